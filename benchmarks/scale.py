# SPDX-License-Identifier: Apache-2.0
"""The paper's tables and sweeps in the simulator, and this program's plans on a thousand datacentres.

    python -m benchmarks scale --out benchmarks/results/scale.jsonl --plots docs/images

Parts, each with its assumptions in its docstring: Tables V and VI, the two sweeps to 1000 datacentres, and our
planner's choice there, with memory unlimited and with 80 GB for each GPU and 128 GB of the host's memory.  All take
about five minutes of one core.
"""

import argparse
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common import Record, Records, new_figure, plain_numbers, save_figure, table
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed, divisors
from ds_hybridep.plan.answer import Answer, Candidate
from ds_hybridep.plan.plan import LevelCodecs, Plan
from ds_hybridep.plan.planner import make_plan
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.workload import MoEModel, Workload
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.simulator import simulate

GIGA_BIT = 1e9 / 8
MEGA = 1e6
HIDDEN, PAPER_PARAMS, PAPER_LAYERS = 1024, 8_400_000, 12
ROW_BYTES = 2 * HIDDEN
PAPER_PACKET_BYTES = 0.36 * MEGA
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
CLUSTERS = {"M": (2, 8), "L": (4, 8)}
# Table VI: (token MB, expert MB) -> seconds with partition alone and with migration.
TABLE_VI = {
    (24, 8): {"S": (0.76, 0.61), "M": (3.41, 2.54), "L": (6.12, 3.48)},
    (48, 2): {"S": (1.06, 0.74), "M": (6.21, 2.81), "L": (10.89, 3.86)},
}
SIZES_VI = {"S": (1, 8), **CLUSTERS}
PAPER_RATIO = 50.0

PARTS = ("table", "sweeps", "ours")


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


# ---- Table V ----


def paper_s(
    sizes: tuple[int, ...], domains: tuple[int, ...], token_mb: float, packet_factor: float, slowness: float
) -> float:
    """Simulated seconds of one iteration of the paper's systems; domain sizes of 1 are Tutel's padded exchange.

    HybridEP is one domain over everything, which is what the paper's rule gives for all of Table V but one cell.

    Assumed: H 1024, 12 layers, 32 experts, top-1, bf16; "token data" is what a GPU sends in a dispatch and its combine
    together (were it each of them, Tutel's slopes would be twice as steep as measured); experts go straight from every
    GPU to all others of the domain, as the paper's (4) counts, gradients return the same way at the same size, and
    neither hides behind computation; dense gradients in one ring; no latency.

    packet_factor: bytes that an expert takes on the link over the 0.36 MB that the table gives.
    slowness: seconds of computation over those at 125 TFLOPS.
    """
    exchange = "deepspeed" if domains == (1, 1) else "direct"
    codecs = (packets_of(packet_factor * PAPER_PACKET_BYTES),) * 2
    scenario = Scenario(
        cluster=cluster_of(*sizes, ETHERNET),
        plan=Plan(spans=sizes, domain_sizes=domains, codecs=codecs, token_exchange=exchange),
        workload=Workload(model=model_of(32), tokens_per_rank=round(token_mb * MEGA / 2 / ROW_BYTES), zero_stage=0),
        rates=Rates(flops_per_s=A800_FLOPS_PER_S / slowness, overlap=0.0),
        gathers_by_level=False,
    )
    return simulate(scenario).step_s


def table_v(packet_factor: float, slowness: float) -> Iterator[Record]:
    """Every cell of Table V beside the simulated one."""
    for name, sizes in CLUSTERS.items():
        for index, token_mb in enumerate(TOKEN_MB):
            yield {
                "part": "table V", "cluster": name, "token_mb": token_mb,
                "paper": {system: column[index] for system, column in TABLE_V[name].items()},
                "flat_s": paper_s(sizes, (1, 1), token_mb, packet_factor, slowness),
                "hybrid_s": paper_s(sizes, sizes, token_mb, packet_factor, slowness),
            }  # fmt: skip


def fit_two_constants() -> tuple[float, float]:
    """(packet_factor, slowness) of least worst error in the HybridEP column."""

    def worst_error(constants: tuple[float, float]) -> float:
        return max(
            abs(paper_s(sizes, sizes, token_mb, *constants) / measured - 1)
            for name, sizes in CLUSTERS.items()
            for token_mb, measured in zip(TOKEN_MB, TABLE_V[name]["HybridEP"], strict=True)
        )

    factors = [2.0 + 0.1 * index for index in range(11)]
    slownesses = [2.0 + 0.5 * index for index in range(9)]
    return min(itertools.product(factors, slownesses), key=worst_error)


def table_vi(packet_factor: float, slowness: float) -> Iterator[Record]:
    """Table VI: domains of the best sizes with experts as they are, and with packets 50 times smaller.

    Assumed: as for Table V, with its two constants; the factor counts for compressed packets only.
    """
    for (token_mb, expert_mb), columns in TABLE_VI.items():
        for name, (alone, migrated) in columns.items():
            sizes, found = SIZES_VI[name], {}
            for what, factor in (("alone", 1.0), ("migrated", packet_factor / PAPER_RATIO)):
                relative = factor * expert_mb * MEGA / PAPER_PACKET_BYTES
                domains = itertools.product(*map(divisors, sizes))
                found[what] = min((paper_s(sizes, one, token_mb, relative, slowness), one) for one in domains)
                found[f"{what}, one domain"] = (paper_s(sizes, sizes, token_mb, relative, slowness), sizes)
            yield {
                "part": "table VI", "cluster": name, "token_mb": token_mb, "expert_mb": expert_mb,
                "paper": {"alone": alone, "migrated": migrated}, "simulated": found,
            }  # fmt: skip


def describe_table_vi(records: Sequence[Record]) -> str:
    rows = []
    for one in records:
        paper, found = one["paper"], one["simulated"]
        cells = [f"{paper[way]}, {found[way][0]:.2f} {list(found[way][1])}" for way in ("alone", "migrated")]
        size = f"{one['token_mb']} & {one['expert_mb']}"
        rows.append([size, one["cluster"], *cells, f"{found['migrated, one domain'][0]:.2f}"])
    header = ("partition alone: paper, simulated", "with migration: paper, simulated", "one domain")
    return table(("MB", "cluster", *header), rows)


def describe_table_v(records: Sequence[Record]) -> str:
    rows = []
    for one in records:
        paper, error = one["paper"], one["hybrid_s"] / one["paper"]["HybridEP"] - 1
        cells = [paper["Tutel"], f"{one['flat_s']:.2f}", paper["HybridEP"], f"{one['hybrid_s']:.2f}"]
        rows.append([one["cluster"], one["token_mb"], *cells, f"{100 * error:+.1f}%"])
    first = records[0]
    title = "Fitted on HybridEP: packets {packet_factor:.3g} times as large, GPUs {slowness:.3g} times slower\n\n"
    header = ("cluster", "token MB", "Tutel", "flat, simulated", "HybridEP", "simulated", "error")
    return title.format(**first) + table(header, rows)


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
    title = f"Simulated, in 80 GB: {in_80_gb[64]:.1f}x at 64 datacentres, {in_80_gb[1000]:.2f}x at 1000"
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
        if part == "table":
            constants = fit_two_constants()
            about = {"packet_factor": constants[0], "slowness": constants[1]}
            found: Iterable[Record] = ({**one, **about} for one in (*table_v(*constants), *table_vi(*constants)))
        else:
            found = itertools.chain(sweeps(), paper_range()) if part == "sweeps" else ours()
        for one in found:
            records.add({"part": one.pop("part")}, **one)


def report(records: list[Record], args: argparse.Namespace) -> str:
    of_part: dict[str, list[Record]] = {}
    for one in records:
        of_part.setdefault(one["params"]["part"], []).append(one)
    if args.plots is not None:
        plot_sweeps(of_part["sweep"], args.plots / "scale-sweeps.svg")
    return "\n\n".join(DESCRIBE[part](found) for part, found in of_part.items())


DESCRIBE = {
    "table V": describe_table_v, "table VI": describe_table_vi, "sweep": describe_sweeps, "range": describe_range,
    "ours": describe_ours,
}  # fmt: skip
