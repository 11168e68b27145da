# SPDX-License-Identifier: Apache-2.0
"""Shapers limit and count what leaves by a device: two htb classes, of which acknowledgements go first.

Acknowledgements that wait behind bulk data hold up the data of the other direction. With one class, an exchange of
1 MB or more both ways at once took 1.6 to 1.8 times as long as the link needs; with two, 1.02 times. Acknowledgements
have strict priority while they fit into half the rate, which they do. Small messages have no priority: a collective of
a few bytes waits behind bulk data, as on a real link.
"""

import json
import math

from ds_hybridep.lab.namespaces import configure, run_tool
from ds_hybridep.lab.topology import MAX_BITS_PER_S, SEGMENT_FRAME_BYTES


def add_shaper(namespace: str, device: str) -> None:
    """Adds the shaper of a device; `set_rate` must follow."""
    configure(
        "tc",
        namespace,
        f"qdisc add dev {device} root handle 1: htb default 20",
        # IPv4 header of 20 bytes, TCP, total length under 128 bytes, and ACK the only flag (data ends with PSH).
        f"filter add dev {device} parent 1: protocol ip prio 1 u32 match u8 0x05 0x0f at 0"
        " match u16 0x0000 0xff80 at 2 match u8 0x06 0xff at 9 match u8 0x10 0xff at 33 flowid 1:10",
    )


def set_rate(namespace: str, device: str, bits_per_s: float | None, round_trip_s: float) -> None:
    """Sets the rate of a shaper; queued frames stay. None is a rate that is never reached: the bytes are counted."""
    bits_per_s = bits_per_s or MAX_BITS_PER_S
    rate, limit = f"{bits_per_s:.0f}bit", queue_bytes(bits_per_s, round_trip_s)
    shared = f"ceil {rate} burst {burst_bytes(bits_per_s)} cburst {burst_bytes(bits_per_s)} quantum 60000"
    child = f"class replace dev {device} parent 1:1 classid"
    configure(
        "tc",
        namespace,
        f"class replace dev {device} parent 1: classid 1:1 htb rate {rate} {shared}",
        f"{child} 1:10 htb prio 0 rate {bits_per_s / 2:.0f}bit {shared}",
        f"{child} 1:20 htb prio 1 rate {bits_per_s / 100:.0f}bit {shared}",
        f"qdisc replace dev {device} parent 1:10 handle 10: bfifo limit {limit}",
        f"qdisc replace dev {device} parent 1:20 handle 20: bfifo limit {limit}",
    )


def shaped(namespace: str, device: str) -> dict[str, int]:
    """Counters of a shaper: "bytes" of frames that it let through, "drops" of packets by full queues."""
    answer = json.loads(run_tool(["tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device]))
    return next(qdisc for qdisc in answer if qdisc["kind"] == "htb")


def burst_bytes(bits_per_s: float) -> int:
    """Bytes that the shaper lets pass at once after a pause: one millisecond's worth, two frames at least.

    A shaper that wakes up later than this loses the rest, so with less a busy machine would not reach the rate. A
    message smaller than this crosses an idle link for free, so it should not be more.
    """
    return max(2 * SEGMENT_FRAME_BYTES, math.ceil(bits_per_s / 8 * 1e-3))


def segment_batch_bytes(bits_per_s: float | None) -> int:
    """Largest packet that TCP may hand down in one piece on a link of this rate; it is cut into segments later.

    It is as large as what the shaper lets pass at once, so that the link does not become coarser, and 64 KB at most.
    Pieces of many segments save most of the processor time that emulation costs: two cores carry 1 Gbit/s in frames
    of 1.5 KB, and 7 to 20 Gbit/s in pieces of 64 KB. The shaper counts the headers of every segment in a piece.
    """
    return 65536 if bits_per_s is None else min(65536, burst_bytes(bits_per_s))


def queue_bytes(bits_per_s: float, round_trip_s: float) -> int:
    """Bytes that the queue before a link of this rate holds: four round trips' worth, at least 200 ms' and 4 MiB.

    TCP seldom overflows such a queue. Messages then take latency + bytes / rate to within 1%. With a queue of one
    round trip, every other message of 1 MB waits for a retransmission and takes up to 2.5 times as long. With 200 ms'
    worth of 20 Mbit/s, a link that has slowed down drops whole windows, and single messages wait 10 s and more.
    """
    return min(2**31, max(4 * 2**20, math.ceil(bits_per_s / 8 * max(4 * round_trip_s, 0.200))))  # tc takes 32 bits
