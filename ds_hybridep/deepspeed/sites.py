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

from torch import Tensor

from ds_hybridep.codecs import make_codec
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.deepspeed import owned
from ds_hybridep.deepspeed.patches import Patches
from ds_hybridep.deepspeed.site_exchange import SiteExchange, compared
from ds_hybridep.kernels import Kernels
from ds_hybridep.link import read_secret
from ds_hybridep.runtime.build import Facts
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.sites.data import site_of
from ds_hybridep.sites.exchange import Counters, Crossing, Incoming
from ds_hybridep.sites.member import Member
from ds_hybridep.sites.packets import OwnedSlice, Packets, leaves_of
from ds_hybridep.sync.home import Home
from ds_hybridep.transport.inside import Inside
from ds_hybridep.transport.job_link import LinkSettings, host_towards
from ds_hybridep.version import __version__

PAUSE_S = 0.02  # between looks for a packet while catching up


def join_sites(
    engine: Any, config: HybridEPConfig, facts: Facts, kernels: Kernels, patches: Patches, refresh: Callable[[], None]
) -> "SiteSync":
    """Connect an engine with the other sites of its settings; all ranks must call.

    patches: of the engine.  refresh: called after weights were loaded.

    Raises ConfigError for the site's name or its files, SiteError if the others do not take it.
    """
    sites = config.sites
    assert sites is not None, "join_sites is for settings that have sites"
    site = site_of(list(sites.names), sites.name).name
    secret = read_secret(Path(sites.secret_file), "hybridep.sites.secret_file")
    link, sample = LinkSettings.of(config), facts.specs[0].sample
    host = host_towards(sites.address[0])
    dense = experts = None
    if sites.codecs is not None:
        recommended = recommended_codecs(sample.element_size())
        dense, experts = (
            make_codec(one, kernels=config.advanced.kernels)
            for one in (recommended.dense_gradient, recommended.gradient)
        )
    home = Home(sample.device, config.state == "host")
    context = None if link.tls is None else link.tls.contexts()[0]
    inside = Inside()
    settings = {
        "version": __version__, "ranks": inside.size, "ZeRO stage": engine.zero_optimization_stage(),
        "sites.every": sites.every, "sites.codecs": sites.codecs,
        "accumulation steps": engine.gradient_accumulation_steps(),
        "parameters": _hash_of_parameters(engine.module),
    }  # fmt: skip

    def join() -> Member:
        return Member(sites.address, site, list(sites.names), settings, secret, config.timeout_s, context)

    def new_crossing(counters: dict[str, Counters]) -> Crossing:
        return Crossing(
            list(sites.names), site, inside.rank, secret, host, config.timeout_s, counters, link.ports, link.tls
        )

    try:
        return SiteSync(
            engine, site, list(sites.names), inside, join, new_crossing,
            Packets(f"{site} {inside.rank}", dense, experts, sample.dtype, home),
            facts.loss_scale, refresh, config.advanced.verify_interval, sites.every, home, kernels, patches,
            lambda: engine.managed_gradient_accumulation() and facts.is_boundary(),
        )  # fmt: skip
    except BaseException:
        inside.close()
        raise


def _hash_of_parameters(module: Any) -> str:
    """Return a hash of names, shapes and types, on this rank."""
    named = module.named_parameters()
    text = repr([(n, tuple(getattr(p, "ds_shape", p.shape)), str(p.dtype), p.requires_grad) for n, p in named])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class SiteSync(SiteExchange):
    """Also lets a site catch up that joins others which are training; arguments as in `SiteExchange`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_running:
            try:
                self._catch_up()
            except BaseException:
                self.close()
                raise

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

        Returns None if another epoch began before this site was up to date, -1 if it begins anew as a member.
        """
        answer = self._call(self._digest())
        if self.site in self.members:
            return -1
        assert self._crossing is not None
        observed = self._crossing
        lead, _ = compared({name: answer["calls"][name] for name in self.members})
        if (state := self._receive_state(observed, lead)) is None:
            return None
        self._restore(state)
        self._is_replaying, self._is_at_exchange = True, True
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
                raise self._left_out()  # packets before that step are lost
            elif found == "nothing" and not has_called:
                self._call(self._digest(), is_ready=True, waits=False)  # no packet waits: it is up to date
                has_called = True
            elif has_called and target is None:
                self._crossing = None  # the old connections stay open until all packets have come
                answer = self._hear(PAUSE_S) or {}
                if answer.get("op") == "epoch":
                    steps = [call["step"] for call in answer["calls"].values() if not call["is_ready"]]
                    target = max(steps, default=self._next()[0]) if self.site in self.members else -1
            else:
                time.sleep(PAUSE_S)
        observed.close()
        return target if target >= 0 else None

    def _look(self, waiting: Mapping[str, Incoming], *, is_applied: bool) -> str:
        """Return, on all ranks, what is known of the next packets: "nothing", "whole", "counts", or "ended".

        Packets count if a member has agreed to their step, so that all apply it; another step may be repeated.
        is_applied: members have come to a later step.
        """
        is_whole = self._inside.all(all(one.is_whole() for one in waiting.values()))
        if is_whole and (is_applied or self._inside.broadcast(any(one.is_agreed() for one in waiting.values()))):
            return "counts"
        # A receive fails once the members have left these connections for those of the next epoch.
        if not self._inside.all(not any(one.has_failed() for one in waiting.values())):
            return "ended"
        return "whole" if is_whole else "nothing"

    def _next_sizes(self) -> list[int]:
        """Return the bytes of the next packets of a member."""
        if self._local is not None:
            slices = self._local.deltas(self._next()[1])
        else:
            slices, _ = self._leaves_of_zeros()
        return [self._packets.num_bytes(one) for one in slices]

    def _leaves_of_zeros(self) -> tuple[list[OwnedSlice], Callable[[], None]]:
        self._owned.make_zeros()
        slices, finish = self._owned.slices()
        return leaves_of(slices), finish

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
        slices, finish = self._leaves_of_zeros()
        self._packets.average(slices, packets, self._loss_scale())
        finish()
        micro_steps = self._engine.micro_steps
        self._engine._take_model_step({})
        self._engine.micro_steps = micro_steps + self._engine.gradient_accumulation_steps()
