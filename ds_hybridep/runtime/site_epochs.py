# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one site take part in epochs together: rank 0 talks to the meeting point, and all ranks follow."""

import contextlib
import hashlib
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ds_hybridep.errors import CommunicationError, SiteError
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.sites.exchange import DIGEST_BYTES, Counters, Crossing
from ds_hybridep.sites.member import Member
from ds_hybridep.sites.patience import Patience
from ds_hybridep.transport.inside import Inside

LOOK_S = 2.0  # between looks at whether the meeting point has answered


class Epochs:
    """The members of the running epoch, and this rank's connections with its counterparts.

    Args:
        site: the name of this one.  names: all sites.
        step: returns the optimizer steps that this site has made.
        join: on rank 0, connects to the meeting point.
        new_crossing: makes this rank's connections for one epoch.

    Raises SiteError on all ranks if the meeting point refuses this site.

    is_running: the other sites were training already when this one joined.
    needs_quorum: a new epoch comes before the next exchange.
    crossing: the connections of the running epoch, or None.
    """

    def __init__(
        self, site: str, names: list[str], inside: Inside, step: Callable[[], int], *, join: Callable[[], Member],
        new_crossing: Callable[[dict[str, Counters]], Crossing],
    ) -> None:  # fmt: skip
        self.site, self.names, self.inside, self._step = site, names, inside, step
        self._new_crossing = new_crossing
        self.counters = {name: Counters() for name in names}
        self.quorum_s = 0.0  # seconds waited for the meeting point and for sites that had to come there
        self.members: list[str] = []
        self.num_exchanges = 0  # in this epoch
        self.needs_quorum = True
        self.crossing: Crossing | None = None
        self._member: Member | None = None
        error = ""
        if inside.rank == 0:
            try:
                self._member = join()
            except SiteError as failure:
                error = str(failure)
        if error := inside.broadcast(error):
            raise SiteError(error)
        self.is_running: bool = inside.broadcast(self._member.is_running if self._member is not None else False)

    def close(self) -> None:
        """Leave the other sites."""
        if self.crossing is not None:
            self.crossing.close()
        if self._member is not None:
            self._member.close()
        self.inside.close()

    @property
    def others(self) -> list[str]:
        return [] if self.crossing is None else self.crossing.others

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
                patience.look(self._trouble())
                time.sleep(LOOK_S)

    def _patience(self, whom: str) -> Patience:
        """Return what announces a wait, on rank 0."""
        what = f"site '{self.site}' waits for {whom} before step {self._step()}"
        return Patience("" if self._member is None else what)

    def _trouble(self) -> str:
        """Return what is wrong with the meeting point, if anything is known."""
        return "" if self._member is None or self._member.is_in_touch else self._member.trouble

    def _news(self) -> tuple[bool, bool, str]:
        member = self._member
        return (True, False, "") if member is None else (member.is_in_touch, member.wants_change, member.refusal)

    def swap(self, packets: list[Tensor]) -> tuple[list[Tensor], bool]:
        """Send this rank's packets, and return those of all members, and whether all ranks have all of them."""
        assert self.crossing is not None
        try:
            received, is_complete = self.crossing.swap(packets), True
        except CommunicationError:
            received, is_complete = [], False
        return received, self.inside.all(is_complete)

    def agree(self, is_complete: bool, digest: bytes) -> tuple[bool, bool]:
        """Agree with all sites whether the step may be applied, and whether a quorum comes before the next one."""
        said = (False, True)
        if self.inside.rank == 0:
            assert self.crossing is not None
            assert self._member is not None
            try:
                said = self.crossing.agree(is_complete, self._member.wants_change, digest)
            except CommunicationError:
                said = False, True
        is_agreed, wants_change = self.inside.broadcast(said)
        return is_agreed, wants_change

    def call(
        self, digest: bytes, *, is_complete: bool = False, is_ready: bool = False, waits: bool = True
    ) -> dict[str, Any]:
        """Call for a quorum, and return its answer; after "epoch", this rank is connected with its counterparts.

        digest: a hash of this site's weights.  is_complete: it has all packets of the step under way.
        is_ready: it observes, and is up to date.  waits: False only calls; `hear` returns the answer later.
        """
        self._coming = self._new_crossing(self.counters)
        addresses = self.inside.gather(self._coming.address)
        missed = self.inside.gather(sorted(self.crossing.missed) if self.crossing is not None else [])
        if waits and self.crossing is not None:
            self.crossing.close()  # nobody waits for more from this site: they call, too
            self.crossing = None
        if self._member is not None:
            self._member.call(
                step=self._step(), complete=is_complete, is_ready=is_ready, addresses=addresses,
                digest=digest.hex(), missed=sorted({name for names in missed for name in names}),
            )  # fmt: skip
        if not waits:
            return {}
        began = time.monotonic()
        with self._patience(f"{' and '.join(name for name in self.names if name != self.site)} to agree") as patience:
            while (answer := self.hear(LOOK_S)) is None:
                patience.look(self._trouble())
        self.quorum_s += time.monotonic() - began
        return answer

    def hear(self, wait_s: float) -> dict[str, Any] | None:
        """Return the answer to the call, on all ranks, or None if there is none in `wait_s`."""
        said: Any = None
        if self._member is not None:
            try:
                said = self._member.answer(wait_s)
            except SiteError as error:
                said = {"op": "error", "text": str(error)}
        answer: dict[str, Any] | None = self.inside.broadcast(said)
        if answer is None:
            return None
        if answer["op"] == "error":
            raise SiteError(answer["text"])
        if answer["op"] == "left out":
            raise self.left_out()
        if answer["op"] == "epoch":
            self._open(answer)
        else:
            self._coming.close()
        return answer

    def left_out(self) -> SiteError:
        """Return the error of a site that the others did not wait for."""
        return SiteError(
            f"the other sites went on without site '{self.site}', which is at step {self._step()}; start "
            f"this site again with the same command, and it joins them"
        )

    def _open(self, answer: dict[str, Any]) -> None:
        """Leave the connections of the last epoch for those of the next."""
        if self.crossing is not None:
            self.crossing.close()
        self.crossing, self.members, self.num_exchanges = self._coming, answer["members"], 0
        calls = answer["calls"]
        addresses = {name: tuple(call["addresses"][self.inside.rank]) for name, call in calls.items()}
        self.crossing.open(answer["epoch"], self.members, answer["observers"], addresses)
        observers = f"; catching up: {', '.join(answer['observers'])}" if answer["observers"] else ""
        log_dist(
            f"hybridep: site '{self.site}' trains with {', '.join(self.members)} from step "
            f"{self._step()} on{observers}", ranks=[0], level=30,
        )  # fmt: skip

    # -- among the ranks of this site -------------------------------------------------------------------------------

    def digest(self, own: bytes) -> bytes:
        """Return a hash of what all ranks give, of `DIGEST_BYTES`; on other ranks than 0 it means nothing."""
        digests = self.inside.gather(own.hex())
        return hashlib.blake2b("".join(digests).encode(), digest_size=DIGEST_BYTES).digest()

    def receive_state(self, crossing: Crossing, lead: str) -> bytes | None:
        """Return what the lead sends; None on all ranks if it does not come whole to one of them."""
        state: bytes | None = None
        with contextlib.suppress(CommunicationError):
            state = crossing.receive_state(lead)
        return state if self.inside.all(state is not None) else None
