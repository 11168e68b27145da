# SPDX-License-Identifier: Apache-2.0
"""Hosts, addresses, rates and schedules of an emulated network. Pure: text and numbers in, frozen values out."""

import math
import re
from dataclasses import dataclass

from ds_hybridep.errors import ConfigError

MAX_DCS = 200
MAX_HOSTS_PER_DC = 200
MIN_BITS_PER_S = 64e3  # below this, a single frame takes 0.2 s and TCP never gets past its first retransmissions
MAX_BITS_PER_S = 100e9
MAX_DELAY_S = 5.0
MAX_LOSS = 0.5

# Bytes of one full TCP segment: those that the application gets, and those that the shaper counts.
SEGMENT_PAYLOAD_BYTES = 1448  # 1500 - 20 (IP) - 20 (TCP) - 12 (TCP timestamps)
SEGMENT_FRAME_BYTES = 1514  # 1500 + 14 (Ethernet)

BITS_PER_UNIT = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z/]*)\s*")


@dataclass(frozen=True)
class Topology:
    """`num_dcs` datacentres of `hosts_per_dc` hosts each, one rank per host.

    Ranks are counted DC by DC: rank = dc * hosts_per_dc + host. For 2x2:

        DC 0: ranks 0, 1     DC 1: ranks 2, 3
    """

    num_dcs: int
    hosts_per_dc: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_dcs <= MAX_DCS or not 1 <= self.hosts_per_dc <= MAX_HOSTS_PER_DC:
            raise ConfigError(
                f"--dcs: got {self}, wanted 1 to {MAX_DCS} datacentres of 1 to {MAX_HOSTS_PER_DC} hosts, such as 2x2"
            )

    def __str__(self) -> str:
        return f"{self.num_dcs}x{self.hosts_per_dc}"

    @classmethod
    def parse(cls, text: str, argument: str = "--dcs") -> "Topology":
        """The topology that "2x4" (two datacentres of four hosts) describes. Raises ConfigError for other text."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*[xX]\s*(\d{1,9})\s*", text)
        if match is None:
            raise ConfigError(f"{argument}: got '{text}', wanted DATACENTRESxHOSTS, for example 2x2 or 4x1")
        return cls(int(match[1]), int(match[2]))

    @property
    def num_ranks(self) -> int:
        return self.num_dcs * self.hosts_per_dc

    def dc_of(self, rank: int) -> int:
        """The datacentre in which `rank` runs. Raises ConfigError if there is no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank: got {rank}, wanted 0 to {self.num_ranks - 1} in a lab of {self}")
        return rank // self.hosts_per_dc

    def check_dc(self, dc: int) -> int:
        """`dc` itself. Raises ConfigError if there is no such datacentre."""
        if not 0 <= dc < self.num_dcs:
            raise ConfigError(f"dc: got {dc}, wanted 0 to {self.num_dcs - 1} in a lab of {self}")
        return dc

    def ranks_in(self, dc: int) -> range:
        """The ranks of one datacentre."""
        return range(self.check_dc(dc) * self.hosts_per_dc, (dc + 1) * self.hosts_per_dc)

    def address_of(self, rank: int) -> str:
        """IPv4 address of the host of `rank`, such as "10.77.1.2" for the second host of DC 1."""
        dc = self.dc_of(rank)
        return f"10.77.{dc}.{rank - dc * self.hosts_per_dc + 1}"

    def mac_of(self, rank: int) -> str:
        """Ethernet address of the host of `rank`; locally administered."""
        dc = self.dc_of(rank)
        return f"02:4d:00:00:{dc:02x}:{rank - dc * self.hosts_per_dc + 1:02x}"


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """Speed of the links. Every rate holds in each direction separately and counts whole Ethernet frames.

    wan_bits_per_s: of the uplink of one datacentre, shared by its hosts. None: not limited.
    wan_delay_s: one way from any datacentre to any other; a round trip takes twice as long.
    lan_bits_per_s: of the link of one host to its datacentre's switch. None: not limited.
    lan_delay_s: one way from a host to any other of its datacentre; also part of every path to other datacentres.
    wan_jitter_s: the most extra time of a frame from one datacentre to another; frames stay in order.
    wan_loss: share of the frames between datacentres that are lost.
    """

    wan_bits_per_s: float | None = None
    wan_delay_s: float = 0.0
    lan_bits_per_s: float | None = None
    lan_delay_s: float = 0.0
    wan_jitter_s: float = 0.0
    wan_loss: float = 0.0

    def __post_init__(self) -> None:
        for argument, rate in (("--wan", self.wan_bits_per_s), ("--lan", self.lan_bits_per_s)):
            check_rate(rate, argument)
        for argument, delay_s in (
            ("--delay", self.wan_delay_s),
            ("--lan-delay", self.lan_delay_s),
            ("--jitter", self.wan_jitter_s),
        ):
            if not 0.0 <= delay_s <= MAX_DELAY_S:
                raise ConfigError(f"{argument}: got {delay_s} s, wanted 0 to {MAX_DELAY_S:g} s, one way")
        if not 0.0 <= self.wan_loss <= MAX_LOSS:
            raise ConfigError(f"--loss: got {self.wan_loss:.0%}, wanted 0% to {MAX_LOSS:.0%} of the frames")

    @property
    def needs_delay_line(self) -> bool:
        """True if frames between datacentres are held back or lost."""
        return bool(self.wan_delay_s or self.wan_jitter_s or self.wan_loss)


@dataclass(frozen=True)
class ScheduleEvent:
    """Something that happens to the WAN while ranks run.

    at_s: seconds after the ranks were started.
    action: "rate" (new rate of the uplinks), "cut" or "restore".
    wan_bits_per_s: the new rate, for "rate"; None otherwise.
    dc: the datacentre whose uplink changes; None means all.
    """

    at_s: float
    action: str
    wan_bits_per_s: float | None = None
    dc: int | None = None

    def __str__(self) -> str:
        what = self.action if self.wan_bits_per_s is None else format_rate(self.wan_bits_per_s)
        return f"{self.at_s:g}s:{what}" + ("" if self.dc is None else f"@{self.dc}")


def parse_rate(text: str, argument: str) -> float:
    """Bits per second of "200mbit", "1gbit" or "64kbit"; units are decimal, as on every line card.

    Raises ConfigError for anything else, also for "mbps", which some programs read as bits and tc as bytes.
    """
    number, unit = _number_and_unit(text)
    if number is None or unit not in BITS_PER_UNIT:
        hint = " (write mbit for megabits)" if unit in {"mbps", "mb", "mb/s", "mbit/s", "gbps", "gb"} else ""
        raise ConfigError(
            f"{argument}: got '{text}', wanted a number and bit, kbit, mbit or gbit, as in 200mbit{hint}"
        )
    bits_per_s = number * BITS_PER_UNIT[unit]
    check_rate(bits_per_s, argument)
    return bits_per_s


def check_rate(bits_per_s: float | None, argument: str) -> None:
    """Raises ConfigError for a rate that cannot be shaped. None means no limit, and is allowed."""
    if bits_per_s is not None and not MIN_BITS_PER_S <= bits_per_s <= MAX_BITS_PER_S:
        allowed = f"{format_rate(MIN_BITS_PER_S)} to {format_rate(MAX_BITS_PER_S)}"
        raise ConfigError(f"{argument}: got {bits_per_s:g} bit/s, wanted {allowed}")


def parse_duration(text: str, argument: str) -> float:
    """Seconds of "10ms", "250us", "1.5s" or "2min". Raises ConfigError for anything else; only 0 needs no unit."""
    number, unit = _number_and_unit(text)
    if number == 0.0 and unit == "":
        return 0.0
    if number is None or unit not in SECONDS_PER_UNIT:
        raise ConfigError(f"{argument}: got '{text}', wanted a number and us, ms, s or min, as in 10ms")
    return number * SECONDS_PER_UNIT[unit]


def parse_share(text: str, argument: str) -> float:
    """The share that "1%" or "0.01" describes. Raises ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise ConfigError(f"{argument}: got '{text}', wanted a share of the frames, as in 1% or 0.01")
    return float(match[1]) / (100.0 if match[2] else 1.0)


def parse_schedule(text: str, topology: Topology, argument: str = "--schedule") -> tuple[ScheduleEvent, ...]:
    """The events of "30s:50mbit,60s:cut@1,65s:restore@1", in order of time.

    Each event is TIME:WHAT with WHAT a rate, "cut" or "restore"; "@N" limits it to the uplink of datacentre N.
    Raises ConfigError that names the event.
    """
    events = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        time_text, colon, what = part.partition(":")
        what, at, dc_text = what.partition("@")
        if not colon or (at and not dc_text.strip().isdecimal()):
            raise ConfigError(f"{argument}: got '{part}', wanted TIME:RATE, TIME:cut or TIME:restore, with @DC or not")
        dc = topology.check_dc(int(dc_text)) if at else None
        at_s = parse_duration(time_text, f"{argument}, event '{part}'")
        action = what.strip().lower()
        if action in {"cut", "restore"}:
            events.append(ScheduleEvent(at_s, action, dc=dc))
        else:
            events.append(ScheduleEvent(at_s, "rate", parse_rate(what, f"{argument}, event '{part}'"), dc))
    return tuple(sorted(events, key=lambda event: event.at_s))


def format_rate(bits_per_s: float | None) -> str:
    """The shortest text that `parse_rate` reads back, such as "200mbit"; "unlimited" for None."""
    if bits_per_s is None:
        return "unlimited"
    unit = next((unit for unit in ("gbit", "mbit", "kbit") if bits_per_s >= BITS_PER_UNIT[unit]), "bit")
    return f"{bits_per_s / BITS_PER_UNIT[unit]:.10g}{unit}"


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
    return max(4 * 2**20, math.ceil(bits_per_s / 8 * max(4 * round_trip_s, 0.200)))


def _number_and_unit(text: str) -> tuple[float | None, str]:
    match = NUMBER_AND_UNIT.fullmatch(text)
    return (None, "") if match is None else (float(match[1]), match[2].lower())
