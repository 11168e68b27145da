# SPDX-License-Identifier: Apache-2.0
"""The link between the ranks of this job: one for each process, shared by all engines."""

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import AgreementError, ConfigError
from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.link import SILENT_S, TLS, Address, Link, LinkOptions, State, read_secret
from ds_hybridep.transport.job import job_store, read_note
from ds_hybridep.transport.waits import waiting

_links: list["JobLink"] = []
_lock = threading.Lock()  # guards them, and the numbers of their users


@dataclass(frozen=True)
class LinkSettings:
    """How this rank connects with others.

    timeout_s: after this time a rank of which nothing is heard is gone; also the longest wait at the start.
    ports: range to listen in; None: any free one.  secret: None: rank 0 makes one for the job.
    """

    timeout_s: float
    ports: tuple[int, int] | None = None
    secret: bytes | None = field(default=None, repr=False)
    tls: TLS | None = None

    @classmethod
    def of(cls, config: HybridEPConfig) -> "LinkSettings":
        """Read the files that a config names; ConfigError if one cannot be used."""
        link = config.link
        secret = None if link.secret_file is None else read_secret(Path(link.secret_file), "hybridep.link.secret_file")
        return cls(config.timeout_s, link.ports, secret, None if link.tls is None else TLS(**dict(link.tls)))


def open_link(cluster: Cluster, generation: int, settings: LinkSettings) -> "JobLink":
    """Return the link that this process has open with these settings, or a new one; all ranks must call together.

    Each call needs a call of `JobLink.leave`.  generation: as in `Transport`.
    Raises CommunicationError if no port is free.
    """
    options = [LinkOptions(level.link.connections, level.link.congestion_control) for level in cluster.levels]
    with _lock:
        for link in _links:  # none that was left to this process's parent by a fork
            if link.num_users and not link.is_closed and (link.options, link.settings) == (options, settings):
                break
        else:
            for unused in [one for one in _links if not one.num_users]:
                if settings.ports is not None:
                    unused.close()  # its port may be the last one
                _links.remove(unused)
            # The first one to write it makes the secret of the job.
            secret = job_store().compare_set("link/secret", "", secrets.token_hex(32))
            link = JobLink(options, settings, bytes.fromhex(secret.decode()))
            _links.append(link)
        link.join(cluster, generation)
    return link


class JobLink(Link):
    """The link of this rank to the other ranks of the job, shared by all engines with the same settings.

    options: of connections over each level.  secret: of the job, for settings that have none.
    """

    def __init__(self, options: Sequence[LinkOptions], settings: LinkSettings, secret: bytes) -> None:
        super().__init__(
            dist.get_rank(), dist.get_world_size(), secret=settings.secret or secret, host=own_host(),
            ports=settings.ports, tls=settings.tls, timeout_s=max(settings.timeout_s, 2 * SILENT_S),
        )  # fmt: skip
        self.options, self.settings, self.num_users = options, settings, 0

    def join(self, cluster: Cluster, generation: int) -> None:
        """Add a user, and tell the other ranks where this one is found from now on."""
        self.num_users += 1
        self._cluster, self._store = cluster, job_store(f"{generation}/link")
        self._found = {self.rank}  # ranks whose notes were read since
        self._store.set(str(self.rank), json.dumps([*self.address, self.instance.hex()]))

    def leave(self) -> None:
        """Undo one `open_link`; the last call closes the link, without waiting for the other ranks."""
        with _lock:
            self.num_users -= 1
            if self.num_users:
                return
        self.close(waits=False)

    @waiting()
    def meet(self, ranks: Sequence[int]) -> None:
        """Connect to those of the ranks to which there is no connection yet; they must call, too.

        Raises AgreementError if one has not opened its link, or CommunicationError if one cannot be reached, within
        the time limit.
        """
        by_level: dict[int, dict[int, Address]] = {}
        limit_s = self.settings.timeout_s
        for rank in set(ranks) - self._found:
            if (note := read_note(self._store, str(rank), limit_s)) is None:
                raise AgreementError(
                    f"rank {rank} did not come to the start of the link within {limit_s:g} s, see its log"
                )
            host, port, instance = note
            peer = self.peers.get(rank)
            # The rank may have closed its last link meanwhile.
            is_lost = peer is not None and peer.state is State.GONE and not peer.has_left
            if peer is None or is_lost or peer.instance.hex() != instance:
                level = self._cluster.level_between(self.rank, rank)
                assert level is not None
                by_level.setdefault(level, {})[rank] = (host, port)
        for level, addresses in by_level.items():
            self.connect(addresses, self.options[level])
        self._found |= set(ranks)

    def report(self) -> list[dict[str, Any]]:
        """Return what was exchanged with each peer, as `link.Statistics` with the rank, JSON-able."""
        return [{"rank": rank, **one._asdict()} for rank, one in sorted(self.statistics().items())]


def own_host() -> str:
    """Return the address at which other ranks reach this one."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        device = os.environ.get(name, "").split(",")[0].lstrip("^=")
        for one in psutil.net_if_addrs().get(device, ()):
            if one.family == socket.AF_INET:
                return str(one.address)
    master, host = os.environ.get("MASTER_ADDR", "127.0.0.1"), "127.0.0.1"
    with contextlib.suppress(ConfigError):
        host = host_towards(master)
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE"))
    is_alone = ranks_here == os.environ.get("WORLD_SIZE")
    if ranks_here is None:  # started by srun: only the master's name tells whether other hosts can reach it
        is_alone = master == "localhost" or master.startswith("127.")
    if host.startswith("127.") and not is_alone:  # this host is the master, and its own name is a loopback address
        found = [one.address for device in psutil.net_if_addrs().values() for one in device]
        host = next((one for one in found if one.count(".") == 3 and not one.startswith("127.")), host)
    return host


def host_towards(host: str) -> str:
    """Return the address of this host from which it reaches `host`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"the host '{host}' is not reached from here: {error}; correct its name") from error
