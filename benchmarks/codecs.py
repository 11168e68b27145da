# SPDX-License-Identifier: Apache-2.0
"""What single codecs cost in loss and in time, and patches in bits.

    python -m benchmarks codecs --seeds 0 1 2 --out benchmarks/results/codecs.jsonl
    python -m benchmarks codecs time --out rates.jsonl
    python -m benchmarks codecs patch
    python -m benchmarks codecs count --out counts.jsonl

loss   as benchmarks/losses.py, with these codecs for experts and exact dense parameters, in fp32
time   milliseconds of one step of each codec, the least of several
patch  bits and speed of patches of bf16 weights by learning rate, beside the entropy of what changed: of a small
       transformer under AdamW with fp32 masters.  Seconds are those that one thread spends on the processor
count  launches, bytes and products of low rank on an accelerator, beside what an H100 could do (codec_counts.py)
"""

import argparse
import math
import time
from typing import Any

import torch

from benchmarks import codec_counts, losses, patches
from benchmarks.common import Record, Records, codec_settings, table
from benchmarks.losses import add_training_arguments, compare
from benchmarks.training import Job
from ds_hybridep.codecs import make_codec

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

Spec = str | dict[str, Any]


def low_rank(**size: int) -> dict[str, Any]:
    return {"type": "low_rank", **size}


def balanced(**size: int) -> dict[str, Any]:
    """For gradients: errors count relative to the size of their row and column, as they do under Adam."""
    return {**low_rank(**size), "weighting": "rms"}


def and_the_rest(codec: dict[str, Any]) -> dict[str, Any]:
    """Two bits for each element of what the directions leave."""
    return {**codec, "rest": {"type": "int2", "block": 64}}


def experts(weight: Spec, gradient: Spec) -> dict[str, Spec]:
    return {"weight_codec": weight, "gradient_codec": gradient}


CASES = {  # name -> settings of the slow level
    "int8": experts("int8", "int8"),
    "int4": experts("int4", "int4"),
    "int4 / exact": experts("int4", "identity"),
    "exact / int4": experts("identity", "int4"),
    "low rank 7 / exact": experts(low_rank(rank=7), "identity"),
    "exact / balanced 7": experts("identity", balanced(rank=7)),
    "low rank 3 / balanced 3": experts(low_rank(rank=3), balanced(rank=3)),
    "low rank 7 / balanced 7": experts(low_rank(rank=7), balanced(rank=7)),
    "low rank 8 + int2 / balanced 8 + int2": experts(and_the_rest(low_rank(rank=8)), and_the_rest(balanced(rank=8))),
    "low rank 16 + int2 / balanced 16 + int2": experts(
        and_the_rest(low_rank(rank=16)), and_the_rest(balanced(rank=16))
    ),
}
TIMED: dict[str, dict[str, Any]] = {  # the ratios depend on the shape
    "int8": {"type": "int8"},
    "int4": {"type": "int4"},
    "int2": {"type": "int2"},
    "low rank 7": low_rank(rank=7),
    "balanced 7": balanced(rank=7),
    "low rank, ratio 50": low_rank(ratio=50),
    "balanced, ratio 50": balanced(ratio=50),
    "balanced, ratio 50 + int2": and_the_rest(balanced(ratio=50)),
}
COLUMNS = {
    "codec_time": {"ratio": ".1f", "encode_update_ms": ".3f", "decode_add_ms": ".3f"},
    "patch": {
        "changed": ".1%", "entropy_bits": ".3f", "bits": ".3f", "ratio": ".0f", "encode_gb_per_s": ".2f",
        "decode_gb_per_s": ".2f",
    },
    "codec_count": {
        "launches": "d", "waits": "d", "gb": ".3f", "gflop": ".2f", "roof_ms": ".3f", "launch_ms": ".3f"
    },
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=("loss", "time", "patch", "count"), default="loss")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--kernels", choices=("compiled", "reference"), default="compiled")
    parser.add_argument("--samples", type=int, default=7, help="of each time")
    parser.add_argument("--shape", nargs=3, type=int, default=[2, 256, 64], metavar=("N", "ROWS", "COLS"))
    parser.add_argument("--weights", type=int, default=2**22, help="of a patch")
    add_training_arguments(parser, dtype="fp32")


def run(args: argparse.Namespace, records: Records) -> None:
    torch.set_num_threads(1)
    measures = {"loss": losses.run, "time": time_codecs, "patch": patches.measure, "count": codec_counts.count}
    measures[args.what](args, records)


def rank(args: argparse.Namespace, job: Job) -> None:
    compare(args, job, {name: CASES[name] for name in args.cases})


def time_codecs(args: argparse.Namespace, records: Records) -> None:
    """Encoding with the mirror's update, and decoding, of random weights."""
    shape = tuple(args.shape)
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for name, spec in TIMED.items():
        codec = make_codec(codec_settings(spec), kernels=args.kernels)
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
            ratio=4 * math.prod(shape[1:]) / codec.packet_bytes(*shape[1:]),
            encode_update_ms=1e3 * min(encode_s), decode_add_ms=1e3 * min(decode_s),
        )  # fmt: skip


def name_of(params: Record) -> str:
    return params["name"] if "name" in params else f"{params['what']} {params['shape']}, rank {params['rank']}"


def report(records: list[Record], args: argparse.Namespace) -> str:
    if (case := records[0]["case"]) not in COLUMNS:
        return losses.report(records, args)
    rows = [
        [name_of(one["params"]), *(format(one[key], form) for key, form in COLUMNS[case].items())] for one in records
    ]
    return table(["", *(key.replace("_", " ") for key in COLUMNS[case])], rows)
