# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/faults.py and benchmarks/soak.py: trains a tiny model, and breaks as it is told."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed import comm as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_lm

from ds_hybridep.integration import attachment

# Else DeepSpeed compiles an all-reduce over shared memory on the first use, for a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

FAULT_STEP = 2
NUM_STEPS = 6
HIDDEN, LAYERS, EXPERTS, TOKENS = 32, 2, 8, 16


@dataclass(frozen=True)
class Orders:
    """What one rank does; the same file serves all."""

    fault: str
    phase: str
    victim: int
    kind: str  # "classic" or "autoep"
    codecs: str  # "exact", "recommended", or "no block"
    timeout_s: float
    folder: str
    sizes: tuple[int, int] = (2, 2)
    num_steps: int = NUM_STEPS
    resume: bool = False
    step_s: float = 0.0  # slept in each step
    save_every: int = 0  # steps; a few folders are written again and again
    follows: bool = False  # begins no step before the driver has written that many into the file `until`


class Breaker:
    """Does to this rank what was ordered, once, at the first call."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._done = orders, False
        self.is_armed = False

    def __call__(self) -> None:
        if not self.is_armed or self._done:
            return
        self._done = True
        Path(self._orders.folder, "broken").write_text(str(time.time()))
        fault = self._orders.fault
        if fault in ("kill", "kill rank 0"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "exception":
            raise ValueError("a bad sample")
        elif fault in ("link", "dc"):  # the driver cuts
            answer = Path(self._orders.folder, "cut")
            while not answer.exists():
                time.sleep(0.02)


def block_of(orders: Orders) -> dict[str, Any]:
    dcs, gpus = orders.sizes
    level: dict[str, Any] = {"name": "dc", "size": dcs, "domain_size": dcs, "bandwidth_gbps": 1.0}
    if orders.codecs == "recommended":
        level["codecs"] = "recommended"
    return {
        "enabled": orders.codecs != "no block",
        "levels": [level, {"name": "gpu", "size": gpus, "domain_size": 1, "bandwidth_gbps": 100.0}],
        "timeout_s": orders.timeout_s,
        "report_interval": 0,
        "advanced": {"kernels": "reference"},
    }


def engine_of(orders: Orders) -> Any:
    world = orders.sizes[0] * orders.sizes[1]
    args = train_lm.argparse.Namespace(
        hidden=HIDDEN, layers=LAYERS, experts=EXPERTS, top_k=2, capacity_factor=1.5, seq_len=TOKENS, ep_size=world
    )
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "hybridep": block_of(orders),
    }
    if orders.kind == "autoep":
        import hf_model

        model: nn.Module = hf_model.build(args, "")
        config["expert_parallel"] = hf_model.autoep_block(world)
    else:
        model = train_lm.ByteModel(args)
    return deepspeed.initialize(model=model, config=config, model_parameters=_groups(model, orders))[0]


def _groups(model: nn.Module, orders: Orders) -> Any:
    return [p for p in model.parameters() if p.requires_grad]


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(train_lm.VOCABULARY, (2, TOKENS + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@contextmanager
def failing_attach(orders: Orders, rank: int) -> Iterator[None]:
    make = attachment.HybridRuntime

    def fail(*args: Any) -> Any:
        make(*args).close()
        Path(orders.folder, "broken").write_text(str(time.time()))
        raise MemoryError("no room for replicas")

    if orders.fault == "memory" and rank == orders.victim:
        with mock.patch.object(attachment, "HybridRuntime", fail):
            yield
    else:
        yield


def break_in(engine: Any, breaker: Breaker, phase: str) -> None:
    """Call the breaker in the middle of a phase."""

    def before(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            breaker()
            return original(*args, **kwargs)

        return call

    modules = [m for m in engine.module.modules() if isinstance(m, nn.LayerNorm) or "RMSNorm" in type(m).__name__]
    middle = modules[len(modules) // 2]
    if phase == "forward":
        middle.register_forward_pre_hook(lambda *_: breaker())
    elif phase == "backward":
        middle.register_full_backward_hook(lambda *_: breaker())
    elif phase == "step":
        engine.optimizer.step = before(engine.optimizer.step)
    elif phase == "save":
        torch.save = before(torch.save)
    elif phase == "load":
        torch.load = before(torch.load)


def await_order(path: Path, step: int) -> None:
    while not path.exists() or int(path.read_text()) < step:
        time.sleep(0.2)


def main(orders: Orders) -> None:
    rank = int(os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    with failing_attach(orders, rank):
        engine = engine_of(orders)
    breaker = Breaker(orders)
    if rank == orders.victim:
        break_in(engine, breaker, orders.phase)

    checkpoints = str(Path(orders.folder, "checkpoints"))
    first = 0
    if orders.resume:
        loaded, state = engine.load_checkpoint(checkpoints)
        first = state["step"] if loaded is not None else 0
    for step in range(first, orders.num_steps):
        if orders.follows:
            await_order(Path(orders.folder, "until"), step)
        breaker.is_armed = step >= FAULT_STEP
        if orders.step_s:
            time.sleep(orders.step_s)
        inputs, targets = batch(step, rank)
        loss, aux_loss = engine(inputs, targets)
        engine.backward(loss + 0.01 * aux_loss)
        engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        if rank == 0:
            with Path(orders.folder, "losses").open("a") as file:
                file.write(json.dumps([step, total.item()]) + "\n")
        if orders.phase in ("save", "load") or (orders.save_every and (step + 1) % orders.save_every == 0):
            tag = f"turn{step // orders.save_every % 3}" if orders.save_every else None
            engine.save_checkpoint(checkpoints, tag, client_state={"step": step + 1})
        if orders.phase == "load" and step >= FAULT_STEP:
            engine.load_checkpoint(checkpoints)
    engine.destroy()
    print("done")


if __name__ == "__main__":
    main(Orders(**json.loads(Path(sys.argv[1]).read_text())))
