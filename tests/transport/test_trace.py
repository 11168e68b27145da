# SPDX-License-Identifier: Apache-2.0
"""ds_hybridep.trace: a file that trace viewers read, with every transfer of experts at the time when it happened."""

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_refs import toy_engine, train_step
from parity import Case, levels_of
from process_pool import ProcessPool
from torch import distributed as dist
from toy_model import ToyConfig

import ds_hybridep

pytestmark = pytest.mark.dist

TOY = ToyConfig()
EXPERT_BYTES = 4 * (TOY.hidden * TOY.ffn + TOY.ffn + TOY.ffn * TOY.hidden + TOY.hidden)
BODY = "test::body"
NUM_STEPS = 2


def trace_steps(case: Case, folder: str, names: Sequence[str]) -> dict[str, Any]:
    """Profiles some steps for each file, with nothing under way when it begins and when it ends."""
    folder_of_rank = Path(folder) / f"rank{dist.get_rank()}"
    with toy_engine(case) as engine:
        train_step(engine, case, 0)
        for name in names:
            ds_hybridep.refresh(engine)
            with ds_hybridep.trace(engine, folder_of_rank / name):
                with torch.profiler.record_function(BODY):
                    for step in range(NUM_STEPS):
                        train_step(engine, case, step)
                    ds_hybridep.refresh(engine)
        return {"layers": [layer["name"] for layer in ds_hybridep.stats(engine)["layers"]]}


Traces = list[tuple[list[str], dict[str, Any]]]  # layer names and trace, of each rank for each of its files


def traces_of(
    pool: ProcessPool, case: Case, folder: Path, names: Sequence[str] = ("first.json", "second.json")
) -> Traces:
    results = pool.run(trace_steps, case=case, folder=str(folder), names=names)
    return [
        (result["layers"], json.loads((folder / f"rank{rank}" / name).read_text()))
        for name in names
        for rank, result in enumerate(results)
    ]


def transfers_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == "hybridep_transfer"]


def named(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("name") == name and event.get("ph") == "X"]


def case_of(*domain_sizes: int) -> Case:
    return Case(levels=levels_of((2, 2), domain_sizes), toy=TOY, dense_sync="deepspeed")


def case_of_two_ranks(domain_size: int) -> Case:
    return Case(levels=levels_of((2,), (domain_size,)), toy=replace(TOY, ep_size=2), dense_sync="deepspeed")


@pytest.fixture(scope="module")
def traces(pool2: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """A domain of two ranks."""
    return traces_of(pool2, case_of_two_ranks(2), tmp_path_factory.mktemp("traces"))


def test_every_transfer_of_every_layer_is_a_row_inside_the_window(traces: Traces) -> None:
    for layers, trace in traces:
        transfers = transfers_of(trace)
        found = [(event["args"]["kind"], event["args"]["layer"]) for event in transfers]
        for layer in layers:
            assert found.count(("expert_weights", layer)) == NUM_STEPS + 1  # and the refresh at the end
            assert found.count(("expert_gradients", layer)) == NUM_STEPS
        assert len(found) == 2 * (2 * NUM_STEPS + 1)
        # Four experts to the neighbour, four from there.
        assert {event["args"]["bytes"] for event in transfers} == {8 * EXPERT_BYTES}
        (body,) = named(trace, BODY)
        for event in transfers:
            assert event["dur"] >= 0
            assert body["ts"] <= event["ts"]
            assert event["ts"] + event["dur"] <= body["ts"] + body["dur"]


def test_gradients_start_inside_the_backward_of_their_layer(traces: Traces) -> None:
    """The two clocks are one axis: what starts a return is a range of the profiler, the return a row of ours."""
    for layers, trace in traces:
        starters = by_time(one for layer in layers for one in named(trace, f"hybridep::start_return::{layer}"))
        ends = {layer: iter(by_time(named(trace, f"hybridep::finish_return::{layer}"))) for layer in layers}
        returns = by_time(event for event in transfers_of(trace) if event["args"]["kind"] == "expert_gradients")
        assert len(returns) == NUM_STEPS * len(layers)
        left_ts = 0.0  # when the layer before was left
        for starter, event in zip(starters, returns, strict=True):
            layer = event["args"]["layer"]
            end = next(ends[layer])
            assert starter["name"].endswith(f"::{layer}")
            assert left_ts <= event["ts"] <= end["ts"] + end["dur"]
            left_ts = starter["ts"] + starter["dur"]


def by_time(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(events, key=lambda event: event["ts"])


@pytest.mark.slow
def test_rows_are_named_by_kind_and_level(pool4: ProcessPool, tmp_path: Path) -> None:
    for _, trace in traces_of(pool4, case_of(2, 2), tmp_path):
        assert {event["pid"] for event in transfers_of(trace)} == {"hybridep transfers"}
        rows = {event["tid"]: set() for event in transfers_of(trace)}
        assert sorted(rows) == [
            f"expert_{kind} over {level}" for kind in ("gradients", "weights") for level in ("dc", "gpu")
        ]
        for event in transfers_of(trace):
            rows[event["tid"]].add(event["args"]["bytes"])
            assert event["tid"].startswith(event["args"]["kind"])
        # Own experts over the slow level, with those that came from there over the fast one.
        assert rows == {name: {(4 if name.endswith("dc") else 8) * EXPERT_BYTES} for name in rows}


def test_ranges_of_the_way_of_a_token_are_named_by_layer(pool2: ProcessPool, tmp_path: Path) -> None:
    there_and_back = (
        "dispatch of rows",
        "combine of rows",
        "dispatch of output gradients",
        "return of input gradients",
    )
    for layers, trace in traces_of(pool2, case_of_two_ranks(1), tmp_path, ["first.json"]):
        for layer in layers:
            for name in ("experts", *there_and_back):
                assert len(named(trace, f"hybridep::{name}::{layer}")) == NUM_STEPS


@pytest.mark.slow
def test_plain_ep_has_a_trace_without_transfers(pool4: ProcessPool, tmp_path: Path) -> None:
    for layers, trace in traces_of(pool4, case_of(1, 1), tmp_path):
        assert transfers_of(trace) == []
        assert len(named(trace, f"hybridep::experts::{layers[0]}")) == NUM_STEPS


def trace_one_step_at_a_time(case: Case, folder: str, has_error: bool) -> list[bool]:
    """Each trace ends right behind a step, whose weights are still on their way."""
    found = []
    with toy_engine(case) as engine:
        train_step(engine, case, 0)
        for step in range(1, 6):
            path = Path(folder) / f"rank{dist.get_rank()}_step{step}.json"
            with contextlib.suppress(KeyError), ds_hybridep.trace(engine, path):
                train_step(engine, case, step)
                if has_error and step == 1:
                    raise KeyError("the user's")
            found.append(path.exists() and bool(transfers_of(json.loads(path.read_text()))))
    return found


@pytest.mark.slow
def test_a_trace_may_end_while_experts_travel(pool4: ProcessPool, tmp_path: Path) -> None:
    results = pool4.run(trace_one_step_at_a_time, case=case_of(2, 1), folder=str(tmp_path), has_error=False)
    assert results == [[True] * 5] * 4


@pytest.mark.slow
def test_an_error_inside_passes_and_the_next_trace_works(pool4: ProcessPool, tmp_path: Path) -> None:
    results = pool4.run(trace_one_step_at_a_time, case=case_of(2, 1), folder=str(tmp_path), has_error=True)
    assert [result[1:] for result in results] == [[True] * 4] * 4
