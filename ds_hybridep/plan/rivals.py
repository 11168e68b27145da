# SPDX-License-Identifier: Apache-2.0
"""Other ways to train the same model, for comparison: DeepSpeed's, sites, and two that are only priced."""

from dataclasses import dataclass, replace
from functools import partial

from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.plan.memory import Memory, memory_of
from ds_hybridep.plan.pipeline import pipelines
from ds_hybridep.plan.plan import CodecCosts, Plan, PricedPlan, SummedBy
from ds_hybridep.plan.question import Question, largest_group
from ds_hybridep.plan.routing import Routing, routing_of
from ds_hybridep.plan.sites import Sites, sites_of
from ds_hybridep.plan.stream_model import StepPrediction, predict
from ds_hybridep.plan.workload import Workload

LEAST_DROPPED = 0.005  # a smaller share of rows is not worth a note
LOCAL_STEPS = 100  # optimizer steps between two synchronisations of local SGD
SITES_EVERY = (1, 10, 100)  # `sites.every`


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to train the same model.

    sites: of one job for each child of level 0.  Without it and `layout`, it is a way of another program and is only
    priced.
    """

    name: str
    step_s: float
    memory_bytes: float
    prediction: StepPrediction | None = None
    plan: PricedPlan | None = None
    lacking_bytes: float = 0.0  # memory that it needs beyond the available memory
    sites: Sites | None = None
    load: float | None = None  # rows that the fullest rank computes over the mean; None: not known, or the capacity
    dropped: float = 0.0  # share of the rows of tokens that no expert computes, because capacity ends
    crossing_bytes: float | None = None  # over one uplink of level 0 in one direction; None: not known
    note: str = ""

    @property
    def is_by_deepspeed(self) -> bool:
        """True if it needs only DeepSpeed, not this program."""
        return self.plan is not None and self.plan.is_padded

    @property
    def is_provided(self) -> bool:
        """True if DeepSpeed or this program can do it."""
        return self.plan is not None or self.sites is not None


def alternatives(question: Question) -> list[Alternative]:
    """The ways to compare with, in the order of the report."""
    cluster, num_experts = question.cluster, question.workload.model.num_experts
    across = max(question.expert_groups, key=lambda group: (group.spans(cluster)[0], group.ep_size))
    inside = largest_group(cluster, num_experts, cluster.num_ranks // cluster.sizes[0])
    plain = without_domains(across.spans(cluster), question.dense_sync)
    strided = ", strided" if across.is_strided else ""
    deduplicated, _ = question.with_best_exchange(plain)
    result = [
        _provided(question, f"DeepSpeed, EP over {across.ep_size}{strided}", _by_deepspeed(plain)),
        _provided(question, f"EP over {across.ep_size}{strided}, exchange de-duplicated", deduplicated),
    ]
    if inside != across:
        parallel = without_domains(inside.spans(cluster), question.dense_sync)
        name = f"EP over {inside.ep_size} inside each {cluster.levels[0].name}, data parallel across"
        exact, _ = question.with_best_exchange(parallel)
        result.append(_provided(question, f"DeepSpeed, {name}", _by_deepspeed(parallel)))
        result.append(_provided(question, f"{name}, exact", exact))
    # One child of level 0 alone, with all layers, the de-duplicated exchange and exact sums level by level.
    alone = Cluster(cluster.levels[1:] or (replace(cluster.levels[0], size=1),))
    plan = without_domains(inside.spans(cluster)[-len(alone.levels) :], question.dense_sync)
    whole = predict(alone, plan, question.workload, question.rates)
    stages, workload = cluster.sizes[0], question.workload
    result += _as_sites(question, alone, plan, whole)
    if workload.model.num_moe_layers >= stages:  # the fastest pipeline, if possible one that fits
        found = pipelines(cluster, plan, workload, question.rates, whole=whole)
        best = min(found, key=lambda one: (question.lacking_bytes(one.memory) > 0, one.step_s))
        name = f"pipeline stages across each {cluster.levels[0].name}, EP inside"
        shape = f"{stages * workload.micro_steps} micro-batches, bubble {best.bubble_s:.3g} s"
        result.append(
            _elsewhere(question, name, best.step_s, best.memory, note=shape, crossing_bytes=best.border_bytes)
        )
    # Local SGD: each child trains by itself, and parameters are averaged every `LOCAL_STEPS` steps.
    terms = question.predict(without_domains(inside.spans(cluster), question.dense_sync)).terms_s
    local_s = whole.step_s + (terms["dense_sync_s"] + terms["expert_sync_s"]) / LOCAL_STEPS
    memory, name = memory_of(alone, plan, workload), f"local SGD, averaged every {LOCAL_STEPS} steps"
    return [*result, _elsewhere(question, name, local_s, memory, note="not the same training: loss may differ")]


def _as_sites(question: Question, alone: Cluster, inside: PricedPlan, whole: StepPrediction) -> list[Alternative]:
    """One job for each child of level 0, if these are more than single ranks; see docs/sites.md."""
    cluster, workload, found = question.cluster, question.workload, []
    if len(cluster.levels) == 1 or cluster.sizes[0] == 1 or workload.offloads_optimizer:  # refused with it
        return []
    codecs = next((one for one in question.codecs if one.is_lossy), question.codecs[0])
    for every in SITES_EVERY if workload.zero_stage else SITES_EVERY[:1]:
        price = partial(
            sites_of, cluster, alone, workload=workload, rates=question.rates, codecs=codecs, whole=whole, every=every
        )
        one, state = price(inside), ""
        if (lacking := question.lacking_bytes(one.memory)) > 0:
            on_host = price(replace(inside, state="host"))
            if (lacking_there := question.lacking_bytes(on_host.memory)) < lacking:
                one, lacking, state = on_host, lacking_there, ", host state"
        found.append(
            Alternative(
                name=f"sites, H = {every}{state}",
                step_s=one.step_s,
                memory_bytes=one.memory.total_bytes,
                lacking_bytes=lacking,
                sites=one,
                crossing_bytes=one.uplink_bytes,
                note=f"{lacking_note(lacking) + '; ' if lacking else ''}{_why(one, cluster, inside, codecs)}",
            )
        )
    return found


def _why(sites: Sites, cluster: Cluster, inside: PricedPlan, codecs: CodecCosts) -> str:
    """What these sites are, and what of their step the exchange takes."""
    coded = "encoded" if codecs.is_lossy else "exact"
    hidden = f", {sites.hidden_s:.3g} s more are hidden" if sites.hidden_s else ""
    text = f"a job in each {cluster.levels[0].name}, EP over {inside.group_size} inside; exchange, {coded}: "
    text += f"{sites.exchange_s:.3g} s of the step{hidden}"
    return text if sites.every == 1 else f"{text}; not the same training: loss may differ"


def without_domains(spans: tuple[int, ...], dense_sync: SummedBy = "hierarchical") -> PricedPlan:
    """Plain expert parallelism, exact: every expert stays where it is."""
    exact = CodecCosts()
    return Plan(spans=spans, domain_sizes=(1,) * len(spans), codecs=(exact,) * len(spans), dense_sync=dense_sync)


def _by_deepspeed(plan: PricedPlan) -> PricedPlan:
    """Plain expert parallelism by DeepSpeed: padded all-to-alls, and sums by rings."""
    return replace(plan, token_exchange="deepspeed", dense_sync="deepspeed")


def _provided(question: Question, name: str, plan: PricedPlan) -> Alternative:
    prediction = question.predict(plan)
    memory, lacking = question.memory(plan)
    routing = routing_of(plan, question.workload)
    dropped = dropped_share(routing, question.workload) if plan.is_padded else 0.0
    notes = [f"drops {dropped:.0%} of the rows"] if dropped > LEAST_DROPPED else []
    notes += [lacking_note(lacking)] if lacking else []
    return Alternative(
        name=name,
        load=None if plan.is_padded else routing.load_after,
        dropped=dropped,
        step_s=prediction.step_s,
        prediction=prediction,
        plan=plan,
        memory_bytes=memory.total_bytes,
        lacking_bytes=lacking,
        crossing_bytes=prediction.level_bytes(0),
        note="; ".join(notes),
    )


def dropped_share(routing: Routing, workload: Workload) -> float:
    """Share of the rows that DeepSpeed's layer leaves out, because they are beyond the capacity of an expert."""
    room = workload.expert_capacity / workload.tokens_per_rank
    return 0.0 if routing.is_even else sum(max(load - room, 0.0) for load in routing.loads) / routing.top_k


def lacking_note(num_bytes: float) -> str:
    """Note for a plan that does not fit."""
    return f"needs {num_bytes / 1e9:.1f} GB more memory than there is"


def _elsewhere(
    question: Question, name: str, step_s: float, memory: Memory, *, note: str, crossing_bytes: float | None = None
) -> Alternative:
    """A way that this program does not provide."""
    lacking = question.lacking_bytes(memory)
    return Alternative(
        name=name,
        step_s=step_s,
        memory_bytes=memory.total_bytes,
        lacking_bytes=lacking,
        crossing_bytes=crossing_bytes,
        note=f"{lacking_note(lacking) + '; ' if lacking else ''}not provided here; {note}",
    )
