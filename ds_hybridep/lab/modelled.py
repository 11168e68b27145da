# SPDX-License-Identifier: Apache-2.0
"""For machines that do not permit namespaces: computes what the bytes of a run would have cost on the WAN.

Nothing is measured. The command runs on loopback, where no link is slow. The bytes that the runtime counted on the
slowest level then cost latency + bytes / rate. Overlap of transfers with computation and with each other is left out,
so every number carries the word "modelled".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_hybridep.errors import LabError
from ds_hybridep.lab.topology import SEGMENT_FRAME_BYTES, SEGMENT_PAYLOAD_BYTES, LinkSpec, Topology


@dataclass(frozen=True)
class ModelledWan:
    """Seconds that one step's bytes would occupy one uplink in one direction; `label` says that nobody measured it."""

    bytes_per_step: float
    transfer_s: float
    latency_s: float
    label: str = "modelled"

    def __str__(self) -> str:
        return (
            f"{self.label}: {self.transfer_s + self.latency_s:.4f} s per step on each uplink and direction"
            f" ({self.bytes_per_step / 1e6:.3f} MB: {self.transfer_s:.4f} s, latency: {self.latency_s:.4f} s),"
            " none of it overlapped"
        )


def modelled_wan(
    record: Mapping[str, Any], topology: Topology, links: LinkSpec, *, exchanges_per_step: int = 0
) -> ModelledWan:
    """What the traffic of a run record would cost per step on each datacentre's uplink.

    record: the content of `report_file`; `levels[0].sent_bytes` are bytes per kind, sums over all ranks and steps,
        assumed to be spread evenly over the datacentres.
    exchanges_per_step: number of exchanges of a step that wait for each other; each costs one one-way delay.
    Raises LabError if the record has no such bytes.
    """
    try:
        total_bytes = sum(record["levels"][0]["sent_bytes"].values())
        num_steps = int(record["steps"])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise LabError("the run record has no steps and levels[0].sent_bytes to charge for") from error
    if num_steps < 1:
        raise LabError("the run record covers no step")
    bytes_per_step = total_bytes / num_steps / topology.num_dcs
    frame_bytes = bytes_per_step * SEGMENT_FRAME_BYTES / SEGMENT_PAYLOAD_BYTES
    return ModelledWan(
        bytes_per_step=bytes_per_step,
        transfer_s=8.0 * frame_bytes / links.wan_bits_per_s if links.wan_bits_per_s else 0.0,
        latency_s=exchanges_per_step * links.wan_delay_s,
    )
