# SPDX-License-Identifier: Apache-2.0
"""What `engine.step()` does around DeepSpeed's own step while an engine is attached."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ds_hybridep.deepspeed.attachment import Attachment
from ds_hybridep.deepspeed.patches import ENGINE, OPTIMIZER
from ds_hybridep.deepspeed.supported import check_optimizer
from ds_hybridep.errors import UnsupportedError


def bind(attachment: Attachment) -> None:
    """Change the engine's step, and connect its optimizer if it is there."""
    attachment.patches.wrap(ENGINE, "_take_model_step", attachment.engine, partial(_take_step, attachment))
    attachment.dropped.bind_engine(attachment.patches)
    bind_optimizer(attachment)


def bind_optimizer(attachment: Attachment) -> None:
    """Connect the optimizer once it exists: DeepSpeed makes it after an engine with the block is attached."""
    engine, patches = attachment.engine, attachment.patches
    optimizer = getattr(engine, "optimizer", None)
    if attachment.optimizer is not None or not hasattr(optimizer, "zero_grad"):
        return
    check_optimizer(engine)
    attachment.optimizer = optimizer
    attachment.dropped.bind_optimizer(patches, optimizer)
    if isinstance(base := engine.basic_optimizer, torch.optim.Optimizer):
        hook = partial(_before_change, weakref.ref(attachment))  # a user's optimizer may outlive the engine
        patches.note(OPTIMIZER, "step_pre_hook", base.register_step_pre_hook(hook).remove)
    if attachment.dense is not None:
        attachment.dense.watch(optimizer)


def _before_change(known: "weakref.ref[Attachment]", *_: Any) -> None:
    """Runs before the optimizer changes parameters: from here on the step is not skipped any more.

    So residuals and packet numbers stay as the gradients of this step have left them.
    """
    if (attachment := known()) is not None and attachment.runtime.commit() and attachment.dense is not None:
        attachment.dense.before_change()


def _take_step(attachment: Attachment, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Replaces `engine._take_model_step`."""
    bind_optimizer(attachment)
    _refuse_other_forwards(attachment)
    engine, runtime, planner = attachment.engine, attachment.runtime, attachment.planner
    dense, sites = attachment.dense, attachment.sites
    # 1. The gradients of this step become final: they have returned to owners, and without local steps
    #    they are averaged over sites.
    runtime.before_step()
    try:
        chosen = planner.before_step(runtime) if planner is not None else None
        if sites is not None:
            sites.exchange()
        # 2. DeepSpeed's own step, which may be skipped.
        if dense is not None:
            dense.before_step()
        original(*args, **kwargs)
    except BaseException:
        runtime.abandon_step()
        raise
    finally:
        if dense is not None:
            dense.after_step()
    # 3. Weights leave.  Dense parameters and experts travel together; experts of several groups must arrive before
    #    they are shipped, and all before local steps change them once more.
    was_applied = engine._step_applied
    if dense is not None:
        dense.finish_gathers(of_experts_only=sites is None or sites.local is None)
    if sites is not None:
        sites.take_outer_step()
    report = runtime.after_step(was_applied=was_applied, ships=chosen is None)
    if dense is not None:
        dense.finish_gathers(of_experts_only=False)
    if sites is not None:
        sites.after_step(was_applied=was_applied)
    # 4. What was measured is published, and may have led to another plan.
    if planner is not None:
        planner.after_step()
    if report is not None:
        attachment.publish(report)
    if chosen is not None and planner is not None:
        attachment.switch(chosen, planner.reason)


def _refuse_other_forwards(attachment: Attachment) -> None:
    """Raise UnsupportedError if a layer has run, but nothing of it here.  A layer that is left out may be."""
    for name, stats in attachment.runtime.layer_stats.items():
        if stats.module_calls and not stats.calls:
            kind = type(attachment.layers[name])
            forward = vars(attachment.layers[name]).get("forward", kind.forward)
            where = f"{getattr(forward, '__module__', '')}.{getattr(forward, '__qualname__', repr(forward))}"
            raise UnsupportedError(
                f"{name} ({kind.__name__}) has run without hybridep, since its forward, {where}, does not call "
                f"DeepSpeed's: call super().forward (or the layer's forward before it was replaced) in it, or set "
                f'"hybridep": {{"enabled": false}}'
            )
