# SPDX-License-Identifier: Apache-2.0
"""Sums and gathers over a data-parallel group, level by level, so that a byte crosses a slow link once per child.

A flat buffer is cut into one slot per rank of the group.  To sum, ranks first trade slots inside the fast level.  Each
adds up the slots for its own column of the next slower level, so one sum per child and slot crosses the slow link.  A
gather goes the same way back.  An example with two DCs of two GPUs; slots a b c d belong to ranks 0 1 2 3, and `+`
marks half of a sum:

    rank             0          1          2          3
    start         a b c d    a b c d    a b c d    a b c d
    sum, gpu      a+  c+       b+  d+   a+  c+       b+  d+    0 and 1 trade b d for a c
    sum, dc       a            b            c            d     0 and 2 trade c+ for a+
    gather, dc    a   c        b   d    a   c        b   d     the same trades backwards
    gather, gpu   a b c d    a b c d    a b c d    a b c d

Over the slow link each DC sends half of the vector for a sum, and half for a gather.  If the level has a codec, that
half is encoded: sums with error feedback, parameters as their change since the step before.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_hybridep.errors import VerificationError
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.geometry.slots import Span, cut, even_bounds, whole
from ds_hybridep.sync.encoding import Encoding
from ds_hybridep.sync.error_feedback import SlotCodecs
from ds_hybridep.sync.memory import CodecMemory, HeldSum, ParameterCodecs
from ds_hybridep.sync.messages import NARROW, PacketPart, split
from ds_hybridep.sync.mirrors import HeldSlot
from ds_hybridep.sync.stages import SlotKey, Stage, connect, gather_stages
from ds_hybridep.sync.transaction import Transaction
from ds_hybridep.sync.transfers import Gather, Reduce, StagedTransfer, StagePipeline, needs_equal_lengths
from ds_hybridep.transport.channels import Purpose, Transport
from ds_hybridep.transport.streams import DeviceStreams


class FlatSlots:
    """One flat buffer as a gather and a reduce see it (`sync.transfers.ValueSlots` and `SumSlots`).

    Args:
        values: by slot, contiguous and flat.
        sums: by slot, in a type wide enough to add up; they travel in the type of the values.
    """

    def __init__(
        self,
        group: "GroupSync",
        values: Sequence[Tensor],
        codecs: SlotCodecs | None = None,
        sums: Sequence[Tensor] = (),
    ) -> None:
        self.name = group.name
        self.stages, self.own_slot = group.stages, group.own_slot
        self.device = values[0].device
        self.streams: DeviceStreams | None = None  # work runs in the caller's stream
        self.codecs = codecs
        self._values: dict[SlotKey, Tensor] = dict(enumerate(values))
        self._sums: dict[SlotKey, Tensor] = dict(enumerate(sums))

    def values(self, slot: SlotKey, *, trainable_only: bool) -> list[Tensor]:
        return [self._values[slot]]

    def sum_sizes(self, slot: SlotKey) -> list[tuple[int, torch.dtype]]:
        return [(self._values[slot].numel(), self._values[slot].dtype)]

    def make_sums(self) -> None:
        """Do nothing: the sums are the caller's."""

    def sums(self, slot: SlotKey) -> list[Tensor]:
        return [self._sums[slot]]

    def sum_parts(self, slot: SlotKey) -> list[Tensor]:
        assert self.codecs is not None, f"{self.name}: nothing is encoded"
        return split(self._sums[slot], self.codecs.parts[slot])

    def drop_sums(self, slot: SlotKey) -> None:
        """Do nothing: the sums are the caller's."""


class _SlottedBuffer:
    """A flat buffer cut into spans, each of which belongs to a slot.

    slices: (slot, span) in the order of the buffer.
    values: by slot, contiguous; views of the buffer where a slot's spans follow each other, unless `copies`.
    """

    def __init__(
        self, flat: Tensor, slices: Sequence[tuple[int, Span]], num_slots: int, *, copies: bool = False
    ) -> None:
        of_slot: list[list[int]] = [[] for _ in range(num_slots)]
        for at, (slot, _) in enumerate(slices):
            of_slot[slot].append(at)
        whole_flat = flat.detach().view(-1)
        places = whole_flat.split([span.num_elements for _, span in slices])
        starts = [0, *itertools.accumulate(span.num_elements for _, span in slices)]
        self.spans = [tuple(slices[at][1] for at in members) for members in of_slot]
        self._places = [[places[at] for at in members] for members in of_slot]
        self.values = [
            whole_flat[starts[members[0]] : starts[members[-1] + 1]]
            if members and not copies and members[-1] - members[0] == len(members) - 1
            else torch.cat([flat.new_empty(0), *places_of])
            for members, places_of in zip(of_slot, self._places, strict=True)
        ]

    def write_back(self, *slots: int) -> None:
        """Copy `values` of these slots, by default of all, to where the buffer does not have them."""
        for slot in slots or range(len(self.values)):
            places, values = self._places[slot], self.values[slot]
            if places and places[0].data_ptr() != values.data_ptr():
                for place, value in zip(places, values.split([place.numel() for place in places]), strict=True):
                    place.copy_(value)


class GroupSync:
    """Collectives of one data-parallel group; its ranks must call each with the same sizes and in the same order.

    Results are bit-identical on all ranks and do not depend on timing: each slot is summed by one rank, in a fixed
    order.  16-bit types are summed in fp32 and rounded when they are sent.

    Args:
        ranks: the group's ranks, in the group's order.
        name: what is synchronised, for errors and channels.
        encoding: codecs of the levels.
        transaction: of the optimizer step.

    Raises:
        PlanError: the group is not a regular part of the levels.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        name: str,
        encoding: Encoding,
        *,
        transaction: Transaction,
        device: torch.device,
    ) -> None:
        self.transport, self.name, self.encoding = transport, name, encoding
        self.ranks, levels = tuple(ranks), transport.cluster.levels
        spans = Partition.build(transport.cluster, ranks, (1,) * len(levels)).spans
        partition = Partition.build(transport.cluster, ranks, spans)
        members = partition.domain_ranks(transport.rank)
        self.own_slot, self.num_slots = members.index(transport.rank), len(members)
        self._slot_of_index = [members.index(rank) for rank in ranks]  # the group may have another order
        self._index_of_slot = [self.ranks.index(rank) for rank in members]
        self.level_to = [None if rank == transport.rank else transport.level_to(rank) for rank in members]
        self.stages = connect(gather_stages(partition, transport.rank), transport, f"dense_{name}", device)
        self._levels = [stage.level for stage in self.stages]
        # True if a level that the group crosses has a codec for weights; for weights or gradients.
        self.encodes_parameters = any(encoding.weight_codecs[level] is not None for level in self._levels)
        self._encodes_gradients = any(encoding.gradient_codecs[level] is not None for level in self._levels)
        self.is_encoded = self.encodes_parameters or self._encodes_gradients
        self.memory = CodecMemory(
            name, transport.rank, transaction, encoding, num_ranks=self.num_slots, levels=self._levels, device=device
        )
        self._earlier_sums: dict[Span, Tensor] = {}  # sums of earlier micro-steps that this rank adds to later ones
        self.waiting_names: set[str] = set()  # parameters with gradients that wait on some rank
        self._pipeline = StagePipeline(transport)
        self._purposes = [
            Purpose("dense", what, name)
            for what in ("sum of gradients", "gather of summed gradients", "gather of parameters")
        ]

    # -- gradients --------------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, spans: Sequence[Span] = ()) -> None:
        """Replace a contiguous tensor by its sum over the ranks.

        spans: the tensors that it consists of; without their names, the sum travels as it is.
        """
        spans = tuple(spans) or (whole("", (flat.numel(),)),)
        if all(span.name for span in spans):
            buffer = _SlottedBuffer(flat, self.memory.slices(spans), self.num_slots)
        else:
            slots_of = enumerate(cut(spans, even_bounds(spans, self.num_slots)))
            buffer = _SlottedBuffer(flat, [(slot, span) for slot, found in slots_of for span in found], self.num_slots)
        to_owners, to_all = self._slot_codecs(buffer)
        sums = self._reduce(buffer, to_owners, is_last=True)
        self._give_to_all(buffer, to_all, sums)
        buffer.write_back()

    def reduce_to_owners(self, flat: Tensor, slices: Sequence[tuple[int, Span]], *, is_last: bool = True) -> None:
        """Replace this rank's slices of a contiguous tensor by their sums; the other slices stay as they are.

        Args:
            slices: (rank in the group that needs the sum, its span), in the order of the tensor; equal on all ranks.
            is_last: False if more sums of the same slices follow before they are used, as under ZeRO 2.  Then at most
                the fastest level is crossed and this rank's slices become zero; the last sum includes everything.
        """
        by_slot = [(self._slot_of_index[owner], span) for owner, span in slices]
        # 16-bit values are copied anyway before anything is added to them.
        buffer = _SlottedBuffer(flat, by_slot, self.num_slots, copies=flat.dtype not in NARROW)
        codecs, _ = self._slot_codecs(buffer)
        total = self._reduce(buffer, codecs, is_last=is_last)[self.own_slot]
        if is_last and codecs is not None and flat.dtype in NARROW:
            total = self._rounded(codecs.parts[self.own_slot], total, flat.dtype)
        buffer.values[self.own_slot] = total if is_last else torch.zeros_like(total)
        buffer.write_back(self.own_slot)

    def verify(self, checksums: Sequence[Tensor]) -> None:
        """Raise VerificationError if ranks have different checksums of what the group shares."""
        if not checksums:
            return
        own = torch.stack(list(checksums)).cpu().reshape(-1)
        table = own.new_empty(self.num_slots, own.numel())
        self.start_all_gather(table, own)()
        wrong = [index for index, row in enumerate(table) if not torch.equal(row, table[0])]
        if wrong:
            raise VerificationError(
                f"{self.name}: ranks {[self.ranks[index] for index in wrong]} hold other values than rank "
                f"{self.ranks[0]}; if they were changed outside engine.step(), do that on all ranks alike, or call "
                f"ds_hybridep.refresh(engine) on all ranks after it"
            )

    def drop_waiting(self) -> None:
        """Forget the sums of micro-steps that no optimizer step will use."""
        self._earlier_sums.clear()
        self.waiting_names.clear()

    def _slot_codecs(self, buffer: _SlottedBuffer) -> tuple[SlotCodecs | None, SlotCodecs | None]:
        """Return the codecs of a buffer on the sums' way to owners, and on that to all ranks; None: not encoded."""
        found = None
        if self._encodes_gradients:
            found = self.memory.slot_codecs(buffer.spans, buffer.values[self.own_slot])
        return found or (None, None)

    def _reduce(self, buffer: _SlottedBuffer, codecs: SlotCodecs | None, *, is_last: bool) -> Sequence[Tensor]:
        """Return sums by slot; that of the own slot is complete if `is_last`."""
        sums = [value.float() if value.dtype in NARROW else value for value in buffer.values]
        slots = FlatSlots(self, buffer.values, codecs, sums)
        inner, outer = self._split_stages(is_encoded=codecs is not None)
        self._run(Reduce(slots, self._purposes[0], inner))
        received = (slot for stage in outer for peer in stage.peers for slot in peer.slots_there)
        carried = {self.own_slot, *(slot for slot in received if isinstance(slot, int))}
        for slot in carried:
            spans = buffer.spans[slot]
            for span, total in zip(spans, sums[slot].split([span.num_elements for span in spans]), strict=True):
                if (earlier := self._earlier_sums.pop(span, None)) is not None:
                    total += earlier
                if not is_last:
                    self._earlier_sums[span] = total.clone()
        names = {span.name for spans in buffer.spans for span in spans}
        if is_last:
            self.waiting_names -= names
            self._run(Reduce(slots, self._purposes[0], outer))
        else:
            self.waiting_names |= names
        return sums

    def _split_stages(self, *, is_encoded: bool) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
        """Return the stages that the sums of every micro-step cross, and those crossed once per optimizer step."""
        fastest = self.stages[-1:]
        if is_encoded and any(self.encoding.gradient_codecs[stage.level] for stage in fastest):
            return (), self.stages
        return fastest, self.stages[:-1]

    def _rounded(self, parts: tuple[PacketPart, ...], total: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of the own slot as `dtype`; what that loses goes into later sums."""
        rounded, loss_scale = self.memory.rounded.senders[0], self.encoding.loss_scale()
        rounded.move_residuals(parts, split(total, parts), loss_scale)
        result = total.to(dtype)
        rounded.leave_out(parts, split(total - result, parts), loss_scale)
        return result

    def _give_to_all(self, buffer: _SlottedBuffer, codecs: SlotCodecs | None, sums: Sequence[Tensor]) -> None:
        """Gather the sums of all slots on all ranks: as they are, or as their packets hold them."""
        own, values = self.own_slot, buffer.values
        messages: dict[int, list[Tensor]] = {}
        held: dict[SlotKey, HeldSlot] = {}
        if codecs is None:
            values[own].copy_(sums[own])
        else:
            of_level = self.encoding.gradient_codecs
            if codecs.parts[own]:
                with codecs.counters.timing("encode_s"):
                    message = HeldSum(codecs, own, values[own]).encode(sums[own])
                messages = {level: message for level in self._levels if of_level[level] is not None}
            held = {
                slot: HeldSum(codecs, slot, values[slot])
                for slot, level in enumerate(self.level_to)
                if level is not None and of_level[level] is not None and codecs.parts[slot]
            }
        self._run(Gather(FlatSlots(self, values, codecs), self._purposes[1], messages, held, is_exact=False))

    # -- parameters -------------------------------------------------------------------------------------------------

    def start_all_gather(
        self, output: Tensor, own: Tensor, before: Tensor | None = None, spans: Sequence[Span] = ()
    ) -> Callable[[], None]:
        """Fill a contiguous `output` with the equally large tensors `own` of all ranks, in the group's order.

        Args:
            before: what the other ranks hold in place of `own`, bit for bit; it is overwritten.  None if that is not
                known: then everything goes as it is.
            spans: the tensors that `output` consists of; without them, codecs see one vector.

        Returns a function that waits for the end; until then both tensors must stay untouched.

        The first gather brings everything as it is, and from then on all ranks hold the same.  With a lossy codec,
        `own` and its place in `output` become what the other ranks get.
        """
        rows = output.detach().view(self.num_slots, -1)
        values = [rows[index] for index in self._index_of_slot]
        place = values[self.own_slot]
        is_apart = place.data_ptr() != own.data_ptr()
        if is_apart:
            place.copy_(own.detach().view(-1))
        codecs = None if before is None else self._parameter_codecs(output, spans)
        messages: dict[int, list[Tensor]] = {}
        replicas: dict[SlotKey, HeldSlot] = {}
        if codecs is not None and before is not None:
            messages, replicas = codecs.prepare(values, before)
            if output.dtype in NARROW:  # their messages vary in length
                for stage in filter(needs_equal_lengths, self.stages):
                    messages.pop(stage.level, None)
        slots = FlatSlots(self, values, codecs)
        gather = Gather(slots, self._purposes[2], messages, replicas, is_exact=False)
        self._pipeline.start(gather)

        def finish() -> None:
            self._pipeline.wait(gather)
            if codecs is not None and is_apart:
                own.detach().view(-1).copy_(place)

        return finish

    def _parameter_codecs(self, output: Tensor, spans: Sequence[Span]) -> ParameterCodecs | None:
        """Return the codecs; None if everything goes as it is."""
        if output.dtype == torch.float64 or not self.encodes_parameters:
            return None
        num_elements = output.numel() // self.num_slots
        spans = tuple(spans) or (whole("", (output.numel(),)),)
        by_index = cut(spans, [num_elements * (index + 1) for index in range(self.num_slots)])
        by_slot = [by_index[index] for index in self._index_of_slot]
        return self.memory.parameter_codecs(by_slot, output, self.level_to, self.own_slot)

    # -- numbers ----------------------------------------------------------------------------------------------------

    def reduce_numbers(self, numbers: Tensor, is_max: Tensor) -> Tensor:
        """Return sums over the ranks, or maxima where `is_max`, of [n] float64 numbers; one message per level."""
        total = numbers
        for stage in self.stages[::-1]:
            assert stage.gradients is not None, f"{self.name}: level {stage.level} has no channel"
            found = {peer.rank: torch.empty_like(total) for peer in stage.peers}
            sends = [(rank, total) for rank in found]
            purpose = Purpose("control", "agreement on numbers", self.name)
            transfer = stage.gradients.start(sends, list(found.items()), purpose)
            transfer.wait()
            self.transport.count_waits([transfer])
            found[self.transport.rank] = total
            table = torch.stack([found[rank] for rank in sorted(found)])  # in one order on all ranks
            total = torch.where(is_max, table.max(0).values, table.sum(0))
        return total

    def _run(self, transfer: StagedTransfer) -> None:
        self._pipeline.start(transfer)
        self._pipeline.wait(transfer)
