# SPDX-License-Identifier: Apache-2.0
"""The answer in words and tables for people; what to paste is in `paste`, the JSON for programs in `answer`."""

from ds_hybridep.geometry.cluster import BITS_PER_BYTE, MS_PER_S, known_or_assumed_bandwidths
from ds_hybridep.plan.answer import Answer
from ds_hybridep.plan.codec_costs import DEFAULT_ADAPTER_RATE, DEFAULT_LEARNING_RATE
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.table import LEAST_WAIT, Row, bill_of, chosen_row, row_of_way, rows_of
from ds_hybridep.plan.verdict import verdict
from ds_hybridep.plan.words import GIGA, aligned, count, hours, number, wrapped

WHERE_WORDS = {
    "attention": "beside attention",
    "experts": "beside routed experts",
    "all": "beside attention, experts and dense layers",
}


def describe(answer: Answer, steps: int, price_per_gb: float | None = None) -> str:
    """The whole answer as text, without settings to paste: verdict, question, table, memory, hours and money."""
    sections = [
        "\n".join(map(wrapped, verdict(answer))),
        "\n".join(map(wrapped, describe_question(answer.question))),
        aligned(table_of(answer), left=(0, 1, 5, 7, 8)),
        "\n".join(map(wrapped, legend(answer))),
        "\n".join(map(wrapped, [describe_memory(answer), *describe_hot(answer)])),
        "\n".join(map(wrapped, describe_bills(answer, steps, price_per_gb))),
    ]
    return "\n\n".join(section for section in sections if section)


# ---- the table ----


def table_of(answer: Answer) -> list[list[str]]:
    """Cells of the table, the header first."""
    header = ["", "", "s/step", "GB/GPU", "GB out", "training", "waits", "most for", ""]
    rows, letters = rows_of(answer), _letters(answer)
    cells = [_cells(row, letters) for row in rows]
    if answer.best.routing.weights is not None:
        header.append("fullest")
        loads = ["" if row.load is None else f"{row.load:.2f}" for row in rows]
        cells = [[*one, load] for one, load in zip(cells, loads, strict=True)]
    return [header, *cells]


def _cells(row: Row, letters: dict[str, str]) -> list[str]:
    share = row.wait_s / row.step_s
    marks = ", ".join(letters[remark] for remark in _remarks(row))
    return [
        "->" if row.is_chosen else "",
        row.name,
        number(row.step_s),
        number(row.memory_bytes / GIGA),
        "" if row.link_bytes is None else number(row.link_bytes / GIGA),
        row.training,
        f"{share:.0%}",
        row.waits_for if share >= LEAST_WAIT else "",
        f"({marks})" if marks else "",
    ]


def _remarks(row: Row) -> list[str]:
    lacking = [f"lacks {number(row.lacking_bytes / GIGA)} GB of memory"] if row.lacking_bytes else []
    return [*lacking, *(row.remark.split("; ") if row.remark else [])]


def _letters(answer: Answer) -> dict[str, str]:
    """A letter for each remark, in the order of the rows."""
    remarks = dict.fromkeys(remark for row in rows_of(answer) for remark in _remarks(row))
    return {remark: chr(ord("a") + at) for at, remark in enumerate(remarks)}


def legend(answer: Answer, mark: str = "->") -> list[str]:
    """Sentences about the table's letters and words; mark: of the chosen row."""
    levels = [level.name for level in answer.question.cluster.levels]
    rows = rows_of(answer)
    remarks = " ".join(f"({letter}) {remark}." for remark, letter in _letters(answer).items())
    ours = (
        f"{mark} is what this program would run: its fastest way that fits and shares gradients in every step. ours: "
        f"this program as one job; [{','.join(levels)}]: domain sizes, ranks with replicas of each other's "
        f"experts; ep: ranks that share the experts."
    )
    if any("strided" in row.name for row in rows):
        ours += f" strided: at equal distances over every {levels[0]}."
    lines = [*([remarks] if remarks else []), ours]
    if any(row.kind == "sites" for row in rows):
        lines.append(
            f"sites: this program as a job in each {levels[0]}. H: steps from one exchange to the next; DiLoCo had "
            f"500. local steps: another training, losses may differ."
        )
    lines.append(
        f"GB out: of a step, out of one {levels[0]}; as many come in. waits: share of the step without arithmetic. "
        f"most for: the longest of these waits."
    )
    if answer.best.routing.weights is not None:
        lines.append("fullest: rows of the fullest GPU over the mean.")
    priced = f"{len(answer.others) + 1} plans were priced; --json has them all. " if answer.others else ""
    return [*lines, f"{priced}Nothing here was measured."]


# ---- below it ----


def describe_bills(answer: Answer, steps: int, price_per_gb: float | None) -> list[str]:
    """Hours and GB of some steps, for the chosen way, for what people have now, and for one child of level 0 alone."""
    question, now, alone = answer.question, answer.now, answer.alone
    ways = [now, *([alone] if alone is not None and alone is not now else [])]
    outer, lines = question.cluster.levels[0], list[str]()
    for row in (chosen_row(answer), *(row_of_way(answer, way) for way in ways if way.is_possible)):
        if row.lacking_bytes:
            continue
        bill = bill_of(row, question, steps, price_per_gb)
        if not lines:
            lines.append(f"{steps:,} steps, {count(bill.tokens)} tokens, on {question.cluster.num_ranks} GPUs:")
        text = f"- {row.name}: {hours(bill.hours)}, {number(bill.gpu_hours)} GPU-hours"
        text += f" of {row.num_gpus} GPUs" if row.num_gpus < question.cluster.num_ranks else ""
        if bill.each_gb and bill.link_gb:
            text += f"; GB out of each {outer.name} {number(bill.each_gb)}, of all {number(bill.link_gb)}"
        if bill.price:
            text += f", price {bill.price:,.2f}"
        lines.append(text)
    if lines and outer.size > 1:
        price = "" if price_per_gb is None else f", {price_per_gb:g} each"
        lines.append(f"GB: of steps alone, without packet headers, first copies, checkpoints and data{price}.")
    return lines


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


# ---- what was asked ----


def describe_question(question: Question) -> list[str]:
    """What was asked: the model, a note on it, the links, the training."""
    workload, model = question.workload, question.workload.model
    sizes = (
        f"{model.name}: {model.num_params / GIGA:.1f} B parameters, {model.num_active_params / GIGA:.1f} B "
        f"active, {_trained(question)}; {model.num_moe_layers} MoE layers of {model.num_experts} experts of "
        f"{model.expert_params * workload.param_bytes / 1e6:.1f} MB, top-{model.top_k}"
    )
    notes = [f"Note: {model.note}."] if model.note else []
    return [sizes, *notes, _links(question), _training(question)]


def _trained(question: Question) -> str:
    workload = question.workload
    if workload.num_train_params >= workload.model.num_params:
        return "all trained"
    adapters = "adapters"
    if question.adapters is not None:
        where, rank = question.adapters
        adapters = f"adapters of rank {rank} {WHERE_WORDS[where]}"
    return f"{count(workload.num_train_params)} trained: {adapters}"


def _links(question: Question) -> str:
    """By level, how many, and what link each of them has."""
    texts = []
    assumed = known_or_assumed_bandwidths(question.cluster)
    for index, (level, bandwidth) in enumerate(zip(question.cluster.levels, assumed, strict=True)):
        text = f"{level.size} {level.name}{' in each' * (index > 0)}"
        if index == 0 and level.size == 1 and len(question.cluster.levels) > 1:
            texts.append(f"{text}, so --wan and --delay do not count")
            continue
        text += f", each with {_gbps(bandwidth)}"
        if level.link.bandwidth_bytes_per_s is None:
            text += " assumed"
        latency_ms = (level.link.latency_s or 0.0) * MS_PER_S
        if latency_ms:
            text += f", {latency_ms:g} ms one way (ping {2 * latency_ms:g} ms)"
        elif index == 0 and level.link.latency_s is None:
            text += ", 0 ms assumed (give --delay)"
        texts.append(text)
    return "; ".join(texts)


def _training(question: Question) -> str:
    workload = question.workload
    usual = DEFAULT_LEARNING_RATE if question.adapters is None else DEFAULT_ADAPTER_RATE
    details = [
        f"{workload.tokens_per_rank} tokens per GPU and micro-step",
        *([f"sequences of {workload.sequence_tokens}"] if workload.sequence_tokens else []),
        f"{workload.micro_steps} micro-step{'s' if workload.micro_steps > 1 else ''}",
        f"{workload.param_bytes} B per parameter",
        f"ZeRO-{workload.zero_stage} beside EP",
        f"learning rate {workload.learning_rate:g}{' (default)' * (workload.learning_rate == usual)}",
        f"{number(question.rates.flops_per_s / 1e12)} TFLOPS reached per GPU",
    ]
    if workload.is_uneven:
        details.append(f"skew {workload.skew:g}" if workload.skew > 1 else "measured loads of experts")
    if workload.offloads_optimizer:
        details.append("the optimizer on the host")
    if workload.is_checkpointed:
        details.append("activation checkpointing")
    if workload.has_fused_loss:
        details.append("a fused loss")
    return ", ".join(details)


def _gbps(bytes_per_s: float) -> str:
    gbits = bytes_per_s * BITS_PER_BYTE / GIGA
    return f"{gbits:.4g} Gbit/s" if gbits >= 1 else f"{gbits * 1e3:.3g} Mbit/s"
