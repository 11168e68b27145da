# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory of replicas before a job starts, in the style of DeepSpeed's own estimators."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import nn

from ds_hybridep.config import HybridEPConfig, parse_config
from ds_hybridep.config_codecs import AUTO_CODEC, IDENTITY
from ds_hybridep.errors import ConfigError
from ds_hybridep.experts.partitioned import full_shape
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.integration.autoep import is_autoep_layer
from ds_hybridep.integration.build import encoding_of
from ds_hybridep.plan.cluster import divisors
from ds_hybridep.plan.depth import return_depth
from ds_hybridep.plan.memory import LayerNeeds, MemoryNeeds, needs_of
from ds_hybridep.plan.partition import Partition
from ds_hybridep.sync.feedback import Encoding
from ds_hybridep.sync.gradients import StepChanges
from ds_hybridep.sync.stages import gather_stages

DomainSizes = tuple[int, ...]
Layer = tuple[nn.Module, int, int]  # an expert without memory, experts per rank, ranks in the group


def estimate_hybridep_mem_needs_all_live(
    model: nn.Module,
    block: Mapping[str, Any],
    world_size: int,
    *,
    dtype: torch.dtype | None = None,
    accumulation: int = 1,
    expert_parallel: Mapping[str, Any] | None = None,
    zero_stage: int = 0,
) -> dict[DomainSizes, MemoryNeeds]:
    """Print the memory that each rank needs for replicas of the model's experts, for all domain sizes.

    Memory that stays between steps is exact.  The most in a step may be a few layers too high.  Codecs that are
    "auto" count as exact.  Expert-parallel groups are assumed to be consecutive ranks.  The function allocates
    nothing of that size, and needs no process group.

    Args:
        model: has layers of `deepspeed.moe.layer.MoE` or of AutoEP; with `expert_parallel`, a model of Hugging Face
            without adapters of experts.  Frozen parameters count as frozen.
        block: content of the "hybridep" block; the output marks its domain sizes with `*` if it gives them.
        world_size: number of ranks of the job.
        dtype: type in which DeepSpeed will train; by default that of each parameter.
        accumulation: gradient_accumulation_steps; above 1, gradient sums of all layers wait for the last micro-step.
        expert_parallel: content of the "expert_parallel" block, for a model that AutoEP has not changed yet.
        zero_stage: ZeRO stage of DeepSpeed; with 3, copies of owned experts stay, because the computation uses them.

    Returns:
        Memory needs by domain sizes; each key has one size for each level.

    Raises:
        ConfigError, PlanError: the block is wrong or does not fit the model.
    """
    if expert_parallel is None:
        layers = [layer for module in model.modules() for layer in _layers_of(module, dtype)]
    else:
        layers = _future_layers(model, expert_parallel, dtype)
    if not layers:
        raise ConfigError(
            "the model has no deepspeed.moe.layer.MoE layer and none of AutoEP, so there are no replicas to estimate; "
            "for a Hugging Face model give expert_parallel, the content of that block of its ds_config"
        )
    return _print_needs(layers, block, world_size, accumulation, is_partitioned=zero_stage == 3)


def _layers_of(module: nn.Module, dtype: torch.dtype | None) -> list[Layer]:
    """Return the module as a `Layer` if it is one of DeepSpeed's MoE layers; else an empty list."""
    layer: Any = module  # AutoEP's class does not exist everywhere
    if isinstance(module, MoE):
        pairs = [(p, p.shape) for p in module.deepspeed_moe.experts.deepspeed_experts[0].parameters()]
    elif is_autoep_layer(module):
        pairs = [(p, full_shape(p)[1:]) for p in layer.experts.parameters()]
    else:
        return []
    expert = _shell([(shape, dtype or p.dtype, p.requires_grad) for p, shape in pairs])
    return [(expert, layer.num_local_experts, layer.ep_size)]


def _future_layers(model: nn.Module, expert_parallel: Mapping[str, Any], dtype: torch.dtype | None) -> list[Layer]:
    """Return the layers that AutoEP will make of the model, without changing the model."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.moe.ep_repack import repack_expert_requires_grad_flags

    settings = parse_autoep_config(dict(expert_parallel))
    layers: list[Layer] = []
    for spec in AutoEP(model, settings).ep_parser():
        if spec.num_experts % settings.autoep_size:
            raise ConfigError(
                f"{spec.moe_module_name}: {spec.num_experts} experts cannot be shared evenly by autoep_size "
                f"{settings.autoep_size}; choose a divisor"
            )
        hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
        source = model.get_submodule(spec.moe_module_name).get_submodule(spec.experts_name)
        num_local = spec.num_experts // settings.autoep_size
        is_trained = repack_expert_requires_grad_flags(source, spec, 0, settings.autoep_size)
        kept_in = dtype or next(source.parameters()).dtype
        shapes = (ffn, hidden), (hidden, ffn), (ffn, hidden)  # w1, w2, w3
        expert = _shell([(shape, kept_in, flag) for shape, flag in zip(shapes, is_trained, strict=True)])
        layers.append((expert, num_local, settings.autoep_size))
    return layers


def _shell(parameters: Iterable[tuple[Sequence[int], torch.dtype, bool]]) -> nn.ParameterList:
    """Return an expert without memory, with parameters of these shapes, types and trainability."""
    return nn.ParameterList(
        nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=is_trained)
        for shape, dtype, is_trained in parameters
    )


def _memory_of_layer(
    experts: Sequence[nn.Module], partition: Partition, encoding: Encoding, *, keeps_own: bool
) -> LayerNeeds:
    """Return what each rank of the group needs for one layer, by building its replicas without memory.

    keeps_own: copies of the owned experts stay as long as copies of other experts.
    """
    if partition.domain_size == 1:
        return LayerNeeds()
    rank = partition.group_ranks[0]
    held = Replicas("", experts, partition, gather_stages(partition, rank), rank, encoding, StepChanges())
    held.make_senders()
    replicas = sum(weights.nbytes for weights in held.weights)
    codecs = held.num_bytes - replicas
    if keeps_own or held.sends_own_slot:
        held.own.make_room(trainable_only=not keeps_own)
    staging = sum(weights.nbytes for weights in held.weights) - replicas
    own_bytes = sum(weights.nbytes for weights in held.values(held.replica_slots[0], trainable_only=True))
    sent = held.feedback.gradients.sent.values() if held.feedback is not None else ()
    slot_sums = sum(part.fp32_bytes for part in held.parts)
    return LayerNeeds(
        replicas=replicas + (staging if keeps_own else 0),
        codecs=codecs,
        host=held.num_host_bytes,
        staging=0 if keeps_own else staging,
        sent=0 if keeps_own or not held.sends_patches else own_bytes,
        sums=slot_sums * len(held.replica_slots),
        own_sums=slot_sums,
        residuals=sum(piece.residual.nbytes for piece in sent),
    )


def _print_needs(
    layers: Sequence[Layer], block: Mapping[str, Any], world_size: int, accumulation: int, *, is_partitioned: bool
) -> dict[DomainSizes, MemoryNeeds]:
    itemsize = next(layers[0][0].parameters()).element_size()
    config = _exact_where_planned(parse_config(block, world_size=world_size).with_dtype(itemsize))
    cluster, encoding = config.cluster(), encoding_of(config)
    alone = (1,) * len(cluster.levels)
    spans = [Partition.build(cluster, range(ep), alone).spans for _, _, ep in layers]
    common = [math.gcd(*level_spans) for level_spans in zip(*spans, strict=True)]
    needs: dict[DomainSizes, MemoryNeeds] = {}
    for sizes in itertools.product(*(divisors(span) for span in common)):
        by_layer = [
            _memory_of_layer(
                [expert] * num_local,
                Partition.build(cluster, range(ep), sizes),
                encoding,
                keeps_own=is_partitioned,
            )
            for expert, num_local, ep in layers
        ]
        depth = return_depth(len(by_layer), max(one.own_sums for one in by_layer), config.advanced.prefetch_depth)
        needs[sizes] = needs_of(
            by_layer,
            depth=depth,
            prefetch_depth=config.advanced.prefetch_depth,
            num_levels=sum(size > 1 for size in sizes),
            is_on_host=encoding.is_on_host,
            accumulates=accumulation > 1,
        )
    print(
        f"Memory needed on each rank for replicas of experts, beside what DeepSpeed needs, in MiB:\n"
        f"{world_size} ranks, {len(layers)} MoE layers\n"
        f"  {'domain sizes':16} {'replicas':>10} {'codecs':>10} {'gradient sums':>14} {'returns':>10} {'all':>10} "
        f"{'host':>10}"
    )
    for sizes, need in needs.items():
        host = need.host + need.host_returns
        columns = (need.replicas, need.codecs, need.gradient_sums, need.returns, need.total, host)
        mib = [f"{num_bytes / 2**20:.1f}" for num_bytes in columns]
        mark = "*" if sizes == config.domain_sizes else " "
        print(
            f"{mark} {list(sizes)!s:16} {mib[0]:>10} {mib[1]:>10} {mib[2]:>14} {mib[3]:>10} {mib[4]:>10} {mib[5]:>10}"
        )
    return needs


def _exact_where_planned(config: HybridEPConfig) -> HybridEPConfig:
    """Return the settings with no codec where the job is to choose one."""
    levels = []
    for level in config.levels:
        planned = [key for key in ("weight_codec", "gradient_codec") if getattr(level, key) == AUTO_CODEC]
        levels.append(level.model_copy(update=dict.fromkeys(planned, IDENTITY)))
    return config.model_copy(update={"levels": tuple(levels)})
