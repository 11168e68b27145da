# SPDX-License-Identifier: Apache-2.0
"""Search for the plan of least step time: expert group x domain sizes x codecs x hot experts x token exchange."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import divisors
from ds_hybridep.plan.answer import TIE, Answer, Candidate
from ds_hybridep.plan.plan import ExpertGroup, Plan, PricedPlan
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import alternatives, lacking_note
from ds_hybridep.plan.routing import routing_of
from ds_hybridep.plan.stream_model import largest_difference


def make_plan(question: Question) -> Answer:
    """Find the plan that fits and has the least predicted step time; among plans within one percent, the simplest one.

    Raises PlanError if experts do not fit the ranks, or if no plan fits the memory.
    """
    answer = answer_of(question)
    if answer.best.lacking_bytes:
        least = answer.best
        raise PlanError(
            f"no plan fits: the smallest, {least.label}, needs {least.memory.total_bytes / 1e9:.1f} GB on each rank "
            f"({least.memory.state_bytes / 1e9:.1f} GB of parameters, gradients and optimizer state, "
            f"{least.memory.activation_bytes / 1e9:.1f} GB of activations, the rest an allowance), "
            f"{least.lacking_bytes / 1e9:.1f} GB more than there are; use more ranks, fewer tokens, activation "
            f"checkpointing, a higher ZeRO stage or adapters"
        )
    return answer


def answer_of(question: Question) -> Answer:
    """The same; but where no plan fits, the best is the one that lacks least, and has `lacking_bytes`.

    Raises PlanError if experts do not fit the ranks.
    """
    candidates = list(price_all(question))
    fitting = [one for one in candidates if not one.lacking_bytes]
    if fitting:
        best = _simplest_of_the_fastest(fitting)
    else:
        best = min(candidates, key=lambda one: (one.lacking_bytes, one.step_s))
    others = [replace(one, reason=_why_lost(one, best)) for one in candidates if one is not best]
    others.sort(key=lambda one: (one.lacking_bytes > 0, one.step_s))
    answer = Answer(question=question, best=best, others=tuple(others), alternatives=tuple(alternatives(question)))
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
    if best.lacking_bytes:
        return f"no plan fits; {lacking_note(best.lacking_bytes)}, the least of all"
    if runner_up is None:
        return "the only plan that fits"
    ratio = runner_up.step_s / best.step_s
    if ratio <= 1 + TIE:
        return f"as fast as {runner_up.label}, with less memory or loss"
    seconds, words = largest_difference(runner_up.prediction, best.prediction)
    return f"{ratio:.4g} times as fast as {runner_up.label}: saves {seconds:.3g} s on {words}"
