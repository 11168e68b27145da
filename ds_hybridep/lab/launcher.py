# SPDX-License-Identifier: Apache-2.0
"""Runs a command once per host, as a cluster's launcher would, and reports how each rank ended.

It starts the command directly in each host's namespace, with the environment that `torch.distributed` and DeepSpeed
read. DeepSpeed's own multi-node launcher would need ssh from host to host.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TextIO

from ds_hybridep.errors import ConfigError, LabError
from ds_hybridep.lab.network import HOST_DEVICE, EmulatedNetwork, UplinkCounters
from ds_hybridep.lab.topology import ScheduleEvent, format_rate

MASTER_PORT = 29500
POLL_S = 0.05
KILL_TIMEOUT_S = 10.0
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


@dataclass(frozen=True)
class AppliedEvent:
    """An event of the schedule, its planned time and its actual time, in seconds after the ranks were started."""

    event: str
    planned_s: float
    applied_s: float


@dataclass(frozen=True, kw_only=True)
class LabResult:
    """How a command ran on all hosts.

    exit_codes: by rank; -N for a process that signal N ended.
    failure: None if every rank returned 0, except ranks killed on purpose; else which rank failed and how, or which
        ranks were still running at the time limit.
    failed_ranks: ranks that ended by themselves with a code other than 0, in the order in which that was seen; ranks
        that were killed because another one failed are not in it.
    timed_out: whether the time limit ended the run.
    killed_ranks: ranks whose host `kill_host` took away.
    seconds: from the first start to the last exit.
    uplinks: what crossed each datacentre's uplink in that time. Empty if nothing was emulated.
    log_files: standard output and error of each rank, by rank.
    """

    topology: str
    command: tuple[str, ...]
    exit_codes: tuple[int, ...]
    failure: str | None
    failed_ranks: tuple[int, ...]
    timed_out: bool
    killed_ranks: tuple[int, ...]
    seconds: float
    uplinks: tuple[UplinkCounters, ...]
    events: tuple[AppliedEvent, ...]
    log_files: tuple[str, ...]
    links: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_success(self) -> bool:
        return self.failure is None

    def to_record(self) -> dict[str, Any]:
        """Return a dict that json can write."""
        return asdict(self)

    def tail_of_log(self, rank: int, num_lines: int = 15) -> str:
        """The last lines that a rank wrote."""
        return "\n".join(Path(self.log_files[rank]).read_text(errors="replace").splitlines()[-num_lines:])


def rank_environment(rank: int, num_ranks: int, master_address: str, device: str, port: int) -> dict[str, str]:
    """The environment variables that a launcher must set for one rank that is alone on its host.

    device: network interface by which other hosts reach this one.
    """
    # If the user has set one of these, that value is kept.
    defaults = {
        "OMP_NUM_THREADS": "1",  # all hosts share the cores of this machine
        "PYTHONUNBUFFERED": "1",  # logs of a process that is killed must not lose their end
        # Otherwise NCCL sees that all hosts are one machine, and bypasses the links. Not tried on GPUs.
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }
    if not any(os.path.exists(path) for path in GPU_DEVICES):
        defaults["DS_ACCELERATOR"] = "cpu"
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
        "TP_SOCKET_IFNAME": device,
        "NCCL_SOCKET_IFNAME": device,
        "NCCL_HOSTID": f"hybridep-lab-{rank}",
    }


class RankProcesses:
    """One process per rank. The constructor starts them; the end of the `with` block kills those that still run.

    network: where the hosts are; None runs all ranks on the loopback of this machine.
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
        environment: Mapping[str, str] | None = None,
        live: TextIO | None = None,
    ) -> None:
        if not command:
            raise ConfigError("command: got nothing, wanted what each rank runs, such as `python train.py`")
        if shutil.which(command[0]) is None:
            raise ConfigError(f"command: '{command[0]}' is not an executable file or in PATH")
        self.log_files = tuple(log_dir / f"rank{rank}.log" for rank in range(num_ranks))
        self.killed_ranks: set[int] = set()
        self.ended: dict[int, int] = {}  # rank -> exit code, in the order in which ranks ended
        self._network = network
        self._live = live
        self._live_log: IO[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        log_dir.mkdir(parents=True, exist_ok=True)
        self.start_s = time.monotonic()
        try:
            self._start(command, environment or {})
        except BaseException:
            self.kill()
            raise

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        network, num_ranks = self._network, len(self.log_files)
        address = network.topology.address_of(0) if network else "127.0.0.1"
        device, port = (HOST_DEVICE, MASTER_PORT) if network else ("lo", _free_port())
        setpriv = shutil.which("setpriv")
        guard = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        for rank, log_file in enumerate(self.log_files):
            line = [*guard, *command]
            with log_file.open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        network.command_on(rank, line) if network else line,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **rank_environment(rank, num_ranks, address, device, port), **environment},
                        start_new_session=True,  # we can kill its children with it, and Ctrl-C reaches only us
                    )
                )
        if self._live is not None:
            self._live_log = self.log_files[0].open("rb")

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def poll(self) -> bool:
        """Notes which ranks have ended and shows what rank 0 wrote. Returns whether any is still running."""
        for rank, process in enumerate(self._processes):
            if rank not in self.ended and process.poll() is not None:
                self.ended[rank] = process.returncode
        self._show()
        return len(self.ended) < len(self._processes)

    def failed_ranks(self) -> list[int]:
        """Ranks that ended by themselves with an exit code other than 0, in the order in which that was seen."""
        return [rank for rank, code in self.ended.items() if code != 0 and rank not in self.killed_ranks]

    def running_ranks(self) -> list[int]:
        return [rank for rank in range(len(self._processes)) if rank not in self.ended]

    def kill_host(self, rank: int) -> None:
        """Takes the host of `rank` away: SIGKILL ends every process on it. The other ranks have to notice."""
        if not 0 <= rank < len(self._processes):
            raise ConfigError(f"rank: got {rank}, wanted 0 to {len(self._processes) - 1}")
        if rank not in self.ended:  # a rank that has failed by itself stays failed
            self.killed_ranks.add(rank)
        self._kill(rank)

    def kill(self) -> None:
        """Kills every rank that still runs and, on emulated hosts, all other processes that ranks left running."""
        for rank in range(len(self._processes)):
            self._kill(rank)
        self.poll()
        if self._live_log is not None:
            self._live_log.close()
            self._live_log = None

    def _kill(self, rank: int) -> None:
        process = self._processes[rank]
        if self._network is not None:
            self._network.kill_processes(rank)
        if process.poll() is None:  # on loopback; or not yet in its namespace
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"rank {rank} (process {process.pid}) does not end on SIGKILL") from error

    def _show(self) -> None:
        if self._live is not None and self._live_log is not None and (fresh := self._live_log.read()):
            self._live.write(fresh.decode(errors="replace"))
            self._live.flush()


def run_ranks(
    network: EmulatedNetwork,
    command: Sequence[str],
    *,
    log_dir: Path,
    timeout_s: float = 600.0,
    schedule: Sequence[ScheduleEvent] = (),
    environment: Mapping[str, str] | None = None,
    live: TextIO | None = None,
) -> LabResult:
    """Runs `command` on every host of `network` until all ranks have ended, one has failed, or the time is up.

    When one rank fails or the time is up, the others are killed. Uplinks stay as the schedule left them.

    schedule: events are applied within 0.1 s of their time; events due after the end are not applied.
    environment, live, log_dir: see RankProcesses.
    Raises ConfigError if the command cannot be started, LabError if a link cannot be changed.
    """
    before = network.counters()
    with RankProcesses(
        network,
        command,
        num_ranks=network.topology.num_ranks,
        log_dir=log_dir,
        environment=environment,
        live=live,
    ) as processes:
        return _supervise(processes, network, command, timeout_s, schedule, before)


def run_on_loopback(
    command: Sequence[str],
    *,
    num_ranks: int,
    log_dir: Path,
    timeout_s: float = 600.0,
    environment: Mapping[str, str] | None = None,
    live: TextIO | None = None,
) -> LabResult:
    """Like `run_ranks`, but without namespaces: all ranks on one host, and no link is limited. See modelled.py."""
    with RankProcesses(
        None, command, num_ranks=num_ranks, log_dir=log_dir, environment=environment, live=live
    ) as processes:
        return _supervise(processes, None, command, timeout_s, (), ())


def _supervise(
    processes: RankProcesses,
    network: EmulatedNetwork | None,
    command: Sequence[str],
    timeout_s: float,
    schedule: Sequence[ScheduleEvent],
    before: Sequence[UplinkCounters],
) -> LabResult:
    pending, applied = sorted(schedule, key=lambda event: event.at_s), []
    failure, timed_out = None, False
    while processes.poll() and failure is None:
        elapsed_s = time.monotonic() - processes.start_s
        while network is not None and pending and pending[0].at_s <= elapsed_s:
            event = pending.pop(0)
            apply_event(network, event)
            applied.append(AppliedEvent(str(event), event.at_s, time.monotonic() - processes.start_s))
        failure = _describe_failures(processes)
        if failure is None and elapsed_s >= timeout_s:
            timed_out = True
            running = ", ".join(map(str, processes.running_ranks()))
            failure = f"time limit of {timeout_s:g} s reached with rank(s) {running} still running"
        if failure is None:
            time.sleep(POLL_S)
    failure = failure or _describe_failures(processes)
    failed_ranks = tuple(processes.failed_ranks())
    processes.kill()
    seconds = time.monotonic() - processes.start_s
    uplinks = [now.since(then) for now, then in zip(network.counters(), before, strict=True)] if network else []
    return LabResult(
        topology=str(network.topology) if network else f"loopback, {len(processes.log_files)} ranks",
        command=tuple(command),
        exit_codes=tuple(processes.ended[rank] for rank in range(len(processes.log_files))),
        failure=failure,
        failed_ranks=failed_ranks,
        timed_out=timed_out,
        killed_ranks=tuple(sorted(processes.killed_ranks)),
        seconds=seconds,
        uplinks=tuple(uplinks),
        events=tuple(applied),
        log_files=tuple(map(str, processes.log_files)),
        links=asdict(network.links) if network else {},
    )


def apply_event(network: EmulatedNetwork, event: ScheduleEvent) -> None:
    """Applies `event` to the uplinks now."""
    if event.action == "rate":
        network.set_wan_rate(event.wan_bits_per_s, dc=event.dc)
    elif event.action == "cut":
        network.cut(event.dc)
    elif event.action == "restore":
        network.restore(event.dc)
    else:
        raise ConfigError(f"schedule: got action '{event.action}', wanted rate, cut or restore")


def format_result(result: LabResult) -> str:
    """A few lines for people: how each rank ended, how long it took, what crossed the uplinks, what was changed."""
    codes = " ".join(f"{rank}:{code}" for rank, code in enumerate(result.exit_codes))
    lines = [
        "done" if result.is_success else f"FAILED: {result.failure}",
        f"{result.seconds:.1f} s on {result.topology}, exit codes by rank {codes}",
    ]
    if result.links:
        links = result.links
        lines.append(
            f"WAN {format_rate(links['wan_bits_per_s'])} per uplink and direction at the start,"
            f" {1e3 * links['wan_delay_s']:g} ms one way"
        )
    for uplink in result.uplinks:
        dropped = uplink.out_dropped_packets + uplink.in_dropped_packets
        lines.append(
            f"DC {uplink.dc}: {uplink.out_bytes / 1e6:.3f} MB out, {uplink.in_bytes / 1e6:.3f} MB in"
            + (f", {dropped} packets dropped by full queues" if dropped else "")
        )
    lines += [f"at {event.applied_s:.2f} s: {event.event}" for event in result.events]
    return "\n".join(lines)


@contextmanager
def log_folder(chosen: Path | None) -> Iterator[Path]:
    """The folder for logs. If none was chosen, it is a new temporary one, removed at the end if it is empty."""
    folder = chosen or Path(tempfile.mkdtemp(prefix="ds_hybridep-lab-"))
    try:
        yield folder
    finally:
        if chosen is None and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program by an exception, as Ctrl-C does, so that everything is taken down."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe_failures(processes: RankProcesses) -> str | None:
    ranks = processes.failed_ranks()
    if not ranks:
        return None
    return ", ".join(f"rank {rank} {_describe_exit(processes.ended[rank])}" for rank in ranks)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
