# SPDX-License-Identifier: Apache-2.0
"""Ways of others to send less, for benchmarks/equal_bytes.py: PowerSGD, DiLoCo and DeMo, in a loop of plain torch.

PowerSGD is torch's own hook.  DiLoCo (arXiv 2311.08105) and DeMo (arXiv 2411.19870) are written here; DiLoCo is run
once more as torchft has it, where that is installed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from deepspeed.moe.layer import MoE
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from torch import Tensor, nn

from benchmarks.training import train_lm

CLIP = 1.0
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of DiLoCo, as its paper recommends
CHUNK, DECAY = 64, 0.999  # of DeMo, as published
POWER_SGD_START = 2  # steps that PowerSGD's warm start leaves exact; their bytes do not count

Train = Callable[[Tensor, Tensor], None]
Sent = Callable[[], float]


def schedule(rate: float, steps: int) -> dict[str, Any]:
    return {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": rate,
        "warmup_num_steps": max(steps // 15, 2),
        "total_num_steps": steps,
    }


class Plain:
    """A training loop of plain torch, with AdamW, warm-up, decay and clipping as DeepSpeed does them."""

    def __init__(
        self, model: nn.Module, rate: float, steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        for module in model.modules():
            if isinstance(module, MoE):
                module.set_deepspeed_parallelism()
        self.model, self.parameters = model, list(model.parameters())
        self.clips = optimizer is None
        self.optimizer = optimizer or torch.optim.AdamW(self.parameters, lr=rate)
        self._schedule = WarmupDecayLR(self.optimizer, **schedule(rate, steps))
        self.sent, self.count = 0.0, 0  # bytes, steps

    def train(self, tokens: Tensor, targets: Tensor) -> None:
        """One step."""
        self.optimizer.zero_grad()
        loss, aux_loss = self.model(tokens, targets)
        (loss + train_lm.AUX_LOSS_WEIGHT * aux_loss).backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self._schedule.step()
        self.count += 1

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over both ranks, in place; each sends as many bytes as the tensor has."""
        torch.distributed.all_reduce(tensor)
        return tensor.div_(2)


def with_power_sgd(model: nn.Module, setting: int, rate: float, steps: int) -> tuple[Train, Sent]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    loop = Plain(model, rate, steps)
    all_reduce = torch.distributed.all_reduce

    def counted(tensor: Tensor, *rest: Any, **more: Any) -> Any:
        loop.sent += tensor.nbytes
        return all_reduce(tensor, *rest, **more)

    torch.distributed.all_reduce = counted
    # One bucket: the hooks of several would call gloo in different orders on the two ranks.
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 2**30
    loop.model = DistributedDataParallel(model, bucket_cap_mb=1024)
    state = powerSGD_hook.PowerSGDState(
        torch.distributed.group.WORLD, setting, start_powerSGD_iter=POWER_SGD_START,
        orthogonalization_epsilon=1e-8,  # else an expert without tokens makes NaN
    )  # fmt: skip
    loop.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return loop.train, lambda: loop.sent


def with_diloco(model: nn.Module, setting: int, rate: float, steps: int) -> tuple[Train, Sent]:
    """Local AdamW; after every H steps, and after the last one, Nesterov on the mean of how far the ranks came."""
    loop = Plain(model, rate, steps)
    common = [parameter.detach().clone() for parameter in loop.parameters]
    outer = torch.optim.SGD(common, lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)

    def train(tokens: Tensor, targets: Tensor) -> None:
        loop.train(tokens, targets)
        if loop.count % setting and loop.count != steps:
            return
        for parameter, old in zip(loop.parameters, common, strict=True):
            old.grad = loop.mean(old - parameter.detach())
            loop.sent += old.nbytes
        outer.step()
        for parameter, new in zip(loop.parameters, common, strict=True):
            parameter.data.copy_(new)

    return train, lambda: loop.sent


def with_torchft(model: nn.Module, setting: int, rate: float, steps: int) -> tuple[Train, Sent]:
    """DiLoCo of torchft, each rank a replica group of its own.  It exchanges after every H steps only."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    assert steps % setting == 0, f"{steps} steps end between two exchanges of {setting}"
    loop = Plain(model, rate, steps)
    rank = torch.distributed.get_rank()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2) if rank == 0 else None
    address = [lighthouse.address() if lighthouse else None]
    torch.distributed.broadcast_object_list(address)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(), None, None, min_replica_size=2, use_async_quorum=False, init_sync=False, rank=0,
        world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=address[0],
        replica_id=f"site-{rank}", hostname="127.0.0.1",
    )  # fmt: skip
    outer = torch.optim.SGD(loop.parameters, lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    diloco = DiLoCo(manager, [model], loop.optimizer, outer, setting)
    diloco.__enter__()
    servers: list[Any] = [store, *([lighthouse] if lighthouse else [])]  # they end with their last reference

    def train(tokens: Tensor, targets: Tensor) -> None:
        loop.train(tokens, targets)
        if loop.count % setting == 0:
            loop.sent += sum(parameter.nbytes for parameter in loop.parameters)
        if loop.count == steps:
            manager.shutdown()
            torch.distributed.barrier()  # the other one may still need the servers
            servers.clear()

    return train, lambda: loop.sent


class DeMo(torch.optim.Optimizer):
    """Each rank sends the strongest `count` of 4096 amplitudes of its momentum; all step along the sign of the mean.

    momentum  = DECAY * momentum + rate * gradient
    sent      = the strongest amplitudes of each chunk's cosine transform
    momentum -= what was sent
    weight   -= rate * sign(mean of all ranks' amplitudes, transformed back)
    """

    def __init__(self, parameters: list[nn.Parameter], rate: float, count: int) -> None:
        super().__init__(parameters, {"lr": rate})
        self._count, self.sent = count, 0.0
        self._momentum = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter, momentum in zip(group["params"], self._momentum, strict=True):
                momentum.mul_(DECAY).add_(parameter.grad, alpha=group["lr"])
                amplitudes, back = cosine_transform(momentum)
                count = min(self._count, amplitudes.shape[-1])
                index = amplitudes.abs().topk(count, dim=-1).indices
                value = amplitudes.gather(-1, index)
                momentum.sub_(back(torch.zeros_like(amplitudes).scatter_(-1, index, value)))
                self.sent += index.numel() * 4.0
                values, indices = ([torch.empty_like(one) for _ in range(2)] for one in (value, index))
                torch.distributed.all_gather(values, value)
                torch.distributed.all_gather(indices, index)
                total = torch.zeros_like(amplitudes)
                total.scatter_reduce_(-1, torch.cat(indices, -1), torch.cat(values, -1), "mean", include_self=False)
                parameter.sub_(back(total).sign_(), alpha=group["lr"])


def cosine_transform(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Orthonormal amplitudes of chunks, [chunks, elements of one], and the way back."""
    matrix = tensor if tensor.dim() == 2 else tensor.reshape(1, -1)
    height, width = (largest_divisor(size) for size in matrix.shape)
    rows, columns = cosines(height), cosines(width)
    chunks = matrix.reshape(matrix.shape[0] // height, height, matrix.shape[1] // width, width).transpose(1, 2)

    def back(amplitudes: Tensor) -> Tensor:
        parts = rows.T @ amplitudes.view(chunks.shape) @ columns
        return parts.transpose(1, 2).reshape(tensor.shape)

    return (rows @ chunks @ columns.T).reshape(-1, height * width), back


def largest_divisor(size: int) -> int:
    """Of a dimension, at most CHUNK."""
    return max(divisor for divisor in range(1, min(size, CHUNK) + 1) if size % divisor == 0)


def cosines(size: int) -> Tensor:
    """The orthonormal matrix of the cosine transform (DCT-II)."""
    place = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.pi / size * (place + 0.5) * place[:, None]) * (2 / size) ** 0.5
    matrix[0] /= 2**0.5
    return matrix.float()


def with_demo(model: nn.Module, setting: int, rate: float, steps: int) -> tuple[Train, Sent]:
    optimizer = DeMo(list(model.parameters()), rate, setting)
    return Plain(model, rate, steps, optimizer).train, lambda: optimizer.sent
