# SPDX-License-Identifier: Apache-2.0
"""Residuals of one sender against a slow reference: kept, undone, and at home on the device or the host."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hybridep.codecs import make_codec
from ds_hybridep.experts.undelivered import collect
from ds_hybridep.sync.feedback import Feedback, ResidualEncoder, StepChanges, residual_dtype
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MessageLayout, PacketPart

CPU = torch.device("cpu")
PART = PacketPart("w", torch.Size((6, 40)), 2)


def encoder_of(codec: Any, dtype: torch.dtype, changes: StepChanges, *, is_host: bool = False) -> ResidualEncoder:
    layout = MessageLayout(make_codec(codec, kernels="reference"), (PART,))
    return ResidualEncoder(layout, Home(CPU, is_host), changes, dtype)


def decoded(encoder: ResidualEncoder, message: torch.Tensor, step: int) -> torch.Tensor:
    (packets,) = encoder.layout.packets(message, step)
    return encoder.layout.codec.decode(packets, torch.empty(2, 6, 40))


@pytest.mark.parametrize("is_host", [False, True])
@pytest.mark.parametrize("codec", ["int4", {"type": "low_rank", "rank": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residuals_are_what_was_not_sent_rounded_to_their_type(codec: Any, dtype: torch.dtype, is_host: bool) -> None:
    changes, generator = StepChanges(), torch.Generator().manual_seed(3)
    encoder = encoder_of(codec, dtype, changes, is_host=is_host)
    expected = torch.zeros(2, 6, 40, dtype=dtype)
    for step in range(4):
        gradient = torch.randn(2, 6, 40, generator=generator)
        wanted = gradient + expected.float()
        expected = (wanted - decoded(encoder, encoder.encode([gradient * 8.0], 8.0), step)).to(dtype)
        assert encoder.residuals[0].dtype == dtype
        assert torch.equal(encoder.residuals[0], expected)
        changes.keep()
        assert torch.equal(encoder.state_dict()["residuals"][0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_skipped_step_leaves_no_bit_changed_and_no_second_copy(dtype: torch.dtype) -> None:
    changes, generator = StepChanges(), torch.Generator().manual_seed(4)
    encoder = encoder_of({"type": "low_rank", "rank": 2}, dtype, changes)
    first, second, third = torch.randn(3, 2, 6, 40, generator=generator)
    encoder.encode([first], 1.0)
    changes.keep()
    before, num_values = encoder.residuals[0].clone(), len(encoder.values)
    message = encoder.encode([second], 1.0)
    encoder.encode([third], 1.0)  # twice in one step
    assert len(encoder.values) == 2 * num_values
    assert torch.equal(encoder.state_dict()["residuals"][0], before)  # as of the last applied step
    changes.undo()
    assert torch.equal(encoder.residuals[0], before)
    assert len(encoder.values) == num_values == 1
    assert torch.equal(encoder.encode([second], 1.0), message)


def test_an_encoding_that_fails_loses_no_residual() -> None:
    layout = MessageLayout(make_codec("int4", kernels="reference"), (PART, PART))
    encoder = ResidualEncoder(layout, Home(CPU), StepChanges())
    gradients = list(torch.randn(2, 2, 6, 40))
    encoder.encode(gradients, 1.0)
    before = [residual.clone() for residual in encoder.residuals]
    with pytest.raises(RuntimeError):  # in the second part
        encoder.encode([gradients[0], torch.zeros(1)], 1.0)
    assert all(map(torch.equal, before, encoder.residuals))


def test_residuals_in_host_memory_are_there_before_they_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may still be writing them."""
    feedback = Feedback([(PART,)] * 2, [make_codec("int4", kernels="reference")], Home(CPU, True), StepChanges())
    encoder = feedback.encoder(0, 1)
    assert encoder is not None
    late = torch.randn(2, 6, 40)
    monkeypatch.setattr(Home, "wait", lambda _: encoder.residuals[0].copy_(late))
    sent: list[torch.Tensor] = []

    def start(sends: list[tuple[int, torch.Tensor]], *_: Any) -> Any:
        sent.extend(one for _, one in sends)
        return SimpleNamespace(wait=int)

    transport: Any = SimpleNamespace(channel=lambda *_: SimpleNamespace(start=start))
    replicas: Any = SimpleNamespace(
        feedback=feedback, parts=(PART,), domain_ranks=(0, 1), own_slot=0, replica_slots=(1,), device=CPU, layer="moe"
    )
    collect(replicas, transport)
    assert torch.equal(sent[0], late.reshape(-1))


def test_residuals_have_the_type_of_what_is_trained() -> None:
    assert residual_dtype([torch.bfloat16, torch.float16]) is torch.bfloat16
    assert residual_dtype([torch.float32]) is residual_dtype([torch.bfloat16, torch.float32]) is torch.float32
