# SPDX-License-Identifier: Apache-2.0
"""How ranks find each other for heartbeats: each writes its addresses into the job's store, and reads its peers'."""

import contextlib
import json
import os
import secrets
import socket
from datetime import timedelta
from typing import Any

import psutil

from ds_hybridep.errors import AgreementError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.transport.heartbeats import Mesh, peers_of
from ds_hybridep.transport.job import job_store


def connect(rank: int, cluster: Cluster, generation: int, timeout_s: float) -> tuple[Mesh, frozenset[str]]:
    """Return the connections for heartbeats, and all IP addresses of all ranks' hosts; all ranks must call.

    generation: the same number on all ranks, and another one in each call of a job.
    Raises AgreementError if ranks do not say their addresses within the time limit.
    """
    notes = _Notes(generation, timeout_s)
    if rank == 0:
        notes.write("key", f"hybridep-{secrets.token_hex(16)}")
    mesh = Mesh(rank, cluster.num_ranks, own_host(), notes.read("key", 0))
    try:
        addresses, hosts = _exchange(mesh, cluster, notes)
        mesh.connect(addresses)
    except BaseException:
        mesh.close()
        raise
    return mesh, hosts


def _exchange(mesh: Mesh, cluster: Cluster, notes: "_Notes") -> tuple[dict[int, tuple[str, int]], frozenset[str]]:
    """Return the peers' addresses for heartbeats, and all IP addresses of all ranks' hosts."""
    notes.write(str(mesh.rank), [mesh.address, _own_hosts()])
    known = {}
    # Rank 0 alone reads all, and tells the others: each reading all would be a million requests for 1000 ranks.
    for peer in range(cluster.num_ranks) if mesh.rank == 0 else peers_of(cluster, mesh.rank):
        (host, port), hosts = notes.read(str(peer), peer)
        known[peer] = (str(host), int(port)), hosts
    if mesh.rank == 0:
        told = {host for address, hosts in known.values() for host in (address[0], *hosts)}
        notes.write("hosts", sorted(told))
    return {peer: known[peer][0] for peer in peers_of(cluster, mesh.rank)}, frozenset(notes.read("hosts", 0))


class _Notes:
    """What ranks tell each other at the start, in the job's store."""

    def __init__(self, generation: int, timeout_s: float) -> None:
        self._store, self._path = job_store(), f"ds_hybridep/{generation}/health"
        self._timeout_s = timeout_s

    def write(self, name: str, value: Any) -> None:
        self._store.set(f"{self._path}/{name}", json.dumps(value))

    def read(self, name: str, writer: int) -> Any:
        """Return a note; AgreementError if its writer does not write it within the time limit."""
        try:
            self._store.wait([f"{self._path}/{name}"], timedelta(seconds=self._timeout_s))
            return json.loads(self._store.get(f"{self._path}/{name}"))
        except RuntimeError as error:
            raise AgreementError(
                f"rank {writer} did not come to the start of heartbeats within {self._timeout_s:g} s, see its log: "
                f"{str(error).splitlines()[0][:200]}"
            ) from error


def own_host() -> str:
    """Return the address at which other ranks reach this one."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        device = os.environ.get(name, "").split(",")[0].lstrip("^=")
        for one in psutil.net_if_addrs().get(device, ()):
            if one.family == socket.AF_INET:
                return str(one.address)
    master, host = os.environ.get("MASTER_ADDR", "127.0.0.1"), "127.0.0.1"
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            host = str(probe.getsockname()[0])
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE"))
    is_alone = ranks_here == os.environ.get("WORLD_SIZE")
    if ranks_here is None:  # started by srun: only the master's name tells whether other hosts can reach it
        is_alone = master == "localhost" or master.startswith("127.")
    if host.startswith("127.") and not is_alone:  # this host is the master, and its own name is a loopback address
        found = [one.address for device in psutil.net_if_addrs().values() for one in device]
        host = next((one for one in found if one.count(".") == 3 and not one.startswith("127.")), host)
    return host


def _own_hosts() -> list[str]:
    """Return the IP addresses of this host, without loopback addresses."""
    found = {
        one.address.partition("%")[0]
        for device in psutil.net_if_addrs().values()
        for one in device
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }
    return sorted(host for host in found if host != "::1" and not host.startswith("127."))
