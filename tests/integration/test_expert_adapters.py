# SPDX-License-Identifier: Apache-2.0
"""peft's adapters of experts through AutoEP, against the same model without expert parallelism."""

import gc
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from adapted_engines import BOTH, adapted_model, engine_of
from autoep_cases import SHAPE, case2, case4
from deepspeed import comm as dist
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.utils import groups
from estimate import needs_of_model
from marks import slow
from parity import FP32_TOLERANCE, Case, model_of, use_expert_groups_of
from process_pool import ProcessPool
from torch import Tensor, nn
from training import train
from universal import convert

import ds_hybridep
from ds_hybridep.deepspeed import adapters as expert_adapters
from ds_hybridep.errors import ConfigError, UnsupportedError

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: '.[hf]'"),
]

# -- in the workers ---------------------------------------------------------------------------------------------


def factors_of(engine: Any, targets: tuple[str, ...], ep_size: int = 4) -> dict[str, Tensor]:
    """Products of factors for all experts, [E, rows, cols], by layer and parameter, whoever holds them."""
    found = {}
    for name, module in engine.module.named_modules():
        if hasattr(module, "scalings"):
            for parameter, scaling in module.scalings.items():
                factors = [getattr(module, f"{parameter}_lora_{which}") for which in "AB"]
                with deepspeed.zero.GatheredParameters(factors):  # does nothing below ZeRO-3
                    own = scaling * (factors[1].detach() @ factors[0].detach())
                everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
                dist.all_gather(everywhere, own.contiguous())
                found[f"{name}.{parameter}"] = torch.cat(everywhere[:ep_size])
        elif type(module).__name__ == "ParamWrapper":
            layer = name.split(".experts")[0] + ".experts"
            found[f"{layer}.{module.parameter_name}"] = module.get_delta_weight("default").detach()
    assert len(found) == len(targets) * 2
    return found


def compare(case: Case, targets: tuple[str, ...]) -> dict[str, Any]:
    with engine_of(case, targets, with_block=False) as engine:
        start = factors_of(engine, targets)
        plain = train(engine, case, 0, case.steps), factors_of(engine, targets)
    with engine_of(case, targets, with_block=True) as engine:
        losses, sent = [], []
        for step in range(case.steps):
            losses += train(engine, case, step, 1)
            sent.append(dict(ds_hybridep.stats(engine)["levels"][0]["sent_bytes"]))
        factors = factors_of(engine, targets, case.toy.ep_size)
        hot_changes = sum(layer.get("hot_changes", 0) for layer in ds_hybridep.stats(engine)["layers"])
        named = engine.module.named_parameters()
        num_factors = sum(getattr(p, "ds_numel", p.numel()) for n, p in named if "proj_lora" in n)
    return {
        "losses": (plain[0], losses),
        "distance": max(float((factors[n] - one).norm() / one.norm()) for n, one in plain[1].items()),
        "moved": min(float((one - start[n]).norm() / start[n].norm()) for n, one in plain[1].items()),
        "sent": sent,
        "num_factors": num_factors,
        "hot_changes": hot_changes,
    }


def resume(case: Case, folder: str) -> dict[str, Any]:
    """Trains on from a checkpoint in the engine that wrote it, and in ones that began with other factors.

    Also, relative, how far one step leads away from factors that were loaded alone; of the parameter that moves most.
    """
    ep_size = case.toy.ep_size
    with engine_of(case, BOTH, with_block=True) as engine:
        train(engine, case, 0, 2)
        engine.save_checkpoint(folder)
        saved = factors_of(engine, BOTH, ep_size)
        straight = train(engine, case, 2, 2), factors_of(engine, BOTH, ep_size)
    with engine_of(case, BOTH, with_block=True, seed=2) as engine:
        engine.load_checkpoint(folder)
        resumed = train(engine, case, 2, 2), factors_of(engine, BOTH, ep_size)
    with engine_of(case, BOTH, with_block=True, seed=2) as engine:
        engine.load_checkpoint(folder, load_module_only=True)
        train(engine, case, 2, 1)
        factors = factors_of(engine, BOTH, ep_size)
    different = [name for name, one in straight[1].items() if not torch.equal(one, resumed[1][name])]
    distance = max(float((factors[name] - one).norm() / one.norm()) for name, one in saved.items())
    return {"losses": (straight[0], resumed[0]), "different": different, "distance": distance}


def held_and_estimated(case: Case) -> tuple[int, int]:
    """Bytes that this rank holds for replicas after a step, and what was predicted."""
    block, sizes = case.ds_config(with_block=True)["hybridep"], tuple(size for *_, size in case.levels)
    with engine_of(case, BOTH, with_block=True) as engine:
        live = needs_of_model(engine.module, block, 4)
        train(engine, case, 0, 1)
        return ds_hybridep.stats(engine)["replica_bytes"], live[sizes].after_step


def errors_of_saves(case: Case, folder: str) -> list[str]:
    """Of adapters with the block, and of unmodified AutoEP with frozen experts."""
    messages = []
    with engine_of(case, BOTH, with_block=True) as engine:
        messages.append(error_of_save(engine, folder))
    use_expert_groups_of(case)
    model = model_of(case, seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = case.ds_config(with_block=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    messages.append(error_of_save(engine, folder))
    engine.destroy()
    del engine, model, trainable
    gc.collect()
    return messages


def error_of_save(engine: Any, folder: str) -> str:
    try:
        engine.save_checkpoint(folder)
    except RuntimeError as error:
        return str(error)
    return ""


def write_universal(case: Case, folder: str) -> Any:
    """Factors of a checkpoint that is made universal, and losses of going on without it."""
    with engine_of(case, BOTH, with_block=True) as engine:
        train(engine, case, 0, 2)
        engine.save_checkpoint(folder, tag="two")
        saved = factors_of(engine, BOTH, case.toy.ep_size)
        losses = train(engine, case, 2, 2)
    if dist.get_rank() == 0:
        convert(Path(folder, "two"), Path(folder, "two_universal"))
    dist.barrier()
    return saved, losses


def read_universal(case: Case, folder: str) -> Any:
    """Factors that the base with untrained ones has after loading, and losses of going on."""
    with engine_of(case, BOTH, with_block=True, load_universal=True) as engine:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        return factors_of(engine, BOTH, case.toy.ep_size), train(engine, case, 2, 2)


def error_of(case: Case, targets: tuple[str, ...], pattern: str) -> str:
    use_expert_groups_of(case)
    config = case.ds_config(with_block=True)
    config["expert_parallel"] |= {"moe_layer_pattern": pattern, "preset_model": "qwen3_moe"}
    try:
        engine, *_ = deepspeed.initialize(model=adapted_model(case, targets, seed=1), config=config)
    except UnsupportedError as error:
        return str(error)
    finally:
        gc.collect()
    engine.destroy()
    return ""


# -- tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "sizes", "options", "targets"),
    [
        ("qwen3_moe", (2, 1), {"accumulation": 2, "zero_stage": 1}, BOTH),
        slow("mixtral", (2, 2), {}, BOTH[:1]),
        slow("qwen3_moe", (1, 1), {"zero_stage": 1}, BOTH[1:]),
        slow("qwen3_moe", (2, 1), {"zero_stage": 3}, BOTH),
        slow("qwen3_moe", (2, 1), {"zero_stage": 1, "offload": "both"}, BOTH),
    ],
    ids=["both", "gate_up", "down", "zero 3", "offload"],
)
def test_only_factors_migrate_and_learn_the_same(
    pool4: ProcessPool, family: str, sizes: tuple[int, int], options: dict[str, Any], targets: tuple[str, ...]
) -> None:
    results = pool4.run(compare, case=case4(family, *sizes, **options), targets=targets)
    for found in results:
        plain, hybrid = found["losses"]
        assert hybrid == pytest.approx(plain, rel=FP32_TOLERANCE)
        assert found["distance"] < FP32_TOLERANCE
        assert found["moved"] > 1e-2
    for kind in ("expert_weights", "expert_gradients"):
        by_step = [sum(found["sent"][step][kind] for found in results) for step in range(5)]
        later = [after - before for before, after in zip(by_step[1:], by_step[2:], strict=False)]
        # Once a step each owner's factors go to the other DC: to its peer there, who forwards them inside.
        expected = 4 * sum(found["num_factors"] for found in results) if sizes[0] == 2 else 0
        assert later == [expected] * 3


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=str)
def test_frozen_weights_of_hot_experts_come_with_them(pool4: ProcessPool, sizes: tuple[int, int]) -> None:
    toy = replace(SHAPE, drift=2)
    case = case4("qwen3_moe", *sizes, toy=toy, hot_experts=2, steps=6, zero_stage=1)
    for found in pool4.run(compare, case=case, targets=BOTH):
        plain, hybrid = found["losses"]
        assert hybrid == pytest.approx(plain, rel=FP32_TOLERANCE)
        assert found["distance"] < FP32_TOLERANCE
        assert found["hot_changes"] > 1


@pytest.mark.slow
def test_groups_of_zero_3_have_hot_experts_of_their_own(pool4: ProcessPool) -> None:
    toy = replace(SHAPE, ep_size=2, drift=2)
    case = case4("qwen3_moe", 1, 1, toy=toy, hot_experts=1, steps=5, zero_stage=3)
    for found in pool4.run(compare, case=case, targets=BOTH):
        plain, hybrid = found["losses"]
        assert hybrid == pytest.approx(plain, rel=FP32_TOLERANCE)
        assert found["hot_changes"] > 1


def test_memory_is_what_is_estimated(pool4: ProcessPool) -> None:
    for held, live in pool4.run(held_and_estimated, case=case4("qwen3_moe", 2, 1, zero_stage=1)):
        assert held == live > 0


@pytest.mark.parametrize("zero_stage", [slow(0), 1])
def test_resume_is_bit_equal_and_a_load_of_the_module_only_is_what_training_goes_on_from(
    pool2: ProcessPool, tmp_path: Path, zero_stage: int
) -> None:
    case = case2("qwen3_moe", zero_stage=zero_stage)
    for found in pool2.run(resume, case=case, folder=str(tmp_path)):
        straight, resumed = found["losses"]
        assert resumed == straight
        assert found["different"] == []
        assert found["distance"] < 0.5  # other factors are more than a whole length away


@pytest.mark.slow
def test_zero_3_saves_no_frozen_experts_with_the_block_or_without(pool4: ProcessPool, tmp_path: Path) -> None:
    case = case4("qwen3_moe", 2, 1, zero_stage=3)
    for messages in pool4.run(errors_of_saves, case=case, folder=str(tmp_path)):
        for message in messages:
            assert "AutoEP with ZeRO Stage 3 checkpointing does not support frozen expert parameters" in message


@pytest.mark.slow
def test_universal_checkpoints_hold_adapters_of_experts(pool4: ProcessPool, tmp_path: Path) -> None:
    case = case4("qwen3_moe", 2, 1, zero_stage=1)
    other = replace(case, levels=(("dc", 2, 1), ("gpu", 2, 1)), toy=replace(case.toy, ep_size=2))
    written = pool4.run(write_universal, case=case, folder=str(tmp_path))
    for target in (case, other):
        read = pool4.run(read_universal, case=target, folder=str(tmp_path))
        for (saved, losses), (loaded, later) in zip(written, read, strict=True):
            assert later == pytest.approx(losses, rel=FP32_TOLERANCE)
            for name, value in saved.items():
                assert torch.equal(value, loaded[name]), name


def test_a_layer_that_autoep_does_not_take(pool2: ProcessPool) -> None:
    only_first = r"base_model\.model\.model\.layers\.0\.mlp"
    for message in pool2.run(error_of, case=case2("qwen3_moe"), targets=BOTH, pattern=only_first):
        assert "base_model.model.model.layers.1.mlp: AutoEP did not take this layer" in message
        assert "expert_parallel.moe_layer_pattern" in message


def test_a_stage_whose_checkpoints_lose_experts(pool2: ProcessPool) -> None:
    case = case2("qwen3_moe", zero_stage=2)
    for message in pool2.run(error_of, case=case, targets=BOTH, pattern=r".*\.layers\.\d+\.mlp"):
        assert "adapters of experts do not work with ZeRO stage 2 (zero_optimization.stage)" in message


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"merged": True}, "merged adapters"),
        ({"active_adapters": ["other"]}, "not active"),
        ({"disable_adapters": True}, "switched off"),
        ({"lora_A": {"one": None, "other": None}}, "2 adapters at once"),
        ({"parameter_name": "gate_up_proj_bias"}, "gate_up_proj_bias"),
        ({"get_param": lambda: torch.zeros(4, 4)}, "not fused"),
    ],
    ids=["merged", "inactive", "off", "two", "parameter", "flat"],
)
def test_adapters_that_are_not_carried_over(settings: dict[str, Any], text: str) -> None:
    common = {"parameter_name": "down_proj", "lora_A": {"default": None}, "merged": False}
    common |= {"active_adapters": ["default"], "disable_adapters": False}
    wrapper = SimpleNamespace(**common | {"get_param": lambda: torch.zeros(2, 4, 4)} | settings)
    with pytest.raises(UnsupportedError, match=f"layers.1.mlp.experts: .*{text}.*target_parameters"):
        expert_adapters._adapter_of("layers.1.mlp.experts", wrapper)


def layer_of(ep_rank: int, ep_size: int) -> SimpleNamespace:
    """What saving and loading look at in a layer with four experts, whose factors hold the number of their rank."""
    num_local_experts = 4 // ep_size
    experts = GroupedExperts(4, 4, num_local_experts, use_grouped_mm=False)
    experts.__class__, experts.scalings = expert_adapters.AdaptedExperts, {"down_proj": 1.0}
    for name in expert_adapters.factor_names("down_proj"):
        experts.register_parameter(name, nn.Parameter(torch.full((num_local_experts, 4, 4), float(ep_rank))))
    place = {"ep_rank": ep_rank, "ep_size": ep_size, "ep_group_name": f"ep_size_{ep_size}"}
    return SimpleNamespace(experts=experts, num_local_experts=num_local_experts, **place)


def test_a_tag_that_fewer_ranks_save_again_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_get_expert_data_parallel_rank", lambda group: 0)  # there are no ranks here
    for step, ep_size in ((1, 4), (2, 2)):
        for ep_rank in range(ep_size):
            expert_adapters.save({"mlp": layer_of(ep_rank, ep_size)}, tmp_path, step)
    assert len(list(tmp_path.iterdir())) == 2
    loaded = layer_of(0, 1)
    expert_adapters.load({"mlp": loaded}, tmp_path)
    assert loaded.experts.down_proj_lora_A[:, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_factors_that_a_checkpoint_does_not_hold(tmp_path: Path) -> None:
    layer = layer_of(0, 2)
    with pytest.raises(ConfigError, match="mlp: .* has no down_proj_lora_A of expert 0"):
        expert_adapters.load({"mlp": layer}, tmp_path)
