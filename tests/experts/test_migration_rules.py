# SPDX-License-Identifier: Apache-2.0
"""Ways of driving an engine that could make migration lose, repeat or misplace something.

Each test trains twice by one script, as unmodified DeepSpeed and with the "hybridep" block, and wants equal losses and
parameters.  Where it matters it also counts what was sent, after every forward and backward.
"""

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from marks import slow
from parity import (
    Case,
    CaseResult,
    Run,
    compare,
    levels_of,
    numeric_problems,
    snapshot,
    start_of,
    use_expert_groups_of,
)
from process_pool import Pools, ProcessPool, RemoteError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from toy_model import AUX_LOSS_WEIGHT, ToyConfig, ToyModel, batch, build_model

import ds_hybridep
from ds_hybridep.errors import GradientNotReturnedError

pytestmark = pytest.mark.dist

NUM_SEQUENCES = 3
EXPERT_KINDS = ("expert_weights", "expert_gradients")


Regions = tuple[tuple[int, ...], ...]
Bytes = dict[str, tuple[int, ...]]  # kind -> bytes that this rank sent over each level since attach


# -- the model and its driver -----------------------------------------------------------------------------------


class ScheduledModel(nn.Module):
    """A ToyModel whose blocks run in any order, some twice or not at all; each region is one checkpoint."""

    def __init__(self, toy: ToyModel, regions: Regions, checkpointing: str | None) -> None:
        super().__init__()
        self.toy = toy
        self.regions = regions
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor, targets: Tensor, regions: Regions | None = None) -> Tensor:
        """The loss of ToyModel over the blocks named in `regions`, in that order."""
        x = self.toy.embedding(tokens)
        total_aux_loss = 0.0
        for region in self.regions if regions is None else regions:
            x, aux_loss = self._checkpointed(functools.partial(self._run, region), x, tokens)
            total_aux_loss = total_aux_loss + aux_loss
        logits = self.toy.head(self.toy.norm(x)).float().flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / max(1, targets.numel())
        return loss + AUX_LOSS_WEIGHT * total_aux_loss if targets.numel() else loss

    def _run(self, region: tuple[int, ...], x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        total_aux_loss = x.new_zeros(())
        for layer in region:
            x, aux_loss = self.toy.blocks[layer](x, tokens)
            total_aux_loss = total_aux_loss + aux_loss
        return x, total_aux_loss

    def _checkpointed(self, function: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, Tensor]:
        if self.checkpointing is None or not self.training:
            return function(*inputs)
        if self.checkpointing == "deepspeed":
            return deepspeed.checkpointing.checkpoint(function, *inputs)
        return checkpoint(function, *inputs, use_reentrant=self.checkpointing == "reentrant", preserve_rng_state=False)


@dataclass
class Trainer:
    """One engine on one rank, and what it did so far.  The plain and the hybrid engine get the same calls."""

    engine: deepspeed.DeepSpeedEngine
    case: Case
    is_hybrid: bool
    losses: list[float] = field(default_factory=list)
    sent: list[tuple[str, Bytes]] = field(default_factory=list)  # (after what, bytes so far)

    def snapshot(self) -> dict[str, Tensor]:
        return snapshot(self.case, self.engine.module)

    def batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        sizes, rank = self.case.batch_sizes, dist.get_rank()
        num_sequences = NUM_SEQUENCES if sizes is None else sizes[rank]
        return batch(
            self.case.toy,
            seed=self.case.seed,
            step=step,
            micro_step=micro_step,
            rank=rank,
            num_sequences=num_sequences,
        )

    def forward(self, step: int, micro_step: int = 0, regions: Regions | None = None) -> Tensor:
        loss = self.engine(*self.batch(step, micro_step), regions=regions)
        self.losses.append(loss.item())
        self._note("forward")
        return loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)
        self._note("backward")

    def micro_step(self, step: int, micro_step: int = 0, regions: Regions | None = None) -> None:
        self.backward(self.forward(step, micro_step, regions))
        self.engine.step()

    def evaluate(self, step: int) -> None:
        self.engine.eval()
        with torch.no_grad():
            self.forward(step, micro_step=1000)  # a batch that training does not see
        self.engine.train()

    def _note(self, what: str) -> None:
        if self.is_hybrid:
            levels = ds_hybridep.stats(self.engine)["levels"]
            kinds = {kind: tuple(level["sent_bytes"][kind] for level in levels) for kind in EXPERT_KINDS}
            self.sent.append((what, kinds))


Script = Callable[[Trainer], None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One training by one script.

    Attributes:
        case: model, plan and ds_config.
        script: module-level function that drives the engine.
        regions: blocks in the order of their execution; None: each once, in module order, each a region of its own.
        checkpointing: None, "reentrant", "nonreentrant" or "deepspeed".
        frozen: parameters whose name contains one of these do not train.
        managed: whether DeepSpeed counts the micro-steps.
    """

    case: Case
    script: Script
    regions: Regions | None = None
    checkpointing: str | None = None
    frozen: tuple[str, ...] = ()
    managed: bool = True


@contextmanager
def trainer_of(rule: Rule, *, with_block: bool, **ds_config: Any) -> Iterator[Trainer]:
    """A fresh engine for `rule`, destroyed at the end; `ds_config` adds settings."""
    case = rule.case
    use_expert_groups_of(case)
    toy = build_model(
        case.toy,
        rank=dist.get_rank(),
        world_size=case.world_size,
        data_before_expert=case.use_data_before_expert_parallel,
        seed=case.seed,
    )
    regions = rule.regions or tuple((layer,) for layer in range(case.toy.num_layers))
    model = ScheduledModel(toy, regions, rule.checkpointing)
    for name, parameter in model.named_parameters():
        if any(part in name for part in rule.frozen):
            parameter.requires_grad_(False)
    config = {**case.ds_config(with_block=with_block), **ds_config}
    if not rule.managed:
        config["managed_gradient_accumulation"] = False
    if with_block:
        config["hybridep"]["advanced"]["verify_interval"] = (
            1  # replica == owner, proved before every step but the first
        )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    try:
        yield Trainer(engine, case, with_block)
    finally:
        engine.destroy()
        del engine, model
        gc.collect()


def follow(rule: Rule, *, with_block: bool) -> tuple[Run, list[tuple[str, Bytes]]]:
    """Trains by the script; what `compare` needs, and the bytes after every forward and backward."""
    with trainer_of(rule, with_block=with_block) as trainer:
        start = start_of(rule.case, trainer.engine.module)
        rule.script(trainer)
        run = Run(
            losses=tuple(trainer.losses),
            eval_losses=(),
            start=start,
            parameters=trainer.snapshot(),
            stats=ds_hybridep.stats(trainer.engine) if with_block else None,
            seconds=0.0,
        )
        return run, trainer.sent


@functools.lru_cache(maxsize=4)
def _plain_run(rule: Rule) -> Run:
    return follow(rule, with_block=False)[0]


def run_rule(rule: Rule) -> tuple[CaseResult, list[tuple[str, Bytes]]]:
    """In the worker: both trainings and their difference."""
    plain = _plain_run(replace(rule, case=rule.case.without_block()))
    hybrid, sent = follow(rule, with_block=True)
    return compare(rule.case, plain=plain, hybrid=hybrid), sent


def losses_of(rule: Rule) -> tuple[float, ...]:
    """In the worker: losses of unmodified DeepSpeed."""
    return _plain_run(replace(rule, case=rule.case.without_block())).losses


def assert_rules(pool: ProcessPool, rules: Sequence[Rule]) -> list[list[list[tuple[str, Bytes]]]]:
    """Every rule on `pool`, whatever became of the ones before.  Returns the bytes by rule and rank."""
    sent, failures = [], []
    for rule in rules:
        label = f"{rule.script.__name__} {rule.case.id} {rule.checkpointing or ''}"
        try:
            results = pool.run(run_rule, rule=rule)
        except RemoteError as error:
            failures.append(f"{label}\n{error}")
            continue
        problems = numeric_problems(rule.case, [result for result, _ in results])
        if not all(result.movement > 1e-2 for result, _ in results):
            problems.append("training moved nothing: the rule shows nothing")
        if problems:
            failures.append("\n    ".join([label, *problems]))
        sent.append([one for _, one in results])
    assert not failures, f"{len(failures)} of {len(rules)} rules failed\n\n" + "\n\n".join(failures)
    return sent


def world(*domain_sizes: int, toy: ToyConfig | None = None, **options: Any) -> Case:
    """As many levels of size two as there are domain sizes.  In one domain only experts travel."""
    sizes = (2,) * len(domain_sizes)
    num_ranks = 2 ** len(sizes)
    toy = replace(toy or ToyConfig(num_experts=2 * num_ranks), ep_size=num_ranks)
    return Case(levels=levels_of(sizes, domain_sizes), toy=toy, kernels="reference", **{"steps": 3, **options})


def expert_bytes(case: Case, num_layers: int | None = None) -> tuple[int, ...]:
    """Closed form: bytes of experts that every rank sends over each level per shipment of all layers, fp32.

    The slowest level carries a rank's own experts, each faster one also what the slower ones have brought.
    """
    toy = case.toy
    num_elements = 2 * toy.hidden * toy.ffn + toy.ffn + toy.hidden
    own = toy.num_experts // toy.ep_size * num_elements * 4 * (toy.num_layers if num_layers is None else num_layers)
    sizes = [size for _, _, size in case.levels]
    num_held, by_level = 1, []
    for size in sizes:
        by_level.append((size - 1) * num_held * own)
        num_held *= size
    return tuple(by_level)


def times(count: int, by_level: Sequence[int]) -> tuple[int, ...]:
    return tuple(count * number for number in by_level)


# -- accumulation -----------------------------------------------------------------------------------------------


def accumulate(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        for micro_step in range(trainer.case.accumulation):
            trainer.micro_step(step, micro_step)


@pytest.mark.parametrize(
    ("zero_stage", "accumulation", "sizes"),
    [
        slow(0, 3, (2, 1)),
        slow(1, 1, (2, 1)),
        (2, 3, (2, 2)),
        slow(1, 3, (2, 2)),
        slow(0, 1, (2, 2)),
        slow(2, 1, (2, 1)),
    ],
    ids=str,
)
def test_experts_travel_once_per_optimizer_step(
    pool4: ProcessPool, zero_stage: int, accumulation: int, sizes: tuple[int, int]
) -> None:
    cases = [world(*sizes, zero_stage=zero_stage, accumulation=accumulation)]
    sent = assert_rules(pool4, [Rule(case=case, script=accumulate) for case in cases])
    for case, by_rank in zip(cases, sent, strict=True):
        once = expert_bytes(case)
        for one in by_rank:
            # Call n: forward, backward of micro-step n.  The first forward fills the replicas.
            for call, (what, kinds) in enumerate(one):
                micro_step = call // 2
                step = micro_step // accumulation
                returns = step + (what == "backward" and micro_step % accumulation == accumulation - 1)
                assert kinds["expert_weights"] == times(step + 1, once), (case.id, what, micro_step)
                assert kinds["expert_gradients"] == times(returns, once), (case.id, what, micro_step)


def three_backwards_one_step(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        for micro_step in range(3):
            trainer.backward(trainer.forward(step, micro_step))
        trainer.engine.step()


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "sizes"), [(2, (2, 1)), slow(0, (2, 1)), slow(1, (2, 2))], ids=str)
def test_unmanaged_accumulation_returns_gradients_in_every_backward(
    pool4: ProcessPool, zero_stage: int, sizes: tuple[int, int]
) -> None:
    case = world(*sizes, zero_stage=zero_stage, accumulation=3)
    rules = [Rule(case=case, script=three_backwards_one_step, managed=False)]
    sent = assert_rules(pool4, rules)
    for rule, by_rank in zip(rules, sent, strict=True):
        once = expert_bytes(rule.case)
        for one in by_rank:
            backwards = [kinds for what, kinds in one if what == "backward"]
            assert [kinds["expert_gradients"] for kinds in backwards] == [times(n + 1, once) for n in range(9)]
            assert [kinds["expert_weights"] for kinds in backwards] == [times(n // 3 + 1, once) for n in range(9)]


def boundary_set_by_hand(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        for micro_step in range(3):
            trainer.engine.set_gradient_accumulation_boundary(micro_step == 2)
            trainer.backward(trainer.forward(step, micro_step))
        trainer.engine.step()


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "sizes"), [(2, (2, 2)), slow(0, (2, 1)), slow(1, (2, 1))], ids=str)
def test_set_gradient_accumulation_boundary(pool4: ProcessPool, zero_stage: int, sizes: tuple[int, int]) -> None:
    rules = [Rule(case=world(*sizes, zero_stage=zero_stage, accumulation=3), script=boundary_set_by_hand)]
    for rule, by_rank in zip(rules, assert_rules(pool4, rules), strict=True):
        for one in by_rank:
            assert one[-1][1]["expert_gradients"] == times(3, expert_bytes(rule.case))


def backwards_under_no_sync(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        with trainer.engine.no_sync():
            for micro_step in range(2):
                trainer.backward(trainer.forward(step, micro_step))
        trainer.micro_step(step, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "sizes"), [slow(0, (2, 1)), (1, (2, 2))], ids=str)
def test_no_sync_counts_as_no_boundary(pool4: ProcessPool, zero_stage: int, sizes: tuple[int, int]) -> None:
    rules = [Rule(case=world(*sizes, zero_stage=zero_stage), script=backwards_under_no_sync)]
    for rule, by_rank in zip(rules, assert_rules(pool4, rules), strict=True):
        for one in by_rank:
            assert one[-1][1]["expert_gradients"] == times(3, expert_bytes(rule.case))


def zero_grad_after_first_micro_step(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        for micro_step in range(3):
            trainer.micro_step(step, micro_step)
            if micro_step == 0:
                trainer.engine.zero_grad()


@pytest.mark.parametrize(
    ("zero_stage", "sizes"), [slow(0, (2, 1)), slow(1, (2, 1)), slow(2, (2, 1)), (2, (2,))], ids=str
)
def test_zero_grad_of_the_engine_in_the_middle_of_an_accumulation(
    pool_of: Pools, zero_stage: int, sizes: tuple[int, ...]
) -> None:
    case = world(*sizes, zero_stage=zero_stage, accumulation=3, steps=2)
    assert_rules(pool_of(case.world_size), [Rule(case=case, script=zero_grad_after_first_micro_step)])


def optimizer_zero_grad_after_first_micro_step(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        for micro_step in range(3):
            trainer.micro_step(step, micro_step)
            if micro_step == 0:
                trainer.engine.optimizer.zero_grad()


@pytest.mark.slow  # test_forgotten_gradients.py has it with codecs
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_zero_grad_of_the_optimizer_in_the_middle_of_an_accumulation(pool4: ProcessPool, zero_stage: int) -> None:
    case = world(2, 1, zero_stage=zero_stage, accumulation=3)
    assert_rules(pool4, [Rule(case=case, script=optimizer_zero_grad_after_first_micro_step)])


# -- a skipped step ---------------------------------------------------------------------------------------------


def run_with_skipped_step(rule: Rule) -> tuple[bool, list[dict[str, Any]]]:
    """In the worker: steps 0 .. 2, of which step 1 has an infinite loss on rank 1.

    Returns: whether the run ended with the parameters of plain DeepSpeed, and for each step whether it was applied,
    whether it changed a parameter, and the bytes of weights that were sent by the end of the next forward.
    """
    parameters, records = [], []
    for with_block in (False, True):
        with trainer_of(rule, with_block=with_block) as trainer:
            records = []
            for step in range(3):
                before = trainer.snapshot()
                loss = trainer.forward(step)
                trainer.backward(loss * float("inf") if step == 1 and dist.get_rank() == 1 else loss)
                trainer.engine.step()
                after = trainer.snapshot()
                records.append(
                    {
                        "applied": trainer.engine.was_step_applied(),
                        "changed": any(not torch.equal(before[name], after[name]) for name in before),
                    }
                )
            trainer.evaluate(3)
            parameters.append(trainer.snapshot())
            forwards = [kinds["expert_weights"] for what, kinds in trainer.sent if what == "forward"]
    for record, sent in zip(records, forwards[1:], strict=True):
        record["sent"] = sent
    is_close = all(
        torch.linalg.vector_norm(parameters[0][name] - value) <= 1e-2 * torch.linalg.vector_norm(value)
        for name, value in parameters[1].items()
    )
    return is_close, records


@pytest.mark.parametrize(
    ("zero_stage", "domain_sizes"),
    [slow(1, (2, 2)), (2, (2,)), slow(2, (2, 1)), slow(1, (2, 1)), slow(2, (2, 2))],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_everywhere(
    pool_of: Pools, zero_stage: int, domain_sizes: tuple[int, ...]
) -> None:
    case = world(*domain_sizes, zero_stage=zero_stage, dtype="bf16", toy=ToyConfig(routing="by_token"))
    results = pool_of(case.world_size).run(run_with_skipped_step, rule=Rule(case=case, script=accumulate))
    once = [number // 2 for number in expert_bytes(case)]  # bf16
    for rank, (is_close, records) in enumerate(results):
        assert [record["applied"] for record in records] == [True, False, True], rank
        assert [record["changed"] for record in records] == [True, False, True], rank
        assert [record["sent"] for record in records] == [times(n, once) for n in (2, 2, 3)], rank
        assert is_close, rank


# -- layers that do not always run ------------------------------------------------------------------------------


def skip_layer_before_boundary(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        for micro_step in range(3):
            trainer.micro_step(step, micro_step, regions=((0,), (2,)) if micro_step == 1 else None)


@pytest.mark.parametrize(
    ("zero_stage", "sizes"), [(1, (2,)), slow(1, (2, 2)), slow(0, (2, 1)), slow(2, (2, 1))], ids=str
)
def test_a_layer_unused_before_the_boundary(pool_of: Pools, zero_stage: int, sizes: tuple[int, ...]) -> None:
    case = world(*sizes, zero_stage=zero_stage, accumulation=3, steps=2, toy=ToyConfig(num_layers=3))
    assert_rules(pool_of(case.world_size), [Rule(case=case, script=skip_layer_before_boundary)])


def skip_layer_for_a_whole_step(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        trainer.micro_step(step, regions=((0,), (2,)) if step == 1 else None)


@pytest.mark.parametrize("sizes", [slow((2, 1)), (2,), slow((2, 2))], ids=str)
def test_a_layer_unused_for_a_whole_step(pool_of: Pools, sizes: tuple[int, ...]) -> None:
    case = world(*sizes, zero_stage=0, toy=ToyConfig(num_layers=3))
    assert_rules(pool_of(case.world_size), [Rule(case=case, script=skip_layer_for_a_whole_step)])


def run_with_layer_missing_at_boundary(rule: Rule) -> tuple[str, bool, int]:
    """In the worker: the error's message, whether parameters stayed as they were, steps applied after zero_grad."""
    with trainer_of(rule, with_block=True) as trainer:
        trainer.micro_step(0, 0)
        trainer.backward(trainer.forward(0, 1, regions=((0,), (2,))))
        before = trainer.snapshot()
        with pytest.raises(GradientNotReturnedError) as caught:
            trainer.engine.step()
        is_unchanged = all(torch.equal(before[name], value) for name, value in trainer.snapshot().items())
        trainer.engine.zero_grad()
        trainer.micro_step(0, 1)
        return str(caught.value), is_unchanged, trainer.engine.global_steps


@pytest.mark.parametrize(
    ("zero_stage", "sizes"), [slow(0, (2, 1)), slow(1, (2, 1)), slow(2, (2, 1)), (2, (2,))], ids=str
)
def test_a_layer_unused_at_the_boundary_is_an_error(pool_of: Pools, zero_stage: int, sizes: tuple[int, ...]) -> None:
    case = world(*sizes, zero_stage=zero_stage, accumulation=2, toy=ToyConfig(num_layers=3))
    results = pool_of(case.world_size).run(run_with_layer_missing_at_boundary, rule=Rule(case=case, script=accumulate))
    for rank, (message, is_unchanged, num_steps) in enumerate(results):
        assert f"rank {rank}: replica gradients of ['toy.blocks.1.moe.deepspeed_moe']" in message
        assert "engine.zero_grad()" in message
        assert is_unchanged
        assert num_steps == 1


# -- forwards out of step with backwards ------------------------------------------------------------------------


def evaluate_everywhere(trainer: Trainer) -> None:
    trainer.evaluate(100)
    for step in range(trainer.case.steps):
        for micro_step in range(trainer.case.accumulation):
            loss = trainer.forward(step, micro_step)
            trainer.evaluate(step)
            trainer.backward(loss)
            trainer.evaluate(step)
            trainer.engine.step()
        trainer.evaluate(step)


@pytest.mark.slow  # test_parity.py has evaluation between steps
def test_evaluation_between_steps_and_between_forward_and_backward(pool4: ProcessPool) -> None:
    cases = [
        world(2, 1, zero_stage=0, accumulation=2),
        world(2, 2, zero_stage=1),
        world(2, 1, zero_stage=2, accumulation=2, prefetch_depth=5),
    ]
    sent = assert_rules(pool4, [Rule(case=case, script=evaluate_everywhere) for case in cases])
    for case, by_rank in zip(cases, sent, strict=True):
        for one in by_rank:
            assert one[-1][1]["expert_weights"] == times(case.steps + 1, expert_bytes(case))


def two_forwards_two_backwards(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        losses = [trainer.forward(step, micro_step) for micro_step in range(2)]
        for loss in losses if step % 2 else reversed(losses):
            trainer.backward(loss)
            trainer.engine.step()


def two_forwards_one_backward(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        trainer.backward(trainer.forward(step, 0) + trainer.forward(step, 1))
        trainer.engine.step()


def abandoned_forward(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        trainer.forward(step, 1)  # with gradients, and no backward
        trainer.micro_step(step, 0)


@pytest.mark.parametrize(("sizes", "prefetch_depth"), [slow((2, 1), None), slow((2, 2), 1), ((2,), 1)], ids=str)
def test_two_forwards_then_two_backwards(pool_of: Pools, sizes: tuple[int, ...], prefetch_depth: int | None) -> None:
    case = world(*sizes, accumulation=2, prefetch_depth=prefetch_depth)
    assert_rules(pool_of(case.world_size), [Rule(case=case, script=two_forwards_two_backwards)])


@pytest.mark.slow  # test_running.py has two forwards, with accumulation
def test_two_forwards_then_one_backward(pool4: ProcessPool) -> None:
    assert_rules(pool4, [Rule(case=world(2, 1, zero_stage=1), script=two_forwards_one_backward)])


@pytest.mark.parametrize(("zero_stage", "sizes"), [slow(0, (2, 1)), slow(2, (2, 1)), (2, (2,))], ids=str)
def test_a_forward_without_backward(pool_of: Pools, zero_stage: int, sizes: tuple[int, ...]) -> None:
    case = world(*sizes, zero_stage=zero_stage)
    assert_rules(pool_of(case.world_size), [Rule(case=case, script=abandoned_forward)])


def backward_twice(trainer: Trainer) -> None:
    for step in range(trainer.case.steps):
        loss = trainer.forward(step)
        for retain_graph in (True, False):
            trainer.engine.backward(loss, retain_graph=retain_graph)
            trainer.engine.step()


@pytest.mark.slow  # test_forgotten_gradients.py has it with codecs
def test_two_backwards_through_one_graph(pool4: ProcessPool) -> None:
    assert_rules(pool4, [Rule(case=world(2, 1, accumulation=2, zero_stage=1), script=backward_twice)])


# -- orders of layers -------------------------------------------------------------------------------------------


def test_a_layer_called_twice_in_one_forward(pool4: ProcessPool) -> None:
    case = world(2, 1, zero_stage=2, accumulation=2, steps=2)
    assert_rules(pool4, [Rule(case=case, script=accumulate, regions=((1,), (0,), (1,)))])


@pytest.mark.slow
def test_a_layer_called_twice_in_other_orders(pool4: ProcessPool) -> None:
    rules = [
        Rule(case=world(2, 1, accumulation=2), script=accumulate, regions=((0,), (1,), (0,))),
        Rule(case=world(2, 2, zero_stage=1), script=accumulate, regions=((0,), (0,), (1,))),
        Rule(case=world(2, 1), script=accumulate, regions=((0,), (1,), (0,)), checkpointing="nonreentrant"),
    ]
    assert_rules(pool4, rules)


@pytest.mark.parametrize("checkpointing", ["reentrant", slow("deepspeed")])
@pytest.mark.slow
def test_a_layer_called_twice_under_reentrant_checkpointing(pool4: ProcessPool, checkpointing: str) -> None:
    case = world(2, 1, accumulation=2)
    rule = Rule(case=case, script=accumulate, regions=((0,), (1,), (0,)), checkpointing=checkpointing)
    assert_rules(pool4, [rule])


@pytest.mark.slow
def test_layers_that_run_in_reverse_of_module_order(pool4: ProcessPool) -> None:
    case = world(2, 2, toy=ToyConfig(num_layers=3), zero_stage=2, prefetch_depth=1)
    assert_rules(pool4, [Rule(case=case, script=accumulate, regions=((2,), (1,), (0,)))])


@pytest.mark.slow
def test_layers_that_run_in_other_orders(pool4: ProcessPool) -> None:
    toy = ToyConfig(num_layers=3)
    rules = [
        Rule(case=world(2, 1, toy=toy, accumulation=2), script=accumulate, regions=((2,), (1,), (0,))),
        Rule(case=world(2, 2, toy=toy, zero_stage=1, accumulation=2), script=accumulate, regions=((1,), (2,), (0,))),
    ]
    assert_rules(pool4, rules)


SHARED_REGIONS = [  # prefetch depth, domain sizes, ZeRO stage, accumulation, regions, checkpointing
    slow(1, (2, 2), 1, 1, ((0,), (1, 2)), "deepspeed"),
    (2, (2, 1), 2, 2, ((0, 1), (2,)), "deepspeed"),
    slow(0, (2, 1), 0, 2, ((0, 1), (2,)), "deepspeed"),
    slow(5, (2, 1), 0, 1, ((0, 1, 2),), "deepspeed"),
    slow(0, (2, 1), 0, 2, ((0, 1), (2,)), "reentrant"),
    slow(2, (2, 2), 2, 1, ((0,), (1, 2)), "reentrant"),
    slow(1, (2, 1), 1, 2, ((0, 1), (2,)), "nonreentrant"),
    slow(5, (2, 1), 0, 1, ((0, 1, 2),), "nonreentrant"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "sizes", "zero_stage", "accumulation", "regions", "checkpointing"), SHARED_REGIONS, ids=str
)
def test_checkpointing_with_two_layers_in_one_region(
    pool4: ProcessPool,
    depth: int,
    sizes: tuple[int, int],
    zero_stage: int,
    accumulation: int,
    regions: Regions,
    checkpointing: str,
) -> None:
    options = {"zero_stage": zero_stage, "accumulation": accumulation, "prefetch_depth": depth, "steps": 2}
    case = world(*sizes, toy=ToyConfig(num_layers=3), **options)
    rule = Rule(case=case, script=accumulate, regions=regions, checkpointing=checkpointing)
    (by_rank,) = assert_rules(pool4, [rule])
    for one in by_rank:  # a recomputation ships nothing again
        assert one[-1][1] == {kind: times(2, expert_bytes(case)) for kind in EXPERT_KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("prefetch_depth", [0, slow(1), slow(2), 5])
def test_prefetch_depths(pool2: ProcessPool, prefetch_depth: int) -> None:
    toy = ToyConfig(num_layers=4)
    case = world(2, toy=toy, prefetch_depth=prefetch_depth, accumulation=2, zero_stage=2)
    assert_rules(pool2, [Rule(case=case, script=accumulate)])


# -- what trains, and on what -----------------------------------------------------------------------------------


@pytest.mark.slow  # test_parity.py has clipping
def test_gradient_clipping(pool4: ProcessPool) -> None:
    # SGD: with Adam a common factor of all gradients would be forgotten.
    rules = [
        Rule(case=world(*sizes, zero_stage=zero, gradient_clipping=0.5, optimizer="sgd"), script=accumulate)
        for zero, sizes in ((0, (2, 1)), (1, (2, 2)), (2, (2, 1)))
    ]
    assert_rules(pool4, rules)
    clipped = rules[-1]
    free = replace(clipped, case=replace(clipped.case, gradient_clipping=0.0))
    assert pool4.run(losses_of, rule=clipped) != pool4.run(losses_of, rule=free)  # the bound does bite


@pytest.mark.parametrize(("zero_stage", "sizes"), [slow(0, (2, 2)), slow(2, (2, 1)), (2, (2,))], ids=str)
def test_frozen_experts_travel_once(pool_of: Pools, zero_stage: int, sizes: tuple[int, ...]) -> None:
    frozen = ("blocks.0.moe.deepspeed_moe.experts",)
    case = world(*sizes, zero_stage=zero_stage, accumulation=2)
    rules = [Rule(case=case, script=accumulate, frozen=frozen)]
    for rule, by_rank in zip(rules, assert_rules(pool_of(case.world_size), rules), strict=True):
        both, one_layer = expert_bytes(rule.case), expert_bytes(rule.case, num_layers=1)
        shipped = tuple(first + 2 * later for first, later in zip(both, one_layer, strict=True))
        for one in by_rank:
            assert one[-1][1] == {"expert_weights": shipped, "expert_gradients": times(3, one_layer)}


@pytest.mark.parametrize(("zero_stage", "sizes"), [(0, (2,)), slow(0, (2, 2)), slow(2, (2, 1))], ids=str)
def test_experts_of_which_only_some_parameters_train(pool_of: Pools, zero_stage: int, sizes: tuple[int, ...]) -> None:
    case = world(*sizes, zero_stage=zero_stage)
    assert_rules(pool_of(case.world_size), [Rule(case=case, script=accumulate, frozen=("up.weight", "down.bias"))])


def freeze_for_a_while(trainer: Trainer, ranks: Sequence[int]) -> None:
    """These ranks freeze their experts after the first step, and train them again in the last."""
    experts = [p for name, p in trainer.engine.module.named_parameters() if ".experts." in name]
    for step in range(trainer.case.steps):
        for parameter in experts if dist.get_rank() in ranks else ():
            parameter.requires_grad_(step in (0, trainer.case.steps - 1))
        for micro_step in range(trainer.case.accumulation):
            trainer.micro_step(step, micro_step)


def freeze_rank_1(trainer: Trainer) -> None:
    freeze_for_a_while(trainer, ranks=(1,))


def freeze_all_ranks(trainer: Trainer) -> None:
    freeze_for_a_while(trainer, ranks=(0, 1))


@pytest.mark.parametrize(
    ("script", "options", "checkpointing"),
    [
        (freeze_rank_1, {"accumulation": 2}, None),
        slow(freeze_rank_1, {"zero_stage": 2}, "reentrant"),
        slow(freeze_rank_1, {"hot_experts": 4, "hot_level": 0}, None),
        slow(freeze_all_ranks, {"zero_stage": 1}, None),
    ],
)
def test_experts_that_some_ranks_freeze_after_the_start(
    pool2: ProcessPool, script: Script, options: dict[str, Any], checkpointing: str | None
) -> None:
    toy = ToyConfig(routing="by_token", drift=4, drop_tokens=False)  # few experts get all tokens, so some are hot
    case = world(1 if "hot_level" in options else 2, toy=toy, steps=4, **options)
    assert_rules(pool2, [Rule(case=case, script=script, checkpointing=checkpointing)])


@pytest.mark.slow  # test_parity.py has such ranks
def test_a_rank_whose_experts_get_no_token(pool4: ProcessPool) -> None:
    toy = ToyConfig(starved_experts=(2, 3))
    rules = [
        Rule(case=world(*sizes, zero_stage=zero, toy=toy, accumulation=2), script=accumulate)
        for zero, sizes in ((0, (2, 2)), (2, (2, 1)))
    ]
    assert_rules(pool4, rules)


@pytest.mark.slow  # test_parity.py has empty batches
def test_a_rank_with_an_empty_batch(pool4: ProcessPool) -> None:
    toy = ToyConfig(drop_tokens=False)
    settings = [  # domain sizes, ZeRO stage, sequences of each rank, checkpointing
        ((2, 1), 0, (3, 0, 3, 3), None),
        ((2, 2), 1, (0, 3, 0, 3), "nonreentrant"),
        ((2, 1), 2, (3, 3, 3, 0), "reentrant"),
    ]
    rules = [
        Rule(
            case=world(*sizes, zero_stage=zero, toy=toy, batch_sizes=batch_sizes, accumulation=2),
            script=accumulate,
            checkpointing=checkpointing,
        )
        for sizes, zero, batch_sizes, checkpointing in settings
    ]
    assert_rules(pool4, rules)
