# SPDX-License-Identifier: Apache-2.0
"""Checks settings, layers and ranks together, and returns the function that makes the runtime of a plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.integration.build import encoding_of, plan_layer
from ds_hybridep.integration.runtime import HybridRuntime
from ds_hybridep.kernels import load_kernels
from ds_hybridep.sync.feedback import no_master, no_scale
from ds_hybridep.transport.agreement import agree, announcing_failure
from ds_hybridep.transport.channels import Transport
from ds_hybridep.transport.job import backends_of, longest_wait_s
from ds_hybridep.transport.job_link import LinkSettings
from ds_hybridep.version import __version__


def prepare_runtime(
    config: HybridEPConfig,
    specs: Sequence[LayerSpec],
    is_boundary: Callable[[], bool],
    *,
    sync_groups: Callable[[HybridEPConfig], Mapping[str, tuple[int, ...]]] = lambda _: {},
    parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]] = tuple,
    master_of: Callable[[nn.Parameter], Tensor | None] = no_master,
    loss_scale: Callable[[], float] = no_scale,
) -> Callable[[], HybridRuntime]:
    """Return the function that makes a model's runtime.  All ranks must call both, each at the same point.

    All checks of settings, layers and ranks are made here, before anything is built.

    Args:
        specs: describe the model's MoE layers, in the order in which they run.
        is_boundary: returns True if the running backward is the last before the optimizer step.
        sync_groups: returns, by name, the ranks that hold the same parameters, if settings synchronise these by level.
        parameters: returns the model's, by name.
        master_of, loss_scale: as in `Encoding`.

    Raises:
        PlanError: an expert-parallel group is not a regular part of the levels, or cannot be split into the domains.
        AgreementError: ranks differ in config, layers or version, or a rank is missing.
    """
    with announcing_failure():
        planned = [plan_layer(config, spec) for spec in specs]
        synchronised = sync_groups(config)
        encoding = replace(encoding_of(config), master_of=master_of, loss_scale=loss_scale)
        device = specs[0].sample.device
        kernels = load_kernels(config.advanced.kernels, device, config.advanced.dispatch_sms)
        backends = backends_of(config, device)
        link = LinkSettings.of(config)
        link.check()
        payload = {
            "version": __version__,
            "torch": torch.__version__,
            "kernels": kernels.name,
            "backends": list(backends),
            "config": config.canonical(),
            "layers": [layer.canonical() for layer in planned],
            "synchronised": sorted(synchronised),
        }
    generation = agree(payload, config.timeout_s)

    def build() -> HybridRuntime:
        transport = Transport(config.cluster(), longest_wait_s(config.timeout_s), generation, backends, link=link)
        try:
            return HybridRuntime(config, transport, kernels, planned, encoding, is_boundary, synchronised, parameters)
        except BaseException:
            transport.close()
            raise

    return build
