# SPDX-License-Identifier: Apache-2.0
"""Engines of a case, their training, and a look inside; all of it runs on the ranks of a pool."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.moe.sharded_moe import MOELayer
from parity import FP32_TOLERANCE, Case, levels_of, loss_of, merged, model_of, use_expert_groups_of
from torch import nn
from toy_model import ToyConfig, batch

import ds_hybridep
from ds_hybridep.errors import HybridEPError

THREAD_LIMIT_S = 100.0
Engine = deepspeed.DeepSpeedEngine


@contextmanager
def engine_of(
    case: Case, *, with_block: bool, hybridep: dict[str, Any] | None = None, seed: int | None = None, **config: Any
) -> Iterator[Engine]:
    """A fresh engine; `hybridep` and `config` add settings to the block and to ds_config.

    seed: of its weights; by default the seed of the case.
    """
    use_expert_groups_of(case)
    torch.manual_seed(case.seed)
    model = model_of(case, seed=case.seed if seed is None else seed)
    ds_config = {**case.ds_config(with_block=with_block), **config}
    if hybridep is not None:
        ds_config["hybridep"] = merged(ds_config.get("hybridep", {}), hybridep)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    try:
        yield engine
    finally:
        engine.destroy()
        del engine, model
        gc.collect()


def train(engine: Engine, case: Case, first_step: int, num_steps: int) -> list[float]:
    """Losses of the micro-steps of steps `first_step` and following."""
    losses = []
    for step in range(first_step, first_step + num_steps):
        for micro_step in range(case.accumulation):
            loss = loss_of(engine, case, *batch_of(case, step, micro_step))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


def evaluate(model: nn.Module, case: Case) -> float:
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, case, *batch_of(case, 1000)).item()
    model.train()
    return loss


def batch_of(case: Case, step: int, micro_step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    return batch(case.toy, seed=case.seed, step=step, micro_step=micro_step, rank=rank, num_sequences=3)


def block_of(case: Case, **settings: Any) -> dict[str, Any]:
    return merged(case.ds_config(with_block=True)["hybridep"], settings)


def moe_layers(model: nn.Module) -> list[MOELayer]:
    return [module for module in model.modules() if isinstance(module, MOELayer)]


def hybridep_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("hybridep"))


def error_of(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Type and message of the error that `function` raises; empty where it raises none."""
    try:
        function(*args, **kwargs)
    except HybridEPError as error:
        return type(error).__name__, str(error)
    return "", ""


def world2(*, domain_size: int = 2, **options: Any) -> Case:
    options.setdefault("toy", ToyConfig(ep_size=2))
    return Case(levels=levels_of((2,), (domain_size,)), kernels="reference", **options)


def world4(*domain_sizes: int, **options: Any) -> Case:
    return Case(levels=levels_of((2, 2), domain_sizes), kernels="reference", **options)


def close_to(losses: list[float]) -> Any:
    return pytest.approx(losses, rel=FP32_TOLERANCE, abs=0.0)


LOW_RANK = {"type": "low_rank", "rank": 2}
COARSE = {"type": "int2", "block": 256}
Codecs = list[tuple[Any, Any]]  # (weights, gradients) of each level


def block_with(case: Case, codecs: Codecs, **settings: Any) -> dict[str, Any]:
    """The case's block with these codecs, every step verified."""
    levels = [
        {**level, "weight_codec": weights, "gradient_codec": gradients}
        for level, (weights, gradients) in zip(
            case.ds_config(with_block=True)["hybridep"]["levels"], codecs, strict=True
        )
    ]
    return merged({"levels": levels, "advanced": {"verify_interval": 1}}, settings)


def runtime_of(engine: Engine) -> Any:
    return engine.__dict__["_hybridep_attachment"].runtime


def migration_of(engine: Engine) -> Any:
    return runtime_of(engine).migration


def replicas_of(engine: Engine) -> list[Any]:
    return [layer.replicas for layer in migration_of(engine).layers]


def residuals_of(engine: Engine) -> list[torch.Tensor]:
    return [residual.clone() for one in replicas_of(engine) for residual in one.codecs.feedback.residuals]


def owed(engine: Engine) -> str:
    """A checksum of the gradients that this rank has kept back so far."""
    return str(ds_hybridep.stats(engine)["checksums"]["owed"])


NOTHING_OWED = "0" * 32


def initialize(case: Case, model: nn.Module, *, with_block: bool, **config: Any) -> Engine:
    ds_config = {**case.ds_config(with_block=with_block), **config}
    if ds_config.get("expert_parallel", ...) is None:
        del ds_config["expert_parallel"]
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)[0]


def new_model(case: Case) -> nn.Module:
    use_expert_groups_of(case)
    torch.manual_seed(case.seed)
    return model_of(case, seed=case.seed)
