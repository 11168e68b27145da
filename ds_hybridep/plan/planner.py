# SPDX-License-Identifier: Apache-2.0
"""Search for the plan of least step time: expert group x domain sizes x codecs x prefetch depth x token exchange.

The search is exhaustive. What does not fit the memory is left out with the bytes that it lacks; for all else there is
a reason why it lost. Beside it stand the ways to train the same model that need nothing from here, and two that are
priced only, because they are other programs.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.cluster import Cluster, divisors
from ds_hybridep.plan.costs import Memory, memory_of, ranks_below
from ds_hybridep.plan.layout import IDENTITY, Codec, ExpertGroup, Layout, LevelCodecs, Rates, SyncModel
from ds_hybridep.plan.stream_model import StepPrediction, predict, with_bandwidth
from ds_hybridep.plan.token_route import known_or_assumed_bandwidths
from ds_hybridep.plan.workload import Workload

PLAN_VERSION = 1
DEFAULT_DEPTHS = (0, 1, 2, 4)
TIE = 0.01  # plans this close to the best count as equal, as no model is better, and the simplest of them is taken
LOCAL_STEPS = 100  # optimizer steps between two synchronisations of local SGD

TERM_WORDS = {
    "dense_s": "computation outside the experts",
    "experts_s": "expert computation",
    "codec_s": "encoding and decoding",
    "tokens_s": "token exchange",
    "expert_weights_s": "waiting for expert weights",
    "expert_gradients_s": "waiting for expert gradients",
    "dense_sync_s": "synchronising dense parameters",
    "expert_sync_s": "synchronising experts that several groups hold",
    "host_s": "calls and messages",
    "optimizer_s": "the optimizer",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan is asked for.

    cluster, workload, rates, sync: as `predict` takes them.
    groups: expert-parallel groups to consider; empty: `candidate_groups`.
    codecs: encodings to consider at each level where experts travel; one choice, identity, loses nothing.
    token_codecs: of rows on their way to experts, one for each level; empty: none. What is compared with has none.
    depths: prefetch depths to consider.
    domain_sizes: for each level a size, or None to search.
    memory_bytes: of one rank, without activations; None: not limited.
    is_transient: replicas are transient, as settings say; else only where others do not fit.
    """

    cluster: Cluster
    workload: Workload
    rates: Rates
    sync: SyncModel = SyncModel()
    groups: tuple[ExpertGroup, ...] = ()
    codecs: tuple[LevelCodecs, ...] = (LevelCodecs(),)
    token_codecs: tuple[Codec, ...] = ()
    depths: tuple[int, ...] = DEFAULT_DEPTHS
    domain_sizes: tuple[int | None, ...] | None = None
    memory_bytes: float | None = None
    is_transient: bool = False

    def with_tokens(self, codecs: Sequence[LevelCodecs]) -> tuple[LevelCodecs, ...]:
        """Encodings of experts at each level, with those of tokens."""
        tokens = self.token_codecs or (IDENTITY,) * len(codecs)
        return tuple(replace(of_level, token=token) for of_level, token in zip(codecs, tokens, strict=True))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout, priced.

    group: the expert-parallel group that it needs.
    lacking_bytes: memory that it needs beyond what there is; 0: it fits.
    reason: why it was taken or lost; empty until the search is over.
    """

    group: ExpertGroup
    layout: Layout
    prediction: StepPrediction
    memory: Memory
    lacking_bytes: float = 0.0
    reason: str = ""

    @property
    def step_s(self) -> float:
        """Predicted seconds."""
        return self.prediction.step_s

    @property
    def label(self) -> str:
        """Domain sizes, and the codecs and the group where they are not the usual ones."""
        text = "[" + ",".join(map(str, self.layout.domain_sizes)) + "]"
        if self.layout.is_transient:
            text += " transient"
        exact = codecs_label(LevelCodecs())
        names = [label for label in map(codecs_label, self.layout.codecs) if label != exact]
        if names:
            text += " " + " ".join(dict.fromkeys(names))
        return text + f" ep {self.group.ep_size}{' strided' if self.group.is_strided else ''}"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to train the same model.

    step_s: predicted; None where it does not exist here, and `note` says why.
    prediction: terms and bytes of what is provided.
    layout: of what DeepSpeed or this program can do; None: another program, priced only.
    lacking_bytes: memory that it needs beyond what there is; 0: it fits, or was not checked.
    """

    name: str
    step_s: float | None
    prediction: StepPrediction | None = None
    layout: Layout | None = None
    memory_bytes: float | None = None
    lacking_bytes: float = 0.0
    note: str = ""

    @property
    def is_provided(self) -> bool:
        """DeepSpeed or this program can do it."""
        return self.layout is not None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.  Frozen; equal questions give equal plans, with equal digests.

    best: the layout to use.  runner_up: the best of the others that fit.
    others: every other layout with why it lost, fastest first, those without memory last.
    alternatives: baselines, and what is not provided here.
    """

    cluster: Cluster
    best: Candidate
    runner_up: Candidate | None
    others: tuple[Candidate, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def better(self) -> Alternative | None:
        """The fastest way that is provided, fits and beats the best layout by more than a tie; None: use the plan."""
        return self._fastest(way for way in self.alternatives if way.is_provided and not way.lacking_bytes)

    @property
    def better_elsewhere(self) -> Alternative | None:
        """The fastest way of another program that beats the best layout by more than a tie."""
        return self._fastest(way for way in self.alternatives if not way.is_provided)

    def _fastest(self, ways: Iterable[Alternative]) -> Alternative | None:
        times = [(way.step_s, index, way) for index, way in enumerate(ways) if way.step_s is not None]
        if not times or min(times)[0] >= self.best.step_s * (1 - TIE):
            return None
        return min(times)[2]

    def to_json(self) -> dict[str, Any]:
        """JSON values; numbers have nine digits, so that machines that round differently agree."""
        return {
            "version": PLAN_VERSION,
            "levels": [{"name": level.name, "size": level.size} for level in self.cluster.levels],
            "plan": _candidate_json(self.best),
            "runner_up": None if self.runner_up is None else _candidate_json(self.runner_up),
            "others": [_candidate_json(candidate) for candidate in self.others],
            "alternatives": [
                {
                    "name": way.name,
                    "step_s": _rounded(way.step_s),
                    "terms_s": None if way.prediction is None else _rounded_values(way.prediction.terms.as_dict()),
                    "memory_bytes": _rounded(way.memory_bytes),
                    "lacking_bytes": _rounded(way.lacking_bytes),
                    "provided": way.is_provided,
                    "note": way.note,
                }
                for way in self.alternatives
            ],
        }

    @property
    def digest(self) -> str:
        """Of what ranks must agree on: the layout, not the seconds that led to it."""
        layout = _layout_json(self.best)
        return hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()[:16]


def make_plan(question: Question) -> Plan:
    """The plan of least predicted step time among those that fit the memory.

    Among plans within one percent of the best, the one without lossy codecs, then with least memory is taken,
    and of those that differ in depth only the one with the least.

    Raises:
        PlanError: experts and ranks cannot be brought together, or no plan fits the memory; says what is lacking.
    """
    candidates = list(price_all(question))
    fitting = [candidate for candidate in candidates if not candidate.lacking_bytes]
    if not fitting:
        least = min(candidates, key=lambda candidate: candidate.lacking_bytes)
        raise PlanError(
            f"no plan fits: the smallest, {least.label}, needs {least.memory.total_bytes / 1e9:.1f} GB of parameters, "
            f"gradients and optimizer state on each rank, {least.lacking_bytes / 1e9:.1f} GB more than there are; use "
            f"more ranks, a higher ZeRO stage or adapters"
        )
    best = _simplest_of_the_fastest(fitting)
    others = [
        replace(candidate, reason=_why_lost(candidate, best)) for candidate in candidates if candidate is not best
    ]
    others.sort(key=lambda candidate: (candidate.lacking_bytes > 0, candidate.step_s))
    runner_up = next((candidate for candidate in others if not candidate.lacking_bytes), None)
    best = _with_least_depth(question, replace(best, reason=_why_won(best, runner_up)))
    return Plan(
        cluster=question.cluster,
        best=best,
        runner_up=runner_up,
        others=tuple(others),
        alternatives=tuple(alternatives(question)),
    )


# ---- the search ----


def candidate_groups(cluster: Cluster, num_experts: int) -> tuple[ExpertGroup, ...]:
    """The largest expert-parallel groups, neighbouring and strided, and the largest inside one child of level 0.

    Raises PlanError where not even one rank alone would do, which cannot be.
    """

    def largest(limit: int, is_strided: bool) -> ExpertGroup:
        for size in reversed(divisors(num_experts)):
            if size <= limit and limit % size == 0 and _is_regular(cluster, ExpertGroup(size, is_strided)):
                return ExpertGroup(size, is_strided)
        raise PlanError(f"no expert-parallel group of {cluster} can share {num_experts} experts")

    world = cluster.num_ranks
    found = [largest(world, False), largest(world, True), largest(world // cluster.sizes[0], False)]
    # Where one group has all ranks, strided and neighbouring are the same.
    spans: dict[tuple[int, ...], ExpertGroup] = {}
    for group in found:
        spans.setdefault(group.spans(cluster), group)
    return tuple(spans.values())


def _is_regular(cluster: Cluster, group: ExpertGroup) -> bool:
    try:
        group.spans(cluster)
    except PlanError:
        return False
    return True


def price_all(question: Question) -> Iterator[Candidate]:
    """Every layout that the question allows, priced, in a fixed order.

    Where replicas do not fit into the memory, the same layout with transient ones follows.
    """
    groups = question.groups or candidate_groups(question.cluster, question.workload.model.num_experts)
    for group in groups:
        spans = group.spans(question.cluster)
        for domain_sizes in _domain_sizes(question, spans):
            for codecs in _codec_choices(question.codecs, domain_sizes):
                layout = Layout(spans=spans, domain_sizes=domain_sizes, codecs=question.with_tokens(codecs))
                can_be_transient = layout.domain_size > 1 and not layout.is_lossy
                if not (question.is_transient and can_be_transient):
                    candidate = _price(question, group, layout)
                    yield candidate
                    can_be_transient &= candidate.lacking_bytes > 0
                if can_be_transient:
                    yield _price_transient(question, group, layout)


def _domain_sizes(question: Question, spans: Sequence[int]) -> Iterable[tuple[int, ...]]:
    wanted = question.domain_sizes or (None,) * len(spans)
    choices = [divisors(span) if size is None else (size,) for span, size in zip(spans, wanted, strict=True)]
    return itertools.product(*choices)


def _codec_choices(allowed: Sequence[LevelCodecs], domain_sizes: Sequence[int]) -> Iterable[tuple[LevelCodecs, ...]]:
    """Every allowed choice at levels where experts travel; the first one, which loses least, elsewhere."""
    return itertools.product(*(allowed if size > 1 else allowed[:1] for size in domain_sizes))


def _price(question: Question, group: ExpertGroup, layout: Layout) -> Candidate:
    """The layout with the cheaper exchange and the greatest depth, which never takes longer than a smaller one."""
    memory, lacking = _memory(question, layout)
    layout, prediction = _with_exchange(question, replace(layout, prefetch_depth=max(question.depths)))
    return Candidate(group=group, layout=layout, prediction=prediction, memory=memory, lacking_bytes=lacking)


def _price_transient(question: Question, group: ExpertGroup, layout: Layout) -> Candidate:
    """The layout with transient replicas of as many layers as fit; of the fewest where none fit."""
    deepest_first = sorted(question.depths, reverse=True)
    fitting = (depth for depth in deepest_first if not _memory(question, _transient(layout, depth))[1])
    depth = next(fitting, deepest_first[-1])
    return _price(replace(question, depths=(depth,)), group, _transient(layout, depth))


def _transient(layout: Layout, depth: int) -> Layout:
    return replace(layout, is_transient=True, prefetch_depth=depth)


def _memory(question: Question, layout: Layout) -> tuple[Memory, float]:
    """What a layout needs, and the bytes that it lacks."""
    memory = memory_of(question.cluster, layout, question.workload)
    limit = question.memory_bytes
    return memory, 0.0 if limit is None else max(memory.total_bytes - limit, 0.0)


def _with_least_depth(question: Question, candidate: Candidate) -> Candidate:
    """The same with the least depth that takes as long."""
    if candidate.layout.domain_size == 1:
        return candidate
    for depth in sorted(question.depths):
        layout = replace(candidate.layout, prefetch_depth=depth)
        prediction = _predict(question, layout)
        if prediction.step_s <= candidate.step_s * (1 + TIE / 10):
            memory, _ = _memory(question, layout)
            return replace(candidate, layout=layout, prediction=prediction, memory=memory)
    return candidate


def _with_exchange(question: Question, layout: Layout) -> tuple[Layout, StepPrediction]:
    """The layout with the token exchange that takes fewer seconds, and its step; direct where both take the same."""
    direct, hierarchical = replace(layout, exchange="direct"), replace(layout, exchange="hierarchical")
    best = _predict(question, direct)
    if sum(count > 1 for count in layout.domain_counts) < 2:
        return direct, best
    other = _predict(question, hierarchical)
    return (hierarchical, other) if other.step_s < best.step_s else (direct, best)


def _predict(question: Question, layout: Layout) -> StepPrediction:
    return predict(question.cluster, layout, question.workload, question.rates, question.sync)


def _simplest_of_the_fastest(candidates: Sequence[Candidate]) -> Candidate:
    fastest_s = min(candidate.step_s for candidate in candidates)
    close = [candidate for candidate in candidates if candidate.step_s <= fastest_s * (1 + TIE)]
    return min(
        close,
        key=lambda candidate: (
            candidate.layout.is_lossy or candidate.layout.has_lossy_gradients,
            candidate.memory.total_bytes,
            candidate.layout.domain_sizes,
        ),
    )


# ---- reasons ----


def _why_lost(candidate: Candidate, best: Candidate) -> str:
    if candidate.lacking_bytes:
        return f"needs {candidate.lacking_bytes / 1e9:.1f} GB more memory than there is"
    ratio = candidate.step_s / best.step_s
    if ratio <= 1 + TIE:
        return "as fast, but needs more memory or loses more"
    ours, theirs = best.prediction.terms.as_dict(), candidate.prediction.terms.as_dict()
    term = max(theirs, key=lambda name: theirs[name] - ours[name])
    return f"{ratio:.4g} times as long: {theirs[term] - ours[term]:.3g} s more for {TERM_WORDS[term]}"


def _why_won(best: Candidate, runner_up: Candidate | None) -> str:
    if runner_up is None:
        return "the only plan that fits"
    ratio = runner_up.step_s / best.step_s
    if ratio <= 1 + TIE:
        return f"as fast as {runner_up.label}, with less memory or loss"
    ours, theirs = best.prediction.terms.as_dict(), runner_up.prediction.terms.as_dict()
    term = max(theirs, key=lambda name: theirs[name] - ours[name])
    saved = theirs[term] - ours[term]
    return f"{ratio:.4g} times as fast as {runner_up.label}: saves {saved:.3g} s on {TERM_WORDS[term]}"


# ---- other ways ----


def alternatives(question: Question) -> list[Alternative]:
    """The ways to compare with, in the order in which they are reported."""
    cluster, num_experts = question.cluster, question.workload.model.num_experts
    groups = question.groups or candidate_groups(cluster, num_experts)
    across = max(groups, key=lambda group: (group.spans(cluster)[0], group.ep_size))
    inside = _group_inside(cluster, num_experts)
    levels = len(cluster.levels)
    plain = Layout(spans=across.spans(cluster), domain_sizes=(1,) * levels, codecs=(LevelCodecs(),) * levels)
    strided = ", strided" if across.is_strided else ""
    result = [
        _provided(question, f"DeepSpeed, EP over {across.ep_size}{strided}", replace(plain, is_padded=True)),
        _provided(
            question, f"EP over {across.ep_size}{strided}, exchange de-duplicated", _with_exchange(question, plain)[0]
        ),
    ]
    if inside != across:
        layout = replace(plain, spans=inside.spans(cluster), is_padded=True)
        name = f"DeepSpeed, EP over {inside.ep_size} inside each {cluster.levels[0].name}, data parallel across"
        result.append(_provided(question, name, layout))
    return [*result, _pipeline(question, inside), _local_sgd(question, inside)]


def _group_inside(cluster: Cluster, num_experts: int) -> ExpertGroup:
    """The largest neighbouring group inside one child of level 0."""
    limit = cluster.num_ranks // cluster.sizes[0]
    sizes = [size for size in divisors(num_experts) if size <= limit and limit % size == 0]
    return ExpertGroup(max(size for size in sizes if _is_regular(cluster, ExpertGroup(size))))


def _provided(question: Question, name: str, layout: Layout) -> Alternative:
    prediction = _predict(question, layout)
    memory, lacking = _memory(question, layout)
    return Alternative(
        name=name,
        step_s=prediction.step_s,
        prediction=prediction,
        layout=layout,
        memory_bytes=memory.total_bytes,
        lacking_bytes=lacking,
        note=f"needs {lacking / 1e9:.1f} GB more memory than there is" if lacking else "",
    )


def _inside_prediction(question: Question, inside: ExpertGroup) -> StepPrediction:
    """A step of one child of level 0 by itself, with all layers and de-duplicated exchange."""
    levels = question.cluster.levels[1:] or (replace(question.cluster.levels[0], size=1),)
    alone = Cluster(levels)
    spans = inside.spans(question.cluster)[-len(levels) :]
    layout = Layout(spans=spans, domain_sizes=(1,) * len(levels), codecs=(LevelCodecs(),) * len(levels))
    return predict(alone, layout, question.workload, question.rates, question.sync)


def _pipeline(question: Question, inside: ExpertGroup) -> Alternative:
    """Stages across level 0, each with a share of the layers and EP inside; the same tokens per step.

    n stages pass n A micro-batches of each rank's tokens: every rank computes as much as before, times the bubble
    1 + (n - 1) / (n A). A border is crossed by one row per token in each direction, hidden behind computation.
    Dense parameters and experts are synchronised inside, a share of them on each stage.
    """
    name = "pipeline stages across, EP inside"
    stages, workload = question.cluster.sizes[0], question.workload
    if workload.model.num_moe_layers < stages:
        return Alternative(name=name, step_s=None, note=f"fewer than {stages} layers")
    prediction = _inside_prediction(question, inside)
    terms = prediction.terms
    sync_s = terms.dense_sync_s + terms.expert_sync_s
    num_batches = stages * workload.micro_steps
    busy_s = (prediction.step_s - sync_s) * (1.0 + (stages - 1) / num_batches)
    # A middle stage sends activations on and gradients back over the same uplink.
    rows = num_batches * workload.tokens_per_rank * (1 if stages == 2 else 2)
    num_bytes = rows * ranks_below(question.cluster)[0] * workload.row_bytes * question.rates.wire_factor
    border_s = num_bytes / known_or_assumed_bandwidths(question.cluster)[0]
    latency_s = 2 * (stages - 1) * (question.cluster.levels[0].link.latency_s or 0.0)
    return Alternative(
        name=name,
        step_s=max(busy_s, border_s) + latency_s + sync_s / stages,
        note="not provided here; bubble included, memory not checked",
    )


def _local_sgd(question: Question, inside: ExpertGroup) -> Alternative:
    """Each child of level 0 trains by itself; parameters are averaged every `LOCAL_STEPS` steps."""
    prediction = _inside_prediction(question, inside)
    levels = len(question.cluster.levels)
    across = Layout(spans=inside.spans(question.cluster), domain_sizes=(1,) * levels, codecs=(LevelCodecs(),) * levels)
    terms = _predict(question, across).terms
    return Alternative(
        name=f"local SGD, averaged every {LOCAL_STEPS} steps",
        step_s=prediction.step_s + (terms.dense_sync_s + terms.expert_sync_s) / LOCAL_STEPS,
        note="not provided here; not the same training: loss may differ",
    )


# ---- what a user asks beyond the plan ----


def break_even_tokens(question: Question, *, is_deduplicated: bool) -> float | None:
    """Tokens per rank and micro-step above which moving all experts over level 0 is fewer bytes than moving tokens.

    Compared are the bytes of a whole optimizer step over one uplink of level 0, with one domain there, against no
    domains: with the de-duplicated exchange level by level, or with DeepSpeed's padded all-to-alls. None where the
    group does not span level 0.

    Source: design note, break-even tokens; bytes grow in proportion to tokens.
    """
    workload = question.workload
    groups = question.groups or candidate_groups(question.cluster, workload.model.num_experts)
    spans = max((group.spans(question.cluster) for group in groups), key=lambda spans: spans[0])
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


@dataclass(frozen=True)
class Reign:
    """Bandwidths of level 0 between which one layout or alternative is the fastest."""

    label: str
    from_bytes_per_s: float
    to_bytes_per_s: float


def step_times(question: Question, plan: Plan, bandwidths: Sequence[float], level: int = 0) -> dict[str, list[float]]:
    """Predicted seconds at each bandwidth of a level: of every layout that fits, and of the ways provided beside them.

    The exchange of each layout is chosen afresh at each bandwidth; depths are those of the plan.
    """
    times: dict[str, list[float]] = {}
    for bandwidth in bandwidths:
        asked = replace(question, cluster=with_bandwidth(question.cluster, level, bandwidth))
        for candidate in (plan.best, *plan.others):
            if not candidate.lacking_bytes:
                _, prediction = _with_exchange(asked, candidate.layout)
                times.setdefault(candidate.label, []).append(prediction.step_s)
        for way in alternatives(asked):
            # De-duplicated exchange without domains is among the layouts already.
            if way.step_s is not None and way.layout and way.layout.is_padded and not way.lacking_bytes:
                times.setdefault(way.name, []).append(way.step_s)
    return times


def reigns(question: Question, plan: Plan, bandwidths: Sequence[float], *, bisections: int = 8) -> tuple[Reign, ...]:
    """Who is fastest between the first and the last of ascending `bandwidths` of level 0, borders bisected.

    Ties go to the plan's best layout, then in the plan's order.
    """

    def winner(bandwidth: float) -> str:
        times = step_times(question, plan, [bandwidth])
        fastest_s = min(seconds[0] for seconds in times.values())
        return next(label for label, seconds in times.items() if seconds[0] <= fastest_s * (1 + TIE))

    winners = [winner(bandwidth) for bandwidth in bandwidths]
    result = [Reign(winners[0], bandwidths[0], bandwidths[-1])]
    for index in range(1, len(bandwidths)):
        if winners[index] != winners[index - 1]:
            low, high = bandwidths[index - 1], bandwidths[index]
            for _ in range(bisections):
                middle = math.sqrt(low * high)
                if winner(middle) == winners[index - 1]:
                    low = middle
                else:
                    high = middle
            result[-1] = replace(result[-1], to_bytes_per_s=high)
            result.append(Reign(winners[index], high, bandwidths[-1]))
    return tuple(result)


# ---- JSON ----


def codecs_label(codecs: LevelCodecs) -> str:
    """Weight/gradient codecs by name."""
    return f"{codecs.weight.name}/{codecs.gradient.name}"


def _layout_json(candidate: Candidate) -> dict[str, Any]:
    layout = candidate.layout
    return {
        **({"replicas": "transient"} if layout.is_transient else {}),
        "ep_size": candidate.group.ep_size,
        "strided": candidate.group.is_strided,
        "domain_sizes": list(layout.domain_sizes),
        "weight_codecs": [codecs.weight.name for codecs in layout.codecs],
        "gradient_codecs": [codecs.gradient.name for codecs in layout.codecs],
        "token_codecs": [codecs.token.name for codecs in layout.codecs],
        "prefetch_depth": layout.prefetch_depth,
        "token_exchange": layout.exchange,
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {
        **_layout_json(candidate),
        "step_s": _rounded(candidate.step_s),
        "terms_s": _rounded_values(candidate.prediction.terms.as_dict()),
        "uplink_bytes": [_rounded_values(dict(kinds)) for kinds in candidate.prediction.uplink_bytes],
        "memory_bytes": _rounded(candidate.memory.total_bytes),
        "lacking_bytes": _rounded(candidate.lacking_bytes),
        "reason": candidate.reason,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.9g}")


def _rounded_values(values: dict[Any, float]) -> dict[str, float | None]:
    return {str(key): _rounded(value) for key, value in values.items()}
