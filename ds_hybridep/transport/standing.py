# SPDX-License-Identifier: Apache-2.0
"""Receives that stand ready before anybody asks for their message.

Gloo sends a message once it has heard that its receiver waits for it.  Where both ends begin at the same time, a
message so takes two delays of the link.  Messages that come again in every step have a *lane*: the receive of the next
one is posted, into memory of its own, as soon as the last one has arrived.

    lane 1   posted | arrived, copied, posted again .......... | asked for: has arrived already

Messages of one lane match in the order in which they are sent; those of different lanes do not wait for each other.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 32 * 2**20  # of all that a rank keeps ready; larger messages take longer than the delay anyway
NUM_LANES = 2**11
_NUM_SIZES = 1_048_573  # a prime below 2**20: sizes of one lane do not meet


def tag_of(lane: int, num_bytes: int) -> int:
    """Gloo's tag of a message; 0 for no lane.  num_bytes: 0 where the length may vary."""
    if not 0 < lane < NUM_LANES:
        return 0
    return lane << 20 | (num_bytes % _NUM_SIZES + 1 if num_bytes else 0)


class Room:
    """Bytes that all standing receives of a rank may take."""

    def __init__(self, num_bytes: int = MOST_BYTES) -> None:
        self._left = num_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """False where there is no room for so many."""
        with self._lock:
            if num_bytes > self._left:
                return False
            self._left -= num_bytes
            return True


class StandingReceives:
    """Of one channel.  Threads that start transfers and the one that ends them may call.

    post: (rank, tensor, tag) posts a receive and returns what waits for it.
    """

    def __init__(self, post: Callable[[int, Tensor, int], Any], room: Room) -> None:
        self._post: Callable[[int, Tensor, int], Any] | None = post
        self._room = room
        self._waiting: dict[tuple[int, int], deque[tuple[Any, Tensor]]] = defaultdict(deque)  # by rank and tag
        self._lock = threading.Lock()  # messages match by order: none may be posted between a look and a post

    def receive(self, rank: int, tensor: Tensor, tag: int) -> tuple[Any, Tensor | None]:
        """What waits for the next message of a lane, and the memory in which it arrives if that is not `tensor`.

        Raises RuntimeError where the message is larger than the one before, for which a receive stands ready.
        """
        with self._lock:
            waiting = self._waiting[rank, tag]
            if not waiting:
                if self._post is None:
                    raise RuntimeError("the channel was closed")
                return self._post(rank, tensor, tag), None
            work, place = waiting.popleft()
        if place.numel() < tensor.nbytes:
            raise RuntimeError(f"a message of {tensor.nbytes} bytes came in a lane for {place.numel()}")
        return work, place

    def stand(self, arrived: Sequence[tuple[int, Tensor, int, Tensor | None]]) -> None:
        """Be ready for the same messages again: (rank, tensor that was filled, tag, memory that it came in)."""
        with self._lock:
            keys = {(rank, tag) for rank, _, tag, _ in arrived}
            if self._post is None or any(self._waiting[key] for key in keys):
                return  # or a transfer that was started meanwhile has received without them
            new_bytes = sum(tensor.nbytes for _, tensor, _, place in arrived if place is None)
            if new_bytes and not self._room.take(new_bytes):
                return
            for rank, tensor, tag, place in arrived:
                mine = torch.empty(tensor.nbytes, dtype=torch.uint8) if place is None else place
                try:
                    self._waiting[rank, tag].append((self._post(rank, mine, tag), mine))
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
