# SPDX-License-Identifier: Apache-2.0
"""The zero-code way in: a ds_config with a "hybridep" block is enough, the training script stays as it is.

torch calls `install` at the end of every `import torch` (entry point group `torch.backends`), in every process of
every program in the environment.  So this module loads nothing but `sys`, does nothing but put one finder on
`sys.meta_path`, and never raises: an exception here would break `import torch`.

    import torch             -> install()            one finder, nothing loaded
    import deepspeed         -> _EngineFinder        the normal loader executes deepspeed.runtime.engine,
                                                     then ds_hybridep.integration.engine.patch_deepspeed_engine(module)
    patching fails           -> _refuse_block        logged once; an engine whose ds_config has the block raises,
                                                     every other engine is untouched
    engine already imported  -> _patch_at_first_use  the same, when the first engine is constructed

`TORCH_DEVICE_BACKEND_AUTOLOAD=0` makes torch skip all entry points; then call `ds_hybridep.attach` in the script.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_ENGINE_MODULE = "deepspeed.runtime.engine"
_BLOCK = "hybridep"


def install() -> None:
    """Arrange that DeepSpeed's engine is patched when it is imported.  Idempotent; never raises."""
    try:
        if any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
            return
        sys.meta_path.insert(0, _EngineFinder())
        module = sys.modules.get(_ENGINE_MODULE)
        if module is not None:
            _patch_at_first_use(module)
    except Exception as reason:  # noqa: BLE001  whatever happens here must not break `import torch`
        _log_failure(reason, f'a "{_BLOCK}" block in ds_config has NO effect; call ds_hybridep.attach in the script')


class _EngineFinder:
    """Meta-path finder for one module name.  The spec is the one the other finders give, with the loader wrapped."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != _ENGINE_MODULE:
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader)  # type: ignore[assignment]  # a loader by its methods
                return spec
        return None


class _PatchingLoader:
    """Executes the module with its own loader, then patches it.  The module keeps its own loader, not this one."""

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> "Any":
        # Tools that look at the spec without importing (get_source, is_package, ...) see the normal loader.
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _patch(module)


def _patch(module: "ModuleType") -> None:
    """Patch `module` now; where that fails, leave it usable for every ds_config without the block."""
    try:
        from ds_hybridep.integration.engine import patch_deepspeed_engine

        patch_deepspeed_engine(module)
    except Exception as reason:  # noqa: BLE001  users of DeepSpeed without the block must not suffer from our failure
        _log_failure(reason, f'a ds_config with a "{_BLOCK}" block will be refused, others are not affected')
        _refuse_block(module, reason)


def _patch_at_first_use(module: "ModuleType") -> None:
    """Patch `module` when its first engine is constructed: now torch itself may still be half imported."""
    if getattr(module.__spec__, "_initializing", False):
        raise RuntimeError(f"{_ENGINE_MODULE} was being imported when ds_hybridep was installed into it")
    from functools import wraps

    engine_class = module.DeepSpeedEngine
    plain_init = engine_class.__init__

    @wraps(plain_init)
    def __init__(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        engine_class.__init__ = plain_init
        _patch(module)
        engine_class.__init__(self, *args, **kwargs)  # looked up again: patching may have replaced it

    engine_class.__init__ = __init__


def _refuse_block(module: "ModuleType", reason: Exception) -> None:
    """Make an engine whose ds_config has the block raise `reason`, so that the block is not silently ignored."""
    from functools import wraps

    engine_class = getattr(module, "DeepSpeedEngine", None)
    if engine_class is None:
        return
    plain_init = engine_class.__init__

    @wraps(plain_init)
    def __init__(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        if _asks_for_hybridep(plain_init, (self, *args), kwargs):
            raise RuntimeError(
                f'ds_config has a "{_BLOCK}" block, but ds_hybridep could not join this DeepSpeed '
                f"({type(reason).__name__}: {reason}); install a version of DeepSpeed that it supports "
                f'(see its setup.py), or set "{_BLOCK}": {{"enabled": false}} to train without it'
            ) from reason
        plain_init(self, *args, **kwargs)

    engine_class.__init__ = __init__


def _asks_for_hybridep(init: "Any", args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> bool:
    """Whether the engine built by `init(*args, **kwargs)` has the block in its ds_config, and not switched off."""
    import inspect

    arguments = inspect.signature(init).bind_partial(*args, **kwargs).arguments
    ds_config = getattr(arguments.get("config_class"), "_param_dict", None) or arguments.get("config")
    block = ds_config.get(_BLOCK) if isinstance(ds_config, dict) else None
    return block is not None and not (isinstance(block, dict) and block.get("enabled") is False)


def _log_failure(reason: Exception, consequence: str) -> None:
    """Say that ds_hybridep is not active, why, and what follows.  Logged, since a warning could be made an error."""
    import logging

    text = "ds_hybridep could not join DeepSpeed and is not active: %s: %s; %s"
    logging.getLogger("ds_hybridep").error(text, type(reason).__name__, reason, consequence, exc_info=reason)
