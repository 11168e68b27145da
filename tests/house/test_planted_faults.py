# SPDX-License-Identifier: Apache-2.0
"""The faults of `make test-faults` can be planted in the package as it is; that program runs their tests."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planted_faults", ROOT / ".ci" / "planted_faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAULTS = program().FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_fault_stands_once_and_its_test_is_there(fault) -> None:
    text = (ROOT / "ds_hybridep" / fault.path).read_text(encoding="utf-8")
    assert text.count(fault.right) == 1, f"change the row {fault.name!r} of FAULTS in .ci/planted_faults.py"
    assert fault.right != fault.wrong
    path, _, name = fault.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
