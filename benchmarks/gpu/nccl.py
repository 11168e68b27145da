# SPDX-License-Identifier: Apache-2.0
"""Phase "nccl", with several GPUs: a small model on all of them over NCCL, with the block and without it.

    python -m benchmarks.gpu.nccl [--pretend] [--out FOLDER]

All ways start from the same weights and see the same batches.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import REPOSITORY, free_port, table

SIZES = {"layers": 4, "hidden": 1024, "seq-len": 512, "steps": 40}
PRETENDED_SIZES = {"layers": 1, "hidden": 32, "seq-len": 32, "steps": 10}
PRETENDED_RANKS = 2
WAYS = {  # name -> (codecs of the block, None without a block; whether in bf16)
    "DeepSpeed, fp32": (None, False),
    "block, exact, fp32": ("exact", False),
    "block, recommended codecs, fp32": ("recommended", False),
    "DeepSpeed, bf16": (None, True),
    "block, recommended codecs, bf16": ("recommended", True),
}
PRETENDED_WAYS = ("DeepSpeed, fp32", "block, exact, fp32")
LIMIT_S = 170  # of each way
TAIL_LINES = 30


def training(way: str, out: Path, num_ranks: int, pretends: bool) -> list[str | Path]:
    """The command of one way to train; writes its ds_config."""
    codecs, is_bf16 = WAYS[way]
    config = json.loads((REPOSITORY / "ds_configs" / "plain_ep.json").read_text())
    sizes, name = PRETENDED_SIZES if pretends else SIZES, file_of(way)
    config["optimizer"]["params"]["lr"] = 3e-3 if pretends else 3e-4
    config["train_micro_batch_size_per_gpu"] = 2 if pretends else 16
    if is_bf16:
        config["bf16"] = {"enabled": True}
    if codecs is not None:
        config["hybridep"] = {"levels": levels_of(num_ranks, codecs), "report_interval": sizes["steps"]}
    (out / f"{name}.json").write_text(json.dumps(config, indent=2))
    launch = ["--nproc_per_node", str(num_ranks), "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    # As many experts on each rank whatever their number.
    options = {**sizes, "experts": num_ranks * max(1, 16 // num_ranks), "log-interval": 5, "eval-interval": 0}
    return [
        sys.executable, "-m", "torch.distributed.run", *launch,
        REPOSITORY / "examples" / "train_lm.py", "--deepspeed_config", out / f"{name}.json",
        "--json-file", out / f"{name}-result.json", *(f"--{key}={value}" for key, value in options.items()),
    ]  # fmt: skip


def levels_of(num_ranks: int, codecs: str) -> list[dict[str, Any]]:
    """Two halves of the GPUs, as if a slow link were between them, where their number is even."""
    coded = {} if codecs == "exact" else {"codecs": codecs}
    if num_ranks % 2:
        return [{"name": "gpu", "size": num_ranks, **coded}]
    halves = {"name": "half", "size": 2, "domain_size": 2, **coded}
    return [halves, *([{"name": "gpu", "size": num_ranks // 2}] if num_ranks > 2 else [])]


def file_of(way: str) -> str:
    return re.sub(r"\W+", "-", way.lower())


def train(way: str, out: Path, num_ranks: int, pretends: bool) -> tuple[str, str]:
    """Train in one way; returns why that failed, or "", and all that was printed."""
    log = out / f"{file_of(way)}.log"
    with log.open("w") as file:
        try:
            status = subprocess.run(
                training(way, out, num_ranks, pretends), cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, timeout=LIMIT_S,
            ).returncode  # fmt: skip
            problem = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {LIMIT_S} s"
    result = result_of(way, out)
    if not problem and not all(math.isfinite(loss) for _, loss in result["losses"]):
        problem = "a loss is not finite"
    return problem, log.read_text(errors="replace")


def result_of(way: str, out: Path) -> dict[str, Any]:
    """The record of a training; {} if there is none."""
    path = out / f"{file_of(way)}-result.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


# ---- what is printed ----


def losses_table(results: Mapping[str, dict[str, Any]]) -> str:
    """Losses and times side by side."""
    by_step = {way: dict(result["losses"]) for way, result in results.items()}
    places = sorted({place for losses in by_step.values() for place in losses})
    rows: list[list[object]] = [
        [place, *(number(losses.get(place)) for losses in by_step.values())] for place in places
    ]
    rows.append(["held-out loss", *(number(result["valid_loss"]) for result in results.values())])
    rows.append(["median step", *(f"{result['median_step_s'] * 1e3:.1f} ms" for result in results.values())])
    return table(("step", *results), rows)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def section_of(way: str, problem: str, output: str) -> str:
    """What the block has counted; of a way that failed, the end."""
    lines = output.splitlines()
    if problem:
        lines = [f"**failed: {problem}.** The end of its output:", "", "````", *lines[-TAIL_LINES:], "````"]
    else:
        said = dict.fromkeys(line for line in lines if "hybridep" in line.split("per step")[0])
        lines = ["````", *said, "````"] if said else ["Without the block."]
    return "\n".join([f"### {way}", "", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.nccl", description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="on two CPUs, over gloo")
    parser.add_argument("--out", type=Path, help="keep ds_configs, results and logs here")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).absolute()
        out.mkdir(parents=True, exist_ok=True)
        num_ranks = PRETENDED_RANKS if args.pretend else torch.cuda.device_count()
        ended = {way: train(way, out, num_ranks, args.pretend) for way in (PRETENDED_WAYS if args.pretend else WAYS)}
        results = {way: result for way in ended if (result := result_of(way, out))}
    print(
        "Losses by optimizer step, from the same weights and batches:", losses_table(results), sep="\n\n", end="\n\n"
    )
    print("\n\n".join(section_of(way, *end) for way, end in ended.items()))
    failed = [way for way, (problem, _) in ended.items() if problem]
    print(f"\n{len(ended) - len(failed)} of {len(ended)} ways train on {num_ranks} ranks", end="")
    print(f"; not {'; '.join(failed)}" if failed else "")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
