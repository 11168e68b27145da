# SPDX-License-Identifier: Apache-2.0
"""What all measuring programs share: records, medians with intervals, tables, and jobs of ranks on emulated hosts.

Plans are compared on a noisy machine in interleaved blocks of steps, and a ratio is taken between neighbours:

    A B C  C B A  A B C ...
"""

import json
import math
import os
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ds_hybridep.config_codecs import CodecConfig, WeightCodec
from ds_hybridep.lab.launcher import RankProcesses
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.ports import hold_port
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_rate

REPOSITORY = Path(__file__).resolve().parents[1]
JOB_FOLDER = "BENCHMARKS_JOB"  # set for ranks: the folder for requests to the driver, and their answers
POLL_S = 0.002
NUM_RESAMPLES = 2000
# Student's t, one-sided 95%, by degrees of freedom.
T_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
)  # fmt: skip
T_975 = (  # the same, two-sided
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip

Record = dict[str, Any]


def codec_settings(spec: Any) -> CodecConfig:
    """The settings that a block's text or object for a codec means."""
    settings: CodecConfig = TypeAdapter(WeightCodec).validate_python(spec)
    return settings


# ---- records ----


def versions() -> dict[str, str]:
    """Machine, Python and packages."""
    found = {"machine": platform.machine(), "python": platform.python_version()}
    for package in ("torch", "deepspeed", "ds_hybridep"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """Short hash of the checkout; "unknown" outside of one."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    run = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def command() -> str:
    """What was typed, without the folders of this machine."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", "-m", "benchmarks", *words])


@dataclass
class Records:
    """What one program has measured; each record is appended to `out` as a JSON line at once."""

    case: str
    out: Path | None = None
    device: str = "cpu"
    rows: list[Record] = field(default_factory=list)

    def go_on(self) -> list[Record]:
        """Take over the records that `out` has of earlier sittings; returns all, to which new ones are added."""
        self.rows[:0] = read_records([self.out] if self.out else [])
        return self.rows

    def add(self, params: Mapping[str, Any], *, case: str | None = None, **measured: Any) -> None:
        about = {"device": self.device, "versions": versions(), "commit": commit(), "command": command()}
        self.rows.append({"case": case or self.case, "params": dict(params), **measured, **about})
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with self.out.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")


def read_records(paths: Iterable[Path]) -> list[Record]:
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


# ---- plots ----


def new_figure(*shape: int, **settings: Any) -> tuple[Any, Any]:
    """(figure, axes) of matplotlib's `subplots`, for an SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ds_hybridep"
    from matplotlib import pyplot

    return pyplot.subplots(*shape, **settings)


def plain_numbers(axes: Any) -> None:
    """Numbers such as 0.5 and 20 along both axes, and none between the marks that are set."""
    from matplotlib import ticker

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_locator(ticker.NullLocator())


OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#666666")  # told apart by people who see few colours


def save_figure(figure: Any, path: Path, caption: str = "") -> None:
    """The same file from the same records.  caption: the conditions, below the axes."""
    from matplotlib import pyplot

    if caption:
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#444444")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


# ---- statistics ----


@dataclass(frozen=True)
class Ratio:
    """Median of block-by-block ratios and its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleaved(names: Sequence[str], num_rounds: int) -> list[tuple[str, ...]]:
    """Orders of the blocks, round by round; every other round runs backwards so that drift cancels."""
    return [tuple(names) if index % 2 == 0 else tuple(reversed(names)) for index in range(num_rounds)]


def ratio(samples: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Ratio:
    """Samples over baseline, paired by round."""
    ratios = [a / b for a, b in zip(samples, baseline, strict=True)]
    return Ratio(statistics.median(ratios), *median_95(ratios, seed))


def margin_95(values: Sequence[float]) -> float:
    """Half the width of the two-sided 95% interval of the mean, from Student's t; inf for one value."""
    if len(values) < 2:
        return math.inf
    return T_975[min(len(values) - 1, len(T_975)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def median_95(samples: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """A 95% bootstrap interval of the median."""
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(samples, k=len(samples))) for _ in range(NUM_RESAMPLES))
    return medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES) - 1]


def upper_95(values: Sequence[float]) -> float:
    """Upper 95% bound of the mean, from Student's t; inf for one value."""
    if len(values) < 2:
        return math.inf
    margin = T_95[min(len(values) - 1, len(T_95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) + margin


# ---- processes ----


def usage_of(pids: Iterable[int]) -> dict[str, float]:
    """Memory, descriptors and threads, the largest of all processes."""
    seen = {"rss_mb": 0.0, "descriptors": 0.0, "threads": 0.0}
    for pid in pids:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        seen["rss_mb"] = max(seen["rss_mb"], int(status["VmRSS"].split()[0]) / 1024)
        seen["threads"] = max(seen["threads"], int(status["Threads"]))
        seen["descriptors"] = max(seen["descriptors"], len(os.listdir(f"/proc/{pid}/fd")))
    return seen


def growth_of(samples: list[dict[str, float]]) -> dict[str, float]:
    """Growth from the second fifth of the samples (the first still warms up) to the last, as a factor of medians."""
    fifth = len(samples) // 5
    if fifth < 2:
        return {}

    def median(part: list[dict[str, float]], name: str) -> float:
        return sorted(sample[name] for sample in part)[len(part) // 2]

    last, early = samples[-fifth:], samples[fifth : 2 * fifth]
    return {name: round(median(last, name) / median(early, name), 4) for name in samples[0]}


# ---- jobs of ranks ----


class Requests:
    """Answers what rank 0 asks through files, in order: to set the link's rate, for its counters, to keep records."""

    def __init__(self, folder: Path, network: EmulatedNetwork | None, records: Records) -> None:
        self._folder, self._network, self._records = folder, network, records
        self._count = 1
        self.is_done = False

    def serve(self) -> None:
        path = self._folder / f"request-{self._count}.json"
        if path.exists():
            partial = self._folder / "answer.partial"
            partial.write_text(json.dumps(self._answer(**json.loads(path.read_text()))))
            os.replace(partial, self._folder / f"answer-{self._count}.json")
            self._count += 1

    def _answer(self, command: str, **request: Any) -> Record:
        if command == "rate" and self._network is not None:
            rate = request["rate"]
            self._network.set_wan_rate(None if rate == "none" else parse_rate(rate, "--rates"))
        elif command == "counters" and self._network is not None:
            return {"wan_bytes": sum(uplink.out_bytes for uplink in self._network.counters())}
        elif command == "record":
            self._records.add(request["params"], **request["measured"])
        elif command == "done":
            self.is_done = True
        return {}


@contextmanager
def emulated(topology: Topology, links: LinkSpec | None) -> Iterator[EmulatedNetwork | None]:
    """An emulated network; none without `links`.  Ends the program with status 2 where there can be none."""
    if links is not None and (reason := why_not_permitted(with_delay=links.wan_delay_s > 0)):
        print(f"no emulated network here: {reason}", file=sys.stderr)
        raise SystemExit(2)
    with nullcontext() if links is None else EmulatedNetwork(topology, links) as network:
        yield network


def run_job(dcs: str, links: LinkSpec | None, records: Records, *arguments: str, limit_s: float = 7200.0) -> None:
    """Run this program's `rank` on each host of `dcs`, such as "2x2"; over loopback without `links`.

    arguments: behind those that this program was given.
    Ends the program with status 1, and the end of a log, if a rank fails or the time is up.
    """
    topology, line = Topology.parse(dcs), [sys.executable, "-m", "benchmarks", *sys.argv[1:], *arguments]
    with tempfile.TemporaryDirectory() as scratch, emulated(topology, links) as network:
        folder = Path(scratch)
        requests = Requests(folder, network, records)
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        environment = {JOB_FOLDER: scratch, "PYTHONPATH": paths}
        with RankProcesses(
            network, line, num_ranks=topology.num_ranks, log_dir=folder / "logs", environment=environment,
            live=sys.stdout,
        ) as ranks:  # fmt: skip
            while ranks.poll() and not ranks.failed_ranks() and time.monotonic() - ranks.start_s < limit_s:
                requests.serve()
                time.sleep(POLL_S)
            if requests.is_done:
                return
            failed = ranks.failed_ranks()
            print(f"the job did not finish; failed ranks: {failed or 'none, out of time'}", file=sys.stderr)
            for rank in failed[:1]:
                print(ranks.log_files[rank].read_text(errors="replace")[-4000:], file=sys.stderr)
            raise SystemExit(1)


def new_folder(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def free_port() -> int:
    """Return a free port; the system gives it to nobody else before this process ends."""
    holder = hold_port()
    port = int(holder.getsockname()[1])
    holder.detach()  # it stays open
    return port
