# SPDX-License-Identifier: Apache-2.0
"""The program of a step, spelt out for classes of ranks: no repetitions, seconds by class, flows of messages."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ds_hybridep.plan.program import KINDS, Instruction, Kind, Message, Program, Repeat
from ds_hybridep.plan.program import Post as PlannedPost
from ds_hybridep.plan.program import Run as PlannedRun
from ds_hybridep.plan.program import Wait as PlannedWait
from ds_hybridep.simulate import events
from ds_hybridep.simulate.events import Operation, Post, Run, Wait
from ds_hybridep.simulate.flows import Floats
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.traffic import TrafficMaker


@dataclass(frozen=True)
class Schedule:
    """What the engine runs, and the bytes that all ranks together send, by level and kind."""

    program: list[events.Instruction]
    operations: list[Operation]
    sent_bytes: tuple[dict[Kind, float], ...]


def schedule_of(
    program: Program, scenario: Scenario, rows: Floats, slowdowns: Floats, maker: TrafficMaker
) -> Schedule:
    """Spell out a program.

    rows: [num_classes] rows that come to a rank of each class over those that even routing brings.
    slowdowns: [num_classes] factors on seconds.
    """
    schedule = Schedule([], [], tuple(dict.fromkeys(KINDS, 0.0) for _ in scenario.cluster.sizes))
    posted: dict[tuple[Message, int | None], range] = {}
    random = np.random.default_rng(scenario.seed)
    for one, number in _flat(program, None):
        if isinstance(one, PlannedRun):
            seconds = one.seconds * slowdowns * (rows if one.grows_with_rows else 1.0)
            if scenario.jitter:
                seconds = seconds * np.exp(scenario.jitter * random.standard_normal(len(rows)))
            if one.seconds > 0.0:
                schedule.program.append(Run(one.term, _label(one.label, number), seconds, one.is_computing))
        elif isinstance(one, PlannedPost):
            posted[one.message, number] = _post(schedule, one.message, number, maker)
        elif isinstance(one, PlannedWait):
            schedule.program.extend(Wait(index, one.message.term) for index in posted.pop((one.message, number)))
    return schedule


def _flat(program: Program, number: int | None) -> Iterator[tuple[Instruction, int | None]]:
    for one in program:
        if isinstance(one, Repeat):
            for inner in one.numbers:
                yield from _flat(one.body, inner)
        else:
            yield one, number


def _label(label: str, number: int | None) -> str:
    return label if number is None else f"{label} {number}"


def _post(schedule: Schedule, message: Message, number: int | None, maker: TrafficMaker) -> range:
    """Post all stages at once.  Returns the operations to wait for."""
    first = len(schedule.operations)
    for index, stage in enumerate(message.stages, first):
        traffic = maker.traffic_of(stage)
        levels = ", ".join(maker.cluster.levels[level].name for level in stage.peers.levels)
        channel = "tokens" if message.is_urgent else f"bulk over {levels}"
        after = index - 1 if index > first else None
        schedule.operations.append(Operation(_label(message.label, number), channel, traffic.flows, after))
        schedule.program.append(Post(index))
        for level, num_bytes in enumerate(traffic.sent_bytes):
            schedule.sent_bytes[level][message.kind] += num_bytes
    return range(first, len(schedule.operations))
