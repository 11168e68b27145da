# SPDX-License-Identifier: Apache-2.0
"""A folder of safetensors files that is there as a whole or not at all.

A new folder is written beside its place and gets its name at the end.  For a folder that is there already, files are
written into a folder inside it, and then take the places of the old ones.  The file that a loader looks for first
comes last, so that what is left of a killed process does not load.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
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
STEMS = ("model", "adapter_model")  # of files with weights
_SHARD = r"{}-\d{{5}}-of-\d{{5}}\.safetensors"


@contextlib.contextmanager
def whole_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Return an empty folder; what is in it at the end becomes `target`, and nothing if the body fails.

    replace: `target` may hold other files.  Only those go that new ones replace.

    Raises ExportError if `target` is there already and not empty, or the disk cannot be written.
    """
    target = target.absolute()
    is_there = target.exists()
    if is_there and not (target.is_dir() and (replace or not any(target.iterdir()))):
        raise ExportError(f"{target} is there already and not empty; remove it, or name another folder")
    # Inside, because what is beside may be on another disk: `target` may be a mounted one.
    place = target if is_there else target.parent
    with _naming(target):
        place.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=place))
    new = partial / "new"
    try:
        with _naming(new):
            new.mkdir()
            yield new
            if is_there:
                _move_into(new, target, partial / "replaced")
            else:
                os.replace(new, target)
                _sync(place)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):
            partial.rmdir()  # unless it holds old files that could not be moved back
        raise
    shutil.rmtree(partial, ignore_errors=True)


def _move_into(source: Path, target: Path, replaced: Path) -> None:
    """Move files into a folder that holds others, e.g. a checkpoint of the Trainer.

    What they replace moves to another folder, and back if anything fails.  In between, `target` does not load: what a
    loader reads first goes first and comes last.
    """
    gone = sorted(_replaced_by(source, target), key=lambda name: name not in FIRST_READ)
    come = sorted((path.name for path in source.iterdir()), key=lambda name: name in FIRST_READ)
    replaced.mkdir()
    try:
        for name in gone:
            os.replace(target / name, replaced / name)
        for name in come:
            os.replace(source / name, target / name)
        _sync(target)
    except BaseException:
        for name in come:
            if not (source / name).exists():
                os.replace(target / name, source / name)
        for name in reversed(gone):
            if os.path.lexists(replaced / name):
                os.replace(replaced / name, target / name)
        replaced.rmdir()
        raise


def _replaced_by(source: Path, target: Path) -> set[str]:
    """Return the files of `target` that give way: of the same names, and the old weights."""
    new = {path.name for path in source.iterdir()}
    names = set(new)
    for stem in STEMS:
        if any(name == f"{stem}.safetensors" or re.fullmatch(_SHARD.format(stem), name) for name in new):
            index = target / f"{stem}.safetensors.index.json"
            names |= {index.name, f"{stem}.safetensors", *_listed_in(index)}
            names |= {path.name for path in target.iterdir() if re.fullmatch(_SHARD.format(stem), path.name)}
    return {name for name in names if os.path.lexists(target / name) and not (target / name).is_dir()}


def _listed_in(index: Path) -> set[str]:
    """Return the shards that an index names; nothing but plain names of this folder."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()  # it goes anyway
    return {name for name in names if isinstance(name, str) and re.fullmatch(r"[^/\\]+\.safetensors", name)}


def shadow_of(folder: Path) -> str:
    """Return why a loader would not read the whole model that was just written to `folder`; empty if it would."""
    if not ((folder / "adapter_config.json").is_file() and (folder / "config.json").is_file()):
        return ""
    return (
        f"{folder} also holds the adapter_config.json of an earlier save: from_pretrained loads the model named there "
        f"with that adapter, not the model that was just written; move the file away if you want this model"
    )


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
            f"{where} cannot be written: {error.strerror or error}{full}; nothing was written, and what was "
            f"there before still is"
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
