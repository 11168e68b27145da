# SPDX-License-Identifier: Apache-2.0
"""Both artefacts of a release: what they hold, and that they work in another environment, far from the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from scripts import free_port, output_of, run_together

REPO_DIR = Path(__file__).resolve().parents[2]
VERSION = re.findall(r'"(.+)"', (REPO_DIR / "ds_hybridep" / "version.py").read_text())[-1]

USE_THE_WHEEL = """
import logging, sys
logging.basicConfig(format="%(message)s")
import torch
import ds_hybridep
from ds_hybridep.kernels import load_kernels
assert ds_hybridep.__file__.startswith(sys.argv[1]), ds_hybridep.__file__
print(type(load_kernels("auto")).__name__)
"""


def test_a_wheel_works_without_a_compiler(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(REPO_DIR)]
    subprocess.run(build, check=True, capture_output=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    options = ["-q", "--no-deps", "--no-index", "--target", str(site)]
    install = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=500)
    environment = {
        "PATH": str(tmp_path / "nothing"),
        "PYTHONPATH": str(site),
        "HOME": str(tmp_path),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-c", USE_THE_WHEEL, str(site)]
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["ReferenceKernels"]
    assert "using the slower PyTorch reference" in found.stderr
    assert "compiler" in found.stderr
    planned = subprocess.run(
        [sys.executable, str(site / "bin" / "ds_hybridep"), "plan", "--help"], env=environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    assert os.listdir(site / "ds_hybridep" / "csrc")


# -- both artefacts in an environment of their own -----------------------------------------------------------------

NOT_IN_A_CHECKOUT = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1_000_000,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "hybridep": {
        "levels": [{"name": "dc", "size": 2, "domain_size": 2, "bandwidth_gbps": 1, "codecs": "recommended"}],
        "advanced": {"kernels": "compiled"},  # so that it fails where the sources are not found
    },
}
SIZES = "--steps 3 --log-interval 1 --eval-interval 0 --layers 1 --hidden 32 --experts 4 --seq-len 32".split()
PLAN = "plan --model Qwen3-30B-A3B --dcs 2x8 --wan 10gbps --delay 10ms --lan 3200gbps --tokens 8192".split()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two wheels: one made from a copy of the checkout, one from its sdist.  And the sdist."""
    folder = tmp_path_factory.mktemp("built")
    checkout, out = folder / "checkout", folder / "out"
    shutil.copytree(REPO_DIR, checkout, ignore=NOT_IN_A_CHECKOUT)
    build = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", out, checkout]
    output_of(build, folder, 200)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder / "from_sdist"]
    output_of([sys.executable, "-m", "pip", "wheel", *options, sdist], folder, 200)
    (from_sdist,) = (folder / "from_sdist").glob("*.whl")
    return {"wheel": wheel, "sdist": from_sdist, "archive": sdist}


def environment_with(wheel: Path, folder: Path) -> Path:
    """The scripts folder of a new environment that has the wheel, and shares torch and all else with this one."""
    output_of([sys.executable, "-m", "venv", folder], folder.parent, 200)
    scripts = folder / "bin"
    output_of([scripts / "python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], folder, 200)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    shared = [path for path in sys.path if path.endswith("-packages")]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    return scripts


@pytest.mark.slow
def test_both_artefacts_hold_the_same_and_all_that_is_needed(built: dict[str, Path]) -> None:
    names = [set(zipfile.ZipFile(built[kind]).namelist()) for kind in ("wheel", "sdist")]
    assert names[0] == names[1]
    for path in [*(REPO_DIR / "ds_hybridep").rglob("*"), *(REPO_DIR / "csrc").rglob("*")]:
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(REPO_DIR).as_posix()
            assert name.replace("csrc/", "ds_hybridep/csrc/") in names[0], name
    assert {"ds_hybridep/op_builder/hybridep.py", "ds_hybridep/op_builder/compile.py"} <= names[0]
    (hooks,) = [name for name in names[0] if name.endswith("/entry_points.txt")]
    text = zipfile.ZipFile(built["wheel"]).read(hooks).decode()
    assert "[torch.backends]\nds_hybridep = ds_hybridep._autoload:install" in text
    assert not [name for name in names[0] if name.split("/")[0] not in ("ds_hybridep", hooks.split("/")[0])]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_artefact_works_in_a_new_environment(built: dict[str, Path], kind: str, tmp_path: Path) -> None:
    scripts = environment_with(built[kind], tmp_path / "environment")
    python, work, extensions = scripts / "python", tmp_path / "work", tmp_path / "extensions"
    work.mkdir()
    ours = {"PYTHONPATH": "", "TORCH_EXTENSIONS_DIR": str(extensions)}
    place = output_of([python, "-c", "import ds_hybridep; print(ds_hybridep.__file__)"], work, 100, **ours)
    assert place.startswith(str(tmp_path / "environment"))
    assert output_of([scripts / "ds_hybridep", "--version"], work, 100, **ours) == f"ds_hybridep {VERSION}\n"
    assert "GB/GPU" in output_of([scripts / "ds_hybridep", *PLAN], work, 100, **ours)
    assert "start-up hook: registered" in output_of([scripts / "ds_hybridep", "report"], work, 100, **ours)

    # What DeepSpeed compiles for itself is taken from here, if it is here; the kernels are built anew.
    here = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    if here.exists():
        shutil.copytree(here, extensions, ignore=shutil.ignore_patterns("hybridep_*", "*lock"))
    shutil.copy(REPO_DIR / "examples" / "train_lm.py", work)
    (work / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    command = [python, "train_lm.py", "--deepspeed_config", "ds_config.json", "--json-file", "run.json", *SIZES]
    job = {**ours, "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"} for rank in range(2)]
    results = run_together([command, command], work, *ranks, limit_s=900)
    assert [status for status, _ in results] == [0, 0], results[0][1] + results[1][1]
    assert "hybridep: 1 MoE layers, domain sizes dc 2" in results[0][1]
    assert json.loads((work / "run.json").read_text())["world_size"] == 2
    assert list(extensions.glob("hybridep_rows_*/*.so"))
