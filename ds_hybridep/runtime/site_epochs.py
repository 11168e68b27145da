# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one site take part in epochs together: rank 0 talks to the meeting point, and all ranks follow."""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ds_hybridep.errors import CommunicationError, SiteError
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.sites.exchange import Counters, Crossing
from ds_hybridep.sites.member import Member
from ds_hybridep.sites.patience import Patience
from ds_hybridep.transport.inside import Inside

LOOK_S = 2.0  # between looks at whether the meeting point has answered


class Epochs:
    """The members of the running epoch, and this rank's connections with its counterparts.

    Args:
        engine: may be a weak proxy.
        site: the name of this one.  names: all sites.
        join: on rank 0, connects to the meeting point.
        new_crossing: makes this rank's connections for one epoch.

    Raises SiteError on all ranks if the meeting point refuses this site.
    """

    def __init__(
        self, engine: Any, site: str, names: list[str], inside: Inside, join: Callable[[], Member],
        new_crossing: Callable[[dict[str, Counters]], Crossing],
    ) -> None:  # fmt: skip
        self._engine, self.site, self.names, self._inside = engine, site, names, inside
        self._new_crossing = new_crossing
        self.counters = {name: Counters() for name in names}
        self.quorum_s = 0.0  # seconds waited for the meeting point and for sites that had to come there
        self.members: list[str] = []
        self.num_exchanges = 0  # in this epoch
        self._needs_quorum = True
        self._crossing: Crossing | None = None
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
        if self._crossing is not None:
            self._crossing.close()
        if self._member is not None:
            self._member.close()
        self._inside.close()

    @property
    def _others(self) -> list[str]:
        return [] if self._crossing is None else self._crossing.others

    def _stay_in_touch(self) -> None:
        """Wait until the meeting point, which may make an epoch of the sites that are missing, knows of this site."""
        with self._patience("the meeting point") as patience:
            while True:
                is_in_touch, wants_change, refusal = self._inside.broadcast(self._news())
                if refusal:
                    raise SiteError(refusal)
                self._needs_quorum = self._needs_quorum or wants_change
                if is_in_touch:
                    return
                patience.look(self._trouble())
                time.sleep(LOOK_S)

    def _patience(self, whom: str) -> Patience:
        """Return what announces a wait, on rank 0."""
        what = f"site '{self.site}' waits for {whom} before step {self._engine.global_steps}"
        return Patience("" if self._member is None else what)

    def _trouble(self) -> str:
        """Return what is wrong with the meeting point, if anything is known."""
        return "" if self._member is None or self._member.is_in_touch else self._member.trouble

    def _news(self) -> tuple[bool, bool, str]:
        member = self._member
        return (True, False, "") if member is None else (member.is_in_touch, member.wants_change, member.refusal)

    def _swap(self, packets: list[Tensor]) -> tuple[list[Tensor], bool]:
        assert self._crossing is not None
        try:
            received, is_complete = self._crossing.swap(packets), True
        except CommunicationError:
            received, is_complete = [], False
        return received, self._inside.all(is_complete)

    def _agree(self, is_complete: bool, digest: bytes) -> tuple[bool, bool]:
        """Agree with all sites whether the step may be applied, and whether a quorum comes before the next one."""
        said = (False, True)
        if self._inside.rank == 0:
            assert self._crossing is not None
            assert self._member is not None
            try:
                said = self._crossing.agree(is_complete, self._member.wants_change, digest)
            except CommunicationError:
                said = False, True
        is_agreed, wants_change = self._inside.broadcast(said)
        return is_agreed, wants_change

    def _call(
        self, digest: bytes, *, is_complete: bool = False, is_ready: bool = False, waits: bool = True
    ) -> dict[str, Any]:
        """Call for a quorum, and return its answer; after "epoch", this rank is connected with its counterparts.

        digest: a hash of this site's weights.  The other arguments are as in `_form` and `_catch_up`.
        """
        self._coming = self._new_crossing(self.counters)
        addresses = self._inside.gather(self._coming.address)
        missed = self._inside.gather(sorted(self._crossing.missed) if self._crossing is not None else [])
        if waits and self._crossing is not None:
            self._crossing.close()  # nobody waits for more from this site: they call, too
            self._crossing = None
        if self._member is not None:
            self._member.call(
                step=self._engine.global_steps, complete=is_complete, is_ready=is_ready, addresses=addresses,
                digest=digest.hex(), missed=sorted({name for names in missed for name in names}),
            )  # fmt: skip
        if not waits:
            return {}
        began = time.monotonic()
        with self._patience(f"{' and '.join(name for name in self.names if name != self.site)} to agree") as patience:
            while (answer := self._hear(LOOK_S)) is None:
                patience.look(self._trouble())
        self.quorum_s += time.monotonic() - began
        return answer

    def _hear(self, wait_s: float) -> dict[str, Any] | None:
        """Return the answer to the call, on all ranks, or None if there is none in `wait_s`."""
        said: Any = None
        if self._member is not None:
            try:
                said = self._member.answer(wait_s)
            except SiteError as error:
                said = {"op": "error", "text": str(error)}
        answer: dict[str, Any] | None = self._inside.broadcast(said)
        if answer is None:
            return None
        if answer["op"] == "error":
            raise SiteError(answer["text"])
        if answer["op"] == "left out":
            raise self._left_out()
        if answer["op"] == "epoch":
            self._open(answer)
        else:
            self._coming.close()
        return answer

    def _left_out(self) -> SiteError:
        return SiteError(
            f"the other sites went on without site '{self.site}', which is at step {self._engine.global_steps}; start "
            f"this site again with the same command, and it joins them"
        )

    def _open(self, answer: dict[str, Any]) -> None:
        """Leave the connections of the last epoch for those of the next."""
        if self._crossing is not None:
            self._crossing.close()
        self._crossing, self.members, self.num_exchanges = self._coming, answer["members"], 0
        calls = answer["calls"]
        addresses = {name: tuple(call["addresses"][self._inside.rank]) for name, call in calls.items()}
        self._crossing.open(answer["epoch"], self.members, answer["observers"], addresses)
        observers = f"; catching up: {', '.join(answer['observers'])}" if answer["observers"] else ""
        log_dist(
            f"hybridep: site '{self.site}' trains with {', '.join(self.members)} from step "
            f"{self._engine.global_steps} on{observers}", ranks=[0], level=30,
        )  # fmt: skip
