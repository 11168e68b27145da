# SPDX-License-Identifier: Apache-2.0
"""Lets DeepSpeed's own sums of gradients and gathers of parameters travel level by level.

This covers dense parameters, which all ranks hold, and experts that several groups hold.  DeepSpeed's code stays, with
its scaling, data types and buckets.  Only the few functions in which it calls torch's collectives are replaced, on one
engine and its optimizer.
"""

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups
from torch import Tensor

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.deepspeed.engine_view import EngineView, FlatGroup, Zero12View, view_of
from ds_hybridep.deepspeed.norms import GradientNorms
from ds_hybridep.deepspeed.patches import BF16_MODULE, ENGINE, ZERO_MODULE, ZERO_OPTIMIZER, Patches
from ds_hybridep.errors import PlanError
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.geometry.slots import Span, cut, whole
from ds_hybridep.runtime.build import DENSE
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.sync.group_sync import GroupSync
from ds_hybridep.transport.job import group_ranks

EXPERTS = "experts of "


def why_unsupported(engine: Any) -> str:
    """Return the setting that makes DeepSpeed sum gradients in an unsupported way, and what to do; else empty."""
    zero, is_partitioned = engine._config.zero_config, engine.zero_optimization()
    is_sparse = any(getattr(module, "sparse", False) is True for module in engine.module.modules())
    reasons = {
        "ZeRO stage 3; use stage 0, 1 or 2": view_of(engine).partitions_parameters,
        "gradient_predivide_factor; leave it at 1": engine.gradient_predivide_factor() != 1.0,
        "parameters with sparse gradients (torch.nn.Embedding(sparse=True)); build them with sparse=False": is_sparse,
    }
    for name in ("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce"):
        reasons[f"zero_optimization.{name} = false; leave it at true"] = is_partitioned and not getattr(zero, name)
    ranks = group_ranks(engine.seq_data_parallel_group)
    reasons[
        f"dense parameters that are data-parallel over ranks {list(ranks)} of {engine.world_size}; leave out the mpu"
    ] = ranks != tuple(range(len(ranks))) or len(ranks) != engine.world_size
    return next((reason for reason, is_used in reasons.items() if is_used), "")


def groups_of(engine: Any, specs: Sequence[LayerSpec], config: HybridEPConfig) -> dict[str, tuple[int, ...]]:
    """Return the ranks that hold the same parameters, by name: dense ones, and experts with several copies.

    Empty if DeepSpeed is to synchronise them.  DeepSpeed also synchronises copies of experts whose ranks are not a
    regular part of the levels.
    """
    if config.dense_sync != "hierarchical":
        return {}
    found = {DENSE: group_ranks(engine.seq_data_parallel_group)}
    for group in dict.fromkeys(spec.group for spec in specs):
        ranks = group_ranks(_process_group(engine, f"{EXPERTS}{group}"))
        try:
            Partition.build(config.cluster(), ranks, (1,) * len(config.levels))
            found[f"{EXPERTS}{group}"] = ranks
        except PlanError as error:
            log_dist(f"hybridep: copies of experts ({group}) are synchronised by DeepSpeed: {error}", ranks=[0])
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def _process_group(engine: Any, name: str) -> Any:
    """Return DeepSpeed's group of this name, as in `groups_of`."""
    find: Any = groups._get_expert_data_parallel_group
    return engine.seq_data_parallel_group if name == DENSE else find(name.removeprefix(EXPERTS))


class DataParallelSync:
    """Carries DeepSpeed's sums and gathers for one engine that `why_unsupported` accepts.

    DeepSpeed calls in at these places, with the process group that it would use itself:

        sum for all ranks     engine.allreduce_bucket             whole gradients: ZeRO 0, and BF16_Optimizer
        ZeRO 1 and 2, in this order:
          labels              optimizer.allreduce_and_scatter     DeepSpeed has divided the slices of a bucket already
          sum for the owners  optimizer.allreduce_bucket          DeepSpeed copies each owner's slice from the result
        before the last sums  optimizer.independent_gradient_partition_epilogue: the end of a backward (ZeRO 2)
        norms and overflow    see `GradientNorms`
        gather of parameters  all_gather_dp_groups                a function that all optimizers call

    A *label* on a tensor that it sums says which parts of which parameters the tensor consists of.

    Args:
        syncs: by name, as in `groups_of`.
        is_boundary: returns True if the running sums are the last before the optimizer step.
    """

    def __init__(
        self, engine: Any, syncs: Mapping[str, GroupSync], patches: Patches, is_boundary: Callable[[], bool]
    ) -> None:
        self._engine, self._patches, self._is_boundary = engine, patches, is_boundary
        self._names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._syncs = {_process_group(engine, name): sync for name, sync in syncs.items()}
        self._dense = syncs[DENSE]
        self._optimizer: Any = None  # one that partitions its state
        self._view: EngineView = view_of(engine)  # of it
        self._spans: list[list[Span]] = []  # of flat parameters, by parameter group
        self._before: dict[int, Tensor] = {}  # own partitions before this step, by parameter group
        self._is_stepping = False
        self._gathers: list[tuple[GroupSync, Callable[[], None]]] = []  # of a step; the function waits for the end
        self._norms: GradientNorms | None = None
        self._sums_are("all ranks", is_mean=not engine.postscale_gradients())
        for name, replacement in (
            ("_get_gradients_for_reduction", self._label_gradients),
            ("allreduce_bucket", self._sum_for_all),
        ):
            patches.wrap(ENGINE, name, engine, replacement)

    def watch(self, optimizer: Any) -> None:
        """Take over the sums and gathers of an optimizer that partitions its state (ZeRO 1 and 2); ignore others."""
        view = view_of(self._engine)
        if optimizer is self._optimizer or view.flats is None:
            return
        self._optimizer, self._view = optimizer, view
        self._spans = [
            _padded([self._span(parameter) for parameter in group.parameters], group.flat.numel())
            for group in view.flat_groups()
        ]
        _watching.add(self)
        for module in (ZERO_MODULE, BF16_MODULE):
            self._patches.share(module, "all_gather_dp_groups", _gather_by_level)
        for flat, spans in zip(view.flat_gradients, self._spans, strict=False):  # not all optimizers have them
            flat.hybridep = _Label(spans)
        if not isinstance(view, Zero12View):  # the engine sums those of BF16_Optimizer
            return
        self._sums_are("owners", is_mean=True)  # it divides before it sums, whatever the engine does
        for name, replacement in (
            ("independent_gradient_partition_epilogue", self._end_of_backward),
            ("allreduce_and_scatter", self._label_slices),
            ("allreduce_bucket", self._sum_for_owners),
        ):
            self._patches.wrap(ZERO_OPTIMIZER, name, optimizer, replacement)
        self._norms = GradientNorms(view, self._dense, self._patches)

    def _sums_are(self, sums_for: str, *, is_mean: bool) -> None:
        for sync in self._syncs.values():
            sync.memory.is_mean = is_mean
            sync.memory.sums_for = f"{sums_for}, {self._engine.communication_data_type}"

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Call before the optimizer step.  The averaged gradients, which engine_view.py names, are final now."""
        self._is_stepping, self._gathers = True, []

    def before_change(self) -> None:
        """Copy this rank's partitions, which all ranks hold, right before the optimizer changes them."""
        for index, (group, sync) in enumerate(self._flat_groups()):
            if sync is not None and sync.encodes_parameters:
                self._before[index] = group.own.detach().reshape(-1).clone()

    def after_step(self) -> None:
        """Drop the copies.  Outside a step nobody knows what other ranks hold, and gathers are exact."""
        self._is_stepping = False
        self._before.clear()
        if self._norms is not None:
            self._norms.forget()

    def finish_gathers(self, *, of_experts_only: bool) -> None:
        """Wait for the gathers that the step started, or only for those of experts: dense ones may go on."""
        left = [(sync, finish) for sync, finish in self._gathers if of_experts_only and sync is self._dense]
        for sync, finish in self._gathers:
            if not (of_experts_only and sync is self._dense):
                finish()
        self._gathers = left

    # -- sums of gradients --------------------------------------------------------------------------------------------

    def _label_gradients(self, original: Callable[..., Any]) -> Any:
        """ZeRO 0: gradients come in the order of parameters, those of experts by their groups."""
        dense, experts = original()
        gradients = {DENSE: iter(dense), **{name: iter(found) for name, found in experts.items()}}
        for parameter in self._engine.module.parameters():
            if parameter.requires_grad and parameter.numel():
                gradient = next(gradients[parameter.group_name if is_moe_param(parameter) else DENSE])
                gradient.hybridep = _Label((self._span(parameter),))
        return dense, experts

    def _sum_for_all(
        self, original: Callable[..., Any], bucket: Sequence[Tensor], dp_group: Any, dp_world_size: Any = None
    ) -> Any:
        """Average whole gradients as DeepSpeed scales them; returns the mean of the flattened bucket."""
        sync, engine = self._syncs.get(dp_group), self._engine
        if sync is None:
            return original(bucket, dp_group, dp_world_size)
        num_ranks = len(sync.ranks) if dp_world_size is None else dp_world_size
        flat: Tensor = engine.flatten(bucket)
        total = flat.to(engine.communication_data_type)
        if engine.gradient_average and not engine.postscale_gradients():
            total.mul_(1.0 / num_ranks)
        labels = [getattr(tensor, "hybridep", None) for tensor in bucket]
        sync.all_reduce(total, [span for label in labels if label for span in label.spans] if all(labels) else ())
        if engine.gradient_average and engine.postscale_gradients():
            total.mul_(1.0 / num_ranks)
        return flat.copy_(total) if total is not flat else flat

    def _label_slices(
        self, original: Callable[..., Any], bucket: Sequence[Any], communication_data_type: Any, **kwargs: Any
    ) -> None:
        """ZeRO 1 and 2: a bucket has (ranks that need it, slice, ...) in the order of the parameters of its group."""
        if kwargs["process_group"] in self._syncs:
            optimizer, group = self._optimizer, kwargs["process_group"]
            places = optimizer.ipg_buckets[communication_data_type].params
            parameters = [optimizer.bit16_groups[group_idx][at] for group_idx, at, _ in places]
            of_experts = optimizer.expert_dp_process_group if any(map(is_moe_param, parameters)) else {}
            spans = [
                self._span(one)
                for one in parameters
                if (of_experts[one.group_name] if is_moe_param(one) else optimizer.dp_process_group) is group
            ]
            ends = list(itertools.accumulate(tensor.numel() for _, tensor, *_ in bucket))
            for (ranks, tensor, *_), inside in zip(bucket, cut(spans, ends), strict=True):
                tensor.hybridep = _Label(inside, ranks if isinstance(ranks, frozenset) else frozenset((ranks,)))
        original(bucket, communication_data_type, **kwargs)

    def _sum_for_owners(
        self, original: Callable[..., Any], bucket: Sequence[Tensor], communication_data_type: Any, **kwargs: Any
    ) -> Any:
        """Sum each slice for the rank that reads it alone, where ZeRO would sum whole buckets for all ranks."""
        sync = self._syncs.get(kwargs.get("process_group"))
        labels = [label for tensor in bucket if (label := getattr(tensor, "hybridep", None)) is not None]
        if sync is None or len(labels) != len(bucket):
            return original(bucket, communication_data_type, **kwargs)
        total: Tensor = self._optimizer.flatten(bucket).to(communication_data_type)
        if all(len(label.owners) == 1 for label in labels):
            slices = [(owner, span) for label in labels for owner in label.owners for span in label.spans]
            # ZeRO 2 adds up what the sums of each micro-step leave in the owner's slices; ZeRO 1 sums once.
            is_last = not self._optimizer.partition_gradients or self._is_boundary()
            sync.reduce_to_owners(total, slices, is_last=is_last)
        else:  # Muon: several ranks read a matrix
            sync.all_reduce(total, [span for label in labels for span in label.spans])
        return total

    def _end_of_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """ZeRO 2: runs before the last buckets of a backward are summed.

        A parameter may get gradients in an earlier micro-step and none in the last one.  Its sums still wait to cross
        the slow levels, so it takes part with a gradient of zero.
        """
        names = {name for sync in self._syncs.values() for name in sync.waiting_names}
        if names and self._is_boundary():
            optimizer = self._optimizer
            in_buckets = {param_id for bucket in optimizer.ipg_buckets.values() for *_, param_id in bucket.params}
            for group_idx, group in enumerate(optimizer.bit16_groups):
                for parameter in group:
                    param_id = optimizer.get_param_id(parameter)
                    is_summed = optimizer.params_already_reduced[param_id] or param_id in in_buckets
                    if self._names.get(id(parameter)) in names and not is_summed:
                        parameter.grad = torch.zeros_like(parameter)
                        optimizer.process_gradients(parameter, group_idx)
        return original(*args, **kwargs)

    # -- gathers of parameters ----------------------------------------------------------------------------------------

    def gathers(self, groups_flat: Any) -> bool:
        """Return True if these flat parameters are those of this engine's optimizer."""
        return self._patches.is_on and self._optimizer is not None and groups_flat is self._view.flats

    def gather(self, index: int) -> bool:
        """Bring the updated partitions of a parameter group to all ranks; False if DeepSpeed is to do it.

        In a step this starts the gather; `finish_gathers` waits for it.
        """
        group, sync = self._flat_groups()[index]
        if sync is None:
            return False
        finish = sync.start_all_gather(group.flat, group.own, self._before.pop(index, None), self._spans[index])
        if self._is_stepping:
            self._gathers.append((sync, finish))
        else:
            finish()
        return True

    def shared_parameters(self, name: str) -> list[Tensor]:
        """Return the flat parameters that the optimizer gathers over the group of this name."""
        return [group.flat for group, sync in self._flat_groups() if sync is not None and sync.name == name]

    def _flat_groups(self) -> list[tuple[FlatGroup, GroupSync | None]]:
        """Return the optimizer's parameter groups, each with who gathers it (None: DeepSpeed)."""
        if self._optimizer is None:
            return []
        return [(group, self._syncs.get(group.group)) for group in self._view.flat_groups()]

    # -- names --------------------------------------------------------------------------------------------------------

    def _span(self, parameter: Any) -> Span:
        return whole(self._names.get(id(parameter), ""), parameter.shape)


_watching: weakref.WeakSet[DataParallelSync] = weakref.WeakSet()


def _gather_by_level(original: Callable[..., Any]) -> Callable[..., None]:
    """Return what replaces DeepSpeed's `all_gather_dp_groups` for all optimizers of the process."""

    def all_gather_dp_groups(
        groups_flat: Any, partitioned_param_groups: Any, dp_process_group: Any, *args: Any, **kwargs: Any
    ) -> None:
        columns = groups_flat, partitioned_param_groups, dp_process_group
        ours = next((one for one in _watching if one.gathers(groups_flat)), None)
        if ours is None:
            original(*columns, *args, **kwargs)
            return
        for index, row in enumerate(zip(*columns, strict=True)):
            if not ours.gather(index):
                original(*([one] for one in row), *args, **kwargs)

    return all_gather_dp_groups


@dataclass(frozen=True)
class _Label:
    """What a tensor that DeepSpeed sums consists of.

    owners: indices in the group of the ranks that need the sum; empty if all do.
    """

    spans: Sequence[Span]
    owners: frozenset[int] = frozenset()


def _padded(spans: list[Span], num_elements: int) -> list[Span]:
    """Add a span of padding, so that all spans together have `num_elements` elements."""
    held = sum(span.num_elements for span in spans)
    return spans if held == num_elements else [*spans, whole(f"padding {held}", (num_elements - held,))]
