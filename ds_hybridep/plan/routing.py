# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a layer go under a plan: which experts are hot, what each rank computes, who sends to whom.

Experts of a group are hot inside one level.  The ranks whose places differ only there, and inside their domains, share
hot experts; each such part of the group has its own N.  Source: runtime/hot_experts.py.

    levels dc (2) and gpu (4), one group, 2 hot experts inside gpu    parts: ranks 0 to 3, and ranks 4 to 7
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import flatten, unflatten
from ds_hybridep.geometry.hot import ROWS_ONLY, HotCosts, choose_hot, rank_loads, step_s
from ds_hybridep.geometry.token_route import TokenExchange, chance_needed
from ds_hybridep.plan import choices
from ds_hybridep.plan.plan import Plan
from ds_hybridep.plan.workload import Workload

COPIES_ONLY = HotCosts(row_s=0.0, copy_s=1.0)
LOAD_DIGITS = 8  # of loads per token, so that equal ones stay equal: weights are searched to 9


def experts_per_rank(plan: Plan[Any], workload: Workload) -> int:
    """Number e of experts that one rank owns.  Raises PlanError if the group cannot share them evenly."""
    num_experts = workload.model.num_experts
    if num_experts % plan.group_size:
        raise PlanError(
            f"{num_experts} experts cannot be shared evenly by an expert-parallel group of {plan.group_size} ranks"
        )
    return num_experts // plan.group_size


def routing_of(plan: Plan[Any], workload: Workload) -> "Routing":
    """The routing of a workload's loads, or of its skew over the ranks of the group.

    Raises PlanError if the group cannot share the experts evenly, or cannot have the skew.
    """
    model, group_size = workload.model, plan.group_size
    experts_per_rank(plan, workload)
    weights = None
    if workload.expert_loads is not None:
        weights = choices.weights_of(workload.expert_loads, model.top_k)
    elif workload.is_uneven:
        weights = choices.skewed_weights(workload.skew, model.num_experts, group_size, model.top_k)
    hot_level = plan.hot.level if plan.hot is not None and plan.num_hot else None
    return _kept(
        Routing(
            spans=plan.spans,
            domain_sizes=plan.domain_sizes,
            hot_level=hot_level,
            num_hot=plan.num_hot,
            num_experts=model.num_experts,
            top_k=model.top_k,
            weights=weights,
        )
    )


@lru_cache(maxsize=1024)
def _kept(routing: "Routing") -> "Routing":
    """An equal routing of before, with what it has computed."""
    return routing


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Rows of a layer, G ranks in the group.

    num_hot: most hot experts of each part of the group.
    weights: [E] of the experts, as in `plan.choices`; None: even routing.
    """

    spans: tuple[int, ...]
    domain_sizes: tuple[int, ...]
    hot_level: int | None
    num_hot: int
    num_experts: int
    top_k: int
    weights: tuple[float, ...] | None

    @property
    def is_even(self) -> bool:
        """True if all experts get equally many rows; then none is hot."""
        return self.weights is None

    # ---- places ----

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(span // size for span, size in zip(self.spans, self.domain_sizes, strict=True))

    @cached_property
    def _domains(self) -> list[tuple[int, ...]]:
        """[G] coordinates of the domain of each rank of the group."""
        return [
            tuple(at // size for at, size in zip(unflatten(rank, self.spans), self.domain_sizes, strict=True))
            for rank in range(math.prod(self.spans))
        ]

    @property
    def _num_local(self) -> int:
        return self.num_experts // math.prod(self.spans)

    def _cells(self, num_levels: int, without: int | None = None) -> list[int]:
        """[G] equal numbers for domains with the same coordinates at the first levels, one level left out."""
        levels = [level for level in range(num_levels) if level != without]
        counts = [self._counts[level] for level in levels]
        return [flatten([domain[level] for level in levels], counts) for domain in self._domains]

    # ---- loads ----

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """[E] rows of each expert for each token."""
        if self.weights is None:
            return (self.top_k / self.num_experts,) * self.num_experts
        return choices.shares_of(self.weights, self.top_k)

    @property
    def num_sharing(self) -> int:
        """Ranks of a part that share the rows of a hot expert among them."""
        return 1 if self.hot_level is None else self.spans[self.hot_level]

    @cached_property
    def _parts(self) -> list[tuple[list[int], list[int]]]:
        """For each part that shares hot experts, its experts, and the place at the hot level of the owner of each."""
        cells = self._cells(len(self.spans), self.hot_level)
        parts: list[tuple[list[int], list[int]]] = [([], []) for _ in range(max(cells) + 1)]
        for expert in range(self.num_experts):
            owner = expert // self._num_local
            experts, owners = parts[cells[owner]]
            experts.append(expert)
            owners.append(0 if self.hot_level is None else self._domains[owner][self.hot_level])
        return parts

    @cached_property
    def hot(self) -> frozenset[int]:
        """The hot experts of all parts, chosen as a job does that is given their number."""
        if self.is_even or self.hot_level is None or self.num_sharing == 1:
            return frozenset()
        chosen = []
        for part, owners in self._parts:
            loads = [round(self.loads[expert], LOAD_DIGITS) for expert in part]
            chosen += [part[at] for at in choose_hot(loads, owners, self.num_sharing, self.num_hot, costs=ROWS_ONLY)]
        return frozenset(chosen)

    def _fullest(self, hot: frozenset[int]) -> float:
        if self.is_even:
            return 1.0
        rows = [
            rank_loads(
                [self.loads[expert] for expert in part],
                owners,
                self.num_sharing,
                [at for at, expert in enumerate(part) if expert in hot],
            )
            for part, owners in self._parts
        ]
        return max(map(max, rows)) * math.prod(self._counts) / self.top_k

    @cached_property
    def load_before(self) -> float:
        """Rows that the fullest rank computes over the mean, without hot experts."""
        return self._fullest(frozenset())

    @cached_property
    def load_after(self) -> float:
        """Rows that the fullest rank computes over the mean."""
        return self._fullest(self.hot)

    @cached_property
    def rank_rows(self) -> list[float]:
        """[G] rows that each rank of the group computes over those of even routing."""
        domain_of = self._cells(len(self.spans))
        part_of = self._cells(len(self.spans), self.hot_level)
        of_domain, of_part = [0.0] * (max(domain_of) + 1), [0.0] * (max(part_of) + 1)
        for expert, load in enumerate(self.loads):
            owner = expert // self._num_local
            if expert in self.hot:
                of_part[part_of[owner]] += load / self.num_sharing
            else:
                of_domain[domain_of[owner]] += load
        scale = math.prod(self._counts) / self.top_k
        pairs = zip(domain_of, part_of, strict=True)
        return [round(scale * (of_domain[domain] + of_part[part]), choices.EQUAL_DIGITS) for domain, part in pairs]

    # ---- copies ----

    @cached_property
    def _owned(self) -> list[list[int]]:
        """For each part, the hot experts whose owners have each place at the hot level."""
        result = []
        for part, owners in self._parts:
            owned = [0] * self.num_sharing
            for expert, owner in zip(part, owners, strict=True):
                owned[owner] += expert in self.hot
            result.append(owned)
        return result

    @property
    def num_near(self) -> int:
        """Most hot experts that a rank holds because they are of its domain."""
        return max(map(max, self._owned)) if self.hot else 0

    @property
    def num_far(self) -> int:
        """Most replicas of hot experts on a rank."""
        return max(sum(owned) - min(owned) for owned in self._owned) if self.hot else 0

    @cached_property
    def num_copies(self) -> float:
        """Hot experts that a rank sends over the hot level, or receives, on the busiest link.

        The ranks of a domain over faster levels are assumed to own equally many.
        """
        if not self.hot or self.hot_level is None:
            return 0.0
        copies = 0.0
        for part, owners in self._parts:
            at = [index for index, expert in enumerate(part) if expert in self.hot]
            loads = [self.loads[expert] for expert in part]
            copies = max(copies, step_s(loads, owners, self.num_sharing, at, costs=COPIES_ONLY))
        return copies / math.prod(self.domain_sizes[self.hot_level + 1 :])

    def num_passed_on(self, level: int) -> float:
        """Replicas of hot experts that a rank has from slower levels and sends to each neighbour at this level."""
        if self.hot_level is None or level <= self.hot_level:
            return 0.0
        return self.num_far / math.prod(self.domain_sizes[level:])

    # ---- chances of a token ----

    def _even_chance(self, num_levels: int) -> float:
        wanted = self.num_experts // math.prod(self._counts[:num_levels])
        return chance_needed(wanted, self.num_experts, self.top_k)

    @lru_cache(maxsize=1024)  # noqa: B019 (`_kept` keeps as many routings)
    def chances(self, num_levels: int) -> tuple[list[float], list[float]]:
        """[G] chance that a token needs an expert of the domains with a rank's coordinates at the first levels.

        Two lists: for tokens of ranks that have another place at the hot level, and for those that have the same one,
        which also send rows of hot experts.
        """
        if self.weights is None:
            even = [self._even_chance(num_levels)] * math.prod(self.spans)
            return even, even
        weights, top_k, hot = self.weights, self.top_k, self.hot
        cells = self._cells(num_levels)
        part_cells = self._cells(num_levels, self.hot_level)

        def products(cell_of: Sequence[int], is_wanted: Callable[[int], bool]) -> list[choices.Polynomial]:
            members: list[list[float]] = [[] for _ in range(max(cell_of) + 1)]
            for expert, weight in enumerate(weights):
                if is_wanted(expert):
                    members[cell_of[expert // self._num_local]].append(weight)
            return [choices.of_experts(one, top_k) for one in members]

        cold = products(cells, lambda expert: expert not in hot)
        of_hot = products(part_cells, lambda expert: expert in hot)
        other_cold, other_hot = (choices.products_of_others(one, top_k) for one in (cold, of_hot))
        all_hot = choices.product(of_hot, top_k)
        whole = choices.product([*cold, *of_hot], top_k)[top_k]

        def chance(rest: choices.Polynomial, hot_rest: choices.Polynomial) -> float:
            none = choices.product([rest, hot_rest], top_k)[top_k] / whole
            return round(max(1.0 - none, 0.0), choices.EQUAL_DIGITS)

        far = [chance(rest, all_hot) for rest in other_cold]
        known: dict[tuple[int, int], float] = {}
        near = []
        for pair in zip(cells, part_cells, strict=True):
            if pair not in known:
                known[pair] = chance(other_cold[pair[0]], other_hot[pair[1]])
            near.append(known[pair])
        return [far[cell] for cell in cells], near

    def chances_over(self, levels: Sequence[int]) -> list[list[float]]:
        """By level, [G] mean chance that a token of a rank at this distance goes to each rank.

        levels: that an exchange joins.
        """
        far, near = self.chances(levels[-1] + 1)
        result = []
        for level in range(len(self.spans)):
            share = share_of_near(self.hot_level, self._counts, levels, level)
            if share == 1.0 or far is near:
                result.append(near)
            else:
                result.append([one + share * (its - one) for one, its in zip(far, near, strict=True)])
        return result

    def busiest_chances(self, levels: Sequence[int]) -> list[float]:
        """By level, the mean chance of `chances_over` over the ranks below the child that gets most rows."""
        if self.is_even:
            return [self._even_chance(levels[-1] + 1)] * len(self.spans)
        result = []
        for level, chances in enumerate(self.chances_over(levels)):
            below = math.prod(self.spans[level + 1 :])
            children = (chances[first : first + below] for first in range(0, len(chances), below))
            result.append(max(math.fsum(child) / below for child in children))
        return result

    def sent_rows(self, exchange: TokenExchange) -> tuple[float, ...]:
        """By level, the rows that a rank sends over it for each of its tokens, on average; see `expected_rows`."""
        counts, result = self._counts, []
        for level, count in enumerate(counts):
            levels = (level,) if exchange == "hierarchical" else tuple(range(len(counts)))
            of_ranks = self.chances_over(levels)[level]
            others = counts[:level] if exchange == "hierarchical" else counts[level + 1 :]
            result.append((count - 1) * math.prod(others) * math.fsum(of_ranks) / len(of_ranks))
        return tuple(result)


def share_of_near(hot_level: int | None, counts: Sequence[int], levels: Sequence[int], level: int) -> float:
    """Share of the tokens for a rank at the distance `level` that come from its own place at the hot level.

    counts: of domains.  levels: that an exchange joins; tokens have crossed the slower ones before.
    """
    if hot_level is None or counts[hot_level] == 1:
        return 1.0
    if hot_level == level:
        return 0.0
    is_mixed = hot_level > level if hot_level in levels else hot_level < level
    return 1.0 / counts[hot_level] if is_mixed else 1.0
