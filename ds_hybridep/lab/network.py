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

The delay line also makes jitter and loss.

A static table tells every switch which port leads to which host. So switches do not flood frames or lose them while
they learn, and an uplink counts only frames that were meant to cross it. Nothing is made in the caller's namespace.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType

from ds_hybridep.errors import LabError
from ds_hybridep.lab.delay import DelayLine, LineEnd, build_delay_line, why_no_delay
from ds_hybridep.lab.namespaces import (
    delete_namespaces,
    kill_processes_in,
    reap_orphans,
    run_batch,
    run_ip,
    run_tool,
    start_time,
)
from ds_hybridep.lab.topology import (
    MAX_BITS_PER_S,
    LinkSpec,
    Topology,
    burst_bytes,
    check_rate,
    queue_bytes,
    segment_batch_bytes,
)

HOST_DEVICE = "eth0"
SUBNET = "10.77.0.0/16"
TOOLS = ("ip", "tc", "bridge")

HOST_SYSCTLS = {
    # Windows for long fat links: 1 Gbit/s with a round trip of 100 ms has 12.5 MB under way.
    "net/ipv4/tcp_rmem": "4096 131072 67108864",
    "net/ipv4/tcp_wmem": "4096 65536 67108864",
    # As on hosts tuned for long links: after a pause between two steps, the window must not start from 10 segments
    # again. A run must not use what the connections of an earlier run found out.
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    # No neighbour discovery or router solicitation among the counted bytes.
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}
SWITCH_SYSCTLS = {name: value for name, value in HOST_SYSCTLS.items() if "ipv6" in name}
_serial_numbers = count()


@dataclass(frozen=True)
class UplinkCounters:
    """Bytes that one datacentre's uplink let through so far, and packets that its full queues dropped.

    Bytes are those of Ethernet frames with the headers of every segment, as they count against the rate.
    """

    dc: int
    out_bytes: int
    in_bytes: int
    out_dropped_packets: int = 0
    in_dropped_packets: int = 0

    def since(self, earlier: "UplinkCounters") -> "UplinkCounters":
        """What was counted after `earlier`."""
        return UplinkCounters(
            self.dc,
            self.out_bytes - earlier.out_bytes,
            self.in_bytes - earlier.in_bytes,
            self.out_dropped_packets - earlier.out_dropped_packets,
            self.in_dropped_packets - earlier.in_dropped_packets,
        )


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
        self._wan_rates = [links.wan_bits_per_s] * topology.num_dcs
        self._namespaces: list[str] = []
        self._delay_lines: list[DelayLine] = []
        self._uplink_lines: list[DelayLine] = []  # by datacentre

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
        return f"{self._prefix}host{self.topology.dc_of(rank)}_{rank % self.topology.hosts_per_dc}"

    def command_on(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on the host of `rank`; for subprocess."""
        return ["ip", "netns", "exec", self.namespace_of(rank), *command]

    def kill_processes(self, rank: int) -> int:
        """Ends every process on the host of `rank` by SIGKILL and waits until all are gone. Returns their number."""
        return kill_processes_in(self.namespace_of(rank))

    # What the links do

    def wan_rate(self, dc: int) -> float | None:
        """Bits per second of the uplink of `dc` now; None if it is not limited."""
        return self._wan_rates[self.topology.check_dc(dc)]

    def set_wan_rate(self, bits_per_s: float | None, *, dc: int | None = None) -> None:
        """Changes the rate of the uplink of one datacentre, or of all, in both directions; queued frames stay.

        A connection made at a much higher rate still hands down pieces that are large for the new rate. It stops
        when TCP itself has slowed down, a few round trips later.
        """
        check_rate(bits_per_s, "bits_per_s")
        for each in self._dcs(dc):
            self._wan_rates[each] = bits_per_s
            self._shape_uplink(each, is_new=False)
        self._limit_segment_batches()

    def set_wan_path(self, delay_s: float, *, jitter_s: float = 0.0, loss: float = 0.0, dc: int | None = None) -> None:
        """Changes one-way delay, jitter and loss of frames that leave one datacentre, or all.

        Raises LabError if the network was made with none of the three. Congestion windows and queues stay.
        """
        if not self._uplink_lines:
            raise LabError("the uplinks have no delay line: make the network with a delay, jitter or loss")
        for each in self._dcs(dc):
            self._uplink_lines[each].change(a_to_b_s=delay_s, jitter_s=jitter_s, loss=loss)

    def cut(self, dc: int | None = None) -> None:
        """Lets no frame leave or enter the datacentre (None: all of them); frames on the wire still arrive."""
        self._set_uplink_ports(dc, state=0)  # disabled

    def restore(self, dc: int | None = None) -> None:
        """Undoes `cut`. A TCP connection continues at its next retransmission, after up to the length of the cut."""
        self._set_uplink_ports(dc, state=3)  # forwarding

    def counters(self) -> tuple[UplinkCounters, ...]:
        """What crossed the uplink of each datacentre since it was made.

        The shapers count. The counters of a network device would miss the headers of segments that the device gets
        in one piece, 4% of all bytes.
        """
        return tuple(
            UplinkCounters(dc, out["bytes"], into["bytes"], out["drops"], into["drops"])
            for dc in range(self.topology.num_dcs)
            for out, into in [[_shaper_statistics(*place) for place in self._uplink_shapers(dc)]]
        )

    # Construction

    @property
    def _core(self) -> str:
        return f"{self._prefix}core"

    def _switch(self, dc: int) -> str:
        return f"{self._prefix}dc{dc}"

    def _dcs(self, dc: int | None) -> range:
        return range(self.topology.num_dcs) if dc is None else range(self.topology.check_dc(dc), dc + 1)

    @property
    def _out_device(self) -> str:
        """Port of a datacentre's gate by which frames leave it."""
        return "outward" if self.links.needs_delay_line else "uplink"

    def _gate(self, dc: int) -> str:
        return f"{self._prefix}gate{dc}"

    def _uplink_shapers(self, dc: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """(namespace, device) whose queue shapes what leaves `dc`, and the same for what enters it."""
        return (self._gate(dc), self._out_device), (self._core, f"dc{dc}")

    def _create(self) -> None:
        if self.links.needs_delay_line or self.links.lan_delay_s:
            if reason := why_no_delay():
                raise LabError(f"no delay line: {reason}")
        # Switches, then cables; the core first since datacentres plug into it.
        self._add_switch(self._core)
        for dc in range(self.topology.num_dcs):
            self._add_switch(self._switch(dc))
            self._add_switch(self._gate(dc))
            self._add_uplink(dc)
            for rank in self.topology.ranks_in(dc):
                self._add_host(rank)
        self._fill_tables()
        for dc in range(self.topology.num_dcs):
            self._shape_uplink(dc, is_new=True)
        self._limit_segment_batches()

    def _add_namespace(self, name: str, sysctls: dict[str, str]) -> None:
        self._namespaces.append(name)
        run_tool(["ip", "netns", "add", name])
        # The files under /proc/sys/net belong to the namespace of the process that opens them. A machine without
        # IPv6 has no files for it.
        lines = [f"test ! -e /proc/sys/{key} || echo '{value}' > /proc/sys/{key}" for key, value in sysctls.items()]
        script = "; ".join(["set -e", *lines])
        run_tool(["ip", "netns", "exec", name, "sh", "-c", script])

    def _add_switch(self, name: str) -> None:
        self._add_namespace(name, SWITCH_SYSCTLS)
        # Without forward_delay 0 a new port stays mute for 15 s.
        run_ip(name, "link add name switch type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
        run_ip(name, "link set dev switch up")

    def _add_uplink(self, dc: int) -> None:
        switch, gate = self._switch(dc), self._gate(dc)
        run_ip(switch, f"link add name wan type veth peer name lan netns {gate}")
        run_ip(gate, f"link add name uplink type veth peer name dc{dc} netns {self._core}")
        _plug(switch, ["wan"])
        _plug(gate, ["lan", "uplink"])
        _plug(self._core, [f"dc{dc}"])
        if self.links.needs_delay_line:
            ends = LineEnd(gate, "outward"), LineEnd(self._core, f"from{dc}")
            self._add_delay_line(*ends, self.links.wan_delay_s, self.links.wan_jitter_s, self.links.wan_loss)
            self._uplink_lines.append(self._delay_lines[-1])
            for end in ends:
                _plug(end.namespace, [end.device])

    def _add_host(self, rank: int) -> None:
        topology, host, switch = self.topology, self.namespace_of(rank), self._switch(self.topology.dc_of(rank))
        self._add_namespace(host, HOST_SYSCTLS)
        if self.links.lan_delay_s:
            # Frames are delayed only from a host to the switch, so once from host to host.
            self._add_delay_line(LineEnd(host, HOST_DEVICE), LineEnd(switch, f"host{rank}"), self.links.lan_delay_s)
        else:
            run_ip(host, f"link add name {HOST_DEVICE} type veth peer name host{rank} netns {switch}")
        _plug(switch, [f"host{rank}"])
        run_batch(
            "ip",
            host,
            [
                "link set dev lo up",
                f"link set dev {HOST_DEVICE} address {topology.mac_of(rank)} up",
                f"address add {topology.address_of(rank)}/16 dev {HOST_DEVICE}",
                # A machine's default may be bbr, which paces by its own model of the link and probes below its rate.
                # A route may name any other; the sysctl of a namespace takes only what the machine allows to all.
                f"route replace {SUBNET} dev {HOST_DEVICE} src {topology.address_of(rank)} congctl cubic",
                *(
                    f"neighbour add {topology.address_of(peer)} lladdr {topology.mac_of(peer)} dev {HOST_DEVICE}"
                    " nud permanent"
                    for peer in range(topology.num_ranks)
                    if peer != rank
                ),
            ],
        )
        if self.links.lan_bits_per_s is not None:
            for namespace, device in ((host, HOST_DEVICE), (switch, f"host{rank}")):
                _shape(namespace, device, self.links.lan_bits_per_s, self._round_trip_s, is_new=True)

    def _add_delay_line(self, a: LineEnd, b: LineEnd, a_to_b_s: float, jitter_s: float = 0, loss: float = 0) -> None:
        line = DelayLine(build_delay_line(), a, b, a_to_b_s=a_to_b_s, b_to_a_s=0.0, jitter_s=jitter_s, loss=loss)
        self._delay_lines.append(line)
        for end in (a, b):
            # The TAP's own queue only bridges the microseconds until the delay line reads it.
            run_ip(end.namespace, f"link set dev {end.device} txqueuelen 5000")

    def _fill_tables(self) -> None:
        dcs = {rank: f"dc{self.topology.dc_of(rank)}" for rank in range(self.topology.num_ranks)}
        self._fill_table(self._core, dcs, "")
        for here in range(self.topology.num_dcs):
            ranks = self.topology.ranks_in(here)
            self._fill_table(self._switch(here), {rank: f"host{rank}" for rank in ranks}, "wan")
            self._fill_table(self._gate(here), dict.fromkeys(ranks, "lan"), self._out_device)

    def _fill_table(self, switch: str, ports: Mapping[int, str], others: str) -> None:
        to = {self.topology.mac_of(rank): ports.get(rank, others) for rank in range(self.topology.num_ranks)}
        run_batch("bridge", switch, [f"fdb add {mac} dev {port} master static" for mac, port in to.items()])

    @property
    def _round_trip_s(self) -> float:
        return 2.0 * (self.links.wan_delay_s + self.links.lan_delay_s)

    def _shape_uplink(self, dc: int, *, is_new: bool) -> None:
        # A link without a limit gets a rate that it never reaches, so that its bytes are counted too.
        rate = self._wan_rates[dc] or MAX_BITS_PER_S
        for namespace, device in self._uplink_shapers(dc):
            _shape(namespace, device, rate, self._round_trip_s, is_new=is_new)

    def _limit_segment_batches(self) -> None:
        # A piece that leaves one uplink must not be too large for the uplink by which it enters.
        over_wan = segment_batch_bytes(min((rate for rate in self._wan_rates if rate is not None), default=None))
        # Loss must hit single frames: a piece of many segments would be lost as a whole.
        segments = "gso_max_segs 1" if self.links.wan_loss else ""
        for dc in range(self.topology.num_dcs):
            run_ip(self._switch(dc), f"link set dev wan gso_max_size {over_wan} {segments}")
        from_host = segment_batch_bytes(self.links.lan_bits_per_s)  # smaller pieces cost up to 10% of a step
        for rank in range(self.topology.num_ranks):
            run_ip(self.namespace_of(rank), f"link set dev {HOST_DEVICE} gso_max_size {from_host}")

    def _set_uplink_ports(self, dc: int | None, *, state: int) -> None:
        for each in self._dcs(dc):
            for device in sorted({"uplink", self._out_device}):
                run_tool(["bridge", "-n", self._gate(each), "link", "set", "dev", device, "state", str(state)])

    def _remove(self) -> None:
        trouble = [line.stop() for line in self._delay_lines]
        self._delay_lines, self._uplink_lines = [], []
        for namespace in self._namespaces:
            kill_processes_in(namespace)
        delete_namespaces(self._namespaces)
        self._namespaces = []
        if any(trouble):
            raise LabError(f"links were not what they should have been: {'; '.join(filter(None, trouble))}")


def why_not_permitted(*, with_delay: bool = True) -> str | None:
    """Why this process cannot emulate a network here, in words; None if it can. Tries it, which takes 0.1 s."""
    links = LinkSpec(wan_bits_per_s=1e9, wan_delay_s=1e-3 if with_delay else 0.0)
    try:
        with EmulatedNetwork(Topology(1, 1), links):
            return None
    except LabError as error:
        return str(error)


def _plug(namespace: str, devices: Iterable[str]) -> None:
    """Makes devices ports of the switch in `namespace`."""
    run_batch(
        "ip",
        namespace,
        [
            line
            for device in devices
            for line in (
                f"link set dev {device} master switch up",
                f"link set dev {device} type bridge_slave learning off flood off mcast_flood off bcast_flood off",
            )
        ],
    )


def _shape(namespace: str, device: str, bits_per_s: float, round_trip_s: float, *, is_new: bool) -> None:
    """Limits frames that leave by `device` to a rate; acknowledgements go first.

    Two classes share the rate. Acknowledgements that wait behind bulk data hold up the data of the other direction.
    With one class, an exchange of 1 MB or more both ways at once took 1.6 to 1.8 times as long as the link needs; with
    two, 1.02 times. Acknowledgements have strict priority while they fit into half the rate, which they do. Small
    messages have no priority: a collective of a few bytes waits behind bulk data, as on a real link.
    """
    rate = f"{bits_per_s:.0f}bit"
    shared = f"ceil {rate} burst {burst_bytes(bits_per_s)} cburst {burst_bytes(bits_per_s)} quantum 60000"
    limit = queue_bytes(bits_per_s, round_trip_s)
    child = f"class replace dev {device} parent 1:1 classid"
    lines = [f"qdisc add dev {device} root handle 1: htb default 20"] if is_new else []
    lines += [
        f"class replace dev {device} parent 1: classid 1:1 htb rate {rate} {shared}",
        f"{child} 1:10 htb prio 0 rate {bits_per_s / 2:.0f}bit {shared}",
        f"{child} 1:20 htb prio 1 rate {bits_per_s / 100:.0f}bit {shared}",
        f"qdisc replace dev {device} parent 1:10 handle 10: bfifo limit {limit}",
        f"qdisc replace dev {device} parent 1:20 handle 20: bfifo limit {limit}",
    ]
    if is_new:
        # IPv4 header of 20 bytes, TCP, total length under 128 bytes, and ACK the only flag (data ends with PSH).
        lines.append(
            f"filter add dev {device} parent 1: protocol ip prio 1 u32 match u8 0x05 0x0f at 0"
            " match u16 0x0000 0xff80 at 2 match u8 0x06 0xff at 9 match u8 0x10 0xff at 33 flowid 1:10"
        )
    run_batch("tc", namespace, lines)


def _shaper_statistics(namespace: str, device: str) -> dict[str, int]:
    answer = json.loads(run_tool(["tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device]))
    return next(qdisc for qdisc in answer if qdisc["kind"] == "htb")


def _check_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise LabError(f"emulated hosts are Linux network namespaces, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise LabError("emulated hosts need root, or a user namespace (lab.unprivileged.become_root)")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise LabError(f"{' and '.join(missing)} not found: install iproute2")
