# SPDX-License-Identifier: Apache-2.0
"""Connects an engine with the other sites: rank 0 joins at the meeting point, and a site that comes late catches up.

SiteState        what this rank has of the training           site_state.py
Epochs           who is there, and the connections            runtime/site_epochs.py
SiteExchange     what happens around each optimizer step      site_exchange.py
Departures       packets that leave during the backward       site_overlap.py
CatchUp          the way of a late site to the others' step   site_catch_up.py
"""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ds_hybridep.codecs import make_codec
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.deepspeed.engine_view import Zero12View
from ds_hybridep.deepspeed.patches import Patches
from ds_hybridep.deepspeed.site_catch_up import CatchUp
from ds_hybridep.deepspeed.site_exchange import SiteExchange
from ds_hybridep.deepspeed.site_overlap import Departures
from ds_hybridep.deepspeed.site_state import SiteState
from ds_hybridep.kernels import Kernels
from ds_hybridep.link import read_secret
from ds_hybridep.runtime.build import Facts
from ds_hybridep.runtime.site_epochs import Epochs
from ds_hybridep.sites.data import site_of
from ds_hybridep.sites.exchange import Counters, Crossing
from ds_hybridep.sites.local_steps import LocalSteps
from ds_hybridep.sites.member import Member
from ds_hybridep.sites.packets import Packets
from ds_hybridep.sync.home import Home
from ds_hybridep.transport.inside import Inside
from ds_hybridep.transport.job_link import LinkSettings, host_towards
from ds_hybridep.version import __version__


def join_sites(
    engine: Any, config: HybridEPConfig, facts: Facts, kernels: Kernels, *, patches: Patches,
    refresh: Callable[[], None],
) -> SiteExchange:  # fmt: skip
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
        return Member(
            sites.address, site, list(sites.names), settings, secret=secret, wait_s=config.timeout_s, context=context
        )

    def new_crossing(counters: dict[str, Counters]) -> Crossing:
        return Crossing(
            list(sites.names),
            site,
            inside.rank,
            secret,
            host=host,
            timeout_s=config.timeout_s,
            counters=counters,
            ports=link.ports,
            tls=link.tls,
        )

    with ExitStack() as made:
        made.callback(inside.close)
        # 1. All that may refuse the engine, before other sites learn of this one.
        state, local = SiteState(engine), None
        if sites.every > 1:
            masters, put = state.view.master_slices()
            local = LocalSteps(masters, sites.every, home, put)
        packets = Packets(f"{site} {inside.rank}", dense, experts, sample.dtype, home=home)
        departures = Departures(packets, kernels)
        # 2. The other sites.
        epochs = Epochs(site, list(sites.names), inside, lambda: state.step, join=join, new_crossing=new_crossing)
        made.callback(epochs.close)
        exchange = SiteExchange(
            state, epochs, packets, departures, local=local, refresh=refresh,
            verify_interval=config.advanced.verify_interval,
        )  # fmt: skip
        if local is None and isinstance(state.view, Zero12View):
            departures.watch(
                state.view, patches, crossing=exchange.next_crossing,
                is_last=lambda: engine.managed_gradient_accumulation() and facts.is_boundary(),
            )  # fmt: skip
        if epochs.is_running:
            CatchUp(exchange).run()
        made.pop_all()
    return exchange


def _hash_of_parameters(module: Any) -> str:
    """Return a hash of names, shapes and types, on this rank."""
    named = module.named_parameters()
    text = repr([(n, tuple(getattr(p, "ds_shape", p.shape)), str(p.dtype), p.requires_grad) for n, p in named])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
