# SPDX-License-Identifier: Apache-2.0
"""Emulated datacentres: hosts that are network namespaces, and links between them that have a rate and a delay.

    host  eth0 ---- port of ┌ switch of ┐ wan -- lan ┌ gate ┐ uplink ------------- dc0 ┌ core ┐ dc1 ---- the other DC
    host  eth0 ---- the DC  └ the DC    ┘            └      ┘ outward ~delay line~ from0 └    ┘

The switch cuts pieces that are larger than what the uplink lets pass at once into frames. Inside the DC, large pieces
save most of the processor time. Without a delay, a veth pair is the uplink in both directions. With one, frames
that leave the DC go through a delay line to the core, and frames that enter it still take the veth pair. So a frame
from DC 0 to DC 1 is

    1. shaped when it leaves DC 0 (queue and rate of 0's uplink),
    2. held back for the one-way delay, which is the only delay on its way,
    3. shaped when it enters DC 1 (queue and rate of 1's uplink).

The delay line also loses frames.

A static table tells every switch which port leads to which host. So switches do not flood frames or lose them while
they learn, and an uplink counts only frames that were meant to cross it. Nothing is made in the caller's namespace.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from operator import sub
from types import TracebackType
from typing import NamedTuple

from ds_hybridep.errors import LabError
from ds_hybridep.lab.delay import DelayLine, LineEnd
from ds_hybridep.lab.namespaces import configure, delete_namespaces, reap_orphans, run_tool, start_time
from ds_hybridep.lab.shaper import add_shaper, segment_batch_bytes, set_rate, shaped
from ds_hybridep.lab.topology import LinkSpec, Topology, check_rate

HOST_DEVICE = "eth0"
SUBNET = "10.77.0.0/16"
TOOLS = ("ip", "tc", "bridge")

SYSCTLS = {
    # Windows for long fat links: 1 Gbit/s with a round trip of 100 ms has 12.5 MB under way.
    "ipv4/tcp_rmem": "4096 131072 67108864",
    "ipv4/tcp_wmem": "4096 65536 67108864",
    # As on hosts tuned for long links: after a pause between two steps, the window must not start from 10 segments
    # again. A run must not use what the connections of an earlier run found out.
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    # No neighbour discovery or router solicitation among the counted bytes.
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
}
_serial_numbers = count()


class UplinkCounters(NamedTuple):
    """Bytes that one datacentre's uplink let through so far, and packets that its full queues dropped.

    Bytes are those of Ethernet frames with the headers of every segment, as they count against the rate.
    """

    out_bytes: int
    in_bytes: int
    dropped_packets: int

    def since(self, earlier: "UplinkCounters") -> "UplinkCounters":
        """What was counted after `earlier`."""
        return UplinkCounters(*map(sub, self, earlier))


class EmulatedNetwork:
    """The hosts and links of `topology`; they exist inside the `with` block.

    Entering the block also removes namespaces whose owner was killed. Leaving it ends every process in its namespaces,
    however the process was started, and removes the namespaces.

    Entering raises LabError with the reason if this machine does not permit it.
    """

    def __init__(self, topology: Topology, links: LinkSpec) -> None:
        self.topology = topology
        self.links = links
        self._prefix = f"hybridep-{os.getpid()}-{start_time(os.getpid())}-{next(_serial_numbers)}-"
        self._core = f"{self._prefix}core"
        self._wan_rates = [links.wan_bits_per_s] * topology.num_dcs
        self._has_delay_lines = bool(links.wan_delay_s or links.wan_loss)
        self._namespaces: list[str] = []
        self._delay_lines: list[DelayLine] = []  # by datacentre

    def __enter__(self) -> "EmulatedNetwork":
        _check_tools()
        reap_orphans()
        try:
            self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    # What ranks see

    def namespace_of(self, rank: int) -> str:
        """Name of the network namespace that is the host of `rank`; `ip netns exec NAME ...` runs something there."""
        return f"{self._prefix}host{rank}"

    def command_on(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on the host of `rank`; for subprocess."""
        return ["ip", "netns", "exec", self.namespace_of(rank), *command]

    # What the links do; `dc` is a datacentre, or None for all

    def set_wan_rate(self, bits_per_s: float | None, *, dc: int | None = None) -> None:
        """Changes the rate of uplinks in both directions; queued frames stay.

        A connection made at a much higher rate still hands down pieces that are large for the new rate. It stops
        when TCP itself has slowed down, a few round trips later.
        """
        check_rate(bits_per_s, "bits_per_s")
        for each in self._dcs(dc):
            self._wan_rates[each] = bits_per_s
            self._shape_uplink(each)
        self._limit_segment_batches()

    def set_wan_path(self, delay_s: float, *, loss: float = 0.0, dc: int | None = None) -> None:
        """Changes one-way delay and loss of frames that leave datacentres. Congestion windows and queues stay.

        Raises LabError if the network was made with neither.
        """
        if not self._has_delay_lines:
            raise LabError("the uplinks have no delay line: make the network with a delay or loss")
        for each in self._dcs(dc):
            self._delay_lines[each].change(delay_s=delay_s, loss=loss)

    def cut(self, dc: int | None = None) -> None:
        """Lets no frame leave or enter; frames on the wire still arrive."""
        self._set_uplink_ports(dc, "disabled")

    def restore(self, dc: int | None = None) -> None:
        """Undoes `cut`. A TCP connection continues at its next retransmission, after up to the length of the cut."""
        self._set_uplink_ports(dc, "forwarding")

    def counters(self) -> tuple[UplinkCounters, ...]:
        """What crossed the uplink of each datacentre since it was made.

        The shapers count. The counters of a network device would miss the headers of segments that the device gets
        in one piece, 4% of all bytes.
        """
        found = []
        for dc in range(self.topology.num_dcs):
            out, into = (shaped(*place) for place in self._uplink_shapers(dc))
            found.append(UplinkCounters(out["bytes"], into["bytes"], out["drops"] + into["drops"]))
        return tuple(found)

    # Construction

    def _switch(self, dc: int) -> str:
        return f"{self._prefix}dc{dc}"

    def _gate(self, dc: int) -> str:
        return f"{self._prefix}gate{dc}"

    def _dcs(self, dc: int | None) -> range:
        if dc is None:
            return range(self.topology.num_dcs)
        self.topology.ranks_in(dc)  # raises if there is no such datacentre
        return range(dc, dc + 1)

    @property
    def _out_device(self) -> str:
        """Port of a datacentre's gate by which frames leave it."""
        return "outward" if self._has_delay_lines else "uplink"

    def _uplink_shapers(self, dc: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """(namespace, device) whose queue shapes what leaves `dc`, and the same for what enters it."""
        return (self._gate(dc), self._out_device), (self._core, f"dc{dc}")

    def _create(self) -> None:
        topology = self.topology
        dcs = {rank: f"dc{topology.dc_of(rank)}" for rank in range(topology.num_ranks)}
        self._add_switch(self._core)  # first, since datacentres plug into it
        for dc in range(topology.num_dcs):
            ranks = topology.ranks_in(dc)
            self._add_switch(self._switch(dc))
            self._add_switch(self._gate(dc))
            self._add_uplink(dc)
            for rank in ranks:
                self._add_host(rank)
            self._fill_table(self._switch(dc), {rank: f"host{rank}" for rank in ranks}, "wan")
            self._fill_table(self._gate(dc), dict.fromkeys(ranks, "lan"), self._out_device)
            self._shape_uplink(dc)
        self._fill_table(self._core, dcs, "")
        self._limit_segment_batches()

    def _add_namespace(self, name: str) -> None:
        self._namespaces.append(name)
        run_tool(["ip", "netns", "add", name])
        # The files under /proc/sys/net belong to the namespace of the process that opens them. A machine without
        # IPv6 has no files for it.
        lines = (f"test ! -e {key} || echo '{value}' > {key}" for key, value in SYSCTLS.items())
        run_tool(["ip", "netns", "exec", name, "sh", "-ec", "; ".join(["cd /proc/sys/net", *lines])])

    def _add_switch(self, name: str) -> None:
        self._add_namespace(name)
        # Without forward_delay 0 a new port stays mute for 15 s.
        bridge = "link add name switch type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
        configure("ip", name, bridge, "link set dev switch up")

    def _add_uplink(self, dc: int) -> None:
        switch, gate = self._switch(dc), self._gate(dc)
        configure("ip", switch, f"link add name wan type veth peer name lan netns {gate}")
        configure("ip", gate, f"link add name uplink type veth peer name dc{dc} netns {self._core}")
        ports = [(switch, "wan"), (gate, "lan"), (gate, "uplink"), (self._core, f"dc{dc}")]
        if self._has_delay_lines:
            ends = LineEnd(gate, "outward"), LineEnd(self._core, f"from{dc}")
            self._delay_lines.append(DelayLine(*ends, delay_s=self.links.wan_delay_s, loss=self.links.wan_loss))
            # The TAP's own queue only bridges the microseconds until the delay line reads it.
            configure("ip", gate, "link set dev outward txqueuelen 5000")
            ports += ends
        for namespace, device in ports:
            _plug(namespace, device)
        for namespace, device in self._uplink_shapers(dc):
            add_shaper(namespace, device)

    def _add_host(self, rank: int) -> None:
        topology, host, switch = self.topology, self.namespace_of(rank), self._switch(self.topology.dc_of(rank))
        address, mac = topology.address_of(rank), topology.mac_of(rank)
        self._add_namespace(host)
        configure(
            "ip",
            host,
            f"link add name {HOST_DEVICE} type veth peer name host{rank} netns {switch}",
            "link set dev lo up",
            # Smaller pieces cost up to 10% of a step.
            f"link set dev {HOST_DEVICE} gso_max_size {segment_batch_bytes(None)} address {mac} up",
            f"address add {address}/16 dev {HOST_DEVICE}",
            # A machine's default may be bbr, which paces by its own model of the link and probes below its rate.
            # A route may name any other; the sysctl of a namespace takes only what the machine allows to all.
            f"route replace {SUBNET} dev {HOST_DEVICE} src {address} congctl cubic",
            *(
                f"neighbour add {topology.address_of(peer)} lladdr {topology.mac_of(peer)} dev {HOST_DEVICE}"
                " nud permanent"
                for peer in range(topology.num_ranks)
                if peer != rank
            ),
        )
        _plug(switch, f"host{rank}")

    def _fill_table(self, switch: str, ports: Mapping[int, str], others: str) -> None:
        to = {self.topology.mac_of(rank): ports.get(rank, others) for rank in range(self.topology.num_ranks)}
        configure("bridge", switch, *(f"fdb add {mac} dev {port} master static" for mac, port in to.items()))

    def _shape_uplink(self, dc: int) -> None:
        for namespace, device in self._uplink_shapers(dc):
            set_rate(namespace, device, self._wan_rates[dc], 2.0 * self.links.wan_delay_s)

    def _limit_segment_batches(self) -> None:
        # A piece that leaves one uplink must not be too large for the uplink by which it enters.
        least = segment_batch_bytes(min((rate for rate in self._wan_rates if rate is not None), default=None))
        # Loss must hit single frames: a piece of many segments would be lost as a whole.
        segments = "gso_max_segs 1" if self.links.wan_loss else ""
        for dc in range(self.topology.num_dcs):
            configure("ip", self._switch(dc), f"link set dev wan gso_max_size {least} {segments}")

    def _set_uplink_ports(self, dc: int | None, state: str) -> None:
        for each in self._dcs(dc):
            for device in {"uplink", self._out_device}:
                run_tool(["bridge", "-n", self._gate(each), "link", "set", "dev", device, "state", state])

    def _remove(self) -> None:
        trouble = [line.stop() for line in self._delay_lines]
        self._delay_lines = []
        delete_namespaces(self._namespaces)
        self._namespaces = []
        if any(trouble):
            raise LabError(f"links were not what they should have been: {'; '.join(filter(None, trouble))}")


def why_not_permitted(*, with_delay: bool = True) -> str | None:
    """Why this process cannot emulate a network here, in words; None if it can. Tries it, which takes 0.1 s."""
    try:
        with EmulatedNetwork(Topology(1, 1), LinkSpec(wan_bits_per_s=1e9, wan_delay_s=1e-3 if with_delay else 0.0)):
            return None
    except LabError as error:
        return str(error)


def _plug(namespace: str, device: str) -> None:
    """Makes a device a port of the switch in `namespace`."""
    port = "type bridge_slave learning off flood off mcast_flood off bcast_flood off"
    configure("ip", namespace, f"link set dev {device} master switch up", f"link set dev {device} {port}")


def _check_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise LabError(f"emulated hosts are Linux network namespaces, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise LabError("emulated hosts need root, or a user namespace (lab.namespaces.become_root)")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise LabError(f"{' and '.join(missing)} not found: install iproute2")
