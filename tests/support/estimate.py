# SPDX-License-Identifier: Apache-2.0
"""The memory of replicas, counted by building them without memory: what the planner's formulas must say."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import nn

from ds_hybridep.config import parse_config
from ds_hybridep.deepspeed.autoep import is_autoep_layer
from ds_hybridep.experts.partitioned import full_shape
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.geometry.cluster import divisors
from ds_hybridep.geometry.packets import return_depth
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.plan.plan import plan_of
from ds_hybridep.runtime.build import encoding_of
from ds_hybridep.sync.encoding import Encoding
from ds_hybridep.sync.stages import gather_stages
from ds_hybridep.sync.transaction import Transaction

DomainSizes = tuple[int, ...]
Layer = tuple[nn.Module, int, int]  # an expert without memory, experts per rank, ranks in the group


@dataclass(frozen=True, kw_only=True)
class LayerNeeds:
    """Bytes of one layer on one rank.  The fields that last between steps come first.

    replicas: weights of the domain's other experts, in the type they are trained in.
    codecs, host: mirrors, fp32 values of 16-bit replicas, residuals, and encoders' state, on the device and the host.
    staging: copies of owned weights that travel unencoded, from a step to the next forward.
    sent: what patches sent last, during the optimizer step.
    sums: of replicas' gradients, fp32.
    own_sums: sums of the owned experts' gradients while they return.
    residuals: of a step, until it is applied.
    """

    replicas: float = 0
    codecs: float = 0
    host: float = 0
    staging: float = 0
    sent: float = 0
    sums: float = 0
    own_sums: float = 0
    residuals: float = 0


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Bytes on one rank beside what DeepSpeed holds, without packets and other short-lived buffers.

    replicas, codecs, staging, host: of all layers, as in `LayerNeeds`.
    gradient_sums: the most that sums of replicas' gradients take in a step.
    returns: the most that returning gradients take beside these sums, and residuals until the step is applied.
    step: what patches sent last, during the optimizer step.
    host_returns: residuals in host memory, from the return of gradients until the step is applied.
    """

    replicas: float = 0
    codecs: float = 0
    staging: float = 0
    gradient_sums: float = 0
    returns: float = 0
    step: float = 0
    host: float = 0
    host_returns: float = 0

    @property
    def after_step(self) -> float:
        """Bytes on the device while new weights travel."""
        return self.replicas + self.codecs + self.staging

    @property
    def total(self) -> float:
        """The most bytes on the device in a step."""
        return self.replicas + self.codecs + max(self.staging, self.gradient_sums + self.returns, self.step)


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
    held = Replicas(
        "", experts, partition, gather_stages(partition, rank), rank=rank, encoding=encoding, transaction=Transaction()
    )
    if held.codecs is not None:
        for stage in held.stages:
            for slot in (slot for peer in stage.peers for slot in peer.slots_there):
                held.codecs.make_residuals(slot, stage.level)
    replicas = sum(weights.nbytes for weights in held.weights)
    codecs = held.num_bytes - replicas
    if keeps_own or held.sends_own_slot(is_exact=False):
        held.own.make_room(trainable_only=not keeps_own)
    staging = sum(weights.nbytes for weights in held.weights) - replicas
    own_bytes = sum(weights.nbytes for weights in held.values(held.replica_slots[0], trainable_only=True))
    slot_sums = sum(part.fp32_bytes for part in held.parts)
    return LayerNeeds(
        replicas=replicas + (staging if keeps_own else 0),
        codecs=codecs,
        host=held.num_host_bytes,
        staging=0 if keeps_own else staging,
        sent=0 if keeps_own or not held.sends_patches else own_bytes,
        sums=slot_sums * len(held.replica_slots),
        own_sums=slot_sums,
        residuals=0 if held.codecs is None else sum(one.nbytes for one in held.codecs.feedback.residuals),
    )


def needs_of_layers(
    layers: Sequence[Layer], block: Mapping[str, Any], world_size: int, *, accumulation: int, is_partitioned: bool
) -> dict[DomainSizes, MemoryNeeds]:
    """By domain sizes; expert-parallel groups are consecutive ranks."""
    itemsize = next(layers[0][0].parameters()).element_size()
    config = parse_config(block, world_size=world_size).with_dtype(itemsize)
    cluster = config.cluster()
    alone = (1,) * len(cluster.levels)
    spans = [Partition.build(cluster, range(ep), alone).spans for _, _, ep in layers]
    encoding = encoding_of(plan_of(config, spans[0], "direct"), config.advanced.kernels)
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


def needs_of(
    layers: Sequence[LayerNeeds],
    *,
    depth: int,
    prefetch_depth: int,
    num_levels: int,
    is_on_host: bool,
    accumulates: bool,
) -> MemoryNeeds:
    """What replicas of these layers need.

    depth: layers between the start of a gradient's return and the wait for it; see `geometry.packets.return_depth`.
    num_levels: levels that a domain spans.
    is_on_host: the host keeps what codecs keep.
    accumulates: several micro-steps are added up, and the gradient sums of all layers wait for the last one.
    """

    def most(name: str, beside: int | None = None) -> float:
        """Of `beside` + 1 neighbouring layers; None: of all layers."""
        ends: list[float] = [0, *accumulate(getattr(layer, name) for layer in layers)]
        width = len(layers) if beside is None else min(beside + 1, len(layers))
        return max(ends[end] - ends[end - width] for end in range(width, len(ends)))

    # Once a layer's gradients are sent, new residuals take the place of its larger sums.
    in_flight = 0 if is_on_host else most("residuals", depth if accumulates else None)
    # Sums that cross one level are in a message as soon as their return starts; others may wait for earlier layers.
    leaving = None if accumulates else prefetch_depth if num_levels == 1 else depth
    return MemoryNeeds(
        replicas=most("replicas"),
        codecs=most("codecs"),
        staging=most("staging"),
        gradient_sums=most("sums", leaving),
        returns=most("own_sums", depth) + in_flight,
        step=most("sent"),
        host=most("host"),
        host_returns=most("residuals") if is_on_host else 0,
    )
