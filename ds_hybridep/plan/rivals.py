# SPDX-License-Identifier: Apache-2.0
"""Other ways to train the same model: what people have now, sites, and two that are only priced."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.plan.memory import Memory, memory_of
from ds_hybridep.plan.pipeline import Pipeline, pipelines
from ds_hybridep.plan.plan import CodecCosts, Plan, PricedPlan, SummedBy
from ds_hybridep.plan.question import Question, largest_group
from ds_hybridep.plan.routing import Routing, routing_of
from ds_hybridep.plan.sharded import Division, sharded
from ds_hybridep.plan.sites import Sites, sites_of
from ds_hybridep.plan.stream_model import StepPrediction, predict
from ds_hybridep.plan.words import number
from ds_hybridep.plan.workload import Workload

LEAST_DROPPED = 0.005  # a smaller share of rows is not worth a note
MOST_DROPPED = 0.01  # a way that drops a larger share is no match for others
SITES_EVERY = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # `sites.every`
HOST_STATE = "what codecs keep is in host memory"
CARRIED = 0.1  # a link carries sites, or averages, if their exchange takes at most this share of a step

# The same training but for rounding; gradients lose something in codecs; another training.
Training = Literal["exact", "lossy", "local steps"]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to train the same model.

    is_now: people have it without this program: DeepSpeed's layers, ZeRO-3, FSDP.
    sites: of one job for each child of level 0.  A way without it and `plan` that nobody has now is only priced.
    refused: why it cannot train this, or not as asked; empty: it can.
    num_gpus: where it leaves GPUs out, how many it takes.
    waits: what a rank waits for, and for how many seconds, where there is no prediction.
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
    remark: str = ""  # for the table, without memory
    training: Training = "exact"
    is_now: bool = False
    refused: str = ""
    num_gpus: int | None = None
    waits: tuple[str, float] | None = None
    state: Literal["device", "host"] = "device"  # where codecs keep what they keep

    @property
    def is_provided(self) -> bool:
        """True if this program, DeepSpeed or PyTorch can do it."""
        return self.plan is not None or self.sites is not None or self.is_now

    @property
    def is_possible(self) -> bool:
        """True if it can train this and fits."""
        return not self.refused and not self.lacking_bytes

    @property
    def rank(self) -> tuple[bool, float, bool, float]:
        """Least for the fastest that can train this; if none can, for the one that lacks least."""
        return bool(self.refused), self.lacking_bytes, self.dropped > MOST_DROPPED, self.step_s


def alternatives(question: Question) -> list[Alternative]:
    """The ways to compare with, in the order of the report."""
    cluster, num_experts = question.cluster, question.workload.model.num_experts
    across = max(question.expert_groups, key=lambda group: (group.spans(cluster)[0], group.ep_size))
    inside = largest_group(cluster, num_experts, cluster.num_ranks // cluster.sizes[0])
    plain = without_domains(across.spans(cluster), question.dense_sync)
    outer, num_ranks = cluster.levels[0].name, across.ep_size
    where = f"across {outer}s" if across.spans(cluster)[0] > 1 else f"in each {outer}"
    deduplicated, _ = question.with_best_exchange(plain)
    result = [_sharded(question, "everywhere")]
    if cluster.sizes[0] > 1 and len(cluster.levels) > 1:
        result += [_sharded(question, "quantised"), _sharded(question, "inside")]
    result += [
        _provided(question, f"DeepSpeed, EP {num_ranks} {where}", _by_deepspeed(plain)),
        _provided(question, f"EP {num_ranks} {where}, exchange de-duplicated", deduplicated),
    ]
    if inside != across:
        parallel = without_domains(inside.spans(cluster), question.dense_sync)
        name = f"EP {inside.ep_size} in each {outer}"
        exact, _ = question.with_best_exchange(parallel)
        result.append(_provided(question, f"DeepSpeed, {name}", _by_deepspeed(parallel)))
        result.append(_provided(question, f"{name}, exact", exact))
    if cluster.sizes[0] == 1:
        return result
    return [*result, _alone(question), *_as_sites(question), *_pipeline(question), _local_sgd(question)]


# ---- what people have now ----


def _sharded(question: Question, division: Division) -> Alternative:
    return _with_batches_that_fit(question, lambda asked: _sharded_as_asked(asked, division))


def _with_batches_that_fit(question: Question, price: Callable[[Question], Alternative]) -> Alternative:
    """With the largest micro-batches that fit, if not those that are asked for; a step has the same tokens."""
    found = price(question)
    for smaller in question.workload.in_smaller_micro_batches():
        if not found.lacking_bytes:
            break
        found = price(replace(question, workload=smaller))
        said = f"micro-batches of {smaller.tokens_per_rank} tokens"
        found = replace(found, note=_joined(found.note, said), remark=_joined(found.remark, said))
    return found


def _joined(*remarks: str) -> str:
    return "; ".join(filter(None, remarks))


def _sharded_as_asked(question: Question, division: Division) -> Alternative:
    cluster = question.cluster
    found = sharded(cluster, question.workload, question.rates, division)
    lacking, outer = question.lacking_bytes(found.memory), cluster.levels[0].name
    is_lossy = division == "quantised"
    refused = "lossy, and only exact ways are asked for" if is_lossy and not question.allows_lossy else ""
    remarks = [refused] if refused else []
    remarks += [f"hpZ, 4-bit gradients, 8-bit weights, in each micro-step from all {outer}s"] if is_lossy else []
    names: dict[Division, str] = {
        "everywhere": f"FSDP or ZeRO-3, all {cluster.num_ranks} GPUs",
        "inside": f"FSDP HYBRID_SHARD in each {outer}",
        "quantised": f"ZeRO++ (lossy) in each {outer}",
    }
    return Alternative(
        name=names[division],
        step_s=found.step_s,
        memory_bytes=found.memory.total_bytes,
        lacking_bytes=lacking,
        crossing_bytes=found.link_bytes,
        note="; ".join([*([lacking_note(lacking)] if lacking else []), *remarks]),
        remark="; ".join(remarks),
        training="lossy" if is_lossy else "exact",
        is_now=True,
        refused=refused,
        waits=("weights, gradients", found.wait_s),
    )


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
    has_adapters = question.workload.model.num_adapter_params > 0
    refused = "DeepSpeed alone does not train these adapters" if plan.is_padded and has_adapters else ""
    remarks = [refused] if refused else []
    remarks += [f"drops {dropped:.0%} of the rows"] if dropped > LEAST_DROPPED else []
    notes = [*remarks, *([lacking_note(lacking)] if lacking else [])]
    return Alternative(
        name=name,
        is_now=plan.is_padded,
        refused=refused,
        remark="; ".join(remarks),
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


def _alone(question: Question) -> Alternative:
    """One child of level 0 without the others: the best of what people have, in more micro-steps for the same step."""
    levels, workload = question.cluster.levels, question.workload
    alone = replace(
        question,
        cluster=Cluster((replace(levels[0], size=1), *levels[1:])),
        workload=replace(workload, micro_steps=levels[0].size * workload.micro_steps),
    )
    num_gpus = alone.cluster.num_ranks
    group = largest_group(alone.cluster, workload.model.num_experts, num_gpus)
    plan = _by_deepspeed(without_domains(group.spans(alone.cluster)))
    parallel = f"DeepSpeed, EP {group.ep_size}"
    ways = {
        "FSDP or ZeRO-3": _sharded(alone, "everywhere"),
        parallel: _with_batches_that_fit(alone, lambda asked: _provided(asked, parallel, plan)),
    }
    name, best = min(ways.items(), key=lambda one: one[1].rank)
    what = f"{name} on {num_gpus} GPU{'s' * (num_gpus > 1)}, which take all tokens of a step"
    return replace(
        best,
        name=f"one {levels[0].name} alone",
        plan=None,  # of another cluster
        note=_joined(what, best.note),
        remark=_joined(what, best.remark),
        num_gpus=num_gpus,
    )


# ---- sites ----


def _as_sites(question: Question) -> list[Alternative]:
    """One job for each child of level 0, with gradients at every step, and with the least H that the link carries."""
    cluster, workload = question.cluster, question.workload
    # Refused: sites of single ranks, and an optimizer on the host.
    if len(cluster.levels) == 1 or workload.offloads_optimizer:
        return []
    first = sites_at(question, 1)
    if _is_carried(first) or not workload.zero_stage:  # local steps need partitions
        return [first]
    others = [sites_at(question, every) for every in SITES_EVERY[1:]]
    return [first, next((one for one in others if _is_carried(one)), others[-1])]


def _is_carried(way: Alternative) -> bool:
    assert way.sites is not None
    return way.sites.exchange_s <= CARRIED * way.step_s


def sites_at(question: Question, every: int) -> Alternative:
    """Sites with this `every`, their state on the host if it does not fit otherwise; see docs/sites.md."""
    cluster, workload = question.cluster, question.workload
    codecs = next((one for one in question.codecs if one.is_lossy), question.codecs[0])
    alone, inside = _one_child(question)
    whole = predict(alone, inside, workload, question.rates)

    def price(plan: PricedPlan) -> tuple[Sites, float]:
        one = sites_of(cluster, alone, plan, workload, rates=question.rates, codecs=codecs, whole=whole, every=every)
        return one, question.lacking_bytes(one.memory)

    state: Literal["device", "host"] = "device"
    one, lacking = price(inside)
    if lacking and (on_host := price(replace(inside, state="host")))[1] < lacking:
        (one, lacking), state = on_host, "host"
    return Alternative(
        name=f"sites, H = {every}{' (DiLoCo-like)' if every > 1 else ''}",
        step_s=one.step_s,
        memory_bytes=one.memory.total_bytes,
        lacking_bytes=lacking,
        sites=one,
        crossing_bytes=one.uplink_bytes,
        note=f"{lacking_note(lacking) + '; ' if lacking else ''}{_why(one, cluster, inside, codecs)}",
        remark=HOST_STATE if state == "host" else "",
        training="local steps" if every > 1 else "lossy" if codecs.is_lossy else "exact",
        waits=whole.waits({"exchange of sites": one.exchange_s}),
        state=state,
    )


def _one_child(question: Question) -> tuple[Cluster, PricedPlan]:
    """One child of level 0 alone, and its plan: the de-duplicated exchange and exact sums level by level."""
    cluster = question.cluster
    inside = largest_group(cluster, question.workload.model.num_experts, cluster.num_ranks // cluster.sizes[0])
    alone = Cluster(cluster.levels[1:] or (replace(cluster.levels[0], size=1),))
    return alone, without_domains(inside.spans(cluster)[-len(alone.levels) :], question.dense_sync)


def _why(sites: Sites, cluster: Cluster, inside: PricedPlan, codecs: CodecCosts) -> str:
    """What these sites are, and what of their step the exchange takes."""
    coded = "encoded" if codecs.is_lossy else "exact"
    hidden = f", {sites.hidden_s:.3g} s more are hidden" if sites.hidden_s else ""
    text = f"a job in each {cluster.levels[0].name}, EP over {inside.group_size} inside; exchange, {coded}: "
    text += f"{sites.exchange_s:.3g} s of the step{hidden}"
    return text if sites.every == 1 else f"{text}; not the same training: loss may differ"


# ---- ways of other programs ----


def _pipeline(question: Question) -> list[Alternative]:
    """The fastest pipeline with a stage in each child of level 0, if possible one that fits."""
    cluster, workload, stages = question.cluster, question.workload, question.cluster.sizes[0]
    if workload.model.num_moe_layers < stages:
        return []
    alone, plan = _one_child(question)
    whole = predict(alone, plan, workload, question.rates)
    found = pipelines(cluster, plan, workload, question.rates, whole=whole)
    best = min(found, key=lambda one: (question.lacking_bytes(one.memory) > 0, one.step_s))
    outer, batches = cluster.levels[0].name, stages * workload.micro_steps
    way = Alternative(
        name=f"pipeline across {outer}s, EP in each",
        step_s=best.step_s,
        memory_bytes=best.memory.total_bytes,
        crossing_bytes=best.border_bytes,
        note=f"{batches} micro-batches, bubble {best.bubble_s:.3g} s",
        remark=f"1F1B, as Megatron-LM has it: {batches} micro-batches, {stages} stages x {workload.micro_steps}, "
        f"{number(best.bubble_s)} s idle at both ends and for the link",
        waits=_waits_of_pipeline(whole, best),
    )
    return [_elsewhere(question, way, best.memory)]


def _waits_of_pipeline(whole: StepPrediction, pipeline: Pipeline) -> tuple[str, float]:
    """Its stages compute as long as all layers on one child; what that child waits for, they wait for likewise."""
    words, inside_s = whole.waits()
    longest = "other stages" if pipeline.bubble_s >= inside_s else words
    return longest, pipeline.step_s - (whole.step_s - inside_s)


def _local_sgd(question: Question) -> Alternative:
    """Each child of level 0 trains by itself, and parameters are averaged every H steps, the least that is carried."""
    cluster, workload = question.cluster, question.workload
    alone, plan = _one_child(question)
    whole = predict(alone, plan, workload, question.rates)
    inside = largest_group(cluster, workload.model.num_experts, cluster.num_ranks // cluster.sizes[0])
    averaged = question.predict(without_domains(inside.spans(cluster), question.dense_sync))
    whole_s = averaged.terms_s["dense_sync_s"] + averaged.terms_s["expert_sync_s"]
    carried = (one for one in SITES_EVERY[1:] if whole_s / one <= CARRIED * (whole.step_s + whole_s / one))
    every = next(carried, SITES_EVERY[-1])
    average_s = whole_s / every
    memory = memory_of(alone, plan, workload)
    way = Alternative(
        name=f"local SGD, H = {every}",
        step_s=whole.step_s + average_s,
        memory_bytes=memory.total_bytes,
        crossing_bytes=averaged.level_bytes(0) / every,
        note="not the same training: loss may differ",
        remark="averages are not encoded",
        training="local steps",
        waits=whole.waits({"averages": average_s}),
    )
    return _elsewhere(question, way, memory)


def _elsewhere(question: Question, way: Alternative, memory: Memory) -> Alternative:
    """A way that this program does not provide."""
    lacking = question.lacking_bytes(memory)
    notes = [lacking_note(lacking)] if lacking else []
    notes += ["not provided here", way.note]
    remark = f"not provided here; {way.remark}"
    return replace(way, lacking_bytes=lacking, note="; ".join(notes), remark=remark)
