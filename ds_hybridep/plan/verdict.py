# SPDX-License-Identifier: Apache-2.0
"""Whether this program is for you, and why: the sentences at the top of the answer."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from ds_hybridep.plan.answer import TIE, Answer, Candidate
from ds_hybridep.plan.plan import EXACT
from ds_hybridep.plan.planner import answer_of
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import Alternative, lacking_note, sites_at
from ds_hybridep.plan.room import Change, changes_on_as_many_gpus, changes_that_fit
from ds_hybridep.plan.table import Row, chosen_row, tokens_of_step
from ds_hybridep.plan.words import GIGA, count, number, seconds

MOST_WAIT = 0.95  # share of a step; who waits longer should not train like this
MOST_LACKING = 0.75  # of a GPU's memory: the next larger GPU has it
MUCH_FASTER = 1.5  # times, which is worth more memory
LEAST_GAIN = 1.1  # times as fast as what people have now; less is not worth the change
MORE_TOKENS = 2, 4, 8  # times as many micro-steps, which the answer is tried with


def is_for_you(answer: Answer) -> bool:
    """True if this program trains the model, and clearly faster than what people have now."""
    return not why_not_for_you(answer)


def why_not_for_you(answer: Answer) -> Literal["", "AutoEP", "memory", "waits", "gain"]:
    """What is missing in one word; empty: it is for you."""
    if _lacks_autoep(answer):
        return "AutoEP"
    if answer.lacking_bytes:
        return "memory"
    if _gains_little(answer):
        return "gain"
    return "waits" if only_waits(answer) else ""


def _gains_little(answer: Answer) -> bool:
    return answer.now.is_possible and answer.now.step_s < LEAST_GAIN * answer.chosen.step_s


def only_waits(answer: Answer) -> bool:
    """True if GPUs wait nearly all the time, however much longer they wait in what people have."""
    chosen = chosen_row(answer)
    return chosen.wait_s > MOST_WAIT * chosen.step_s


def _lacks_autoep(answer: Answer) -> bool:
    model = answer.question.workload.model
    return model.is_of_hub and model.autoep_preset is None


@lru_cache(maxsize=32)
def _asked(question: Question) -> Answer:
    """The answer to another question, such as one with more memory."""
    return answer_of(question)


def verdict(answer: Answer) -> list[str]:
    """Sentences: whether it is for you, and why; then how, and what to know."""
    reason = why_not_for_you(answer)
    if reason == "AutoEP":
        gains_little = not answer.lacking_bytes and _gains_little(answer)
        return [
            "Not for you, because DeepSpeed's AutoEP has no preset for models of this kind.",
            "The table says what this program would bring to layers of deepspeed.moe.layer of the same sizes. If you "
            "write these yourself, give --model a file with layers, hidden, ffn, experts and top_k.",
            *([_gains_too_little(answer, "With such layers it is not for you either")] if gains_little else []),
        ]
    if reason == "memory":
        return _does_not_fit(answer)
    if not reason:
        advice = _advice_on_groups(answer) if isinstance(answer.chosen, Candidate) else []
        return [f"For you: {_beside_now(answer)}{_exactly(answer)}", _how(answer), *_notes(answer), *advice]
    if reason == "waits":
        return [_waits_too_long(answer), _how(answer, "What fits here is "), *_notes(answer)]
    return [
        _gains_too_little(answer),
        _how(answer, "The best of this program is "),
        *_turn(answer),
        *_local_steps(answer),
        *_elsewhere(answer),
    ]


# ---- the first sentence ----


def _beside_now(answer: Answer) -> str:
    """Seconds of a step, beside those of what people have now."""
    now, step_s, lossy = answer.now, answer.chosen.step_s, _lossy(chosen_row(answer))
    if not now.is_possible:
        return f"{seconds(step_s)}{lossy}. Nothing without this program can do it: {now.name} {_why_not(now)}."
    ratio = number(now.step_s / step_s)
    both = f"{seconds(step_s)} instead of {number(now.step_s)} with {now.name}"
    times = answer.question.cluster.sizes[0]
    cost = f", for {'twice' if times == 2 else f'{times} times'} the GPUs" if now is answer.alone else ""
    return f"{ratio} times as fast{lossy}, {both}{cost}."


def _gains_too_little(answer: Answer, begin: str = "Not for you") -> str:
    now, chosen = answer.now, chosen_row(answer)
    ours = f"with this program{' (lossy)' * (chosen.training == 'lossy')}"
    if now is answer.alone:
        because = f"it gains little over {now.name}"
        if now.step_s <= chosen.step_s * (1 + TIE):
            because = f"{now.name} is {'faster' if now.step_s < chosen.step_s * (1 - TIE) else 'as fast'}"
        both = f"{seconds(now.step_s)} on {now.num_gpus} GPUs, {number(chosen.step_s)} s on {chosen.num_gpus} {ours}"
        return f"{begin}, because {because}: {both}. {_what_helps(answer.question, chosen)}."
    is_as_fast = now.step_s <= chosen.step_s * (1 + TIE)
    because = "what you can have without this program is as fast" if is_as_fast else "it gains little"
    both = f"{seconds(now.step_s)} with {now.name}, {number(chosen.step_s)} s {ours}"
    return f"{begin}, because {because}: {both}. Take {now.name}."


def _lossy(row: Row) -> str:
    return " with lossy gradients" if row.training == "lossy" else ""


def _exactly(answer: Answer) -> str:
    """After a lossy gain: what exact gradients gain."""
    codecs = tuple(one for one in answer.question.codecs if not one.is_lossy)
    if chosen_row(answer).training != "lossy" or not codecs:
        return ""
    exact = _asked(replace(answer.question, codecs=codecs))
    now, step_s = exact.now, exact.chosen.step_s
    if exact.lacking_bytes:
        return " With exact gradients (--codecs exact) it does not fit."
    if not now.is_possible:
        return f" With exact gradients (--codecs exact), {seconds(step_s)}."
    ratio = now.step_s / step_s
    gain = "it is slower" if ratio < 1 - TIE else "it gains nothing worth the change"
    if ratio >= LEAST_GAIN:
        gain = f"it is {number(ratio)} times as fast"
    with_what = "" if now.name == answer.now.name else f" with {now.name}"
    both = f"{seconds(step_s)} instead of {number(now.step_s)}{with_what}"
    return f" With exact gradients (--codecs exact) {gain}: {both}."


def _waits_too_long(answer: Answer) -> str:
    chosen, more = chosen_row(answer), _with_more_memory(answer)
    share = f"GPUs would compute {1 - chosen.wait_s / chosen.step_s:.0%} of the time"
    if more is None:
        return f"Not for you, because {share}: {_beside_now(answer)}"
    limit, found = (answer.question.memory_bytes or 0.0) / GIGA, _asked(more.question)
    is_good = "For you" if is_for_you(found) else "Not for you either"
    return (
        f"Not for you, because {limit:g} GB on each GPU are too few: what fits takes {seconds(chosen.step_s)}, and "
        f"{share}. {is_good} with {more.words}: {_beside_now(found)}"
    )


def _does_not_fit(answer: Answer) -> list[str]:
    """Where nothing of this program fits: what is missing, what to change, and what fits else."""
    question, memory, now = answer.question, answer.chosen_memory, answer.now
    pairs = (
        ("on each GPU", memory.total_bytes, question.memory_bytes),
        ("on the host for each GPU", memory.host_bytes, question.host_memory_bytes),
    )
    missing = " and ".join(
        f"{number(needed / GIGA)} GB {where}, which has {limit / GIGA:g}"
        for where, needed, limit in pairs
        if limit is not None and needed > limit
    )
    changes = changes_that_fit(question)
    if changes:
        one_of = "any one of: " if len(changes) > 1 else ""
        fits = f"It fits with {one_of}{_listed([_with_seconds(change) for change in changes])}."
    else:
        fits = "Nothing that this program knows makes it fit: take a smaller model, or many more GPUs."
    if now.is_possible:
        without = f"Without this program, {now.name} fits: {seconds(now.step_s)}."
    else:
        without = f"Nothing without this program can do it either: {now.name} {_why_not(now)}."
    first = f"Not for you, because it does not fit: the least that this program needs is {missing}. {fits}"
    return [first, without, *_elsewhere(answer)]


def _with_seconds(change: Change) -> str:
    found = _asked(change.question)
    about = f"about {float(f'{found.chosen.step_s:.2g}'):g} s a step"  # codecs are still those of the question
    return f"{change.words}: {about}, {'for you' if is_for_you(found) else 'not for you'}"


def _listed(words: Sequence[str]) -> str:
    """a; b; or c."""
    *first, last = words
    return f"{'; '.join(first)}; or {last}" if first else last


def _why_not(way: Alternative) -> str:
    return way.refused or lacking_note(way.lacking_bytes)


# ---- how, and what to know ----


def _how(answer: Answer, begin: str = "How: ") -> str:
    """What to take, in words."""
    chosen, outer = answer.chosen, answer.question.cluster.levels[0].name
    if not isinstance(chosen, Candidate):
        return f"{begin}one job in each {outer}, which exchange gradients at every step ({chosen.name})."
    if chosen.plan.domain_size == 1:
        hot = ", but hot experts have replicas" if chosen.plan.num_hot else ""
        what = f"experts stay where they are (domain sizes {list(chosen.plan.domain_sizes)}){hot}"
    else:
        what = f"experts have replicas where that is cheaper (domain sizes {list(chosen.plan.domain_sizes)})"
    return f"{begin}one job over all GPUs; {what}{_encoded_over(answer)}."


def _encoded_over(answer: Answer) -> str:
    """Words for the levels over which the best plan encodes, and for its codecs."""
    pairs = zip(answer.question.cluster.levels, answer.best.plan.codecs, strict=True)
    encoded = [(level.name, codecs) for level, codecs in pairs if codecs.label != EXACT]
    if not encoded:
        return ""
    codecs = encoded[0][1]
    how = f"weights: {codecs.weight.name}, gradients: {codecs.gradient.name}"
    return f"; what crosses {' and '.join(name for name, _ in encoded)} is encoded ({how})"


def _notes(answer: Answer) -> list[str]:
    """What a reader should know before taking the chosen way."""
    chosen, lines = chosen_row(answer), []
    if chosen.training == "lossy":
        lines.append(
            "Lossy: gradients that cross the slow link are approximated, and what is lost is sent later. Held-out "
            "loss of small models rose by 0.04% in fine-tuning, and by up to 3.8% from scratch "
            "(docs/benchmarks.md#loss); large models are untested."
        )
    if chosen.wait_s > chosen.step_s / 2:
        lines.append(
            f"It waits {number(chosen.wait_s)} of {number(chosen.step_s)} s, for {chosen.waits_for} most: the link "
            f"decides. {_what_helps(answer.question, chosen)}; faster GPUs do not."
        )
    lines += _turn(answer)
    more = None if only_waits(answer) else _with_more_memory(answer)
    if more is not None:
        found = chosen_row(_asked(more.question))
        lines.append(f"Faster with {more.words}: {found.name}, {seconds(found.step_s)}.")
    return [*lines, *_local_steps(answer), *_elsewhere(answer)]


def _to_beat_s(answer: Answer) -> float:
    """Seconds of a step of what the answer says to take."""
    return min(answer.chosen.step_s, answer.now.step_s if answer.now.is_possible else math.inf)


def _local_steps(answer: Answer) -> list[str]:
    ways = (way for way in answer.alternatives if way.sites is not None and way.sites.every > 1)
    return [
        f"If local steps, which are another training, are fine: {way.name}, {seconds(way.step_s)}."
        for way in ways
        if way.is_possible and way.step_s * LEAST_GAIN < _to_beat_s(answer)
    ]


def _what_helps(question: Question, chosen: Row) -> str:
    """Token rows grow with the tokens of a step; all else is the same for more tokens."""
    option = "--sweep wan" if question.cluster.sizes[0] > 1 else "--lan"
    if chosen.waits_for == "token rows":
        return f"More bandwidth ({option}) helps"
    return f"More tokens for each step (--accumulation) or more bandwidth ({option}) help"


def _turn(answer: Answer) -> list[str]:
    """Where a step with more tokens turns the answer: it sends the same bytes, so all ways come closer."""
    workload, is_ours = answer.question.workload, is_for_you(answer)

    def with_more(factor: int) -> Answer:
        more = replace(workload, micro_steps=factor * workload.micro_steps)
        return _asked(replace(answer.question, workload=more))

    if is_for_you(with_more(MORE_TOKENS[-1])) == is_ours:
        return []
    found = next(one for one in map(with_more, MORE_TOKENS) if is_for_you(one) != is_ours)
    micro_steps, tokens = found.question.workload.micro_steps, count(tokens_of_step(found.question))
    where = f"--accumulation {micro_steps} ({tokens} tokens in a step)"
    if not found.now.is_possible:
        return [f"With {where} it is for you: {seconds(found.chosen.step_s)}."]
    both = f"{seconds(found.chosen.step_s)} instead of {number(found.now.step_s)} with {found.now.name}"
    return [f"With {where} it is {'not ' if is_ours else ''}for you: {both}."]


def _with_more_memory(answer: Answer) -> Change | None:
    """Larger GPUs on which the same training is much faster than what fits here."""
    question, limit = answer.question, (answer.question.memory_bytes or 0.0) * MOST_LACKING
    ways = [way for way in answer.alternatives if way.sites is not None and way.sites.every == 1]
    lacking: list[Candidate | Alternative] = [*answer.others, *ways]
    lacking = [one for one in lacking if 0 < one.lacking_bytes <= limit]
    best = min(lacking, key=lambda one: one.step_s, default=None)
    if best is None or MUCH_FASTER * best.step_s >= answer.chosen.step_s:
        return None

    def lacks(changed: Question) -> float:
        return changed.memory(best.plan)[1] if isinstance(best, Candidate) else sites_at(changed, 1).lacking_bytes

    return next(iter(changes_on_as_many_gpus(question, lacks)), None)


def _elsewhere(answer: Answer) -> list[str]:
    """The fastest way of another program, where it is faster or all that fits."""
    elsewhere, step_s = answer.better_elsewhere, _to_beat_s(answer)
    if elsewhere is None or (not answer.lacking_bytes and elsewhere.step_s > step_s * (1 - TIE)):
        return []
    what = f"{elsewhere.name}, {seconds(elsewhere.step_s)}"
    if answer.lacking_bytes:
        return [f"Fits where you can have it: {what} ({elsewhere.remark})."]
    times = f"{number(step_s / elsewhere.step_s)} times as fast"
    return [f"Faster where you can have it: {what}, {times} ({elsewhere.remark})."]


def _advice_on_groups(answer: Answer) -> list[str]:
    question, group, plan = answer.question, answer.best.group, answer.best.plan
    cluster, num_experts = question.cluster, question.workload.model.num_experts
    outermost = cluster.levels[0]
    lines = []
    if num_experts < cluster.num_ranks:
        lines.append(
            f"{num_experts} experts cannot be spread over {cluster.num_ranks} ranks: groups of {group.ep_size} ranks "
            f"share them, and {cluster.num_ranks // group.ep_size} groups hold the same experts."
        )
    if group.is_strided:
        lines.append(
            f"The expert-parallel group has {group.ep_size} ranks at equal distances over every {outermost.name}; "
            f"use_data_before_expert_parallelism makes it so."
        )
    elif not question.workload.model.is_of_hub:
        lines.append(f"Give the MoE layers ep_size={group.ep_size}; groups are neighbouring ranks.")
    if outermost.size > 1 and plan.spans[0] == 1:
        lines.append(
            f"The {group.ep_size} GPUs that share the experts are inside one {outermost.name}: no token and no "
            f"replica crosses the slow link, only gradients and weights that both sides hold."
        )
    return lines
