# SPDX-License-Identifier: Apache-2.0
"""Seconds of one training step for a cluster, a plan of experts and a workload, term by term.

One clock runs through the program of a rank (`plan.step`), and one for each level's uplink, which the ranks below a
child share.  Every second belongs to one term, so the terms add up.  On a link, messages follow each other in the
order of their posts, while the rank computes; token rows share it equally with the others.

Sources: paper (5), (7) for the overlap of one layer; docs/planning.md, "How a step is predicted".
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from ds_hybridep.geometry.cluster import Cluster, known_or_assumed_bandwidths
from ds_hybridep.plan.plan import PricedPlan
from ds_hybridep.plan.program import KINDS, Kind, Message, MessageStage, Post, Program, Run, Wait
from ds_hybridep.plan.rates import Rates
from ds_hybridep.plan.step import step_program
from ds_hybridep.plan.workload import Workload

TERM_WORDS = {  # causes of the seconds of a step, which add up to the step
    "dense_s": "computation outside the experts",
    "experts_s": "expert computation",
    "codec_s": "encoding, decoding and state on the host",
    "tokens_s": "token exchange",
    "expert_weights_s": "waiting for expert weights",
    "expert_gradients_s": "waiting for expert gradients",
    "dense_sync_s": "synchronising dense parameters",
    "expert_sync_s": "synchronising experts that several groups hold",
    "host_s": "calls and messages",
}
WAITS = {  # terms of a step that are no training arithmetic, in words
    "tokens_s": "token rows",
    "expert_weights_s": "expert weights",
    "expert_gradients_s": "expert gradients",
    "dense_sync_s": "dense gradients",
    "expert_sync_s": "copies of experts",
    "codec_s": "encoding",
    "host_s": "calls",
}


@dataclass(frozen=True)
class StepPrediction:
    """One step: seconds by term; for each level, payload bytes by kind over one child's uplink in one direction."""

    terms_s: Mapping[str, float]
    uplink_bytes: tuple[Mapping[Kind, float], ...]

    @property
    def step_s(self) -> float:
        return math.fsum(self.terms_s.values())

    def waits(self, more: Mapping[str, float] | None = None) -> tuple[str, float]:
        """What a rank waits for longest, in words, and the seconds in which it does no training arithmetic, in all.

        more: seconds that come to the step, by words.
        """
        seconds = {words: self.terms_s[term] for term, words in WAITS.items()} | dict(more or {})
        return max(seconds, key=lambda words: seconds[words]), math.fsum(seconds.values())

    def level_bytes(self, level: int) -> float:
        """Bytes of all kinds over one uplink of `level`."""
        return math.fsum(self.uplink_bytes[level].values())


def largest_difference(slower: StepPrediction, faster: StepPrediction) -> tuple[float, str]:
    """The most seconds that one step has more of one term than the other step, and the words for this term."""
    more, less = slower.terms_s, faster.terms_s
    term = max(more, key=lambda name: more[name] - less[name])
    return more[term] - less[term], TERM_WORDS[term]


def predict(cluster: Cluster, plan: PricedPlan, workload: Workload, rates: Rates) -> StepPrediction:
    """Seconds and bytes of one training step in the steady state.  Raises PlanError if the arguments do not fit.

    What `rates.overlap` says is not hidden is taken from a step that waits for each message as soon as it is posted.
    Both steps grow when a bandwidth falls, so their weighted mean grows too.  That would not hold if links were slower
    while the rank computes: a wait for one level would give messages of another level time to flow.
    """
    program = step_program(cluster, plan, workload, rates)
    bandwidths = [bandwidth / rates.wire_factor for bandwidth in known_or_assumed_bandwidths(cluster)]
    clock = _Clock(bandwidths)
    clock.run(program)
    seconds = {term: clock.totals[term] for term in TERM_WORDS}
    if rates.overlap < 1.0:
        exposed = _Clock(bandwidths, hides=False)
        exposed.run(program)
        for term in seconds:
            seconds[term] += (1.0 - rates.overlap) * (exposed.totals[term] - seconds[term])
    uplink_bytes = tuple(dict.fromkeys(KINDS, 0.0) for _ in bandwidths)
    for message, count in clock.totals.items():
        if isinstance(message, Message):
            for stage in message.stages:
                for level in stage.levels:
                    uplink_bytes[level][message.kind] += count * stage.uplink_bytes[level]
    return StepPrediction(seconds, uplink_bytes)


_Key = tuple[Message, int]  # a message with its number
_Route = list[tuple[int, float, float]]  # (level, bytes over its uplink, seconds from their departure to the arrival)


@dataclass(slots=True)
class _QueuedMessage:
    key: _Key
    num_bytes: float  # that are left


class _Clock:
    """The time of one rank and its links, from the start of a program.

    hides: False: the rank waits for each message as soon as it has posted it.
    totals: seconds by term, number of times by message.
    """

    def __init__(self, bandwidths: list[float], *, hides: bool = True) -> None:
        self.now_s = 0.0
        self.totals: defaultdict[str | Message, float] = defaultdict(float)
        self._links = [_Link(bandwidth) for bandwidth in bandwidths]
        self._hides = hides
        self._posted: dict[_Key, _Route] = {}  # not waited for yet
        self._routes: dict[Message, _Route] = {}

    def run(self, program: Program, number: int = 0) -> None:
        """Run instructions; their messages have this number."""
        for one in program:
            if isinstance(one, Run):
                self._spend(one.seconds, one.term)
            elif isinstance(one, Post):
                self._post(one.message, number)
            elif isinstance(one, Wait):
                self._wait(one.message, number)
            else:
                self._repeat(one.numbers, one.body)

    def _repeat(self, numbers: tuple[int, ...], body: Program) -> None:
        for index, number in enumerate(numbers):
            can_skip = not self._posted and index + 1 < len(numbers)
            before, begin_s = self.totals.copy() if can_skip else None, self.now_s
            self.run(body, number)
            if before is not None and not self._posted:  # with idle links, all repetitions take the same time
                left = len(numbers) - index - 1
                for key, value in self.totals.items():
                    self.totals[key] += left * (value - before[key])
                self.now_s += left * (self.now_s - begin_s)
                break

    def _spend(self, seconds: float, term: str) -> None:
        self.now_s += seconds
        self.totals[term] += seconds

    def _post(self, message: Message, number: int) -> None:
        self._posted[message, number] = route = self._route_of(message)
        self.totals[message] += 1
        for level, num_bytes, _ in route:
            self._links[level].post((message, number), num_bytes, self.now_s, is_urgent=message.is_urgent)
        if not self._hides and not message.is_urgent:
            self._wait(message, number)

    def _wait(self, message: Message, number: int) -> None:
        arrival_s = self.now_s
        for level, _, after_s in self._posted.pop((message, number), ()):  # none where it was waited for already
            arrival_s = max(arrival_s, self._links[level].left_s((message, number)) + after_s)
        self._spend(arrival_s - self.now_s, message.term)

    def _route_of(self, message: Message) -> _Route:
        """A stage begins when the one before has arrived, so what the others take is added to each."""
        route = self._routes.get(message)
        if route is None:
            alone_s = [
                max((self._alone_s(stage, level) for level in stage.levels), default=0.0) for stage in message.stages
            ]
            route = self._routes[message] = [
                (level, stage.uplink_bytes[level], stage.latencies_s[level] + math.fsum(alone_s) - stage_s)
                for stage, stage_s in zip(message.stages, alone_s, strict=True)
                for level in stage.levels
            ]
        return route

    def _alone_s(self, stage: MessageStage, level: int) -> float:
        """Seconds of a stage over an idle link."""
        return stage.uplink_bytes[level] / self._links[level].bytes_per_s + stage.latencies_s[level]


class _Link:
    """One level's uplink with a clock of its own: two queues, which share it equally."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._now_s = 0.0
        self._urgent: deque[_QueuedMessage] = deque()
        self._others: deque[_QueuedMessage] = deque()
        self._left_s: dict[_Key, float] = {}

    def post(self, key: _Key, num_bytes: float, now_s: float, *, is_urgent: bool) -> None:
        """Queue a message at a time that is not before the last one."""
        self._flow(now_s)
        (self._urgent if is_urgent else self._others).append(_QueuedMessage(key, num_bytes))

    def left_s(self, key: _Key) -> float:
        """Time at which a message has left, if nothing is posted until then."""
        self._flow(math.inf, key)
        return self._left_s.pop(key)

    def _flow(self, until_s: float, key: _Key | None = None) -> None:
        """Let messages flow until a time, or until the message `key` has left."""
        while self._now_s < until_s and key not in self._left_s:
            queue, other = self._urgent, self._others
            if not queue or (other and other[0].num_bytes < queue[0].num_bytes):
                queue, other = other, queue
            if not queue:
                self._now_s = until_s
                return
            first, rate = queue[0], self.bytes_per_s / (2 if other else 1)
            end_s = self._now_s + first.num_bytes / rate
            if end_s <= until_s:
                num_bytes = first.num_bytes
                self._left_s[queue.popleft().key] = end_s
            else:
                num_bytes = (until_s - self._now_s) * rate
                first.num_bytes -= num_bytes
            if other:
                other[0].num_bytes -= num_bytes
            self._now_s = min(end_s, until_s)
