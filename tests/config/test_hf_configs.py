# SPDX-License-Identifier: Apache-2.0
"""Configurations for Hugging Face models: DeepSpeed accepts the AutoEP block, and the planner chooses the rest."""

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_config
from deepspeed.utils.groups import _get_expert_parallel_ranks

from ds_hybridep.commands.main import main
from ds_hybridep.config import parse_config
from ds_hybridep.geometry.partition import Partition

FOLDER = Path(__file__).resolve().parents[2] / "ds_configs"
MODELS = {
    "qwen3_30b_a3b_2x8.json": "Qwen3-30B-A3B",
    "qwen3_30b_a3b_2x8_ep_inside.json": "Qwen3-30B-A3B",
    "mixtral_8x7b_2x8.json": "Mixtral-8x7B",
    "lora_2x8.json": "Qwen3-30B-A3B",
}
INSIDE = {"qwen3_30b_a3b_2x8_ep_inside.json", "mixtral_8x7b_2x8.json"}  # groups inside each datacentre


def load(name: str) -> tuple[dict[str, Any], int]:
    """The ds_config and its number of ranks."""
    config = json.loads((FOLDER / name).read_text())
    return config, math.prod(level["size"] for level in config["hybridep"]["levels"])


@pytest.mark.parametrize("name", ["hf_2x2.json", *MODELS])
def test_deepspeed_accepts_the_block_and_domains_fit_into_its_groups(name: str) -> None:
    config, world_size = load(name)
    autoep = parse_autoep_config(config["expert_parallel"])
    validate_autoep_config(autoep, world_size, pp_size=1, tp_size=1, sp_size=1)
    block = parse_config(config["hybridep"], world_size=world_size, base_dir=FOLDER)
    is_strided = config.get("use_data_before_expert_parallelism", False)
    expert_groups, _ = _get_expert_parallel_ranks(
        world_size, 1, autoep.autoep_size, use_data_before_expert_parallel_=is_strided
    )
    for ranks in expert_groups:
        partition = Partition.build(block.cluster(), tuple(ranks), block.domain_sizes)
        assert partition.spans[0] == (1 if name in INSIDE else 2)


@pytest.mark.parametrize("name", MODELS)
def test_experts_can_be_divided_by_the_ranks(name: str) -> None:
    model = yaml.safe_load(files("ds_hybridep.plan.models").joinpath(f"{MODELS[name]}.yaml").read_text())
    config, _ = load(name)
    num_experts = model.get("num_experts") or model["num_local_experts"]
    assert config["expert_parallel"]["preset_model"] == model["model_type"]
    assert num_experts % config["expert_parallel"]["autoep_size"] == 0


@pytest.mark.parametrize("name", MODELS)
def test_they_are_what_the_planner_chooses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    network = ["--dcs", "2x8", "--wan", "10gbps", "--delay", "10ms"]
    training = ["--tokens", "8192", "--accumulation", "4", "--checkpointing"]
    config, _ = load(name)
    if name in INSIDE:
        training += ["--ep-size", str(config["expert_parallel"]["autoep_size"])]
    if name.startswith("lora"):
        training += ["--lora", "all", "--lora-rank", "16"]
    assert main(["plan", "--json", "--model", MODELS[name], *network, *training]) == 0
    answer = json.loads(capsys.readouterr().out)
    chosen = answer["ds_config"]["hybridep"]
    assert config["hybridep"] == chosen
    assert config["expert_parallel"]["autoep_size"] == answer["plan"]["ep_size"]
    assert config["gradient_accumulation_steps"] == 4
