# SPDX-License-Identifier: Apache-2.0
"""The streams of a device beside the one that training computes in.

    with streams.aside():            in the side stream, behind all that the current stream was given so far
        decode(...)
        done = streams.mark()
    ...
    streams.follow(done)             the current stream goes on when the mark was reached; the host does not wait
    use(...)

Encoding, decoding and sums of migration run aside.  Copies between device and host have two more streams, one for each
way, so that they hold up neither computation nor each other.  A CPU has no streams: work runs where it is written.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

Mark = Any  # a point in a stream


class HostStreams:
    """Streams of a CPU: everything is done where it is written."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


class DeviceStreams:
    """Streams of one CUDA device.

    Whoever hands a tensor from one stream to another keeps it until the other stream, or the host, was waited for:
    memory that is freed goes back to the stream that it was allocated in.

    api: what of torch.cuda is used; tests put another in its place.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        self.device, self._api = device, api
        self._side, self.outbound, self.inbound = (self.new_stream() for _ in range(3))

    def new_stream(self) -> Any:
        return self._api.Stream(self.device)

    @contextmanager
    def within(self, stream: Any, *, after: Mark = None) -> Iterator[None]:
        """Work inside runs in `stream`, behind `after` and what that stream was given."""
        if after is not None:
            stream.wait_event(after)
        with self._api.stream(stream):
            yield

    def aside(self) -> AbstractContextManager[None]:
        """Work inside runs in the side stream, behind what the current stream was given so far."""
        return self.within(self._side, after=self.mark())

    def free_behind_side(self, tensor: Tensor) -> None:
        """Call before a tensor of another stream is freed, with which the side stream may be working."""
        if tensor.is_cuda:
            tensor.record_stream(self._side)

    def mark(self, *, is_awaited: bool = False) -> Mark:
        """The point that the current stream has come to; is_awaited: a thread sleeps until then instead of looking."""
        mark = self._api.Event(blocking=is_awaited)
        mark.record(self._api.current_stream(self.device))
        return mark

    def follow(self, mark: Mark) -> None:
        """The current stream goes on behind `mark`.  Does not block."""
        self._api.current_stream(self.device).wait_event(mark)

    def join(self) -> None:
        """The current stream goes on behind all that the side stream was given so far.  Does not block."""
        mark = self._api.Event()
        mark.record(self._side)
        self.follow(mark)

    def synchronize(self) -> None:
        """Block until the current stream is empty, before a clock is read."""
        self._api.current_stream(self.device).synchronize()

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Pinned host memory as `tensor`, a contiguous one; torch reuses it only when copies with it have ended."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)


@functools.cache
def streams_of(device: torch.device) -> DeviceStreams | HostStreams:
    """The streams that all layers and transfers of this process share on a device."""
    return DeviceStreams(device) if device.type == "cuda" else HostStreams()
