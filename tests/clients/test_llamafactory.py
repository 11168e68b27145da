# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory trains with the two blocks as with DeepSpeed alone: `make test-clients`.

Its recipes of whole models and of adapters, shortened, on four ranks; transformers and peft read the folders.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import REPOSITORY, Client
from safetensors.torch import load_file

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(7200)]

NUM_RANKS = 4
RUN_LIMIT_S = 1200


@dataclass(frozen=True, kw_only=True)
class Trainer(Client):
    """A program that trains with this checkout installed."""

    def make(self) -> None:
        """Make the environment, if it is not there."""
        super().make()
        installed = ("--no-deps", "--no-build-isolation", "-e", str(REPOSITORY))
        self._install(*installed)
        # LLaMA-Factory imports torchaudio always, and needs it for sound only.
        stand_in = next(self.folder.glob("lib/python3*/site-packages")) / "torchaudio.py"
        stand_in.write_text('"""A stand-in: nothing here has sound."""\n')


PROGRAM = Trainer(
    name="llamafactory",
    without_needs="llamafactory==0.9.5",
    left_out=("torchaudio", "torchvision", "gradio"),
    packages=("deepspeed==0.19.8", "transformers==5.6.0", "psutil", "rich", "pybind11", "ninja", "setuptools>=77"),
)

# Makes a model, a tokenizer and data; in the program's environment, so by its transformers.
_MAKE = """
import json, random, sys, torch, transformers
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
out = Path(sys.argv[1])
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
vocab = {token: at for at, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokens = Tokenizer(models.BPE(vocab=vocab, merges=[]))
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokens, eos_token=special[2], pad_token=special[0], additional_special_tokens=special[1:2]
).save_pretrained(out / "model")
torch.manual_seed(0)
config = transformers.Qwen3MoeConfig(
    vocab_size=len(vocab), hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
    norm_topk_prob=True, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=2,
    pad_token_id=0,
)
transformers.Qwen3MoeForCausalLM(config).save_pretrained(out / "model")
draw = random.Random(0)
words = "moe expert link train slow fast token gate layer send".split()
rows = [draw.choices(words, k=draw.randint(3, 8)) for _ in range(64)]
rows = [{"instruction": " ".join(row), "input": "", "output": " ".join(reversed(row))} for row in rows]
(out / "rows.json").write_text(json.dumps(rows))
(out / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
"""

# What a folder computes for a fixed batch.
_READ = """
import json, sys, torch, transformers
base, adapters, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
if adapters:
    import peft
    model = peft.PeftModel.from_pretrained(model, adapters)
with torch.no_grad():
    logits = model.eval()(input_ids=torch.arange(64).reshape(2, 32) + 3).logits
torch.save(logits, out)
"""

# examples/deepspeed/ds_z2_config.json of LLaMA-Factory.
DS_CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
        "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
}  # fmt: skip
BLOCKS = {
    "expert_parallel": {"enabled": True, "autoep_size": NUM_RANKS},
    "hybridep": {"levels": [{"name": "dc", "size": 2, "domain_size": 2}, {"name": "gpu", "size": 2}]},
}
# examples/train_full/qwen3_full_sft.yaml and examples/train_lora/qwen3_lora_sft.yaml: what differs, and what both say.
METHODS: dict[str, dict[str, Any]] = {
    "full": {"finetuning_type": "full"},
    "lora": {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"},
}
RECIPE = {
    "stage": "sft", "do_train": True, "dataset": "rows", "template": "qwen3_nothink", "cutoff_len": 128,
    "logging_steps": 1, "save_steps": 4, "overwrite_output_dir": True, "save_only_model": False, "report_to": "none",
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": 6,
    "lr_scheduler_type": "cosine", "bf16": False, "val_size": 0.125, "eval_strategy": "steps", "eval_steps": 3,
    "seed": 1,
}  # fmt: skip


def python(program: str, *arguments: object) -> None:
    own = os.environ | {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    command = [PROGRAM.python, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]


def trained(folder: Path, method: str, blocks: dict[str, Any]) -> tuple[list[float], Path]:
    """Losses, of training and of evaluation, and the folder that the program wrote."""
    out = folder / f"{method}-{'with' if blocks else 'without'}"
    out.mkdir()
    (out / "ds_config.json").write_text(json.dumps(DS_CONFIG | blocks))
    recipe = RECIPE | METHODS[method] | {
        "model_name_or_path": str(folder / "model"), "dataset_dir": str(folder), "output_dir": str(out / "saved"),
        "deepspeed": str(out / "ds_config.json"),
    }  # fmt: skip
    (out / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    bin_folder = PROGRAM.folder / "bin"
    own = {
        "PATH": f"{bin_folder}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
        "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(NUM_RANKS), "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": str(PROGRAM.folder / "torch_extensions"),
    }  # fmt: skip
    command = [bin_folder / "llamafactory-cli", "train", "recipe.yaml"]
    done = subprocess.run(command, cwd=out, env=os.environ | own, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    log = json.loads((out / "saved" / "trainer_state.json").read_text())["log_history"]
    return [record[key] for record in log for key in ("loss", "eval_loss") if key in record], out / "saved"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_recipe_trains_and_saves_what_deepspeed_alone_does(tmp_path: Path, method: str) -> None:
    PROGRAM.make()
    python(_MAKE, tmp_path)
    alone, without = trained(tmp_path, method, {})
    losses, with_blocks = trained(tmp_path, method, BLOCKS)
    assert len(losses) == 8
    assert losses == pytest.approx(alone, rel=1e-5)
    file = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    expected, found = load_file(without / file), load_file(with_blocks / file)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert float((found[name] - weight).norm()) <= 1e-5 * float(weight.norm()), name
    logits = []
    for folder in (without, with_blocks):
        model, adapters = (folder, "") if method == "full" else (tmp_path / "model", folder)
        python(_READ, model, adapters, tmp_path / "logits.pt")
        logits.append(torch.load(tmp_path / "logits.pt"))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)
