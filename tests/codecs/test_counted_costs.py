# SPDX-License-Identifier: Apache-2.0
"""What low rank does to a tensor, counted: how often it is read or written, and multiplied by a factor."""

from typing import Any

import pytest
import torch
from codec_cases import BALANCED, make_codec, normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_hybridep.plan import codec_costs

SHAPE = (2, 512, 384)
PREPARE = 3  # the compiled kernel reads gradient and residual and writes their sum; torch does not see that
FREE = ("view", "slice", "transpose", "split", "unsqueeze", "alias", "expand", "select", "empty", "as_strided")


class Counter(TorchDispatchMode):
    """Counts reads and writes of whole tensors, and products in units of tensor times factor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.accesses, self.products, self._rank = 0, 0.0, rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(word in func.name() for word in FREE):
            return result
        whole = torch.Size(SHAPE).numel()
        is_out = "out" in (kwargs or {})  # then it is also the result
        touched = [one for one in tree_leaves((args, kwargs, None if is_out else result)) if isinstance(one, Tensor)]
        self.accesses += sum(one.numel() == whole for one in touched)
        if func.name() in ("aten::bmm", "aten::bmm.out"):
            n, rows, inner = args[0].shape
            products = n * rows * inner * args[1].shape[2] / whole / self._rank
            self.products += products if products > 0.9 else 0.0  # those of two factors are small
        return result


@pytest.mark.parametrize("is_decoding", [False, True])
def test_plans_price_low_rank_by_what_it_does(is_decoding: bool) -> None:
    rank = 16
    codec, residual = make_codec({**BALANCED, "rank": rank}), torch.zeros(SHAPE)
    state = codec.new_state(*SHAPE)
    gradient = normal(*SHAPE)
    packets = codec.encode_with_residual(gradient, residual, state)
    with Counter(rank) as counted:
        if is_decoding:
            codec.decode_add(packets, residual)
        else:
            codec.encode_with_residual(gradient, residual, state)
    if is_decoding:
        traffic, products = codec_costs.LOW_RANK_DECODE_TRAFFIC, codec_costs.LOW_RANK_DECODE_PRODUCTS
    else:
        counted.accesses += PREPARE
        traffic, products = codec_costs.LOW_RANK_ENCODE_TRAFFIC, codec_costs.LOW_RANK_ENCODE_PRODUCTS
    assert counted.products == products
    assert counted.accesses == pytest.approx(traffic / 4, abs=2)
