# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models through DeepSpeed's AutoEP, with the "hybridep" block and without."""

import gc
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import parity
import pytest
import torch
from autoep_cases import SHAPE, case2, case4
from checkpoints import resume_across, resume_in_a_fresh_engine
from deepspeed import comm as dist
from hf_models import FAMILIES
from marks import slow
from parity import FP32_TOLERANCE, Case, assert_parity, levels_of, model_of, use_expert_groups_of
from process_pool import ProcessPool
from torch import Tensor
from training import train

import ds_hybridep

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"),
]

BY_TOKEN = replace(SHAPE, routing="by_token")
PLANS4 = [(a, b) for a in (1, 2) for b in (1, 2)]


# -- parity -----------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.slow
def test_every_plan_of_four_ranks(pool4: ProcessPool) -> None:
    assert_parity(pool4, [case4("qwen3_moe", *sizes, optimizer="sgd") for sizes in PLANS4])


@pytest.mark.core
@pytest.mark.slow
def test_zero_stages_and_checkpointing(pool4: ProcessPool) -> None:
    cases = [
        case4("mixtral", 2, 1, zero_stage=1, accumulation=2, toy=replace(SHAPE, checkpointing="nonreentrant")),
        case4("mixtral", 2, 2, zero_stage=2, accumulation=2, toy=replace(SHAPE, checkpointing="reentrant")),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
@pytest.mark.core
def test_shared_experts_and_limited_groups(pool4: ProcessPool) -> None:
    assert_parity(pool4, [case4("deepseek_v3", 2, 1, zero_stage=1), case4("qwen3_5_moe", 2, 1, zero_stage=2)])


@pytest.mark.slow
def test_bf16_tells_a_wrong_gradient_from_another_order_of_sums(pool4: ProcessPool) -> None:
    case = case4("qwen3_moe", 1, 1, dtype="bf16", zero_stage=1, toy=BY_TOKEN)
    results = pool4.run(parity.run_other_layout, case=case, ep_size=2)
    assert results[0].distance > 0.0
    assert parity.numeric_problems(case, results) == []
    for where in (3, "layers.1.self_attn.q_norm"):
        results = pool4.run(parity.run_with_fault, case=case, gradient_factor=1.5, where=where)
        tolerances = parity.tolerances_of(pool4, case, results)
        assert any("parameters differ; worst" in line for line in parity.numeric_problems(case, results, tolerances))


@pytest.mark.slow  # test_autoep_settings.py has the cases that matter most
def test_zero_3(pool4: ProcessPool) -> None:
    cases = [
        case4("qwen3_moe", 2, 1, zero_stage=3, accumulation=2, evaluate=True),
        # A rank holds half of each of its experts.
        case4("mixtral", 1, 2, zero_stage=3, toy=replace(SHAPE, ep_size=2, checkpointing="nonreentrant")),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
def test_optimizer_on_the_host(pool4: ProcessPool) -> None:
    clipped: dict[str, Any] = {"accumulation": 2, "gradient_clipping": 0.1}
    cases = [
        case4("qwen3_moe", 2, 1, zero_stage=stage, offload=offload, **clipped)
        for offload in ("hybrid", "both")
        for stage in (1, 2, 3)
    ]
    cases.append(case4("mixtral", 1, 2, zero_stage=3, toy=replace(SHAPE, ep_size=2), offload="both"))
    assert_parity(pool4, cases)


@pytest.mark.slow
def test_two_ranks(pool2: ProcessPool) -> None:
    toy = replace(SHAPE, ep_size=2)
    assert_parity(pool2, [Case(levels=levels_of((2,), (size,)), family="mixtral", toy=toy) for size in (1, 2)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_plan_and_stage(pool4: ProcessPool, family: str, zero_stage: int, dtype: str) -> None:
    toy = BY_TOKEN if dtype == "bf16" else SHAPE
    common: dict[str, Any] = {"zero_stage": zero_stage, "dtype": dtype}
    if family == "qwen3_5_moe" and dtype == "bf16":
        common["steps"] = 3  # linear attention amplifies rounding: DeepSpeed's layouts differ after five, too
    cases = [case4(family, *sizes, toy=toy, **common) for sizes in PLANS4]
    cases.append(case4(family, 1, 2, toy=replace(toy, ep_size=2), **common))
    strided = {"use_data_before_expert_parallel": True, "accumulation": 2}
    cases.append(case4(family, 2, 1, toy=replace(toy, ep_size=2), **strided, **common))
    assert_parity(pool4, cases)


# -- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "zero_stage",
    [pytest.param(stage, marks=pytest.mark.core if stage == 1 else pytest.mark.slow) for stage in (0, 1, 2, 3)],
)
def test_checkpoints(pool2: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    case = case2("qwen3_moe", zero_stage=zero_stage, accumulation=2)
    for result in pool2.run(resume_in_a_fresh_engine, case=case, folder=str(tmp_path / "own")):
        straight, resumed = result["losses"]
        assert result["is_loaded"]
        assert resumed == straight
        assert result["different"] == []
        assert result["is_equal"]
    for losses in pool2.run(resume_across, case=replace(case, accumulation=1), folder=str(tmp_path / "across")):
        for losses_found in losses.values():
            assert losses_found == pytest.approx(losses[False, False], rel=FP32_TOLERANCE, abs=0.0)


# -- adapters ---------------------------------------------------------------------------------------------------


def train_attention_adapters(case: Case, *, with_block: bool) -> dict[str, Any]:
    """Losses, adapters and bytes of experts over the slow level after each step; all but the adapters is frozen."""
    import peft

    use_expert_groups_of(case)
    model = model_of(case, seed=case.seed)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, settings)
    config = case.ds_config(with_block=with_block)
    config["expert_parallel"]["moe_layer_pattern"] = r"base_model\.model\.model\.layers\.\d+\.mlp"
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    losses, sent = [], []
    for step in range(case.steps):
        losses += train(engine, case, step, 1)
        if with_block:
            sent.append(dict(ds_hybridep.stats(engine)["levels"][0]["sent_bytes"]))
    found = {
        "losses": losses,
        "adapters": {n: p.detach().clone() for n, p in engine.module.named_parameters() if p.requires_grad},
        "sent": sent,
    }
    engine.destroy()
    del engine, model, trainable
    gc.collect()
    return found


def compare_attention_adapters(case: Case) -> dict[str, Any]:
    plain, hybrid = (train_attention_adapters(case, with_block=with_block) for with_block in (False, True))
    distances = [float((hybrid["adapters"][n] - one).norm() / one.norm()) for n, one in plain["adapters"].items()]
    return {"losses": (plain["losses"], hybrid["losses"]), "distance": max(distances), "sent": hybrid["sent"]}


NEEDS_PEFT = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: '.[hf]'")


@NEEDS_PEFT
def test_adapters_of_attention_leave_experts_where_they_are(pool2: ProcessPool) -> None:
    check_attention_adapters(pool2, case2("qwen3_moe"))


@NEEDS_PEFT
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_adapters_of_attention_leave_experts_of_four_ranks_where_they_are(
    pool4: ProcessPool, sizes: tuple[int, int]
) -> None:
    check_attention_adapters(pool4, case4("qwen3_moe", *sizes))


def check_attention_adapters(pool: ProcessPool, case: Case) -> None:
    for found in pool.run(compare_attention_adapters, case=case):
        plain, hybrid = found["losses"]
        assert hybrid == pytest.approx(plain, rel=FP32_TOLERANCE)
        assert found["distance"] < FP32_TOLERANCE
        first, *others = found["sent"]
        assert first["expert_weights"] > 0
        for sent in others:  # frozen experts were copied once
            assert sent["expert_weights"] == first["expert_weights"]
            assert sent["expert_gradients"] == 0
            assert sent["tokens"] == 0


# -- the layer alone --------------------------------------------------------------------------------------------


def run_first_layer(case: Case, *, with_block: bool, layer_settings: dict[str, Any]) -> dict[str, Tensor]:
    """What the first AutoEP layer gives, keeps and gets as gradients, with some of its attributes set by hand."""
    use_expert_groups_of(case)
    model = model_of(case, seed=case.seed)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=case.ds_config(with_block=with_block)
    )
    name, layer = next((n, m) for n, m in engine.module.named_modules() if type(m).__name__ == "AutoEPMoELayer")
    for attribute, value in layer_settings.items():
        setattr(layer, attribute, value)
    hybrid = layer.__dict__.get("_hybridep")
    if hybrid is not None and "score_apply" in layer_settings:
        layer._hybridep = replace(hybrid, weighs_inputs=layer_settings["score_apply"] == "pre")
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2, 5, case.toy.hidden, generator=generator, requires_grad=True)
    output = layer(x)
    output, logits = output if isinstance(output, tuple) else (output, torch.zeros(1))
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    found = {
        "output": output.detach(),
        "logits": logits.detach(),
        "tokens_per_expert": layer.tokens_per_expert.clone(),
        "grad_x": x.grad,
        **{n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None},
    }
    engine.destroy()
    del engine, model, layer
    gc.collect()
    return found


def compare_first_layers(case: Case, layer_settings: dict[str, Any]) -> dict[str, float]:
    plain, hybrid = (run_first_layer(case, with_block=b, layer_settings=layer_settings) for b in (False, True))
    assert plain.keys() == hybrid.keys()
    assert torch.equal(plain["tokens_per_expert"], hybrid["tokens_per_expert"])
    assert plain["tokens_per_expert"].sum() == 2 * 5 * case.toy.k
    return {
        name: float((hybrid[name] - value).norm() / value.norm().clamp(min=1e-12)) for name, value in plain.items()
    }


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        slow("mixtral", {"score_apply": "pre"}),
        ("mixtral", {"expert_bias": torch.linspace(-1.0, 1.0, 8)}),
        slow("qwen3_5_moe", {"return_router_logits": True}),
    ],
    ids=["scores before experts", "expert bias", "router logits"],
)
def test_one_layer(pool2: ProcessPool, family: str, settings: dict[str, Any]) -> None:
    for differences in pool2.run(compare_first_layers, case=case2(family), layer_settings=settings):
        assert {"output", "logits", "grad_x", "experts.w1", "experts.w2", "experts.w3"} <= differences.keys()
        for name, difference in differences.items():
            assert difference < FP32_TOLERANCE, name
