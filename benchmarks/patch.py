# SPDX-License-Identifier: Apache-2.0
"""Bits and speed of patches, beside the entropy of what changed.

    python benchmarks/patch.py
    python benchmarks/patch.py --weights 33554432 --out benchmarks/results/patch.jsonl

Two kinds of bf16 weights.  "normal": normal weights of standard deviation 0.02, and a normal step of the size that is
named.  "trained": a byte-level transformer under AdamW with fp32 masters; after `--steps` steps at 1e-3, for each
learning rate, the last of `--after` more steps.

Seconds are those that one thread spends on the processor, the least of some runs: GB of 16-bit weights a second.
"entropy" is that of the change of a weight, in bits a weight: what a code without context needs at least.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from bench import versions
from torch import Tensor, nn

from ds_hybridep.codecs import Patch
from ds_hybridep.codecs.patch_format import place_in_order

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples"))

from train_lm import VOCABULARY, Attention, batch_at, read_corpus  # noqa: E402

NORMAL_STEPS = (2.5e-7, 5e-7, 1e-6, 2e-6, 5e-6, 1e-5, 1e-4)
LEARNING_RATES = (1e-3, 1e-4, 3e-5, 1e-5, 1e-6)
FIRST_RATE = 1e-3
ROWS, SEQ_LEN, LAYERS = 8, 128, 3


class Block(nn.Module):
    """Attention, then a feed-forward, each with a residual connection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.attention = Attention(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def make_model(hidden: int) -> nn.Sequential:
    blocks = [Block(hidden) for _ in range(LAYERS)]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, hidden), *blocks, nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY)
    )


def normal_weights(n: int, step: float) -> tuple[Tensor, Tensor]:
    """bf16 [n], before and after a step."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(n, generator=generator) * 0.02
    return master.bfloat16(), (master + step * torch.randn(n, generator=generator)).bfloat16()


class Training:
    """fp32 masters under AdamW, and a model that computes with what they are in bf16."""

    def __init__(self, hidden: int) -> None:
        torch.manual_seed(0)
        self.corpus = read_corpus()[0]
        self.model = make_model(hidden)
        self.masters = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=FIRST_RATE)
        self.num_steps = 0

    def weights(self) -> Tensor:
        """All weights in bf16, [n]."""
        return torch.cat([master.detach().bfloat16().flatten() for master in self.masters])

    def step(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master.bfloat16())
        inputs, targets = batch_at(self.corpus, (0, self.num_steps, 0, 0), rows=ROWS, seq_len=SEQ_LEN)
        F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()).backward()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        self.optimizer.step()
        self.num_steps += 1

    def at_rate(self, rate: float, num_steps: int) -> tuple[Tensor, Tensor]:
        """bf16 [n], before and after the last of so many steps at `rate`; the training itself goes no further."""
        masters, state = [master.clone() for master in self.masters], copy.deepcopy(self.optimizer.state_dict())
        before, at = self.weights(), self.num_steps
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(num_steps):
            before = self.weights()
            self.step()
        after = self.weights()
        for master, saved in zip(self.masters, masters, strict=True):
            master.data.copy_(saved)
        self.optimizer.load_state_dict(state)
        self.num_steps = at
        return before, after


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, old and new weights."""
    for step in NORMAL_STEPS:
        yield f"normal, step {step:g}", *normal_weights(args.weights, step)
    training = Training(args.hidden)
    for _ in range(args.steps):
        training.step()
    for rate in LEARNING_RATES:
        old, new = training.at_rate(rate, args.after)
        # A small model's weights several times over, as many as the others, so that times can be compared.
        times = -(-args.weights // len(old))
        yield f"trained, rate {rate:g}", old.repeat(times)[: args.weights], new.repeat(times)[: args.weights]


def entropy_of_change(old: Tensor, new: Tensor) -> float:
    """Bits for each weight."""
    places = [place_in_order(weights.view(torch.int16).long() & 0xFFFF) for weights in (old, new)]
    counts = ((places[1] - places[0]) % 2**16).bincount(minlength=2**16)
    shares = counts[counts > 0].double() / len(old)
    return float(-(shares * shares.log2()).sum())


def least_seconds(run: Callable[[], object], prepare: Callable[[], object], samples: int) -> float:
    """The least processor seconds of this thread."""
    seconds = []
    for _ in range(samples):
        prepare()
        start = time.thread_time()
        run()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def measure(old: Tensor, new: Tensor, args: argparse.Namespace) -> dict[str, float]:
    patch, sent, held = Patch(kernels=args.kernels), old.clone(), old.clone()
    out = torch.zeros(patch.max_bytes(len(old)), dtype=torch.uint8)
    length = patch.encode(new, sent, out, 0)
    encode_s = least_seconds(lambda: patch.encode(new, sent, out, 0), lambda: sent.copy_(old), args.samples)
    decode_s = least_seconds(lambda: patch.decode(out, held), lambda: held.copy_(old), args.samples)
    if not torch.equal(held.view(torch.int16), new.view(torch.int16)):
        raise SystemExit("decoded weights are not those that were encoded")
    gigabytes = 2e-9 * len(old)
    return {
        "changed_percent": 100 * float((old.view(torch.int16) != new.view(torch.int16)).float().mean()),
        "entropy_bits": entropy_of_change(old, new),
        "bits": 8 * length / len(old),
        "ratio": 2 * len(old) / length,
        "encode_gb_per_s": gigabytes / encode_s,
        "decode_gb_per_s": gigabytes / decode_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=2**22, help="in each case")
    parser.add_argument("--hidden", type=int, default=192, help="of the model that is trained, a multiple of 32")
    parser.add_argument("--steps", type=int, default=250, help="of the training before the rates are tried")
    parser.add_argument("--after", type=int, default=12, help="steps at each rate")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--kernels", choices=("compiled", "reference"), default="compiled")
    parser.add_argument("--out", type=Path, help="JSON lines are added to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| weights | changed | entropy | bits | of entropy | ratio | encode GB/s | decode GB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, old, new in cases(args):
        found = measure(old, new, args)
        print(
            f"| {name} | {found['changed_percent']:.1f}% | {found['entropy_bits']:.3f} | {found['bits']:.3f} "
            f"| {100 * found['bits'] / found['entropy_bits']:.0f}% | {found['ratio']:.0f}x "
            f"| {found['encode_gb_per_s']:.2f} | {found['decode_gb_per_s']:.2f} |",
            flush=True,
        )
        if args.out is not None:
            params = {name: value for name, value in vars(args).items() if name != "out"}
            with args.out.open("a") as file:
                record = {"case": name, "params": params, **found, "versions": versions()}
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
