# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's universal checkpoints, written and read."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.checkpoint import ds_to_universal
from parity import Case, snapshot
from torch import Tensor
from training import engine_of, train


def universal_engine(case: Case, *, with_block: bool, is_universal: bool, seed: int, **block: Any) -> Any:
    checkpoint = {"load_universal": is_universal}
    return engine_of(
        case, with_block=with_block, hybridep=block if with_block else None, seed=seed, checkpoint=checkpoint
    )


def write(case: Case, folder: Path, *, with_block: bool, **block: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Weights that a universal checkpoint is made of, and losses of going on without it."""
    with universal_engine(case, with_block=with_block, is_universal=False, seed=1, **block) as engine:
        train(engine, case, 0, 2)
        engine.save_checkpoint(str(folder), tag="two")
        saved = snapshot(case, engine.module)
        losses = train(engine, case, 2, 2)
    if dist.get_rank() == 0:
        convert(folder / "two", folder / "two_universal")
    dist.barrier()
    return saved, losses


def convert(source: Path, target: Path) -> None:
    """What the program ds_to_universal does."""
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    options = {"keep_temp_folder": False, "strict": True, "inject_missing_state": False, **workers}
    ds_to_universal.main(Namespace(input_folder=str(source), output_folder=str(target), **options))


def read(case: Case, folder: Path, *, with_block: bool, **block: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Weights that a model with others has after loading, and losses of going on."""
    with universal_engine(case, with_block=with_block, is_universal=True, seed=2, **block) as engine:
        path, _ = engine.load_checkpoint(str(folder))
        assert path is not None
        return snapshot(case, engine.module), train(engine, case, 2, 2)
