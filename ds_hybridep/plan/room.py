# SPDX-License-Identifier: Apache-2.0
"""What to change in a question so that something fits into memory: batch, ZeRO, offload, adapters, GPUs."""

from collections.abc import Callable, Iterable, Iterator
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


def least_lacking_bytes(question: Question) -> float:
    """Bytes that the smallest plan lacks: the one without copies and codecs."""
    spans = (group.spans(question.cluster) for group in question.expert_groups)
    return min(question.memory(without_domains(each, question.dense_sync))[1] for each in spans)


def changes_that_fit(question: Question, lacks: Lacks = least_lacking_bytes) -> list[Change]:
    """Changes of which each alone makes it fit; where memory can be saved for nothing, the others come beside that.

    lacks: of what should fit; by default the smallest plan.
    """
    return _that_fit(question, lacks, _resources)


def changes_on_as_many_gpus(question: Question, lacks: Lacks) -> list[Change]:
    """The same, with the same training and the same number of GPUs."""
    return _that_fit(question, lacks, _larger_gpu)


def _that_fit(
    question: Question, lacks: Lacks, resources: Callable[[Question, Lacks], Iterator[Change]]
) -> list[Change]:
    alone = [
        change for change in (*_savings(question, lacks), *resources(question, lacks)) if not lacks(change.question)
    ]
    if alone:
        return alone
    saved = _together(question, lacks)
    if not lacks(saved.question):
        return [saved]
    beside = f", beside {saved.words}" if saved.words else ""
    more = (change for change in resources(saved.question, lacks) if not lacks(change.question))
    return [replace(change, words=f"{change.words}{beside}") for change in more]


# ---- the same training on the same GPUs, with less memory ----


def _savings(question: Question, lacks: Lacks) -> list[Change]:
    return [change for save in SAVINGS if (change := save(question, lacks)) is not None]


def _together(question: Question, lacks: Lacks) -> Change:
    """One after the other until it fits; all of them if it does not."""
    words, changed = list[str](), question
    for save in SAVINGS:
        change = save(changed, lacks) if lacks(changed) else None
        if change is not None:
            changed = change.question
            words.append(change.words)
    return Change(words=" and ".join(words), question=changed)


def _checkpointing(question: Question, lacks: Lacks) -> Change | None:
    del lacks
    workload = question.workload
    if workload.is_checkpointed:
        return None
    return _with(question, "--checkpointing", replace(workload, is_checkpointed=True))


def _smaller_micro_batches(question: Question, lacks: Lacks) -> Change | None:
    """The largest that fit, else the smallest, of one sequence; a step has the same tokens."""
    workload, parts, found = question.workload, 1, None
    while workload.tokens_per_rank // (2 * parts) >= max(workload.sequence_tokens, 1):
        parts *= 2
        tokens, micro_steps = workload.tokens_per_rank // parts, workload.micro_steps * parts
        words = f"--tokens {tokens} --accumulation {micro_steps} (the same step in smaller micro-batches)"
        found = _with(question, words, replace(workload, tokens_per_rank=tokens, micro_steps=micro_steps))
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


SAVINGS: tuple[Callable[[Question, Lacks], Change | None], ...] = (
    _checkpointing,
    _smaller_micro_batches,
    _gradients_in_parts,
    _optimizer_on_the_host,
)


# ---- other adapters, a larger GPU, more GPUs ----


def _resources(question: Question, lacks: Lacks) -> Iterator[Change]:
    workload = question.workload
    if not workload.model.num_adapter_params:
        adapted, (of_expert, of_dense) = with_adapters(workload.model, "all", LORA_RANK)
        changed = replace(
            workload, model=adapted, trainable_expert_shapes=of_expert, trainable_dense_shapes=of_dense, zero_stage=1
        )
        yield _with(question, "--lora all (only adapters are trained)", changed)
    yield from _larger_gpu(question, lacks)
    yield from _first_that_fits(_more_gpus(question), lacks)


def _larger_gpu(question: Question, lacks: Lacks) -> Iterator[Change]:
    yield from _first_that_fits(_larger_gpus(question), lacks)


def _first_that_fits(changes: Iterable[Change], lacks: Lacks) -> Iterator[Change]:
    yield from [change for change in changes if not lacks(change.question)][:1]


def _larger_gpus(question: Question) -> Iterator[Change]:
    """By memory; only that is changed."""
    for gpu in sorted(GPUS.values(), key=lambda one: one.memory_bytes):
        if gpu.memory_bytes > (question.memory_bytes or 0.0):
            words = f"--gpu {gpu.name} ({gpu.memory_bytes / 1e9:.0f} GB)"
            yield Change(words=words, question=replace(question, memory_bytes=gpu.memory_bytes))


def _more_gpus(question: Question) -> Iterator[Change]:
    """Twice, four times ... as many in each child of level 0."""
    levels, factor = question.cluster.levels, 2
    at = min(1, len(levels) - 1)
    while factor <= MOST_GPUS:
        level = replace(levels[at], size=levels[at].size * factor)
        cluster = Cluster((*levels[:at], level, *levels[at + 1 :]))
        yield Change(
            words=f"{cluster.num_ranks} GPUs instead of {question.cluster.num_ranks}",
            question=replace(question, cluster=cluster),
        )
        factor *= 2


def _with(question: Question, words: str, workload: Workload) -> Change:
    return Change(words=words, question=replace(question, workload=workload))
