# SPDX-License-Identifier: Apache-2.0
"""The exchange between sites around an optimizer step, and what a site saves of it."""

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.deepspeed import owned
from ds_hybridep.deepspeed.patches import Patches
from ds_hybridep.deepspeed.site_overlap import Departures
from ds_hybridep.errors import CommunicationError
from ds_hybridep.kernels import Kernels
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.runtime.site_epochs import Epochs
from ds_hybridep.sites.exchange import DIGEST_BYTES, Counters, Crossing
from ds_hybridep.sites.local_steps import LocalSteps
from ds_hybridep.sites.member import Member
from ds_hybridep.sites.packets import OwnedSlice, Packets, leaves_of
from ds_hybridep.sync.home import Home
from ds_hybridep.transport.inside import Inside


def compared(calls: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Return the first of the newest members, and the members that have another step or other weights.

    A member that has caught up is left out: it called before it had come to the step of the others.
    """
    old = {name: (call["step"], call["digest"]) for name, call in calls.items() if not call["is_ready"]}
    if not old:  # those who had given them the state have gone
        return next(iter(calls)), []
    newest = max(step for step, _ in old.values())
    lead = next(name for name, (step, _) in old.items() if step == newest)
    return lead, [name for name, state in old.items() if state != old[lead]]


class SiteExchange(Epochs):
    """Averages what one engine owns with its counterparts in other sites; all ranks of the site must make it.

    Args:
        engine: may be a weak proxy; its optimizer exists.  The other arguments up to new_crossing are as in `Epochs`.
        loss_scale: returns the factor of gradients.
        refresh: called after weights were loaded.
        verify_interval: exchanges between comparisons of weights.
        every: 1 averages gradients at each step; more: local steps, see `sites.local_steps`.
        patches: of the engine.
        is_last: returns True in the last backward before the optimizer step.
    """

    def __init__(
        self, engine: Any, site: str, names: list[str], inside: Inside, join: Callable[[], Member],
        new_crossing: Callable[[dict[str, Counters]], Crossing], packets: Packets, loss_scale: Callable[[], float],
        refresh: Callable[[], None], verify_interval: int, every: int, home: Home, kernels: Kernels, patches: Patches,
        is_last: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._owned = owned.Owned(engine)
        self._local: LocalSteps | None = None
        if every > 1:
            masters, self._publish = self._owned.masters()
            self._local = LocalSteps(masters, every, home)
        super().__init__(engine, site, names, inside, join, new_crossing)  # after all that may refuse the engine
        self._packets, self._loss_scale, self._refresh = packets, loss_scale, refresh
        self._interval = verify_interval
        self._has_caught_up = False  # and made no step since
        self._reached = 0  # the step of the packet that was replayed last
        self._is_at_exchange = True  # what was captured for a site that comes back is as before an exchange
        self._num_repeated = 0  # exchanges that were discarded and repeated
        self._last_steps: dict[str, int] = {}  # of the last exchange with each site
        self._is_replaying = False
        self._departures = Departures(self._owned, packets, kernels, self._next_crossing, is_last, loss_scale)
        if every == 1 and self._owned.reduces_buckets:
            self._departures.watch(engine.optimizer, patches)

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Set this rank's averaged gradients to the mean over all sites that are present."""
        if not self._is_replaying and self._local is None:
            slices, finish = self._owned.slices()
            leaves = leaves_of(slices)
            if self._average(lambda: leaves, self._loss_scale)[1]:
                finish()

    def _next_crossing(self) -> Crossing | None:
        """Return the connections of the next exchange; None if there may be others by then, or nobody else."""
        return None if self._is_replaying or self._needs_quorum or not self._others else self._crossing

    def _average(
        self, take: Callable[[], list[OwnedSlice]], loss_scale: Callable[[], float]
    ) -> tuple[list[OwnedSlice], bool]:
        """Set what `take` returns to the mean over all sites that are present.

        take: is called again when this site may have taken over the state of another one.

        Returns the slices, and False if they have not changed.
        """
        scale = first = loss_scale()
        while True:
            if self._needs_quorum:
                self._recall()
                while self._form(is_complete=False) and self._needs_quorum:
                    pass  # the state of the lead did not come whole
            slices = take()
            if (newer := loss_scale()) != scale:  # of another site, whose state this one has taken over
                for tensor in (tensor for one in slices for tensor in one.tensors):
                    tensor.mul_(newer / scale)
                scale = newer
            if len(self.members) < len(self.names):
                self._stay_in_touch()
            if not self._others:
                return slices, scale != first  # then they were rescaled
            # Weights are compared in the first exchange of an epoch, and every so often.
            verifies = not self.num_exchanges or (self._interval and self.num_exchanges % self._interval == 0)
            digest = self._digest() if verifies else bytes(DIGEST_BYTES)
            received, is_complete = self._swap(self._encode(slices, scale))
            is_agreed, self._needs_quorum = self._agree(is_complete, digest)
            if is_agreed or not self._form(is_complete=is_complete):
                self._packets.average(slices, received, scale)
                self.num_exchanges += 1
                self._last_steps |= dict.fromkeys(self.members, self._engine.global_steps)
                self._departures.learn(slices)
                return slices, True
            self._recall()
            self._num_repeated += 1

    def _encode(self, slices: list[OwnedSlice], scale: float) -> list[Tensor]:
        """Return this rank's packets: those that have departed, or all anew if gradients have changed since."""
        if not self._departures.are_as_sent(slices, scale):
            self._recall()
        departed = self._departures.departed
        return [
            departed[index].packet if index in departed else self._packets.encode(one, scale)
            for index, one in enumerate(slices)
        ]

    def _recall(self) -> None:
        """Forget what has departed: it does not count, and will be encoded anew."""
        self._packets.changes.undo()
        self._departures.forget()

    def after_step(self, *, was_applied: bool) -> None:
        """Keep what codecs left out, or restore it if the step was skipped."""
        changes = self._packets.changes
        self._has_caught_up = self._has_caught_up and self._is_replaying
        if self._local is not None:
            if not self._is_replaying:
                local = self._local
                mean, _ = self._average(lambda: local.deltas(local.due(self._engine.global_steps)), lambda: 1.0)
                self._outer_step(local.due(self._engine.global_steps), mean)
            changes.commit()
        elif was_applied:
            changes.commit()
        else:
            changes.undo()

    def _outer_step(self, fragment: int, mean: list[OwnedSlice]) -> None:
        assert self._local is not None
        self._local.apply(fragment, mean)
        self._publish()
        self._refresh()

    def report(self) -> dict[str, Any]:
        """Return what this rank has exchanged with the other sites, JSON-able; docs/sites.md describes it.

        "drift" is the L2 distance of this rank's weights from the common ones over their norm; None without local
        steps.
        """
        return {
            "site": self.site, "step": self._engine.global_steps, "repeated": self._num_repeated,
            "quorum_s": self.quorum_s, "drift": None if self._local is None else self._local.drift(),
            "others": {
                name: {"present": name in self.members, "step": self._last_steps.get(name), **vars(counters)}
                for name, counters in self.counters.items() if name != self.site
            },
        }  # fmt: skip

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Save what only this site has: what codecs have left out, and the state of local steps."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"packets": self._packets.state_dict(), "local": self._more()}, self._file(folder))

    def before_load(self) -> bytes | None:
        """Return the state that this site has from others, if it has caught up with them and made no step since."""
        return owned.capture(self._engine, self._more()) if self._has_caught_up else None

    def after_load(self, folder: Path | None, caught_up: bytes | None) -> None:
        """A checkpoint was loaded.  The state of sites that are training is newer: it comes back.

        folder: None if the optimizer's state was not loaded.  Then, and where it has no file of this site, nothing is
        left of the steps before.
        """
        self._recall()
        if caught_up is not None:
            self._restore(caught_up)
            return
        self._needs_quorum = True  # weights are compared before the next exchange
        self._packets.forget()
        if self._local is not None:
            self._local.begin()
        if folder is not None and (path := self._file(folder)).exists():
            saved = torch.load(path, weights_only=True, map_location="cpu")
            self._packets.load_state_dict(saved["packets"])
            if self._local is not None:
                self._local.load_state_dict(saved["local"])

    def _file(self, folder: Path) -> Path:
        return folder / f"hybridep_site_{self.site}_rank_{self._inside.rank}.pt"

    def _more(self) -> Any:
        return None if self._local is None else self._local.state_dict()

    def _form(self, *, is_complete: bool) -> bool:
        """Take part in a new epoch; a site whose step or weights differ gets the state of the first that is newest.

        is_complete: this site has all packets of the step under way.
        Returns False if another site has applied that step, so this one must, too, before the next epoch.
        """
        answer = self._call(self._digest(), is_complete=is_complete)
        self._needs_quorum = answer["op"] == "commit"
        if self._needs_quorum:
            return False
        if self.site not in self.members:
            raise self._left_out()
        lead, differ = compared({name: answer["calls"][name] for name in self.members})
        assert self._crossing is not None
        if self.site == lead and (differ or answer["observers"]):
            state = owned.capture(self._engine, self._more())
            for name in (*differ, *answer["observers"]):
                self._crossing.send_state(name, state)
        if self.site in differ:
            if (whole := self._receive_state(self._crossing, lead)) is None:
                self._needs_quorum = True  # without the lead, if it has ended
                return True
            self._restore(whole)
            log_dist(
                f"hybridep: site '{self.site}' had other weights or was at another step than site '{lead}'; it took "
                f"over that site's state at step {self._engine.global_steps}", ranks=[0], level=30,
            )  # fmt: skip
        return True

    def _receive_state(self, crossing: Crossing, lead: str) -> bytes | None:
        """Return what the lead sends; None on all ranks if it does not come whole to one of them."""
        state: bytes | None = None
        with contextlib.suppress(CommunicationError):
            state = crossing.receive_state(lead)
        return state if self._inside.all(state is not None) else None

    def _restore(self, state: bytes) -> None:
        more = owned.restore(self._engine, state)
        if self._local is not None:
            self._local.load_state_dict(more)
        self._refresh()

    def _digest(self) -> bytes:
        """Return a hash of this site's weights and step; on other ranks than 0 it means nothing."""
        tensors = owned.weights(self._engine).values() if self._local is None else self._local.common()
        digests = self._inside.gather(owned.hash_of(tensors, self._engine.global_steps).hex())
        return hashlib.blake2b("".join(digests).encode(), digest_size=DIGEST_BYTES).digest()
