# SPDX-License-Identifier: Apache-2.0
"""The paper's tables and sweeps in the simulator, and this program's plans on a thousand datacentres.

    python -m benchmarks scale --out benchmarks/results/scale.jsonl --plots docs/images

Parts, each with its assumptions in its docstring: Tables V, VI and VII, the two sweeps to 1000 datacentres, even and
uneven routing there, and our planner's choice, with memory unlimited and with 80 GB for each GPU and 128 GB of the
host's memory.  All take about half an hour of one core.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import mul
from pathlib import Path

from benchmarks.common import Record, Records, new_figure, plain_numbers, save_figure, table
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed, divisors
from ds_hybridep.plan.answer import Answer, Candidate
from ds_hybridep.plan.plan import LevelCodecs, Plan
from ds_hybridep.plan.planner import make_plan
from ds_hybridep.plan.program import Peers
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.workload import MoEModel, Workload
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.simulator import SimulatedStep, simulate

GIGA_BIT = 1e9 / 8
MEGA = 1e6
HIDDEN, PAPER_PARAMS, PAPER_LAYERS = 1024, 8_400_000, 12
ROW_BYTES = 2 * HIDDEN
PAPER_PACKET_MB = 0.36
A800_FLOPS_PER_S = 312e12 * 0.4
PCIE, ETHERNET = 128 * GIGA_BIT, 10 * GIGA_BIT
HOST_BYTES = 128e9  # of the host's memory for each GPU, where GPUs have 80 GB
GBPS = (1.0, 5.0, 10.0, 25.0, 100.0)
SWEEP_PACKET_MB = (0.36, 0.036)
SWEEP_DCS = (4, 8, 16, 32, 64, 128, 256, 500, 1000)

# Seconds per iteration of the paper's Table V, by MB of token data.
TOKEN_MB = (6, 12, 24, 48, 96, 192)
TABLE_V = {
    "M": {"Tutel": (2.52, 4.26, 5.82, 7.62, 12.65, 20.35), "HybridEP": (2.48, 2.63, 2.74, 2.82, 3.01, 3.78)},
    "L": {"Tutel": (3.74, 7.30, 10.69, 13.54, 18.59, 28.46), "HybridEP": (3.49, 3.53, 3.54, 3.85, 4.24, 5.20)},
}
# Table VI: (token MB, expert MB) -> seconds with partition alone and with migration.
TABLE_VI = {
    (24, 8): {"S": (0.76, 0.61), "M": (3.41, 2.54), "L": (6.12, 3.48)},
    (48, 2): {"S": (1.06, 0.74), "M": (6.21, 2.81), "L": (10.89, 3.86)},
}
SIZES = {"S": (1, 8), "M": (2, 8), "L": (4, 8)}
PAPER_RATIO = 50.0
WAYS = 2  # weights and gradients
FITTED = ("message_s", "slowness", "sync_factor")
FAR = 1.3  # a factor

# Table VII: transfers from GPU to GPU (all-to-all, all-gather), for domains of 1, 2, 4 ... GPUs.
TABLE_VII = {
    8: ((56, 0), (24, 8), (8, 24), (0, 56)),
    16: ((240, 0), (112, 16), (48, 48), (16, 112), (0, 240)),
    32: ((992, 0), (480, 32), (224, 96), (96, 224), (32, 480), (0, 992)),
}

PARTS = ("table", "sweeps", "skew", "ours")


def model_of(num_experts: int, *, top_k: int = 1, layers: int = PAPER_LAYERS) -> MoEModel:
    """The paper's H = 1024 model with another number of experts."""
    dense = layers * 4 * HIDDEN * HIDDEN
    return MoEModel(
        name="paper H 1024", hidden=HIDDEN, num_experts=num_experts, top_k=top_k, num_moe_layers=layers,
        expert_shapes=((PAPER_PARAMS,),), dense_shapes=((dense,),), active_dense_params=dense,
    )  # fmt: skip


def cluster_of(num_dcs: int, gpus: int, bytes_per_s: float, latency_s: float = 0.0) -> Cluster:
    """Datacentres of GPUs; PCIe inside."""
    return Cluster((Level("dc", num_dcs, LinkSpeed(bytes_per_s, latency_s)), Level("gpu", gpus, LinkSpeed(PCIE, 0.0))))


def packets_of(num_bytes: float) -> LevelCodecs:
    """Expert weights, as exact changes, and gradients with error feedback, in packets of this size."""
    ratio = 2 * PAPER_PARAMS / num_bytes
    return LevelCodecs(weight=CodecCost("patch", ratio=ratio, is_lossy=False), gradient=CodecCost("low_rank", ratio))


# ---- Tables V and VI ----


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the paper does not say, fitted on its tables.

    message_s: seconds of a rank for each message to one peer.
    slowness: seconds of computation over those at 125 TFLOPS.
    sync_factor: bytes of the sum of dense gradients over those of attention's weights in bf16.
    """

    message_s: float
    slowness: float
    sync_factor: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of Table V or VI.

    system: "Tutel", "HybridEP", or, in Table VI, "alone" and "migrated".
    expert_mb: MB of an expert before packets.
    packet_mb: MB of a packet of one expert in one direction.
    """

    paper_table: str
    system: str
    cluster: str
    token_mb: float
    expert_mb: float
    packet_mb: float
    paper_s: float

    @property
    def sizes(self) -> tuple[int, ...]:
        return SIZES[self.cluster]


def paper_cells() -> Iterator[Cell]:
    """All 36 numbers of Tutel and HybridEP in Table V, and of Table VI.

    Assumed: packets of weights and of gradients together have the size that the paper gives for a packet, as its (4)
    counts one all-gather; experts without encoding (Table VI, partition alone) travel in full both ways.
    """
    for cluster, columns in TABLE_V.items():
        for system, column in columns.items():
            for token_mb, seconds in zip(TOKEN_MB, column, strict=True):
                yield Cell(
                    paper_table="V", system=system, cluster=cluster, token_mb=token_mb, paper_s=seconds,
                    expert_mb=PAPER_PACKET_MB, packet_mb=PAPER_PACKET_MB / WAYS,
                )  # fmt: skip
    for (token_mb, expert_mb), clusters in TABLE_VI.items():
        for cluster, pair in clusters.items():
            packets = {"alone": expert_mb, "migrated": expert_mb / PAPER_RATIO / WAYS}
            for (system, packet_mb), seconds in zip(packets.items(), pair, strict=True):
                yield Cell(
                    paper_table="VI", system=system, cluster=cluster, token_mb=token_mb, paper_s=seconds,
                    expert_mb=expert_mb, packet_mb=packet_mb,
                )  # fmt: skip


def paper_workload(token_mb: float) -> Workload:
    """The H = 1024 model; "token data" is what a GPU sends in a dispatch and its combine together."""
    return Workload(model=model_of(32), tokens_per_rank=round(token_mb * MEGA / 2 / ROW_BYTES), zero_stage=0)


def paper_domains(cell: Cell, slowness: float) -> tuple[int, ...]:
    """Domain sizes by the paper's rule, level by level; 1 for Tutel.  It knows nothing of a cost per message.

    With D bytes of token data, packets of P bytes and the G ranks below a parent: p = 0 where 2 D >= G P, else
    1 - B PE / (P (G - 1)); then the size whose share of all-to-all is nearest.  Source: paper, cases 1 and 2.
    """
    if cell.system == "Tutel":
        return (1,) * len(cell.sizes)
    flops = paper_workload(cell.token_mb).pre_expert_flops
    found = []
    for level, (size, bytes_per_s) in enumerate(zip(cell.sizes, (ETHERNET, PCIE), strict=True)):
        case = PaperRule(
            num_gpus=math.prod(cell.sizes[level:]), token_bytes=cell.token_mb * MEGA,
            expert_bytes=cell.packet_mb * MEGA, pre_expert_bytes=bytes_per_s * flops * slowness / A800_FLOPS_PER_S,
        )  # fmt: skip
        found.append(case.domain_size(size))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class PaperRule:
    """G, D and P of the paper's stream model; pre_expert_bytes: what a link carries during PE."""

    num_gpus: int
    token_bytes: float
    expert_bytes: float
    pre_expert_bytes: float

    def domain_size(self, size: int) -> int:
        """The divisor of `size` with the share of all-to-all nearest to the paper's p*."""
        if size == 1 or 2 * self.token_bytes >= self.num_gpus * self.expert_bytes:
            return size
        hidden = self.pre_expert_bytes / (self.expert_bytes * (self.num_gpus - 1))
        share = max(1.0 - hidden, 0.0)
        return min(divisors(size), key=lambda one: abs((size - one) / (size - 1) - share))


def paper_step(cell: Cell, constants: Constants, domains: tuple[int, ...]) -> SimulatedStep:
    """The simulated iteration.

    Assumed: H 1024, 12 layers, 32 experts, top-1, bf16; experts go straight from every GPU to all others of the
    domain, as the paper's (4) counts, gradients return the same way, and neither hides behind anything; dense
    gradients in one ring; no latency but the cost of messages.
    """
    codecs = (packets_of(cell.packet_mb * MEGA),) * len(cell.sizes)
    exchange = "deepspeed" if cell.system == "Tutel" else "direct"
    scenario = Scenario(
        cluster=cluster_of(*cell.sizes, ETHERNET),
        plan=Plan(spans=cell.sizes, domain_sizes=domains, codecs=codecs, token_exchange=exchange),
        workload=paper_workload(cell.token_mb),
        rates=Rates(
            flops_per_s=A800_FLOPS_PER_S / constants.slowness, overlap=0.0, message_s=constants.message_s,
            sync_factor=constants.sync_factor,
        ),
        gathers_by_level=False,
    )  # fmt: skip
    return simulate(scenario)


def fit_constants(cells: Sequence[Cell]) -> Constants:
    """The constants of least squared logarithmic error over the cells."""
    step_s = functools.cache(_linear_step)

    def loss(constants: Constants) -> float:
        predicted = (step_s(cell, paper_domains(cell, constants.slowness)) for cell in cells)
        return sum(math.log(one(constants) / cell.paper_s) ** 2 for one, cell in zip(predicted, cells, strict=True))

    best = Constants(message_s=2e-3, slowness=4.0, sync_factor=8.0)
    least = loss(best)
    for factor in (1.4, 1.15, 1.05, 1.01):
        trials = list(itertools.product((1.0, factor, 1 / factor), repeat=3))
        while True:
            around = [
                Constants(**dict(zip(FITTED, map(mul, asdict(best).values(), trial), strict=True))) for trial in trials
            ]
            value, number = min((loss(one), number) for number, one in enumerate(around))
            if value >= least:
                break
            least, best = value, around[number]
    return best


def _linear_step(cell: Cell, domains: tuple[int, ...]) -> Callable[[Constants], float]:
    """Seconds as a function of the constants: nothing is hidden, so all of them count in proportion."""
    terms = dict(paper_step(cell, Constants(message_s=1.0, slowness=1.0, sync_factor=1.0), domains).terms_s)
    messages, sync_s = terms.pop("host_s"), terms.pop("dense_sync_s")
    compute_s = terms.pop("dense_s") + terms.pop("experts_s")
    rest_s = math.fsum(terms.values())

    def seconds(constants: Constants) -> float:
        computing_s = constants.slowness * compute_s
        return messages * constants.message_s + computing_s + constants.sync_factor * sync_s + rest_s

    return seconds


def tables() -> Iterator[Record]:
    """Every cell of Tables V and VI beside the simulated one, and Table VII."""
    cells = list(paper_cells())
    constants = fit_constants(cells)
    for cell in cells:
        domains = paper_domains(cell, constants.slowness)
        simulated_s = paper_step(cell, constants, domains).step_s
        yield {
            "part": f"table {cell.paper_table}",
            **asdict(cell),
            "domains": domains,
            "simulated_s": simulated_s,
            **asdict(constants),
        }
    for num_gpus, paper in TABLE_VII.items():
        sizes = [2**power for power in range(len(paper))]
        yield {
            "part": "table VII",
            "gpus": num_gpus,
            "domain_sizes": sizes,
            "paper": paper,
            "counted": [transfers(num_gpus, size) for size in sizes],
        }


def transfers(num_gpus: int, domain_size: int) -> tuple[int, int]:
    """(all-to-all, all-gather): transfers from GPU to GPU in one of each, as the program of a plan has them."""
    plan = Plan(spans=(num_gpus,), domain_sizes=(domain_size,), codecs=(LevelCodecs(),))
    to_others = (Peers((part,), (0,)).count(plan, (num_gpus,), 0) for part in ("domain", "offset"))
    all_to_all, all_gather = (num_gpus * count for count in to_others)
    return all_to_all, all_gather


def describe_table_v(records: Sequence[Record]) -> str:
    return describe_pairs(records, "V", ("Tutel", "HybridEP"))


def describe_table_vi(records: Sequence[Record]) -> str:
    return describe_pairs(records, "VI", ("alone", "migrated"))


def describe_pairs(records: Sequence[Record], name: str, systems: tuple[str, str]) -> str:
    """Seconds and speed-ups, the paper's beside ours, and ours over the paper's."""
    of_place: dict[tuple[float, float, str], dict[str, Record]] = {}
    for one in records:
        of_place.setdefault((one["token_mb"], one["expert_mb"], one["cluster"]), {})[one["system"]] = one
    rows = []
    for (token_mb, expert_mb, cluster), found in of_place.items():
        cells = [f"{token_mb:g} & {expert_mb:g}", cluster]
        pairs = [(found[system]["paper_s"], found[system]["simulated_s"]) for system in systems]
        speed_up = tuple(slow / fast for slow, fast in zip(*pairs, strict=True))
        for paper, ours in (*pairs, speed_up):
            cells += [f"{paper:.2f}", f"{ours:.2f}", f"{ours / paper:.2f}"]
        rows.append([*cells, *("x".join(map(str, found[system]["domains"])) for system in systems[name == "V" :])])
    first = records[0]
    constants = "A message costs {:.2g} ms, GPUs are {:.2g} times slower, dense sums have {:.3g} times the bytes."
    text = constants.format(1e3 * first["message_s"], first["slowness"], first["sync_factor"])
    columns = [f"{what}{of}" for what in (*systems, "speed-up") for of in (", paper", ", ours", ", ratio")]
    header = (
        "MB of tokens & expert",
        "cluster",
        *columns,
        *(f"domains, {system}" for system in systems[name == "V" :]),
    )
    return f"Table {name}, seconds and speed-ups. {text}\n\n{agreement(records)}\n\n" + table(header, rows)


def agreement(records: Sequence[Record]) -> str:
    """How many cells are how near, and those that are not."""
    ratios = [one["simulated_s"] / one["paper_s"] for one in records]
    near = [sum(max(ratio, 1 / ratio) <= factor for ratio in ratios) for factor in (1.1, 1.3)]
    text = f"Of {len(ratios)} cells, {near[0]} are within a factor of 1.1, and {near[1]} within 1.3"
    far = [
        f"{one['system']} {one['cluster']} {one['token_mb']:g} MB {ratio:.2f}"
        for one, ratio in zip(records, ratios, strict=True)
        if max(ratio, 1 / ratio) > FAR
    ]
    return text + (f". Beyond: {', '.join(far)}." if far else ".")


def describe_table_vii(records: Sequence[Record]) -> str:
    """Transfers of one all-to-all and one all-gather."""
    rows = []
    for one in records:
        for size, paper, counted in zip(one["domain_sizes"], one["paper"], one["counted"], strict=True):
            rows.append([one["gpus"], size, *("{}, {}".format(*pair) for pair in (paper, counted))])
    header = ("GPUs", "domain size", "paper: all-to-all, all-gather", "ours")
    return "Table VII, transfers from GPU to GPU.\n\n" + table(header, rows)


# ---- the paper's sweeps ----


def sweeps() -> Iterator[Record]:
    """Speed-ups over flat EP with domains of 4 DCs, with domains of half of all DCs (p = 1/2), and of our planner.

    Assumed: one GPU in each DC and one expert on each GPU, as in the paper's derivation; 192 MB of token data for a
    dispatch and its combine; packets of 0.36 MB and a tenth of it; top-1, so that there is nothing to de-duplicate; no
    latency; gradients return.
    """
    for packet_mb, num_dcs, gbps in itertools.product(SWEEP_PACKET_MB, SWEEP_DCS, GBPS):
        sizes = {"fixed size": 4, "fixed share": num_dcs // 2}
        gains = {name: gain_of(num_dcs, size, gbps, packet_mb) for name, size in sizes.items()}
        yield {
            "part": "sweep", "packet_mb": packet_mb, "dcs": num_dcs, "gbps": gbps,
            "gains": gains | planner_gains(num_dcs, gbps, packet_mb),
        }  # fmt: skip


def sweep_question(num_dcs: int, gbps: float, packet_mb: float, memory_bytes: float | None = None) -> Question:
    """One point of a sweep."""
    return Question(
        cluster=Cluster((Level("dc", num_dcs, LinkSpeed(gbps * GIGA_BIT, 0.0)),)),
        workload=Workload(model=model_of(num_dcs), tokens_per_rank=round(96 * MEGA / ROW_BYTES), zero_stage=0),
        rates=Rates(flops_per_s=A800_FLOPS_PER_S), codecs=(packets_of(packet_mb * MEGA),),
        memory_bytes=memory_bytes, host_memory_bytes=None if memory_bytes is None else HOST_BYTES,
    )  # fmt: skip


def gain_of(num_dcs: int, domain_size: int, gbps: float, packet_mb: float) -> float:
    """Simulated speed-up over flat EP at one point of a sweep."""
    question = sweep_question(num_dcs, gbps, packet_mb)
    flat = Plan(spans=(num_dcs,), domain_sizes=(1,), codecs=(packets_of(packet_mb * MEGA),))
    return step_s_of(question, flat) / step_s_of(question, replace(flat, domain_sizes=(domain_size,)))


def planner_gains(num_dcs: int, gbps: float, packet_mb: float) -> dict[str, float]:
    """Of the planner's own choice at a point of a sweep, with the paper's packets, by memory of a GPU."""
    found = {}
    for name, memory_bytes in ((UNLIMITED, None), (IN_80_GB, 80e9)):
        question = sweep_question(num_dcs, gbps, packet_mb, memory_bytes)
        best = fastest_simulated(question, make_plan(question)).plan
        flat = Plan(spans=(num_dcs,), domain_sizes=(1,), codecs=best.codecs)
        found[name] = step_s_of(question, flat) / step_s_of(question, best)
    return found


def paper_range() -> Iterator[Record]:
    """For domains of a share of 1000 DCs: at which bandwidth the speed-up is 1.45, and where it has fallen to 1.05.

    "gains": those of the planner's choice at these bandwidths.
    """
    for domain_size, packet_mb, wanted in itertools.product((125, 250, 500), SWEEP_PACKET_MB, (1.45, 1.05)):
        gbps = gbps_of(domain_size, packet_mb, wanted)
        yield {
            "part": "range", "dcs": 1000, "domain_size": domain_size, "packet_mb": packet_mb, "gain": wanted,
            "gbps": gbps, "gains": {} if gbps is None else planner_gains(1000, gbps, packet_mb),
        }  # fmt: skip


def gbps_of(domain_size: int, packet_mb: float, wanted: float) -> float | None:
    """Gbit/s (0.1 to 10000) above which the speed-up on 1000 DCs is below `wanted`; None where it never is more."""
    low, high = 0.1, 1e4
    if gain_of(1000, domain_size, low, packet_mb) < wanted:
        return None
    for _ in range(12):
        middle = math.sqrt(low * high)
        is_enough = gain_of(1000, domain_size, middle, packet_mb) >= wanted
        low, high = (middle, high) if is_enough else (low, middle)
    return low


UNLIMITED, IN_80_GB = "the planner's choice", "the planner's choice in 80 GB"
PLOTTED = {  # label, colour, and where the label stands beside the line's end
    UNLIMITED: ("our planner, memory without limit", "#0072B2", 1.0),
    IN_80_GB: ("our planner in 80 GB", "#009E73", 1.12),
    "fixed share": ("domains of half of all", "#D55E00", 1.0),
    "fixed size": ("domains of 4", "#777777", 0.93),
}


def describe_sweeps(records: Sequence[Record]) -> str:
    """Speed-ups by number of DCs and bandwidth."""
    parts = []
    for name, packet_mb in itertools.product(records[0]["gains"], SWEEP_PACKET_MB):
        cells: dict[int, list[str]] = {}
        for one in records:
            if one["packet_mb"] == packet_mb:
                cells.setdefault(one["dcs"], []).append(f"{one['gains'][name]:.2f}")
        header = ["DCs", *(f"{gbps:g} Gbit/s" for gbps in GBPS)]
        rows = ([num_dcs, *gains] for num_dcs, gains in cells.items())
        parts.append(f"Speed-up over flat EP, {name}, packets of {packet_mb} MB:\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def describe_range(records: Sequence[Record]) -> str:
    """Where the paper's gains are found on 1000 DCs, and what the planner's choice gains there."""
    rows = []
    for one in records:
        where = "never" if one["gbps"] is None else f"{one['gbps']:.3g}"
        gains = [f"{gain:.2f}" for gain in one["gains"].values()] or ["", ""]
        rows.append([one["domain_size"], f"{one['packet_mb']} MB", one["gain"], where, *gains])
    return table(("domains of", "packets", "gain", "Gbit/s", "planner", "in 80 GB"), rows)


# ---- uneven routing ----

SKEWS = (1.0, 1.5, 2.56, 5.09)  # the last two: fullest over mean rank in fine-tuning, DeepSpeed#8213
SKEW_SIZES = (4, 20, 50, 100)
SKEW_DCS, SKEW_GBPS, SKEW_MESSAGE_S = 1000, 10.0, 2e-3


def skewed() -> Iterator[Record]:
    """Speed-ups on 1000 DCs over flat EP by domain size, with even and with uneven routing.

    Assumed: as for the sweeps; one GPU with 80 GB and 128 GB of the host in each DC.  A domain computes and receives
    the mean of its ranks' rows, which is what it gains where routing is uneven.  "bound": 1 / (1 - S / G), which even
    routing cannot pass, as a domain of S only saves the rows that would stay in it.  "with messages": each costs
    2 ms, near what fits Tables V and VI, as far as that holds for 1000 peers.  By the stream model, from which the
    simulator differs by 2% here and takes a hundred times as long.
    """
    for packet_mb, skew in itertools.product(SWEEP_PACKET_MB, SKEWS):
        question = sweep_question(SKEW_DCS, SKEW_GBPS, packet_mb, 80e9)
        question = replace(question, workload=replace(question.workload, skew=skew))
        with_messages = replace(question, rates=replace(question.rates, message_s=SKEW_MESSAGE_S))
        flat = Plan(spans=(SKEW_DCS,), domain_sizes=(1,), codecs=question.codecs)
        flat_s = [one.predict(flat).step_s for one in (question, with_messages)]
        for size in SKEW_SIZES:
            plan = replace(flat, domain_sizes=(size,))
            gain, gain_with_messages = (
                before_s / one.predict(plan).step_s
                for before_s, one in zip(flat_s, (question, with_messages), strict=True)
            )
            yield {
                "part": "skew", "packet_mb": packet_mb, "skew": skew, "domain_size": size, "gain": gain,
                "bound": 1 / (1 - size / SKEW_DCS), "with messages": gain_with_messages,
                "lacking_bytes": question.memory(plan)[1],
            }  # fmt: skip


def describe_skewed(records: Sequence[Record]) -> str:
    rows = [
        [
            f"{one['packet_mb']} MB", one["skew"], one["domain_size"], f"{one['gain']:.2f}",
            f"{one['bound']:.3f}" if one["skew"] == 1 else "", f"{one['with messages']:.2f}",
            "no" if one["lacking_bytes"] else "yes",
        ]
        for one in records
    ]  # fmt: skip
    header = ("packets", "skew", "domains of", "speed-up", "bound of even routing", "with 2 ms a message", "in 80 GB")
    return f"Speed-up over flat EP, {SKEW_DCS} DCs, {SKEW_GBPS:g} Gbit/s:\n\n" + table(header, rows)


# ---- ours ----

OUR_CODECS = (
    LevelCodecs(),
    LevelCodecs(weight=CodecCost("patch", 47.0, is_lossy=False), gradient=CodecCost("low_rank", 25.0)),
)


def ours(num_dcs: int = 1000) -> Iterator[Record]:
    """The planner's choice on 1000 DCs of 8 GPUs, simulated, beside what it is compared with.

    Assumed: 12 layers, H 1024, top-2, capacity factor 1, 8192 tokens per GPU and micro-step, ZeRO-1, 10 ms between
    DCs; weights as patches 47 times smaller than bf16 (learning rate 1e-5), gradients 25 times smaller with error
    feedback, both at no cost of computation; dense gradients level by level, exact, and for DeepSpeed's own layers
    also in rings, as it does them.
    """
    for num_experts, accumulation, gbps, memory_bytes in itertools.product((8000, 64), (1, 8), GBPS, (None, 80e9)):
        model = model_of(num_experts, top_k=2)
        question = Question(
            cluster=cluster_of(num_dcs, 8, gbps * GIGA_BIT, 0.01),
            workload=Workload(model=model, tokens_per_rank=8192, micro_steps=accumulation),
            rates=Rates(flops_per_s=A800_FLOPS_PER_S), codecs=OUR_CODECS,
            memory_bytes=memory_bytes, host_memory_bytes=None if memory_bytes is None else HOST_BYTES,
        )  # fmt: skip
        yield {
            "part": "ours", "experts": num_experts, "accumulation": accumulation, "gbps": gbps,
            "memory": "unlimited" if memory_bytes is None else "80 GB", **compared(question),
        }  # fmt: skip


def compared(question: Question) -> Record:
    """The simulated step of the planner's choice, and its gains over flat EP, over flat EP with dense sums by level,
    and over the better of the ways that are provided and fit, with dense sums by level."""
    answer = make_plan(question)
    best = fastest_simulated(question, answer)
    step_s = step_s_of(question, best.plan)
    flat, *others = (way for way in answer.alternatives if way.plan is not None)
    as_deepspeed = step_s_of(replace(question, dense_sync="deepspeed"), flat.plan)
    fair = [step_s_of(question, way.plan) for way in others if not way.lacking_bytes]
    gains = [as_deepspeed / step_s, step_s_of(question, flat.plan) / step_s, min(fair) / step_s]
    return {"plan": best.label, "step_s": step_s, "gains": gains}


def fastest_simulated(question: Question, answer: Answer) -> Candidate:
    """The one with the shortest simulated step among the planner's first few that fit."""
    fitting = [candidate for candidate in (answer.best, *answer.others[:3]) if not candidate.lacking_bytes]
    return min(fitting, key=lambda candidate: step_s_of(question, candidate.plan))


def step_s_of(question: Question, plan: Plan) -> float:
    """Simulated seconds, with the sums of the question."""
    summed = replace(plan, dense_sync=question.dense_sync)
    scenario = Scenario(cluster=question.cluster, plan=summed, workload=question.workload, rates=question.rates)
    return simulate(scenario).step_s


def describe_ours(records: Sequence[Record]) -> str:
    rows = []
    for one in records:
        plan = one["plan"].replace("|", " then ")  # a bar would end the cell
        numbers = [f"{one['step_s']:.3g}", *(f"{gain:.2f}" for gain in one["gains"])]
        rows.append([one["experts"], one["accumulation"], f"{one['gbps']:g}", one["memory"], plan, *numbers])
    header = ("experts", "accumulation", "Gbit/s", "memory", "plan", "s/step", "over flat EP")
    return table((*header, "its dense sums by level", "over the better fair baseline"), rows)


# ---- plots ----


def plot_sweeps(records: Sequence[Record], path: Path, gbps: float = 10.0) -> None:
    """Speed-up over flat EP against the number of DCs, with packets of 0.036 MB."""
    chosen = [one for one in records if one["gbps"] == gbps and one["packet_mb"] == min(SWEEP_PACKET_MB)]
    figure, axes = new_figure(figsize=(9, 4))
    for name, (label, color, height) in PLOTTED.items():
        gains = [one["gains"][name] for one in chosen]
        axes.plot([one["dcs"] for one in chosen], gains, "o-", color=color, linewidth=2)
        axes.annotate(label, (1120, gains[-1] * height), color=color, va="center", fontsize=9)
    in_80_gb = {one["dcs"]: one["gains"][IN_80_GB] for one in chosen}
    title = f"In 80 GB: {in_80_gb[64]:.1f}x at 64 datacentres, {in_80_gb[1000]:.2f}x at 1000"
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    axes.set(xscale="log", yscale="log", xlabel=f"datacentres, each with one GPU and {gbps:g} Gbit/s")
    axes.set(ylabel="speed-up over flat EP", xlim=(3.6, 4500), ylim=(0.8, 11))
    axes.set_xticks([4, 16, 64, 256, 1000])
    axes.set_yticks([1, 2, 5, 10])
    plain_numbers(axes)
    save_figure(figure, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="for the report's SVG")


def run(args: argparse.Namespace, records: Records) -> None:
    for part in args.parts:
        for one in MAKE[part]():
            records.add({"part": one.pop("part")}, **one)


def report(records: list[Record], args: argparse.Namespace) -> str:
    of_part: dict[str, list[Record]] = {}
    for one in records:
        of_part.setdefault(one["params"]["part"], []).append(one)
    if args.plots is not None:
        plot_sweeps(of_part["sweep"], args.plots / "scale-sweeps.svg")
    return "\n\n".join(DESCRIBE[part](found) for part, found in of_part.items())


MAKE: dict[str, Callable[[], Iterable[Record]]] = {
    "table": tables, "sweeps": lambda: itertools.chain(sweeps(), paper_range()), "skew": skewed, "ours": ours,
}  # fmt: skip
DESCRIBE = {
    "table V": describe_table_v, "table VI": describe_table_vi, "table VII": describe_table_vii,
    "sweep": describe_sweeps, "range": describe_range, "skew": describe_skewed, "ours": describe_ours,
}  # fmt: skip
