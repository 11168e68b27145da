# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's universal checkpoints of AutoEP models, written and read with the "hybridep" block and without."""

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from autoep_cases import case4
from deepspeed import comm as dist
from parity import FP32_TOLERANCE, Case
from process_pool import ProcessPool
from universal import read, write

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"),
]


# -- in the workers ---------------------------------------------------------------------------------------------


def write_and_read(case: Case, other: Case, folder: str) -> dict[str, Any]:
    """Losses by (written with the block, read with the block), and by reader those of another layout.

    Weights that changed on the way are named.
    """
    losses: dict[Any, list[float]] = {}
    changed = []
    for writes in (False, True):
        path = Path(folder) / str(writes)
        saved, losses[writes, "kept"] = write(case, path, with_block=writes)
        for reads in (False, True):
            loaded, losses[writes, reads] = read(case, path, with_block=reads)
            changed += [name for name, value in saved.items() if not torch.equal(value, loaded[name])]
    others = {reads: read(other, path, with_block=reads) for reads in (False, True)}
    changed += [name for name, value in others[False][0].items() if not torch.equal(value, others[True][0][name])]
    return {"losses": losses, "others": {reads: found for reads, (_, found) in others.items()}, "changed": changed}


def go_on_with_codecs(case: Case, folder: str) -> dict[str, Any]:
    """Losses of lossy training that goes on, and of the same from universal checkpoints with and without our files."""
    levels = case.ds_config(with_block=True)["hybridep"]["levels"]
    levels[0] |= {"weight_codec": "int8", "gradient_codec": {"type": "low_rank", "rank": 2}}
    # Masters are saved, which lossy dense parameters are not equal to.
    levels[0] |= {"dense_weight_codec": "identity"}
    path = Path(folder)
    _, straight = write(case, path, with_block=True, levels=levels)
    _, without = read(case, path, with_block=True, levels=levels)
    if dist.get_rank() == 0:
        for file in (path / "two").glob("hybridep_*"):
            shutil.copy(file, path / "two_universal")
    dist.barrier()
    _, with_files = read(case, path, with_block=True, levels=levels)
    return {"straight": straight, "without": without, "with": with_files}


# -- tests ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "offload"), [(1, None), (2, None), (3, None), (1, "both")])
def test_the_block_changes_nothing(
    pool4: ProcessPool, tmp_path: Path, zero_stage: int, offload: Literal[None, "both"]
) -> None:
    case = case4("qwen3_moe", 2, 1, zero_stage=zero_stage, offload=offload)
    other = replace(case, levels=(("dc", 2, 1), ("gpu", 2, 2)), toy=replace(case.toy, ep_size=2))
    for found in pool4.run(write_and_read, case=case, other=other, folder=str(tmp_path)):
        assert found["changed"] == []
        losses = found["losses"]
        # Under ZeRO-3 unmodified DeepSpeed does not go on as without the way round either.
        expected = losses[False, False] if zero_stage == 3 else losses[False, "kept"]
        for key in ((False, False), (False, True), (True, False), (True, True)):
            assert losses[key] == pytest.approx(expected, rel=FP32_TOLERANCE, abs=0.0), key
        assert found["others"][True] == pytest.approx(found["others"][False], rel=FP32_TOLERANCE, abs=0.0)


@pytest.mark.slow
def test_our_files_beside_it_keep_what_codecs_have(pool4: ProcessPool, tmp_path: Path) -> None:
    case = case4("qwen3_moe", 2, 1, zero_stage=1)
    for found in pool4.run(go_on_with_codecs, case=case, folder=str(tmp_path)):
        assert found["with"] == found["straight"]
        assert found["without"] != found["straight"]
        assert found["without"] == pytest.approx(found["straight"], rel=1e-2)
