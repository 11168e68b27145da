# SPDX-License-Identifier: Apache-2.0
"""The gloo connections of a channel: which one a message takes, and which receives stand ready.

Over a link that loses frames, one TCP connection reaches only a share of the rate, and less with a longer delay; n
connections reach n times as much.  A large message is cut into n parts; smaller ones use them in turn, by lane.

Gloo sends a message only after it has heard that the receiver waits for it.  If both ends start at the same time, a
message takes two delays of the link.  Messages that repeat in every step have a *lane*: as soon as one has arrived,
the receive for the next one is posted, into memory of its own.

    lane 1   posted | arrived, copied, posted again .......... | asked for: has arrived already

Messages of one lane match in the order in which they are sent; those of different lanes do not wait for each other.

Messages with tokens change in length.  Their transfers on a channel take a few lanes in turn, and the memory that
stands ready for a message is its room rounded up to a power of two.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hybridep.transport.staging import Part

CUT_BYTES = 2**16  # messages of this size and more are cut
MOST_BYTES = 32 * 2**20  # of all standing receives that share a budget
MOST_MESSAGE_BYTES = 4 * 2**20  # of one: a larger message takes longer than the delay anyway, and copies cost time
NUM_LANES = 2**11
NUM_TURNS = 4  # lanes that transfers with `rooms` take in turn
_NUM_SIZES = 1_048_573  # a prime below 2**20, so that usual sizes in one lane get different tags


def tag_of(lane: int, num_bytes: int) -> int:
    """Return gloo's tag for a message, 0 for no lane.  num_bytes: 0 if the length may vary."""
    if not 0 < lane < NUM_LANES:
        return 0
    return lane << 20 | (num_bytes % _NUM_SIZES + 1 if num_bytes else 0)


class Lengths(Enum):
    """What both ends of a transfer know about the lengths of its messages."""

    EQUAL = auto()  # the lengths, which are the same in every step
    BY_ROOM = auto()  # the receiver's room for each message, which changes from step to step
    VARYING = auto()  # nothing, but the receiver's room is always the same


Source = tuple[int, int]  # (rank, connection)


class Arriving(NamedTuple):
    """A message that is expected in a lane."""

    source: Source
    tensor: Tensor  # to fill
    tag: int
    place: Tensor | None  # memory that the message arrives in, if not `tensor`
    ready_bytes: int  # size of the receive that stands ready for the next message


class Budget:
    """The bytes that the standing receives of some channels may take together."""

    def __init__(self, num_bytes: int = MOST_BYTES) -> None:
        self._left = num_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take bytes, or return False if too few are left."""
        with self._lock:
            if num_bytes > self._left:
                return False
            self._left -= num_bytes
            return True

    def give(self, num_bytes: int) -> None:
        """Give back bytes that were taken."""
        with self._lock:
            self._left += num_bytes


class StandingReceives:
    """Receives of one channel that stand ready.  Threads that start transfers use it, and the thread that ends them.

    post: called with (source, tensor, tag), posts a receive and returns the work to wait for.
    """

    def __init__(self, post: Callable[[Source, Tensor, int], Any], budget: Budget) -> None:
        self._post: Callable[[Source, Tensor, int], Any] | None = post
        self._budget = budget
        self._waiting: dict[tuple[Source, int], deque[tuple[Any, Tensor]]] = defaultdict(deque)  # by source and tag
        self._lock = threading.Lock()  # messages match by order, so a look and a post are one step

    def receive(self, source: Source, tensor: Tensor, tag: int) -> tuple[Any, Tensor | None]:
        """Return the work of a lane's next message, and the memory that it arrives in if that is not `tensor`.

        Raises RuntimeError if the message is larger than the memory that stands ready for it.
        """
        with self._lock:
            waiting = self._waiting[source, tag]
            if not waiting:
                if self._post is None:
                    raise RuntimeError("the channel was closed")
                return self._post(source, tensor, tag), None
            work, place = waiting.popleft()
        if place.numel() < tensor.nbytes:
            raise RuntimeError(f"a message of {tensor.nbytes} bytes came in a lane for {place.numel()}")
        return work, place

    def stand(self, arrived: Sequence[Arriving]) -> None:
        """Post receives for the next messages of the same lanes, as far as the budget goes."""
        with self._lock:
            if (post := self._post) is None:
                return
            # A lane where a receive still waits needs no more: a transfer that overlapped has posted its own.
            needed = {(one.source, one.tag) for one in arrived if not self._waiting[one.source, one.tag]}
            for source, _, tag, place, ready_bytes in arrived:
                if (source, tag) not in needed:
                    if place is not None:
                        self._budget.give(len(place))
                    continue
                if place is None:
                    if ready_bytes > MOST_MESSAGE_BYTES or not self._budget.take(ready_bytes):
                        continue
                    place = torch.empty(ready_bytes, dtype=torch.uint8, device="cpu")
                try:
                    self._waiting[source, tag].append((post(source, place, tag), place))
                except RuntimeError:  # a rank has gone; the next transfer with it will raise
                    return

    def close(self) -> None:
        """Forget all receives, and post no more."""
        with self._lock:
            self._waiting.clear()
            self._post = None


def copy_bytes(place: Tensor, tensor: Tensor) -> None:
    """Fill `tensor` with a message's bytes from `place`; autograd graphs that saved `tensor` do not see the change."""
    tensor.data.view(-1).view(torch.uint8).copy_(place[: tensor.nbytes])


class Connections:
    """The connections of one channel.

    Args:
        groups: one gloo process group for each connection.
        ranks: the channel's ranks.
        budget: for receives that stand ready.
        stands: False if no receives stand ready.
    """

    def __init__(self, groups: Sequence[Any], ranks: Sequence[int], budget: Budget, *, stands: bool) -> None:
        self._groups = tuple(groups)
        self._index_of_rank = {rank: index for index, rank in enumerate(ranks)}
        self._stands = stands
        self._standing = StandingReceives(self._receive, budget)

    def post(
        self,
        sends: Sequence[Part],
        receives: Sequence[Part],
        lane: int,
        lengths: Lengths = Lengths.EQUAL,
        rooms: Sequence[int] | None = None,
    ) -> tuple[list[Any], list[Arriving]]:
        """Start sends and receives.  Return the works to wait for, and the messages that arrive in a lane.

        rooms: bytes that the receiver of each send has made room for, if they differ from the send's length.
        Raises RuntimeError if a rank is gone or the channel was closed.
        """
        works: list[Any] = []
        arriving: list[Arriving] = []
        with _without_ranges():
            # Receives first: a posted receive lets the peer's data flow at once.
            for rank, tensor in receives:
                for at, piece, room in self._pieces(tensor, tensor.nbytes, lane, lengths):
                    ready_bytes = _ready_bytes(room, lengths)
                    if (tag := _tag(lane, ready_bytes, lengths)) == 0:
                        works.append(self._receive((rank, at), piece, 0))
                        continue
                    work, place = self._standing.receive((rank, at), piece, tag)
                    works.append(work)
                    arriving.append(Arriving((rank, at), piece, tag, place, ready_bytes))
            for (rank, tensor), num_bytes in zip(sends, rooms or [part.nbytes for _, part in sends], strict=True):
                for at, piece, room in self._pieces(tensor, num_bytes, lane, lengths):
                    tag = _tag(lane, _ready_bytes(room, lengths), lengths)
                    works.append(self._groups[at].send([piece], self._index_of_rank[rank], tag))
        return works, arriving

    def stand(self, arrived: Sequence[Arriving]) -> None:
        """Let receives stand ready for the next messages in the lanes of those that have arrived."""
        if arrived and self._stands:
            with _without_ranges():
                self._standing.stand(arrived)

    def close(self) -> None:
        """Drop the connections.  Does not block."""
        self._standing.close()
        self._groups = ()

    def _receive(self, source: Source, tensor: Tensor, tag: int) -> Any:
        rank, at = source
        if not (groups := self._groups):
            raise RuntimeError("the channel was closed")
        return groups[at].recv([tensor], self._index_of_rank[rank], tag)

    def _pieces(self, tensor: Tensor, num_bytes: int, lane: int, lengths: Lengths) -> list[tuple[int, Tensor, int]]:
        """Cut a message with room for `num_bytes` into (connection, part, room); both ends get the same rooms."""
        if not (count := len(self._groups)):
            raise RuntimeError("the channel was closed")
        if count == 1 or lengths is Lengths.VARYING or num_bytes < CUT_BYTES:
            return [(lane % count, tensor, num_bytes)]
        whole = tensor.data.view(-1).view(torch.uint8)
        cuts = pairwise(num_bytes * at // count for at in range(count + 1))
        # A message may be shorter than its room: a part with nothing in it is then sent as one byte.
        return [
            (at, whole[begin:end] if begin < len(whole) else whole[:1], end - begin)
            for at, (begin, end) in enumerate(cuts)
        ]


def _ready_bytes(room: int, lengths: Lengths) -> int:
    """Return the bytes of a receive that stands ready for messages with this room."""
    return 1 << (room - 1).bit_length() if lengths is Lengths.BY_ROOM else room


def _tag(lane: int, ready_bytes: int, lengths: Lengths) -> int:
    return tag_of(lane, 0 if lengths is Lengths.VARYING else ready_bytes)


@contextmanager
def _without_ranges() -> Iterator[None]:
    """Turn the profiler's ranges off inside.

    Torch opens a range when a send or receive starts, and closes it in the thread that waits for it.  If the profiler
    ends in between, closing the range crashes the process.  Torch does not tell whether ranges were on before; they
    are on afterwards.
    """
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)
