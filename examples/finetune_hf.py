# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a Hugging Face Mixture-of-Experts model on a text, with the Trainer.

An ordinary Trainer script: only the blocks "expert_parallel" and "hybridep" of the ds_config decide about expert
parallelism and about what travels between datacentres.

    deepspeed --num_gpus 4 examples/finetune_hf.py --model FOLDER --text FILE --deepspeed ds_configs/hf_2x2.json
    deepspeed --num_gpus 4 examples/finetune_hf.py --tiny --deepspeed ds_configs/hf_2x2.json

FOLDER holds a model and its tokenizer as save_pretrained writes them; the script downloads nothing.  FILE is a text,
cut into windows of --seq-len tokens.  `--tiny` builds a small random Qwen3-MoE over bytes instead, and its text is
this project's documentation.  It first trains that model on the sources of Python's own standard library, to have
something to fine-tune.  Without an accelerator, put `DS_ACCELERATOR=cpu OMP_NUM_THREADS=1` in front.

Learning rate, windows and gradient checkpointing have other defaults for a real model than for the tiny one.

`--save-to FOLDER` writes what was trained, for `from_pretrained` of transformers or peft.
"""

import argparse
import json
import os
import sysconfig
from pathlib import Path

import torch
from accelerate import PartialState
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

REPOSITORY = Path(__file__).resolve().parents[1]
VALID_EVERY = 10  # one window in ten is kept for validation
# Learning rates and tokens of a window, where the command line has none.
TINY_RATE, TINY_SEQ_LEN = 1e-3, 128
FULL_RATE, ADAPTER_RATE, SEQ_LEN = 1e-5, 1e-4, 2048


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="folder of a causal Mixture-of-Experts model and its tokenizer")
    source.add_argument("--tiny", action="store_true", help="a small random Qwen3-MoE, trained a little first")
    parser.add_argument("--tiny-steps", type=int, default=60, help="steps of that first training")
    parser.add_argument("--text", type=Path, help="file to fine-tune on; required with --model")
    parser.add_argument("--deepspeed", required=True, help="ds_config.json")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="windows of a rank in one micro-step")
    parser.add_argument("--accumulation", type=int, help="micro-steps; by default what the ds_config says, or 1")
    parser.add_argument("--seq-len", type=int, help=f"tokens of a window; default {SEQ_LEN}, tiny {TINY_SEQ_LEN}")
    parser.add_argument(
        "--learning-rate",
        type=float,
        help=f"default {FULL_RATE:g}, for adapters {ADAPTER_RATE:g}, tiny {TINY_RATE:g}",
    )
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations of a real model")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of attention only; needs peft")
    parser.add_argument("--lora-experts", action="store_true", help="adapters of the experts too")
    parser.add_argument("--save-to", type=Path, help="folder for the model, or its adapters, that were trained")
    parser.add_argument("--save-every", type=int, help="steps between checkpoints in runs/finetune_hf")
    parser.add_argument("--json-file", type=Path, help="where rank 0 writes the final record")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.tiny and args.text is None:
        parser.error("--model needs --text FILE")
    if args.seq_len is None:
        args.seq_len = TINY_SEQ_LEN if args.tiny else SEQ_LEN
    if args.learning_rate is None:
        args.learning_rate = TINY_RATE if args.tiny else ADAPTER_RATE if args.lora_rank else FULL_RATE
    return args


# ---------------------------------------------------------------------------------------------------------------- text


def read_text(path: Path | None) -> str:
    if path is not None:
        return path.read_text(encoding="utf-8")
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    return "\n\n".join(page.read_text(encoding="utf-8") for page in pages)


def read_library() -> str:
    """Some of the standard library's sources, the same on every rank."""
    root = Path(sysconfig.get_path("stdlib"))
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(root.glob("[a-d]*.py")))


def windows_of(text: str, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Tensor:
    """Token ids [num_windows, seq_len], one window after the other."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]
    num_windows = len(ids) // seq_len
    if num_windows < 2 * VALID_EVERY:
        raise SystemExit(f"the text has {num_windows} windows of {seq_len} tokens; give a longer one with --text")
    return ids[: num_windows * seq_len].view(num_windows, seq_len)


def examples_of(windows: Tensor) -> list[dict[str, Tensor]]:
    """The windows in the form that the Trainer takes; the model shifts the labels itself."""
    return [{"input_ids": window, "labels": window} for window in windows]


# --------------------------------------------------------------------------------------------------------------- model


def build_tiny(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Qwen3-MoE of 1.1M parameters that has seen some text; every rank trains the same one by itself."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        use_cache=False,
    )
    torch.manual_seed(args.seed)
    model = Qwen3MoeForCausalLM(config)
    windows = windows_of(read_library(), tokenizer, args.seq_len)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.tiny_steps):
        first = 8 * step % (len(windows) - 8)
        batch = windows[first : first + 8]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
    model.config.use_cache = False
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def add_adapters(model: PreTrainedModel, rank: int, *, with_experts: bool) -> torch.nn.Module:
    """Freezes the model and gives its attention, and its experts, adapters of low rank."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if with_experts else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, settings)


# ------------------------------------------------------------------------------------------------------------ training


def join_ranks_on_cpus() -> None:
    """Joins the ranks.  Otherwise the Trainer, without an accelerator, treats each rank as a job of its own."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def main() -> None:
    args = parse_args()
    has_accelerator = get_accelerator().device_name() != "cpu"
    if not has_accelerator:
        join_ranks_on_cpus()
    # 1. Arguments, before the model: with ZeRO-3 in the ds_config, transformers then loads weights in parts.
    #    The Trainer wants to be told what the ds_config says of the dtype and of micro-steps.
    config = json.loads(Path(args.deepspeed).read_text(encoding="utf-8"))
    is_bf16 = config.get("bf16", {}).get("enabled") is True
    accumulation = (
        config.get("gradient_accumulation_steps", "auto") if args.accumulation is None else args.accumulation
    )
    arguments = TrainingArguments(
        output_dir="runs/finetune_hf",
        deepspeed=args.deepspeed,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        gradient_accumulation_steps=1 if accumulation == "auto" else accumulation,
        learning_rate=args.learning_rate,
        gradient_checkpointing=not (args.tiny or args.no_checkpointing),
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="steps" if args.save_every else "no",
        save_steps=args.save_every or args.steps,
        report_to=[],
        seed=args.seed,
        bf16=is_bf16,
        use_cpu=not has_accelerator,
        accelerator_config={"use_configured_state": not has_accelerator},
        dataloader_pin_memory=has_accelerator,
        disable_tqdm=True,
    )
    # 2. Model and text.
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    model, tokenizer = build_tiny(args) if args.tiny else load(args.model, dtype)
    if args.lora_rank:
        model = add_adapters(model, args.lora_rank, with_experts=args.lora_experts)
    windows = windows_of(read_text(args.text), tokenizer, args.seq_len)
    is_valid = torch.arange(len(windows)) % VALID_EVERY == 0
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=examples_of(windows[~is_valid]),
        eval_dataset=examples_of(windows[is_valid]),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    # 3. Training and one evaluation at the end.
    result = trainer.train()
    valid_loss = trainer.evaluate()["eval_loss"]
    if args.save_to is not None:
        trainer.save_model(str(args.save_to))
    if trainer.is_world_process_zero():
        record = {
            "loss": result.training_loss,
            "valid_loss": valid_loss,
            "steps": args.steps,
            "world_size": trainer.args.world_size,
            "losses": [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry],
        }
        print(f"done: loss {record['loss']:.4f}, validation loss {valid_loss:.4f}", flush=True)
        if args.json_file is not None:
            args.json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
