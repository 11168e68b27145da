# SPDX-License-Identifier: Apache-2.0
"""Connects an engine with the other sites: rank 0 joins at the meeting point, and a site that comes late catches up.

SiteExchange     what happens around each optimizer step      site_exchange.py
Join, Lead       how a site gets the others' state            site_join.py
SiteState        what this rank has of the training           site_state.py
Departures       packets that leave during the backward       site_overlap.py
Epochs           who is there, and the connections            runtime/site_epochs.py
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch

from ds_hybridep.codecs import make_codec
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.deepspeed.engine_view import Zero12View, view_of
from ds_hybridep.deepspeed.patches import MODULE, Patches
from ds_hybridep.deepspeed.site_exchange import SiteExchange
from ds_hybridep.deepspeed.site_overlap import Departures
from ds_hybridep.deepspeed.site_state import SiteState
from ds_hybridep.errors import ConfigError
from ds_hybridep.kernels import Kernels
from ds_hybridep.link import read_secret
from ds_hybridep.runtime.build import Facts
from ds_hybridep.runtime.site_epochs import Epochs
from ds_hybridep.sites.data import site_of
from ds_hybridep.sites.exchange import Counters, SiteConnections
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
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    if link.ports is not None and link.ports[1] - link.ports[0] + 1 < 2 * ranks_here:
        raise ConfigError(
            f"hybridep.link.ports has {link.ports[1] - link.ports[0] + 1} ports, and {ranks_here} ranks of this "
            f"machine need two each while sites change; give at least {2 * ranks_here}"
        )
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
    settings = {**_settings_of(engine._config._param_dict), **_facts_of(engine, kernels, inside)}

    def join() -> Member:
        return Member(
            sites.address, site, list(sites.names), settings, secret=secret, wait_s=config.timeout_s, context=context
        )  # fmt: skip

    def connect(counters: dict[str, Counters]) -> SiteConnections:
        return SiteConnections(
            list(sites.names), site, inside.rank, secret, host=host, timeout_s=config.timeout_s, counters=counters,
            ports=link.ports, tls=link.tls, announced=sites.host,
        )  # fmt: skip

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
        epochs = Epochs(site, list(sites.names), inside, lambda: state.step, join=join, connect=connect)
        made.callback(epochs.close)
        exchange = SiteExchange(
            state, epochs, packets, departures, local=local, refresh=refresh,
            verify_interval=config.advanced.verify_interval,
        )  # fmt: skip
        if local is None and isinstance(state.view, Zero12View):
            departures.watch(
                state.view, patches, connections=exchange.next_connections,
                is_last=lambda: engine.managed_gradient_accumulation() and facts.is_boundary(),
            )  # fmt: skip
        note = engine.module.register_forward_pre_hook(partial(_note_tokens, exchange), with_kwargs=True)
        patches.note(MODULE, "forward_pre_hook", note.remove)
        exchange.start()
        made.pop_all()
    return exchange


OF_A_STEP = ("params", "lr", "initial_lr", "step")  # which sites compare in each exchange
SCALARS = (bool, int, float, str, tuple, list, type(None))


def _note_tokens(exchange: SiteExchange, module: Any, _: Any, inputs: Mapping[str, Any]) -> None:
    """Let a step of Transformers' Trainer count with the tokens that it divides its loss by."""
    if module.training and (tokens := inputs.get("num_items_in_batch")) is not None:
        exchange.weight = tokens


# What may differ between sites, by the path of its key.
OF_ONE_SITE = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "tensorboard", "wandb", "csv_monitor", "comet",
    "monitor_config", "comms_logger", "flops_profiler", "aio", "autotuning", "nebula", "checkpoint",
    "dataloader_drop_last",
    "hybridep.link", "hybridep.report_file", "hybridep.report_interval", "hybridep.timeout_s", "hybridep.state",
    "hybridep.sites.name", "hybridep.sites.host", "hybridep.sites.meeting_point", "hybridep.sites.secret_file",
    "hybridep.sites.names",  # which the meeting point compares anyway
)  # fmt: skip
OF_SPEED = ("bucket_size", "overlap_comm", "contiguous_gradients", "pin_memory", "nvme_path")


def _settings_of(block: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the settings of a ds_config that must be equal on all sites, by the path of their keys."""
    found: dict[str, Any] = {}
    for key, value in block.items():
        name = f"{path}{key}"
        if name in OF_ONE_SITE or str(key).endswith(OF_SPEED):
            continue
        if isinstance(value, Mapping):
            found |= _settings_of(value, f"{name}.")
        else:
            found[name] = json.loads(json.dumps(value, default=str))
    return found


def _facts_of(engine: Any, kernels: Kernels, inside: Inside) -> dict[str, Any]:
    """Return what else must be equal on all sites; complete on rank 0.  All ranks must call."""
    base, view = engine.basic_optimizer, view_of(engine)
    frozen = torch.zeros(2, dtype=torch.int64, device=engine.device)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            held = getattr(parameter, "ds_tensor", parameter).detach()
            frozen += kernels.bit_sums(held.to(frozen.device).contiguous()) * (zlib.crc32(name.encode()) | 1)
    groups = {
        f"parameter group {index}: {key}": json.loads(json.dumps(value, default=str))
        for index, group in enumerate(base.param_groups)
        for key, value in group.items()
        if isinstance(value, SCALARS) and key not in OF_A_STEP
    }
    order = [
        (view.names[id(one)], tuple(getattr(one, "ds_shape", one.shape)), str(one.dtype)) for one in view.trained()
    ]
    return {
        "version of ds_hybridep": ".".join(__version__.split(".")[:2]),
        "version of deepspeed": deepspeed.__version__,
        "ranks": inside.size,
        "optimizer": type(base).__name__,
        **groups,
        "trained parameters": _hash_of(order),
        "frozen parameters": _hash_of(inside.gather(frozen.tolist())),
    }


def _hash_of(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
