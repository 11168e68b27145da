# SPDX-License-Identifier: Apache-2.0
"""What the tests of emulated networks share."""

import os
import time

import pytest

from ds_hybridep.lab import namespaces


@pytest.fixture
def lab_namespaces():
    """A function of a process id: the names of the namespaces that belong to it."""
    folder = namespaces.NETNS_FOLDER
    return lambda pid: [name for name in os.listdir(folder) if name.startswith(f"hybridep-{pid}-")]


@pytest.fixture
def wait_until_gone():
    """A function that waits for the end of a process."""

    def wait(pid, timeout_s=300.0):
        deadline_s = time.monotonic() + timeout_s
        while namespaces.start_time(pid) is not None:
            assert time.monotonic() < deadline_s, f"process {pid} is still there"
            time.sleep(0.02)

    return wait
