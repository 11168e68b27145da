# SPDX-License-Identifier: Apache-2.0
"""What people do, as they write it.  table.py has the rows."""

import copy
from typing import Any

import torch
from deepspeed import comm as dist
from torch import nn

from works_with.everyday import EPS, LEARNING_RATE, SHAPE, Job, read_folder

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SUMS = [(one, two) for one in range(8) for two in range(8)]


# -- transformers.Trainer ----------------------------------------------------------------------------------------


def trainer_full(job: Job) -> dict[str, Any]:
    trainer = job.trainer()
    trainer.train()
    return job.trained(trainer)


def trainer_without_optimizer(job: Job) -> dict[str, Any]:
    trainer = job.trainer(arguments=job.arguments(deepspeed=job.ds_config(optimizer=False)))
    trainer.train()
    return job.trained(trainer)


def trainer_with_auxiliary_loss(job: Job) -> dict[str, Any]:
    trainer = job.trainer(job.model(output_router_logits=True, router_aux_loss_coef=0.5))
    trainer.train()
    return job.trained(trainer)


def trains_twice(job: Job) -> dict[str, Any]:
    trainer = job.trainer()
    trainer.train()
    trainer.train()
    return job.trained(trainer)


def two_trainers(job: Job) -> dict[str, Any]:
    model = job.model()
    first = job.trainer(model)
    first.train()
    second = job.trainer(model, train_dataset=job.examples(seed=1))
    second.train()
    return job.trained(second)


def best_model_at_end(job: Job) -> dict[str, Any]:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    arguments = job.arguments(load_best_model_at_end=True, **settings)
    trainer = job.trainer(arguments=arguments, eval_dataset=job.examples(count=16, seed=2))
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return job.trained(trainer, eval_losses=[*losses, trainer.evaluate()["eval_loss"]])


def resume(job: Job) -> dict[str, Any]:
    def trainer(steps: int) -> Any:
        arguments = job.arguments(max_steps=steps, save_strategy="steps", save_steps=2)
        return job.trainer(arguments=arguments)

    trainer(2).train()
    resumed = trainer(4)
    resumed.train(resume_from_checkpoint=True)
    return job.trained(resumed)


def trainer_checkpointing(job: Job) -> dict[str, Any]:
    trainer = job.trainer(arguments=job.arguments(gradient_checkpointing=True, gradient_accumulation_steps=2))
    trainer.train()
    return job.trained(trainer)


def trainer_torch_compile(job: Job) -> dict[str, Any]:
    trainer = job.trainer(arguments=job.arguments(torch_compile=True, torch_compile_backend="eager"))
    trainer.train()
    return job.trained(trainer)


def reward_classification(job: Job) -> dict[str, Any]:
    import transformers

    model = job.model()
    torch.manual_seed(3)
    reward = transformers.Qwen3MoeForSequenceClassification(copy.deepcopy(model.config))
    data = [{"input_ids": one["input_ids"], "labels": int(one["input_ids"].sum() % 2)} for one in job.examples()]
    trainer = job.trainer(reward, train_dataset=data)
    trainer.train()
    return job.trained(trainer)


# -- accelerate --------------------------------------------------------------------------------------------------


def _accelerated(job: Job) -> tuple[Any, Any, list[float]]:
    accelerator = job.accelerator()
    from accelerate.utils import DummyOptim
    from torch.utils.data import DataLoader

    model = job.model()
    loader = DataLoader(job.examples(), batch_size=2)
    engine, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters(), lr=LEARNING_RATE), loader)
    losses = []
    for batch, _ in zip(loader, range(3), strict=False):
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return accelerator, engine, losses


def accelerate_loop(job: Job) -> dict[str, Any]:
    _, engine, losses = _accelerated(job)
    return job.found(engine, losses)


def accelerate_client_optimizer(job: Job) -> dict[str, Any]:
    accelerator = job.accelerator(job.ds_config(auto=False, optimizer=False))
    from torch.utils.data import DataLoader

    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    loader = DataLoader(job.examples(), batch_size=2)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch, _ in zip(loader, range(3), strict=False):
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return job.found(engine, losses)


def accelerator_save_model(job: Job) -> dict[str, Any]:
    accelerator, engine, losses = _accelerated(job)
    accelerator.save_model(engine, str(job.folder / "saved"))
    return {"losses": losses, "weights": read_folder(job.folder / "saved") if job.is_first else {}}


def accelerator_get_state_dict(job: Job) -> dict[str, Any]:
    accelerator, engine, losses = _accelerated(job)
    state = accelerator.get_state_dict(engine)
    if job.is_first:
        accelerator.unwrap_model(engine).save_pretrained(str(job.folder / "saved"), state_dict=state)
    return {"losses": losses, "weights": read_folder(job.folder / "saved") if job.is_first else {}}


def unwrapped_save_pretrained(job: Job) -> dict[str, Any]:
    accelerator, engine, losses = _accelerated(job)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(engine).save_pretrained(str(job.folder / "saved"))
    return {"losses": losses, "weights": read_folder(job.folder / "saved") if job.is_first else {}}


def accelerator_save_state(job: Job) -> dict[str, Any]:
    accelerator, engine, losses = _accelerated(job)
    accelerator.save_state(str(job.folder / "state"))
    again = job.steps(engine, first=10)
    accelerator.load_state(str(job.folder / "state"))
    assert job.steps(engine, first=10) == again
    return job.found(engine, losses + again)


# -- a loop of one's own -----------------------------------------------------------------------------------------


def loop_full(job: Job) -> dict[str, Any]:
    with job.engine() as engine:
        return job.found(engine, job.steps(engine))


def client_optimizer_with_groups(job: Job) -> dict[str, Any]:
    model = job.model()
    decayed = [p for name, p in model.named_parameters() if "norm" not in name and "experts" not in name]
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
        {"params": experts, "weight_decay": 0.0, "lr": LEARNING_RATE / 2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS)
    with job.engine(model, optimizer) as engine:
        return job.found(engine, job.steps(engine))


def offload_states(job: Job) -> dict[str, Any]:
    with job.engine() as engine:
        losses = job.steps(engine)
        engine.offload_states()
        engine.reload_states()
        return job.found(engine, losses + job.steps(engine, first=3))


def offload_optimizer(job: Job) -> dict[str, Any]:
    offload = {"offload_optimizer": {"device": "cpu"}}
    with job.engine(zero_optimization=offload, zero_force_ds_cpu_optimizer=False) as engine:
        return job.found(engine, job.steps(engine))


def torch_autocast(job: Job) -> dict[str, Any]:
    with job.engine(torch_autocast={"enabled": True, "dtype": "bfloat16"}) as engine:
        return job.found(engine, job.steps(engine))


def two_forwards_one_backward(job: Job) -> dict[str, Any]:
    losses = []
    with job.engine(gradient_accumulation_steps=2) as engine:
        for step in range(0, 12, 2):
            loss = engine(**job.batch(step)).loss + 0.5 * engine(**job.batch(step + 1)).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return job.found(engine, losses)


def frozen_routers(job: Job) -> dict[str, Any]:
    model = job.model()
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.requires_grad_(False)
    with job.engine(model) as engine:
        return job.found(engine, job.steps(engine))


def activation_offloading(job: Job) -> dict[str, Any]:
    losses = []
    with job.engine() as engine:
        for step in range(3):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
                loss = engine(**job.batch(step)).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return job.found(engine, losses)


def ema_by_deepcopy(job: Job) -> dict[str, Any]:
    with job.engine() as engine:
        losses = job.steps(engine)
        average = copy.deepcopy(engine.module)
        for old, new in zip(average.parameters(), engine.module.parameters(), strict=True):
            old.data.lerp_(new.data, 0.1)
        losses += job.steps(engine, first=3)
        average.eval()
        with torch.no_grad():
            losses.append(average(**job.batch(7)).loss.item())
        return job.found(engine, losses)


def muon(job: Job) -> dict[str, Any]:
    model = job.model()
    for name, parameter in model.named_parameters():
        parameter.use_muon = parameter.ndim >= 2 and "embed" not in name and "lm_head" not in name
    params = {"lr": LEARNING_RATE, "momentum": 0.9, "torch_adam": True}
    optimizer = {"type": "Muon", "params": params}
    # DeepSpeed compiles Muon's steps, for minutes on a CPU.
    with torch.compiler.set_stance("force_eager"), job.engine(model, optimizer=optimizer) as engine:
        return job.found(engine, job.steps(engine))


def reentrant_checkpointing(job: Job) -> dict[str, Any]:
    model = job.model()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with job.engine(model) as engine:
        return job.found(engine, job.steps(engine))


def layer_drop(job: Job) -> dict[str, Any]:
    model = job.model()
    dropped = model.model.layers[1]
    forward, calls = dropped.forward, []

    def sometimes(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return hidden_states if len(calls) % 2 == 0 else forward(hidden_states, *args, **kwargs)

    dropped.forward = sometimes
    with job.engine(model, gradient_accumulation_steps=2) as engine:
        losses = job.steps(engine, accumulation=2)
        del dropped.forward
        return job.found(engine, losses)


def generate_in_step(job: Job) -> dict[str, Any]:
    with job.engine() as engine:
        losses = job.steps(engine)
        engine.eval()
        prompts = torch.arange(3, 9)[None] + dist.get_rank()
        options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "eos_token_id": None}
        written = engine.module.generate(prompts, **options).tolist()
        engine.train()
        return job.found(engine, losses + job.steps(engine, first=3), written=written)


def generate_of_unequal_lengths(job: Job) -> dict[str, Any]:
    with job.engine() as engine:
        losses = job.steps(engine)
        engine.eval()
        prompts = torch.arange(3, 9)[None] + dist.get_rank()
        options = {"max_new_tokens": 2 + 2 * dist.get_rank(), "do_sample": False, "eos_token_id": None}
        written = engine.module.generate(prompts, **options).tolist()
        engine.train()
        return job.found(engine, losses + job.steps(engine, first=3), written=written)


def only_rank_0_evaluates(job: Job) -> dict[str, Any]:
    with job.engine() as engine:
        losses = job.steps(engine)
        if job.is_first:
            engine.eval()
            with torch.no_grad():
                losses.append(engine(**job.batch(9)).loss.item())
            engine.train()
        dist.barrier()
        return job.found(engine, losses)


def skips_a_batch_with_nan(job: Job) -> dict[str, Any]:
    if job.column == "block":
        job.block["levels"][0]["codecs"] = "recommended"
    losses = []
    with job.engine() as engine:
        for step in range(4):
            loss = engine(**job.batch(step)).loss * (float("nan") if step == dist.get_rank() == 1 else 1.0)
            is_finite = torch.isfinite(loss).float()
            dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
            if is_finite:
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        return job.found(engine, losses)


class WithValueHead(nn.Module):
    """A model inside another module, as value heads and reward models of one's own have it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.pretrained_model = inner
        self.config = inner.config
        torch.manual_seed(4)
        self.v_head = nn.Linear(SHAPE.hidden, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        output = self.pretrained_model(input_ids=input_ids, labels=labels, output_hidden_states=True)
        output.loss = output.loss + self.v_head(output.hidden_states[-1]).square().mean()
        return output


def value_head(job: Job) -> dict[str, Any]:
    with job.engine(WithValueHead(job.model())) as engine:
        losses = job.steps(engine)
        head = {"v_head": engine.module.v_head.weight.detach().clone()}
        return {"losses": losses, "weights": head if job.is_first else {}}


def trainer_value_head(job: Job) -> dict[str, Any]:
    trainer = job.trainer(WithValueHead(job.model()))
    trainer.train()
    return job.trained(trainer)  # the file has the head too


def inference_mode_first(job: Job) -> dict[str, Any]:
    with job.engine(zero_optimization={"stage": 3}) as engine:
        engine.eval()
        with torch.inference_mode():
            losses = [engine(**job.batch(9)).loss.item()]
        engine.train()
        return job.found(engine, losses + job.steps(engine))


# -- adapters ----------------------------------------------------------------------------------------------------


def _adapted(job: Job, model: Any = None, **settings: Any) -> Any:
    import peft

    torch.manual_seed(5)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "init_lora_weights": False, **settings}
    return peft.get_peft_model(job.model() if model is None else model, peft.LoraConfig(**settings))


def _train_adapted(job: Job, **settings: Any) -> dict[str, Any]:
    trainer = job.trainer(_adapted(job, **settings))
    trainer.train()
    return job.trained(trainer)


def lora_attention(job: Job) -> dict[str, Any]:
    return _train_adapted(job)


def lora_experts(job: Job) -> dict[str, Any]:
    return _train_adapted(job, target_parameters=EXPERTS)


def lora_dropout(job: Job) -> dict[str, Any]:
    return _train_adapted(job, lora_dropout=0.5)


def lora_rslora(job: Job) -> dict[str, Any]:
    return _train_adapted(job, target_parameters=EXPERTS, use_rslora=True, alpha_pattern={"q_proj": 16})


def lora_router(job: Job) -> dict[str, Any]:
    model = _adapted(job, target_parameters=["mlp.gate.weight"])
    trainer = job.trainer(model, job.arguments(deepspeed=_below_peft(job, job.ds_config(stage=0))))
    trainer.train()
    return job.trained(trainer)


def _below_peft(job: Job, config: dict[str, Any]) -> dict[str, Any]:
    """The ds_config with what AutoEP alone needs to find layers below peft's wrapper."""
    if job.column == "autoep":
        config["expert_parallel"]["moe_layer_pattern"] = r"base_model\.model\.model\.layers\.\d+\.mlp"
    return config


def lora_router_saved(job: Job) -> dict[str, Any]:
    return _train_adapted(job, target_parameters=EXPERTS, modules_to_save=["gate"])


def lora_new_tokens(job: Job) -> dict[str, Any]:
    return _train_adapted(job, target_parameters=EXPERTS, modules_to_save=["embed_tokens", "lm_head"])


# -- trl ---------------------------------------------------------------------------------------------------------


def _dataset(job: Job, rows: list[dict[str, Any]]) -> Any:
    """On disk, since trl shares what it computes of a data set between ranks by files beside it."""
    from datasets import Dataset, load_from_disk

    if job.is_first:
        Dataset.from_list(rows).save_to_disk(str(job.folder / "data"))
    dist.barrier()
    return load_from_disk(str(job.folder / "data"))


def _prompts(job: Job) -> Any:
    return _dataset(job, [{"prompt": f"{one} plus {two} is ", "completion": f"{one + two}."} for one, two in SUMS])


def _preferences(job: Job) -> Any:
    return _dataset(
        job,
        [
            {"prompt": f"{one} plus {two} is ", "chosen": f"{one + two}.", "rejected": f"{one + two + 1}, no."}
            for one, two in SUMS
        ],
    )


def _sft(job: Job, **options: Any) -> dict[str, Any]:
    from trl import SFTConfig, SFTTrainer

    trainer_options = {key: options.pop(key) for key in ("peft_config",) if key in options}
    model = options.pop("model", None)
    trainer = SFTTrainer(
        model=job.model() if model is None else model,
        args=job.arguments(SFTConfig, max_length=32, **options),
        train_dataset=_prompts(job),
        processing_class=job.tokenizer(),
        **trainer_options,
    )
    trainer.train()
    return job.trained(trainer)


def sft(job: Job) -> dict[str, Any]:
    return _sft(job)


def sft_packing(job: Job) -> dict[str, Any]:
    return _sft(job, packing=True)


def sft_lora(job: Job) -> dict[str, Any]:
    import peft

    settings = peft.LoraConfig(r=4, target_modules=ATTENTION)
    return _sft(job, peft_config=settings)


def _dpo(job: Job, *, peft_config: Any = None, **options: Any) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=job.model_folder(),
        args=job.arguments(DPOConfig, max_length=32, model_init_kwargs={"dtype": "float32"}, **options),
        train_dataset=_preferences(job),
        processing_class=job.tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    return job.trained(trainer)


def dpo(job: Job) -> dict[str, Any]:
    return _dpo(job)


def dpo_precomputed(job: Job) -> dict[str, Any]:
    return _dpo(job, precompute_ref_log_probs=True)


def dpo_lora(job: Job) -> dict[str, Any]:
    import peft

    torch.manual_seed(5)
    return _dpo(job, peft_config=peft.LoraConfig(r=4, target_modules=ATTENTION, target_parameters=EXPERTS))


def kto(job: Job) -> dict[str, Any]:
    from trl import KTOConfig, KTOTrainer

    rows = [
        {"prompt": f"{one} plus {two} is ", "completion": f"{one + two + two % 2}.", "label": two % 2 == 0}
        for one, two in SUMS
    ]
    settings = {"max_length": 32, "model_init_kwargs": {"dtype": "float32"}}
    trainer = KTOTrainer(
        model=job.model_folder(),
        args=job.arguments(KTOConfig, **settings),
        train_dataset=_dataset(job, rows),
        processing_class=job.tokenizer(),
    )
    trainer.train()
    return job.trained(trainer)


def _lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, one)) % 7) for one in completions]


def _seeded() -> Any:
    """A callback that seeds what is sampled: AutoEP draws numbers while it makes layers."""
    from transformers import TrainerCallback

    class Seeded(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            torch.manual_seed(7 + dist.get_rank())

    return Seeded()


def _grpo(job: Job, **options: Any) -> dict[str, Any]:
    from trl import GRPOConfig, GRPOTrainer

    settings = {"max_completion_length": 5, "num_generations": 2, "beta": 0.1, "max_steps": 2}
    settings["model_init_kwargs"] = {"dtype": "float32"}
    trainer = GRPOTrainer(
        model=job.model_folder(),
        reward_funcs=_lengths,
        args=job.arguments(GRPOConfig, **settings, **options),
        train_dataset=_dataset(job, [{"prompt": f"{one} plus {two} is "} for one, two in SUMS]),
        processing_class=job.tokenizer(),
        callbacks=[_seeded()],
    )
    trainer.train()
    return job.trained(trainer)


def grpo_of_unequal_lengths(job: Job) -> dict[str, Any]:
    return _grpo(job, generation_kwargs={"eos_token_id": list(range(1, 140))})


def trl_reward(job: Job) -> dict[str, Any]:
    import transformers
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(3)
    config = copy.deepcopy(job.model().config)
    config.num_labels = 1
    trainer = RewardTrainer(
        model=transformers.Qwen3MoeForSequenceClassification(config),
        args=job.arguments(RewardConfig, max_length=32),
        train_dataset=_preferences(job),
        processing_class=job.tokenizer(),
    )
    trainer.train()
    return job.trained(trainer)
