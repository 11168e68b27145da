# SPDX-License-Identifier: Apache-2.0
"""A model of 300 million parameters and a vocabulary of 32,768: the same training as DeepSpeed, and predicted bytes?

    python -m benchmarks larger --folder runs --minutes 60 --out benchmarks/results/larger.jsonl
    python -m benchmarks larger --report benchmarks/results/larger.jsonl --plots docs/images

Two emulated datacentres of one rank train a random Qwen3-MoE through AutoEP with AdamW, in fp32 under ZeRO 1, on the
Python files of the packages torch and deepspeed, in tokens of a vocabulary that is made from them (byte-level BPE).
All ways have one expert-parallel group over both datacentres, the same weights at the start and the same batches:

    DeepSpeed              alone
    exact                  tokens and dense gradients cross
    exact, domain          weights and gradients of experts cross in place of tokens
    encoded, domain        the same with the recommended codecs

Compared with DeepSpeed: the loss of every step, and the weights at the end of each part, as the relative L2 distance
over every 97th element, beside how far DeepSpeed's own weights are from the start; and whether they are equal bit for
bit (CRC-32 of all weights of each rank).  Bytes are those that an uplink carries in a step, headers included, counted
by the network from the second step of a part on; and the payload as ds_hybridep counts it, beside what
`ds_hybridep plan` predicts.  What it predicts of seconds is for GPUs, and not compared.  Seconds are those of CPU
ranks that share the cores of one machine.  `GiB` is the largest resident set of all ranks together.

A part is `--every` steps of one way, in new processes, from a checkpoint in `--folder` to the next.  A checkpoint has
5 GB, and there is one of each way, and one more while a part ends.  The way that is behind goes first.  A sitting ends
with the first part that ends after `--minutes`, and the same command goes on.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from torch import Tensor

from benchmarks.common import OKABE_ITO, REPOSITORY, Record, Records, new_figure, run_job, save_figure, table
from benchmarks.e2e import level_0_bytes
from benchmarks.rivals import CLIP, schedule
from benchmarks.training import (
    RECOMMENDED,
    Job,
    Plan,
    Run,
    autoep,
    engine_of,
    python_files,
    qwen3_moe,
    save,
    steps_in,
    texts_of,
    train_lm,
)
from ds_hybridep.lab.topology import LinkSpec, parse_rate

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

PLAIN = "DeepSpeed"
WAYS = {
    PLAIN: Plan(PLAIN, 2),
    "exact": Plan("exact", 2, (1, 1)),
    "exact, domain": Plan("exact, domain", 2, (2, 1)),
    "encoded, domain": Plan("encoded, domain", 2, (2, 1), RECOMMENDED),
}
SIZES = (2, 1)  # datacentres, ranks in each
MODEL = (
    "hidden", "layers", "experts", "top_k", "vocabulary", "rows", "seq_len", "lr", "dtype", "seed", "rate", "steps",
)  # fmt: skip
SAMPLED = 97  # every so many elements
BUCKET = 50_000_000  # elements; DeepSpeed's default is more than the model
TEXT_BYTES = 8_000_000  # that are made into tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("larger-runs"), help="of checkpoints, to go on from")
    parser.add_argument("--minutes", type=float, default=60.0, help="of this sitting")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--rate", default="1000mbit", help="of each datacentre's uplink")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=1, help="sequences of a rank in a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plots", type=Path, help="folder for the plot of the report")


# ---- the driver ----


def run(args: argparse.Namespace, records: Records) -> None:
    end = time.monotonic() + 60 * args.minutes
    args.folder.mkdir(parents=True, exist_ok=True)
    records.go_on()
    if not tokens_of(args).exists():
        make_tokens(args)
    while time.monotonic() < end:
        done = {way: steps_in(args.folder / way) for way in args.ways}
        way = min(args.ways, key=lambda name: done[name])  # of those that are as far, the first
        if done[way] >= args.steps:
            break
        run_job("2x1", LinkSpec(wan_bits_per_s=parse_rate(args.rate, "--rate")), records, "--ways", way)


def tokens_of(args: argparse.Namespace) -> Path:
    return Path(args.folder) / f"tokens-{args.vocabulary}.pt"


def make_tokens(args: argparse.Namespace) -> None:
    """Make a vocabulary of the text, and the text into tokens, int32 [num_tokens]."""
    from tokenizers import ByteLevelBPETokenizer

    text = bytes(texts_of(python_files())[0].numpy()).decode(errors="replace")
    tokenizer = ByteLevelBPETokenizer()
    step = 1_000_000
    parts = [text[begin : begin + step] for begin in range(0, len(text), step)]
    tokenizer.train_from_iterator(parts, vocab_size=args.vocabulary, show_progress=False)
    found = [torch.tensor(one.ids, dtype=torch.int32) for one in tokenizer.encode_batch(parts[: TEXT_BYTES // step])]
    torch.save(torch.cat(found), tokens_of(args))


# ---- the ranks ----


def rank(args: argparse.Namespace, job: Job) -> None:
    """Train one way for a part."""
    way = args.ways[-1]
    plan, folder = WAYS[way], args.folder / way
    run = build(args, plan)
    start = weights_of(run)
    if steps_in(folder):
        run.engine.load_checkpoint(str(folder))
    elif way == PLAIN:
        torch.save(start, sample_in(args, 0))
    run.num_steps, first = run.engine.global_steps, run.engine.global_steps + 1
    corpus = torch.load(tokens_of(args))
    losses, step_s, counted, last = [], [], (0.0, {}), min(args.every, args.steps - run.num_steps)
    for step in range(last):
        dist.barrier()
        begin = time.perf_counter()
        run.train(corpus, args, args.rows, 1)
        dist.barrier()
        step_s.append(time.perf_counter() - begin)
        losses.append(train_lm.mean_over_ranks(torch.tensor(run.loss)))
        if step in (0, last - 1):  # what the first step left under way is not counted
            run.finish_transfers()
            before, counted = counted, (job.ask("counters").get("wan_bytes", 0), level_0_bytes(run))
    num = max(last - 1, 1)
    weights = weights_of(run)
    if way == PLAIN:
        torch.save(weights, sample_in(args, run.num_steps))
    params = {name: getattr(args, name) for name in MODEL} | {"way": way}
    job.record(
        params, first=first, step=run.num_steps, losses=[round(loss, 7) for loss in losses], step_s=step_s,
        link_bytes=(counted[0] - before[0]) / num / SIZES[0],  # of one uplink
        counted_bytes={kind: mean((count - before[1].get(kind, 0)) / num) for kind, count in counted[1].items()},
        predicted_bytes=predicted(args, plan, run.engine.module.config) if job.rank == 0 else None,
        checksums=checksums(run), distances=distances(args, run.num_steps, weights),
        gib=total(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20), parameters=num_parameters(run),
    )  # fmt: skip
    job.say(f"{way}: step {run.num_steps}, loss {losses[-1]:.4f}, {statistics.median(step_s):.1f} s a step")
    save(run.engine, folder)
    job.end()


def build(args: argparse.Namespace, plan: Plan) -> Run:
    # All ranks begin with the same seed.  A broadcast of each parameter would take longer than a step.
    deepspeed.DeepSpeedEngine._broadcast_model = lambda self: None
    torch.manual_seed(args.seed)
    block = None if plan.domain_sizes is None else plan.block(SIZES)
    zero = {"stage": 1, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    engine = engine_of(
        qwen3_moe(args), block, rate=args.lr, dtype=args.dtype, zero_optimization=zero, gradient_clipping=CLIP,
        scheduler={"type": "WarmupDecayLR", "params": schedule(args.lr, args.steps)}, **autoep(plan.ep_size),
    )  # fmt: skip
    return Run(plan, engine)


def total(value: float) -> float:
    """Over ranks."""
    return dist.get_world_size() * mean(value)


def mean(value: float) -> float:
    return train_lm.mean_over_ranks(torch.tensor(value))


def weights_of(run: Run) -> Tensor:
    """A sample of this rank's weights, [num_sampled] float32."""
    weights = [parameter.detach().flatten()[::SAMPLED].float() for parameter in run.engine.module.parameters()]
    return torch.cat(weights)


def sample_in(args: argparse.Namespace, step: int) -> Path:
    return Path(args.folder) / f"sample-{step}-{dist.get_rank()}.pt"


def distances(args: argparse.Namespace, step: int, weights: Tensor) -> dict[str, float]:
    """Relative L2 distances of all ranks' weights: to DeepSpeed's, and of these to the start, where they are known."""
    paths = {"to_deepspeed": sample_in(args, step), "from_start": sample_in(args, 0)}
    found = {}
    for name, path in paths.items():
        if path.exists():
            other = torch.load(path)
            square, of_all = total(float((weights - other).square().sum())), total(float(other.square().sum()))
            found[name] = (square / of_all) ** 0.5
    return found


def checksums(run: Run) -> list[int]:
    """CRC-32 of the bits of all weights, by rank."""
    value = 0
    for parameter in run.engine.module.parameters():
        value = zlib.crc32(parameter.detach().contiguous().view(torch.uint8).numpy(), value)
    found: list[Any] = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value]))
    return [int(one) for one in found]


def num_parameters(run: Run) -> int:
    """Of the whole model."""
    by_kind = {True: 0, False: 0}
    for parameter in run.engine.module.parameters():
        by_kind[getattr(parameter, "allreduce", True)] += parameter.numel()
    return by_kind[True] + by_kind[False] * SIZES[0]


def predicted(args: argparse.Namespace, plan: Plan, config: Any) -> dict[str, float]:
    """What `ds_hybridep plan` says of the bytes over an uplink in a step, by kind; DeepSpeed's without kinds."""
    folder = Path(args.folder) / "config"
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    line = [
        "plan", "--model", str(folder), "--dcs", "2x1", "--wan", "1gbps", "--tokens", str(args.rows * args.seq_len),
        "--dtype", args.dtype, "--ep-size", str(plan.ep_size), "--learning-rate", str(args.lr), "--memory", "1000",
        "--codecs", "recommended" if plan.slow else "exact", "--json",
    ]  # fmt: skip
    program = [sys.executable, "-m", "ds_hybridep.commands.main", *line]
    answer = json.loads(subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout)
    if plan.domain_sizes is None:
        (row,) = (row for row in answer["table"] if row["name"].startswith("DeepSpeed, EP 2"))
        return {"all": row["link_bytes"]}
    found = [
        row for row in (answer["plan"], *answer["others"])
        if tuple(row["domain_sizes"]) == plan.domain_sizes
        and (row["gradient_codecs"][0] != "identity") == bool(plan.slow)
    ]  # fmt: skip
    return dict(found[0]["uplink_bytes"][0])


# ---- the report ----

KINDS = {"tokens": "tokens", "expert_weights": "expert_weights", "expert_gradients": "expert_gradients",
         "dense": "dense_sync"}  # counted, predicted  # fmt: skip


def report(records: list[Record], args: argparse.Namespace) -> str:
    """For each model: losses and weights beside DeepSpeed's, bytes beside the prediction, and seconds."""
    models: dict[tuple[Any, ...], dict[tuple[str, int], Record]] = {}
    for record in records:  # of a part that was trained again after a crash, the last record counts
        about = tuple(record["params"][name] for name in MODEL)
        models.setdefault(about, {})[record["params"]["way"], record["step"]] = record
    texts = []
    for about, parts in models.items():
        params, first = dict(zip(MODEL, about, strict=True)), next(iter(parts.values()))
        tokens = 2 * params["rows"] * params["seq_len"]
        texts.append(
            f"{first['parameters'] / 1e6:.0f} million parameters: hidden {params['hidden']}, {params['layers']} "
            f"layers, {params['experts']} experts, vocabulary {params['vocabulary']}; {tokens} tokens a step, "
            f"{params['dtype']}, {params['rate']}\n"
        )
        ways = [way for way in WAYS if any(way == one for one, _ in parts)]
        texts.append(parity_table(parts, ways) + "\n")
        texts.append(bytes_table(parts, ways) + "\n")
        if args.plots:
            plot({way: losses_of(parts, way) for way in ways}, args.plots / f"larger-{params['hidden']}.svg")
    return "\n".join(texts)


Parts = Mapping[tuple[str, int], Record]  # by way and last step


def losses_of(parts: Parts, way: str) -> dict[int, float]:
    """By step."""
    return {
        record["first"] + at: loss for (one, _), record in parts.items() if one == way
        for at, loss in enumerate(record["losses"])
    }  # fmt: skip


def parity_table(parts: Parts, ways: Sequence[str]) -> str:
    plain = losses_of(parts, PLAIN)
    rows = []
    for way in ways:
        losses = losses_of(parts, way)
        both = sorted(set(losses) & set(plain))
        apart = max((abs(losses[step] / plain[step] - 1) for step in both), default=None)
        last = parts[way, max(losses)]
        of_plain, found = parts.get((PLAIN, max(losses))), last["distances"]
        same = "" if of_plain is None else "yes" if of_plain["checksums"] == last["checksums"] else "no"
        cells = [f"{found[name]:.1e}" if name in found else "" for name in ("to_deepspeed", "from_start")]
        rows.append([
            way, max(losses), f"{losses[min(losses)]:.4f} to {losses[max(losses)]:.4f}",
            "" if apart is None else f"{apart:.1e}", *cells, same,
        ])  # fmt: skip
    header = ["way", "steps", "loss", "largest gap to DeepSpeed's", "weights, to DeepSpeed's", "from the start"]
    return table([*header, "bits equal DeepSpeed's"], rows)


def bytes_table(parts: Parts, ways: Sequence[str]) -> str:
    """MB of an uplink in a step; seconds of a step."""
    rows = []
    for way in ways:
        found = [record for (one, _), record in parts.items() if one == way]
        counted, expected = found[-1]["counted_bytes"], found[-1]["predicted_bytes"]
        kinds = [
            f"{counted[kind] / 1e6:.2f} ({expected[name] / 1e6:.2f})" if kind in counted and name in expected else ""
            for kind, name in KINDS.items()
        ]
        every = sorted(seconds for record in found for seconds in record["step_s"][1:] or record["step_s"])
        link = statistics.median(record["link_bytes"] for record in found)
        rows.append([
            way, f"{link / 1e6:.1f}", f"{sum(expected.values()) / 1e6:.1f}", *kinds,
            f"{statistics.median(every):.1f}", f"{every[0]:.1f} to {every[-1]:.1f}",
            f"{max(record['gib'] for record in found):.1f}",
        ])  # fmt: skip
    header = ["way", "MB of an uplink", "predicted", *(f"{name.replace('_', ' ')} (predicted)" for name in KINDS)]
    return table([*header, "s/step", "all steps", "GiB"], rows)


def plot(losses: Mapping[str, Mapping[int, float]], path: Path) -> None:
    figure, (left, right) = new_figure(1, 2, figsize=(11, 3.8))
    for (way, found), color in zip(losses.items(), OKABE_ITO, strict=False):
        left.plot(list(found), list(found.values()), color=color, label=way, linewidth=1.5)
        both = [step for step in found if step in losses.get(PLAIN, {})]
        if way != PLAIN and both:
            gaps = [max(abs(found[step] / losses[PLAIN][step] - 1), 1e-8) for step in both]
            right.plot(both, gaps, color=color, label=way, linewidth=1.5)
    left.set(xlabel="step", ylabel="training loss")
    right.set(xlabel="step", ylabel="gap to DeepSpeed's loss, relative", yscale="log")
    left.legend(frameon=False)
    save_figure(
        figure,
        path,
        "2 CPU ranks in 2 emulated datacentres, the same weights and batches. Gaps below 1e-8 are drawn there.",
    )
