# SPDX-License-Identifier: Apache-2.0
"""Three sites and a meeting point for site-kills: what ranks run, and how the driver starts, watches and ends them."""

import argparse
import ctypes
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

import ds_hybridep
from benchmarks import training
from benchmarks.common import JOB_FOLDER, REPOSITORY, Record, free_port, new_folder, usage_of
from benchmarks.training import RECOMMENDED, byte_model, engine_of, loss_on, train_lm
from ds_hybridep.lab.launcher import rank_environment
from ds_hybridep.lab.network import HOST_DEVICE, EmulatedNetwork
from ds_hybridep.sites.exchange import SiteConnections

NAMES = ("a", "b", "c")
LAYERS, HIDDEN, SEQ_LEN = 2, 64, 64
ROWS, UNEQUAL_ROWS = {"a": 4, "b": 4, "c": 4}, {"a": 4, "b": 2, "c": 3}  # of a batch
OTHER_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default"}  # of site c, where sites are unequal: it rounds differently
HELD_OUT = 64  # batches
PLACES = ("forward", "backward", "exchange", "agreement", "update")  # a step sleeps before each
BUCKETS = 16  # of ZeRO 2, about


# ---- a rank ----


class Job(training.Job):
    """A rank of one site."""

    def __init__(self, folder: Path) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the driver
        super().__init__(folder)


class Pauses:
    """Sleeps before each part of a step, and tells the driver which part that is."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._seconds = seconds
        self._file = os.open(folder / "place", os.O_WRONLY | os.O_CREAT)
        for name, place in (("swap", "agreement"), ("agree", "update")):
            setattr(SiteConnections, name, self._after(getattr(SiteConnections, name), place))

    def __call__(self, place: str) -> None:
        os.pwrite(self._file, place.ljust(12).encode(), 0)
        time.sleep(self._seconds)

    def _after(self, method: Callable[..., Any], place: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self(place)
            return result

        return call


def rank(args: argparse.Namespace, job: Job) -> None:
    """Train up to the step that the file `last` names, once it is there."""
    settings, last = json.loads((job.folder / "settings.json").read_text()), job.folder.parent / "last"
    torch.manual_seed(0)
    model = byte_model(hidden=HIDDEN, layers=LAYERS, ep_size=args.ranks, seq_len=SEQ_LEN)
    zero = {"stage": args.zero_stage}
    if args.zero_stage == 2:
        zero["reduce_bucket_size"] = sum(parameter.numel() for parameter in model.parameters()) // BUCKETS
    pause = Pauses(job.folder, settings["step_s"] / len(PLACES))
    engine = engine_of(model, settings["block"], zero_optimization=zero)
    absent = {*settings["absent"]}
    corpus, held_out = train_lm.read_corpus()
    with (job.folder / f"steps-{settings['life']}-{job.rank}").open("w", buffering=1) as told:
        while not last.exists() or engine.global_steps < int(last.read_text()):
            place = (settings["seed"], engine.global_steps, settings["index"], job.rank)
            batch = train_lm.batch_at(corpus, place, rows=settings["rows"], seq_len=SEQ_LEN)
            pause("forward")
            loss, aux_loss = engine(*batch)
            if engine.global_steps + 1 in absent:
                ds_hybridep.weigh(engine, 0.0)
            pause("backward")
            engine.backward(loss + train_lm.AUX_LOSS_WEIGHT * aux_loss)
            pause("exchange")
            engine.step()
            told.write(json.dumps([time.time(), engine.global_steps, loss.item()]) + "\n")
    weights, state = hashes_of(engine)
    end = {"step": engine.global_steps, "weights": weights, "optimizer": state}
    end["loss"] = loss_on(engine, held_out, HELD_OUT, seq_len=SEQ_LEN)
    torch.save([one.detach().float() for one in engine.module.parameters()], job.folder / f"weights-{job.rank}.pt")
    (job.folder / f"end-{job.rank}.json").write_text(json.dumps(end))
    dist.barrier()
    engine.destroy()


def hashes_of(engine: Any) -> tuple[str, str]:
    """Of all parameters, and of all that the optimizer keeps in fp32."""
    base = engine.basic_optimizer
    masters = [one for group in base.param_groups for one in group["params"]]
    kept = [value for master in masters for _, value in sorted(base.state[master].items())]
    return _hash(engine.module.parameters()), _hash([*masters, *kept])


def _hash(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        whole = value.detach().float().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        digest.update(whole)
    return digest.hexdigest()


# ---- the driver's side of sites ----


class Failure(Exception):
    """Something that must not happen; the ends of logs are in it."""


@dataclass
class Life:
    """One start of a site, until it ends.  steps: when, number, loss."""

    site: str
    folder: Path
    number: int
    processes: list[subprocess.Popen[bytes]]
    started_at: float = field(default_factory=time.time)
    ended_at: float = 0.0
    steps: list[tuple[float, int, float]] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    _read: int = 0

    def look(self) -> None:
        """Read the steps that were made since."""
        path = self.folder / f"steps-{self.number}-0"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                said = file.read()
            said = said[: said.rfind(b"\n") + 1]  # a rank that was killed may have written half a line
            self._read += len(said)
            self.steps += [tuple(json.loads(line)) for line in said.splitlines()]

    def logs(self) -> list[Path]:
        return [self.folder / f"log-{self.number}-{rank}" for rank in range(len(self.processes))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.ended_at = self.ended_at or time.time()
        self.look()

    def num_missing(self) -> int:
        """Steps that were left out or made twice between the first and the last."""
        steps = [step for _, step, _ in self.steps]
        return sum(abs(after - before - 1) for before, after in zip(steps, steps[1:], strict=False))


class Sites:
    """A meeting point, and three sites; each on a host of its own where a network is given.

    absent: the steps in which batches of a site count nothing.
    """

    def __init__(
        self, args: argparse.Namespace, folder: Path, seed: int, step_s: float, stack: ExitStack, *,
        network: EmulatedNetwork | None, absent: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._args, self._folder, self._seed, self._step_s = args, new_folder(folder), seed, step_s
        self._absent = absent
        self._network = network
        self.lives: list[Life] = []
        self.now: dict[str, Life] = {}  # of each site that runs
        self._sample_at = 0.0
        self._secret, self._port = folder / "secret", free_port()
        self._ports = {name: free_port() for name in NAMES}
        self._secret.write_text(os.urandom(16).hex())
        self._log = stack.enter_context((folder / "meeting").open("wb"))
        self.start_point()
        stack.callback(self.kill_point)
        stack.callback(self._end)
        for name in NAMES:
            self.start(name)

    def _end(self) -> None:
        for life in self.lives:
            life.kill()

    def start_point(self) -> None:
        """Start the meeting point, also again."""
        where = [
            "--host",
            self._address(len(NAMES)),
            "--port",
            str(self._port),
            "--folder",
            str(self._folder / "meet"),
        ]
        line = [sys.executable, "-m", "ds_hybridep.commands.main", "meet", "--secret-file", str(self._secret), *where]
        self._point = subprocess.Popen(self._on(len(NAMES), line), stdout=self._log, stderr=self._log)

    def kill_point(self) -> None:
        self._point.kill()
        self._point.wait()

    def _address(self, host: int) -> str:
        return "127.0.0.1" if self._network is None else self._network.topology.address_of(host)

    def _on(self, host: int, line: list[str]) -> list[str]:
        return line if self._network is None else self._network.command_on(host, line)

    def start(self, name: str) -> Life:
        args, folder, host = self._args, self._folder / name, NAMES.index(name)
        folder.mkdir(exist_ok=True)
        sites = {
            "names": NAMES,
            "meeting_point": f"{self._address(len(NAMES))}:{self._port}",
            "secret_file": str(self._secret),
        }
        life = Life(name, folder, sum(one.site == name for one in self.lives), [])
        settings = {
            "block": {
                "sites": sites | (RECOMMENDED if args.codecs == "recommended" else {}), "timeout_s": args.timeout_s
            },
            "seed": self._seed, "index": host, "step_s": self._step_s, "life": life.number,
            "rows": (UNEQUAL_ROWS if args.unequal else ROWS)[name], "absent": [*self._absent.get(name, ())],
        }  # fmt: skip
        (folder / "settings.json").write_text(json.dumps(settings))
        (folder / "place").write_text("start".ljust(12))
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        more, port = {JOB_FOLDER: str(folder), "HYBRIDEP_SITE": name, "PYTHONPATH": paths}, self._ports[name]
        more |= OTHER_PROCESSOR if args.unequal and name == NAMES[-1] else {}
        address, device = self._address(host), "lo" if self._network is None else HOST_DEVICE
        self.lives.append(life)
        for index in range(args.ranks):
            environment = {**os.environ, **rank_environment(index, args.ranks, address, device, port=port), **more}
            with (folder / f"log-{life.number}-{index}").open("wb") as log:
                line = self._on(host, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])
                life.processes.append(
                    subprocess.Popen(line, env=environment, stdout=log, stderr=log, start_new_session=True)
                )
        self.now[name] = life
        return life

    def look(self, sample_s: float, *, has_point: bool = True) -> None:
        """See what all sites have done since.  Raises Failure where a process has ended."""
        takes = time.time() > self._sample_at
        for life in self.now.values():
            life.look()
            if any(process.poll() is not None for process in life.processes):
                raise Failure(self.told(f"site {life.site} ended by itself"))
            if takes and life.steps:
                with suppress(OSError, KeyError):  # it ends just now: the next look says so
                    life.samples.append(usage_of(process.pid for process in life.processes))
        if has_point and self._point.poll() is not None:
            raise Failure(self.told("the meeting point ended"))
        self._sample_at = time.time() + sample_s if takes else self._sample_at

    def tell_last(self, step: int) -> None:
        partial = self._folder / "last.partial"
        partial.write_text(str(step))
        partial.replace(self._folder / "last")

    def ends(self, limit_s: float) -> dict[str, list[Record]]:
        """Wait for all sites to end; returns what each rank has written.  Raises Failure."""
        deadline = time.time() + limit_s
        for life in self.now.values():
            for process in life.processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.time(), 0.1))
                if process.returncode != 0:
                    raise Failure(self.told(f"site {life.site} ended with {process.returncode} at the end"))
            life.ended_at = time.time()
            life.look()
        paths = {name: [self._folder / name / f"end-{i}.json" for i in range(self._args.ranks)] for name in NAMES}
        return {name: [json.loads(path.read_text()) for path in of_site] for name, of_site in paths.items()}

    def apart(self) -> float:
        """Return how far weights of sites that have ended differ at most, as a share of the norm of a tensor."""
        first, *others = (
            [one for rank in range(self._args.ranks)
             for one in torch.load(self._folder / name / f"weights-{rank}.pt", weights_only=True)]
            for name in NAMES
        )  # fmt: skip
        return max(
            float((one - ours).norm() / ours.norm().clamp_min(1e-12))
            for theirs in others
            for one, ours in zip(theirs, first, strict=True)
        )

    def told(self, what: str) -> str:
        """A text and the ends of logs: of the sites as they are now, and of the meeting point."""
        logs = [log for life in self.now.values() for log in life.logs()]
        ends = [
            f"-- {log.relative_to(self._folder)}\n{log.read_text(errors='replace')[-3000:]}"
            for log in (*logs, self._folder / "meeting")
        ]
        return "\n".join([what, *ends])
