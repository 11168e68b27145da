# SPDX-License-Identifier: Apache-2.0
"""The bytes that the program counts are those that its hosts' interfaces carry."""

import json
import sys
from pathlib import Path

import pytest

from ds_hybridep.lab.launcher import run_ranks
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import LinkSpec, Topology

SCRIPT = str(Path(__file__).with_name("moe_script.py"))
FRAME_SHARE = 1448 / 1514  # payload of a full Ethernet frame
MIN_BYTES = 20e6  # start-up and acknowledgements must not matter


@pytest.mark.dist
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("domain_size", "kinds"), [(1, {"tokens"}), (2, {"expert_weights", "expert_gradients"})])
def test_counted_bytes_over_the_slow_level_are_those_of_the_interfaces(tmp_path, domain_size, kinds):
    if reason := why_not_permitted():
        pytest.skip(f"emulated networks are not permitted here: {reason}")
    with EmulatedNetwork(Topology(2, 2), LinkSpec(wan_bits_per_s=500e6)) as net:
        command = [sys.executable, SCRIPT, str(domain_size), "4"]
        result = run_ranks(net, command, log_dir=tmp_path, timeout_s=100)
    logs = [Path(path).read_text() for path in result.log_files]
    assert result.is_success, logs[0][-2000:]
    slow = [json.loads(log.splitlines()[-1])[0] for log in logs]
    assert all({kind for kind, sent in level["sent_bytes"].items() if sent} == kinds for level in slow)
    for dc, uplink in enumerate(result.uplinks):
        sent = sum(sum(level["sent_bytes"].values()) for level in slow[2 * dc : 2 * dc + 2])
        received = sum(sum(level["received_bytes"].values()) for level in slow[2 * dc : 2 * dc + 2])
        assert sent > MIN_BYTES
        assert uplink.out_bytes * FRAME_SHARE == pytest.approx(sent, rel=0.05)
        assert uplink.in_bytes * FRAME_SHARE == pytest.approx(received, rel=0.05)
