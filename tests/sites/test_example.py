# SPDX-License-Identifier: Apache-2.0
"""The examples of two sites, as their page starts them."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from scripts import blocks_of, free_port, run_together
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
def test_both_sites_train_together_and_go_on_from_their_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        commands = [
            [str(EXAMPLE / f"site_{name}.sh"), "--save", str(tmp_path / name), "--save-interval", "10"]
            for name in "ab"
        ]
        results = run_together([[*one, "--steps", "20"] for one in commands], tmp_path, *environments)
        again = run_together([[*one, "--steps", "30"] for one in commands], tmp_path, *environments)
    for status, said in results:
        assert status == 0, said
        assert "step 20  loss" in said
        assert "present: a, b" in said
    for status, said in again:
        assert status == 0, said
        assert "step 30  loss" in said
        assert "step 20  loss" not in said, "they go on from their checkpoints"
    assert main(["show", str(tmp_path / "site_a-report.json")]) == 0
    assert "other sites, as rank 0 of site a sees them" in capsys.readouterr().out


PAGE, SECTION = "../examples/sites/README.md", "With the Trainer, or with accelerate"


def commands_of_the_page(folder: Path, meeting: Meeting, first: str, steps: int) -> list[str]:
    """The two commands of the page that begin so, with this meeting point, ports of their own and so many steps."""
    config = json.loads((EXAMPLE / "hf.json").read_text())
    config["hybridep"]["sites"] |= {
        "meeting_point": f"127.0.0.1:{meeting.port}", "secret_file": str(secret_file(folder)),
    }  # fmt: skip
    (folder / "hf.json").write_text(json.dumps(config))
    (block,) = [one for one in blocks_of(PAGE, SECTION) if one.startswith(f"HYBRIDEP_SITE=a {first}")]
    commands = block.replace("\\\n", " ").splitlines()
    assert [command.split()[0] for command in commands] == ["HYBRIDEP_SITE=a", "HYBRIDEP_SITE=b"]
    changes = {"29511": str(free_port()), "29512": str(free_port()), "examples/sites/hf.json": str(folder / "hf.json")}
    found = []
    for command in commands:
        for there, here in changes.items():
            command = command.replace(there, here)
        found.append(command.replace("examples/", f"{EXAMPLE.parent}/") + f" --steps {steps}")
    return found


def losses_in(said: str) -> dict[int, float]:
    """Losses by step: of the loop with accelerate, or in the order in which the Trainer logs them, every 10 steps."""
    if found := re.findall(r"^step (\d+)  loss (\S+)", said, re.MULTILINE):
        return {int(step): float(loss) for step, loss in found}
    logged = re.findall(r"'loss': '?([\d.e+-]+)", said)
    return {10 * (place + 1): float(loss) for place, loss in enumerate(logged)}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs the extra hf: '.[hf]'")
@pytest.mark.parametrize("first", ["deepspeed", "accelerate"])
def test_sites_of_a_hugging_face_model_train_together(tmp_path: Path, first: str) -> None:
    path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    with Meeting(tmp_path) as meeting:
        commands = commands_of_the_page(tmp_path, meeting, first, steps=60)
        results = run_together([["bash", "-c", one] for one in commands], tmp_path, path, path, limit_s=600)
        assert "site 'b'" in meeting.log.read_text()
    losses = []
    for status, said in results:
        assert status == 0, said
        losses.append(losses_in(said))
        assert list(losses[-1]) == [10, 20, 30, 40, 50, 60], said
    # Each number is of one batch, and the text is that of these documents.
    both = [sum(of_site[step] for of_site in losses) for step in losses[0]]
    assert sum(both[3:]) < sum(both[:3])
    assert losses[0] != losses[1], "each has data of its own"


def test_what_the_page_shows_is_in_the_scripts() -> None:
    scripts = [(EXAMPLE / name).read_text() for name in ("train_hf.py", "train_accelerate.py")]
    lines = {line.strip() for script in scripts for line in script.splitlines()}
    shown = [block for block in blocks_of(PAGE, SECTION) if "HYBRIDEP_SITE" not in block]
    assert len(shown) == 2
    assert [line for block in shown for line in block.splitlines() if line.strip() and line.strip() not in lines] == []
