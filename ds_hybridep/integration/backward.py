# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed is about to do with the gradients of a backward.

Those of the last one before an optimizer step are summed.  If that step does not come, they may be replaced:

    ZeRO 1 and 2    the last backward before a step fills `averaged_gradients`; without that step, the next one fills
                    them anew; it adds to them if they are fp32 and parameters are not
    ZeRO 3          the first backward after a step or after the optimizer's zero_grad fills the partitions anew
    others          gradients are added up until zero_grad
"""

from typing import Any

from ds_hybridep.errors import UnsupportedError


def replaces_gradients(engine: Any, *, is_boundary: bool) -> bool:
    """Return True if the backward that begins replaces all gradients since the last optimizer step.

    is_boundary: it is the last before the optimizer step.

    Raises UnsupportedError if it replaces gradients of some parameter groups and adds to those of others.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return bool(optimizer.micro_step_id == 0)
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
