# SPDX-License-Identifier: Apache-2.0
"""What low rank by ratio costs in loss at several widths: all parameters of two sites encoded, in one process.

    python -m benchmarks codec-ratios --hidden 256 --seeds 0 1 2 3 4 --out benchmarks/results/codec-ratios.jsonl

As benchmarks/codecs.py trains its sites; experts are [4 x hidden, hidden] and back.
"""

import argparse

import torch

from benchmarks import codecs
from benchmarks.codecs import RANK_7, Spec, add_loss_arguments, and_the_rest, balanced, low_rank
from benchmarks.common import Record, Records

RATIOS = (12, 25, 50, 100)
PLAIN: dict[str, Spec] = {"int8": "int8", "int4": "int4", "int2": {"type": "int2", "block": 64}}
WEIGHTS: dict[str, Spec] = {str(ratio): low_rank({"ratio": ratio}) for ratio in RATIOS} | PLAIN
WEIGHTS["50 + int2"] = and_the_rest(low_rank({"ratio": 50}))
GRADIENTS: dict[str, Spec] = {str(ratio): balanced({"ratio": ratio}) for ratio in RATIOS} | PLAIN
GRADIENTS["50 + int2"] = and_the_rest(balanced({"ratio": 50}))

CASES: dict[str, tuple[Spec, Spec, Spec, Spec]] = {
    "exact": (None, None, None, None),
    "experts: rank 7": (low_rank(RANK_7), balanced(RANK_7), None, None),
    **{f"experts: {name}": (WEIGHTS[name], GRADIENTS[name], None, None) for name in WEIGHTS},
    **{f"dense weights: {name}": (None, None, WEIGHTS[name], None) for name in WEIGHTS},
    **{f"dense gradients: {name}": (None, None, None, GRADIENTS[name]) for name in WEIGHTS},
    **{f"all: {name}": (WEIGHTS[name], GRADIENTS[name]) * 2 for name in WEIGHTS},
    "recommended, 16 bits": (None, GRADIENTS["50"], None, GRADIENTS["50 + int2"]),
    "recommended, 32 bits": (WEIGHTS["50"], GRADIENTS["50"], WEIGHTS["50 + int2"], GRADIENTS["50 + int2"]),
    "attention gradients: 50": (None, None, None, GRADIENTS["50"]),
    "embedding gradients: 50": (None, None, None, GRADIENTS["50"]),
}
ONLY = {"attention gradients: 50": ("attentions",), "embedding gradients: 50": ("bytes", "positions", "head")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_loss_arguments(parser, CASES, {"layers": 1, "hidden": 64, "steps": 150})


def run(args: argparse.Namespace, records: Records) -> None:
    torch.set_num_threads(1)
    codecs.run_cases(args, records, CASES, ONLY)


def report(records: list[Record], args: argparse.Namespace) -> str:
    return codecs.loss_report(records)
