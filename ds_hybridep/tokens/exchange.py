# SPDX-License-Identifier: Apache-2.0
"""Moves rows between the ranks of one exchange: `dispatch` to where their experts are, `combine` back.

The receiver of a dispatch does not know the number of rows.  The first message gives it, and carries as many rows as
the receiver has room for.  Both ends derive this room from the dispatch before.  A second transfer takes the surplus:

    first     header | expert ids and gate weights of the first m rows | the first m rows
    surplus   expert ids and gate weights of the other rows, the other rows

A header has the numbers of rows and of the sender's tokens, a stamp of layer and plan, and a checksum.  The receiver
refuses a wrong header before it allocates memory for the rows.

A first message with fewer rows is shorter than the room (see `Channel.has_equal_lengths`).  All later transfers of the
layer move the same number of rows, there or back.

If the level between two ranks has a token codec, rows of a dispatch travel as records with one byte per element.  The
receiver continues with the decoded rows.  All other transfers are exact.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ds_hybridep.errors import NO_SECOND_DERIVATIVES, CommunicationError, UnsupportedError
from ds_hybridep.geometry.row_format import RowFormat
from ds_hybridep.geometry.token_route import RouteStage
from ds_hybridep.kernels import Kernels, Routes
from ds_hybridep.transport.channels import Channel, Purpose, Transport, profiler_range

HEADER_BYTES = 16  # four 32-bit integers, see `header_of`; what follows is aligned for every type
JOINED_BYTES = 1 << 16  # up to this size, copying two parts into one message costs less than a second message


@dataclass
class Exchange:
    """A `RouteStage` with its channel, its kernels and room for its messages.  Lives as long as the layer."""

    layer: str
    ranks: tuple[int, ...]  # destinations in order: this rank, and those in its place in other domains
    self_index: int
    expert_to_destination: Tensor  # [E] int32, places in `ranks`: where rows of an expert go
    channel: Channel
    kernels: Kernels
    row_formats: tuple[RowFormat | None, ...]  # of rows to and from each destination; None: unencoded
    room_to: list[int]  # rows that fit into the first message of the next dispatch, by destination
    room_from: list[int]

    @cached_property
    def peers(self) -> tuple[tuple[int, int], ...]:
        """(index, rank) of the other destinations."""
        return tuple((index, rank) for index, rank in enumerate(self.ranks) if index != self.self_index)


@dataclass(frozen=True)
class DispatchState:
    """A dispatch over an exchange, as combine and the backward need it: which rows went where, and how many came.

    recv_splits: rows from each destination.
    """

    exchange: Exchange
    routes: Routes
    recv_splits: tuple[int, ...]

    @property
    def send_splits(self) -> tuple[int, ...]:
        """Rows to each destination."""
        return self.routes.rows_per_destination

    def send(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """Send tensors [rows sent, ...] the way of the dispatch, and return what arrives, [rows received, ...]."""
        return _swap(self.exchange, tensors, self.send_splits, self.recv_splits, what=what)

    def send_back(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """Send tensors [rows received, ...] back, and return what arrives, [rows sent, ...]."""
        return _swap(self.exchange, tensors, self.recv_splits, self.send_splits, what=what)


def build_exchanges(
    stages: Sequence[RouteStage],
    transport: Transport,
    group: str,
    kernels: Kernels,
    *,
    layer: str,
    device: torch.device,
    level_formats: Sequence[RowFormat | None] = (),
) -> tuple[Exchange, ...]:
    """Make the exchanges of one layer's route, and their channels; all ranks of the group must call in the same order.

    level_formats: formats of dispatched rows by the level that they cross; if empty, rows travel unencoded.
    """

    def format_to(rank: int) -> RowFormat | None:
        return level_formats[transport.level_to(rank)] if level_formats and rank != transport.rank else None

    return tuple(
        Exchange(
            layer=layer,
            ranks=stage.ranks,
            self_index=stage.self_index,
            expert_to_destination=torch.tensor(stage.expert_to_destination, dtype=torch.int32, device=device),
            channel=transport.channel(
                f"{group}_tokens_{'direct' if stage.level is None else stage.level}", stage.ranks
            ),
            kernels=kernels,
            row_formats=tuple(map(format_to, stage.ranks)),
            room_to=[0] * len(stage.ranks),
            room_from=[0] * len(stage.ranks),
        )
        for stage in stages
    )


def dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor, DispatchState]:
    """Send rows to their destinations.  Returns the rows sent here, ordered by sender, then by the sender's token.

    Args:
        x: [T, D] tokens, or rows of a dispatch before.
        topk_idx: [T, K] int32 global expert ids, -1 = dropped.
        topk_weights: [T, K] fp32 gate weights.

    Returns:
        rows [R, D] in x.dtype, their topk_idx [R, K] int32 (-1 for experts reached through other ranks) and
        topk_weights [R, K] fp32, and the state that `combine` takes.
    """
    routes = exchange.kernels.plan_routes(topk_idx, exchange.expert_to_destination, len(exchange.ranks))
    with torch.no_grad():
        state, rows, row_topk_idx, row_weights = exchange_rows(exchange, routes, x, topk_weights)
    rows, row_weights = _Dispatch.apply(x, topk_weights, [rows, row_weights], state)
    return rows, row_topk_idx, row_weights, state


def combine(partial_sums: Tensor, state: DispatchState) -> Tensor:
    """Return the sum of each token's partial results, [R, D] -> [T, D]; accumulates in fp32, in destination order."""
    sums: Tensor = _Combine.apply(partial_sums, state)
    return sums


def exchange_rows(
    exchange: Exchange, routes: Routes, x: Tensor, topk_weights: Tensor
) -> tuple[DispatchState, Tensor, Tensor, Tensor]:
    """Send each destination its rows of the tokens [T, D], with their expert ids and gate weights [T, K] fp32.

    Returns what `combine` needs, and what arrived, ordered by sender: rows [R, D], their expert ids [R, K] int32, and
    their gate weights [R, K] fp32.
    """
    purpose = Purpose("tokens", "dispatch of rows", exchange.layer)
    with profiler_range(purpose.operation, exchange.layer):
        parts = _outgoing(exchange, routes, x.contiguous(), topk_weights)
        messages = _swap_first_messages(exchange, parts, purpose, len(x))
        recv_splits = list(routes.rows_per_destination)
        for (i, _), count in zip(exchange.peers, row_counts(exchange, messages, parts), strict=True):
            recv_splits[i] = count

        # Copy what arrived to its place.  Records have their own place until all of them are there.
        metadata = parts[0][0].new_empty(sum(recv_splits), parts[0][0].shape[1])
        all_rows = x.new_empty(sum(recv_splits), x.shape[1])
        rows_of = all_rows.split_with_sizes(recv_splits)
        arriving = [
            rows if row_format is None else part.new_empty(len(rows), part.shape[1])
            for rows, (_, part), row_format in zip(rows_of, parts, exchange.row_formats, strict=True)
        ]
        places = list(zip(metadata.split_with_sizes(recv_splits), arriving, strict=True))
        _copy(parts[exchange.self_index], places[exchange.self_index])
        for (i, _), message in zip(exchange.peers, messages, strict=True):
            num_rows = min(recv_splits[i], exchange.room_from[i])
            _copy(_unpack(message, num_rows, parts[i]), [place[:num_rows] for place in places[i]])
        sends = [(rank, part[exchange.room_to[i] :]) for i, rank in exchange.peers for part in parts[i]]
        receives = [(rank, place[exchange.room_from[i] :]) for i, rank in exchange.peers for place in places[i]]
        exchange.channel.start(sends, receives, purpose).wait()  # the surplus, mostly empty

        for rows, records, row_format in zip(rows_of, arriving, exchange.row_formats, strict=True):
            if row_format is not None:
                exchange.kernels.dequantise_rows(records, x.shape[1], row_format, x.dtype, out=rows)
        exchange.room_to = [count + count // 4 + 8 for count in routes.rows_per_destination]
        exchange.room_from = [count + count // 4 + 8 for count in recv_splits]
        row_topk_idx, row_weights = (part.contiguous() for part in metadata.chunk(2, dim=1))
        state = DispatchState(exchange, routes, tuple(recv_splits))
        return state, all_rows, row_topk_idx, row_weights.view(torch.float32)


def _outgoing(exchange: Exchange, routes: Routes, x: Tensor, topk_weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return metadata and rows for each destination: rows [m, D], or records [m, B] uint8 if it has a format.

    Metadata are [m, 2K] int32: expert ids, then the bits of gate weights.
    """
    send_splits = routes.rows_per_destination
    rows = [x] * len(send_splits)
    for row_format in dict.fromkeys(exchange.row_formats):  # a token is read and encoded once for each
        is_mine = [one == row_format for one in exchange.row_formats]
        slot_to_row = routes.first_slot_to_row if all(is_mine) else _rows_among(routes, send_splits, is_mine)
        splits = list(compress(send_splits, is_mine))
        if row_format is None:
            made = exchange.kernels.dispatch_rows(x, slot_to_row, sum(splits))
        else:
            made = exchange.kernels.quantise_rows(x, slot_to_row, sum(splits), row_format)
        for i, part in zip(compress(range(len(rows)), is_mine), made.split_with_sizes(splits), strict=True):
            rows[i] = part
    weights = topk_weights.index_select(0, routes.row_to_token)
    metadata = torch.cat([routes.row_topk_idx, weights.view(torch.int32)], dim=1)
    return list(zip(metadata.split_with_sizes(send_splits), rows, strict=True))


def _rows_among(routes: Routes, send_splits: Sequence[int], is_mine: Sequence[bool]) -> Tensor:
    """Return `first_slot_to_row` with rows counted among those to some destinations, -1 for rows to others.

    rows_per_destination = (2, 1, 1), is_mine = (True, False, True):  [[2, 0], [1, 3]]  ->  [[-1, 0], [1, 2]]
    """
    # One entry more than there are rows: -1, which slots without a row find as the last one.
    places = routes.first_slot_to_row.new_full((routes.num_rows + 1,), -1)
    begin = num_mine = 0
    for is_wanted, run in groupby(zip(is_mine, send_splits, strict=True), key=itemgetter(0)):
        count = sum(split for _, split in run)
        if is_wanted:
            torch.arange(num_mine, num_mine + count, out=places[begin : begin + count])
            num_mine += count
        begin += count
    return places[routes.first_slot_to_row]


def _swap_first_messages(
    exchange: Exchange, parts: Sequence[tuple[Tensor, Tensor]], purpose: Purpose, num_tokens: int
) -> list[Tensor]:
    channel, device = exchange.channel, parts[0][0].device
    joined = b"".join(header_of(len(part[1]), num_tokens, _stamp(exchange, part)) for part in parts)
    headers = to_device(torch.frombuffer(bytearray(joined), dtype=torch.uint8), device).view(-1, HEADER_BYTES)
    sends, receives = [], []
    for i, rank in exchange.peers:
        pieces = [_bytes_of(part) for part in (headers[i], *(p[: exchange.room_to[i]] for p in parts[i]))]
        if channel.has_equal_lengths:
            missing = _message_bytes(exchange.room_to[i], parts[i]) - sum(map(len, pieces))
            pieces.append(pieces[0].new_zeros(missing))
        sends.append((rank, torch.cat(pieces)))
        room_bytes = _message_bytes(exchange.room_from[i], parts[i])
        receives.append((rank, torch.empty(room_bytes, dtype=torch.uint8, device=device)))
    channel.start(sends, receives, purpose).wait()
    return [message for _, message in receives]


def _message_bytes(num_rows: int, samples: Sequence[Tensor]) -> int:
    """Return the length of a first message of `num_rows` rows; `samples` have the types and widths of its parts."""
    return HEADER_BYTES + num_rows * sum(sample.element_size() * sample.shape[1] for sample in samples)


def _unpack(message: Tensor, num_rows: int, samples: Sequence[Tensor]) -> list[Tensor]:
    sizes = [num_rows * sample.element_size() * sample.shape[1] for sample in samples]
    pieces = message[HEADER_BYTES : HEADER_BYTES + sum(sizes)].split_with_sizes(sizes)
    return [
        piece.view(sample.dtype).view(num_rows, sample.shape[1]) for piece, sample in zip(pieces, samples, strict=True)
    ]


def header_of(num_rows: int, num_tokens: int, stamp: int) -> bytes:
    """Return the start of a first message: rows, surplus included; tokens of the sender; stamp; checksum of these."""
    fields = struct.pack("<iiI", num_rows, num_tokens, stamp)
    return fields + struct.pack("<I", zlib.crc32(fields))


def read_header(header: bytes, stamp: int) -> int:
    """Return the number of rows.  Raises ValueError if `header_of` did not make the header with this stamp."""
    num_rows, num_tokens, theirs, checksum = struct.unpack("<iiII", header)
    if checksum != zlib.crc32(header[:12]):
        raise ValueError("its checksum is wrong, so it was damaged or is no header")
    if theirs != stamp:
        raise ValueError(f"its stamp is {theirs:#010x}, wanted {stamp:#010x}: it is of another layer, plan or type")
    if not 0 <= num_rows <= num_tokens:
        raise ValueError(f"it says {num_rows} rows of {num_tokens} tokens")
    return int(num_rows)


def row_counts(exchange: Exchange, messages: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> list[int]:
    """Return the rows that each peer sends.  A wrong header raises CommunicationError with the peer and the layer."""
    if not messages:
        return []
    # One device-to-host sync for all headers: the caller makes tensors of these sizes next.
    headers = torch.cat([message[:HEADER_BYTES] for message in messages]).cpu().numpy().tobytes()
    counts = []
    for index, (i, rank) in enumerate(exchange.peers):
        try:
            header = headers[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]
            counts.append(read_header(header, _stamp(exchange, parts[i])))
        except ValueError as error:
            raise CommunicationError(
                f"rank {exchange.ranks[exchange.self_index]}: a dispatch of {exchange.layer} from rank {rank} has a "
                f"header that cannot be right: {error}; restart from the last checkpoint, and look at the hardware "
                f"and network of rank {rank} if it happens again"
            ) from error
    return counts


def _stamp(exchange: Exchange, part: Sequence[Tensor]) -> int:
    """Return a number that is equal for messages of the same layer, plan, and types and widths of parts."""
    shape = [(str(one.dtype), one.shape[1]) for one in part]
    return zlib.crc32(f"{exchange.layer} {exchange.channel.transport.generation} {shape}".encode())


def _swap(
    exchange: Exchange, tensors: Sequence[Tensor], send_splits: Sequence[int], recv_splits: Sequence[int], *, what: str
) -> list[Tensor]:
    """Return for each [sum(send_splits), ...] tensor the parts meant for this rank, [sum(recv_splits), ...].

    All tensors travel in one transfer.  Small parts for one rank travel in one message.
    """
    with profiler_range(what, exchange.layer):
        results = [tensor.new_empty(sum(recv_splits), *tensor.shape[1:]) for tensor in tensors]
        parts = list(zip(*(tensor.contiguous().split_with_sizes(send_splits) for tensor in tensors), strict=True))
        places = list(zip(*(result.split_with_sizes(recv_splits) for result in results), strict=True))
        sends = [(rank, message) for i, rank in exchange.peers for message in _joined(parts[i])]
        incoming = {i: _room_for(places[i]) for i, _ in exchange.peers}
        receives = [(rank, message) for i, rank in exchange.peers for message in incoming[i]]
        transfer = exchange.channel.start(sends, receives, Purpose("tokens", what, exchange.layer))
        _copy(parts[exchange.self_index], places[exchange.self_index])
        transfer.wait()
        for i, messages in incoming.items():
            if messages is not places[i]:
                sizes = [place.nbytes for place in places[i]]
                _copy(messages[0].split_with_sizes(sizes), map(_bytes_of, places[i]))
        return results


def _copy(parts: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    for part, place in zip(parts, places, strict=True):
        place.copy_(part)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _joined(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.cat([_bytes_of(part) for part in parts])] if _are_joined(parts) else parts


def _room_for(places: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return room for the messages from one rank: the places of its parts, or one buffer if the parts are joined."""
    if not _are_joined(places):
        return places
    return [torch.empty(sum(place.nbytes for place in places), dtype=torch.uint8, device=places[0].device)]


def _are_joined(parts: Sequence[Tensor]) -> bool:
    """Return True if these parts travel in one message; both ends decide this by the same numbers of bytes."""
    return len(parts) > 1 and 0 < sum(part.nbytes for part in parts) <= JOINED_BYTES


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on `device`, or the tensor itself on a CPU; the host does not wait for it.

    From memory that is not pinned, a copy may first wait for all work of the current stream.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# ---- autograd ----


class _Dispatch(Function):
    @staticmethod
    def forward(
        ctx: Any, _x: Tensor, _topk_weights: Tensor, arrived: list[Tensor], state: DispatchState
    ) -> tuple[Tensor, ...]:
        """Return what arrived; autograd sees it as a function of what was sent."""
        ctx.state = state
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_row_weights: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_SECOND_DERIVATIVES)
        state = ctx.state
        routes, kernels = state.routes, state.exchange.kernels
        grad_row_weights, grad_rows = state.send_back([grad_row_weights, grad_rows], "return of input gradients")
        grad_x = kernels.combine_rows(grad_rows, routes.first_slot_to_row)
        # One row has served each slot (t, k).  An extra row takes the slots that were not routed.
        padded = torch.cat([grad_row_weights, grad_row_weights.new_zeros(1, grad_row_weights.shape[1])])
        slot_to_row = routes.slot_to_row.where(routes.slot_to_row >= 0, grad_row_weights.shape[0])
        return grad_x, padded.gather(0, slot_to_row), None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, partial_sums: Tensor, state: DispatchState) -> Tensor:
        ctx.state = state
        (returned,) = state.send_back([partial_sums], "combine of rows")
        return state.exchange.kernels.combine_rows(returned, state.routes.first_slot_to_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_SECOND_DERIVATIVES)
        state, routes = ctx.state, ctx.state.routes
        grad_rows = state.exchange.kernels.dispatch_rows(grad.contiguous(), routes.first_slot_to_row, routes.num_rows)
        (grad_partial_sums,) = state.send([grad_rows], "dispatch of output gradients")
        return grad_partial_sums, None
