# SPDX-License-Identifier: Apache-2.0
"""Second derivatives are refused, and never wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.derivatives import once_differentiable


class Product(Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor, _: str) -> Tensor:
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        one, other = ctx.saved_tensors
        return grad * other, grad * one, None


@pytest.mark.parametrize("is_plain_sum", [True, False])
def test_a_graph_of_a_backward_is_refused(is_plain_sum: bool) -> None:
    one, other = (torch.tensor([2.0, 3.0], requires_grad=True) for _ in range(2))
    result = Product.apply(one, other, "") if is_plain_sum else Product.apply(one, other, "").square()
    with pytest.raises(UnsupportedError, match="no second derivatives .* leave MoE layers out of it"):
        torch.autograd.grad(result.sum(), (one, other), create_graph=True)
    torch.testing.assert_close(
        torch.autograd.grad(result.sum(), one)[0], other if is_plain_sum else 2 * one * other**2
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_asks_for_no_graph(use_reentrant: bool) -> None:
    one, other = (torch.tensor([2.0, 3.0], requires_grad=True) for _ in range(2))
    checkpoint(Product.apply, one, other, "", use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(one.grad, other.detach())
