# SPDX-License-Identifier: Apache-2.0
"""The memory of replicas, counted by building them without memory: what the planner's formulas must say."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import nn

from ds_hybridep.config import parse_config
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


def needs_of_model(
    model: nn.Module, block: Mapping[str, Any], world_size: int, *, accumulation: int = 1, zero_stage: int = 0
) -> dict[DomainSizes, MemoryNeeds]:
    """Of a model with layers of DeepSpeed's MoE or of AutoEP, for all domain sizes."""
    layers = [layer for module in model.modules() for layer in _layers_of(module)]
    return needs_of_layers(layers, block, world_size, accumulation=accumulation, is_partitioned=zero_stage == 3)


def _layers_of(module: nn.Module) -> list[Layer]:
    """Return the module as a `Layer` if it is one of DeepSpeed's MoE layers; else an empty list."""
    layer: Any = module  # AutoEP's class does not exist everywhere
    if isinstance(module, MoE):
        pairs = [(p, p.shape) for p in module.deepspeed_moe.experts.deepspeed_experts[0].parameters()]
    elif is_autoep_layer(module):
        pairs = [(p, full_shape(p)[1:]) for p in layer.experts.parameters()]
    else:
        return []
    expert = shell([(shape, p.dtype, p.requires_grad) for p, shape in pairs])
    return [(expert, layer.num_local_experts, layer.ep_size)]


def shell(parameters: Iterable[tuple[Sequence[int], torch.dtype, bool]]) -> nn.ParameterList:
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
    if keeps_own or held.sends_own_slot(is_exact=False):
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


def needs_of_layers(
    layers: Sequence[Layer], block: Mapping[str, Any], world_size: int, *, accumulation: int, is_partitioned: bool
) -> dict[DomainSizes, MemoryNeeds]:
    """By domain sizes; expert-parallel groups are consecutive ranks."""
    itemsize = next(layers[0][0].parameters()).element_size()
    config = parse_config(block, world_size=world_size).with_dtype(itemsize)
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
    return needs
