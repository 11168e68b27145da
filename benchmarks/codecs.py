# SPDX-License-Identifier: Apache-2.0
"""What codecs cost in loss, in bytes and in time: two sites trained in one process, single codecs, and patches.

    python -m benchmarks codecs --seeds 0 1 2 --out benchmarks/results/codecs.jsonl
    python -m benchmarks codecs time --out rates.jsonl
    python -m benchmarks codecs patch

loss   site 0 owns every parameter, site 1 computes with mirrors of them, each on half of the rows of a batch.
       Gradients of site 1 come back through the gradient codec with error feedback, new weights go out through the
       weight codec.  Two phases: from scratch on the sources of Python's standard library, and from the exact run's
       result on other text.  Loss is of the owner's weights, against the exact run of the same seed.  Any difference,
       however small, grows into another run of the same quality, so gaps have an upper 95% bound over the seeds.
time   milliseconds of one step of each codec, the least of several; `ds_hybridep plan --codec-rates` reads the file
patch  bits and speed of patches of bf16 weights by learning rate, beside the entropy of what changed: of a small
       transformer under AdamW with fp32 masters.  Seconds are those that one thread spends on the processor
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import patches
from benchmarks.common import REPOSITORY, Record, Records, read_records, table, upper_95
from benchmarks.losses import read_headers
from benchmarks.training import VOCABULARY, train_lm
from ds_hybridep.codecs import make_codec

Spec = str | dict[str, Any] | None
EXPERTS, TOP_K, ROWS, SEQ_LEN, EVAL_BATCHES = 8, 2, 8, 128, 48
LEARNING_RATES = {"scratch": (2e-3, 20), "tune": (3e-4, 10)}  # the largest, and after how many steps
FINAL_LR = 0.1  # of the largest, reached by a cosine
CACHE = REPOSITORY / ".cache" / "codecs"  # states to tune from


def low_rank(size: dict[str, Any], factors: str = "int4", **more: Any) -> dict[str, Any]:
    return {"type": "low_rank", "factors": factors, "iterations": 2, **size, **more}


def balanced(size: dict[str, Any]) -> dict[str, Any]:
    """For gradients: errors count relative to the size of their row and column, as they do under Adam."""
    return low_rank(size, "log4", weighting="rms")


def and_the_rest(codec: dict[str, Any]) -> dict[str, Any]:
    """Two bits for each element of what the directions leave."""
    return {**codec, "rest": {"type": "int2", "block": 64}}


RANK_3, RANK_7, RANK_8, RANK_16 = ({"rank": rank} for rank in (3, 7, 8, 16))
# name -> codecs of expert weights, expert gradients, dense weights, dense gradients; None: exact
CASES: dict[str, tuple[Spec, Spec, Spec, Spec]] = {
    "exact": (None, None, None, None),
    "int8": ("int8", "int8", None, None),
    "int4": ("int4", "int4", None, None),
    "int4 / exact": ("int4", None, None, None),
    "exact / int4": (None, "int4", None, None),
    "low rank 7, int4": (low_rank(RANK_7), low_rank(RANK_7), None, None),
    "low rank 7, int4 / exact": (low_rank(RANK_7), None, None, None),
    "exact / balanced 7": (None, balanced(RANK_7), None, None),
    "low rank 3, int4 / balanced 3": (low_rank(RANK_3), balanced(RANK_3), None, None),
    "low rank 7, int4 / balanced 7": (low_rank(RANK_7), balanced(RANK_7), None, None),
    "low rank 8 + int2 / balanced 8 + int2": (
        and_the_rest(low_rank(RANK_8)), and_the_rest(balanced(RANK_8)), None, None,
    ),
    "low rank 16 + int2 / balanced 16 + int2": (
        and_the_rest(low_rank(RANK_16)), and_the_rest(balanced(RANK_16)), None, None,
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=("loss", "time", "patch"), default="loss")
    parser.add_argument("--kernels", choices=("compiled", "reference"), default="compiled")
    parser.add_argument("--samples", type=int, default=7, help="of each time")
    add_loss_arguments(parser, CASES, {"layers": 2, "hidden": 64, "steps": 300})
    parser.add_argument("--shape", nargs=3, type=int, default=[2, 256, 64], metavar=("N", "ROWS", "COLS"))
    parser.add_argument("--weights", type=int, default=2**22, help="of a patch")


def add_loss_arguments(parser: argparse.ArgumentParser, cases: dict[str, Any], sizes: dict[str, int]) -> None:
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases), metavar="NAME")
    parser.add_argument("--phases", nargs="+", choices=LEARNING_RATES, default=list(LEARNING_RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)


def run(args: argparse.Namespace, records: Records) -> None:
    torch.set_num_threads(1)
    if args.what == "loss":
        run_cases(args, records, CASES)
    else:
        (time_codecs if args.what == "time" else patches.measure)(args, records)


# ---- loss ----


class Experts(nn.Module):
    """Top-k experts, [T, D] -> [T, D], and the load-balancing loss."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, EXPERTS, bias=False)
        one = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def copies(tensor: Tensor) -> nn.Parameter:
            stack = tensor.detach().reshape(-1, tensor.shape[-1]).expand(EXPERTS, -1, -1).clone()
            return nn.Parameter(stack + 0.1 * stack.std() * torch.randn_like(stack))

        self.experts = nn.ParameterList(copies(tensor) for layer in one for tensor in (layer.weight, layer.bias))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probability = self.gate(x).softmax(dim=-1)
        weight, expert = probability.topk(TOP_K, dim=-1)  # [T, K]
        share = F.one_hot(expert, EXPERTS).float().mean(dim=(0, 1))
        aux_loss = EXPERTS * (share * probability.mean(dim=0)).sum()
        order = expert.flatten().argsort(stable=True)
        rows = x[order // TOP_K].split(expert.flatten().bincount(minlength=EXPERTS).tolist())
        outputs = []
        for idx, expert_rows in enumerate(rows):
            w1, b1, w2, b2 = (tensor[idx] for tensor in self.experts)
            outputs.append(F.gelu(expert_rows @ w1.T + b1) @ w2.T + b2)
        slots = torch.cat(outputs)[order.argsort()].view(len(x), TOP_K, -1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        return (slots * weight.unsqueeze(-1)).sum(dim=1), aux_loss


class Model(nn.Module):
    """(inputs, targets) -> (cross entropy in nats per byte, load-balancing loss)."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(SEQ_LEN, hidden)
        self.attention_norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.attentions = nn.ModuleList(train_lm.Attention(hidden) for _ in range(layers))
        self.moe_norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.moes = nn.ModuleList(Experts(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.bytes(inputs) + self.positions.weight
        aux_losses = []
        blocks = zip(self.attention_norms, self.attentions, self.moe_norms, self.moes, strict=True)
        for attention_norm, attention, moe_norm, moe in blocks:
            x = x + attention(attention_norm(x))
            moved, aux_loss = moe(moe_norm(x).flatten(0, 1))
            x = x + moved.view_as(x)
            aux_losses.append(aux_loss)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), torch.stack(aux_losses).mean()


class Direction:
    """One tensor's way through a codec, and the bytes that took; fp32 without one."""

    def __init__(self, spec: Spec, shape: Sequence[int]) -> None:
        self.codec = None if spec is None else make_codec(spec)
        self.state = None if self.codec is None else self.codec.new_state(*shape)
        self.num_bytes = 0

    def sent(self, values: Tensor, packets: Tensor | None) -> None:
        self.num_bytes += 4 * values.numel() if packets is None else packets.numel()


class Link:
    """One parameter on its way from site 0 to site 1, and its gradient back."""

    def __init__(self, owned: nn.Parameter, mirror: nn.Parameter, weight_spec: Spec, gradient_spec: Spec) -> None:
        self.owned, self.mirror = owned, mirror
        self.shape = (1,) * (3 - owned.dim()) + tuple(owned.shape)
        self.weights, self.gradients = Direction(weight_spec, self.shape), Direction(gradient_spec, self.shape)
        self.residual = torch.zeros(self.shape)

    @torch.no_grad()
    def send_weights(self) -> None:
        values, mirror = (tensor.detach().view(self.shape) for tensor in (self.owned, self.mirror))
        packets = None
        if self.weights.codec is None:
            mirror.copy_(values)
        else:
            packets = self.weights.codec.encode_update(values, mirror, self.weights.state)
        self.weights.sent(values, packets)

    @torch.no_grad()
    def return_gradient(self) -> None:
        gradient, packets = self.mirror.grad.view(self.shape), None
        if (codec := self.gradients.codec) is not None:
            packets = codec.encode_with_residual(gradient, self.residual, self.gradients.state)
            gradient = codec.decode(packets, torch.empty_like(gradient))
        self.gradients.sent(gradient, packets)
        self.owned.grad = (self.owned.grad + gradient.view(self.owned.shape)) / 2


def learning_rate(phase: str, step: int, steps: int) -> float:
    largest, warm_up = LEARNING_RATES[phase]
    if step < warm_up:
        return largest * (step + 1) / warm_up
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))
    return largest * (FINAL_LR + (1 - FINAL_LR) * cosine)


def codecs_of(name: str, specs: tuple[Spec, Spec, Spec, Spec], only: tuple[str, ...]) -> tuple[Spec, Spec]:
    """Codecs of a parameter's weights and gradients."""
    if ".experts." in name:
        return specs[:2]
    return specs[2:] if name.startswith(only) else (None, None)


def train(
    model: Model, phase: str, seed: int, steps: int, text: Tensor, codecs: Callable[[str], tuple[Spec, Spec]]
) -> dict[str, float]:
    """Train `model` as the owner; fp32 bytes over bytes sent, of weights and of gradients."""
    remote = copy.deepcopy(model)
    pairs = zip(model.named_parameters(), remote.parameters(), strict=True)
    links = [Link(owned, mirror, *codecs(name)) for (name, owned), mirror in pairs]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase, step, steps)
        halves = train_lm.batch_at(text, (seed, step), rows=ROWS, seq_len=SEQ_LEN)
        for site, inputs, targets in zip((model, remote), *(half.chunk(2) for half in halves), strict=True):
            site.zero_grad(set_to_none=False)
            loss, aux_loss = site(inputs, targets)
            (loss + train_lm.AUX_LOSS_WEIGHT * aux_loss).backward()
        for link in links:
            link.return_gradient()
        optimizer.step()
        for link in links:
            link.send_weights()
    raw_bytes = 4 * steps * sum(link.owned.numel() for link in links)
    return {
        "weight_ratio": raw_bytes / sum(link.weights.num_bytes for link in links),
        "gradient_ratio": raw_bytes / sum(link.gradients.num_bytes for link in links),
    }


@torch.no_grad()
def evaluate(model: Model, text: Tensor) -> float:
    """Mean loss over the same windows at every call."""
    places = [(7, at) for at in range(EVAL_BATCHES)]
    batches = (train_lm.batch_at(text, place, rows=ROWS, seq_len=SEQ_LEN) for place in places)
    return statistics.fmean(model(*batch)[0].item() for batch in batches)


def run_cases(
    args: argparse.Namespace,
    records: Records,
    cases: dict[str, tuple[Spec, Spec, Spec, Spec]],
    only: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> None:
    """Measure each case, phase and seed that the file of records does not hold yet.

    only: in these cases other dense parameters than those whose names begin so stay exact.
    """
    corpora = {"scratch": train_lm.read_corpus(), "tune": read_headers(train_lm.VALID_EVERY)}
    done = {key_of(record) for record in read_records([records.out] if records.out else [])}
    CACHE.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        start = CACHE / f"exact-{args.layers}-{args.hidden}-{args.steps}-{seed}.pt"
        for case in dict.fromkeys(["exact", *args.cases]):
            for phase in args.phases:
                steps = args.steps if phase == "scratch" else args.steps // 2
                params = {"name": case, "phase": phase, "seed": seed, "hidden": args.hidden, "steps": steps}
                is_start = case == "exact" and phase == "scratch" and not start.exists()
                if tuple(params.values()) in done and not is_start:
                    continue
                torch.manual_seed(seed)
                model = Model(args.hidden, args.layers)
                if phase == "tune" and start.exists():
                    model.load_state_dict(torch.load(start))
                train_text, valid_text = corpora[phase]
                ratios = train(
                    model, phase, seed, steps, train_text,
                    lambda name, case=case: codecs_of(name, cases[case], only.get(case, ("",))),
                )  # fmt: skip
                if is_start:
                    torch.save(model.state_dict(), start)
                with torch.no_grad():
                    batches = (
                        train_lm.batch_at(valid_text, (7, at), rows=ROWS, seq_len=SEQ_LEN)
                        for at in range(EVAL_BATCHES)
                    )
                    loss = statistics.fmean(model(*batch)[0].item() for batch in batches)
                records.add(params, codecs=cases[case], loss=loss, layers=args.layers, **ratios)
                print(f"{phase}, seed {seed}, {case}: loss {loss:.4f}", flush=True)


def key_of(record: Record) -> tuple[Any, ...]:
    return tuple(record["params"].get(name) for name in ("name", "phase", "seed", "hidden", "steps"))


def loss_report(records: list[Record]) -> str:
    """Gaps to the exact run of the same seed, relative, by width and phase."""
    losses = {key_of(record): record["loss"] for record in records}
    groups: dict[tuple[int, str, int], dict[str, list[Record]]] = {}
    for record in records:
        name, phase, _, hidden, steps = key_of(record)
        if name != "exact":
            groups.setdefault((hidden, phase, steps), {}).setdefault(name, []).append(record)
    lines = []
    for (hidden, phase, steps), by_name in sorted(groups.items()):
        rows = []
        for name, found in by_name.items():
            gaps = [one["loss"] / losses[("exact", *key_of(one)[1:])] - 1 for one in found]
            ratios = [found[0]["weight_ratio"], found[0]["gradient_ratio"]]
            upper = upper_95(gaps)
            cells = [name, *(f"{ratio:.1f}x" for ratio in ratios), f"{statistics.fmean(gaps):+.2%}"]
            rows.append((min(ratios), [*cells, "" if math.isinf(upper) else f"{upper:+.2%}", len(gaps)]))
        header = ("weights / gradients", "ratio weights", "ratio gradients", "gap, mean", "gap, upper 95%", "seeds")
        title = f"### {hidden} x {4 * hidden}, {phase}, {steps} steps"
        lines.append(f"{title}\n\n{table(header, [row for _, row in sorted(rows, key=lambda pair: pair[0])])}")
    return "\n\n".join(lines)


# ---- time ----

TIMED: dict[str, dict[str, Any]] = {  # the ratios depend on the shape
    "int8": {"type": "int8"},
    "int4": {"type": "int4"},
    "int2": {"type": "int2"},
    "low rank 7": low_rank(RANK_7),
    "balanced 7": balanced(RANK_7),
    "low rank, ratio 50": low_rank({"ratio": 50}),
    "balanced, ratio 50": balanced({"ratio": 50}),
    "balanced, ratio 50 + int2": and_the_rest(balanced({"ratio": 50})),
}


def time_codecs(args: argparse.Namespace, records: Records) -> None:
    """Encoding with the mirror's update, and decoding, of random weights."""
    shape = tuple(args.shape)
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for name, spec in TIMED.items():
        codec = make_codec(spec, kernels=args.kernels)
        mirror, state = torch.zeros(shape), codec.new_state(*shape)
        packets = codec.encode_update(weights, mirror, state)
        encode_s, decode_s = [], []
        for _ in range(args.samples):
            begin_s = time.perf_counter()
            packets = codec.encode_update(weights, mirror, state)
            encoded_s = time.perf_counter()
            codec.decode_add(packets, mirror)
            decode_s.append(time.perf_counter() - encoded_s)
            encode_s.append(encoded_s - begin_s)
        records.add(
            {"name": name, "codec": spec, "shape": shape, "kernels": args.kernels}, case="codec_time",
            ratio=codec.ratio(*shape[1:]), encode_update_ms=1e3 * min(encode_s), decode_add_ms=1e3 * min(decode_s),
        )  # fmt: skip


def report(records: list[Record], args: argparse.Namespace) -> str:
    of_case: dict[str, list[Record]] = {}
    for record in records:
        of_case.setdefault(record["case"], []).append(record)
    tables = []
    for case, found in of_case.items():
        if case not in COLUMNS:
            tables.append(loss_report(found))
            continue
        columns = COLUMNS[case]
        rows = [[one["params"]["name"], *(format(one[key], form) for key, form in columns.items())] for one in found]
        tables.append(table(["", *(key.replace("_", " ") for key in columns)], rows))
    return "\n\n".join(tables)


COLUMNS = {
    "codec_time": {"ratio": ".1f", "encode_update_ms": ".3f", "decode_add_ms": ".3f"},
    "patch": {
        "changed": ".1%", "entropy_bits": ".3f", "bits": ".3f", "ratio": ".0f", "encode_gb_per_s": ".2f",
        "decode_gb_per_s": ".2f",
    },
}  # fmt: skip
