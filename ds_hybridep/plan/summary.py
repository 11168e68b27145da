# SPDX-License-Identifier: Apache-2.0
"""The answer in words and tables for people; what to paste is in `paste`, the JSON for programs in `answer`."""

from collections.abc import Sequence
from typing import Any

from ds_hybridep.geometry.cluster import BITS_PER_BYTE, MS_PER_S, Level, known_or_assumed_bandwidths
from ds_hybridep.plan.answer import TIE, Answer, Candidate
from ds_hybridep.plan.plan import EXACT
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import Alternative, lacking_note, sites_at
from ds_hybridep.plan.room import changes_on_as_many_gpus, changes_that_fit
from ds_hybridep.plan.table import LEAST_WAIT, Row, bill_of, chosen_row, row_of_plan, row_of_way, rows_of
from ds_hybridep.plan.workload import Workload

GIGA = 1e9
MOST_WAIT = 0.95  # share of a step; who waits longer should not train like this
MOST_LACKING = 0.75  # of a GPU's memory: the next larger GPU has it
MUCH_FASTER = 1.5  # times, which is worth more memory
LEAST_GAIN = 1.1  # times as fast as what people have now; less is not worth the change


def level_settings(level: Level) -> dict[str, Any]:
    """A level as in a "hybridep" block: its name, its size and what is known of its link, with six digits."""
    bandwidth, latency_s = level.link.bandwidth_bytes_per_s, level.link.latency_s
    known = {
        "bandwidth_gbps": None if bandwidth is None else bandwidth * BITS_PER_BYTE / GIGA,
        "latency_ms": None if latency_s is None else latency_s * MS_PER_S,
    }
    numbers = {key: float(f"{value:.6g}") for key, value in known.items() if value is not None}
    several = {"connections": level.link.connections} if level.link.connections > 1 else {}
    control = {"congestion_control": level.link.congestion_control} if level.link.congestion_control else {}
    return {"name": level.name, "size": level.size, **numbers, **several, **control}


def is_for_you(answer: Answer) -> bool:
    """True if this program trains the model, and clearly faster than what people have now."""
    now = answer.now
    is_faster = not now.is_possible or now.step_s >= LEAST_GAIN * answer.chosen.step_s
    return is_faster and not answer.lacking_bytes and not _lacks_autoep(answer) and not only_waits(answer)


def only_waits(answer: Answer) -> bool:
    """True if GPUs wait nearly all the time, however much longer they wait in what people have."""
    chosen = chosen_row(answer)
    return chosen.wait_s > MOST_WAIT * chosen.step_s


def _lacks_autoep(answer: Answer) -> bool:
    model = answer.question.workload.model
    return model.is_of_hub and model.autoep_preset is None


def verdict(answer: Answer) -> list[str]:
    """Sentences: whether it is for you, and why; then how, and what to know."""
    if answer.lacking_bytes and not _lacks_autoep(answer):
        return _does_not_fit(answer)
    now, chosen = answer.now, chosen_row(answer)
    if is_for_you(answer):
        advice = _advice_on_groups(answer) if isinstance(answer.chosen, Candidate) else []
        return [f"For you: {_beside_now(answer)}", _how(answer), *_notes(answer), *advice]
    if _lacks_autoep(answer):
        return [
            "Not for you, because DeepSpeed's AutoEP has no preset for models of this kind.",
            "The table says what this program would bring to layers of deepspeed.moe.layer of the same sizes. If you "
            "write these yourself, give --model a file with layers, hidden, ffn, experts and top_k.",
        ]
    if only_waits(answer):
        share = 1 - chosen.wait_s / chosen.step_s
        first = f"Not for you, because GPUs would compute {share:.0%} of the time: {_beside_now(answer)}"
        return [first, _how(answer), *_notes(answer)]
    if now.step_s <= chosen.step_s * (1 + TIE):
        because = "what you have now is as fast or faster"
    else:
        because = "it gains little"
    return [
        f"Not for you, because {because}: {_seconds(now.step_s)} with {now.name}, {_seconds(chosen.step_s)} with "
        f"this program. Keep what you have.",
        _how(answer, "Its best is "),
        *_elsewhere(answer),
    ]


def _does_not_fit(answer: Answer) -> list[str]:
    """Where nothing of this program fits: what is missing, what fits else, and what to change."""
    question, memory, now = answer.question, answer.chosen_memory, answer.now
    pairs = (
        ("on each GPU", memory.total_bytes, question.memory_bytes),
        ("on the host for each GPU", memory.host_bytes, question.host_memory_bytes),
    )
    missing = " and ".join(
        f"{needed / GIGA:.1f} GB {where}, which has {limit / GIGA:g}"
        for where, needed, limit in pairs
        if limit is not None and needed > limit
    )
    lines = [f"Not for you, because it does not fit: {chosen_row(answer).name} needs {missing}, and is the smallest."]
    if now.is_possible:
        lines.append(f"Of what you have now, {now.name} fits, {_seconds(now.step_s)}.")
    else:
        lines.append(f"Nothing that you have now can do it either: {now.name} {_why_not(now)}.")
    changes = changes_that_fit(question)
    if changes:
        lines.append(f"It fits with {_listed([change.words for change in changes])}.")
    else:
        lines.append("Nothing that this program knows makes it fit: take a smaller model, or many more GPUs.")
    return [*lines, *_elsewhere(answer)]


def _listed(words: Sequence[str]) -> str:
    """a; b; or c."""
    *first, last = words
    return f"{'; '.join(first)}; or {last}" if first else last


def _beside_now(answer: Answer) -> str:
    """Seconds of a step, beside those of what people have now."""
    now, step_s = answer.now, answer.chosen.step_s
    if not now.is_possible:
        return f"{_seconds(step_s)}. Nothing that you have now can do it: {now.name} {_why_not(now)}."
    ratio = now.step_s / step_s
    return f"{ratio:.3g} times as fast, {_seconds(step_s)} instead of {number(now.step_s)} s with {now.name}."


def _why_not(way: Alternative) -> str:
    return way.refused or lacking_note(way.lacking_bytes)


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


def _notes(answer: Answer) -> list[str]:
    """What a reader should know before taking the chosen way."""
    chosen, lines = chosen_row(answer), []
    if chosen.training == "lossy":
        lines.append(
            "Lossy: gradients that cross the slow link are approximated, and what is lost is sent later "
            "(docs/codecs.md has losses); --codecs exact leaves this out."
        )
    if chosen.wait_s > chosen.step_s / 2:
        lines.append(
            f"It waits {number(chosen.wait_s)} of {number(chosen.step_s)} s, for {chosen.waits_for} most: the link "
            f"decides. {_what_helps(chosen)}; faster GPUs do not."
        )
    lines += _with_more_memory(answer)
    others = [way for way in answer.alternatives if way.is_possible and way is not answer.chosen]
    steps = [way for way in others if way.sites is not None and way.sites.every > 1]
    if steps and steps[0].step_s * LEAST_GAIN < chosen.step_s:
        lines.append(
            f"If local steps, which are another training, are fine: {steps[0].name}, {_seconds(steps[0].step_s)}."
        )
    return [*lines, *_elsewhere(answer)]


def _what_helps(chosen: Row) -> str:
    """Token rows grow with the tokens of a step; all else is the same for more tokens."""
    if chosen.waits_for == "token rows":
        return "More bandwidth (--sweep wan) helps"
    return "More tokens for each step (--accumulation) or more bandwidth (--sweep wan) help"


def _elsewhere(answer: Answer) -> list[str]:
    """The fastest way of another program, where it is faster or all that fits."""
    elsewhere, step_s = answer.better_elsewhere, answer.chosen.step_s
    if elsewhere is None:
        return []
    what = f"{elsewhere.name}, {_seconds(elsewhere.step_s)}"
    if answer.lacking_bytes:
        return [f"Fits where you can have it: {what} ({elsewhere.note})."]
    return [f"Faster where you can have it: {what}, {step_s / elsewhere.step_s:.3g} times as fast ({elsewhere.note})."]


def _encoded_over(answer: Answer) -> str:
    """Words for the levels over which the best plan encodes."""
    pairs = zip(answer.question.cluster.levels, answer.best.plan.codecs, strict=True)
    names = [level.name for level, codecs in pairs if codecs.label != EXACT]
    return f"; what crosses {' and '.join(names)} is encoded" if names else ""


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
            f"Each group is inside one {outermost.name}: no token and no replica crosses the slow link, only "
            f"gradients and weights that both sides hold; domain_size there must be 1."
        )
    return lines


def describe(answer: Answer, steps: int, price_per_gb: float | None = None) -> str:
    """The whole answer as text, without settings to paste: verdict, question, table, memory, hours and money."""
    sections = [
        "\n".join(verdict(answer)),
        describe_question(answer.question),
        _table(answer),
        describe_memory(answer),
        *describe_hot(answer),
        describe_bills(answer, steps, price_per_gb),
    ]
    return "\n\n".join(section for section in sections if section)


def _table(answer: Answer) -> str:
    text = aligned(table_of(answer), left=(0, 1, 6, 7, 8))
    return "\n".join([text, "", *legend(answer)])


def table_of(answer: Answer) -> list[list[str]]:
    """Cells of the table, the header first: mark of the chosen row, name, numbers, training, wait, note, max/mean."""
    outer = answer.question.cluster.levels[0].name
    is_uneven = answer.best.routing.weights is not None
    header = ["", "", "s/step", "tokens/s", "GB/GPU", f"GB/step, {outer} link", "training", "waits for", ""]
    rows = [_cells(row) for row in rows_of(answer)]
    if is_uneven:
        header.append("max/mean")
        loads = ["" if row.load is None else f"{row.load:.2f}" for row in rows_of(answer)]
        rows = [[*cells, load] for cells, load in zip(rows, loads, strict=True)]
    return [header, *rows]


def legend(answer: Answer, mark: str = "->") -> list[str]:
    """Sentences about the table's words; mark: of the chosen row."""
    levels = [level.name for level in answer.question.cluster.levels]
    rows = rows_of(answer)
    words = {
        "sites, H": "H: steps from one exchange of sites to the next.",
        "host state": "host state: what codecs keep is in host memory.",
        "strided": f"strided: ranks at equal distances over every {levels[0]}.",
    }
    lines = [
        f"{mark} is the best of this program. tokens/s: of all GPUs. GB/step: over the link of one {levels[0]}, each "
        f"way. waits for: the longest wait, and all waits as a share of the step.",
        f"[..]: domain sizes, ranks with replicas of each other's experts; a|b: codecs; both by level "
        f"({', '.join(levels)}). ep: ranks that share the experts.",
    ]
    used = [meaning for word, meaning in words.items() if any(word in row.name for row in rows)]
    lines += [" ".join(used)] if used else []
    if answer.others:
        lines.append(f"{len(answer.others) + 1} plans were priced; --json has them all.")
    return lines


def _cells(row: Row) -> list[str]:
    share = row.wait_s / row.step_s
    waits = f"{row.waits_for}, {share:.0%}" if share >= LEAST_WAIT else "next to nothing"
    notes = [f"lacks {number(row.lacking_bytes / GIGA, 3)} GB"] if row.lacking_bytes else []
    notes += [row.remark] if row.remark else []
    return [
        "->" if row.is_chosen else "",
        row.name,
        number(row.step_s),
        f"{row.tokens_per_s:.0f}",
        f"{row.memory_bytes / GIGA:.1f}",
        "" if row.link_bytes is None else number(row.link_bytes / GIGA),
        row.training,
        waits,
        "; ".join(notes),
    ]


def number(value: float, digits: int = 4) -> str:
    """So many digits, or all of a larger number, without an exponent."""
    return f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def describe_bills(answer: Answer, steps: int, price_per_gb: float | None) -> str:
    """Hours and GB of some steps, for the chosen way and for what people have now."""
    now = row_of_way(answer, answer.now)
    lines = []
    for what, row in (("this program", chosen_row(answer)), ("what you have now", now)):
        if row.lacking_bytes or (row.kind == "now" and not answer.now.is_possible):
            continue
        bill = bill_of(row, answer.question, steps, price_per_gb)
        text = f"{steps} steps with {what}: {bill.hours:.3g} hours of {answer.question.cluster.num_ranks} GPUs"
        if bill.link_gb is not None:
            text += f", {bill.link_gb:,.0f} GB out of all {answer.question.cluster.levels[0].name}s together"
        lines.append(text if bill.price is None else f"{text}, which cost {bill.price:,.2f} at {price_per_gb:g} a GB")
    return "\n".join(lines)


def describe_hot(answer: Answer) -> list[str]:
    """What hot experts the plan has, or that it has none; nothing under even routing."""
    plan, routing, question = answer.best.plan, answer.best.routing, answer.question
    if not question.workload.is_uneven:
        return []
    if plan.hot is None:
        return [f"Hot experts: none. The fullest rank computes {routing.load_after:.2f} times the mean."]
    return [
        f"Hot experts: {plan.num_hot} of each layer, inside level {question.cluster.levels[plan.hot.level].name}. "
        f"The fullest rank computes {routing.load_after:.2f} instead of {routing.load_before:.2f} times the mean."
    ]


def describe_memory(answer: Answer) -> str:
    """What the chosen way's bytes on a GPU are for."""
    memory = answer.chosen_memory
    parts = {
        "DeepSpeed's state": memory.dense_bytes + memory.owned_expert_bytes,
        "replicas and what codecs keep": memory.copies_bytes,
        "activations": memory.activation_bytes,
        "allowance": memory.workspace_bytes,
        "on the host": memory.host_bytes,
    }
    text = ", ".join(f"{name} {num_bytes / GIGA:.1f}" for name, num_bytes in parts.items() if num_bytes)
    return f"GB per GPU of {chosen_row(answer).name}: {text}"


def describe_question(question: Question) -> str:
    """What was asked: the model, a note on it, the links, the training; a line for each."""
    workload, model = question.workload, question.workload.model
    assumed = known_or_assumed_bandwidths(question.cluster)
    links = []
    for index, (level, bandwidth) in enumerate(zip(question.cluster.levels, assumed, strict=True)):
        text = f"{level.size} {level.name}{' in each' * (index > 0)}, {_gbps(bandwidth)}"
        if level.link.bandwidth_bytes_per_s is None:
            text += " assumed"
        if level.link.latency_s:
            text += f", {level.link.latency_s * MS_PER_S:g} ms"
        links.append(text)
    details = [
        f"{workload.tokens_per_rank} tokens per GPU and micro-step",
        *([f"sequences of {workload.sequence_tokens}"] if workload.sequence_tokens else []),
        f"{workload.micro_steps} micro-step{'s' if workload.micro_steps > 1 else ''}",
        f"{workload.param_bytes} B per parameter",
        f"ZeRO-{workload.zero_stage}",
        f"learning rate {workload.learning_rate:g}",
        f"{question.rates.flops_per_s / 1e12:g} TFLOPS reached per GPU",
    ]
    if workload.is_uneven:
        details.append(f"skew {workload.skew:g}" if workload.skew > 1 else "measured loads of experts")
    if workload.offloads_optimizer:
        details.append("the optimizer on the host")
    if workload.is_checkpointed:
        details.append("activation checkpointing")
    if workload.has_fused_loss:
        details.append("a fused loss")
    sizes = (
        f"{model.name}: {model.num_params / GIGA:.1f} B parameters, {model.num_active_params / GIGA:.1f} B "
        f"active, {_trained(workload)}; {model.num_moe_layers} MoE layers of {model.num_experts} experts of "
        f"{model.expert_params * workload.param_bytes / 1e6:.1f} MB, top-{model.top_k}"
    )
    notes = [f"Note: {model.note}."] if model.note else []
    return "\n".join([sizes, *notes, "; ".join(links), ", ".join(details)])


def _trained(workload: Workload) -> str:
    if workload.num_train_params >= workload.model.num_params:
        return "all trained"
    return f"{workload.num_train_params / GIGA:.3g} B of adapters trained"


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Format rows as lines; columns in `left` are aligned left, the others, which hold numbers, are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _with_more_memory(answer: Answer) -> list[str]:
    """The fastest of ours that lacks some memory, if it is the same training and much faster than what fits."""
    question, limit = answer.question, (answer.question.memory_bytes or 0.0) * MOST_LACKING
    ways = [way for way in answer.alternatives if way.sites is not None and way.sites.every == 1]
    found: list[Candidate | Alternative] = [*answer.others, *ways]
    found = [one for one in found if 0 < one.lacking_bytes <= limit]
    best = min(found, key=lambda one: one.step_s, default=None)
    if best is None or MUCH_FASTER * best.step_s >= answer.chosen.step_s:
        return []

    def lacks(changed: Question) -> float:
        return changed.memory(best.plan)[1] if isinstance(best, Candidate) else sites_at(changed, 1).lacking_bytes

    row = row_of_plan(answer, best) if isinstance(best, Candidate) else row_of_way(answer, best)
    changes = changes_on_as_many_gpus(question, lacks)
    how = f" It fits with {_listed([one.words for one in changes])}." if changes else ""
    more = f"{best.lacking_bytes / GIGA:.3g} GB more on each GPU"
    return [f"With {more}: {row.name}, {_seconds(best.step_s)}.{how}"]


def _seconds(value: float) -> str:
    return f"{number(value)} s a step"


def _gbps(bytes_per_s: float) -> str:
    gbits = bytes_per_s * BITS_PER_BYTE / GIGA
    return f"{gbits:.4g} Gbit/s" if gbits >= 1 else f"{gbits * 1e3:.3g} Mbit/s"
