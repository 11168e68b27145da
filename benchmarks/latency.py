# SPDX-License-Identifier: Apache-2.0
"""What a long link costs a step: step time at several one-way delays, 4 and 12 layers, with and without dropping.

    sudo python benchmarks/latency.py --out benchmarks/results/latency.jsonl
    sudo python benchmarks/latency.py --quick

Each delay and layer count is one job on emulated datacentres that trains all plans in turn.  A table shows the step at
the shortest delay, and what each longer one adds.  Needs root, iproute2 and a C++ compiler.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

KINDS = ("dropping", "without dropping", "AutoEP")
PLANS = (
    "deepspeed, flat EP",
    "deepspeed, EP inside the DC",
    "hybridep, EP inside the DC",
    "hybridep [1,1]",
    "hybridep [2,1]",
    "hybridep [2,1] recommended",
)
SLOW_PLANS = PLANS[:1]  # they take seconds, and accumulate nothing
DCS, RATE = "2x2", "1000mbit"
WARM_UP_STEPS = 3


# -- one rank -----------------------------------------------------------------------------------------------------


def arguments_of(kind: str, num_layers: int) -> argparse.Namespace:
    return argparse.Namespace(
        hidden=64, layers=num_layers, experts=8, top_k=2, seq_len=32, seed=0, lr=1e-3, dtype="fp32", zero_stage=1,
        capacity_factor=0.0 if kind == "without dropping" else 1.25, compute="real", prefetch_depth=2,
        model="qwen3_moe" if kind == "AutoEP" else "bytes",
    )  # fmt: skip


def work(args: argparse.Namespace) -> None:
    """Train every plan; rank 0 writes one JSON line for each."""
    import deepspeed
    import torch
    from e2e_worker import build, finish_transfers, plans_of, plans_of_hf, train, train_lm

    import ds_hybridep

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    # All ranks begin with the same seed.  A broadcast of each parameter would take longer than what is measured.
    deepspeed.DeepSpeedEngine._broadcast_model = lambda self: None
    sizes = tuple(int(size) for size in DCS.split("x"))
    corpus, _ = train_lm.read_corpus()
    for kind in args.kinds:
        settings = arguments_of(kind, args.layers[0])
        for accumulation in args.accumulations:
            named = {plan.name: plan for plan in (plans_of if kind != "AutoEP" else plans_of_hf)(sizes)}
            for name in args.plans:
                if name not in named or (accumulation > 1 and name in SLOW_PLANS):
                    continue
                run = build(copy.copy(settings), named[name], accumulation, sizes)
                train(run, corpus, settings, 1, WARM_UP_STEPS)
                num_steps = 2 if name in SLOW_PLANS else args.steps
                before = waits_of(run, ds_hybridep)
                seconds = []
                for _ in range(num_steps):
                    begin = time.perf_counter()
                    train(run, corpus, settings, 1, 1)
                    seconds.append(time.perf_counter() - begin)
                waits = {at: (n - before[at]) / num_steps for at, n in waits_of(run, ds_hybridep).items()}
                finish_transfers(run)
                params = {"kind": kind, "plan": name, "layers": settings.layers, "accumulation": accumulation}
                record = {"params": params, "step_s": seconds, "waits": waits, "loss": run.loss}
                if torch.distributed.get_rank() == 0:
                    with args.worker.open("a") as file:
                        file.write(json.dumps(record) + "\n")
                run.engine.destroy()


def waits_of(run: Any, ds_hybridep: Any) -> dict[str, int]:
    """Waits in a row over each level so far."""
    if run.plan.domain_sizes is None:
        return {}
    return {level["name"]: level["waits"] for level in ds_hybridep.stats(run.engine)["levels"]}


# -- the driver ---------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, delay: str, num_layers: int) -> list[dict[str, Any]]:
    """Records of one job."""
    from ds_hybridep.lab.launcher import run_ranks
    from ds_hybridep.lab.network import EmulatedNetwork
    from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate

    links = LinkSpec(
        wan_bits_per_s=parse_rate(RATE, "rate"), wan_delay_s=parse_duration(delay, "--delays"),
        wan_loss=args.loss,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(Topology.parse(DCS), links) as network:
        records = Path(scratch) / "records.jsonl"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(records), "--steps", str(args.steps)]
        command += ["--layers", str(num_layers), "--accumulations", *map(str, args.accumulations)]
        command += ["--kinds", *args.kinds, "--plans", *args.plans]
        result = run_ranks(network, command, log_dir=Path(scratch) / "logs", timeout_s=args.job_limit_s)
        if not result.is_success:
            print(f"{delay}, {num_layers} layers: {result.failure}\n{result.tail_of_log(0, 40)}", file=sys.stderr)
            if not records.exists():
                return []
        about = {
            "case": "latency",
            "delay": delay,
            "dcs": DCS,
            "rate": RATE,
            "wan_loss": args.loss,
        }
        about["versions"] = bench.versions()
        return [{**about, **json.loads(line)} for line in records.read_text().splitlines()]


def table(records: list[dict[str, Any]]) -> str:
    """The step at the shortest delay and what longer ones add, by medians and by the fastest steps; waits in a row."""
    delays = sorted({record["delay"] for record in records}, key=lambda delay: float(delay.removesuffix("ms")))
    rows: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    waits: dict[tuple[Any, ...], set[float]] = {}
    for record in records:
        key = tuple(record["params"].values())
        rows.setdefault(key, {}).setdefault(record["delay"], []).extend(record["step_s"])
        waits.setdefault(key, set()).update(list(record["waits"].values())[:1])  # over the long link
    columns = [f"{delays[0]} [s]", *(f"+ {delay}" for delay in delays[1:])]
    titles = ["kind", "plan", "layers", "accumulation", *columns, *(f"fastest {one}" for one in columns), "waits"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for key, by_delay in rows.items():
        cells = [str(part) for part in key]
        for of_all in (statistics.median, min):
            first = of_all(by_delay[delays[0]]) if delays[0] in by_delay else float("nan")
            later = [of_all(by_delay[one]) - first if one in by_delay else float("nan") for one in delays[1:]]
            cells += [f"{seconds:.3f}" for seconds in (first, *later)]
        counted = sorted(waits[key])
        lines.append(f"| {' | '.join(cells)} | {' to '.join(f'{count:g}' for count in counted) or '-'} |")
    return "\n".join(lines).replace("nan", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", nargs="+", default=["1ms", "10ms", "50ms"], help="one way between DCs")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--accumulations", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--steps", type=int, default=7, help="that are timed")
    parser.add_argument("--loss", type=float, default=0.0, help="share of frames that the long link drops")
    parser.add_argument("--quick", action="store_true", help="1 and 50 ms, and domains over both DCs alone")
    parser.add_argument("--job-limit-s", type=float, default=400.0)
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--report", type=Path, help="print the table of these records")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args)
        return 0
    if args.report is not None:
        print("Seconds of a step at the shortest delay, and what longer ones add: medians, and the fastest steps.\n")
        print(table([json.loads(line) for line in args.report.read_text().splitlines()]))
        return 0
    from ds_hybridep.lab.network import why_not_permitted

    if reason := why_not_permitted():
        print(f"no emulated network here: {reason}", file=sys.stderr)
        return 2
    if args.quick:
        args.delays, args.plans = ["1ms", "50ms"], list(PLANS[-2:])
    records: list[dict[str, Any]] = []
    for num_layers in args.layers:
        for delay in args.delays:
            found = measure(args, delay, num_layers)
            if not found:
                return 1
            records += found
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a") as file:
                    file.writelines(json.dumps(record) + "\n" for record in found)
            print(f"{num_layers} layers, {delay}: done", flush=True)
    print(table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
