# SPDX-License-Identifier: Apache-2.0
"""What everyday scripts do: a row for each script of scripts.py, and how its three columns end.

test_works_with.py runs the rows, and compares docs/works-with.md with `page()`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["same", "other", "refused", "fails", "wrong", "ends", "hangs"]


@dataclass(frozen=True)
class Cell:
    """How a script ends.

    same      losses and saved weights are those of the script without expert parallelism
    other     it trains, with another result, which is right too
    refused   hybridep raises an error with this text
    fails     DeepSpeed, or a library, raises an error with this text
    wrong     DeepSpeed, or a library, goes on with a wrong result, and says nothing
    ends      ranks wait for each other, a message with this text says so, and a time limit ends them
    hangs     ranks wait for each other until a time limit ends them, or gloo ends one whose messages do not fit
    """

    kind: Kind
    text: str = ""  # part of the error; or what is other or wrong
    issue: str = ""  # a public report, such as "DeepSpeed#8377"

    @property
    def waits(self) -> bool:
        """True if ranks wait until a time limit ends them."""
        return self.kind in ("ends", "hangs")

    @property
    def is_an_error(self) -> bool:
        """True if the script ends with an error."""
        return self.kind in ("refused", "fails")


SAME = Cell("same")
CLIENT_GROUPS = Cell("fails", "None of the param groups are marked as MoE", "DeepSpeed#5354")
NOT_FOUND = Cell("fails", "no MoE layers detected")
ONE_RANK = Cell("refused", "would write the experts of one rank only")
OF_RANK_0 = Cell("wrong", "the file has the experts of rank 0 only")
SHARED = Cell("fails", "contained shared tensors")
TWICE = Cell("fails", "'NoneType' object has no attribute 'backward'")
WAITS = Cell("hangs", "", "DeepSpeed#6634")
DROPPED = Cell("wrong", "routers stay as they were, and their adapters vanish")
NO_COPY = Cell("fails", "cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object", "DeepSpeed#7245")
NOT_RETURNED = Cell("refused", "set managed_gradient_accumulation in ds_config to false (for LayerDrop)")
TWO_MATRICES = Cell("other", "AutoEP has gate and up of an expert as two matrices")
ONLY_BF16 = Cell("fails", "Expected inputs of BF16 type")
LOSSY = Cell("other", "codecs are lossy")
UNEQUAL = Cell("ends", "all ranks must call the model equally often")


@dataclass(frozen=True)
class Row:
    """One script.

    close: how far losses and weights may be from those without expert parallelism, relative.  fp32 sums in another
        order make 1e-7 of these models; a gradient that is wrong by a factor makes 1e-3 and more.
    """

    script: str
    what: str
    autoep: Cell = SAME
    block: Cell = SAME
    plain: Cell = SAME
    close: float = 1e-5

    @property
    def is_slow(self) -> bool:
        """True if only `make test-slow` runs it."""
        return self.script not in QUICK

    def cell(self, column: str) -> Cell:
        """The cell of a column."""
        found: Cell = getattr(self, column)
        return found


# One of each kind; less than a minute of CPU time together.
QUICK = {
    "trainer_without_optimizer",
    "sft",
    "grpo_of_unequal_lengths",
    "lora_router",
    "accelerator_save_model",
    "ema_by_deepcopy",
    "lora_attention",
    "dpo",
}

SECTIONS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "transformers' Trainer",
        (
            Row("trainer_full", "full fine-tuning"),
            Row("trainer_without_optimizer", 'a ds_config without `"optimizer"`', autoep=CLIENT_GROUPS),
            Row("trainer_with_auxiliary_loss", "`output_router_logits=True`"),
            Row("trainer_checkpointing", "gradient checkpointing, accumulation"),
            Row("best_model_at_end", "evaluation, `load_best_model_at_end`; one folder for all ranks"),
            Row("resume", "`resume_from_checkpoint`"),
            Row("two_trainers", "a second Trainer for the same model", autoep=NOT_FOUND),
            Row("trains_twice", "`train()` twice", *[TWICE] * 3),
            Row("trainer_value_head", "a value head around the model; `save_model`", autoep=NOT_FOUND),
            Row("reward_classification", "a reward model, `...ForSequenceClassification`"),
            Row("trainer_torch_compile", "`torch_compile=True`", autoep=ONLY_BF16),
        ),
    ),
    (
        "trl",
        (
            Row("sft", "SFT, defaults (with auxiliary loss)"),
            Row("sft_packing", "SFT, packing"),
            Row("sft_lora", "SFT, adapters of attention", autoep=NOT_FOUND),
            Row("dpo", "DPO, reference model by copy"),
            Row("dpo_lora", "DPO, adapters switched off", autoep=NOT_FOUND),
            Row("dpo_precomputed", "DPO, `precompute_ref_log_probs`", autoep=NOT_FOUND),
            Row("kto", "KTO"),
            Row("grpo_of_unequal_lengths", "GRPO, ranks stop at different lengths", autoep=WAITS),
            Row("trl_reward", "RewardTrainer"),
        ),
    ),
    (
        "peft's adapters, with the Trainer",
        (
            Row("lora_attention", "of attention alone", autoep=NOT_FOUND),
            Row("lora_experts", "of experts, `target_parameters`", autoep=NOT_FOUND),
            Row("lora_dropout", "of attention, `lora_dropout`", autoep=NOT_FOUND),
            Row("lora_rslora", "`use_rslora`, `alpha_pattern`", autoep=NOT_FOUND),
            Row(
                "lora_router", "of routers", autoep=DROPPED, block=Cell("refused", "leave 'gate' out of the adapters")
            ),
            Row("lora_router_saved", "routers in `modules_to_save`", autoep=NOT_FOUND),
            Row("lora_new_tokens", "new tokens, in `modules_to_save`", autoep=NOT_FOUND),
        ),
    ),
    (
        "accelerate",
        (
            Row("accelerate_loop", "a loop with `Accelerator`"),
            Row("accelerate_client_optimizer", "an optimizer of its own", autoep=CLIENT_GROUPS),
            Row("accelerator_save_model", "`accelerator.save_model`", autoep=OF_RANK_0),
            Row("accelerator_get_state_dict", "`get_state_dict`, then `save_pretrained`", autoep=OF_RANK_0),
            Row("unwrapped_save_pretrained", "`save_pretrained` on rank 0", autoep=SHARED, block=ONE_RANK),
            Row("accelerator_save_state", "`save_state`, `load_state`"),
        ),
    ),
    (
        "A loop of one's own",
        (
            Row("loop_full", "`engine(...)`, `backward`, `step`"),
            Row("client_optimizer_with_groups", "groups with their own rates and decay", autoep=CLIENT_GROUPS),
            # Muon rounds to bf16: where gradients differ by 1e-7, plain DeepSpeed's weights differ by 2e-4.
            Row("muon", "Muon", autoep=TWO_MATRICES, block=TWO_MATRICES, close=1e-3),
            Row("offload_optimizer", "`offload_optimizer`"),
            Row("offload_states", "`offload_states()`, `reload_states()`"),
            Row("torch_autocast", "`torch_autocast` in bf16", close=1e-2),
            Row("two_forwards_one_backward", "two forwards, one backward"),
            Row("frozen_routers", "frozen routers"),
            Row("reentrant_checkpointing", "re-entrant gradient checkpointing"),
            Row("activation_offloading", "`saved_tensors_hooks`"),
            Row("layer_drop", "LayerDrop, with accumulation", block=NOT_RETURNED),
            Row("value_head", "a value head around the model", autoep=NOT_FOUND),
            Row("ema_by_deepcopy", "averaged weights by `deepcopy`", autoep=NO_COPY),
            Row("inference_mode_first", "evaluation under `inference_mode` first, ZeRO 3"),
            Row("skips_a_batch_with_nan", "a batch with NaN is skipped; lossy codecs", block=LOSSY),
            Row("only_rank_0_evaluates", "only rank 0 evaluates", autoep=WAITS, block=UNEQUAL),
            Row("generate_in_step", "`generate()`, equal lengths"),
            Row("generate_of_unequal_lengths", "`generate()`, unequal lengths", autoep=WAITS),
        ),
    ),
)


_INTRO = """\
# What works with it

Scripts as people write them, each run three times on four CPU ranks: without expert parallelism, with DeepSpeed's
AutoEP alone, and with the `"hybridep"` block. The model is a tiny random Qwen3-MoE in fp32, under ZeRO 1. Versions:
DeepSpeed 0.19.8, transformers 5.3.0, accelerate 1.15.0, peft 0.21.2, trl 1.16.0. All ranks were on one machine.

- "Same": losses of all ranks and saved weights are those without expert parallelism, to 1e-5 (`torch_autocast`: 1e-2).
- AutoEP alone has no call that saves a whole model. Where a script calls none itself, our `save_pretrained` writes
  the weights of that column.
- `trainer_torch_compile` has the backend `eager`, and `muon` runs uncompiled: compilers take minutes on a CPU.
- [The scripts](../tests/works_with/scripts.py) have the names in the first column.
  `tests/works_with/test_works_with.py` runs each, and compares this page with [the
  table](../tests/works_with/table.py) of what it expects.
- transformers before 5.6 takes probabilities of routers for logits in auxiliary losses (transformers#45120). AutoEP,
  with the block or without, does not. Here, transformers is corrected.
"""


def page() -> str:
    """docs/works-with.md."""
    parts = [_INTRO, _counts()]
    for title, rows in SECTIONS:
        parts += [
            f"\n## {title}\n\n| script | what it does | without EP | AutoEP alone | with the block |\n",
            "|---" * 5,
            "|\n",
        ]
        for row in rows:
            cells = [_say(row.cell(column)) for column in _COLUMNS]
            parts.append(f"| {' | '.join([f'`{row.script}`', row.what, *cells])} |\n")
    return "".join(parts)


_COLUMNS = ("plain", "autoep", "block")


def _counts() -> str:
    rows = [row for _, rows in SECTIONS for row in rows]
    lines = [f"\n| of {len(rows)} scripts | without EP | AutoEP alone | with the block |\n|---|---|---|---|\n"]
    for kind, about in _KINDS.items():
        numbers = [sum(row.cell(column).kind == kind for row in rows) for column in _COLUMNS]
        lines.append(f"| {about} | {' | '.join(map(str, numbers))} |\n")
    return "".join(lines)


_KINDS = {
    "same": "same result",
    "other": "another result, which is right too",
    "refused": "refused with a sentence of ours",
    "fails": "error of DeepSpeed or another library",
    "wrong": "wrong, and nothing is said",
    "ends": "ranks wait, and a message says for whom",
    "hangs": "ranks wait or die, and nothing says why",
}


def _say(cell: Cell) -> str:
    issue = f" ({cell.issue})" if cell.issue else ""
    match cell.kind:
        case "same":
            return "same"
        case "other":
            return f"other: {cell.text}{issue}"
        case "refused":
            return f"refused: {cell.text}"
        case "fails":
            return f"error: {cell.text}{issue}"
        case "ends":
            return f"waits, with a message: {cell.text}"
        case "wrong":
            return f"**wrong**: {cell.text}{issue}"
        case _:
            return f"**hangs or dies**{issue}"


if __name__ == "__main__":
    Path(__file__).resolve().parents[2].joinpath("docs", "works-with.md").write_text(page(), encoding="utf-8")
