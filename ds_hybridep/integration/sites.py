# SPDX-License-Identifier: Apache-2.0
"""One engine of a site: its gradients are averaged with those of the other sites before each optimizer step.

start          rank 0 connects to the meeting point; if the other sites are training, this one catches up
before a step  `exchange`; after a change, all ranks first take part in a new epoch
after it       what codecs left out is kept, or restored if the step was skipped
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.codecs import make_codec
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.errors import CommunicationError
from ds_hybridep.integration import owned
from ds_hybridep.integration.log import log_dist
from ds_hybridep.integration.site_epochs import Epochs
from ds_hybridep.link import read_secret
from ds_hybridep.sites.data import site_of
from ds_hybridep.sites.exchange import DIGEST_BYTES, Counters, Crossing
from ds_hybridep.sites.local_steps import LocalSteps
from ds_hybridep.sites.member import Member
from ds_hybridep.sites.packets import OwnedSlice, Packets
from ds_hybridep.sync.home import Home
from ds_hybridep.transport.inside import Inside
from ds_hybridep.transport.job_link import LinkSettings, host_towards
from ds_hybridep.version import __version__

PAUSE_S = 0.02  # between looks for a packet while catching up


def join_sites(
    engine: Any, config: HybridEPConfig, sample: Tensor, loss_scale: Callable[[], float], refresh: Callable[[], None]
) -> "SiteSync":
    """Connect an engine with the other sites of its settings; all ranks must call.

    Raises ConfigError for the site's name or its files, SiteError if the others do not take it.
    """
    sites = config.sites
    assert sites is not None, "join_sites is for settings that have sites"
    site = site_of(list(sites.names), sites.name).name
    secret = read_secret(Path(sites.secret_file), "hybridep.sites.secret_file")
    link = LinkSettings.of(config)
    inside = Inside(3 * config.timeout_s + 60.0)
    settings = {
        "version": __version__, "ranks": inside.size, "ZeRO stage": engine.zero_optimization_stage(),
        "sites.every": sites.every, "sites.codecs": sites.codecs,
        "accumulation steps": engine.gradient_accumulation_steps(),
        "parameters": _hash_of_parameters(engine.module),
    }  # fmt: skip
    host = host_towards(sites.address[0])
    dense = experts = None
    if sites.codecs is not None:
        recommended = recommended_codecs(sample.element_size())
        kernels = config.advanced.kernels
        dense, experts = (
            make_codec(one, kernels=kernels) for one in (recommended.dense_gradient, recommended.gradient)
        )
    home = Home(sample.device, config.state == "host")
    context = None if link.tls is None else link.tls.contexts()[0]

    def join() -> Member:
        return Member(sites.address, site, list(sites.names), settings, secret, config.timeout_s, context)

    def new_crossing(counters: Counters) -> Crossing:
        return Crossing(
            list(sites.names), site, inside.rank, secret, host, config.timeout_s, counters, link.ports, link.tls
        )

    return SiteSync(
        engine, site, list(sites.names), inside, join, new_crossing,
        Packets(f"{site} {inside.rank}", dense, experts, sample.dtype, home),
        loss_scale, refresh, config.advanced.verify_interval, sites.every, home,
    )  # fmt: skip


def _hash_of_parameters(module: Any) -> str:
    """Return a hash of names, shapes and types, on this rank."""
    named = module.named_parameters()
    text = repr([(n, tuple(getattr(p, "ds_shape", p.shape)), str(p.dtype), p.requires_grad) for n, p in named])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _compared(calls: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Return the first of the newest members, and the members that have another step or other weights.

    A member that has caught up is left out: it called before it had come to the step of the others.
    """
    old = {name: (call["step"], call["digest"]) for name, call in calls.items() if not call["is_ready"]}
    if not old:  # those who had given them the state have gone
        return next(iter(calls)), []
    newest = max(step for step, _ in old.values())
    lead = next(name for name, (step, _) in old.items() if step == newest)
    return lead, [name for name, state in old.items() if state != old[lead]]


class SiteSync(Epochs):
    """Connects one engine with its counterparts in other sites; all ranks of the site must make it.

    Args:
        engine: may be a weak proxy; its optimizer exists.  The other arguments up to new_crossing are as in `Epochs`.
        loss_scale: returns the factor of gradients.
        refresh: called after weights were loaded.
        verify_interval: exchanges between comparisons of weights.
        every: 1 averages gradients at each step; more: local steps, see `sites.local_steps`.
    """

    def __init__(
        self, engine: Any, site: str, names: list[str], inside: Inside, join: Callable[[], Member],
        new_crossing: Callable[[Counters], Crossing], packets: Packets, loss_scale: Callable[[], float],
        refresh: Callable[[], None], verify_interval: int, every: int, home: Home,
    ) -> None:  # fmt: skip
        super().__init__(engine, site, names, inside, join, new_crossing)
        self._packets, self._loss_scale, self._refresh = packets, loss_scale, refresh
        self._interval = verify_interval
        self._has_caught_up = False  # and made no step since
        self._owned = owned.Owned(engine)
        self._local: LocalSteps | None = None
        self._reached = 0  # the step of the packet that was replayed last
        self._is_at_exchange = True  # what was captured for a site that comes back is as before an exchange
        if every > 1:
            masters, self._publish = self._owned.masters()
            self._local = LocalSteps(masters, every, home)
        self._is_replaying = False
        if self.is_running:
            try:
                self._catch_up()
            except BaseException:
                self.close()
                raise

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Set this rank's averaged gradients to the mean over all sites that are present."""
        if not self._is_replaying and self._local is None:
            slices, finish = self._owned.slices()
            if self._average(slices, self._loss_scale()):
                finish()

    def _average(self, slices: list[OwnedSlice], scale: float) -> bool:
        """Set `slices` to the mean over all sites that are present; False if that is this site alone."""
        while True:
            if self._needs_quorum:
                self._form(is_complete=False)
            if len(self.members) < len(self.names):
                self._stay_in_touch()
            if not self._others:
                return False
            # Weights are compared in the first exchange of an epoch, and every so often.
            verifies = not self.num_exchanges or (self._interval and self.num_exchanges % self._interval == 0)
            digest = self._digest() if verifies else bytes(DIGEST_BYTES)
            packet = self._packets.encode(slices, scale)
            received, is_complete = self._swap(packet)
            is_agreed, self._needs_quorum = self._agree(is_complete, digest)
            if is_agreed or not self._form(is_complete=is_complete):
                self._packets.average(slices, received, scale)
                self.num_exchanges += 1
                return True
            self._packets.changes.undo()
            self.counters.num_repeated += 1

    def after_step(self, *, was_applied: bool) -> None:
        """Keep what codecs left out, or restore it if the step was skipped."""
        changes = self._packets.changes
        self._has_caught_up = self._has_caught_up and self._is_replaying
        if self._local is not None:
            if not self._is_replaying:
                fragment = self._local.due(self._engine.global_steps)
                deltas = self._local.deltas(fragment)
                self._average(deltas, 1.0)
                self._outer_step(fragment, deltas)
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

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Save what only this site has: what codecs have left out, and the state of local steps."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"packets": self._packets.state_dict(), "local": self._more()}, self._file(folder))

    def before_load(self) -> bytes | None:
        """Return the state that this site has from others, if it has caught up with them and made no step since."""
        return owned.capture(self._engine, self._more()) if self._has_caught_up else None

    def after_load(self, folder: Path, caught_up: bytes | None) -> None:
        """A checkpoint was loaded.  The state of sites that are training is newer: it comes back."""
        if caught_up is not None:
            self._restore(caught_up)
            return
        self._needs_quorum = True  # weights are compared before the next exchange
        if self._local is not None:
            self._local.begin()
        if (path := self._file(folder)).exists():
            saved = torch.load(path, weights_only=True)
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
        lead, differ = _compared({name: answer["calls"][name] for name in self.members})
        assert self._crossing is not None
        if self.site == lead and (differ or answer["observers"]):
            state = owned.capture(self._engine, self._more())
            for name in (*differ, *answer["observers"]):
                self._crossing.send_state(name, state)
        if self.site in differ:
            self._restore(self._crossing.receive_state(lead))
            log_dist(
                f"hybridep: site '{self.site}' had other weights or was at another step than site '{lead}'; it took "
                f"over that site's state at step {self._engine.global_steps}", ranks=[0], level=30,
            )  # fmt: skip
        return True

    def _restore(self, state: bytes) -> None:
        """Load the state of another site."""
        more = owned.restore(self._engine, state)
        if self._local is not None:
            self._local.load_state_dict(more)
        self._refresh()

    def _digest(self) -> bytes:
        """Return a hash of this site's weights and step; on other ranks than 0 it means nothing."""
        tensors = owned.weights(self._engine).values() if self._local is None else self._local.common()
        digests = self._inside.gather(owned.hash_of(tensors, self._engine.global_steps).hex())
        return hashlib.blake2b("".join(digests).encode(), digest_size=DIGEST_BYTES).digest()

    # -- catching up ------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Get the state of a site that is training, replay the packets of its steps since, and become a member."""
        began = time.monotonic()
        while (target := self._follow()) is None:
            pass
        self._is_replaying = False
        if target < 0:
            self._needs_quorum = True  # other sites may have come to the start meanwhile
            return
        self._needs_quorum = False
        if self._local is not None:
            self._reach(target)
        # The state was taken inside a step, which this site makes itself; with local steps, that step is behind it.
        num_micro_steps = self._engine.gradient_accumulation_steps()
        extra = self._engine.micro_steps % num_micro_steps
        self._engine.micro_steps += -extra if self._local is None else -extra % num_micro_steps
        self._has_caught_up = True
        step, spent_s = self._engine.global_steps, time.monotonic() - began
        log_dist(f"hybridep: site '{self.site}' joined at step {step}, after {spent_s:.1f} s", ranks=[0], level=30)

    def _follow(self) -> int | None:
        """Observe the members of one epoch, and return the step at which this site is a member.

        Returns None if another epoch began before this site was up to date, -1 if it is alone and begins anew.
        """
        answer = self._call(self._digest())
        if self.site in self.members:
            return -1
        assert self._crossing is not None
        observed = self._crossing
        lead, _ = _compared({name: answer["calls"][name] for name in self.members})
        try:
            state = observed.receive_state(lead)
        except CommunicationError:
            state = b""
        if not self._inside.all(bool(state)):
            return None
        self._restore(state)
        self._is_replaying, self._is_at_exchange = True, True
        has_called = False
        target: int | None = None
        waiting = observed.observe(self._next_bytes())
        while target is None or self._next()[0] < target:
            if self._inside.all(all(one.is_done() and one.failure() is None for _, one in waiting)):
                for _, one in waiting:
                    one.wait()  # fills its place
                self._replay([place for place, _ in waiting])
                waiting = observed.observe(self._next_bytes())
            elif not has_called:
                # A receive fails once the members have left these connections for those of the next epoch.
                has_ended = any(one.failure() is not None for _, one in waiting)
                if not self._inside.all(not has_ended):
                    return None
                self._call(self._digest(), is_ready=True, waits=False)  # no packet waits: it is up to date
                has_called = True
            elif target is None:
                self._crossing = None  # the old connections stay open until all packets have come
                answer = self._hear(PAUSE_S) or {}
                if answer.get("op") == "epoch":
                    steps = [call["step"] for call in answer["calls"].values() if not call["is_ready"]]
                    target = max(steps, default=self._next()[0])
            elif not self._inside.all(all(one.failure() is None for _, one in waiting)):
                raise self._left_out()  # packets before that step are lost
            else:
                time.sleep(PAUSE_S)
        observed.close()
        return target

    def _next_bytes(self) -> int:
        """Return the bytes of the next packet of a member."""
        if self._local is not None:
            slices = self._local.deltas(self._next()[1])
        else:
            self._owned.make_zeros()
            slices, _ = self._owned.slices()
        return sum(self._packets.num_bytes(one) for one in slices)

    def _next(self) -> tuple[int, int]:
        """Return the step of the next packet, and its fragment."""
        if self._local is None:
            return self._engine.global_steps, 0
        step = self._engine.global_steps if self._is_at_exchange else self._reached + 1
        return step, self._local.due(step)

    def _reach(self, step: int) -> None:
        """Begin local steps from the common weights, at the exchange that the other sites have come to."""
        assert self._local is not None
        owned.skip_to(self._engine, step)
        self._local.reset()
        self._publish()
        self._refresh()
        self._is_at_exchange = False
        self.after_step(was_applied=True)

    def _replay(self, packets: list[Tensor]) -> None:
        """Apply a step of the other sites, from the packets of all their members."""
        if self._local is not None:
            step, fragment = self._next()
            deltas = self._local.deltas(fragment)
            self._packets.average(deltas, packets)
            self._outer_step(fragment, deltas)
            self._reached, self._is_at_exchange = step, False
            return
        self._owned.make_zeros()
        slices, finish = self._owned.slices()
        self._packets.average(slices, packets, self._loss_scale())
        finish()
        micro_steps = self._engine.micro_steps
        self._engine._take_model_step({})
        self._engine.micro_steps = micro_steps + self._engine.gradient_accumulation_steps()
