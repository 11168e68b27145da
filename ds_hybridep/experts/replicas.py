# SPDX-License-Identifier: Apache-2.0
"""Working copies of a domain's experts for one layer, and their gradients until these return to the owners.

    weights  [M, e * n]  slot i = the experts of the domain rank with offset index i (own slot: a staging copy)
    sums     [M, e * n]  fp32 partial gradients since the last return (own slot: what came back)

One tensor for each block of `experts.layout`.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import Patch
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.layout import ParameterSlice, lay_out, num_local_experts
from ds_hybridep.experts.partitioned import gathered
from ds_hybridep.plan.partition import Partition
from ds_hybridep.sync.feedback import Encoding, Feedback, StepChanges
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
        is_transient: weights have no memory until `TransientWeights` gives them some, and sums only while some wait to
            return; weights must travel as they are.
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
        self.lane = 0  # from `MigrationManager`
        self.partition, self.stages, self.encoding = partition, stages, encoding
        self._is_transient = is_transient
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
        new = torch.empty if is_transient else torch.zeros
        slots = range(len(self.domain_ranks))
        self.weights = [
            new(len(slots), self.num_local * block.num_elements, dtype=block.dtype, device=sample.device)
            for block in self.blocks
        ]
        self.weight_parts = [self._trainable_parts(self.weights, slot) for slot in slots]
        self.weights_by_name = [self._by_name(self.values(slot, trainable_only=False)) for slot in slots]
        # 3. Sums of gradients.
        self.gradient_sums: list[Tensor | None] = []
        self.sum_parts: list[list[Tensor]] = []
        if is_transient:
            for weights in self.weights:
                weights.untyped_storage().resize_(0)  # views cannot be made without memory, but stay
        else:
            self._make_sums()
        # 4. What lossy codecs keep.
        self.feedback = _feedback_of(self, changes)

    def _make_sums(self) -> None:
        self.gradient_sums = [
            torch.zeros(weights.shape, dtype=torch.float32, device=weights.device) if block.is_trainable else None
            for block, weights in zip(self.blocks, self.weights, strict=True)
        ]
        self.sum_parts = [self._trainable_parts(self.gradient_sums, slot) for slot in range(len(self.domain_ranks))]

    def level_between(self, slot: int, other: int) -> int:
        """The slowest level between the ranks of two slots."""
        level = self.partition.cluster.level_between(self.domain_ranks[slot], self.domain_ranks[other])
        assert level is not None, f"{self.layer}: slots {slot} and {other} are of one rank"
        return level

    # -- views ---------------------------------------------------------------------------------------------------

    def _part(self, tensor: Tensor, piece: ParameterSlice) -> Tensor:
        """View [e, *shape] of one parameter of a slot's experts, in the slot's row of `weights` or `sums`."""
        start, stop = self.num_local * piece.start, self.num_local * piece.stop
        return tensor[start:stop].view(self.num_local, *piece.shape)

    def _trainable_parts(self, tensors: Sequence[Tensor | None], slot: int) -> list[Tensor]:
        return [
            self._part(tensor[slot], piece)
            for block, tensor in zip(self.blocks, tensors, strict=True)
            if block.is_trainable and tensor is not None
            for piece in block.slices
        ]

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
        """Weights of a slot, [e * n] for each block."""
        pairs = zip(self.blocks, self.weights, strict=True)
        return [weights[slot] for block, weights in pairs if block.is_trainable or not trainable_only]

    def sums(self, slot: int) -> list[tuple[Tensor, torch.dtype]]:
        """Partial gradients of a slot, fp32 [e * n] for each trainable block, and the type in which they travel."""
        pairs = zip(self.blocks, self.gradient_sums, strict=True)
        return [(sums[slot], block.dtype) for block, sums in pairs if sums is not None]

    def loss_scale(self) -> float:
        return self.encoding.loss_scale()

    def trainable_weights(self, slots: Iterable[int]) -> list[Tensor]:
        """Trainable weights as they are held, by slot, `experts` and `trainable_names`."""
        return [
            weights[name] for slot in slots for weights in self.weights_by_name[slot] for name in self.trainable_names
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

    def load_own_weights(self, *, trainable_only: bool) -> None:
        """Copy the owned experts' parameters into the own slot.

        Under ZeRO-3 the ranks that share them must call together.
        """
        self._load(self.weights_by_name[self.own_slot], trainable_only=trainable_only)

    def own_weights(self) -> list[Tensor]:
        """The owned experts' trainable parameters as `values` has those of a slot; the own slot stays as it is."""
        values = [torch.empty_like(sent) for sent in self.values(self.own_slot, trainable_only=True)]
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

        The optimizer's fp32 masters where they are here; otherwise the staging copy.  Rounding noise of a bf16 weight
        does not compress.
        """
        staged = self.weight_parts[self.own_slot]
        return [self._masters(part, view) for part, view in zip(self.parts, staged, strict=True)]

    def _masters(self, part: PacketPart, staged: Tensor) -> Tensor:
        if staged.dtype == torch.float32:
            return staged  # a master holds no more
        parameters = [dict(expert.named_parameters())[part.name] for expert in self.experts]
        masters = [self.encoding.master_of(parameter) for parameter in parameters]
        held = [master.detach().reshape(-1, *part.shape) for master in masters if master is not None]
        return torch.cat(held) if len(held) == len(masters) else staged

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
        if not self.gradient_sums:
            self._make_sums()
        iterator = iter(gradients)
        for slot in self.replica_slots:
            for part in self._by_module(self.sum_parts[slot]):
                part.add_(next(iterator))

    def take_returned(self) -> list[Tensor]:
        """What came back for the owned experts, fp32, by `experts` and `trainable_names`; clears all sums."""
        returned = [part.clone() for part in self._by_module(self.sum_parts[self.own_slot])]
        self.clear_sums()
        return returned

    def _by_module(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if self.is_grouped:
            return list(parts)
        return [part[module_idx] for module_idx in range(len(self.experts)) for part in parts]

    def clear_sums(self) -> None:
        """Forget all partial gradients."""
        if self._is_transient:
            self.gradient_sums, self.sum_parts = [], []
        for sums in self.gradient_sums:
            if sums is not None:
                sums.zero_()

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        weights = sum(tensor.untyped_storage().nbytes() for tensor in self.weights)
        sums = sum(tensor.nbytes for tensor in self.gradient_sums if tensor is not None)
        return weights + sums + (self.feedback.num_bytes(self.weights) if self.feedback is not None else 0)

    def make_encoders(self) -> None:
        """Have the senders of all gradients that leave here; otherwise each is made when it is first asked for."""
        if self.feedback is not None:
            for stage in self.stages:
                for peer in stage.peers:
                    for slot in peer.receives:
                        self.feedback.encoder(stage.level, slot)

    def release(self) -> None:
        self.weights, self.gradient_sums, self.weight_parts, self.sum_parts, self.weights_by_name = [], [], [], [], []
        self.feedback = None

    def expert_ids(self, slot: int) -> range:
        owner = self.partition.group_ranks.index(self.domain_ranks[slot])
        return range(owner * self.num_local, (owner + 1) * self.num_local)


def _feedback_of(replicas: Replicas, changes: StepChanges) -> Feedback | None:
    """None where everything travels as it is, or nothing does but at the start because all is frozen."""
    levels = [stage.level for stage in replicas.stages]
    weights, gradients = replicas.encoding.weight_codecs, replicas.encoding.gradient_codecs
    if not replicas.parts or not any(weights[level] or gradients[level] for level in levels):
        return None
    feedback = Feedback([replicas.parts] * len(replicas.domain_ranks), gradients, replicas.device, changes)
    for level in levels:
        codec = weights[level]
        if isinstance(codec, Patch):
            known = next(iter(feedback.patches.values()), None)
            feedback.patches[level] = known or PatchSender(
                codec, replicas.values(replicas.own_slot, trainable_only=True)
            )
        elif codec is not None:
            name = feedback.mirror_names[level] = codec.settings()
            if name not in feedback.mirrors:
                feedback.mirrors[name] = Mirror(MessageLayout(codec, replicas.parts), replicas.device)
    for slot in replicas.replica_slots:
        codec = weights[replicas.level_between(replicas.own_slot, slot)]
        if isinstance(codec, Patch):
            feedback.replicas[slot] = PatchReplica(codec, replicas.values(slot, trainable_only=True))
        elif codec is not None:
            feedback.replicas[slot] = Replica(MessageLayout(codec, replicas.parts), replicas.weight_parts[slot])
    return feedback


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
        # In the current stream: under ZeRO-3 DeepSpeed gathers parameters for that.
        patches = {} if feedback is None or self._is_exact else feedback.patches
        weights = replicas.own_weights() if patches else []
        if not patches:
            replicas.load_own_weights(trainable_only=not self._is_exact)
        if feedback is None or not (feedback.mirrors or patches):
            return
        streams = replicas.streams
        with nullcontext() if streams is None else streams.aside(), feedback.counters.timing("encode_s"):
            if self._is_exact:
                for mirror in feedback.mirrors.values():
                    mirror.assign(replicas.weight_parts[replicas.own_slot])
                return
            for level, sender in patches.items():  # all are one
                if not self._messages:
                    messages = sender.encode(weights)  # brings the own slot up to them
                self._messages[level] = messages
            sources = replicas.source_weights() if feedback.mirrors else []
            encoded = {name: [mirror.encode(sources)] for name, mirror in feedback.mirrors.items()}
            self._messages.update({level: encoded[name] for level, name in feedback.mirror_names.items()})
