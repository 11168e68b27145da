# SPDX-License-Identifier: Apache-2.0
"""How plans are compared on a noisy machine: interleaved blocks, medians, and ratios with a bootstrap interval.

A B C  C B A  A B C ...     each letter a block of steps; a ratio is taken between neighbours of one round
"""

import json
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """Median of block-by-block ratios and its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleaved(names: Sequence[str], num_rounds: int) -> list[tuple[str, ...]]:
    """Orders of the blocks, round by round; every other round runs backwards so that drift cancels."""
    return [tuple(names) if index % 2 == 0 else tuple(reversed(names)) for index in range(num_rounds)]


def ratio(samples: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Ratio:
    """Samples over baseline, paired by round.

    Raises:
        ValueError: the two have different lengths, or none.
    """
    if not samples or len(samples) != len(baseline):
        raise ValueError(f"paired samples wanted, got {len(samples)} and {len(baseline)}")
    ratios = [a / b for a, b in zip(samples, baseline, strict=True)]
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES))
    return Ratio(
        statistics.median(ratios), medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES) - 1]
    )


def versions() -> dict[str, str]:
    """What a recorded result must name: machine, Python, packages, commit ("unknown" outside a checkout)."""
    found = {"machine": platform.machine(), "python": platform.python_version()}
    for package in ("torch", "deepspeed", "ds_hybridep"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    found["commit"] = git.stdout.strip() or "unknown"
    return found


def read_headers(valid_every: int) -> tuple[Any, Any]:
    """The C++ headers that come with torch as (train, valid), uint8 tensors; one file in `valid_every` is of valid."""
    import torch

    files = sorted((Path(torch.__file__).parent / "include" / "ATen").rglob("*.h"))
    train, valid = bytearray(), bytearray()
    for file_idx, path in enumerate(files):
        (valid if file_idx % valid_every == 0 else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(valid, dtype=torch.uint8)


def print_record(case: str, params: Mapping[str, Any], **measured: Any) -> None:
    """One JSON line: case, params, what was measured, versions."""
    json.dump({"case": case, "params": dict(params), **measured, "versions": versions()}, sys.stdout)
    print(flush=True)
