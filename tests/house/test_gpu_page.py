# SPDX-License-Identifier: Apache-2.0
"""What `make gpu` does, on CPUs: the page has all its parts, and a step that fails is in it."""

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from scripts import output_of

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY)
    return importlib.import_module("benchmarks.gpu")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1200)
def test_the_page_has_all_its_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = output_of([sys.executable, "-m", "benchmarks", "gpu", "--pretend", "--out", out], REPOSITORY, 1100)
    assert said.splitlines()[-1] == f"The page to send back: {out / 'report.md'}"
    page = (out / "report.md").read_text()
    assert "failed" not in page
    assert re.search(r"^Commit [0-9a-f]{7,}, 20\d\d-\d\d-\d\d \d\d:\d\d UTC\.", page, re.MULTILINE)
    assert re.search(r"^versions: deepspeed \d.*, torch \d.*, Python 3", page, re.MULTILINE)
    assert "hybridep_cpu ..." in page  # ds_report
    assert "\nCompiledKernels\n" in page
    assert re.search(r"^\d+ passed", page, re.MULTILINE)
    assert "| Kernels | skipped: torch finds no CUDA device |" in page
    (header,) = re.findall(r"^\| step \| DeepSpeed.*$", page, re.MULTILINE)
    assert header.count("|") == 7
    first = re.findall(r"\d\.\d{6}", re.findall(r"^\| 1 \|.*$", page, re.MULTILINE)[0])
    assert len(first) == 5
    assert float(first[0]) == pytest.approx(float(first[1]), rel=1e-5)  # exact, but for the order of sums
    assert len(re.findall(r"\d ms", page)) == 5
    assert len(re.findall("hybridep after 10 steps, per step: sent over half", page)) == 3
    assert str(REPOSITORY) not in page
    assert "\x1b" not in page


def test_a_step_that_fails_is_in_the_page_and_the_others_go_on(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(text: str) -> list[str]:
        return [sys.executable, "-c", text]

    many = f"print(*range(1000), sep='\\n', flush=True); raise SystemExit('{REPOSITORY}/kernels.cu is broken')"
    steps = [
        gpu.Step("Build the kernels", program(many), 100),
        gpu.Step("nvcc", ["no-such-nvcc"], 100),
        gpu.Step("GPU tests", ["sh", "-c", "echo waits; exec sleep 90"], 3),
        gpu.Step("Train: DeepSpeed, fp32", program("print('no NCCL'); raise SystemExit(7)"), 100),
        gpu.Step("ds_report", program(r"print('\033[92m[OKAY]\033[0m')"), 100),
    ]
    monkeypatch.setattr(gpu, "steps_of", lambda *_: steps)
    assert gpu.run(argparse.Namespace(out=tmp_path / "out", pretend=True)) == 1
    page = (tmp_path / "out" / "report.md").read_text()
    assert [step.result for step in steps] == [
        "failed: exit status 1", "failed: No such file or directory", "failed: not done after 3 s",
        "failed: exit status 7", "passed",
    ]  # fmt: skip
    assert "\n998\n999\n./kernels.cu is broken\n" in page
    assert "\n900\n" not in page
    assert "\nwaits\n" in page
    assert "### Train: DeepSpeed, fp32\n\n**failed: exit status 7.** The end of its output:\n\n````\nno NCCL" in page
    assert "\n[OKAY]\n" in page
    assert "[5/5] ds_report passed" in capsys.readouterr().out


def test_kernels_that_were_not_measured_and_losses_that_are_not_finite_are_failures(
    gpu: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "kernels.jsonl").write_text('{"status": "not run", "reason": "nvcc was not found"}\n')
    (tmp_path / "deepspeed-fp32-result.json").write_text('{"losses": [[1, 5.0], [5, NaN]]}')
    for pretends, results in (
        (False, ["failed: nvcc was not found", "failed: a loss is not finite"]),
        (True, ["skipped: nvcc was not found", "failed: a loss is not finite"]),
    ):
        steps = [gpu.Step(title, [], 1, "passed") for title in ("Kernels", "Train: DeepSpeed, fp32")]
        for step in steps:
            gpu.judge(step, tmp_path, pretends)
        assert [step.result for step in steps] == results


def test_a_machine_without_a_gpu_is_told_so(gpu: ModuleType, tmp_path: Path) -> None:
    results = {step.title: step.result for step in gpu.steps_of(tmp_path, 0, False)}
    assert {title: result for title, result in results.items() if result != "not run"} == {
        f"Train: {way}": "failed: torch finds no CUDA device" for way in gpu.WAYS
    }


def test_an_even_number_of_gpus_has_two_halves(gpu: ModuleType) -> None:
    sizes = {num: [level["size"] for level in gpu.levels_of(num, "exact")] for num in (1, 2, 3, 8)}
    assert sizes == {1: [1], 2: [2], 3: [3], 8: [2, 4]}
    assert gpu.levels_of(8, "recommended")[0] == {"name": "half", "size": 2, "domain_size": 2, "codecs": "recommended"}


def test_make_gpu_is_this_program_and_pretends_if_asked() -> None:
    for words, end in (([], "gpu"), (["PRETEND=1"], "gpu --pretend")):
        make = ["make", "-n", "--no-print-directory", "gpu", "INSTALLED=", *words]
        run = subprocess.run(make, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert run.stdout.strip().endswith(f"-m benchmarks {end}")
