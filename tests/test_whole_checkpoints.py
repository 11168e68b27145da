# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is loaded after a save that was interrupted."""

import os
from pathlib import Path

import pytest

from ds_hybridep.errors import ConfigError
from ds_hybridep.integration import whole_checkpoints as whole


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
