# SPDX-License-Identifier: Apache-2.0
"""Working copies of a domain's experts for one layer, and their gradients until these return to the owners.

    weights  M x [e * n]  slot i = the experts of the domain rank with offset index i
    sums     M x [e * n]  fp32 partial gradients since the last return (own slot: what came back)

One tensor for each block of `experts.layout`.  The own slot has weights while they are sent as they are; those that
left as patches stay.  Sums have memory from a step's first gradients until these were sent, those of the own slot
during a return.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import Patch
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.layout import Block, ParameterSlice, lay_out, num_local_experts
from ds_hybridep.experts.partitioned import gathered
from ds_hybridep.plan.partition import Partition
from ds_hybridep.sync.feedback import Encoding, Feedback, StepChanges, residual_dtype
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MessageLayout, PacketPart
from ds_hybridep.sync.mirrors import Mirror, PatchReplica, PatchSender, Replica
from ds_hybridep.sync.stages import GatherStage
from ds_hybridep.sync.transfers import Gather
from ds_hybridep.transport.channels import Purpose
from ds_hybridep.transport.streams import DeviceStreams, streams_of


class Replicas:
    """One layer's replicas on this rank.

    Args:
        experts: the e experts owned by this rank, one module each; `is_grouped`: one, with parameters [e, *shape].
        partition: of the layer's expert-parallel group.
        changes: shared by all layers.
        is_transient: weights have no memory until `TransientWeights` gives them some, and must travel as they are.
    """

    def __init__(
        self,
        layer: str,
        experts: Sequence[nn.Module],
        partition: Partition,
        stages: tuple[GatherStage, ...],
        rank: int,
        encoding: Encoding,
        changes: StepChanges,
        *,
        is_grouped: bool = False,
        is_transient: bool = False,
    ) -> None:
        self.layer, self.experts, self.is_grouped = layer, tuple(experts), is_grouped
        self.partition, self.stages, self.encoding = partition, stages, encoding
        self.num_local = num_local_experts(experts, is_grouped=is_grouped)
        self.blocks = lay_out(experts[0], is_grouped=is_grouped)
        trainable = [piece for block in self.blocks if block.is_trainable for piece in block.slices]
        self.trainable_names = tuple(piece.name for piece in trainable)
        self.parts = tuple(PacketPart(piece.name, piece.shape, self.num_local) for piece in trainable)
        # 1. Slots.
        self.domain_ranks = partition.domain_ranks(rank)
        self.own_slot = partition.offset_index(rank)
        self.replica_slots = tuple(slot for slot in range(len(self.domain_ranks)) if slot != self.own_slot)
        # 2. Weights, and views of them.
        sample = next(experts[0].parameters())
        self.device = sample.device
        streams = streams_of(sample.device)
        self.streams = streams if isinstance(streams, DeviceStreams) else None  # None: work runs where it is written
        patches = any(isinstance(encoding.weight_codecs[stage.level], Patch) for stage in stages)
        self._lasting: list[Tensor | None] = [
            self._new_weights(block)
            if is_transient or (block.is_trainable and patches and not encoding.is_on_host)
            else None
            for block in self.blocks
        ]
        self._own = list(self._lasting)
        self._weights = {slot: [self._new_weights(block) for block in self.blocks] for slot in self.replica_slots}
        self._views = {slot: self._by_name(self.values(slot, trainable_only=False)) for slot in self.replica_slots}
        if is_transient:
            for weights in self.weights:
                weights.untyped_storage().resize_(0)  # views cannot be made without memory, but stay
        # 3. Sums of gradients, by slot, for each trainable block.
        self._sums: dict[int, list[Tensor]] = {}
        # 4. What lossy codecs keep.
        self.feedback = _feedback_of(self, changes)

    def _new_weights(self, block: Block) -> Tensor:
        return torch.zeros(self.num_local * block.num_elements, dtype=block.dtype, device=self.device)

    @property
    def weights(self) -> list[Tensor]:
        """All that is held of weights, of all slots and blocks."""
        own = [weights for weights in self._own if weights is not None]
        return [*own, *(weights for slot in self._weights.values() for weights in slot)]

    def level_between(self, slot: int, other: int) -> int:
        """The slowest level between the ranks of two slots."""
        level = self.partition.cluster.level_between(self.domain_ranks[slot], self.domain_ranks[other])
        assert level is not None, f"{self.layer}: slots {slot} and {other} are of one rank"
        return level

    # -- views ---------------------------------------------------------------------------------------------------

    def _part(self, tensor: Tensor, piece: ParameterSlice) -> Tensor:
        """View [e, *shape] of one parameter of a slot's experts, in a block of the slot's weights or sums."""
        start, stop = self.num_local * piece.start, self.num_local * piece.stop
        return tensor[start:stop].view(self.num_local, *piece.shape)

    def _trainable_parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of what `values` gives of trainable blocks, or something alike."""
        blocks = [block for block in self.blocks if block.is_trainable]
        pairs = zip(blocks, tensors, strict=True)
        return [self._part(tensor, piece) for block, tensor in pairs for piece in block.slices]

    def _by_name(self, values: Sequence[Tensor], *, trainable_only: bool = False) -> list[dict[str, Tensor]]:
        """A slot's weights by parameter name for each of `experts`, in what `values` gives or something alike."""
        blocks = [block for block in self.blocks if block.is_trainable or not trainable_only]
        parts = {
            piece.name: self._part(tensor, piece)
            for block, tensor in zip(blocks, values, strict=True)
            for piece in block.slices
        }
        return [
            {name: part if self.is_grouped else part[module_idx] for name, part in parts.items()}
            for module_idx in range(len(self.experts))
        ]

    def values(self, slot: int, *, trainable_only: bool) -> list[Tensor]:
        """Weights of a slot, [e * n] for each block; the own slot must have been staged."""
        held: Sequence[Tensor | None] = self._own if slot == self.own_slot else self._weights[slot]
        blocks = [block for block in self.blocks if block.is_trainable or not trainable_only]
        values = [weights for weights, block in zip(held, self.blocks, strict=True) if block in blocks]
        held_values = [weights for weights in values if weights is not None]
        assert len(held_values) == len(blocks), f"{self.layer}: the own slot is not staged"
        return held_values

    def weight_parts(self, slot: int) -> list[Tensor]:
        """Trainable weights of a slot, [e, *shape] in the order of `parts`."""
        return self._trainable_parts(self.values(slot, trainable_only=True))

    def weights_by_name(self, slot: int) -> list[dict[str, Tensor]]:
        """Weights of a slot by parameter name for each of `experts`; the own ones are the parameters, if not away."""
        if slot != self.own_slot:
            return self._views[slot]
        if not self.is_partitioned:
            return [dict(expert.named_parameters()) for expert in self.experts]
        return self._by_name(self.values(slot, trainable_only=False))

    def sums(self, slot: int) -> list[tuple[Tensor, torch.dtype]]:
        """Partial gradients of a slot, fp32 [e * n] for each trainable block, and the type in which they travel."""
        dtypes = [block.dtype for block in self.blocks if block.is_trainable]
        return list(zip(self._sums[slot], dtypes, strict=True))

    def sum_parts(self, slot: int) -> list[Tensor]:
        return self._trainable_parts(self._sums[slot])

    def drop_sums(self, slot: int) -> None:
        for sums in self._sums.pop(slot):
            if self.streams is not None:
                self.streams.free_behind_side(sums)

    def loss_scale(self) -> float:
        return self.encoding.loss_scale()

    def trainable_weights(self, slots: Iterable[int]) -> list[Tensor]:
        """Trainable weights as they are held, by slot, `experts` and `trainable_names`."""
        return [
            weights[name] for slot in slots for weights in self.weights_by_name(slot) for name in self.trainable_names
        ]

    # -- weights of the owned experts ----------------------------------------------------------------------------

    @property
    def is_partitioned(self) -> bool:
        """True where ZeRO-3 keeps a part of each owned expert here, and the own slot is what is computed with."""
        return any(hasattr(parameter, "ds_id") for parameter in self.experts[0].parameters())

    def owned_parameters(self) -> list[nn.Parameter]:
        """The owned experts' trainable parameters, by `experts` and `trainable_names`; ZeRO-3 does not gather them."""
        named = [dict(expert.named_parameters()) for expert in self.experts]
        return [parameters[name] for parameters in named for name in self.trainable_names]

    def stage(self, *, trainable_only: bool) -> None:
        """Copy the owned experts' parameters into the own slot, until `unstage`.

        Under ZeRO-3 the ranks that share them must call together.
        """
        self.stage_empty(trainable_only=trainable_only)
        values = self.values(self.own_slot, trainable_only=trainable_only)
        self._load(self._by_name(values, trainable_only=trainable_only), trainable_only=trainable_only)

    def stage_empty(self, *, trainable_only: bool) -> None:
        """Have memory for the own slot."""
        self._own = [
            self._new_weights(block) if own is None and (block.is_trainable or not trainable_only) else own
            for own, block in zip(self._own, self.blocks, strict=True)
        ]

    def unstage(self) -> None:
        """The own slot was sent.  Under ZeRO-3 it is what is computed with, and stays."""
        if not self.is_partitioned:
            self._own = list(self._lasting)

    def own_weights(self) -> list[Tensor]:
        """The owned experts' trainable parameters as `values` has those of a slot; the own slot stays as it is."""
        values = [self._new_weights(block) for block in self.blocks if block.is_trainable]
        self._load(self._by_name(values, trainable_only=True), trainable_only=True)
        return values

    def _load(self, places_of: Sequence[dict[str, Tensor]], *, trainable_only: bool) -> None:
        """Reads parameters afresh: ZeRO re-points them."""
        pairs = [
            (places[name], parameter)
            for expert, places in zip(self.experts, places_of, strict=True)
            for name, parameter in expert.named_parameters()
            if not trainable_only or name in self.trainable_names
        ]
        with gathered([parameter for _, parameter in pairs]) if self.is_partitioned else nullcontext():
            for place, parameter in pairs:
                place.copy_(parameter.detach())

    def source_weights(self) -> list[Tensor]:
        """Owned trainable weights as exact as this rank has them, [e, *shape], in the order of `parts`.

        The optimizer's fp32 masters where they are here; otherwise the parameters, or under ZeRO-3 the own slot.
        Rounding noise of a bf16 weight does not compress.
        """
        return [self._source(index, part) for index, part in enumerate(self.parts)]

    def _source(self, index: int, part: PacketPart) -> Tensor:
        parameters = [dict(expert.named_parameters())[part.name] for expert in self.experts]
        held: list[Tensor] = list(parameters)
        if parameters[0].dtype != torch.float32:  # otherwise a master holds no more
            masters = [self.encoding.master_of(parameter) for parameter in parameters]
            held = [master for master in masters if master is not None]
        if len(held) < len(parameters) or (held[0] is parameters[0] and self.is_partitioned):
            held = [self.weight_parts(self.own_slot)[index]] if self.is_partitioned else [*parameters]
        shaped = [one.detach().reshape(-1, *part.shape) for one in held]
        return shaped[0] if len(shaped) == 1 else torch.cat(shaped)

    def check_trainability(self) -> None:
        """Raise UnsupportedError where a parameter was unfrozen since the blocks were laid out."""
        if all(block.is_trainable for block in self.blocks):
            return
        for expert_idx, expert in enumerate(self.experts):
            for name, parameter in expert.named_parameters():
                if parameter.requires_grad and name not in self.trainable_names:
                    raise UnsupportedError(
                        f"{self.layer}: a frozen parameter of local expert {expert_idx} became trainable; "
                        f"call ds_hybridep.detach(engine) before and ds_hybridep.attach(engine) after that"
                    )

    # -- gradients of the replicas -------------------------------------------------------------------------------

    def add_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Add one backward's gradients of all replicas to the fp32 sums.

        gradients: in the order of `replica_slots`, then of `experts`, then `trainable_names`.
        """
        iterator = iter(gradients)
        for slot in self.replica_slots:
            is_first = slot not in self._sums
            if is_first:
                self._make_sums(slot)
            for part in self._by_module(self.sum_parts(slot)):
                if is_first:
                    part.copy_(next(iterator))
                else:
                    part.add_(next(iterator))

    def _make_sums(self, slot: int) -> None:
        """Memory for a slot's sums; what it holds is undefined."""
        self._sums[slot] = [
            torch.empty(self.num_local * block.num_elements, device=self.device)
            for block in self.blocks
            if block.is_trainable
        ]

    def prepare_return(self) -> None:
        """Have what a return of gradients needs: sums for what comes back, and the senders."""
        self._make_sums(self.own_slot)
        for sums in self._sums[self.own_slot]:
            sums.zero_()
        self.make_encoders()

    def take_returned(self) -> list[Tensor]:
        """What came back for the owned experts, fp32, by `experts` and `trainable_names`; there are no sums then."""
        returned = self._by_module(self.sum_parts(self.own_slot))
        self.clear_sums()
        return returned

    def _by_module(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if self.is_grouped:
            return list(parts)
        return [part[module_idx] for module_idx in range(len(self.experts)) for part in parts]

    def clear_sums(self, *, is_in_use: bool = False) -> None:
        """Forget all partial gradients; is_in_use: a return that is under way goes on, with zeros."""
        if not is_in_use:
            self._sums = {}
        for sums in (one for slot in self._sums.values() for one in slot):
            sums.zero_()

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """On the device."""
        weights = sum(tensor.untyped_storage().nbytes() for tensor in self.weights)
        sums = sum(tensor.nbytes for slot in self._sums.values() for tensor in slot)
        return weights + sums + (self.feedback.num_bytes(self.weights)[0] if self.feedback is not None else 0)

    @property
    def num_host_bytes(self) -> int:
        return 0 if self.feedback is None else self.feedback.num_bytes(self.weights)[1]

    @property
    def sends_own_slot(self) -> bool:
        """True where a level takes weights of the own slot as they are, rather than encoded."""
        feedback = self.feedback
        return feedback is None or any(
            stage.weights is not None and stage.weights.has_equal_lengths
            if stage.level in feedback.patches
            else stage.level not in feedback.mirror_names
            for stage in self.stages
        )

    def make_encoders(self) -> None:
        """Have the senders of all gradients that leave here; otherwise each is made when it is first asked for."""
        if self.feedback is not None:
            for stage in self.stages:
                for peer in stage.peers:
                    for slot in peer.receives:
                        self.feedback.encoder(stage.level, slot)

    def release(self) -> None:
        self._lasting, self._own, self._weights, self._views = [], [], {}, {}
        self._sums, self.feedback = {}, None

    def expert_ids(self, slot: int) -> range:
        owner = self.partition.group_ranks.index(self.domain_ranks[slot])
        return range(owner * self.num_local, (owner + 1) * self.num_local)


def _feedback_of(replicas: Replicas, changes: StepChanges) -> Feedback | None:
    """None where everything travels as it is, or nothing does but at the start because all is frozen."""
    levels = [stage.level for stage in replicas.stages]
    weights, gradients = replicas.encoding.weight_codecs, replicas.encoding.gradient_codecs
    if not replicas.parts or not any(weights[level] or gradients[level] for level in levels):
        return None
    kept_in = residual_dtype(block.dtype for block in replicas.blocks if block.is_trainable)
    parts = [replicas.parts] * len(replicas.domain_ranks)
    home = Home(replicas.device, replicas.encoding.is_on_host)
    feedback = Feedback(parts, gradients, home, changes, residuals=kept_in)
    for level in levels:
        codec = weights[level]
        if isinstance(codec, Patch):
            known = next(iter(feedback.patches.values()), None)
            feedback.patches[level] = known or PatchSender(codec, _sent(replicas, home), home=home)
        elif codec is not None:
            name = feedback.mirror_names[level] = codec.settings()
            if name not in feedback.mirrors:
                feedback.mirrors[name] = Mirror(MessageLayout(codec, replicas.parts), home)
    for slot in replicas.replica_slots:
        codec = weights[replicas.level_between(replicas.own_slot, slot)]
        if isinstance(codec, Patch):
            feedback.replicas[slot] = PatchReplica(codec, replicas.values(slot, trainable_only=True))
        elif codec is not None:
            feedback.replicas[slot] = Replica(MessageLayout(codec, replicas.parts), replicas.weight_parts(slot), home)
    return feedback


def _sent(replicas: Replicas, home: Home) -> list[Tensor]:
    """What patches say the change of: the own slot, or memory of the host."""
    if not home.is_host:
        return replicas.values(replicas.own_slot, trainable_only=True)
    blocks = [block for block in replicas.blocks if block.is_trainable]
    return [home.zeros(replicas.num_local * block.num_elements, dtype=block.dtype) for block in blocks]


class WeightShipment(Gather):
    """One gather of a layer's weights.

    An exact one ships every parameter as it is, frozen ones too, and begins the mirrors anew.  Otherwise trainable
    parameters go, as the codec of the slowest level between owner and replica has it.
    """

    def __init__(self, replicas: Replicas, *, is_exact: bool) -> None:
        self._messages: dict[int, list[Tensor]] = {}
        purpose = Purpose("expert_weights", "shipping of expert weights", replicas.layer)
        super().__init__(replicas, purpose, self._messages, is_exact=is_exact)
        self._replicas = replicas

    def load(self) -> None:
        """Take the owned experts' weights as they are now, and encode them.  Comes before the first `advance`."""
        replicas, feedback = self._replicas, self._replicas.feedback
        senders = [] if feedback is None else list(dict.fromkeys(feedback.patches.values()))  # one or none
        is_sent = self._is_exact or replicas.sends_own_slot
        # In the current stream: under ZeRO-3 DeepSpeed gathers parameters for that.
        if senders and not self._is_exact and not replicas.encoding.is_on_host:
            weights = replicas.own_weights()  # encoding brings the own slot up to them
        elif is_sent or senders or replicas.is_partitioned:
            replicas.stage(trainable_only=not self._is_exact)
            weights = replicas.values(replicas.own_slot, trainable_only=True)
        if feedback is None or not (feedback.mirrors or senders):
            return
        streams = replicas.streams
        with nullcontext() if streams is None else streams.aside(), feedback.counters.timing("encode_s"):
            if self._is_exact:
                for mirror in feedback.mirrors.values():
                    mirror.assign(replicas.weight_parts(replicas.own_slot))
                for sender in senders:
                    sender.assign(weights)
                return
            for sender in senders:
                self._messages.update(dict.fromkeys(feedback.patches, sender.encode(weights)))
            sources = replicas.source_weights() if feedback.mirrors else []
            encoded = {name: [mirror.encode(sources)] for name, mirror in feedback.mirrors.items()}
            self._messages.update({level: encoded[name] for level, name in feedback.mirror_names.items()})
        if not is_sent:
            replicas.unstage()
