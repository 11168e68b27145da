# SPDX-License-Identifier: Apache-2.0
"""What documents tell readers to type: each command runs here, or it is said where; examples of the block parse."""

import json
import re
import shlex
from pathlib import Path

import pytest

from ds_hybridep.commands.main import main
from ds_hybridep.config import parse_config

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
PROGRAMS = re.compile(
    r"(ds_hybridep|deepspeed|torchrun|accelerate|sbatch|srun|python|sudo|make|pip|git|ssh|ip|echo) |examples/"
)
HERE = ("ds_hybridep plan", "ds_hybridep simulate", "ds_hybridep report")
ELSEWHERE = {  # by how a command begins: what runs it, or why nothing does
    "make demo": "tests/house/test_demo.py",
    "make test": ".ci/run",
    "make check": ".ci/run",
    "make fmt": "not run: rewrites the sources",
    "pip install .": ".ci/run, tests/house/test_wheel.py",
    "pip install '.[hf]'": "not run: pyproject.toml has the same names",
    "pip uninstall": "not run: removes what is tested",
    "git clone": "not run: names a place",
    "ssh": "tests/lab/test_multi_node.py",
    "ip -br address": "not run: a look at the machine",
    "echo": "tests/lab/test_multi_node.py",
    "deepspeed --hostfile": "tests/lab/test_multi_node.py",
    "deepspeed --num_gpus 4 examples/finetune_hf.py": "tests/house/test_finetune_hf.py",
    "ds_hybridep show": "tests/commands/test_report.py",
    "ds_hybridep export": "tests/house/test_finetune_hf.py",
    "ds_hybridep lab": "tests/lab/test_launcher.py",
    "examples/restart/": "tests/house/test_restart.py",
    "examples/sites/": "tests/sites/test_example.py",
    "python -m benchmarks ": "tests/house/test_measuring_programs.py",
    "deepspeed --num_gpus 8 train.py": "tests/house/test_launchers.py",
    "torchrun --nnodes 2": "tests/house/test_launchers.py",
    "accelerate launch": "tests/house/test_launchers.py",
    "openssl rand": "not run: makes a secret",
    "ds_hybridep meet": "tests/sites/test_training.py",
    "deepspeed train.py --deepspeed_config": "tests/sites/test_training.py, without the launcher",
    "sbatch job.sh": "tests/house/test_launchers.py",
}


def commands_of(text: str) -> list[str]:
    """Commands of fenced blocks, without comments and settings of the environment."""
    found = []
    for language, body in BLOCK.findall(text):
        if language:
            continue
        for line in body.replace("\\\n", " ").splitlines():
            line = re.sub(r"^(\w+=\S+ )+", "", line.split(" #")[0].strip())
            found += [part.strip() for part in line.split("&&") if PROGRAMS.match(part.strip())]
    return found


COMMANDS = sorted({command for path in DOCUMENTS for command in commands_of(path.read_text())})


def test_each_command_is_run_somewhere_or_it_is_said_why_not() -> None:
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        begins = [begin for begin in (*HERE, *ELSEWHERE) if command.startswith(begin)]
        assert begins, f"{command}: run it in a test, and name the test here"
    for place in ELSEWHERE.values():
        for name in re.findall(r"tests/\S+\.py|\.ci/run", place):
            assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(HERE)])
def test_commands_that_need_no_ranks_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    levels = [
        {"name": "dc", "size": 2, "bandwidth_gbps": 10.0, "latency_ms": 10.0},
        {"name": "gpu", "size": 8, "bandwidth_gbps": 3200.0, "latency_ms": 0.01},
    ]
    Path("cluster.yaml").write_text(json.dumps({"levels": levels}))
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


BLOCKS = [
    (path.name, body)
    for path in DOCUMENTS
    for language, body in BLOCK.findall(path.read_text())
    if language == "json" and '"levels"' in body
]


@pytest.mark.parametrize("name", sorted({name for name, _ in BLOCKS}))
def test_examples_of_the_block_are_accepted(name: str) -> None:
    for body in [body for other, body in BLOCKS if other == name]:
        block = json.loads(f"{{{body}}}")["hybridep"]
        world_size = 1
        for level in block["levels"]:
            world_size *= level["size"]
        parse_config(block, world_size=world_size, base_dir=REPOSITORY)


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", path.read_text()):
            if "://" not in target:
                other = (path.parent / target) if target else path
                assert other.exists(), f"{path.name}: {target}"
                assert not heading or heading in anchors_of(other), f"{path.name}: {target}#{heading}"


def anchors_of(path: Path) -> set[str]:
    """What headings are called in links, as on GitHub."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_about_the_architecture_is_short_and_its_files_exist() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    assert len(text.split()) <= 600
    for name in re.findall(r"`([\w/]+/(?:\w+\.py)?)`", text):
        assert any((folder / name).exists() for folder in (REPOSITORY, REPOSITORY / "ds_hybridep")), name
