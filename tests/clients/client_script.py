# SPDX-License-Identifier: Apache-2.0
"""What a program does that reads our exports; runs where neither ds_hybridep nor deepspeed is installed.

    python client_script.py TASKS RESULTS

TASKS is a JSON list of {"do": NAME, ...}, RESULTS the JSON list of what the functions of these names return.
"""

import gc
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

NUM_NEW = 8
NUM_LIKELIEST = 5

Answers = list[dict[str, Any]]  # by prompt: its new tokens, and for each of them the likeliest tokens and their logs


def transformers_answers(*, model: str, prompts: list[list[int]], adapters: str | None = None) -> Answers:
    """Greedy tokens and log-probabilities of transformers, with peft's adapters if there are any."""
    loaded = load_in_transformers(model, adapters)
    import torch

    answers = []
    for prompt in prompts:
        with torch.no_grad():
            found = loaded.generate(
                torch.tensor([prompt]),
                max_new_tokens=NUM_NEW,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logs = [one[0].float().log_softmax(-1).topk(NUM_LIKELIEST) for one in found.logits]
        answers.append(
            {
                "tokens": found.sequences[0, len(prompt) :].tolist(),
                "logs": [dict(zip(map(str, one.indices.tolist()), one.values.tolist(), strict=True)) for one in logs],
            }
        )
    return answers


def load_in_transformers(model: str, adapters: str | None) -> Any:
    """The model of a folder, with the adapters of another."""
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    if adapters is not None:
        import peft

        loaded = peft.PeftModel.from_pretrained(loaded, adapters)
    return loaded.eval()


def transformers_logits(*, model: str, prompts: list[list[int]], adapters: str | None = None) -> list[Any] | str:
    """What transformers computes for prompts of one length; an error if the adapters do not load."""
    import torch

    try:
        loaded = load_in_transformers(model, adapters)
    except RuntimeError as error:
        return str(error)
    with torch.no_grad():
        return list(loaded(input_ids=torch.tensor(prompts)).logits.float().tolist())


def vllm_answers(*, model: str, prompts: list[list[int]]) -> Answers:
    """Greedy tokens and log-probabilities of vLLM."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=NUM_NEW, logprobs=NUM_LIKELIEST, detokenize=False)
    answers = []
    for found in vllm_engine(model).generate([{"prompt_token_ids": one} for one in prompts], settings):
        (said,) = found.outputs
        logs = [{str(token): log.logprob for token, log in one.items()} for one in said.logprobs]
        answers.append({"tokens": list(said.token_ids), "logs": logs})
    return answers


def vllm_products(*, model: str, mixed: bool, loads: list[dict[str, Any]]) -> list[str | None]:
    """Load adapters into vLLM, one after the other, and write what its layers then add to each weight.

    loads: of each the folder, whether it is in the fused form, and where to write.  Returns errors, None if none.
    """
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    engine = vllm_engine(model, enable_lora=True, enable_mixed_moe_lora_format=mixed)
    # vLLM has no call that shows what it holds: the manager has the buffers that its kernels read.
    runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    manager = runner.lora_manager._adapter_manager
    errors: list[str | None] = []
    for number, load in enumerate(loads, start=1):
        request = LoRARequest(str(number), number, load["adapters"], is_3d_lora_weight=load["is_fused"])
        try:
            engine.llm_engine.add_lora(request)
        except ValueError as error:
            errors.append(str(error))
            continue
        manager.activate_adapter(number)
        slot = manager.lora_index_to_id.index(number)
        products = {
            f"{name}.{part}": product.float().contiguous()
            for name, layer in manager.modules.items()
            if isinstance(layer.lora_a_stacked, (tuple, list))  # not of embeddings and heads
            for part, product in products_of(layer, slot).items()
        }
        save_file({name: product for name, product in products.items() if product.any()}, load["out"])
        errors.append(None)
    return errors


def products_of(layer: Any, slot: int) -> dict[str, Any]:
    """What a layer of vLLM adds to its weights: one after the other, those of experts by number and name."""
    if not hasattr(layer, "w13_lora_a_stacked"):
        pairs = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        return {str(place): b[slot, 0] @ a[slot, 0] for place, (a, b) in enumerate(pairs)}
    (w1_a, w3_a), (w1_b, w3_b) = layer.w13_lora_a_stacked, layer.w13_lora_b_stacked
    (w2_a,), (w2_b,) = layer.w2_lora_a_stacked, layer.w2_lora_b_stacked
    pairs = {"w1": (w1_a, w1_b), "w2": (w2_a, w2_b), "w3": (w3_a, w3_b)}
    return {
        f"{expert}.{name}": product
        for name, (a, b) in pairs.items()
        for expert, product in enumerate(b[slot] @ a[slot])
    }


def vllm_engine(model: str, **options: Any) -> Any:
    """A small engine of vLLM in this process."""
    from vllm import LLM

    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=32,
        max_num_seqs=4,
        **({"max_lora_rank": 8} if options.get("enable_lora") else {}),
        **options,
    )


def main(tasks: Path, results: Path) -> None:
    """Do all tasks, one after the other."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    for name in ("ds_hybridep", "deepspeed"):
        assert importlib.util.find_spec(name) is None, f"{name} is installed here"
    found = []
    for task in json.loads(tasks.read_text()):
        found.append(globals()[task.pop("do")](**task))
        gc.collect()
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
