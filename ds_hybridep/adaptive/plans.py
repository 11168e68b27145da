# SPDX-License-Identifier: Apache-2.0
"""The plans that the settings of a running job leave open, and what a step of each is predicted to take."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ds_hybridep.config import AUTO, HybridEPConfig, LevelConfig
from ds_hybridep.config_codecs import AUTO_CODEC, IDENTITY, CodecConfig
from ds_hybridep.geometry.cluster import Cluster, divisors
from ds_hybridep.plan.memory import Memory, memory_of
from ds_hybridep.plan.plan import JobPlan, LevelCodecs, SummedBy, is_crossed, plan_of
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.stream_model import StepPrediction, predict
from ds_hybridep.plan.workload import Workload


def open_plans(config: HybridEPConfig, spans: tuple[int, ...], *, trains_experts: bool = True) -> tuple[JobPlan, ...]:
    """Every plan that the settings leave open, once.  The first is as close to DeepSpeed as the settings allow.

    spans: positions of the expert-parallel group at each level.
    trains_experts: if False, expert packets are never encoded.
    """
    exchange = config.token_exchange
    exchanges = ("deepspeed", "direct", "hierarchical") if exchange == AUTO else (exchange,)
    sizes: list[tuple[int, ...]] = [
        divisors(span) if level.domain_size == "auto" else (level.domain_size,)
        for level, span in zip(config.levels, spans, strict=True)
    ]
    plans = []
    for domain_sizes in itertools.product(*sizes):
        levels = [
            _levels_with(level, size, config, trains_experts=trains_experts)
            for level, size in zip(config.levels, domain_sizes, strict=True)
        ]
        # "hierarchical" differs from "direct" only where tokens cross several levels.  DeepSpeed has no domains and no
        # hot experts.
        is_nested = sum(span > size for span, size in zip(spans, domain_sizes, strict=True)) > 1
        is_possible = {"direct": True, "hierarchical": is_nested or len(exchanges) == 1}
        is_possible["deepspeed"] = max(domain_sizes) == 1 and config.hot_level is None
        possible = [one for one in exchanges if is_possible[one]]
        for chosen, tokens in itertools.product(itertools.product(*levels), possible):
            plans.append(plan_of(config.model_copy(update={"levels": chosen, "token_exchange": tokens}), spans))
    return tuple(plans)


def _levels_with(
    level: LevelConfig, domain_size: int, config: HybridEPConfig, *, trains_experts: bool
) -> list[LevelConfig]:
    """The level once for each choice of codecs that it may have."""
    summed_by: SummedBy = "hierarchical" if config.dense_sync == "hierarchical" else "deepspeed"
    has_effect = level.hot_experts != 0 or is_crossed(level.size, domain_size, summed_by)

    def choices(codec: CodecConfig) -> list[CodecConfig]:
        if codec == AUTO_CODEC:
            return [IDENTITY, *(config.auto_codecs if trains_experts and has_effect else ())]
        return [codec if trains_experts or domain_size == 1 else IDENTITY]

    pairs = list(itertools.product(choices(level.weight_codec), choices(level.gradient_codec)))
    if AUTO_CODEC == level.weight_codec == level.gradient_codec:  # both get the same codec
        pairs = [pair for pair in pairs if pair[0] == pair[1]]
    # Dense parameters keep their codecs, also where nothing of the experts crosses the level.
    kinds = {
        "dense_weight_codec": level.all_codecs.dense_weight,
        "dense_gradient_codec": level.all_codecs.dense_gradient,
    }
    dense = {key: codec for key, codec in kinds.items() if codec != AUTO_CODEC}
    return [
        level.model_copy(
            update={"domain_size": domain_size, "weight_codec": weight, "gradient_codec": gradient, **dense}
        )
        for weight, gradient in pairs
    ]


@dataclass(frozen=True)
class Job:
    """What predictions start from; links and workload are those measured last.

    costs: of every codec that a plan may have, except the exact default.
    """

    cluster: Cluster
    workload: Workload
    rates: Rates
    costs: Mapping[CodecConfig, CodecCost]

    def predict(self, plan: JobPlan) -> StepPrediction:
        """Seconds of one step by the stream model."""
        return predict(self.cluster, plan.priced(self.costs), self.workload, self.rates)

    def memory(self, plan: JobPlan) -> Memory:
        """Memory of one rank without activations."""
        return memory_of(self.cluster, plan.priced(self.costs), self.workload)

    def filling_s(self, plan: JobPlan) -> float:
        """Seconds to fill replicas with exact weights over the levels where later steps send less."""
        priced = plan.priced(self.costs)
        is_encoded = [codecs.weight.is_lossy for codecs in priced.codecs]
        if not any(is_encoded):
            return 0.0
        exact = replace(priced, codecs=tuple(LevelCodecs(token=codecs.token) for codecs in priced.codecs))
        sent = predict(self.cluster, exact, self.workload, self.rates).uplink_bytes
        return sum(
            kinds["expert_weights"] * self.rates.wire_factor / level.link.bandwidth_bytes_per_s
            for is_less, level, kinds in zip(is_encoded, self.cluster.levels, sent, strict=True)
            if is_less and level.link.bandwidth_bytes_per_s is not None
        )


def label_of(plan: JobPlan) -> str:
    """A short text for people."""
    return f"{plan.label} tokens {plan.token_exchange}"
