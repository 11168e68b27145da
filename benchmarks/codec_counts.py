# SPDX-License-Identifier: Apache-2.0
"""What low rank does on an accelerator, counted without one: operations, bytes, products, and waits of the host.

Tensors are on torch's "meta" device, which has shapes and no values; reading one there, which would be a wait of the
host, is an error.  Each operation of torch counts as one launch; a factorisation and a triangular solution of many
small matrices may take more.  The compiled kernels that prepare values and write headers, one launch each, are left
out.  `roof_ms` is the sum over operations of the longer of bytes / bandwidth and products / peak, on an H100 SXM in
fp32 without tensor cores: what nobody can beat with these operations.  `launch_ms` is what launches take if each costs
LAUNCH_S: where it is the larger one, batches are too small for the device.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common import Records, codec_settings
from ds_hybridep.codecs import make_codec

SPEC = {"type": "low_rank", "ratio": 50, "weighting": "rms"}
SHAPES = ((16, 768, 2048), (1, 14336, 4096), (1, 18992, 2048), (16, 64, 256))
BYTES_PER_S, PRODUCTS_PER_S, LAUNCH_S = 3.35e12, 67e12, 4e-6
VIEWS = ("view", "slice", "transpose", "split", "unsqueeze", "squeeze", "alias", "expand", "select", "empty",
         "as_strided", "diagonal", "detach", "lift_fresh", "_unsafe_view", "t")  # fmt: skip


class Counter(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.num_bytes, self.products, self.roof_s = 0, 0, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        touched = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor) and one.is_meta]
        if name not in VIEWS and touched:
            num_bytes = sum(one.numel() * one.element_size() for one in touched)
            products = products_of(name, args)
            self.launches += 1
            self.num_bytes += num_bytes
            self.products += products
            self.roof_s += max(num_bytes / BYTES_PER_S, products / PRODUCTS_PER_S)
        return result


def products_of(name: str, args: tuple[Any, ...]) -> float:
    """Floating point operations of those that do more than touch each element."""
    if name == "bmm":
        n, rows, inner = args[0].shape
        return float(2 * n * rows * inner * args[1].shape[2])
    if name == "linalg_solve_triangular":
        n, rank, cols = args[1].shape
        return float(n * rank * rank * cols)
    if name == "linalg_cholesky_ex":
        n, rank, _ = args[0].shape
        return float(n * rank**3 / 3)
    return 0.0


def count(args: argparse.Namespace, records: Records) -> None:
    """Encoding with a residual, and decoding."""
    codec = make_codec(codec_settings(SPEC), kernels="reference")
    for n, rows, cols in SHAPES:
        ranked = codec.resolve(rows, cols)
        x = torch.empty(n, rows, cols, device="meta")
        state = ranked.new_state(n, rows, cols, device="meta")
        state.step = 1  # the first step makes random numbers, as does one in 64
        payload = torch.empty(n, ranked.sizes.payload_bytes(rows, cols), dtype=torch.uint8, device="meta")
        is_bad = torch.empty(n, dtype=torch.bool, device="meta")
        params = {"codec": SPEC, "shape": [n, rows, cols], "rank": ranked.header_number(rows, cols)}
        with counted("encode", params, records):
            ranked.encode_payload(x, state, payload, is_bad, sizes=x)
        with counted("decode", params, records):
            ranked.decode_payload(payload, x, is_add=True)


@contextmanager
def counted(what: str, params: dict[str, Any], records: Records) -> Iterator[None]:
    with Counter() as found:
        yield
    records.add(
        {"what": what, **params}, case="codec_count", launches=found.launches, waits=0, gb=found.num_bytes / 1e9,
        gflop=found.products / 1e9, roof_ms=1e3 * found.roof_s, launch_ms=1e3 * LAUNCH_S * found.launches,
    )  # fmt: skip
