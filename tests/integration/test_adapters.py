# SPDX-License-Identifier: Apache-2.0
"""Experts whose base is frozen: adapters travel, exactly, and the base does once."""

import gc
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from parity import FP32_TOLERANCE
from process_pool import ProcessPool
from torch import Tensor, nn
from torch.nn import functional as F

import ds_hybridep

pytestmark = pytest.mark.dist

HIDDEN, FFN, NUM_EXPERTS, NUM_LAYERS, TOKENS, RANK, STEPS = 64, 64, 8, 2, 2048, 8, 3
FLOAT_BYTES = 4


class LoraLinear(nn.Module):
    """A frozen linear map plus a trainable one of low rank."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out)
        self.down = nn.Linear(num_in, RANK, bias=False)
        self.up = nn.Linear(RANK, num_out, bias=False)
        self.base.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.base(rows) + self.up(self.down(rows))


class LoraModel(nn.Module):
    """MoE layers of experts with adapters; gate and everything else trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoE(
                HIDDEN,
                nn.Sequential(LoraLinear(HIDDEN, FFN), nn.GELU(), LoraLinear(FFN, HIDDEN)),
                num_experts=NUM_EXPERTS,
                ep_size=4,
                k=2,
                capacity_factor=1.25,
                use_rts=False,
                top2_2nd_expert_sampling=False,
            )
            for _ in range(NUM_LAYERS)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return F.mse_loss(x, target)


def train(block: dict[str, Any] | None) -> dict[str, Any]:
    """Losses, parameters and bytes over the slow level of a few steps of AdamW."""
    torch.manual_seed(17 + dist.get_rank())
    model = LoraModel()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "experts" not in name:  # what all ranks share must start equal
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True}},
        "steps_per_print": 1_000_000,
    }
    if block is not None:
        config["hybridep"] = block
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    losses, sent = [], []
    for step in range(STEPS):
        data = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        x, target = (torch.randn(TOKENS, HIDDEN, generator=data) for _ in range(2))
        loss = engine(x, target)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        if block is not None:
            sent.append(dict(ds_hybridep.stats(engine)["levels"][0]["sent_bytes"]))
            plain = ds_hybridep.stats(engine)["levels"][0]["plain_ep_bytes"]
    found = {
        "losses": losses,
        "parameters": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
        "sent": sent,
        "plain": plain / STEPS if block is not None else 0.0,
    }
    engine.destroy()
    del engine, model
    gc.collect()
    return found


def compare(block: dict[str, Any]) -> dict[str, Any]:
    """Both trainings on one rank; parameters are compared here, since they are many."""
    plain, ours = train(None), train(block)
    distances = [
        float((ours["parameters"][name] - one).norm() / one.norm().clamp(min=1e-12))
        for name, one in plain["parameters"].items()
    ]
    return {
        "losses": (plain["losses"], ours["losses"]),
        "distance": max(distances),
        "sent": ours["sent"],
        "plain": ours["plain"],
    }


def test_adapters_alone_migrate_and_exactly(pool4: ProcessPool) -> None:
    levels = [{"name": "dc", "size": 2, "domain_size": 2}, {"name": "gpu", "size": 2}]
    results = pool4.run(compare, block={"levels": levels, "advanced": {"verify_interval": 1}, "report_interval": 0})
    adapters = (HIDDEN * RANK + RANK * FFN + FFN * RANK + RANK * HIDDEN) * FLOAT_BYTES
    step_bytes = NUM_LAYERS * NUM_EXPERTS // 4 * adapters
    for found in results:
        plain, ours = found["losses"]
        assert ours == pytest.approx(plain, rel=FP32_TOLERANCE)
        assert found["distance"] < FP32_TOLERANCE
        first, *others = found["sent"]
        for before, after in zip([first, *others], others, strict=False):
            assert after["expert_weights"] - before["expert_weights"] == step_bytes  # the base does not travel again
            assert after["expert_gradients"] - before["expert_gradients"] == step_bytes
            assert after["tokens"] == 0
        # Against what plain EP's four padded all-to-alls send over the slow level.
        assert found["plain"] > 50 * 2 * step_bytes
