# SPDX-License-Identifier: Apache-2.0
"""Rows between the ranks of one exchange.

How many rows a dispatch brings is news to their receiver.  The first message says it, and carries as many rows as the
receiver has made room for, which both ends derive from the dispatch before; only a surplus takes a second message:

    first     header (row count) | expert ids and gate weights of the first m rows | the first m rows
    second    expert ids and gate weights of the others, the others

All later transfers of the layer move as many rows, there or back.

Where the level between two ranks has a token codec, rows of a dispatch travel as records of one byte an element; the
receiver goes on with what they say. All other transfers are exact.
"""

from collections.abc import Sequence
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
        row_parts = _outgoing(exchange, plan, send_splits, x.contiguous())
        weights = topk_weights.index_select(0, plan.row_to_token)
        metadata = torch.cat([plan.row_topk_idx, weights.view(torch.int32)], dim=1)
        metadata_parts = metadata.split_with_sizes(send_splits)

        # 1. First messages.  They may be shorter than the room that their receiver has made.
        layouts = [MessageLayout(metadata.shape[1], part.shape[1], part.dtype) for part in row_parts]
        headers = torch.tensor(send_splits, dtype=torch.int64).view(-1, 1).view(torch.uint8)
        headers = headers.to(x.device, non_blocking=True)  # otherwise the host would wait for the rows made above
        sends = [
            (rank, layouts[i].message(headers[i], metadata_parts[i][: room.sent[i]], row_parts[i][: room.sent[i]]))
            for i, rank in exchange.peers
        ]
        if exchange.channel.has_equal_lengths:
            rooms = [layouts[i].num_bytes(room.sent[i]) for i, _ in exchange.peers]
            sends = [(rank, pad(part, (0, size - len(part)))) for (rank, part), size in zip(sends, rooms, strict=True)]
        messages = {i: layouts[i].empty_message(room.received[i], x.device) for i, _ in exchange.peers}
        receives = [(rank, messages[i]) for i, rank in exchange.peers]
        exchange.channel.start(sends, receives, purpose, counts_receives=False).wait()

        # 2. What came goes to its place.
        splits = list(send_splits)
        for i, count in zip(messages, row_counts(list(messages.values())), strict=True):
            splits[i] = count
        all_metadata = metadata.new_empty(sum(splits), metadata.shape[1])
        all_rows = x.new_empty(sum(splits), x.shape[1])
        rows_of = all_rows.split_with_sizes(splits)
        # Records have a place of their own until all of them are there.
        arriving = [
            rows if row_format is None else part.new_empty(len(rows), part.shape[1])
            for rows, part, row_format in zip(rows_of, row_parts, exchange.row_formats, strict=True)
        ]
        places = list(zip(all_metadata.split_with_sizes(splits), arriving, strict=True))
        places[exchange.self_index][0].copy_(metadata_parts[exchange.self_index])
        places[exchange.self_index][1].copy_(row_parts[exchange.self_index])
        for i, rank in exchange.peers:
            num_rows = min(splits[i], room.received[i])
            for place, part in zip(places[i], layouts[i].parts(messages[i], num_rows), strict=True):
                place[:num_rows].copy_(part)
            exchange.channel.transport.count_received(rank, layouts[i].num_bytes(num_rows), purpose.kind)

        # 3. The surplus.
        late_sends = [
            (rank, part[room.sent[i] :])
            for i, rank in exchange.peers
            if send_splits[i] > room.sent[i]
            for part in (metadata_parts[i], row_parts[i])
        ]
        late_receives = [
            (rank, place[room.received[i] :])
            for i, rank in exchange.peers
            if splits[i] > room.received[i]
            for place in places[i]
        ]
        if late_sends or late_receives:
            exchange.channel.start(late_sends, late_receives, purpose).wait()
        for rows, records, row_format in zip(rows_of, arriving, exchange.row_formats, strict=True):
            if row_format is not None:
                rows.copy_(exchange.kernels.dequantise_rows(records, x.shape[1], row_format, x.dtype))
        room.follow(send_splits, splits)
        return Arrival(tuple(splits), all_metadata, all_rows)


def _outgoing(exchange: Exchange, plan: RoutePlan, send_splits: Sequence[int], x: Tensor) -> list[Tensor]:
    """Rows for each destination: [m, D], or [m, record_bytes(D)] uint8 where they have a format."""
    kernels = exchange.kernels
    if not any(exchange.row_formats):
        return list(kernels.dispatch_rows(x, plan.row_to_token).split_with_sizes(send_splits))
    return [
        kernels.dispatch_rows(x, tokens) if row_format is None else kernels.quantise_rows(x, tokens, row_format)
        for tokens, row_format in zip(
            plan.row_to_token.split_with_sizes(send_splits), exchange.row_formats, strict=True
        )
    ]


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
        sends, receives, joined = [], [], []
        for i, rank in exchange.peers:
            if _are_joined(parts[i]):
                sends.append((rank, torch.cat([_bytes_of(part) for part in parts[i]])))
            else:
                sends += [(rank, part) for part in parts[i]]
            if _are_joined(places[i]):
                message = torch.empty(_num_bytes(places[i]), dtype=torch.uint8, device=places[i][0].device)
                joined.append((message, places[i]))
                receives.append((rank, joined[-1][0]))
            else:
                receives += [(rank, place) for place in places[i]]
        transfer = exchange.channel.start(sends, receives, Purpose("tokens", what, exchange.layer))
        for place, part in zip(places[exchange.self_index], parts[exchange.self_index], strict=True):
            place.copy_(part)
        transfer.wait()
        for message, members in joined:
            for place, part in zip(
                members, message.split_with_sizes([place.nbytes for place in members]), strict=True
            ):
                _bytes_of(place).copy_(part)
        return results


@dataclass(frozen=True)
class MessageLayout:
    """Bytes of a first message with m rows: header, metadata [m, 2K] int32, rows [m, D]."""

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


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _are_joined(parts: Sequence[Tensor]) -> bool:
    """True where these parts travel in one message: both ends decide it by the same bytes."""
    return len(parts) > 1 and 0 < _num_bytes(parts) <= JOINED_BYTES
