# SPDX-License-Identifier: Apache-2.0
import inspect
import re

import pytest

from ds_hybridep import errors

DRAWN = re.findall(r"^[├└]── (\w+) \((\w+)\)", errors.__doc__, flags=re.MULTILINE)


def test_the_drawn_tree_is_the_real_one():
    drawn = {name: ("HybridEPError", built_in) for name, built_in in DRAWN}
    drawn["HybridEPError"] = ("Exception",)
    real = {
        name: tuple(base.__name__ for base in member.__bases__)
        for name, member in inspect.getmembers(errors, inspect.isclass)
    }
    assert drawn == real


def test_the_last_branch_is_drawn_as_the_last():
    branches = re.findall(r"^([├└])── ", errors.__doc__, flags=re.MULTILINE)
    assert branches == ["├"] * (len(DRAWN) - 1) + ["└"]


@pytest.mark.parametrize(("name", "built_in"), DRAWN)
def test_each_error_is_caught_as_ours_and_as_the_built_in(name, built_in):
    error = getattr(errors, name)("what, where, and what to do")
    assert isinstance(error, errors.HybridEPError)
    assert isinstance(error, {"ValueError": ValueError, "RuntimeError": RuntimeError}[built_in])
    assert str(error) == "what, where, and what to do"
