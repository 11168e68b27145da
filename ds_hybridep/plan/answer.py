# SPDX-License-Identifier: Apache-2.0
"""The planner's answer: every plan with its price, the ways to compare with, and both as rows for programs.

`planner` finds it; `summary` puts it in words, tables and settings.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ds_hybridep.plan.memory import Memory
from ds_hybridep.plan.plan import ExpertGroup, PricedPlan
from ds_hybridep.plan.program import Kind
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import MOST_DROPPED, Alternative
from ds_hybridep.plan.routing import Routing
from ds_hybridep.plan.stream_model import StepPrediction

JSON_VERSION = 3
TIE = 0.01  # plans this close count as equal, as no model is more exact; of these, nothing lossy and least memory win


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan with its price, its group and the memory that it needs; `reason` says why it won or lost."""

    group: ExpertGroup
    plan: PricedPlan
    prediction: StepPrediction
    memory: Memory
    routing: Routing
    lacking_bytes: float = 0.0  # memory that it needs beyond the available memory
    reason: str = ""

    @property
    def step_s(self) -> float:
        return self.prediction.step_s

    @property
    def label(self) -> str:
        """The plan and its group, for people."""
        return f"{self.plan.label} ep {self.group.ep_size}{' strided' if self.group.is_strided else ''}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a question.

    best: the best plan that fits; if none does, the one that lacks least.
    others: all plans but the best, fastest first; those that do not fit come last.
    """

    question: Question
    best: Candidate
    others: tuple[Candidate, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest of the others; None if none of them fits."""
        return next((one for one in self.others if not one.lacking_bytes), None)

    @property
    def now(self) -> Alternative:
        """What people have without this program: the fastest that can train this, else the one that lacks least."""
        return min((way for way in self.alternatives if way.is_now), key=lambda way: way.rank)

    @property
    def alone(self) -> Alternative | None:
        """One child of level 0 without the others; None: there is only one."""
        return next((way for way in self.alternatives if way.num_gpus is not None), None)

    @property
    def chosen(self) -> "Candidate | Alternative":
        """What to take of this program: its best plan, or sites that average at every step if these are faster."""
        return self.better_as_sites or self.best

    @property
    def lacking_bytes(self) -> float:
        """Memory that the chosen way lacks; 0: it fits."""
        return self.chosen.lacking_bytes

    @property
    def chosen_memory(self) -> Memory:
        chosen = self.chosen
        if isinstance(chosen, Candidate):
            return chosen.memory
        assert chosen.sites is not None, "only plans and sites are chosen"
        return chosen.sites.memory

    @property
    def better(self) -> Alternative | None:
        """What people have now, if it beats the best plan by more than a tie; None: use the plan."""
        return self._fastest(way for way in self.alternatives if way.is_now)

    @property
    def better_elsewhere(self) -> Alternative | None:
        """The fastest way of another program that fits and beats the best plan by more than a tie."""
        return self._fastest(way for way in self.alternatives if not way.is_provided)

    @property
    def better_as_sites(self) -> Alternative | None:
        """Sites that average gradients at every step, if they fit and beat the best plan by more than a tie."""
        return self._fastest(way for way in self.alternatives if way.sites is not None and way.sites.every == 1)

    def _fastest(self, ways: Iterable[Alternative]) -> Alternative | None:
        least_s = math.inf if self.best.lacking_bytes else self.best.step_s * (1 - TIE)
        faster = (way for way in ways if way.is_possible and way.step_s < least_s and way.dropped <= MOST_DROPPED)
        return min(faster, key=lambda way: way.step_s, default=None)

    def to_json(self) -> dict[str, Any]:
        """JSON values; `PlanRow` and `WayRow` say what the rows have."""
        levels = self.question.cluster.levels
        return {
            "version": JSON_VERSION,
            "levels": [{"name": level.name, "size": level.size} for level in levels],
            "plan": PlanRow.of(self.best).to_json(),
            "runner_up": None if self.runner_up is None else PlanRow.of(self.runner_up).to_json(),
            "others": [PlanRow.of(candidate).to_json() for candidate in self.others],
            "alternatives": [WayRow.of(way).to_json() for way in self.alternatives],
        }


# ---- rows for programs ----


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A candidate; lists have an entry for each level.  What is None is left out of the JSON.

    uplink_bytes: over one child's uplink in one direction, by kind.
    memory_bytes: of a GPU, of which activation_bytes for activations; lacking_bytes: more than it has.
    hot_experts, load_before, load_after: with uneven routing, the most hot experts, and the rows of the fullest rank
        over the mean without them and with them.
    state, host_bytes: where the host keeps something.
    """

    ep_size: int
    strided: bool
    domain_sizes: list[int]
    weight_codecs: list[str]
    gradient_codecs: list[str]
    dense_weight_codecs: list[str]
    dense_gradient_codecs: list[str]
    token_exchange: str
    step_s: float
    terms_s: Mapping[str, float]
    uplink_bytes: list[Mapping[Kind, float]]
    memory_bytes: float
    activation_bytes: float
    lacking_bytes: float
    reason: str
    hot_experts: list[int] | None
    load_before: float | None
    load_after: float | None
    state: str | None
    host_bytes: float | None

    @classmethod
    def of(cls, candidate: Candidate) -> "PlanRow":
        plan, memory, prediction, routing = candidate.plan, candidate.memory, candidate.prediction, candidate.routing
        return cls(
            ep_size=candidate.group.ep_size,
            strided=candidate.group.is_strided,
            domain_sizes=list(plan.domain_sizes),
            weight_codecs=[codecs.weight.name for codecs in plan.codecs],
            gradient_codecs=[codecs.gradient.name for codecs in plan.codecs],
            dense_weight_codecs=[codecs.dense_weight.name for codecs in plan.codecs],
            dense_gradient_codecs=[codecs.dense_gradient.name for codecs in plan.codecs],
            token_exchange=plan.token_exchange,
            step_s=candidate.step_s,
            terms_s=prediction.terms_s,
            uplink_bytes=list(prediction.uplink_bytes),
            memory_bytes=memory.total_bytes,
            activation_bytes=memory.activation_bytes,
            lacking_bytes=candidate.lacking_bytes,
            reason=candidate.reason,
            hot_experts=None if routing.is_even else list(plan.hot_by_level),
            load_before=None if routing.is_even else routing.load_before,
            load_after=None if routing.is_even else routing.load_after,
            state=plan.state if plan.state == "host" else None,
            host_bytes=memory.host_bytes or None,
        )

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class WayRow:
    """An alternative; `terms_s` is None if only its whole step is known.  No dropped rows are left out of the JSON."""

    name: str
    step_s: float
    terms_s: Mapping[str, float] | None
    memory_bytes: float
    lacking_bytes: float
    provided: bool
    dropped: float
    note: str

    @classmethod
    def of(cls, way: Alternative) -> "WayRow":
        return cls(
            name=way.name,
            step_s=way.step_s,
            terms_s=None if way.prediction is None else way.prediction.terms_s,
            memory_bytes=way.memory_bytes,
            lacking_bytes=way.lacking_bytes,
            provided=way.is_provided,
            dropped=way.dropped,
            note=way.note,
        )

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "dropped" or value}
