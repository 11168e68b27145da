# SPDX-License-Identifier: Apache-2.0
"""One engine of a site: its gradients are averaged with those of the other sites before each optimizer step.

start          rank 0 connects to the meeting point; if the other sites are training, this one catches up
before a step  `exchange`; after a change, all ranks first take part in a new epoch
after it       what codecs left out is kept, or restored if the step was skipped
"""

import hashlib
import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.codecs import make_codec
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.errors import CommunicationError, ConfigError, SiteError
from ds_hybridep.integration import owned
from ds_hybridep.integration.log import log_dist
from ds_hybridep.sites.exchange import Counters, Crossing
from ds_hybridep.sites.local_steps import LocalSteps
from ds_hybridep.sites.member import Member
from ds_hybridep.sites.packets import OwnedSlice, Packets
from ds_hybridep.sites.protocol import read_secret
from ds_hybridep.sync.home import Home
from ds_hybridep.transport.inside import Inside
from ds_hybridep.transport.job_link import LinkSettings, host_towards
from ds_hybridep.version import __version__

LOOK_S = 2.0  # between looks at whether the meeting point has answered
PAUSE_S = 0.02  # between looks for a packet while catching up


def join_sites(engine: Any, runtime: Any) -> "SiteSync":
    """Connect an engine with the other sites of its settings; all ranks must call.

    Raises ConfigError for the site's name or its files, SiteError if the others do not take it.
    """
    config, sites = runtime.config, runtime.config.sites
    site = os.environ.get("HYBRIDEP_SITE") or sites.name
    if site not in sites.names:
        raise ConfigError(
            f"hybridep.sites.names is {list(sites.names)}, and this site is {site!r}; set the environment variable "
            f"HYBRIDEP_SITE to one of the names on all ranks of this site"
        )
    secret = read_secret(sites.secret_file, "hybridep.sites.secret_file")
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
        recommended = recommended_codecs(runtime.sample.element_size())
        kernels = config.advanced.kernels
        dense, experts = (
            make_codec(one, kernels=kernels) for one in (recommended.dense_gradient, recommended.gradient)
        )
    home = Home(runtime.sample.device, config.state == "host")
    context = None if link.tls is None else link.tls.contexts()[0]

    def join() -> Member:
        return Member(sites.address, site, list(sites.names), settings, secret, config.timeout_s, context)

    def new_crossing(counters: Counters) -> Crossing:
        return Crossing(
            list(sites.names), site, inside.rank, secret, host, config.timeout_s, counters, link.ports, link.tls
        )

    return SiteSync(
        engine, site, list(sites.names), inside, join, new_crossing,
        Packets(f"{site} {inside.rank}", dense, experts, runtime.sample.dtype, home),
        partial(loss_scale_of, engine), runtime.refresh, config.advanced.verify_interval, sites.every, home,
    )  # fmt: skip


def loss_scale_of(engine: Any) -> float:
    """Return the factor that gradients are multiplied by now."""
    scale = getattr(engine.optimizer, "loss_scale", None)  # FP16_Optimizer has None in bf16
    return 1.0 if scale is None else float(scale)


def _hash_of_parameters(module: Any) -> str:
    """Return a hash of names, shapes and types, on this rank."""
    named = module.named_parameters()
    text = repr([(n, tuple(getattr(p, "ds_shape", p.shape)), str(p.dtype), p.requires_grad) for n, p in named])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class SiteSync:
    """Connects one engine with its counterparts in other sites; all ranks of the site must make it.

    Args:
        engine: may be a weak proxy; its optimizer exists.
        site: the name of this one.  names: all sites.
        join: on rank 0, connects to the meeting point.
        new_crossing: makes this rank's connections for one epoch.
        loss_scale: returns the factor of gradients.
        refresh: called after weights were loaded.
        verify_interval: steps between comparisons of weights.
        every: 1 averages gradients at each step; more: local steps, see `sites.local_steps`.
    """

    def __init__(
        self, engine: Any, site: str, names: list[str], inside: Inside, join: Callable[[], Member],
        new_crossing: Callable[[Counters], Crossing], packets: Packets, loss_scale: Callable[[], float],
        refresh: Callable[[], None], verify_interval: int, every: int, home: Home,
    ) -> None:  # fmt: skip
        self._engine, self.site, self.names, self._inside = engine, site, names, inside
        self._new_crossing, self._packets = new_crossing, packets
        self._loss_scale, self._refresh, self._verify_interval = loss_scale, refresh, verify_interval
        self.counters = Counters()
        self.members: list[str] = []
        self.num_repairs = 0  # times that this site's weights were replaced
        self._owned = owned.Owned(engine)
        self._local: LocalSteps | None = None
        self._reached = 0  # the step of the packet that was replayed last
        self._is_at_exchange = True  # what was captured for a site that comes back is as before an exchange
        if every > 1:
            masters, self._publish = self._owned.masters()
            self._local = LocalSteps(masters, every, home)
        self._crossing: Crossing | None = None
        self._needs_quorum, self._is_replaying = True, False
        self._member: Member | None = None
        error = ""
        if inside.rank == 0:
            try:
                self._member = join()
            except SiteError as failure:
                error = str(failure)
        if error := inside.broadcast(error):
            raise SiteError(error)
        is_running = inside.broadcast(self._member.is_running if self._member is not None else False)
        if is_running:
            self._catch_up()

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
            packet = self._packets.encode(slices, scale)
            received, is_complete = self._swap(packet)
            is_agreed, self._needs_quorum = self._agree(is_complete)
            if is_agreed or not self._form(is_complete=is_complete):
                self._packets.average(slices, received, scale)
                return True
            self._packets.changes.undo()
            self.counters.num_repeated += 1

    def after_step(self, *, was_applied: bool) -> None:
        """Keep what codecs left out, or restore it if the step was skipped."""
        changes = self._packets.changes
        if self._local is not None:
            fragment = None if self._is_replaying else self._local.due(self._engine.global_steps)
            if fragment is not None:
                deltas = self._local.deltas(fragment)
                self._average(deltas, 1.0)
                self._outer_step(fragment, deltas)
            changes.keep()
        elif was_applied:
            changes.keep()
        else:
            changes.undo()

    def _outer_step(self, fragment: int, mean: list[OwnedSlice]) -> None:
        assert self._local is not None
        self._local.apply(fragment, mean)
        self._publish()
        self._refresh()

    def close(self) -> None:
        """Leave the other sites."""
        if self._crossing is not None:
            self._crossing.close()
        if self._member is not None:
            self._member.close()

    @property
    def _others(self) -> list[str]:
        return [] if self._crossing is None else self._crossing.others

    def _stay_in_touch(self) -> None:
        """Wait until the meeting point, which may make an epoch of the sites that are missing, knows of this site."""
        while True:
            is_in_touch, wants_change = self._inside.broadcast(self._news())
            self._needs_quorum = self._needs_quorum or wants_change
            if is_in_touch:
                return
            time.sleep(LOOK_S)

    def _news(self) -> tuple[bool, bool]:
        member = self._member
        return (member.is_in_touch, member.wants_change) if member is not None else (True, False)

    def _swap(self, packet: Tensor) -> tuple[list[Tensor], bool]:
        assert self._crossing is not None
        try:
            received, is_complete = self._crossing.swap(packet), True
        except CommunicationError:
            received, is_complete = [], False
        return received, self._inside.all(is_complete)

    def _agree(self, is_complete: bool) -> tuple[bool, bool]:
        """Agree with all sites whether the step may be applied, and whether a quorum comes before the next one."""
        said = (False, True)
        if self._inside.rank == 0:
            assert self._crossing is not None
            assert self._member is not None
            try:
                said = self._crossing.agree(is_complete, self._member.wants_change)
            except CommunicationError:
                said = False, True
        is_agreed, wants = self._inside.broadcast(said)
        interval = self._verify_interval
        return is_agreed, wants or bool(interval and (self._engine.global_steps + 1) % interval == 0)

    # -- epochs -----------------------------------------------------------------------------------------------------

    def _call(self, *, is_complete: bool = False, is_ready: bool = False, waits: bool = True) -> dict[str, Any]:
        """Call for a quorum, and return its answer; after "epoch", this rank is connected with its counterparts."""
        self._next = self._new_crossing(self.counters)
        addresses = self._inside.gather(self._next.address)
        digests = self._inside.gather(self._digest())
        missed = self._inside.gather(sorted(self._crossing.missed) if self._crossing is not None else [])
        if self._member is not None:
            digest = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
            self._member.call(
                step=self._engine.global_steps, complete=is_complete, is_ready=is_ready, addresses=addresses,
                digest=digest, missed=sorted({name for names in missed for name in names}),
            )  # fmt: skip
        while waits:
            if (answer := self._hear(LOOK_S)) is not None:
                return answer
        return {}

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
            raise SiteError(
                f"the other sites went on without site '{self.site}', which is at step {self._engine.global_steps}; "
                f"they are at step {answer['step']}; start this site again with the same command, and it joins them"
            )
        if answer["op"] == "epoch":
            self._open(answer)
        else:
            self._next.close()
        return answer

    def _open(self, answer: dict[str, Any]) -> None:
        """Leave the connections of the last epoch for those of the next."""
        if self._crossing is not None:
            self._crossing.close()
        self._crossing, self.members = self._next, answer["members"]
        calls = answer["calls"]
        addresses = {name: tuple(call["addresses"][self._inside.rank]) for name, call in calls.items()}
        self._crossing.open(answer["epoch"], self.members, answer["observers"], addresses)
        observers = f"; catching up: {', '.join(answer['observers'])}" if answer["observers"] else ""
        log_dist(
            f"hybridep: site '{self.site}' trains with {', '.join(self.members)} from step "
            f"{self._engine.global_steps} on{observers}", ranks=[0], level=30,
        )  # fmt: skip

    def _form(self, *, is_complete: bool) -> bool:
        """Take part in a new epoch; a site whose step or weights differ gets the state of the first that is newest.

        is_complete: this site has all packets of the step under way.
        Returns False if another site has applied that step, so this one must, too, before the next epoch.
        """
        answer = self._call(is_complete=is_complete)
        self._needs_quorum = answer["op"] == "commit"
        if self._needs_quorum:
            return False
        calls = answer["calls"]
        newest = max(calls[name]["step"] for name in self.members if not calls[name]["is_ready"])
        lead = next(n for n in self.members if calls[n]["step"] == newest and not calls[n]["is_ready"])
        differ = [
            name
            for name in self.members
            if not calls[name]["is_ready"]
            and (calls[name]["step"], calls[name]["digest"]) != (newest, calls[lead]["digest"])
        ]
        assert self._crossing is not None
        if self.site == lead and (differ or answer["observers"]):
            state = owned.capture(self._engine, None if self._local is None else self._local.state_dict())
            for name in (*differ, *answer["observers"]):
                self._crossing.send_state(name, state)
        if self.site in differ:
            self._restore(self._crossing.receive_state(lead))
            self.num_repairs += 1
            log_dist(
                f"hybridep: site '{self.site}' had other weights or was at another step than site '{lead}'; it took "
                f"over that site's state at step {newest}", ranks=[0], level=30,
            )  # fmt: skip
        return True

    def _restore(self, state: bytes) -> None:
        """Load the state of another site."""
        more = owned.restore(self._engine, state)
        if self._local is not None:
            self._local.load_state_dict(more)
        self._refresh()

    def _digest(self) -> str:
        """Return a hash of this rank's weights and step."""
        digest = hashlib.blake2b(str(self._engine.global_steps).encode(), digest_size=8)
        tensors = owned.weights(self._engine).values() if self._local is None else self._local.common()
        for tensor in tensors:
            digest.update(tensor.detach().reshape(-1).view(dtype=torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    # -- catching up ------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Get the state of a site that is training, replay the packets of its steps since, and become a member."""
        began = time.monotonic()
        answer = self._call()
        if self.site in self.members:  # all others are gone: this site begins anew
            self._needs_quorum = False
            return
        assert self._crossing is not None
        calls = answer["calls"]
        lead = max(self.members, key=lambda name: calls[name]["step"])
        self._restore(self._crossing.receive_state(lead))
        num_bytes = self._next_bytes()
        self._is_replaying, first = True, self._engine.global_steps
        has_called, target = False, None
        waiting = self._crossing.observe(num_bytes)
        observed = self._crossing
        idle_since = time.monotonic()
        while target is None or self._next_step() < target:
            # A receive fails once the members have left these connections for those of the next epoch.
            has_come = self._inside.all(all(one.is_done() and one.failure() is None for _, one in waiting))
            if has_come:
                for _, one in waiting:
                    one.wait()  # fills its place
                self._replay([place for place, _ in waiting])
                num_bytes = self._next_bytes()
                waiting, idle_since = observed.observe(num_bytes), time.monotonic()
                continue
            if not has_called:
                is_idle = self._inside.broadcast(time.monotonic() - idle_since > 5 * PAUSE_S)
                if is_idle:
                    has_called = True
                    self._call(is_ready=True, waits=False)
            elif target is None:
                self._crossing = None  # the old connections stay open until all packets have come
                if (answer := self._hear(PAUSE_S) or {}).get("op") == "epoch":
                    newest = [call["step"] for name, call in answer["calls"].items() if not call["is_ready"]]
                    target = max(newest)
                continue
            time.sleep(PAUSE_S)
        observed.close()
        self._is_replaying = self._needs_quorum = False
        if self._local is not None:
            self._reach(target)
        log_dist(
            f"hybridep: site '{self.site}' caught up to step {self._engine.global_steps} "
            f"({self._engine.global_steps - first} steps replayed) in {time.monotonic() - began:.1f} s",
            ranks=[0], level=30,
        )  # fmt: skip

    def _next_bytes(self) -> int:
        """Return the bytes of the next packet of a member."""
        if self._local is not None:
            slices = self._local.deltas(self._next_fragment()[1])
        else:
            self._owned.make_zeros()
            slices, _ = self._owned.slices()
        return sum(self._packets.num_bytes(one) for one in slices)

    def _next_step(self) -> int:
        """Return the step of the next packet."""
        return self._engine.global_steps if self._local is None else self._next_fragment()[0]

    def _next_fragment(self) -> tuple[int, int]:
        """Return the next step after which a fragment is exchanged, and that fragment."""
        assert self._local is not None
        steps = itertools.count(self._engine.global_steps if self._is_at_exchange else self._reached + 1)
        return next((step, fragment) for step in steps if (fragment := self._local.due(step)) is not None)

    def _reach(self, step: int) -> None:
        """Begin local steps from the common weights, at the exchange that the other sites have come to."""
        assert self._local is not None
        engine = self._engine
        for _ in range(step - engine.global_steps):
            engine.global_steps += 1
            engine.global_samples += engine.train_batch_size()
            engine.micro_steps += engine.gradient_accumulation_steps()
            if engine.lr_scheduler is not None:
                engine.lr_scheduler.step()
        self._local.reset()
        self._publish()
        self._refresh()
        self._is_at_exchange = False
        self.after_step(was_applied=True)

    def _replay(self, packets: list[Tensor]) -> None:
        """Apply a step of the other sites, from the packets of all their members."""
        if self._local is not None:
            step, fragment = self._next_fragment()
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
