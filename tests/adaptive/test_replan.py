# SPDX-License-Identifier: Apache-2.0
"""Other plans while a job runs: losses stay DeepSpeed's, residuals reach the owners, ranks choose the same."""

import json
import math
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from marks import slow
from parity import Case, levels_of, merged
from process_pool import Pools, ProcessPool
from toy_model import ToyConfig
from training import (
    Engine,
    batch_of,
    block_of,
    block_with,
    close_to,
    engine_of,
    error_of,
    evaluate,
    moe_layers,
    replicas_of,
    runtime_of,
    train,
    world4,
)

import ds_hybridep
from ds_hybridep.adaptive import meter
from ds_hybridep.adaptive.chooser import Look
from ds_hybridep.errors import HybridEPError
from ds_hybridep.plan.plan import JobPlan

pytestmark = pytest.mark.dist

SIZES = ((1, 1), (2, 1))
COARSE = {"type": "int2", "block": 256}
LOSSY = [(COARSE, COARSE), ("identity", "identity")]


def world2(domain_size: int, **options: Any) -> Case:
    return Case(levels=levels_of((2,), (domain_size,)), toy=ToyConfig(ep_size=2, num_experts=4), **options)


def label_of(domain_sizes: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, domain_sizes))}]"


def attachment_of(engine: Engine) -> Any:
    return engine.__dict__["_hybridep_attachment"]


# -- in the workers ---------------------------------------------------------------------------------------------


def plain_losses(case: Case, num_steps: int) -> list[float]:
    with engine_of(case, with_block=False) as engine:
        return train(engine, case, 0, num_steps)


def losses_over(case: Case, blocks: list[dict[str, Any]], steps: int) -> tuple[list[float], list[float], Any]:
    """Losses of `steps` optimizer steps under each block in turn, an evaluation after each, and the meter."""
    losses, evaluations = [], []
    with engine_of(case, with_block=True, hybridep=blocks[0]) as engine:
        for index, block in enumerate(blocks):
            if index:
                ds_hybridep.replan(engine, block_of(case, **block))
            losses += train(engine, case, index * steps, steps)
            evaluations.append(evaluate(engine.module, case))
        return losses, evaluations, ds_hybridep.stats(engine)


def block_of_sizes(case: Case, domain_sizes: tuple[int, ...], **settings: Any) -> dict[str, Any]:
    levels = case.ds_config(with_block=True)["hybridep"]["levels"]
    sized = [{**level, "domain_size": size} for level, size in zip(levels, domain_sizes, strict=True)]
    return merged({"levels": sized, "advanced": {"verify_interval": 1}}, settings)


def kept_back(engine: Engine) -> dict[str, torch.Tensor]:
    """By layer, what this rank's senders have not delivered, [M, numbers]."""
    result = {}
    for replicas in replicas_of(engine):
        total = torch.zeros(len(replicas.domain_ranks), sum(part.rows * part.cols for part in replicas.parts) * 2)
        gradients, sizes = replicas.codecs.feedback, [part.fp32_bytes // 4 for part in replicas.parts]
        starts = {part.spans[0]: slot for slot, parts in replicas.slot_parts.items() for part in parts}
        for _, span, residual in gradients.undelivered():
            place = total[starts[span]].split(sizes)[replicas.trainable_names.index(span.name.split()[1])]
            place += residual.view(-1)
        result[replicas.name] = total
    return result


def residuals_before_and_after(case: Case, block: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each layer what all ranks had kept back of this rank's experts, and what it has to add after a change."""
    with engine_of(case, with_block=True, hybridep=block_with(case, LOSSY)) as engine:
        train(engine, case, 0, 2)
        before = kept_back(engine)
        owed = {}
        for replicas in replicas_of(engine):
            name = replicas.name
            everywhere = [torch.empty_like(before[name]) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, before[name])
            names = replicas.trainable_names
            owed[name] = sum(everywhere[rank][replicas.own_slot] for rank in replicas.domain_ranks)
        ds_hybridep.replan(engine, block_of(case, **block))
        attachment = attachment_of(engine)
        waiting = attachment.runtime.codec_state.waiting
        taken = {(one.name, one.start): one.values * dist.get_world_size() for one in waiting.records()}
        pairs = [
            (owed[name], torch.cat([taken[one] for n in names for one in sorted(taken) if one[0] == f"{name} {n}"]))
            for name in owed
        ]
        train(engine, case, 2, 1)
        assert not waiting.records()
        return pairs


def gradients_of_nothing(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(carried, change of the parameter) of each expert parameter in a step whose own gradients are zero."""
    with engine_of(case, with_block=True, hybridep=block_with(case, LOSSY[:1])) as engine:
        train(engine, case, 0, 3)
        ds_hybridep.replan(engine, block_of(case, **block_of_sizes(case, (1,))))
        attachment = attachment_of(engine)
        waiting = attachment.runtime.codec_state.waiting
        carried = {(one.name, one.start): one.values.clone() for one in waiting.records() if " " in one.name}
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        loss = engine(*batch_of(case, 99)) * 0.0
        engine.backward(loss)
        engine.step()
        after = dict(engine.module.named_parameters())
        return [
            (carried[place].view_as(after[name]), after[name].detach() - before[name])
            for name, place in waiting.places().items()
            if place in carried
        ]


def planned_run(case: Case, wanted: list[tuple[int, ...]], steps: int) -> tuple[list[float], dict[str, Any], bool]:
    """Losses and record of a run whose planner is told, look by look, which domain sizes are best; is it settled?"""
    block = planned_block(case, advanced={"verify_interval": 1}, token_exchange="direct")
    with engine_of(case, with_block=True, hybridep=block) as engine:
        planner = attachment_of(engine).planner
        looks = iter(wanted)

        def look(current: JobPlan, _: Look) -> tuple[JobPlan, bool]:
            sizes = next(looks)
            best = next(plan for plan in planner._chooser.plans if plan.domain_sizes == sizes)
            return best, best == current

        planner._chooser.look = look
        losses = train(engine, case, 0, steps)
        return losses, ds_hybridep.stats(engine)["planning"], planner.is_settled


def looks_at(planner: Any) -> list[int]:
    """Let every look find that the plan stays; the steps of these looks are added to the list."""
    steps: list[int] = []

    def look(current: JobPlan, about: Look) -> tuple[JobPlan, bool]:
        steps.append(about.step)
        return current, True

    planner._chooser.look = look
    return steps


def looks_of(case: Case, steps: int, **settings: Any) -> tuple[list[int], int, bool]:
    """Steps at which the plan is looked at; every look finds that it stays.  With a change of steps under way."""
    with engine_of(case, with_block=True, hybridep=planned_block(case, **settings)) as engine:
        planner = attachment_of(engine).planner
        found = looks_at(planner)
        note, planner._watch.note = planner._watch.note, lambda _: note(1.0 if planner._num_steps <= 12 else 5.0)
        train(engine, case, 0, steps)
        return found, planner._num_steps, planner._watch.mode == "off"


def choose_again(case: Case) -> list[tuple[bool, bool]]:
    """(settled, a look was made) of a plan that is held, and of one that is chosen anew."""
    with engine_of(case, with_block=True, hybridep=planned_block(case)) as engine:
        attachment, found = attachment_of(engine), []
        planner = attachment.planner
        looks = looks_at(planner)
        planner.hold()
        for _ in range(2):
            train(engine, case, 0, 6)
            found.append((planner.is_settled, bool(looks)))
            planner.choose_anew(attachment.runtime)
        return found


def load_what_rank_0_cannot_read(case: Case, folder: str) -> tuple[str, str]:
    """The error of a planned job's load where a file that only rank 0 reads is broken."""
    block = planned_block(case, timeout_s=100)
    with engine_of(case, with_block=True, hybridep=block) as engine:
        train(engine, case, 0, 1)
        engine.save_checkpoint(folder, tag="broken")
        dist.barrier()
        if dist.get_rank() == 0:
            next(Path(folder, "broken").glob("layer_0_expert_0_*")).write_bytes(b"no checkpoint")
        dist.barrier()
        try:
            engine.load_checkpoint(folder, tag="broken")
        except (HybridEPError, UnpicklingError) as error:
            return type(error).__name__, str(error)
        return "", ""


def measured_links(case: Case) -> tuple[list[dict[str, Any]], int]:
    """Links of a planned job that is told none, and the bytes that its start has sent over the slow level."""
    from ds_hybridep.adaptive import probe

    levels = [{"name": "dc", "size": 2, "domain_size": "auto"}]
    short = mock.patch.object(probe, "LONG_ENOUGH_S", 0.01)
    with short, engine_of(case, with_block=True, hybridep={"levels": levels}) as engine:
        dist.barrier()  # nobody leaves while others still connect
        sent_bytes = attachment_of(engine).planner._transport.traffic.sent_bytes.get((0, "control"), 0)
        return ds_hybridep.stats(engine)["planning"]["links"], sent_bytes


def planned_block(case: Case, **settings: Any) -> dict[str, Any]:
    levels = [{**level, "domain_size": "auto"} for level in case.ds_config(with_block=True)["hybridep"]["levels"]]
    return {"levels": levels, **settings}


def plan_after_load(case: Case, folder: str) -> tuple[JobPlan, JobPlan, list[float], list[float]]:
    """Plan at the save and after the load, and losses after both."""
    with engine_of(case, with_block=True, hybridep=planned_block(case)) as engine:
        train(engine, case, 0, 2)
        ds_hybridep.replan(engine, block_of(case, **block_of_sizes(case, (2,))))
        saved = attachment_of(engine).planner.current
        engine.save_checkpoint(folder, tag="two")
        losses = train(engine, case, 2, 2)
    with engine_of(case, with_block=True, hybridep=planned_block(case)) as engine:
        engine.load_checkpoint(folder, tag="two")
        return saved, attachment_of(engine).planner.current, losses, train(engine, case, 2, 2)


def movement_of_nothing(engine: Engine, case: Case) -> float:
    """How far parameters move in an optimizer step over losses of zero."""
    before = [p.detach().clone() for p in engine.module.parameters()]
    for _ in range(case.accumulation):
        engine.backward(engine(*batch_of(case, 99)) * 0.0)
        engine.step()
    return sum(float((p - b).norm()) for p, b in zip(engine.module.parameters(), before, strict=True))


def load_into_a_lossy_plan(case: Case, folder: str) -> tuple[JobPlan, float, float]:
    """A plan that kept gradients back is left for that of a checkpoint, in the middle of an accumulation.

    Returns the plan then, the norm of what was kept back before, and how far a step of nothing moves parameters.
    """
    block = planned_block(case)
    block["levels"][0].update(gradient_codec=COARSE, dense_gradient_codec="identity")
    with engine_of(case, with_block=True, hybridep=block) as engine:
        train(engine, case, 0, 1)
        engine.save_checkpoint(folder, tag="plain")
        ds_hybridep.replan(engine, block_of(case, **block_with(case, [("identity", COARSE)])))
        train(engine, case, 1, 2)
        engine.backward(engine(*batch_of(case, 3)))
        engine.step()
        kept = runtime_of(engine).undelivered_norm
        engine.load_checkpoint(folder, tag="plain")
        engine.zero_grad()
        return attachment_of(engine).planner.current, kept, movement_of_nothing(engine, case)


def carried_norm(engine: Engine) -> float:
    """L2 norm of what waits at parameters without replicas."""
    records = attachment_of(engine).runtime.codec_state.waiting.records()
    return sum(float(one.values.square().sum()) for one in records) ** 0.5


def expert_gradient_norm(module: torch.nn.Module) -> float:
    gradients = [p.grad for layer in moe_layers(module) for p in layer.experts.parameters() if p.grad is not None]
    return sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5


def carry_over_two_backwards(case: Case) -> list[float]:
    """Norms of what is carried, of experts' gradients after backwards of nothing, and of what is left."""
    block = block_with(case, [("identity", COARSE)])
    settings = {"hybridep": block, "managed_gradient_accumulation": False}
    with engine_of(case, with_block=True, **settings) as engine:
        train(engine, case, 0, 3)
        ds_hybridep.replan(engine, block_of(case, **block_of_sizes(case, (1,))))
        found = [carried_norm(engine)]
        for _ in range(2):
            engine.backward(engine(*batch_of(case, 9)) * 0.0)
            found.append(expert_gradient_norm(engine.module))
        engine.zero_grad()
        engine.backward(engine(*batch_of(case, 9)) * 0.0)
        found.append(expert_gradient_norm(engine.module))
        engine.step()
        return [*found, carried_norm(engine)]


def replan_before_the_step(case: Case) -> tuple[float, float, float]:
    """What is carried when the plan changes after the backward, after that step, and after the next."""
    with engine_of(case, with_block=True, hybridep=block_with(case, [("identity", COARSE)])) as engine:
        train(engine, case, 0, 3)
        engine.backward(engine(*batch_of(case, 3)))
        ds_hybridep.replan(engine, block_of(case, **block_of_sizes(case, (1,))))
        found = [carried_norm(engine)]
        engine.step()
        found.append(carried_norm(engine))
        train(engine, case, 4, 1)
        return found[0], found[1], carried_norm(engine)


def save_what_is_carried(case: Case, folder: str, domain_size: int) -> tuple[float, float, float]:
    """Movement of a step of nothing after a lossy plan was left, and after loading a checkpoint saved in between."""
    with engine_of(case, with_block=True, hybridep=block_with(case, [("identity", COARSE)])) as engine:
        train(engine, case, 0, 3)
        ds_hybridep.replan(engine, block_of(case, **block_of_sizes(case, (domain_size,))))
        engine.save_checkpoint(folder, tag="between")
        moved = movement_of_nothing(engine, case)
        without = movement_of_nothing(engine, case)
        engine.load_checkpoint(folder, tag="between")
        return moved, without, movement_of_nothing(engine, case)


def errors_of_replan(case: Case) -> tuple[list[tuple[str, str]], float, float]:
    """Errors of changes that are refused, and what senders have kept back before and after them."""
    with engine_of(case, with_block=True, hybridep=block_with(case, [("identity", COARSE)])) as engine:
        train(engine, case, 0, 3)
        before = runtime_of(engine).undelivered_norm
        wrong = block_with(case, [("identity", {"type": "top_k", "k": 99999, "block": 256})])
        errors = [
            error_of(ds_hybridep.replan, engine, block_of(case, **block))
            for block in (
                planned_block(case),
                {"levels": [{"name": "all", "size": 1}, {"name": "gpu", "size": 2}]},
                wrong,
            )
        ]
        return errors, before, runtime_of(engine).undelivered_norm


def wrap_and_replan(case: Case, folder: str) -> tuple[bool, int, list[bool]]:
    """Whether a user's wrapper survives a change of plan, calls of it, and what is left of ours after detach."""
    with engine_of(case, with_block=True) as engine:
        inner, calls = engine.save_checkpoint, []

        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return inner(*args, **kwargs)

        engine.save_checkpoint = save_checkpoint
        earlier = replicas_of(engine)[0]
        ds_hybridep.replan(engine, block_of(case, **block_of_sizes(case, (1,))))
        freed = earlier.weights == [] and earlier.num_bytes == 0
        train(engine, case, 0, 1)
        engine.save_checkpoint(folder, tag="wrapped")
        ds_hybridep.detach(engine)
        kept = engine.__dict__.get("save_checkpoint") is save_checkpoint
        engine.save_checkpoint(folder, tag="detached")
        left = [name in engine.__dict__ for name in ("load_checkpoint", "zero_grad", "_take_model_step")]
        return kept and freed, len(calls), left


def record_by_hand(case: Case, folder: str) -> tuple[Any, str, list[float], str]:
    """Of settings that the planned ones do not leave open: plan and change as recorded; then loading, at the start."""
    with engine_of(case, with_block=True, hybridep=planned_block(case)) as engine:
        train(engine, case, 0, 1)
        ds_hybridep.replan(engine, block_of(case, **block_with(case, LOSSY[:1])))
        engine.save_checkpoint(folder, tag="by hand")
        record = ds_hybridep.stats(engine)["planning"]
        for text in ('{"plan": ', '{"plan": "[1] tokens direct"}'):  # broken; of a version that wrote labels only
            dist.barrier()
            (Path(folder) / "by hand" / "hybridep_plan.json").write_text(text)  # both write the same
            dist.barrier()
            engine.load_checkpoint(folder, tag="by hand")
        sizes = [level.domain_size for level in attachment_of(engine).runtime.config.levels]
        return record["plan"], record["history"][-1]["to"], sizes, attachment_of(engine).planner.history[-1]["to"]


def plan_without_work(case: Case, *, is_frozen: bool) -> tuple[int, int]:
    """Open plans with codecs, and changes after seven steps: with frozen experts, or trained as an evaluation."""
    block = planned_block(case, auto_codecs=["int8"])
    block["levels"][0].update(weight_codec="auto", gradient_codec="auto")
    with engine_of(case, with_block=False) as engine:
        if is_frozen:
            for layer in moe_layers(engine.module):
                layer.experts.requires_grad_(False)
        else:
            engine.eval()
        ds_hybridep.attach(engine, block_of(case, **block))
        planner = attachment_of(engine).planner
        train(engine, case, 0, 7)
        return sum(plan.encodes_experts for plan in planner._chooser.plans), len(planner.history)


def plans_that_fit(case: Case) -> list[tuple[float, list[int]]]:
    """Look by look, the memory left, which ranks differ in, and the largest domains for just enough and a bit less."""
    memory = mock.patch.object(meter, "memory_left", return_value=(1e6 * (7 - dist.get_rank()), 1000.0))
    with memory, engine_of(case, with_block=True, hybridep=planned_block(case)) as engine:
        planner, found = attachment_of(engine).planner, []

        def look(current: JobPlan, about: Look) -> tuple[JobPlan, bool]:
            free_bytes, plans, sizes = planner._meter.memory[0], planner._chooser.plans, []
            needed_bytes = 1000.0 + max(about.job.memory(plan).replica_bytes for plan in plans)
            for extra in (1, -1):
                planner._meter.memory = (needed_bytes / meter.ROOM_SHARE + extra, 1000.0)
                sizes.append(max(max(plan.domain_sizes) for plan in plans if about.fits(plan)))
            found.append((free_bytes, sizes))
            return current, True

        planner._chooser.look = look
        train(engine, case, 0, 6)
        return found


# -- tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero_stage", "accumulation"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)])
def test_losses_are_deepspeeds_over_changes_of_plan(pool4: ProcessPool, zero_stage: int, accumulation: int):
    case = world4(1, 1, zero_stage=zero_stage, accumulation=accumulation)
    blocks = [block_of_sizes(case, sizes) for sizes in SIZES]
    blocks.append(block_of_sizes(case, (1, 1), token_exchange="deepspeed", dense_sync="hierarchical"))
    blocks.append(block_of_sizes(case, (2, 2), advanced={"prefetch_depth": 0}))
    plain = pool4.run(plain_losses, case=case, num_steps=2 * len(blocks))
    hybrid = pool4.run(losses_over, case=case, blocks=blocks, steps=2)
    for rank in range(4):
        losses, _, stats = hybrid[rank]
        assert losses == close_to(plain[rank])
        assert stats["steps"] == 2 * len(blocks)  # counting goes on
        assert stats["levels"][0]["sent_bytes"]["tokens"] > 0
        assert stats["levels"][0]["sent_bytes"]["expert_weights"] > 0


@pytest.mark.parametrize("sizes", [slow((1, 1)), (2, 2)])
def test_what_codecs_had_kept_back_goes_to_the_owners(pool4: ProcessPool, sizes: tuple[int, int]):
    case = world4(2, 1)
    block = block_of_sizes(case, sizes)
    for rank, pairs in enumerate(pool4.run(residuals_before_and_after, case=case, block=block)):
        assert len(pairs) == case.toy.num_layers
        for owed, taken in pairs:
            assert owed.norm() > 0, f"rank {rank} kept nothing back, so nothing is tested"
            torch.testing.assert_close(taken, owed, rtol=1e-6, atol=1e-7)


def test_what_has_no_place_in_the_next_plan_is_added_to_the_next_gradients(pool2: ProcessPool):
    case = world2(2, optimizer="sgd")
    for pairs in pool2.run(gradients_of_nothing, case=case):
        carried, change = (torch.cat([pair[i].reshape(-1) for pair in pairs]) for i in (0, 1))
        assert change.norm() > 0
        # SGD moves every parameter by the learning rate times its gradient, which DeepSpeed may have averaged.
        factor = -(change @ carried) / (carried @ carried)
        torch.testing.assert_close(change, -factor * carried, rtol=1e-4, atol=1e-7)
        assert factor > 0


@pytest.mark.parametrize(("first", "second"), [((1,), (2,)), slow((1, 1), (2, 1))])
def test_a_planned_job_changes_its_plan_and_keeps_its_losses(
    pool_of: Pools, first: tuple[int, ...], second: tuple[int, ...]
):
    case = world2(*first, zero_stage=1) if len(first) == 1 else world4(*first, zero_stage=1)
    pool, wanted = pool_of(case.world_size), [second, first, first]
    plain = pool.run(plain_losses, case=case, num_steps=16)
    results = pool.run(planned_run, case=case, wanted=wanted, steps=16)
    for rank, (losses, record, is_settled) in enumerate(results):
        assert losses == close_to(plain[rank])
        # Three steps of each plan are measured, without the first ones, and the next step brings the look.
        changes = [(entry["step"], entry["to"].split(" ")[0]) for entry in record["history"]]
        assert changes == [(6, label_of(second)), (11, label_of(first))]
        assert is_settled
        assert record["plan"].startswith(label_of(first))
        assert record["measured_step_s"] > 0
        assert record["workload"]["micro_steps"] == 1
        assert record["links"][0]["bandwidth_gbps"] > 0


@pytest.mark.slow
def test_a_settled_plan_is_looked_at_when_steps_change(pool2: ProcessPool):
    case = world2(1)
    # The first look after five steps; the thirteenth step is longer.
    assert pool2.run(looks_of, case=case, steps=16)[0] == ([6, 14], 16, False)
    assert pool2.run(looks_of, case=case, steps=16, advanced={"replan": False})[0] == ([6], 16, True)


def test_a_plan_is_held_until_it_is_chosen_anew(pool2: ProcessPool):
    assert pool2.run(choose_again, case=world2(1))[0] == [(True, False), (True, True)]


def test_a_load_that_fails_on_one_rank_leaves_nobody_waiting_for_the_plan(pool2: ProcessPool, tmp_path):
    errors = pool2.run(load_what_rank_0_cannot_read, case=world2(1), folder=str(tmp_path))
    assert errors[0][0] not in ("", "AgreementError")
    assert errors[1][0] == "AgreementError"
    assert f"rank 0 cannot start: {errors[0][0]}" in errors[1][1]


def test_links_that_are_not_given_are_measured(pool2: ProcessPool):
    found = pool2.run(measured_links, case=world2(1))
    assert all(links == found[0][0] for links, _ in found)
    assert all(link["bandwidth_gbps"] > 0 and link["latency_ms"] >= 0 for link in found[0][0])
    assert all(sent_bytes > 0 for _, sent_bytes in found)


def test_a_planned_job_goes_on_with_the_plan_of_its_checkpoint(pool2: ProcessPool, tmp_path):
    results = pool2.run(plan_after_load, case=world2(1, zero_stage=1), folder=str(tmp_path))
    for saved, loaded, losses, again in results:
        assert saved == loaded
        assert saved.domain_sizes == (2,)
        assert again == close_to(losses)
    record = json.loads((tmp_path / "two" / "hybridep_plan.json").read_text())
    assert record["decisions"] == results[0][0].to_json()
    assert record["history"][-1]["reason"] == "by hand"


def test_a_load_brings_no_gradients_of_before(pool2: ProcessPool, tmp_path):
    case = world2(2, optimizer="sgd", accumulation=2)
    for plan, kept, movement in pool2.run(load_into_a_lossy_plan, case=case, folder=str(tmp_path)):
        assert plan.domain_sizes == (1,)
        assert kept > 0
        assert movement == 0


def test_what_is_carried_is_added_once_and_kept_until_a_step_used_it(pool2: ProcessPool):
    case = world2(2, optimizer="sgd")
    for carried, once, twice, again, rest in pool2.run(carry_over_two_backwards, case=case):
        assert carried > 0
        assert once == twice == again > 0  # and again after zero_grad
        assert rest == 0
    for carried, after_step, after_next in pool2.run(replan_before_the_step, case=case):
        assert after_step == carried > 0  # that step had its gradients already
        assert after_next == 0


@pytest.mark.parametrize("domain_size", [slow(1), 2])
def test_a_checkpoint_holds_what_is_carried(pool2: ProcessPool, tmp_path, domain_size: int):
    case = world2(2, optimizer="sgd")
    for moved, without, again in pool2.run(
        save_what_is_carried, case=case, folder=str(tmp_path), domain_size=domain_size
    ):
        assert moved > 0
        assert without == 0
        assert again == pytest.approx(moved, rel=1e-5)


def test_a_plan_that_is_refused_changes_nothing(pool2: ProcessPool):
    for errors, before, after in pool2.run(errors_of_replan, case=world2(2)):
        assert [kind for kind, _ in errors] == ["ConfigError"] * 3
        assert 'without "auto"' in errors[0][1]
        assert "same levels as before" in errors[1][1]
        assert after == before > 0


def test_wrappers_of_the_user_survive_a_change_of_plan(pool2: ProcessPool, tmp_path):
    for survives, num_calls, left in pool2.run(wrap_and_replan, case=world2(2), folder=str(tmp_path)):
        assert survives
        assert num_calls == 2
        assert not any(left)


def test_settings_by_hand_are_no_plan_and_a_broken_plan_file_is_left_alone(pool2: ProcessPool, tmp_path):
    for plan, change, sizes, last in pool2.run(record_by_hand, case=world2(2), folder=str(tmp_path)):
        assert plan is None
        assert change == last == "settings given by hand"
        assert sizes == [2]


def test_frozen_experts_have_nothing_lossy_and_evaluations_are_not_planned(pool2: ProcessPool):
    assert [lossy for lossy, _ in pool2.run(plan_without_work, case=world2(1), is_frozen=True)] == [0, 0]
    for lossy, num_changes in pool2.run(plan_without_work, case=world2(1), is_frozen=False):
        assert lossy > 0
        assert num_changes == 0


def test_plans_have_the_memory_that_is_free(pool2: ProcessPool):
    found = pool2.run(plans_that_fit, case=world2(1))[0]  # rank 0 chooses
    assert found
    assert all(one == (6e6, [2, 1]) for one in found)


def test_memory_left_is_read_from_the_host_and_the_container(tmp_path):
    free_bytes, working_bytes = meter.memory_left(torch.device("cpu"), 1)
    assert 0 < meter.memory_left(torch.device("cpu"), 4)[0] < free_bytes / 3
    assert working_bytes >= 0
    assert meter._left_in_container(tmp_path) == math.inf
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 50\n")
    for limit, left in (("1000\n", 350.0), ("max\n", math.inf)):
        (tmp_path / "memory.max").write_text(limit)
        assert meter._left_in_container(tmp_path) == left
