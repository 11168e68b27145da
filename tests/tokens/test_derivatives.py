# SPDX-License-Identifier: Apache-2.0
"""Second derivatives are refused, and never wrong."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hybridep.errors import UnsupportedError
from ds_hybridep.kernels.build import load_kernels
from ds_hybridep.tokens import layer

KERNELS = load_kernels("reference")
TOP_K = torch.tensor([[0, 1], [1, 0], [1, 1]], dtype=torch.int32)
PLAN = KERNELS.plan_routes(TOP_K, torch.arange(2, dtype=torch.int32), 2)


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    return layer._WeightedSum.apply(rows, weights, PLAN, KERNELS)


def tensors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    num_rows = len(PLAN.row_to_token)
    return torch.randn(num_rows, 4, requires_grad=True), torch.rand(3, 2, requires_grad=True)


def plain(rows: Tensor, weights: Tensor) -> Tensor:
    return (rows[PLAN.slot_to_row] * weights[:, :, None]).sum(1)


@pytest.mark.parametrize("is_plain_sum", [True, False])
def test_a_graph_of_a_backward_is_refused(is_plain_sum: bool) -> None:
    given = tensors()
    found = [one if is_plain_sum else one.square() for one in (weighted_sum(*given), plain(*given))]
    with pytest.raises(UnsupportedError, match="no second derivatives .* leave MoE layers out of it"):
        torch.autograd.grad(found[0].sum(), given, create_graph=True)
    gradients, wanted = (torch.autograd.grad(one.sum(), given) for one in found)
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_asks_for_no_graph(use_reentrant: bool) -> None:
    rows, weights = tensors()
    checkpoint(weighted_sum, rows, weights, use_reentrant=use_reentrant).sum().backward()
    wanted = torch.autograd.grad(plain(rows, weights).sum(), (rows, weights))
    torch.testing.assert_close((rows.grad, weights.grad), wanted)
