# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other about themselves, over connections of their own.

A rank is connected with a few others at every level, so that no single rank or link carries the news:

    level gpu    all ranks of the same node, or if there are many, those 1, 2, 4, ... places away
    level dc     only for the first ranks of a datacentre: the ranks at the same place in the others

Messages are lines of JSON.  They say that the sender lives, and pass on news: a rank failed, ended or is gone.  A rank
that misses a peer asks for more, and the others tell it of whom they have heard.
"""

import contextlib
import errno
import json
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_hybridep.plan.cluster import Cluster

Socket = socket.socket
NEARBY = 8  # in levels of up to this many children, every rank is connected with every other
BRIDGES = 4  # ranks of a domain that are connected with other domains
MAX_LINE = 1 << 18  # bytes of one message
MAX_TEXT = 960  # letters of a fact
MAX_STRANGERS = 32  # accepted connections that have not said who they are; more than a rank has peers
STRANGER_S = 5.0  # how long one may take to say it
DIAL_S = 1.0  # between attempts to reach a peer that is silent
REDIAL_S = 3.0  # of silence, after which a peer is dialled again
MAX_BACKLOG = 1 << 16  # unsent bytes above which beats without news are left out
FACTS = ("failed", "gone", "verdict", "left")  # the most telling first


def peers_of(cluster: Cluster, rank: int) -> list[int]:
    """Return the ranks that `rank` is connected with."""
    place, sizes = cluster.place_of(rank), cluster.sizes
    peers: set[int] = set()
    inner = cluster.num_ranks
    for level, size in enumerate(sizes):
        inner //= size
        if inner > 1 and rank % inner >= BRIDGES:
            continue
        steps: Iterable[int] = range(1, size) if size <= NEARBY else (1 << i for i in range(size.bit_length() - 1))
        for step in steps:
            for coordinate in ((place[level] + step) % size, (place[level] - step) % size):
                peers.add(cluster.rank_at((*place[:level], coordinate, *place[level + 1 :])))
    return sorted(peers - {rank})


@dataclass(frozen=True)
class Fact:
    """What happened to a rank."""

    rank: int
    kind: Literal["failed", "gone", "verdict", "left"]
    text: str


@dataclass(frozen=True)
class Beat:
    """One message."""

    rank: int
    count: int  # number of this message among the sender's
    step: int  # optimizer steps so far
    alert: bool  # the sender asks what others have heard, and passes on what it has heard itself
    others: tuple[tuple[int, float, int, int], ...] = ()  # rank, seconds since it was heard, count, step
    facts: tuple[Fact, ...] = ()

    def line(self) -> bytes:
        others = [[rank, round(age, 2), count, step] for rank, age, count, step in self.others]
        facts = [[fact.rank, fact.kind, fact.text] for fact in self.facts]
        record = [self.rank, self.count, self.step, int(self.alert), others, facts]
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def parse_beat(line: bytes, world_size: int) -> Beat | None:
    """Return the message in a line, or None if no rank of this job sends such a line."""
    try:
        rank, count, step, alert, others, facts = json.loads(line)
        if len(others) > world_size or len(facts) > 2 * world_size:
            return None
        return Beat(
            _rank(rank, world_size),
            _number(count, int),
            _number(step, int),
            bool(_number(alert, int)),
            tuple(
                (_rank(other, world_size), _number(age, float, int), _number(number, int), _number(at, int))
                for other, age, number, at in others
            ),
            tuple(Fact(_rank(other, world_size), _kind(kind), _text(text)) for other, kind, text in facts),
        )
    except (ValueError, TypeError, RecursionError):
        return None


def _number(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds or not 0 <= value < 1e15:
        raise ValueError(value)
    return value


def _rank(value: Any, world_size: int) -> int:
    if _number(value, int) >= world_size:
        raise ValueError(value)
    return int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return "".join(letter if letter.isprintable() else " " for letter in value[:MAX_TEXT])


def _kind(value: Any) -> Any:
    if value not in FACTS:
        raise ValueError(value)
    return value


@dataclass
class Link:
    """The connection with one peer."""

    rank: int
    address: tuple[str, int]
    dials: bool  # this side makes the connection
    socket: Socket | None = None
    dialled: Socket | None = None  # a connection attempt under way
    dialled_at: float = float("-inf")
    heard_at: float | None = None
    closed_at: float | None = None  # when the peer closed its end, if it has not come back
    answer: Literal["", "answers", "refused", "nothing"] = ""  # of the peer's host, when it was dialled last
    inbox: bytes = b""
    outbox: bytes = b""
    told: set[Fact] = field(default_factory=set)
    alert: bool = False


class Mesh:
    """The connections of one rank with its peers.  Belongs to one thread, and never blocks it for long.

    key: the first word on each connection, which tells ranks of this job from strangers.
    """

    def __init__(self, rank: int, world_size: int, host: str, key: str) -> None:
        self.rank, self._world_size, self._key = rank, world_size, key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._strangers: dict[Socket, tuple[bytes, float]] = {}
        self.links: dict[int, Link] = {}
        self.sent_bytes = 0
        self.gone: set[int] = set()  # peers that have left or died: not dialled any more

    @property
    def address(self) -> tuple[str, int]:
        host, port, *_ = self._listener.getsockname()
        return host, port

    def connect(self, addresses: dict[int, tuple[str, int]]) -> None:
        """Make a link for each peer; the higher rank of a pair dials."""
        self.links = {peer: Link(peer, address, self.rank > peer) for peer, address in addresses.items()}

    def watch(self, other: Socket) -> None:
        """Let `poll` return when this socket can be read."""
        self._selector.register(other, selectors.EVENT_READ, other)

    def poll(self, timeout_s: float) -> list[Beat]:
        """Wait up to `timeout_s` for messages and return them; keep connections up."""
        beats: list[Beat] = []
        for key, events in self._selector.select(timeout_s):
            if not isinstance(key.fileobj, Socket):
                continue
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, Link):
                self._serve(key.data, key.fileobj, events, beats)
            elif key.fileobj in self._strangers:
                self._welcome(key.fileobj)
        now = time.monotonic()
        for stranger in [one for one, (_, since) in self._strangers.items() if now - since > STRANGER_S]:
            self._refuse(stranger)
        self._dial(now)
        return beats

    def send(self, link: Link, beat: Beat) -> None:
        """Queue a message; leave it out if it has no news and too many bytes are still unsent."""
        if link.socket is not None and (beat.facts or len(link.outbox) < MAX_BACKLOG):
            link.outbox += beat.line()
            link.told.update(beat.facts)
            self._flush(link)

    def drain(self, limit_s: float) -> None:
        """Send what is queued, for at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        while any(link.outbox for link in self.links.values()) and time.monotonic() < deadline:
            self.poll(0.05)

    def close(self) -> None:
        for link in self.links.values():
            self._drop(link)
            self._drop_dialled(link)
        for stranger in self._strangers:
            stranger.close()
        self._selector.close()
        self._listener.close()

    def close_copies(self) -> None:
        """Close a forked child's copies, and leave the parent's connections as they are."""
        for link in self.links.values():
            for one in (link.socket, link.dialled):
                if one is not None:
                    one.close()
        for stranger in self._strangers:
            stranger.close()
        self._listener.close()
        # Not `unregister`: the epoll instance is shared with the parent.
        self._selector.close()

    # -- making connections -----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            stranger, _ = self._listener.accept()
            stranger.setblocking(False)
            self._strangers[stranger] = b"", time.monotonic()
            self._selector.register(stranger, selectors.EVENT_READ, None)
            if len(self._strangers) > MAX_STRANGERS:
                self._refuse(next(iter(self._strangers)))  # the oldest: a peer says at once who it is

    def _refuse(self, stranger: Socket) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        stranger.close()

    def _welcome(self, stranger: Socket) -> None:
        """Read the first line of an accepted connection: the key and the peer's rank."""
        said, since = self._strangers[stranger]
        try:
            more = stranger.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        line, newline, rest = said.partition(b"\n")
        if more and not newline and len(said) < 512:
            self._strangers[stranger] = said, since
            return
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        words = line.decode(errors="replace").split()
        if newline and len(words) == 2 and words[0] == self._key and words[1].isdecimal():
            link = self.links.get(int(words[1]))
            if link is not None:
                self._adopt(link, stranger, rest)
                return
        stranger.close()

    def _adopt(self, link: Link, connection: Socket, rest: bytes = b"") -> None:
        """Use this connection for the link in place of an older one."""
        self._drop(link)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.socket, link.inbox, link.closed_at = connection, rest, None
        link.told = set()
        self._selector.register(connection, selectors.EVENT_READ, link)

    def _dial(self, now: float) -> None:
        """Connect with silent peers; if a peer is the one that dials, only ask whether its host answers."""
        for link in self.links.values():
            if link.dialled is not None:
                if now - link.dialled_at > DIAL_S:
                    link.answer = "nothing"
                    self._drop_dialled(link)
                continue
            is_silent = link.socket is None or now - (link.heard_at or link.dialled_at) > REDIAL_S
            if link.rank in self.gone or not is_silent or now - link.dialled_at < DIAL_S:
                continue
            if not link.dials and link.heard_at is None and link.closed_at is None:
                continue  # the peer has not dialled yet
            link.dialled_at = now
            family = socket.AF_INET6 if ":" in link.address[0] else socket.AF_INET
            try:
                link.dialled = Socket(family, socket.SOCK_STREAM)
            except OSError:  # no descriptor is free
                continue
            link.dialled.setblocking(False)
            error = link.dialled.connect_ex(link.address)
            if error in (0, errno.EINPROGRESS):
                self._selector.register(link.dialled, selectors.EVENT_WRITE, link)
            else:
                link.answer = "refused" if error == errno.ECONNREFUSED else "nothing"
                link.dialled.close()
                link.dialled = None

    def _dialled(self, link: Link) -> None:
        assert (connection := link.dialled) is not None
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            link.answer = "refused" if error == errno.ECONNREFUSED else "nothing"
            self._drop_dialled(link)
            return
        link.answer = "answers"
        if not link.dials:
            self._drop_dialled(link)
            return
        self._selector.unregister(connection)
        link.dialled = None
        self._adopt(link, connection)
        link.outbox = f"{self._key} {self.rank}\n".encode()
        self._flush(link)

    # -- using them -------------------------------------------------------------------------------------------------

    def _serve(self, link: Link, connection: Socket, events: int, beats: list[Beat]) -> None:
        if connection is link.dialled:
            self._dialled(link)
            return
        if connection is not link.socket:
            return
        if events & selectors.EVENT_WRITE:
            self._flush(link)
        if events & selectors.EVENT_READ and link.socket is not None:
            self._read(link, beats)

    def _read(self, link: Link, beats: list[Beat]) -> None:
        assert link.socket is not None
        try:
            data = link.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (link.inbox + data).split(b"\n")
        link.inbox = rest
        for line in lines:
            beat = parse_beat(line, self._world_size)
            if beat is None or beat.rank != link.rank:
                data = b""
                break
            link.heard_at, link.alert = time.monotonic(), beat.alert
            beats.append(beat)
        if not data or len(rest) > MAX_LINE:
            self._drop(link)
            link.closed_at = time.monotonic()
            link.dialled_at = float("-inf")  # dial at once, to see whether the peer comes back

    def _flush(self, link: Link) -> None:
        if link.socket is None:
            return
        try:
            while link.outbox:
                num_bytes = link.socket.send(link.outbox)
                link.outbox = link.outbox[num_bytes:]
                self.sent_bytes += num_bytes
        except BlockingIOError:
            pass
        except OSError:
            return  # `_read` will see the error
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox else 0)
        if self._selector.get_key(link.socket).events != wanted:
            self._selector.modify(link.socket, wanted, link)

    def _drop(self, link: Link) -> None:
        if link.socket is not None:
            self._selector.unregister(link.socket)
            link.socket.close()
        link.socket, link.inbox, link.outbox = None, b"", b""

    def _drop_dialled(self, link: Link) -> None:
        if link.dialled is not None:
            self._selector.unregister(link.dialled)
            link.dialled.close()
        link.dialled = None
