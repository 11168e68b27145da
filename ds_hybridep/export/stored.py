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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.errors import ExportError

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_HARMLESS = {
    "builtins": set("set frozenset list dict tuple int float bool str bytes bytearray complex".split()),
    "collections": {"OrderedDict"},
}  # fmt: skip
_LOCAL_HEADER_BYTES = 30  # of a zip entry, before its name and extra field


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    begin_bytes: int  # of its storage, in the file
    dtype: torch.dtype
    offset: int  # of its first element, in the storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """True if its elements follow each other in the file."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def read_into(self, place: Tensor, start: int = 0) -> None:
        """Fill `place`, a contiguous tensor of the same dtype, with elements from `start` on, in row-major order."""
        if place.numel() == 0:
            return
        if self.is_contiguous:
            self._read(place, self.offset + start)
            return
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        storage = torch.empty(span, dtype=self.dtype)
        self._read(storage, self.offset)
        whole = storage.as_strided(self.shape, self.stride).flatten()
        place.view(-1).copy_(whole[start : start + place.numel()])

    def value(self) -> Tensor:
        """Return the whole tensor."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    def _read(self, place: Tensor, first: int) -> None:
        view = memoryview(place.view(-1).view(torch.uint8).numpy().data)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.begin_bytes + first * self.dtype.itemsize)
                done = 0
                while done < len(view):
                    count = file.readinto(view[done:])
                    if not count:
                        raise ExportError(
                            f"{self.path} is cut short: {len(view) - done} bytes of a tensor are missing"
                        )
                    done += count
        except OSError as error:
            raise ExportError(f"{self.path} cannot be read: {error}") from error


class StandIn:
    """Takes the place of any object that is no plain data; `args` and its attributes are what the file says of it."""

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Ignore an item."""

    def extend(self, values: Any) -> None:
        """Ignore items."""


def load(path: Path) -> dict[str, Any]:
    """Return what torch.save wrote, with `Stored` for tensors and `StandIn` for objects; raises ExportError."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            name = next((entry for entry in archive.namelist() if entry.endswith("/data.pkl")), None)
            if name is None:
                raise ExportError(f"{path} holds no data of torch.save (no entry data.pkl)")
            reader = _Reader(archive, file, path, name.removesuffix("data.pkl"))
            loaded = reader.load()
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
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
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
        return Stored(self._path, self._begin_bytes(key), dtype, offset, tuple(shape), tuple(stride))

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
