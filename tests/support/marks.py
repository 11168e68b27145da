# SPDX-License-Identifier: Apache-2.0
"""Marks that several tests share."""

import functools

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # like its neighbours, for `make test-slow`
