# SPDX-License-Identifier: Apache-2.0
"""What to change in a question so that something fits into memory: batch, ZeRO, offload, adapters, GPUs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.plan.adapters import with_adapters
from ds_hybridep.plan.machines import GPUS
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import without_domains
from ds_hybridep.plan.workload import Workload

MOST_GPUS = 64  # times as many as asked for, before more GPUs are no advice
LORA_RANK = 16

Lacks = Callable[[Question], float]  # bytes that something lacks under a question


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a question, in words that name the option."""

    words: str
    question: Question


Save = Callable[[Question, Lacks], Change | None]


def least_lacking_bytes(question: Question) -> float:
    """Bytes that the smallest plan lacks: the one without copies and codecs."""
    spans = (group.spans(question.cluster) for group in question.expert_groups)
    return min(question.memory(without_domains(each, question.dense_sync))[1] for each in spans)


def changes_that_fit(question: Question, lacks: Lacks = least_lacking_bytes) -> list[Change]:
    """Changes of which each makes it fit; what saves memory comes together, or beside the others, if it must.

    lacks: of what should fit; by default the smallest plan.
    """
    return _that_fit(question, lacks, (_adapters(question), _larger_gpus(question), _more_gpus(question)))


def changes_on_as_many_gpus(question: Question, lacks: Lacks) -> list[Change]:
    """The same, with the same training and the same number of GPUs."""
    return _that_fit(question, lacks, (_larger_gpus(question),))


def _that_fit(question: Question, lacks: Lacks, kinds: Sequence[list[Change]]) -> list[Change]:
    """kinds: other changes, from the least of each kind to the most."""
    savings = [change for save in SAVINGS if (change := save(question, lacks)) and not lacks(change.question)]
    if not savings:
        together = _together(question, lacks)
        savings = [together] if together.words and not lacks(together.question) else []
    more = [_first(changes, lacks) for changes in kinds]
    found = [*savings, *(change for change in more if change is not None)]
    if not found:
        more = [_first((_beside_savings(change, lacks) for change in changes), lacks) for changes in kinds]
        found = [change for change in more if change is not None]
    return found


def _first(changes: Iterable[Change], lacks: Lacks) -> Change | None:
    return next((change for change in changes if not lacks(change.question)), None)


def _beside_savings(change: Change, lacks: Lacks) -> Change:
    saved = _together(change.question, lacks)
    return replace(saved, words=f"{change.words}, beside {saved.words}" if saved.words else change.words)


# ---- the same training on the same GPUs, with less memory ----


def _together(question: Question, lacks: Lacks) -> Change:
    """As few as make it fit, or all of them if it does not."""
    whole = _applied(question, lacks, SAVINGS)
    if lacks(whole.question):
        return whole
    needed = list(SAVINGS)
    for save in SAVINGS[::-1]:
        fewer = [one for one in needed if one is not save]
        if not lacks(_applied(question, lacks, fewer).question):
            needed = fewer
    return _applied(question, lacks, needed)


def _applied(question: Question, lacks: Lacks, saves: Iterable[Save]) -> Change:
    words, changed = list[str](), question
    for save in saves:
        change = save(changed, lacks)
        if change is not None:
            changed = change.question
            words.append(change.words)
    return Change(words=" ".join(words), question=changed)


def _checkpointing(question: Question, lacks: Lacks) -> Change | None:
    del lacks
    workload = question.workload
    if workload.is_checkpointed:
        return None
    return _with(question, "--checkpointing", replace(workload, is_checkpointed=True))


def _smaller_micro_batches(question: Question, lacks: Lacks) -> Change | None:
    """The largest that fit, else the smallest, of one sequence; a step has the same tokens."""
    found = None
    for workload in question.workload.in_smaller_micro_batches():
        words = f"--tokens {workload.tokens_per_rank} --accumulation {workload.micro_steps}"
        found = _with(question, words, workload)
        if not lacks(found.question):
            break
    return found


def _gradients_in_parts(question: Question, lacks: Lacks) -> Change | None:
    """Not with adapters, of which those of experts refuse it."""
    del lacks
    workload = question.workload
    if workload.zero_stage != 1 or workload.model.num_adapter_params:
        return None
    return _with(question, "--zero-stage 2", replace(workload, zero_stage=2))


def _optimizer_on_the_host(question: Question, lacks: Lacks) -> Change | None:
    del lacks
    workload = question.workload
    if workload.zero_stage == 0 or workload.offloads_optimizer:
        return None
    return _with(question, "--offload-optimizer", replace(workload, offloads_optimizer=True))


SAVINGS: tuple[Save, ...] = (_checkpointing, _gradients_in_parts, _optimizer_on_the_host, _smaller_micro_batches)


# ---- other adapters, a larger GPU, more GPUs ----


def _adapters(question: Question) -> list[Change]:
    workload = question.workload
    if workload.model.num_adapter_params:
        return []
    adapted, (of_expert, of_dense) = with_adapters(workload.model, "all", LORA_RANK)
    changed = replace(
        workload,
        model=adapted,
        trainable_expert_shapes=of_expert,
        trainable_dense_shapes=of_dense,
        zero_stage=min(workload.zero_stage, 1),  # adapters of experts refuse 2
    )
    stage = " --zero-stage 1" if workload.zero_stage == 2 else ""
    words = f"--lora all{stage} (only adapters are trained)"
    return [Change(words=words, question=replace(question, workload=changed, adapters=("all", LORA_RANK)))]


def _larger_gpus(question: Question) -> list[Change]:
    """By memory; only that is changed."""
    limit = question.memory_bytes or 0.0
    larger = sorted((gpu for gpu in GPUS.values() if gpu.memory_bytes > limit), key=lambda gpu: gpu.memory_bytes)
    changes = list[Change]()
    for gpu in larger:
        size = f"{gpu.memory_bytes / 1e9:.0f}"
        words = f"GPUs of {size} GB, such as {gpu.name} (--memory {size})"
        changes.append(Change(words=words, question=replace(question, memory_bytes=gpu.memory_bytes)))
    return changes


def _more_gpus(question: Question) -> list[Change]:
    """Twice, four times ... as many in each child of level 0."""
    levels, changes, factor = question.cluster.levels, list[Change](), 2
    at = min(1, len(levels) - 1)
    while factor <= MOST_GPUS:
        level = replace(levels[at], size=levels[at].size * factor)
        cluster = Cluster((*levels[:at], level, *levels[at + 1 :]))
        words = f"{cluster.num_ranks} GPUs instead of {question.cluster.num_ranks}"
        changes.append(Change(words=words, question=replace(question, cluster=cluster)))
        factor *= 2
    return changes


def _with(question: Question, words: str, workload: Workload) -> Change:
    return Change(words=words, question=replace(question, workload=workload))
