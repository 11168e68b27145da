# SPDX-License-Identifier: Apache-2.0
"""Lets peft switch adapters of experts off and on, and refuses what it could do to other adapters only.

peft goes through a model's modules and looks for its own.  `adapters.py` has removed those around experts, so each
layer gets a small one, a switch.  Methods that change one module after the other are refused before they begin.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from ds_hybridep.deepspeed.patches import PEFT_MODEL, PEFT_TUNER, Patches
from ds_hybridep.errors import UnsupportedError

_MERGED = 'call ds_hybridep.save_pretrained(engine, DIR, form="merged"), which writes the merged model'
_BEFORE = "do it before deepspeed.initialize"
_ONE = "keep to the one adapter that is trained"
_LOADED = "load adapters with from_pretrained before deepspeed.initialize, or a checkpoint with engine.load_checkpoint"
# Methods of peft: what people call, and what they can do instead.
_OF_TUNER = {
    "merge_adapter": ("merge_adapter()", _MERGED),
    "_unload_and_optionally_merge": ("merge_and_unload() or unload()", _MERGED),
    "delete_adapter": ("delete_adapter()", _BEFORE),
    "inject_adapter": ("add_adapter()", _ONE),
    "set_requires_grad": ("set_requires_grad()", _BEFORE),
}
_OF_MODEL = {"load_adapter": ("load_adapter()", _LOADED)}


class AdapterSwitch(nn.Module, LoraLayer):
    """What peft finds in a layer whose experts have adapters.  Has no parameters.

    layer: name of the MoE block.
    adapter: name of its only adapter.
    """

    weight = bias = None  # type: ignore[assignment]  # peft's look for what this module wraps, and never end
    adapter_layer_names = other_param_names = ()
    lora_A: Any = {}  # peft looks for adapters in these
    lora_B = lora_embedding_A = lora_embedding_B = lora_A

    def __init__(self, layer: str, adapter: str) -> None:
        super().__init__()
        self.layer, self._active_adapter = layer, [adapter]
        self.scaling = {adapter: 1.0}  # times what the experts have; peft's `rescale_adapter_scale` changes it

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Raise UnsupportedError for other adapters than the one there is, and for `inference_mode`."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        if inference_mode or names != self.active_adapters:
            _refuse(self.layer, f"set_adapter({adapter_names!r}, inference_mode={inference_mode})", _ONE)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise UnsupportedError."""
        _refuse(self.layer, *_OF_TUNER["merge_adapter"])

    def unmerge(self) -> None:
        """Do nothing: nothing is ever merged."""

    def delete_adapter(self, adapter_name: str) -> None:
        """Raise UnsupportedError."""
        _refuse(self.layer, *_OF_TUNER["delete_adapter"])

    def set_requires_grad(self, adapter_names: Any, requires_grad: bool = True) -> None:
        """Raise UnsupportedError."""
        _refuse(self.layer, *_OF_TUNER["set_requires_grad"])


def guard(model: nn.Module, switches: Iterable[AdapterSwitch]) -> None:
    """Make peft's objects around the model refuse what cannot reach the experts, before they change anything."""
    switch, changed = next(iter(switches)), Patches()
    for module in model.modules():
        # Partial functions, because a copy of the model gets its own.
        if isinstance(module, BaseTuner):
            owner, refused = PEFT_TUNER, _OF_TUNER
            for method, checked in (("set_adapter", _set_adapter), ("_enable_peft_forward_hooks", _enable_hooks)):
                changed.put(owner, method, module, partial(checked, switch, getattr(module, method)))
        elif isinstance(module, PeftModel):
            owner, refused = PEFT_MODEL, _OF_MODEL
        else:
            continue
        for method, (what, instead) in refused.items():
            changed.put(owner, method, module, partial(_refuse, switch.layer, what, instead))


def _set_adapter(
    switch: AdapterSwitch, original: Callable[..., None], adapter_name: Any, inference_mode: bool = False
) -> None:
    switch.set_adapter(adapter_name, inference_mode)
    original(adapter_name, inference_mode)


def _enable_hooks(switch: AdapterSwitch, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("adapter_names") is not None:
        _refuse(switch.layer, "adapter_names", "call the model once more inside disable_adapter()")
    return original(*args, **kwargs)


def _refuse(layer: str, what: str, instead: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        f"{layer}: {what} of peft does not reach adapters of experts, which hybridep has taken over, and would change "
        f"other adapters only; {instead}"
    )
