# SPDX-License-Identifier: Apache-2.0
"""Builds the runtime of one model from its config and layers, and drives it around the optimizer step."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import Codec, make_codec
from ds_hybridep.config import IDENTITY, HybridEPConfig
from ds_hybridep.errors import AgreementError
from ds_hybridep.experts import codec_checkpoint
from ds_hybridep.experts.hand_over import CarriedGradients
from ds_hybridep.experts.layer_spec import LayerSpec, check_experts
from ds_hybridep.experts.migration import LayerExperts, MigrationManager, StagePipeline
from ds_hybridep.experts.replicas import (
    Encoding,
    ReplicaStore,
    build_gather_levels,
    lay_out,
    no_master,
    no_scale,
)
from ds_hybridep.experts.transient import TransientMigration
from ds_hybridep.integration.statistics import Statistics
from ds_hybridep.kernels import Kernels, load_kernels
from ds_hybridep.plan.partition import Partition
from ds_hybridep.plan.token_route import TokenExchange, build_route, choose_exchange
from ds_hybridep.sync.collectives import LevelCollectives
from ds_hybridep.tokens.exchange import build_exchanges
from ds_hybridep.tokens.layer import HybridMoE, LayerStats, expert_to_slot
from ds_hybridep.transport.agreement import agree, announcing_failure
from ds_hybridep.transport.channels import Transport
from ds_hybridep.transport.job import backends_of
from ds_hybridep.version import __version__

# Tokens per rank for which the token exchange is chosen where "token_exchange" is "auto"; only the ratio of bytes to
# latency depends on it.
TYPICAL_NUM_TOKENS = 4096


@dataclass(frozen=True)
class PlannedLayer:
    """A layer with its domains and the way of its tokens (None: DeepSpeed's own)."""

    spec: LayerSpec
    partition: Partition
    exchange: TokenExchange | None

    def canonical(self) -> dict[str, Any]:
        """What ranks must agree on, JSON-able."""
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


class HybridRuntime:
    """Everything that one attached model has: channels, layers, migration and counters."""

    def __init__(
        self,
        config: HybridEPConfig,
        transport: Transport,
        kernels: Kernels,
        planned: Sequence[PlannedLayer],
        encoding: Encoding,
        is_boundary: Callable[[], bool],
    ) -> None:
        self.config = config
        self._encoding = encoding
        self._is_boundary = is_boundary
        self._carried: CarriedGradients | None = None
        self._is_stepping = False
        self.transport = transport
        self.kernels = kernels
        self._planned = tuple(planned)
        self.layers: dict[str, HybridMoE] = {}
        self.layer_stats: dict[str, LayerStats] = {}  # of earlier plans too
        pipelines: dict[str, tuple[StagePipeline, StagePipeline]] = {}
        stores: list[LayerExperts] = []
        # 1. Channels, in the same order on all ranks: for each layer tokens, then weights and gradients by level; then
        #    those of everything else, where it is ours to send.
        taken_over = [(layer, layer.exchange) for layer in planned if layer.exchange is not None]
        connected = [(layer, *self._connect(layer, exchange)) for layer, exchange in taken_over]
        self.dense = LevelCollectives(transport) if config.dense_sync == "hierarchical" else None
        # 2. Memory, where a rank may fail: after it has connected, so that no other rank waits in a connection to it.
        parts = [
            (exchanges, self._build_store(layer, levels, pipelines, stores)) for layer, exchanges, levels in connected
        ]
        # 3. One manager for all layers, then the layers.
        self.migration: MigrationManager | None = None
        if stores and config.replicas == "transient":
            self.migration = TransientMigration(transport, stores, config.prefetch_depth, is_boundary)
        elif stores:
            self.migration = MigrationManager(
                transport, stores, config.prefetch_depth, is_boundary, config.max_staleness
            )
        for (layer, _), (exchanges, position) in zip(taken_over, parts, strict=True):
            hybrid = self.layers[layer.spec.name] = self._build_layer(layer, exchanges, position)
            self.layer_stats[layer.spec.name] = hybrid.stats
        self.statistics = Statistics(
            transport,
            [
                (self.layers[layer.spec.name], layer.partition, layer.spec.hidden * layer.spec.sample.element_size())
                for layer, _ in taken_over
            ],
            counts_dense=self.dense is not None,
        )

    def _connect(self, layer: PlannedLayer, exchange: TokenExchange) -> tuple[tuple[Any, ...], Any]:
        """Exchanges of a layer, and the levels of its gathers (None where every domain is one rank)."""
        spec, partition, rank = layer.spec, layer.partition, self.transport.rank
        stages = build_route(partition, rank, spec.num_experts, exchange)
        exchanges = build_exchanges(
            stages, self.transport, spec.group, self.kernels, spec.name, spec.sample.device,
            level_formats=[level.row_format for level in self.config.levels],
        )  # fmt: skip
        if partition.domain_size == 1:
            return exchanges, None
        return exchanges, build_gather_levels(partition, self.transport, spec.group, spec.sample.device)

    def _build_store(
        self,
        layer: PlannedLayer,
        levels: Any,
        pipelines: dict[str, tuple[StagePipeline, StagePipeline]],
        stores: list[LayerExperts],
    ) -> int:
        """The position of a layer's store (-1 where every domain is one rank)."""
        spec, partition, rank = layer.spec, layer.partition, self.transport.rank
        if levels is None:
            return -1
        store = ReplicaStore(
            spec.name, spec.experts, partition, levels, rank, self._encoding, is_grouped=spec.is_grouped,
            is_transient=self.config.replicas == "transient",
        )  # fmt: skip
        if spec.group not in pipelines:
            pipelines[spec.group] = StagePipeline(self.transport), StagePipeline(self.transport)
        weights, gradients = pipelines[spec.group]
        stores.append(LayerExperts(store, weights, gradients))
        return len(stores) - 1

    def _build_layer(self, layer: PlannedLayer, exchanges: tuple[Any, ...], position: int) -> HybridMoE:
        spec, partition = layer.spec, layer.partition
        domain = partition.domain_index(self.transport.rank)
        experts = partition.domain_experts(domain, spec.num_experts)
        return HybridMoE(
            name=spec.name,
            experts=spec.experts,
            num_local=spec.num_local,
            exchanges=exchanges,
            expert_to_slot=expert_to_slot(experts, spec.num_experts, spec.sample.device),
            num_slots=partition.domain_size,
            kernels=self.kernels,
            migration=self.migration if position >= 0 else None,
            position=position,
            call=spec.call,
            weighs_inputs=spec.weighs_inputs,
        )

    @property
    def plan(self) -> str:
        """What lossy codecs' state depends on, in one form: levels, domains, codecs and layers."""
        levels = [
            [level.size, level.domain_size, level.weight_codec.spec, level.gradient_codec.spec]
            for level in self.config.levels
        ]
        return json.dumps({"levels": levels, "layers": [layer.canonical() for layer in self._planned]}, sort_keys=True)

    def save_codecs(self, folder: Path, step: int) -> None:
        """Write what lossy codecs keep into the folder of a checkpoint; all ranks must call, before it is complete.

        step: optimizer steps so far.  Files of earlier checkpoints in the same folder are removed.
        """
        rank, path = self.transport.rank, codec_checkpoint.file_of(folder, self.transport.rank)
        if self.migration is not None:
            self.migration.finish()  # a run that resumes begins with replicas as new as their owners
        saved = self._capture_codecs(step)
        if saved is not None:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".partial")
            torch.save(saved, unfinished)
            os.replace(unfinished, path)
        else:
            path.unlink(missing_ok=True)
        if rank == 0:
            kept = {codec_checkpoint.file_of(folder, other) for other in range(self.transport.world_size)}
            for other in set(folder.glob(codec_checkpoint.PATTERN)) - kept:
                other.unlink(missing_ok=True)

    def _capture_codecs(self, step: int) -> dict[str, Any] | None:
        """What codecs keep, and what those of an earlier plan had kept and no step has used; None for nothing.

        All ranks must call.
        """
        has_codecs = self.migration is not None and self.migration.has_codecs
        if self.migration is not None and (has_codecs or self.migration.has_undelivered):
            saved = self.migration.capture_codecs(self.plan, step)
        elif self._carried is not None:
            saved = codec_checkpoint.capture((), self.plan, step)
        else:
            return None
        if self._carried is not None:
            for layer in self._owned():
                if layer.name in self._carried.parts:
                    saved["layers"][layer.name] = layer.record(self._carried.parts[layer.name])
        return saved

    def load_codecs(self, folder: Path, step: int) -> str:
        """Take over what `save_codecs` wrote; all ranks must call, after weights were loaded.

        Returns:
            What could not be kept, for the log; empty where all is well.

        Raises:
            AgreementError: some ranks found the state of this plan and others did not.
        """
        self.forget_codecs()
        files = sorted(folder.glob(codec_checkpoint.PATTERN))
        if self.migration is not None and self.migration.has_codecs:
            with announcing_failure():
                path = codec_checkpoint.file_of(folder, self.transport.rank)
                saved = torch.load(path, weights_only=True, map_location="cpu") if path in files else None
            is_same = saved is not None and saved["plan"] == self.plan and saved["step"] == step
            try:
                agree({f"state of lossy codecs in {folder.name}": is_same}, self.config.timeout_s)
            except AgreementError as error:
                raise AgreementError(
                    f"{error} (True: its {codec_checkpoint.PATTERN} in {folder} is of this plan and step); all ranks "
                    f"or none must find theirs: copy the files to all nodes, or remove them to begin without what "
                    f"codecs kept"
                ) from error
            if saved is not None and is_same:
                self.migration.restore_codecs(saved)
                return ""
        found = codec_checkpoint.undelivered(self._owned(), files, step)
        self._take_over(found)
        norm = sum(float(part.double().square().sum()) for parts in found.values() for part in parts) ** 0.5
        if not norm:
            return ""
        return f"the checkpoint is of another plan: mirrors begin anew, gradients of norm {norm:.3g} are handed over"

    def _owned(self) -> list[codec_checkpoint.OwnedExperts]:
        """The experts of this rank by layer, with the shapes of their trainable parameters."""
        return [
            codec_checkpoint.OwnedExperts(
                name=layer.spec.name,
                experts=range(first, first + layer.spec.num_local),
                shapes=tuple(
                    (layer.spec.num_local, *piece.shape)
                    for block in lay_out(layer.spec.experts[0], is_grouped=layer.spec.is_grouped)
                    if block.is_trainable
                    for piece in block.slices
                ),
                share=len(layer.spec.group_ranks) / self.transport.world_size,
                device=layer.spec.sample.device,
            )
            for layer in self._planned
            for first in [layer.spec.group_ranks.index(self.transport.rank) * layer.spec.num_local]
        ]

    def forget_codecs(self) -> None:
        """Weights were loaded without the optimizer: the next forward ships them, residuals are dropped."""
        self._drop_carried()
        if self.migration is not None:
            self.migration.mark_weights_changed()
            self.migration.forget_codecs()

    def forget_gradients(self) -> None:
        """What was computed so far is left behind: drop residuals, and sums that did not return to their owners."""
        self.forget_codecs()
        self.clear_gradients(drops_returned=True)

    def clear_gradients(self, *, drops_returned: bool) -> None:
        """Forget replica gradients, as zero_grad does for the owners'.

        drops_returned: those that were returned to their owners are forgotten there too.
        """
        drops_returned &= not self._is_stepping  # the step's own zero_grad comes after they were used
        if self._carried is not None and drops_returned:
            self._carried.restore()
        if self.migration is not None:
            self.migration.clear_gradients(drops_returned=drops_returned)

    def refresh(self) -> None:
        """Ship all experts' weights again and wait for them; without an engine this ends an optimizer step."""
        self._finish_carried(was_applied=True)
        if self.migration is not None:
            self.migration.refresh()

    def describe(self) -> str:
        """The plan in one line, for the log."""
        first = self._planned[0]
        names = [level.name for level in self.config.levels]
        domains = ", ".join(f"{n} {s}" for n, s in zip(names, first.partition.domain_sizes, strict=True))
        codecs = [
            f", {kind} {getattr(level, key).type} over {level.name}"
            + (" (no effect: its domain_size is 1)" if level.domain_size == 1 else "")
            for level in self.config.levels
            for kind, key in (("weights", "weight_codec"), ("gradients", "gradient_codec"))
            if getattr(level, key) != IDENTITY
        ]
        codecs += [
            f", dispatched tokens {level.token_codec.type} over {level.name}"
            + ("" if first.exchange and count > 1 else " (no effect: no tokens of ours cross it)")
            for level, count in zip(self.config.levels, first.partition.domain_counts, strict=True)
            if level.row_format is not None
        ]
        dense = ", dense gradients and parameters by level" if self.dense is not None else ""
        memory = "no replicas" if self.migration is None else self.migration.describe_memory()
        tokens = first.exchange or "deepspeed"
        over = f", over {', '.join(self.transport.backends)}" if first.spec.sample.is_cuda else ""
        return (
            f"hybridep: {len(self._planned)} MoE layers, domain sizes {domains}, tokens {tokens}, "
            f"{self.kernels.name} kernels, {memory}{over}{dense}" + "".join(codecs)
        )

    def before_step(self) -> None:
        """Call right before the optimizer changes parameters."""
        if self.migration is None:
            self._is_stepping = True
            return
        self.migration.before_step()
        self._is_stepping = True
        interval = self.config.verify_interval
        if interval and self.statistics.num_steps and self.statistics.num_steps % interval == 0:
            self.migration.verify()

    def abandon_step(self) -> None:
        """The optimizer failed in the step that `before_step` announced."""
        self._is_stepping = False
        if self.migration is not None:
            self.migration.abandon_step()

    def after_step(self, *, was_applied: bool, ships: bool = True) -> dict[str, Any] | None:
        """Call right after the optimizer step.  Returns the job's record on rank 0 every `report_interval` steps.

        ships: send the new weights to their replicas; False where another plan follows, which ships them all.
        """
        self._is_stepping = False
        self._finish_carried(was_applied=was_applied)
        if self.migration is not None:
            self.migration.after_step(was_applied=was_applied, ships=ships)
        self.statistics.num_steps += 1
        interval = self.config.report_interval
        return self.statistics.gather_job() if interval and self.statistics.num_steps % interval == 0 else None

    def finish(self) -> None:
        """Wait for what is under way; all ranks must call.

        Raises:
            GradientNotReturnedError: in the middle of an accumulation.
        """
        if self.migration is not None:
            self.migration.check_returned("detach")
            self.migration.finish()

    @property
    def token_exchange(self) -> Literal["direct", "hierarchical", "deepspeed"]:
        """How tokens travel."""
        return self._planned[0].exchange or "deepspeed"

    @property
    def codec_s(self) -> float:
        """Seconds that this rank has spent on encoding and decoding under this plan."""
        return self.migration.codec_s if self.migration is not None else 0.0

    def hand_over(self) -> dict[str, list[Tensor]]:
        """Give the owners what senders of gradients had kept back, before another plan; all ranks must call.

        Returns:
            By layer what was not delivered yet of the owned experts, fp32 [e, *shape] for each trainable parameter.
            Empty where nothing is lossy.
        """
        self.finish()
        undelivered = {} if self.migration is None else self.migration.collect_undelivered()
        return {**undelivered, **self._drop_carried()}

    def follow(self, earlier: "HybridRuntime", undelivered: Mapping[str, list[Tensor]]) -> None:
        """Go on counting where `earlier` stopped, and take over what it had not delivered."""
        self.transport.traffic = earlier.transport.traffic
        self.statistics.num_steps = earlier.statistics.num_steps
        for name, stats in earlier.layer_stats.items():
            if name in self.layer_stats:
                vars(self.layer_stats[name]).update(vars(stats))
            else:
                self.layer_stats[name] = stats
        self._take_over(undelivered)

    def _take_over(self, undelivered: Mapping[str, list[Tensor]]) -> None:
        """Add what was not delivered to the next gradients: with what replicas return, or at the parameter itself."""
        homeless = dict(undelivered) if self.migration is None else self.migration.take_over(undelivered)
        if homeless:
            experts = {layer.spec.name: layer.spec.experts for layer in self._planned}
            self._carried = CarriedGradients(experts, homeless, self._is_boundary, self._encoding.loss_scale)

    def _finish_carried(self, *, was_applied: bool) -> None:
        if self._carried is None:
            return
        if was_applied:
            self._carried.commit()
        else:
            self._carried.restore()
        if self._carried.is_done:
            self._carried = None

    def _drop_carried(self) -> dict[str, list[Tensor]]:
        carried, self._carried = self._carried, None
        return {} if carried is None else carried.remove()

    def close(self) -> None:
        """Drop connections and replicas.  Waits for nothing, so that it can be called after an error too."""
        self._drop_carried()
        if self.migration is not None:
            self.migration.release()
        self.transport.close()


def build_runtime(
    config: HybridEPConfig,
    specs: Sequence[LayerSpec],
    is_boundary: Callable[[], bool],
    *,
    master_of: Callable[[nn.Parameter], Tensor | None] = no_master,
    loss_scale: Callable[[], float] = no_scale,
) -> HybridRuntime:
    """The runtime of a model, as `prepare_runtime` and a call of what it returns make it."""
    return prepare_runtime(config, specs, is_boundary, master_of=master_of, loss_scale=loss_scale)()


def prepare_runtime(
    config: HybridEPConfig,
    specs: Sequence[LayerSpec],
    is_boundary: Callable[[], bool],
    *,
    master_of: Callable[[nn.Parameter], Tensor | None] = no_master,
    loss_scale: Callable[[], float] = no_scale,
) -> Callable[[], HybridRuntime]:
    """What makes the runtime of a model; all ranks must call at the same point, and make the same use of it.

    All that settings, layers and ranks may be refused for is refused here, before anything is built.

    Args:
        config: of the job.
        specs: of the model's MoE layers, in the order in which they run.
        is_boundary: True when the backward that runs is the last before the optimizer step.
        master_of: the optimizer's fp32 copy of a parameter, None where this rank does not hold all of it.
        loss_scale: by which gradients are multiplied now.

    Raises:
        PlanError: an expert-parallel group is no regular part of the levels, or cannot be split into the domains.
        AgreementError: ranks differ in config, layers or version, or one is missing.
    """
    with announcing_failure():
        planned = [_plan_layer(config, spec) for spec in specs]
        encoding = replace(encoding_of(config), master_of=master_of, loss_scale=loss_scale)
        device = specs[0].sample.device
        kernels = load_kernels(config.kernels, device.type)
        backends = backends_of(config, device)
        payload = {
            "version": __version__,
            "torch": torch.__version__,
            "kernels": kernels.name,
            "backends": list(backends),
            "config": config.canonical(),
            "layers": [layer.canonical() for layer in planned],
        }
    generation = agree(payload, config.timeout_s)
    transport = Transport(config.cluster(), config.timeout_s, generation, backends)
    return partial(HybridRuntime, config, transport, kernels, planned, encoding, is_boundary)


def encoding_of(config: HybridEPConfig) -> Encoding:
    """How weights and gradients travel, without an optimizer.

    Raises:
        ConfigError: an option of a codec is wrong.
    """
    return Encoding(_codecs(config, "weight_codec"), _codecs(config, "gradient_codec"))


def _codecs(config: HybridEPConfig, key: str) -> tuple[Codec | None, ...]:
    """The codec of each level; None where weights or gradients go as they are.

    Raises:
        ConfigError: an option of a codec is wrong.
    """
    specs = [getattr(level, key) for level in config.levels]
    return tuple(
        None
        if spec == IDENTITY
        else make_codec(spec.spec, where=f"hybridep.levels[{i}].{key}", kernels=config.kernels)
        for i, spec in enumerate(specs)
    )


def _plan_layer(config: HybridEPConfig, spec: LayerSpec) -> PlannedLayer:
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
