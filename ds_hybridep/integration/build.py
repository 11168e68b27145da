# SPDX-License-Identifier: Apache-2.0
"""Makes the layers of a plan from the settings and the model's MoE layers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ds_hybridep.codecs import make_codec, make_weight_codec
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.config_codecs import IDENTITY
from ds_hybridep.experts.layer_spec import LayerSpec, check_experts
from ds_hybridep.experts.migration import LayerExperts, MigrationManager
from ds_hybridep.experts.partitioned import full_shape
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.experts.slots import lay_out
from ds_hybridep.kernels import Kernels
from ds_hybridep.plan.depth import return_depth
from ds_hybridep.plan.partition import Partition
from ds_hybridep.plan.token_route import TokenExchange, build_route, choose_exchange
from ds_hybridep.sync.feedback import Encoding
from ds_hybridep.sync.gradients import StepChanges
from ds_hybridep.sync.stages import GatherStage, connect, gather_stages
from ds_hybridep.sync.transfers import StagePipeline
from ds_hybridep.sync.undelivered import Target, stacked
from ds_hybridep.tokens.exchange import Exchange, build_exchanges
from ds_hybridep.tokens.layer import HybridMoE, expert_to_slot
from ds_hybridep.transport.channels import Transport

# If "token_exchange" is "auto", the exchange is chosen for this number of tokens per rank.  Only the ratio of bytes to
# latency depends on it.
TYPICAL_NUM_TOKENS = 4096


@dataclass(frozen=True)
class PlannedLayer:
    """A layer with its domains and its token exchange (None: DeepSpeed's own)."""

    spec: LayerSpec
    partition: Partition
    exchange: TokenExchange | None

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
            "expert": [
                [str(block.dtype), block.is_trainable, [[piece.name, list(piece.shape)] for piece in block.slices]]
                for block in lay_out(self.spec.experts[0], is_grouped=self.spec.is_grouped)
            ],
        }

    def targets(self, rank: int, world_size: int) -> Iterator[Target]:
        """Yield the parameters of this rank's experts, for what codecs have not delivered."""
        spec = self.spec
        first = spec.group_ranks.index(rank) * spec.num_local
        share = len(spec.group_ranks) / world_size
        for at, module in enumerate(spec.experts):
            for name, parameter in module.named_parameters():
                num_elements = full_shape(parameter).numel()
                start = first * num_elements // spec.num_local if spec.is_grouped else (first + at) * num_elements
                if parameter.requires_grad:
                    yield Target(stacked(spec.name, name), start, start + num_elements, parameter, share)


class Builder:
    """Makes the layers of one plan and what moves their experts."""

    def __init__(
        self,
        config: HybridEPConfig,
        transport: Transport,
        kernels: Kernels,
        encoding: Encoding,
        changes: StepChanges,
        is_boundary: Callable[[], bool],
    ) -> None:
        self._config, self._transport, self._kernels = config, transport, kernels
        self._encoding, self._changes, self._is_boundary = encoding, changes, is_boundary
        self._pipelines: dict[str, tuple[StagePipeline, StagePipeline]] = {}  # by expert-parallel group

    def build(self, layers: Sequence[PlannedLayer]) -> tuple[dict[str, HybridMoE], MigrationManager | None]:
        """Return the layers by name, and the manager of the layers that have replicas.

        Makes channels for each layer: first for tokens, then for weights and gradients by level.  All ranks must call
        with the same layers.
        """
        # 1. Connections.  They come first, so that nobody waits to connect to a rank that fails in a later part.
        connected = [(self._exchanges_of(layer), self._stages_of(layer)) for layer in layers]
        # 2. Memory.
        experts = {
            layer.spec.name: self._experts_of(layer, stages)
            for layer, (_, stages) in zip(layers, connected, strict=True)
            if stages
        }
        migration: MigrationManager | None = None
        if experts:
            most_bytes = max(one.replicas.layout.sum_bytes for one in experts.values())
            depth = return_depth(len(experts), most_bytes, self._config.advanced.prefetch_depth)
            migration = MigrationManager(self._transport, list(experts.values()), depth, self._is_boundary)
        positions = {name: position for position, name in enumerate(experts)}
        built = {
            layer.spec.name: self._layer_of(layer, route, migration, positions.get(layer.spec.name, -1))
            for layer, (route, _) in zip(layers, connected, strict=True)
        }
        return built, migration

    def _exchanges_of(self, layer: PlannedLayer) -> tuple[Exchange, ...]:
        spec = layer.spec
        assert layer.exchange is not None
        stages = build_route(layer.partition, self._transport.rank, spec.num_experts, layer.exchange)
        return build_exchanges(
            stages, self._transport, spec.group, self._kernels, spec.name, spec.sample.device,
            level_formats=[level.row_format for level in self._config.levels],
        )  # fmt: skip

    def _stages_of(self, layer: PlannedLayer) -> tuple[GatherStage, ...]:
        """Return the stages of a gather with their channels; empty if every domain is one rank."""
        stages = gather_stages(layer.partition, self._transport.rank)
        return connect(stages, self._transport, layer.spec.group, layer.spec.sample.device)

    def _experts_of(self, layer: PlannedLayer, stages: tuple[GatherStage, ...]) -> LayerExperts:
        spec = layer.spec
        replicas = Replicas(
            spec.name, spec.experts, layer.partition, stages, self._transport.rank, self._encoding, self._changes,
            is_grouped=spec.is_grouped,
        )  # fmt: skip
        if spec.group not in self._pipelines:
            self._pipelines[spec.group] = StagePipeline(self._transport), StagePipeline(self._transport)
        return LayerExperts(replicas, *self._pipelines[spec.group])

    def _layer_of(
        self,
        layer: PlannedLayer,
        exchanges: tuple[Exchange, ...],
        migration: MigrationManager | None,
        position: int,
    ) -> HybridMoE:
        spec, partition = layer.spec, layer.partition
        domain = partition.domain_index(self._transport.rank)
        experts = partition.domain_experts(domain, spec.num_experts)
        return HybridMoE(
            name=spec.name,
            experts=spec.experts,
            num_local=spec.num_local,
            exchanges=exchanges,
            expert_to_slot=expert_to_slot(experts, spec.num_experts, spec.sample.device),
            num_slots=partition.domain_size,
            kernels=self._kernels,
            domain_experts=tuple(experts),
            migration=migration if position >= 0 else None,
            position=position,
            call=spec.call,
            weighs_inputs=spec.weighs_inputs,
        )


def describe(
    planned: Sequence[PlannedLayer], config: HybridEPConfig, backends: Sequence[str], kernels: str, memory: str
) -> str:
    """Describe a plan in one line, for the log."""
    first = planned[0]
    names = [level.name for level in config.levels]
    domains = ", ".join(f"{n} {s}" for n, s in zip(names, first.partition.domain_sizes, strict=True))
    dense = ", dense gradients and parameters by level" if config.dense_sync == "hierarchical" else ""
    over = f", over {', '.join(backends)}" if first.spec.sample.is_cuda else ""
    return (
        f"hybridep: {len(planned)} MoE layers, domain sizes {domains}, tokens {first.exchange or 'deepspeed'}, "
        f"{kernels} kernels, {memory}{over}{dense}" + _describe_codecs(config, first)
    )


def _describe_codecs(config: HybridEPConfig, layer: PlannedLayer) -> str:
    codecs = [f", {line}" for line in config.describe_codecs()]
    codecs += [
        f", dispatched tokens {level.token_codec.type} over {level.name}"
        + ("" if layer.exchange and count > 1 else " (no effect: no tokens of ours cross it)")
        for level, count in zip(config.levels, layer.partition.domain_counts, strict=True)
        if level.row_format is not None
    ]
    return "".join(codecs)


def encoding_of(config: HybridEPConfig, *, is_dense: bool = False) -> Encoding:
    """Return the encoding of experts, or of dense parameters; it has no `master_of` and `loss_scale` yet."""

    kernels = config.advanced.kernels
    codecs = [level.all_codecs for level in config.levels]
    weights = [one.dense_weight if is_dense else one.weight for one in codecs]
    gradients = [one.dense_gradient if is_dense else one.gradient for one in codecs]
    return Encoding(
        tuple(None if one == IDENTITY else make_weight_codec(one, kernels=kernels) for one in weights),
        tuple(None if one == IDENTITY else make_codec(one, kernels=kernels) for one in gradients),
        is_on_host=config.state == "host",
    )


def plan_layer(config: HybridEPConfig, spec: LayerSpec) -> PlannedLayer:
    cluster = config.cluster()
    partition = Partition.build(cluster, spec.group_ranks, config.domain_sizes)
    if partition.domain_size > 1:
        check_experts(spec)
    exchange: TokenExchange | None
    if config.token_exchange == "auto":
        row_bytes = spec.hidden * spec.sample.element_size()
        exchange = choose_exchange(partition, cluster, spec.num_experts, spec.top_k, row_bytes, TYPICAL_NUM_TOKENS)
    else:
        exchange = None if config.token_exchange == "deepspeed" else config.token_exchange
    return PlannedLayer(spec, partition, exchange)
