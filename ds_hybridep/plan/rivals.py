# SPDX-License-Identifier: Apache-2.0
"""Other ways to train the same model, to compare a plan with: DeepSpeed's, and two other programs, priced only."""

from dataclasses import dataclass, replace

from ds_hybridep.plan.cluster import Cluster, known_or_assumed_bandwidths
from ds_hybridep.plan.costs import ranks_below
from ds_hybridep.plan.layout import ExpertGroup, Layout, LevelCodecs, Rates
from ds_hybridep.plan.question import Question, largest_group
from ds_hybridep.plan.stream_model import StepPrediction, predict

LOCAL_STEPS = 100  # optimizer steps between two synchronisations of local SGD


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to train the same model; one without `layout` is another program, which is priced only."""

    name: str
    step_s: float | None  # None where it does not exist here, and `note` says why
    prediction: StepPrediction | None = None
    layout: Layout | None = None
    memory_bytes: float | None = None
    lacking_bytes: float = 0.0  # beyond what there is; 0 also where it was not checked
    note: str = ""

    @property
    def is_by_deepspeed(self) -> bool:
        """It needs none of this program."""
        return self.layout is not None and self.layout.is_padded

    @property
    def is_provided(self) -> bool:
        """DeepSpeed or this program can do it."""
        return self.layout is not None


def alternatives(question: Question) -> list[Alternative]:
    """The ways to compare with, in the order in which they are reported."""
    cluster, num_experts = question.cluster, question.workload.model.num_experts
    across = max(question.expert_groups, key=lambda group: (group.spans(cluster)[0], group.ep_size))
    inside = largest_group(cluster, num_experts, cluster.num_ranks // cluster.sizes[0])
    plain = without_domains(across.spans(cluster))
    strided = ", strided" if across.is_strided else ""
    deduplicated, _ = question.with_best_exchange(plain)
    result = [
        _provided(question, f"DeepSpeed, EP over {across.ep_size}{strided}", replace(plain, is_padded=True)),
        _provided(question, f"EP over {across.ep_size}{strided}, exchange de-duplicated", deduplicated),
    ]
    if inside != across:
        parallel = without_domains(inside.spans(cluster))
        name = f"EP over {inside.ep_size} inside each {cluster.levels[0].name}, data parallel across"
        exact, _ = question.with_best_exchange(parallel)
        result.append(_provided(question, f"DeepSpeed, {name}", replace(parallel, is_padded=True)))
        result.append(_provided(question, f"{name}, exact", exact))
    return [*result, _pipeline(question, inside), _local_sgd(question, inside)]


def without_domains(spans: tuple[int, ...]) -> Layout:
    """Plain expert parallelism: every expert stays where it is."""
    return Layout(spans=spans, domain_sizes=(1,) * len(spans), codecs=(LevelCodecs(),) * len(spans))


def _provided(question: Question, name: str, layout: Layout) -> Alternative:
    prediction = question.predict(layout)
    memory, lacking = question.memory(layout)
    return Alternative(
        name=name,
        step_s=prediction.step_s,
        prediction=prediction,
        layout=layout,
        memory_bytes=memory.total_bytes,
        lacking_bytes=lacking,
        note=lacking_note(lacking) if lacking else "",
    )


def lacking_note(num_bytes: float) -> str:
    """What is said of a layout that does not fit."""
    return f"needs {num_bytes / 1e9:.1f} GB more memory than there is"


def _inside_prediction(question: Question, inside: ExpertGroup) -> StepPrediction:
    """A step of one child of level 0 by itself, with all layers and de-duplicated exchange."""
    levels = question.cluster.levels[1:] or (replace(question.cluster.levels[0], size=1),)
    layout = without_domains(inside.spans(question.cluster)[-len(levels) :])
    return predict(Cluster(levels), layout, question.workload, question.rates, question.sync)


def _pipeline(question: Question, inside: ExpertGroup) -> Alternative:
    """Stages across level 0, each with a share of the layers and EP inside; the same tokens per step.

    n stages pass n A micro-batches of each rank's tokens: as much computation as before, times 1 + (n - 1) / (n A). A
    border is crossed by one row per token in each direction, hidden behind computation.
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
    terms = question.predict(without_domains(inside.spans(question.cluster))).terms
    return Alternative(
        name=f"local SGD, averaged every {LOCAL_STEPS} steps",
        step_s=prediction.step_s + (terms.dense_sync_s + terms.expert_sync_s) / LOCAL_STEPS,
        note="not provided here; not the same training: loss may differ",
    )


def break_even_tokens(question: Question, *, is_deduplicated: bool) -> float | None:
    """Tokens per rank and micro-step above which moving all experts over level 0 is fewer bytes than moving tokens.

    Compared are the bytes of an optimizer step with one domain at level 0 against none, with the de-duplicated
    exchange or DeepSpeed's padded one; they grow in proportion to tokens. None where the group is inside one child.
    """
    cluster = question.cluster
    spans = max((group.spans(cluster) for group in question.expert_groups), key=lambda spans: spans[0])
    if spans[0] == 1:
        return None
    # Many tokens, so that the capacity's rounding does not show.
    many, rates = replace(question.workload, tokens_per_rank=1_000_000), Rates(flops_per_s=1.0)
    codecs = question.with_tokens((question.codecs[0],) * len(spans))
    plain = replace(without_domains(spans), codecs=codecs, exchange="hierarchical")
    gathered = replace(plain, domain_sizes=(spans[0], *plain.domain_sizes[1:]))
    rows = predict(cluster, replace(plain, is_padded=not is_deduplicated), many, rates).uplink_bytes[0]
    experts = predict(cluster, gathered, many, rates).uplink_bytes[0]
    return many.tokens_per_rank * (experts["expert_weights"] + experts["expert_gradients"]) / rows["tokens"]
