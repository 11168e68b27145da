# SPDX-License-Identifier: Apache-2.0
"""Training with "max_staleness": 1: replicas are exactly one optimizer step old, and as new as can be elsewhere."""

from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from parity import Case, levels_of
from process_pool import ProcessPool
from test_engine import Engine, _batch, engine_of, moe_layers
from test_lossy import block_with, stores_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

Weights = list[list[dict[str, torch.Tensor]]]  # by layer and expert of the group
EXACT = [("identity", "identity")] * 2
INT8_BETWEEN_DCS = [("int8", "int8"), ("identity", "identity")]


def owners_weights(engine: Engine) -> Weights:
    """The parameters of all experts, from their owners."""
    layers = []
    for layer in moe_layers(engine.module):
        own = [
            {name: parameter.detach().clone() for name, parameter in expert.named_parameters()}
            for expert in layer.experts.deepspeed_experts
        ]
        by_rank: list[Any] = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(by_rank, own)
        layers.append([expert for experts in by_rank for expert in experts])
    return layers


def are_replicas(engine: Engine, weights: Weights) -> bool:
    """Whether all replicas on this rank equal `weights`."""
    return all(
        torch.equal(replica, weights[index][expert][name])
        for index, store in enumerate(stores_of(engine))
        for slot in store.replica_slots()
        for local_idx, expert in enumerate(store.expert_ids(slot))
        for name, replica in store.expert_weights(slot, local_idx).items()
    )


def follow_replicas(case: Case, num_steps: int) -> list[dict[str, bool]]:
    """In each step, whether replicas are as old as they should be in forward and backward; then an evaluation."""
    block = block_with(case, EXACT, max_staleness=1)
    with engine_of(case, with_block=True, hybridep=block) as engine:
        history, found = [owners_weights(engine)], []
        for step in range(num_steps):
            expected = history[max(step - 1, 0)]
            loss = engine(*_batch(case, step))
            in_forward = are_replicas(engine, expected)
            with torch.no_grad():  # a forward beside the graph changes nothing under it
                engine(*_batch(case, 100 + step))
            engine.backward(loss)
            found.append({"forward": in_forward, "backward": are_replicas(engine, expected)})
            engine.step()
            history.append(owners_weights(engine))
        found.append({"moved": not are_replicas(engine, history[-1])})
        with torch.no_grad():
            engine(*_batch(case, 200))
        found.append({"evaluation": are_replicas(engine, history[-1])})
        return found


def losses_of(case: Case, codecs: Any, max_staleness: int, num_steps: int) -> list[float]:
    block = block_with(case, codecs, max_staleness=max_staleness)  # verifies every step
    with engine_of(case, with_block=True, hybridep=block) as engine:
        losses = []
        for step in range(num_steps):
            loss = engine(*_batch(case, step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("domain_sizes", [(2, 1), (2, 2)])
def test_replicas_are_one_step_old_in_training(pool4: ProcessPool, domain_sizes: tuple[int, ...]) -> None:
    case = Case(levels=levels_of((2, 2), domain_sizes), zero_stage=1)
    for found in pool4.run(follow_replicas, case=case, num_steps=4):
        assert all(value for checks in found for value in checks.values()), found


def test_a_stale_run_repeats_bit_for_bit_and_differs_from_a_fresh_one_from_the_second_step(pool4: ProcessPool) -> None:
    case = Case(levels=levels_of((2, 2), (2, 2)), zero_stage=2)
    for codecs in (EXACT, INT8_BETWEEN_DCS):
        fresh, stale, again = (
            pool4.run(losses_of, case=case, codecs=codecs, max_staleness=age, num_steps=4) for age in (0, 1, 1)
        )
        assert stale == again
        for one, other in zip(fresh, stale, strict=True):
            assert one[0] == other[0]
            assert one[1:] != other[1:]
