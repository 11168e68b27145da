# SPDX-License-Identifier: Apache-2.0
"""What codecs cost in a training step where no link is slow: four ranks over loopback.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 4 benchmarks/codec_step.py
    ... benchmarks/codec_step.py --layers 2 --rows 16

The model of the end-to-end benchmark (4 layers, hidden 64, 8 experts, 1024 tokens per rank), or with the arguments of
the second line that of `make demo`, on two levels of two with domains over the slower one.  All codecs, and exact
migration twice, live in one job on the same data, in interleaved blocks of steps.  Two numbers for each: the
share of a step that ranks spend in encoding and decoding, by their own clocks, and the step's length against the exact
one.  Prints a JSON line for each and closes with a table.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bench
import deepspeed
import torch
from deepspeed import comm as dist

import ds_hybridep

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_lm


def low_rank(rank: int, factors: str) -> dict[str, Any]:
    return {"type": "low_rank", "rank": rank, "factors": factors}


def balanced(rank: int) -> dict[str, Any]:
    return {**low_rank(rank, "log4"), "weighting": "rms"}


def and_the_rest(codec: dict[str, Any]) -> dict[str, Any]:
    return {**codec, "rest": {"type": "int2", "block": 64}}


# name -> (weight codec, gradient codec)
CODECS: dict[str, tuple[Any, Any]] = {
    "exact": ("identity", "identity"),
    "exact again": ("identity", "identity"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
    "low rank 7, int4": (low_rank(7, "int4"),) * 2,
    "low rank 7, int4 / balanced 7": (low_rank(7, "int4"), balanced(7)),
    "low rank 16 + int2 / balanced 16 + int2": (and_the_rest(low_rank(16, "int4")), and_the_rest(balanced(16))),
    "low rank 8 + int2 / balanced 8 + int2": (and_the_rest(low_rank(8, "int4")), and_the_rest(balanced(8))),
}
MODEL = {"hidden": 64, "layers": 4, "experts": 8, "top_k": 2, "seq_len": 128, "capacity_factor": 1.25, "ep_size": 4}


class Run:
    """One codec in training."""

    def __init__(self, codecs: tuple[Any, Any], args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = train_lm.ByteModel(argparse.Namespace(**MODEL))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 1_000_000_000,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        levels = [
            {"name": "dc", "size": 2, "domain_size": 2, "weight_codec": codecs[0], "gradient_codec": codecs[1]},
            {"name": "gpu", "size": 2},
        ]
        advanced = {"verify_interval": 0, "kernels": args.kernels}
        block = {"levels": levels, "report_interval": 0, "advanced": advanced}
        ds_hybridep.attach(self.engine, block)
        self.num_steps = 0
        self.step_s: list[float] = []
        self.codec_s: list[float] = []  # of a step, mean over ranks

    def train(self, corpus: torch.Tensor, rows: int, num_steps: int) -> None:
        for _ in range(num_steps):
            place = (0, self.num_steps, 0, dist.get_rank())
            loss, aux_loss = self.engine(*train_lm.batch_at(corpus, place, rows=rows, seq_len=MODEL["seq_len"]))
            self.engine.backward(loss + train_lm.AUX_LOSS_WEIGHT * aux_loss)
            self.engine.step()
            self.num_steps += 1

    def block(self, corpus: torch.Tensor, rows: int, num_steps: int) -> None:
        before_s = self.seconds_in_codecs()
        dist.barrier()
        begin_s = time.perf_counter()
        self.train(corpus, rows, num_steps)
        dist.barrier()  # the latest end over ranks
        self.step_s.append((time.perf_counter() - begin_s) / num_steps)
        spent_s = torch.tensor([self.seconds_in_codecs() - before_s])
        dist.all_reduce(spent_s)
        self.codec_s.append(spent_s.item() / dist.get_world_size() / num_steps)

    def seconds_in_codecs(self) -> float:
        codecs = [layer["codecs"] for layer in ds_hybridep.stats(self.engine)["layers"]]
        return sum(one.get("encode_s", 0.0) + one.get("decode_s", 0.0) for one in codecs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS), metavar="NAME")
    parser.add_argument("--rows", type=int, default=8, help="sequences of 128 tokens per rank")
    parser.add_argument("--layers", type=int, default=MODEL["layers"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="steps of one block")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    MODEL["layers"] = args.layers
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    corpus, _ = train_lm.read_corpus()
    runs = {name: Run(CODECS[name], args) for name in dict.fromkeys(["exact", *args.codecs])}
    for run in runs.values():
        run.train(corpus, args.rows, 2)
    for order in bench.interleaved(list(runs), args.rounds):
        for name in order:
            runs[name].block(corpus, args.rows, args.steps)
    if dist.get_rank() == 0:
        report(args, runs)
    dist.barrier()


def report(args: argparse.Namespace, runs: dict[str, Run]) -> None:
    lines = [f"{'weights / gradients':32} {'step':>9} {'in codecs':>10}   share of a step [95%]   step / exact [95%]"]
    for name, run in runs.items():
        share, against = bench.ratio(run.codec_s, run.step_s), bench.ratio(run.step_s, runs["exact"].step_s)
        codec_ms, step_ms = (1e3 * statistics.median(samples) for samples in (run.codec_s, run.step_s))
        lines.append(f"{name:32} {step_ms:6.1f} ms {codec_ms:7.2f} ms   {share}   {against}")
        params = {**MODEL, "rows": args.rows, "codec": name, "spec": CODECS[name]}
        bench.print_record("codec_step", params, step_s=run.step_s, codec_s=run.codec_s)
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
