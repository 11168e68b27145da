# SPDX-License-Identifier: Apache-2.0
"""What codecs cost in model quality, in bytes and in time: two sites trained in one process.

    python benchmarks/codecs.py train --seeds 0 1 2 --out benchmarks/results/codecs.jsonl
    python benchmarks/codecs.py time
    python benchmarks/codecs.py track
    python benchmarks/codecs.py report benchmarks/results/codecs.jsonl --plot codecs.svg

A byte-level Mixture-of-Experts model in fp32 under AdamW.  Half of the rows of each batch stand for a remote site:
their experts run with the mirror's weights, and the gradients of those come back through the gradient codec with error
feedback.  Two phases: from scratch on the sources of Python's standard library, and from the exact run's result on
other text, the C++ headers that come with torch.  Runs of one seed share initial weights and batches, so the loss of a
codec is compared with the exact run of its own seed.  The evaluation is of the owner's weights.

Any difference, however small, grows into another run of the same quality, so a single gap says little: the gap of int8
shows how far two equally good runs part, and every gap comes with an upper 95% bound over the seeds.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hybridep.codecs import Codec, CodecState, make_codec
from ds_hybridep.version import __version__

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples"))

from train_lm import AUX_LOSS_WEIGHT, VALID_EVERY, VOCABULARY, Attention, batch_at, read_corpus  # noqa: E402

Spec = str | dict[str, Any] | None
LAYERS, HIDDEN, FFN, EXPERTS, TOP_K = 2, 64, 256, 8, 2
ROWS, SEQ_LEN, EVAL_BATCHES = 8, 128, 48
PHASES = {"scratch": {"steps": 300, "lr": 2e-3, "warm_up": 20}, "tune": {"steps": 150, "lr": 3e-4, "warm_up": 10}}
FINAL_LR = 0.1  # of the largest, reached by a cosine

# Student's t, one-sided 95%, by degrees of freedom.
T_95 = dict(
    enumerate(
        (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
        + (1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
        start=1,
    )
)


def low_rank(rank: int, factors: str) -> dict[str, Any]:
    return {"type": "low_rank", "rank": rank, "factors": factors}


def balanced(rank: int, factors: str = "log4") -> dict[str, Any]:
    """For gradients: errors count relative to the size of their row and column, as they do under Adam."""
    return {**low_rank(rank, factors), "weighting": "rms"}


def and_the_rest(codec: dict[str, Any]) -> dict[str, Any]:
    """Two bits for each element of what the directions leave."""
    return {**codec, "rest": {"type": "int2", "block": 64}}


# name -> (weight codec, gradient codec); None: exact
CASES: dict[str, tuple[Spec, Spec]] = {
    "exact": (None, None),
    "exact, one step old": (None, None),
    "low rank 7, int4": (low_rank(7, "int4"),) * 2,
    "low rank 3, int4": (low_rank(3, "int4"),) * 2,
    "low rank 7, int4 / balanced 7": (low_rank(7, "int4"), balanced(7)),
    "low rank 3, int4 / balanced 3": (low_rank(3, "int4"), balanced(3)),
    "low rank 24, int4 / balanced 24": (low_rank(24, "int4"), balanced(24)),
    "low rank 16 + int2 / balanced 16 + int2": (and_the_rest(low_rank(16, "int4")), and_the_rest(balanced(16))),
    "low rank 8 + int2 / balanced 8 + int2": (and_the_rest(low_rank(8, "int4")), and_the_rest(balanced(8))),
    "low rank 7, int4 / exact": (low_rank(7, "int4"), None),
    "exact / low rank 7, int4": (None, low_rank(7, "int4")),
    "exact / balanced 7": (None, balanced(7)),
    "int4 / exact": ("int4", None),
    "exact / int4": (None, "int4"),
    "int8": ("int8", "int8"),
    "paper, exact gradients": ("shared_residual", None),
    "int4": ("int4", "int4"),
}


STALE = {"exact, one step old"}  # cases whose replicas are what was shipped a step before


# --------------------------------------------------------------------------------------------------------------- model


class TwoSiteMoE(nn.Module):
    """Top-k experts, [T, D] -> [T, D]; the second half of the tokens uses `mirrors` where there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        one = [nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)]

        def copies(tensor: Tensor) -> nn.Parameter:
            # Experts differ a little from the start; equal ones would make an unfair gift to the shared codec.
            stack = tensor.detach().reshape(-1, tensor.shape[-1]).expand(EXPERTS, -1, -1).clone()
            return nn.Parameter(stack + 0.1 * stack.std() * torch.randn_like(stack))

        self.experts = nn.ParameterList(
            [copies(one[0].weight), copies(one[0].bias), copies(one[1].weight), copies(one[1].bias)]
        )
        self.mirrors: list[Tensor] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.shape[0]
        probability = self.gate(x).softmax(dim=-1)
        weight, expert = probability.topk(TOP_K, dim=-1)  # [T, K]
        weight = weight / weight.sum(dim=-1, keepdim=True)
        share = F.one_hot(expert, EXPERTS).float().mean(dim=(0, 1))
        aux_loss = EXPERTS * (share * probability.mean(dim=0)).sum()

        # Experts of the remote site stand behind those of the owner's.
        is_remote = torch.arange(tokens) >= tokens // 2
        place = (expert + EXPERTS * is_remote[:, None]).flatten()  # [T * K]
        order = place.argsort(stable=True)
        rows = x[order // TOP_K].split(place.bincount(minlength=2 * EXPERTS).tolist())
        remote = self.mirrors if self.mirrors is not None else list(self.experts)
        outputs = []
        for idx, expert_rows in enumerate(rows):
            w1, b1, w2, b2 = (tensor[idx % EXPERTS] for tensor in (self.experts if idx < EXPERTS else remote))
            outputs.append(F.gelu(expert_rows @ w1.T + b1) @ w2.T + b2)
        slots = torch.cat(outputs)[order.argsort()].view(tokens, TOP_K, HIDDEN)
        return (slots * weight.unsqueeze(-1)).sum(dim=1), aux_loss


class Model(nn.Module):
    """(inputs, targets) -> (cross entropy in nats per byte, load-balancing loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(SEQ_LEN, HIDDEN)
        self.attention_norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(LAYERS))
        self.attentions = nn.ModuleList(Attention(HIDDEN) for _ in range(LAYERS))
        self.moe_norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(LAYERS))
        self.moes = nn.ModuleList(TwoSiteMoE() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
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


# ------------------------------------------------------------------------------------------------------------ the link


class SharedResidual:
    """The paper's codec, to compare with: an expert is the mean of all experts and the largest 2% of the difference.

    The mean is replicated and synchronised each step; the difference is assigned, with no mirror and no feedback.
    """

    fraction = 0.02

    def replicate(self, weights: Tensor, replica: Tensor) -> int:
        """Set `replica` to what arrives of weights [n, rows, cols]; returns the bytes sent, the mean included."""
        shared = weights.mean(dim=0, keepdim=True)
        residual = (weights - shared).flatten(1)
        num_kept = max(1, int(self.fraction * residual.shape[1]))
        index = residual.abs().topk(num_kept, dim=1).indices
        kept_residual = torch.zeros_like(residual).scatter_(1, index, residual.gather(1, index))
        replica.copy_(shared + kept_residual.view_as(weights))
        return shared.numel() * 4 + index.numel() * (4 + 4)


@dataclass
class Link:
    """One expert tensor [n, rows, cols] on its way there and back."""

    parameter: nn.Parameter
    weight_codec: Codec | SharedResidual | None
    gradient_codec: Codec | None
    is_stale: bool = False
    mirror: Tensor = field(init=False)
    replica: Tensor = field(init=False)  # what the remote site computes with: the mirror, or as it was a step before
    weight_state: CodecState | None = None
    gradient_state: CodecState | None = None
    weight_bytes: int = 0
    gradient_bytes: int = 0
    residual: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.parameter.shape
        self.mirror = self.parameter.detach().clone()
        self.replica = (self.mirror.clone() if self.is_stale else self.mirror).requires_grad_()
        self.residual = torch.zeros(shape)
        if isinstance(self.weight_codec, Codec):
            self.weight_state = self.weight_codec.new_state(*shape)
        if self.gradient_codec is not None:
            self.gradient_state = self.gradient_codec.new_state(*shape)

    @torch.no_grad()
    def send_weights(self) -> None:
        weights, mirror = self.parameter.detach(), self.mirror.detach()
        if self.is_stale:
            self.replica.copy_(mirror)
        if self.weight_codec is None:
            mirror.copy_(weights)
            self.weight_bytes += weights.numel() * 4
        elif isinstance(self.weight_codec, SharedResidual):
            self.weight_bytes += self.weight_codec.replicate(weights, mirror)
        else:
            self.weight_bytes += self.weight_codec.encode_update(weights, mirror, self.weight_state).numel()

    @torch.no_grad()
    def return_gradient(self) -> None:
        gradient, self.replica.grad = self.replica.grad, None
        if self.gradient_codec is None:
            self.gradient_bytes += gradient.numel() * 4
        else:
            packets = self.gradient_codec.encode_with_residual(gradient, self.residual, self.gradient_state)
            gradient = self.gradient_codec.decode(packets, torch.empty_like(gradient))
            self.gradient_bytes += packets.numel()
        self.parameter.grad += gradient


# ------------------------------------------------------------------------------------------------------------ training


def learning_rate(phase: str, step: int) -> float:
    steps, largest, warm_up = (PHASES[phase][key] for key in ("steps", "lr", "warm_up"))
    if step < warm_up:
        return largest * (step + 1) / warm_up
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))
    return largest * (FINAL_LR + (1 - FINAL_LR) * cosine)


@torch.no_grad()
def evaluate(model: Model, valid: Tensor) -> float:
    """Mean loss over the same windows at every call, with the owner's weights on both sites."""
    mirrors = [moe.mirrors for moe in model.moes]
    for moe in model.moes:
        moe.mirrors = None
    losses = [model(*batch_at(valid, (7, idx), rows=ROWS, seq_len=SEQ_LEN))[0].item() for idx in range(EVAL_BATCHES)]
    for moe, mirror in zip(model.moes, mirrors, strict=True):
        moe.mirrors = mirror
    return statistics.fmean(losses)


def train(
    case: str,
    phase: str,
    seed: int,
    corpus: tuple[Tensor, Tensor],
    start: dict[str, Tensor] | None,
    *,
    link: Callable[..., Link] = Link,
) -> Any:
    """One run: its record, and the state it ends with.  `link` makes what carries one expert tensor."""
    torch.manual_seed(seed)
    model = Model()
    if start is not None:
        model.load_state_dict(start)
    weight_spec, gradient_spec = CASES[case]
    links = []
    for moe in model.moes:
        for parameter in moe.experts:
            weight_codec, gradient_codec = (_codec(spec) for spec in (weight_spec, gradient_spec))
            links.append(link(parameter, weight_codec, gradient_codec, case in STALE))
        moe.mirrors = [each.replica for each in links[-4:]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01)

    steps = int(PHASES[phase]["steps"])
    compute_s = codec_s = 0.0
    lag = []
    for step in range(steps):
        begin_s = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase, step)
        loss, aux_loss = model(*batch_at(corpus[0], (seed, step), rows=ROWS, seq_len=SEQ_LEN))
        optimizer.zero_grad(set_to_none=False)
        (loss + AUX_LOSS_WEIGHT * aux_loss).backward()
        backward_s = time.process_time()
        for each in links:
            each.return_gradient()
        optimizer_s = time.process_time()
        optimizer.step()
        send_s = time.process_time()
        for each in links:
            each.send_weights()
        end_s = time.process_time()
        compute_s += backward_s - begin_s + send_s - optimizer_s
        codec_s += optimizer_s - backward_s + end_s - send_s
        if step % 50 == 49:
            with torch.no_grad():
                lag.append(float((links[0].parameter - links[0].mirror).norm() / links[0].parameter.norm()))
    raw_bytes = 4 * steps * sum(each.parameter.numel() for each in links)
    record = {
        "case": "codecs",
        "params": {"name": case, "phase": phase, "seed": seed, "weights": weight_spec, "gradients": gradient_spec},
        "loss": evaluate(model, corpus[1]),
        "weight_ratio": raw_bytes / sum(each.weight_bytes for each in links),
        "gradient_ratio": raw_bytes / sum(each.gradient_bytes for each in links),
        "compute_cpu_s_per_step": compute_s / steps,
        "codec_cpu_s_per_step": codec_s / steps,
        "mirror_lag": lag,
        "setup": {"steps": steps, "layers": LAYERS, "hidden": HIDDEN, "ffn": FFN, "experts": EXPERTS, "top_k": TOP_K},
        "versions": {"ds_hybridep": __version__, "torch": torch.__version__},
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }
    return record, model.state_dict()


def _codec(spec: Spec) -> Codec | SharedResidual | None:
    if spec is None or spec == "shared_residual":
        return None if spec is None else SharedResidual()
    return make_codec(spec)


def _commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    return run.stdout.strip()


def run_cases(args: argparse.Namespace) -> None:
    """Append a record for each case, phase and seed that `args.out` does not hold yet."""
    done = set()
    if args.out.exists():
        done = {key_of(record) for record in map(json.loads, args.out.read_text().splitlines())}
    for setting in PHASES.values():
        setting["steps"] *= args.times_longer
    corpora = {"scratch": read_corpus(), "tune": bench.read_headers(VALID_EVERY)}
    args.cache.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        start_path = args.cache / f"exact-{seed}.pt"
        for case in dict.fromkeys(["exact", *args.cases]):
            for phase in args.phases:
                if (case, phase, seed) in done and not (case == "exact" and not start_path.exists()):
                    continue
                start = torch.load(start_path) if phase == "tune" else None
                record, end = train(case, phase, seed, corpora[phase], start)
                if case == "exact" and phase == "scratch":
                    torch.save(end, start_path)
                if (case, phase, seed) in done:
                    continue
                with args.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(
                    f"{phase:8} seed {seed} {case:28} loss {record['loss']:.4f}  "
                    f"{record['weight_ratio']:.1f}x / {record['gradient_ratio']:.1f}x  "
                    f"{record['compute_cpu_s_per_step']:.3f} + {record['codec_cpu_s_per_step']:.3f} CPU s",
                    flush=True,
                )


# --------------------------------------------------------------------------------------------------- time and tracking

# What `time` and `track` compare.  The ratios depend on the shape.
SINGLE_CODECS: dict[str, dict[str, Any]] = {
    "int8": {"type": "int8"},
    "int4": {"type": "int4"},
    "int2": {"type": "int2"},
    "low rank 7, int4": low_rank(7, "int4"),
    "low rank 3, int4": low_rank(3, "int4"),
    "balanced 7": balanced(7),
    "balanced 12": balanced(12),
    "low rank 8 + int2": and_the_rest(low_rank(8, "int4")),
    "balanced 16 + int2": and_the_rest(balanced(16)),
}


def time_codecs(args: argparse.Namespace) -> None:
    """Milliseconds of one step of each codec, encoding with the mirror's update and decoding, least of several."""
    shape = tuple(args.shape)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(shape, generator=generator)
    for name, spec in SINGLE_CODECS.items():
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
        record = {
            "case": "codec_time",
            "params": {"name": name, "codec": spec, "shape": shape, "kernels": args.kernels},
            "ratio": codec.ratio(*shape[1:]),
            "encode_update_ms": 1e3 * min(encode_s),
            "decode_add_ms": 1e3 * min(decode_s),
            "versions": {"ds_hybridep": __version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "commit": _commit(),
        }
        print(json.dumps(record), flush=True)


@dataclass
class Recorder(Link):
    """An exact link that remembers weights after each step, and the gradients of both sites."""

    weights: list[Tensor] = field(default_factory=list)
    own_gradients: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def send_weights(self) -> None:
        super().send_weights()
        self.weights.append(self.parameter.detach().clone())

    def return_gradient(self) -> None:
        assert self.parameter.grad is not None
        assert self.replica.grad is not None
        self.own_gradients.append(self.parameter.grad.clone())
        self.gradients.append(self.replica.grad.clone())
        super().return_gradient()


def track(args: argparse.Namespace) -> None:
    """How closely each codec follows the weights and gradients of one exact run, without feedback into training."""
    torch.manual_seed(args.seed)
    links: list[Link] = []

    def link(parameter: nn.Parameter, weight_codec: Any, gradient_codec: Any) -> Link:
        # The first matrix of the last layer; all would need gigabytes.
        kind = Recorder if len(links) == 4 * (LAYERS - 1) else Link
        links.append(kind(parameter, weight_codec, gradient_codec))
        return links[-1]

    train("exact", "scratch", args.seed, read_corpus(), None, link=link)
    recorder = links[4 * (LAYERS - 1)]
    assert isinstance(recorder, Recorder)
    print("| codec | ratio | weights: steps behind | gradients: momentum error | Adam's update: error |")
    print("|---" * 5 + "|")
    for name, spec in SINGLE_CODECS.items():
        codec = make_codec(spec)
        ratio = codec.ratio(*recorder.parameter.shape[1:])
        lag = follow_weights(codec, recorder.weights)
        error, update_error = follow_gradients(codec, recorder.gradients, recorder.own_gradients)
        print(f"| {name} | {ratio:.1f}x | {lag:.2f} | {error:.2f} | {update_error:.3f} |", flush=True)


def follow_weights(codec: Codec, weights: Sequence[Tensor]) -> float:
    """Mean distance from the mirror to the weights, in lengths of the last step."""
    mirror, state = weights[0].clone(), codec.new_state(*weights[0].shape)
    lag = []
    for before, after in zip(weights, weights[1:], strict=False):
        codec.encode_update(after, mirror, state)
        lag.append(float((after - mirror).norm() / (after - before).norm()))
    return statistics.fmean(lag)


def follow_gradients(codec: Codec, gradients: Sequence[Tensor], own: Sequence[Tensor]) -> tuple[float, float]:
    """Mean relative errors of a momentum of 0.9 over what arrives, and of Adam's update from that and the owner's."""
    shape = gradients[0].shape
    residual, value, state = torch.zeros(shape), torch.empty(shape), codec.new_state(*shape)
    wanted, actual = Adam(shape), Adam(shape)
    wanted_sum, actual_sum = Adam(shape), Adam(shape)
    errors, update_errors = [], []
    for step, (gradient, owned) in enumerate(zip(gradients, own, strict=True)):
        codec.decode(codec.encode_with_residual(gradient.contiguous(), residual, state), value)
        wanted.take(gradient)
        actual.take(value)
        errors.append(float((wanted.mean - actual.mean).norm() / wanted.mean.norm()))
        wanted_sum.take(owned + gradient)
        actual_sum.take(owned + value)
        if step >= 20:  # before that the means know little
            exact = wanted_sum.update()
            update_errors.append(float((exact - actual_sum.update()).norm() / exact.norm()))
    return statistics.fmean(errors), statistics.fmean(update_errors)


class Adam:
    """Running means of a gradient and of its square, as AdamW with the betas of `train` has them."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.mean, self.square = torch.zeros(shape), torch.zeros(shape)

    def take(self, gradient: Tensor) -> None:
        self.mean.lerp_(gradient, 0.1)
        self.square.lerp_(gradient.square(), 0.05)

    def update(self) -> Tensor:
        return self.mean / (self.square.sqrt() + 1e-8)


# -------------------------------------------------------------------------------------------------------------- report


def key_of(record: dict[str, Any]) -> tuple[str, str, int]:
    params = record["params"]
    return params["name"], params["phase"], params["seed"]


@dataclass(frozen=True)
class Row:
    """One case of one phase over its seeds; gaps are of the loss to the exact run of the same seed, relative."""

    name: str
    phase: str
    weight_ratio: float
    gradient_ratio: float
    gaps: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.gaps)

    @property
    def upper(self) -> float:
        """Upper 95% bound of the mean gap, from Student's t."""
        count = len(self.gaps)
        if count < 2:
            return math.inf
        return self.mean + T_95[count - 1] * statistics.stdev(self.gaps) / math.sqrt(count)


def rows_of(records: Sequence[dict[str, Any]]) -> list[Row]:
    by_key = {key_of(record): record for record in records}
    names = list(dict.fromkeys((name, phase) for name, phase, _ in by_key))
    rows = []
    for name, phase in names:
        if name == "exact":
            continue
        seeds = sorted(seed for case, case_phase, seed in by_key if (case, case_phase) == (name, phase))
        ours = [by_key[name, phase, seed] for seed in seeds]
        exact = [by_key["exact", phase, seed] for seed in seeds]
        rows.append(
            Row(
                name=name,
                phase=phase,
                weight_ratio=ours[0]["weight_ratio"],
                gradient_ratio=ours[0]["gradient_ratio"],
                gaps=tuple(one["loss"] / other["loss"] - 1 for one, other in zip(ours, exact, strict=True)),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| weights / gradients | ratio weights | ratio gradients | gap, mean | gap, upper 95% | seeds |",
        "|---" * 6 + "|",
    ]
    for row in sorted(rows, key=lambda row: min(row.weight_ratio, row.gradient_ratio)):
        upper = "" if math.isinf(row.upper) else f"{row.upper:+.2%}"
        lines.append(
            f"| {row.name} | {row.weight_ratio:.1f}x | {row.gradient_ratio:.1f}x | {row.mean:+.2%} | {upper} | "
            f"{len(row.gaps)} |"
        )
    return "\n".join(lines)


DIRECTIONS: dict[str, Callable[[Row], bool]] = {
    "weights": lambda row: row.gradient_ratio == 1 < row.weight_ratio,
    "gradients": lambda row: row.weight_ratio == 1 < row.gradient_ratio,
    "both": lambda row: min(row.weight_ratio, row.gradient_ratio) > 1,
}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Gap against ratio, one panel for each phase and what is encoded; bars reach to the upper bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(PHASES), len(DIRECTIONS), figsize=(16, 9), sharex=True, sharey="row")
    for phase, line in zip(PHASES, panels, strict=True):
        for (what, belongs), panel in zip(DIRECTIONS.items(), line, strict=True):
            for row in (row for row in rows if row.phase == phase and belongs(row)):
                encoded = [ratio for ratio in (row.weight_ratio, row.gradient_ratio) if ratio > 1]
                ratio = len(encoded) / sum(1 / one for one in encoded)
                bar = 0.0 if math.isinf(row.upper) else 100 * (row.upper - row.mean)
                name = row.name.removesuffix(", exact gradients").removesuffix(" / exact").removeprefix("exact / ")
                label = f"{name}, {100 * row.mean:+.2f}%"
                panel.errorbar(ratio, 100 * row.mean, yerr=[[0], [bar]], marker="o", capsize=3, label=label)
            panel.axhline(0, color="black", linewidth=0.6)
            panel.set(xscale="log", title=f"{phase}: {what} encoded")
            panel.set_yscale("symlog", linthresh=0.2)
            panel.set_yticks([0, 0.1, 0.2, 0.5, 1, 2, 3], ["0", "0.1", "0.2", "0.5", "1", "2", "3"])
            panel.set_ylim(-0.08, 100)  # the legend stands above all points
            panel.grid(which="both", alpha=0.3)
            panel.legend(fontsize=7, loc="upper left")
        line[0].set(ylabel="evaluation loss against the exact run, %")
    for panel in panels[-1]:
        panel.set(xlabel="fp32 bytes / bytes sent")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def report(args: argparse.Namespace) -> None:
    records = [json.loads(line) for path in args.records for line in path.read_text().splitlines()]
    rows = rows_of(records)
    for phase in PHASES:
        print(f"### {phase}\n\n{table([row for row in rows if row.phase == phase])}\n")
    if args.plot is not None:
        plot(rows, args.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="run cases that have no record yet")
    training.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    training.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    training.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    training.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "codecs.jsonl")
    training.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "codecs", help="states to tune from")
    training.add_argument("--times-longer", type=int, default=1, help="more steps in both phases")
    training.set_defaults(run=run_cases)
    timing = commands.add_parser("time", help="milliseconds of each codec")
    timing.add_argument("--shape", nargs=3, type=int, default=[2, 256, 64], metavar=("N", "ROWS", "COLS"))
    timing.add_argument("--samples", type=int, default=30)
    timing.add_argument("--kernels", choices=("compiled", "reference"), default="compiled")
    timing.set_defaults(run=time_codecs)
    tracking = commands.add_parser("track", help="how closely codecs follow one exact run")
    tracking.add_argument("--seed", type=int, default=0)
    tracking.set_defaults(run=track)
    reporting = commands.add_parser("report", help="tables, and a plot")
    reporting.add_argument("records", type=Path, nargs="+")
    reporting.add_argument("--plot", type=Path, help="PNG file")
    reporting.set_defaults(run=report)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
