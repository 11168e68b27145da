# SPDX-License-Identifier: Apache-2.0
"""Runs everyday scripts on the ranks of a pool, each three times: with plain DeepSpeed, AutoEP alone, and the block.

A script is a function of `Job`, which gives it a tiny model, data, a ds_config and a folder, and hides what a test on
CPUs needs.  It returns what people look at: losses, and the folder that was saved.
"""

import copy
import functools
import gc
import importlib.metadata
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import deepspeed
import torch
from deepspeed import comm as dist
from hf_models import build_hf_model
from parity import Case, use_expert_groups_of
from toy_model import ToyConfig

import ds_hybridep

Column = Literal["plain", "autoep", "block"]
COLUMNS: tuple[Column, ...] = ("plain", "autoep", "block")

SHAPE = ToyConfig(hidden=32, ffn=16, sequence=16, num_experts=8, k=2, vocab=260, ep_size=4)
LEARNING_RATE = 5e-3
EPS = 3e-3  # of the size of the gradients, so that AdamW does not forget their scale
BLOCK = {
    "levels": [
        {"name": "dc", "size": 2, "domain_size": 2, "bandwidth_gbps": 1, "latency_ms": 0.01},
        {"name": "gpu", "size": 2, "bandwidth_gbps": 100, "latency_ms": 0.01},
    ],
    "timeout_s": 60,
    "advanced": {"kernels": "reference"},
}
# The layout of groups that the pool gets before each script.
_GROUPS = Case(levels=(("dc", 2, 1), ("gpu", 2, 1)), toy=SHAPE)


@dataclass
class Job:
    """What a script is given."""

    column: Column
    folder: Path
    block: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(BLOCK))

    @property
    def is_plain(self) -> bool:
        """True without expert parallelism."""
        return self.column == "plain"

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return dist.get_rank() == 0

    # -- what a user brings --------------------------------------------------------------------------------------

    def ds_config(self, *, stage: int = 1, optimizer: bool = True, auto: bool = True, **more: Any) -> dict[str, Any]:
        """A ds_config.  auto: for the Trainer; else for a loop of one's own."""
        params = {"lr": "auto", "weight_decay": "auto", "eps": "auto"} if auto else {"lr": LEARNING_RATE, "eps": EPS}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": "auto" if auto else 2,
            "gradient_accumulation_steps": "auto" if auto else 1,
            "gradient_clipping": "auto" if auto else 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000,
        }
        if optimizer:
            config["optimizer"] = {"type": "AdamW", "params": {**params, "torch_adam": True}}
        if not self.is_plain:
            config["expert_parallel"] = {"enabled": True, "autoep_size": SHAPE.ep_size}
        if self.column == "block":
            config["hybridep"] = self.block
        return config | more

    def model(self, family: str = "qwen3_moe", seed: int = 1, **options: Any) -> Any:
        """A tiny causal language model over bytes, without an auxiliary loss unless the options ask for it."""
        options = {"output_router_logits": False, "eos_token_id": 1, "pad_token_id": 0, **options}
        return build_hf_model(family, SHAPE, seed=seed, **options)

    def model_folder(self) -> str:
        """The folder of such a model and its tokenizer, as people download it."""
        folder = self.folder / "model"
        if self.is_first:
            self.model().save_pretrained(folder)
            self.tokenizer().save_pretrained(folder)
        dist.barrier()
        return str(folder)

    def tokenizer(self) -> Any:
        """Of bytes; downloads nothing."""
        from transformers import ByT5Tokenizer

        tokenizer = ByT5Tokenizer(extra_ids=0)
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        return tokenizer

    def examples(self, count: int = 64, seed: int = 0) -> list[dict[str, Any]]:
        """Windows of tokens."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(3, SHAPE.vocab - 1, (count, SHAPE.sequence), generator=generator)
        return [{"input_ids": row, "labels": row.clone()} for row in rows]

    def batch(self, step: int, size: int = 2) -> dict[str, torch.Tensor]:
        """A batch of this rank for a loop of one's own."""
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(3, SHAPE.vocab - 1, (size, SHAPE.sequence), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    def arguments(self, kind: Any = None, **options: Any) -> Any:
        """TrainingArguments, or a trainer's own kind of them; `deepspeed` is the ds_config."""
        import transformers

        join_ranks_on_cpus()
        options.setdefault("deepspeed", self.ds_config())
        common = {
            "output_dir": str(self.folder / "runs"),
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": LEARNING_RATE,
            "adam_epsilon": EPS,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "bf16": False,
            "use_cpu": True,
            "accelerator_config": {"use_configured_state": True},
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
        }
        return (kind or transformers.TrainingArguments)(**(common | options))

    def trainer(self, model: Any = None, arguments: Any = None, kind: Any = None, **options: Any) -> Any:
        """A Trainer over windows of tokens."""
        import transformers

        options.setdefault("train_dataset", self.examples())
        options.setdefault("data_collator", transformers.default_data_collator)
        model = self.model() if model is None else model
        return (kind or transformers.Trainer)(model=model, args=arguments or self.arguments(), **options)

    def accelerator(self, config: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """An accelerate.Accelerator with a DeepSpeedPlugin."""
        import accelerate

        join_ranks_on_cpus()
        plugin = accelerate.DeepSpeedPlugin(hf_ds_config=dict(config or self.ds_config(auto=False)), **options)
        return accelerate.Accelerator(deepspeed_plugin=plugin)

    @contextmanager
    def engine(self, model: Any = None, client: Any = None, **config: Any) -> Iterator[Any]:
        """What deepspeed.initialize returns first, for a loop of one's own."""
        model = self.model() if model is None else model
        trained = [p for p in model.parameters() if p.requires_grad]
        given = {"optimizer": client} if client is not None else {"model_parameters": trained}
        config = self.ds_config(auto=False, optimizer=client is None) | self._zero(config)
        engine, *_ = deepspeed.initialize(model=model, config=config, **given)
        try:
            yield engine
        finally:
            engine.destroy()

    def _zero(self, config: dict[str, Any]) -> dict[str, Any]:
        zero = {"stage": 1, **config.get("zero_optimization", {})}
        return config | {"zero_optimization": zero}

    def steps(self, engine: Any, first: int = 0, count: int = 3, accumulation: int = 1) -> list[float]:
        """Losses of some steps of a loop of one's own."""
        losses = []
        for step in range(first, first + count * accumulation):
            loss = engine(**self.batch(step)).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses

    # -- what people look at -------------------------------------------------------------------------------------

    def trained(self, trainer: Any, **facts: Any) -> dict[str, Any]:
        """Losses of a Trainer that has trained, and the weights that it saves."""
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return self.found(trainer.deepspeed, losses, trainer=trainer, **facts)

    def found(self, engine: Any, losses: list[float], trainer: Any = None, **facts: Any) -> dict[str, Any]:
        """Losses and weights of an engine; AutoEP alone cannot save its model, so for it we do."""
        folder = self.folder / "saved"
        if trainer is not None and self.column != "autoep":
            trainer.save_model(str(folder))
        elif self.is_plain or hasattr(engine.module, "peft_config"):
            if self.is_first:
                engine.module.save_pretrained(str(folder))
        else:
            ds_hybridep.save_pretrained(engine, folder)
        dist.barrier()
        weights = read_folder(folder) if self.is_first else {}
        return {"losses": losses, "weights": weights, **facts}


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors that a folder's safetensors hold."""
    from safetensors.torch import load_file

    return {key: value for path in sorted(folder.glob("*.safetensors")) for key, value in load_file(path).items()}


def join_ranks_on_cpus() -> None:
    """What a script needs on CPUs: otherwise each rank would be a job of its own.

    TrainingArguments forget the state of accelerate too, where they make it themselves.
    """
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


# -- on a rank of the pool ---------------------------------------------------------------------------------------


def run_script(script: str, folder: str, columns: tuple[Column, ...] = COLUMNS) -> dict[str, Any]:
    """Run a script of `scripts.py` in each column; what it returned, or the error that ended it."""
    from works_with import scripts

    results: dict[str, Any] = {}
    for column in columns:
        place = Path(folder) / column
        place.mkdir(parents=True, exist_ok=True)
        with _as_in_a_new_process(), _newer_routers() if column == "plain" else nullcontext():
            results[column] = _result(getattr(scripts, script), Job(column, place))
        for _ in range(2):  # what an engine's finalizer touches stays until the next collection
            gc.collect()
        gc.freeze()  # hundreds of thousands of objects of imported modules, which each collection would go through
        dist.barrier()
    return results


def _result(script: Callable[[Job], dict[str, Any]], job: Job) -> dict[str, Any]:
    try:
        return script(job)
    except Exception as error:  # noqa: BLE001 (what a user would see is what the test compares)
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


@contextmanager
def _as_in_a_new_process() -> Iterator[None]:
    """Forget what accelerate, transformers and DeepSpeed keep for a process."""
    environment = dict(os.environ)
    use_expert_groups_of(_GROUPS)
    torch.manual_seed(1)
    try:
        with mock.patch.object(importlib.metadata, "metadata", _metadata):
            yield
    finally:
        from accelerate.state import AcceleratorState, GradientState
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        for engine in [
            one for one in gc.get_objects() if issubclass(type(one), deepspeed.DeepSpeedEngine)
        ]:  # not isinstance: there are proxies
            with suppress(AttributeError):  # of a start that failed
                engine.destroy()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(environment)
        torch.nn.functional.linear = _LINEAR  # ZeRO 3 puts its own in this place, for good


@contextmanager
def _newer_routers() -> Iterator[None]:
    """Let routers record logits, as from transformers 5.6 on; before, probabilities were taken for logits.

    AutoEP, with or without the block, records logits of all versions.  transformers#45120
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    original = Qwen3MoeTopKRouter.forward

    def forward(router: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, *others = original(router, hidden_states)
        is_probability = bool(torch.allclose(logits.sum(-1), torch.ones(())))
        return (logits.log() if is_probability else logits, *others)

    Qwen3MoeTopKRouter.forward = forward
    try:
        yield
    finally:
        Qwen3MoeTopKRouter.forward = original


_metadata = functools.cache(importlib.metadata.metadata)  # accelerate parses the same files again and again
_LINEAR = torch.nn.functional.linear
