# SPDX-License-Identifier: Apache-2.0
"""Checksums of what a rank holds, for `ds_hybridep.stats`: runs that are equal in every bit have equal ones."""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.experts.partitioned import is_partitioned
from ds_hybridep.kernels import Kernels
from ds_hybridep.runtime.runtime import HybridRuntime
from ds_hybridep.transport.job import group_ranks, own_rank


def checksums_of(engine: Any, runtime: HybridRuntime) -> dict[str, str]:
    """Return two checksums of this rank, 32 hexadecimal digits each.

    weights: of all parameters that it holds, those of other ranks' experts not included; under ZeRO 3 of its parts.
    owed: of gradients that it has kept back so far: residuals of codecs, and what waits for the next gradients.  All
        zeros if it owes nothing.
    """
    kernels, codecs = runtime.kernels, runtime.codec_state
    streams = next((layer.replicas.streams for layer in runtime.migration.layers), None)
    owed, weights = (torch.zeros(2, dtype=torch.int64, device=engine.device) for _ in range(2))
    with nullcontext() if streams is None else streams.aside():  # where these residuals are written and freed
        _add(owed, codecs.owed_to_experts(), kernels)
    if streams is not None:
        streams.wait_for_side()
    _add(owed, codecs.owed_to_others(), kernels)
    _add(weights, _weights(engine), kernels)
    return {"weights": _hex(weights), "owed": _hex(owed)}


def _weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's parameters by name; of those that ZeRO 3 has cut, its part without what pads the last one."""
    parameters: dict[str, Any] = dict(engine.module.named_parameters())
    for name, parameter in parameters.items():
        if is_partitioned(parameter):
            part, whole = parameter.ds_tensor.detach().view(-1), parameter.ds_numel
            at = group_ranks(parameter.ds_process_group).index(own_rank())
            yield name, part[: max(0, whole - at * part.numel())]
        else:
            yield name, parameter.detach()


def _add(total: Tensor, named: Iterable[tuple[str, Tensor]], kernels: Kernels) -> None:
    """Add sums over bits and names, whatever the order, modulo 2^64; the host does not wait.  Zeros do not count."""
    for name, tensor in named:
        odd = zlib.crc32(name.encode()) | 1
        total += kernels.bit_sums(tensor.detach().to(total.device).contiguous()) * odd


def _hex(total: Tensor) -> str:
    return "".join(f"{one & 2**64 - 1:016x}" for one in total.tolist())
