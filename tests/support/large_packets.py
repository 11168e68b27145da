# SPDX-License-Identifier: Apache-2.0
"""A way that loses large packets without a word, as a tunnel does whose MTU nobody tells."""

import shutil

import pytest

from ds_hybridep.lab.namespaces import run_tool
from ds_hybridep.lab.network import EmulatedNetwork

LARGEST_BYTES = 1000
RULES = f"""
table inet way {{
    chain arriving {{
        type filter hook input priority 0
        meta length > {LARGEST_BYTES} drop
    }}
}}
"""


def lose_large_packets(network: EmulatedNetwork, rank: int) -> None:
    """Let packets above LARGEST_BYTES be lost on their way to a host; skip the test where `nft` is missing."""
    if shutil.which("nft") is None:
        pytest.skip("nft not found: apt-get install nftables")
    run_tool(network.command_on(rank, ["nft", "-f", "-"]), stdin=RULES)


def pass_large_packets(network: EmulatedNetwork, rank: int) -> None:
    run_tool(network.command_on(rank, ["nft", "delete", "table", "inet", "way"]))
