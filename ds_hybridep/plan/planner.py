# SPDX-License-Identifier: Apache-2.0
"""Search for the plan of least step time: expert group x domain sizes x codecs x hot experts x token exchange."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster, divisors
from ds_hybridep.plan.memory import Memory
from ds_hybridep.plan.plan import ExpertGroup, Plan, PricedPlan
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import Alternative, alternatives, lacking_note
from ds_hybridep.plan.routing import Routing, routing_of
from ds_hybridep.plan.stream_model import StepPrediction, largest_difference

PLAN_VERSION = 2
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


@dataclass(frozen=True)
class Answer:
    """The planner's answer: `others` has all plans but the best, fastest first; those that do not fit come last."""

    cluster: Cluster
    best: Candidate
    others: tuple[Candidate, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest of the others; None if none of them fits."""
        return next((one for one in self.others if not one.lacking_bytes), None)

    @property
    def better(self) -> Alternative | None:
        """DeepSpeed's fastest way that fits and beats the best plan by more than a tie; None: use the plan."""
        return self._fastest(way for way in self.alternatives if way.is_by_deepspeed)

    @property
    def better_elsewhere(self) -> Alternative | None:
        """The fastest way of another program that fits and beats the best plan by more than a tie."""
        return self._fastest(way for way in self.alternatives if not way.is_provided)

    @property
    def better_as_sites(self) -> Alternative | None:
        """Sites that average gradients at every step, if they fit and beat the best plan by more than a tie."""
        return self._fastest(way for way in self.alternatives if way.sites is not None and way.sites.every == 1)

    def _fastest(self, ways: Iterable[Alternative]) -> Alternative | None:
        least_s = self.best.step_s * (1 - TIE)
        faster = (way for way in ways if not way.lacking_bytes and way.step_s < least_s and way.dropped <= TIE)
        return min(faster, key=lambda way: way.step_s, default=None)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "version": PLAN_VERSION,
            "levels": [{"name": level.name, "size": level.size} for level in self.cluster.levels],
            "plan": _candidate_json(self.best),
            "runner_up": None if self.runner_up is None else _candidate_json(self.runner_up),
            "others": [_candidate_json(candidate) for candidate in self.others],
            "alternatives": [_alternative_json(way) for way in self.alternatives],
        }


def make_plan(question: Question) -> Answer:
    """Find the plan that fits and has the least predicted step time; among plans within one percent, the simplest one.

    Raises PlanError if experts do not fit the ranks, or if no plan fits the memory.
    """
    candidates = list(price_all(question))
    fitting = [one for one in candidates if not one.lacking_bytes]
    if not fitting:
        least = min(candidates, key=lambda one: one.lacking_bytes)
        raise PlanError(
            f"no plan fits: the smallest, {least.label}, needs {least.memory.total_bytes / 1e9:.1f} GB on each rank "
            f"({least.memory.state_bytes / 1e9:.1f} GB of parameters, gradients and optimizer state, "
            f"{least.memory.activation_bytes / 1e9:.1f} GB of activations, the rest an allowance), "
            f"{least.lacking_bytes / 1e9:.1f} GB more than there are; use more ranks, fewer tokens, activation "
            f"checkpointing, a higher ZeRO stage or adapters"
        )
    best = _simplest_of_the_fastest(fitting)
    others = [replace(one, reason=_why_lost(one, best)) for one in candidates if one is not best]
    others.sort(key=lambda one: (one.lacking_bytes > 0, one.step_s))
    answer = Answer(question.cluster, best, tuple(others), tuple(alternatives(question)))
    return replace(answer, best=replace(best, reason=_why_won(best, answer.runner_up)))


# ---- the search ----


def price_all(question: Question) -> Iterator[Candidate]:
    """Price every plan that the question allows; after one that does not fit, price variants that need less memory.

    The variants keep their state on the host.
    """
    for group in question.expert_groups:
        spans = group.spans(question.cluster)
        for domain_sizes in itertools.product(*map(divisors, spans)):
            allowed = (question.codecs_over(level, size) for level, size in enumerate(domain_sizes))
            for codecs in itertools.product(*allowed):
                plain = Plan(spans=spans, domain_sizes=domain_sizes, codecs=codecs, dense_sync=question.dense_sync)
                for plan in question.with_hot_experts(plain):
                    candidate = _price(question, group, plan)
                    yield candidate
                    if candidate.lacking_bytes and candidate.memory.copies_bytes:
                        on_host = _price(question, group, replace(plan, state="host"))
                        if on_host.memory.total_bytes < candidate.memory.total_bytes:
                            yield on_host


def _price(question: Question, group: ExpertGroup, plan: PricedPlan) -> Candidate:
    """Price the plan with the faster exchange."""
    memory, lacking = question.memory(plan)
    plan, prediction = question.with_best_exchange(plan)
    return Candidate(
        group=group,
        plan=plan,
        prediction=prediction,
        memory=memory,
        lacking_bytes=lacking,
        routing=routing_of(plan, question.workload),
    )


def _simplest_of_the_fastest(candidates: Sequence[Candidate]) -> Candidate:
    def costs(candidate: Candidate) -> tuple[bool, float, tuple[int, ...], int]:
        plan = candidate.plan
        loses_something = any(codecs.is_lossy for codecs in plan.codecs)
        return loses_something, candidate.memory.total_bytes, plan.domain_sizes, plan.num_hot

    fastest_s = min(candidate.step_s for candidate in candidates)
    return min((one for one in candidates if one.step_s <= fastest_s * (1 + TIE)), key=costs)


def _why_lost(candidate: Candidate, best: Candidate) -> str:
    if candidate.lacking_bytes:
        return lacking_note(candidate.lacking_bytes)
    ratio = candidate.step_s / best.step_s
    if ratio <= 1 + TIE:
        return "as fast, but needs more memory or loses more"
    seconds, words = largest_difference(candidate.prediction, best.prediction)
    return f"{ratio:.4g} times as long: {seconds:.3g} s more for {words}"


def _why_won(best: Candidate, runner_up: Candidate | None) -> str:
    if runner_up is None:
        return "the only plan that fits"
    ratio = runner_up.step_s / best.step_s
    if ratio <= 1 + TIE:
        return f"as fast as {runner_up.label}, with less memory or loss"
    seconds, words = largest_difference(runner_up.prediction, best.prediction)
    return f"{ratio:.4g} times as fast as {runner_up.label}: saves {seconds:.3g} s on {words}"


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    plan, memory, prediction, routing = candidate.plan, candidate.memory, candidate.prediction, candidate.routing
    hot: dict[str, Any] = {}
    if routing.weights is not None:
        loads = {"load_before": routing.load_before, "load_after": routing.load_after}
        hot = {"hot_experts": list(plan.hot_by_level), **loads}
    return {
        **hot,
        **({"state": "host"} if plan.state == "host" else {}),
        **({"host_bytes": memory.host_bytes} if memory.host_bytes else {}),
        "ep_size": candidate.group.ep_size,
        "strided": candidate.group.is_strided,
        "domain_sizes": list(plan.domain_sizes),
        "weight_codecs": [codecs.weight.name for codecs in plan.codecs],
        "gradient_codecs": [codecs.gradient.name for codecs in plan.codecs],
        "dense_weight_codecs": [codecs.dense_weight.name for codecs in plan.codecs],
        "dense_gradient_codecs": [codecs.dense_gradient.name for codecs in plan.codecs],
        "token_exchange": plan.token_exchange,
        "step_s": candidate.step_s,
        "terms_s": prediction.terms_s,
        "uplink_bytes": [dict(kinds) for kinds in prediction.uplink_bytes],
        "memory_bytes": memory.total_bytes,
        "activation_bytes": memory.activation_bytes,
        "lacking_bytes": candidate.lacking_bytes,
        "reason": candidate.reason,
    }


def _alternative_json(way: Alternative) -> dict[str, Any]:
    return {
        "name": way.name,
        "step_s": way.step_s,
        "terms_s": None if way.prediction is None else way.prediction.terms_s,
        "memory_bytes": way.memory_bytes,
        "lacking_bytes": way.lacking_bytes,
        "provided": way.is_provided,
        **({"dropped": way.dropped} if way.dropped else {}),
        "note": way.note,
    }
