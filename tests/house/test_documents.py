# SPDX-License-Identifier: Apache-2.0
"""What documents tell readers to type: each command runs here, or it is said where; examples of the block parse."""

import json
import math
import re
import runpy
import shlex
from pathlib import Path

import pytest
from marks import slow

from ds_hybridep.commands.main import main
from ds_hybridep.config import parse_config

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "ds_configs/README.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
PROGRAMS = re.compile(
    r"(ds_hybridep|deepspeed|torchrun|accelerate|sbatch|srun|mpirun|python|sudo|make|pip|git|ssh|ip|echo"
    r"|openssl|wg|wg-quick|ufw|tc|ping|llamafactory-cli|swift|axolotl) |examples/"
)
HERE = ("ds_hybridep plan", "ds_hybridep simulate", "ds_hybridep report")
ELSEWHERE = {  # by how a command begins: what runs it, or why nothing does
    "make demo": "tests/house/test_demo.py",
    "make test": ".ci/run",
    "make gpu": "tests/house/test_gpu_page.py",
    "make check": ".ci/run",
    "make fmt": "not run: rewrites the sources",
    "pip install .": ".ci/run, tests/house/test_wheel.py",
    "pip install '.[hf]'": "not run: pyproject.toml has the same names",
    "pip install llamafactory": "tests/clients/test_llamafactory.py",
    "llamafactory-cli train": "tests/clients/test_llamafactory.py",
    "pip install ms-swift": "tests/clients/test_swift.py",
    "swift sft": "tests/clients/test_swift.py",
    "pip install axolotl": "tests/clients/test_axolotl.py",
    "pip install deepspeed": "tests/clients/test_axolotl.py",
    "axolotl train": "tests/clients/test_axolotl.py",
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
    "openssl": "tests/house/test_security_page.py",
    "wg": "tests/house/test_security_page.py",
    "ufw": "not run: changes the firewall",
    "tc": "not run: changes the network",
    "ping": "not run: looks at the network",
    "ds_hybridep meet": "tests/sites/test_training.py",
    "deepspeed train.py --deepspeed_config": "tests/sites/test_training.py, without the launcher",
    "sbatch job.sh": "tests/house/test_launchers.py",
    "sbatch examples/sites/job.sh": "tests/house/test_launchers.py",
    "mpirun --host": "tests/house/test_launchers.py",
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
# tests/house/test_five_plans.py runs them and reads what they print.
OF_FIVE_PLANS = commands_of((REPOSITORY / "docs" / "five-plans.md").read_text())
RUN_HERE = [command for command in COMMANDS if command.startswith(HERE) and command not in OF_FIVE_PLANS]


def test_each_command_is_run_somewhere_or_it_is_said_why_not() -> None:
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        begins = [begin for begin in (*HERE, *ELSEWHERE) if command.startswith(begin)]
        assert begins, f"{command}: run it in a test, and name the test here"
    for place in ELSEWHERE.values():
        for name in re.findall(r"tests/\S+\.py|\.ci/run", place):
            assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("command", [slow(command) if "--sweep" in command else command for command in RUN_HERE])
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
        block = json.loads(body if body.startswith("{") else f"{{{body}}}")["hybridep"]  # some are whole files
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


def test_the_drawings_are_what_their_program_draws() -> None:
    drawings = runpy.run_path(str(REPOSITORY / ".ci" / "drawings.py"))["DRAWINGS"]
    for name, draw in drawings.items():
        assert (REPOSITORY / "docs" / "images" / name).read_text() == draw(), "run python .ci/drawings.py"


def test_the_drawing_of_a_gradient_names_classes_where_they_are() -> None:
    drawings = runpy.run_path(str(REPOSITORY / ".ci" / "drawings.py"))
    places = [place for _, where in (*drawings["HOLDER"], *drawings["OWNER"]) for place in where.split("; ")]
    assert places
    for file, _, names in (place.partition(": ") for place in places):
        path = REPOSITORY / "ds_hybridep" / file
        assert path.exists(), file
        for name in filter(None, names.split(", ")):
            assert f"class {name}" in path.read_text(), (file, name)


def test_messages_that_the_page_about_troubles_quotes_are_in_the_sources() -> None:
    table = (REPOSITORY / "docs" / "troubleshooting.md").read_text().split("## ")[1]
    messages = [one for line in table.splitlines() for one in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    assert len(messages) > 10
    sources = [path.read_text() for folder, ends in (("ds_hybridep", "*.py"), ("csrc", "*.h")) for path in (
        REPOSITORY / folder).rglob(ends)]  # fmt: skip
    # Python and C++ join literals that follow each other; a message may begin in one and end in the next.
    joined = "".join(re.sub(r'"\s*\n\s*f?"', "", text) for text in sources)
    for message in messages:
        words = [word for word in message.split(": ") if not word.endswith("slot_to_row")]  # C++ puts the name in
        assert all(word in joined for word in words) or message == "No module named 'mpi4py'", message


def test_the_table_of_environment_variables_has_those_that_are_read() -> None:
    table = (REPOSITORY / "docs" / "environment.md").read_text()
    sources = [path for folder in ("ds_hybridep", "op_builder") for path in (REPOSITORY / folder).rglob("*.py")]
    read = re.compile(r'environ(?:\.get|\.setdefault)?[\[(]"(\w+)"')
    found = {name for path in (*sources, REPOSITORY / "setup.py") for name in read.findall(path.read_text())}
    assert {"HYBRIDEP_SITE", "MASTER_ADDR", "CXX"} <= found
    assert [name for name in sorted(found) if f"`{name}`" not in table] == []


EXAMPLES = {"dc": "four_dcs_4x8.json", "region": "two_regions_2x2x8.json"}  # by the first level of the block shown


def test_blocks_that_the_page_about_configurations_shows_are_those_of_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "ds_configs" / "README.md").read_text().split("## Complete examples")[1]
    blocks = [json.loads(f"{{{body}}}")["hybridep"] for language, body in BLOCK.findall(page) if language == "json"]
    assert {block["levels"][0]["name"] for block in blocks} == set(EXAMPLES)
    for block in blocks:
        levels = block["levels"]
        file = json.loads((REPOSITORY / "ds_configs" / EXAMPLES[levels[0]["name"]]).read_text())
        assert levels == file["hybridep"]["levels"]
        assert math.prod(level["size"] for level in levels) == 32
        for level, gbps in zip(levels, (10.0, *(3200.0 for _ in levels[1:])), strict=True):
            level |= {"bandwidth_gbps": gbps, "latency_ms": 1.0}
        keys = ("name", "size", "bandwidth_gbps", "latency_ms")
        cluster = {"levels": [{key: level[key] for key in keys} for level in levels]}
        (tmp_path / "cluster.yaml").write_text(json.dumps(cluster))
        assert main(["plan", "--cluster", str(tmp_path / "cluster.yaml"), "--model", "Mixtral-8x7B"]) == 0
        assert "s/step" in capsys.readouterr().out
