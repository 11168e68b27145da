# SPDX-License-Identifier: Apache-2.0
"""Whether small gradients arrive: what was delivered and what is left, beside the sum of the gradients.

    python -m benchmarks residual-sums --out benchmarks/results/residual-sums.jsonl

A gradient [64, 128] whose elements are spread evenly in the logarithm between 1e-4 and 1 is sent for many steps, with
and without noise as large as itself.  Error: of each element, delivered plus residual less the sum, over that sum.

    most    the largest of all elements
    mean    of all elements: the bias
    small   mean over the elements below 3e-4 of the largest

Residuals are kept as this package keeps them for a type of parameter, or ("bf16, nearest") rounded to bf16 at each
step, as is often done.
"""

import argparse
import itertools
import math
from typing import Any

import torch

from benchmarks.common import Record, Records, codec_settings, table
from ds_hybridep.codecs import make_codec
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.geometry.slots import whole
from ds_hybridep.sync.error_feedback import GradientReceiver, GradientSender
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MessageLayout, PacketPart
from ds_hybridep.sync.transaction import Transaction

RECOMMENDED = recommended_codecs(2)
CODECS: dict[str, Any] = {
    "int8": "int8",
    "int4": "int4",
    "int2": "int2",
    "low rank": {"type": "low_rank"},
    "low rank, rms": {"type": "low_rank", "weighting": "rms"},
    "recommended, experts": RECOMMENDED.gradient.spec,
    "recommended, dense": RECOMMENDED.dense_gradient.spec,
}
ROWS, COLS = 64, 128
KEPT = {"bf16 parameters": torch.bfloat16, "fp32 parameters": torch.float32, "bf16, nearest": torch.float32}


def measure(spec: Any, kept: str, is_noisy: bool, num_steps: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(7)
    size = torch.exp(torch.rand(1, ROWS, COLS, generator=generator) * math.log(1e-4))
    mean = size * torch.sign(torch.randn(1, ROWS, COLS, generator=generator))
    part = PacketPart(torch.Size((ROWS, COLS)), 1, (whole("w", (ROWS, COLS)),), KEPT[kept])
    codec, transaction = make_codec(codec_settings(spec)), Transaction()
    layout, home = MessageLayout(codec, (part,)), Home(torch.device("cpu"))
    sender, receiver = GradientSender("measured 0 0", codec, home, transaction), GradientReceiver(Transaction())
    owed, arrived = (torch.zeros(1, ROWS, COLS, dtype=torch.float64) for _ in range(2))
    left = torch.zeros(1, ROWS, COLS)
    for _ in range(num_steps):
        noise = torch.randn(1, ROWS, COLS, generator=generator) if is_noisy else torch.zeros(())
        gradient = (mean * (1 + noise)).bfloat16().float()
        message = sender.encode(layout, [gradient], 1.0)
        delivered = torch.zeros(1, ROWS, COLS)
        receiver.decode_add(layout, message, [delivered], 1.0)
        transaction.commit()
        if kept == "bf16, nearest":
            for residual in sender.residuals:
                residual.copy_(residual.bfloat16())
        arrived += delivered
        owed += gradient
        left = sender.residual(part.spans[0])
    error = (arrived + left.view_as(arrived) - owed) / (num_steps * mean)
    return {
        "most": float(error.abs().max()), "mean": float(error.mean()), "small": float(error[size < 3e-4].mean()),
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS))


def run(args: argparse.Namespace, records: Records) -> None:
    for name, kept, is_noisy in itertools.product(args.codecs, KEPT, (False, True)):
        errors = measure(CODECS[name], kept, is_noisy, args.steps)
        records.add({"codec": name, "kept": kept, "is_noisy": is_noisy, "steps": args.steps}, errors=errors)


def report(records: list[Record], args: argparse.Namespace) -> str:
    rows = []
    for record in records:
        about, errors = record["params"], record["errors"]
        numbers = [f"{errors[name]:+.4f}" for name in ("most", "mean", "small")]
        gradient = "noisy" if about["is_noisy"] else "constant"
        rows.append([about["codec"], about["kept"], gradient, about["steps"], *numbers])
    return table(("codec", "residuals", "gradient", "steps", "most", "mean", "mean of small"), rows)
