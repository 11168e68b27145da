# SPDX-License-Identifier: Apache-2.0
"""Training with "replicas": "transient": what persistent ones give, bit for bit, in the memory of a few layers."""

import contextlib
import io
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from parity import Case, assert_parity, levels_of
from process_pool import ProcessPool
from test_engine import change_by_hand, engine_of, error_of, evaluate, train
from test_lossy import block_with, migration_of, replicas_of
from test_migration_rules import (
    Rule,
    abandoned_forward,
    accumulate,
    assert_rules,
    backward_twice,
    evaluate_everywhere,
    skip_layer_before_boundary,
    skip_layer_for_a_whole_step,
    two_forwards_one_backward,
    two_forwards_two_backwards,
)
from test_migration_rules import world4 as rule_case
from torch.profiler import ProfilerActivity
from toy_model import ToyConfig

import ds_hybridep
from ds_hybridep.experts.transient import TransientWeights
from ds_hybridep.integration import prepare
from ds_hybridep.integration.estimate import MemoryNeeds

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

TOY = ToyConfig(num_layers=4)
EXACT = [("identity", "identity")] * 2
LOSSY_GRADIENTS = [("identity", "int8"), ("identity", "identity")]
FROZEN = ("blocks.0.moe.deepspeed_moe.experts", "up.weight", "down.bias")
REGIONS = ((0, 1), (2, 3))


def world4(*domain_sizes: int, **options: Any) -> Case:
    settings = {"toy": TOY, "replicas": "transient", "prefetch_depth": 1, "steps": 3}
    return Case(levels=levels_of((2, 2), domain_sizes), **{**settings, **options})


def rule(*domain_sizes: int, **options: Any) -> Case:
    settings = {"toy": TOY, "replicas": "transient", "prefetch_depth": 1, "steps": 2}
    return rule_case(*domain_sizes, **{**settings, **options})


# -- in the workers ---------------------------------------------------------------------------------------------


def trained(case: Case, codecs: Any, replicas: str) -> list[torch.Tensor]:
    """Losses, and all parameters on this rank in the end; every step is verified."""
    with engine_of(case, with_block=True, hybridep=block_with(case, codecs, replicas=replicas)) as engine:
        losses = torch.tensor(train(engine, case, 0, case.steps))
        return [losses, *(parameter.detach().clone() for parameter in engine.module.parameters())]


def same_bits(case: Case, codecs: Any) -> bool:
    kept, gathered = (trained(case, codecs, replicas) for replicas in ("persistent", "transient"))
    return all(map(torch.equal, kept, gathered))


def estimated(case: Case) -> MemoryNeeds:
    """What the estimator says of the case's model and domains."""
    with engine_of(case, with_block=True) as engine:
        block = case.ds_config(with_block=True)["hybridep"]
        with contextlib.redirect_stdout(io.StringIO()):
            needs = ds_hybridep.estimate_hybridep_mem_needs_all_live(
                engine.module, block, case.world_size, accumulation=case.accumulation
            )
        return needs[tuple(size for _, _, size in case.levels)]


def losses_over_changes(case: Case, kinds: tuple[str, ...]) -> list[float]:
    """Losses of a step for each kind of replicas, changed by hand between them."""
    block = case.ds_config(with_block=True)["hybridep"]
    with engine_of(case, with_block=True, hybridep={"replicas": kinds[0]}) as engine:
        losses = train(engine, case, 0, 1)
        for step, replicas in enumerate(kinds[1:], start=1):
            ds_hybridep.replan(engine, {**block, "replicas": replicas})
            losses += train(engine, case, step, 1)
        return losses


def evaluate_alone(case: Case) -> tuple[str, str]:
    """On rank 0 the error of an evaluation that no other rank takes part in."""
    own_limit = mock.patch.object(prepare, "longest_wait_s", float)  # else it would be torch's
    with own_limit, engine_of(case, with_block=True, hybridep={"timeout_s": 2}) as engine:
        train(engine, case, 0, 1)
        found = error_of(evaluate, engine, case) if dist.get_rank() == 0 else ("", "")
        dist.barrier()
        return found


def peak_blocks(case: Case) -> dict[str, int]:
    """Blocks of one slot's replicas alive at once, from start to end: by torch's allocator, and as is said."""
    held: list[int] = []
    owned: list[int] = []

    def sample() -> None:
        progress()
        held.append(sum(weights.untyped_storage().nbytes() for one in layers for weights in one.weights))

    def sample_owned(_: torch.Tensor) -> None:
        storages = [p.grad.untyped_storage() for p in engine.module.parameters() if p.grad is not None]
        owned.append(sum({one.data_ptr(): one.nbytes() for one in storages if one.nbytes() == block_bytes}.values()))

    with (
        torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile,
        engine_of(case, with_block=True) as engine,
    ):
        layers, migration = replicas_of(engine), migration_of(engine)
        block_bytes = layers[0].weights[0].nbytes  # of a slot
        progress, migration.progress = migration.progress, sample
        for parameter in engine.module.parameters():
            parameter.register_post_accumulate_grad_hook(sample_owned)
        train(engine, case, 0, 2)
        said = {
            "held": max(held),
            "owned": max(owned),  # gradients of owned experts, which lie in the block in which they came back
            "said": migration.most_weight_bytes,
            "stats": ds_hybridep.stats(engine)["replica_bytes"],
        }
        del migration.progress
    alive = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]" and abs(event.nbytes()) == block_bytes:
            alive += 1 if event.nbytes() > 0 else -1
            most = max(most, alive)
    return {"alive": most, **{name: num_bytes // block_bytes for name, num_bytes in said.items()}}


# -- the tests --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parity(pool4: ProcessPool) -> None:
    cases = [
        world4(2, 1, zero_stage=2, accumulation=2, toy=replace(TOY, checkpointing="nonreentrant")),
        world4(2, 2, zero_stage=1, dtype="bf16", toy=replace(TOY, routing="by_token"), prefetch_depth=0),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_parity_of_layouts_passes_and_types(pool4: ProcessPool, zero_stage: int, dtype: str) -> None:
    toy = replace(TOY, routing="by_token" if dtype == "bf16" else "learned")
    common = {"zero_stage": zero_stage, "dtype": dtype}
    cases = [
        world4(*sizes, accumulation=accumulation, toy=replace(toy, checkpointing=checkpointing), **common)
        for accumulation in (1, 2)
        for checkpointing in (None, "reentrant", "nonreentrant")
        for sizes in ((2, 2), (2, 1), (1, 2))
    ]
    cases.append(world4(2, 2, evaluate=True, prefetch_depth=0, toy=toy, **common))
    assert_parity(pool4, cases)


@pytest.mark.slow
def test_bits_are_those_of_persistent_replicas(pool4: ProcessPool) -> None:
    assert all(pool4.run(same_bits, case=world4(2, 2, zero_stage=1, accumulation=2), codecs=LOSSY_GRADIENTS))


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [EXACT, LOSSY_GRADIENTS], ids=["exact", "lossy"])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "nonreentrant"])
def test_bits_under_checkpointing(pool4: ProcessPool, checkpointing: str | None, codecs: Any) -> None:
    toy = replace(TOY, checkpointing=checkpointing)
    for sizes, zero_stage in (((2, 1), 0), ((1, 2), 1), ((2, 2), 2)):
        assert all(pool4.run(same_bits, case=world4(*sizes, zero_stage=zero_stage, toy=toy), codecs=codecs))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_memory_is_that_of_a_few_layers_whatever_their_number(pool4: ProcessPool, depth: int) -> None:
    for num_layers in (5, 7):
        # A size that no other tensor has: with four layers, a rank's own experts have it together.
        toy = ToyConfig(num_layers=num_layers, ffn=37)
        for found in pool4.run(peak_blocks, case=world4(2, 2, toy=toy, prefetch_depth=depth)):
            assert found["said"] == found["held"] == found["stats"] == 4 * (depth + 1)
            assert found["owned"] <= num_layers
            # Gradient sums of as many layers wait to return, or are on their way as messages that the link has copied.
            assert 4 * (depth + 1) < found["alive"] - found["owned"] <= 16 * (depth + 1)


@pytest.mark.slow
def test_kinds_of_replicas_can_be_changed_by_hand(pool4: ProcessPool) -> None:
    case = world4(2, 1)
    kept, changed = (
        pool4.run(losses_over_changes, case=case, kinds=kinds)
        for kinds in (("persistent",) * 3, ("persistent", "transient", "persistent"))
    )
    assert kept == changed


def test_estimates_are_of_as_many_layers(pool4: ProcessPool) -> None:
    layer = 4 * 2 * (2 * 16 * 32 + 32 + 16) * 4  # slots x experts of a rank x fp32
    for accumulation, summed in ((1, 2), (2, 4)):
        for need in pool4.run(estimated, case=world4(2, 2, accumulation=accumulation)):
            of_others = 3 * layer // 4  # those of the own experts are with their parameters
            assert (need.replicas, need.gradient_sums, need.codecs) == (2 * layer, summed * of_others, 0)
            assert need.returns == 2 * layer // 4


def test_a_parameter_changed_by_hand_is_found_by_verification(pool2: ProcessPool) -> None:
    case = Case(levels=levels_of((2,), (2,)), toy=ToyConfig(ep_size=2), replicas="transient")
    for message, losses in pool2.run(change_by_hand, case=case, ranks=(1,), layer=1, refreshes=False):
        assert "the copies of the experts of rank 1 on ranks [0] differ" in message
        assert len(losses) == 2


def test_a_backward_never_reads_weights_that_are_not_held_or_have_changed() -> None:
    block = torch.ones(2, 6)
    weights = TransientWeights([block])
    x = torch.ones(4, 3, requires_grad=True)

    def use() -> torch.Tensor:
        weights.take()
        block.fill_(2.0)
        weights.stamp()
        return x @ block[1].view(3, 2)

    output = use()
    weights.give_back()
    assert block.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward(retain_graph=True)
    use()
    output.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, torch.full((4, 3), 4.0))
    weights.renew()  # an optimizer step
    use()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.slow
def test_unusual_passes(pool4: ProcessPool) -> None:
    rules = [
        Rule(case=rule(2, 1, zero_stage=2), script=accumulate, checkpointing="reentrant", regions=REGIONS),
        Rule(case=rule(2, 2, accumulation=2), script=evaluate_everywhere, frozen=FROZEN),
    ]
    assert_rules(pool4, rules)


@pytest.mark.slow
def test_more_unusual_passes(pool4: ProcessPool) -> None:
    rules = [
        Rule(case=rule(2, 1, accumulation=2), script=evaluate_everywhere),
        Rule(case=rule(2, 2), script=accumulate, frozen=FROZEN),
        Rule(case=rule(2, 2, accumulation=2), script=accumulate, regions=((0,), (1,), (0,), (2,))),
        Rule(case=rule(2, 2, zero_stage=1), script=accumulate, regions=((3,), (2,), (1,), (0,))),
        *(
            Rule(case=rule(2, 2, prefetch_depth=depth), script=accumulate, checkpointing=kind, regions=REGIONS)
            for depth in (0, 1)
            for kind in ("reentrant", "nonreentrant", "deepspeed")
        ),
        Rule(case=rule(2, 1, zero_stage=2), script=accumulate, checkpointing="nonreentrant", regions=((0, 0), (1,))),
        Rule(case=rule(2, 2, accumulation=2), script=two_forwards_two_backwards),
        Rule(case=rule(2, 1), script=two_forwards_one_backward),
        Rule(case=rule(2, 1), script=abandoned_forward),
        Rule(case=rule(2, 1, zero_stage=1, accumulation=2), script=backward_twice),
        Rule(case=rule(2, 2), script=skip_layer_for_a_whole_step),
        Rule(case=rule(2, 2, accumulation=3), script=skip_layer_before_boundary),
        Rule(case=rule(2, 2, zero_stage=2), script=accumulate, frozen=FROZEN, checkpointing="nonreentrant"),
    ]
    assert_rules(pool4, rules)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named() -> None:
    case = Case(levels=levels_of((2,), (2,)), toy=replace(TOY, ep_size=2), replicas="transient", prefetch_depth=0)
    with ProcessPool(2) as pool:  # of its own: what was not received stays in its connections
        kind, message = pool.run(evaluate_alone, case=case)[0]
    assert kind == "CommunicationError"
    assert "blocks.1.moe.deepspeed_moe" in message
    assert "time limit of 2 s" in message
