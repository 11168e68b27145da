# SPDX-License-Identifier: Apache-2.0
"""Lets DeepSpeed's own sums of gradients and gathers of parameters travel level by level.

This covers dense parameters, which all ranks hold, and experts that several groups hold.  DeepSpeed's code stays, with
its scaling, data types and buckets.  Only the process groups that it passes to torch change, on one engine and its
optimizer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.utils import groups, log_dist
from torch import Tensor, nn

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import PlanError
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.integration.agreements import Agreements
from ds_hybridep.integration.patches import ENGINE, ZERO_OPTIMIZER, Patches
from ds_hybridep.plan.partition import Partition
from ds_hybridep.sync.dense import GroupSync
from ds_hybridep.sync.flat import Span, cut, whole
from ds_hybridep.transport.job import group_ranks
from ds_hybridep.transport.stand_in import StandInGroup

DENSE = "dense parameters"
EXPERTS = "experts of "


def why_unsupported(engine: Any) -> str:
    """Return the setting that makes DeepSpeed sum gradients in an unsupported way, and what to do; else empty."""
    zero, is_partitioned = engine._config.zero_config, engine.zero_optimization()
    is_sparse = any(getattr(module, "sparse", False) is True for module in engine.module.modules())
    owners_only = "leave it at true: level by level, each sum goes to its owner alone anyway"
    reasons = {
        "ZeRO stage 3; use stage 0, 1 or 2": engine.zero_optimization_stage() == 3,
        "parameters with sparse gradients (torch.nn.Embedding(sparse=True)); build them with sparse=False": is_sparse,
    }
    for name, remedy in {
        "contiguous_gradients": "leave it at true",
        "reduce_scatter": "leave it at true",
        "use_multi_rank_bucket_allreduce": owners_only,
    }.items():
        reasons[f"zero_optimization.{name} = false; {remedy}"] = is_partitioned and not getattr(zero, name)
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
        ranks = group_ranks(_expert_data_parallel_group(group))
        try:
            Partition.build(config.cluster(), ranks, (1,) * len(config.levels))
            found[f"{EXPERTS}{group}"] = ranks
        except PlanError as error:
            log_dist(f"hybridep: copies of experts ({group}) are synchronised by DeepSpeed: {error}", ranks=[0])
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def _expert_data_parallel_group(group: str) -> Any:
    find: Any = groups._get_expert_data_parallel_group
    return find(group)


class DenseSync:
    """Carries DeepSpeed's sums and gathers for one engine that `why_unsupported` accepts.

    Args:
        syncs: by name, as in `groups_of`.
        is_boundary: returns True if the running sums are the last before the optimizer step.
    """

    def __init__(
        self, engine: Any, syncs: Mapping[str, GroupSync], patches: Patches, is_boundary: Callable[[], bool]
    ) -> None:
        self._engine, self._patches, self._is_boundary = engine, patches, is_boundary
        self._names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._stand_ins: dict[Any, Any] = {}  # by the group that each stands in for
        self._syncs: dict[Any, GroupSync] = {}  # by stand-in
        self._optimizer: Any = None
        self._bucket: tuple[Tensor, list[Span]] | None = None  # buffer of `average_tensor`, and its spans
        self._call = _Call()
        self._before: dict[int, Tensor] = {}  # own partitions before this step, by address of the flat buffer
        self._is_stepping = False
        self._gathers: list[tuple[GroupSync, Callable[[], None]]] = []  # started in a step; the function waits for it
        self._agreements = Agreements()
        self._is_in_norm = False
        for name, sync in syncs.items():
            is_dense = name == DENSE
            original = (
                engine.seq_data_parallel_group if is_dense else _expert_data_parallel_group(name.removeprefix(EXPERTS))
            )
            group = StandInGroup(
                original,
                partial(self._all_reduce, sync),
                partial(self._all_gather, sync),
                partial(self._agree, sync),
            )
            self._stand_ins[original], self._syncs[group] = group, sync
            patches.note("torch.distributed.distributed_c10d:_World", "pg_map, pg_group_ranks", group.unregister)
            sync.memory.is_mean = not engine.postscale_gradients()
            sync.memory.sums_for = f"all ranks, {engine.communication_data_type}"
        patches.wrap(ENGINE, "allreduce_bucket", engine, self._allreduce_bucket)

    def watch(self, optimizer: Any) -> None:
        """Take over the process groups of an optimizer that partitions its state (ZeRO 1 and 2); ignore others."""
        real_groups = getattr(optimizer, "real_dp_process_group", None)
        if real_groups is None or optimizer is self._optimizer:
            return
        self._optimizer = optimizer

        def swap(group: Any) -> Any:
            return self._stand_ins.get(group, group)

        self._patches.put(ZERO_OPTIMIZER, "dp_process_group", optimizer, swap(optimizer.dp_process_group))
        self._patches.put(ZERO_OPTIMIZER, "real_dp_process_group", optimizer, list(map(swap, real_groups)))
        if (of_experts := getattr(optimizer, "expert_dp_process_group", None)) is not None:
            swapped = {name: swap(group) for name, group in of_experts.items()}
            self._patches.put(ZERO_OPTIMIZER, "expert_dp_process_group", optimizer, swapped)
        if hasattr(optimizer, "average_tensor"):  # it divides before it sums, whatever the engine does
            for sync in self._syncs.values():
                sync.memory.is_mean = True
                sync.memory.sums_for = f"owners, {self._engine.communication_data_type}"
        for name, replacement in (
            ("average_tensor", self._average_tensor),
            ("independent_gradient_partition_epilogue", self._end_of_backward),
            ("allreduce_and_copy_with_multiple_ranks", self._sum_for_owners_only),
            ("has_overflow", self._has_overflow),
            ("scaled_global_norm", self._global_norm),
        ):
            if hasattr(optimizer, name):
                self._patches.wrap(ZERO_OPTIMIZER, name, optimizer, replacement)

    def shared_parameters(self, name: str) -> list[Tensor]:
        """Return the flat parameters that the optimizer gathers over the group of this name."""
        flats = [(flat, self._syncs.get(group)) for flat, _, group in self._partitioned()]
        return [flat for flat, sync in flats if sync is not None and sync.name == name]

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Call before the optimizer step."""
        self._is_stepping, self._gathers = True, []

    def commit(self) -> None:
        """Copy this rank's partitions, which all ranks hold, right before the optimizer changes them."""
        for flat, partitions, group in self._partitioned():
            if group in self._syncs and self._syncs[group].encodes_parameters:
                self._before[flat.data_ptr()] = partitions[group.rank()].detach().reshape(-1).clone()

    def after_step(self) -> None:
        """Drop the copies of `commit`.  Outside a step nobody knows what other ranks hold: gathers are exact."""
        self._is_stepping = False
        self._before.clear()
        self._agreements.forget()

    def finish_gathers(self, *, of_experts_only: bool) -> None:
        """Wait for the gathers that the step started, or only for those of experts: dense ones may go on."""
        for sync, finish in self._gathers:
            if sync.name != DENSE or not of_experts_only:
                finish()
        self._gathers = [(sync, finish) for sync, finish in self._gathers if of_experts_only and sync.name == DENSE]

    def _partitioned(self) -> Iterator[tuple[Tensor, Sequence[Tensor], Any]]:
        """Yield flat parameters, their partitions by rank, and the group that shares them."""
        for flats, partitions in (
            ("bit16_groups_flat", "parallel_partitioned_bit16_groups"),
            ("bf16_groups_flat", "bf16_partitioned_groups"),  # of BF16_Optimizer
        ):
            if hasattr(self._optimizer, flats):
                optimizer = self._optimizer
                yield from zip(
                    getattr(optimizer, flats), getattr(optimizer, partitions), optimizer.real_dp_process_group,
                    strict=True,
                )  # fmt: skip

    # -- gradients --------------------------------------------------------------------------------------------------

    def _allreduce_bucket(self, original: Callable[..., Any], bucket: Any, dp_group: Any, *args: Any) -> Any:
        stand_in = self._stand_ins.get(dp_group)
        if stand_in is None:
            return original(bucket, dp_group, *args)
        with self._calling(spans=self._spans_of(bucket)):
            return original(bucket, stand_in, *args)

    def _average_tensor(self, original: Callable[..., Any], tensor: Tensor, dtype: Any) -> Any:
        """Note the parameters whose gradients `tensor` holds, in order."""
        params = self._optimizer.ipg_buckets[dtype].params
        self._bucket = tensor, [self._span(self._optimizer.bit16_groups[i][at]) for i, at, _ in params]
        try:
            return original(tensor, dtype)
        finally:
            self._bucket = None

    def _sum_for_owners_only(
        self, original: Callable[..., Any], bucket: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Sum each slice only for the rank that reads it, where ZeRO would sum whole buckets for all ranks."""
        if not isinstance(kwargs.get("process_group"), StandInGroup):
            return original(bucket, *args, **kwargs)
        with self._calling(**self._slices_of(bucket, kwargs.get("bucket_ranks"))):
            return original(bucket, *args, **kwargs)

    def _slices_of(self, bucket: Sequence[Tensor], ranks: Sequence[Any] | None) -> dict[str, Any]:
        """Return the arguments of `_calling`: slices, or if several ranks read one, spans."""
        owners = [rank if isinstance(rank, frozenset) else frozenset((rank,)) for rank in ranks or ()]
        if self._bucket is None or len(owners) != len(bucket):
            return {}
        whole_bucket, spans = self._bucket
        bounds = {0, whole_bucket.numel()}
        firsts = [(tensor.data_ptr() - whole_bucket.data_ptr()) // tensor.element_size() for tensor in bucket]
        for first, tensor in zip(firsts, bucket, strict=True):
            bounds |= {first, first + tensor.numel()}
        ends = sorted(bounds)
        inside = dict(zip(ends, cut(spans, ends[1:]), strict=False))  # by first element
        if any(len(some) != 1 for some in owners):
            return {"spans": [span for first in firsts for span in inside[first]]}
        pairs = zip(firsts, owners, strict=True)
        return {"slices": [(owner, span) for first, (owner,) in pairs for span in inside[first]]}

    def _all_reduce(self, sync: GroupSync, tensor: Tensor) -> None:
        if self._call.slices is None:
            sync.all_reduce(tensor, self._call.spans)
        else:
            # ZeRO 2 adds up what the sums of each micro-step leave in the owner's slices; ZeRO 1 sums once.
            sync.reduce_to_owners(tensor, self._call.slices, is_last=self._is_boundary())

    def _all_gather(self, sync: GroupSync, output: Tensor, own: Tensor) -> None:
        before = self._before.pop(output.data_ptr(), None)
        spans = _layout_of(output, self._engine.module, self._span) if before is not None else ()
        finish = sync.start_all_gather(output, own, before, spans)
        if self._is_stepping:
            self._gathers.append((sync, finish))
        else:
            finish()

    def _end_of_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs under ZeRO 2, before DeepSpeed sums the last buckets of a backward.

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

    # -- norms and overflow -----------------------------------------------------------------------------------------

    def _agree(self, sync: GroupSync, tensor: Tensor, is_max: bool) -> None:
        if sync.name != DENSE and self._is_in_norm:
            tensor.mul_(len(sync.ranks))  # DeepSpeed takes a mean over copies; the sum before made all equal
        else:
            self._agreements.ask(sync, tensor, is_max)

    def _has_overflow(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Get the flag and the norm together: DeepSpeed asks for the norm next."""
        if not self._optimizer.cpu_offload:
            asks_norm = getattr(self._optimizer, "compute_grad_norm", True)
            others = (self._optimizer.scaled_global_norm,) if asks_norm else ()
            self._agreements.prepare(partial(original, *args, **kwargs), *others)
        return original(*args, **kwargs)

    def _global_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._optimizer.cpu_offload and not self._agreements.is_under_way:
            self._agreements.prepare(partial(self._global_norm, original, *args, **kwargs))
        self._is_in_norm = True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_in_norm = False

    # -- what flat buffers consist of -------------------------------------------------------------------------------

    @contextmanager
    def _calling(self, *, spans: Sequence[Span] = (), slices: list[tuple[int, Span]] | None = None) -> Iterator[None]:
        earlier, self._call = self._call, _Call(spans, slices)
        try:
            yield
        finally:
            self._call = earlier

    def _span(self, parameter: Any) -> Span:
        return whole(self._names.get(id(parameter), ""), parameter.shape)

    def _spans_of(self, bucket: Sequence[Tensor]) -> tuple[Span, ...]:
        """Return the spans of gradients, or of the flat buffers in which BF16_Optimizer adds them up."""
        known = {
            parameter.grad.data_ptr(): [self._span(parameter)]
            for parameter in self._engine.module.parameters()
            if parameter.grad is not None
        }
        optimizer = self._engine.optimizer
        flats = getattr(optimizer, "fp32_groups_gradients_flat", ())
        for flat, members in zip(flats, getattr(optimizer, "bf16_groups", ()), strict=False):
            spans = [self._span(parameter) for parameter in members]
            known[flat.data_ptr()] = _padded(spans, flat.numel())
        found: list[Span] = []
        for tensor in bucket:
            spans = known.get(tensor.data_ptr(), [])
            is_whole = sum(span.num_elements for span in spans) == tensor.numel()
            found += spans if is_whole else [whole("", (tensor.numel(),))]
        return tuple(found)


@dataclass(frozen=True)
class _Call:
    """What DeepSpeed is about to sum."""

    spans: Sequence[Span] = ()
    slices: list[tuple[int, Span]] | None = None


def _layout_of(flat: Tensor, module: nn.Module, span_of: Callable[[Any], Span]) -> tuple[Span, ...]:
    """Return the spans of a flat buffer whose views are parameters."""
    members = [parameter for parameter in module.parameters() if _is_view(parameter, flat)]
    members.sort(key=lambda parameter: int(parameter.data_ptr()))
    spans: list[Span] = []
    position = 0
    for parameter in members:
        start = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
        spans = [*_padded(spans, start, position), span_of(parameter)]
        position = start + parameter.numel()
    return tuple(_padded(spans, flat.numel(), position))


def _is_view(parameter: Tensor, flat: Tensor) -> bool:
    return 0 <= parameter.data_ptr() - flat.data_ptr() < flat.nbytes and parameter.numel() > 0


def _padded(spans: list[Span], num_elements: int, position: int | None = None) -> list[Span]:
    """Add a span of padding, so that all spans together have `num_elements` elements."""
    held = sum(span.num_elements for span in spans) if position is None else position
    return spans if held == num_elements else [*spans, whole(f"padding {held}", (num_elements - held,))]
