# SPDX-License-Identifier: Apache-2.0
import inspect

import pytest

from ds_hybridep import errors

ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind is not errors.HybridEPError]


@pytest.mark.parametrize("kind", ERRORS)
def test_each_error_is_caught_as_ours_and_as_a_built_in(kind):
    assert issubclass(kind, errors.HybridEPError)
    assert issubclass(kind, ValueError | RuntimeError)
    assert str(kind("what, where, and what to do")) == "what, where, and what to do"
