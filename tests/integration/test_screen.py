# SPDX-License-Identifier: Apache-2.0
"""What a user sees on the screen of a training script that knows nothing of ds_hybridep."""

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from scripts import LIMIT_S, SCRIPT, free_port, run_two_ranks
from training import world2

pytestmark = pytest.mark.dist

GETTING_STARTED = Path(__file__).resolve().parents[2] / "docs" / "getting-started.md"
START, FIGURES = "hybridep: 2 MoE layers, domain sizes dc 2, tokens", "hybridep after 2 steps, per step: sent over dc"


def ds_config(**settings: Any) -> dict[str, Any]:
    """What a user writes, with reports every two steps."""
    config = world2().ds_config(with_block=True)
    return {**config, "hybridep": {**config["hybridep"], "report_interval": 2}, **settings}


def lines_with(text: str, said: str) -> list[str]:
    return [line for line in said.splitlines() if text in line]


def said_by_rank_0(folder: Path, config: dict[str, Any], *arguments: str) -> str:
    """Output of rank 0 of a job of two ranks that ends well, and of whose ranks no other says anything of ours."""
    (status, said), (status_1, said_1) = run_two_ranks(folder, [config, config], *arguments)
    assert (status, status_1) == (0, 0), said + said_1
    assert "hybridep" not in said_1.lower()
    return said


@pytest.mark.slow  # test_statistics.py compares the page, test_launchers.py starts the launchers
def test_the_line_that_getting_started_tells_to_look_for_is_on_the_screen(tmp_path: Path) -> None:
    config, train = tmp_path / "ds_config.json", tmp_path / "train.py"
    config.write_text(json.dumps(ds_config()))
    train.write_text(f"import runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")
    document = GETTING_STARTED.read_text()
    (shown,) = re.findall(r"^\[Rank 0\] hybridep: .*$", document, re.MULTILINE)
    (command,) = re.findall(r"^deepspeed --hostfile hosts (train\.py --deepspeed_config .*)$", document, re.MULTILINE)
    launch = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), *command.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        launch, cwd=tmp_path, env=environment, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    (line,) = lines_with(START, said)
    beginnings = [re.sub(r"\d+", "N", text).partition(", gpu")[0] for text in (shown, line)]
    assert beginnings[1].startswith(beginnings[0])
    assert len(lines_with("per step: sent over dc", said)) == 2
    assert said.count("has finished") == 2  # two ranks write to one screen, so both may be on one line


@pytest.mark.slow
@pytest.mark.parametrize("level", ["error", "debug"])
def test_the_lines_are_there_whatever_the_log_level_of_deepspeed(tmp_path: Path, level: str) -> None:
    said = said_by_rank_0(tmp_path, ds_config(log_level=level))
    assert len(lines_with(START, said)) == len(lines_with(FIGURES, said)) == 1


@pytest.mark.slow
def test_a_script_that_configures_logging_gets_each_line_once_in_its_own_format(tmp_path: Path) -> None:
    said = said_by_rank_0(tmp_path, ds_config(), "--logging", "configured")
    for text in (START, FIGURES):
        (line,) = lines_with(text, said)
        assert line.startswith("at INFO of ds_hybridep: ")


@pytest.mark.slow
def test_a_script_can_silence_the_lines(tmp_path: Path) -> None:
    assert lines_with("hybridep", said_by_rank_0(tmp_path, ds_config(), "--logging", "silenced")) == []


@pytest.mark.slow  # test_autoload.py has the line, beside other names
def test_a_misspelt_block_is_told_of_with_the_right_name(tmp_path: Path) -> None:
    config = ds_config()
    config["hybridEP"] = config.pop("hybridep")
    (line,) = lines_with("hybrid", said_by_rank_0(tmp_path, config))
    assert line == (
        'ds_config has a key "hybridEP", which has no effect; if it is meant for ds_hybridep, its name is "hybridep"'
    )
