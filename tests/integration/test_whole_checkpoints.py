# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is loaded after a save that was interrupted."""

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from deepspeed import comm as dist
from parity import Case
from process_pool import ProcessPool
from training import close_to, engine_of, error_of, train, world2

from ds_hybridep.runtime import whole_checkpoints as whole


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


def load_at_once(case: Case, folder: str) -> list[Any]:
    """What is loaded right after a save on whose rank 0 the mark stays for a while, by name and without one."""
    unlink = Path.unlink

    def unlink_late(path: Path, **options: Any) -> None:
        if path.name == whole.MARK:
            time.sleep(0.5)
        unlink(path, **options)

    found = []
    with engine_of(case, with_block=True) as engine, mock.patch.object(Path, "unlink", unlink_late):
        train(engine, case, 0, 1)
        for tag in ("mine", None):
            engine.save_checkpoint(folder, "mine")
            found.append(Path(engine.load_checkpoint(folder, tag)[0]).parent.name)
    return found


def load_where_rank_1_sees_an_old_folder(case: Case, folder: str) -> list[Any]:
    """What is loaded where rank 1 sees a mark, and the name of an older checkpoint, after both have changed."""
    is_late = dist.get_rank() == 1
    found = []
    with engine_of(case, with_block=True) as engine:
        for step in range(2):
            train(engine, case, step, 1)
            engine.save_checkpoint(folder)
        with (
            mock.patch.object(whole, "why_not", return_value="incomplete") if is_late else nullcontext(),
            mock.patch.object(whole, "named", return_value="global_step1") if is_late else nullcontext(),
        ):
            for tag in ("global_step2", None):
                found.append(Path(engine.load_checkpoint(folder, tag)[0]).parent.name)
    return found


def load_an_export(case: Case, folder: str, *, with_block: bool) -> dict[str, Any]:
    """What a load without a tag finds where a save left no file `latest`, and what the training does then."""
    with engine_of(case, with_block=with_block) as engine:
        train(engine, case, 0, 1)
        engine.save_checkpoint(folder, "export", save_latest=False)
        train(engine, case, 1, 1)
        return {
            "loaded": engine.load_checkpoint(folder),
            "steps": engine.global_steps,
            "losses": train(engine, case, 2, 2),
            "nowhere": engine.load_checkpoint(f"{folder}/missing"),
        }


@pytest.mark.dist
def test_a_load_where_no_file_latest_is_loads_nothing_as_deepspeed_alone(pool2: ProcessPool, tmp_path: Path) -> None:
    plain = pool2.run(load_an_export, case=world2(), folder=str(tmp_path / "plain"), with_block=False)
    hybrid = pool2.run(load_an_export, case=world2(), folder=str(tmp_path / "hybrid"), with_block=True)
    for without, with_block in zip(plain, hybrid, strict=True):
        assert with_block["losses"] == close_to(without["losses"])
        for key in ("loaded", "steps", "nowhere"):
            assert with_block[key] == without[key]
        assert without["loaded"] == (None, None)


def lossy_losses(case: Case, folder: str, *, loads: bool) -> list[float]:
    """Losses where gradients travel as int2, with a load that finds nothing between two steps, or without it."""
    levels = [{**level, "gradient_codec": "int2"} for level in case.ds_config(with_block=True)["hybridep"]["levels"]]
    with engine_of(case, with_block=True, hybridep={"levels": levels}) as engine:
        losses = train(engine, case, 0, 2)
        if loads:
            engine.load_checkpoint(folder)
        return losses + train(engine, case, 2, 3)


@pytest.mark.dist
def test_a_load_that_finds_nothing_drops_no_gradient(pool2: ProcessPool, tmp_path: Path) -> None:
    without, with_load = (
        pool2.run(lossy_losses, case=world2(), folder=str(tmp_path), loads=loads) for loads in (False, True)
    )
    assert with_load == without


@pytest.mark.dist
def test_an_engine_loads_the_newest_whole_checkpoint(pool2: ProcessPool, tmp_path: Path) -> None:
    wanted = ["global_step2", "global_step1", None, "ConfigError"]
    assert pool2.run(load_after_interrupted_saves, case=world2(), folder=str(tmp_path)) == [wanted] * 2


@pytest.mark.dist
def test_a_save_returns_when_its_checkpoint_is_whole(pool2: ProcessPool, tmp_path: Path) -> None:
    assert pool2.run(load_at_once, case=world2(), folder=str(tmp_path)) == [["mine", "mine"]] * 2


@pytest.mark.slow
@pytest.mark.dist
def test_rank_0_decides_what_is_whole(pool2: ProcessPool, tmp_path: Path) -> None:
    found = pool2.run(load_where_rank_1_sees_an_old_folder, case=world2(), folder=str(tmp_path))
    assert found == [["global_step2", "global_step2"]] * 2


def saved(folder: Path, tag: str, at: float, *, is_whole: bool = True) -> None:
    (folder / tag).mkdir(exist_ok=True)
    (folder / tag / whole.MARK).touch()
    path = folder / tag / "mp_rank_00_model_states.pt"
    path.touch()
    os.utime(path, (at, at))
    if is_whole:
        (folder / tag / whole.MARK).unlink()


def test_the_one_that_latest_names_is_loaded(tmp_path):
    saved(tmp_path, "step1", 1.0)
    saved(tmp_path, "step2", 2.0)
    (tmp_path / "latest").write_text("step1\n")
    assert whole.newest(tmp_path) == ("step1", [])


@pytest.mark.parametrize("latest", ["step3", "", "step9"])
def test_an_incomplete_one_is_skipped_and_named(tmp_path, latest):
    for step, is_whole in ((1, True), (2, True), (3, False)):
        saved(tmp_path, f"step{step}", float(step), is_whole=is_whole)
    (tmp_path / "latest").write_text(latest)
    assert whole.newest(tmp_path) == ("step2", ["step3"])
    assert "step3 is incomplete: its saving was interrupted; load without a tag" in whole.why_not(tmp_path / "step3")
    assert whole.why_not(tmp_path / "step2") == ""


def test_a_tag_that_is_saved_again_is_whole_again(tmp_path):
    (tmp_path / "latest").write_text("best")
    saved(tmp_path, "best", 1.0, is_whole=False)
    assert whole.newest(tmp_path) == (None, ["best"])
    saved(tmp_path, "best", 2.0)
    assert whole.newest(tmp_path) == ("best", [])


def test_a_folder_without_a_file_latest_has_none(tmp_path):
    assert whole.newest(tmp_path) == whole.newest(tmp_path / "missing") == (None, [])
    saved(tmp_path, "export", 1.0)
    saved(tmp_path, "step1", 2.0, is_whole=False)
    assert whole.newest(tmp_path) == (None, [])
