# SPDX-License-Identifier: Apache-2.0
"""What crosses a connection after its handshake: frames, each a header and a payload.

byte  0       kind      see `Kind`
bytes 1-4     length    of the payload
      5-20    stream    DATA: the channel and kind that the message belongs to, see `stream_of`
     21-28    sequence  DATA: number of the message in its stream; ACK: DATA frames received; FACT: its number
     29-36    total     DATA: bytes of the message
     37-44    offset    DATA: where in the message the payload lies
"""

import ctypes
import hashlib
import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Union

if TYPE_CHECKING:
    import torch

# A message is cut into as many pieces as there are connections, or into more so that heartbeats can overtake it.
LEAST_CHUNK_BYTES, CHUNK_BYTES = 2**16, 2**20
FACT_BYTES = 4096
HEADER = struct.Struct("!BI16sQQQ")
Data = Union["torch.Tensor", memoryview, bytes, bytearray]


class Kind(IntEnum):
    """What a frame is; only DATA is counted, acknowledged and sent again after a reset."""

    DATA = 1  # a message, or a piece of one
    ACK = 2
    BEAT = 3  # a heartbeat
    FACT = 4  # an announcement: its kind, a zero byte and its text


_LIMITS = {Kind.DATA: CHUNK_BYTES, Kind.FACT: FACT_BYTES}


class Frame(NamedTuple):
    """A header."""

    kind: Kind
    length: int = 0
    stream: bytes = bytes(16)
    sequence: int = 0
    total: int = 0
    offset: int = 0

    def pack(self) -> bytes:
        return HEADER.pack(*self)


def parse(header: memoryview) -> Frame:
    """Return the frame that has this header; ConnectionError if none can."""
    kind, *rest = HEADER.unpack(header)
    if kind not in Kind.__members__.values():
        raise ConnectionError(f"it sent a frame of the unknown kind {kind}")
    frame = Frame(Kind(kind), *rest)
    is_outside = frame.kind is Kind.DATA and frame.offset + frame.length > frame.total
    if is_outside or frame.length > _LIMITS.get(frame.kind, 0):
        raise ConnectionError(f"it sent a frame with an impossible length: {frame}")
    return frame


def stream_of(channel: str, ranks: Sequence[int], generation: int, kind: str) -> bytes:
    """Return the 16 bytes that stand for messages of one kind on one channel; equal on all of its ranks."""
    return hashlib.blake2b(json.dumps([channel, list(ranks), generation, kind]).encode(), digest_size=16).digest()


def view_of(data: Data) -> memoryview:
    """Return the bytes of `data` without a copy; a tensor must be contiguous and on the CPU."""
    if isinstance(data, memoryview | bytes | bytearray):
        return memoryview(data).cast("B")
    assert data.is_contiguous(), f"only contiguous tensors are sent and filled, not one with strides {data.stride()}"
    # Not by way of NumPy: afterwards nobody could resize the tensor's storage.
    memory: Any = (ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else bytearray()
    if data.nbytes:
        memory.tensor = data  # lives as long as the view
    return memoryview(memory).cast("B")
