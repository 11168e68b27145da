# SPDX-License-Identifier: Apache-2.0
"""Where another way becomes the best: numbers of tokens, and bandwidths of the slowest level."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_hybridep.plan.layout import Layout, Rates
from ds_hybridep.plan.planner import TIE, Plan
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import alternatives
from ds_hybridep.plan.stream_model import predict

SWEEP_BYTES_PER_S = [10 ** (6 + step / 4) for step in range(25)]  # 8 Mbit/s to 8 Tbit/s


@dataclass(frozen=True)
class Crossovers:
    """Where another way than the plan becomes the best.

    tokens_deduplicated, tokens_padded: as `break_even_tokens` says, against each kind of exchange.
    fastest: (label, from, to) of ascending bandwidths of level 0, in bytes/s, and what is fastest between them.
    """

    tokens_deduplicated: float | None
    tokens_padded: float | None
    fastest: tuple[tuple[str, float, float], ...]

    @classmethod
    def of(cls, question: Question, plan: Plan) -> "Crossovers":
        """All of them."""
        tokens = [break_even_tokens(question, is_deduplicated=ours) for ours in (True, False)]
        return cls(tokens[0], tokens[1], fastest_ranges(question, plan, SWEEP_BYTES_PER_S))


def break_even_tokens(question: Question, *, is_deduplicated: bool) -> float | None:
    """Tokens per rank and micro-step above which moving all experts over level 0 is fewer bytes than moving tokens.

    Compared are the bytes of a whole optimizer step over one uplink of level 0, with one domain there, against no
    domains: with the de-duplicated exchange level by level, or with DeepSpeed's padded all-to-alls. None where the
    group does not span level 0.

    Source: design note, break-even tokens; bytes grow in proportion to tokens.
    """
    workload = question.workload
    spans = max((group.spans(question.cluster) for group in question.expert_groups), key=lambda spans: spans[0])
    if spans[0] == 1:
        return None
    levels = len(spans)
    # Many tokens, so that the capacity's rounding does not show.
    many = replace(workload, tokens_per_rank=1_000_000)
    codecs = question.with_tokens((question.codecs[0],) * levels)
    plain = Layout(spans=spans, domain_sizes=(1,) * levels, codecs=codecs, exchange="hierarchical")
    exchanged = replace(plain, is_padded=not is_deduplicated)
    gathered = replace(plain, domain_sizes=(spans[0], *(1,) * (levels - 1)))
    rates = Rates(flops_per_s=1.0)
    token_bytes = predict(question.cluster, exchanged, many, rates).uplink_bytes[0]["tokens"]
    experts = predict(question.cluster, gathered, many, rates).uplink_bytes[0]
    return many.tokens_per_rank * (experts["expert_weights"] + experts["expert_gradients"]) / token_bytes


def step_times(question: Question, plan: Plan, bandwidth: float) -> dict[str, float]:
    """Predicted seconds at a bandwidth of level 0, of every layout that fits and of what DeepSpeed does itself.

    The exchange of each layout is chosen afresh; depths are those of the plan.
    """
    asked = replace(question, cluster=question.cluster.with_link(0, bandwidth_bytes_per_s=bandwidth))
    fitting = [candidate for candidate in (plan.best, *plan.others) if not candidate.lacking_bytes]
    times: dict[str, float] = {}
    for candidate in fitting:
        times.setdefault(candidate.label, asked.with_best_exchange(candidate.layout)[1].step_s)
    for way in alternatives(asked):
        # De-duplicated exchange without domains is among the layouts already.
        if way.step_s is not None and way.layout and way.layout.is_padded and not way.lacking_bytes:
            times[way.name] = way.step_s
    return times


def fastest_ranges(
    question: Question, plan: Plan, bandwidths: Sequence[float], *, bisections: int = 8
) -> tuple[tuple[str, float, float], ...]:
    """What is fastest between the first and the last of ascending `bandwidths`, as in `Crossovers.fastest`.

    Ties go to the plan's best layout, then in the plan's order.
    """

    def winner(bandwidth: float) -> str:
        times = step_times(question, plan, bandwidth)
        fastest_s = min(times.values())
        return next(label for label, seconds in times.items() if seconds <= fastest_s * (1 + TIE))

    winners = [winner(bandwidth) for bandwidth in bandwidths]
    borders, labels = [bandwidths[0]], winners[:1]
    for index in range(1, len(bandwidths)):
        if winners[index] != winners[index - 1]:
            low, high = bandwidths[index - 1], bandwidths[index]
            for _ in range(bisections):
                middle = math.sqrt(low * high)
                if winner(middle) == winners[index - 1]:
                    low = middle
                else:
                    high = middle
            borders.append(high)
            labels.append(winners[index])
    return tuple(zip(labels, borders, [*borders[1:], bandwidths[-1]], strict=True))
