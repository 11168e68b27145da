# SPDX-License-Identifier: Apache-2.0
"""`engine.offload_states()` and `engine.reload_states()`: replicas leave the device with what they are copies of.

lp_params    weights of replicas
lp_grads     sums of their gradients
others       nothing: what codecs keep stays, or is in host memory anyway ("state": "host")
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

from ds_hybridep.deepspeed.patches import ENGINE, Patches
from ds_hybridep.experts.migration import MigrationManager


def bind(patches: Patches, engine: Any, migration: Callable[[], MigrationManager]) -> None:
    """Let replicas follow.  migration: of the present plan."""
    patches.wrap(ENGINE, "offload_states", engine, partial(_offload, engine, migration))
    patches.wrap(ENGINE, "reload_states", engine, partial(_reload, migration))


def _offload(
    engine: Any, migration: Callable[[], MigrationManager], original: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    given = dict(zip(("include", "device", "pin_memory", "non_blocking"), args, strict=False)) | kwargs
    with _moving(migration()):
        original(*args, **kwargs)
    options = {"is_pinned": given.get("pin_memory", True), "non_blocking": given.get("non_blocking", False)}
    away = getattr(engine.optimizer, "offloaded_states", ())
    for layer in migration().layers:
        replicas = layer.replicas
        if layer.shipment is not None:
            layer.finish_shipment()
        if replicas.streams is not None:
            replicas.streams.wait_for_side()
        if Kind.lp_params in away:
            replicas.away.put("weights", replicas.kept_weights, **options)
        if Kind.lp_grads in away:
            replicas.away.put("gradient sums", layer.gradients.sums.kept, **options)


def _reload(
    migration: Callable[[], MigrationManager], original: Callable[..., None], non_blocking: bool = False
) -> None:
    with _moving(migration()):
        original(non_blocking=non_blocking)
    for layer in migration().layers:
        layer.replicas.away.bring_back(non_blocking=non_blocking)


@contextmanager
def _moving(migration: MigrationManager) -> Iterator[None]:
    """DeepSpeed gives parameters other memory inside, and leaves their values as they are."""
    before = [layer.replicas.own.versions() for layer in migration.layers]
    try:
        yield
    finally:
        for layer, versions in zip(migration.layers, before, strict=True):
            if layer.versions == versions:  # nobody had changed them since they were shipped
                layer.versions = layer.replicas.own.versions()
