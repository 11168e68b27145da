# SPDX-License-Identifier: Apache-2.0
"""The public functions for an engine that is attached; start.py has `attach`."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.deepspeed import supported
from ds_hybridep.deepspeed.attachment import attachment_of, the_one_of_a_site
from ds_hybridep.deepspeed.checksums import checksums_of
from ds_hybridep.deepspeed.start import checked_config
from ds_hybridep.errors import ConfigError
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.sites.data import Site, read_site, site_of
from ds_hybridep.transport.agreement import announcing_failure
from ds_hybridep.transport.trace import record_trace


def detach(engine: nn.Module) -> None:
    """Give the MoE layers back to DeepSpeed, as they were before `attach`; all ranks must call.

    Args:
        engine: the first value that `deepspeed.initialize` returned.

    Raises:
        ConfigError: hybridep is not attached to this engine.
        GradientNotReturnedError: the call comes in the middle of a gradient accumulation.
    """
    attachment = attachment_of(engine)
    attachment.runtime.finish()
    if norm := attachment.runtime.undelivered_norm:
        log_dist(f"hybridep: detached with gradients of norm {norm:.3g} that codecs had kept back", ranks=[-1])
    attachment.unbind()


def stats(engine: nn.Module) -> dict[str, Any]:
    """Return what was moved so far, of this rank, as a dict that JSON can hold.  Counters begin at attach.

    Args:
        engine: the first value that `deepspeed.initialize` returned.

    Returns:
        A dict.  Names that end in `_bytes` are bytes, in `_s` seconds, `rows` are rows of tokens.

            "rank", "steps"  of this process; optimizer steps
            "levels"         for each level, slowest first, "sent_bytes", "received_bytes" and "sent_messages" by kind;
                             "plain_ep_bytes", what DeepSpeed would have sent; "waits"
            "exposed_s"      seconds in which training waited, by kind
            "layers"         for each MoE layer its rows and what codecs do on this rank
            "link"           for each peer on the link: bytes, round trip, reconnects
            "synchronised"   what codecs do, by name, for dense parameters and for experts that several groups hold
            "replica_bytes"  bytes held now on the device for replicas, their gradients and their codecs
            "host_bytes"     bytes held now in host memory for the same, if "state" is "host"
            "checksums"      of the bits of this rank's "weights", and of the gradients "owed", which it has kept back
                             so far (residuals, and what waits for the next gradients; zeros if nothing); runs that are
                             equal in every bit have equal ones
            "job"            counters of all ranks as of the last report, as in `report_file`; None before the first
                             report and on ranks other than 0
            "planning"       the plan, as in `report_file`, if the job is planned while it runs; else None
            "sites"          what this rank has exchanged with other sites (docs/sites.md), if there are any; else None

        Kind "dense" covers all that several ranks hold; its counters are None (not counted) if DeepSpeed sends it
        itself.

    Raises:
        ConfigError: hybridep is not attached to this engine.
    """
    attachment = attachment_of(engine)
    runtime, planner = attachment.runtime, attachment.planner
    return {
        **runtime.statistics.local(),
        "synchronised": {
            name: sync.memory.stats().record() for name, sync in runtime.syncs.items() if sync.is_encoded
        },
        "replica_bytes": runtime.migration.replica_bytes,
        "host_bytes": runtime.migration.host_bytes,
        "checksums": checksums_of(engine, runtime),
        "job": attachment.last_report,
        "planning": None if planner is None else planner.record(runtime),
        "sites": None if attachment.sites is None else attachment.sites.report(),
    }


def refresh(engine: nn.Module) -> None:
    """Ship all experts' weights again and wait for them; all ranks must call.

    Call this after anything other than `engine.step()` or checkpoint loading has changed parameters.

    Args:
        engine: the first value that `deepspeed.initialize` returned.

    Raises:
        ConfigError: hybridep is not attached to this engine.
        CommunicationError: a transfer failed or passed its time limit.
    """
    attachment_of(engine).runtime.refresh()


def replan(engine: nn.Module, config: Mapping[str, Any] | HybridEPConfig) -> None:
    """Switch to other settings: domain sizes, codecs, token exchange, dense synchronisation; all ranks must call.

    Optimizer and parameters stay where they are.  Gradients that lossy codecs had kept back go to the experts' owners
    and into the next gradients.  The levels must not change.  If the job is planned ("auto"), planning goes on, but
    `config` itself must give all sizes and codecs.

    Call between two optimizer steps.

    Args:
        engine: the first value that `deepspeed.initialize` returned.
        config: content of a "hybridep" block.

    Raises:
        ConfigError, PlanError, UnsupportedError: the block is wrong, leaves something "auto", or does not fit; or
            hybridep is not attached to this engine.
        GradientNotReturnedError: the call comes in the middle of a gradient accumulation.
        AgreementError: ranks differ, or a rank failed; the earlier settings stay.
    """
    attachment = attachment_of(engine)
    with announcing_failure():
        checked = checked_config(engine, config)
        if checked.is_planned or not checked.enabled:
            raise ConfigError(
                'replan takes settings that are enabled and say all sizes and codecs, without "auto"; to plan, detach '
                "and attach again"
            )
        if [level.size for level in checked.levels] != [level.size for level in attachment.runtime.config.levels]:
            raise ConfigError("replan takes the same levels as before, slowest first; only their settings may differ")
        checked = supported.resolve(engine, checked, attachment.layers)
        supported.refuse_engine(engine, checked, attachment.layers)
    attachment.switch(checked, "by hand")


def trace(engine: nn.Module, path: str | Path) -> AbstractContextManager[None]:
    """Return a context manager that profiles the steps inside, and writes this rank's Chrome/Perfetto trace to `path`.

    The runtime names its ranges `hybridep::...`.  Transfers of weights and gradients have their own rows.

    Args:
        engine: the first value that `deepspeed.initialize` returned.
        path: file of this rank, JSON with times in microseconds.  Its folder is made.

    Raises:
        ConfigError: hybridep is not attached to this engine.
        OSError: the file cannot be written.
    """
    runtime = attachment_of(engine).runtime
    return record_trace(runtime.transport, path, runtime.hot.loads)


def weigh(engine: Any, weight: float) -> None:
    """Say how much this site's gradients of the next optimizer step count in the mean over sites.

    With a loss that is divided by the tokens of all ranks of the site, give these tokens: then sites with other
    numbers of tokens train as one job would.  Transformers' Trainer needs no call.  Without one, a step counts with
    its samples.

    Args:
        engine: an engine of a site.
        weight: at least 0; the same on all ranks of the site.

    Raises:
        ConfigError: the engine has no sites, or the weight is negative or no number.
    """
    sites = attachment_of(engine).sites
    if sites is None:
        raise ConfigError('this engine has no "sites" in its "hybridep" block; docs/sites.md shows one')
    if not 0 <= weight < math.inf:
        raise ConfigError(f"weigh: {weight} is no weight; give the tokens or samples of the step, at least 0")
    sites.weight = float(weight)


def site(source: Any = None) -> Site:
    """Return which of the sites this process belongs to.

    Args:
        source: an engine, or a ds_config (path or dict) before there is an engine; by default the engine that trains
            here.

    Raises:
        ConfigError: there are no sites, or this process's own name is none of theirs.
        OSError: the file of the ds_config cannot be read.
    """
    if source is not None and not isinstance(source, nn.Module):
        return read_site(source)
    attachment = the_one_of_a_site() if source is None else attachment_of(source)
    sites = attachment.runtime.config.sites
    if sites is None:
        raise ConfigError('this engine has no "sites" in its "hybridep" block; docs/sites.md shows one')
    present = () if attachment.sites is None else tuple(attachment.sites.epochs.members)
    return site_of(list(sites.names), sites.name, present)
