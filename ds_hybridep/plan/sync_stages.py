# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients and gathers of parameters that several ranks hold: bytes and seconds of coding, level by level.

These are dense parameters, which all ranks hold, and experts that several expert-parallel groups hold.  Under ZeRO 1
and 2 a sum goes to the rank that owns the slot, and after the optimizer its new parameters go to all; without ZeRO the
sum itself goes to all.

    ZeRO    in every micro-step         once in an optimizer step
    0                                   sums, inner levels first; gather of the sums, outer levels first
    1                                   sums; gather of parameters
    2       sums at the fastest level   sums at the others; gather of parameters

A fastest level with a gradient codec is crossed once under ZeRO 2 too.  Source: sync/dense.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.codec_costs import patch_cost
from ds_hybridep.plan.costs import experts_per_rank
from ds_hybridep.plan.layout import IDENTITY, CodecCost, Layout, Rates, SyncModel
from ds_hybridep.plan.slots import Shape, Slot, num_elements, shares_of
from ds_hybridep.plan.workload import Workload

NARROW_BYTES = 2  # of parameters that travel as patches wherever a level encodes them


@dataclass(frozen=True)
class SyncStage:
    """One level of a sum or of a gather, as every rank of the group has it.

    rank_bytes: that a rank sends, on average; encode_s, decode_s: before and after.
    times: in an optimizer step.
    follows_optimizer: parameters; what else leaves then shares their delay.
    """

    level: int
    rank_bytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    times: int = 1
    follows_optimizer: bool = False


@dataclass(frozen=True)
class Held:
    """Parameters that several ranks hold: positions of their group at each level, and codecs of each level.

    tensors: in the order of the model.
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
    """The experts of one rank, which ranks of other expert-parallel groups hold too."""
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
    """All stages of an optimizer step, in the order in which they run; none where nothing is shared."""
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
    """Own slots leave encoded over the levels that encode; what came encoded over slower levels goes on so."""
    is_partitioned = workload.zero_stage >= 1
    shares = shares_of(held.tensors, held.group_size, workload.zero_stage)
    slots = shares.parameters if is_partitioned else shares.gradients
    codec, encoding_levels = gather_codec(held, workload)
    whole, encoded = mean_bytes(IDENTITY, slots, workload), mean_bytes(codec, slots, workload)
    stages = []
    for level in held.levels:
        num_encoded, num_whole = 0, 0
        for origin in (one for one in held.levels if one <= level):
            # Slots that a rank has by then from over `origin`, or its own.
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
        # The sum that a rank gives to others it takes from the same packet.
        own_s = 0.0 if is_partitioned else whole / codec.decode_bytes_per_s
        stages[0] = replace(stages[0], encode_s=whole / codec.encode_bytes_per_s + own_s)
    return stages


def gather_codec(held: Held, workload: Workload) -> tuple[CodecCost, tuple[int, ...]]:
    """The one codec of a gather, and the levels over which it is used."""
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
    """What codecs keep of gradients on a rank: residuals, and new ones until the step is applied."""
    return 2 * _residual_bytes(held, workload)


def sync_host_traffic_s(held: Held, workload: Workload, rates: Rates) -> float:
    """Seconds in which residuals pass between host and device where they are kept there: read, and written."""
    return 2 * _residual_bytes(held, workload) / rates.host_bytes_per_s


def before_step_bytes(held: Held, workload: Workload) -> float:
    """Bytes of the copy of own parameters that is kept from before the optimizer step until the gather after it."""
    is_kept = workload.zero_stage >= 1 and held.levels and gather_codec(held, workload)[1]
    return _slot_bytes(held, workload) if is_kept else 0.0


def _residual_bytes(held: Held, workload: Workload) -> float:
    """They have the parameters' type."""
    encoding_levels = [level for level in held.levels if held.gradients[level] != IDENTITY]
    residuals = sum(held.messages_over(level) for level in encoding_levels)
    if encoding_levels and workload.zero_stage == 0:
        residuals += 1  # of the own slot's sum
    return _slot_bytes(held, workload) * residuals


def _slot_bytes(held: Held, workload: Workload) -> float:
    return sum(map(math.prod, held.tensors)) / held.group_size * workload.param_bytes


def ring_bytes(
    cluster: Cluster, spans: Sequence[int], num_bytes: float, passes: float, sync: SyncModel
) -> tuple[float, ...]:
    """Bytes over one uplink of each level when DeepSpeed's groups that span `spans` reduce or gather `num_bytes`.

    A ring of g ranks sends (g - 1) / g of the bytes for each pass over one edge that leaves each child, and as many
    rings leave a child as it has groups.
    """
    group_size = math.prod(spans)
    result = []
    for level, span in enumerate(spans):
        num_groups = math.prod(cluster.sizes[level + 1 :]) // math.prod(spans[level + 1 :])
        share = (group_size - 1) / group_size
        result.append(sync.factor * passes * num_groups * share * num_bytes if span > 1 else 0.0)
    return tuple(result)
