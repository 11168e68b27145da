# SPDX-License-Identifier: Apache-2.0
"""How many rows a measured load of experts makes, where routing is not even."""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.cluster import unflatten
from ds_hybridep.plan.token_route import TokenExchange


def chance_needed(expert_load: Sequence[float], wanted: frozenset[int], top_k: int) -> float:
    """Chance that a token's `top_k` different experts contain at least one of `wanted`.

    expert_load: [num_experts] rows of each expert, in any unit. A choice of experts is taken to be as likely as the
        product of their loads: exact for even loads and for top-1.

    With e_k the sum over all choices of k experts of these products: 1 - e_k(others) / e_k(all).

    Source: conditional Poisson sampling.
    """
    everything = _sum_of_products(tuple(expert_load), top_k)
    others = tuple(load for expert, load in enumerate(expert_load) if expert not in wanted)
    return 1.0 - _sum_of_products(others, top_k) / everything


def expected_rows_of_load(
    expert_load: tuple[float, ...],
    spans: Sequence[int],
    domain_sizes: Sequence[int],
    *,
    top_k: int,
    num_tokens: int,
    exchange: TokenExchange,
) -> tuple[float, ...]:
    """`token_route.expected_rows` for a measured load: mean over ranks of the rows sent over each level.

    All ranks are taken to route alike. Ranks of the group own equal blocks of experts, in row-major order of `spans`.

    Raises PlanError where the load is no load of these experts.
    """
    num_ranks = math.prod(spans)
    if len(expert_load) % num_ranks or min(expert_load) < 0 or sum(load > 0 for load in expert_load) < top_k:
        raise PlanError(
            f"expert_load has {len(expert_load)} entries of which {sum(load > 0 for load in expert_load)} are > 0; it "
            f"must have one >= 0 for each expert, a multiple of {num_ranks}, and at least {top_k} > 0"
        )
    counts = [span // size for span, size in zip(spans, domain_sizes, strict=True)]
    # Scaled to a mean of 1, so that products of many stay in range.
    mean = sum(expert_load) / len(expert_load)
    sums = _needs_by_depth(tuple(load / mean for load in expert_load), tuple(spans), tuple(domain_sizes), top_k)
    rows = []
    for level, count in enumerate(counts):
        if exchange == "hierarchical":
            # One row for each group of experts that agree down to this level; it crosses unless it is there already.
            rows.append(num_tokens * sums[level] * (count - 1) / count)
        else:
            # One row for each domain; of the domains, this share differs first at this level.
            rows.append(num_tokens * sums[-1] * (count - 1) / math.prod(counts[: level + 1]))
    return tuple(rows)


@lru_cache(maxsize=4096)
def _needs_by_depth(
    load: tuple[float, ...], spans: tuple[int, ...], domain_sizes: tuple[int, ...], top_k: int
) -> tuple[float, ...]:
    """[levels] expected number of groups of domains, alike down to that level, of which a token needs an expert."""
    experts_per_rank = len(load) // math.prod(spans)
    coordinates = [
        tuple(p // size for p, size in zip(unflatten(expert // experts_per_rank, spans), domain_sizes, strict=True))
        for expert in range(len(load))
    ]
    result = []
    for depth in range(1, len(spans) + 1):
        experts = sorted(range(len(load)), key=lambda expert: coordinates[expert][:depth])
        groups = itertools.groupby(experts, key=lambda expert: coordinates[expert][:depth])
        result.append(sum(chance_needed(load, frozenset(members), top_k) for _, members in groups))
    return tuple(result)


@lru_cache(maxsize=65536)
def _sum_of_products(loads: tuple[float, ...], top_k: int) -> float:
    """Elementary symmetric polynomial e_k: the sum over all choices of k loads of their products."""
    sums = [1.0] + [0.0] * top_k
    for load in loads:
        for size in range(top_k, 0, -1):
            sums[size] += load * sums[size - 1]
    return sums[top_k]
