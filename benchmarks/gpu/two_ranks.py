# SPDX-License-Identifier: Apache-2.0
"""Phase "training": two ranks share one GPU, with the block and without it, beside the same runs on CPUs.

    python -m benchmarks.gpu.two_ranks [--pretend] [--own-stream] [--reference-kernels] [--out FOLDER]

NCCL refuses two ranks on one GPU, so DeepSpeed talks over gloo, and our levels use the link by way of pinned memory.
Four jobs run at once, with the block and without it on each kind of device; so what one cannot do costs no other.
Where gloo cannot do one of DeepSpeed's collectives on CUDA tensors, runs without the block fail on the GPU, and those
with it are compared with the CPU alone.
"""

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import REPOSITORY, free_port, table

sys.path.append(str(REPOSITORY / "tests" / "support"))  # models and cases are those of the tests

WORLD_SIZE = 2
LIMIT_S = 400  # of all jobs; the phase has a little more
TAIL_CHARS = 2500
KINDS = ("block", "plain")


class Bounds(NamedTuple):
    """How far two runs of a case may be apart."""

    losses: float  # relative, the worst of all steps
    parameters: float  # relative L2, the worst of all tensors: of the change in bf16, else of the tensor


# On one device the block changes the order of sums: parity.py says where its tolerances come from.
# Another device has another exp and other orders in every product; some steps of AdamW let that grow.
SAME_DEVICE = {"fp32": Bounds(1e-5, 1e-5), "bf16": Bounds(5e-3, 0.15)}
OTHER_DEVICE = {"fp32": Bounds(1e-4, 1e-3), "bf16": Bounds(2e-2, 0.5)}
# Of lossy runs only losses are compared, with those of exact ones and those of the CPU, relative to the first one:
# later ones come close to zero.  On CPUs the worst is 0.035; gradients that get lost make it 0.9.
LOSSY = 0.1


@dataclass(frozen=True)
class Training:
    """A case of parity.py, and whether codecs lose something."""

    case: Any
    is_lossy: bool = False


def cases() -> dict[str, Training]:
    """All trainings, by name; those through AutoEP where transformers is installed."""
    from parity import Case
    from toy_model import ToyConfig

    native = Case(levels=(("dc", 2, 2),), toy=ToyConfig(ep_size=2, num_experts=4, hidden=32, ffn=64), steps=3)
    hf = ToyConfig(ep_size=2, num_experts=4, hidden=32, ffn=16, sequence=8, k=2)
    auto = replace(native, toy=hf, family="qwen3_moe")
    still = (("dc", 2, 1),)
    # In bf16 rounding must not move tokens to other experts; factors need matrices of some size.
    steady, wide = ({"routing": "by_token"}, {"hidden": 128, "ffn": 128})
    found = {
        "native, ZeRO 0": Training(native),
        "native, ZeRO 1, two micro-steps": Training(replace(native, zero_stage=1, accumulation=2)),
        "native, ZeRO 2, tokens move": Training(replace(native, zero_stage=2, levels=still)),
        "native, ZeRO 1, bf16": Training(
            replace(native, zero_stage=1, dtype="bf16", toy=replace(native.toy, **steady))
        ),
        "native, ZeRO 0, tokens in fp8": Training(replace(native, levels=still, token_codec="fp8"), is_lossy=True),
        "native, ZeRO 1, recommended codecs": Training(
            replace(native, zero_stage=1, toy=replace(native.toy, **wide), codecs="recommended", steps=8),
            is_lossy=True,
        ),
    }
    if importlib.util.find_spec("transformers") is None:
        return found
    return found | {
        "AutoEP, ZeRO 0, tokens move": Training(replace(auto, levels=still)),
        "AutoEP, ZeRO 1": Training(replace(auto, zero_stage=1)),
        "AutoEP, ZeRO 2": Training(replace(auto, zero_stage=2)),
        "AutoEP, ZeRO 3": Training(replace(auto, zero_stage=3)),
        "AutoEP, ZeRO 1, bf16": Training(replace(auto, zero_stage=1, dtype="bf16", toy=replace(hf, **steady))),
        "AutoEP, ZeRO 1, bf16, recommended codecs": Training(
            replace(
                auto, zero_stage=1, dtype="bf16", toy=replace(hf, **steady, **wide), codecs="recommended", steps=8
            ),
            is_lossy=True,
        ),
        "AutoEP, ZeRO 3, recommended codecs": Training(
            replace(auto, zero_stage=3, toy=replace(hf, **wide), codecs="recommended", steps=8), is_lossy=True
        ),
    }


# ---- in a rank ----


def train_all(device_type: str, kind: str, folder: Path, *, own_stream: bool, kernels: str) -> None:
    """Train all cases on this rank; each leaves a file."""
    import ds_hybridep._autoload

    ds_hybridep._autoload.install()  # before deepspeed's engine is imported
    import deepspeed
    import parity
    from hf_models import let_plain_autoep_work

    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled on the first use
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    let_plain_autoep_work()
    made_on_cpu = parity.batch
    parity.batch = lambda *args, **kwargs: tuple(one.to(device) for one in made_on_cpu(*args, **kwargs))
    if own_stream and device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))
    for at, (name, training) in enumerate(cases().items()):
        case = replace(training.case, kernels=kernels) if kind == "block" else training.case.without_block()
        begin_s = time.perf_counter()
        try:
            found = parity.train(case, with_block=kind == "block")
        except Exception as error:  # noqa: BLE001 (the table names it, and the other cases go on)
            traceback.print_exc()
            result: dict[str, Any] = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"}
        else:
            result = {
                "losses": list(found.losses),
                **{part: {key: value.cpu() for key, value in getattr(found, part).items()} for part in STATES},
                "seconds": time.perf_counter() - begin_s,
            }
        print(f"{name}: {result.get('error', 'done')}", flush=True)
        path = file_of(folder, device_type, kind, at, int(os.environ["RANK"]))
        torch.save(result, path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)


STATES = ("start", "parameters")


def file_of(folder: Path, device_type: str, kind: str, case_idx: int, rank: int) -> Path:
    return folder / f"{device_type}-{kind}-{case_idx}-{rank}.pt"


# ---- the jobs ----


class Job:
    """Two ranks that train all cases, with the block or without it, on one kind of device."""

    def __init__(self, device_type: str, kind: str, folder: Path, options: Sequence[str]) -> None:
        self.name = f"{device_type}-{kind}"
        environment = {
            **os.environ, "DS_ACCELERATOR": device_type, "WORLD_SIZE": f"{WORLD_SIZE}", "LOCAL_SIZE": f"{WORLD_SIZE}",
            "LOCAL_WORLD_SIZE": f"{WORLD_SIZE}", "LOCAL_RANK": "0",  # the GPU's number: all ranks share it
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.gpu.two_ranks", *options]
        command += ["--out", str(folder), "--rank-of", device_type, kind]
        self.logs, self.ranks = [], []
        for rank in range(WORLD_SIZE):
            self.logs.append(folder / f"{self.name}-{rank}.log")
            with self.logs[-1].open("w") as log:
                self.ranks.append(
                    subprocess.Popen(
                        command, cwd=REPOSITORY, env={**environment, "RANK": f"{rank}"}, stdin=subprocess.DEVNULL,
                        stdout=log, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip

    def finish(self, deadline_s: float) -> str:
        """Wait for the ranks until time.monotonic() is `deadline_s`; "" if they ended well, else what happened."""
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(deadline_s - time.monotonic(), 0.1))
        statuses = [rank.poll() for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        if not any(status != 0 for status in statuses):
            return ""
        ends = [log.read_text(errors="replace")[-TAIL_CHARS:] for log in self.logs]
        return f"{self.name}: exit statuses {statuses} (None: out of time)\n" + "\n".join(ends)


def read_results(folder: Path, devices: Sequence[str], num_cases: int) -> list[dict[tuple[str, str], Any]]:
    """By case, what each job has left, by device and kind: one result for each rank; none of cases not reached."""
    found: list[dict[tuple[str, str], Any]] = []
    for at in range(num_cases):
        found.append({})
        for device_type in devices:
            for kind in KINDS:
                paths = [file_of(folder, device_type, kind, at, rank) for rank in range(WORLD_SIZE)]
                if all(path.exists() for path in paths):
                    found[-1][device_type, kind] = [torch.load(path) for path in paths]
    return found


# ---- comparing ----


def apart(training: Training, ours: Sequence[Any], others: Sequence[Any]) -> Bounds:
    """How far two runs of a case are apart, the worst over ranks."""
    losses = parameters = 0.0
    for one, other in zip(ours, others, strict=True):
        pairs = list(zip(one["losses"], other["losses"], strict=True))
        units = [pairs[0][1]] * len(pairs) if training.is_lossy else [b for _, b in pairs]
        losses = max(losses, *(abs(a - b) / abs(unit) for (a, b), unit in zip(pairs, units, strict=True)))
        for name, value in other["parameters"].items():
            base = value - other["start"][name] if training.case.dtype == "bf16" else value
            distance = float((one["parameters"][name] - value).norm()), float(base.norm())
            parameters = max(parameters, distance[0] / distance[1] if distance[0] else 0.0)
    return Bounds(losses, parameters)


def error_of(results: Sequence[Any] | None) -> str | None:
    """Why there is nothing to compare; None if there is."""
    if results is None:
        return "not reached"
    return next((one["error"] for one in results if "error" in one), None)


def verdict_of(training: Training, found: Mapping[tuple[str, str], Any], device: str) -> tuple[str, str, str]:
    """What is said of a case: distance from DeepSpeed alone on this device, from the CPU, and the verdict."""
    ours = found.get((device, "block"))
    if (error := error_of(ours)) is not None:
        return "-", "-", f"FAILED: {error}"
    assert ours is not None
    dtype, shown, problems = training.case.dtype, [], []
    is_finite = all(loss == loss and abs(loss) < float("inf") for one in ours for loss in one["losses"])
    comparisons = {
        "DeepSpeed": ((device, "plain"), SAME_DEVICE[dtype]),
        "the CPU": (("cpu", "block"), OTHER_DEVICE[dtype]),
    }
    for name, (key, bounds) in comparisons.items():
        others = found.get(key)
        if (error := error_of(others)) is not None:
            shown.append(f"none: {error}")
            continue
        assert others is not None
        distance = apart(training, ours, others)
        shown.append(f"{distance.losses:.1e}" + ("" if training.is_lossy else f", {distance.parameters:.1e}"))
        bounds = Bounds(LOSSY, float("inf")) if training.is_lossy else bounds
        if not (distance.losses <= bounds.losses and distance.parameters <= bounds.parameters):
            problems.append(f"{name} is too far: at most {bounds.losses:g}, {bounds.parameters:g}")
    if not is_finite:
        problems.append("a loss is not finite")
    if all(one.startswith("none") for one in shown):
        problems.append("nothing to compare with")
    good = "within bounds" if training.is_lossy else "equal"
    return shown[0], shown[1], f"FAILED: {'; '.join(problems)}" if problems else good


# ---- the phase ----


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.two_ranks", description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="on CPUs, which then stand for both devices")
    parser.add_argument("--own-stream", action="store_true", help="train in a stream that is not the default one")
    parser.add_argument("--reference-kernels", action="store_true", help="where kernels could not be built")
    parser.add_argument("--out", type=Path, help="keep results and logs of ranks here")
    parser.add_argument("--rank-of", nargs=2, metavar=("DEVICE", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank_of:
        kernels = "reference" if args.reference_kernels else "compiled"
        train_all(args.rank_of[0], args.rank_of[1], args.out, own_stream=args.own_stream, kernels=kernels)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return compare_all(folder.absolute(), args)


def compare_all(folder: Path, args: argparse.Namespace) -> int:
    """Run all jobs, and print a table of what they have found."""
    device = "cpu" if args.pretend else "cuda"
    devices = list(dict.fromkeys((device, "cpu")))
    options = [f"--{word}" for word in ("own-stream", "reference-kernels") if vars(args)[word.replace("-", "_")]]
    deadline_s = time.monotonic() + LIMIT_S
    jobs = [Job(one, kind, folder, options) for one in devices for kind in KINDS]
    ends = [end for job in jobs if (end := job.finish(deadline_s))]
    trainings = cases()
    results = read_results(folder, devices, len(trainings))
    rows, failed = [], []
    for (name, training), found in zip(trainings.items(), results, strict=True):
        *distances, verdict = verdict_of(training, found, device)
        ours = found.get((device, "block"), [{}])[0]
        seconds = f"{ours['seconds']:.1f}" if "seconds" in ours else "-"
        rows.append([name, *distances, verdict, seconds])
        failed += [name] if verdict.startswith("FAILED") else []
    print("Distances of losses and parameters with the block; experts move if nothing else is said.\n")
    print(table(("training", "from DeepSpeed alone", "from the block on CPUs", "verdict", "s"), rows))
    for end in ends:
        print("\n````", end, "````", sep="\n")
    missing = "" if any("AutoEP" in name for name in trainings) else "; no AutoEP: transformers is not installed"
    print(f"\n{len(rows) - len(failed)} of {len(rows)} trainings agree{missing}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
