# SPDX-License-Identifier: Apache-2.0
"""Reads files of torch.save without loading them: tensors become addresses, and no code of the file runs.

A file of torch.save is a zip archive without compression.  Its pickle says where in which storage each tensor lies;
each storage is one entry.  Reading exactly the bytes that are wanted keeps memory small also where most of a file is
the optimizer's state, and objects of DeepSpeed or of the user become harmless stand-ins.
"""

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import StorageType

from ds_hybridep.errors import ExportError

_HARMLESS = {
    "builtins": set("set frozenset list dict tuple int float bool str bytes bytearray complex".split()),
    "collections": {"OrderedDict"},
}  # fmt: skip
_LOCAL_HEADER_BYTES = 30  # of a zip entry, before its name and extra field
_CHUNK = 1 << 24  # elements that are read at once


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    begin_bytes: int  # of its first element, in the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def read(self, start: int, count: int) -> Tensor:
        """Return [count] elements from `start` on, in row-major order."""
        if torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous():
            return self._read(start, count)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self._read(0, span).as_strided(self.shape, self.stride).flatten()[start : start + count]

    def value(self) -> Tensor:
        """Return the whole tensor."""
        return self.read(0, self.numel).view(self.shape)

    def _read(self, first: int, count: int) -> Tensor:
        size, begin = self.dtype.itemsize, self.begin_bytes + first * self.dtype.itemsize
        try:
            data = np.fromfile(self.path, np.uint8, count * size, offset=begin)
        except OSError as error:
            raise ExportError(f"{self.path} cannot be read: {error}") from error
        if len(data) < count * size:
            raise ExportError(f"{self.path} is cut short: {count * size - len(data)} bytes of a tensor are missing")
        return torch.from_numpy(data).view(self.dtype)


@dataclass(frozen=True)
class Piece:
    """A run of elements of a tensor in a file, in row-major order."""

    stored: Stored
    start: int
    numel: int


@dataclass(frozen=True)
class Parameter:
    """One whole parameter, wherever it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # how it is stored
    read: Callable[[torch.dtype], Tensor]  # returns it, rounded to a dtype


def in_files(shape: Sequence[int], pieces: Sequence[Piece]) -> Parameter:
    """Return the parameter that lies in files, piece after piece."""
    return Parameter(tuple(shape), pieces[0].stored.dtype, partial(_join, tuple(shape), tuple(pieces)))


def whole(stored: Stored) -> Parameter:
    """Return a tensor of a file as a parameter."""
    return in_files(stored.shape, (Piece(stored, 0, stored.numel),))


def _join(shape: tuple[int, ...], pieces: Sequence[Piece], dtype: torch.dtype) -> Tensor:
    joined = torch.empty(math.prod(shape), dtype=dtype)
    done = 0
    for piece in pieces:
        for start in range(0, piece.numel, _CHUNK):
            count = min(_CHUNK, piece.numel - start)
            joined[done : done + count] = piece.stored.read(piece.start + start, count)
            done += count
    return joined.view(shape)


class StandIn(dict[Any, Any]):
    """Takes the place of any object that is no plain data; its attributes are what the file says of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, item: Any) -> None:
        """Ignore an item of a list."""

    extend = append


def load(path: Path) -> dict[str, Any]:
    """Return what torch.save wrote, with `Stored` for tensors and `StandIn` for objects; raises ExportError."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            name = next((entry for entry in archive.namelist() if entry.endswith("/data.pkl")), None)
            if name is None:
                raise ExportError(f"{path} holds no data of torch.save (no entry data.pkl)")
            loaded = _Reader(archive, file, path, name.removesuffix("data.pkl")).load()
    except FileNotFoundError as error:
        raise ExportError(f"{path} is missing") from error
    except zipfile.BadZipFile as error:
        raise ExportError(f"{path} is cut short, or was not written by torch.save: {error}") from error
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ExportError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, dict):
        raise ExportError(f"{path} holds {type(loaded).__name__}; a file of a checkpoint holds a dict")
    return loaded


class _Reader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, file: io.BufferedReader, path: Path, prefix: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{prefix}data.pkl")), encoding="utf-8")
        self._archive, self._file, self._path, self._prefix = archive, file, path, prefix
        self._begins: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what the file may use; everything else becomes a stand-in."""
        if module == "torch._utils" and name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return self._tensor
        if module == "torch._utils" and name.startswith("_rebuild_parameter"):
            return lambda data, *_: data
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):  # a tensor with attributes of its own
            return lambda rebuild, _type, args, _state: rebuild(*args)
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return StorageType(name).dtype
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if name in _HARMLESS.get(module, ()):
            return super().find_class(module, name)
        return StandIn

    def persistent_load(self, pid: Any) -> tuple[str, torch.dtype]:
        """Return key and dtype of a storage."""
        kind, dtype, key, *_ = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"an unknown kind of data, {kind!r}")
        return str(key), dtype

    def _tensor(self, storage: tuple[str, torch.dtype], offset: int, shape: Any, stride: Any, *_: Any) -> Stored:
        key, dtype = storage
        begin = self._begin_bytes(key) + offset * dtype.itemsize
        return Stored(self._path, begin, dtype, tuple(shape), tuple(stride))

    def _begin_bytes(self, key: str) -> int:
        if key not in self._begins:
            entry = self._archive.getinfo(f"{self._prefix}data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED:
                raise pickle.UnpicklingError("a compressed tensor, which torch.save does not write")
            self._file.seek(entry.header_offset)
            header = self._file.read(_LOCAL_HEADER_BYTES)
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            self._begins[key] = entry.header_offset + _LOCAL_HEADER_BYTES + lengths
        return self._begins[key]
