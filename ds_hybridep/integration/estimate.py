# SPDX-License-Identifier: Apache-2.0
"""How much memory replicas take, before a job is started: beside DeepSpeed's estimators, in their manner."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from ds_hybridep.plan.partition import Partition
from ds_hybridep.plan.replica_pool import leaving_depth, return_depth
from ds_hybridep.sync.feedback import Encoding, StepChanges
from ds_hybridep.sync.stages import gather_stages


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Bytes on one rank beside what DeepSpeed holds; packets and other buffers of the moment are not counted.

    replicas: weights of the domain's other experts, in the type they are trained in.
    codecs: mirrors, replicas in fp32 beside others, residuals, and encoders' state.
    staging: copies of owned weights that travel as they are, from a step to the next forward.
    gradient_sums: the most that sums of replicas' gradients take in a step, fp32.
    returns: the most that gradients on their way take beside these, and residuals until the step is applied.
    step: the same residuals, and what patches sent last, during the optimizer step.
    host: in host memory, with "state": "host".
    host_returns: likewise, from the return of gradients until the step is applied.
    """

    replicas: int = 0
    codecs: int = 0
    staging: int = 0
    gradient_sums: int = 0
    returns: int = 0
    step: int = 0
    host: int = 0
    host_returns: int = 0

    @property
    def after_step(self) -> int:
        """While new weights travel, on the device."""
        return self.replicas + self.codecs + self.staging

    @property
    def total(self) -> int:
        """The most in a step, on the device."""
        return self.replicas + self.codecs + max(self.staging, self.gradient_sums + self.returns, self.step)


@dataclass(frozen=True, kw_only=True)
class _LayerNeeds:
    """Bytes of one layer; those that are held between steps first.

    sent: what patches sent last, during the optimizer step.
    own_sums: of the owned experts' gradients, while they return; residuals: those of a step, until it is applied.
    """

    replicas: int = 0
    codecs: int = 0
    host: int = 0
    staging: int = 0
    sent: int = 0
    sums: int = 0
    own_sums: int = 0
    residuals: int = 0


DomainSizes = tuple[int, ...]
Layer = tuple[nn.Module, int, int]  # an expert without memory, experts of a rank, ranks of the group


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
    """Print what each rank needs for replicas of the model's experts, for all domain sizes.

    Exact for what stays between steps, and at most a few layers too much for the most in a step.  Codecs that are
    "auto" count as exact.  Expert-parallel groups are taken to be consecutive ranks.  Nothing of that size is
    allocated, and no process group is needed.

    Args:
        model: with `deepspeed.moe.layer.MoE` layers or those that AutoEP has made; with `expert_parallel` one of
            Hugging Face, without adapters of experts.  Frozen parameters count as such.
        block: content of the "hybridep" block; its domain sizes are marked with `*` where they are given.
        world_size: ranks of the job.
        dtype: in which DeepSpeed will train; by default parameters stay as they are.
        accumulation: gradient_accumulation_steps; above 1, gradient sums of all layers wait for the last one.
        expert_parallel: content of the "expert_parallel" block, for a model that AutoEP has yet to change.
        zero_stage: of DeepSpeed; with 3, copies of owned experts stay, for they are what is computed with.

    Returns:
        Needs by domain sizes, one for each level.

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
    """The module as a layer, if it is one of DeepSpeed's."""
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
    """The layers that AutoEP will make of the model, which stays as it is."""
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
    """An expert without memory, of parameters of that shape, type and trainability."""
    return nn.ParameterList(
        nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=is_trained)
        for shape, dtype, is_trained in parameters
    )


def _memory_of_layer(
    experts: Sequence[nn.Module], partition: Partition, encoding: Encoding, *, keeps_own: bool
) -> _LayerNeeds:
    """What each rank of the group needs for one layer, found by building its replicas without memory.

    keeps_own: copies of the owned experts stay as long as those of others.
    """
    if partition.domain_size == 1:
        return _LayerNeeds()
    rank = partition.group_ranks[0]
    held = Replicas("", experts, partition, gather_stages(partition, rank), rank, encoding, StepChanges())
    held.make_encoders()
    replicas = sum(weights.nbytes for weights in held.weights)
    codecs = held.num_bytes - replicas
    if keeps_own or held.sends_own_slot:
        held.own.make_room(trainable_only=not keeps_own)
    staging = sum(weights.nbytes for weights in held.weights) - replicas
    own_bytes = sum(weights.nbytes for weights in held.values(held.replica_slots[0], trainable_only=True))
    encoders = held.feedback.encoders.values() if held.feedback is not None else ()
    slot_sums = sum(part.fp32_bytes for part in held.parts)
    return _LayerNeeds(
        replicas=replicas + (staging if keeps_own else 0),
        codecs=codecs,
        host=held.num_host_bytes,
        staging=0 if keeps_own else staging,
        sent=0 if keeps_own or not held.sends_patches else own_bytes,
        sums=slot_sums * len(held.replica_slots),
        own_sums=slot_sums,
        residuals=sum(residual.nbytes for encoder in encoders for residual in encoder.residuals),
    )


def _most_at_once(
    layers: Sequence[_LayerNeeds], depth: int, leaving: int, *, is_transient: bool, is_on_host: bool, accumulates: bool
) -> MemoryNeeds:
    """What replicas of these layers need, of which gradients of `depth` + 1 neighbours return at a time.

    leaving: as `leaving_depth` says.
    is_transient: weights of as many are held.
    accumulates: several micro-steps are added up, for which the gradient sums of all layers wait.
    """

    def most(name: str, *, of_all: bool = False, beside: int = depth) -> int:
        sizes = [getattr(layer, name) for layer in layers]
        return max((sum(sizes) if of_all else sum(sizes[at : at + beside + 1]) for at in range(len(sizes))), default=0)

    # A layer whose gradients were sent has new residuals in the place of larger sums.
    in_flight, of_step = (0 if is_on_host else most("residuals", of_all=of_all) for of_all in (not accumulates, True))
    return MemoryNeeds(
        replicas=most("replicas", of_all=not is_transient),
        codecs=most("codecs", of_all=True),
        staging=most("staging", of_all=True),
        gradient_sums=most("sums", of_all=accumulates, beside=leaving),
        returns=most("own_sums") + in_flight,
        step=of_step + most("sent", of_all=True),
        host=most("host", of_all=True),
        host_returns=most("residuals", of_all=True) if is_on_host else 0,
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
                keeps_own=is_partitioned or config.replicas == "transient",
            )
            for expert, num_local, ep in layers
        ]
        depth, is_transient = config.advanced.prefetch_depth, config.replicas == "transient"
        if not is_transient:
            depth = return_depth(len(by_layer), max(one.own_sums for one in by_layer), depth)
        needs[sizes] = _most_at_once(
            by_layer,
            depth,
            leaving_depth(sum(size > 1 for size in sizes), depth, config.advanced.prefetch_depth),
            is_transient=is_transient,
            is_on_host=encoding.is_on_host,
            accumulates=accumulation > 1,
        )
    print(
        f"Memory needed on each rank for replicas of experts, beside what DeepSpeed needs, in MiB:\n"
        f"{world_size} ranks, {len(layers)} MoE layers, {config.replicas} replicas\n"
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
    """A codec that the job is to choose counts as none."""
    levels = []
    for level in config.levels:
        planned = [key for key in ("weight_codec", "gradient_codec") if getattr(level, key) == AUTO_CODEC]
        levels.append(level.model_copy(update=dict.fromkeys(planned, IDENTITY)))
    return config.model_copy(update={"levels": tuple(levels)})
