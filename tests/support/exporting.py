# SPDX-License-Identifier: Apache-2.0
"""Trains small models whose checkpoints are exported, and says what the engine held."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import deepspeed
import torch
import training
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param
from parity import Case, loss_of, model_of, snapshot, use_expert_groups_of
from toy_model import ToyConfig, batch

import ds_hybridep
from ds_hybridep.commands.main import main

SHAPE = ToyConfig(num_experts=4, k=2, ep_size=2)
LEARNING_RATE = 1e-2
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

Adapters = Literal["", "attention", "experts"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, and what is saved of it in `folder`: base/, checkpoint/ and, where asked for, live/."""

    folder: str
    family: str = "qwen3_moe"
    shape: ToyConfig = SHAPE
    world_size: int = 2
    ep_size: int = 2
    zero_stage: int = 1
    dtype: Literal["fp32", "bf16"] = "fp32"
    with_block: bool = True
    adapters: Adapters = ""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    without_frozen: bool = False  # in the checkpoint, as the Trainer saves models of peft
    live: bool = False
    steps: int = 2

    @property
    def case(self) -> Case:
        """The training as other tests describe it."""
        levels = (("dc", 2, 1), ("gpu", self.world_size // 2, 1))
        toy = replace(self.shape, ep_size=self.ep_size)
        return Case(
            levels=levels if self.world_size > 2 else levels[:1],
            toy=toy,
            family=self.family,
            dtype=self.dtype,
            zero_stage=self.zero_stage,
            optimizer=self.optimizer,
        )

    def ds_config(self) -> dict[str, Any]:
        """What the user would write."""
        config = self.case.ds_config(with_block=self.with_block)
        if self.world_size == 1:
            del config["expert_parallel"]
        elif self.adapters and not self.with_block:  # AutoEP alone does not find layers below peft
            config["expert_parallel"]["moe_layer_pattern"] = r"base_model\.model\.model\.layers\.\d+\.mlp"
        return config


def peft_model(model: Any, adapters: Adapters) -> Any:
    """The model with adapters that change it from the start."""
    import peft

    targets = BOTH if adapters == "experts" else None
    modules = ["q_a_proj", "kv_b_proj"] if model.config.model_type == "deepseek_v3" else ["q_proj", "o_proj"]
    settings = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=modules, target_parameters=targets, init_lora_weights=False
    )
    return peft.get_peft_model(model, settings)


def base_of(job: Job) -> Any:
    """The model that the training begins from; rank 0 saves it."""
    model = model_of(job.case, seed=1).to(torch.bfloat16 if job.dtype == "bf16" else torch.float32)
    model.config.output_router_logits = False
    if dist.get_rank() == 0:
        model.save_pretrained(f"{job.folder}/base")
    return model


@contextmanager
def engine_of(job: Job, model: Any = None, ds_config: Any = None) -> Iterator[Any]:
    """The engine of a job; `model`: another one than the base, with adapters if there are to be any."""
    use_expert_groups_of(job.case)
    if model is None:
        model = base_of(job)
        model = peft_model(model, job.adapters) if job.adapters else model
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=ds_config or job.ds_config())
    try:
        yield engine
    finally:
        engine.destroy()
        del engine, model, trainable
        gc.collect()


def train(engine: Any, job: Job, first: int, steps: int) -> list[float]:
    """Losses of some steps; each rank's data depends on the number of ranks not at all."""
    losses = []
    for step in range(first, first + steps):
        place = {"seed": 1, "step": step, "micro_step": 0, "rank": 0}
        loss = loss_of(engine, job.case, *batch(job.case.toy, num_sequences=4, **place))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def tokens_of(job: Job) -> torch.Tensor:
    """A batch that is not trained on."""
    return batch(job.case.toy, seed=2, step=0, micro_step=0, rank=0, num_sequences=4)[0]


@torch.no_grad()
def logits_of(engine: Any, job: Job) -> torch.Tensor:
    """What the engine computes for a batch that is not trained on."""
    engine.eval()
    logits = engine(input_ids=tokens_of(job)).logits.float()
    engine.train()
    return logits


def held_by(engine: Any) -> dict[str, tuple[list[int] | None, torch.Tensor]]:
    """This rank's parameters in fp32, with the experts that they are of; masters where there are any."""
    from ds_hybridep.deepspeed.autoep import experts_of

    held = {}
    layers = {f"{name}.experts.": layer for name, layer in engine.module.named_modules() if hasattr(layer, "ep_rank")}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter]):
            value = (parameter if master is None else master).detach().float().clone()
        layer = next((layer for prefix, layer in layers.items() if name.startswith(prefix)), None)
        held[name] = (None if layer is None else experts_of(layer, layer.ep_rank), value)
    return held


def run(job: Job) -> dict[str, Any]:
    """Train and save.  Returns what this rank's engine held and computed, and the losses of going on."""
    folder = Path(job.folder)
    with engine_of(job) as engine:
        losses = train(engine, job, 0, job.steps)
        engine.save_checkpoint(str(folder / "checkpoint"), exclude_frozen_parameters=job.without_frozen)
        found = {"held": held_by(engine), "logits": logits_of(engine, job), "losses": losses}
        if job.live:
            ds_hybridep.save_pretrained(engine, folder / "live")
        found["later"] = train(engine, job, job.steps, 2)
    return found


def exported(job: Job, *options: str, name: str = "out") -> Path:
    """The folder that the command writes."""
    folder = Path(job.folder)
    arguments = ["export", str(folder / "checkpoint"), "--model", str(folder / "base"), "--out", str(folder / name)]
    assert main([*arguments, *options]) == 0
    return folder / name


def save_in_all_ways(job: Job) -> dict[str, Any]:
    """Errors of what must not write, by call, and losses after saving and without it."""
    import transformers.trainer  # noqa: F401 (hybridep looks for it where an engine starts)

    folder = Path(job.folder)
    errors = {}
    with engine_of(job) as engine:
        train(engine, job, 0, job.steps)
        try:
            engine.module.save_pretrained(folder / "module")
        except RuntimeError as error:
            errors["module"] = str(error)
        engine.save_16bit_model(str(folder / "sixteen"))
        trainer = trainer_of(engine, folder / "trainer")
        trainer.save_model()
        trainer.save_state()
        ds_hybridep.save_pretrained(engine, folder / "live")
        try:
            ds_hybridep.save_pretrained(engine, folder / "live" / "config.json")
        except RuntimeError as error:
            errors["file"] = str(error)
        saved = train(engine, job, job.steps, 2)
    with engine_of(job) as engine:
        kept = train(engine, job, 0, job.steps + 2)[job.steps :]
        ds_hybridep.detach(engine)
        errors["detached"] = str("save_pretrained" in vars(engine.module))
    return {"errors": errors, "losses": (saved, kept)}


def trainer_of(engine: Any, folder: Path, kind: Any = None) -> Any:
    """What a Trainer is while it trains, as far as saving goes."""
    from transformers.trainer import Trainer
    from transformers.trainer_callback import TrainerState

    trainer = (kind or Trainer).__new__(kind or Trainer)
    trainer.deepspeed = trainer.model_wrapped = engine
    trainer.model = engine.module
    is_first = dist.get_rank() == 0
    trainer.args = SimpleNamespace(
        output_dir=str(folder), should_save=is_first, push_to_hub=False, process_index=dist.get_rank()
    )
    trainer.state = TrainerState(global_step=engine.global_steps)
    trainer.processing_class = trainer.data_collator = None
    return trainer


def run_classic(case: Case, folder: str) -> dict[str, torch.Tensor]:
    """Train a model with deepspeed.moe.layer.MoE, save a checkpoint, and return its masters by global name."""
    with training.engine_of(case, with_block=True) as engine:
        training.train(engine, case, 0, 2)
        engine.save_checkpoint(folder)
        return snapshot(case, engine.module)
