# SPDX-License-Identifier: Apache-2.0
"""An engine as the rest of this package sees it: one class for each kind of ZeRO, which says what its optimizer holds.

    class         DeepSpeed's optimizer                   averaged gradients, before a step      weights it changes
    WholeView     torch's, FP16_Optimizer (ZeRO 0)        `.grad`, whole on every rank           whole
    Bf16View      BF16_Optimizer (ZeRO 1, fp32 sums)      flat buffers, whole on every rank      own partition, fp32
    Zero12View    DeepSpeedZeroOptimizer (ZeRO 1, 2)      slices of the own partition            own partition, fp32
    Zero3View     DeepSpeedZeroOptimizer_Stage3           own part of each parameter             own parts, fp32

With optimizer offload, averaged gradients are `.grad` of the fp32 weights on the host.  `view_of` returns a view.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups
from torch import Tensor

from ds_hybridep.errors import UnsupportedError
from ds_hybridep.geometry.slots import Span, cut, whole
from ds_hybridep.sites.packets import OwnedSlice
from ds_hybridep.transport.inside import share
from ds_hybridep.transport.job import group_ranks, own_rank

Put = Callable[[], None]


def view_of(engine: Any) -> "EngineView":
    """Return the view of an engine.  engine: may be a weak proxy.

    An engine whose optimizer is not made yet is seen as under ZeRO 0 or 3.
    """
    optimizer = getattr(engine, "optimizer", None)
    if engine.zero_optimization_stage() == 3:
        return Zero3View(engine)
    if hasattr(optimizer, "fp32_groups_gradient_flat_partition"):
        return Bf16View(engine)
    return Zero12View(engine) if hasattr(optimizer, "averaged_gradients") else WholeView(engine)


def is_boundary(engine: Any) -> bool:
    """Return True if the running backward, inside which it is called, is the last before the optimizer step.

    Without managed accumulation nobody knows, so every backward returns gradients.  Under no_sync the caller says that
    more backwards will follow.
    """
    if engine.inside_no_sync_ctxt:
        return False
    return bool(not engine.managed_gradient_accumulation() or engine.is_gradient_accumulation_boundary())


def loss_scale(engine: Any) -> float:
    """Return the factor that gradients are multiplied by now."""
    scale = getattr(engine.optimizer, "loss_scale", None)  # FP16_Optimizer has None in bf16
    return 1.0 if scale is None else float(scale)


def master_of(engine: Any, parameter: Any) -> Tensor | None:
    """Return the whole fp32 copy of a parameter that the optimizer updates, on the parameter's device.

    None if this rank has only a part of it, or none.
    """
    return view_of(engine).master_of(parameter)


@dataclass(frozen=True)
class FlatGroup:
    """The parameters of one parameter group, which the ranks of `group` hold together.

    flat: all of them and padding, one after the other.
    own: this rank's part of `flat`.
    parameters: in their order in `flat`.
    """

    flat: Tensor
    own: Tensor
    group: Any
    parameters: Sequence[Any]


class EngineView(ABC):
    """What the rest of this package asks of an engine and its optimizer."""

    partitions_parameters = False  # a rank holds a part of each parameter between its uses

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer; None before it is made."""
        return getattr(self.engine, "optimizer", None)

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the model's parameters, by id."""
        return {id(parameter): name for name, parameter in self.engine.module.named_parameters()}

    # -- gradients that are dropped ---------------------------------------------------------------------------------

    @property
    def keeps_in_grad(self) -> bool:
        """True if the gradients of a step stay in `.grad` until then, so that whoever clears `.grad` drops them."""
        return False

    def drops_gradients(self, *, by_optimizer: bool, sets_to_none: bool) -> bool:
        """Return True if a call of zero_grad drops the gradients that wait for the step.

        by_optimizer: it is the optimizer's, not the engine's, which only clears `.grad`.
        sets_to_none: what it does to `.grad`.
        """
        return by_optimizer  # gradients are kept apart from `.grad`

    def holds_averaged(self) -> bool:
        """Return True if averaged gradients wait for the step apart from `.grad`, so that no zero_grad drops them."""
        return False

    def replaces_gradients(self, *, is_boundary: bool) -> bool:
        """Return True if the backward that begins replaces all gradients since the last optimizer step.

        is_boundary: it is the last before the optimizer step.

        Raises UnsupportedError if it replaces gradients of some parameter groups and adds to those of others.
        """
        return False  # gradients are added up until zero_grad

    # -- dense parameters -------------------------------------------------------------------------------------------

    @property
    def flats(self) -> list[Tensor] | None:
        """The list of flat parameters that DeepSpeed gathers after a step, one for each parameter group; or None."""
        return None

    def flat_groups(self) -> list[FlatGroup]:
        """Return the parameter groups behind `flats`."""
        return []

    @property
    def flat_gradients(self) -> Sequence[Any]:
        """Gradients that the engine sums as flat buffers, each laid out as the group of `flats`."""
        return ()

    def master_of(self, parameter: Any) -> Tensor | None:
        """Return the parameter's whole fp32 copy, as the function of this name does."""
        return None

    # -- what this rank owns, for sites -----------------------------------------------------------------------------

    @abstractmethod
    def trained(self) -> list[Any]:
        """Return the parameters that the optimizer was given."""

    @abstractmethod
    def slices(self) -> tuple[list[OwnedSlice], Put]:
        """Return the averaged gradients that this rank owns.

        Returns them, and the function that puts changed ones back; all ranks of the site must call that.
        """

    @abstractmethod
    def make_zeros(self) -> None:
        """Make averaged gradients of zeros, as after a backward without gradients."""

    def master_slices(self) -> tuple[list[OwnedSlice], Put]:
        """Return the fp32 weights that this rank owns, and the function that copies changed ones to the parameters."""
        raise UnsupportedError(
            "hybridep.sites.every above 1 needs ZeRO stage 1 or 2, where each rank owns a part of the weights; set "
            "zero_optimization.stage, or every to 1"
        )

    @abstractmethod
    def masters(self) -> list[Tensor]:
        """Return the tensors that the user's optimizer changes, in an order that is the same on all sites."""

    def scalers(self) -> list[Any]:
        """Return the objects that hold the loss scale: ZeRO's and those of FP16_Optimizer."""
        found = [getattr(self.optimizer, name, None) for name in ("loss_scaler", "loss_scale_config")]
        return [one for one in found if one is not None and hasattr(one, "__dict__")]

    def refresh_masters(self) -> None:
        """Copy parameters that were loaded to their fp32 copies, if there are any."""
        if (refresh := getattr(self.optimizer, "refresh_fp32_params", None)) is not None:
            refresh()

    def gather_weights(self) -> None:
        """Bring up to date what was made of the parameters' partitions, which have changed; all ranks must call."""
        return  # most optimizers hold whole parameters

    def _slice(self, spans: Sequence[Span], values: Sequence[Tensor], parameters: Sequence[Any]) -> OwnedSlice:
        return OwnedSlice(tuple(spans), tuple(values), is_moe_param(parameters[0]))


class WholeView(EngineView):
    """ZeRO 0: all ranks hold all gradients and weights.  Each owns an even share of the gradients of its group."""

    @property
    def keeps_in_grad(self) -> bool:
        return True

    def drops_gradients(self, *, by_optimizer: bool, sets_to_none: bool) -> bool:
        return True

    def trained(self) -> list[Any]:
        given = getattr(self.optimizer, "fp16_groups", None)  # of FP16_Optimizer
        return [parameter for group in given or self._groups() for parameter in group]

    def _groups(self) -> list[Any]:
        return [group["params"] for group in self.engine.basic_optimizer.param_groups]

    def make_zeros(self) -> None:
        for parameter in self.engine.module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def slices(self) -> tuple[list[OwnedSlice], Put]:
        slices, shared = [], []
        for group, parameters in _by_group(self.engine):
            ranks = group_ranks(group)
            rank, spans = ranks.index(own_rank()), []
            for parameter in parameters:
                spans.append(whole(self.names[id(parameter)], parameter.shape))
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            values = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
            size = -(-len(values) // len(ranks))
            flat = torch.nn.functional.pad(values, (0, size * len(ranks) - len(values)))
            own = flat[rank * size : (rank + 1) * size]
            if (share_of_it := _unpadded(own, spans, rank)) is not None:
                slices.append(self._slice(*share_of_it, parameters))
            shared.append((flat, own, group, parameters))

        def put() -> None:
            for flat, own, group, parameters in shared:
                share(flat, own, group)
                start = 0
                for parameter in parameters:
                    parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                    start += parameter.numel()

        return slices, put

    def masters(self) -> list[Tensor]:
        for name in ("fp32_groups_flat", "fp32_groups"):  # of FP16_Optimizer and FP16_UnfusedOptimizer
            if (found := getattr(self.optimizer, name, None)) is not None:
                return [tensor for item in found for tensor in (item if isinstance(item, list) else [item])]
        return [parameter for group in self._groups() for parameter in group]


class Bf16View(EngineView):
    """BF16_Optimizer: gradients are flat fp32 buffers, whole on all ranks; each owns its partition of them."""

    @property
    def flats(self) -> list[Tensor]:
        found: list[Tensor] = self.optimizer.bf16_groups_flat
        return found

    def flat_groups(self) -> list[FlatGroup]:
        optimizer = self.optimizer
        return [
            FlatGroup(flat, partitions[group.rank()], group, parameters)
            for flat, partitions, group, parameters in zip(
                optimizer.bf16_groups_flat,
                optimizer.bf16_partitioned_groups,
                optimizer.real_dp_process_group,
                optimizer.bf16_groups,
                strict=True,
            )
        ]

    @property
    def flat_gradients(self) -> Sequence[Any]:
        found: Sequence[Any] = self.optimizer.fp32_groups_gradients_flat
        return found

    def master_of(self, parameter: Any) -> Tensor | None:
        return _mapped_master(parameter)

    def trained(self) -> list[Any]:
        return [parameter for group in self.optimizer.bf16_groups for parameter in group]

    def make_zeros(self) -> None:
        pass  # the buffers are always there, and what comes from other sites replaces what they hold

    def slices(self) -> tuple[list[OwnedSlice], Put]:
        optimizer = self.optimizer
        flats, partitions = optimizer.fp32_groups_gradients_flat, optimizer.fp32_groups_gradient_flat_partition

        def put() -> None:
            for flat, own, group in zip(flats, partitions, optimizer.real_dp_process_group, strict=True):
                share(flat, own, group)
            # Another site may have gradients where this one has none: norms and clipping must see them all.
            optimizer.fp32_groups_has_gradients = [[True] * len(group) for group in optimizer.bf16_groups]

        return self._partitions(partitions), put

    def master_slices(self) -> tuple[list[OwnedSlice], Put]:
        return self._partitions(self.optimizer.fp32_groups_flat_partition), self.optimizer.update_lp_params

    def _partitions(self, partitions: list[Tensor]) -> list[OwnedSlice]:
        """Return this rank's partitions of flat buffers, one for each parameter group, as slices."""
        optimizer, slices = self.optimizer, []
        columns = partitions, optimizer.bf16_groups, optimizer.real_dp_process_group
        for own, parameters, group in zip(*columns, strict=True):
            spans = [whole(self.names[id(parameter)], parameter.shape) for parameter in parameters]
            if (part := _unpadded(own.detach(), spans, group_ranks(group).index(own_rank()))) is not None:
                slices.append(self._slice(*part, parameters))
        return slices

    def masters(self) -> list[Tensor]:
        return list(self.optimizer.fp32_groups_flat_partition)


class Zero12View(EngineView):
    """ZeRO 1 and 2: the last backward before a step reduces gradients into `averaged_gradients`.

    Without that step, the next such backward fills `averaged_gradients` anew; it adds to them if they are fp32 and
    parameters are not.  With offload they are on the host; there ZeRO 2 adds if the step had several backwards.
    """

    @property
    def keeps_in_grad(self) -> bool:
        return not self.optimizer.partition_gradients and not self._accumulates_apart

    @property
    def _accumulates_apart(self) -> bool:
        """True under ZeRO 1 if gradients are added up in another type than that of `.grad`, and so elsewhere."""
        return bool(getattr(self.optimizer, "use_grad_accum_attribute", False))

    def drops_gradients(self, *, by_optimizer: bool, sets_to_none: bool) -> bool:
        if self.optimizer.partition_gradients:  # ZeRO 2 keeps what it has reduced, whoever calls
            return False
        # With False, ZeRO 1 sets `.grad` to zero and keeps what it has accumulated elsewhere.
        return not self._accumulates_apart or (by_optimizer and sets_to_none)

    @property
    def is_on_host(self) -> bool:
        """True with optimizer offload: gradients are copied to the host as they are reduced."""
        return bool(self.optimizer.cpu_offload)

    def holds_averaged(self) -> bool:
        if self.is_on_host:
            return bool(self.optimizer.norm_for_param_grads)  # noted with each gradient; a step drops them
        return _are_there(self.optimizer.averaged_gradients)

    def replaces_gradients(self, *, is_boundary: bool) -> bool:
        if self.is_on_host:
            return is_boundary and self.holds_averaged() and self._replaces_on_host()
        averaged = self.optimizer.averaged_gradients or {}
        # After a step the table still has an entry for each group: None.
        kept = [group for group in averaged.values() if group is not None] if is_boundary else []
        adds = {getattr(group, "flat_partition", None) is not None for group in kept}
        if len(adds) == 2:
            raise UnsupportedError(
                f"rank {self.engine.global_rank}: engine.step() was left out after the last backward of a step, so "
                f"DeepSpeed drops the gradients of some parameter groups (with Muon) and keeps those of others, which "
                f"codecs of gradients cannot follow; call engine.step() after it, or set data_types.grad_accum_dtype "
                f"to the type of the parameters"
            )
        return adds == {False}

    def _replaces_on_host(self) -> bool:
        """Return True if a backward replaces gradients that the last one of a step has copied to the host."""
        optimizer = self.optimizer
        are_added = {self._is_compact(index) for index in range(len(optimizer.bit16_groups))}
        if optimizer.micro_step_id > 0 or are_added == {True}:
            return False
        if len(are_added) == 2 or optimizer.accumulated_grads_in_cpu:
            raise UnsupportedError(
                f"rank {self.engine.global_rank}: engine.step() was left out after the last backward of a step, and "
                f"with zero_optimization.offload_optimizer DeepSpeed then adds gradients of an earlier step, which "
                f"codecs of gradients cannot follow; call engine.step() after it, or leave out offload_optimizer"
            )
        return True

    def _is_compact(self, index: int) -> bool:
        """Return True if a parameter group has one buffer for the gradients of its partition, which are added up."""
        find = getattr(self.optimizer, "_use_compact_grad_partition_buffer", None)  # older DeepSpeeds have none
        return find is not None and bool(find(index))

    def local_squares(self) -> tuple[Tensor, list[Tensor]]:
        """Return whether averaged gradients of this rank have overflowed, and their squared norms by parameter group.

        A flag of shape [], double, on the host with offload, and numbers of shape [], fp32.
        """
        optimizer = self.optimizer
        if self.is_on_host:  # DeepSpeed has noted a flag and norms while it copied gradients to the host
            flag = torch.tensor(float(optimizer.local_overflow), dtype=torch.double)
            return flag, [self._noted_square(parameters) for parameters in optimizer.params_in_partition]
        flag = optimizer.has_overflow_partitioned_grads_serial().reshape(()).double()
        averaged = (optimizer.averaged_gradients[index] for index in range(len(optimizer.bit16_groups)))
        return flag, [_square(gradients) for gradients in averaged]

    def _noted_square(self, parameters: Sequence[Any]) -> Tensor:
        """Return the squared norm of gradients of `parameters` that went to the host; some may have none."""
        noted = self.optimizer.norm_for_param_grads
        ids = map(self.optimizer.get_param_id, parameters)
        norms = [noted[param_id].double() for param_id in ids if param_id in noted]
        return torch.stack(norms).square().sum().float() if norms else torch.zeros(())

    @property
    def flats(self) -> list[Tensor]:
        found: list[Tensor] = self.optimizer.bit16_groups_flat
        return found

    def flat_groups(self) -> list[FlatGroup]:
        optimizer = self.optimizer
        return [
            FlatGroup(flat, partitions[group.rank()], group, parameters)
            for flat, partitions, group, parameters in zip(
                optimizer.bit16_groups_flat,
                optimizer.parallel_partitioned_bit16_groups,
                optimizer.real_dp_process_group,
                optimizer.round_robin_bit16_groups,
                strict=True,
            )
        ]

    def master_of(self, parameter: Any) -> Tensor | None:
        return _mapped_master(parameter)

    def trained(self) -> list[Any]:
        return [parameter for group in self.optimizer.bit16_groups for parameter in group]

    def make_zeros(self) -> None:
        optimizer = self.optimizer
        for index, parameters in enumerate(optimizer.params_in_partition):
            optimizer.averaged_gradients[index] = self._zeros(index, parameters)

    def _zeros(self, index: int, parameters: list[Any]) -> Any:
        optimizer = self.optimizer
        if self._is_compact(index):
            return optimizer._build_compact_grad_partition_buffer(index)
        dtype = optimizer.gradient_accumulation_dtype
        optimizer.all_grad_tensors[index] = [torch.zeros_like(parameter, dtype=dtype) for parameter in parameters]
        device = parameters[0].device if parameters else optimizer.device
        zeros = optimizer.get_flat_partition(
            parameters, optimizer.first_offset[index], optimizer.partition_size[index], dtype=dtype, device=device,
            param_group_idx=index, return_tensor_list=True,
        )  # fmt: skip
        optimizer.all_grad_tensors[index] = None
        return zeros

    def slices(self) -> tuple[list[OwnedSlice], Put]:
        optimizer, slices = self.optimizer, []
        for index, parameters in enumerate(optimizer.params_in_partition):
            starts = optimizer.grad_start_offset[index][self._partition(index)]
            tensors = [t for t in optimizer.averaged_gradients[index] or () if not getattr(t, "_zero_padding", False)]
            spans, values = [], []
            for parameter, tensor in zip(parameters, tensors, strict=False):  # padding follows, marked or not
                start = int(starts[optimizer.get_param_id(parameter)])
                spans.append(Span(self.names[id(parameter)], tuple(parameter.shape), start, tensor.numel()))
                values.append(tensor)
            if spans:
                slices.append(self._slice(spans, values, parameters))
        return slices, _nothing

    def master_slices(self) -> tuple[list[OwnedSlice], Put]:
        optimizer, slices = self.optimizer, []
        for index, parameters in enumerate(optimizer.params_in_partition):
            partition = self._partition(index)
            flat, spans, values = optimizer.single_partition_of_fp32_groups[index].detach(), [], []
            for parameter in parameters:
                param_id = optimizer.get_param_id(parameter)
                start = int(optimizer.grad_start_offset[index][partition][param_id])
                offset = int(optimizer.grad_partition_insertion_offset[index][partition][param_id])
                count = min(parameter.numel() - start, len(flat) - offset)
                spans.append(Span(self.names[id(parameter)], tuple(parameter.shape), start, count))
                values.append(flat[offset : offset + count])
            if spans:
                slices.append(self._slice(spans, values, parameters))
        return slices, optimizer.update_lp_params

    def _partition(self, index: int) -> int:
        """Return this rank's partition of a parameter group."""
        return group_ranks(self.optimizer.real_dp_process_group[index]).index(own_rank())

    def reduced(self, index: int, parameter: Any, span: Span) -> Tensor:
        """Return what `averaged_gradients` will hold of a parameter that has just been reduced, flat.

        index: of its parameter group.  Only in the last micro-step of a step.
        """
        optimizer = self.optimizer
        if self._is_compact(index):
            param_id, partition = optimizer.get_param_id(parameter), self._partition(index)
            own: Tensor = optimizer._get_compact_grad_partition_slice(index, partition, param_id, span.num_elements)
            return own
        gradient = optimizer.get_param_gradient_attribute(parameter)
        if (earlier := optimizer.all_grad_tensors.get(index)) is not None:  # ZeRO 2: of earlier micro-steps
            members = optimizer.params_in_partition[index]
            place = next(place for place, member in enumerate(members) if member is parameter)
            gradient = earlier[place].add(gradient)
        flat: Tensor = gradient.detach().reshape(-1)
        return flat[span.start : span.start + span.num_elements]

    def masters(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)


class Zero3View(EngineView):
    """ZeRO 3: a rank holds, and owns, its part of each parameter and of its gradient.

    The first backward after a step, or after the optimizer's zero_grad, fills the gradients anew.
    """

    partitions_parameters = True

    def holds_averaged(self) -> bool:
        if getattr(self.optimizer, "offload_optimizer", False):
            return bool(self.optimizer.norm_for_param_grads)
        return _are_there(getattr(self.optimizer, "averaged_gradients", None))

    def replaces_gradients(self, *, is_boundary: bool) -> bool:
        return bool(self.optimizer.micro_step_id == 0)

    def master_of(self, parameter: Any) -> Tensor | None:
        optimizer = getattr(parameter, "_z3_optimizer", None)  # none before DeepSpeed makes it
        if optimizer is None or not parameter.requires_grad or parameter.partition_numel() != parameter.ds_numel:
            return None
        master: Tensor | None = optimizer.get_local_fp32_param(parameter)
        return master

    def trained(self) -> list[Any]:
        return [parameter for group in self.optimizer.fp16_groups for parameter in group]

    def make_zeros(self) -> None:
        optimizer = self.optimizer
        for index, parameters in enumerate(optimizer.fp16_groups):
            optimizer.averaged_gradients[index] = [
                torch.zeros_like(parameter.ds_tensor, dtype=optimizer.gradient_accumulation_dtype)
                for parameter in parameters
            ]

    def slices(self) -> tuple[list[OwnedSlice], Put]:
        optimizer, slices = self.optimizer, []
        for index, parameters in enumerate(optimizer.fp16_groups):
            rank, spans, values = optimizer._get_sub_group_partition_rank(index), [], []
            for parameter, tensor in zip(parameters, optimizer.averaged_gradients[index], strict=True):
                start = rank * tensor.numel()
                count = min(tensor.numel(), parameter.ds_numel - start)
                if count > 0:
                    spans.append(Span(self.names[id(parameter)], tuple(parameter.ds_shape), start, count))
                    values.append(tensor.view(-1)[:count])
            if spans:
                slices.append(self._slice(spans, values, parameters))
        return slices, _nothing

    def masters(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def gather_weights(self) -> None:
        self.optimizer._partition_all_parameters()
        if persistent := self.optimizer.persistent_parameters:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


def _nothing() -> None:
    """Put nothing back: slices are views of what the optimizer uses."""


def _are_there(averaged: Any) -> bool:
    return any(group is not None for group in (averaged or {}).values())  # after a step each entry is None


def _mapped_master(parameter: Any) -> Tensor | None:
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None or mapping.lp_fragment_address.numel != parameter.numel():
        return None
    fragment: Tensor = mapping.hp_fragment
    # With optimizer offload it is on the host.  It changes next in a step that waits for what is made of it now.
    return fragment.to(parameter.device, non_blocking=True)


def _unpadded(own: Tensor, spans: list[Span], rank: int) -> tuple[tuple[Span, ...], tuple[Tensor, ...]] | None:
    """Return the spans and values of `own`, part number `rank` of a flat buffer, without padding."""
    total, begin = sum(span.num_elements for span in spans), rank * own.numel()
    end = min(begin + own.numel(), total)
    if end <= begin:
        return None
    inside = cut(spans, [begin, end, total])[1] if begin else cut(spans, [end, total])[0]
    return inside, tuple(own[: end - begin].split([span.num_elements for span in inside]))


def _by_group(engine: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the trainable parameters of each group of ranks that hold the same ones, and that group first."""
    by_name: dict[str, list[Any]] = {}
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            by_name.setdefault(parameter.group_name if is_moe_param(parameter) else "", []).append(parameter)
    for name, parameters in by_name.items():
        yield groups._get_expert_data_parallel_group(name) if name else engine.seq_data_parallel_group, parameters


def _square(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return the squared norm of one parameter group's gradients on this rank, fp32."""
    found = [one for one in gradients if one is not None and not getattr(one, "_zero_padding", False)]
    norms = [torch.linalg.vector_norm(one.detach().double()) for one in found]
    return torch.stack(norms).square().sum().float() if norms else torch.zeros(())
