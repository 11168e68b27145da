# SPDX-License-Identifier: Apache-2.0
"""The training state of one rank as one long vector, which a joiner gets in fragments, one after each step.

    groups      weights, and what the optimizer keeps of each: [w0 | m0 | v0], [w1 | m1 | v1], ...
    position    an element of the groups, counted over all of them
    fragment    a run of positions: of each tensor of a group, the elements of the run

What an optimizer does to an element depends on this element alone.  So a fragment that was taken over after a step
stays equal to its source, as long as both take the same steps.
"""

import math
import struct
from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

NUM_PARTS = 16  # that two states are compared by
BLOCK_ELEMENTS = 2**22  # that are read at a time for it
SKETCH = 3  # numbers of each part: the sum, with plus and minus in turn, and of squares
_HEAD = struct.Struct("!QQQI")  # start, stop, all positions, bytes of the head


class StateVector:
    """Tensors that are read and written by position.

    Args:
        groups: in each, contiguous tensors of the same number of elements.  They are written in place.
        is_elementwise: False: the optimizer mixes the elements of a tensor, so a group is never cut.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], *, is_elementwise: bool = True) -> None:
        self._groups = [[tensor.detach().view(-1) for tensor in group] for group in groups if group[0].numel()]
        self._is_elementwise = is_elementwise
        ends = list(accumulate(len(group[0]) for group in self._groups))
        self._begins, self.num_positions = [0, *ends[:-1]], ends[-1] if ends else 0
        self.num_bytes = sum(tensor.nbytes for group in self._groups for tensor in group)

    def read(self, start: int, end: int, most_bytes: int) -> tuple[int, Tensor]:
        """Return where a fragment from `start` stops, at the latest at `end`, and its bytes (uint8 on the CPU).

        It has at least one position, and otherwise at most so many bytes; whole groups if they are never cut.
        """
        stop, parts = start, list[Tensor]()
        for begin, group in zip(self._begins, self._groups, strict=True):
            size, at = min(len(group[0]), end - begin), stop - begin
            if not 0 <= at < size:
                continue
            row_bytes = sum(tensor.element_size() for tensor in group)
            if parts and most_bytes < (row_bytes if self._is_elementwise else row_bytes * size):
                break
            count = min(size - at, max(most_bytes // row_bytes, 1)) if self._is_elementwise else size
            parts += [_bytes_of(tensor[at : at + count]) for tensor in group]
            stop, most_bytes = stop + count, most_bytes - count * row_bytes
        return stop, torch.cat([torch.empty(0, dtype=torch.uint8), *parts])

    def write(self, start: int, stop: int, payload: Tensor) -> None:
        """Set the positions from `start` to `stop` to what `read` returned elsewhere."""
        taken = 0
        for begin, group in zip(self._begins, self._groups, strict=True):
            low, high = max(start - begin, 0), min(stop - begin, len(group[0]))
            for tensor in group if low < high else ():
                place = tensor[low:high]
                part = payload[taken : taken + place.nbytes].clone()  # aligned memory, which a view needs
                place.copy_(part.view(place.dtype))
                taken += place.nbytes
        assert taken == len(payload), f"a fragment of {len(payload)} bytes for a state that takes {taken}"

    def parts(self) -> list[tuple[int, int]]:
        """Return at most `NUM_PARTS` runs of positions, of about the same size, that make up the whole."""
        if not self._is_elementwise:
            cuts = [*self._begins, self.num_positions]
        else:
            cuts = [index * self.num_positions // NUM_PARTS for index in range(NUM_PARTS + 1)]
        cuts = sorted(set(cuts))
        return list(pairwise(cuts))

    def sketch(self) -> list[float]:
        """Return `SKETCH` numbers for each of `parts`, of the first tensor of each group; see `distances`."""
        found = []
        for start, stop in self.parts():
            total = torch.zeros(SKETCH, dtype=torch.float64, device=self._groups[0][0].device)
            for begin, group in zip(self._begins, self._groups, strict=True):
                low, high = max(start - begin, 0), min(stop - begin, len(group[0]))
                for at in range(low, high, BLOCK_ELEMENTS):  # a copy of all in fp64 may be too large
                    values = group[0][at : min(at + BLOCK_ELEMENTS, high)].double()
                    odd = values[1 - (at % 2) :: 2].sum()
                    total += torch.stack([values.sum(), values.sum() - 2 * odd, values.square().sum()])
            found.append(total)
        return [] if not found else [float(number) for number in torch.cat(found).cpu()]


def distances(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return for each part how far two states are apart, over the norm of `theirs`.

    The sum of differences, with any signs, is about as large as their norm; the mean of two such sums is an estimate.
    """
    apart = []
    for at in range(0, len(theirs), SKETCH):
        (one, two, _), (other, another, square) = ours[at : at + SKETCH], theirs[at : at + SKETCH]
        estimate = math.sqrt(((one - other) ** 2 + (two - another) ** 2) / 2)
        if not math.isfinite(square):
            apart.append(0.0)  # there is nothing that a state could be like
        elif square > 0 and not math.isnan(estimate):
            apart.append(estimate / math.sqrt(square))
        else:
            apart.append(math.inf if estimate else 0.0)
    return apart


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


class Fragment(NamedTuple):
    """A run of a state as it crosses.  head: what is no vector, in the first fragment; else empty."""

    start: int
    stop: int
    num_positions: int
    head: bytes
    payload: Tensor

    def pack(self) -> Tensor:
        """Return it as uint8 on the CPU."""
        said = _HEAD.pack(self.start, self.stop, self.num_positions, len(self.head)) + self.head
        return torch.cat([torch.frombuffer(bytearray(said), dtype=torch.uint8), self.payload])

    @classmethod
    def unpack(cls, data: memoryview) -> "Fragment":
        """Read what `pack` made."""
        start, stop, num_positions, head_bytes = _HEAD.unpack_from(data)
        at = _HEAD.size + head_bytes
        rest = bytearray(data[at:])
        payload = torch.frombuffer(rest, dtype=torch.uint8) if rest else torch.empty(0, dtype=torch.uint8)
        return cls(start, stop, num_positions, bytes(data[_HEAD.size : at]), payload)


LEAST_BYTES = 2**15  # of a fragment: one whose arrival the link notes; steps beside such a one are the measure
NUM_PLAIN_STEPS = 3  # that are measured
SLOWER = 1.2  # times as long may a step take beside a fragment
JOIN_S = 3600.0  # the time in which a join should end, even if steps then take longer


class Pace:
    """How long the fragments for one joiner are: steps take at most 1.2 times as long, or the join an hour.

    A fragment that crosses in a fifth of a step's time costs no more, whatever else crosses.  Longer ones are tried
    for as long as steps do not get slower, because most of the time the link may be idle.

    num_bytes: of all that is to be sent.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left_bytes, self._left_s = float(num_bytes), JOIN_S
        self._plain: list[float] = []  # seconds of steps beside next to nothing
        self._recent: deque[float] = deque(maxlen=NUM_PLAIN_STEPS)  # seconds of steps; one may take longer by itself
        self._size, self._growth = float(LEAST_BYTES), 2.0

    def note(self, num_bytes: int, step_s: float, transfer_s: float) -> None:
        """A step took so long, with its exchange and a fragment of so many bytes, which took `transfer_s`."""
        self._left_bytes -= num_bytes
        self._left_s -= step_s
        self._recent.append(step_s)
        if len(self._plain) < NUM_PLAIN_STEPS:
            self._plain.append(step_s)
        elif transfer_s > (SLOWER - 1) * step_s and _median(self._recent) > SLOWER * self._plain_s:
            self._growth = 1.1  # near the limit: approach it slowly
            self._size = max(self._size / 2, LEAST_BYTES)
        else:
            self._size *= self._growth

    def next_bytes(self) -> int:
        """Return the bytes of the next fragment."""
        if len(self._plain) < NUM_PLAIN_STEPS:
            return LEAST_BYTES
        num_steps = max(self._left_s / (SLOWER * self._plain_s), 1.0)
        return int(max(self._size, self._left_bytes / num_steps))

    @property
    def _plain_s(self) -> float:
        return _median(self._plain)


def _median(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 2]
