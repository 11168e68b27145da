# SPDX-License-Identifier: Apache-2.0
"""The probe on emulated datacentres finds the rate to which the uplinks are shaped, and the delay."""

import json
import sys

import pytest

from ds_hybridep.lab.launcher import run_ranks
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import LinkSpec, Topology

TOLERANCE = 0.05
DELAY_S = 0.005


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mbit", [20, 100, 500])
def test_the_rate_is_within_five_percent_of_the_shaped_one(tmp_path, mbit):
    if reason := why_not_permitted(with_delay=True):
        pytest.skip(f"emulated networks are not permitted here: {reason}")
    out = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "ds_hybridep.commands.main", "probe", "--levels", "dc=2,gpu=2", "--out", str(out)]
    links = LinkSpec(wan_bits_per_s=mbit * 1e6, wan_delay_s=DELAY_S)
    with EmulatedNetwork(Topology(2, 2), links) as network:
        result = run_ranks(network, command, log_dir=tmp_path, timeout_s=120)
    assert result.is_success, result.tail_of_log(0)
    slow, fast = json.loads(out.read_text())["levels"]
    assert slow["bandwidth_gbps"] * 1e3 == pytest.approx(mbit, rel=TOLERANCE)
    assert DELAY_S * 1e3 <= slow["latency_ms"] < 2 * DELAY_S * 1e3
    assert fast["bandwidth_gbps"] > slow["bandwidth_gbps"]
