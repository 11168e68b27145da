# SPDX-License-Identifier: Apache-2.0
"""The example of two sites, as its page starts it."""

import json
import sys
from pathlib import Path

import pytest
from scripts import free_port, run_together
from site_jobs import Meeting, secret_file

from ds_hybridep.commands.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sites"
SCRIPT = f"""
import runpy
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled on the first use, for a minute
runpy.run_path("{EXAMPLE}/train.py", run_name="__main__")
"""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_sites_train_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with Meeting(tmp_path) as meeting:
        environments = []
        for name in "ab":
            config = json.loads((EXAMPLE / f"site_{name}.json").read_text())
            config["hybridep"]["sites"] |= {
                "meeting_point": f"127.0.0.1:{meeting.port}", "secret_file": str(secret_file(tmp_path)),
            }  # fmt: skip
            (tmp_path / f"{name}.json").write_text(json.dumps(config))
            path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
            port, file = str(free_port()), str(tmp_path / f"{name}.json")
            environments.append(
                {"CONFIG": file, "MASTER_PORT": port, "PATH": path, "SCRIPT": str(tmp_path / "train.py")}
            )
        commands = [[str(EXAMPLE / f"site_{name}.sh"), "--steps", "20"] for name in "ab"]
        results = run_together(commands, tmp_path, *environments)
    for status, said in results:
        assert status == 0, said
        assert "step 20  loss" in said
        assert "present: a, b" in said
    assert main(["show", str(tmp_path / "site_a-report.json")]) == 0
    assert "other sites, as rank 0 of site a sees them" in capsys.readouterr().out
