# SPDX-License-Identifier: Apache-2.0
"""Keeps ranks in step in transformers' `generate`, where a rank whose text ends early would leave the others waiting.

Experts of other ranks are needed for every token.  So `synced_gpus` is on unless a script says otherwise, as
transformers has it under ZeRO-3, and ranks go on until all of them have ended.
"""

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ds_hybridep.deepspeed.attachment import Attachment, attached
from ds_hybridep.deepspeed.patches import GENERATION, Patches
from ds_hybridep.transport.unequal import any_of

AGREEMENT = "end of generate"
_finished: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose texts have all ended on this rank


def install(changes: Patches) -> None:
    """Change `generate` of all models while any engine is attached; models without its layers do as before."""
    if GENERATION.partition(":")[0] in sys.modules:
        changes.share(GENERATION, "generate", _synced)
        changes.share(GENERATION, "_has_unfinished_sequences", _told_by_others)
        changes.share(GENERATION, "_update_model_kwargs_for_generation", _not_after_the_end)


def _synced(original: Callable[..., Any]) -> Callable[..., Any]:
    position = list(inspect.signature(original).parameters).index("synced_gpus")

    def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_open = len(args) < position and kwargs.get("synced_gpus") is None
        if is_open and (attachment := _attachment_of(model)) is not None and attachment.coupled_ranks():
            kwargs["synced_gpus"] = True
        return original(model, *args, **kwargs)

    return generate


def _told_by_others(original: Callable[..., bool]) -> Callable[..., bool]:
    """Let ranks whose experts are needed tell each other, instead of a collective of all ranks with no limit."""

    def has_unfinished_sequences(model: nn.Module, this_peer_finished: bool, synced_gpus: bool, **kwargs: Any) -> bool:
        attachment = _attachment_of(model) if synced_gpus else None
        if attachment is None or not (ranks := attachment.coupled_ranks()):
            return original(model, this_peer_finished, synced_gpus, **kwargs)
        (_finished.add if this_peer_finished else _finished.discard)(model)
        return any_of(attachment.runtime.transport, ranks, not this_peer_finished, AGREEMENT)

    return has_unfinished_sequences


def _not_after_the_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the attention mask of texts that have ended as long as they are.

    transformers makes it longer in each further call for the others' sake, but not the text.  Only with a cache, which
    grows too, do the two fit.
    """

    def update(model: nn.Module, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if model in _finished and not model_kwargs.get("use_cache", True):
            return model_kwargs
        return original(model, outputs, model_kwargs, *args, **kwargs)

    return update


def _attachment_of(model: nn.Module) -> Attachment | None:
    """Return the attachment of the engine that has layers of `model`, which may be inside the engine's module."""
    modules = {id(module) for module in model.modules()}
    for attachment in list(attached):
        if any(id(layer) in modules for layer in attachment.layers.values()):
            return attachment
    return None
