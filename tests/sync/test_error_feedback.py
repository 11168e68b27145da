# SPDX-License-Identifier: Apache-2.0
"""Residuals of gradients against a slow reference: kept, undone, by piece, at home on the device or the host."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from codec_cases import make_codec

from ds_hybridep.codecs.compact import compact, expand
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.errors import PacketError
from ds_hybridep.geometry.slots import Span, whole
from ds_hybridep.sync.error_feedback import ErrorFeedback, SlotCodecs, residual_of
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MessageLayout, PacketPart, packet_parts
from ds_hybridep.sync.transaction import Transaction
from ds_hybridep.sync.undelivered import GradientTarget, Undelivered, UndeliveredGradients, collect, kept_back_in

CPU = torch.device("cpu")
SHAPE = (2, 32, 40)


def part_of(dtype: torch.dtype = torch.float32, name: str = "w", slot: int = 1) -> PacketPart:
    return PacketPart(
        torch.Size(SHAPE[1:]), SHAPE[0], (Span(name, SHAPE, slot * math.prod(SHAPE), math.prod(SHAPE)),), dtype
    )


class Sender:
    """One sender of some parts over one level, and its receiver."""

    def __init__(self, codec: Any, *parts: PacketPart, is_host: bool = False, kernels: Any = "reference") -> None:
        self.transaction, self.codec = Transaction(), make_codec(codec, kernels=kernels)
        self.feedback = ErrorFeedback("layer", (self.codec,), Home(CPU, is_host), self.transaction, rank=0)
        self.other = ErrorFeedback("layer", (self.codec,), Home(CPU), Transaction(), rank=1)
        self.parts = parts

    def encode(self, *gradients: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.feedback.senders[0].encode(MessageLayout(self.codec, self.parts), gradients, scale)

    def receive(self, message: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
        found = [torch.zeros(part.num_experts, *part.shape) for part in self.parts]
        self.other.receiver(0, 0).decode_add(MessageLayout(self.codec, self.parts), message, found, scale)
        return found

    def residuals(self) -> list[torch.Tensor]:
        return [residual for _, _, residual in self.feedback.undelivered()]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or SHAPE), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_host", [False, True])
@pytest.mark.parametrize("codec", ["int4", {"type": "low_rank", "rank": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_residuals_are_what_was_not_sent(codec: Any, dtype: torch.dtype, is_host: bool) -> None:
    sender = Sender(codec, part_of(dtype), is_host=is_host)
    expected = torch.zeros(SHAPE)
    for step in range(4):
        wanted = normal(step) + expected
        expected = wanted - sender.receive(sender.encode(normal(step) * 8.0, scale=8.0))[0]
        if dtype.itemsize == 2:
            stored = sender.feedback.residuals[0]
            assert stored.dtype == torch.int16
            assert stored.nbytes <= 2.52 * math.prod(SHAPE)
            unit = 2.0 ** (math.ceil(math.log2(float(expected.abs().max()))) - 19)
            torch.testing.assert_close(sender.residuals()[0], expected, rtol=0, atol=unit)
            expected = sender.residuals()[0]
        assert torch.equal(sender.residuals()[0], expected)
        sender.transaction.commit()
        (saved,) = sender.feedback.state_dict()["sent"]
        assert torch.equal(residual_of(saved), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_skipped_step_leaves_no_bit_changed_and_no_second_copy(dtype: torch.dtype) -> None:
    sender = Sender({"type": "low_rank", "rank": 2}, part_of(dtype))
    sender.encode(normal(1))
    sender.transaction.commit()
    before = sender.residuals()[0]
    message = sender.encode(normal(2))
    sender.encode(normal(3))  # twice in one step
    assert len(sender.feedback.residuals) == 2
    assert torch.equal(residual_of(sender.feedback.state_dict()["sent"][0]), before)  # as of the last applied step
    sender.transaction.undo()
    assert torch.equal(sender.residuals()[0], before)
    assert len(sender.feedback.residuals) == 1
    assert torch.equal(sender.encode(normal(2)), message)


def test_an_encoding_that_fails_loses_no_residual() -> None:
    sender = Sender("int4", part_of(), part_of(name="other"))
    sender.encode(normal(1), normal(2))
    before = sender.residuals()
    with pytest.raises(RuntimeError):  # in the second part
        sender.encode(normal(3), torch.zeros(1))
    assert all(map(torch.equal, before, sender.residuals()))


def test_an_encoding_without_memory_for_its_residuals_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ends while the second part's residual is stored, which only a patch of `store` can bring about."""
    sender = Sender("int4", part_of(), part_of(name="other"))
    sender.encode(normal(1), normal(2))
    before, stored = sender.residuals(), []

    def store(home: Home, work: torch.Tensor) -> torch.Tensor:
        stored.append(work)
        if len(stored) == 2:
            raise torch.OutOfMemoryError
        return work

    monkeypatch.setattr(Home, "store", store)
    with pytest.raises(torch.OutOfMemoryError):
        sender.encode(normal(3), normal(4))
    assert all(map(torch.equal, before, sender.residuals()))


def test_a_message_that_is_lost_or_comes_twice_is_an_error() -> None:
    sender = Sender("int4", part_of())
    first, second = sender.encode(normal(1)), sender.encode(normal(2))
    for wrong, number in ((second, 1), (first, 0)):
        if number == 0:
            sender.receive(first)
        with pytest.raises(PacketError, match=f"packet has sequence number {number}, wanted {1 - number}: one before"):
            sender.receive(wrong)
    sender.receive(second)


# -- pieces ---------------------------------------------------------------------------------------------------------

SPANS = [whole("a.weight", (64, 48)), whole("a.bias", (64,)), whole("b.bias", (40,)), whole("b.weight", (48, 48))]


@pytest.mark.parametrize("codec", ["int4", {"type": "low_rank", "rank": 3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_are_skipped_at_times_lose_nothing_and_need_no_more_memory(codec: Any, dtype: torch.dtype) -> None:
    """Every combination of tensors is a buffer of its own; neighbouring vectors share a packet."""
    sender, generator = Sender(codec, kernels="auto"), torch.Generator().manual_seed(5)
    owed = {span.name: torch.zeros(span.num_elements, dtype=torch.float64) for span in SPANS}
    delivered = {span.name: torch.zeros(span.num_elements, dtype=torch.float64) for span in SPANS}
    sizes = []
    for step in range(64):
        spans = [span for at, span in enumerate(SPANS) if step % 16 >> at & 1]
        flat = [torch.randn(span.num_elements, generator=generator) for span in spans]
        sender.parts = packet_parts(spans, dtype)
        pieces = torch.cat([*flat, torch.zeros(0)])
        views = pieces.split([part.fp32_bytes // 4 for part in sender.parts]) if spans else ()
        gradients = [view.view(part.num_experts, *part.shape) for view, part in zip(views, sender.parts, strict=True)]
        if spans:
            found = torch.cat([one.view(-1) for one in sender.receive(sender.encode(*gradients))])
            sender.transaction.commit()
            for span, one, gradient in zip(spans, found.split([s.num_elements for s in spans]), flat, strict=True):
                owed[span.name] += gradient
                delivered[span.name] += one
        sizes.append(sum(residual.nbytes for residual in sender.feedback.residuals))
    assert sizes[16] == sizes[-1]
    left = {span.name: residual.view(-1) for _, span, residual in sender.feedback.undelivered()}
    for name, total in owed.items():
        torch.testing.assert_close(delivered[name] + left[name], total, rtol=0, atol=2e-3)


def test_what_is_saved_comes_back() -> None:
    one, other = Sender("int4", part_of(torch.bfloat16)), Sender("int4", part_of(torch.bfloat16))
    one.encode(normal(1))
    one.transaction.commit()
    saved = one.feedback.state_dict()
    other.feedback.load_state_dict(saved)
    assert torch.equal(one.encode(normal(2)), other.encode(normal(2)))
    assert torch.equal(one.residuals()[0], other.residuals()[0])


def test_residuals_in_host_memory_are_there_before_they_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may still be writing them."""
    part, codec = part_of(), make_codec("int4", kernels="reference")
    feedback = ErrorFeedback("moe", [codec], Home(CPU, True), Transaction(), rank=0)
    codecs = SlotCodecs({0: (part_of(slot=0),), 1: (part,)}, feedback)
    feedback.senders[0].make_residuals(part)
    late = normal(6)
    monkeypatch.setattr(Home, "wait", lambda _: feedback.residuals[0].copy_(late))
    sent: list[torch.Tensor] = []

    def start(sends: list[tuple[int, torch.Tensor]], *_: Any) -> Any:
        sent.extend(one for _, one in sends)
        return SimpleNamespace(wait=int)

    transport: Any = SimpleNamespace(channel=lambda *_: SimpleNamespace(start=start))
    slots: Any = SimpleNamespace(codecs=codecs, own_slot=0, device=CPU, name="moe", stages=(SimpleNamespace(level=0),))
    collect(slots, (0, 1), transport, num_ranks=2)
    assert torch.equal(sent[0], late.reshape(-1))


# -- undelivered ----------------------------------------------------------------------------------------------------


class Parameters:
    """One parameter, the experts 2 and 3 of a layer, and what waits at them."""

    def __init__(self, num_ranks: int = 4) -> None:
        self.transaction, self.is_boundary = Transaction(), True
        self.dense, self.expert = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((40,), (2, 2, 4)))
        targets = {
            "a": GradientTarget("a", 0, 40, self.dense),
            "local": GradientTarget("moe w", 16, 32, self.expert, share=0.5),
        }
        self.undelivered = UndeliveredGradients(
            lambda: targets, num_ranks, lambda: self.is_boundary, lambda: 2.0, transaction=self.transaction
        )

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.dense.grad = self.expert.grad = None
        (self.dense.sum() + self.expert.sum()).backward()
        assert self.dense.grad is not None
        assert self.expert.grad is not None
        return self.dense.grad - 1, self.expert.grad.reshape(-1) - 1


def test_undelivered_gradients_are_added_once_where_they_belong() -> None:
    parameters, values = Parameters(num_ranks=4), torch.arange(1.0, 21.0)
    parameters.dense.requires_grad_(False)  # for now
    parameters.undelivered.add([Undelivered("a", 30, values[:10]), Undelivered("moe w", 14, values)])
    parameters.undelivered.add([Undelivered("a", 30, values[:5]), Undelivered("unknown", 0, values)])
    parameters.dense.requires_grad_(True)
    dense, expert = torch.zeros(40), torch.zeros(16)
    dense[30:], expert[:] = 8 * values[:10], 8 * values[2:18]  # four ranks, a loss scale of 2
    dense[30:35] *= 2
    parameters.is_boundary = False
    assert not any(gradient.any() for gradient in parameters.gradients())
    parameters.is_boundary = True
    for _ in range(2):
        assert all(map(torch.equal, parameters.gradients(), (dense, expert)))
        assert not any(gradient.any() for gradient in parameters.gradients())  # once
        assert len(parameters.undelivered.records()) == 3  # a checkpoint still has them
        parameters.transaction.undo()  # the step was skipped
    assert all(map(torch.equal, parameters.gradients(), (dense, expert)))
    parameters.transaction.commit()
    assert parameters.undelivered.records() == []
    assert not any(gradient.any() for gradient in parameters.gradients())


def test_undelivered_gradients_wait_for_a_backward_that_accumulates() -> None:
    parameters = Parameters()
    parameters.undelivered.add([Undelivered("a", 0, torch.ones(40)), Undelivered("moe w", 16, torch.ones(16))])
    both = (parameters.dense, parameters.expert)
    for asked in (both, both[:1]):
        found = torch.autograd.grad(parameters.dense.sum() + parameters.expert.sum(), asked)
        assert all(map(torch.equal, found, map(torch.ones_like, asked)))
    assert all(bool((gradient == 8).all()) for gradient in parameters.gradients())


@pytest.mark.parametrize("is_ours", [True, False])
def test_residuals_of_a_file_go_to_one_rank_and_those_of_experts_to_their_owners(is_ours: bool) -> None:
    """As parts of a mean, so that they fit another number of ranks; residuals of experts are parts of sums."""
    kept, shape = torch.arange(16.0), [2, 2, 4]
    sent = {"level": 0, "shape": shape, "residual": kept.view(shape)}
    nothing: dict[str, Any] = {"sent": [], "received": []}
    group = {"results": nothing, "rounded": nothing}
    saved = {
        "experts": {
            "moe": {"gradients": {"sent": [{**sent, "piece": ["moe w", 16]}, {**sent, "piece": ["moe w", 0]}]}}
        },
        "synchronised": {
            "dense": {"is_mean": False, "sums": {"sent": [{**sent, "piece": ["a", 8]}]}, **group},
            "experts": {"is_mean": True, "sums": {"sent": [{**sent, "piece": ["of that rank", 0]}]}, **group},
        },
        "undelivered": [("a", 0, kept)],
        "places": {"of that rank": ("moe w", 24)},
    }
    parameters = Parameters()
    found = list(kept_back_in(saved, 8, parameters.undelivered.share_of(is_ours=is_ours)))
    expected = [("moe w", 16, kept / 16), ("moe w", 24, kept / 2)]
    if is_ours:
        expected = [expected[0], ("a", 8, kept / 8), expected[1], ("a", 0, kept)]
    assert [(one.name, one.start) for one in found] == [(name, start) for name, start, _ in expected]
    assert all(torch.equal(one.values, values) for one, (*_, values) in zip(found, expected, strict=True))


def test_undelivered_gradients_wait_on_the_device_of_their_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, device="meta"))
    targets = {"a": GradientTarget("a", 0, 4, parameter)}
    undelivered = UndeliveredGradients(lambda: targets, 1, lambda: True, lambda: 1.0, transaction=Transaction())
    undelivered.add([Undelivered("a", 0, torch.ones(4))])
    assert undelivered.records()[0].values.device == parameter.device


# -- nothing is lost for good -----------------------------------------------------------------------------------

RECOMMENDED = recommended_codecs(2)
GRADIENT_CODECS = {
    "int8": "int8",
    "int4": "int4",
    "int2": "int2",
    "low_rank": {"type": "low_rank"},
    "recommended, experts": RECOMMENDED.gradient.spec,
    "recommended, dense": RECOMMENDED.dense_gradient.spec,
}


@pytest.mark.slow
@pytest.mark.parametrize("is_noisy", [False, True], ids=["constant", "noisy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", GRADIENT_CODECS.values(), ids=GRADIENT_CODECS)
def test_a_gradient_a_ten_thousandth_of_its_neighbours_arrives(codec: Any, dtype: torch.dtype, is_noisy: bool) -> None:
    """What has arrived and what waits is the sum of 5000 gradients: within 2% of each element, without bias."""
    check_sums(codec, dtype, is_noisy=is_noisy, num_steps=5000)


@pytest.mark.parametrize("name", ["int2", "recommended, experts", "recommended, dense"])
def test_small_gradients_arrive(name: str) -> None:
    """Fewer steps, so more noise is left: it falls with the root of their number."""
    check_sums(GRADIENT_CODECS[name], torch.bfloat16, is_noisy=False, num_steps=500, most=0.02 * math.sqrt(10))


def check_sums(codec: Any, dtype: torch.dtype, *, is_noisy: bool, num_steps: int, most: float = 0.02) -> None:
    rows, cols = 64, 128
    generator = torch.Generator().manual_seed(7)
    part = PacketPart(torch.Size((rows, cols)), 1, (whole("w", (rows, cols)),), dtype)
    sender = Sender(codec, part, kernels="auto")
    size = torch.exp(torch.rand(1, rows, cols, generator=generator) * math.log(1e-4))
    mean = size * torch.sign(torch.randn(1, rows, cols, generator=generator))
    owed, arrived = torch.zeros(1, rows, cols, dtype=torch.float64), torch.zeros(1, rows, cols, dtype=torch.float64)
    for _ in range(num_steps):
        noise = torch.randn(1, rows, cols, generator=generator) if is_noisy else torch.zeros(())
        gradient = (mean * (1 + noise)).to(dtype).float()
        arrived += sender.receive(sender.encode(gradient))[0]
        sender.transaction.commit()
        owed += gradient
    error = (arrived + sender.residuals()[0] - owed) / (num_steps * mean)
    assert error.abs().max() < most
    assert error.mean().abs() < 0.002
    small = size < 3e-4
    assert error[small].mean().abs() < 0.002 + 4 * error[small].std() / math.sqrt(int(small.sum()))


def test_bf16_would_lose_them() -> None:
    """The control: why residuals are not kept in the type of the parameters."""
    step, lost = torch.full((1, 128), 2e-4), torch.ones(1, 128)
    kept = torch.ones(1, 128)
    for at in range(1000):
        lost = (lost + step).bfloat16().float()
        kept = expand(compact(kept + step, at), torch.empty_like(kept))
    assert torch.equal(lost, torch.ones(1, 128))
    torch.testing.assert_close(kept, torch.full((1, 128), 1.2), rtol=0, atol=2e-3)
