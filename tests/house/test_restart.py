# SPDX-License-Identifier: Apache-2.0
"""A rank is killed while it saves: the launcher starts all again, and losses are those of an undisturbed run."""

import json
import re
from pathlib import Path

import pytest
from scripts import RESTART_CONFIG, free_port, run_together

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = ["--steps", "6", "--layers", "1", "--hidden", "32", "--experts", "4", "--seq-len", "16"]
ARGUMENTS += ["--log-interval", "1", "--eval-interval", "0"]


def losses_of(folder: Path, launcher: str, **fault: str) -> tuple[dict[int, float], str]:
    """Losses by step of the last attempt, and what was said."""
    folder.mkdir()
    config = folder / "ds_config.json"
    config.write_text(json.dumps(RESTART_CONFIG))
    result = folder / "result.json"
    ours = [*ARGUMENTS, "--json-file", str(result), "--deepspeed_config", str(config)]
    script, checkpoints = ROOT / "examples" / "restart" / f"with_{launcher}.sh", str(folder / "checkpoints")
    if launcher == "torchrun":
        command = [str(script), checkpoints, "2", *ours]
    else:
        command = [str(script), checkpoints, "--num_gpus", "2", "--master_port", str(free_port()), "--", *ours]
    restart_script = str(ROOT / "tests" / "support" / "restart_script.py")
    environment = {**fault, "SAVE_INTERVAL": "2", "PAUSE_S": "1", "SCRIPT": restart_script}
    ((status, said),) = run_together([command], folder, environment, limit_s=500)
    assert status == 0, said[-4000:]
    return dict(json.loads(result.read_text())["losses"]), said


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_job_whose_rank_was_killed_while_saving_goes_on_with_the_same_losses(tmp_path: Path, launcher: str) -> None:
    undisturbed, _ = losses_of(tmp_path / "undisturbed", launcher)
    fault = {"FAULT_FILE": str(tmp_path / "fault"), "FAULT_RANK": "1", "FAULT_STEP": "4"}
    resumed, said = losses_of(tmp_path / "resumed", launcher, **fault)
    assert (tmp_path / "fault").exists()
    # The launcher names the rank, and ends the other one before that can say a word.
    assert re.search(r"exitcode: -9\) local_rank: 1|--local_rank=1.* return code = -9", said)
    assert "global_step4 is incomplete (its saving was interrupted): skipped" in said
    assert "goes on from step 2" in said
    assert sorted(undisturbed) == [1, 2, 3, 4, 5, 6]
    assert resumed == {step: loss for step, loss in undisturbed.items() if step > 2}
