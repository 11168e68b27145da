# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written by one engine and read by another, with the block and without."""

from typing import Any

import torch
from parity import Case, merged, whole_parameters
from training import engine_of, evaluate, train

import ds_hybridep

STEPS_BEFORE, STEPS_AFTER = 2, 2


def checked_engine(case: Case, *, with_block: bool, block: dict[str, Any] | None = None, **options: Any) -> Any:
    """As `engine_of`, with settings for the block, which also proves in every step that replicas are equal."""
    settings = merged({"advanced": {"verify_interval": 1}}, block or {})
    return engine_of(case, with_block=with_block, hybridep=settings if with_block else None, **options)


def resume_in_a_fresh_engine(case: Case, folder: str) -> dict[str, Any]:
    """Trains on from a checkpoint twice: in the engine that wrote it, and in one that started with other weights."""
    with checked_engine(case, with_block=True) as engine:
        train(engine, case, 0, STEPS_BEFORE)
        engine.save_checkpoint(folder)
        straight_losses = train(engine, case, STEPS_BEFORE, STEPS_AFTER)
        straight = whole_parameters(engine.module)
        checksums = ds_hybridep.stats(engine)["checksums"]
    with checked_engine(case, with_block=True, seed=2) as engine:
        path, _ = engine.load_checkpoint(folder)
        resumed_losses = train(engine, case, STEPS_BEFORE, STEPS_AFTER)
        resumed = whole_parameters(engine.module)
        is_equal = ds_hybridep.stats(engine)["checksums"] == checksums
    return {
        "is_loaded": path is not None,
        "losses": (straight_losses, resumed_losses),
        "is_equal": is_equal,  # weights, and gradients that were kept back
        "different": [name for name, value in straight.items() if not torch.equal(value, resumed[name])],
    }


def resume_across(case: Case, folder: str) -> dict[tuple[bool, bool], list[float]]:
    """Losses after loading, for every (written with the block, read with the block)."""
    losses = {}
    for writes_with_block in (False, True):
        path = f"{folder}/{'hybrid' if writes_with_block else 'plain'}"
        with checked_engine(case, with_block=writes_with_block) as engine:
            train(engine, case, 0, STEPS_BEFORE)
            engine.save_checkpoint(path)
        for reads_with_block in (False, True):
            with checked_engine(case, with_block=reads_with_block, seed=2) as engine:
                engine.load_checkpoint(path)
                evaluated = evaluate(engine, case)
                losses[writes_with_block, reads_with_block] = [
                    evaluated,
                    *train(engine, case, STEPS_BEFORE, STEPS_AFTER),
                ]
    return losses
