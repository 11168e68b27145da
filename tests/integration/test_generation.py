# SPDX-License-Identifier: Apache-2.0
"""`generate` on all ranks of a model that is trained, against the model that is saved, in one process."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from autoep_cases import case2, case4
from deepspeed import comm as dist
from marks import slow
from parity import Case
from process_pool import Pools, ProcessPool
from training import engine_of, train

import ds_hybridep

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"),
]


# Ranks end at other lengths.  The second time nobody says that they should wait for each other.
OPTIONS: dict[int, dict[str, Any]] = {2: {"synced_gpus": True}, 3: {"num_beams": 2}}


def written_by(model: Any, rank: int, **options: Any) -> list[list[int]]:
    """Tokens after two prompts of this rank; each rank has prompts and a number of tokens of its own."""
    prompts = torch.arange(2 * (rank + 1)).view(2, -1) % 7
    options |= {"max_new_tokens": 3 + rank, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    options["output_router_logits"] = False  # for which transformers has no place in its cache
    return model.generate(prompts, **options).tolist()


def write_and_train(case: Case, folder: str) -> dict[str, Any]:
    """Tokens before and after some steps, losses, and bytes of tokens that crossed each level for the former."""
    with engine_of(case, with_block=True) as engine:
        losses, written = train(engine, case, 0, 2), []
        for step in (2, 3):
            before = ds_hybridep.stats(engine)["levels"]
            engine.eval()
            model = engine.module if step == 2 else engine
            written.append(written_by(model, dist.get_rank(), **OPTIONS[step]))
            engine.train()
            after = ds_hybridep.stats(engine)["levels"]
            ds_hybridep.save_pretrained(engine, Path(folder) / f"after-{step}")
            losses += train(engine, case, step, 1)
        sent = [b["sent_bytes"]["tokens"] - a["sent_bytes"]["tokens"] for a, b in zip(before, after, strict=True)]
        return {"written": written, "losses": losses, "sent": sent}


def only_train(case: Case) -> list[float]:
    with engine_of(case, with_block=True) as engine:
        return train(engine, case, 0, 4)


def write_on_one_rank(case: Case) -> list[float]:
    """Losses of a run in which rank 0 alone writes something between two steps."""
    with engine_of(case, with_block=True) as engine:
        losses = train(engine, case, 0, 2)
        if dist.get_rank() == 0:
            engine.eval()
            written_by(engine, 0)
            engine.train()
        return losses + train(engine, case, 2, 2)


def written_by_saved(folder: str, step: int) -> list[list[int]]:
    """Tokens that a saved model writes after this rank's prompts, in this process alone."""
    import transformers

    saved = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / f"after-{step}", dtype="float32")
    return written_by(saved, dist.get_rank(), **OPTIONS[step] | {"synced_gpus": False})


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case2("qwen3_moe", 1, zero_stage=1), id="two ranks"),
        *(
            slow(case4(family, 2, 1, zero_stage=zero_stage), id=f"{family}-{zero_stage}")
            for family in ("qwen3_moe", "mixtral")
            for zero_stage in (1, 3)
        ),
    ],
)
def test_all_ranks_write_what_the_saved_model_writes(pool_of: Pools, tmp_path: Path, case: Case) -> None:
    pool = pool_of(case.world_size)
    results = pool.run(write_and_train, case=case, folder=str(tmp_path))
    for place, step in enumerate((2, 3)):
        saved = pool.run(written_by_saved, folder=str(tmp_path), step=step)
        assert [one["written"][place] for one in results] == saved
    for one in results:
        *domain, inside = one["sent"]
        assert not any(domain), "the domain holds what its tokens need"
        assert inside > 0
    # Training does not notice: the losses are those of a run that generates nothing.
    assert [one["losses"] for one in results] == pool.run(only_train, case=case)


def test_one_rank_alone_may_write_where_it_has_all_experts(pool2: ProcessPool) -> None:
    case = case2("qwen3_moe", zero_stage=1)
    assert pool2.run(write_on_one_rank, case=case) == pool2.run(only_train, case=case)
