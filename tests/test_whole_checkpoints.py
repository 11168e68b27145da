# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is loaded after a save that was interrupted."""

import os
from pathlib import Path
from typing import Any

import pytest
from deepspeed import comm as dist
from parity import Case
from process_pool import ProcessPool
from test_engine import engine_of, error_of, train, world2

from ds_hybridep.errors import ConfigError
from ds_hybridep.integration import whole_checkpoints as whole


def load_after_interrupted_saves(case: Case, folder: str) -> list[Any]:
    """What is loaded after two saves without a mark, with one on the second, and with both; an error by name."""
    found: list[Any] = []
    with engine_of(case, with_block=True) as engine:
        for step in range(2):
            train(engine, case, step, 1)
            engine.save_checkpoint(folder)
        for marked in ((), (2,), (1, 2)):
            for step in marked:
                Path(folder, f"global_step{step}", whole.MARK).touch()
            dist.barrier()
            loaded, _ = engine.load_checkpoint(folder)
            found.append(None if loaded is None else Path(loaded).parent.name)
        found.append(error_of(engine.load_checkpoint, folder, "global_step2")[0])
    return found


@pytest.mark.dist
def test_an_engine_loads_the_newest_whole_checkpoint(pool2: ProcessPool, tmp_path: Path) -> None:
    wanted = ["global_step2", "global_step1", None, "ConfigError"]
    assert pool2.run(load_after_interrupted_saves, case=world2(), folder=str(tmp_path)) == [wanted] * 2


def saved(folder: Path, tag: str, at: float, *, is_whole: bool = True) -> None:
    whole.begin(folder / tag)
    path = folder / tag / "mp_rank_00_model_states.pt"
    path.touch()
    os.utime(path, (at, at))
    if is_whole:
        whole.end(folder / tag)


def test_the_one_that_latest_names_is_loaded(tmp_path):
    saved(tmp_path, "step1", 1.0)
    saved(tmp_path, "step2", 2.0)
    (tmp_path / "latest").write_text("step1\n")
    assert whole.newest(tmp_path) == ("step1", [])


@pytest.mark.parametrize("latest", ["step3", "", "step9", None])
def test_an_incomplete_one_is_skipped_and_named(tmp_path, latest):
    for step, is_whole in ((1, True), (2, True), (3, False)):
        saved(tmp_path, f"step{step}", float(step), is_whole=is_whole)
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    assert whole.newest(tmp_path) == ("step2", ["step3"])
    with pytest.raises(ConfigError, match="step3 is incomplete: its saving was interrupted; load without a tag"):
        whole.check(tmp_path / "step3")


def test_a_tag_that_is_saved_again_is_whole_again(tmp_path):
    saved(tmp_path, "best", 1.0, is_whole=False)
    assert whole.newest(tmp_path) == (None, ["best"])
    saved(tmp_path, "best", 2.0)
    assert whole.newest(tmp_path) == ("best", [])


def test_an_empty_or_missing_folder_has_none(tmp_path):
    assert whole.newest(tmp_path) == whole.newest(tmp_path / "missing") == (None, [])
