# SPDX-License-Identifier: Apache-2.0
"""What codecs keep, and what training loses, if layers take part at times only; recommended codecs against exact.

    python -m benchmarks skipped-layers --out benchmarks/results/skipped-layers.jsonl

The model is that of examples/train_lm.py, in bf16, on two datacentres of two ranks:

    stochastic depth   each attention takes part in half of the steps, at random
    two heads          each step uses one of two output layers
    freezing           the embeddings are trained in every second run of ten steps
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from benchmarks.common import Record, Records, run_job, table
from benchmarks.training import Job, byte_model, engine_of, loss_on, runtime_of, train_lm, train_step

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

KINDS = ("stochastic depth", "two heads", "freezing")
MODEL = {"hidden": 64, "layers": 8, "experts": 4, "top_k": 2, "seq_len": 64, "capacity_factor": 1.25, "ep_size": 2}
EVALUATED = 20  # batches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--zero-stages", type=int, nargs="+", default=[1, 2])


def run(args: argparse.Namespace, records: Records) -> None:
    run_job("2x2", None, records)


class TwoHeads(nn.Module):
    """Two output layers, of which each step uses one."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.heads = nn.ModuleList([head, nn.Linear(head.in_features, head.out_features, bias=False)])
        self.used = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.used](x)


def begin_step(model: Any, kind: str, step: int) -> None:
    """Choose what takes part in a step: the same on all ranks and in all runs."""
    if kind == "stochastic depth":
        draw = random.Random(step)
        for block in model.blocks:
            block.attention.__dict__.pop("forward", None)
            if draw.random() < 0.5:
                block.attention.forward = torch.zeros_like
    elif kind == "two heads":
        model.head.used = step % 2
    else:
        for parameter in (model.bytes.weight, model.positions.weight):
            parameter.requires_grad_(step // 10 % 2 == 0)


def kept_tensors(engine: Any) -> tuple[int, int]:
    """Number and bytes of the residuals of dense parameters on this rank."""
    memories = [sync.memory for sync in runtime_of(engine).syncs.values()]
    parts = [part for memory in memories for part in (memory.sums, memory.results, memory.rounded)]
    kept = [tensor for part in parts for tensor in part.residuals]
    return len(kept), sum(tensor.nbytes for tensor in kept)


def train(job: Job, kind: str, stage: int, codecs: dict[str, Any], steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = byte_model(**MODEL)
    if kind == "two heads":
        model.head = TwoHeads(model.head)
    levels = [{"name": "dc", "size": 2, **codecs}, {"name": "gpu", "size": 2}]
    engine = engine_of(model, {"levels": levels}, stage=stage, dtype="bf16", gradient_clipping=1.0)
    corpus, valid = train_lm.read_corpus()
    found: dict[str, Any] = {"tensors": {}, "bytes": {}, "checkpoint": {}}
    for step in range(steps):
        begin_step(engine.module, kind, step)
        train_step(engine, corpus, step, rows=2, seq_len=MODEL["seq_len"])
        if step + 1 in (10, steps) and codecs:
            found["tensors"][step + 1], found["bytes"][step + 1] = kept_tensors(engine)
            engine.save_checkpoint(str(job.folder), tag="now")
            dist.barrier()
            files = Path(job.folder, "now").glob("hybridep_rank_*")
            found["checkpoint"][step + 1] = sum(path.stat().st_size for path in files)
            dist.barrier()
    for block in engine.module.blocks:
        block.attention.__dict__.pop("forward", None)  # all layers take part in the evaluation
    found["loss"] = loss_on(engine, valid, EVALUATED, seq_len=MODEL["seq_len"])
    engine.destroy()
    return found


def rank(args: argparse.Namespace, job: Job) -> None:
    for stage in args.zero_stages:
        for kind in KINDS:
            exact = train(job, kind, stage, {}, args.steps)
            encoded = train(job, kind, stage, {"codecs": "recommended"}, args.steps)
            params = {"kind": kind, "zero_stage": stage, "steps": args.steps, **MODEL}
            job.record(params, **encoded, exact=exact["loss"])
            job.say(f"{kind}, ZeRO {stage}: done")
    job.end()


def report(records: list[Record], args: argparse.Namespace) -> str:
    rows = []
    for record in records:
        cells = [record["params"]["kind"], record["params"]["zero_stage"]]
        for name, unit in (("tensors", 1), ("bytes", 1000), ("checkpoint", 1000)):
            cells += [f"{value / unit:.0f}" for value in record[name].values()]
        rows.append([*cells, f"{record['loss'] / record['exact'] - 1:+.2%}"])
    header = ("layers", "ZeRO", "tensors at step 10", "at the end", "KB", "KB", "checkpoint, KB", "KB")
    return table([*header, "loss over exact"], rows)
