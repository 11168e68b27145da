# SPDX-License-Identifier: Apache-2.0
"""Bits and speed of patches, for `python -m benchmarks codecs patch`."""

import argparse
import copy
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import Records
from benchmarks.training import VOCABULARY, train_lm
from ds_hybridep.codecs import PatchCodec

RATES = (1e-3, 1e-4, 3e-5, 1e-5, 1e-6)
HIDDEN, LAYERS, ROWS, SEQ_LEN = 192, 3, 8, 128
NUM_STEPS = 250  # of the training before the rates are tried
STEPS_AFTER = 12  # at each rate, after those of the training


class Training:
    """fp32 masters under AdamW, and a dense transformer that computes with what they are in bf16."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.corpus = train_lm.read_corpus()[0]
        parts: list[nn.Module] = []
        for _ in range(LAYERS):
            wide = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
            parts += [nn.LayerNorm(HIDDEN), train_lm.Attention(HIDDEN), nn.LayerNorm(HIDDEN), wide]
        head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY))
        self.model = nn.ModuleList([nn.Embedding(VOCABULARY, HIDDEN), *parts, head])
        self.masters = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=RATES[0])
        self.num_steps = 0

    def weights(self) -> Tensor:
        """All weights in bf16, [n]."""
        return torch.cat([master.detach().bfloat16().flatten() for master in self.masters])

    def step(self) -> None:
        pairs = list(zip(self.model.parameters(), self.masters, strict=True))
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master.bfloat16())
        inputs, targets = train_lm.batch_at(self.corpus, (0, self.num_steps, 0, 0), rows=ROWS, seq_len=SEQ_LEN)
        embedding, *middle, head = self.model
        x = embedding(inputs)
        for norm, layer in zip(middle[::2], middle[1::2], strict=True):
            x = x + layer(norm(x))
        F.cross_entropy(head(x).flatten(0, 1), targets.flatten()).backward()
        for parameter, master in pairs:
            master.grad, parameter.grad = parameter.grad, None
        self.optimizer.step()
        self.num_steps += 1

    def at_rate(self, rate: float) -> tuple[Tensor, Tensor]:
        """bf16 [n], before and after the last of some steps at `rate`; the training itself goes no further."""
        twin = copy.deepcopy(self)
        for group in twin.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(STEPS_AFTER - 1):
            twin.step()
        before = twin.weights()
        twin.step()
        return before, twin.weights()


def entropy_of_change(old: Tensor, new: Tensor) -> float:
    """Bits for each weight that a code without context needs at least."""
    words = [weights.view(torch.int16).long() & 0xFFFF for weights in (old, new)]
    # Numbers in order of the values that they stand for: negative ones come first and run backwards.
    places = [torch.where(word >= 0x8000, 0xFFFF - word, word + 0x8000) for word in words]
    counts = ((places[1] - places[0]) % 2**16).bincount(minlength=2**16)
    shares = counts[counts > 0].double() / len(old)
    return float(-(shares * shares.log2()).sum())


def least_seconds(call: Callable[[], object], prepare: Callable[[], object], samples: int) -> float:
    """The least processor seconds of this thread."""
    seconds = []
    for _ in range(samples):
        prepare()
        start = time.thread_time()
        call()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def measure(args: argparse.Namespace, records: Records) -> None:
    training, steps = Training(), args.steps or NUM_STEPS
    for _ in range(steps):
        training.step()
    for rate in RATES:
        old, new = training.at_rate(rate)
        times = -(-args.weights // len(old))  # a small model's weights several times over
        old, new = (weights.repeat(times)[: args.weights] for weights in (old, new))
        params = {"name": f"rate {rate:g}", "weights": args.weights, "steps": steps, "kernels": args.kernels}
        records.add(params, case="patch", **measured(old, new, args))


def measured(old: Tensor, new: Tensor, args: argparse.Namespace) -> dict[str, float]:
    patch, sent, held = PatchCodec(kernels=args.kernels), old.clone(), old.clone()
    out = torch.zeros(patch.max_bytes(len(old)), dtype=torch.uint8)
    length = patch.encode(new, sent, out, 0)
    encode_s = least_seconds(lambda: patch.encode(new, sent, out, 0), lambda: sent.copy_(old), args.samples)
    decode_s = least_seconds(lambda: patch.decode(out, held), lambda: held.copy_(old), args.samples)
    assert torch.equal(held.view(torch.int16), new.view(torch.int16)), "decoded weights are not the encoded ones"
    return {
        "changed": float((old.view(torch.int16) != new.view(torch.int16)).float().mean()),
        "entropy_bits": entropy_of_change(old, new), "bits": 8 * length / len(old), "ratio": 2 * len(old) / length,
        "encode_gb_per_s": 2e-9 * len(old) / encode_s, "decode_gb_per_s": 2e-9 * len(old) / decode_s,
    }  # fmt: skip
