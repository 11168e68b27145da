# SPDX-License-Identifier: Apache-2.0
"""The exchange between sites around an optimizer step, and what a site saves of it.

before a step  `exchange`; after a change of members, all ranks first take part in a new epoch
after it       `after_step`: what codecs left out is kept, or restored if the step was skipped
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.deepspeed.site_overlap import Departures
from ds_hybridep.deepspeed.site_state import SiteState, hash_of
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.runtime.site_epochs import Epochs
from ds_hybridep.sites.exchange import DIGEST_BYTES, Crossing
from ds_hybridep.sites.local_steps import LocalSteps
from ds_hybridep.sites.packets import OwnedSlice, Packets, leaves_of


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


class SiteExchange:
    """Averages what one engine owns with its counterparts in other sites; all ranks of the site must make it.

    Args:
        state: of the engine.
        epochs: the connections with the other sites.
        packets: what crosses.
        departures: packets that leave while the backward runs.
        local: of local steps; None averages gradients at each step.
        refresh: called after weights have changed.
        verify_interval: exchanges between comparisons of weights.

    is_replaying: this site takes steps of the others from their packets, and exchanges nothing itself.
    has_caught_up: it has the others' state, and has made no step of its own since.
    """

    def __init__(
        self, state: SiteState, epochs: Epochs, packets: Packets, departures: Departures, *,
        local: LocalSteps | None, refresh: Callable[[], None], verify_interval: int,
    ) -> None:  # fmt: skip
        self.state, self.epochs, self.packets, self._departures = state, epochs, packets, departures
        self.local, self.refresh, self._interval = local, refresh, verify_interval
        self.is_replaying = self.has_caught_up = False
        self._num_repeated = 0  # exchanges that were discarded and repeated
        self._last_steps: dict[str, int] = {}  # of the last exchange with each site

    def close(self) -> None:
        """Leave the other sites."""
        self.epochs.close()

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Set this rank's averaged gradients to the mean over all sites that are present."""
        if not self.is_replaying and self.local is None:
            slices, put = self.state.view.slices()
            leaves = leaves_of(slices)
            if self._average(lambda: leaves, lambda: self.state.loss_scale)[1]:
                put()

    def next_crossing(self) -> Crossing | None:
        """Return the connections of the next exchange; None if there may be others by then, or nobody else."""
        is_known = not self.is_replaying and not self.epochs.needs_quorum and self.epochs.others
        return self.epochs.crossing if is_known else None

    def _average(
        self, take: Callable[[], list[OwnedSlice]], loss_scale: Callable[[], float]
    ) -> tuple[list[OwnedSlice], bool]:
        """Set what `take` returns to the mean over all sites that are present.

        take: is called again when this site may have taken over the state of another one.

        Returns the slices, and False if they have not changed.
        """
        epochs = self.epochs
        scale = first = loss_scale()
        while True:
            if epochs.needs_quorum:
                self._recall()
                while self._form(is_complete=False) and epochs.needs_quorum:
                    pass  # the state of the lead did not come whole
            slices = take()
            if (newer := loss_scale()) != scale:  # of another site, whose state this one has taken over
                for tensor in (tensor for one in slices for tensor in one.tensors):
                    tensor.mul_(newer / scale)
                scale = newer
            if len(epochs.members) < len(epochs.names):
                epochs.stay_in_touch()
            if not epochs.others:
                return slices, scale != first  # then they were rescaled
            # Weights are compared in the first exchange of an epoch, and every so often.
            verifies = not epochs.num_exchanges or (self._interval and epochs.num_exchanges % self._interval == 0)
            digest = self.digest() if verifies else bytes(DIGEST_BYTES)
            received, is_complete = epochs.swap(self._encode(slices, scale))
            is_agreed, epochs.needs_quorum = epochs.agree(is_complete, digest)
            if is_agreed or not self._form(is_complete=is_complete):
                self.packets.average(slices, received, scale)
                epochs.num_exchanges += 1
                self._last_steps |= dict.fromkeys(epochs.members, self.state.step)
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
            departed[index].packet if index in departed else self.packets.encode(one, scale)
            for index, one in enumerate(slices)
        ]

    def _recall(self) -> None:
        """Forget what has departed: it does not count, and will be encoded anew."""
        self.packets.transaction.undo()
        self._departures.forget()

    def after_step(self, *, was_applied: bool) -> None:
        """Keep what codecs left out, or restore it if the step was skipped."""
        transaction = self.packets.transaction
        self.has_caught_up = self.has_caught_up and self.is_replaying
        if (local := self.local) is not None:
            if not self.is_replaying:
                mean, _ = self._average(lambda: local.deltas(local.due(self.state.step)), lambda: 1.0)
                self.outer_step(local.due(self.state.step), mean)
            transaction.commit()
        elif was_applied:
            transaction.commit()
        else:
            transaction.undo()

    def outer_step(self, fragment: int, mean: list[OwnedSlice]) -> None:
        """Take the outer step of a fragment, with the mean of all sites' deltas."""
        assert self.local is not None
        self.local.apply(fragment, mean)
        self.refresh()

    def report(self) -> dict[str, Any]:
        """Return what this rank has exchanged with the other sites, JSON-able; docs/sites.md describes it.

        "drift" is the L2 distance of this rank's weights from the common ones over their norm; None without local
        steps.
        """
        epochs = self.epochs
        return {
            "site": epochs.site, "step": self.state.step, "repeated": self._num_repeated,
            "quorum_s": epochs.quorum_s, "drift": None if self.local is None else self.local.drift(),
            "others": {
                name: {"present": name in epochs.members, "step": self._last_steps.get(name), **vars(counters)}
                for name, counters in epochs.counters.items() if name != epochs.site
            },
        }  # fmt: skip

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Save what only this site has: what codecs have left out, and the state of local steps."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"packets": self.packets.state_dict(), "local": self._state_of_local()}, self._file(folder))

    def before_load(self) -> bytes | None:
        """Return the state that this site has from others, if it has caught up with them and made no step since."""
        return self.state.capture(self._state_of_local()) if self.has_caught_up else None

    def after_load(self, folder: Path | None, caught_up: bytes | None) -> None:
        """A checkpoint was loaded.  The state of sites that are training is newer: it comes back.

        folder: None if the optimizer's state was not loaded.  Then, and where it has no file of this site, nothing is
        left of the steps before.
        """
        self._recall()
        if caught_up is not None:
            self.restore(caught_up)
            return
        self.epochs.needs_quorum = True  # weights are compared before the next exchange
        self.packets.forget()
        if self.local is not None:
            self.local.begin()
        if folder is not None and (path := self._file(folder)).exists():
            saved = torch.load(path, weights_only=True, map_location="cpu")
            self.packets.load_state_dict(saved["packets"])
            if self.local is not None:
                self.local.load_state_dict(saved["local"])

    def _file(self, folder: Path) -> Path:
        return folder / f"hybridep_site_{self.epochs.site}_rank_{self.epochs.inside.rank}.pt"

    def _state_of_local(self) -> Any:
        return None if self.local is None else self.local.state_dict()

    # -- another epoch ----------------------------------------------------------------------------------------------

    def _form(self, *, is_complete: bool) -> bool:
        """Take part in a new epoch; a site whose step or weights differ gets the state of the first that is newest.

        is_complete: this site has all packets of the step under way.
        Returns False if another site has applied that step, so this one must, too, before the next epoch.
        """
        epochs = self.epochs
        answer = epochs.call(self.digest(), is_complete=is_complete)
        epochs.needs_quorum = answer["op"] == "commit"
        if epochs.needs_quorum:
            return False
        if epochs.site not in epochs.members:
            raise epochs.left_out()
        lead, differ = compared({name: answer["calls"][name] for name in epochs.members})
        assert epochs.crossing is not None
        if epochs.site == lead and (differ or answer["observers"]):
            state = self.state.capture(self._state_of_local())
            for name in (*differ, *answer["observers"]):
                epochs.crossing.send_state(name, state)
        if epochs.site in differ:
            if (whole := epochs.receive_state(epochs.crossing, lead)) is None:
                epochs.needs_quorum = True  # without the lead, if it has ended
                return True
            self.restore(whole)
            log_dist(
                f"hybridep: site '{epochs.site}' had other weights or was at another step than site '{lead}'; it took "
                f"over that site's state at step {self.state.step}", ranks=[0], level=30,
            )  # fmt: skip
        return True

    def restore(self, state: bytes) -> None:
        """Take over the state of another site."""
        more = self.state.restore(state)
        if self.local is not None:
            self.local.load_state_dict(more)
        self.refresh()

    def digest(self) -> bytes:
        """Return a hash of this site's weights and step; on other ranks than 0 it means nothing."""
        tensors = self.state.weights().values() if self.local is None else self.local.common()
        return self.epochs.digest(hash_of(tensors, self.state.step))
