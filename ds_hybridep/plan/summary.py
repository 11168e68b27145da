# SPDX-License-Identifier: Apache-2.0
"""What a plan means, in words, tables and settings for people; the JSON for programs is in `answer`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds_hybridep.geometry.cluster import BITS_PER_BYTE, MS_PER_S, Level, known_or_assumed_bandwidths
from ds_hybridep.plan.answer import Answer, Candidate
from ds_hybridep.plan.memory import Memory
from ds_hybridep.plan.plan import EXACT, PricedPlan
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import Alternative

GIGA = 1e9
MAX_ROWS = 8  # rows of a table for plans that lost
RECOMMENDED = "recommended"  # name of a set of codecs; a block asks for the set by this name


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


def ds_config_block(answer: Answer) -> dict[str, Any]:
    """Settings to paste into ds_config.json: the "hybridep" block, and other settings that the plan needs there."""
    plan, levels = answer.best.plan, []
    for level, domain_size, hot, codecs in zip(
        answer.question.cluster.levels, plan.domain_sizes, plan.hot_by_level, plan.codecs, strict=True
    ):
        entry = level_settings(level)
        entry["domain_size"] = domain_size
        if hot:
            entry["hot_experts"] = hot
        if codecs.name == RECOMMENDED:
            entry["codecs"] = RECOMMENDED
        levels.append(entry)
    block: dict[str, Any] = {"levels": levels}
    if plan.state == "host":
        block["state"] = "host"
    if sum(count > 1 for count in plan.domain_counts) > 1:
        block["token_exchange"] = plan.token_exchange
    if plan.dense_sync == "deepspeed":
        block["dense_sync"] = "deepspeed"
    settings: dict[str, Any] = {"hybridep": block}
    if answer.best.group.is_strided:
        settings["use_data_before_expert_parallelism"] = True
    return settings


def verdict(answer: Answer) -> list[str]:
    """One or more sentences: use it, use it without domains, or do not use it, and why."""
    best, better = answer.best, answer.better
    if better is not None:
        lines = [
            f"Do not use it: {better.name} takes {_seconds(better.step_s)}, this program's best plan "
            f"{_seconds(best.step_s)} ({best.step_s / better.step_s:.2f} times as long)."
        ]
    elif best.plan.domain_size == 1:
        hot = "hot experts, " if best.plan.num_hot else ""
        lines = [
            f"Domains do not pay here: leave every domain_size at 1 ({_seconds(best.step_s)}). What the block then "
            f"brings is the de-duplicated exchange without padding, {hot}and sums level by level"
            f"{_encoded_over(answer)}."
        ]
    else:
        sizes = list(best.plan.domain_sizes)
        encoded = _encoded_over(answer)
        lines = [f"Use domain sizes {sizes}{encoded}: {_seconds(best.step_s)}, {best.reason}."]
    if (as_sites := answer.better_as_sites) is not None:
        lines.append(
            f"One job for each {answer.question.cluster.levels[0].name} is faster: {as_sites.name}, "
            f"{_seconds(as_sites.step_s)}, {best.step_s / as_sites.step_s:.3g} times as fast ({as_sites.note})."
        )
    elsewhere = answer.better_elsewhere
    if elsewhere is not None:
        lines.append(
            f"Do not use it where you can have this: {elsewhere.name}, {_seconds(elsewhere.step_s)}, "
            f"{best.step_s / elsewhere.step_s:.3g} times as fast ({elsewhere.note})."
        )
    return lines if better is not None else lines + _advice_on_groups(answer)


def _encoded_over(answer: Answer) -> str:
    """Words for the levels over which the best plan encodes."""
    pairs = zip(answer.question.cluster.levels, answer.best.plan.codecs, strict=True)
    names = [level.name for level, codecs in pairs if codecs.label != EXACT]
    return f", encoded over {' and '.join(names)}" if names else ""


def _advice_on_groups(answer: Answer) -> list[str]:
    question, group, plan = answer.question, answer.best.group, answer.best.plan
    cluster, num_experts = question.cluster, question.workload.model.num_experts
    outermost = cluster.levels[0]
    lines = []
    if num_experts < cluster.num_ranks:
        lines.append(
            f"{num_experts} experts cannot be spread over {cluster.num_ranks} ranks, so expert parallelism over all "
            f"ranks is impossible; groups of {group.ep_size} share them, and "
            f"{cluster.num_ranks // group.ep_size} groups hold the same experts."
        )
    if group.is_strided:
        lines.append(
            f"Give the MoE layers ep_size={group.ep_size} and set use_data_before_expert_parallelism, so that each "
            f"group has ranks at equal distances over every {outermost.name}."
        )
    else:
        lines.append(f"Give the MoE layers ep_size={group.ep_size}; groups are neighbouring ranks.")
    if outermost.size > 1 and plan.spans[0] == 1:
        lines.append(
            f"Each group stays inside one {outermost.name}: no token crosses the slow link and no expert migrates "
            f"over it, only gradients and parameters that both sides hold do; domain_size there must be 1."
        )
    return lines


def describe(answer: Answer) -> str:
    """The whole answer as text."""
    terms = answer.best.prediction.terms_s
    shown = [f"{name.removesuffix('_s')} {seconds:.4g}" for name, seconds in terms.items() if seconds > 0]
    sections = [
        _describe_question(answer.question),
        _plan_table(answer),
        f"Seconds of {answer.best.label}: {', '.join(shown)}",
        f"GB per GPU: {_describe_memory(answer.best.memory)}",
        *_describe_hot(answer),
        "\n".join(verdict(answer)),
    ]
    return "\n\n".join(sections)


def _describe_hot(answer: Answer) -> list[str]:
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


def _describe_memory(memory: Memory) -> str:
    parts = {
        "DeepSpeed's state": memory.dense_bytes + memory.owned_expert_bytes,
        "copies and what codecs keep": memory.copies_bytes,
        "activations": memory.activation_bytes,
        "allowance": memory.workspace_bytes,
        "on the host": memory.host_bytes,
    }
    return ", ".join(f"{name} {num_bytes / GIGA:.1f}" for name, num_bytes in parts.items() if num_bytes)


def _describe_question(question: Question) -> str:
    workload, model = question.workload, question.workload.model
    assumed = known_or_assumed_bandwidths(question.cluster)
    links = []
    for level, bandwidth in zip(question.cluster.levels, assumed, strict=True):
        text = f"{level.name} ({level.size}) {_gbps(bandwidth)}"
        if level.link.bandwidth_bytes_per_s is None:
            text += " assumed"
        if level.link.latency_s:
            text += f", {level.link.latency_s * MS_PER_S:g} ms"
        links.append(text)
    details = [
        f"{workload.tokens_per_rank} tokens per GPU and micro-step",
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
    if workload.trainable_expert_shapes is not None:
        details.append(f"{workload.expert_travel_params} trained parameters per expert")
    sizes = (
        f"{model.name}: {model.num_params / GIGA:.1f} B parameters; {model.num_moe_layers} MoE layers of "
        f"{model.num_experts} experts of {model.expert_params * workload.param_bytes / 1e6:.1f} MB, top-{model.top_k}"
    )
    return "\n".join([sizes, "; ".join(links), ", ".join(details)])


def _plan_table(answer: Answer) -> str:
    is_uneven = answer.best.routing.weights is not None
    load = ("max/mean",) if is_uneven else ()
    header = ("", "plan", "s/step", f"GB/step, {answer.question.cluster.levels[0].name} uplink", "GB/GPU", *load, "")
    shown = _best_counts(answer)[:MAX_ROWS]
    # Data parallelism over the slow link is always shown, because most jobs use it.
    inside = next((one for one in (answer.best, *answer.others) if one.plan.spans[0] == 1), None)
    if inside is not None and inside not in (answer.best, *shown):
        shown = (*shown, inside)
    rows = [_candidate_row(answer.best, "->"), *(_candidate_row(candidate, "") for candidate in shown)]
    hidden = len(answer.others) - len(shown)
    if hidden > 0:
        rows.append(("", f"... {hidden} more, see --json", *[""] * (len(header) - 2)))
    rows += [_alternative_row(way, is_uneven) for way in answer.alternatives]
    return aligned([header, *rows], left=(0, 1, len(header) - 1))


def _best_counts(answer: Answer) -> tuple[Candidate, ...]:
    """The plans that lost, each with the best number of hot experts; and the best plan without them."""
    seen: set[PricedPlan] = set()
    shown = []
    for one in (answer.best, *answer.others):
        plain = replace(one.plan, hot=None, token_exchange="direct")
        is_plain_best = one.plan.hot is None and replace(answer.best.plan, hot=None, token_exchange="direct") == plain
        if one is not answer.best and (plain not in seen or is_plain_best):
            shown.append(one)
        seen.add(plain)
    return tuple(shown)


def _candidate_row(candidate: Candidate, mark: str) -> tuple[str, ...]:
    return (
        mark,
        candidate.label,
        f"{candidate.step_s:.4g}",
        f"{candidate.prediction.level_bytes(0) / GIGA:.4g}",
        f"{candidate.memory.total_bytes / GIGA:.1f}",
        *([] if candidate.routing.weights is None else [f"{candidate.routing.load_after:.2f}"]),
        candidate.reason,
    )


def _alternative_row(way: Alternative, is_uneven: bool) -> tuple[str, ...]:
    load = [f"{way.load:.2f}" if way.load else ""] if is_uneven else []
    crossing = "" if way.crossing_bytes is None else f"{way.crossing_bytes / GIGA:.4g}"
    return ("", way.name, f"{way.step_s:.4g}", crossing, f"{way.memory_bytes / GIGA:.1f}", *load, way.note)


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


def _seconds(value: float) -> str:
    return f"{value:.4g} s a step"


def _gbps(bytes_per_s: float) -> str:
    gbits = bytes_per_s * BITS_PER_BYTE / GIGA
    return f"{gbits:.4g} Gbit/s" if gbits >= 1 else f"{gbits * 1e3:.3g} Mbit/s"
