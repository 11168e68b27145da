# SPDX-License-Identifier: Apache-2.0
"""The program of a step, spelt out for classes of ranks: no repetitions, seconds by class, flows of messages."""

from collections.abc import Iterator

import numpy as np

from ds_hybridep.plan import program as planned
from ds_hybridep.simulate.events import Instruction, Operation, TimedPost, TimedRun, TimedWait
from ds_hybridep.simulate.flows import Floats
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.traffic import TrafficMaker


class Schedule:
    """What the engine runs, and the bytes that all ranks together send, by level and kind.

    rows: [num_classes] rows that come to a rank of each class over those that the program assumes.
    slowdowns: [num_classes] factors on seconds.
    """

    def __init__(
        self, program: planned.Program, scenario: Scenario, rows: Floats, slowdowns: Floats, *, maker: TrafficMaker
    ) -> None:
        self.program: list[Instruction] = []
        self.operations: list[Operation] = []
        self.sent_bytes = tuple(dict.fromkeys(planned.KINDS, 0.0) for _ in scenario.cluster.sizes)
        self._maker = maker
        posted: dict[tuple[planned.Message, str], range] = {}
        random = np.random.default_rng(0)
        for one, number in _flat(program, ""):
            if isinstance(one, planned.Run):
                seconds = one.seconds * slowdowns * (rows if one.grows_with_rows else 1.0)
                if scenario.jitter:
                    seconds = seconds * np.exp(scenario.jitter * random.standard_normal(len(rows)))
                if one.seconds > 0.0:
                    self.program.append(TimedRun(one.term, one.label + number, seconds, one.is_computing))
            elif isinstance(one, planned.Post):
                posted[one.message, number] = self._post(one.message, number)
            elif isinstance(one, planned.Wait):
                self.program.extend(TimedWait(index, one.message.term) for index in posted.pop((one.message, number)))

    def _post(self, message: planned.Message, number: str) -> range:
        """Post all stages at once.  Returns the operations to wait for."""
        first = len(self.operations)
        for index, stage in enumerate(message.stages, first):
            traffic = self._maker.traffic_of(stage)
            levels = ", ".join(self._maker.cluster.levels[level].name for level in stage.peers.levels)
            channel = "tokens" if message.is_urgent else f"bulk over {levels}"
            after = index - 1 if index > first else None
            self.operations.append(Operation(message.label + number, channel, traffic.flows, after))
            self.program.append(TimedPost(index))
            for level, num_bytes in enumerate(traffic.sent_bytes):
                self.sent_bytes[level][message.kind] += num_bytes
        return range(first, len(self.operations))


def _flat(program: planned.Program, number: str) -> Iterator[tuple[planned.Instruction, str]]:
    """Every instruction with what its label has behind it: the number of its repetition."""
    for one in program:
        if isinstance(one, planned.Repeat):
            for inner in one.numbers:
                yield from _flat(one.body, f" {inner}")
        else:
            yield one, number
