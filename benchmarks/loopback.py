# SPDX-License-Identifier: Apache-2.0
"""Step time and bytes of DeepSpeed's own MoE layer and of ours, in one job over loopback.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 benchmarks/loopback.py

All plans live in one process, on the same data; blocks of steps are interleaved (see bench.py), and
DeepSpeed runs twice, so that the noise of the machine can be read off.  No link is slow here: this shows what the
runtime itself costs.  Prints one JSON line per plan on rank 0 and closes with a table.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import bench
import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

import ds_hybridep

PLANS: dict[str, dict[str, Any] | None] = {
    "deepspeed": None,
    "deepspeed again": None,
    "[1,1] direct": {"domain_sizes": (1, 1), "token_exchange": "direct"},
    "[1,1] hierarchical": {"domain_sizes": (1, 1), "token_exchange": "hierarchical"},
    "[2,1]": {"domain_sizes": (2, 1), "token_exchange": "direct"},
    "[2,2]": {"domain_sizes": (2, 2), "token_exchange": "direct"},
}


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(rows)))


class Layers(nn.Module):
    """MoE layers only: everything else would dilute the comparison."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoE(
                args.hidden,
                Expert(args.hidden),
                num_experts=args.experts,
                ep_size=4,
                k=args.top_k,
                capacity_factor=args.capacity_factor,
                use_rts=False,
                top2_2nd_expert_sampling=False,
            )
            for _ in range(args.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        total_aux = 0.0
        for layer in self.layers:
            y, aux, _ = layer(x)
            x, total_aux = x + y, total_aux + aux
        return x.square().mean() + 0.01 * total_aux


@dataclass
class Run:
    engine: Any
    step_s: list[float]


def build(args: argparse.Namespace, plan: dict[str, Any] | None) -> Run:
    torch.manual_seed(0)
    model = Layers(args)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 1_000_000,
    }
    if args.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if plan is not None:
        dc, gpu = plan["domain_sizes"]
        levels = [{"name": "dc", "size": 2, "domain_size": dc}, {"name": "gpu", "size": 2, "domain_size": gpu}]
        block = {"levels": levels, "token_exchange": plan["token_exchange"], "report_interval": 0}
        advanced = {"kernels": args.kernels, "verify_interval": 0}
        ds_hybridep.attach(engine, {**block, "advanced": advanced})
    return Run(engine, [])


def run_block(engine: Any, x: Tensor, num_steps: int) -> float:
    """Seconds per step, from the earliest start to the latest end over ranks."""
    deepspeed.comm.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
    deepspeed.comm.barrier()
    return (time.perf_counter() - start) / num_steps


def token_bytes_per_step(run: Run, num_steps: int) -> tuple[float, float]:
    """Bytes that this rank sent per step for tokens, and those that padded all-to-alls would have sent."""
    levels = ds_hybridep.stats(run.engine)["levels"]
    sent = sum(level["sent_bytes"]["tokens"] for level in levels)
    return sent / num_steps, sum(level["plain_ep_bytes"] for level in levels) / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("experts", 8), ("top-k", 2), ("layers", 2), ("tokens", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps of one block")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    rank = deepspeed.comm.get_rank()
    runs = {name: build(args, plan) for name, plan in PLANS.items()}
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    x = torch.randn(args.tokens, args.hidden, generator=torch.Generator().manual_seed(rank)).to(dtype)
    for run in runs.values():
        run_block(run.engine, x, 3)
    for order in bench.interleaved(list(PLANS), args.rounds):
        for name in order:
            runs[name].step_s.append(run_block(runs[name].engine, x, args.steps))
    if rank == 0:
        report(args, runs)
    deepspeed.comm.barrier()


def report(args: argparse.Namespace, runs: dict[str, Run]) -> None:
    params = {key: value for key, value in vars(args).items() if key != "local_rank"}
    num_steps = 3 + args.rounds * args.steps
    rows = []
    for name, run in runs.items():
        against = bench.ratio(run.step_s, runs["deepspeed"].step_s)
        median_ms = 1e3 * statistics.median(run.step_s)
        sent, padded = token_bytes_per_step(run, num_steps) if PLANS[name] is not None else (None, None)
        share = "" if sent is None or not padded else f"{sent / padded:.2f}"
        rows.append(f"{name:20} {median_ms:9.1f} ms   {against}   {share}")
        bench.print_record(
            "loopback",
            {**params, "plan": name},
            step_s=run.step_s,
            ratio_to_deepspeed=[against.median, against.low, against.high],
            token_bytes_per_step=sent,
            plain_ep_bytes_per_step=padded,
        )
    print(f"\n{'plan':20} {'step':>12}   ratio to deepspeed [95%]   token bytes / padded all-to-all")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
