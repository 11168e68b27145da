# SPDX-License-Identifier: Apache-2.0
"""Long-lived gloo workers for tests: one process per rank, started once, given one function at a time.

    with ProcessPool(4) as pool:
        results = pool.run(some_module.some_function, step=3)      # [result of rank 0, ..., result of rank 3]

Life of a pool:

    run() -> start if needed: fork server (torch and deepspeed already imported) -> fork world_size workers
                              rank 0 opens the store on a port that the system picks -> its number goes to all ranks
          -> the same call to every worker -> one answer per worker
          -> a failure, a death or the time limit: stacks of the ranks still at work, kill, RemoteError;
             the next run() starts new workers, because collectives may be out of step
"""

import faulthandler
import glob
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# No test asserts a time: these end what hangs, and a machine with ten times the load of a quiet one keeps them.
START_LIMIT_S = 300.0
RUN_LIMIT_S = 500.0  # below the limit of pytest-timeout, which shows less
GRACE_S = 10.0  # what the other ranks get after the first failure; most of them wait in a collective for ever
COLLECTIVE_LIMIT_S = 600  # ends workers whose parent was killed while they waited in a collective
LOG_TAIL_BYTES = 6000


class RemoteError(AssertionError):
    """Some rank failed, died or ran past the limit; the message holds every rank's traceback and output."""


@dataclass
class Worker:
    """One rank as its parent sees it."""

    process: BaseProcess
    pipe: Connection
    log_path: Path
    log_offset_bytes: int = 0  # where the output of the current run begins


class ProcessPool:
    """`world_size` processes in one gloo group, wrapped by `deepspeed.comm`; started by the first `run`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[Worker] = []
        self._log_dir: Path | None = None
        self._port: int | None = None

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers, by rank; empty before the first run and after a failed one."""
        return [worker.process.pid for worker in self._workers]

    def run(self, function: Callable[..., Any], *, timeout_s: float = RUN_LIMIT_S, **kwargs: Any) -> list[Any]:
        """Results of `function(**kwargs)`, called once on every rank, in rank order.

        `function` is a module-level function, found again by its name in the worker; `kwargs` and results travel by
        pickle.

        Raises: RemoteError where any rank raised, died, or was not done after `timeout_s`.
        """
        if not self._workers:
            self._start()
        target = f"{function.__module__}:{function.__qualname__}"
        for worker in self._workers:
            worker.log_offset_bytes = worker.log_path.stat().st_size
        try:
            for worker in self._workers:
                worker.pipe.send((target, kwargs))
        except OSError:
            pass  # a worker that died in between is reported by _collect
        return self._collect(target, timeout_s)

    # -- starting -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._log_dir = Path(tempfile.mkdtemp(prefix=f"process_pool_{self.world_size}_"))
        context = fork_server()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            log_path = self._log_dir / f"rank_{rank}.log"
            log_path.touch()
            process = context.Process(
                target=_worker_main, args=(rank, self.world_size, theirs, str(log_path)), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, log_path))
        deadline_s = time.monotonic() + START_LIMIT_S
        self._port = self._workers[0].pipe.recv() if self._readable(0, deadline_s) else None
        if self._port is not None:
            for worker in self._workers[1:]:
                worker.pipe.send(self._port)
        self._collect("start", deadline_s - time.monotonic())

    def _readable(self, rank: int, deadline_s: float) -> bool:
        worker = self._workers[rank]
        ready = multiprocessing.connection.wait(
            [worker.pipe, worker.process.sentinel], max(0.0, deadline_s - time.monotonic())
        )
        return worker.pipe in ready and worker.process.is_alive()

    # -- one call -----------------------------------------------------------------------------------------------

    def _collect(self, target: str, timeout_s: float) -> list[Any]:
        """One answer per rank; after the first failure the others get GRACE_S, then all are killed."""
        start_s = time.monotonic()
        deadline_s = start_s + timeout_s
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.world_size and (wait_s := deadline_s - time.monotonic()) > 0:
            waiting = {rank: worker for rank, worker in enumerate(self._workers) if rank not in answers}
            channels = [channel for worker in waiting.values() for channel in (worker.pipe, worker.process.sentinel)]
            ready = multiprocessing.connection.wait(channels, wait_s)
            for rank, worker in waiting.items():
                if worker.pipe in ready or worker.process.sentinel in ready:
                    answers[rank] = _receive(worker)
            if not all(ok for ok, _ in answers.values()):
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        if len(answers) == self.world_size and all(ok for ok, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.world_size)]
        message = self._failure(target, answers, time.monotonic() - start_s)
        self.close()
        raise RemoteError(message)

    def _failure(self, target: str, answers: dict[int, tuple[bool, Any]], elapsed_s: float) -> str:
        at_work = [rank for rank in range(self.world_size) if rank not in answers]
        for rank in at_work:
            os.kill(self._workers[rank].process.pid, signal.SIGUSR1)  # faulthandler writes the stacks to its log
        if at_work:
            time.sleep(0.3)
        parts = [f"{target} failed on {self.world_size} ranks after {elapsed_s:.1f} s"]
        # Answers came in this order: the first failure, mostly the cause of the others, is read first.
        for rank in [*answers, *at_work]:
            worker = self._workers[rank]
            ok, answer = answers.get(rank, (False, "still at work; stacks below"))
            parts.append(f"--- rank {rank} ---\n{'returned normally' if ok else answer}")
            if not ok:
                parts.append(_tail(worker))
        return "\n".join(part for part in parts if part)

    def close(self) -> None:
        """Ends the workers, removes their output files and what they left in /dev/shm."""
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()  # the fork server reaps it, so no zombie is left
            worker.pipe.close()
            worker.process.close()
        self._workers = []
        if self._log_dir is not None:
            shutil.rmtree(self._log_dir, ignore_errors=True)
            self._log_dir = None
        if self._port is not None:
            for path in glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_*_{self._port}_*"):
                Path(path).unlink(missing_ok=True)
            self._port = None


Pools = Callable[[int], ProcessPool]  # by their number of ranks


def fork_server() -> Any:
    """Return the context whose processes have torch and deepspeed imported when they start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pool_preload"])
    with _search_path_in_environment():
        multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def _search_path_in_environment() -> Iterator[None]:
    """Lets the fork server find the modules that this process finds: it gets no sys.path of ours in Python 3.11."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _receive(worker: Worker) -> tuple[bool, Any]:
    try:
        if worker.pipe.poll():
            return worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        pass
    worker.process.join(timeout=1.0)
    return False, f"died with exit code {worker.process.exitcode}"


def _tail(worker: Worker) -> str:
    with worker.log_path.open("rb") as log:
        size_bytes = worker.log_path.stat().st_size
        log.seek(max(worker.log_offset_bytes, size_bytes - LOG_TAIL_BYTES))
        return log.read().decode(errors="replace").rstrip()


# -- in the worker ----------------------------------------------------------------------------------------------


def _worker_main(rank: int, world_size: int, pipe: Connection, log_path: str) -> None:
    """Body of one rank: join the group, then answer calls until the end of the pipe."""
    log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business; it closes the pool
    try:
        _join_group(rank, world_size, pipe)
        pipe.send((True, None))
        while True:
            pipe.send(_answer(*pipe.recv()))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except BaseException:  # noqa: BLE001 (whatever stops a rank from joining is reported)
        pipe.send((False, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of gloo may still wait for ranks that were killed: do not let the interpreter join them.
        os._exit(0)


def _answer(target: str, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    import pool_preload

    module_name, _, function_name = target.partition(":")
    try:
        function = importlib.import_module(module_name)
        for name in function_name.split("."):
            function = getattr(function, name)
        return True, function(**kwargs)
    except BaseException:  # noqa: BLE001 (also SystemExit: whatever ends a call is reported)
        return False, traceback.format_exc()
    finally:
        # ZeRO 3 puts its own in this place, for good.  It gives gradients in another order.
        pool_preload.torch.nn.functional.linear = pool_preload.LINEAR


def _join_group(rank: int, world_size: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
    )
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of the host name, which may be slow or wrong
    import pool_preload
    import torch.distributed as torch_dist

    torch = pool_preload.torch
    torch.set_num_threads(1)
    limit = timedelta(seconds=COLLECTIVE_LIMIT_S)
    # Port 0: the system picks the port at the moment it is opened, so no other process can take it in between.
    if rank == 0:
        store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        pipe.send(store.port)
        port = store.port
    else:
        port = pipe.recv()
        store = torch_dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    os.environ["MASTER_PORT"] = str(port)
    # deepspeed wraps a group that exists already instead of opening its own on a fixed port.
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    pool_preload.deepspeed.init_distributed(dist_backend="gloo", timeout=limit, verbose=False)
