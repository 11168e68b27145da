# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one site take part in epochs together: rank 0 talks to the meeting point, and all ranks follow."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ds_hybridep.errors import CommunicationError, SiteError
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.sites.exchange import Counters, Header, Packet, SiteConnections
from ds_hybridep.sites.member import Member
from ds_hybridep.sites.patience import Patience
from ds_hybridep.transport.inside import Inside

PORTS_S = 10.0  # how long a site waits for a free port
LOOK_S = 2.0  # between looks at whether the meeting point has answered


class Epochs:
    """The sites of the running epoch, and this rank's connections with its counterparts.

    Args:
        site: the name of this one.  names: all sites.
        step: returns the optimizer steps that this site has made.
        join: on rank 0, connects to the meeting point.
        connect: makes this rank's connections for one epoch.

    Raises SiteError on all ranks if the meeting point refuses this site.

    run: the identity of the training run; empty before the first epoch of a fresh start.
    is_running: the other sites were training already when this one came.
    needs_quorum: a new epoch comes before the next exchange.
    connections: of the running epoch, or None.
    """

    def __init__(
        self, site: str, names: list[str], inside: Inside, step: Callable[[], int], *, join: Callable[[], Member],
        connect: Callable[[dict[str, Counters]], SiteConnections],
    ) -> None:  # fmt: skip
        self.site, self.names, self.inside, self._step = site, names, inside, step
        self._connect = connect
        self.counters = {name: Counters() for name in names}
        self.quorum_s = 0.0  # seconds waited for the meeting point and for sites that had to come there
        self.run = ""
        self.members: list[str] = []
        self.lead = ""  # the member that hands the state on
        self.num_exchanges = 0  # in this epoch
        self.needs_quorum = True
        self.connections: SiteConnections | None = None
        self._member: Member | None = None
        error = ""
        if inside.rank == 0:
            try:
                self._member = join()
            except SiteError as failure:
                error = str(failure)
        if error := inside.broadcast(error):
            raise SiteError(error)
        welcome = inside.broadcast(None if self._member is None else self._member.welcome)
        self.is_running: bool = welcome["is_running"]

    def close(self) -> None:
        """Leave the other sites."""
        if self.connections is not None:
            self.connections.close()
        if self._member is not None:
            self._member.close()
        self.inside.close()

    @property
    def others(self) -> list[str]:
        return [] if self.connections is None else self.connections.others

    def stay_in_touch(self) -> None:
        """Wait until the meeting point, which may make an epoch of the sites that are missing, knows of this site."""
        with self._patience("the meeting point") as patience:
            while True:
                is_in_touch, wants_change, refusal = self.inside.broadcast(self._news())
                if refusal:
                    raise SiteError(refusal)
                self.needs_quorum = self.needs_quorum or wants_change
                if is_in_touch:
                    return
                patience.look(self._reason())
                time.sleep(LOOK_S)

    def _patience(self, whom: str) -> Patience:
        """Return what announces a wait, on rank 0."""
        what = f"site '{self.site}' waits for {whom} before step {self._step()}"
        return Patience("" if self._member is None else what)

    def _reason(self) -> str:
        """Return why the meeting point does not answer, if anything is known."""
        if self._member is None:
            return ""
        return self._member.waiting_for if self._member.is_in_touch else self._member.trouble

    def _news(self) -> tuple[bool, bool, str]:
        member = self._member
        return (True, False, "") if member is None else (member.is_in_touch, member.wants_change, member.refusal)

    # -- an exchange ------------------------------------------------------------------------------------------------

    def exchange(self, packets: Sequence[Tensor], header: Header) -> tuple[dict[str, Packet], bool]:
        """Send the packets of this rank, as a member.

        Return what all members have sent, and whether all members have everything, so that the step counts.
        """
        return self._agreed(lambda connections: connections.swap(packets, header))

    def observe(self, sizes: Sequence[int]) -> tuple[dict[str, Packet], bool]:
        """As `exchange`, for a joiner, which sends nothing.  sizes: bytes of each packet of a member."""
        return self._agreed(lambda connections: connections.observe(sizes))

    def _agreed(self, receive: Callable[[SiteConnections], dict[str, Packet]]) -> tuple[dict[str, Packet], bool]:
        connections = self.connections
        assert connections is not None
        received: dict[str, Packet] = {}
        try:
            received, is_complete = receive(connections), True
        except CommunicationError:
            is_complete = False
        self.is_complete = self.inside.all(is_complete)
        said = (False, True)
        if self._member is not None:
            try:
                said = connections.agree(self.is_complete, self._member.wants_change or self.wants_quorum_soon)
            except CommunicationError:
                pass
        is_agreed, self.needs_quorum = self.inside.broadcast(said)
        if is_agreed:
            self.num_exchanges += 1
            self.is_complete = False  # no step is under way any more
        return received, is_agreed

    is_complete = False  # all ranks have all packets of the last exchange
    wants_quorum_soon = False  # this site wants a quorum after the exchange under way

    def committed(self, step: int) -> None:
        """Let the meeting point know that so many steps are made."""
        if self._member is not None:
            self._member.committed(step)

    # -- quorums ----------------------------------------------------------------------------------------------------

    def call(self, *, is_whole: bool, positions: Any = None) -> dict[str, Any]:
        """Call for a quorum, and return its answer; after "epoch", this rank is connected with its counterparts.

        is_whole: this site has a whole state.  positions: what this rank has of it otherwise.
        """
        answer = self._call(is_whole=is_whole, positions=positions)
        while answer["op"] == "left out":
            log_dist(
                f"hybridep: the other sites went on without site '{self.site}', which is at step {self._step()}; it "
                f"joins them: {answer['cause']}", ranks=[0], level=30,
            )  # fmt: skip
            answer = self._call(is_whole=False)
        return answer

    def _call(self, *, is_whole: bool, positions: Any = None) -> dict[str, Any]:
        missed = self.inside.gather({} if self.connections is None else self.connections.missed)
        if self.connections is not None:
            self.connections.close()  # nobody waits for more from this site: they call, too
            self.connections = None
        self._coming = self._new_connections()
        addresses = self.inside.gather(self._coming.address)
        positions = self.inside.gather(positions)
        if self._member is not None:
            causes = {name: cause for one in missed for name, cause in one.items()}
            for name, cause in causes.items():
                text = f"hybridep: site '{self.site}' has lost site '{name}' in step {self._step()}: {cause}"
                log_dist(text, ranks=[0], level=30)
            self._member.call(
                run=self.run, step=self._step(), complete=self.is_complete, is_whole=is_whole, addresses=addresses,
                missed=causes, positions=positions,
            )  # fmt: skip
        began = time.monotonic()
        with self._patience("a quorum") as patience:
            while (answer := self._answer()) is None:
                patience.look(self._reason())
        self.quorum_s += time.monotonic() - began
        self.is_complete = self.wants_quorum_soon = False
        self.needs_quorum = answer["op"] == "commit"
        return answer

    def _new_connections(self) -> SiteConnections:
        """Return connections on a free port; those of the last epoch may still hold theirs for a moment."""
        deadline = time.monotonic() + PORTS_S
        while True:
            try:
                return self._connect(self.counters)
            except CommunicationError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _answer(self) -> dict[str, Any] | None:
        """Return the answer to the call, on all ranks, or None if there is none yet."""
        said: Any = None
        if self._member is not None:
            try:
                said = self._member.answer(LOOK_S)
            except SiteError as error:
                said = {"op": "error", "text": str(error)}
        answer: dict[str, Any] | None = self.inside.broadcast(said)
        if answer is None:
            return None
        if answer["op"] == "error":
            raise SiteError(answer["text"])
        if answer["op"] == "epoch":
            self._open(answer)
        else:
            self._coming.close()
        return answer

    def _open(self, answer: dict[str, Any]) -> None:
        """Begin an epoch."""
        self.connections, self.members, self.num_exchanges = self._coming, answer["members"], 0
        self.run, self.lead = answer["run"], answer["lead"]
        addresses = {name: tuple(call["addresses"][self.inside.rank]) for name, call in answer["calls"].items()}
        self.connections.open(answer["epoch"], self.members, answer["joiners"], addresses)
        joiners = f"; joining: {', '.join(answer['joiners'])}" if answer["joiners"] else ""
        log_dist(
            f"hybridep: site '{self.site}': {', '.join(self.members)} train together from step {answer['step']} "
            f"on{joiners}", ranks=[0], level=30,
        )  # fmt: skip


def check_headers(site: str, step: int, packets: dict[str, Packet], names: Sequence[str]) -> None:
    """Raise SiteError if members are at another step, or take it with other learning rates or loss scales."""
    first = packets[names[0]].header
    for name in names:
        header = packets[name].header
        for what, ours, theirs in (
            ("is at step", first.step, header.step),
            ("has the learning rates", first.rates, header.rates),
            ("has the loss scale", first.loss_scale, header.loss_scale),
        ):
            if ours != theirs:
                raise SiteError(
                    f"site '{site}', step {step}: site '{name}' {what} {_shown(theirs)}, and site '{names[0]}' "
                    f"{_shown(ours)}; use the same settings and schedule on all sites, and set a schedule of the "
                    f"script's own to engine.global_steps after the start"
                )


def _shown(value: object) -> str:
    return ", ".join(f"{one:g}" for one in value) if isinstance(value, tuple) else f"{value}"
