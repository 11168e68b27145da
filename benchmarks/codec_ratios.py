# SPDX-License-Identifier: Apache-2.0
"""What low rank by ratio costs in loss at several widths, with all parameters encoded, or some of them.

    python -m benchmarks codec-ratios --hidden 256 --seeds 0 1 2 3 4 --out benchmarks/results/codec-ratios.jsonl

As benchmarks/losses.py, in fp32; experts are [4 x hidden, hidden] and back.
"""

import argparse

from benchmarks.codecs import Spec, and_the_rest, balanced, experts, low_rank
from benchmarks.losses import add_training_arguments, compare, report, run
from benchmarks.training import Job

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

RATIOS = (12, 25, 50, 100)
PLAIN: dict[str, tuple[Spec, Spec]] = {name: (name, name) for name in ("int8", "int4", "int2")}
CODECS: dict[str, tuple[Spec, Spec]] = {
    **{str(ratio): (low_rank(ratio=ratio), balanced(ratio=ratio)) for ratio in RATIOS},
    **PLAIN,
    "50 + int2": (and_the_rest(low_rank(ratio=50)), and_the_rest(balanced(ratio=50))),
}


def dense(weight: Spec, gradient: Spec) -> dict[str, Spec]:
    return {"dense_weight_codec": weight, "dense_gradient_codec": gradient}


CASES = {  # name -> settings of the slow level
    "recommended": {"codecs": "recommended"},
    **{f"experts: {name}": experts(*pair) for name, pair in CODECS.items()},
    **{f"dense weights: {name}": dense(pair[0], "identity") for name, pair in CODECS.items()},
    **{f"dense gradients: {name}": dense("identity", pair[1]) for name, pair in CODECS.items()},
    **{f"all: {name}": {**experts(*pair), **dense(*pair)} for name, pair in CODECS.items()},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    add_training_arguments(parser, dtype="fp32")


def rank(args: argparse.Namespace, job: Job) -> None:
    compare(args, job, {name: CASES[name] for name in args.cases})
