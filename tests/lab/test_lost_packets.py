# SPDX-License-Identifier: Apache-2.0
"""A job between two datacentres ends with the cause when large packets no longer cross."""

import sys
import threading
import time
from pathlib import Path

import pytest
from large_packets import lose_large_packets

from ds_hybridep.lab.launcher import run_ranks
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology

SCRIPT = Path(__file__).parent / "endless_script.py"


@pytest.mark.dist
@pytest.mark.slow
def test_a_job_whose_large_packets_are_lost_ends_and_says_so(permitted, tmp_path):
    begun, results = tmp_path / "begun", []
    with EmulatedNetwork(Topology(2, 1), LinkSpec()) as network:
        command = [sys.executable, str(SCRIPT), "12", str(begun)]
        job = threading.Thread(
            target=lambda: results.append(run_ranks(network, command, log_dir=tmp_path, timeout_s=300)), daemon=True
        )
        job.start()
        while not begun.exists():
            assert job.is_alive(), results
            time.sleep(0.05)
        lose_large_packets(network, 1)
        job.join(400)
    (result,) = results
    assert not result.timed_out
    said = result.log_files[result.failed_ranks[0]].read_text()
    assert "large packets from rank 0 to rank 1 (10.77.1.1:" in said
    assert "is the MTU too large somewhere on the way?" in said
    for log in result.log_files:  # the report, which the other rank may have no time for, names a transfer
        assert " object at 0x" not in log.read_text()
