# SPDX-License-Identifier: Apache-2.0
"""One rank fails where others would wait for it: all hear of it at once, and what was there before goes on."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from deepspeed import comm as dist
from parity import Case, levels_of
from process_pool import ProcessPool
from training import COARSE, NOTHING_OWED, block_of, block_with, close_to, engine_of, error_of, owed, train, world2

import ds_hybridep
from ds_hybridep.adaptive import planner
from ds_hybridep.adaptive.planner import JobPlanner
from ds_hybridep.adaptive.probe import LinkProbe
from ds_hybridep.runtime import runtime as owner
from ds_hybridep.transport import agreement
from ds_hybridep.transport.channels import Transport

pytestmark = pytest.mark.dist


# -- in the workers ---------------------------------------------------------------------------------------------


def short_of_memory() -> Any:
    """Runtimes do not fit into the memory of rank 1."""
    make = owner.HybridRuntime

    def fail(*args: Any, **kwargs: Any) -> Any:
        make(*args, **kwargs).close()  # connections are made before there is need for memory
        raise MemoryError("no room for replicas")

    return mock.patch.object(owner, "HybridRuntime", fail) if dist.get_rank() == 1 else nullcontext()


def attach_where_memory_is_short(case: Case) -> dict[str, Any]:
    with engine_of(case, with_block=False) as engine:
        with short_of_memory():
            found: dict[str, Any] = {"error": error_of(ds_hybridep.attach, engine, block_of(case))}
        found["left"] = [name for name in vars(engine) if name in ("_hybridep_attachment", "_take_model_step")]
        found["again"] = error_of(ds_hybridep.attach, engine, block_of(case))
        return {**found, "losses": train(engine, case, 0, 2)}


def plan_where_memory_is_short(case: Case) -> tuple[tuple[str, str], int]:
    """The error of an attach that plans, and how often its planner was closed."""
    block = block_of(case)
    block["levels"] = [{**level, "domain_size": "auto"} for level in block["levels"]]
    with engine_of(case, with_block=False) as engine:
        with (
            short_of_memory(),
            mock.patch.object(JobPlanner, "close", autospec=True, side_effect=JobPlanner.close) as closing,
        ):
            return error_of(ds_hybridep.attach, engine, block), closing.call_count


def plan_where_measuring_fails(case: Case, what: str) -> tuple[tuple[str, str], int]:
    """The error of an attach that plans where `what` fails on rank 1, and how many transports were closed."""
    block = block_of(case)
    block["levels"] = [{"name": "dc", "size": 2, "domain_size": "auto"}]
    owner, name = {"links": (LinkProbe, "latency_s"), "experts": (planner, "measure_experts")}[what]
    fails = mock.patch.object(owner, name, side_effect=MemoryError("no room to measure"))
    with engine_of(case, with_block=False) as engine:
        with (
            fails if dist.get_rank() == 1 else nullcontext(),
            mock.patch.object(Transport, "close", autospec=True, side_effect=Transport.close) as closing,
        ):
            return error_of(ds_hybridep.attach, engine, block), len({id(call.args[0]) for call in closing.mock_calls})


def replan_where_memory_is_short(case: Case) -> dict[str, Any]:
    """A change of plan that fails after two steps, and losses with it and without it."""
    block, found = block_with(case, [("identity", COARSE)]), {}
    for name in ("untouched", "failed"):
        with engine_of(case, with_block=True, hybridep=block) as engine:
            losses = train(engine, case, 0, 2)
            if name == "failed":
                attachment = engine.__dict__["_hybridep_attachment"]
                kept, before = attachment.runtime, owed(engine)
                with short_of_memory():
                    found["error"] = error_of(
                        ds_hybridep.replan, engine, block_of(case, advanced={"prefetch_depth": 1})
                    )
                found["same runtime"] = attachment.runtime is kept
                found["residuals"] = owed(engine) == before != NOTHING_OWED
            found[name] = losses + train(engine, case, 2, 2)
            if name == "failed":
                found["again"] = error_of(ds_hybridep.replan, engine, block_of(case, advanced={"prefetch_depth": 1}))
    return found


def load_badly_on_rank_1(case: Case, folder: str) -> dict[str, Any]:
    """Errors of a load that fails on rank 1 and is caught, of the same load then, and of a change of plan."""

    def load(src: Any, dst: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")

    def load_and_catch() -> None:
        try:
            engine.load_checkpoint(folder, custom_load_fn=load)
        except OSError:
            caught.append("OSError")

    caught: list[str] = []
    with engine_of(case, with_block=True, hybridep={"timeout_s": 60}) as engine:
        train(engine, case, 0, 1)
        engine.save_checkpoint(folder)
        found: dict[str, Any] = {"failed": error_of(load_and_catch), "caught": caught}
        found["loaded"] = error_of(engine.load_checkpoint, folder)
        found["replanned"] = error_of(ds_hybridep.replan, engine, block_of(case, advanced={"prefetch_depth": 1}))
        return {**found, "losses": train(engine, case, 1, 1)}


# -- the tests --------------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_build_its_runtime_stops_the_others_at_once(pool2: ProcessPool) -> None:
    for found in pool2.run(attach_where_memory_is_short, case=world2()):
        kind, message = found["error"]
        assert kind == "AgreementError"
        assert "rank 1 cannot start: MemoryError: no room for replicas" in message
        assert found["left"] == []
        assert found["again"] == ("", "")


def test_the_planner_of_an_attach_that_fails_drops_its_connections(pool2: ProcessPool) -> None:
    for (kind, message), num_closed in pool2.run(plan_where_memory_is_short, case=world2()):
        assert kind == "AgreementError"
        assert "rank 1 cannot start: MemoryError: no room for replicas" in message
        assert num_closed == 1


@pytest.mark.parametrize("what", ["links", "experts"])
def test_a_rank_that_fails_while_a_planner_measures_stops_the_others_at_once(pool2: ProcessPool, what: str) -> None:
    for (kind, message), num_closed in pool2.run(plan_where_measuring_fails, case=world2(), what=what):
        assert kind == "AgreementError"
        assert "rank 1 cannot start: MemoryError: no room to measure" in message
        assert num_closed == 1


def test_what_was_made_is_given_up_where_the_store_fails_afterwards() -> None:
    give_up = mock.Mock()
    with mock.patch.object(agreement, "agree", side_effect=ConnectionError), pytest.raises(ConnectionError):
        with agreement.together(1.0, give_up):
            pass
    give_up.assert_called()


def test_a_change_of_plan_that_fails_on_one_rank_loses_nothing(pool2: ProcessPool) -> None:
    for found in pool2.run(replan_where_memory_is_short, case=world2()):
        kind, message = found["error"]
        assert kind == "AgreementError"
        assert "rank 1 cannot start: MemoryError: no room for replicas" in message
        assert found["same runtime"]
        assert found["residuals"]
        assert found["failed"] == found["untouched"]  # bit for bit
        assert found["again"] == ("", "")


@pytest.mark.parametrize("domain_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_start_ups_stay_in_step_after_a_load_that_failed_on_one_rank(
    pool2: ProcessPool, tmp_path: Path, domain_size: int
) -> None:
    case = Case(levels=levels_of((2,), (domain_size,)), toy=world2().toy, kernels="reference")
    first, second = pool2.run(load_badly_on_rank_1, case=case, folder=str(tmp_path))
    assert first["failed"][0] == "AgreementError"
    assert "rank 1 cannot start: OSError: the disk is gone" in first["failed"][1]
    assert (second["failed"], second["caught"]) == (("", ""), ["OSError"])
    for found in (first, second):
        assert found["loaded"] == found["replanned"] == ("", "")
        assert found["losses"] == close_to(found["losses"])
