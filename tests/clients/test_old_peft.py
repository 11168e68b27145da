# SPDX-License-Identifier: Apache-2.0
"""The oldest peft and accelerate that people have beside transformers 5 load what we write: `make test-clients`."""

from pathlib import Path

import pytest
import torch
from clients import Client
from exporting import Job, exported, run, tokens_of
from process_pool import ProcessPool

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # of transformers and peft
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]

OLD = Client(name="old_peft", packages=("peft==0.18.1", "transformers==5.3.0", "accelerate==1.11.0"))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_old_peft_computes_what_was_trained(pool2: ProcessPool, tmp_path: Path, family: str) -> None:
    OLD.make()
    tasks, wanted = [], []
    for adapters in ("", "attention", "experts"):
        job = Job(folder=str(tmp_path / adapters), family=family, zero_stage=0, adapters=adapters, live=True)
        logits = pool2.run(run, job=job, timeout_s=300.0)[0]["logits"]
        base, live, out = f"{job.folder}/base", f"{job.folder}/live", exported(job)
        common = {"do": "transformers_logits", "prompts": tokens_of(job).tolist()}
        if adapters:
            found = [common | {"model": base, "adapters": folder} for folder in (live, out)]
            found.append(common | {"model": exported(job, "--merged", name="merged")})
        else:
            found = [common | {"model": folder} for folder in (live, out)]
        tasks += found
        wanted += [logits] * len(found)
    for task, ours, theirs in zip(tasks, OLD.do(tasks, tmp_path), wanted, strict=True):
        where = f"{task['model']}, {task.get('adapters')}"
        if "experts" in str(task.get("adapters")):  # peft before 0.19 takes rows for columns there
            assert "size mismatch for base_model.model.model.layers.0.mlp.experts" in str(ours), where
            continue
        assert not isinstance(ours, str), f"{where}: {ours}"
        different = (torch.tensor(ours) - theirs).abs().max().item()
        assert different < 1e-5, f"{where}: logits differ by {different}"
