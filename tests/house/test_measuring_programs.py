# SPDX-License-Identifier: Apache-2.0
"""The programs that measure still run, each in its smallest form, and their reports read the records of documents."""

import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from forked_script import ForkedScript
from scripts import output_of

from ds_hybridep.lab.network import why_not_permitted

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = sorted((REPOSITORY / "benchmarks" / "results").iterdir())
REASON = why_not_permitted(with_delay=False)
NEEDS_LAB = pytest.mark.skipif(REASON is not None, reason=f"emulated hosts: {REASON}")
NO_DELAY = why_not_permitted()
NEEDS_DELAY = pytest.mark.skipif(NO_DELAY is not None, reason=f"emulated delays: {NO_DELAY}")
SMALL_E2E = "--rates none --rows 1 --accumulations 1 --rounds 1 --steps 1 --block-s 0.1 --layers 1"
HERE = {  # need a few seconds; with what is printed
    "kernels --pretend --only plan rows": "torch index_select",
    "codecs time --samples 1": "balanced, ratio 50",
}
SLOW = {
    "residual-sums --steps 2": "recommended, dense",
    f"e2e {SMALL_E2E}": "hybridep auto, codecs allowed",
    "one-at-a-time --rates 100mbit --delays 1ms --blocks 1 --steps 1 --layers 1": r"sites, encoded \| 0",
    "fine-tuning --folder runs --seeds 0 --trained adapters --rates 1e-3 --first-steps 4 --search-steps 4 --every 2 "
    "--megabytes 0.02 --hidden 32 --layers 1": r"sites, H 10, recommended \| 0.001 \| 1 \|",
    "larger --folder runs --ways DeepSpeed exact,_domain --hidden 64 --layers 1 --vocabulary 300 --steps 2 --every 1 "
    "--seq-len 32": r"exact, domain \| 2 \|",
    "latency --delays 1ms --layers 2 --kinds dropping --accumulations 1 --steps 1": r"hybridep \[2,1\] recommended",
    "sites --points none_0ms --rounds 1 --steps 1 --layers 1": "two jobs apart",
    "cuts --kinds classic --codecs recommended --cases cut_for_5_s": r"\| 0 \|",
    "site-kills --minutes 0.5 --kills 2 --orders 1 --step-s 0.1 --away-s 2": "bit-equal",
    "site-joins --rate 100mbit --hidden 32 --step-s 0.05 --steps 5": "100mbit",
    "soak --minutes 0.2 --kinds classic": r"\| classic \|",
    "losses --seeds 0 --steps 15": "domain",
    "gap --folder runs --hidden 32 --layers 1 --steps 4 --every 2": r"\| 4 \| 1 \|",
    "gap --folder runs --hidden 32 --layers 1 --steps 4 --every 2 --exact-steps 2": r"after 2 \| 4 \| 1 \|",
    "equal-bytes --seeds 0 --phases scratch --steps 4 --cases PowerSGD,_rank_1 DeMo,_32_of_4096 DiLoCo,_H_10 "
    "ours,_sites,_H_10,_recommended": "PowerSGD, rank 1",
    "skipped-layers --steps 10 --zero-stages 1": "two heads",
    "codecs loss --cases int8 --seeds 0 --steps 15 --layers 1": "int8",
    "codecs patch --steps 2 --weights 10000 --samples 1": "rate 1e-05",
    "codec-ratios --cases all:_50 --seeds 0 --steps 15 --layers 1": "all: 50",
    "link messages --megabytes 1 --rounds 2": "gloo",
    "link loopback --rounds 2 --steps 1 --hidden 64 --tokens 64": r"\[2,2\]",
    "link goodput --losses 0% --megabytes 1 --rounds 1": "cubic",
    "overlap --layers 2": "expert_gradients",
    "hot --kinds classic --skews 1.0 --rounds 1 --steps 2 --ranks 2 --experts 8 --tokens 16": "hot experts auto",
    "memory --accumulations 1 --layers MoE --rows exact": "exact",
    "predict benchmarks/results/e2e-exact-4x1.jsonl": "stream model",
    "simulate benchmarks/results/e2e-exact-4x1.jsonl": "simulator",
    "scale --parts table": "HybridEP",
    "replan --rates 500mbit 50mbit --rows 1 --steps 4 --warm-up 8 --tries 1 --layers 1": "planned: losses differ",
    "export --layers 2 --hidden 64 --experts 4": "adapters --merged",
    "is-it-for-you": "",
}
ELSEWHERE = {
    "demo": "tests/house/test_demo.py",
    "gpu": "tests/house/test_gpu_page.py",
    "faults": "tests/house/test_faults.py",
}
IN_ONE_WORKER = pytest.mark.xdist_group("other processes")  # which runs them once, and has a fork server
ON_EMULATED_HOSTS = ("e2e", "one-at-a-time", "larger", "sites", "cuts", "soak", "overlap", "replan")
WITH_DELAY = ("one-at-a-time", "latency", "link goodput", "soak", "cuts")


def run_program(*words: str, folder: Path) -> str:
    return output_of([sys.executable, "-m", "benchmarks", *words], folder, 800, PYTHONPATH=str(REPOSITORY))


IN_ONE_PROCESS = """
import json, os, sys
repository, folder, lines = sys.argv[1:]
sys.path.insert(0, repository)
os.chdir(folder)
from benchmarks.__main__ import main
for words in json.loads(lines):
    print("@@")
    sys.argv = ["benchmarks", *words]
    assert main() == 0
"""


@pytest.fixture(scope="module")
def said_together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What the list, all of HERE, their reports and those of RESULTS print, in one process: imports take long."""
    folder = tmp_path_factory.mktemp("records")
    files = [str(folder / f"{place}.jsonl") for place in range(len(HERE))]
    runs = [[*words_of(line), "--out", file] for line, file in zip(HERE, files, strict=True)]
    reports = [[line.split()[0], "--report", file] for line, file in zip(HERE, files, strict=True)]
    kept = [[name_of(path), "--report", str(path)] for path in RESULTS]
    script, log = folder / "programs.py", folder / "programs.log"
    script.write_text(IN_ONE_PROCESS)
    lines = json.dumps([[], *runs, *reports, *kept])
    run = ForkedScript([str(script), str(REPOSITORY), str(folder), lines], os.environ, log)
    try:
        assert run.wait(800) == 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    return folder, log.read_text().split("@@\n")[1:]


def name_of(path: Path) -> str:
    """The program that has written a file of results."""
    command: str = json.loads(path.read_text().splitlines()[0])["command"]
    return command.split()[3]


def words_of(line: str) -> list[str]:
    return [
        str(REPOSITORY / word) if word.startswith("benchmarks/") else word.replace("_", " ") for word in line.split()
    ]


def marked(line: str) -> object:
    marks = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(900)]
    marks += [NEEDS_LAB] if line.startswith(ON_EMULATED_HOSTS) else []
    marks += [NEEDS_DELAY] if line.startswith(WITH_DELAY) else []
    return pytest.param(line, marks=marks, id=" ".join(line.split()[:2]))


@IN_ONE_WORKER
@pytest.mark.parametrize("line", HERE)
def test_the_smallest_form_runs_and_its_record_is_read_again(line: str, said_together: tuple[Path, list[str]]) -> None:
    folder, (_, *said) = said_together
    place = list(HERE).index(line)
    check(line, folder / f"{place}.jsonl", said[place], said[len(HERE) + place])


@pytest.mark.parametrize("line", [marked(line) for line in SLOW])
def test_the_smallest_form_runs_and_its_records_are_read_again(line: str, tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    said = run_program(*words_of(line), "--out", str(out), folder=tmp_path)
    if line == "is-it-for-you":
        assert out.read_text() == (REPOSITORY / "docs" / "is-it-for-you.md").read_text()
        return
    check(line, out, said, run_program(line.split()[0], "--report", str(out), folder=tmp_path))


def check(line: str, out: Path, said: str, again: str) -> None:
    """What a program and then its report have said of the same records."""
    assert re.search((HERE | SLOW)[line], said), said
    record = json.loads(out.read_text().splitlines()[-1])
    assert {"case", "params", "device", "versions", "commit", "command"} <= set(record)
    assert str(out.parent) not in record["command"]
    assert again.strip() in said


@IN_ONE_WORKER
def test_each_program_is_listed_and_run_somewhere(said_together: tuple[Path, list[str]]) -> None:
    listed = re.findall(r"^  (\S+) ", said_together[1][0], re.M)
    assert sorted(listed) == sorted({line.split()[0] for line in (*HERE, *SLOW, *ELSEWHERE)})
    for path in ELSEWHERE.values():
        assert '"-m", "benchmarks"' in (REPOSITORY / path).read_text()


def test_each_result_says_how_to_repeat_it_and_is_in_a_document() -> None:
    documents = "".join(path.read_text() for path in (REPOSITORY / "docs").glob("*.md"))
    for path in RESULTS:
        first = json.loads(path.read_text().splitlines()[0])
        assert first["command"].startswith("python -m benchmarks "), path.name
        assert f"results/{path.name}" in documents, f"no document refers to {path.name}"
        assert not re.search(r'"/(home|root|tmp|work|Users)/', path.read_text()), f"{path.name} names a folder"


@IN_ONE_WORKER
def test_reports_read_the_results(said_together: tuple[Path, list[str]]) -> None:
    for path, said in zip(RESULTS, said_together[1][-len(RESULTS) :], strict=True):
        assert said.count("\n") > 2, path.name
