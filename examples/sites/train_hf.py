# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes the small model of finetune_hf.py in one of several sites, with the Trainer; README.md says how.

What differs from a script without sites: the site's share of the data, and the step at which the Trainer begins.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers
from deepspeed.accelerator import get_accelerator
from transformers.trainer_utils import get_last_checkpoint

import ds_hybridep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from finetune_hf import build_tiny, examples_of, join_ranks_on_cpus, read_text, windows_of

SEQ_LEN = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--deepspeed", required=True, help="ds_config.json, with sites")
    parser.add_argument("--steps", type=int, default=100, help="train until this step; the same on all sites")
    parser.add_argument(
        "--save-steps", type=int, default=0, help="steps between checkpoints, from which it goes on; 0: none"
    )
    args = parser.parse_args()
    has_accelerator = get_accelerator().device_name() != "cpu"
    if not has_accelerator:
        join_ranks_on_cpus()
    site = ds_hybridep.site(args.deepspeed)
    arguments = transformers.TrainingArguments(
        output_dir=f"runs/site_{site.name}",
        deepspeed=args.deepspeed,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        save_total_limit=2,
        report_to=[],
        use_cpu=not has_accelerator,
        accelerator_config={"use_configured_state": not has_accelerator},
        dataloader_pin_memory=has_accelerator,
        disable_tqdm=True,
    )
    model, tokenizer = build_tiny(argparse.Namespace(seed=0, seq_len=SEQ_LEN, tiny_steps=30))
    windows = examples_of(windows_of(read_text(None), tokenizer, SEQ_LEN))

    class BeginAtTheCommonStep(transformers.TrainerCallback):
        """A site that comes back takes over the step of the others; the Trainer itself would begin at 0."""

        def on_train_begin(self, args, state, control, **more):
            state.global_step = trainer.deepspeed.global_steps

    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=windows[site.index :: site.number],
        data_collator=transformers.default_data_collator,
        callbacks=[BeginAtTheCommonStep()],
    )
    has_folder = args.save_steps and Path(arguments.output_dir).is_dir()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir) if has_folder else None)
    trainer.deepspeed.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
