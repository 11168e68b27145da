# SPDX-License-Identifier: Apache-2.0
"""Lets DeepSpeed's own sums of dense gradients and gathers of dense parameters travel level by level.

DeepSpeed's code is not replaced: its scaling, data types and buckets stay as they are.  What changes is the process
group that it calls torch with, on one engine and its optimizer.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ds_hybridep.errors import UnsupportedError
from ds_hybridep.integration.patches import ENGINE, ZERO_OPTIMIZER, Patches
from ds_hybridep.sync.collectives import LevelCollectives
from ds_hybridep.transport.job import group_ranks
from ds_hybridep.transport.stand_in import StandInGroup

_REMEDY = 'or set hybridep.dense_sync to "deepspeed"'


def refuse_unsupported(engine: Any) -> None:
    """Raise UnsupportedError where a setting makes DeepSpeed reduce dense gradients in a way that is not covered."""
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
    for reason, is_used in reasons.items():
        if is_used:
            raise UnsupportedError(
                f'hybridep.dense_sync is "hierarchical", which does not work with {reason}, {_REMEDY}'
            )
    ranks = group_ranks(engine.seq_data_parallel_group)
    if ranks != tuple(range(len(ranks))) or len(ranks) != engine.world_size:
        raise UnsupportedError(
            f'hybridep.dense_sync is "hierarchical", which sums over all ranks of the job, but dense parameters are '
            f"data-parallel over ranks {list(ranks)} of {engine.world_size}; leave out the mpu, {_REMEDY}"
        )


class DenseSync:
    """Carries DeepSpeed's sums and gathers of dense parameters for one engine that `refuse_unsupported` has passed."""

    def __init__(self, engine: Any, collectives: LevelCollectives, patches: Patches) -> None:
        self._collectives = collectives
        self._original = engine.seq_data_parallel_group
        self._group = StandInGroup(self._original, self._all_reduce, collectives.all_gather)
        self._slices: list[tuple[int, int]] | None = None
        self._patches = patches
        patches.keep("torch.distributed.distributed_c10d:_World", "pg_map, pg_group_ranks", self._group.unregister)
        patches.wrap(ENGINE, "allreduce_bucket", engine, self._allreduce_bucket)

    def watch(self, optimizer: Any) -> None:
        """Take over the groups of an optimizer that partitions its state (ZeRO 1 and 2); others have none."""
        groups = getattr(optimizer, "real_dp_process_group", None)
        if groups is None or self._group in groups:
            return
        replaced = [self._group if group is self._original else group for group in groups]
        self._patches.put(ZERO_OPTIMIZER, "dp_process_group", optimizer, self._group)
        self._patches.put(ZERO_OPTIMIZER, "real_dp_process_group", optimizer, replaced)
        name = "allreduce_and_copy_with_multiple_ranks"
        if hasattr(optimizer, name):
            self._patches.wrap(ZERO_OPTIMIZER, name, optimizer, self._sum_for_owners_only)

    def _allreduce_bucket(self, original: Callable[..., Any], bucket: Any, dp_group: Any, *args: Any) -> Any:
        return original(bucket, self._group if dp_group is self._original else dp_group, *args)

    def _sum_for_owners_only(
        self, original: Callable[..., Any], bucket: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """ZeRO sums whole buckets over all ranks, and each rank reads its partition of them: sum no more than that."""
        if kwargs.get("process_group") is self._group:
            self._slices = _slices_of(bucket, kwargs.get("bucket_ranks"))
        try:
            return original(bucket, *args, **kwargs)
        finally:
            self._slices = None

    def _all_reduce(self, tensor: Tensor) -> None:
        if self._slices is None:
            self._collectives.all_reduce(tensor)
        else:
            self._collectives.reduce_slices(tensor, self._slices)


def _slices_of(bucket: Sequence[Tensor], ranks: Sequence[Any] | None) -> list[tuple[int, int]] | None:
    """(owner, number of elements) of each tensor in the bucket; None where one is read by several ranks."""
    owners = [rank if isinstance(rank, frozenset) else frozenset((rank,)) for rank in ranks or ()]
    if len(owners) != len(bucket) or any(len(some) != 1 for some in owners):
        return None
    return [(next(iter(some)), tensor.numel()) for some, tensor in zip(owners, bucket, strict=True)]
