# SPDX-License-Identifier: Apache-2.0
"""The link between the ranks of this job: one for each process, shared by all engines."""

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch.distributed as dist

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import AgreementError, ConfigError
from ds_hybridep.link import LEAST_SECRET_BYTES, SILENT_S, TLS, Address, Channel, Fact, Link, Options, Peer
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.transport.job import job_store
from ds_hybridep.transport.waits import waiting

_newest: "JobLink | None" = None
_lock = threading.Lock()  # guards it, and the number of users


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
        try:
            secret = self.secret_file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"hybridep.link.secret_file: {error}; give a file that this rank can read") from error
        if len(secret) < LEAST_SECRET_BYTES:
            raise ConfigError(
                f"hybridep.link.secret_file: {self.secret_file} holds {len(secret)} bytes; give at least "
                f"{LEAST_SECRET_BYTES}, for example the output of `openssl rand -hex 32`"
            )
        return secret


def open_link(cluster: Cluster, generation: int, settings: LinkSettings) -> "JobLink":
    """Return the link that all ranks have open with these settings, or a new one; all ranks must call together.

    Each call needs a call of `JobLink.leave`.  generation: as in `Transport`.
    Raises CommunicationError if no port is free, ConfigError if a file cannot be used, AgreementError if a rank does
    not come within the time limit.
    """
    global _newest
    notes = _Notes(f"ds_hybridep/{generation}/link", settings.timeout_s)
    with _lock:
        if (link := _newest) is not None and link.is_open() and link.has(cluster, settings):
            link.num_users += 1
        else:
            link = None
    try:
        name, secret = notes.settle("" if link is None else link.name, str(generation))
        if link is None or link.name != name:
            if settings.ports is not None and _newest is not None and not _newest.num_users:
                _newest.wait_closed()  # its port may be the last one
            other, link = link, JobLink(cluster, name, bytes.fromhex(secret), settings)
            if other is not None:
                other.leave()
            with _lock:
                _newest = link
    except BaseException:
        if link is not None:
            link.leave()
        raise
    return link


class Listener(Protocol):
    """Hears of what becomes of peers, in the link's thread."""

    def on_change(self, fact: Fact) -> None:
        """Called with what a peer has announced, or what has become of it."""
        ...

    def on_tick(self) -> None:
        """Called several times a second."""
        ...


class JobLink:
    """The link of this rank to the other ranks of the job; arguments as in `open_link`.

    name: of this link, in the job's store.  secret: of the job, the same on all ranks; a secret file goes before it.
    """

    def __init__(self, cluster: Cluster, name: str, secret: bytes, settings: LinkSettings) -> None:
        self.name, self.num_users = name, 1
        self._cluster, self._settings = cluster, settings
        self._notes = _Notes(f"ds_hybridep/{name}/addresses", settings.timeout_s)
        self._listener: Listener | None = None
        self._link = Link(
            dist.get_rank(), dist.get_world_size(), secret=settings.read_secret() or secret, host=own_host(),
            ports=settings.ports, tls=settings.tls, timeout_s=max(settings.timeout_s, 2 * SILENT_S),
            on_change=self._on_change, on_tick=self._on_tick,
        )  # fmt: skip
        self._notes.write(str(self._link.rank), self._link.address)

    def is_open(self) -> bool:
        """Return True if it was not closed, and no fork has left it to this process's parent."""
        return self.num_users > 0 and not self._link.is_closed

    def has(self, cluster: Cluster, settings: LinkSettings) -> bool:
        """Return True if its connections are as these say."""
        return settings == self._settings and _options_of(cluster) == _options_of(self._cluster)

    def connect(self, ranks: Sequence[int]) -> None:
        """Connect to those of the ranks to which there is no connection yet; they must call, too.

        Raises CommunicationError if one cannot be reached within the time limit.
        """
        options = _options_of(self._cluster)
        by_level: dict[int, dict[int, Address]] = {}
        for rank in ranks:
            if rank != self._link.rank and rank not in self._link.peers:
                level = self._cluster.level_between(self._link.rank, rank)
                assert level is not None
                host, port = self._notes.read(str(rank), rank)
                by_level.setdefault(level, {})[rank] = (host, port)
        with waiting():
            for level, addresses in by_level.items():
                self._link.connect(addresses, options[level])

    def channel(self, name: str, ranks: Sequence[int], generation: int, priority: int) -> Channel:
        return self._link.channel(name, ranks, generation=generation, priority=priority)

    # -- for the watch ----------------------------------------------------------------------------------------------

    def listen(self, listener: "Listener | None") -> None:
        """Let one object hear of all changes; None: nobody."""
        self._listener = listener
        for fact in self._link.facts():
            self._on_change(fact)

    def announce(self, kind: str, text: str, key: str = "") -> None:
        self._link.announce(kind, text, key)

    def set_progress(self, progress: int) -> None:
        """Let heartbeats carry a number."""
        self._link.outgoing.progress = progress

    def say_last(self, kind: str, text: str) -> None:
        """Set what this rank announces when its process ends."""
        self._link.last_words = kind, text

    def peers(self) -> Mapping[int, Peer]:
        return self._link.peers

    def statistics(self) -> list[dict[str, Any]]:
        """Return what was exchanged with each peer, as `link.Statistics` with the rank, JSON-able."""
        return [{"rank": rank, **one._asdict()} for rank, one in sorted(self._link.statistics().items())]

    def _on_change(self, fact: Fact) -> None:
        if (listener := self._listener) is not None:
            listener.on_change(fact)

    def _on_tick(self) -> None:
        if (listener := self._listener) is not None:
            listener.on_tick()

    # -- the end ----------------------------------------------------------------------------------------------------

    def wait_closed(self) -> None:
        """Wait until a link that nobody uses any more has given its port back."""
        self._link.close()

    def leave(self) -> None:
        """Undo one `open_link`; the last call closes the link, without waiting for the other ranks."""
        with _lock:
            self.num_users -= 1
            if self.num_users:
                return
        self._link.close(waits=False)


def _options_of(cluster: Cluster) -> list[Options]:
    """Return the options of connections over each level."""
    return [Options(level.link.connections, level.link.congestion_control) for level in cluster.levels]


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


class _Notes:
    """What ranks tell each other in the job's store, below one path."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._store, self._path, self._timeout_s = job_store(), path, timeout_s

    def settle(self, held: str, new: str) -> tuple[str, str]:
        """Return the name and the secret of the link to use: the held one if all ranks hold it, else a new one."""
        rank = dist.get_rank()
        self.write(str(rank), held)
        if rank == 0:
            # Rank 0 alone reads all: each rank reading all would be a million requests for 1000 ranks.
            is_shared = held and all(self.read(str(other), other) == held for other in range(1, dist.get_world_size()))
            self.write("verdict", [held, ""] if is_shared else [new, secrets.token_hex(32)])
        name, secret = self.read("verdict", 0)
        return str(name), str(secret)

    def write(self, name: str, value: Any) -> None:
        self._store.set(f"{self._path}/{name}", json.dumps(value))

    @waiting()
    def read(self, name: str, writer: int) -> Any:
        """Return a note; AgreementError if its writer does not write it within the time limit."""
        key = f"{self._path}/{name}"
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
            return json.loads(self._store.get(key))
        except RuntimeError as error:
            raise AgreementError(
                f"rank {writer} did not come to the start of the link within {self._timeout_s:g} s, see its log: "
                f"{str(error).splitlines()[0][:200]}"
            ) from error
