# SPDX-License-Identifier: Apache-2.0
"""Jobs that are disturbed, for faults, cuts and soak: a tiny model on four ranks that are forked from the driver."""

import argparse
import atexit
import ctypes
import json
import os
import re
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.compile_fx
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401  imported once, for all ranks
from deepspeed import comm as dist
from torch import nn

from benchmarks.common import usage_of
from benchmarks.training import VOCABULARY, autoep, byte_model, engine_of, join, qwen3_moe, train_step
from ds_hybridep.lab.launcher import MASTER_PORT, rank_environment
from ds_hybridep.lab.network import HOST_DEVICE, EmulatedNetwork
from ds_hybridep.lab.topology import Topology
from ds_hybridep.runtime import runtime

TOPOLOGY = Topology(2, 2)
KINDS, CODECS = ("classic", "autoep"), ("exact", "recommended")
FAULT_STEP, NUM_STEPS = 2, 6
SIZES = {"hidden": 32, "layers": 2, "experts": 8, "top_k": 2, "capacity_factor": 1.5, "seq_len": 16, "ep_size": 4}
CLONE_NEWNET = 0x40000000
SAMPLE_EVERY = 20  # steps of the undisturbed job
ERROR = re.compile(r"^(\[rank\d+\]: )?(hybridep: (?!\d)|Traceback|terminate called|Fatal Python|[\w.]+Error: )")


@dataclass(frozen=True)
class Orders:
    """What ranks do; `victim` breaks in the middle of `phase`."""

    folder: Path
    kind: str  # of KINDS
    codecs: str  # of CODECS, or "no block"
    timeout_s: float
    fault: str = "none"
    phase: str = "none"
    victim: int = -1
    num_steps: int = NUM_STEPS
    resume: bool = False
    step_s: float = 0.0  # slept in each step
    save_every: int = 0  # steps; a few folders are written again and again
    follows: bool = False  # begins no step before the driver has written that many into the file `until`


# ---- one rank ----


class Breaker:
    """Does to this rank what was ordered, once, at the first call."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._done = orders, False
        self.is_armed = False

    def __call__(self) -> None:
        if not self.is_armed or self._done:
            return
        self._done = True
        note_break(self._orders)
        fault = self._orders.fault
        if fault in ("kill", "kill rank 0"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "exception":
            raise ValueError("a bad sample")
        elif fault in ("link", "dc"):  # the driver cuts
            while not (self._orders.folder / "cut").exists():
                time.sleep(0.02)


def note_break(orders: Orders) -> None:
    (orders.folder / "broken").write_text(str(time.time()))


def build(orders: Orders) -> Any:
    level: dict[str, Any] = {"name": "dc", "size": 2, "domain_size": 2, "bandwidth_gbps": 1.0}
    if orders.codecs == "recommended":
        level["codecs"] = "recommended"
    block = {
        "enabled": orders.codecs != "no block",
        "levels": [level, {"name": "gpu", "size": 2, "domain_size": 1, "bandwidth_gbps": 100.0}],
        "timeout_s": orders.timeout_s,
        "advanced": {"kernels": "reference"},
    }
    torch.manual_seed(0)
    if orders.kind == "autoep":
        return engine_of(qwen3_moe(argparse.Namespace(**SIZES)), block, dtype="bf16", **autoep(SIZES["ep_size"]))
    return engine_of(byte_model(**SIZES), block, dtype="bf16")


@contextmanager
def failing_attach(orders: Orders, rank: int) -> Iterator[None]:
    make = runtime.HybridRuntime

    def fail(*args: Any, **kwargs: Any) -> Any:
        make(*args, **kwargs).close()
        note_break(orders)
        raise MemoryError("no room for replicas")

    fails = orders.fault == "memory" and rank == orders.victim
    with mock.patch.object(runtime, "HybridRuntime", fail if fails else make):
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


def train(orders: Orders) -> None:
    """What each rank runs."""
    rank = join()
    with failing_attach(orders, rank):
        engine = build(orders)
    breaker = Breaker(orders)
    if rank == orders.victim:
        break_in(engine, breaker, orders.phase)
    text = torch.randint(VOCABULARY, (10_000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    until, checkpoints, first = orders.folder / "until", str(orders.folder / "checkpoints"), 0
    if orders.resume:
        loaded, state = engine.load_checkpoint(checkpoints)
        first = state["step"] if loaded is not None else 0
    for step in range(first, orders.num_steps):
        while orders.follows and (not until.exists() or int(until.read_text()) < step):
            time.sleep(0.2)
        breaker.is_armed = step >= FAULT_STEP
        time.sleep(orders.step_s)
        total = torch.tensor(train_step(engine, text, step, rows=2, seq_len=SIZES["seq_len"]))
        dist.all_reduce(total)
        if rank == 0:
            with (orders.folder / "losses").open("a") as file:
                file.write(json.dumps([step, total.item()]) + "\n")
        if orders.phase in ("save", "load") or (orders.save_every and (step + 1) % orders.save_every == 0):
            tag = f"turn{step // orders.save_every % 3}" if orders.save_every else None
            engine.save_checkpoint(checkpoints, tag, client_state={"step": step + 1})
        if orders.phase == "load" and step >= FAULT_STEP:
            engine.load_checkpoint(checkpoints)
    engine.destroy()
    print("done")


def run_as_script(orders: Orders) -> int:
    """`train`, ended as the interpreter would: last_value, excepthook, then atexit."""
    status = 0
    try:
        train(orders)
    except BaseException as error:  # noqa: BLE001  as the interpreter does
        status, sys.last_value = 1, error
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    return status


# ---- the driver ----


class Ranks:
    """Forked from this process, which has imported everything, each into the namespace of its host."""

    def __init__(self, network: EmulatedNetwork, orders: Orders, folder: Path) -> None:
        self.logs = [folder / f"rank{rank}.log" for rank in range(network.topology.num_ranks)]
        self.pids = [self._fork(network, rank, orders) for rank in range(len(self.logs))]
        self.ended: dict[int, tuple[float, int]] = {}  # rank -> when, status

    def _fork(self, network: EmulatedNetwork, rank: int, orders: Orders) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the parent removes its folders itself
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            log = os.open(self.logs[rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            with open(f"/run/netns/{network.namespace_of(rank)}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            address = network.topology.address_of(0)
            os.environ.update(
                rank_environment(rank, network.topology.num_ranks, address, HOST_DEVICE, port=MASTER_PORT)
            )
            status = run_as_script(orders)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> bool:
        """Whether any rank still runs."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.ended[rank] = time.time(), os.waitstatus_to_exitcode(status)
        return len(self.ended) < len(self.pids)

    def kill(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.ended:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                self.ended[rank] = time.time(), os.waitstatus_to_exitcode(status)


def first_error(log: Path) -> str:
    """The first line of this package that says what is wrong; else the last one of the first traceback."""
    found, ours = "", re.compile(r"hybridep: (rank|ranks|the link|\w+ \d+ \()")
    lines = log.read_text(errors="replace").splitlines()
    for line in lines:
        if ours.match(line):
            return line
    for line in lines:
        if not found and (match := ERROR.match(line)):
            found = line
            if match[2] != "Traceback":
                return found
        elif found and re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception|Exit): ", line):
            return line
    return found


class Watched:
    """A job of four ranks in a folder, and what it has written there."""

    def __init__(self, network: EmulatedNetwork, orders: Orders, logs: Path | None = None) -> None:
        (logs or orders.folder).mkdir(parents=True, exist_ok=True)
        self.ranks = Ranks(network, orders, logs or orders.folder)
        self._losses = orders.folder / "losses"
        self._read = self._losses.stat().st_size if self._losses.exists() else 0

    def new_losses(self) -> list[tuple[int, float]]:
        """(step, loss) that were not returned yet."""
        if not self._losses.exists():
            return []
        with self._losses.open() as file:
            file.seek(self._read)
            said = file.read()
        said = said[: said.rfind("\n") + 1]  # a rank that was killed may have written half a line
        self._read += len(said)
        return [(step, loss) for step, loss in map(json.loads, said.splitlines())]

    def errors(self) -> list[str]:
        return [first_error(log)[:200] for log in self.ranks.logs]


class Undisturbed:
    """The job that others are compared with; it runs as far as it is told."""

    def __init__(self, network: EmulatedNetwork, orders: Orders) -> None:
        self._until = orders.folder / "until"
        self._job = Watched(network, orders)
        self.losses: dict[int, float] = {}
        self.samples: list[dict[str, float]] = []

    def follow(self, step: int, limit_s: float = 900.0) -> None:
        """Run until the loss of this step is known.  RuntimeError where that takes too long, or a rank has ended."""
        partial = self._until.with_suffix(".partial")
        partial.write_text(str(step))
        partial.replace(self._until)
        begin, next_sample = time.monotonic(), len(self.losses) + SAMPLE_EVERY
        while step not in self.losses:
            if not self._job.ranks.poll() or self._job.ranks.ended or time.monotonic() - begin > limit_s:
                raise RuntimeError(f"the undisturbed job ended, or is slow: {self._job.errors()}")
            self.losses |= dict(self._job.new_losses())
            if len(self.losses) >= next_sample:
                self.samples.append(usage_of(self._job.ranks.pids))
                next_sample = len(self.losses) + SAMPLE_EVERY
            time.sleep(0.1)

    def close(self) -> None:
        self._job.ranks.kill()
