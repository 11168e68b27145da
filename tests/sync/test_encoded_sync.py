# SPDX-License-Identifier: Apache-2.0
"""Dense parameters, and experts that several groups hold, over levels that encode: bits, losses, bytes, resumption."""

import hashlib
from typing import Any

import pytest
import torch
from encoded import digest, over_slow_level, residuals, world2, world4
from marks import slow
from parity import Case
from process_pool import ProcessPool
from toy_model import ToyConfig
from training import batch_of, engine_of, train

import ds_hybridep

pytestmark = pytest.mark.dist

STEPS = 3
COPIES = ToyConfig(ep_size=2)  # two groups hold each expert
BF16 = {"dtype": "bf16", "toy": ToyConfig(routing="by_token")}


def dense_digest(engine: Any) -> str:
    found = hashlib.sha256()
    for name, parameter in engine.module.named_parameters():
        if "experts" not in name:
            found.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train_encoded(case: Case, codecs: dict[str, Any], config: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    with engine_of(case, with_block=True, hybridep=over_slow_level(case, **codecs), **config) as engine:
        losses = train(engine, case, 0, steps)
        stats = ds_hybridep.stats(engine)
        return {
            "losses": losses,
            "digest": digest(engine),
            "dense": dense_digest(engine),
            "sent": stats["levels"][0]["sent_bytes"],
            "codecs": stats["synchronised"],
        }


def settings_of(stage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a case, and ds_config: "0", "1" and "2" are stages, "1 fp32" adds gradients up in fp32."""
    accumulates = {"data_types": {"grad_accum_dtype": "fp32"}} if "fp32" in stage else {}
    return {"zero_stage": int(stage[0])}, accumulates


# -- exact: patches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ep_size", [slow(4), 2])
@pytest.mark.parametrize("stage", [slow("1"), "2", slow("1 fp32")])
def test_patches_train_bit_for_bit_as_exact_weights(pool4: ProcessPool, stage: str, ep_size: int) -> None:
    options, config = settings_of(stage)
    toy, sizes = ToyConfig(routing="by_token", ep_size=ep_size), (1, 2) if ep_size == 2 else (2, 1)
    case = world4(*sizes, dtype="bf16", accumulation=2, **{**options, "toy": toy})
    exact = pool4.run(train_encoded, case=case, codecs={}, config=config)
    patched = pool4.run(train_encoded, case=case, codecs={"weight_codec": "patch"}, config=config)
    for one, other in zip(exact, patched, strict=True):
        assert one["losses"] == other["losses"]
        assert one["digest"] == other["digest"]
        assert other["sent"]["dense"] < one["sent"]["dense"]


# -- lossy ------------------------------------------------------------------------------------------------------

LOSSY = {"weight_codec": "int8", "gradient_codec": "int8"}


@pytest.mark.parametrize(
    ("stage", "ep_size"), [slow("0", 2), slow("0", 4), slow("1", 2), slow("1", 4), ("2", 2), slow("2", 4)]
)
def test_lossy_levels_keep_all_ranks_bit_equal(pool4: ProcessPool, stage: str, ep_size: int) -> None:
    options, config = settings_of(stage)
    toy = ToyConfig(ep_size=ep_size, num_layers=1)
    case = world4(1, 2, toy=toy, accumulation=2, gradient_clipping=0.5, **options)
    exact = pool4.run(train_encoded, case=case, codecs={}, config=config)
    lossy = pool4.run(train_encoded, case=case, codecs=LOSSY, config=config)
    assert len({one["dense"] for one in lossy}) == 1
    if ep_size == 2:  # ranks 0 and 2, and 1 and 3, hold the same experts
        assert lossy[0]["digest"] == lossy[2]["digest"]
        assert lossy[1]["digest"] == lossy[3]["digest"]
    for one, other in zip(exact, lossy, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=0.02)
        assert other["losses"] != one["losses"]
        of_dense = other["codecs"]["dense parameters"]
        assert 3.5 < of_dense["gradient_ratio"] < 4
        assert of_dense["residual_norm"] > 0
        assert (of_dense["weight_bytes"] > 0) == (stage != "0")
    assert sum(one["sent"]["dense"] for one in lossy) < 0.45 * sum(one["sent"]["dense"] for one in exact)


@pytest.mark.slow
def test_lossy_gradients_with_an_optimizer_that_adds_up_in_fp32(pool4: ProcessPool) -> None:
    options, config = settings_of("1 fp32")
    case = world4(2, 1, **{**BF16, **options})
    codecs = {"weight_codec": "patch", "gradient_codec": "int8"}
    lossy = pool4.run(train_encoded, case=case, codecs=codecs, config=config)
    exact = pool4.run(train_encoded, case=case, codecs={}, config=config)
    assert len({one["dense"] for one in lossy}) == 1
    for one, other in zip(exact, lossy, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=0.03)


# -- checkpoints and other plans --------------------------------------------------------------------------------


def save_and_resume(case: Case, codecs: dict[str, Any], folder: str) -> dict[str, Any]:
    block = over_slow_level(case, **codecs)
    with engine_of(case, with_block=True, hybridep=block) as engine:
        straight = train(engine, case, 0, 2)
        engine.save_checkpoint(folder, tag="two")
        saved = digest(engine)
        straight += train(engine, case, 2, 2)
        found = digest(engine)
    with engine_of(case, with_block=True, hybridep=block) as engine:
        engine.load_checkpoint(folder, tag="two")
        resumed = train(engine, case, 2, 2)
        digests = found, digest(engine)
    with engine_of(case, with_block=False) as engine:
        engine.load_checkpoint(folder, tag="two")
        plain = digest(engine), train(engine, case, 2, 2)
    return {"straight": straight, "resumed": resumed, "digests": digests, "saved": saved, "plain": plain}


@pytest.mark.parametrize(("stage", "dtype"), [slow(0, "fp32"), slow(1, "fp32"), (2, "bf16"), slow(1, "bf16")])
def test_resume_is_bit_equal_and_deepspeed_reads_it(pool4: ProcessPool, stage: int, dtype: str, tmp_path: Any) -> None:
    toy = ToyConfig(routing="by_token", ep_size=2, num_layers=1)
    case = world4(1, 1, zero_stage=stage, dtype=dtype, toy=toy)
    codecs = {"codecs": "recommended"} if dtype == "bf16" else LOSSY
    for one in pool4.run(save_and_resume, case=case, codecs=codecs, folder=str(tmp_path)):
        assert one["resumed"] == one["straight"][2:]
        assert one["digests"][0] == one["digests"][1]
        plain_digest, plain_losses = one["plain"]  # DeepSpeed reads what was saved with the block
        assert plain_digest == one["saved"]
        assert plain_losses == pytest.approx(one["straight"][2:], rel=0.02)


def change_plan(case: Case) -> list[dict[str, float]]:
    """Residuals before a change of codecs, right after it, and after an exact step."""
    with engine_of(case, with_block=True, hybridep=over_slow_level(case, gradient_codec="int4")) as engine:
        train(engine, case, 0, 2)
        found = [residuals(engine)]
        block = {**case.ds_config(with_block=True)["hybridep"]}
        ds_hybridep.replan(engine, block)
        found.append(residuals(engine))
        train(engine, case, 2, 1)
        return [*found, residuals(engine)]


@pytest.mark.parametrize("stage", [slow(0), 2])
def test_another_plan_delivers_what_was_kept_back(pool2: ProcessPool, stage: int) -> None:
    for before, after, later in pool2.run(change_plan, case=world2(1, zero_stage=stage)):
        assert any(before.values())
        assert after == pytest.approx(before, rel=1e-6, abs=1e-9)
        assert later == {}


def overflow(case: Case) -> dict[str, Any]:
    """Residuals and weights before and after a step that overflows on one rank, and whether training goes on."""
    with engine_of(case, with_block=True, hybridep=over_slow_level(case, codecs="recommended")) as engine:
        train(engine, case, 0, 2)
        before, weights, skipped = residuals(engine), digest(engine), engine.skipped_steps
        handle = None
        if torch.distributed.get_rank() == 1:
            parameter = next(p for name, p in engine.module.named_parameters() if "experts" not in name)
            handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
        train(engine, case, 2, 1)
        if handle is not None:
            handle.remove()
        found = {
            "has residuals": any(before.values()),
            "skipped": engine.skipped_steps - skipped,
            "residuals stay": residuals(engine) == before,
            "weights stay": digest(engine) == weights,
        }
        losses = train(engine, case, 3, 2)
        return {**found, "goes on": all(loss == loss for loss in losses), "dense": dense_digest(engine)}


@pytest.mark.parametrize("stage", [slow(1), 2])
def test_an_overflow_leaves_no_trace(pool2: ProcessPool, stage: int) -> None:
    toy = ToyConfig(routing="by_token", ep_size=2, num_experts=4)
    results = pool2.run(overflow, case=world2(1, zero_stage=stage, dtype="bf16", toy=toy))
    assert len({one.pop("dense") for one in results}) == 1
    expected = {"has residuals": True, "skipped": 1, "residuals stay": True, "weights stay": True, "goes on": True}
    assert results == [expected] * 2


def skip_a_step(case: Case) -> dict[str, Any]:
    """Without ZeRO: a step that is not applied, and one whose gradients are dropped."""
    with engine_of(case, with_block=True, hybridep=over_slow_level(case, **LOSSY)) as engine:
        runtime = engine.__dict__["_hybridep_attachment"].runtime
        train(engine, case, 0, 2)
        before = residuals(engine)
        engine.backward(engine(*batch_of(case, 7)))
        first = [p.grad.clone() for p in engine.module.parameters() if p.grad is not None]
        runtime.before_step()
        runtime.after_step(was_applied=False)
        skipped = residuals(engine)
        engine.zero_grad()
        engine.backward(engine(*batch_of(case, 7)))
        again = [p.grad.clone() for p in engine.module.parameters() if p.grad is not None]
        engine.zero_grad()
        return {
            "has residuals": any(before.values()),
            "skipped": skipped == before,
            "again": len(first) > 0 and all(map(torch.equal, first, again)),
            "dropped": residuals(engine) == before,
        }


def test_a_skipped_step_leaves_no_trace(pool2: ProcessPool) -> None:
    for one in pool2.run(skip_a_step, case=world2(1)):
        assert all(one.values()), one
