# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients and gathers of parameters that several ranks hold: bytes and seconds of coding, level by level.

These are dense parameters, which all ranks hold, and experts that several expert-parallel groups hold.  Under ZeRO 1
and 2, a sum goes to the rank that owns the slot; after the optimizer, this rank sends the new parameters to all.
Without ZeRO, the sum itself goes to all.

    ZeRO    in every micro-step         once in an optimizer step
    0                                   sums, inner levels first; gather of the sums, outer levels first
    1                                   sums; gather of parameters
    2       sums at the fastest level   sums at the others; gather of parameters

If the fastest level has a gradient codec, sums cross it only once under ZeRO 2, too.  Source: sync/dense.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.codec_costs import patch_cost
from ds_hybridep.plan.costs import experts_per_rank, residual_bytes
from ds_hybridep.plan.layout import IDENTITY, CodecCost, Layout, Rates, SyncModel
from ds_hybridep.plan.slots import Shape, Slot, num_elements, shares_of
from ds_hybridep.plan.workload import Workload

NARROW_BYTES = 2  # parameters of this size travel as patches over every level that encodes them


@dataclass(frozen=True)
class SyncStage:
    """One level of a sum or of a gather, the same on every rank of the group.

    rank_bytes: bytes that a rank sends on average.  encode_s, decode_s: seconds before and after that.
    times: number of times in an optimizer step.
    follows_optimizer: True for gathers of parameters; other data that leaves at that time shares their delay.
    """

    level: int
    rank_bytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    times: int = 1
    follows_optimizer: bool = False


@dataclass(frozen=True)
class Held:
    """Parameters that several ranks hold.

    spans: positions of their group, by level.  tensors: in the model's order.  weights, gradients: codecs, by level.
    """

    spans: tuple[int, ...]
    tensors: tuple[Shape, ...]
    weights: tuple[CodecCost, ...]
    gradients: tuple[CodecCost, ...]

    @property
    def group_size(self) -> int:
        return math.prod(self.spans)

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels that the group crosses, slowest first."""
        return tuple(level for level, span in enumerate(self.spans) if span > 1)

    def messages_over(self, level: int) -> int:
        """Slots that a rank sends over a level in one sum."""
        return (self.spans[level] - 1) * math.prod(self.spans[:level])


def dense_parameters(cluster: Cluster, layout: Layout, workload: Workload) -> Held:
    codecs = layout.codecs
    return Held(
        cluster.sizes,
        workload.dense_tensors,
        tuple(one.dense_weight for one in codecs),
        tuple(one.dense_gradient for one in codecs),
    )


def shared_experts(cluster: Cluster, layout: Layout, workload: Workload) -> Held:
    """The experts of one rank, which ranks of other expert-parallel groups also hold."""
    spans = tuple(size // span for size, span in zip(cluster.sizes, layout.spans, strict=True))
    codecs = layout.codecs
    return Held(
        spans,
        workload.owned_tensors(experts_per_rank(layout, workload)),
        tuple(one.weight for one in codecs),
        tuple(one.gradient for one in codecs),
    )


@lru_cache(maxsize=4096)
def sync_stages(held: Held, workload: Workload) -> tuple[SyncStage, ...]:
    """All stages of an optimizer step, in the order in which they run; empty if no ranks share parameters."""
    if not held.levels or not held.tensors:
        return ()
    return (*_sum_stages(held, workload), *_gather_stages(held, workload))


def _sum_stages(held: Held, workload: Workload) -> list[SyncStage]:
    stages = []
    slots = shares_of(held.tensors, held.group_size, workload.zero_stage).gradients
    whole = mean_bytes(IDENTITY, slots, workload)
    for level in reversed(held.levels):
        codec, count = held.gradients[level], held.messages_over(level)
        stage = SyncStage(
            level,
            count * mean_bytes(codec, slots, workload),
            encode_s=count * whole / codec.encode_bytes_per_s,
            decode_s=count * whole / codec.decode_bytes_per_s,
        )
        is_repeated = level == held.levels[-1] and codec == IDENTITY and workload.zero_stage == 2
        stages.append(replace(stage, times=workload.micro_steps) if is_repeated else stage)
    return stages


def _gather_stages(held: Held, workload: Workload) -> list[SyncStage]:
    """Own slots leave encoded over levels that encode; slots that came encoded over slower levels stay encoded."""
    is_partitioned = workload.zero_stage >= 1
    shares = shares_of(held.tensors, held.group_size, workload.zero_stage)
    slots = shares.parameters if is_partitioned else shares.gradients
    codec, encoding_levels = gather_codec(held, workload)
    whole, encoded = mean_bytes(IDENTITY, slots, workload), mean_bytes(codec, slots, workload)
    stages = []
    for level in held.levels:
        num_encoded, num_whole = 0, 0
        for origin in (one for one in held.levels if one <= level):
            # Number of slots that came over `origin` before `level`; its own slot if both are the same level.
            count = 1
            if origin < level:
                count = (held.spans[origin] - 1) * math.prod(held.spans[origin + 1 : level])
            if origin in encoding_levels:
                num_encoded += count
            else:
                num_whole += count
        others = held.spans[level] - 1
        stages.append(
            SyncStage(
                level,
                others * (num_encoded * encoded + num_whole * whole),
                decode_s=others * num_encoded * whole / codec.decode_bytes_per_s,
                follows_optimizer=is_partitioned,
            )
        )
    if encoding_levels:
        # A rank decodes its own packet too, so that it has the same sum as the others.
        own_s = 0.0 if is_partitioned else whole / codec.decode_bytes_per_s
        stages[0] = replace(stages[0], encode_s=whole / codec.encode_bytes_per_s + own_s)
    return stages


def gather_codec(held: Held, workload: Workload) -> tuple[CodecCost, tuple[int, ...]]:
    """The one codec of a gather, and the levels that use it."""
    if workload.zero_stage == 0:
        codecs, wanted = held.gradients, [level for level in held.levels if held.gradients[level] != IDENTITY]
    elif workload.param_bytes == NARROW_BYTES:
        codecs, wanted = held.weights, [level for level in held.levels if held.weights[level] != IDENTITY]
        lossless = [codecs[level] for level in wanted if not codecs[level].is_lossy]
        if wanted:
            return next(iter(lossless), patch_cost(workload.learning_rate)), tuple(wanted)
    else:
        codecs, wanted = held.weights, [level for level in held.levels if held.weights[level].is_lossy]
    return (codecs[wanted[0]] if wanted else IDENTITY), tuple(wanted)


def mean_bytes(codec: CodecCost, slots: Sequence[Slot], workload: Workload) -> float:
    """Mean bytes of one slot's message."""
    if codec == IDENTITY:
        return sum(map(num_elements, slots)) * workload.param_bytes / len(slots)
    return math.fsum(codec.message_bytes(slot, workload.param_bytes) for slot in slots) / len(slots)


def sync_residual_bytes(held: Held, workload: Workload) -> float:
    """Bytes that codecs of gradients keep on a rank: residuals, and new residuals until the step is applied."""
    return 2 * _residual_bytes(held, workload)


def sync_host_traffic_s(held: Held, workload: Workload, rates: Rates) -> float:
    """Seconds to move residuals from the host to the device and back, if the host keeps them."""
    return 2 * _residual_bytes(held, workload) / rates.host_bytes_per_s


def before_step_bytes(held: Held, workload: Workload) -> float:
    """Bytes of a copy of own parameters, which lives from before the optimizer step until the gather after it."""
    is_kept = workload.zero_stage >= 1 and held.levels and gather_codec(held, workload)[1]
    return _slot_elements(held) * workload.param_bytes if is_kept else 0.0


def _residual_bytes(held: Held, workload: Workload) -> float:
    """Bytes of the residuals on a rank."""
    encoding_levels = [level for level in held.levels if held.gradients[level] != IDENTITY]
    residuals = sum(held.messages_over(level) for level in encoding_levels)
    if encoding_levels and workload.zero_stage == 0:
        residuals += 1  # for the sum of the own slot
    return _slot_elements(held) * residual_bytes(workload) * residuals


def _slot_elements(held: Held) -> float:
    return sum(map(math.prod, held.tensors)) / held.group_size


def ring_bytes(
    cluster: Cluster, spans: Sequence[int], num_bytes: float, passes: float, sync: SyncModel
) -> tuple[float, ...]:
    """Bytes over one uplink of each level when DeepSpeed's groups that span `spans` reduce or gather `num_bytes`.

    In each pass, a ring of g ranks sends (g - 1) / g of the bytes over the one edge by which it leaves a child.
    As many rings leave a child as there are groups in it.
    """
    group_size = math.prod(spans)
    result = []
    for level, span in enumerate(spans):
        num_groups = math.prod(cluster.sizes[level + 1 :]) // math.prod(spans[level + 1 :])
        share = (group_size - 1) / group_size
        result.append(sync.factor * passes * num_groups * share * num_bytes if span > 1 else 0.0)
    return tuple(result)
