# SPDX-License-Identifier: Apache-2.0
"""How a site without the state of the others gets it, in lockstep with their steps.

    exchange      the joiner receives the packets of all members, as members do, with nothing of its own
    step          it takes the same optimizer step
    fragment      the lead sends it the next part of the state as it is after this step
    ...           until it has all of them: then its state is equal, and the next epoch has it as a member

What it has not got yet is garbage, on which steps do no harm.  What it has got stays equal, because all later packets
reach it.  Members wait for it in each exchange, so nothing queues up.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ds_hybridep.deepspeed.engine_view import Put
from ds_hybridep.deepspeed.site_state import SiteState
from ds_hybridep.errors import CommunicationError, SiteError
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.runtime.site_epochs import Epochs, check_headers
from ds_hybridep.sites.exchange import Packet, SiteConnections, weights_of
from ds_hybridep.sites.fragments import NUM_PLAIN_STEPS, Fragment, Pace, StateVector
from ds_hybridep.sites.local_steps import LocalSteps
from ds_hybridep.sites.packets import OwnedSlice, Packets, leaves_of

FIRST_LINE_S, GROWTH = 5.0, 2.0  # when a joiner first says how far it is, and after how much longer again


class Parts(Protocol):
    """What the exchange of a site is made of."""

    state: SiteState
    epochs: Epochs
    packets: Packets
    local: LocalSteps | None


def positions_of(answer: Mapping[str, Any], rank: int) -> dict[str, int]:
    """Return the positions up to which joiners of a new epoch have the state; 0 if they lack a step.

    answer: of the meeting point.  rank: of this process in its site, which talks to the same ranks of joiners.
    """
    found = {}
    for name in answer["joiners"]:
        call = answer["calls"][name]
        is_continued = (call["run"], call["step"]) == (answer["run"], answer["step"]) and call["positions"]
        found[name] = int(call["positions"][rank] or 0) if is_continued else 0
    return found


@dataclass
class Handover:
    """What the lead still has to send to one site.

    runs: of positions, the first one next; the end of the last one may be None: as far as the state goes.
    is_joiner: False for a member whose weights have drifted.
    """

    runs: list[tuple[int, int | None]]
    is_joiner: bool
    needs_head: bool = False
    pace: Pace | None = None
    sent_bytes: int = 0  # of the last fragment
    sent_at: float = 0.0
    arrived_at: float | None = None  # None: not yet

    def note_arrival(self, sent_at: float, _: object) -> None:
        """A fragment has arrived; perhaps one before the last."""
        if sent_at == self.sent_at:
            self.arrived_at = time.monotonic()


class Lead:
    """Hands the state of this rank on, if this site is the lead of an epoch."""

    def __init__(self, state: SiteState, local: LocalSteps | None) -> None:
        self._state, self._local = state, local
        self._handovers: dict[str, Handover] = {}
        self._stepped_at: float | None = None

    def begin(self, positions: Mapping[str, int]) -> None:
        """An epoch begins.  positions: of its joiners; nothing if another site leads."""
        self._handovers = {
            name: Handover([(at, None)], is_joiner=True, needs_head=not at) for name, at in positions.items()
        }
        self._stepped_at = None

    def repair(self, name: str, runs: Sequence[tuple[int, int]]) -> None:
        """Send these parts of the state to a member, unless it gets some already."""
        self._handovers.setdefault(name, Handover([*runs], is_joiner=False))

    def after_step(self, connections: SiteConnections | None) -> None:
        """Send each site the fragment that it gets after the step that has just been made."""
        if not self._handovers or connections is None:
            return
        now = time.monotonic()
        step_s, self._stepped_at = None if self._stepped_at is None else now - self._stepped_at, now
        for name, one in list(self._handovers.items()):
            if name not in (connections.joiners if one.is_joiner else connections.members):
                del self._handovers[name]
                continue
            vector = self._state.vector(self._local, of_all_sites=not one.is_joiner)
            if one.pace is None:
                one.pace = Pace(vector.num_bytes)
            elif step_s is not None:
                one.pace.note(one.sent_bytes, step_s, (one.arrived_at or now) - one.sent_at)
            start, end = one.runs[0]
            end = vector.num_positions if end is None else end
            stop, payload = vector.read(start, end, one.pace.next_bytes())
            head = self._state.head() if one.needs_head else b""
            sent = connections.send_fragment(name, Fragment(start, stop, vector.num_positions, head, payload))
            one.needs_head, one.sent_bytes, one.sent_at, one.arrived_at = False, payload.nbytes, now, None
            if sent is not None:
                sent.add_done_callback(partial(one.note_arrival, now))
            one.runs = [*([(stop, end)] if stop < end else []), *one.runs[1:]]
            if not one.runs:
                del self._handovers[name]


class Join:
    """One site's way from a joiner to a member.

    parts: of its exchange.  answer: of the meeting point, in which it is a joiner.
    """

    def __init__(self, parts: Parts, answer: Mapping[str, Any]) -> None:
        self._state, self._epochs, self._packets, self._local = parts.state, parts.epochs, parts.packets, parts.local
        self._position, self._num_positions = 0, -1  # -1: not known yet
        self._vector: StateVector | None = None
        self._is_settled = False  # a step was taken since the last fragment, so 16-bit weights are new, too
        self._next_step: int = answer["step"]  # the step of the next exchange
        self._began_at = time.monotonic()
        self._say_at = self._began_at + FIRST_LINE_S
        self._stepped_at, self._pace = self._began_at, 0.0  # of the last fragment: when it came, positions per second
        self._last_size, self._num_steady = 0, 0  # positions of the last fragment; how many before were about as long

    def run(self) -> Mapping[str, Any]:
        """Take steps of the others until this site is a member; return the meeting point's answer that says so."""
        epochs = self._epochs
        is_whole = False
        while True:
            received, is_agreed = epochs.observe(self._sizes())
            if is_agreed:
                self._take(received)
                self._take_fragment()
                is_whole = epochs.inside.all(self._has_all())
                epochs.wants_quorum_soon = is_whole
                self._say()
            if is_agreed and not epochs.needs_quorum:
                continue
            answer = epochs.call(is_whole=is_whole, positions=self._position)
            if answer["op"] == "commit":
                raise SiteError(f"site '{epochs.site}' was told to commit a step while it joins; start it again")
            if epochs.site in answer["members"]:
                break
            is_whole = False
            if not positions_of(answer, epochs.inside.rank)[epochs.site]:
                self._position, self._num_positions = 0, -1
            self._next_step = answer["step"]
        if self._local is not None:
            self._local.reset()
        log_dist(
            f"hybridep: site '{epochs.site}' joined at step {self._state.step}, after "
            f"{time.monotonic() - self._began_at:.1f} s", ranks=[0], level=30,
        )  # fmt: skip
        return answer

    # -- a step of the others ---------------------------------------------------------------------------------------

    def _slices(self, step: int) -> tuple[list[OwnedSlice], Put | None]:
        """Return where the mean of the exchange of a step goes; what they hold means nothing."""
        if self._local is not None:
            return self._local.deltas(self._local.due(step)), None
        self._state.view.make_zeros()
        slices, put = self._state.view.slices()
        return leaves_of(slices), put

    def _sizes(self) -> list[int]:
        return [self._packets.num_bytes(one) for one in self._slices(self._next_step)[0]]

    def _take(self, received: Mapping[str, Packet]) -> None:
        """Take the step, unless this site has nothing yet that could be stepped."""
        step, epochs = self._next_step, self._epochs
        check_headers(epochs.site, step, dict(received), epochs.members)
        if (found := received[epochs.members[0]].header.step) != step:
            raise SiteError(f"site '{epochs.site}' joins at step {step}, but packets of step {found} came")
        self._next_step += 1
        if not self._num_positions > 0:
            return
        slices, put = self._slices(step)
        data: Sequence[Tensor] = [one.data for one in received.values()]
        self._packets.average(slices, data, weights_of(received), self._state.loss_scale)
        if self._local is not None:
            self._local.apply(self._local.due(step), slices)
            self._is_settled = True
        elif put is not None:
            put()
            self._is_settled |= self._state.take_step()

    def _take_fragment(self) -> None:
        """Take over the fragment that the lead sends after the step."""
        connections = self._epochs.connections
        assert connections is not None
        if self._num_positions < 0 or self._position < self._num_positions:
            try:
                fragment = connections.receive_fragment(self._epochs.lead)
            except CommunicationError:
                return  # the next exchange fails, too
            if fragment.head:
                self._state.load_head(fragment.head)
            if fragment.head or self._vector is None:
                self._vector = self._state.vector(self._local)
            if self._vector.num_positions != fragment.num_positions:
                raise SiteError(
                    f"site '{self._epochs.site}': its state has {self._vector.num_positions} elements on this rank, "
                    f"that of site '{self._epochs.lead}' {fragment.num_positions}; use the same settings"
                )
            self._vector.write(fragment.start, fragment.stop, fragment.payload)
            now = time.monotonic()
            size = fragment.stop - fragment.start
            self._num_steady = self._num_steady + 1 if size <= 1.5 * self._last_size else 0
            self._last_size = size
            self._pace = size / max(now - self._stepped_at, 1e-6)
            self._stepped_at = now
            self._position, self._num_positions = fragment.stop, fragment.num_positions
            self._is_settled = False
        if self._local is not None:
            self._state.skip_to(self._next_step)  # the others are about to make it

    def _has_all(self) -> bool:
        return self._position == self._num_positions and (self._is_settled or self._local is not None)

    def _say(self) -> None:
        """Say how far this site is, now and then."""
        if (now := time.monotonic()) < self._say_at or not self._position:
            return
        spent_s, share = now - self._began_at, self._position / self._num_positions
        rest = f"about {(self._num_positions - self._position) / self._pace:.0f} s are left"
        if self._num_steady <= NUM_PLAIN_STEPS:  # the first ones only measure, and then they grow
            rest = "the time that is left is not known yet"
        self._say_at = now + (GROWTH - 1) * spent_s
        log_dist(
            f"hybridep: site '{self._epochs.site}' has {share:.0%} of the state after {spent_s:.0f} s, at step "
            f"{self._state.step} of the others; {rest}", ranks=[0], level=30,
        )  # fmt: skip
