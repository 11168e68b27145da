# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank needs for replicas, without allocating them: the same objects, built on tensors without memory."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_hybridep.experts.layout import gather_stages
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.plan.partition import Partition
from ds_hybridep.sync.feedback import Encoding, StepChanges


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Bytes on one rank beside what DeepSpeed holds; packets and other buffers of the moment are not counted.

    replicas: weights of the domain's experts, in the type they are trained in.
    gradient_sums: of those that are trained, fp32.
    codecs: mirrors, replicas in fp32 beside others, residuals with their copy until the step, and encoders' state.
    """

    replicas: int = 0
    gradient_sums: int = 0
    codecs: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.replicas + self.gradient_sums + self.codecs

    def __add__(self, other: "MemoryNeeds") -> "MemoryNeeds":
        return MemoryNeeds(
            replicas=self.replicas + other.replicas,
            gradient_sums=self.gradient_sums + other.gradient_sums,
            codecs=self.codecs + other.codecs,
        )


def most_at_once(layers: Sequence[MemoryNeeds], num_held: int, *, accumulates: bool) -> MemoryNeeds:
    """What transient replicas of these layers need: weights of so many neighbours, and all that codecs keep.

    accumulates: several micro-steps are added up, for which the gradient sums of all layers wait.
    """
    windows = [layers[first : first + num_held] for first in range(len(layers))]
    summed = [layers] if accumulates else windows
    return MemoryNeeds(
        replicas=max((sum(layer.replicas for layer in window) for window in windows), default=0),
        gradient_sums=max((sum(layer.gradient_sums for layer in window) for window in summed), default=0),
        codecs=sum(layer.codecs for layer in layers),
    )


def without_memory(expert: nn.Module) -> nn.Module:
    """A copy of `expert` whose parameters have shapes and types only."""
    shells = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in expert.parameters()
    }
    return copy.deepcopy(expert, shells)  # which finds the parameters copied already


def memory_of_layer(experts: Sequence[nn.Module], partition: Partition, encoding: Encoding) -> MemoryNeeds:
    """What each rank of the partition's group needs for one layer once training has begun.

    Args:
        experts: the e experts of one rank, from `without_memory`.
        partition: of the layer's expert-parallel group.
        encoding: how weights and gradients travel.
    """
    if partition.domain_size == 1:
        return MemoryNeeds()
    rank = partition.group_ranks[0]
    held = Replicas("", experts, partition, gather_stages(partition, rank), rank, encoding, StepChanges())
    held.make_encoders()
    replicas = sum(weights.nbytes for weights in held.weights)
    sums = sum(sums.nbytes for sums in held.sums if sums is not None)
    return MemoryNeeds(replicas=replicas, gradient_sums=sums, codecs=held.num_bytes - replicas - sums)
