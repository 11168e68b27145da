# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model inside another module, with adapters or without, and no pattern in the ds_config."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import starts
import torch
from adapted_engines import BOTH
from autoep_cases import case2, case4
from deepspeed import comm as dist
from marks import slow
from parity import Case, model_of
from process_pool import ProcessPool
from starts import Start, assert_same
from torch import Tensor, nn
from universal import convert

import ds_hybridep
from ds_hybridep.commands.main import main
from ds_hybridep.errors import UnsupportedError

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: '.[hf]'"),
]


class WithValueHead(nn.Module):
    """As trl's model for PPO: a model and a head beside it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = nn.Linear(model.config.hidden_size, 1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        out = self.pretrained_model(input_ids=tokens, labels=targets, output_hidden_states=True)
        loss: Tensor = out.loss + self.v_head(out.hidden_states[-1]).square().mean()
        return loss


class Reward(nn.Module):
    """As a script's reward model: a backbone without its head for tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone = model.model
        self.score = nn.Linear(model.config.hidden_size, 1, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.score(self.backbone(input_ids=tokens).last_hidden_state)[..., 0]
        return (scores - targets.float() / 10).square().mean()


def with_value_head(model: Any) -> nn.Module:
    torch.manual_seed(1)
    return WithValueHead(model)


def reward(model: Any) -> nn.Module:
    torch.manual_seed(1)
    return Reward(model)


def lora(model: Any, **settings: Any) -> Any:
    import peft

    torch.manual_seed(1)
    common = {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**(common | settings)))


def lora_of_experts(model: Any) -> Any:
    return lora(model, target_parameters=list(BOTH))


def lora_in_value_head(model: Any) -> nn.Module:
    return with_value_head(lora_of_experts(model))


def policy_with_lora(model: Any) -> nn.Module:
    return with_value_head(lora(model))


def lora_with_patterns(model: Any) -> Any:
    """rsLoRA, an alpha of its own for one projection, and whole embeddings, heads and routers."""
    saved = ["embed_tokens", "lm_head", "gate"]
    return lora(
        model, target_parameters=list(BOTH), use_rslora=True, alpha_pattern={"q_proj": 8}, modules_to_save=saved
    )


def loss_of_module(engine: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = engine(tokens, targets)
    return loss


def is_frozen(name: str) -> bool:
    return "lora_" not in name and "v_head" not in name


@pytest.mark.parametrize(
    ("make", "zero_stage"), [(with_value_head, 1), slow(reward, 3)], ids=["value head, zero 1", "backbone, zero 3"]
)
def test_a_model_inside_another_module_trains_as_without_expert_parallelism(
    pool4: ProcessPool, make: Any, zero_stage: int
) -> None:
    case = case4("qwen3_moe", 2, 1, zero_stage=zero_stage)
    start = Start(model=make, loss=loss_of_module)
    assert_same(pool4.run(starts.compare, case=case, start=start, timeout_s=120.0))


def adamw(model: nn.Module) -> tuple[Any, Any]:
    return torch.optim.AdamW(starts.trained(model), lr=5e-3, eps=3e-3), None


ALONE, POLICY = Start(model=lora), Start(model=policy_with_lora, loss=loss_of_module, optimizer=adamw)


@pytest.mark.parametrize(
    ("start", "zero_stage"),
    [
        pytest.param(POLICY, 1, marks=pytest.mark.core),
        *(slow(ALONE, stage) for stage in (0, 1, 2, 3)),
        *(slow(POLICY, stage) for stage in (0, 2, 3)),
    ],
    ids=lambda one: f"zero {one}" if isinstance(one, int) else "alone" if one is ALONE else "policy",
)
def test_lora_of_attention_starts_without_a_pattern_and_freezes_experts(
    pool2: ProcessPool, start: Start, zero_stage: int
) -> None:
    case = case2("qwen3_moe", zero_stage=zero_stage, steps=3)
    assert_same(pool2.run(starts.compare, case=case, start=start, timeout_s=120.0), frozen=is_frozen)


def save_and_go_on(case: Case, start: Start, folder: str) -> dict[str, Any]:
    """Losses after saving, after loading, and after loading what ds_to_universal makes; and a live export."""
    if dist.get_rank() == 0:
        model_of(case, seed=case.seed).save_pretrained(Path(folder, "base"))
    with starts.started(case, start, with_block=True) as (engine, _):
        starts.train(engine, None, case, start, 0, 2)
        engine.save_checkpoint(folder, tag="two")
        ds_hybridep.save_pretrained(engine, Path(folder, "live"))
        losses = starts.train(engine, None, case, start, 2, 2)
    with starts.started(case, start, with_block=True) as (engine, _):
        engine.load_checkpoint(folder, tag="two")
        resumed = starts.train(engine, None, case, start, 2, 2)
    if dist.get_rank() == 0:
        convert(Path(folder, "two"), Path(folder, "two_universal"))
    dist.barrier()
    with starts.started(case, start, with_block=True, checkpoint={"load_universal": True}) as (engine, _):
        engine.load_checkpoint(folder, tag="two_universal")
        universal = starts.train(engine, None, case, start, 2, 2)
    return {"losses": losses, "resumed": resumed, "universal": universal}


@pytest.mark.slow  # test_saves.py writes a model inside another module
@pytest.mark.parametrize("make", [with_value_head, lora_in_value_head], ids=["value head", "with adapters of experts"])
def test_checkpoints_of_a_model_inside_another_module_are_read_and_exported(
    pool4: ProcessPool, tmp_path: Path, make: Any
) -> None:
    from safetensors.torch import load_file

    case = case4("qwen3_moe", 2, 1, zero_stage=1)
    start = Start(model=make, loss=loss_of_module)
    for found in pool4.run(save_and_go_on, case=case, start=start, folder=str(tmp_path), timeout_s=120.0):
        assert found["resumed"] == found["losses"]
        assert found["universal"] == pytest.approx(found["losses"], rel=1e-5)
    out = tmp_path / "exported"
    assert 0 == main(["export", str(tmp_path / "two"), "--model", str(tmp_path / "base"), "--out", str(out)])
    (name,) = [path.name for path in out.glob("*.safetensors")]
    exported, live = load_file(out / name), load_file(tmp_path / "live" / name)
    assert exported.keys() == live.keys()
    assert all(torch.equal(exported[key], live[key]) for key in exported)
    assert any("experts" in key for key in exported)


# -- adapters of routers ------------------------------------------------------------------------------------------


def router_by_parameter(model: Any) -> Any:
    return lora(model, target_parameters=["mlp.gate.weight"])


def error_of_start(case: Case, start: Start) -> str:
    try:
        with starts.started(case, start, with_block=True):
            return ""
    except UnsupportedError as error:
        return str(error)


def test_whole_routers_and_heads_beside_adapters_train_as_without_expert_parallelism(pool2: ProcessPool) -> None:
    case = case2("qwen3_moe", zero_stage=1, steps=3)
    results = pool2.run(starts.compare, case=case, start=Start(model=lora_with_patterns), timeout_s=120.0)
    assert_same(results, frozen=lambda name: "lora_" not in name and "modules_to_save" not in name)


def test_an_adapter_of_a_router_is_refused_by_name(pool2: ProcessPool) -> None:
    case = case2("qwen3_moe", zero_stage=1)
    for message in pool2.run(error_of_start, case=case, start=Start(model=router_by_parameter)):
        assert "model.layers.0.mlp.gate.lora_A.default.weight is trained, but AutoEP" in message
        assert "leave 'gate' out of the adapters" in message
        assert "modules_to_save trains a whole router" in message


def test_a_frozen_model_with_a_trained_head_has_nothing_to_send_back(pool2: ProcessPool) -> None:
    case = case2("qwen3_moe", zero_stage=2, steps=3)
    start = Start(model=frozen_experts_and_routers)
    results = pool2.run(starts.compare, case=case, start=start, timeout_s=120.0)
    assert_same(results, frozen=lambda name: ".experts." in name or ".router." in name)


def frozen_experts_and_routers(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." not in name)
    return model
