# SPDX-License-Identifier: Apache-2.0
"""Reads files of torch.save without loading them: tensors are mapped into memory, and no code of the file runs.

Objects of DeepSpeed or of the user become harmless stand-ins.  Pages that were read are given back at once, so memory
stays small also where most of a file is the optimizer's state.
"""

import ctypes
import math
import mmap
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor

from ds_hybridep.errors import ExportError

_HARMLESS = set("set frozenset list dict tuple int float bool str bytes bytearray complex".split())  # of builtins
_CHUNK = 1 << 24  # elements that are read at once
_DAMAGED = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, EOFError, pickle.PickleError)
_MADV_PAGEOUT = 21  # of Linux 5.4 and later; never loses data


@dataclass(frozen=True)
class Piece:
    """A run of elements of a tensor in a file, in row-major order."""

    stored: Tensor
    start: int
    numel: int


@dataclass(frozen=True)
class Parameter:
    """One whole parameter, wherever it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # how it is stored
    read: Callable[[torch.dtype], Tensor]  # returns it, rounded to a dtype
    is_frozen: bool = False  # known of a running engine only


def in_files(shape: Sequence[int], pieces: Sequence[Piece]) -> Parameter:
    """Return the parameter that lies in files, piece after piece."""
    return Parameter(tuple(shape), pieces[0].stored.dtype, partial(_join, tuple(shape), tuple(pieces)))


def whole(stored: Tensor) -> Parameter:
    """Return a tensor of a file as a parameter."""
    return in_files(stored.shape, (Piece(stored, 0, stored.numel()),))


def _join(shape: tuple[int, ...], pieces: Sequence[Piece], dtype: torch.dtype) -> Tensor:
    joined = torch.empty(math.prod(shape), dtype=dtype)
    done = 0
    for piece in pieces:
        flat = piece.stored.reshape(-1)[piece.start : piece.start + piece.numel]
        for chunk in flat.split(_CHUNK):
            joined[done : done + len(chunk)] = chunk
            done += len(chunk)
            _give_back(chunk)
    if done != len(joined):
        raise ExportError(f"a parameter of {len(joined)} elements has {done} in its files; are they of several runs?")
    return joined.view(shape)


def _give_back(mapped: Tensor) -> None:
    begin = -(-mapped.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = mapped.data_ptr() + mapped.nbytes - begin
    if num_bytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), _MADV_PAGEOUT)


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
    """Return what torch.save wrote, with `StandIn` for objects; raises ExportError."""
    pickle_module = SimpleNamespace(Unpickler=_Reader, __name__=__name__)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=pickle_module)
    except FileNotFoundError as error:
        raise ExportError(f"{path} is missing") from error
    except _DAMAGED as error:
        raise ExportError(f"{path} is cut short, or was not written by torch.save: {error}") from error
    if not isinstance(loaded, dict):
        raise ExportError(f"{path} holds {type(loaded).__name__}; a file of a checkpoint holds a dict")
    return loaded


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what the file may use, beside storages; everything else becomes a stand-in."""
        if module == "torch._utils" and name.startswith("_rebuild_parameter"):
            return lambda data, *_: data
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):  # a tensor with attributes of its own
            return lambda rebuild, _type, args, _state: rebuild(*args)
        if module == "torch._utils" and name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return lambda *args: _rebuild_tensor(*args[:4])  # without the history of gradients that some ask for
        is_harmless = (
            (module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)))
            or (module in ("builtins", "__builtin__") and name in _HARMLESS)
            or (module, name) == ("collections", "OrderedDict")
        )
        return super().find_class(module, name) if is_harmless else StandIn
