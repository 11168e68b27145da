# SPDX-License-Identifier: Apache-2.0
"""What people call to save a model while it trains; all of it runs on the ranks of a pool."""

import contextlib
import copy
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist
from exporting import BOTH, Job, base_of, engine_of, logits_of, peft_model, tokens_of, train, trainer_of
from moe_refs import come_after
from parity import use_expert_groups_of
from toy_model import global_name
from training import world2

import ds_hybridep
from ds_hybridep.runtime.log import warn_once

ALONE_S = 0.5  # how long a rank waits that saves alone


def said_by(call: Any, *args: Any, **kwargs: Any) -> str:
    """The error of a call, empty if it has none."""
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def accelerated(job: Job) -> Iterator[tuple[Any, Any]]:
    """An Accelerator and the engine that it has made of the job's model."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DummyOptim

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    use_expert_groups_of(job.case)
    config = job.ds_config()
    model = base_of(job)
    model = peft_model(model, job.adapters) if job.adapters else model
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")  # on CPUs; otherwise each rank would be a job of its own
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    engine, _ = accelerator.prepare(model, DummyOptim(model.parameters()))
    try:
        yield accelerator, engine
    finally:
        engine.destroy()
        del engine, model, accelerator
        gc.collect()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def save_with_accelerate(job: Job) -> dict[str, Any]:
    """Save in every way that accelerate's documents name.  Returns logits, and what was said."""
    folder, said = Path(job.folder), {}
    is_first = dist.get_rank() == 0
    with accelerated(job) as (accelerator, engine):
        train(engine, job, 0, job.steps)
        found: dict[str, Any] = {"logits": logits_of(engine, job), "said": said}
        said["save_model"] = said_by(accelerator.save_model, engine, folder / "save_model")
        whole = accelerator.get_state_dict(engine)
        found["is there"] = whole is not None
        unwrapped = accelerator.unwrap_model(engine)
        said["recipe"] = said_by(
            unwrapped.save_pretrained,
            folder / "recipe",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(engine),
        )
        if is_first:
            said["first only"] = said_by(unwrapped.save_pretrained, folder / "first", state_dict=whole)
            unwrapped.config.save_pretrained(folder / "save_model")
        said["own part"] = said_by(unwrapped.save_pretrained, folder / "part")
        said["own state"] = said_by(unwrapped.save_pretrained, folder / "part", state_dict=unwrapped.state_dict())
        engine.save_16bit_model(folder / "sixteen", "weights.bin")
        found["later"] = train(engine, job, job.steps, 1)
    return found


def logged(action: Any) -> list[str]:
    """What hybridep logs during a call."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ds_hybridep")
    logger.addHandler(handler)
    try:
        action()
    finally:
        logger.removeHandler(handler)
    return lines


def save_adapters(job: Job) -> dict[str, Any]:
    """Save a model whose experts have adapters in ways that peft's documents name."""
    import peft

    folder, said = Path(job.folder), {}
    with accelerated(job) as (accelerator, engine):
        train(engine, job, 0, job.steps)
        found: dict[str, Any] = {"logits": logits_of(engine, job), "said": said}
        model = accelerator.unwrap_model(engine)
        said["peft's state"] = said_by(peft.get_peft_model_state_dict, model)
        said["one rank"] = said_by(model.save_pretrained, folder / "one")
        whole = accelerator.get_state_dict(engine)
        said["recipe"] = said_by(
            model.save_pretrained,
            folder / "recipe",
            is_main_process=accelerator.is_main_process,
            state_dict=whole,
        )
        if whole is not None:
            adapters = peft.get_peft_model_state_dict(model, state_dict=whole)
            found["factors"] = {name: tuple(one.shape) for name, one in adapters.items() if ".experts." in name}
        found["trained"] = len(engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True) or ())
        ds_hybridep.save_pretrained(engine, folder / "live")
    return found


def save_on_one_rank(job: Job) -> dict[str, Any]:
    """Rank 0 saves alone, in all ways; then all ranks do."""
    found: dict[str, Any] = {}
    with engine_of(job) as engine, contextlib.ExitStack() as alone:
        train(engine, job, 0, 1)
        if dist.get_rank() == 0:
            # A short limit for these two calls only: what all ranks do may take longer on a busy machine.
            runtime = engine.__dict__["_hybridep_attachment"].runtime
            short = runtime.config.model_copy(update={"timeout_s": ALONE_S})
            alone.enter_context(mock.patch.object(runtime, "config", short))
            found["save_pretrained"] = said_by(ds_hybridep.save_pretrained, engine, f"{job.folder}/one")
            found["save_16bit_model"] = said_by(engine.save_16bit_model, f"{job.folder}/sixteen")
            alone.close()
        come_after(0)
        found["together"] = said_by(ds_hybridep.save_pretrained, engine, f"{job.folder}/live")
        warn_once.cache_clear()  # other tests ran in this process
        found["log"] = logged(engine.module.state_dict)
        found["quiet"] = logged(lambda: engine.save_checkpoint(f"{job.folder}/checkpoint"))
        found["no folder"] = said_by(engine.save_checkpoint, f"{job.folder}/file/checkpoint")
        found["losses"] = train(engine, job, 1, 1)
    return found


class WithHead(torch.nn.Module):
    """A model of transformers inside another module, as for values of tokens."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.policy, self.config = inner, inner.config
        self.value = torch.nn.Linear(inner.config.hidden_size, 1)

    def forward(self, **inputs: Any) -> Any:
        return self.policy(**inputs)


def save_wrapped(job: Job) -> dict[str, Any]:
    """Write the model of transformers that another module contains, and the state of both."""
    wrapped = WithHead(base_of(job))
    config = job.ds_config()
    config["expert_parallel"] |= {"moe_layer_pattern": r"policy\.model\.layers\.\d+\.mlp", "preset_model": job.family}
    with engine_of(job, wrapped, ds_config=config) as engine:
        found: dict[str, Any] = {"logits": logits_of(engine, job)}
        found["log"] = logged(lambda: ds_hybridep.save_pretrained(engine, f"{job.folder}/live"))
        engine.save_16bit_model(f"{job.folder}/sixteen")
    return found


def train_with_new_tokens(job: Job) -> dict[str, Any]:
    """Add tokens, train their embeddings in modules_to_save beside adapters, and export."""
    import peft

    model = base_of(job)
    model.resize_token_embeddings(job.case.toy.vocab + 3)
    settings = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=BOTH if job.adapters == "experts" else None,
        modules_to_save=["embed_tokens", "lm_head"],
        init_lora_weights=False,
    )
    with engine_of(job, peft.get_peft_model(model, settings)) as engine:
        train(engine, job, 0, job.steps)
        found = {"logits": logits_of(engine, job)}
        ds_hybridep.save_pretrained(engine, f"{job.folder}/adapters")
        ds_hybridep.save_pretrained(engine, f"{job.folder}/merged", form="merged")
        engine.save_checkpoint(f"{job.folder}/checkpoint", exclude_frozen_parameters=job.without_frozen)
    return found


def save_by_a_trainer_of_its_own(job: Job) -> dict[str, Any]:
    """A Trainer with a `_save` of its own, and one with a `save_model` of its own."""
    from transformers.trainer import Trainer

    class OwnSave(Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            self.model.save_pretrained(output_dir, state_dict=state_dict)
            (Path(output_dir) / "own").touch()

    class OwnSaveModel(Trainer):
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            if self.args.should_save:
                self.model.save_pretrained(output_dir)

    found: dict[str, Any] = {}
    with accelerated(job) as (accelerator, engine):
        found["logits"] = logits_of(engine, job)
        for kind in (OwnSave, OwnSaveModel):
            trainer = trainer_of(engine, Path(job.folder), kind)
            trainer.accelerator, trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled = accelerator, True, False
            found[kind.__name__] = said_by(trainer.save_model, f"{job.folder}/{kind.__name__}")
    return found


def save_classic(folder: str) -> dict[str, Any]:
    """Parameters of this rank by their names in the whole model; the same in a file, and by accelerate."""
    from accelerate import Accelerator
    from training import engine_of as engine_of_classic
    from training import train as train_classic

    case = world2()
    with engine_of_classic(case, with_block=True) as engine:
        train_classic(engine, case, 0, 1)
        engine.save_16bit_model(folder)
        whole = Accelerator.get_state_dict(None, engine)  # looks only at the model
        return {
            "parameters": {
                global_name(name, ep_rank=dist.get_rank(), num_local_experts=case.toy.num_experts // 2): value
                for name, value in engine.module.state_dict().items()
            },
            "is there": whole is not None,
        }


def save_a_reward_model(job: Job) -> torch.Tensor:
    """Write a model with a head for one label.  Returns what the engine computes."""
    from transformers import Qwen3MoeForSequenceClassification

    config = copy.deepcopy(base_of(job).config)
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(3)
    with engine_of(job, Qwen3MoeForSequenceClassification(config)) as engine:
        engine.eval()
        with torch.no_grad():
            scores = engine(input_ids=tokens_of(job)).logits.float()
        ds_hybridep.save_pretrained(engine, f"{job.folder}/live")
    return scores
