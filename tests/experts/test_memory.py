# SPDX-License-Identifier: Apache-2.0
"""What replicas and codecs hold, step by step, beside what the planner says; and the same on the host, bit for bit."""

from typing import Any

import pytest
import torch
from estimate import needs_of_model
from parity import Case, levels_of
from process_pool import ProcessPool
from toy_model import ToyConfig
from training import LOW_RANK, batch_of, block_with, engine_of, migration_of, replicas_of, runtime_of, train

import ds_hybridep

pytestmark = pytest.mark.dist

PATCHES = [("patch", "int4")]
DELTAS = [(LOW_RANK, LOW_RANK)]
EXACT = [("identity", "identity")]


def world2(**options: Any) -> Case:
    return Case(
        levels=levels_of((2,), (2,)), **{"toy": ToyConfig(ep_size=2, num_layers=5), "dtype": "bf16", **options}
    )


# -- in the workers ---------------------------------------------------------------------------------------------


def bytes_of_steps(case: Case, codecs: Any, state: str) -> dict[str, Any]:
    """Counted bytes when gradients move, in the step and after it; and what was predicted."""
    block, held = block_with(case, codecs, state=state), []
    with engine_of(case, with_block=True, hybridep=block) as engine:
        needs = needs_of_model(
            engine.module, block, case.world_size, accumulation=case.accumulation, zero_stage=case.zero_stage
        )
        migration = migration_of(engine)
        progress = migration.progress

        def sample() -> None:
            held.append(migration.replica_bytes)
            progress()

        train(engine, case, 0, 1)
        after_step = migration.replica_bytes
        migration.progress = sample  # called in every acquire, forward and backward
        remember_sent = migration.remember_sent
        migration.remember_sent = lambda: (remember_sent(), held.append(migration.replica_bytes))
        train(engine, case, 1, 2)
        del migration.progress, migration.remember_sent
        stats = ds_hybridep.stats(engine)
        return {
            "need": needs[tuple(level["domain_size"] for level in block["levels"])],
            "after": (after_step, stats["replica_bytes"]),
            "host": stats["host_bytes"],
            "most": max(held),
            "replicated": sum(part.fp32_bytes // 4 for one in replicas_of(engine) for part in one.parts),
        }


def kept_by(engine: Any) -> list[torch.Tensor]:
    """Residuals of gradients, and the weights of replicas."""
    feedbacks = [replicas.codecs for replicas in replicas_of(engine)]
    kept = [residual for one in feedbacks for residual in one.feedback.residuals]
    kept += [weights for replicas in replicas_of(engine) for weights in replicas.weights]
    return [tensor.clone() for tensor in kept]


def train_with_a_skipped_step(case: Case, codecs: Any, state: str) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, parameters and what codecs keep, and bytes in host memory."""
    with engine_of(case, with_block=True, hybridep=block_with(case, codecs, state=state)) as engine:
        losses = train(engine, case, 0, 2)
        migration_of(engine).finish_shipments()
        before = kept_by(engine)
        engine.backward(engine(*batch_of(case, 7)))
        assert not all(map(torch.equal, before, kept_by(engine)))
        runtime_of(engine).before_step()
        runtime_of(engine).after_step(was_applied=False)
        engine.zero_grad()
        assert all(map(torch.equal, before, kept_by(engine)))  # bit for bit
        losses += train(engine, case, 2, 2)
        runtime_of(engine).verify()
        tensors = [*(p.detach().clone() for p in engine.module.parameters()), *kept_by(engine)]
        return losses, tensors, ds_hybridep.stats(engine)["host_bytes"]


def same_on_the_host(case: Case, codecs: Any) -> tuple[bool, bool, int, int]:
    losses, tensors, none = train_with_a_skipped_step(case, codecs, "device")
    losses_too, tensors_too, held = train_with_a_skipped_step(case, codecs, "host")
    return losses == losses_too, all(map(torch.equal, tensors, tensors_too)), none, held


def fail_in_an_optimizer_step(case: Case, codecs: Any, state: str) -> bool:
    """After weights have changed; whether replicas are right after the next step."""
    with engine_of(case, with_block=True, hybridep=block_with(case, codecs, state=state)) as engine:
        train(engine, case, 0, 2)
        engine.backward(engine(*batch_of(case, 2)))
        step = engine.optimizer.step

        def fail(*args: Any, **kwargs: Any) -> None:
            step(*args, **kwargs)
            raise RuntimeError("out of memory")

        engine.optimizer.step = fail
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        engine.optimizer.step = step
        engine.zero_grad()
        train(engine, case, 3, 1)
        runtime_of(engine).verify()
        return True


# -- the tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [pytest.param("device", marks=pytest.mark.slow), "host"])
@pytest.mark.parametrize(
    ("codecs", "accumulation"),
    [
        (PATCHES, 2),
        pytest.param(PATCHES, 1, marks=pytest.mark.slow),
        pytest.param(DELTAS, 2, marks=pytest.mark.slow),
        pytest.param(DELTAS, 1, marks=pytest.mark.slow),
        pytest.param(EXACT, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_of_a_step_are_those_that_were_predicted(
    pool2: ProcessPool, codecs: Any, accumulation: int, state: str
) -> None:
    case = world2(accumulation=accumulation)
    for found in pool2.run(bytes_of_steps, case=case, codecs=codecs, state=state):
        need = found["need"]
        assert found["after"] == (need.after_step, need.after_step)
        assert found["host"] == need.host
        assert found["most"] <= need.total
        if accumulation > 1:  # in the last micro-step all sums are there
            assert found["most"] >= need.replicas + need.codecs + need.gradient_sums
        if (codecs, state) == (PATCHES, "device"):
            # Weights in bf16, residuals in the compact form, sums in fp32.
            sums = 4 if accumulation > 1 else 4 * 3 / 5
            assert need.replicas == 2 * found["replicated"]
            assert 2.5 * found["replicated"] < need.codecs < 2.7 * found["replicated"]  # small ones are less compact
            assert need.gradient_sums == pytest.approx(sums * found["replicated"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "codecs", [PATCHES, pytest.param(DELTAS, marks=pytest.mark.slow), pytest.param(EXACT, marks=pytest.mark.slow)]
)
def test_state_on_the_host_changes_no_bit(pool2: ProcessPool, codecs: Any) -> None:
    codecs = [("identity", "int2")] if codecs is EXACT else codecs
    for same_losses, same_bits, none, held in pool2.run(same_on_the_host, case=world2(), codecs=codecs):
        assert same_losses
        assert same_bits
        assert none == 0 < held


def test_a_step_that_fails_halfway_leaves_no_patch_of_what_nobody_has(pool2: ProcessPool) -> None:
    assert pool2.run(fail_in_an_optimizer_step, case=world2(), codecs=PATCHES, state="device") == [True, True]
