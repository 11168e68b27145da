# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

IMPORT_ALL = """
import importlib, pkgutil, sys
for name in ("ds_hybridep.geometry", "ds_hybridep.plan"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(*sorted({"torch", "deepspeed"} & set(sys.modules)))
"""


def test_no_module_of_geometry_and_plan_loads_torch_or_deepspeed() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=REPOSITORY, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
