# SPDX-License-Identifier: Apache-2.0
"""Gradients of hot experts that return through a codec: nothing is lost, whichever experts are hot next."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad
from marks import slow
from parity import Case, levels_of, loss_of, whole_parameters
from process_pool import ProcessPool
from toy_model import ToyConfig
from training import Engine, batch_of, block_of, engine_of, replicas_of, residuals_of, runtime_of, train

import ds_hybridep

pytestmark = pytest.mark.dist

FEW = ToyConfig(routing="by_token", drift=2, drop_tokens=False)  # few experts get all tokens, other ones later
NO_CHANGE = {"type": "SGD", "params": {"lr": 0.0}}  # of weights: gradients depend on the batch alone


def hot4(*domain_sizes: int, **options: Any) -> Case:
    return Case(levels=levels_of((2, 2), domain_sizes), **{"hot_experts": 2, "toy": FEW, **options})


def hot2(**options: Any) -> Case:
    return Case(levels=levels_of((2,), (1,)), toy=replace(FEW, ep_size=2), hot_experts=2, **options)


# -- in the workers ---------------------------------------------------------------------------------------------


def with_codecs(case: Case, *codecs: Any) -> dict[str, Any]:
    """The case's block with codecs of gradients, by level; every step verified."""
    levels = case.ds_config(with_block=True)["hybridep"]["levels"]
    levels = [{**level, "gradient_codec": codec} for level, codec in zip(levels, codecs, strict=True)]
    return {"levels": levels, "advanced": {"verify_interval": 1}}


def without_hot_experts(case: Case) -> dict[str, Any]:
    levels = case.ds_config(with_block=True)["hybridep"]["levels"]
    return block_of(case, levels=[{**level, "hot_experts": 0} for level in levels])


def owned(engine: Engine) -> list[torch.nn.Parameter]:
    return [p for p in engine.module.parameters() if not getattr(p, "allreduce", True) and p.requires_grad]


def backward(engine: Engine, case: Case, step: int) -> list[torch.Tensor]:
    """Run a step up to its optimizer, and return the gradients of the owned experts, as the optimizer gets them."""
    for micro_step in range(case.accumulation):
        engine.backward(loss_of(engine, case, *batch_of(case, step, micro_step)))
        if micro_step < case.accumulation - 1:
            engine.step()
    found = [p.grad if case.zero_stage == 0 else safe_get_full_grad(p) for p in owned(engine)]
    return [gradient.detach().float().clone() for gradient in found]


def skip(engine: Engine, case: Case, step: int) -> None:
    """A step whose gradients overflow."""
    backward(engine, case, step)
    runtime_of(engine).before_step()
    runtime_of(engine).after_step(was_applied=False)
    engine.zero_grad()


def sums_of_gradients(
    case: Case, codecs: Sequence[Any], steps: int, skipped: Sequence[int] = (), folder: str = ""
) -> dict[str, Any]:
    """Gradients of the owned experts summed over steps, the last of them under a plan without hot experts.

    skipped: steps after which another one is skipped.  folder: the last step is run by another engine, which has
        loaded a checkpoint; else by the same one.
    """
    block, single = with_codecs(case, *codecs), []
    with engine_of(case, with_block=True, hybridep=block, optimizer=NO_CHANGE) as engine:
        num_waiting = 0
        for step in range(steps):
            single.append(backward(engine, case, step))
            engine.step()
            num_waiting += len(runtime_of(engine).codec_state.waiting.records())
            if step in skipped:
                skip(engine, case, step + 100)
        changes = [layer["hot_changes"] for layer in ds_hybridep.stats(engine)["layers"]]
        if folder:
            engine.save_checkpoint(folder)
        else:
            ds_hybridep.replan(engine, without_hot_experts(case))
            single.append(backward(engine, case, steps))
    if folder:
        plain = without_hot_experts(case)
        with engine_of(case, with_block=True, hybridep=plain, optimizer=NO_CHANGE, seed=2) as engine:
            engine.load_checkpoint(folder)
            single.append(backward(engine, case, steps))
    return {"steps": single, "changes": changes, "num_waiting": num_waiting}


def lost(case: Case, codecs: Sequence[Any], **options: Any) -> dict[str, Any]:
    """How far the sums of gradients are from those of exact ones, and what happened on the way."""
    exact = sums_of_gradients(case, ["identity"] * len(codecs), **options)
    ours = sums_of_gradients(case, codecs, **options)
    sums = [[sum(parts) for parts in zip(*run["steps"], strict=True)] for run in (ours, exact)]
    return {
        "of all": distance(*sums),
        "of a step": max(map(distance, ours["steps"], exact["steps"])),
        "changes": max(ours["changes"]),
        "num_waiting": (exact["num_waiting"], ours["num_waiting"]),
    }


def distance(ours: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Relative, of all tensors together."""
    apart = sum(float((one - other).square().sum()) for one, other in zip(ours, exact, strict=True))
    return (apart / max(sum(float(one.square().sum()) for one in exact), 1e-30)) ** 0.5


def resume(case: Case, codecs: Sequence[Any], before: int, folder: str) -> dict[str, Any]:
    """Train on from a checkpoint: in the engine that wrote it, in it again, and in one with other weights."""
    block, runs = with_codecs(case, *codecs), []
    with engine_of(case, with_block=True, hybridep=block) as engine:
        train(engine, case, 0, before)
        engine.save_checkpoint(folder)
        has_left_out = (
            bool(runtime_of(engine).codec_state.waiting.records()),
            any(map(torch.any, residuals_of(engine))),
        )
        for _ in range(2):
            runs.append((train(engine, case, before, 3), whole_parameters(engine.module)))
            engine.load_checkpoint(folder)
    with engine_of(case, with_block=True, hybridep=block, seed=2) as engine:
        train(engine, case, 7, 2)  # other hot experts
        engine.load_checkpoint(folder)
        runs.append((train(engine, case, before, 3), whole_parameters(engine.module)))
    return {
        "losses": [losses for losses, _ in runs],
        "different": [name for _, run in runs for name, one in run.items() if not torch.equal(one, runs[0][1][name])],
        "has left out": has_left_out,
    }


def undelivered(engine: Engine) -> dict[str, torch.Tensor]:
    """What all ranks together have not delivered of each parameter of all experts, as parts of sums."""
    num_experts = engine.module.config.num_experts
    pieces = [
        (span.name, span.start, residual.reshape(-1))
        for replicas in replicas_of(engine)
        for _, span, residual in replicas.codecs.feedback.undelivered()
    ]
    waiting = runtime_of(engine).codec_state.waiting.records()
    pieces += [(one.name, one.start, dist.get_world_size() * one.values) for one in waiting]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, pieces)
    sizes = {
        f"{one.name} {piece.name}": num_experts * piece.shape.numel()
        for one in replicas_of(engine)
        for piece in one.layout.trainable
    }
    found = {name: torch.zeros(size) for name, size in sizes.items()}
    for name, start, values in (one for pieces in of_all for one in pieces):
        found[name][start : start + len(values)] += values
    return found


def sent_by(replicas: Any) -> set[Any]:
    """What a rank sends of the present hot experts, by level: the spans that have another packet to wait for."""
    peers = [(stage.level, peer) for stage in replicas.stages for peer in stage.peers]
    parts = [(level, part) for level, peer in peers for slot in peer.slots_there for part in replicas.slot_parts[slot]]
    return {(level, span) for level, part in parts for span in part.spans}


def go_back_in_the_middle(case: Case, codecs: Sequence[Any], folder: str) -> dict[str, Any]:
    """What is not delivered when a checkpoint is saved, and once it is loaded beside other hot experts."""
    with engine_of(case, with_block=True, hybridep=with_codecs(case, *codecs)) as engine:
        train(engine, case, 0, 2)
        engine.save_checkpoint(folder)
        saved, hot = undelivered(engine), [one["hot_experts"] for one in ds_hybridep.stats(engine)["layers"]]
        train(engine, case, 2, 3)
        engine.backward(loss_of(engine, case, *batch_of(case, 5)))
        engine.step()
        engine.load_checkpoint(folder)
        loaded, now = undelivered(engine), [one["hot_experts"] for one in ds_hybridep.stats(engine)["layers"]]
        stranded = [
            len({(level, span) for level, span, _ in one.codecs.feedback.undelivered()} - sent_by(one))
            for one in replicas_of(engine)
        ]
        engine.backward(loss_of(engine, case, *batch_of(case, 2, 1)))
        engine.step()
        losses = train(engine, case, 3, 2)
        return {
            "saved": float(sum(one.abs().sum() for one in saved.values())),
            "apart": float(sum((one - loaded[name]).abs().sum() for name, one in saved.items())),
            "other hot experts": now != hot,
            "stranded": stranded,
            "trains on": all(loss == loss for loss in losses),
        }


def leave_no_trace(case: Case, codecs: Sequence[Any]) -> dict[str, bool]:
    """A step that is skipped, and one whose gradients are dropped, leave what is kept as it was; then detach."""
    with engine_of(case, with_block=True, hybridep=with_codecs(case, *codecs)) as engine:
        train(engine, case, 0, 3)
        before = undelivered(engine)
        first = backward(engine, case, 7)
        engine.zero_grad()
        dropped = undelivered(engine)
        skip(engine, case, 7)
        skipped = undelivered(engine)
        again = backward(engine, case, 7)
        engine.zero_grad()
        train(engine, case, 3, 3)
        found = {
            "has something": any(bool(one.any()) for one in before.values()),
            "dropped": all(torch.equal(before[name], one) for name, one in dropped.items()),
            "skipped": all(torch.equal(before[name], one) for name, one in skipped.items()),
            "again": all(map(torch.equal, first, again)),
        }
        ds_hybridep.detach(engine)
        return {**found, "goes on": all(loss == loss for loss in train(engine, case, 6, 1))}


def kept_over_time(case: Case, codecs: Sequence[Any], steps: int) -> list[tuple[int, int]]:
    """After each step, the pieces that codecs keep, and those of the present hot experts."""
    with engine_of(case, with_block=True, hybridep=with_codecs(case, *codecs)) as engine:
        found = []
        for step in range(steps):
            train(engine, case, step, 1)
            of_hot = 0
            for replicas in replicas_of(engine):
                of_hot += sum(len(replicas.slot_parts[slot]) for slot in replicas.hot_slots)
            found.append((len(residuals_of(engine)), of_hot))
        return found


# -- the tests --------------------------------------------------------------------------------------------------


LOW_RANK = {"type": "low_rank", "rank": 1}
LAW = [  # (domain sizes, codecs by level, options)
    slow((1, 1), ("identity", "int2"), {"zero_stage": 0, "accumulation": 2}),
    slow((1, 1), ("identity", LOW_RANK), {"zero_stage": 1}),
    slow((1, 1), ("int8", "int2"), {"zero_stage": 2, "accumulation": 2}),
    ((2, 1), ("int4", "int2"), {"zero_stage": 2, "accumulation": 2}),
    slow((2, 1), ("int4", "int2"), {"zero_stage": 2}),
    slow((2, 1), ("identity", "int2"), {"zero_stage": 0}),
    slow((1, 2), (LOW_RANK, "int4"), {"zero_stage": 0, "hot_level": 0}),
    slow((1, 2), ("int2", "int4"), {"zero_stage": 0, "hot_level": 0}),
    slow((1, 2), ("int2", "identity"), {"zero_stage": 1, "hot_level": 0}),
]


@pytest.mark.parametrize(("domain_sizes", "codecs", "options"), LAW, ids=str)
def test_sums_are_exact_while_the_hot_experts_change(
    pool4: ProcessPool, domain_sizes: tuple[int, ...], codecs: tuple[Any, ...], options: dict[str, Any]
) -> None:
    check_sums(pool4, hot4(*domain_sizes, **options), codecs)


@pytest.mark.slow  # test_hot_experts.py has such models
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_sums_are_exact_in_models_of_autoep(pool4: ProcessPool, zero_stage: int) -> None:
    toy = ToyConfig(drift=2, drop_tokens=False)
    check_sums(pool4, hot4(1, 1, toy=toy, family="mixtral", zero_stage=zero_stage), ("identity", "int2"))


def test_sums_are_exact_through_skipped_steps(pool2: ProcessPool) -> None:
    # Step 2 is the first with other routing, and after it the hot experts change: then what they left out waits.
    check_sums(pool2, hot2(zero_stage=0), ["int2"], skipped=(1, 2, 4))


@pytest.mark.slow  # what a load has to find, below, is what is not delivered
@pytest.mark.parametrize("steps", [6, 5])
def test_sums_are_exact_through_a_checkpoint(pool4: ProcessPool, tmp_path: Path, steps: int) -> None:
    check_sums(pool4, hot4(1, 1, zero_stage=1), ("identity", "int2"), steps=steps, folder=str(tmp_path / "at"))


def check_sums(pool: ProcessPool, case: Case, codecs: Sequence[Any], **options: Any) -> None:
    results = pool.run(lost, case=case, codecs=codecs, **{"steps": 5, **options})
    assert max(found["changes"] for found in results) > 1
    assert max(found["of a step"] for found in results) > 1e-2  # a codec is at work
    assert sum(found["num_waiting"][0] for found in results) == 0
    assert sum(found["num_waiting"][1] for found in results) > 0
    for found in results:
        assert found["of all"] < 1e-5, found


@pytest.mark.parametrize(
    ("before", "sizes", "options"),
    [
        slow(2, (1, 1), {"zero_stage": 0}),
        slow(3, (1, 1), {"zero_stage": 1, "dtype": "bf16"}),
        slow(3, (2, 1), {"zero_stage": 2}),
        slow(3, (1, 2), {"zero_stage": 1, "hot_level": 0}),
        slow(3, (1, 1), {"family": "mixtral", "zero_stage": 3, "toy": ToyConfig(drift=2, drop_tokens=False)}),
    ],
    ids=str,
)
def test_a_resumed_run_is_equal_in_every_bit(
    pool4: ProcessPool, tmp_path: Path, before: int, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    codecs = ("int4", "int2")
    results = pool4.run(resume, case=hot4(*sizes, **options), codecs=codecs, before=before, folder=str(tmp_path))
    # After two steps it waits for the next gradients of hot experts; after three, others are hot.
    assert any(found["has left out"][before == 2] for found in results)
    for found in results:
        assert found["losses"][0] == found["losses"][1] == found["losses"][2]
        assert found["different"] == []


def test_a_load_in_the_middle_of_an_accumulation_loses_nothing(pool2: ProcessPool, tmp_path: Path) -> None:
    case = hot2(zero_stage=1, accumulation=2)
    for found in pool2.run(go_back_in_the_middle, case=case, codecs=["int2"], folder=str(tmp_path)):
        assert found["saved"] > 0
        assert found["apart"] < 1e-5 * found["saved"]
        assert found["other hot experts"]
        assert found["stranded"] == [0, 0]
        assert found["trains on"]


@pytest.mark.slow  # sums through skipped steps would be wrong too
def test_a_skipped_step_leaves_no_trace(pool4: ProcessPool) -> None:
    for found in pool4.run(leave_no_trace, case=hot4(1, 1, zero_stage=0), codecs=("identity", "int2")):
        assert set(found.values()) == {True}, found


@pytest.mark.slow
def test_only_hot_experts_have_residuals(pool4: ProcessPool) -> None:
    results = pool4.run(kept_over_time, case=hot4(1, 1, zero_stage=1), codecs=("identity", "int4"), steps=5)
    assert any(of_hot for found in results for _, of_hot in found)
    for found in results:
        for kept, of_hot in found:
            assert kept <= of_hot
