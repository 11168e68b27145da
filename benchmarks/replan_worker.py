# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/replan.py: the same training over a link that drops and recovers, planned and by hand.

1. Every plan of the list runs a few steps at each rate; the fastest at a rate is what one would choose by hand.
2. By hand: that plan, with `ds_hybridep.replan` in the very step in which the rate changes.
3. Planned: everything "auto"; the program sees the change by itself.
4. DeepSpeed as it is, without a limit, for the losses.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from e2e_worker import AUTO_CODECS, AUTO_LEVEL, Driver, Plan, Run, add_model_arguments, build, train

import ds_hybridep
from ds_hybridep.integration.attachment import attachment_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_lm


def plans_by_hand(sizes: tuple[int, ...], *, with_codecs: bool) -> list[Plan]:
    """What one would try."""
    dcs, gpus = sizes
    world = dcs * gpus
    plans = [
        Plan("DeepSpeed's own", world, (1, 1), dense_sync="deepspeed", token_exchange="deepspeed"),
        Plan("DeepSpeed's tokens, sums by level", world, (1, 1), token_exchange="deepspeed"),
        Plan("[1,1]", world, (1, 1)),
        Plan(f"[{dcs},1]", world, (dcs, 1)),
    ]
    if with_codecs:
        plans += [
            Plan(f"[{dcs},1] {name_of(codec)}", world, (dcs, 1), {"weight_codec": codec, "gradient_codec": codec})
            for codec in AUTO_CODECS
        ]
    return plans


def name_of(codec: Any) -> str:
    return codec if isinstance(codec, str) else " ".join(str(value) for value in codec.values())


def block_of(plan: Plan, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The plan as `ds_hybridep.replan` takes it."""
    levels: list[dict[str, Any]] = [
        {"name": name, "size": size, "domain_size": domain_size}
        for name, size, domain_size in zip(("dc", "gpu"), sizes, plan.domain_sizes or (), strict=True)
    ]
    levels[0].update(plan.codecs or {})
    dense = {} if plan.dense_sync is None else {"dense_sync": plan.dense_sync}
    return {
        "levels": levels, "report_interval": 0, **dense,
        "token_exchange": plan.token_exchange, "advanced": {"verify_interval": 0},
    }  # fmt: skip


class Trial:
    """Steps of one engine, timed from barrier to barrier, with their losses."""

    def __init__(self, run: Run, corpus: torch.Tensor, args: argparse.Namespace) -> None:
        self.run, self._corpus, self._args = run, corpus, args
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, block: dict[str, Any] | None = None) -> None:
        """One optimizer step; with a block, other settings first, in the same time."""
        begin_s = time.perf_counter()
        if block is not None:
            ds_hybridep.replan(self.run.engine, block)
        train(self.run, self._corpus, self._args, self._args.rows, 1)
        dist.barrier()
        self.seconds.append(time.perf_counter() - begin_s)
        self.losses.append(self.run.loss)


def fastest_by_rate(
    plans: list[Plan], args: argparse.Namespace, driver: Driver, corpus: torch.Tensor, sizes: tuple[int, ...]
) -> dict[str, dict[str, float]]:
    """Median seconds of each plan at each rate, and the fastest under "best"."""
    trial = Trial(build(args, plans[0], args.accumulation, sizes), corpus, args)
    times: dict[str, dict[str, float]] = {}
    for rate in dict.fromkeys(args.rates):
        driver.ask(command="rate", rate=rate)
        for plan in plans:
            ds_hybridep.replan(trial.run.engine, block_of(plan, sizes))
            for _ in range(2 + args.tries):
                trial.step()
            table = torch.tensor([statistics.median(trial.seconds[-args.tries :])])
            dist.broadcast(table, 0)
            times.setdefault(rate, {})[plan.name] = table.item()
            if dist.get_rank() == 0:
                print(f"{rate} {plan.name}: {table.item():.3f} s", flush=True)
    trial.run.engine.destroy()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--dcs", required=True)
    parser.add_argument("--rates", nargs="+", required=True, help="of the phases, in order")
    parser.add_argument("--steps", type=int, default=40, help="of a phase")
    parser.add_argument("--warm-up", type=int, default=30, help="steps at the first rate that are not counted")
    parser.add_argument("--tries", type=int, default=5, help="timed steps of each plan at each rate")
    parser.add_argument("--rows", type=int, default=2, help="sequences per rank and micro-step")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--with-codecs", action="store_true", help="lossy codecs too")
    add_model_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    sizes = tuple(int(size) for size in args.dcs.split("x"))
    driver, (corpus, _) = Driver(args.control), train_lm.read_corpus()
    plans = plans_by_hand(sizes, with_codecs=args.with_codecs)
    driver.ask(command="rate", rate="none")
    times = fastest_by_rate(plans, args, driver, corpus, sizes)
    best = {
        rate: next(p for p in plans if p.name == min(found, key=found.__getitem__)) for rate, found in times.items()
    }
    codecs, level = (AUTO_CODECS, AUTO_LEVEL) if args.with_codecs else ((), None)
    auto = Plan("auto", sizes[0] * sizes[1], ("auto", "auto"), level, auto_codecs=codecs)
    plain = Plan("DeepSpeed", sizes[0] * sizes[1])
    records = []
    for name, plan in (("by hand", best[args.rates[0]]), ("planned", auto), ("DeepSpeed", plain)):
        trial = Trial(build(args, plan, args.accumulation, sizes), corpus, args)
        driver.ask(command="rate", rate="none" if name == "DeepSpeed" else args.rates[0])
        for _ in range(args.warm_up):
            trial.step()
        for index, rate in enumerate(args.rates):
            if name != "DeepSpeed":
                driver.ask(command="rate", rate=rate)
            trial.step(block_of(best[rate], sizes) if name == "by hand" and index else None)
            for _ in range(args.steps - 1):
                trial.step()
        record = {"name": name, "step_s": trial.seconds[args.warm_up :], "losses": trial.losses}
        if name == "planned":
            planner = attachment_of(trial.run.engine).planner
            record["history"] = planner.history
            record["planning"] = planner.record(attachment_of(trial.run.engine).runtime)
        records.append(record)
        trial.run.engine.destroy()
    driver.ask(
        command="records", records=[{"times_by_hand": times, "best": {r: p.name for r, p in best.items()}}, *records]
    )
    driver.ask(command="done")
    dist.barrier()


if __name__ == "__main__":
    main()
