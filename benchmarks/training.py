# SPDX-License-Identifier: Apache-2.0
"""What ranks of measuring programs share: models, engines, plans, steps, and questions to the driver."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.autograd import Function

import ds_hybridep
from benchmarks.common import POLL_S, REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples"))
import train_lm

VOCABULARY = train_lm.VOCABULARY
SIZES = {"hidden": 64, "layers": 4, "experts": 8, "top_k": 2, "seq_len": 128, "capacity_factor": 1.25}
ADAPTER_RANK = 8
ANSWER_LIMIT_S = 60.0
RECOMMENDED = {"codecs": "recommended"}
AUTO_LEVEL = {"weight_codec": "auto", "gradient_codec": "auto"}
AUTO_CODECS = ({"type": "low_rank", "ratio": 50}, "int8")
AUTO_MOST_STEPS = 100


def join() -> int:
    """Make the process group; returns this rank."""
    # Else DeepSpeed compiles an all-reduce over shared memory, for a minute, that no rank with a host of its own uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    return int(dist.get_rank())


class Job:
    """One rank's side of a job; only rank 0 asks the driver, and all ranks wait for the answer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0
        torch.set_num_threads(1)
        self.rank = join()

    def ask(self, command: str, **request: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        if self.rank == 0:
            self._count += 1
            partial = self.folder / "request.partial"
            partial.write_text(json.dumps({"command": command, **request}))
            os.replace(partial, self.folder / f"request-{self._count}.json")
            path, limit = self.folder / f"answer-{self._count}.json", time.monotonic() + ANSWER_LIMIT_S
            while not path.exists():
                if time.monotonic() > limit:
                    raise TimeoutError(f"the driver did not answer {command} within {ANSWER_LIMIT_S:g} s")
                time.sleep(POLL_S)
            answer = json.loads(path.read_text())
        dist.barrier()
        return answer

    def record(self, params: Mapping[str, Any], **measured: Any) -> None:
        self.ask("record", params=dict(params), measured=measured)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def end(self) -> None:
        self.ask("done")
        dist.barrier()


# ---- a model whose compute is sleep ----


class _Sleep(Function):
    """The identity, which takes `seconds` forward and twice as long backward; weights get some gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, *weights: Tensor) -> Tensor:
        ctx.seconds, ctx.weights = seconds, weights
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds)
        return grad, None, *(torch.full_like(weight, 1e-6) for weight in ctx.weights)


class SleepingExpert(nn.Module):
    """The weights of a two-layer expert, and none of its arithmetic."""

    def __init__(self, hidden: int, seconds_per_row: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.seconds_per_row = seconds_per_row

    def forward(self, rows: Tensor) -> Tensor:
        return 0.5 * _Sleep.apply(rows, rows[..., 0].numel() * self.seconds_per_row, *self.parameters())


class SleepModel(nn.Module):
    """Embedding, then layers of one sleeping dense sublayer and one MoE of sleeping experts; a loss that is real.

    Shapes, gate, optimizer and communication are real: what is left of a step is communication and what hides it.
    args.dense_ms is the forward of a dense sublayer for one sequence, args.row_us that of an expert for one row,
    padding included; backwards sleep twice as long.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, args.hidden)
        expert = SleepingExpert(args.hidden, args.row_us * 1e-6)
        self.layers = nn.ModuleList(moe_of(args, expert) for _ in range(args.layers))
        self.head = nn.Linear(args.hidden, VOCABULARY)
        self.dense_s = args.dense_ms * 1e-3

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        total_aux = x.new_zeros(())
        for layer in self.layers:
            y, aux, _ = layer(_Sleep.apply(x, self.dense_s * tokens.shape[0]))
            x, total_aux = x + y, total_aux + aux
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()), total_aux


def moe_of(args: argparse.Namespace, expert: nn.Module) -> MoE:
    return MoE(
        args.hidden, expert, num_experts=args.experts, ep_size=args.ep_size, k=args.top_k,
        capacity_factor=args.capacity_factor, use_rts=False, top2_2nd_expert_sampling=False,
    )  # fmt: skip


# ---- a Hugging Face model ----


def qwen3_moe(args: argparse.Namespace, adapters: str = "", weights: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A Qwen3-MoE, random without `weights`; with `adapters`, of "attention" or "attention and experts", only these
    are trainable.

    Called as the other models are, with (tokens, targets) and two losses.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    class BytesQwen3Moe(Qwen3MoeForCausalLM):
        def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            found = super().forward(input_ids=tokens, labels=tokens)
            aux_loss = self.router_aux_loss_coef * found.aux_loss  # is part of the loss
            return found.loss - aux_loss, aux_loss / train_lm.AUX_LOSS_WEIGHT

    config = Qwen3MoeConfig(
        vocab_size=getattr(args, "vocabulary", VOCABULARY), hidden_size=args.hidden, intermediate_size=2 * args.hidden,
        moe_intermediate_size=2 * args.hidden, num_hidden_layers=args.layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=args.hidden // 4, num_experts=args.experts, num_experts_per_tok=args.top_k,
        norm_topk_prob=True, output_router_logits=True, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    model = BytesQwen3Moe(config)
    if weights is not None:
        model.load_state_dict(weights)
    if not adapters:
        return model
    from peft import LoraConfig, get_peft_model

    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if "experts" in adapters else None
    return get_peft_model(model, LoraConfig(r=ADAPTER_RANK, target_modules=attention, target_parameters=experts))


def autoep(ep_size: int) -> dict[str, Any]:
    """The "expert_parallel" block; peft puts a prefix before the names of modules."""
    pattern = r"(base_model\.model\.)?model\.layers\.\d+\.mlp"
    return {"expert_parallel": {"enabled": True, "autoep_size": ep_size, "moe_layer_pattern": pattern}}


# ---- texts ----


def python_files() -> list[Path]:
    """Of the packages torch and deepspeed, 50 MB."""
    roots = [Path(package.__file__).parent for package in (torch, deepspeed)]
    return [path for root in roots for path in sorted(root.rglob("*.py"))]


def header_files(part: str = "") -> list[Path]:
    """C++ headers that come with torch, 40 MB, or those in one part of them."""
    return sorted((Path(torch.__file__).parent / "include" / part).rglob("*.h"))


def texts_of(files: Iterable[Path]) -> tuple[Tensor, Tensor]:
    """(train, valid), uint8 [num_bytes] each; one file in twenty is of valid."""
    train, valid = bytearray(), bytearray()
    for number, path in enumerate(files):
        (valid if number % train_lm.VALID_EVERY == 0 else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(valid, dtype=torch.uint8)


# ---- engines and steps ----


def byte_model(**sizes: Any) -> nn.Module:
    """The model of examples/train_lm.py."""
    return train_lm.ByteModel(argparse.Namespace(**{**SIZES, **sizes}))


class LinearInFp32(nn.Linear):
    """Multiplies in fp32, and rounds what comes out to the dtype of what went in.

    So do matrix units.  torch on a processor without instructions for bf16 sums in fp32 too, but takes many times as
    long, backward above all.
    """

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)


def attention_in_fp32(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    mixed = nn.functional.scaled_dot_product_attention(query.float(), key.float(), value.float(), **options)
    return mixed.to(query.dtype)


def multiply_in_fp32(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = LinearInFp32
        elif type(module) is train_lm.Attention:
            module.attend = attention_in_fp32


def engine_of(
    model: nn.Module,
    block: Mapping[str, Any] | None = None,
    *,
    rate: float = 1e-3,
    stage: int = 1,
    dtype: str = "fp32",
    accumulation: int = 1,
    **settings: Any,
) -> Any:
    """An engine that trains what is trainable; `block` is the "hybridep" block, `settings` others of ds_config."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only its product with the others is checked
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}},
        **settings,
    }
    if block is not None:
        config["hybridep"] = {"report_interval": 0, **block}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trainable, config=config)[0]


def train_step(engine: Any, corpus: Tensor, step: int, *, rows: int, seq_len: int, seed: int = 0) -> float:
    """One optimizer step on data that depend on seed, step and rank only; returns the last micro-step's loss."""
    for micro_step in range(engine.gradient_accumulation_steps()):
        place = (seed, step, micro_step, dist.get_rank())
        loss, aux_loss = engine(*train_lm.batch_at(corpus, place, rows=rows, seq_len=seq_len))
        engine.backward(loss + train_lm.AUX_LOSS_WEIGHT * aux_loss)
        engine.step()
    return loss.item()


@torch.no_grad()
def losses_on(engine: Any, corpus: Tensor, num_batches: int, *, seq_len: int) -> list[float]:
    """Loss of each batch, the same ones at every call, as the mean over ranks."""
    engine.eval()
    losses = torch.stack([
        engine(*train_lm.batch_at(corpus, (977, at, 0, dist.get_rank()), rows=4, seq_len=seq_len))[0].float()
        for at in range(num_batches)
    ])  # fmt: skip
    engine.train()
    dist.all_reduce(losses)
    found: list[float] = (losses / dist.get_world_size()).tolist()
    return found


@torch.no_grad()
def loss_on(engine: Any, corpus: Tensor, num_batches: int, *, seq_len: int) -> float:
    """Mean loss over the same batches at every call, of all ranks."""
    engine.eval()
    losses = [
        engine(*train_lm.batch_at(corpus, (977, at, 0, dist.get_rank()), rows=4, seq_len=seq_len))[0]
        for at in range(num_batches)
    ]
    engine.train()
    return train_lm.mean_over_ranks(torch.stack(losses).mean())


def runtime_of(engine: Any) -> Any:
    """What ds_hybridep attached; its insides may change."""
    return engine.__dict__["_hybridep_attachment"].runtime


def steps_in(folder: Path) -> int:
    """Steps of the newest checkpoint; 0 without one."""
    latest = folder / "latest"
    return int(latest.read_text().removeprefix("step")) if latest.exists() else 0


def save(engine: Any, folder: Path) -> None:
    """Keep the newest checkpoint only."""
    tag = f"step{engine.global_steps}"
    engine.save_checkpoint(str(folder), tag=tag)
    dist.barrier()
    if dist.get_rank() == 0:
        for old in folder.glob("step*"):
            if old.name != tag:
                shutil.rmtree(old)


def planner_of(engine: Any) -> Any:
    """What plans a job while it trains; None where the plan is given, or nothing is attached."""
    attachment = engine.__dict__.get("_hybridep_attachment")
    return None if attachment is None else attachment.planner


# ---- plans ----


@dataclass(frozen=True)
class Plan:
    """What is trained: an EP size, and for ours domain sizes."""

    name: str
    ep_size: int
    domain_sizes: tuple[Any, ...] | None = None
    slow: Mapping[str, Any] | None = None  # settings of the slow level
    dense_sync: str | None = None  # None: by level
    token_exchange: str = "auto"
    auto_codecs: tuple[Any, ...] = ()
    adapters: str = ""  # what has some, "attention" or "attention and experts"; else everything is trained

    def block(self, sizes: tuple[int, ...], prefetch_depth: int = 2) -> dict[str, Any]:
        """The "hybridep" block; domains of one rank where the plan has none."""
        domain_sizes = self.domain_sizes or (1,) * len(sizes)
        levels: list[dict[str, Any]] = [
            {"name": name, "size": size, "domain_size": domain_size}
            for name, size, domain_size in zip(("dc", "gpu"), sizes, domain_sizes, strict=True)
        ]
        levels[0].update(self.slow or {})
        return {
            "levels": levels, "token_exchange": self.token_exchange, "auto_codecs": list(self.auto_codecs),
            "advanced": {"verify_interval": 0, "prefetch_depth": prefetch_depth},
            **({} if self.dense_sync is None else {"dense_sync": self.dense_sync}),
        }  # fmt: skip


def plans_of(sizes: tuple[int, ...]) -> list[Plan]:
    """Baselines and plans for `sizes` = (DCs, GPUs per DC)."""
    dcs, gpus = sizes
    world = dcs * gpus
    flat, by_level = Plan("deepspeed, flat EP", world), Plan("hybridep [1,1]", world, (1, 1))
    return [
        flat,
        Plan("deepspeed, EP inside the DC", gpus),
        Plan("hybridep [1,1], dense sums by DeepSpeed", world, (1, 1), dense_sync="deepspeed"),
        by_level,
        replace(by_level, name="hybridep, only sums by level", token_exchange="deepspeed"),
        *(Plan(f"hybridep [{size},1]", world, (size, 1)) for size in range(2, dcs + 1) if dcs % size == 0),
        Plan(f"hybridep [{dcs},1] recommended", world, (dcs, 1), RECOMMENDED),
        Plan("hybridep, EP inside the DC", gpus, (1, 1)),
        Plan("hybridep, EP inside the DC, recommended", gpus, (1, 1), RECOMMENDED),
        Plan("hybridep auto", world, ("auto", "auto")),
        Plan("hybridep auto, codecs allowed", world, ("auto", "auto"), AUTO_LEVEL, auto_codecs=AUTO_CODECS),
        replace(flat, name=f"{flat.name} again"),
    ]


def plans_of_hf(sizes: tuple[int, ...]) -> list[Plan]:
    """Full fine-tuning and adapters of a Hugging Face model."""
    dcs, gpus = sizes
    by_name = {plan.name: plan for plan in plans_of(sizes)}
    names = ("deepspeed, flat EP", "deepspeed, EP inside the DC", f"hybridep [{dcs},1]", "deepspeed, flat EP again")
    full = [by_name[name] for name in names]
    more = (f"hybridep [{dcs},1] recommended", "hybridep, EP inside the DC", "hybridep, EP inside the DC, recommended")
    return [*full, *(by_name[name] for name in more)] + [
        replace(plan, name=f"{adapters}: {plan.name}", adapters=adapters)
        for adapters in ("attention", "attention and experts")
        for plan in full
    ]


@dataclass
class Run:
    """One plan in training."""

    plan: Plan
    engine: Any
    num_steps: int = 0  # optimizer steps so far; batches are a function of it
    loss: float = float("nan")

    def train(self, corpus: Tensor, args: argparse.Namespace, rows: int, num_steps: int) -> None:
        """The same data for every plan."""
        for _ in range(num_steps):
            self.loss = train_step(
                self.engine, corpus, self.num_steps, rows=rows, seq_len=args.seq_len, seed=args.seed
            )
            self.num_steps += 1

    def finish_transfers(self) -> None:
        """Wait for weights under way, on all ranks."""
        if self.plan.domain_sizes is not None and (migration := runtime_of(self.engine).migration) is not None:
            migration.finish()
        dist.barrier()

    def settle(self, corpus: Tensor, args: argparse.Namespace, rows: int) -> None:
        """Train a planned run until its plan stays, at this rate and batch; it keeps that while it is timed."""
        planner = planner_of(self.engine)
        if planner is None:
            return
        planner.choose_anew(runtime_of(self.engine))  # steps of the last rate and batch say nothing
        for _ in range(AUTO_MOST_STEPS):
            self.train(corpus, args, rows, 1)
            if planner.is_settled:
                break
        planner.hold()


def build(args: argparse.Namespace, plan: Plan, accumulation: int, sizes: tuple[int, ...]) -> Run:
    """`args` is what `add_model_arguments` parsed."""
    torch.manual_seed(args.seed)
    sized = argparse.Namespace(**{**vars(args), "ep_size": plan.ep_size})
    is_hf, is_ours = args.model == "qwen3_moe", plan.domain_sizes is not None
    if is_hf:
        model = qwen3_moe(sized, plan.adapters)
    else:
        model = SleepModel(sized) if args.compute == "sleep" else train_lm.ByteModel(sized)
    # Adapters of experts need the block at the start; AutoEP runs them without it afterwards.
    needs_block = is_ours or plan.adapters == "attention and experts"
    engine = engine_of(
        model, plan.block(sizes, args.prefetch_depth) if needs_block else None, rate=args.lr, dtype=args.dtype,
        # DeepSpeed's ZeRO 1 and 2 refuse a model with MoE layers and no trainable expert.
        stage=0 if plan.adapters == "attention" else args.zero_stage,
        accumulation=accumulation, **(autoep(plan.ep_size) if is_hf else {}),
    )  # fmt: skip
    if needs_block and not is_ours:
        ds_hybridep.detach(engine)
    return Run(plan, engine)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What `build` and `Run.train` read."""
    for name, default in {**SIZES, "seed": 0, "prefetch_depth": 2, "zero_stage": 1}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--model", choices=("bytes", "qwen3_moe"), default="bytes")
    parser.add_argument("--compute", choices=("real", "sleep"), default="real")
    parser.add_argument("--dense-ms", type=float, default=2.0, help="slept per dense sublayer and sequence, forward")
    parser.add_argument("--row-us", type=float, default=10.0, help="slept per row and expert, forward")
