# SPDX-License-Identifier: Apache-2.0
"""The job's process group, as the launcher made it."""

import json
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import CommunicationError, UnsupportedError
from ds_hybridep.link import LinkOptions

# For rooms that do not call torch.distributed.
own_rank, world_size, meet = dist.get_rank, dist.get_world_size, dist.barrier


def group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, in group-rank order."""
    return tuple(dist.get_process_group_ranks(group))


def gather_to_first(part: torch.Tensor, group: Any) -> list[torch.Tensor] | None:
    """Return the parts of all ranks of the group of rank 0 there, in group-rank order, and None on other ranks.

    Groups without rank 0 send nothing.  The bytes are not counted: they belong to no step.
    """
    ranks = group_ranks(group)
    if 0 not in ranks:
        return None
    parts = [torch.empty_like(part) for _ in ranks] if own_rank() == 0 else None
    dist.gather(part, parts, dst=0, group=group)
    return parts


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def job_store(path: str = "") -> Any:
    """Return the part of the job's store that belongs to this attempt: torchrun may keep one store over restarts.

    Where it makes a new one, the count of attempts is not used, because nodes may differ in it.
    """
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_kept else "0"
    store = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore(f"ds_hybridep/attempt{attempt}/{path}", store)


def read_note(store: Any, key: str, limit_s: float) -> Any:
    """Return a JSON value of the store once it is there, None after the limit; RuntimeError if the store fails."""
    try:
        store.wait([key], timedelta(seconds=limit_s))
        return json.loads(store.get(key))
    except dist.DistStoreError:
        return None


def first_line(error: Exception) -> str:
    """Return the first line of the message; the other lines hold a C++ stack."""
    return str(error).splitlines()[0]


def longest_wait_s(timeout_s: float) -> float:
    """Return torch's own time limit for the job's collectives, or `timeout_s` if that is longer.

    A rank may wait this long for another one that lives: heartbeats end a job whose ranks do not.
    """
    group = dist.distributed_c10d._get_default_group()
    limits = [group._get_backend(device).options._timeout for device in group._device_types]
    return max(timeout_s, *(limit.total_seconds() for limit in limits))


def join_job(timeout_s: float) -> None:
    """Form the job's process group over gloo, from what a launcher has set in the environment.

    Raises CommunicationError if the environment names no job, or if the job's ranks do not come together.
    """
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except (ValueError, RuntimeError) as error:
        said = first_line(error)
        remedy = "start the command as a training script is started, with deepspeed, torchrun or `ds_hybridep lab`"
        if "[127." in said:
            remedy = "the name of this host is a loopback address: set GLOO_SOCKET_IFNAME to the network interface"
        raise CommunicationError(f"no job to join: {said}; {remedy}, on all nodes") from error


def leave_job() -> None:
    """Leave the job that `join_job` joined; all ranks must call."""
    dist.barrier()
    dist.destroy_process_group()


def backend_name() -> str:
    """Backend of the job's process group, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend_config())


def backends_of(config: HybridEPConfig, device: torch.device) -> tuple[str, ...]:
    """Return "gloo" or "nccl" at each level, for tensors on `device`.

    Raises UnsupportedError if a backend or a level's congestion control is missing.
    """
    for index, level in enumerate(config.levels):
        if (control := level.congestion_control) is not None and (refusal := LinkOptions(1, control).why_refused()):
            raise UnsupportedError(
                f'hybridep.levels[{index}].congestion_control is "{control}", but this system does not permit it '
                f"({refusal}); load the module tcp_{control} and add {control} to "
                "net.ipv4.tcp_allowed_congestion_control on every node, or leave the key out"
            )
    return tuple(
        backend_for(level.backend, device, f"hybridep.levels[{index}].backend")
        for index, level in enumerate(config.levels)
    )


def backend_for(wanted: str, device: torch.device, where: str) -> str:
    """Return the backend of one level, whose config has `wanted` ("auto": the job's) at the key path `where`."""
    if wanted == "auto":
        return "nccl" if device.type == "cuda" and "nccl" in backend_name() else "gloo"
    if wanted == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        reason = "this build of torch has none" if device.type == "cuda" else f"the model is on {device.type!r}"
        raise UnsupportedError(f'{where} is "nccl", but {reason}; set it to "auto" or "gloo"')
    return wanted
