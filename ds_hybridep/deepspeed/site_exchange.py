# SPDX-License-Identifier: Apache-2.0
"""The exchange between sites around an optimizer step, and what a site saves of it.

before a step  `exchange`: gradients become the mean over all members
after it       `take_outer_step`: local steps are exchanged
at its end     `after_step`: residuals are kept, a fragment of the state leaves for joiners

A change of members comes before an exchange: all ranks take part in a new epoch, in which this site is a member or a
joiner.  A joiner takes the others' steps (`site_join.py`) until it is a member; what it had computed counts nothing.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.deepspeed.engine_view import Put
from ds_hybridep.deepspeed.site_join import Join, Lead, positions_of
from ds_hybridep.deepspeed.site_overlap import Departures
from ds_hybridep.deepspeed.site_state import InsideStep, SiteState
from ds_hybridep.errors import CommunicationError, SiteError
from ds_hybridep.runtime.log import log_dist, write_json
from ds_hybridep.runtime.site_epochs import Epochs, check_headers
from ds_hybridep.sites.exchange import Header, Packet, SiteConnections, weights_of
from ds_hybridep.sites.fragments import distances
from ds_hybridep.sites.local_steps import LocalSteps
from ds_hybridep.sites.packets import OwnedSlice, Packets, leaves_of

TOLERANCE = 1e-5  # of the norm of a part: weights that are further apart are repaired
OTHER_WEIGHTS = 1e-2  # no rounding makes so much
RUN_FILE = "hybridep_sites.json"  # beside DeepSpeed's files in a checkpoint


class QuorumOutcome(Enum):
    """What a quorum has decided about the step under way."""

    GO_ON = "exchange it, perhaps again, with the members of the new epoch"
    COMMIT = "apply it: another site has"
    JOINED = "it counts nothing: this site has taken steps of the others, and is at theirs"


def _nothing() -> None:
    """Put nothing back."""


class SiteExchange:
    """Averages what one engine owns with its counterparts in other sites; all ranks of the site must make it.

    Args:
        state: of the engine.
        epochs: the connections with the other sites.
        packets: what crosses.
        departures: packets that leave while the backward runs.
        local: of local steps; None averages gradients at each step.
        refresh: called after weights have changed.
        verify_interval: exchanges between comparisons of weights; 0: only the first one of an epoch compares.

    weight: how much the next step of this site counts; None: the samples of a step.
    has_joined: it has the others' state, and has made no step of its own since.
    """

    def __init__(
        self, state: SiteState, epochs: Epochs, packets: Packets, departures: Departures, *,
        local: LocalSteps | None, refresh: Callable[[], None], verify_interval: int,
    ) -> None:  # fmt: skip
        self.state, self.epochs, self.packets, self._departures = state, epochs, packets, departures
        self.local, self.refresh, self._verify_interval = local, refresh, verify_interval
        self.weight: float | Tensor | None = None
        self.has_joined = self._is_joining = False
        self._lead = Lead(state, local)  # hands the state on, while this site leads
        self._num_repeated = self._num_joins = 0  # exchanges that were discarded and repeated; times that it joined
        self._last_steps: dict[str, int] = {}  # of the last exchange with each site
        self._owed: list[tuple[int, int]] = []  # positions of the state that the lead is about to send
        self._is_lost = False  # its weights are not those of the others
        self.apart, self.num_repairs = 0.0, 0

    def close(self) -> None:
        """Leave the other sites."""
        self.epochs.close()

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Set this rank's averaged gradients to the mean over all sites that are present."""
        if not self._is_joining and self.local is None:
            _, put = self._average(self._gradients, lambda: self.state.loss_scale)
            put()

    def next_connections(self) -> SiteConnections | None:
        """Return the connections of the next exchange; None if there may be others by then, or nobody else."""
        is_known = not self._is_joining and not self.epochs.needs_quorum and self.epochs.others
        return self.epochs.connections if is_known else None

    def take_outer_step(self) -> None:
        """Take the outer step of local steps, which changes weights also where the optimizer's step was skipped."""
        if self.local is None or self._is_joining:
            return
        mean, _ = self._average(self._deltas, lambda: 1.0)
        self.local.apply(self.local.due(self.state.step), mean)

    def after_step(self, *, was_applied: bool) -> None:
        """Keep what codecs left out, or restore it if the step was skipped; hand a part of the state on."""
        transaction = self.packets.transaction
        if self._is_joining:
            return transaction.undo()
        if was_applied or self.local is not None:
            transaction.commit()
        else:
            transaction.undo()
        if self.local is not None and not was_applied:
            self.refresh()  # the outer step has changed weights that a skipped step does not send
        self.has_joined = False
        self.epochs.committed(self.state.step)
        self._lead.after_step(self.epochs.connections)
        self._take_repair()

    def _gradients(self, *, of_nothing: bool) -> tuple[list[OwnedSlice], Put]:
        if of_nothing:
            self.state.view.make_zeros()
        slices, put = self.state.view.slices()
        return leaves_of(slices), put

    def _deltas(self, *, of_nothing: bool) -> tuple[list[OwnedSlice], Put]:
        """Return how far this site has come; nothing if it has just joined."""
        assert self.local is not None
        return self.local.deltas(self.local.due(self.state.step)), _nothing

    def _average(
        self, take: Callable[..., tuple[list[OwnedSlice], Put]], loss_scale: Callable[[], float]
    ) -> tuple[list[OwnedSlice], Put]:
        """Return slices, set to the mean over all members, and what puts them back; alone, nothing is put.

        take: is called with `of_nothing=True` after this site has joined the others: then it has computed nothing for
            the step that they are at.
        """
        epochs, weight, is_taken = self.epochs, self._take_weight(), False
        place: InsideStep = "before" if self.local is None else "after"
        slices: list[OwnedSlice] = []
        while True:
            outcome = QuorumOutcome.GO_ON
            while epochs.needs_quorum and outcome is QuorumOutcome.GO_ON:
                self._recall()
                outcome = self._form(place)
            if outcome is QuorumOutcome.JOINED:
                weight = 0.0
            if outcome is QuorumOutcome.JOINED or not is_taken:
                slices, put = take(of_nothing=outcome is QuorumOutcome.JOINED)
                is_taken = True
            if len(epochs.members) < len(epochs.names):
                epochs.stay_in_touch()
                if epochs.needs_quorum:  # the others may have gone on without this site
                    continue
            if not epochs.others:
                return slices, _nothing
            header = Header(self.state.step, loss_scale(), weight, self.state.rates, self._sketch())
            packets = self._encode(slices, header.loss_scale)
            received, is_agreed = epochs.exchange(packets, header)
            if not is_agreed:
                self._num_repeated += 1
                epochs.needs_quorum = True
                outcome = self._form(place)
                if outcome is QuorumOutcome.JOINED:
                    weight = 0.0
                    slices, put = take(of_nothing=True)
                if outcome is not QuorumOutcome.COMMIT:
                    self._recall()
                    continue
            check_headers(epochs.site, self.state.step, received, list(received))
            data, lost = [one.data for one in received.values()], self._compare(received)
            self.packets.average(slices, data, weights_of(received, without=lost), header.loss_scale)
            self._last_steps |= dict.fromkeys(received, self.state.step)
            self._departures.learn(slices)
            return slices, put

    # -- weights that drift apart -----------------------------------------------------------------------------------

    def _sketch(self) -> tuple[float, ...]:
        """Return what the weights are compared by, in the first exchange of an epoch and every so often; else ()."""
        count, interval = self.epochs.num_exchanges, self._verify_interval
        if count and not (interval and count % interval == 0):
            return ()
        return tuple(self.state.vector(self.local, of_all_sites=True).sketch())

    def _compare(self, received: Mapping[str, Packet]) -> list[str]:
        """Let the lead repair what has drifted; return members whose weights are others altogether.

        Processors of two kinds round differently, so weights that take the same steps drift apart by some 1e-8 a step.
        All sites see the same sketches, and so come to the same result.
        """
        epochs, wanted = self.epochs, received[self.epochs.lead].header.sketch
        if not wanted:
            return []
        lost = []
        for name, one in received.items():
            apart = distances(one.header.sketch, wanted)
            parts = self.state.vector(self.local, of_all_sites=True).parts()
            runs = [part for part, distance in zip(parts, apart, strict=True) if distance > TOLERANCE]
            if name == epochs.site:
                self.apart = max(apart, default=0.0)
            if max(apart, default=0.0) > OTHER_WEIGHTS:
                lost.append(name)
            elif runs and epochs.site == epochs.lead:
                self._lead.repair(name, runs)
            elif runs and name == epochs.site and not self._owed:
                self._owed, self.num_repairs = runs, self.num_repairs + 1
        all_lost: list[str] = epochs.inside.any_of(lost)
        if epochs.site in all_lost:
            self._is_lost, epochs.needs_quorum = True, True
            log_dist(
                f"hybridep: the weights of site '{epochs.site}' are not those of site '{epochs.lead}' at step "
                f"{self.state.step}; what it has computed does not count, and it takes over the state", ranks=[0],
                level=30,
            )  # fmt: skip
        return all_lost

    def _take_repair(self) -> None:
        """Take over the fragment that the lead sends after a step while weights that have drifted are repaired."""
        epochs = self.epochs
        if not self._owed or epochs.connections is None:
            return
        with suppress(CommunicationError):  # the next exchange fails, too
            fragment = epochs.connections.receive_fragment(epochs.lead)
            self.state.vector(self.local, of_all_sites=True).write(fragment.start, fragment.stop, fragment.payload)
            (_, end), *rest = self._owed
            self._owed = [*([(fragment.stop, end)] if fragment.stop < end else []), *rest]

    def _take_weight(self) -> float:
        """Return how much this step counts: what was said for it, else its samples; the same on all ranks."""
        weight, self.weight = self.weight, None
        return float(self.state.num_samples) if weight is None else self.epochs.inside.mean(float(weight))

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

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Save which run this is, and what only this site has: what codecs have left out, and local steps."""
        folder.mkdir(parents=True, exist_ok=True)
        local = None if self.local is None else self.local.state_dict()
        kept = {"packets": self.packets.state_dict(), "local": local, "settings": self._settings}
        torch.save(kept, self._file(folder))
        if self.epochs.inside.rank == 0:
            write_json(folder / RUN_FILE, {"run": self.epochs.run, "step": self.state.step})

    def keeps_state(self, folder: Path) -> bool:
        """Return True if a checkpoint must not be loaded: this site has just got a newer state of the same run.

        folder: of the checkpoint.

        Raises SiteError if the checkpoint is of another run, or has more steps than the sites that train.
        """
        if not self.has_joined:
            return False
        saved, epochs = self._run_of(folder), self.epochs
        here = f"the sites that train are at step {self.state.step} of run {epochs.run}"
        if saved is None or (saved["run"] == epochs.run and saved["step"] <= self.state.step):
            log_dist(
                f"hybridep: site '{epochs.site}' keeps the state of the other sites, at step {self.state.step}; the "
                f"checkpoint in {folder}, of step {'?' if saved is None else saved['step']}, is not loaded",
                ranks=[0], level=30,
            )  # fmt: skip
            return True
        raise SiteError(
            f"site '{epochs.site}': {folder} has step {saved['step']} of run {saved['run']}, but {here}; "
            f"to go on with it, stop all sites, say `ds_hybridep meet --run {saved['run']}`, and start them again; "
            f"to go on with the others, start this site without the checkpoint"
        )

    def after_load(self, folder: Path | None) -> None:
        """A checkpoint was loaded.

        folder: None if the optimizer's state was not loaded.  Then, and where it has no file of this site, nothing is
        left of the steps before.
        """
        self._recall()
        self.epochs.needs_quorum = True  # before the next exchange
        self.packets.forget()
        if self.local is not None:
            self.local.begin()
        if folder is None:
            return
        if (saved := self._run_of(folder)) is not None:
            self.epochs.run = saved["run"]
        if (path := self._file(folder)).exists():
            kept = torch.load(path, weights_only=True, map_location="cpu")
            if kept.get("settings") != self._settings:
                log_dist(
                    f"hybridep: site '{self.epochs.site}': {folder} was saved with another sites.every or codecs; "
                    f"what codecs had left out, and the outer momentum, begin anew", ranks=[0], level=30,
                )  # fmt: skip
                return
            self.packets.load_state_dict(kept["packets"])
            if self.local is not None and kept["local"] is not None:
                self.local.load_state_dict(kept["local"])

    def _run_of(self, folder: Path) -> dict[str, Any] | None:
        """Return the run and step of a checkpoint; None if it has none.  Rank 0 reads it."""
        path, found = folder / RUN_FILE, None
        if self.epochs.inside.rank == 0 and path.exists():
            found = json.loads(path.read_text())
        said: dict[str, Any] | None = self.epochs.inside.broadcast(found)
        return said

    @property
    def _settings(self) -> list[Any]:
        """By what the file of a checkpoint is laid out."""
        return [0 if self.local is None else self.local.every, self.packets.codecs]

    def _file(self, folder: Path) -> Path:
        return folder / f"hybridep_site_{self.epochs.site}_rank_{self.epochs.inside.rank}.pt"

    # -- another epoch ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the others, if they are training already."""
        if self.epochs.is_running and self._form("") is QuorumOutcome.JOINED and self.local is not None:
            self.weight = 0.0
            self.take_outer_step()  # the exchange that they are at
            self.after_step(was_applied=True)
            self.refresh()
            self.has_joined = True

    def _form(self, inside_step: InsideStep) -> QuorumOutcome:
        """Take part in a new epoch."""
        epochs = self.epochs
        answer: Mapping[str, Any] = epochs.call(is_whole=not self._is_lost)
        self._owed = []  # the first exchange of the epoch compares anew
        if answer["op"] == "commit":
            return QuorumOutcome.COMMIT
        outcome = QuorumOutcome.GO_ON
        if epochs.site in answer["joiners"]:
            self._recall()
            self.packets.forget()
            self._is_joining = True
            try:
                answer = Join(self, answer).run()
            finally:
                self._is_joining = False
            self._is_lost = False
            self.state.count_as_if_always_here(inside_step)
            self.refresh()
            self._num_joins += 1
            self.has_joined, outcome = True, QuorumOutcome.JOINED
        self._lead.begin(positions_of(answer, epochs.inside.rank) if epochs.site == epochs.lead else {})
        return outcome

    def report(self) -> dict[str, Any]:
        """Return what this rank has exchanged with the other sites, JSON-able; docs/sites.md describes it.

        "drift" is the L2 distance of this rank's weights from the common ones over their norm; None without local
        steps.
        """
        epochs = self.epochs
        return {
            "site": epochs.site, "run": epochs.run, "step": self.state.step, "repeated": self._num_repeated,
            "joins": self._num_joins, "quorum_s": epochs.quorum_s, "apart": self.apart, "repairs": self.num_repairs,
            "drift": None if self.local is None else self.local.drift(),
            "others": {
                name: {"present": name in epochs.members, "step": self._last_steps.get(name), **vars(counters)}
                for name, counters in epochs.counters.items() if name != epochs.site
            },
        }  # fmt: skip
