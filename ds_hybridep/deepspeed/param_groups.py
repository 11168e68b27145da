# SPDX-License-Identifier: Apache-2.0
"""Gives experts groups of their own in an optimizer that the script, or the Trainer, has made.

ZeRO 1 and 2 and DeepSpeed's 16-bit optimizers need groups that hold experts only, with a mark.  DeepSpeed makes them
for an optimizer of the ds_config only.  For another one, DeepSpeed gets a second object, which shares everything with
the script's but the list of groups:

    of the script       [a, b]                  its dicts, its order; what schedulers and the script see
    of DeepSpeed        [a, b, a's experts]     a and b are the same dicts, without experts

A value that the script or a scheduler changes in a reaches a's experts before the next step.  What the optimizer
itself changes in a group while it steps (a counter, for example) stays with that group.

A model whose experts are all frozen has no such group; then DeepSpeed's optimizers do not hear of experts at all.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from torch import Tensor

from ds_hybridep.deepspeed import conversion
from ds_hybridep.deepspeed.engine_view import view_of
from ds_hybridep.deepspeed.patches import ENGINE, Patches

Group = dict[str, Any]
_OF_THE_GROUP = ("params", "name", "moe")  # what experts do not have in common with the group that they came from


def bind(patches: Patches, engine: Any, layers: Mapping[str, Any]) -> None:
    """Let an engine whose optimizer is not made yet accept one with groups of any kind, and models of frozen experts.

    layers: its MoE layers.
    """
    patches.wrap(ENGINE, "_configure_optimizer", engine, partial(_configure, engine, dict(layers)))
    for method in ("_configure_zero_optimizer", "_configure_bf16_optimizer", "_configure_fp16_optimizer"):
        patches.wrap(ENGINE, method, engine, partial(_wrap_optimizer, engine))


def _configure(
    engine: Any, layers: Mapping[str, Any], original: Callable[..., None], client_optimizer: Any, parameters: Any
) -> None:
    conversion.remap(engine, parameters)
    conversion.forget(engine)
    of_experts = [parameter for layer in layers.values() for parameter in layer.experts.parameters()]
    if client_optimizer is None and isinstance(parameters, list) and parameters and isinstance(parameters[0], dict):
        parameters = _named(parameters)
    with _unaware_of_experts(engine, when=not any(parameter.requires_grad for parameter in of_experts)):
        original(client_optimizer, parameters)


def _wrap_optimizer(engine: Any, original: Callable[..., Any], optimizer: Any = None, *args: Any) -> Any:
    """Replaces what wraps `optimizer` into one of DeepSpeed's."""
    groups = getattr(optimizer, "param_groups", None)
    if not engine.has_moe_layers or not groups or any(group.get("moe") for group in groups):
        return original(optimizer, *args)
    trained = [p for group in groups for p in group["params"] if is_moe_param(p) and p.requires_grad]
    # ZeRO-3 splits groups itself.
    if trained and not view_of(engine).partitions_parameters:
        optimizer = engine.basic_optimizer = with_experts_apart(optimizer)
    with _unaware_of_experts(engine, when=not trained):
        return original(optimizer, *args)


@contextmanager
def _unaware_of_experts(engine: Any, *, when: bool) -> Iterator[None]:
    before = engine.has_moe_layers
    # ZeRO-3 asks for no marks, and must know experts in order to place them.
    engine.has_moe_layers = before and not (when and not view_of(engine).partitions_parameters)
    try:
        yield
    finally:
        engine.has_moe_layers = before


def _named(groups: Iterable[Group]) -> list[Group]:
    """Return groups of different names: where two have one name, DeepSpeed gives the experts of both one's values."""
    found: list[Group] = []
    taken: set[str] = set()
    for index, group in enumerate(groups):
        name = group.get("name", f"group {index}")
        if name in taken:
            name = f"{name} {index}"
        taken.add(name)
        found.append({**group, "name": name})
    return found


def with_experts_apart(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the object that DeepSpeed gets in the place of `optimizer`, whose groups hold no experts then."""
    split = _Split(optimizer)
    apart: torch.optim.Optimizer = type(optimizer).__new__(type(optimizer))
    vars(apart).update(vars(optimizer))
    apart.param_groups = [group for group, _ in split.parts]
    # These hooks are for this object alone; all others are the script's too.
    apart._optimizer_state_dict_pre_hooks = optimizer._optimizer_state_dict_pre_hooks.copy()
    apart._optimizer_load_state_dict_post_hooks = optimizer._optimizer_load_state_dict_post_hooks.copy()
    apart.register_state_dict_pre_hook(split.before_save)
    apart.register_load_state_dict_post_hook(split.after_load)
    apart.step = MethodType(split.step, apart)  # type: ignore[method-assign]
    return apart


class _Split:
    """The groups of a script's optimizer, and the parts that DeepSpeed gets: (part, the group that it came from)."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parts: list[tuple[Group, Group]] = []
        of_experts: list[tuple[Group, Group]] = []
        for group in optimizer.param_groups:
            trained = [one for one in group["params"] if one.requires_grad or not is_moe_param(one)]
            whole = {**group, "params": trained, "name": "group"}
            rest, *parts = split_params_into_different_moe_groups_for_optimizer([whole])
            of_experts += [(part, group) for part in parts]
            if not parts or any(parameter.requires_grad for parameter in rest["params"]):
                group["params"] = rest["params"]
                self.parts.append((group, group))
        self.parts += of_experts
        self._note()

    @property
    def step(self) -> Callable[..., Any]:
        """A method: lets the script's optimizer, with all that was done to its `step`, step DeepSpeed's groups."""

        def step(apart: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._follow()
            kept, self.optimizer.param_groups = self.optimizer.param_groups, apart.param_groups
            try:
                return self.optimizer.step(*args, **kwargs)
            finally:
                self.optimizer.param_groups = kept
                self._note()

        return step

    def before_save(self, apart: torch.optim.Optimizer) -> None:
        """Let the parts have what schedulers have changed since the last step."""
        self._follow()
        self._note()

    def after_load(self, apart: torch.optim.Optimizer) -> None:
        """Take over what was loaded, in the dicts that everybody has already."""
        for (part, group), loaded in zip(self.parts, apart.param_groups, strict=True):
            part.update(loaded)
            if not any(other is group for other, _ in self.parts):  # of experts alone
                group.update(_common(part))
        apart.param_groups = [part for part, _ in self.parts]
        self.optimizer.state = apart.state
        self._note()

    def _follow(self) -> None:
        for part, group in self.parts:
            if part is not group:
                before = self._seen[id(group)]
                part.update({key: now for key, now in _common(group).items() if not _is_same(now, before.get(key))})

    def _note(self) -> None:
        self._seen = {id(group): _common(group) for _, group in self.parts}


def _common(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in _OF_THE_GROUP}


def _is_same(now: Any, before: Any) -> bool:
    return now is before or not isinstance(now, Tensor) and not isinstance(before, Tensor) and bool(now == before)
