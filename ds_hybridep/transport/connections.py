# SPDX-License-Identifier: Apache-2.0
"""The gloo connections of a channel: which one a message takes, and which receives stand ready.

Over a link that loses frames a TCP connection fills a share of the rate that falls with the delay; several fill as
many times more.  A large message is cut into as many parts; smaller ones take the connections in turn, by lane.

Gloo sends a message once it has heard that its receiver waits for it.  Where both ends begin at the same time, a
message so takes two delays of the link.  Messages that come again in every step have a *lane*: the receive of the next
one is posted, into memory of its own, as soon as the last one has arrived.

    lane 1   posted | arrived, copied, posted again .......... | asked for: has arrived already

Messages of one lane match in the order in which they are sent; those of different lanes do not wait for each other.

Lengths of tokens change from step to step.  All their transfers on a channel take a few lanes in turn, and what stands
ready for a message is the next power of two.
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

CUT_BYTES = 2**16  # of a message that is large
MOST_BYTES = 32 * 2**20  # of all receives that share a budget
MOST_MESSAGE_BYTES = 4 * 2**20  # of one: larger messages take longer than the delay anyway, and copies cost time
NUM_LANES = 2**11
NUM_TURNS = 4  # lanes that messages by room take in turn
_NUM_SIZES = 1_048_573  # a prime below 2**20: sizes of one lane do not meet


def tag_of(lane: int, num_bytes: int) -> int:
    """Gloo's tag of a message; 0 for no lane.  num_bytes: 0 where the length may vary."""
    if not 0 < lane < NUM_LANES:
        return 0
    return lane << 20 | (num_bytes % _NUM_SIZES + 1 if num_bytes else 0)


class Lengths(Enum):
    """What both ends of a transfer know of the lengths of its messages."""

    EQUAL = auto()  # them, and they are the same in every step
    BY_ROOM = auto()  # the receiver's room for each, which changes from step to step
    VARYING = auto()  # nothing; the receiver's room for them is always the same


Source = tuple[int, int]  # (rank, connection)


class Arriving(NamedTuple):
    """A message that is expected in a lane."""

    source: Source
    tensor: Tensor  # to fill
    tag: int
    place: Tensor | None  # memory that it comes in, if that is not `tensor`
    ready_bytes: int  # of a receive that stands ready for the next one


class Budget:
    """Bytes that standing receives of some channels may take."""

    def __init__(self, num_bytes: int = MOST_BYTES) -> None:
        self._left = num_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """False where so many are not left."""
        with self._lock:
            if num_bytes > self._left:
                return False
            self._left -= num_bytes
            return True

    def give(self, num_bytes: int) -> None:
        """What was taken is free again."""
        with self._lock:
            self._left += num_bytes


class StandingReceives:
    """Receives of one channel that stand ready.  Called by threads that start transfers and the one that ends them.

    post: (source, tensor, tag) posts a receive and returns what waits for it.
    """

    def __init__(self, post: Callable[[Source, Tensor, int], Any], budget: Budget) -> None:
        self._post: Callable[[Source, Tensor, int], Any] | None = post
        self._budget = budget
        self._waiting: dict[tuple[Source, int], deque[tuple[Any, Tensor]]] = defaultdict(deque)  # by source and tag
        self._lock = threading.Lock()  # messages match by order: none may be posted between a look and a post

    def receive(self, source: Source, tensor: Tensor, tag: int) -> tuple[Any, Tensor | None]:
        """What waits for the next message of a lane, and the memory in which it arrives if that is not `tensor`.

        Raises RuntimeError where the message is larger than what stands ready for it.
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
        """Be ready for the same messages again, as far as the budget goes."""
        with self._lock:
            if (post := self._post) is None:
                return
            # Others need none: a transfer that was started meanwhile has received without them.
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
                except RuntimeError:  # a rank has gone; who needs it will say so
                    return

    def close(self) -> None:
        """Expect nothing more."""
        with self._lock:
            self._waiting.clear()
            self._post = None


def copy_bytes(place: Tensor, tensor: Tensor) -> None:
    """Fill `tensor` with the bytes that a message has left in `place`; graphs that have saved it note no change."""
    tensor.data.view(-1).view(torch.uint8).copy_(place[: tensor.nbytes])


class Connections:
    """The connections of one channel.

    Args:
        groups: one gloo process group for each connection.
        ranks: of the channel.
        budget: of receives that stand ready.
        stands: False where none do.
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
        """What waits for each message, and what arrives in a lane.

        rooms: bytes that the receiver of each send has made room for, if that is not its length.
        Raises RuntimeError where a rank is gone, or the channel was closed.
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
        """Be ready for what comes next in the lane of what has arrived."""
        if arrived and self._stands:
            with _without_ranges():
                self._standing.stand(arrived)

    def close(self) -> None:
        """Drop the connections.  Waits for nothing."""
        self._standing.close()
        self._groups = ()

    def _receive(self, source: Source, tensor: Tensor, tag: int) -> Any:
        rank, at = source
        if not (groups := self._groups):
            raise RuntimeError("the channel was closed")
        return groups[at].recv([tensor], self._index_of_rank[rank], tag)

    def _pieces(self, tensor: Tensor, num_bytes: int, lane: int, lengths: Lengths) -> list[tuple[int, Tensor, int]]:
        """(connection, part, room for it) of a message for which there is room; both ends come to the same rooms."""
        if not (count := len(self._groups)):
            raise RuntimeError("the channel was closed")
        if count == 1 or lengths is Lengths.VARYING or num_bytes < CUT_BYTES:
            return [(lane % count, tensor, num_bytes)]
        whole = tensor.data.view(-1).view(torch.uint8)
        cuts = pairwise(num_bytes * at // count for at in range(count + 1))
        # Of a message that ends before its room does, a byte stands for a part with nothing in it.
        return [
            (at, whole[begin:end] if begin < len(whole) else whole[:1], end - begin)
            for at, (begin, end) in enumerate(cuts)
        ]


def _ready_bytes(room: int, lengths: Lengths) -> int:
    """Bytes of a receive that stands ready for messages with that room."""
    return 1 << (room - 1).bit_length() if lengths is Lengths.BY_ROOM else room


def _tag(lane: int, ready_bytes: int, lengths: Lengths) -> int:
    return tag_of(lane, 0 if lengths is Lengths.VARYING else ready_bytes)


@contextmanager
def _without_ranges() -> Iterator[None]:
    """Without the profiler's ranges.

    Torch opens one when a send or receive starts and closes it where that is waited for.  If the profiler ends in
    between, the process crashes when the waiting thread closes the range.  Torch does not tell whether ranges were on
    before; they are on afterwards.
    """
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)
