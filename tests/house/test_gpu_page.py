# SPDX-License-Identifier: Apache-2.0
"""What `make gpu` does, on CPUs: the page has all its parts, and a phase that fails costs no other."""

import argparse
import importlib
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts import output_of

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = ["machine", "build", "definitions", "kernels", "training", "encoding", "sanitizers"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY)
    return importlib.import_module("benchmarks.gpu")


def phase_named(name: str) -> Any:
    """The module of a phase."""
    return importlib.import_module(f"benchmarks.gpu.{name}")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(2400)
def test_the_page_has_all_its_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = output_of([sys.executable, "-m", "benchmarks", "gpu", "--pretend", "--out", out], REPOSITORY, 2300)
    assert said.splitlines()[-1] == f"The page to send back: {out / 'report.md'}"
    page = (out / "report.md").read_text()
    assert "failed" not in page.lower()
    assert re.search(r"^Commit [0-9a-f]{7,}, 20\d\d-\d\d-\d\d \d\d:\d\d UTC\.", page, re.MULTILINE)
    assert re.findall(r"^\| (\w+) \| (?:passed|skipped): .* s \|$", page, re.MULTILINE) == [*NAMES, "nccl"]
    assert re.search(r"^versions: deepspeed \d.*, torch \d.*, Python 3", page, re.MULTILINE)
    assert "| build | passed: cpu: CompiledKernels, " in page
    assert "9 of 9 groups of kernels equal their definitions" in page
    for words in ("dispatch | ours", "dispatch | deepspeed _sparse_encode", "encode int8, residual | torch"):
        assert f"| {words} |" in page
    trainings = re.findall(
        r"^\| (native|AutoEP), ZeRO (\d)(.*?) \| .* \| (equal|within bounds) \|", page, re.MULTILINE
    )
    assert {(kind, int(stage)) for kind, stage, *_ in trainings} >= {
        ("native", 2),
        *(("AutoEP", at) for at in range(4)),
    }
    assert [verdict for _, _, codecs, verdict in trainings if "recommended codecs" in codecs] == 3 * ["within bounds"]
    assert re.search(
        r"^\| experts of Qwen3-30B-A3B, .* beside 16 experts' forward and backward \|", page, re.MULTILINE
    )
    (header,) = re.findall(r"^\| step \| DeepSpeed.*$", page, re.MULTILINE)
    assert header.count("|") == 4
    first = re.findall(r"\d\.\d{6}", re.findall(r"^\| 1 \|.*$", page, re.MULTILINE)[0])
    assert float(first[0]) == pytest.approx(float(first[1]), rel=1e-5)  # exact, but for the order of sums
    assert len(re.findall("hybridep after 10 steps, per step: sent over half", page)) == 1
    assert str(REPOSITORY) not in page
    assert "\x1b" not in page


# ---- the phases together ----


def test_one_gpu_takes_half_an_hour_at_most(gpu: ModuleType) -> None:
    assert [phase.name for phase in gpu.phases_of(1)] == NAMES
    assert sum(phase.limit_s for phase in gpu.phases_of(1)) <= 1800
    assert [phase.name for phase in gpu.phases_of(4)] == [*NAMES, "nccl"]


def test_phases_end_what_they_start_before_their_own_limits(gpu: ModuleType) -> None:
    limits = {phase.module: phase.limit_s for phase in gpu.phases_of(2)}
    for name in ("definitions", "two_ranks", "sanitizers"):
        assert limits[name] - 30 <= phase_named(name).LIMIT_S < limits[name], name
    nccl = phase_named("nccl")
    assert len(nccl.WAYS) * nccl.LIMIT_S < limits["nccl"]


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def run_phases(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, commands: dict[str, list[str]]) -> Any:
    """The exit status and the phases, if these are their programs; the definitions may take 3 s, others a minute."""
    limits = {"definitions": 3}  # the phase that waits; the others have time on a busy machine
    phases = [
        gpu.Phase(name, "", name, limits.get(name, 60), needs_kernels=name in ("definitions", "kernels"))
        for name in NAMES
    ]
    monkeypatch.setattr(gpu, "phases_of", lambda _: phases)
    monkeypatch.setattr(gpu, "command_of", lambda phase, *_: commands.get(phase.name, ["echo", "well"]))
    status = gpu.run(argparse.Namespace(out=out, pretend=True, only=None))
    return status, {phase.name: phase for phase in phases}


def test_a_phase_that_fails_is_in_the_page_and_the_others_go_on(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = "import sys; print(*range(1000), sep='\\n', file=sys.stderr); print('| a table |')"
    commands = {
        "machine": ["no-such-program"],
        "definitions": ["sh", "-c", "echo '````'; echo waits; exec sleep 90"],
        "kernels": ["sh", "-c", f"echo '{REPOSITORY}/rows.cu is broken'; exit 7"],
        "training": python(f"{many}; raise SystemExit('no gloo')"),
        "encoding": python(r"print('\033[92mfast\033[0m')"),
        "sanitizers": ["echo", "skipped: there is none"],
    }
    status, phases = run_phases(gpu, monkeypatch, tmp_path / "out", commands)
    assert status == 1
    results = {name: phase.result for name, phase in phases.items()}
    assert results.pop("machine").startswith("failed: [Errno 2] No such file")
    assert results == {
        "build": "passed: well", "definitions": "failed: not done after 3 s", "kernels": "failed: ./rows.cu is broken",
        "training": "failed: | a table |", "encoding": "passed: fast", "sanitizers": "skipped: there is none",
    }  # fmt: skip
    page = (tmp_path / "out" / "report.md").read_text()
    assert "\n````\nwaits\n````\n" in page  # a listing that was cut off is closed
    assert "The end of its errors:\n\n````\n961\n962\n" in page
    assert "\n999\nno gloo\n````" in page
    assert "[7/7] sanitizers: " in capsys.readouterr().out


def test_what_a_phase_has_started_ends_with_it(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    commands = {"definitions": ["sh", "-c", f"sleep 600 & echo $! > {started}; wait"]}
    run_phases(gpu, monkeypatch, tmp_path / "out", commands)
    status, deadline_s = Path("/proc", started.read_text().strip(), "status"), time.monotonic() + 60
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_without_kernels_phases_that_need_them_are_skipped_and_training_takes_the_reference(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = next(phase for phase in gpu.phases_of(1) if phase.name == "training")
    assert "--reference-kernels" in gpu.command_of(training, tmp_path, False, has_kernels=False)
    assert "--reference-kernels" not in gpu.command_of(training, tmp_path, False, has_kernels=True)
    _, phases = run_phases(gpu, monkeypatch, tmp_path / "out", {"build": ["sh", "-c", "echo nvcc failed; exit 1"]})
    assert phases["definitions"].result == phases["kernels"].result == "skipped: the kernels were not built"
    assert phases["training"].result == "passed: well"


def test_a_machine_without_a_gpu_is_told_so(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(gpu, "command_of", lambda *_: ["sh", "-c", "echo torch finds no CUDA device; exit 1"])
    assert gpu.run(argparse.Namespace(out=tmp_path, pretend=False, only=None)) == 1
    page = (tmp_path / "report.md").read_text()
    assert "| machine | failed: torch finds no CUDA device |" in page
    assert page.count("| skipped: torch finds no CUDA device |") == len(NAMES) - 1


def test_make_gpu_is_this_program_installs_nothing_and_pretends_if_asked() -> None:
    for words, end in (([], "gpu"), (["PRETEND=1"], "gpu --pretend")):
        make = ["make", "-n", "--no-print-directory", "gpu", "VENV=nowhere", "PYTHON=its-python", *words]
        run = subprocess.run(make, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == f"its-python -m benchmarks {end}"


FROM_A_CHECKOUT = """
import sys
sys.meta_path = [one for one in sys.meta_path if "editable" not in repr(one).lower()]  # as if nothing were installed
import benchmarks
from ds_hybridep.op_builder import HybridEPBuilder
print(HybridEPBuilder().csrc())
"""


def test_a_checkout_finds_the_sources_of_its_kernels_whatever_is_installed() -> None:
    found = Path(output_of([sys.executable, "-c", FROM_A_CHECKOUT], REPOSITORY, 300).splitlines()[-1])
    assert (found / "bindings.cpp").samefile(REPOSITORY / "csrc" / "bindings.cpp")


# ---- single phases ----


def test_programs_are_found_on_the_path_and_in_the_toolkit(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toolkit = phase_named("toolkit")
    home, wrapper = tmp_path / "cuda", tmp_path / "usr"
    for path in (home / "bin" / "nvcc", home / "compute-sanitizer" / "compute-sanitizer", wrapper / "bin" / "nvcc"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(toolkit, "USUAL_CUDA_HOME", home)
    monkeypatch.setattr(toolkit.cpp_extension, "CUDA_HOME", str(wrapper))  # above a wrapper of nvcc, without headers
    assert toolkit.cuda_home() == home
    assert gpu.environment_of(False)["CUDA_HOME"] == str(home)
    assert toolkit.program("nvcc") == home / "bin" / "nvcc"
    assert toolkit.program("compute-sanitizer") == home / "compute-sanitizer" / "compute-sanitizer"
    assert toolkit.program("no-such-program") is None
    monkeypatch.setenv("PATH", str(wrapper / "bin"))
    assert toolkit.program("nvcc") == wrapper / "bin" / "nvcc"


def test_a_kernel_that_differs_from_its_definition_is_named(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    definitions = phase_named("definitions")
    assert definitions.main(["--pretend", "--in-one", "others", "patch"]) == 0
    made = definitions.expand
    monkeypatch.setattr(definitions, "expand", lambda words, out, mode: made(words, out, mode) * (mode == "reference"))
    assert definitions.main(["--pretend", "--in-one", "others", "patch"]) == 1
    said = capsys.readouterr().out.splitlines()[-2:]
    assert re.match(
        r"- others: FAILED: AssertionError: expand \(2, 33, 40\): 2640 of 2640 differ, the first at 0", said[0]
    )
    assert said[1].startswith("- patch: equal")


def trained(*losses: float, weight: float = 1.0) -> list[dict[str, Any]]:
    """What both ranks leave of a training."""
    state = {"start": {"w": torch.zeros(2)}, "parameters": {"w": torch.full((2,), weight)}}
    return [{"losses": list(losses), **state} for _ in range(2)]


def test_trainings_are_judged_beside_deepspeed_and_beside_the_cpu(gpu: ModuleType) -> None:
    two_ranks = phase_named("two_ranks")
    exact, lossy = (
        two_ranks.Training(argparse.Namespace(dtype="fp32"), is_lossy=is_lossy) for is_lossy in (False, True)
    )
    good, near, far = trained(4.0, 2.0), trained(4.0, 2.1), trained(4.0, 3.0)
    failed = [{"error": "RuntimeError: no all-to-all"}] * 2

    def verdict(training: Any, block: Any, plain: Any, on_cpu: Any) -> str:
        found = {("cuda", "block"): block, ("cuda", "plain"): plain, ("cpu", "block"): on_cpu}
        found = {key: value for key, value in found.items() if value is not None}
        return str(two_ranks.verdict_of(training, found, "cuda")[-1])

    assert verdict(exact, good, good, good) == "equal"
    assert verdict(exact, good, failed, good) == "equal"  # gloo cannot do all of DeepSpeed's on CUDA tensors
    assert verdict(exact, good, failed, None) == "FAILED: nothing to compare with"
    assert verdict(exact, near, good, near).startswith("FAILED: DeepSpeed is too far")
    assert verdict(exact, near, near, good).startswith("FAILED: the CPU is too far")
    assert verdict(exact, trained(4.0, 2.0, weight=1.1), good, good).startswith("FAILED: DeepSpeed is too far")
    assert verdict(lossy, near, good, good) == "within bounds"
    assert verdict(lossy, far, good, good).startswith("FAILED: DeepSpeed is too far")
    assert verdict(lossy, trained(4.0, float("nan")), good, good).startswith("FAILED")
    assert verdict(exact, failed, good, good) == "FAILED: RuntimeError: no all-to-all"
    assert verdict(exact, None, good, good) == "FAILED: not reached"


SANITIZER = """#!/bin/sh
case "$*" in
    *memcheck*"--small --in-one"*patch*) echo "========= ERROR SUMMARY: 3 errors"; exit 9;;
    *memcheck*"--small --in-one"*) echo "========= ERROR SUMMARY: 0 errors";;
    *racecheck*rows*) echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)";;
    *racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
esac
"""


def test_what_sanitizers_find_is_said_and_their_absence_too(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sanitizers = phase_named("sanitizers")
    monkeypatch.setattr(sanitizers, "program", lambda name: None)
    assert sanitizers.main([]) == 0
    assert capsys.readouterr().out.startswith("skipped: compute-sanitizer is neither on PATH nor")
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    monkeypatch.setattr(sanitizers, "program", lambda name: tool)
    assert sanitizers.main([]) == 1
    said = capsys.readouterr().out
    assert "- memcheck of plan, rows, few_sms: clean, " in said
    assert "- memcheck of records, blockwise, patch, others: FAILED: exit status 9, " in said
    assert "- racecheck of plan, rows, few_sms: FAILED: " in said
    assert "\n\nracecheck of plan, rows, few_sms:\n````\n========= RACECHECK SUMMARY: 1 hazard" in said
    assert said.splitlines()[-1] == "2 of 4 runs are clean"


def test_an_even_number_of_gpus_has_two_halves(gpu: ModuleType) -> None:
    nccl = phase_named("nccl")
    sizes = {num: [level["size"] for level in nccl.levels_of(num, "exact")] for num in (1, 2, 3, 8)}
    assert sizes == {1: [1], 2: [2], 3: [3], 8: [2, 4]}
    assert nccl.levels_of(8, "recommended")[0] == {
        "name": "half", "size": 2, "domain_size": 2, "codecs": "recommended",
    }  # fmt: skip
