# SPDX-License-Identifier: Apache-2.0
"""The rows that answer "what will I get": what people have now, this program's ways, and two others."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ds_hybridep.plan.answer import TIE, Answer, Candidate
from ds_hybridep.plan.plan import listed
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import HOST_STATE, Alternative, Training

MOST_NOW = 4  # rows of what people have, without one child alone; the table has eleven at most
LEAST_WAIT = 0.05  # share of a step that is worth a word


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train, with what it costs.

    kind: people have it now; it is ours, as one job or as sites; or nobody here provides it.
    layout: what it is apart from codecs and where state lies.
    link_bytes: a step's over one uplink of level 0, in one direction; None: not known.
    num_gpus: that compute.
    load: with uneven routing, the rows of the fullest rank over the mean; None: not known.
    waits_for, wait_s: what a rank waits for longest, and how many seconds it does not compute for training, in all.
    """

    kind: Literal["now", "ours", "sites", "elsewhere"]
    name: str
    layout: str
    step_s: float
    tokens_per_s: float
    memory_bytes: float
    link_bytes: float | None
    num_gpus: int
    training: Training
    load: float | None
    waits_for: str
    wait_s: float
    lacking_bytes: float
    is_chosen: bool
    note: str  # for programs
    remark: str = ""  # for the table, parts with semicolons between

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(answer: Answer) -> list[Row]:
    """At most eleven rows that differ, in the order of the report."""
    ways = answer.alternatives
    rows = [row_of_way(answer, way) for way in _ways_now(answer)]
    rows += [row_of_plan(answer, one) for one in _our_plans(answer)]
    rows += [row_of_way(answer, way) for way in ways if way.sites is not None]
    return rows + [row_of_way(answer, way) for way in ways if not way.is_provided]


def _ways_now(answer: Answer) -> list[Alternative]:
    """What people have now, without the slowest if there are many, and one child alone."""
    ways, alone = [way for way in answer.alternatives if way.is_now], answer.alone
    others = (way for way in ways if way is not alone)
    best = sorted(others, key=lambda way: (way is not answer.now, not way.is_possible, way.step_s))[:MOST_NOW]
    return [way for way in ways if way in best or way is alone]


def _our_plans(answer: Answer) -> Iterable[Candidate]:
    """The best plan that loses nothing, and the best one that does, if it is faster; if none fits, the smallest."""
    fitting = [one for one in (answer.best, *answer.others) if not one.lacking_bytes]
    exact = [one for one in fitting if not is_lossy(one)]
    lossy = [one for one in fitting if is_lossy(one)]
    if not fitting:
        return [answer.best]
    found = [answer.best if answer.best in group else group[0] for group in (exact, lossy) if group]
    is_worth_it = len(found) < 2 or found[1].step_s < found[0].step_s * (1 - TIE)
    return found if is_worth_it else found[:1]


def is_lossy(candidate: Candidate) -> bool:
    return any(codecs.is_lossy for codecs in candidate.plan.codecs)


def row_of_plan(answer: Answer, candidate: Candidate) -> Row:
    term, wait_s = candidate.prediction.waits()
    training: Training = "lossy" if is_lossy(candidate) else "exact"
    plan, group = candidate.plan, candidate.group
    layout = f"{listed(plan.domain_sizes)} ep {group.ep_size}{' strided' if group.is_strided else ''}"
    remarks = [HOST_STATE] if plan.state == "host" else []
    if plan.hot is not None:
        level = answer.question.cluster.levels[plan.hot.level].name
        remarks.append(f"at most {plan.num_hot} hot experts in each layer, inside {level}")
    return Row(
        kind="ours",
        name=f"ours, {'encoded' if training == 'lossy' else 'exact'}: {layout}",
        layout=f"{layout}, {training}",
        step_s=candidate.step_s,
        tokens_per_s=tokens_per_s(answer.question, candidate.step_s),
        memory_bytes=candidate.memory.total_bytes,
        link_bytes=candidate.prediction.level_bytes(0),
        num_gpus=answer.question.cluster.num_ranks,
        training=training,
        load=None if candidate.routing.is_even else candidate.routing.load_after,
        waits_for=term,
        wait_s=wait_s,
        lacking_bytes=candidate.lacking_bytes,
        is_chosen=candidate is answer.chosen,
        note="",
        remark="; ".join(remarks),
    )


def row_of_way(answer: Answer, way: Alternative) -> Row:
    term, wait_s = way.waits or ("", 0.0) if way.prediction is None else way.prediction.waits()
    kind: Literal["now", "sites", "elsewhere"] = "elsewhere"
    if way.is_now or way.sites is not None:
        kind = "now" if way.is_now else "sites"
    return Row(
        kind=kind,
        name=way.name,
        layout=way.name,
        step_s=way.step_s,
        tokens_per_s=tokens_per_s(answer.question, way.step_s),
        memory_bytes=way.memory_bytes,
        link_bytes=way.crossing_bytes,
        num_gpus=way.num_gpus or answer.question.cluster.num_ranks,
        training=way.training,
        load=way.load if answer.question.workload.is_uneven else None,
        waits_for=term,
        wait_s=wait_s,
        lacking_bytes=way.lacking_bytes,
        is_chosen=way is answer.chosen,
        note=way.note,
        remark=way.remark,
    )


def chosen_row(answer: Answer) -> Row:
    """The row of what to take of this program."""
    chosen = answer.chosen
    return row_of_plan(answer, chosen) if isinstance(chosen, Candidate) else row_of_way(answer, chosen)


def tokens_of_step(question: Question) -> int:
    """Tokens of all ranks."""
    workload = question.workload
    return question.cluster.num_ranks * workload.tokens_per_rank * workload.micro_steps


def tokens_per_s(question: Question, step_s: float) -> float:
    """Tokens of all ranks in a second."""
    return tokens_of_step(question) / step_s


# ---- hours and money ----


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What a number of steps takes.

    link_gb: GB that leave all datacentres together; each_gb: that leave one; None: not known.  price: of link_gb.
    """

    steps: int
    tokens: int
    hours: float
    gpu_hours: float
    each_gb: float | None
    link_gb: float | None
    price: float | None


def bill_of(row: Row, question: Question, steps: int, price_per_gb: float | None) -> Bill:
    cluster, hours = question.cluster, row.step_s * steps / 3600
    each_gb = None if row.link_bytes is None else row.link_bytes * steps / 1e9
    link_gb = None if each_gb is None else cluster.sizes[0] * each_gb
    return Bill(
        steps=steps,
        tokens=steps * tokens_of_step(question),
        hours=hours,
        gpu_hours=hours * row.num_gpus,
        each_gb=each_gb,
        link_gb=link_gb,
        price=None if link_gb is None or price_per_gb is None else link_gb * price_per_gb,
    )
