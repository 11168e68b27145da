# SPDX-License-Identifier: Apache-2.0
"""Trainings of Hugging Face models as people start them, with the block and without expert parallelism.

Without it every rank has all experts, and DeepSpeed is as it is.  All of it runs on the ranks of a pool.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from hf_models import hf_loss
from parity import FP32_TOLERANCE, Case, model_of, use_expert_groups_of
from torch import Tensor, nn
from training import batch_of

from ds_hybridep.deepspeed.autoep import experts_of

Make = Callable[[Any], Any]


def as_it_is(model: Any) -> Any:
    return model


def trained(model: nn.Module) -> list[Any]:
    """What the Trainer gives `model_parameters`."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a script starts.  The functions have names, since they travel to other processes.

    model: makes the script's model of that of the case.
    optimizer: makes the script's optimizer and perhaps a schedule; None where the ds_config has one.
    groups: makes what `model_parameters` gets, for the optimizer of the ds_config.
    loss: of the engine and a batch.
    config: other settings of the ds_config.
    """

    model: Make = as_it_is
    optimizer: Callable[[nn.Module], tuple[Any, Any]] | None = None
    groups: Callable[[nn.Module], list[Any]] = trained
    loss: Callable[..., Tensor] = hf_loss
    config: dict[str, Any] = field(default_factory=dict)


@contextmanager
def started(case: Case, start: Start, *, with_block: bool, **config: Any) -> Iterator[tuple[Any, Any]]:
    """The engine, and the schedule that the script steps."""
    use_expert_groups_of(case)
    torch.manual_seed(case.seed)
    model = model_of(case, seed=case.seed)
    model.config.output_router_logits = False  # AutoEP makes its auxiliary loss of other logits than transformers
    model = start.model(model)
    ds_config = {**case.ds_config(with_block=with_block), **start.config, **config}
    if with_block:
        ds_config["hybridep"]["advanced"]["verify_interval"] = 1
    else:
        del ds_config["expert_parallel"]
    if start.optimizer is None:
        made: dict[str, Any] = {"model_parameters": start.groups(model)}
        schedule = None
    else:
        del ds_config["optimizer"]
        optimizer, schedule = start.optimizer(model)
        made = {"optimizer": optimizer, "model_parameters": start.groups(model)}
    engine, *_ = deepspeed.initialize(model=model, config=ds_config, **made)
    try:
        yield engine, schedule
    finally:
        engine.destroy()
        del engine, model, made
        gc.collect()


def train(engine: Any, schedule: Any, case: Case, start: Start, first: int, steps: int) -> list[float]:
    """Losses of some steps."""
    losses = []
    for step in range(first, first + steps):
        for micro_step in range(case.accumulation):
            loss = start.loss(engine, *batch_of(case, step, micro_step))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        if schedule is not None:
            schedule.step()
    return losses


def weights_of(module: nn.Module, own: Sequence[int]) -> dict[str, Tensor]:
    """fp32 copies, by AutoEP's names, with or without AutoEP; of experts those in `own`.  All ranks must call."""
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            value = parameter.detach().float().clone()
        if name.endswith(".experts.gate_up_proj"):
            head = name.removesuffix("gate_up_proj")
            found[f"{head}w1"], found[f"{head}w3"] = value[list(own)].chunk(2, dim=1)
        elif name.endswith(".experts.down_proj"):
            found[name.removesuffix("down_proj") + "w2"] = value[list(own)]
        elif name.endswith(".mlp.gate.weight"):
            found[name.replace(".gate.", ".router.gate.")] = value
        else:
            found[name] = value
    return found


def own_experts(module: nn.Module) -> list[int]:
    """The experts of this rank in all AutoEP layers."""
    layer: Any = next(one for one in module.modules() if hasattr(one, "ep_rank"))
    return experts_of(layer, layer.ep_rank)


def compare(case: Case, start: Start) -> dict[str, Any]:
    """Train with the block and without expert parallelism."""
    with started(case, start, with_block=True) as (engine, schedule):
        own = own_experts(engine.module)
        before = weights_of(engine.module, own)
        ours = train(engine, schedule, case, start, 0, case.steps), weights_of(engine.module, own)
        groups = [{k: v for k, v in g.items() if k in ("lr", "weight_decay", "name")} for g in groups_of(engine)]
    with started(case, start, with_block=False) as (engine, schedule):
        plain = train(engine, schedule, case, start, 0, case.steps), weights_of(engine.module, own)
    names = ours[1].keys() & plain[1].keys()
    assert all(".experts." in name or ".gate." in name for name in ours[1].keys() ^ plain[1].keys())  # below adapters
    return {
        "losses": (plain[0], ours[0]),
        "distance": {name: ratio(ours[1][name] - plain[1][name], plain[1][name]) for name in names},
        "moved": {name: ratio(plain[1][name] - before[name], before[name]) for name in names},
        "groups": groups,
    }


def groups_of(engine: Any) -> list[dict[str, Any]]:
    return list(engine.optimizer.param_groups)


def ratio(difference: Tensor, value: Tensor) -> float:
    return float(difference.norm() / value.norm().clamp(min=1e-12))


def assert_same(
    results: Sequence[dict[str, Any]],
    *,
    frozen: Callable[[str], bool] = lambda name: False,
    tolerance: float = FP32_TOLERANCE,
) -> None:
    """Losses and weights are as without expert parallelism, and all that is not frozen has moved."""
    for found in results:
        plain, ours = found["losses"]
        assert max(abs(a - b) / abs(a) for a, b in zip(plain, ours, strict=True)) < tolerance, (plain, ours)
        far = {name: value for name, value in found["distance"].items() if not value < tolerance}
        assert not far
        assert {name for name, value in found["moved"].items() if value == 0.0} == set(filter(frozen, found["moved"]))
