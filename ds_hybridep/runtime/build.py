# SPDX-License-Identifier: Apache-2.0
"""Makes the layers of a plan from the settings and the model's MoE layers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import make_codec, make_weight_codec
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.config_codecs import IDENTITY
from ds_hybridep.experts.gradient_return import GradientReturn
from ds_hybridep.experts.layer_spec import LayerSpec, check_experts
from ds_hybridep.experts.migration import LayerExperts, MigrationManager
from ds_hybridep.experts.partitioned import full_shape
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.experts.slots import Block, lay_out
from ds_hybridep.geometry.packets import return_depth
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.geometry.token_route import TokenExchange, build_route, choose_exchange
from ds_hybridep.kernels import Kernels, Mode
from ds_hybridep.plan.plan import JobPlan, plan_of
from ds_hybridep.sync.encoding import Encoding, no_master, no_scale
from ds_hybridep.sync.stages import connect, gather_stages
from ds_hybridep.sync.transaction import Transaction
from ds_hybridep.sync.transfers import StagePipeline
from ds_hybridep.sync.undelivered import GradientTarget, stacked
from ds_hybridep.tokens.exchange import build_exchanges
from ds_hybridep.tokens.layer import HeldExperts, HybridMoE
from ds_hybridep.transport.channels import Transport

DENSE = "dense parameters"  # name of the group of ranks that hold what all ranks do

# If "token_exchange" is "auto", the exchange is chosen for this number of tokens per rank.  Only the ratio of bytes to
# latency depends on it.
TYPICAL_NUM_TOKENS = 4096


@dataclass(frozen=True)
class Facts:
    """What all plans of one engine have in common.

    specs: the model's MoE layers, in the order in which they run.
    is_boundary: returns True if the running backward is the last before the optimizer step.
    sync_groups: returns, by name, the ranks that hold the same parameters, if settings synchronise these by level.
    parameters: returns the model's, by name.
    master_of, loss_scale, sum_dtype: as in `Encoding`.
    """

    specs: tuple[LayerSpec, ...]
    is_boundary: Callable[[], bool]
    sync_groups: Callable[[HybridEPConfig], Mapping[str, tuple[int, ...]]] = lambda _: {}
    parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]] = tuple
    master_of: Callable[[nn.Parameter], Tensor | None] = no_master
    loss_scale: Callable[[], float] = no_scale
    sum_dtype: torch.dtype | None = None

    def complete(self, encoding: Encoding) -> Encoding:
        """Return an encoding with what depends on the engine."""
        return replace(encoding, master_of=self.master_of, loss_scale=self.loss_scale, sum_dtype=self.sum_dtype)


@dataclass(frozen=True)
class PlannedLayer:
    """A layer, its plan, and the domains that this gives to the ranks of its group."""

    spec: LayerSpec
    partition: Partition
    plan: JobPlan

    @property
    def exchange(self) -> TokenExchange | None:
        """The token exchange; None: DeepSpeed's own."""
        return None if self.plan.token_exchange == "deepspeed" else self.plan.token_exchange

    @property
    def hot_level(self) -> int | None:
        """Level inside which it may have hot experts."""
        return None if self.plan.hot is None else self.plan.hot.level

    @property
    def of_hot(self) -> Partition:
        """The domains of hot experts, which are whole at `hot_level`; without one, those of all experts."""
        partition, sizes = self.partition, list(self.partition.domain_sizes)
        if self.hot_level is not None:
            sizes[self.hot_level] = partition.spans[self.hot_level]
        return Partition.build(partition.cluster, partition.group_ranks, sizes)

    @property
    def _blocks(self) -> Sequence[Block]:
        return lay_out(self.spec.experts[0], is_grouped=self.spec.is_grouped)

    def canonical(self) -> dict[str, Any]:
        """Return what all ranks must agree on, JSON-able."""
        return {
            "name": self.spec.name,
            "num_experts": self.spec.num_experts,
            "top_k": self.spec.top_k,
            "ep_size": len(self.spec.group_ranks),
            "spans": list(self.partition.spans),
            "domain_sizes": list(self.partition.domain_sizes),
            "token_exchange": self.exchange,
            **({} if self.hot_level is None else {"hot_level": self.hot_level}),
            "expert": [
                [str(block.dtype), block.is_trainable, [[piece.name, list(piece.shape)] for piece in block.slices]]
                for block in self._blocks
            ],
        }

    def targets(self, rank: int, world_size: int) -> Iterator[GradientTarget]:
        """Yield the parameters of this rank's experts, for what codecs have not delivered."""
        spec = self.spec
        first = spec.group_ranks.index(rank) * spec.num_local
        share = len(spec.group_ranks) / world_size
        for at, module in enumerate(spec.experts):
            for name, parameter in module.named_parameters():
                num_elements = full_shape(parameter).numel()
                start = first * num_elements // spec.num_local if spec.is_grouped else (first + at) * num_elements
                if parameter.requires_grad:
                    yield GradientTarget(stacked(spec.name, name), start, start + num_elements, parameter, share)


def plan_layer(config: HybridEPConfig, spec: LayerSpec) -> PlannedLayer:
    """Return a layer with the plan that the settings give it."""
    partition = Partition.build(config.cluster(), spec.group_ranks, config.domain_sizes)
    exchange = choose_exchange(
        partition,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        row_bytes=spec.hidden * spec.sample.element_size(),
        num_tokens=TYPICAL_NUM_TOKENS,
    )
    plan = plan_of(config, partition.spans, exchange)
    if partition.domain_size > 1 or plan.hot is not None:
        check_experts(spec)
    return PlannedLayer(spec, partition, plan)


def build_layers(
    planned: Sequence[PlannedLayer],
    config: HybridEPConfig,
    transport: Transport,
    kernels: Kernels,
    *,
    encoding: Encoding,
    transaction: Transaction,
    is_boundary: Callable[[], bool],
) -> tuple[dict[str, HybridMoE], MigrationManager]:
    """Return the layers of one plan by name, and the manager of those that have replicas.

    Makes channels for each layer: first for tokens, then for weights and gradients by level.  All ranks must call
    with the same layers, none of which leaves its tokens to DeepSpeed.
    """
    # 1. Connections.  They come first, so that nobody waits to connect to a rank that fails in a later part.
    connected = []
    formats = [level.row_format for level in config.levels]
    for layer in planned:
        assert layer.exchange is not None
        spec, device, rank = layer.spec, layer.spec.sample.device, transport.rank
        route = build_route(layer.partition, rank, spec.num_experts, layer.exchange)
        exchanges = build_exchanges(
            route, transport, spec.group, kernels, layer=spec.name, device=device, level_formats=formats
        )
        if layer.hot_level is not None:
            transport.channel("loads", spec.group_ranks, background=True)
            transport.channel("hand_over", layer.of_hot.domain_ranks(rank))
        stages = connect(gather_stages(layer.of_hot, rank, layer.hot_level), transport, spec.group, device)
        connected.append((layer, exchanges, stages))
    # 2. Memory.
    pipelines: dict[str, tuple[StagePipeline, StagePipeline]] = {}
    experts: dict[str, LayerExperts] = {}
    for layer, _, stages in connected:
        if stages:  # else every domain is one rank
            spec = layer.spec
            replicas = Replicas(
                spec.name, spec.experts, layer.of_hot, stages, rank=transport.rank, encoding=encoding,
                transaction=transaction, is_grouped=spec.is_grouped, hot_level=layer.hot_level,
            )  # fmt: skip
            if spec.group not in pipelines:
                pipelines[spec.group] = StagePipeline(transport), StagePipeline(transport)
            weights, gradients = pipelines[spec.group]
            experts[spec.name] = LayerExperts(replicas, weights, GradientReturn(replicas, gradients, is_boundary))
    most_bytes = max((one.replicas.layout.sum_bytes for one in experts.values()), default=0)
    depth = return_depth(len(experts), most_bytes, config.advanced.prefetch_depth)
    migration = MigrationManager(transport, list(experts.values()), depth)
    # 3. Layers.
    positions = {name: position for position, name in enumerate(experts)}
    built = {}
    for layer, exchanges, _ in connected:
        spec, partition = layer.spec, layer.partition
        in_domain = partition.domain_experts(partition.domain_index(transport.rank), spec.num_experts)
        by_slot = [in_domain[first : first + spec.num_local] for first in range(0, len(in_domain), spec.num_local)]
        position = positions.get(spec.name, -1)
        built[spec.name] = HybridMoE(
            name=spec.name,
            experts=spec.experts,
            num_local=spec.num_local,
            exchanges=exchanges,
            held=HeldExperts.of(by_slot, spec.num_experts, spec.sample.device),
            kernels=kernels,
            migration=migration if position >= 0 else None,
            position=position,
            call=spec.call,
            weighs_inputs=spec.weighs_inputs,
        )
    return built, migration


def describe(
    planned: Sequence[PlannedLayer], config: HybridEPConfig, backends: Sequence[str], kernels: str, *, memory: str
) -> str:
    """Describe a plan in one line, for the log."""
    first = planned[0]
    levels = list(zip(config.levels, first.plan.domain_sizes, first.plan.domain_counts, strict=True))
    said = [
        f"hybridep: {len(planned)} MoE layers",
        f"domain sizes {', '.join(f'{level.name} {size}' for level, size, _ in levels)}",
        f"tokens {first.plan.token_exchange}",
        f"{kernels} kernels",
        memory,
    ]
    if first.spec.sample.is_cuda:
        said.append(f"over {', '.join(backends)}")
    if first.plan.dense_sync == "hierarchical":
        said.append("dense gradients and parameters by level")
    if (at := config.hot_level) is not None:
        effect = "" if first.plan.hot is not None else " (no effect: no tokens of ours cross it)"
        most = config.levels[at].hot_experts
        said.append(f"hot experts {most} over {config.levels[at].name}{effect}")
    said += config.describe_codecs()
    for level, _, count in levels:
        if level.row_format is not None:
            effect = "" if first.exchange and count > 1 else " (no effect: no tokens of ours cross it)"
            said.append(f"dispatched tokens {level.token_codec.type} over {level.name}{effect}")
    return ", ".join(said)


def encoding_of(plan: JobPlan, kernels: Mode, *, is_dense: bool = False) -> Encoding:
    """Return the encoding of experts, or of dense parameters; it has no `master_of` and `loss_scale` yet."""
    weights = [one.dense_weight if is_dense else one.weight for one in plan.codecs]
    gradients = [one.dense_gradient if is_dense else one.gradient for one in plan.codecs]
    return Encoding(
        tuple(None if one == IDENTITY else make_weight_codec(one, kernels=kernels) for one in weights),
        tuple(None if one == IDENTITY else make_codec(one, kernels=kernels) for one in gradients),
        is_on_host=plan.state == "host",
    )
