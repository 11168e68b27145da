# SPDX-License-Identifier: Apache-2.0
"""What predictions know of a machine: what its codecs cost, and how fast a rank and its host are."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.packets import Packets, Part, part_elements


@dataclass(frozen=True)
class CodecCost:
    """Cost of an encoding on the rank's own device; its rates count bytes before the encoding.

    ratio: bytes before the encoding over bytes on the wire; used if `packets` is None.
    packets: computes the bytes of a message from the shapes in it.
    """

    name: str
    ratio: float = 1.0
    _: KW_ONLY
    encode_bytes_per_s: float = math.inf
    decode_bytes_per_s: float = math.inf
    is_lossy: bool = True
    packets: Packets | None = None

    def message_bytes(self, parts: Sequence[Part], element_bytes: int) -> float:
        """Bytes of one message that holds these parts; an element has `element_bytes` before the encoding."""
        if self.packets is not None:
            return self.packets.message_bytes(parts)
        return sum(map(part_elements, parts)) * element_bytes / self.ratio


IDENTITY = CodecCost("identity", is_lossy=False)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed of one rank, and costs of the host.  Host times that are not given are 0.

    flops_per_s, expert_flops_per_s: rates that dense products and experts reach; None: experts reach the same rate.
    layer_s, expert_call_s: host time of a layer, and of calling one expert, in a forward; a backward takes twice that.
    exchange_s, all_to_all_s: host time of one round of messages of our token exchange, and of one all-to-all of
        DeepSpeed's layer. Bytes flow during this time: rows of early ranks travel while late ranks compute.
    packet_s: host time of one packet of a layer's weights, or of its gradients.
    message_s: work of the host for each message to one peer, of token rows or a packet. A rank hands them over one
        after the other, before their bytes flow; other bytes flow meanwhile as they do while it computes.
    overlap: hidden share of the time that could be hidden; 0: a rank waits for each packet separately.
    wire_factor: bytes on the wire for each byte of payload, because of headers.
    sync_factor: measured bytes of sums and gathers over those that the model predicts.
    """

    flops_per_s: float
    expert_flops_per_s: float | None = None
    layer_s: float = 0.0
    expert_call_s: float = 0.0
    exchange_s: float = 0.0
    all_to_all_s: float = 0.0
    packet_s: float = 0.0
    message_s: float = 0.0
    step_s: float = 0.0
    overlap: float = 1.0
    wire_factor: float = 1.0
    sync_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise PlanError(f"overlap is {self.overlap}, but must be between 0 and 1")
