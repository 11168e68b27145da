# SPDX-License-Identifier: Apache-2.0
"""Joins DeepSpeed without a change of the training script: a ds_config with a "hybridep" block is enough.

torch calls `install` at the end of every `import torch` (entry point group `torch.backends`), in every process of
every program in the environment.  So this module loads nothing but `sys`, does nothing but put one finder on
`sys.meta_path`, and never raises: an exception here would break `import torch`.

    import torch              -> install()       one finder, nothing loaded
    import deepspeed          -> _EngineFinder   two methods of its engine now look for the block, and a start that
                                                 fails is undone; nothing loaded yet
    an engine with the block  -> the rest of ds_hybridep is imported, and attaches itself
    the methods are missing   -> logged once; an engine whose ds_config has the block raises, others are untouched

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
_NO_EFFECT = f'a "{_BLOCK}" block in ds_config has NO effect; call ds_hybridep.attach in the script'
# Rows of the table in deepspeed/patches.py.  Their replacements are in deepspeed/start.py.
_METHODS = ("_configure_distributed_model", "_configure_expert_parallel")
# What ds_to_universal asks for the parameters of experts.
_UNIVERSAL_MODULE = "deepspeed.checkpoint.autoep_universal"
_CHECKPOINT_MODULE = "deepspeed.checkpoint.deepspeed_checkpoint"
# The program ds_report.
_REPORT_MODULE = "deepspeed.env_report"
# How torch, for DeepSpeed too, lets one process compile kernels while the others wait.
_LOCK_MODULE = "torch.utils.file_baton"
_LOCK_NOTICE_S = 30.0


def install() -> None:
    """Arrange that DeepSpeed's engine is patched when it is imported.  Idempotent; never raises."""
    try:
        if any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
            return
        sys.meta_path.insert(0, _EngineFinder())
        for name in (_ENGINE_MODULE, _LOCK_MODULE):
            if name in sys.modules:
                _patch(sys.modules[name])
    except Exception as reason:  # noqa: BLE001  whatever happens here must not break `import torch`
        _log_failure(reason, _NO_EFFECT)


class _EngineFinder:
    """Meta-path finder for DeepSpeed's modules that are patched.  It returns the spec that another finder gives."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname not in (_ENGINE_MODULE, _UNIVERSAL_MODULE, _CHECKPOINT_MODULE, _REPORT_MODULE, _LOCK_MODULE):
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                if spec.loader is not None:
                    _patch_after(spec.loader)
                return spec
        return None


def _patch_after(loader: "Any") -> None:
    """Make `loader` patch the module once, after it has executed it.  Then the loader is as it was."""

    def exec_module(module: "ModuleType") -> None:
        del loader.exec_module
        loader.exec_module(module)
        _patch(module)

    try:
        loader.exec_module = exec_module
    except AttributeError as reason:  # a foreign loader that takes no attributes
        _log_failure(reason, _NO_EFFECT)


def _patch(module: "ModuleType") -> None:
    """Let engines of `module` look for the block.  If that is impossible, engines with the block are refused."""
    from functools import partial

    if module.__name__ == _UNIVERSAL_MODULE:
        _wrap(module, "get_autoep_zero12_expert_param_info", _with_adapters)
        return
    if module.__name__ == _CHECKPOINT_MODULE:
        _wrap(getattr(module, "DeepSpeedCheckpoint", None), "_lightweight_autoep_metadata", _with_marks)
        return
    if module.__name__ == _REPORT_MODULE:
        _wrap(module, "op_report", _with_kernels)
        return
    if module.__name__ == _LOCK_MODULE:
        _wrap(getattr(module, "FileBaton", None), "wait", _wait_for_lock)
        return
    engine_class = getattr(module, "DeepSpeedEngine", None)
    missing = [name for name in _METHODS if not hasattr(engine_class, name)]
    if not missing:
        for name in _METHODS:
            _wrap(engine_class, name, partial(_join, name))
        _wrap(engine_class, "__init__", _start)
        return
    reason = AttributeError(f"DeepSpeedEngine has no {' and no '.join(missing)}")
    _log_failure(reason, f'a ds_config with a "{_BLOCK}" block will be refused, others are not affected')
    if engine_class is not None:
        _wrap(engine_class, "__init__", partial(_refuse, reason))


def _wrap(owner: "Any", name: str, replacement: "Any") -> None:
    """Replace a method or function, if it is there, by one that calls `replacement(original, ...)`."""
    from functools import wraps

    if not hasattr(owner, name):
        return
    original = getattr(owner, name)

    @wraps(original)
    def call(*args: "Any", **kwargs: "Any") -> "Any":
        return replacement(original, *args, **kwargs)

    is_static = isinstance(vars(owner).get(name), staticmethod)
    setattr(owner, name, staticmethod(call) if is_static else call)


def _join(name: str, original: "Any", engine: "Any", *args: "Any", **kwargs: "Any") -> "Any":
    if not _is_on(engine._config):
        if name == _METHODS[0]:
            _warn_of_misspelling(engine)
        return original(engine, *args, **kwargs)
    from ds_hybridep.deepspeed import start

    replacement = start.configure_distributed_model if name == _METHODS[0] else start.configure_expert_parallel
    return replacement(original, engine, *args, **kwargs)


def _with_marks(original: "Any", model_state: "Any") -> "Any":
    """Keep what a checkpoint says of adapters of experts, which DeepSpeed leaves out."""
    found = original(model_state)
    for short, layer in zip(found, model_state["ds_autoep_layers"], strict=True) if isinstance(found, list) else ():
        if factors := (layer.get("expert_placement") or {}).get("hybridep_factors"):
            short["hybridep_factors"] = factors
    return found


def _with_adapters(original: "Any", layers: "Any") -> "Any":
    """Let ds_to_universal see the adapters of experts where a checkpoint says that it has any."""
    found = original(layers)
    for layer in layers:
        prefix = layer["expert_key_prefix"]
        if factors := layer.get("hybridep_factors", ()):
            # The weights below adapters are frozen, and ZeRO has no masters of them.
            about = [found.pop(f"{prefix}.{name}") for name in ("w1", "w2", "w3")][0]
            about.pop("affine_map", None)
            found.update({f"{prefix}.{name}": dict(about) for name in factors})
    return found


def _with_kernels(original: "Any", *args: "Any", **kwargs: "Any") -> None:
    """Let ds_report list the kernels beside DeepSpeed's own."""
    from ds_hybridep.op_builder import HybridEPBuilder

    names = original.__globals__
    devices = ("cpu", "cuda") if names["get_accelerator"]().device_name() == "cuda" else ("cpu",)
    builders = {f"hybridep_{device}": HybridEPBuilder(device) for device in devices}
    before = names["ALL_OPS"], names["installed_ops"]
    names["ALL_OPS"] = before[0] | builders
    names["installed_ops"] = before[1] | {name: one.is_ahead_of_time() for name, one in builders.items()}
    try:
        original(*args, **kwargs)
    finally:
        names["ALL_OPS"], names["installed_ops"] = before


def _wait_for_lock(original: "Any", baton: "Any") -> None:
    """Say so if the process that made the lock is gone: torch would wait for it for ever, without a word."""
    import os
    import time

    path, since, was_held = baton.lock_file_path, time.monotonic(), True
    while os.path.exists(path):
        if time.monotonic() - since > _LOCK_NOTICE_S:
            if "deepspeed" not in sys.modules or _is_open_somewhere(path):
                since, was_held = time.monotonic(), True
            elif was_held:  # a builder that ends closes the file before it removes it: look once more
                was_held = False
            else:
                _warn_of_lock(path)
                break
        time.sleep(baton.wait_seconds)
    original(baton)


def _warn_of_lock(path: str) -> None:
    import logging

    text = (
        "this process has waited %.0f s for the lock %s of a build of kernels, which no process of this host holds: a "
        "build that was interrupted leaves it; if no other host is building there, delete the file"
    )
    logging.getLogger("ds_hybridep").warning(text, _LOCK_NOTICE_S, path)


def _is_open_somewhere(path: str) -> bool:
    """Return whether a process of this host, as far as this one may look, has the file open."""
    import os

    real = os.path.realpath(path)
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with os.scandir(f"/proc/{process}/fd") as files:
                if any(os.path.realpath(file.path) == real for file in files):
                    return True
        except OSError:  # it has ended, or belongs to another user
            continue
    return False


def _warn_of_misspelling(engine: "Any") -> None:
    """Say so on rank 0 if ds_config has a key that looks like the block's: DeepSpeed takes any key without a word."""
    ds_config = getattr(engine._config, "_param_dict", None)
    if not isinstance(ds_config, dict) or _BLOCK in ds_config or getattr(engine, "global_rank", 0) != 0:
        return
    import logging
    from difflib import get_close_matches

    for key in ds_config:
        plain = "".join(filter(str.isalnum, str(key).lower()))
        if get_close_matches(_BLOCK, [plain], cutoff=0.86) or any(word in plain for word in (_BLOCK, "hybridexpert")):
            text = 'ds_config has a key "%s", which has no effect; if it is meant for ds_hybridep, its name is "%s"'
            logging.getLogger("ds_hybridep").warning(text, key, _BLOCK)


def _start(original: "Any", engine: "Any", *args: "Any", **kwargs: "Any") -> None:
    """Replaces `__init__`: if it fails after the engine has joined, undo that."""
    try:
        original(engine, *args, **kwargs)
        if (start := _start_of(engine)) is not None:
            start.finish_start(engine)
    except BaseException:
        if (start := _start_of(engine)) is not None:
            start.undo_start(engine)
        raise


def _start_of(engine: "Any") -> "Any":
    """Return the module that made the engine join, None if it did not."""
    if "_hybridep_attachment" not in vars(engine):
        return None
    from ds_hybridep.deepspeed import start

    return start


def _refuse(reason: Exception, original: "Any", *args: "Any", **kwargs: "Any") -> None:
    """Replaces `__init__`, so that the block is not silently ignored."""
    if any(map(_is_on, (*args, *kwargs.values()))):
        raise RuntimeError(
            f'ds_config has a "{_BLOCK}" block, but ds_hybridep could not join this DeepSpeed ({reason}); install '
            f"a version of DeepSpeed that it supports (see its pyproject.toml), or set "
            f'"{_BLOCK}": {{"enabled": false}} to train without it'
        ) from reason
    original(*args, **kwargs)


def _is_on(config: "Any") -> bool:
    """Whether `config`, a ds_config or DeepSpeed's object for one, has the block and does not switch it off."""
    ds_config = getattr(config, "_param_dict", config)
    block = ds_config.get(_BLOCK) if isinstance(ds_config, dict) else None
    return block is not None and not (isinstance(block, dict) and block.get("enabled") is False)


def _log_failure(reason: Exception, consequence: str) -> None:
    """Log the failure.  A warning could be turned into an error, which must not happen here."""
    import logging

    text = "ds_hybridep could not join DeepSpeed and is not active: %s: %s; %s"
    logging.getLogger("ds_hybridep").error(text, type(reason).__name__, reason, consequence, exc_info=reason)
