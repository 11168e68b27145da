# SPDX-License-Identifier: Apache-2.0
"""Lets a site catch up that joins others which are training.

one member's state -> the packets of its steps since, from all members -> this site is a member of the next epoch
"""

import time
from collections.abc import Mapping

from torch import Tensor

from ds_hybridep.deepspeed.engine_view import Put
from ds_hybridep.deepspeed.site_exchange import SiteExchange, compared
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.sites.exchange import Incoming
from ds_hybridep.sites.packets import OwnedSlice, leaves_of

PAUSE_S = 0.02  # between looks for a packet


class CatchUp:
    """One site's way to the step of the others.  exchange: of the site, which begins to exchange afterwards."""

    def __init__(self, exchange: SiteExchange) -> None:
        self._exchange, self._state, self._epochs = exchange, exchange.state, exchange.epochs
        self._local = exchange.local
        self._reached = 0  # the step of the packet that was replayed last
        self._is_at_exchange = True  # what was captured for a site that comes back is as before an exchange

    def run(self) -> None:
        """Get the state of a site that is training, replay the packets of its steps since, and become a member."""
        began = time.monotonic()
        while (target := self._follow()) is None:
            pass
        self._exchange.is_replaying = False
        if target < 0:
            self._epochs.needs_quorum = True  # other sites may have come to the start meanwhile
            return
        self._epochs.needs_quorum = False
        if self._local is not None:
            self._reach(target)
        # The state was taken inside a step, which this site makes itself; with local steps, that step is behind it.
        self._state.begin_accumulation(is_made=self._local is not None)
        self._exchange.has_caught_up = True
        log_dist(
            f"hybridep: site '{self._epochs.site}' joined at step {self._state.step}, after "
            f"{time.monotonic() - began:.1f} s", ranks=[0], level=30,
        )  # fmt: skip

    def _follow(self) -> int | None:
        """Observe the members of one epoch, and return the step at which this site is a member.

        Returns None if another epoch began before this site was up to date, -1 if it begins anew as a member.
        """
        exchange, epochs = self._exchange, self._epochs
        answer = epochs.call(exchange.digest())
        if epochs.site in epochs.members:
            return -1
        assert epochs.crossing is not None
        observed = epochs.crossing
        lead, _ = compared({name: answer["calls"][name] for name in epochs.members})
        if (state := epochs.receive_state(observed, lead)) is None:
            return None
        exchange.restore(state)
        exchange.is_replaying, self._is_at_exchange = True, True
        has_called = False
        target: int | None = None
        waiting = observed.observe(self._next_sizes())
        while target is None or self._next()[0] < target:
            found = self._look(waiting, is_applied=target is not None)
            if found == "counts":
                for one in waiting.values():
                    one.finish()
                self._replay([one.packets for one in waiting.values()])
                waiting = observed.observe(self._next_sizes())
            elif found == "ended" and not has_called:
                return None
            elif found == "ended" and target is not None:
                raise epochs.left_out()  # packets before that step are lost
            elif found == "nothing" and not has_called:
                epochs.call(exchange.digest(), is_ready=True, waits=False)  # no packet waits: it is up to date
                has_called = True
            elif has_called and target is None:
                epochs.crossing = None  # the old connections stay open until all packets have come
                answer = epochs.hear(PAUSE_S) or {}
                if answer.get("op") == "epoch":
                    steps = [call["step"] for call in answer["calls"].values() if not call["is_ready"]]
                    target = max(steps, default=self._next()[0]) if epochs.site in epochs.members else -1
            else:
                time.sleep(PAUSE_S)
        observed.close()
        return target if target >= 0 else None

    def _look(self, waiting: Mapping[str, Incoming], *, is_applied: bool) -> str:
        """Return, on all ranks, what is known of the next packets: "nothing", "whole", "counts", or "ended".

        Packets count if a member has agreed to their step, so that all apply it; another step may be repeated.
        is_applied: members have come to a later step.
        """
        inside = self._epochs.inside
        is_whole = inside.all(all(one.is_whole() for one in waiting.values()))
        if is_whole and (is_applied or inside.broadcast(any(one.is_agreed() for one in waiting.values()))):
            return "counts"
        # A receive fails once the members have left these connections for those of the next epoch.
        if not inside.all(not any(one.has_failed() for one in waiting.values())):
            return "ended"
        return "whole" if is_whole else "nothing"

    def _next(self) -> tuple[int, int]:
        """Return the step of the next packet, and its fragment."""
        if self._local is None:
            return self._state.step, 0
        step = self._state.step if self._is_at_exchange else self._reached + 1
        return step, self._local.due(step)

    def _next_sizes(self) -> list[int]:
        """Return the bytes of the next packets of a member."""
        if self._local is not None:
            slices = self._local.deltas(self._next()[1])
        else:
            slices, _ = self._leaves_of_zeros()
        return [self._exchange.packets.num_bytes(one) for one in slices]

    def _leaves_of_zeros(self) -> tuple[list[OwnedSlice], Put]:
        self._state.view.make_zeros()
        slices, put = self._state.view.slices()
        return leaves_of(slices), put

    def _replay(self, packets: list[Tensor]) -> None:
        """Apply a step of the other sites, from the packets of all their members."""
        exchange = self._exchange
        if self._local is not None:
            step, fragment = self._next()
            deltas = self._local.deltas(fragment)
            exchange.packets.average(deltas, packets)
            exchange.outer_step(fragment, deltas)
            self._reached, self._is_at_exchange = step, False
            return
        slices, put = self._leaves_of_zeros()
        exchange.packets.average(slices, packets, self._state.loss_scale)
        put()
        self._state.take_step()

    def _reach(self, step: int) -> None:
        """Begin local steps from the common weights, at the exchange that the other sites have come to."""
        assert self._local is not None
        self._state.skip_to(step)
        self._local.reset()
        self._exchange.refresh()
        self._is_at_exchange = False
        self._exchange.after_step(was_applied=True)
