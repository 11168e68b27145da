# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/e2e.py: trains every plan on the same data, in interleaved blocks, phase by phase.

All plans live in one process.  Rank 0 asks the driver outside the emulated network, through files in the control
folder, to set the link's rate and to read the interface counters; nothing crosses the network for that.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bench
import deepspeed
import torch
from deepspeed import comm as dist
from torch import Tensor

import ds_hybridep
from ds_hybridep.adaptive.planner import JobPlanner
from ds_hybridep.integration.attachment import attachment_of
from ds_hybridep.integration.runtime import HybridRuntime

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_lm
from sleep_model import SleepModel

AUX_LOSS_WEIGHT = train_lm.AUX_LOSS_WEIGHT
POLL_S = 0.002
AUTO_LEVEL = {"weight_codec": "auto", "gradient_codec": "auto"}
AUTO_CODECS = ({"type": "low_rank", "ratio": 50}, "int8")
ANSWER_LIMIT_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What is trained: an EP size, and for ours domain sizes."""

    name: str
    ep_size: int
    domain_sizes: tuple[Any, ...] | None = None
    codecs: Any = None  # between the DCs: "recommended", or settings of the level
    dense_sync: str | None = None  # None: by level
    token_exchange: str = "auto"
    token_codec: str = "identity"  # between the DCs; others run where --plans names them
    auto_codecs: tuple[Any, ...] = ()
    adapters: str = ""  # what has some, "attention" or "attention and experts"; else everything is trained


AUTO_MOST_STEPS = 100


@dataclass
class Run:
    """One plan at one accumulation count."""

    plan: Plan
    engine: Any
    num_steps: int = 0  # optimizer steps so far; batches are a function of it
    loss: float = float("nan")


@dataclass
class Measured:
    """Blocks of one plan in one phase."""

    step_s: list[float] = field(default_factory=list)
    wan_bytes: list[float] = field(default_factory=list)  # per step, all DC uplinks, one direction, headers included
    counted: list[dict[str, float]] = field(default_factory=list)  # per step, level 0, by kind, this rank
    probe_s: list[float] = field(default_factory=list)  # of `compute_probe_s`, right before each block


class Driver:
    """Asks the process outside; only rank 0 talks, everybody waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def ask(self, **request: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        if dist.get_rank() == 0:
            self._count += 1
            partial = self._folder / "request.partial"
            partial.write_text(json.dumps(request))
            os.replace(partial, self._folder / f"request-{self._count}.json")
            path, limit = self._folder / f"answer-{self._count}.json", time.monotonic() + ANSWER_LIMIT_S
            while not path.exists():
                if time.monotonic() > limit:
                    raise TimeoutError(f"the driver did not answer {request} within {ANSWER_LIMIT_S:g} s")
                time.sleep(POLL_S)
            answer = json.loads(path.read_text())
        dist.barrier()
        return answer


def plans_of(sizes: tuple[int, ...]) -> list[Plan]:
    """Baselines and plans for `sizes` = (DCs, GPUs per DC)."""
    dcs, gpus = sizes
    world = dcs * gpus
    by_deepspeed = Plan("hybridep [1,1], dense sums by DeepSpeed", world, (1, 1), dense_sync="deepspeed")
    by_level = Plan("hybridep [1,1]", world, (1, 1))
    plans = [
        Plan("deepspeed, flat EP", world),
        Plan("deepspeed, EP inside the DC", gpus),
        by_deepspeed,
        by_level,
        replace(by_level, name="hybridep, only sums by level", token_exchange="deepspeed"),
    ]
    plans += [
        replace(by_level, name=f"{by_level.name}, tokens {codec}", token_codec=codec) for codec in ("int8", "fp8")
    ]
    plans += [Plan(f"hybridep [{size},1]", world, (size, 1)) for size in range(2, dcs + 1) if dcs % size == 0]
    plans += [
        Plan(f"hybridep [{dcs},1] recommended", world, (dcs, 1), "recommended"),
        Plan("hybridep, EP inside the DC", gpus, (1, 1)),
        Plan("hybridep, EP inside the DC, recommended", gpus, (1, 1), "recommended"),
        Plan("hybridep auto", world, ("auto", "auto")),
        Plan("hybridep auto, codecs allowed", world, ("auto", "auto"), AUTO_LEVEL, auto_codecs=AUTO_CODECS),
    ]
    return [*plans, Plan("deepspeed, flat EP again", world)]


def plans_of_hf(sizes: tuple[int, ...]) -> list[Plan]:
    """Full fine-tuning and adapters of a Hugging Face model."""
    dcs, gpus = sizes
    world = dcs * gpus
    flat, inside = Plan("deepspeed, flat EP", world), Plan("deepspeed, EP inside the DC", gpus)
    ours = Plan(f"hybridep [{dcs},1]", world, (dcs, 1))
    lossy = replace(ours, name=f"{ours.name} recommended", codecs="recommended")
    ours_inside = Plan("hybridep, EP inside the DC, recommended", gpus, (1, 1), "recommended")
    again = replace(flat, name=f"{flat.name} again")
    return [flat, inside, ours, lossy, ours_inside, again] + [
        replace(plan, name=f"{adapters}: {plan.name}", adapters=adapters)
        for adapters in ("attention", "attention and experts")
        for plan in (flat, inside, ours, again)
    ]


def build_model(args: argparse.Namespace, plan: Plan) -> torch.nn.Module:
    args.ep_size = plan.ep_size
    if args.model == "qwen3_moe":
        import hf_model  # what it needs is not installed everywhere

        return hf_model.build(args, plan.adapters)
    return SleepModel(args) if args.compute == "sleep" else train_lm.ByteModel(args)


def block_of(args: argparse.Namespace, plan: Plan, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The "hybridep" block of a plan; domains of one rank where it has none."""
    domain_sizes = plan.domain_sizes or (1,) * len(sizes)
    levels = [
        {"name": name, "size": size, "domain_size": domain_size}
        for name, size, domain_size in zip(("dc", "gpu"), sizes, domain_sizes, strict=True)
    ]
    codecs = {"codecs": plan.codecs} if plan.codecs == "recommended" else plan.codecs or {}
    levels[0].update(codecs, token_codec=plan.token_codec)
    block = {} if plan.dense_sync is None else {"dense_sync": plan.dense_sync}
    return {
        **block,
        "levels": levels,
        "report_interval": 0,
        "advanced": {"verify_interval": 0, "prefetch_depth": args.prefetch_depth},
        "token_exchange": plan.token_exchange,
        "auto_codecs": list(plan.auto_codecs),
    }


def build(args: argparse.Namespace, plan: Plan, accumulation: int, sizes: tuple[int, ...]) -> Run:
    torch.manual_seed(args.seed)
    model = build_model(args, plan)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only its product with the others is checked
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 1_000_000_000,
        # DeepSpeed's ZeRO 1 and 2 refuse a model with MoE layers and no trainable expert.
        "zero_optimization": {"stage": 0 if plan.adapters == "attention" else args.zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": True}},
    }
    if args.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if args.model == "qwen3_moe":
        import hf_model

        config["expert_parallel"] = hf_model.autoep_block(plan.ep_size)
    is_ours = plan.domain_sizes is not None
    # Adapters of experts need the block at the start; AutoEP runs them without it afterwards.
    if is_ours or plan.adapters == "attention and experts":
        config["hybridep"] = block_of(args, plan, sizes)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    if not is_ours and "hybridep" in config:
        ds_hybridep.detach(trained)
    return Run(plan, trained)


def train(run: Run, corpus: Tensor, args: argparse.Namespace, rows: int, num_steps: int) -> None:
    """`num_steps` optimizer steps; the same data for every plan."""
    for _ in range(num_steps):
        for micro_step in range(run.engine.gradient_accumulation_steps()):
            place = (args.seed, run.num_steps, micro_step, dist.get_rank())
            batch = train_lm.batch_at(corpus, place, rows=rows, seq_len=args.seq_len)
            loss, aux_loss = run.engine(*batch)
            run.engine.backward(loss + AUX_LOSS_WEIGHT * aux_loss)
            run.engine.step()
        run.num_steps += 1
        run.loss = loss.item()


def compute_probe_s(num_products: int = 400) -> float:
    """Seconds that the slowest rank takes for the same small matrix products, all ranks at once: this machine's speed
    drifts by more than plans differ, and a prediction has to know today's."""
    torch.manual_seed(0)
    x, weight = torch.randn(128, 64), torch.randn(64, 256)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_products):
        torch.relu(x @ weight) @ weight.T
    dist.barrier()
    return time.perf_counter() - start


def level_0_bytes(run: Run) -> dict[str, int]:
    """By kind, without those that are not counted."""
    if run.plan.domain_sizes is None:
        return {}
    sent = ds_hybridep.stats(run.engine)["levels"][0]["sent_bytes"]
    return {kind: count for kind, count in sent.items() if count is not None}


def run_block(run: Run, driver: Driver, corpus: Tensor, args: argparse.Namespace, rows: int, steps: int) -> Any:
    """(seconds per step, WAN bytes per step, counted bytes per step by kind) of one block.

    A step leaves weights under way that the next one waits for.  So the clock runs as in the middle of a training: one
    step goes right before it starts, and what is under way when it stops arrives before another plan's turn.  Bytes
    are those of all of these steps: reading counters takes time, in which the link would carry weights for nothing.
    """
    before, counted_before = driver.ask(command="counters"), level_0_bytes(run)
    train(run, corpus, args, rows, 1)
    dist.barrier()
    start = time.perf_counter()
    train(run, corpus, args, rows, steps)
    dist.barrier()  # the latest end over ranks
    seconds = time.perf_counter() - start
    finish_transfers(run)
    after, counted = driver.ask(command="counters"), level_0_bytes(run)
    wan_bytes = (after.get("wan_bytes", 0) - before.get("wan_bytes", 0)) / (steps + 1)
    return seconds / steps, wan_bytes, {kind: (n - counted_before[kind]) / (steps + 1) for kind, n in counted.items()}


def runtime_of(run: Run) -> HybridRuntime:
    return attachment_of(run.engine).runtime


def planner_of(run: Run) -> JobPlanner | None:
    """What plans the run while it trains; None where the plan is given."""
    return None if run.plan.domain_sizes is None else attachment_of(run.engine).planner


def settle(run: Run, corpus: Tensor, args: argparse.Namespace, rows: int) -> None:
    """Train a planned run until its plan stays, at this rate and batch; it keeps what it picked while it is timed."""
    planner = planner_of(run)
    if planner is None:
        return
    planner.choose_anew(runtime_of(run))  # steps of the last rate and batch say nothing
    for _ in range(AUTO_MOST_STEPS):
        train(run, corpus, args, rows, 1)
        if planner.is_settled:
            break
    planner.hold()


def finish_transfers(run: Run) -> None:
    """Wait for weights under way, on all ranks."""
    if run.plan.domain_sizes is not None:
        runtime_of(run).migration.finish()
    dist.barrier()


def steps_per_block(seconds: float, args: argparse.Namespace) -> int:
    """At most `--steps` steps, fewer where one takes long; the same on all ranks."""
    wanted = torch.tensor([args.block_s / max(seconds, 1e-3)])
    dist.broadcast(wanted, 0)
    return max(1, min(args.steps, int(wanted.item())))


def phase(runs: list[Run], driver: Driver, corpus: Tensor, args: argparse.Namespace, rows: int) -> dict[str, Measured]:
    measured = {run.plan.name: Measured() for run in runs}
    for run in runs:
        settle(run, corpus, args, rows)
    seconds = []
    for run in runs:  # warm-up at this rate and batch, and how long a step takes
        begin = time.perf_counter()
        train(run, corpus, args, rows, 1)
        finish_transfers(run)
        seconds.append(time.perf_counter() - begin)
    steps = steps_per_block(statistics.median(seconds), args)
    by_name = {run.plan.name: run for run in runs}
    for order in bench.interleaved(list(by_name), args.rounds):
        for name in order:
            measured[name].probe_s.append(compute_probe_s())
            step_s, wan_bytes, counted = run_block(by_name[name], driver, corpus, args, rows, steps)
            measured[name].step_s.append(step_s)
            measured[name].wan_bytes.append(wan_bytes)
            measured[name].counted.append(counted)
    return measured


def sum_over_ranks(counted: list[dict[str, float]]) -> dict[str, float]:
    """Median bytes per step by kind, summed over ranks."""
    kinds = ("tokens", "expert_weights", "expert_gradients", "dense", "control")
    own = torch.tensor([statistics.median(one.get(kind, 0.0) for one in counted) for kind in kinds])
    dist.all_reduce(own)
    return dict(zip(kinds, own.tolist(), strict=True))


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What `build` and `train` read."""
    for name, default in (("hidden", 64), ("layers", 4), ("experts", 8), ("top-k", 2), ("seq-len", 128), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--model", choices=("bytes", "qwen3_moe"), default="bytes", help="see hf_model.py")
    parser.add_argument("--compute", choices=("real", "sleep"), default="real", help="see sleep_model.py")
    parser.add_argument("--dense-ms", type=float, default=2.0, help="slept per dense sublayer and sequence, forward")
    parser.add_argument("--row-us", type=float, default=10.0, help="slept per row and expert, forward")
    parser.add_argument("--prefetch-depth", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--dcs", required=True, help="DCs x GPUs per DC, as in 2x2")
    parser.add_argument("--rates", nargs="+", required=True, help="rates of the DC uplinks, or 'none'")
    parser.add_argument("--rows", type=int, nargs="+", required=True, help="sequences per rank and micro-step")
    parser.add_argument("--accumulations", type=int, nargs="+", required=True)
    add_model_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="most steps of one block")
    parser.add_argument("--block-s", type=float, default=2.0, help="seconds of one block to aim at")
    parser.add_argument(
        "--plans", nargs="+", default=[], help="names of the plans to run; by default all with exact tokens"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    sizes = tuple(int(size) for size in args.dcs.split("x"))
    known = plans_of(sizes) if args.model == "bytes" else plans_of_hf(sizes)
    plans = [plan for plan in known if (plan.name in args.plans if args.plans else plan.token_codec == "identity")]
    driver = Driver(args.control)
    driver.ask(command="rate", rate="none")
    runs = {
        accumulation: [build(args, plan, accumulation, sizes) for plan in plans] for accumulation in args.accumulations
    }
    corpus, _ = train_lm.read_corpus()
    for rate in args.rates:
        driver.ask(command="rate", rate=rate)
        for rows in args.rows:
            for accumulation in args.accumulations:
                measured = phase(runs[accumulation], driver, corpus, args, rows)
                records = []
                for run in runs[accumulation]:
                    one = measured[run.plan.name]
                    records.append(
                        {
                            "params": {
                                "dcs": args.dcs, "rate": rate, "rows": rows, "accumulation": accumulation,
                                "tokens_per_rank": rows * args.seq_len, "hidden": args.hidden, "layers": args.layers,
                                "experts": args.experts, "top_k": args.top_k, "zero_stage": args.zero_stage,
                                "lr": args.lr, "dtype": args.dtype,
                                "compute": args.compute, "dense_ms": args.dense_ms, "row_us": args.row_us,
                                "plan": run.plan.name.removeprefix(f"{run.plan.adapters}: "), "model": args.model,
                                "adapters": run.plan.adapters,
                            },
                            "step_s": one.step_s,
                            "probe_s": one.probe_s,
                            "wan_bytes_per_step": statistics.median(one.wan_bytes),
                            "counted_bytes_per_step": sum_over_ranks(one.counted),
                            "loss": run.loss,
                            "num_steps": run.num_steps,
                            "picked": None if (planner := planner_of(run)) is None else planner.current.label,
                            "history": None if planner is None else planner.history,
                            "links": [] if planner is None else planner.record(runtime_of(run))["links"],
                        }
                    )  # fmt: skip
                driver.ask(command="records", records=records)
    driver.ask(command="done")
    dist.barrier()


if __name__ == "__main__":
    main()
