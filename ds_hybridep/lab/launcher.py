# SPDX-License-Identifier: Apache-2.0
"""Runs a command once per host, as a cluster's launcher would, and reports how each rank ended.

It starts the command directly in each host's namespace, with the environment that `torch.distributed` and DeepSpeed
read. DeepSpeed's own multi-node launcher would need ssh from host to host.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TextIO

from ds_hybridep.errors import ConfigError, LabError
from ds_hybridep.lab.namespaces import KILL_TIMEOUT_S, kill_processes_in
from ds_hybridep.lab.network import HOST_DEVICE, EmulatedNetwork, UplinkCounters
from ds_hybridep.lab.ports import hold_port

MASTER_PORT = 29500
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class LabResult:
    """How a command ran on all hosts.

    exit_codes: by rank; -N for a process that signal N ended.
    failure: None if every rank returned 0; else which rank failed and how, or which were running at the time limit.
    failed_ranks: ranks that ended by themselves with a code other than 0, in the order in which that was seen; ranks
        that were killed because another one failed are not in it.
    timed_out: whether the time limit ended the run.
    seconds: from the first start to the last exit.
    uplinks: what crossed each datacentre's uplink in that time.
    log_files: standard output and error of each rank, by rank.
    """

    exit_codes: tuple[int, ...]
    failure: str | None
    failed_ranks: tuple[int, ...]
    timed_out: bool
    seconds: float
    uplinks: tuple[UplinkCounters, ...]
    log_files: tuple[Path, ...]

    @property
    def is_success(self) -> bool:
        return self.failure is None

    def tail_of_log(self, rank: int) -> str:
        """The last lines that a rank wrote."""
        return "\n".join(self.log_files[rank].read_text(errors="replace").splitlines()[-15:])

    def __str__(self) -> str:
        """A few lines for people: how each rank ended, how long it took, and what crossed the uplinks."""
        codes = " ".join(f"{rank}:{code}" for rank, code in enumerate(self.exit_codes))
        lines = [
            "done" if self.is_success else f"FAILED: {self.failure}",
            f"{self.seconds:.1f} s, exit codes by rank {codes}",
        ]
        for dc, uplink in enumerate(self.uplinks):
            dropped = f", {uplink.dropped_packets} packets dropped by full queues" if uplink.dropped_packets else ""
            lines.append(f"DC {dc}: {uplink.out_bytes / 1e6:.3f} MB out, {uplink.in_bytes / 1e6:.3f} MB in{dropped}")
        return "\n".join(lines)


def rank_environment(rank: int, num_ranks: int, master_address: str, device: str, *, port: int) -> dict[str, str]:
    """The environment variables that a launcher must set for one rank that is alone on its host.

    device: network interface by which other hosts reach this one.
    """
    # If the user has set one of these, that value is kept.
    defaults = {
        "OMP_NUM_THREADS": "1",  # all hosts share the cores of this machine
        "PYTHONUNBUFFERED": "1",  # logs of a process that is killed must not lose their end
        "DS_ACCELERATOR": "cpu",
    }
    return {
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0",
        # DeepSpeed assumes that this many ranks share a machine. With WORLD_SIZE, all-reduces would go through
        # shared memory, which namespaces do not separate, and not over the links.
        "LOCAL_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "CROSS_RANK": str(rank),
        "CROSS_SIZE": str(num_ranks),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": device,
    }


class RankProcesses:
    """One process per rank. The constructor starts them; the end of the `with` block kills those that still run.

    network: where the hosts are; None runs all ranks on the loopback of this machine, where no link is limited.
    first_host: where rank 0 runs; the others follow.
    environment: for all ranks; added to this process's environment and `rank_environment`, and overrides both.
    log_dir: gets rank0.log, rank1.log, ...; made if missing.
    live: stream to which `poll` also writes rank 0's output.

    If the process that started the ranks is killed, the ranks are killed too. (Without `setpriv`, the next lab kills
    them when it starts.) For this, the thread that starts the ranks must live as long as they do.
    """

    def __init__(
        self,
        network: EmulatedNetwork | None,
        command: Sequence[str],
        *,
        num_ranks: int,
        log_dir: Path,
        first_host: int = 0,
        environment: Mapping[str, str] | None = None,
        live: TextIO | None = None,
    ) -> None:
        if not command or shutil.which(command[0]) is None:
            raise ConfigError(f"command: got '{' '.join(command)}', wanted a program in PATH and its arguments")
        self.log_files = tuple(log_dir / f"rank{rank}.log" for rank in range(num_ranks))
        self.ended: dict[int, int] = {}  # rank -> exit code, in the order in which ranks ended
        self._network, self._live, self._first_host = network, live, first_host
        self._processes: list[subprocess.Popen[bytes]] = []
        self._holder = None if network else hold_port()  # of rank 0's port, which no host shares with others
        log_dir.mkdir(parents=True, exist_ok=True)
        self.start_s = time.monotonic()
        try:
            self._start(command, environment or {})
        except BaseException:
            self.kill()
            raise
        self._live_log: IO[bytes] | None = None if live is None else self.log_files[0].open("rb")

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        network, num_ranks = self._network, len(self.log_files)
        address = network.topology.address_of(self._first_host) if network else "127.0.0.1"
        device = HOST_DEVICE if network else "lo"
        port = self._holder.getsockname()[1] if self._holder else MASTER_PORT
        setpriv = shutil.which("setpriv")
        line = [*([setpriv, "--pdeathsig", "KILL"] if setpriv else []), *command]
        for rank, log_file in enumerate(self.log_files):
            with log_file.open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        network.command_on(self._first_host + rank, line) if network else line,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={
                            **os.environ,
                            **rank_environment(rank, num_ranks, address, device, port=port),
                            **environment,
                        },
                        start_new_session=True,  # we can kill its children with it, and Ctrl-C reaches only us
                    )
                )

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if self._live_log is not None:
            self._live_log.close()

    def poll(self) -> bool:
        """Notes which ranks have ended and shows what rank 0 wrote. Returns whether any is still running."""
        for rank in self.running_ranks():
            if (code := self._processes[rank].poll()) is not None:
                self.ended[rank] = code
        if self._live is not None and self._live_log is not None and (fresh := self._live_log.read()):
            self._live.write(fresh.decode(errors="replace"))
            self._live.flush()
        return len(self.ended) < len(self._processes)

    def failed_ranks(self) -> list[int]:
        """Ranks with an exit code other than 0, in the order in which that was seen."""
        return [rank for rank, code in self.ended.items() if code != 0]

    def running_ranks(self) -> list[int]:
        return [rank for rank in range(len(self._processes)) if rank not in self.ended]

    def kill(self) -> None:
        """Kills every rank that still runs and, on emulated hosts, all other processes that ranks left running."""
        for rank, process in enumerate(self._processes):
            if self._network is not None:
                kill_processes_in(self._network.namespace_of(self._first_host + rank))
            if process.poll() is None:  # on loopback; or not yet in its namespace
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise LabError(f"rank {rank} (process {process.pid}) does not end on SIGKILL") from error
        if self._holder is not None:
            self._holder.close()


def run_ranks(
    network: EmulatedNetwork,
    command: Sequence[str],
    *,
    log_dir: Path,
    timeout_s: float = 600.0,
    live: TextIO | None = None,
) -> LabResult:
    """Runs `command` on every host of `network` until all ranks have ended, one has failed, or the time is up.

    When one rank fails or the time is up, the others are killed.

    live, log_dir: see RankProcesses.
    Raises ConfigError if the command cannot be started.
    """
    num_ranks, before = network.topology.num_ranks, network.counters()
    failure, timed_out = "", False
    with RankProcesses(network, command, num_ranks=num_ranks, log_dir=log_dir, live=live) as ranks:
        while ranks.poll() and not ranks.failed_ranks() and not timed_out:
            if timed_out := time.monotonic() - ranks.start_s >= timeout_s:
                running = ", ".join(map(str, ranks.running_ranks()))
                failure = f"time limit of {timeout_s:g} s reached with rank(s) {running} still running"
            time.sleep(POLL_S)
        failed = ranks.failed_ranks()
        failure = ", ".join(f"rank {rank} {_describe_exit(ranks.ended[rank])}" for rank in failed) or failure
        ranks.kill()
        ranks.poll()
        seconds = time.monotonic() - ranks.start_s
        uplinks = [now.since(then) for now, then in zip(network.counters(), before, strict=True)]
    return LabResult(
        exit_codes=tuple(ranks.ended[rank] for rank in range(num_ranks)),
        failure=failure or None,
        failed_ranks=tuple(failed),
        timed_out=timed_out,
        seconds=seconds,
        uplinks=tuple(uplinks),
        log_files=ranks.log_files,
    )


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
    return f"was ended by {name}"
