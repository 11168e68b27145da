# SPDX-License-Identifier: Apache-2.0
"""DeMo, as the benchmarks compare it, against its definition."""

import math

import pytest
import torch
from torch import nn

from benchmarks.rivals import DECAY, DeMo, cosine_transform


@pytest.mark.parametrize("shape", [(128, 64), (192,), (6, 320), (1,), (67, 3)])
def test_the_cosine_transform_is_orthonormal_and_has_a_way_back(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    amplitudes, back = cosine_transform(tensor)
    assert amplitudes.shape[1] <= 64 * 64
    torch.testing.assert_close(amplitudes.square().sum(), tensor.square().sum())
    torch.testing.assert_close(back(amplitudes), tensor)


def test_amplitudes_are_those_of_the_textbook() -> None:
    tensor = torch.randn(5)
    expected = [
        sum(math.sqrt((2 if k else 1) / 5) * math.cos(math.pi / 5 * (n + 0.5) * k) * tensor[n] for n in range(5))
        for k in range(5)
    ]
    torch.testing.assert_close(cosine_transform(tensor)[0][0], torch.tensor(expected))


def test_alone_with_all_amplitudes_it_is_the_sign_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(found: list[torch.Tensor], own: torch.Tensor) -> None:
        for one in found:
            one.copy_(own)

    monkeypatch.setattr(torch.distributed, "all_gather", alone)
    weight = nn.Parameter(torch.randn(8, 4))
    before, weight.grad = weight.detach().clone(), torch.randn(8, 4)
    optimizer = DeMo([weight], 0.1, 4096)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before - 0.1 * weight.grad.sign())
    assert optimizer.sent == 8 * 4 * 4


def test_what_was_not_sent_stays_in_the_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_gather", lambda found, own: [one.copy_(own) for one in found])
    weight = nn.Parameter(torch.zeros(16, 16))
    optimizer, owed = DeMo([weight], 1.0, 5), torch.zeros(16, 16)
    for _ in range(3):
        weight.grad = torch.randn(16, 16)
        momentum = DECAY * owed + weight.grad
        optimizer.step()
        owed = optimizer._momentum[0].clone()
        amplitudes = cosine_transform(momentum - owed)[0]
        assert int((amplitudes.abs() > 1e-4).sum()) == 5
