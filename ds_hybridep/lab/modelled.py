# SPDX-License-Identifier: Apache-2.0
"""For machines that do not permit namespaces: computes what the bytes of a run would have cost on the WAN.

Nothing is measured. The command runs on loopback, where no link is slow. The bytes that the runtime counted on the
slowest level then cost latency + bytes / rate. Overlap of transfers with computation and with each other is left out,
so every number carries the word "modelled".
"""

from collections.abc import Mapping
from typing import Any

from ds_hybridep.errors import LabError
from ds_hybridep.lab.topology import SEGMENT_FRAME_BYTES, SEGMENT_PAYLOAD_BYTES, LinkSpec, Topology


def modelled_wan(record: Mapping[str, Any], topology: Topology, links: LinkSpec) -> str:
    """A line that says how long one step's bytes would occupy one datacentre's uplink in one direction.

    record: the content of `report_file`; bytes of its first level are sums over all ranks and steps, assumed to be
        spread evenly over the datacentres. Its `waits` in a row for this level each cost one delay.
    Raises LabError if the record has no such bytes.
    """
    try:
        level, steps = record["levels"][0], record["steps"]
        num_bytes = sum(sent or 0 for sent in level["sent_bytes"].values()) / steps / topology.num_dcs
        latency_s = level.get("waits", 0) / steps * links.wan_delay_s
    except (LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise LabError(f"the run record has no steps and levels[0].sent_bytes to charge for: {error!r}") from error
    frame_bytes = num_bytes * SEGMENT_FRAME_BYTES / SEGMENT_PAYLOAD_BYTES
    transfer_s = 8.0 * frame_bytes / links.wan_bits_per_s if links.wan_bits_per_s else 0.0
    return (
        f"modelled: {transfer_s + latency_s:.4f} s per step on each uplink and direction"
        f" ({num_bytes / 1e6:.3f} MB: {transfer_s:.4f} s, latency: {latency_s:.4f} s), none of it overlapped"
    )
