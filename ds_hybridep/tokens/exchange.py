# SPDX-License-Identifier: Apache-2.0
"""Rows between the ranks of one exchange.

The receiver of a dispatch does not know how many rows will come.  The first message says it, and carries as many rows
as the receiver has made room for, which both ends derive from the dispatch before; a surplus takes a second transfer:

    first     header (row count) | expert ids and gate weights of the first m rows | the first m rows
    surplus   expert ids and gate weights of the others, the others

A first message with fewer rows is shorter than the room (see `Channel.has_equal_lengths`).  All later transfers of the
layer move as many rows, there or back.

Where the level between two ranks has a token codec, rows of a dispatch travel as records of one byte an element; the
receiver goes on with what they say.  All other transfers are exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_hybridep.kernels import Kernels, RoutePlan
from ds_hybridep.plan.row_format import RowFormat
from ds_hybridep.plan.token_route import Stage
from ds_hybridep.transport.channels import Channel, Purpose, Transport, profiler_range

HEADER_BYTES = 8  # an int64 row count; what follows is aligned for every type
JOINED_BYTES = 1 << 16  # up to here copying two parts into one message costs less than a message more


@dataclass
class RoomForRows:
    """Rows that fit into the first message of the next dispatch, by destination."""

    sent: list[int]
    received: list[int]

    def follow(self, send_splits: Sequence[int], recv_splits: Sequence[int]) -> None:
        """Room for as many rows as in the last dispatch and a few more."""
        self.sent = [count + count // 4 + 8 for count in send_splits]
        self.received = [count + count // 4 + 8 for count in recv_splits]


@dataclass(frozen=True)
class Exchange:
    """One stage of a layer's token route on this rank: with whom rows are exchanged.  Lives as long as the layer."""

    layer: str
    ranks: tuple[int, ...]  # destinations in order, this rank included
    self_index: int
    expert_to_destination: Tensor  # [E] int32
    channel: Channel
    kernels: Kernels
    room: RoomForRows
    row_formats: tuple[RowFormat | None, ...]  # of rows to and from each destination; None: as they are

    @cached_property
    def peers(self) -> tuple[tuple[int, int], ...]:
        """(index, rank) of the other destinations."""
        return tuple((index, rank) for index, rank in enumerate(self.ranks) if index != self.self_index)


@dataclass(frozen=True)
class Arrival:
    """What a dispatch brought, ordered by sender."""

    splits: tuple[int, ...]  # rows from each destination
    metadata: Tensor  # [R, 2K] int32: expert ids, then the bits of the gate weights
    rows: Tensor  # [R, D]


def build_exchanges(
    stages: Sequence[Stage],
    transport: Transport,
    group: str,
    kernels: Kernels,
    layer: str,
    device: torch.device,
    *,
    level_formats: Sequence[RowFormat | None] = (),
) -> tuple[Exchange, ...]:
    """The exchanges of one layer's route; makes the channels, so all ranks of the group call in the same order.

    level_formats: of dispatched rows that cross each level; none: rows travel as they are.
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
            room=RoomForRows([0] * len(stage.ranks), [0] * len(stage.ranks)),
            row_formats=tuple(map(format_to, stage.ranks)),
        )
        for stage in stages
    )


def dispatch_rows(
    exchange: Exchange, plan: RoutePlan, send_splits: tuple[int, ...], x: Tensor, topk_weights: Tensor
) -> Arrival:
    """Send each destination the tokens of its rows, with their expert ids and gate weights.

    Args:
        exchange: with whom.
        plan: of the rows.
        send_splits: rows to each destination.
        x: [T, D] tokens.
        topk_weights: [T, K] fp32 gate weights.
    """
    purpose, room = Purpose("tokens", "dispatch of rows", exchange.layer), exchange.room
    with profiler_range(purpose.operation, exchange.layer):
        parts = _outgoing(exchange, plan, send_splits, x.contiguous(), topk_weights)
        layouts = [RowMessage(metadata.shape[1], rows.shape[1], rows.dtype) for metadata, rows in parts]
        messages = _swap_first_messages(exchange, send_splits, parts, layouts, purpose)
        splits = list(send_splits)
        for (i, _), count in zip(exchange.peers, row_counts(messages), strict=True):
            splits[i] = count

        # What came goes to its place; records have one of their own until all of them are there.
        all_metadata = torch.empty(sum(splits), layouts[0].metadata_width, dtype=torch.int32, device=x.device)
        all_rows = x.new_empty(sum(splits), x.shape[1])
        rows_of = all_rows.split_with_sizes(splits)
        arriving = [
            rows if row_format is None else part.new_empty(len(rows), part.shape[1])
            for rows, (_, part), row_format in zip(rows_of, parts, exchange.row_formats, strict=True)
        ]
        places = list(zip(all_metadata.split_with_sizes(splits), arriving, strict=True))
        _copy(parts[exchange.self_index], places[exchange.self_index])
        for (i, rank), message in zip(exchange.peers, messages, strict=True):
            num_rows = min(splits[i], room.received[i])
            _copy(layouts[i].parts(message, num_rows), [place[:num_rows] for place in places[i]])
            exchange.channel.transport.count_received(rank, layouts[i].num_bytes(num_rows), purpose.kind)
        sends = [(rank, part[room.sent[i] :]) for i, rank in exchange.peers for part in parts[i]]
        receives = [(rank, place[room.received[i] :]) for i, rank in exchange.peers for place in places[i]]
        exchange.channel.start(sends, receives, purpose).wait()  # the surplus, mostly none

        for rows, records, row_format in zip(rows_of, arriving, exchange.row_formats, strict=True):
            if row_format is not None:
                rows.copy_(exchange.kernels.dequantise_rows(records, x.shape[1], row_format, x.dtype))
        room.follow(send_splits, splits)
        return Arrival(tuple(splits), all_metadata, all_rows)


def _outgoing(
    exchange: Exchange, plan: RoutePlan, send_splits: Sequence[int], x: Tensor, topk_weights: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Metadata [m, 2K] and rows for each destination: [m, D], or records [m, B] uint8 where they have a format."""
    kernels, formats = exchange.kernels, exchange.row_formats
    if any(formats):
        rows = [
            kernels.dispatch_rows(x, tokens) if row_format is None else kernels.quantise_rows(x, tokens, row_format)
            for tokens, row_format in zip(plan.row_to_token.split_with_sizes(send_splits), formats, strict=True)
        ]
    else:
        rows = list(kernels.dispatch_rows(x, plan.row_to_token).split_with_sizes(send_splits))
    weights = topk_weights.index_select(0, plan.row_to_token)
    metadata = torch.cat([plan.row_topk_idx, weights.view(torch.int32)], dim=1)
    return list(zip(metadata.split_with_sizes(send_splits), rows, strict=True))


def _swap_first_messages(
    exchange: Exchange,
    send_splits: Sequence[int],
    parts: Sequence[tuple[Tensor, Tensor]],
    layouts: Sequence["RowMessage"],
    purpose: Purpose,
) -> list[Tensor]:
    """The first message of each peer, in the room made for it."""
    channel, room, device = exchange.channel, exchange.room, parts[0][1].device
    headers = torch.tensor(send_splits, dtype=torch.int64).view(-1, 1).view(torch.uint8)
    headers = headers.to(device, non_blocking=True)  # otherwise the host would wait for the rows made above
    sends = []
    for i, rank in exchange.peers:
        message = layouts[i].message(headers[i], *(part[: room.sent[i]] for part in parts[i]))
        if channel.has_equal_lengths:
            message = pad(message, (0, layouts[i].num_bytes(room.sent[i]) - len(message)))
        sends.append((rank, message))
    receives = [(rank, layouts[i].empty_message(room.received[i], device)) for i, rank in exchange.peers]
    channel.start(sends, receives, purpose, counts_receives=False).wait()
    return [message for _, message in receives]


def swap(
    exchange: Exchange, tensors: Sequence[Tensor], send_splits: Sequence[int], recv_splits: Sequence[int], what: str
) -> list[Tensor]:
    """For each [sum(send_splits), ...] tensor the parts meant for this rank, [sum(recv_splits), ...].

    All tensors travel in one transfer, small parts for one rank in one message.
    """
    with profiler_range(what, exchange.layer):
        results = [tensor.new_empty(sum(recv_splits), *tensor.shape[1:]) for tensor in tensors]
        parts = list(zip(*(tensor.contiguous().split_with_sizes(send_splits) for tensor in tensors), strict=True))
        places = list(zip(*(result.split_with_sizes(recv_splits) for result in results), strict=True))
        sends = [(rank, message) for i, rank in exchange.peers for message in _joined(parts[i])]
        rooms = {i: _room_for(places[i]) for i, _ in exchange.peers}
        receives = [(rank, message) for i, rank in exchange.peers for message in rooms[i]]
        transfer = exchange.channel.start(sends, receives, Purpose("tokens", what, exchange.layer))
        _copy(parts[exchange.self_index], places[exchange.self_index])
        transfer.wait()
        for i, messages in rooms.items():
            if messages is not places[i]:
                sizes = [place.nbytes for place in places[i]]
                _copy(messages[0].split_with_sizes(sizes), map(_bytes_of, places[i]))
        return results


@dataclass(frozen=True)
class RowMessage:
    """Layout of a first message with m rows: header, metadata [m, 2K] int32, rows [m, D]."""

    metadata_width: int
    width: int
    dtype: torch.dtype

    def num_bytes(self, num_rows: int) -> int:
        """Length of a message with that many rows."""
        return HEADER_BYTES + num_rows * (4 * self.metadata_width + self.dtype.itemsize * self.width)

    def message(self, header: Tensor, metadata: Tensor, rows: Tensor) -> Tensor:
        """The message of these rows."""
        return torch.cat([header, _bytes_of(metadata), _bytes_of(rows)])

    def empty_message(self, num_rows: int, device: torch.device) -> Tensor:
        """Room for a message with at most that many rows."""
        return torch.empty(self.num_bytes(num_rows), dtype=torch.uint8, device=device)

    def parts(self, message: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Views of the metadata and the rows of a message that has that many."""
        begin, end = HEADER_BYTES + 4 * num_rows * self.metadata_width, self.num_bytes(num_rows)
        metadata = message[HEADER_BYTES:begin].view(torch.int32).view(num_rows, self.metadata_width)
        return metadata, message[begin:end].view(self.dtype).view(num_rows, self.width)


def row_counts(messages: Sequence[Tensor]) -> list[int]:
    """The row counts in the headers of first messages."""
    if not messages:
        return []
    # Device-to-host sync, one for all: tensors of these sizes are made next.
    counts: list[int] = torch.cat([message[:HEADER_BYTES] for message in messages]).view(torch.int64).tolist()
    return counts


def _copy(parts: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    for part, place in zip(parts, places, strict=True):
        place.copy_(part)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _joined(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The messages of parts that go to one rank."""
    return [torch.cat([_bytes_of(part) for part in parts])] if _are_joined(parts) else parts


def _room_for(places: Sequence[Tensor]) -> Sequence[Tensor]:
    """Room for the messages of parts that come from one rank: the places themselves, unless they are joined."""
    if not _are_joined(places):
        return places
    return [torch.empty(sum(place.nbytes for place in places), dtype=torch.uint8, device=places[0].device)]


def _are_joined(parts: Sequence[Tensor]) -> bool:
    """True where these parts travel in one message: both ends decide it by the same bytes."""
    return len(parts) > 1 and 0 < sum(part.nbytes for part in parts) <= JOINED_BYTES
