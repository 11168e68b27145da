# SPDX-License-Identifier: Apache-2.0
"""What to paste and to type: a complete ds_config, and how to start the job."""

import json
import math
from typing import Any

from ds_hybridep.geometry.cluster import BITS_PER_BYTE, MS_PER_S, Level
from ds_hybridep.plan.answer import Answer, Candidate
from ds_hybridep.plan.machines import GPUS_OF_MACHINE
from ds_hybridep.plan.plan import RECOMMENDED
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import Alternative
from ds_hybridep.plan.words import GIGA
from ds_hybridep.plan.workload import Workload

MEETING_PORT, LINK_PORTS = 29400, [29600, 29699]  # as in docs/sites.md
# What peft calls the parts of the models that AutoEP trains.  A name that a model does not have changes nothing.
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
LATENT = "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
LINEAR = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"
ATTENTION_BY_PRESET = {"deepseek_v2": LATENT, "deepseek_v3": LATENT, "qwen3_5_moe": (*ATTENTION, *LINEAR)}
# Of shared experts and dense layers.  In other families, peft 0.21 takes these names for routed experts.
FFN_BY_PRESET = {"qwen3_5_moe": ("gate_proj", "up_proj", "down_proj")}
IN_SCRIPT = "In train.py, before deepspeed.initialize or the Trainer"
EXPERTS = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
SITE_NAMES = "abcdefghijklmnopqrstuvwxyz"


def level_settings(level: Level) -> dict[str, Any]:
    """A level as in a "hybridep" block: its name, its size and what is known of its link, with six digits."""
    bandwidth, latency_s = level.link.bandwidth_bytes_per_s, level.link.latency_s
    known = {
        "bandwidth_gbps": None if bandwidth is None else bandwidth * BITS_PER_BYTE / GIGA,
        "latency_ms": None if latency_s is None else latency_s * MS_PER_S,
    }
    numbers = {key: float(f"{value:.6g}") for key, value in known.items() if value is not None}
    several = {"connections": level.link.connections} if level.link.connections > 1 else {}
    control = {"congestion_control": level.link.congestion_control} if level.link.congestion_control else {}
    return {"name": level.name, "size": level.size, **numbers, **several, **control}


def ds_config_of(answer: Answer) -> dict[str, Any]:
    """A complete ds_config for the chosen way."""
    chosen, model = answer.chosen, answer.question.workload.model
    if isinstance(chosen, Candidate):
        ep_size, block = chosen.group.ep_size, _levels_block(answer, chosen)
    else:
        assert chosen.sites is not None, "only plans and sites are chosen"
        ep_size, block = chosen.sites.ep_size, _sites_block(answer, chosen)
    settings = _training_settings(answer.question.workload)
    if isinstance(chosen, Candidate) and chosen.group.is_strided:
        settings["use_data_before_expert_parallelism"] = True
    if model.is_of_hub:
        preset = {} if model.autoep_preset is None else {"preset_model": model.autoep_preset}
        settings["expert_parallel"] = {"enabled": True, "autoep_size": ep_size, **preset}
    return {**settings, "hybridep": block}


def _training_settings(workload: Workload) -> dict[str, Any]:
    """All that DeepSpeed needs beside expert parallelism."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": max(workload.tokens_per_rank // max(workload.sequence_tokens, 1), 1),
        "gradient_accumulation_steps": workload.micro_steps,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": workload.zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": workload.learning_rate, "torch_adam": True}},
    }
    if workload.param_bytes == 2:
        settings["bf16"] = {"enabled": True}
    if workload.offloads_optimizer:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return settings


def _levels_block(answer: Answer, chosen: Candidate) -> dict[str, Any]:
    plan, levels = chosen.plan, []
    for level, domain_size, hot, codecs in zip(
        answer.question.cluster.levels, plan.domain_sizes, plan.hot_by_level, plan.codecs, strict=True
    ):
        entry = level_settings(level)
        entry["domain_size"] = domain_size
        if hot:
            entry["hot_experts"] = hot
        if codecs.name == RECOMMENDED:
            entry["codecs"] = RECOMMENDED
        levels.append(entry)
    block: dict[str, Any] = {"levels": levels}
    if plan.state == "host":
        block["state"] = "host"
    if sum(count > 1 for count in plan.domain_counts) > 1:
        block["token_exchange"] = plan.token_exchange
    if plan.dense_sync == "deepspeed":
        block["dense_sync"] = "deepspeed"
    return block


def _sites_block(answer: Answer, chosen: Alternative) -> dict[str, Any]:
    assert chosen.sites is not None
    sites: dict[str, Any] = {
        "names": _site_names(answer.question.cluster.sizes[0]),
        "meeting_point": f"HOST:{MEETING_PORT}",
        "secret_file": "secret",
    }
    if chosen.training != "exact":
        sites["codecs"] = RECOMMENDED
    if chosen.sites.every > 1:
        sites["every"] = chosen.sites.every
    block: dict[str, Any] = {"sites": sites, "link": {"ports": LINK_PORTS}}
    if chosen.state == "host":
        block["state"] = "host"
    return block


def _site_names(count: int) -> list[str]:
    """a, b, c; s0, s1 ... if these are too few."""
    return list(SITE_NAMES[:count]) if count <= len(SITE_NAMES) else [f"s{index}" for index in range(count)]


def adapters_of(question: Question) -> dict[str, Any] | None:
    """Arguments of `peft.LoraConfig` for the adapters that were asked for; None: everything is trained."""
    if question.adapters is None:
        return None
    (where, rank), preset = question.adapters, question.workload.model.autoep_preset or ""
    modules = () if where == "experts" else ATTENTION_BY_PRESET.get(preset, ATTENTION)
    modules += FFN_BY_PRESET.get(preset, ()) if where == "all" else ()
    parameters = {} if where == "attention" else {"target_parameters": list(EXPERTS)}
    return {"r": rank, "target_modules": list(modules), **parameters}


def script_of(answer: Answer) -> list[str]:
    """Lines that the script needs for adapters, which no ds_config adds."""
    question = answer.question
    settings, model = adapters_of(question), question.workload.model
    if settings is None or question.adapters is None:
        return []
    if not model.is_of_hub:
        return [f"# give your own layers the adapters, of rank {settings['r']}, and freeze all else"]
    arguments = [f"    {key}={json.dumps(value)}," for key, value in settings.items()]
    notes = []
    if question.adapters[0] == "all" and model.other_matrices and model.autoep_preset not in FFN_BY_PRESET:
        notes = ["# without shared experts and dense layers, whose names peft takes for those of routed experts"]
    made = ["adapters = peft.LoraConfig(", *arguments, ")", "model = peft.get_peft_model(model, adapters)"]
    return ["import peft", "", *notes, *made]


def launch_of(answer: Answer) -> list[str]:
    """Commands that start the chosen way."""
    start = "deepspeed --hostfile hosts train.py --deepspeed_config ds_config.json"
    if isinstance(answer.chosen, Candidate):
        return [start]
    cluster = answer.question.cluster
    names = _site_names(cluster.sizes[0])
    if cluster.ranks_below[0] <= GPUS_OF_MACHINE:
        jobs = [f"HYBRIDEP_SITE={name} {start.replace('--hostfile hosts ', '')}" for name in names]
    else:  # a launch with a hostfile does not pass the variable on
        jobs = [f'{start.replace("hosts", f"hosts_{name}")}  # "name": "{name}" in "sites"' for name in names]
    return [f"ds_hybridep meet --port {MEETING_PORT} --secret-file secret --folder meeting", *jobs]


def reminders_of(answer: Answer) -> list[str]:
    """Sentences: what no ds_config switches on, and what its reader must know."""
    workload, cluster = answer.question.workload, answer.question.cluster
    outer, of_machine = cluster.levels[0].name, math.gcd(cluster.sizes[-1], GPUS_OF_MACHINE)
    lines = [
        "train.py is your script. With the Trainer, TrainingArguments must have the same batch, accumulation and rate."
    ]
    if any("--hostfile" in line for line in launch_of(answer)):
        lines.append(
            f"A file of hosts has a line for each machine, such as 'machine1 slots={of_machine}': all of one {outer}, "
            f"then all of the next."
        )
    if not isinstance(answer.chosen, Candidate):
        lines.append(
            f"meet runs on one machine that all sites reach; its address stands for HOST. Each other line runs in its "
            f"own {outer}. All have the same file secret (docs/sites.md)."
        )
    if workload.is_checkpointed:
        lines.append("Switch activation checkpointing on in your script (Trainer: gradient_checkpointing=True).")
    return lines
