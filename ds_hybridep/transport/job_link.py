# SPDX-License-Identifier: Apache-2.0
"""The link between the ranks of this job: one for each process, shared by all engines."""

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import AgreementError, ConfigError
from ds_hybridep.link import SILENT_S, TLS, Address, Link, Options, read_secret
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.transport.job import job_store, read_note
from ds_hybridep.transport.waits import waiting

_links: list["JobLink"] = []
_lock = threading.Lock()  # guards them, and the numbers of their users


@dataclass(frozen=True)
class LinkSettings:
    """How this rank connects with others.

    timeout_s: after this time a rank of which nothing is heard is gone; also the longest wait at the start.
    ports: range to listen in; None: any free one.  secret_file: None: rank 0 makes a secret for the job.
    """

    timeout_s: float
    ports: tuple[int, int] | None = None
    secret_file: Path | None = None
    tls: TLS | None = None

    @classmethod
    def of(cls, config: HybridEPConfig) -> "LinkSettings":
        link = config.link
        tls = None if link.tls is None else TLS(*map(Path, (link.tls.certificate, link.tls.key, link.tls.authority)))
        return cls(config.timeout_s, link.ports, None if link.secret_file is None else Path(link.secret_file), tls)

    def check(self) -> None:
        """Raise ConfigError if a file cannot be used."""
        self.read_secret()
        if self.tls is not None:
            self.tls.contexts()

    def read_secret(self) -> bytes | None:
        """Return what the file holds, without space around it; ConfigError if it cannot be read or is too short."""
        if self.secret_file is None:
            return None
        return read_secret(self.secret_file, "hybridep.link.secret_file")


def open_link(cluster: Cluster, generation: int, settings: LinkSettings) -> "JobLink":
    """Return the link that this process has open with these settings, or a new one; all ranks must call together.

    Each call needs a call of `JobLink.leave`.  generation: as in `Transport`.
    Raises CommunicationError if no port is free, ConfigError if a file cannot be used.
    """
    store = job_store()
    options = [Options(level.link.connections, level.link.congestion_control) for level in cluster.levels]
    with _lock:
        link = next((one for one in _links if one.has(options, settings)), None)
        if link is None:
            for unused in [one for one in _links if not one.num_users]:
                if settings.ports is not None:
                    unused.close()  # its port may be the last one
                _links.remove(unused)
            # The first one to write it makes the secret of the job.
            secret = store.compare_set("ds_hybridep/link/secret", "", secrets.token_hex(32))
            link = JobLink(store, options, bytes.fromhex(secret.decode()), settings)
            _links.append(link)
        link.join(cluster, generation)
    return link


class JobLink(Link):
    """The link of this rank to the other ranks of the job, shared by all engines with the same settings.

    options: of connections over each level.  secret: of the job; a secret file goes before it.
    """

    def __init__(self, store: Any, options: Sequence[Options], secret: bytes, settings: LinkSettings) -> None:
        super().__init__(
            dist.get_rank(), dist.get_world_size(), secret=settings.read_secret() or secret, host=own_host(),
            ports=settings.ports, tls=settings.tls, timeout_s=max(settings.timeout_s, 2 * SILENT_S),
        )  # fmt: skip
        self.num_users = 0
        self._store, self._options, self._settings = store, options, settings
        self._found: set[int] = set()  # ranks whose notes were read since `join`

    def has(self, options: Sequence[Options], settings: LinkSettings) -> bool:
        """Return True if it is as these say and was not closed, nor left to this process's parent by a fork."""
        is_open = self.num_users > 0 and not self.is_closed
        return is_open and (options, settings) == (self._options, self._settings)

    def join(self, cluster: Cluster, generation: int) -> None:
        """Add a user, and tell the other ranks where this one is found from now on."""
        self.num_users += 1
        self._cluster, self._prefix, self._found = cluster, f"ds_hybridep/{generation}/link", {self.rank}
        self._store.set(f"{self._prefix}/{self.rank}", json.dumps([*self.address, self.instance.hex()]))

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
        limit_s = self._settings.timeout_s
        for rank in set(ranks) - self._found:
            if (note := read_note(self._store, f"{self._prefix}/{rank}", limit_s)) is None:
                raise AgreementError(
                    f"rank {rank} did not come to the start of the link within {limit_s:g} s, see its log"
                )
            host, port, instance = note
            peer = self.peers.get(rank)
            if peer is None or peer.instance.hex() != instance:  # the rank may have closed its last link meanwhile
                level = self._cluster.level_between(self.rank, rank)
                assert level is not None
                by_level.setdefault(level, {})[rank] = (host, port)
        for level, addresses in by_level.items():
            self.connect(addresses, self._options[level])
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


def host_towards(host: str) -> str:
    """Return the address of this host from which it reaches `host`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"the host '{host}' is not reached from here: {error}; correct its name") from error
