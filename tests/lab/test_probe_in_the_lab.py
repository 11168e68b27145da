# SPDX-License-Identifier: Apache-2.0
"""The probe on emulated datacentres tells slow links from fast ones, and finds the delay."""

import json
import sys

import pytest

from ds_hybridep.lab.launcher import run_ranks
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import LinkSpec, Topology

DELAY_S = 0.005


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_slow_level_is_found(tmp_path):
    if reason := why_not_permitted():
        pytest.skip(f"emulated networks are not permitted here: {reason}")
    out = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "ds_hybridep.commands.main", "probe", "--levels", "dc=2,gpu=2", "--out", str(out)]
    with EmulatedNetwork(Topology(2, 2), LinkSpec(wan_bits_per_s=20e6, wan_delay_s=DELAY_S)) as network:
        result = run_ranks(network, command, log_dir=tmp_path, timeout_s=120)
    assert result.is_success, result.tail_of_log(0)
    slow, fast = json.loads(out.read_text())["levels"]
    assert slow["bandwidth_gbps"] < 0.021 < fast["bandwidth_gbps"]
    assert slow["latency_ms"] >= DELAY_S * 1e3 > fast["latency_ms"]
