# SPDX-License-Identifier: Apache-2.0
"""The parts of a plan: codecs, rates of a machine, how sums travel, expert-parallel groups and layouts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.geometry.packets import Packets, Part, part_elements
from ds_hybridep.geometry.token_route import TokenExchange


@dataclass(frozen=True)
class CodecCost:
    """Cost of an encoding on the rank's own device; its rates count bytes before the encoding.

    ratio: bytes before the encoding over bytes on the wire; used if `packets` is None.
    packets: computes the bytes of a message from the shapes in it.
    """

    name: str
    ratio: float = 1.0
    encode_bytes_per_s: float = math.inf
    decode_bytes_per_s: float = math.inf
    is_lossy: bool = True
    packets: Packets | None = None

    def message_bytes(self, parts: Sequence[Part], element_bytes: int) -> float:
        """Bytes of one message that holds these parts; an element has `element_bytes` before the encoding."""
        if self.packets is not None:
            return self.packets.message_bytes(parts)
        return sum(map(part_elements, parts)) * element_bytes / self.ratio


IDENTITY = CodecCost("identity", is_lossy=False)
EXACT = "exact"


@dataclass(frozen=True)
class LevelCodecs:
    """Codecs for data that crosses one level.

    weight, gradient: codecs of experts, including experts that several groups hold.
    token: codec of rows on their way to experts; other rows are not encoded.
    dense_weight, dense_gradient: codecs of parameters that all ranks hold.
    name: name of the whole set, for people.
    """

    weight: CodecCost = IDENTITY
    gradient: CodecCost = IDENTITY
    token: CodecCost = IDENTITY
    dense_weight: CodecCost = IDENTITY
    dense_gradient: CodecCost = IDENTITY
    name: str = field(default="", kw_only=True)

    @property
    def label(self) -> str:
        """Name of the set, or the names of its codecs of experts."""
        return EXACT if self == LevelCodecs() else self.name or f"{self.weight.name}/{self.gradient.name}"

    @property
    def is_lossy(self) -> bool:
        """True if a codec of parameters or gradients loses something."""
        return any(one.is_lossy for one in (self.weight, self.gradient, self.dense_weight, self.dense_gradient))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed of one rank, and costs of the host.  Host times that are not given are 0.

    flops_per_s, expert_flops_per_s: rates that dense products and experts reach; None: experts reach the same rate.
    layer_s, expert_call_s: host time of a layer, and of calling one expert, in a forward; a backward takes twice that.
    exchange_s, all_to_all_s: host time of one round of messages of our token exchange, and of one all-to-all of
        DeepSpeed's layer. Bytes flow during this time: rows of early ranks travel while late ranks compute.
    packet_s: host time of one packet of a layer's weights, or of its gradients.
    overlap: hidden share of the time that could be hidden; 0: a rank waits for each packet separately.
    wire_factor: bytes on the wire for each byte of payload, because of headers.
    """

    flops_per_s: float
    expert_flops_per_s: float | None = None
    layer_s: float = 0.0
    expert_call_s: float = 0.0
    exchange_s: float = 0.0
    all_to_all_s: float = 0.0
    packet_s: float = 0.0
    step_s: float = 0.0
    overlap: float = 1.0
    wire_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise PlanError(f"overlap is {self.overlap}, but must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class SyncModel:
    """How ranks sum the gradients of parameters that several ranks hold, and gather the parameters.

    algorithm: "hierarchical": level by level, with the levels' codecs (`plan.held`); "ring": DeepSpeed's rings.
    factor: measured bytes over the bytes that this model predicts.
    """

    algorithm: Literal["ring", "hierarchical"] = "hierarchical"
    factor: float = 1.0


BY_DEEPSPEED = SyncModel(algorithm="ring")


@dataclass(frozen=True)
class ExpertGroup:
    """Ranks that share the experts: neighbours, or strided by DeepSpeed's `use_data_before_expert_parallelism`."""

    ep_size: int
    is_strided: bool = False

    def spans(self, cluster: Cluster) -> tuple[int, ...]:
        """Number of positions of one group at each level.  Raises PlanError if it is not a regular grid of levels."""
        rest, spans = self.ep_size, [1] * len(cluster.levels)
        order = range(len(spans)) if self.is_strided else reversed(range(len(spans)))
        for level in order:
            size = cluster.sizes[level]
            if rest % size == 0:
                spans[level] = size
            elif size % rest == 0:
                spans[level] = rest
            else:
                break
            rest //= spans[level]
        if rest != 1 or self.ep_size < 1:
            raise PlanError(
                f"ep_size {self.ep_size} is no regular grid of the levels {cluster}; choose a divisor of one level's "
                f"size times all sizes {'above' if self.is_strided else 'below'} it"
            )
        return tuple(spans)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All that a plan decides: where experts and their copies are, and how data travels.

    spans, domain_sizes, codecs: one entry for each level; a span counts positions of the expert-parallel group.
    prefetch_depth: least layers between the start of a gradient's return and the wait for it; see `return_depth`.
    is_padded: use DeepSpeed's own layer instead of ours: it has padded all-to-alls and no domains.
    state: where codecs keep residuals, mirrors and fp32 copies.
    hot_experts, hot_level: most hot experts of a layer in each part of the group that shares them, and the level
        inside which they have replicas (`plan.routing`).
    """

    spans: tuple[int, ...]
    domain_sizes: tuple[int, ...]
    codecs: tuple[LevelCodecs, ...]
    prefetch_depth: int = 2
    exchange: TokenExchange = "direct"
    is_padded: bool = False
    state: Literal["device", "host"] = "device"
    hot_experts: int = 0
    hot_level: int | None = None

    def __post_init__(self) -> None:
        if any(size < 1 or span % size for span, size in zip(self.spans, self.domain_sizes, strict=True)):
            raise PlanError(f"domain sizes {self.domain_sizes} do not divide the group's spans {self.spans}")
        alone = [level for level, size in enumerate(self.domain_sizes) if size == 1]
        if self.hot_experts and (self.is_padded or self.hot_level not in alone):
            raise PlanError(
                f"{self.hot_experts} hot experts inside level {self.hot_level} do not fit domain sizes "
                f"{self.domain_sizes}{' and padded all-to-alls' if self.is_padded else ''}: give a level with domain "
                f"size 1 and our own exchange"
            )

    def check_fits(self, cluster: Cluster) -> None:
        """Raises PlanError if the levels of a cluster cannot be cut into groups of these spans."""
        sizes = cluster.sizes
        if len(self.spans) != len(sizes) or any(size % span for span, size in zip(self.spans, sizes, strict=True)):
            raise PlanError(f"a group that spans {self.spans} does not fit the levels {cluster}")

    @cached_property
    def domain_counts(self) -> tuple[int, ...]:
        """Number of domains at each level."""
        return tuple(span // size for span, size in zip(self.spans, self.domain_sizes, strict=True))

    @property
    def hot_by_level(self) -> tuple[int, ...]:
        """Most hot experts inside each level."""
        return tuple(self.hot_experts if level == self.hot_level else 0 for level in range(len(self.spans)))

    @property
    def group_size(self) -> int:
        """Number G of ranks in the expert-parallel group."""
        return math.prod(self.spans)

    @property
    def domain_size(self) -> int:
        """Number M of ranks in a domain."""
        return math.prod(self.domain_sizes)

    @cached_property
    def gather_levels(self) -> tuple[int, ...]:
        """Levels over which experts travel."""
        return tuple(level for level, size in enumerate(self.domain_sizes) if size > 1)
