# SPDX-License-Identifier: Apache-2.0
"""How often tokens choose each expert under uneven routing.

A token chooses k of E experts.  The chance of a choice is in proportion to the product of the weights of its experts.
Equal weights are even routing.  With p(S) the product of (1 + weight x) over experts S, and c(S) its coefficient of
x^k, a token needs none of S with the chance c(all others) / c(all).

Source: conditional Poisson sampling.  Its weights from shares: Chen, Dempster and Liu, 1994.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache

from ds_hybridep.errors import PlanError

EQUAL_DIGITS = 14  # of chances, so that equal ones stay equal when summed in another order
EXACT = 1e-9  # a share of an expert that may be this much off, where weights are searched
MOST_OFTEN = 0.999  # share of tokens that may choose one expert: with all, its weight would be infinite
MOST_ROUNDS, BISECTIONS = 1000, 60
STEEPEST = 32.0  # exponent of a skew
GOLDEN = 0.618034

Polynomial = list[float]  # coefficients of x^0, x^1 .. x^k


def product(polynomials: Iterable[Polynomial], top_k: int) -> Polynomial:
    """Product up to x^top_k."""
    result = [1.0] + [0.0] * top_k
    for one in polynomials:
        result = _times(result, one)
    return result


def of_experts(weights: Iterable[float], top_k: int) -> Polynomial:
    """p of experts with these weights."""
    result = [1.0] + [0.0] * top_k
    for weight in weights:
        for power in range(top_k, 0, -1):
            result[power] += weight * result[power - 1]
    return result


def products_of_others(polynomials: Sequence[Polynomial], top_k: int) -> list[Polynomial]:
    """For each polynomial, the product of all others."""
    before = [product([], top_k)]
    for one in polynomials:
        before.append(_times(before[-1], one))
    behind, result = product([], top_k), []
    for index in range(len(polynomials) - 1, -1, -1):
        result.append(_times(before[index], behind))
        behind = _times(behind, polynomials[index])
    return result[::-1]


def _times(left: Polynomial, right: Polynomial) -> Polynomial:
    return [math.fsum(map(operator.mul, left, right[power::-1])) for power in range(len(left))]


def shares_of(weights: Sequence[float], top_k: int) -> tuple[float, ...]:
    """[E] share of the tokens that choose each expert; the shares add up to top_k."""
    before = [[1.0] + [0.0] * top_k]
    for weight in weights:
        last = before[-1]
        before.append([1.0, *(last[power] + weight * last[power - 1] for power in range(1, top_k + 1))])
    behind, shares = [1.0] + [0.0] * top_k, []
    for index in range(len(weights) - 1, -1, -1):
        # Chosen with top_k - 1 of all others.
        chosen = sum(before[index][at] * behind[top_k - 1 - at] for at in range(top_k))
        shares.append(weights[index] * chosen / before[-1][top_k])
        for power in range(top_k, 0, -1):
            behind[power] += weights[index] * behind[power - 1]
    return tuple(shares[::-1])


@lru_cache(maxsize=64)
def weights_of(loads: tuple[float, ...], top_k: int) -> tuple[float, ...]:
    """[E] weights with which experts get rows in proportion to `loads`, as far as a token can choose them so often."""
    wanted = _possible(loads, top_k)
    weights = list(wanted)
    for _ in range(MOST_ROUNDS):
        found = shares_of(weights, top_k)
        if all(abs(one - its) <= EXACT for one, its in zip(found, wanted, strict=True)):
            break
        pairs = zip(weights, wanted, found, strict=True)
        weights = [weight * one / its if its > 0 else 0.0 for weight, one, its in pairs]
    return tuple(weights)


def _possible(loads: Sequence[float], top_k: int) -> list[float]:
    """Shares of tokens in proportion to the loads, none above MOST_OFTEN."""
    always: set[int] = set()
    while True:
        rest = math.fsum(load for expert, load in enumerate(loads) if expert not in always)
        scale = (top_k - MOST_OFTEN * len(always)) / rest if rest else 0.0
        more = {expert for expert, load in enumerate(loads) if load * scale > MOST_OFTEN} - always
        if not more:
            return [MOST_OFTEN if expert in always else load * scale for expert, load in enumerate(loads)]
        always |= more


@lru_cache(maxsize=64)
def skewed_weights(skew: float, num_experts: int, num_ranks: int, top_k: int) -> tuple[float, ...]:
    """[E] weights with which the fullest of the ranks, of which each has E / R experts, gets `skew` times the mean.

    Loads fall as in Zipf's law, over the ranks and over the experts of each rank: expert j of the n-th fullest rank,
    both counted from 1, has the weight

        1 / (n^s j^t),  t = min(2 s, 1)

    with s such that the skew comes out.  So a full rank has one or two strong experts among others, as measured loads
    have.  Rank 0 is the fullest.  The others follow in strides of about 0.618 R (0, 5, 2, 7, 4, 1, 6, 3), so that
    machines, datacentres and domains have about equal loads.  A skew of 1 is even routing.

    Raises PlanError for a skew below 1, or one that no routing has.
    """
    num_local = num_experts // num_ranks
    most = min(num_local, top_k) * num_ranks / top_k
    if not 1 <= skew <= most:
        raise PlanError(
            f"skew is {skew:g}, but must be between 1 and {most:g}, the most that {num_experts} experts with "
            f"top-{top_k} can have over {num_ranks} ranks"
        )
    strides = (stride for stride in range(1, num_ranks + 1) if math.gcd(stride, num_ranks) == 1)
    stride = min(strides, key=lambda one: abs(one - GOLDEN * num_ranks))
    places = {place * stride % num_ranks: place + 1 for place in range(num_ranks)}

    def weights(exponent: float) -> tuple[float, ...]:
        inside = min(2 * exponent, 1.0)
        return tuple(
            places[expert // num_local] ** -exponent * (1 + expert % num_local) ** -inside
            for expert in range(num_experts)
        )

    least, steepest = 0.0, 1.0
    while _skew_of(weights(steepest), num_local, num_ranks, top_k) < skew and steepest < STEEPEST:
        least, steepest = steepest, 2 * steepest
    for _ in range(BISECTIONS if skew > 1 else 0):
        middle = (least + steepest) / 2
        is_too_even = _skew_of(weights(middle), num_local, num_ranks, top_k) < skew
        least, steepest = (middle, steepest) if is_too_even else (least, middle)
    return weights(steepest if skew > 1 else 0.0)


def skewed_loads(skew: float, num_experts: int, num_ranks: int, top_k: int = 1) -> tuple[float, ...]:
    """[E] rows of each expert for each token, with which the fullest rank gets `skew` times the mean.

    See `skewed_weights`, also for errors.
    """
    return shares_of(skewed_weights(skew, num_experts, num_ranks, top_k), top_k)


def _skew_of(weights: Sequence[float], num_local: int, num_ranks: int, top_k: int) -> float:
    # Rank 0 is the fullest.
    return math.fsum(shares_of(weights, top_k)[:num_local]) * num_ranks / top_k
