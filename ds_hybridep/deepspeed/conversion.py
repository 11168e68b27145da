# SPDX-License-Identifier: Apache-2.0
"""Runs AutoEP on what people bring: a model inside another module, adapters, an optimizer that exists already.

AutoEP looks for layers under their usual names.  Below a wrapper (peft, a value head, a module of the script) names
are longer, so it is given the models inside, one after the other.
"""

import copy
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_hybridep.deepspeed.autoep import is_autoep_layer, plain_registry
from ds_hybridep.errors import ConfigError, UnsupportedError

_REPLACED = "_hybridep_replaced"  # of an engine that is being made


def convert(original: Callable[..., Any], engine: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces the engine's `_configure_expert_parallel`; returns what it returns."""
    from ds_hybridep.deepspeed import adapters  # here, because it needs modules of AutoEP

    settings = engine._config.expert_parallel_config
    taken = adapters.take_off(model)
    trained = {name: weakref.ref(one) for name, one in model.named_parameters() if one.requires_grad}
    old = _sources(model, settings)
    sources: Any = None
    try:
        for part, of_part in _parts(model, settings):
            engine._config.expert_parallel_config = of_part
            with plain_registry(), _same_random_numbers():
                found = original(engine, part, *args, **kwargs)
            if sources is None:
                sources = found
            elif found is not None:
                sources.update(found)
    finally:
        engine._config.expert_parallel_config = settings
    _refuse_lost(model, trained, settings)
    adapters.put_on(model, taken, sources)
    if sources is None:
        engine.__dict__[_REPLACED] = _replacements(model, old)
        remap(engine, getattr(engine.client_optimizer, "param_groups", None))
    return sources


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Let AutoEP draw numbers for weights that it then overwrites, so that dropout draws what it would without AutoEP.

    Otherwise adapters and value heads with dropout train differently from the first step on.
    """
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        yield


# -- models inside other modules ----------------------------------------------------------------------------------


def peft_configs_of(module: nn.Module) -> dict[str, Any]:
    """Return the configs of adapters, by name; empty if peft has put none into the module."""
    for one in module.modules():
        if hasattr(type(one), "peft_config") or "peft_config" in vars(one):
            return dict(one.peft_config)  # type: ignore[arg-type]
    return {}


def _parts(model: nn.Module, settings: Any) -> list[tuple[nn.Module, Any]]:
    """Return the modules that AutoEP is run on, and the settings for each; `model` itself if it finds none below it.

    First come models whose layers have their usual names, then models without a head, whose names are shorter.  If an
    earlier engine has made the layers, they stay, and AutoEP only makes groups of ranks.
    """
    if made := {int(vars(layer)["ep_size"]) for layer in model.modules() if is_autoep_layer(layer)}:
        return [(nn.Module(), _for_no_layers(settings, made))]
    if settings.moe_layer_pattern is not None:
        return [(model, settings)]
    parts: list[tuple[nn.Module, Any]] = []
    covered: set[int] = set()
    for has_usual_names in (True, False):
        for module in model.modules():
            if (preset := _preset_of(module, settings)) is None:
                continue
            blocks = {
                name: id(block)
                for name, block in module.named_modules()
                if re.fullmatch(preset.moe_layer_pattern, name) or not has_usual_names
                if hasattr(block, preset.experts_pattern) and hasattr(block, preset.router_pattern)
            }
            new = [name for name, block in blocks.items() if block not in covered]
            if not new:
                continue
            covered.update(blocks.values())
            of_part = settings if module is model else copy.copy(settings)  # AutoEP writes to it
            if not has_usual_names:
                of_part = copy.copy(settings)
                of_part.moe_layer_pattern = "|".join(map(re.escape, new))
            parts.append((module, of_part))
    return parts or [(model, settings)]


def _for_no_layers(settings: Any, made: set[int]) -> Any:
    """Return settings with which AutoEP looks for no layers.

    made: the sizes of the expert-parallel groups that the model's layers were made for.
    """
    if made != {settings.autoep_size}:
        raise ConfigError(
            f"expert_parallel.autoep_size is {settings.autoep_size}, but an earlier deepspeed.initialize has made the "
            f"model's layers for {', '.join(map(str, sorted(made)))}; use the same size, or load the model anew"
        )
    found = copy.copy(settings)
    found.preset_model = found.moe_layer_pattern = None
    return found


def _preset_of(module: nn.Module, settings: Any) -> Any:
    """Return AutoEP's preset for a model of transformers, None for other modules and models that it does not know."""
    from deepspeed.module_inject.auto_ep_config import PRESET_MODELS

    kind = getattr(getattr(module, "config", None), "model_type", None)
    if kind is None:
        return None
    if settings.preset_model is not None:
        return PRESET_MODELS.get(settings.preset_model)
    return next((preset for preset in PRESET_MODELS.values() if kind in preset.hf_model_types), None)


# -- what AutoEP would drop ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """What AutoEP reads of a layer, by all its presets and the settings."""

    routers: frozenset[str]
    experts: frozenset[str]
    weights: frozenset[str]

    @classmethod
    def of(cls, settings: Any) -> "_Names":
        from deepspeed.module_inject.auto_ep_config import PRESET_MODELS

        presets = list(PRESET_MODELS.values())
        weights = [(one.expert_w1, one.expert_w2, one.expert_w3) for one in presets]
        own = (settings.expert_w1, settings.expert_w2, settings.expert_w3)
        names = (*(name for names in (*weights, own) for name in names), "gate_proj", "up_proj", "w1", "w2", "w3")
        return cls(
            frozenset((*(one.router_pattern for one in presets), settings.router_pattern)) - {None},
            frozenset((*(one.experts_pattern for one in presets), settings.expert_pattern)) - {None},
            frozenset(name for name in names if isinstance(name, str)),
        )

    def reads(self, name: str) -> bool:
        """Return True for a parameter, by its name in the layer, that AutoEP makes one of its own of."""
        routers, experts, weights = ("|".join(map(re.escape, sorted(one))) for one in vars(self).values())
        router = rf"({routers})\.(modules_to_save\.[^.]+\.)?(weight|bias|e_score_correction_bias)"
        return re.fullmatch(rf"{router}|({experts})\.(\d+\.)?({weights})(\.weight)?", name) is not None


def _refuse_lost(model: nn.Module, trained: Mapping[str, weakref.ref[nn.Parameter]], settings: Any) -> None:
    """Raise UnsupportedError if a parameter that is trained has gone, and nothing was made of it."""
    names, left = _Names.of(settings), {id(parameter) for parameter in model.parameters()}
    paths = [path for path, layer in model.named_modules() if is_autoep_layer(layer)]
    for name, reference in trained.items():
        if (parameter := reference()) is not None and id(parameter) in left:
            continue
        path = next((path for path in paths if name.startswith(f"{path}.")), "")
        inside = name.removeprefix(f"{path}.")
        if not names.reads(inside):
            is_adapter = ".lora_" in name
            instead = (
                f"leave {inside.split('.')[0]!r} out of the adapters (target_modules and target_parameters of the "
                f"LoraConfig); modules_to_save trains a whole router"
                if is_adapter
                else "freeze it, or keep it outside of the MoE layer"
            )
            raise UnsupportedError(
                f"{name} is trained, but AutoEP makes a layer of its own of {path or 'its layer'}, which has no place "
                f"for {'adapters there' if is_adapter else 'it'}; {instead}"
            )


# -- optimizers of DeepSpeed before 0.19.7, which does this itself since ------------------------------------------


def _sources(model: nn.Module, settings: Any) -> dict[int, tuple[str, str]]:
    """Return, by id of a parameter that AutoEP may replace, the path of its block and its name in it."""
    names, found = _Names.of(settings), {}
    paths = [
        path
        for path, block in model.named_modules()
        if any(hasattr(block, one) for one in names.routers) and any(hasattr(block, one) for one in names.experts)
    ]
    for path in paths:
        for name, parameter in model.get_submodule(path).named_parameters():
            if names.reads(name):
                found[id(parameter)] = (path, name)
    return found


def _replacements(model: nn.Module, sources: Mapping[int, tuple[str, str]]) -> dict[int, list[nn.Parameter]]:
    """Return what AutoEP has made of parameters, by the id that these had."""
    found: dict[int, list[nn.Parameter]] = {}
    for key, (path, name) in sources.items():
        layer: Any = model.get_submodule(path)
        if not is_autoep_layer(layer):
            continue
        kind = name.removesuffix(".weight").rpartition(".")[2]
        parts = {"gate_up_proj": ("w1", "w3"), "gate_proj": ("w1",), "up_proj": ("w3",), "down_proj": ("w2",)}
        if "experts" in name:
            found[key] = [getattr(layer.experts, one) for one in parts.get(kind, (kind,))]
        elif (router := getattr(layer.router.gate, name.rpartition(".")[2], None)) is not None:
            found[key] = [router]
    return found


def remap(engine: Any, groups: Any) -> None:
    """Put what AutoEP has made in the place of what it replaced, in groups of parameters or a list of them."""
    replaced: dict[int, list[nn.Parameter]] = engine.__dict__.get(_REPLACED) or {}
    if not replaced or not isinstance(groups, list):
        return
    placed: set[int] = set()
    lists = [group["params"] for group in groups if isinstance(group, dict)] or [groups]
    for parameters in filter(lambda one: isinstance(one, list), lists):
        parameters[:] = _placed(parameters, replaced, placed)


def _placed(
    parameters: Iterable[nn.Parameter], replaced: Mapping[int, list[nn.Parameter]], placed: set[int]
) -> Iterator[nn.Parameter]:
    for parameter in parameters:
        for one in replaced.get(id(parameter), [parameter]):
            if id(one) not in placed:
                placed.add(id(one))
                yield one


def forget(engine: Any) -> None:
    """Drop what `remap` needs, once the engine's optimizer is made."""
    engine.__dict__.pop(_REPLACED, None)
