# SPDX-License-Identifier: Apache-2.0
"""Hosts, addresses and links of an emulated network. Pure: text and numbers in, frozen values out."""

import re
from dataclasses import dataclass

from ds_hybridep.errors import ConfigError

MOST = 200  # datacentres, and hosts in each
MIN_BITS_PER_S = 64e3  # below this, a single frame takes 0.2 s and TCP never gets past its first retransmissions
MAX_BITS_PER_S = 100e9
MAX_DELAY_S = 5.0

SEGMENT_FRAME_BYTES = 1514  # of one full TCP segment, as the shaper counts it: 1500 + 14 (Ethernet)

BITS_PER_UNIT = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z%]*)\s*")


@dataclass(frozen=True)
class Topology:
    """`num_dcs` datacentres of `hosts_per_dc` hosts each, one rank per host.

    Ranks are counted DC by DC: rank = dc * hosts_per_dc + host. For 2x2:

        DC 0: ranks 0, 1     DC 1: ranks 2, 3
    """

    num_dcs: int
    hosts_per_dc: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_dcs <= MOST or not 1 <= self.hosts_per_dc <= MOST:
            raise ConfigError(f"--dcs: got {self}, wanted 1 to {MOST} datacentres of 1 to {MOST} hosts, such as 2x2")

    def __str__(self) -> str:
        return f"{self.num_dcs}x{self.hosts_per_dc}"

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """The topology that "2x4" (two datacentres of four hosts) describes. Raises ConfigError for other text."""
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
        if match is None:
            raise ConfigError(f"--dcs: got '{text}', wanted DATACENTRESxHOSTS, for example 2x2 or 4x1")
        return cls(int(match[1]), int(match[2]))

    @property
    def num_ranks(self) -> int:
        return self.num_dcs * self.hosts_per_dc

    def dc_of(self, rank: int) -> int:
        """The datacentre in which `rank` runs."""
        return rank // self.hosts_per_dc

    def ranks_in(self, dc: int) -> range:
        """The ranks of one datacentre. Raises ConfigError if there is no such datacentre."""
        if not 0 <= dc < self.num_dcs:
            raise ConfigError(f"dc: got {dc}, wanted 0 to {self.num_dcs - 1} in a lab of {self}")
        return range(dc * self.hosts_per_dc, (dc + 1) * self.hosts_per_dc)

    def address_of(self, rank: int) -> str:
        """IPv4 address of the host of `rank`, such as "10.77.1.2" for the second host of DC 1."""
        dc, host = divmod(rank, self.hosts_per_dc)
        return f"10.77.{dc}.{host + 1}"

    def mac_of(self, rank: int) -> str:
        """Ethernet address of the host of `rank`; locally administered."""
        dc, host = divmod(rank, self.hosts_per_dc)
        return f"02:4d:00:00:{dc:02x}:{host + 1:02x}"


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """Links between datacentres, of the same kind in both directions. Links inside a datacentre are not limited.

    wan_bits_per_s: of the uplink of one datacentre, shared by its hosts; counts whole Ethernet frames. None: no limit.
    wan_delay_s: one way from any datacentre to any other; a round trip takes twice as long.
    wan_loss: share of the frames between datacentres that are lost.
    """

    wan_bits_per_s: float | None = None
    wan_delay_s: float = 0.0
    wan_loss: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.wan_bits_per_s, "--wan")
        if not 0.0 <= self.wan_delay_s <= MAX_DELAY_S:
            raise ConfigError(f"--delay: got {self.wan_delay_s} s, wanted 0 to {MAX_DELAY_S:g} s, one way")
        if not 0.0 <= self.wan_loss <= 1.0:
            raise ConfigError(f"--loss: got {self.wan_loss:.0%}, wanted 0% to 100% of the frames")


def parse_rate(text: str, argument: str) -> float:
    """Bits per second of "200mbit", "1gbit" or "64kbit"; units are decimal, as on every line card.

    Raises ConfigError for anything else, also for "mbps", which some programs read as bits and tc as bytes.
    """
    bits_per_s = parse_number(text, BITS_PER_UNIT)
    if bits_per_s is None:
        raise ConfigError(f"{argument}: got '{text}', wanted a number and bit, kbit, mbit or gbit, as in 200mbit")
    check_rate(bits_per_s, argument)
    return bits_per_s


def check_rate(bits_per_s: float | None, argument: str) -> None:
    """Raises ConfigError for a rate that cannot be shaped. None means no limit, and is allowed."""
    if bits_per_s is not None and not MIN_BITS_PER_S <= bits_per_s <= MAX_BITS_PER_S:
        raise ConfigError(f"{argument}: got {bits_per_s:g} bit/s, wanted 64kbit to 100gbit")


def parse_duration(text: str, argument: str) -> float:
    """Seconds of "10ms", "250us", "1.5s" or "2min". Raises ConfigError for anything else; only 0 needs no unit."""
    seconds = parse_number(text, SECONDS_PER_UNIT)
    if seconds is None and text.strip() != "0":
        raise ConfigError(f"{argument}: got '{text}', wanted a number and us, ms, s or min, as in 10ms")
    return seconds or 0.0


def parse_share(text: str, argument: str) -> float:
    """The share that "1%" describes. Raises ConfigError for anything else."""
    share = parse_number(text, {"%": 0.01})
    if share is None:
        raise ConfigError(f"{argument}: got '{text}', wanted a percentage of the frames, as in 1%")
    return share


def parse_number(text: str, units: dict[str, float]) -> float | None:
    """A number with one of these units, in any case, as in "1.5 ms"; None for anything else."""
    match = NUMBER_AND_UNIT.fullmatch(text)
    return None if match is None or match[2].lower() not in units else float(match[1]) * units[match[2].lower()]
