# SPDX-License-Identifier: Apache-2.0
"""What low rank by ratio costs in loss at several widths: all parameters of two sites encoded, in one process.

    python benchmarks/codec_ratios.py train --hidden 256 --seeds 0 1 2 3 4
    python benchmarks/codec_ratios.py report

Model, data and phases are those of benchmarks/codecs.py; experts are [4 x hidden, hidden] and back.  Site 0 owns every
parameter, site 1 computes with mirrors of them, each on half of the rows.  Site 1's gradients come back through the
gradient codec with error feedback, new weights go out through the weight codec.  Loss is of the owner's weights,
against the exact run of the same seed.
"""

import argparse
import copy
import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import make_codec

REPOSITORY = Path(__file__).resolve().parents[1]


def _load_base() -> Any:
    """benchmarks/codecs.py, whose name is also that of a module of Python."""
    spec = importlib.util.spec_from_file_location("codecs_benchmark", REPOSITORY / "benchmarks" / "codecs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


base = _load_base()
Spec = dict[str, Any] | str | None


def low_rank(ratio: float, factors: str = "int4", weighting: str = "none") -> dict[str, Any]:
    return {"type": "low_rank", "ratio": ratio, "factors": factors, "weighting": weighting}


def balanced(ratio: float) -> dict[str, Any]:
    return low_rank(ratio, "log4", "rms")


def and_the_rest(codec: dict[str, Any]) -> dict[str, Any]:
    """Two bits for each element of what the directions leave."""
    return {**codec, "rest": {"type": "int2", "block": 64}}


RATIOS = (12, 25, 50, 100)
PLAIN: dict[str, Spec] = {"int8": "int8", "int4": "int4", "int2": {"type": "int2", "block": 64}}
WEIGHTS: dict[str, Spec] = {str(ratio): low_rank(ratio) for ratio in RATIOS} | PLAIN
WEIGHTS["50 + int2"] = and_the_rest(low_rank(50))
GRADIENTS: dict[str, Spec] = {str(ratio): balanced(ratio) for ratio in RATIOS} | PLAIN
GRADIENTS["50 + int2"] = and_the_rest(balanced(50))
RANK_7: dict[str, Any] = {"type": "low_rank", "rank": 7}

# name -> codecs of expert weights, expert gradients, dense weights, dense gradients; None: exact
CASES: dict[str, tuple[Spec, Spec, Spec, Spec]] = {
    "exact": (None, None, None, None),
    "experts: rank 7": (RANK_7 | {"factors": "int4"}, RANK_7 | {"factors": "log4", "weighting": "rms"}, None, None),
    **{f"experts: {name}": (WEIGHTS[name], GRADIENTS[name], None, None) for name in WEIGHTS},
    **{f"expert gradients: {name}": (None, GRADIENTS[name], None, None) for name in WEIGHTS},
    **{f"dense weights: {name}": (None, None, WEIGHTS[name], None) for name in WEIGHTS},
    **{f"dense gradients: {name}": (None, None, None, GRADIENTS[name]) for name in WEIGHTS},
    **{f"all: {name}": (WEIGHTS[name], GRADIENTS[name]) * 2 for name in WEIGHTS},
    "recommended, 16 bits": (None, GRADIENTS["50"], None, GRADIENTS["50 + int2"]),
    "recommended, 32 bits": (WEIGHTS["50"], GRADIENTS["50"], WEIGHTS["50 + int2"], GRADIENTS["50 + int2"]),
    "all: 50, dense gradients: + int2": (WEIGHTS["50"], GRADIENTS["50"], WEIGHTS["50"], GRADIENTS["50 + int2"]),
    "attention gradients: 50": (None, None, None, GRADIENTS["50"]),
    "embedding gradients: 50": (None, None, None, GRADIENTS["50"]),
}


# Cases in which only some dense parameters are encoded, and what those are called.
ONLY = {"attention gradients: 50": ("attentions",), "embedding gradients: 50": ("bytes", "positions", "head")}


class Link:
    """One parameter on its way from site 0 to site 1, and its gradient back."""

    def __init__(self, owned: nn.Parameter, mirror: nn.Parameter, weight_spec: Spec, gradient_spec: Spec) -> None:
        self.owned, self.mirror = owned, mirror
        shape = owned.shape if owned.dim() == 3 else (1, *owned.shape) if owned.dim() == 2 else (1, 1, *owned.shape)
        self.shape = shape
        self.weight_codec = None if weight_spec is None else make_codec(weight_spec)
        self.gradient_codec = None if gradient_spec is None else make_codec(gradient_spec)
        self.weight_state = self.weight_codec.new_state(*shape) if self.weight_codec else None
        self.gradient_state = self.gradient_codec.new_state(*shape) if self.gradient_codec else None
        self.residual = torch.zeros(shape)
        self.weight_bytes = self.gradient_bytes = 0

    @torch.no_grad()
    def send_weights(self) -> None:
        weights, mirror = (tensor.detach().view(self.shape) for tensor in (self.owned, self.mirror))
        if self.weight_codec is None:
            mirror.copy_(weights)
            self.weight_bytes += 4 * weights.numel()
        else:
            self.weight_bytes += self.weight_codec.encode_update(weights, mirror, self.weight_state).numel()

    @torch.no_grad()
    def return_gradient(self) -> None:
        gradient: Tensor = self.mirror.grad.view(self.shape)
        if self.gradient_codec is None:
            self.gradient_bytes += 4 * gradient.numel()
        else:
            packets = self.gradient_codec.encode_with_residual(gradient, self.residual, self.gradient_state)
            gradient = self.gradient_codec.decode(packets, torch.empty_like(gradient))
            self.gradient_bytes += packets.numel()
        self.owned.grad = (self.owned.grad + gradient.view(self.owned.shape)) / 2


def train(
    case: str, phase: str, seed: int, steps: int, corpus: tuple[Tensor, Tensor], start: dict[str, Tensor] | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One run: its record, and the weights it ends with."""
    torch.manual_seed(seed)
    base.PHASES[phase]["steps"] = steps
    owner = base.Model()
    if start is not None:
        owner.load_state_dict(start)
    remote = copy.deepcopy(owner)
    links = [
        Link(mine, theirs, *_codecs_of(name, case))
        for (name, mine), theirs in zip(owner.named_parameters(), remote.parameters(), strict=True)
    ]
    optimizer = torch.optim.AdamW(owner.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01)
    compute_s = codec_s = 0.0
    for step in range(steps):
        begin_s = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = base.learning_rate(phase, step)
        halves = base.batch_at(corpus[0], (seed, step), rows=base.ROWS, seq_len=base.SEQ_LEN)
        for model, inputs, targets in zip((owner, remote), *(half.chunk(2) for half in halves), strict=True):
            model.zero_grad(set_to_none=False)
            loss, aux_loss = model(inputs, targets)
            (loss + base.AUX_LOSS_WEIGHT * aux_loss).backward()
        backward_s = time.process_time()
        for link in links:
            link.return_gradient()
        returned_s = time.process_time()
        optimizer.step()
        send_s = time.process_time()
        for link in links:
            link.send_weights()
        codec_s += returned_s - backward_s + time.process_time() - send_s
        compute_s += backward_s - begin_s + send_s - returned_s
    raw_bytes = 4 * steps * sum(link.owned.numel() for link in links)
    record = {
        "case": "codec_ratios",
        "params": {"name": case, "phase": phase, "seed": seed, "hidden": base.HIDDEN, "steps": steps},
        "codecs": CASES[case],
        "loss": base.evaluate(owner, corpus[1]),
        "weight_ratio": raw_bytes / sum(link.weight_bytes for link in links),
        "gradient_ratio": raw_bytes / sum(link.gradient_bytes for link in links),
        "compute_cpu_s_per_step": compute_s / steps,
        "codec_cpu_s_per_step": codec_s / steps,
        "setup": {"layers": base.LAYERS, "ffn": base.FFN, "experts": base.EXPERTS, "top_k": base.TOP_K},
        "versions": {"torch": torch.__version__},
        "commit": base._commit(),
    }
    return record, owner.state_dict()


def _codecs_of(name: str, case: str) -> tuple[Spec, Spec]:
    """Codecs of a parameter's weights and gradients."""
    weights, gradients, dense_weights, dense_gradients = CASES[case]
    if ".experts." in name:
        return weights, gradients
    is_exact = case in ONLY and not name.startswith(ONLY[case])
    return (None, None) if is_exact else (dense_weights, dense_gradients)


def key_of(record: dict[str, Any]) -> tuple[Any, ...]:
    params = record["params"]
    return tuple(params[key] for key in ("name", "phase", "seed", "hidden", "steps"))


def records_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_cases(args: argparse.Namespace) -> None:
    """Append a record for each case, phase and seed that `args.out` does not hold yet."""
    base.HIDDEN, base.FFN, base.LAYERS = args.hidden, 4 * args.hidden, args.layers
    corpora = {"scratch": base.read_corpus(), "tune": base.bench.read_headers(base.VALID_EVERY)}
    args.cache.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        start_path = args.cache / f"exact-{args.layers}-{args.hidden}-{args.steps}-{seed}.pt"
        for case in dict.fromkeys(["exact", *args.cases]):
            for phase in args.phases:
                steps = args.steps if phase == "scratch" else args.steps // 2
                is_start = case == "exact" and phase == "scratch" and not start_path.exists()
                done = {key_of(record) for record in records_in(args.out)}
                if (case, phase, seed, args.hidden, steps) in done and not is_start:
                    continue
                start = torch.load(start_path) if phase == "tune" else None
                record, end = train(case, phase, seed, steps, corpora[phase], start)
                if is_start:
                    torch.save(end, start_path)
                with args.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(json.dumps(record), flush=True)


def report(args: argparse.Namespace) -> None:
    records = [record for path in args.records for record in records_in(path)]
    for hidden in sorted({record["params"]["hidden"] for record in records}):
        for phase in base.PHASES:
            found = [r for r in records if (r["params"]["hidden"], r["params"]["phase"]) == (hidden, phase)]
            if found:
                steps = ", ".join(sorted({str(record["params"]["steps"]) for record in found}))
                print(f"### {hidden} x {4 * hidden}, {phase}, {steps} steps\n\n{base.table(base.rows_of(found))}\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    results = REPOSITORY / "benchmarks" / "results" / "codec-ratios.jsonl"
    training = commands.add_parser("train", help="run cases that have no record yet")
    training.add_argument("--hidden", type=int, default=64)
    training.add_argument("--layers", type=int, default=1)
    training.add_argument("--steps", type=int, default=150, help="from scratch; half as many in tuning")
    training.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    training.add_argument("--phases", nargs="+", choices=base.PHASES, default=list(base.PHASES))
    training.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    training.add_argument("--out", type=Path, default=results)
    training.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "codecs", help="states to tune from")
    training.set_defaults(run=run_cases)
    reporting = commands.add_parser("report", help="tables")
    reporting.add_argument("records", type=Path, nargs="*", default=[results])
    reporting.set_defaults(run=report)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
