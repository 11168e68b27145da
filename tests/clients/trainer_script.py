# SPDX-License-Identifier: Apache-2.0
"""What a test needs of a training program's own transformers and peft; runs in the program's environment.

python trainer_script.py make FOLDER               a model, a tokenizer and data
python trainer_script.py adapters FOLDER OUT       adapters to begin with
python trainer_script.py logits MODEL OUT [ADAPTERS]
"""

import json
import random
import sys
from pathlib import Path

import torch
import transformers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = "moe expert link train slow fast token gate layer send".split()
NUM_ROWS = 64


def make(folder: Path) -> None:
    """Write a random Qwen3-MoE in model/, rows.json of instructions, and pairs.json of answers to choose from."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: at for at, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        additional_special_tokens=SPECIAL[1:2],
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(vocab), hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    drawn = [draw.choices(WORDS, k=draw.randint(3, 8)) for _ in range(NUM_ROWS)]
    asked = [{"instruction": " ".join(words), "input": ""} for words in drawn]
    right = [" ".join(reversed(words)) for words in drawn]
    rows = [one | {"output": answer} for one, answer in zip(asked, right, strict=True)]
    pairs = [
        one | {"chosen": answer, "rejected": one["instruction"]} for one, answer in zip(asked, right, strict=True)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "pairs.json").write_text(json.dumps(pairs))


def adapters(folder: Path, out: Path) -> None:
    """Write adapters of attention as peft makes them."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    torch.manual_seed(1)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    settings = peft.LoraConfig(r=8, lora_dropout=0.05, target_modules=projections, task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(out)


def logits(model_folder: Path, out: Path, adapters_folder: Path | None = None) -> None:
    """Write what a folder computes for a fixed batch, [2, 32, vocabulary]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto")
    if adapters_folder is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapters_folder)
    with torch.no_grad():
        torch.save(model.eval()(input_ids=torch.arange(64).reshape(2, 32) + 3).logits, out)


if __name__ == "__main__":
    {"make": make, "adapters": adapters, "logits": logits}[sys.argv[1]](*map(Path, sys.argv[2:]))
