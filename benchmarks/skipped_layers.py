# SPDX-License-Identifier: Apache-2.0
"""What codecs keep, and what training loses, if layers take part at times only; recommended codecs against exact.

    torchrun --nproc_per_node 4 benchmarks/skipped_layers.py --out benchmarks/results/skipped-layers.jsonl
    python benchmarks/skipped_layers.py --report benchmarks/results/skipped-layers.jsonl

The model is that of examples/train_lm.py, in bf16, on two datacentres of two ranks:

    stochastic depth   each attention takes part in half of the steps, at random
    two heads          each step uses one of two output layers
    freezing           the embeddings are trained in every second run of ten steps
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench
import deepspeed
import torch
from deepspeed import comm as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_lm

KINDS = ("stochastic depth", "two heads", "freezing")
SIZES = {"hidden": 64, "layers": 8, "experts": 4, "top_k": 2, "seq_len": 64, "capacity_factor": 1.25, "ep_size": 2}
EVALUATED = 20  # batches


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
    syncs = engine.__dict__["_hybridep_attachment"].runtime.syncs.values()
    kept = []
    for sync in syncs:
        memory = sync.memory
        kept += [
            t for one in (memory.sums, memory.results, memory.rounded) for p in one.sent.values() for t in p.tensors
        ]
    return len(kept), sum(tensor.nbytes for tensor in kept)


def train(kind: str, stage: int, codecs: dict[str, Any], steps: int) -> dict[str, Any]:
    args = argparse.Namespace(**SIZES)
    torch.manual_seed(0)
    model = train_lm.ByteModel(args)
    if kind == "two heads":
        model.head = TwoHeads(model.head)
    levels = [{"name": "dc", "size": 2, **codecs}, {"name": "gpu", "size": 2}]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "steps_per_print": 1_000_000_000,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "hybridep": {"levels": levels, "report_interval": 0},
        },
    )
    corpus, valid = train_lm.read_corpus()
    found: dict[str, Any] = {"tensors": {}, "bytes": {}, "checkpoint": {}}
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, 0)
        for step in range(steps):
            begin_step(engine.module, kind, step)
            batch = train_lm.batch_at(corpus, (0, step, 0, dist.get_rank()), rows=2, seq_len=args.seq_len)
            loss, aux_loss = engine(*batch)
            engine.backward(loss + train_lm.AUX_LOSS_WEIGHT * aux_loss)
            engine.step()
            if step + 1 in (10, steps) and codecs:
                found["tensors"][step + 1], found["bytes"][step + 1] = kept_tensors(engine)
                engine.save_checkpoint(folders[0], tag="now")
                dist.barrier()
                files = Path(folders[0], "now").glob("hybridep_rank_*")
                found["checkpoint"][step + 1] = sum(path.stat().st_size for path in files)
                dist.barrier()
    for block in engine.module.blocks:
        block.attention.__dict__.pop("forward", None)  # all layers take part in the evaluation
    engine.eval()
    with torch.no_grad():
        batches = [
            train_lm.batch_at(valid, (977, at, 0, dist.get_rank()), rows=4, seq_len=args.seq_len)
            for at in range(EVALUATED)
        ]
        found["loss"] = train_lm.mean_over_ranks(torch.stack([engine(*batch)[0] for batch in batches]).mean())
    engine.destroy()
    return found


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for stage in args.zero_stages:
        for kind in KINDS:
            exact = train(kind, stage, {}, args.steps)
            encoded = train(kind, stage, {"codecs": "recommended"}, args.steps)
            if dist.get_rank() == 0:
                record = {"params": {"kind": kind, "zero_stage": stage, "steps": args.steps, **SIZES}, **encoded,
                          "exact": exact["loss"], "versions": bench.versions()}  # fmt: skip
                with args.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(kind, stage, encoded, exact["loss"], flush=True)


def report(path: Path) -> None:
    print("| layers | ZeRO | tensors at step 10 | at the end | KB | KB | checkpoint, KB | KB | loss over exact |")
    print("|---" * 9 + "|")
    for line in path.read_text().splitlines():
        record = json.loads(line)
        about, columns = record["params"], []
        for name, unit in (("tensors", 1), ("bytes", 1000), ("checkpoint", 1000)):
            columns += [f"{value / unit:.0f}" for value in record[name].values()]
        gap = record["loss"] / record["exact"] - 1
        print(f"| {about['kind']} | {about['zero_stage']} | {' | '.join(columns)} | {gap:+.2%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--zero-stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=Path("skipped-layers.jsonl"))
    parser.add_argument("--report", type=Path, help="print the table of these records")
    args = parser.parse_args()
    if args.report is not None:
        report(args.report)
    else:
        run(args)


if __name__ == "__main__":
    main()
