# SPDX-License-Identifier: Apache-2.0
"""Saves and loads states of codecs, adapters of experts and the plan, beside DeepSpeed's own checkpoints."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_hybridep.deepspeed import saving
from ds_hybridep.deepspeed.attachment import Attachment
from ds_hybridep.deepspeed.autoep import adapted_layers
from ds_hybridep.deepspeed.engine_view import view_of
from ds_hybridep.errors import ConfigError
from ds_hybridep.runtime import whole_checkpoints
from ds_hybridep.runtime.log import log_dist, warn_once, write_json
from ds_hybridep.transport.agreement import agree, announcing_failure, result_of_rank_0

PLAN_FILE = "hybridep_plan.json"
ADAPTER_CONFIG = "hybridep_adapter_config.json"  # what peft writes as adapter_config.json
DEEPSPEED_STATES = {
    "module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd",
    "lr_scheduler", "optimizer", "sparse_tensor_module_names", "buffer_names", "param_shapes", "frozen_param_shapes",
    "shared_params", "frozen_param_fragments", "ds_config", "ds_version", "global_samples",
}  # fmt: skip
UNIVERSAL = "latest_universal"  # DeepSpeed's file that names the newest universal checkpoint


def save(
    attachment: Attachment, original: Callable[..., Any], save_dir: str, tag: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `engine.save_checkpoint`."""
    engine, planner = attachment.engine, attachment.planner
    tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    folder, transport = Path(save_dir) / tag, attachment.runtime.transport
    is_first = transport.rank == 0
    # Engines that write in the background do not say when they have finished.
    marks = is_first and not engine.checkpoint_engine.is_decoupled()
    mark = folder / whole_checkpoints.MARK  # from before the first rank writes until all have written
    with announcing_failure():
        if marks:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
    agree({"saves": tag}, transport.timeout_s, remedy=saving.remedy_for("engine.save_checkpoint"))
    # Ours come first: DeepSpeed ends with the file that names the newest checkpoint, and a barrier.
    with announcing_failure():
        attachment.runtime.codec_state.save(folder, engine.global_steps)
        if attachment.sites is not None:
            attachment.sites.save(folder)
        if adapted := adapted_layers(attachment.layers):
            from ds_hybridep.deepspeed import adapters

            adapters.save(adapted, folder, engine.global_steps)
        config = next(map(saving.adapter_config_of, saving.models_in(engine.module).values()), None)
        if config is not None and is_first:
            write_json(folder / ADAPTER_CONFIG, config.to_dict(), default=_plain)
        if planner is not None and is_first:
            write_json(folder / PLAN_FILE, planner.record(attachment.runtime))
    agree({"saved beside": tag}, transport.timeout_s)  # in DeepSpeed's barriers nobody would hear of a failure
    saved = original(save_dir, tag, *args, **kwargs)
    with announcing_failure():
        if marks:
            mark.unlink(missing_ok=True)
    agree({"saved": tag}, transport.timeout_s)  # a rank that returned earlier could find the mark
    return saved


def load(attachment: Attachment, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `engine.load_checkpoint`.  Raises AgreementError if only some ranks find a checkpoint."""
    engine, timeout_s = attachment.engine, attachment.runtime.transport.timeout_s
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    # Only rank 0 looks: file systems may show the other ranks an older state.
    tag, why_none = result_of_rank_0(partial(_choose, Path(given["load_dir"]), given["tag"], engine), timeout_s)
    if why_none and given["tag"] is not None:
        raise ConfigError(why_none)
    given["tag"] = tag
    if attachment.sites is not None and tag is not None and not why_none:
        if attachment.sites.keeps_state(folder := Path(given["load_dir"]) / tag):
            return str(folder), _client_state(engine, given["load_dir"], tag)
    with announcing_failure():
        loaded = _load_weights(attachment, original, call) if not why_none else (None, None)
    # Here all ranks learn that one has failed, no matter what each of them loads next.
    agree({"is a checkpoint found": loaded[0] is not None}, timeout_s)
    if loaded[0] is None:
        return loaded
    has_state = given["load_optimizer_states"] and not given["load_module_only"]
    if not has_state:
        attachment.runtime.codec_state.forget()
    else:
        folder, planner = Path(loaded[0]).parent, attachment.planner
        if planner is not None and (recalled := planner.recall(folder / PLAN_FILE)) is not None:
            attachment.runtime.forget_gradients()  # of the run before: the switch must not hand them over
            attachment.switch(recalled, "the plan of the checkpoint")
        if lost := attachment.runtime.codec_state.load(folder, engine.global_steps):
            log_dist(f"hybridep: {lost}", ranks=[0])
    if attachment.sites is not None:
        attachment.sites.after_load(Path(loaded[0]).parent if has_state else None)
    attachment.ship_partitioned()
    return loaded


def _choose(folder: Path, tag: str | None, engine: Any) -> tuple[str | None, str]:
    """Return, on rank 0, the tag to load (by default the newest whole checkpoint), and why it must not be loaded."""
    if tag is not None:
        return str(tag), whole_checkpoints.why_not(folder / str(tag))
    if engine.load_universal_checkpoint():
        return whole_checkpoints.named(folder / UNIVERSAL), ""
    chosen, skipped = whole_checkpoints.newest(folder)
    for one in skipped:
        warn_once(f"checkpoint {folder / one} is incomplete (its saving was interrupted): skipped")
    return chosen, "all are incomplete" if skipped and chosen is None else ""


def _load_weights(attachment: Attachment, original: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    engine, adapted = attachment.engine, adapted_layers(attachment.layers)
    loaded = original(*call.args, **call.kwargs)
    if loaded[0] is not None and adapted and not engine.load_universal_checkpoint():
        from ds_hybridep.deepspeed import adapters

        adapters.load(adapted, Path(loaded[0]).parent)
        if call.arguments["load_module_only"]:
            view_of(engine).refresh_masters()  # DeepSpeed's own call came before the factors were loaded
    return loaded


def _client_state(engine: Any, load_dir: str, tag: str) -> dict[str, Any]:
    """Return what a script has saved of its own in a checkpoint that is not loaded; nothing if it holds objects."""
    names = engine._get_all_ckpt_names(load_dir, tag)
    try:
        saved = torch.load(names[0], map_location="cpu", weights_only=True, mmap=True) if names else {}
    except Exception as error:  # noqa: BLE001 (whatever torch finds wrong with an object in it)
        warn_once(f"the client_state of {names[0]} is not returned: {str(error).splitlines()[0]}")
        saved = {}
    return {key: value for key, value in saved.items() if key not in DEEPSPEED_STATES}


def _plain(value: Any) -> Any:
    """Return a value of a peft config that JSON does not know."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
