# SPDX-License-Identifier: Apache-2.0
"""On emulated datacentres: counted bytes are those of the interfaces, and the probe finds the slow link."""

import json
import sys
from pathlib import Path

import pytest

from ds_hybridep.lab.launcher import run_ranks
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology

DELAY_S = 0.005
SCRIPT = str(Path(__file__).with_name("moe_script.py"))
FRAME_SHARE = 1448 / 1514  # payload of a full Ethernet frame
MIN_BYTES = 20e6  # of a DC; start-up and acknowledgements must not matter
SUM_BOUND = 0.02  # of both trainings, of which the smaller has 40% of the bytes: 5% of either would be seen
KINDS = ({"tokens"}, {"expert_weights", "expert_gradients"})  # of domains of one DC, and of both


@pytest.mark.dist
@pytest.mark.slow
def test_counted_bytes_over_the_slow_level_are_those_of_the_interfaces(permitted, tmp_path):
    with EmulatedNetwork(Topology(2, 2), LinkSpec(wan_bits_per_s=500e6)) as net:
        result = run_ranks(net, [sys.executable, SCRIPT, "4", "1", "2"], log_dir=tmp_path, timeout_s=300)
    logs = [Path(path).read_text() for path in result.log_files]
    assert result.is_success, logs[0][-2000:]
    counted = [json.loads(log.splitlines()[-1]) for log in logs]
    for index, kinds in enumerate(KINDS):
        slow = [of_domain_size[index][0] for of_domain_size in counted]
        assert all({kind for kind, sent in level["sent_bytes"].items() if sent} == kinds for level in slow)
    for dc, uplink in enumerate(result.uplinks):
        levels = [level for rank in counted[2 * dc : 2 * dc + 2] for level, _ in rank]
        sent = [sum(level["sent_bytes"].values()) for level in levels]
        received = sum(sum(level["received_bytes"].values()) for level in levels)
        assert min(sent) > MIN_BYTES / 2
        assert uplink.out_bytes * FRAME_SHARE == pytest.approx(sum(sent), rel=SUM_BOUND)
        assert uplink.in_bytes * FRAME_SHARE == pytest.approx(received, rel=SUM_BOUND)


@pytest.mark.dist
@pytest.mark.slow
def test_the_slow_level_is_found(permitted, tmp_path):
    out = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "ds_hybridep.commands.main", "probe", "--levels", "dc=2,gpu=2", "--out", str(out)]
    with EmulatedNetwork(Topology(2, 2), LinkSpec(wan_bits_per_s=20e6, wan_delay_s=DELAY_S)) as network:
        result = run_ranks(network, command, log_dir=tmp_path, timeout_s=300)
    assert result.is_success, result.tail_of_log(0)
    slow, fast = json.loads(out.read_text())["levels"]
    assert slow["bandwidth_gbps"] < 0.021 < fast["bandwidth_gbps"]
    assert slow["latency_ms"] >= DELAY_S * 1e3 > fast["latency_ms"]
