# SPDX-License-Identifier: Apache-2.0
"""The package on four ranks against the plain version of its idea in one process."""

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from parity import FP32_TOLERANCE
from plain_version import Batch, PlainVersion
from process_pool import ProcessPool
from torch import Tensor, nn
from torch.nn import functional as F
from toy_model import MlpExpert

import ds_hybridep
from ds_hybridep.codecs import make_codec
from ds_hybridep.config_codecs import BlockwiseConfig

pytestmark = pytest.mark.dist
VOCAB, HIDDEN, FFN, NUM_EXPERTS, STEPS, MICRO_STEPS = 32, 16, 32, 4, 4, 2
CODEC = {"type": "int4", "block": 64}  # coarse: without residuals and mirrors, four steps would end elsewhere
RATES = {"lr": 2e-2, "eps": 1e-3, "weight_decay": 0.01}


def value_of(name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def dense_values() -> dict[str, Tensor]:
    return {
        "embedding": 4 * value_of("embedding", VOCAB, HIDDEN),
        "gate": value_of("gate", NUM_EXPERTS, HIDDEN),
        "head": value_of("head", VOCAB, HIDDEN),
    }


def expert_values(expert: int) -> dict[str, Tensor]:
    shapes = {"up.weight": (FFN, HIDDEN), "up.bias": (FFN,), "down.weight": (HIDDEN, FFN), "down.bias": (HIDDEN,)}
    return {name: value_of(f"{expert} {name}", *shape) for name, shape in shapes.items()}


def batch_of(step: int, micro_step: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_step + rank)
    tokens = torch.randint(VOCAB, (3, 8), generator=generator)
    return tokens, (3 * tokens + 1) % VOCAB


class Model(nn.Module):
    """What a user of DeepSpeed writes; the same function as `PlainVersion.loss`."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        one = MlpExpert(HIDDEN, FFN)
        self.moe = MoE(HIDDEN, one, NUM_EXPERTS, ep_size=4, k=1, drop_tokens=False, use_rts=False)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(self.value(name, dense_values(), expert_values(expert)))

    @staticmethod
    def value(name: str, dense: dict[str, Tensor], expert: dict[str, Tensor]) -> Tensor:
        """Find a parameter of this model in what the plain version calls it."""
        if "deepspeed_experts.0." in name:
            return expert[name.split("deepspeed_experts.0.")[1]]
        return dense["gate" if ".gate." in name else name.split(".")[0]]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return F.cross_entropy(self.head(x + self.moe(x)[0]).flatten(0, 1), targets.flatten())


def train_with_package() -> dict[str, Any]:
    """Losses, parameters and bytes of this rank."""
    rank = dist.get_rank()
    slow = {"name": "dc", "size": 2, "domain_size": 2, "weight_codec": CODEC, "gradient_codec": CODEC}
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": MICRO_STEPS,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {**RATES, "torch_adam": True}},
        "hybridep": {"levels": [slow, {"name": "gpu", "size": 2}], "timeout_s": 60, "dense_sync": "deepspeed"},
    }
    model = Model(rank)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            loss = engine(*batch_of(step, micro_step, rank))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sent = ds_hybridep.stats(engine)["levels"][0]["sent_bytes"]
    engine.destroy()
    return {"losses": losses, "parameters": parameters, "sent": sent}


def code(x: Tensor) -> Tensor:
    codec = make_codec(BlockwiseConfig(**CODEC))
    matrix = x.detach().reshape(1, *(x.shape if x.ndim == 2 else (1, *x.shape))).contiguous()
    packets = codec.encode(matrix, codec.new_state(*matrix.shape))
    return codec.decode(packets, torch.empty_like(matrix)).view(x.shape)


def test_four_ranks_train_what_the_plain_version_says(pool4: ProcessPool) -> None:
    plain = PlainVersion(
        dense_values(),
        [expert_values(expert) for expert in range(NUM_EXPERTS)],
        gradient_code=code,
        weight_code=code,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, **RATES),
    )
    plain_losses: list[list[float]] = [[] for _ in range(4)]
    for step in range(STEPS):
        micro_steps = [
            [[batch_of(step, micro_step, 2 * dc + gpu) for gpu in range(2)] for dc in range(2)]
            for micro_step in range(MICRO_STEPS)
        ]
        for place, loss in enumerate(plain.step(micro_steps)):
            plain_losses[place % 4].append(loss)
    assert any(value.abs().max() > 0 for one in plain.residual for value in one.values())
    for rank, result in enumerate(pool4.run(train_with_package)):
        assert result["losses"] == pytest.approx(plain_losses[rank], rel=FP32_TOLERANCE)
        assert result["sent"]["tokens"] == 0, "tokens stay in their datacentre"
        for name, value in result["parameters"].items():
            wanted = Model.value(name, plain.dense, plain.owners(rank)).detach()
            assert (value - wanted).norm() <= FP32_TOLERANCE * wanted.norm(), f"rank {rank}: {name}"
