# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed is about to do with the gradients of a backward.

Those of the last one before an optimizer step are summed.  If that step does not come, they may be replaced:

    ZeRO 1 and 2    the last backward before a step fills `averaged_gradients`; without that step, the next one fills
                    them anew; it adds to them if they are fp32 and parameters are not
    with offload    the same, on the host; ZeRO 2 adds if the step had several backwards
    ZeRO 3          the first backward after a step or after the optimizer's zero_grad fills the partitions anew
    others          gradients are added up until zero_grad
"""

from typing import Any

from ds_hybridep.errors import UnsupportedError
from ds_hybridep.runtime.runtime import holds_averaged


def replaces_gradients(engine: Any, *, is_boundary: bool) -> bool:
    """Return True if the backward that begins replaces all gradients since the last optimizer step.

    is_boundary: it is the last before the optimizer step.

    Raises UnsupportedError if it replaces gradients of some parameter groups and adds to those of others.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return bool(optimizer.micro_step_id == 0)
    if getattr(optimizer, "cpu_offload", False):
        return is_boundary and holds_averaged(optimizer) and _replaces_on_host(engine)
    averaged = getattr(optimizer, "averaged_gradients", None) or {}
    # After a step the table still has an entry for each group: None.
    kept = [group for group in averaged.values() if group is not None] if is_boundary else []
    adds = {getattr(group, "flat_partition", None) is not None for group in kept}
    if len(adds) == 2:
        raise UnsupportedError(
            f"rank {engine.global_rank}: engine.step() was left out after the last backward of a step, so DeepSpeed "
            f"drops the gradients of some parameter groups (with Muon) and keeps those of others, which codecs of "
            f"gradients cannot follow; call engine.step() after it, or set data_types.grad_accum_dtype to the type of "
            f"the parameters"
        )
    return adds == {False}


def _replaces_on_host(engine: Any) -> bool:
    """Return True if a backward replaces gradients that the last one of a step has copied to the host."""
    optimizer = engine.optimizer
    adds_up = getattr(optimizer, "_use_compact_grad_partition_buffer", lambda _: False)  # older DeepSpeeds have none
    are_added = {adds_up(at) for at in range(len(optimizer.bit16_groups))}
    if optimizer.micro_step_id > 0 or are_added == {True}:
        return False
    if len(are_added) == 2 or optimizer.accumulated_grads_in_cpu:
        raise UnsupportedError(
            f"rank {engine.global_rank}: engine.step() was left out after the last backward of a step, and with "
            f"zero_optimization.offload_optimizer DeepSpeed then adds gradients of an earlier step, which codecs of "
            f"gradients cannot follow; call engine.step() after it, or leave out offload_optimizer"
        )
    return True
