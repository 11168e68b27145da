# SPDX-License-Identifier: Apache-2.0
"""What hybridep was tested with.  It refuses all else that a job turns on, and names the feature and a way out."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import nn

from ds_hybridep.config import AUTO, HybridEPConfig
from ds_hybridep.config_codecs import IDENTITY, PATCH
from ds_hybridep.deepspeed import data_parallel
from ds_hybridep.deepspeed.autoep import adapted_layers, is_autoep_layer
from ds_hybridep.deepspeed.patches import misfits
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.runtime.log import log_dist, warn_once
from ds_hybridep.transport.job import backend_name

TESTED_VERSIONS = ("0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8")
TESTED_TRANSFORMERS = ("5.3.0", "5.22.2", "5.24.0")
TESTED_HELPERS = {"peft": ("0.18.1", "0.21.2"), "accelerate": ("1.11.0", "1.15.0")}  # from first to last

# Sections and switches of a ds_config that were tested in training; those from "aio" on do not change its results.
TESTED_SECTIONS = frozenset({
    "activation_checkpointing", "bf16", "checkpoint", "data_types", "expert_parallel", "fp16", "hybridep",
    "managed_gradient_accumulation", "optimizer", "prescale_gradients", "scheduler", "tensor_parallel",
    "use_data_before_expert_parallelism", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "torch_autocast", "zero_optimization", "aio", "comet", "comms_logger", "csv_monitor", "dataloader_drop_last",
    "disable_python_gc", "dump_state", "flops_profiler", "memory_breakdown", "monitor_config", "tensorboard", "timers",
    "wall_clock_breakdown", "wandb",
})  # fmt: skip
# Tested settings of "zero_optimization"; all others must have their default values.
TESTED_ZERO = frozenset({
    "stage", "allgather_bucket_size", "contiguous_gradients", "gather_16bit_weights_on_model_save", "leaf_module",
    "log_trace_cache_warnings", "max_live_parameters", "max_reuse_distance", "model_persistence_threshold",
    "module_granularity_threshold", "overlap_comm", "param_persistence_threshold", "prefetch_bucket_size",
    "offload_optimizer", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients", "sub_group_size",
    "use_multi_rank_bucket_allreduce",
})  # fmt: skip
# Settings of "offload_optimizer" that change more than where the optimizer's states are, and their tested values.
# Others have no effect with them.
TESTED_OFFLOAD = {"device": ("none", "cpu"), "ratio": (1.0,), "super_offload": (False,)}
TESTED_WRAPPERS = (
    "BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
)  # fmt: skip
TESTED_OPTIMIZERS = ("AdamW", "SGD", "DeepSpeedCPUAdam")  # others of single elements should work too
_UNTESTED = 'was not tested together with the "hybridep" block; turn it off, or set "hybridep": {"enabled": false}'


def check_version(version: str = deepspeed.__version__) -> None:
    """Raise UnsupportedError if DeepSpeed is too old, or if it is untested and lacks something that we rely on."""
    tested = f"{TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}"
    if _numbers(version) < _numbers(TESTED_VERSIONS[0]):
        raise UnsupportedError(
            f"DeepSpeed {version} is too old for hybridep, which was tested with {tested}; install one of these"
        )
    if version.split("+")[0] in TESTED_VERSIONS:
        return
    if missing := misfits():
        raise UnsupportedError(
            f"DeepSpeed {version} has no {missing[0]}, which hybridep relies on; install one of the versions that "
            f'were tested, {tested}, or set "hybridep": {{"enabled": false}}'
        )
    warn_once(f"DeepSpeed {version} was not tested; hybridep was with {tested}, and what it relies on is there")


def check_hugging_face() -> None:
    """Raise UnsupportedError if a transformers is imported that AutoEP cannot read; warn of versions not tested."""
    for name, (oldest, newest) in TESTED_HELPERS.items():
        found = getattr(sys.modules.get(name), "__version__", newest)
        if not _numbers(oldest) <= _numbers(found) <= _numbers(newest):
            warn_once(f"{name} {found} was not tested with hybridep, which was with {oldest} to {newest}")
    first, last = TESTED_TRANSFORMERS[0], TESTED_TRANSFORMERS[-1]
    version = getattr(sys.modules.get("transformers"), "__version__", first)
    if _numbers(version) < _numbers(first):
        raise UnsupportedError(
            f'transformers {version} is too old for the "expert_parallel" block with hybridep, which was tested with '
            f"{first} to {last}; install one of these"
        )
    if _numbers(version) > _numbers(last):
        warn_once(
            f'transformers {version} was not tested with the "expert_parallel" block; hybridep was with {first} to '
            f"{last}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def resolve(engine: Any, config: HybridEPConfig, layers: Mapping[str, Any]) -> HybridEPConfig:
    """Complete the settings with what depends on the engine: recommended codecs, and who sums dense gradients.

    Raises UnsupportedError if the settings ask for patches and parameters do not have 16 bits.
    """
    sample = next(next(iter(layers.values())).experts.parameters())
    config = config.with_dtype(sample.element_size())
    levels = []
    for index, level in enumerate(config.levels):
        for key in ("weight_codec", "dense_weight_codec"):
            if getattr(level, key) == PATCH and sample.element_size() != 2:
                raise UnsupportedError(
                    f'hybridep.levels[{index}].{key} is "patch", which needs parameters of 16 bits, but experts are '
                    f'{sample.dtype}; switch on bf16 or fp16, or choose another codec, for example "recommended" as '
                    f"hybridep.levels[{index}].codecs"
                )
        if level.backend == AUTO and PATCH in level.all_codecs:  # NCCL cannot carry messages that vary in length
            level = level.model_copy(update={"backend": "gloo"})
        levels.append(level)
    dense_sync = config.dense_sync or "hierarchical"
    if config.dense_sync is None and (reason := data_parallel.why_unsupported(engine)):
        dense_sync = "deepspeed"
        has_codecs = any(level.all_codecs[2:] != (IDENTITY, IDENTITY) for level in levels)
        log_dist(
            f"hybridep: sums of dense parameters and of copies of experts are left to DeepSpeed"
            f"{', which has no codecs for them' if has_codecs else ''}: level by level does not work with {reason}",
            ranks=[0],
        )
    return config.model_copy(update={"levels": tuple(levels), "dense_sync": dense_sync})


def refuse_engine(engine: Any, config: HybridEPConfig, layers: Mapping[str, nn.Module]) -> None:
    """Raise UnsupportedError for features of DeepSpeed, or settings of the block, that were not tested together."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer_name() or ""
    in_use = {
        **dict.fromkeys(untested_settings(engine._config._param_dict, engine._config.zero_config), True),
        "pipeline parallelism (PipelineModule)": engine.pipeline_parallelism,
        "tensor parallelism": bwc_tensor_model_parallel_world_size(groups.mpu) > 1 or engine.autotp_size() > 1,
        "sequence parallelism": groups._get_sequence_parallel_world_size() > 1,
        f"the 1-bit optimizer {optimizer}": optimizer.lower() in ("onebitadam", "onebitlamb", "zerooneadam"),
        "ZeRO stage 3 with native MoE layers": stage == 3 and not all(map(is_autoep_layer, layers.values())),
    }
    if feature := next((feature for feature, is_used in in_use.items() if is_used), None):
        raise UnsupportedError(f"{feature} {_UNTESTED}")
    if (autocast := engine._config).torch_autocast_enabled and autocast.torch_autocast_dtype == torch.float16:
        raise UnsupportedError(
            'torch_autocast.dtype is "float16", with which DeepSpeed scales losses and leaves out steps unseen by '
            'hybridep; set it to "bfloat16", or use the "fp16" section in its place'
        )
    if stage == 2 and adapted_layers(layers):
        raise UnsupportedError(
            "adapters of experts do not work with ZeRO stage 2 (zero_optimization.stage), whose checkpoints hold "
            "frozen parameters as rank 0 has them, experts too; use stage 0 or 1"
        )
    if stage == 3:
        _refuse_partitioned(engine, config, layers)
    has_codecs = any(one != IDENTITY for level in config.levels for one in level.all_codecs)
    if config.sites is not None and (config.is_planned or has_codecs):
        raise UnsupportedError(
            'hybridep.levels has codecs or a setting that is "auto" beside hybridep.sites, but what codecs inside a '
            "site keep is not handed to a site that comes back; leave out the codecs of levels, and write domain "
            "sizes (sites.codecs encodes what crosses between sites)"
        )
    if config.sites is not None and engine.zero_use_cpu_optimizer():
        raise UnsupportedError(
            "zero_optimization.offload_optimizer was not tested together with hybridep.sites, whose exchange takes "
            "gradients and weights from the memory of the device; leave out one of them"
        )
    if config.dense_sync == "hierarchical" and (reason := data_parallel.why_unsupported(engine)):
        raise UnsupportedError(
            f'hybridep.dense_sync is "hierarchical", which does not work with {reason}, or set hybridep.dense_sync to '
            f'"deepspeed"'
        )


def untested_settings(ds_config: Mapping[str, Any], zero: Any) -> list[str]:
    """Return the key paths of features that are on but not in a list above."""
    found = []
    for name, value in ds_config.items():
        is_on = value.get("enabled", bool(value)) if isinstance(value, Mapping) else value is True
        if is_on and name not in TESTED_SECTIONS:
            found.append(name)
    if ds_config.get("gradient_allreduce_op", "mean") != "mean":
        found.append("gradient_allreduce_op")
    for name, about in type(zero).model_fields.items():
        default = about.get_default(call_default_factory=True)
        value = getattr(zero, name, default)  # deprecated ones are gone: DeepSpeed turned them into others
        is_off = getattr(value, "device", None) == "none"  # of an offload section
        if name not in TESTED_ZERO and not is_off and value != default:
            found.append(f"zero_optimization.{about.alias or name}")
    for name, tested in TESTED_OFFLOAD.items():
        if (value := getattr(zero.offload_optimizer, name, tested[0])) not in tested:
            found.append(f"zero_optimization.offload_optimizer.{name} = {getattr(value, 'value', value)!r}")
    return found


def _refuse_partitioned(engine: Any, config: HybridEPConfig, layers: Mapping[str, nn.Module]) -> None:
    """Raise UnsupportedError for settings that do not work together with ZeRO stage 3."""
    if config.is_planned or any(level.hot_experts == AUTO for level in config.levels):
        raise UnsupportedError(
            'a hybridep setting is "auto", but plans are not made for ZeRO stage 3, whose gathers of parameters they '
            "do not count; write sizes, codecs and numbers of hot experts, or use stage 0, 1 or 2"
        )
    leaves = [name for name, module in engine.module.named_modules() if getattr(module, "_z3_leaf", False)]
    inside = [leaf for leaf in leaves for name in layers if f"{name}.experts".startswith(f"{leaf}." if leaf else "")]
    if inside or engine._config.zero_config.module_granularity_threshold:
        raise UnsupportedError(
            f"zero_optimization.leaf_module makes one piece of {inside[:1] or 'modules'} under ZeRO stage 3, but "
            f"gradients of experts come back after their module's backward; leave MoE layers out of it, and "
            f"stage3_module_granularity_threshold at 0"
        )


def check_optimizer(engine: Any) -> None:
    """Raise UnsupportedError for an untested wrapper of DeepSpeed; warn once about an untested optimizer."""
    wrapper, basic = type(engine.optimizer), type(getattr(engine, "basic_optimizer", None))
    if wrapper.__module__.startswith("deepspeed.runtime.") and wrapper.__name__ not in TESTED_WRAPPERS:
        raise UnsupportedError(f"{wrapper.__name__} {_UNTESTED}")
    if issubclass(basic, torch.optim.Optimizer) and basic.__name__ not in TESTED_OPTIMIZERS:
        warn_once(
            f"the optimizer {basic.__name__} was not tested, only {', '.join(TESTED_OPTIMIZERS)} were; one that "
            f"treats each element of a parameter alone should do as well"
        )


def refuse_devices(specs: Sequence[LayerSpec]) -> None:
    """Raise UnsupportedError for devices and backends that the transport does not support; warn once about GPUs."""
    devices, backend = sorted({spec.sample.device.type for spec in specs}), backend_name()
    if devices == ["cuda"] and ("gloo" in backend or "nccl" in backend):
        warn_once(
            "training on GPUs was written without one: it has been checked on CPUs only and never run on a GPU "
            "by its authors; compare a few steps with the block disabled before you rely on it (docs/architecture.md)"
        )
    elif devices != ["cpu"] or "gloo" not in backend:
        raise UnsupportedError(
            f"hybridep moves a CPU's tensors over gloo, and a CUDA device's over gloo or NCCL; the model is on "
            f"{devices} and the job's backend is {backend!r}: train on one of these devices over one of its backends, "
            f'or set "hybridep": {{"enabled": false}}'
        )
