# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests: pools of gloo workers, started by the first test that runs something on them."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

TESTS_DIR = Path(__file__).resolve().parent
REPO_DIR = TESTS_DIR.parent

sys.path[:0] = [str(TESTS_DIR / "support"), str(TESTS_DIR)]  # helpers, and packages: cuda_emulation, stream_checker
if importlib.util.find_spec("ds_hybridep") is None:  # run from a checkout without an install
    sys.path.insert(0, str(REPO_DIR))

# On a busy machine an example takes as long as it takes.  `make test` draws the same examples each time, and
# `make test-slow` twice as many others (HYPOTHESIS_PROFILE=random).
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None, max_examples=50)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Before torch or deepspeed are imported anywhere: workers inherit these.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Own folder: a killed build leaves a lock in the folder that all checkouts share, and later builds wait for ever.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(REPO_DIR / ".cache" / "torch_extensions"))

from process_pool import Pools, ProcessPool  # noqa: E402 (needs the path and the environment above)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write what is computed to tests/golden")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under pytest-xdist tests of one kind run one by one in the same worker, which starts their processes once."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if {"pool2", "pool4", "pool8", "own_pool4", "pool_of"} & fixtures:
            # Two workers share them: one alone would take longer than all other tests together.
            folder = "integration" if item.path.parent.name == "integration" else "other"
            item.add_marker(pytest.mark.xdist_group(f"pools, {folder} tests"))
        elif item.get_closest_marker("dist") or item.path.parent.name == "lab":
            # They wait more than they compute, and one worker would wait until all others are done.
            of_sites = item.path.parent.name in ("house", "sites")
            item.add_marker(pytest.mark.xdist_group("other processes, of sites" if of_sites else "other processes"))
        elif "emulated" in item.nodeid:  # the first of them compiles for half a minute
            item.add_marker(pytest.mark.xdist_group("emulated kernels"))
            item.add_marker(pytest.mark.timeout(1500))
        elif item.path.stem in ("test_activations", "test_lora", "test_model_families"):  # they import transformers
            item.add_marker(pytest.mark.xdist_group("models of transformers"))
        elif item.path.parent.name in ("plan", "commands", "simulate"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))  # tests of one file ask the same large questions


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the kernels before any test has a time limit: on a busy machine this takes minutes, once."""
    if session.items and not session.config.option.collectonly:
        from ds_hybridep.kernels import load_kernels

        load_kernels("auto")


@pytest.fixture(scope="session")
def permitted() -> None:
    """Skip the test where no network may be emulated."""
    _skip_where_not_permitted(with_delay=True)


@pytest.fixture(scope="session")
def permitted_without_delay() -> None:
    """Skip the test where not even a network without delays may be emulated."""
    _skip_where_not_permitted(with_delay=False)


def _skip_where_not_permitted(*, with_delay: bool) -> None:
    from ds_hybridep.lab.network import why_not_permitted

    if reason := why_not_permitted(with_delay=with_delay):
        pytest.skip(f"emulated networks are not permitted here: {reason}")


@pytest.fixture(scope="session")
def pool2() -> Iterator[ProcessPool]:
    """Two gloo ranks."""
    with ProcessPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[ProcessPool]:
    """Four gloo ranks."""
    with ProcessPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool8() -> Iterator[ProcessPool]:
    """Eight gloo ranks."""
    with ProcessPool(8) as pool:
        yield pool


@pytest.fixture
def pool_of(request: pytest.FixtureRequest) -> Pools:
    """The pool with so many ranks, for tests whose rows differ in that."""
    return lambda num_ranks: request.getfixturevalue(f"pool{num_ranks}")
