# SPDX-License-Identifier: Apache-2.0
"""A wheel installed where there is no compiler: everything works, more slowly, and a warning says what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO_DIR = Path(__file__).resolve().parents[2]

USE_THE_WHEEL = """
import logging, sys
logging.basicConfig(format="%(message)s")
import torch
import ds_hybridep
from ds_hybridep.kernels import load_kernels
assert ds_hybridep.__file__.startswith(sys.argv[1]), ds_hybridep.__file__
print(type(load_kernels("auto")).__name__)
"""


@pytest.mark.timeout(240)
def test_a_wheel_works_without_a_compiler(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(REPO_DIR)]
    subprocess.run(build, check=True, capture_output=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    options = ["-q", "--no-deps", "--no-index", "--target", str(site)]
    install = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=100)
    environment = {
        "PATH": str(tmp_path / "nothing"),
        "PYTHONPATH": str(site),
        "HOME": str(tmp_path),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-c", USE_THE_WHEEL, str(site)]
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["ReferenceKernels"]
    assert "using the slower PyTorch reference" in found.stderr
    assert "compiler" in found.stderr
    planned = subprocess.run(
        [sys.executable, str(site / "bin" / "ds_hybridep"), "plan", "--help"], env=environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    assert os.listdir(site / "ds_hybridep" / "csrc")
