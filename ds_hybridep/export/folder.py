# SPDX-License-Identifier: Apache-2.0
"""A folder of safetensors files that is there as a whole or not at all.

Files are written into a folder beside the wanted one, which gets its name at the end.  The file that a loader looks
for first is written last, so that what is left of a killed process does not load either.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ds_hybridep.errors import ExportError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FIRST_READ = ("config.json", "adapter_config.json")  # by what loads the folder


@contextlib.contextmanager
def whole_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Return an empty folder; what is in it at the end becomes `target`, and nothing if the body fails.

    replace: `target` may hold other files; what a loader reads is replaced.

    Raises ExportError if `target` is there already and not empty, or the disk cannot be written.
    """
    target = target.absolute()
    is_there = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_there and not (replace and target.is_dir()):
        raise ExportError(f"{target} is there already and not empty; remove it, or name another folder")
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    with _naming(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        with _naming(partial):
            yield partial
            if is_there:
                _move_into(partial, target)
            else:
                os.replace(partial, target)  # also in the place of an empty folder
            _sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _move_into(source: Path, target: Path) -> None:
    """Move files into a folder that holds others, e.g. a checkpoint of the Trainer.

    In between, the folder does not load: what a loader reads first goes first and comes last.
    """
    stem = "adapter_model" if (source / "adapter_config.json").exists() else "model"
    for old in (
        *(path for path in target.iterdir() if path.name in FIRST_READ),
        *target.glob(f"{stem}*.safetensors*"),
    ):
        old.unlink()
    for path in sorted(source.iterdir(), key=lambda path: path.name in FIRST_READ):
        os.replace(path, target / path.name)
    source.rmdir()
    _sync(target)


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into ExportError that names the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        full = "; the disk is full: free some space, or name a folder on another one" if is_full else ""
        raise ExportError(
            f"{where} cannot be written: {error.strerror or error}{full}; no folder was written"
        ) from error


class ShardWriter:
    """Writes tensors, one by one and in any order, into safetensors files whose contents are planned before."""

    def __init__(self, folder: Path, stem: str, planned: Mapping[str, Tensor], max_shard_size: int | str) -> None:
        """Write the headers.  planned: tensors on the meta device, by name."""
        from huggingface_hub import split_torch_state_dict_into_shards

        self._folder, self._stem, self._planned = folder, stem, dict(planned)
        self._missing = set(planned)
        self._split = split_torch_state_dict_into_shards(
            self._planned, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=max_shard_size
        )
        num_bytes, free = sum(one.nbytes for one in planned.values()), shutil.disk_usage(folder).free
        if num_bytes > free:
            raise ExportError(
                f"{folder.parent}: the export needs {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; free "
                f"some space, or name a folder on another disk"
            )
        self._begins: dict[str, int] = {}
        for name, tensors in self._split.filename_to_tensors.items():
            self._write_header(folder / name, tensors)

    def _write_header(self, path: Path, shard: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # Wide elements first, so that each tensor begins at a multiple of its element size.
        for name in sorted(shard, key=lambda name: -self._planned[name].itemsize):
            plan = self._planned[name]
            place = [offset, offset + plan.nbytes]
            header[name] = {"dtype": DTYPE_NAMES[plan.dtype], "shape": list(plan.shape), "data_offsets": place}
            self._begins[name], offset = place
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        for name in shard:
            self._begins[name] += 8 + len(text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the planned tensors."""
        plan = self._planned[name]
        assert (tensor.dtype, tensor.shape) == (plan.dtype, plan.shape), f"{name}: {tensor.dtype}, {tensor.shape}"
        with (self._folder / self._split.tensor_to_filename[name]).open("r+b") as file:
            file.seek(self._begins[name])
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def close(self) -> None:
        """Bring all files to the disk, and write the index if there are several."""
        assert not self._missing, f"never written: {sorted(self._missing)[:5]}"
        for name in self._split.filename_to_tensors:
            _sync(self._folder / name)
        if self._split.is_sharded:
            index = {"metadata": self._split.metadata, "weight_map": self._split.tensor_to_filename}
            path = self._folder / f"{self._stem}.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
