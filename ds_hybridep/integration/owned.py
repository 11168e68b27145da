# SPDX-License-Identifier: Apache-2.0
"""What one rank owns of a DeepSpeed engine: its averaged gradients, and its training state.

ZeRO 1, 2    `averaged_gradients`: slices of this rank's partition
ZeRO 3       the same, cut for each parameter
BF16         BF16_Optimizer sums whole gradients on all ranks: this rank's partition of them, shared afterwards
ZeRO 0       an even share of all gradients, shared afterwards
"""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
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

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Owned:
    """What this rank owns of the gradients of one engine whose optimizer exists.  engine: may be a weak proxy."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._names: dict[int, str] = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._kind = _kind_of(engine)
        if any(getattr(p, "use_muon", False) for p in engine.module.parameters()):
            raise UnsupportedError(
                "hybridep.sites: Muon changes gradients before sites can average them; choose another optimizer"
            )
        if any(id(parameter) not in self._names for parameter in _trained(engine)):
            raise UnsupportedError(
                "hybridep.sites: the optimizer has parameters that are not in the model, such as those of a learned "
                "loss, and sites exchange those of the model; make them a part of it"
            )

    def slices(self) -> tuple[list[OwnedSlice], Callable[[], None]]:
        """Return what this rank owns, and the function to call after it was changed on all ranks of the site."""
        return self._kind(self)

    def masters(self) -> tuple[list[OwnedSlice], Callable[[], None]]:
        """Return the optimizer's weights that this rank owns, and the function that hands changed ones on."""
        return _masters_of(self)

    @property
    def reduces_buckets(self) -> bool:
        """True under ZeRO 1 and 2, whose optimizer reduces gradients bucket by bucket."""
        return self._kind is _of_zero_12

    def name_of(self, parameter: Any) -> str:
        return self._names[id(parameter)]

    def reduced(self, group: int, parameter: Any, span: Span) -> Tensor:
        """Return what `averaged_gradients` will hold of a parameter that ZeRO 1 or 2 has just reduced, flat.

        group: parameter group.  Only in the last micro-step of a step.
        """
        optimizer = self._optimizer
        if optimizer._use_compact_grad_partition_buffer(group):
            partition = group_ranks(optimizer.real_dp_process_group[group]).index(own_rank())
            param_id = optimizer.get_param_id(parameter)
            found: Tensor = optimizer._get_compact_grad_partition_slice(group, partition, param_id, span.num_elements)
            return found
        gradient = optimizer.get_param_gradient_attribute(parameter)
        if (earlier := optimizer.all_grad_tensors.get(group)) is not None:  # ZeRO 2: of earlier micro-steps
            at = next(i for i, one in enumerate(optimizer.params_in_partition[group]) if one is parameter)
            gradient = earlier[at].add(gradient)
        flat: Tensor = gradient.detach().reshape(-1)
        return flat[span.start : span.start + span.num_elements]

    def make_zeros(self) -> None:
        """Make averaged gradients of zeros, as after a backward without gradients."""
        optimizer = self._optimizer
        if self._kind is _of_zero_12:
            for index, parameters in enumerate(optimizer.params_in_partition):
                optimizer.averaged_gradients[index] = _zeros_of_zero_12(optimizer, index, parameters)
        elif self._kind is _of_zero_3:
            for index, parameters in enumerate(optimizer.fp16_groups):
                optimizer.averaged_gradients[index] = [
                    torch.zeros_like(parameter.ds_tensor, dtype=optimizer.gradient_accumulation_dtype)
                    for parameter in parameters
                ]
        elif self._kind is _of_zero_0:
            for parameter in self._engine.module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def _zeros_of_zero_12(optimizer: Any, index: int, parameters: list[Any]) -> Any:
    if optimizer._use_compact_grad_partition_buffer(index):
        return optimizer._build_compact_grad_partition_buffer(index)
    dtype = optimizer.gradient_accumulation_dtype
    optimizer.all_grad_tensors[index] = [torch.zeros_like(parameter, dtype=dtype) for parameter in parameters]
    device = parameters[0].device if parameters else optimizer.device
    made = optimizer.get_flat_partition(
        parameters, optimizer.first_offset[index], optimizer.partition_size[index], dtype=dtype, device=device,
        param_group_idx=index, return_tensor_list=True,
    )  # fmt: skip
    optimizer.all_grad_tensors[index] = None
    return made


def _kind_of(engine: Any) -> Callable[[Owned], tuple[list[OwnedSlice], Callable[[], None]]]:
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return _of_zero_3
    if hasattr(optimizer, "fp32_groups_gradient_flat_partition"):
        return _of_bf16
    return _of_zero_12 if hasattr(optimizer, "averaged_gradients") else _of_zero_0


def _trained(engine: Any) -> list[Any]:
    """Return the parameters that the optimizer was given."""
    lists = (getattr(engine.optimizer, name, None) for name in ("bit16_groups", "bf16_groups", "fp16_groups"))
    wrapped = next((found for found in lists if found is not None), None)
    of_groups = [group["params"] for group in engine.basic_optimizer.param_groups] if wrapped is None else wrapped
    return [parameter for group in of_groups for parameter in group]


def _nothing() -> None:
    pass


def _of_zero_12(owned: Owned) -> tuple[list[OwnedSlice], Callable[[], None]]:
    optimizer, slices = owned._optimizer, []
    for index, parameters in enumerate(optimizer.params_in_partition):
        partition = group_ranks(optimizer.real_dp_process_group[index]).index(own_rank())
        tensors = [t for t in optimizer.averaged_gradients[index] or () if not getattr(t, "_zero_padding", False)]
        spans, values = [], []
        for parameter, tensor in zip(parameters, tensors, strict=False):  # padding follows, marked or not
            start = int(optimizer.grad_start_offset[index][partition][optimizer.get_param_id(parameter)])
            spans.append(Span(owned._names[id(parameter)], tuple(parameter.shape), start, tensor.numel()))
            values.append(tensor)
        if spans:
            slices.append(OwnedSlice(tuple(spans), tuple(values), is_moe_param(parameters[0])))
    return slices, _nothing


def _of_zero_3(owned: Owned) -> tuple[list[OwnedSlice], Callable[[], None]]:
    optimizer, slices = owned._optimizer, []
    for index, parameters in enumerate(optimizer.fp16_groups):
        rank, spans, values = optimizer._get_sub_group_partition_rank(index), [], []
        for parameter, tensor in zip(parameters, optimizer.averaged_gradients[index], strict=True):
            start = rank * tensor.numel()
            count = min(tensor.numel(), parameter.ds_numel - start)
            if count > 0:
                spans.append(Span(owned._names[id(parameter)], tuple(parameter.ds_shape), start, count))
                values.append(tensor.view(-1)[:count])
        if spans:
            slices.append(OwnedSlice(tuple(spans), tuple(values), is_moe_param(parameters[0])))
    return slices, _nothing


def _of_bf16(owned: Owned) -> tuple[list[OwnedSlice], Callable[[], None]]:
    optimizer = owned._optimizer
    flats, partitions = optimizer.fp32_groups_gradients_flat, optimizer.fp32_groups_gradient_flat_partition

    def finish() -> None:
        for flat, own, group in zip(flats, partitions, optimizer.real_dp_process_group, strict=True):
            share(flat, own, group)
        # Another site may have gradients where this one has none: norms and clipping must see them all.
        optimizer.fp32_groups_has_gradients = [[True] * len(group) for group in optimizer.bf16_groups]

    return _parts_of_bf16(owned, partitions), finish


def _parts_of_bf16(owned: Owned, partitions: list[Tensor]) -> list[OwnedSlice]:
    """Return this rank's partitions of BF16_Optimizer's flat buffers, one for each parameter group, as slices."""
    optimizer, slices = owned._optimizer, []
    columns = partitions, optimizer.bf16_groups, optimizer.real_dp_process_group
    for own, parameters, group in zip(*columns, strict=True):
        spans = [whole(owned._names[id(parameter)], parameter.shape) for parameter in parameters]
        if (one := _piece(own.detach(), spans, group_ranks(group).index(own_rank()))) is not None:
            slices.append(OwnedSlice(*one, is_moe_param(parameters[0])))
    return slices


def _piece(own: Tensor, spans: list[Span], rank: int) -> tuple[tuple[Span, ...], tuple[Tensor, ...]] | None:
    """Return the spans and values of `own`, part number `rank` of a flat buffer, without padding."""
    total, begin = sum(span.num_elements for span in spans), rank * own.numel()
    end = min(begin + own.numel(), total)
    if end <= begin:
        return None
    pieces = cut(spans, [begin, end, total])[1] if begin else cut(spans, [end, total])[0]
    return pieces, tuple(own[: end - begin].split([span.num_elements for span in pieces]))


def _of_zero_0(owned: Owned) -> tuple[list[OwnedSlice], Callable[[], None]]:
    slices, shared = [], []
    for group, is_expert, parameters in _by_group(owned._engine):
        ranks = group_ranks(group)
        rank, spans = ranks.index(own_rank()), []
        for parameter in parameters:
            spans.append(whole(owned._names[id(parameter)], parameter.shape))
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        values = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        size = -(-len(values) // len(ranks))
        flat = torch.nn.functional.pad(values, (0, size * len(ranks) - len(values)))
        own = flat[rank * size : (rank + 1) * size]
        if (one := _piece(own, spans, rank)) is not None:
            slices.append(OwnedSlice(*one, is_expert))
        shared.append((flat, own, group, parameters))

    def finish() -> None:
        for flat, own, group, parameters in shared:
            share(flat, own, group)
            at = 0
            for parameter in parameters:
                parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
                at += parameter.numel()

    return slices, finish


def _by_group(engine: Any) -> Iterator[tuple[Any, bool, list[Any]]]:
    """Yield the trainable parameters of each group of ranks that hold the same ones."""
    by_name: dict[str, list[Any]] = {}
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            by_name.setdefault(parameter.group_name if is_moe_param(parameter) else "", []).append(parameter)
    for name, parameters in by_name.items():
        group = groups._get_expert_data_parallel_group(name) if name else engine.seq_data_parallel_group
        yield group, bool(name), parameters


def _masters_of(owned: Owned) -> tuple[list[OwnedSlice], Callable[[], None]]:
    optimizer, slices = owned._optimizer, []
    if owned._kind is _of_zero_12:
        for index, parameters in enumerate(optimizer.params_in_partition):
            partition = group_ranks(optimizer.real_dp_process_group[index]).index(own_rank())
            flat, spans, values = optimizer.single_partition_of_fp32_groups[index].detach(), [], []
            for parameter in parameters:
                param_id = optimizer.get_param_id(parameter)
                start = int(optimizer.grad_start_offset[index][partition][param_id])
                at = int(optimizer.grad_partition_insertion_offset[index][partition][param_id])
                count = min(parameter.numel() - start, len(flat) - at)
                spans.append(Span(owned._names[id(parameter)], tuple(parameter.shape), start, count))
                values.append(flat[at : at + count])
            if spans:
                slices.append(OwnedSlice(tuple(spans), tuple(values), is_moe_param(parameters[0])))
        return slices, optimizer.update_lp_params
    if owned._kind is _of_bf16:
        return _parts_of_bf16(owned, optimizer.fp32_groups_flat_partition), optimizer.update_lp_params
    raise UnsupportedError(
        "hybridep.sites.every above 1 needs ZeRO stage 1 or 2, where each rank owns a part of the weights; set "
        "zero_optimization.stage, or every to 1"
    )


# -- the whole state ------------------------------------------------------------------------------------------------


def _masters(engine: Any) -> list[Tensor]:
    """Return the tensors that the user's optimizer changes, in an order that is the same on all sites."""
    optimizer = engine.optimizer
    for name in (
        "single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat",
        "fp32_groups_flat", "fp32_groups",
    ):  # fmt: skip
        if (found := getattr(optimizer, name, None)) is not None:
            return [one for item in found for one in (item if isinstance(item, list) else [item])]
    return [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]


def _scalers(engine: Any) -> list[Any]:
    """Return the objects that hold the loss scale: ZeRO's and those of FP16_Optimizer."""
    found = [getattr(engine.optimizer, name, None) for name in ("loss_scaler", "loss_scale_config")]
    return [one for one in found if one is not None and hasattr(one, "__dict__")]


def weights(engine: Any) -> dict[str, Tensor]:
    """Return all parameters that this rank holds, by name; under ZeRO 3 its partitions."""
    named: dict[str, Any] = dict(engine.module.named_parameters())
    return {name: getattr(parameter, "ds_tensor", parameter).detach() for name, parameter in named.items()}


def _held(engine: Any) -> dict[str, Tensor]:
    """Return parameters and buffers.  Buffers may differ between sites, for example counts of tokens."""
    held = weights(engine)
    return {**held, **{f"buffer {name}": buffer.detach() for name, buffer in engine.module.named_buffers()}}


def hash_of(tensors: Iterable[Tensor], step: int) -> bytes:
    """Return a hash of tensors and a step number, of 8 bytes."""
    digest = hashlib.blake2b(str(step).encode(), digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).view(dtype=torch.uint8).cpu().numpy().tobytes())
    return digest.digest()


def skip_to(engine: Any, step: int) -> None:
    """Let an engine count steps, and its schedule take them, that other sites have made."""
    for _ in range(step - engine.global_steps):
        engine.global_steps += 1
        engine.global_samples += engine.train_batch_size()
        engine.micro_steps += engine.gradient_accumulation_steps()
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.step()


def capture(engine: Any, more: Any = None) -> bytes:
    """Return this rank's training state: weights, optimizer, loss scale, schedule, counters, and `more`."""
    base = engine.basic_optimizer
    state = {
        "weights": _held(engine),
        "masters": [master.data for master in _masters(engine)],
        "optimizer": [
            {
                key: (value, isinstance(value, Tensor) and value.device == master.device)
                for key, value in base.state.get(master, {}).items()
            }
            for master in _masters(engine)
        ],
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in base.param_groups],
        "scalers": [{k: v for k, v in vars(one).items() if isinstance(v, int | float)} for one in _scalers(engine)],
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "more": more,
        "counters": {name: getattr(engine, name) for name in COUNTERS},
    }
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def _gather_again(optimizer: Any) -> None:
    """Drop what was gathered of old partitions under ZeRO 3, and gather what stays whole; all ranks of a site call."""
    optimizer._partition_all_parameters()
    if persistent := optimizer.persistent_parameters:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def restore(engine: Any, state: bytes) -> Any:
    """Load what `capture` returned on another site, in place, and return `more`."""
    saved = torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")  # a device may not hold it twice
    for name, tensor in _held(engine).items():
        tensor.copy_(saved["weights"][name])
    if engine.zero_optimization_stage() == 3:
        _gather_again(engine.optimizer)
    base = engine.basic_optimizer
    for master, value, kept in zip(_masters(engine), saved["masters"], saved["optimizer"], strict=True):
        master.data.copy_(value)
        known = base.state[master]
        for key, (one, follows) in kept.items():
            if isinstance(known.get(key), Tensor) and isinstance(one, Tensor):
                known[key].copy_(one)  # others may refer to it
            else:
                known[key] = one.to(master.device) if follows else one
    for group, options in zip(base.param_groups, saved["groups"], strict=True):
        group.update(options)
    for scaler, numbers in zip(_scalers(engine), saved["scalers"], strict=True):
        vars(scaler).update(numbers)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(saved["scheduler"])
    for name, value in saved["counters"].items():
        setattr(engine, name, value)
    return saved["more"]
