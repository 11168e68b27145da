# SPDX-License-Identifier: Apache-2.0
"""How token rows travel between domains: straight to the peers, or level by level with fewer rows on slow links."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Literal, get_args

from ds_hybridep.geometry.cluster import Cluster, known_or_assumed_bandwidths, latencies_of
from ds_hybridep.geometry.partition import Partition

TokenExchange = Literal["direct", "hierarchical"]


@dataclass(frozen=True)
class RouteStage:
    """One exchange of rows, as one rank sees it.

    level: cluster level whose domains it joins; None if it joins all domains at once.
    expert_to_destination: [num_experts] index into `ranks` for rows of that expert; this rank is at `self_index`.

    Rank 0 of 2 DCs x 2 GPUs, one expert each:

        stage  level  ranks   expert_to_destination
        0      0      (0, 2)  (0, 0, 1, 1)    experts 2, 3 live in the other DC: one row there for both
        1      1      (0, 1)  (0, 1, 0, 1)    rows that are still here need expert 0 or 1
    """

    level: int | None
    ranks: tuple[int, ...]
    self_index: int
    expert_to_destination: tuple[int, ...]


def build_route(partition: Partition, rank: int, num_experts: int, exchange: TokenExchange) -> tuple[RouteStage, ...]:
    """Stages that bring a row of `rank` to its peer in the domain of every expert that the row needs.

    A peer is the rank with the same offset in another domain: not the expert's owner, but it holds a replica.
    Direct: one stage to the peers in all domains. Hierarchical: one for each level with several domains, slowest
    first; between stages, `plan_routes` drops experts for which a row went elsewhere. One domain: no stage.
    """
    experts_per_rank = partition.experts_per_rank(num_experts)
    rank_domain = partition.domain_of(rank)
    if partition.num_domains == 1:
        return ()
    if exchange == "direct":
        domain_indices = [partition.domain_index(owner) for owner in partition.group_ranks]
        peers = tuple(partition.peer_of(rank, domain_index) for domain_index in range(partition.num_domains))
        return (RouteStage(None, peers, partition.domain_index(rank), _per_expert(domain_indices, experts_per_rank)),)
    owner_domains = [partition.domain_of(owner) for owner in partition.group_ranks]
    return tuple(
        RouteStage(
            level=level,
            ranks=partition.exchange_peers(rank, level),
            self_index=rank_domain[level],
            expert_to_destination=_per_expert([domain[level] for domain in owner_domains], experts_per_rank),
        )
        for level in range(partition.num_levels)
        if partition.domain_counts[level] > 1
    )


def expected_rows(
    domain_counts: Sequence[int], num_experts: int, top_k: int, num_tokens: int, *, exchange: TokenExchange
) -> tuple[float, ...]:
    """Rows that one rank sends over each level in one dispatch, on average if tokens pick `top_k` experts evenly.

    There are T tokens, E experts, n_l domains at level l and n in all. Direct: (n_l - 1) n_(l+1) n_(l+2) ... peers
    differ first at level l. A token visits each with the chance that it needs one of E / n experts. Hierarchical: rows
    have visited n_0 ... n_(l-1) coordinates before level l, and by symmetry every rank receives as many as it sends.
    So T n_0 ... n_(l-1) tokens may go to each of n_l - 1 destinations. A token goes there with the chance that it
    needs one of E / (n_0 ... n_l) experts.
    """
    num_domains = math.prod(domain_counts)
    rows = []
    for count, down_to in zip(domain_counts, accumulate(domain_counts, mul), strict=True):
        if exchange == "direct":
            num_destinations = (count - 1) * (num_domains // down_to)
            experts_each = num_experts // num_domains
        else:
            num_destinations = (count - 1) * (down_to // count)
            experts_each = num_experts // down_to
        rows.append(num_tokens * num_destinations * chance_needed(experts_each, num_experts, top_k))
    return tuple(rows)


def choose_exchange(
    partition: Partition, *, num_experts: int, top_k: int, row_bytes: float, num_tokens: int
) -> TokenExchange:
    """The exchange with fewer seconds for one dispatch of rows of `row_bytes`; direct if both are equally fast."""
    seconds = {}
    for exchange in get_args(TokenExchange):
        rows = expected_rows(partition.domain_counts, num_experts, top_k, num_tokens, exchange=exchange)
        seconds[exchange] = _dispatch_s(partition.cluster, [num_rows * row_bytes for num_rows in rows], exchange)
    return "hierarchical" if seconds["hierarchical"] < seconds["direct"] else "direct"


def _dispatch_s(cluster: Cluster, rank_bytes: list[float], exchange: TokenExchange) -> float:
    used = [level for level, num_bytes in enumerate(rank_bytes) if num_bytes > 0]
    bandwidths, latencies, transfer_s = known_or_assumed_bandwidths(cluster), latencies_of(cluster), 0.0
    for level in used:
        transfer_s += rank_bytes[level] * math.prod(cluster.sizes[level + 1 :]) / bandwidths[level]
    waited = [0.0, *(latencies[level] for level in used)]
    return transfer_s + (max(waited) if exchange == "direct" else sum(waited))


def chance_needed(num_wanted: int, num_experts: int, top_k: int) -> float:
    """Chance that a token's `top_k` of `num_experts` experts contain at least one of `num_wanted` given ones."""
    # Subtracting whole numbers first keeps all digits of a small chance.
    num_choices = math.comb(num_experts, top_k)
    return (num_choices - math.comb(num_experts - num_wanted, top_k)) / num_choices


def _per_expert(per_group_rank: list[int], experts_per_rank: int) -> tuple[int, ...]:
    """[num_experts] value of each expert's owner, from [G] values in group order."""
    return tuple(value for value in per_group_rank for _ in range(experts_per_rank))
