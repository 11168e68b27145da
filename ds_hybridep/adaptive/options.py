# SPDX-License-Identifier: Apache-2.0
"""The options that the settings of a running job leave open, and the predicted step of each."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ds_hybridep.config import AUTO, HybridEPConfig, LevelConfig
from ds_hybridep.config_codecs import AUTO_CODEC, IDENTITY, CodecConfig, describe_codec
from ds_hybridep.geometry.cluster import Cluster, divisors
from ds_hybridep.plan.layout import BY_DEEPSPEED, CodecCost, Layout, LevelCodecs, Rates, SyncModel
from ds_hybridep.plan.layout import IDENTITY as EXACT_COST
from ds_hybridep.plan.memory import Memory, memory_of
from ds_hybridep.plan.stream_model import StepPrediction, predict
from ds_hybridep.plan.workload import Workload

TokenExchange = Literal["direct", "hierarchical", "deepspeed", "auto"]


@dataclass(frozen=True)
class Option:
    """Everything that can change while a job runs; `layout` describes it to the stream model."""

    config: HybridEPConfig
    layout: Layout

    def settings_other_than(self, other: "Option") -> int:
        """Number of settings in which two options differ."""
        return sum(ours != its for ours, its in zip(settings_of(self.config), settings_of(other.config), strict=True))

    @property
    def is_encoded(self) -> bool:
        """True if some level has a codec for experts."""
        return any(settings_of(self.config)[1])

    @property
    def label(self) -> str:
        """A short text for people; different options have different labels."""
        sizes, codecs, exchange, *_ = settings_of(self.config)
        names = ["/".join(dict.fromkeys(map(describe_codec, pair))) for pair in codecs if pair]
        text = " ".join(["[" + ",".join(map(str, sizes)) + "]", *names])
        return f"{text} tokens {exchange}"


def settings_of(config: HybridEPConfig) -> tuple[Any, ...]:
    """Domain sizes, codecs of experts (None for exact), the token exchange, and settings that no option changes."""
    pairs = [(level.weight_codec, level.gradient_codec) for level in config.levels]
    codecs = tuple(None if pair == (IDENTITY, IDENTITY) else pair for pair in pairs)
    of_dense = tuple(
        tuple(None if ours == theirs else ours for ours, theirs in zip(known[2:], known[:2], strict=True))
        for known in (level.all_codecs for level in config.levels)
    )
    row_formats = tuple(level.row_format for level in config.levels)
    hot = tuple(level.hot_experts for level in config.levels)
    return config.domain_sizes, codecs, config.token_exchange, config.dense_sync, of_dense, row_formats, hot


def open_options(
    config: HybridEPConfig,
    *,
    spans: tuple[int, ...],
    codecs: Mapping[CodecConfig, CodecCost],
    token_codecs: Sequence[CodecCost],
    trains_experts: bool = True,
) -> tuple[Option, ...]:
    """Every option that the settings leave open, once.  The first is as close to DeepSpeed as the settings allow.

    spans: positions of the expert-parallel group at each level.
    codecs: the cost of every codec that may be used except the exact default.
    token_codecs: one for each level; they have no effect where DeepSpeed sends the tokens.
    trains_experts: if False, expert packets are never encoded.
    """
    exchange = config.token_exchange
    exchanges: tuple[TokenExchange, ...] = ("deepspeed", "direct", "hierarchical") if exchange == AUTO else (exchange,)
    sizes: list[tuple[int, ...]] = [
        divisors(span) if level.domain_size == "auto" else (level.domain_size,)
        for level, span in zip(config.levels, spans, strict=True)
    ]
    options = []
    for domain_sizes in itertools.product(*sizes):
        levels = [
            _settings_at(level, size, config, has_codecs=trains_experts and bool(codecs))
            for level, size in zip(config.levels, domain_sizes, strict=True)
        ]
        # "hierarchical" differs from "direct" only where tokens cross several levels.  DeepSpeed has no domains and no
        # hot experts.
        is_nested = sum(span > size for span, size in zip(spans, domain_sizes, strict=True)) > 1
        is_possible = {"direct": True, "hierarchical": is_nested or len(exchanges) == 1}
        is_possible["deepspeed"] = max(domain_sizes) == 1 and config.hot_level is None
        possible = [one for one in exchanges if is_possible[one]]
        for chosen, tokens in itertools.product(itertools.product(*levels), possible):
            settings = config.model_copy(update={"levels": chosen, "token_exchange": tokens})
            options.append(Option(settings, _layout_of(settings, spans, codecs, token_codecs)))
    return tuple(options)


def _settings_at(level: LevelConfig, domain_size: int, config: HybridEPConfig, has_codecs: bool) -> list[LevelConfig]:
    """The level once for each choice of codecs that it may have."""

    # Without domains over a level, hot experts and sums of the parameters that several of its children hold cross it.
    is_crossed = domain_size > 1 or level.hot_experts != 0
    is_crossed = is_crossed or (level.size > 1 and config.dense_sync == "hierarchical")

    def choices(codec: CodecConfig) -> list[CodecConfig]:
        if codec == AUTO_CODEC:
            return [IDENTITY, *(config.auto_codecs if has_codecs and is_crossed else ())]
        return [codec if has_codecs or domain_size == 1 else IDENTITY]

    pairs = list(itertools.product(choices(level.weight_codec), choices(level.gradient_codec)))
    if AUTO_CODEC == level.weight_codec == level.gradient_codec:  # both get the same codec
        pairs = [pair for pair in pairs if pair[0] == pair[1]]
    # Dense parameters keep their codecs, also where nothing of the experts crosses the level.
    kinds = zip(("dense_weight_codec", "dense_gradient_codec"), level.all_codecs[2:], strict=True)
    dense = {key: codec for key, codec in kinds if codec != AUTO_CODEC}
    return [
        level.model_copy(
            update={"domain_size": domain_size, "weight_codec": weight, "gradient_codec": gradient, **dense}
        )
        for weight, gradient in pairs
    ]


def _layout_of(
    config: HybridEPConfig,
    spans: tuple[int, ...],
    costs: Mapping[CodecConfig, CodecCost],
    token_codecs: Sequence[CodecCost],
) -> Layout:
    levels = []
    for level, token in zip(config.levels, token_codecs, strict=True):
        weight, gradient, dense_weight, dense_gradient = (costs.get(one, EXACT_COST) for one in level.all_codecs)
        levels.append(LevelCodecs(weight, gradient, token, dense_weight, dense_gradient))
    # How many "auto" is, is decided while the job runs: it is priced as none.
    at, is_padded = config.hot_level, config.token_exchange == "deepspeed"
    wanted = 0 if at is None or is_padded or config.domain_sizes[at] > 1 else config.levels[at].hot_experts
    return Layout(
        hot_experts=0 if wanted == "auto" else wanted,
        hot_level=at,
        spans=spans,
        domain_sizes=config.domain_sizes,
        codecs=tuple(levels),
        prefetch_depth=config.advanced.prefetch_depth,
        exchange="hierarchical" if config.token_exchange == "hierarchical" else "direct",
        is_padded=is_padded,
    )


@dataclass(frozen=True)
class Job:
    """What predictions start from; links and workload are those measured last."""

    cluster: Cluster
    workload: Workload
    rates: Rates

    def predict(self, option: Option) -> StepPrediction:
        """Seconds of one step by the stream model."""
        sync = SyncModel() if option.config.dense_sync == "hierarchical" else BY_DEEPSPEED
        return predict(self.cluster, option.layout, self.workload, self.rates, sync)

    def memory(self, option: Option) -> Memory:
        """Memory of one rank without activations."""
        return memory_of(self.cluster, option.layout, self.workload)

    def filling_s(self, option: Option) -> float:
        """Seconds to fill replicas with exact weights over the levels where later steps send less."""
        layout = option.layout
        is_encoded = [codecs.weight.is_lossy for codecs in layout.codecs]
        if not any(is_encoded):
            return 0.0
        exact = replace(layout, codecs=tuple(LevelCodecs(token=codecs.token) for codecs in layout.codecs))
        sent = predict(self.cluster, exact, self.workload, self.rates).uplink_bytes
        return sum(
            kinds["expert_weights"] * self.rates.wire_factor / level.link.bandwidth_bytes_per_s
            for is_less, level, kinds in zip(is_encoded, self.cluster.levels, sent, strict=True)
            if is_less and level.link.bandwidth_bytes_per_s is not None
        )
