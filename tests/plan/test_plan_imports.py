# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(*sorted({"torch", "deepspeed"} & set(sys.modules)))
"""


@pytest.mark.parametrize("package", ["ds_hybridep.geometry", "ds_hybridep.plan"])
def test_no_module_of_geometry_and_plan_loads_torch_or_deepspeed(package: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package], cwd=REPOSITORY, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
