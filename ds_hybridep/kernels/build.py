# SPDX-License-Identifier: Apache-2.0
"""Chooses a process's kernels: compiled ones if there are any, else the reference, with the reason in the log."""

import functools
import importlib
import logging
import subprocess
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from ds_hybridep.errors import KernelBuildError
from ds_hybridep.kernels.codecs import CompiledCodecs
from ds_hybridep.kernels.compiled import CompiledKernels
from ds_hybridep.kernels.cuda import CudaKernels
from ds_hybridep.kernels.reference import ReferenceKernels

Kernels = CompiledKernels | ReferenceKernels
Mode = Literal["auto", "compiled", "reference"]

# What a tool chain or a loader can raise.  Any other error is a mistake of ours and must surface.
BUILD_ERRORS = (RuntimeError, ImportError, OSError, subprocess.SubprocessError)

# Compilers print the first error far above the last line.  For files of our size, this much of the end includes it.
OUTPUT_TAIL_CHARS = 4000

logger = logging.getLogger(__name__)
_loaded: list[Any] = []  # compiled modules


def load_kernels(mode: Mode, device: torch.device | str = "cpu", dispatch_sms: int | None = None) -> Kernels:
    """Kernels for tensors on `device`.  The first call in a process may compile for some seconds.

    Args:
        mode: "auto" for compiled kernels, or else the reference and one warning that says why; "compiled" for compiled
            kernels or an error; "reference" for the PyTorch definitions.
        device: a device, or the type of the current one.
        dispatch_sms: most multiprocessors on which compiled kernels for "cuda" dispatch and combine rows, forward and
            backward; the others stay free for kernels that run at the same time.  None for all.  Results are the same.

    Raises:
        KernelBuildError: mode is "compiled" and there are no compiled kernels.
    """
    if mode == "reference":
        return ReferenceKernels()
    device = torch.device(device)
    extension = _extension_or_reason(device)
    if not isinstance(extension, str):
        return _kernels_of(extension, device.type, dispatch_sms)
    if mode == "compiled":
        raise KernelBuildError(
            f"compiled kernels for device type {device.type!r}: {extension}\n"
            'Repair the tool chain named above, or choose the kernels "auto" or "reference", '
            "which compute the same more slowly."
        )
    _warn_once(device.type, extension)
    return ReferenceKernels()


@functools.cache  # called at every encoding
def load_codec_kernels(mode: Mode, device: torch.device | str = "cpu") -> CompiledCodecs | None:
    """Return compiled kernels for codecs, or None: use the definitions in `codecs`.  Otherwise like `load_kernels`."""
    kernels = load_kernels(mode, device)
    return CompiledCodecs(kernels) if isinstance(kernels, CompiledKernels) else None


@functools.cache
def _kernels_of(extension: Any, device_type: str, dispatch_sms: int | None) -> CompiledKernels:
    if device_type == "cuda":
        return CudaKernels(extension, dispatch_sms=dispatch_sms)
    return CompiledKernels(extension)


@functools.cache
def _warn_once(device_type: str, reason: str) -> None:
    logger.warning("kernels: using the slower PyTorch reference on device type %r: %s", device_type, reason)


def loaded_extension() -> Any:
    """Return a compiled module that this process has loaded, for whatever device; None if there is none."""
    return next(iter(_loaded), None)


@functools.cache  # so that layers do not try a failed build again
def _extension_or_reason(device: torch.device) -> Any:
    """Return the compiled module, or a string that says why there is none."""
    if device.type not in ("cpu", "cuda"):
        return f"ds_hybridep has compiled kernels for 'cpu' and 'cuda', none for {device.type!r}"
    try:
        # Imported by name: the folder op_builder/ becomes this package when ds_hybridep is installed.
        op_builder: Any = importlib.import_module("ds_hybridep.op_builder")
        with _current(device):
            builder = op_builder.HybridEPBuilder(device.type)
            reason: str | None = builder.why_not()
            if reason is not None:
                return reason
            extension = builder.load(verbose=False)
            if (reason := builder.why_unusable(extension)) is None:
                _loaded.append(extension)
            return reason or extension
    except BUILD_ERRORS as error:
        return _describe(error)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one: to ask what it can run takes memory on the current device."""
    is_other = device.type == "cuda" and device.index is not None and torch.cuda.is_available()
    return torch.cuda.device(device) if is_other else nullcontext()


def _describe(error: Exception) -> str:
    text = str(error).strip()
    if len(text) > OUTPUT_TAIL_CHARS:
        first_line = text.splitlines()[0][:500]
        text = f"{first_line}\n[...]\n{text[-OUTPUT_TAIL_CHARS:]}"
    return f"{type(error).__name__}: {text}"
