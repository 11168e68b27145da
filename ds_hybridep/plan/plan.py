# SPDX-License-Identifier: Apache-2.0
"""The plan: all that is decided about a job's MoE layers, as one value.

    settings  --plan_of-->      JobPlan  --priced-->  PricedPlan  -->  the stream model, the simulator
              <--settings_of--                        also made by the planner's search

Plans are compared field by field; a label is only for people.  A running job's plan has the settings of its codecs.
A prediction needs their costs, so a priced plan has those in their place; all other fields are the same.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields
from functools import cached_property
from typing import Any, Generic, Literal, Protocol, TypeVar

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.config_codecs import CodecConfig
from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.plan.rates import IDENTITY, CodecCost

EXACT = "exact"
RECOMMENDED = "recommended"  # name of a set of codecs; a block asks for the set by this name
SummedBy = Literal["hierarchical", "deepspeed"]
_NO_CODEC: Any = IDENTITY  # the default of priced plans


class Named(Protocol):
    """What stands for a codec in a plan: its settings, or its cost."""

    @property
    def name(self) -> str: ...


CodecT = TypeVar("CodecT", bound=Named)


@dataclass(frozen=True)
class LevelCodecs(Generic[CodecT]):
    """Codecs for data that crosses one level.

    weight, gradient: codecs of experts, including experts that several groups hold.
    token: codec of rows on their way to experts; other rows are not encoded.
    dense_weight, dense_gradient: codecs of parameters that all ranks hold.
    name: name of the whole set, for people.
    """

    weight: CodecT = _NO_CODEC
    gradient: CodecT = _NO_CODEC
    _: KW_ONLY
    token: CodecT = _NO_CODEC
    dense_weight: CodecT = _NO_CODEC
    dense_gradient: CodecT = _NO_CODEC
    name: str = ""

    @property
    def encodes_experts(self) -> bool:
        """True if weights or gradients of experts are encoded."""
        return not self.weight.name == self.gradient.name == IDENTITY.name

    @property
    def is_lossy(self: "LevelCodecs[CodecCost]") -> bool:
        """True if a codec of parameters or gradients loses something."""
        return any(one.is_lossy for one in (self.weight, self.gradient, self.dense_weight, self.dense_gradient))

    @property
    def label(self) -> str:
        """Name of the set, or the names of its codecs of experts, for people."""
        if not self.name and not self.encodes_experts:
            return EXACT
        return self.name or "/".join(dict.fromkeys((self.weight.name, self.gradient.name)))


@dataclass(frozen=True)
class HotLimit:
    """Experts of a layer that may be hot: inside which level, and how many at most in each part of the group.

    The ranks of a part share its hot experts (`plan.routing`).  "auto": as many as pay, which a running job measures.
    """

    level: int
    most: int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Plan(Generic[CodecT]):
    """All that is decided: where experts and their copies are, and how data travels.

    spans, domain_sizes, codecs: one entry for each level; a span counts positions of the expert-parallel group.
    token_exchange: ours, straight or level by level, or DeepSpeed's own layer with padded all-to-alls and no domains.
    dense_sync: who sums the gradients of parameters that several ranks hold, and gathers the parameters: this package
        level by level, with the levels' codecs (`plan.held`), or DeepSpeed's rings.
    state: where codecs keep residuals, mirrors and fp32 copies.
    hot: the experts that may be hot; None: no expert is.
    prefetch_depth: least layers between the start of a gradient's return and the wait for it; see `return_depth`.
    """

    spans: tuple[int, ...]
    domain_sizes: tuple[int, ...]
    codecs: tuple[LevelCodecs[CodecT], ...]
    token_exchange: Literal["direct", "hierarchical", "deepspeed"] = "direct"
    dense_sync: SummedBy = "hierarchical"
    state: Literal["device", "host"] = "device"
    hot: HotLimit | None = None
    prefetch_depth: int = 2

    def __post_init__(self) -> None:
        if any(size < 1 or span % size for span, size in zip(self.spans, self.domain_sizes, strict=True)):
            raise PlanError(f"domain sizes {self.domain_sizes} do not divide the group's spans {self.spans}")
        alone = [level for level, size in enumerate(self.domain_sizes) if size == 1]
        if self.hot is not None and (self.is_padded or self.hot.level not in alone):
            raise PlanError(
                f"{self.hot.most} hot experts inside level {self.hot.level} do not fit domain sizes "
                f"{self.domain_sizes}{' and padded all-to-alls' if self.is_padded else ''}: give a level with domain "
                f"size 1 and our own exchange"
            )

    def check_fits(self, cluster: Cluster) -> None:
        """Raises PlanError if the levels of a cluster cannot be cut into groups of these spans."""
        sizes = cluster.sizes
        if len(self.spans) != len(sizes) or any(size % span for span, size in zip(self.spans, sizes, strict=True)):
            raise PlanError(f"a group that spans {self.spans} does not fit the levels {cluster}")

    @property
    def is_padded(self) -> bool:
        """True if DeepSpeed's own layer sends the tokens."""
        return self.token_exchange == "deepspeed"

    @cached_property
    def domain_counts(self) -> tuple[int, ...]:
        """Number of domains at each level."""
        return tuple(span // size for span, size in zip(self.spans, self.domain_sizes, strict=True))

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

    @property
    def num_hot(self) -> int:
        """Most hot experts as far as a prediction knows; "auto" is priced as none."""
        return 0 if self.hot is None or self.hot.most == "auto" else self.hot.most

    @property
    def hot_by_level(self) -> tuple[int, ...]:
        """`num_hot` inside each level."""
        at = None if self.hot is None else self.hot.level
        return tuple(self.num_hot if level == at else 0 for level in range(len(self.spans)))

    @property
    def encodes_experts(self) -> bool:
        """True if weights or gradients of experts are encoded over some level."""
        return any(codecs.encodes_experts for codecs in self.codecs)

    @property
    def label(self) -> str:
        """For people: domain sizes, hot experts by level if any, and codecs by level unless all are exact."""
        text = listed(self.domain_sizes)
        if self.num_hot:
            text += f" hot {listed(self.hot_by_level)}"
        if self.state == "host":
            text += " host state"
        names = [codecs.label for codecs in self.codecs]
        return text if all(name == EXACT for name in names) else f"{text} {'|'.join(names)}"

    def num_differences(self, other: "Plan[CodecT]") -> int:
        """Number of decisions in which two plans differ; hot experts do not count, they follow the domain sizes."""
        names = (one.name for one in fields(self) if one.name != "hot")
        return sum(getattr(self, name) != getattr(other, name) for name in names)

    def priced(self, costs: Mapping[CodecT, CodecCost]) -> "Plan[CodecCost]":
        """The plan for predictions.  A codec without a cost is taken for exact."""
        codecs = tuple(
            LevelCodecs(
                weight=costs.get(one.weight, IDENTITY),
                gradient=costs.get(one.gradient, IDENTITY),
                token=costs.get(one.token, IDENTITY),
                dense_weight=costs.get(one.dense_weight, IDENTITY),
                dense_gradient=costs.get(one.dense_gradient, IDENTITY),
                name=one.name,
            )
            for one in self.codecs
        )
        others = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "codecs"}
        return Plan(codecs=codecs, **others)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values; those of equal plans are equal.  Codecs must be settings."""
        return dict(json.loads(json.dumps(asdict(self), default=lambda codec: codec.spec)))


JobPlan = Plan[CodecConfig]  # of a running job
PricedPlan = Plan[CodecCost]  # for predictions
CodecCosts = LevelCodecs[CodecCost]  # of one level


def is_crossed(size: int, domain_size: int, dense_sync: SummedBy) -> bool:
    """Whether weights and gradients cross a level of this size: those of domains, or of what its children all hold."""
    return domain_size > 1 or (size > 1 and dense_sync == "hierarchical")


def listed(values: tuple[int, ...]) -> str:
    """Values by level, as in [2,1]."""
    return "[" + ",".join(map(str, values)) + "]"


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


# ---- plans of running jobs ----


def plan_of(
    config: HybridEPConfig, spans: tuple[int, ...], token_exchange: Literal["direct", "hierarchical"] | None = None
) -> JobPlan:
    """The plan that settings give to layers whose expert-parallel group has these spans.

    token_exchange: what "auto" stands for.  A domain size that is still "auto" is 1.  There are no hot experts where
    tokens of ours do not cross their level.
    """
    exchange = token_exchange if config.token_exchange == "auto" else config.token_exchange
    assert exchange is not None, 'token_exchange is "auto", and nobody says what it stands for'
    sizes, level = config.domain_sizes, config.hot_level
    hot = None
    if level is not None and spans[level] > 1 and sizes[level] == 1 and exchange != "deepspeed":
        hot = HotLimit(level, config.levels[level].hot_experts)
    return Plan(
        spans=spans,
        domain_sizes=sizes,
        codecs=tuple(LevelCodecs(token=level.token_codec, **level.all_codecs._asdict()) for level in config.levels),
        token_exchange=exchange,
        dense_sync="hierarchical" if config.dense_sync == "hierarchical" else "deepspeed",
        state=config.state,
        hot=hot,
        prefetch_depth=config.advanced.prefetch_depth,
    )


def settings_of(plan: JobPlan, config: HybridEPConfig) -> HybridEPConfig:
    """The settings with a plan's domain sizes, codecs and token exchange in place of "auto"."""
    levels = tuple(
        level.model_copy(
            update={
                "domain_size": size,
                "weight_codec": codecs.weight,
                "gradient_codec": codecs.gradient,
                "dense_weight_codec": codecs.dense_weight,
                "dense_gradient_codec": codecs.dense_gradient,
            }
        )
        for level, size, codecs in zip(config.levels, plan.domain_sizes, plan.codecs, strict=True)
    )
    return config.model_copy(update={"levels": levels, "token_exchange": plan.token_exchange})
