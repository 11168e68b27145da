# SPDX-License-Identifier: Apache-2.0
"""Describes one MoE layer for the package, and checks whether its experts can have replicas."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.slots import lay_out


@dataclass(frozen=True)
class LayerSpec:
    """What the runtime must know of one MoE layer of any kind.

    Attributes:
        name: dotted module name.
        group: name of its expert-parallel group.
        group_ranks: global ranks of that group, in group-rank order.
        experts: modules of this rank's e experts: one module each, or one for all if `is_grouped`.
        call: runs one of `experts`, as in `HybridMoE`.
        is_grouped: parameters of the module are [e, *shape].
        weighs_inputs: gate weights multiply the experts' inputs instead of their outputs.
    """

    name: str
    group: str
    group_ranks: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden: int
    experts: tuple[nn.Module, ...]
    call: Callable[..., Tensor]
    is_grouped: bool = False
    weighs_inputs: bool = False

    @property
    def num_local(self) -> int:
        """Number of experts that each rank owns (e)."""
        return self.num_experts // len(self.group_ranks)

    @property
    def sample(self) -> nn.Parameter:
        """A parameter to read dtype and device from."""
        return next(self.experts[0].parameters())


def check_experts(spec: LayerSpec) -> None:
    """Raise UnsupportedError for experts with buffers or hooks, without parameters, or with different parameters."""
    advice = "or set every hybridep domain_size to 1, which needs no copies of experts"
    blocks = lay_out(spec.experts[0], is_grouped=spec.is_grouped)
    if not blocks:
        raise UnsupportedError(
            f"{spec.name}: the experts have no parameters to place in domains; build others, {advice}"
        )
    for expert_idx, expert in enumerate(spec.experts):
        where = f"{spec.name}: local expert {expert_idx}"
        if lay_out(expert, is_grouped=spec.is_grouped) != blocks:
            raise UnsupportedError(
                f"{where} has other parameters (name, shape, dtype or requires_grad) than local expert 0; make the "
                f"experts of one structure, {advice}"
            )
        buffers = [name for name, _ in expert.named_buffers()]
        if buffers:
            raise UnsupportedError(
                f"{where} has buffers {buffers}, which replicas do not carry; remove them, {advice}"
            )
        hooked = [name or "itself" for name, module in expert.named_modules() if _has_hooks(module)]
        if hooked:
            raise UnsupportedError(
                f"{where} has forward or backward hooks (on {hooked}), which would also run for replicas of other "
                f"ranks' experts; remove them, {advice}"
            )


def _has_hooks(module: nn.Module) -> bool:
    """Return True for hooks other than DeepSpeed's: ZeRO-3 gathers by its hooks, and its experts run without them."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for kind in kinds for hook in getattr(module, kind).values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in hooks)
