# SPDX-License-Identifier: Apache-2.0
"""Flows over shared links: who sends how many bytes over which links, and at what rate.

Flows share all links max-min fairly, by weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SAME_RATE = 1.0 + 1e-12  # links within this factor fill up together; the difference is rounding
MAX_KNOWN_SHARES = 4096  # sets of flows whose rates are kept, because all layers of a step send the same


def fair_rates(capacities: Floats, weights: Floats, flow: Ints, link: Ints, *, load: Floats) -> Floats:
    """Weighted max-min fair rates of flows.

    Args:
        capacities: [L] bytes/s of each link.
        weights: [F] weight of each flow where flows share a link.
        flow, link, load: [N] entries "each byte/s of this flow puts `load` bytes/s on this link".

    Returns:
        [F] bytes/s; inf for a flow without a link.

    Source: progressive filling: all rates grow until a link is full; its flows keep their rates, the others grow on.
    """
    rates = np.full(len(weights), math.inf)
    is_settled = np.zeros(len(weights), dtype=bool)
    left = capacities.copy()
    num_links = len(capacities)
    while len(flow):
        demand = np.bincount(link, load * weights[flow], num_links)
        level = np.full(num_links, math.inf)
        np.divide(left, demand, out=level, where=demand > 0.0)
        lowest = max(float(level.min()), 0.0)
        is_full = level <= lowest * SAME_RATE
        is_settled[flow[is_full[link]]] = True
        done = is_settled[flow]
        rates[flow[done]] = weights[flow[done]] * lowest
        left -= np.bincount(link[done], load[done] * weights[flow[done]] * lowest, num_links)
        flow, link, load = flow[~done], link[~done], load[~done]
    return rates


@dataclass(frozen=True)
class Flows:
    """What one operation sends.

    num_bytes: [F] bytes of each flow.
    weights: [F] weights for the fair shares.
    latencies_s: [F] seconds from the departure of the last byte to its arrival.
    member_flow, member_actor: [M] "this actor takes part in this flow".
    entry_flow, entry_link, entry_load: [N] as `fair_rates` takes them.
    """

    num_bytes: Floats
    weights: Floats
    latencies_s: Floats
    member_flow: Ints
    member_actor: Ints
    entry_flow: Ints
    entry_link: Ints
    entry_load: Floats

    @cached_property
    def num_members(self) -> Ints:
        """[F] number of actors of each flow."""
        return np.bincount(self.member_flow, minlength=len(self.num_bytes))

    def flows_of(self, num_actors: int) -> list[Ints]:
        """Indices of the flows of each actor."""
        order = np.argsort(self.member_actor, kind="stable")
        ends = np.cumsum(np.bincount(self.member_actor, minlength=num_actors))
        return np.split(self.member_flow[order], ends[:-1])


class LinkShares:
    """Rates of flows that are under way at the same time.

    Args:
        capacities: [L] bytes/s of the links.
        busy_share: factor on the rate of a flow while one of its members computes.
    """

    def __init__(self, capacities: Floats, busy_share: float) -> None:
        self._capacities = capacities
        self._busy_share = busy_share
        self._known: dict[tuple[bytes | int, ...], list[Floats]] = {}

    def rates(self, active: Sequence[tuple[Flows, Bools]], is_computing: Bools) -> list[Floats]:
        """Rates of the flowing flows of each operation.

        active: (flows, [F] which of them are under way) of each operation.  is_computing: [num_actors].
        """
        key: list[bytes | int] = [is_computing.tobytes()]
        for flows, is_flowing in active:
            key += [id(flows), is_flowing.tobytes()]
        known = tuple(key)
        if known not in self._known:
            if len(self._known) >= MAX_KNOWN_SHARES:
                self._known.clear()
            self._known[known] = self._share(active, is_computing)
        return self._known[known]

    def _share(self, active: Sequence[tuple[Flows, Bools]], is_computing: Bools) -> list[Floats]:
        if not active:
            return []
        starts = np.cumsum([0, *(len(is_flowing) for _, is_flowing in active)])
        flow = np.concatenate([one.entry_flow + start for (one, _), start in zip(active, starts, strict=False)])
        weights, link, load = (
            np.concatenate([getattr(one, name) for one, _ in active])
            for name in ("weights", "entry_link", "entry_load")
        )
        entries = np.concatenate([is_flowing for _, is_flowing in active])[flow]
        rates = fair_rates(self._capacities, weights, flow[entries], link[entries], load=load[entries])
        found = []
        for (flows, is_flowing), own in zip(active, np.split(rates, starts[1:-1]), strict=True):
            is_busy = np.zeros(len(is_flowing), dtype=bool)
            is_busy[flows.member_flow[is_computing[flows.member_actor]]] = True
            found.append(np.where(is_busy, self._busy_share, 1.0)[is_flowing] * own[is_flowing])
        return found
