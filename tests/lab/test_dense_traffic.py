# SPDX-License-Identifier: Apache-2.0
"""Sums by level on emulated datacentres: interfaces see what the program counted, and less than a ring sends."""

import sys
from pathlib import Path

import pytest

from ds_hybridep.lab.launcher import run_ranks
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import SEGMENT_FRAME_BYTES, SEGMENT_PAYLOAD_BYTES, LinkSpec, Topology

SCRIPT = str(Path(__file__).with_name("dense_script.py"))
NUM_FLOATS, NUM_SUMS = 1_000_000, 4
VECTORS_BYTES = 4 * NUM_FLOATS * NUM_SUMS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def permitted():
    if reason := why_not_permitted(with_delay=False):
        pytest.skip(f"emulated networks are not permitted here: {reason}")


def bytes_of(way, log_dir):
    """Bytes that left each datacentre, by the interfaces, and what the ranks counted."""
    with EmulatedNetwork(Topology(2, 2), LinkSpec()) as network:
        command = [sys.executable, SCRIPT, way, str(NUM_FLOATS), str(NUM_SUMS)]
        result = run_ranks(network, command, log_dir=log_dir, timeout_s=100)
    assert result.is_success, result.tail_of_log(0)
    logs = [Path(path).read_text().splitlines() for path in result.log_files]
    counted = [int(line.split()[1]) for log in logs for line in log if line.startswith("sent ")]
    assert len(counted) == 4
    return [uplink.out_bytes for uplink in result.uplinks], counted


@pytest.mark.slow
def test_interfaces_see_what_is_counted(permitted, tmp_path):
    seen, counted = bytes_of("levels", tmp_path)
    # Half of the vector of a sum, and half of what is gathered, from each of the two ranks of a datacentre.
    assert counted == [VECTORS_BYTES // 2] * 4
    for out_bytes in seen:
        # Headers of full segments, acknowledgements of what comes in (at most one of 66 bytes for each segment), and
        # less than 3% for the start of the job.
        assert 1.0 < out_bytes * SEGMENT_PAYLOAD_BYTES / SEGMENT_FRAME_BYTES / VECTORS_BYTES < 1.08


@pytest.mark.slow
def test_a_ring_sends_half_as_much_again(permitted, tmp_path):
    seen, nothing = bytes_of("torch", tmp_path)
    assert nothing == [0] * 4
    assert sum(seen) * SEGMENT_PAYLOAD_BYTES / SEGMENT_FRAME_BYTES > 1.45 * len(seen) * VECTORS_BYTES
