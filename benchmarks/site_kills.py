# SPDX-License-Identifier: Apache-2.0
"""Kills random sites again and again while three of them train, and compares the end with undisturbed runs.

    python -m benchmarks site-kills --minutes 60 --kills 30 --wan 20mbit --delay 30ms --unequal \
        --out benchmarks/results/site-kills.jsonl

By the seed, at random times: `kill -9` for all ranks of one site, and the same command again a while later.  After one
kill in five follows a second one, of a site that trains or of the one that comes back.  With one kill in three the
meeting point is killed as well, and started again some seconds later.  The others must go on within timeout_s + 5 s,
and the time without a meeting point, in the same processes and miss no step, and the site that was killed must come
back.  At the end the weights and the optimizer's state of all sites must be bit-equal; of unequal sites, which have
batches of 4, 2 and 3 rows and a third processor that rounds differently, weights must lie within TOLERANCE.

Then all sites train as many steps without kills, with the same data and with data in other orders, from the same
weights.  In steps without a site that was away, its batches do not count there, either.  The loss on held-out data
must lie where one more of those runs would lie, at 95%.  A last run, in which all batches count, shows what those are
worth that were left out.  Only the run with kills goes over the emulated link.

A step sleeps in five places, so that kills find sites in all of them and most of the time both cores are free.
"""

import argparse
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Record, Records, growth_of, margin_95, table
from benchmarks.killed_sites import NAMES, Failure, Job, Life, Sites, rank
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate

__all__ = ["Job", "add_arguments", "rank", "report", "run"]
POLL_S = 0.1
EXTRA_S = 5.0  # beyond timeout_s, for the others to go on
STEP_LIMIT_S = 3.0  # of an undisturbed run
MORE_STEPS = 20  # until the last one, once it is told
SECOND, SECOND_AFTER_S = 0.2, 30.0  # how often a second kill follows, and how late at most
POINT, POINT_AWAY_S = 1 / 3, 5.0  # how often the meeting point is killed as well, and how long it is away at most
NUM_SAMPLES = 240  # of memory, in a run
TOLERANCE = 1e-5  # of a tensor's norm; the package repairs what is further apart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=30, help="in these minutes; second ones come on top")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--orders", type=int, default=3, help="undisturbed runs with data in another order")
    parser.add_argument("--ranks", type=int, default=1, help="of each site")
    parser.add_argument("--codecs", choices=("exact", "recommended"), default="recommended")
    parser.add_argument("--zero-stage", type=int, choices=(1, 2), default=1)
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument("--step-s", type=float, default=1.0, help="slept in each step while sites are killed")
    parser.add_argument("--back-s", type=float, default=120.0, help="longest time from a start to the first step")
    parser.add_argument("--wan", help="rate of each site's uplink, such as 20mbit; without it the sites share a host")
    parser.add_argument("--delay", default="0", help="one way between sites, such as 30ms")
    parser.add_argument("--unequal", action="store_true", help="batches and processors of the sites differ")
    parser.add_argument("--away-s", type=float, default=20.0, help="longest time from a kill to the next start")
    parser.add_argument("--logs", type=Path, help="keep the logs here")


# ---- kills ----


@dataclass
class Kill:
    """One kill, and what came of it.

    step: the newest of all sites.  place: where the site was.  others: those that trained then.
    """

    life: Life
    is_second: bool
    at: float
    step: int
    place: str
    others: list[Life]
    restart_at: float
    point_away_s: float  # how long the meeting point is away; 0: it is not killed
    new: Life | None = None
    was_killed_again: bool = False

    def went_on(self) -> bool:
        """Whether all others have made a step that the one which was killed cannot have had a part in."""
        return all(any(step >= self.step + 2 for _, step, _ in life.steps[-50:]) for life in self.others)

    def is_over(self) -> bool:
        return self.went_on() and (self.was_killed_again or (self.new is not None and bool(self.new.steps)))

    def pause_s(self, life: Life) -> float:
        """The longest time from one step of another site to the next, until it went on."""
        times = [when for when, step, _ in life.steps if self.step - 1 <= step <= self.step + 2]
        return max(after - before for before, after in zip(times, times[1:], strict=False))

    def measured(self, begin: float) -> Record:
        back = None if self.new is None or self.was_killed_again else self.new.steps[0]
        return {
            "site": self.life.site, "at_s": round(self.at - begin, 1), "step": self.step, "place": self.place,
            "is_second": self.is_second, "was_killed_again": self.was_killed_again,
            "pause_s": {life.site: round(self.pause_s(life), 2) for life in self.others},
            "away_s": round(self.restart_at - self.at, 1), "point_away_s": round(self.point_away_s, 1),
            "back_s": None if back is None or self.new is None else round(back[0] - self.new.started_at, 2),
            "back_at_step": None if back is None else back[1],
            "steps_missing": sum(life.num_missing() for life in self.others),
            "others": {life.site: [process.pid for process in life.processes] for life in self.others},
            "same_processes": all(not life.ended_at or life.ended_at > self._gone_on_at(life) for life in self.others),
        }  # fmt: skip

    def _gone_on_at(self, life: Life) -> float:
        return next(when for when, step, _ in life.steps if step >= self.step + 2)


class Killer:
    """Kills sites and starts them again."""

    def __init__(self, args: argparse.Namespace, sites: Sites, records: Records) -> None:
        self._args, self._sites, self._records = args, sites, records
        self._draw, self._sample_s = random.Random(args.seed), max(0.5, 60 * args.minutes / NUM_SAMPLES)
        self._open: list[Kill] = []
        self._point_back_at: float | None = None
        self.rows: list[Record] = []
        self.begin = 0.0

    def run(self) -> int:
        """Kill for so many minutes; returns the step that all sites end at."""
        began = time.time()
        self._until(lambda: all(life.steps for life in self._sites.now.values()), began + self._args.back_s, "start")
        self.begin = time.time()
        slot_s = 60 * self._args.minutes / self._args.kills
        for number in range(self._args.kills):
            self._round(self.begin + slot_s * (number + self._draw.uniform(0.0, 0.6)))
        self._until_time(self.begin + 60 * self._args.minutes)
        last = self._newest() + MORE_STEPS
        self._sites.tell_last(last)
        return last

    def _round(self, at: float) -> None:
        """One kill, now and then a second one, and all sites are back."""
        draw, most_s = self._draw, self._args.away_s
        victim, away_s = draw.choice(NAMES), [draw.uniform(0.0, most_s) for _ in range(2)]
        has_second, second_after_s, choice = draw.random() < SECOND, draw.uniform(0.0, SECOND_AFTER_S), draw.random()
        point_away_s = draw.uniform(0.5, POINT_AWAY_S) if draw.random() < POINT else 0.0
        self._until_time(at)
        if point_away_s:
            self._sites.kill_point()
            self._point_back_at = time.time() + point_away_s
        first = self._kill(victim, away_s[0], point_away_s)
        if has_second:
            self._until(first.went_on)
            self._until_time(first.at + second_after_s)
            there = sorted(self._sites.now)
            self._kill(there[int(choice * len(there))], away_s[1], is_second=True)
        self._until(lambda: not self._open)

    def _until_time(self, at: float) -> None:
        self._until(lambda: time.time() >= at)

    def _newest(self) -> int:
        return max(life.steps[-1][1] for life in self._sites.lives if life.steps)

    def _kill(self, name: str, away_s: float, point_away_s: float = 0.0, is_second: bool = False) -> Kill:
        life = self._sites.now.pop(name)
        place = (life.folder / "place").read_text().strip()
        at = time.time()
        life.kill()
        for one in self._open:
            one.was_killed_again = one.was_killed_again or one.new is life
        for other in self._sites.now.values():
            other.look()
        others = [other for other in self._sites.now.values() if other.steps]
        self._open.append(Kill(life, is_second, at, self._newest(), place, others, at + away_s, point_away_s))
        return self._open[-1]

    def _until(self, is_done: Callable[[], bool], limit: float = math.inf, what: str = "") -> None:
        """Watch all sites, and start those again whose time has come.  Raises Failure."""
        while not is_done() or self._point_back_at is not None:
            now = time.time()
            if self._point_back_at is not None and now >= self._point_back_at:
                self._sites.start_point()
                self._point_back_at = None
            self._sites.look(self._sample_s, has_point=self._point_back_at is None)
            for kill in list(self._open):
                if kill.new is None and now >= kill.restart_at:
                    kill.new = self._sites.start(kill.life.site)
                if not kill.went_on() and now > kill.at + self._args.back_s:
                    raise Failure(self._sites.told(f"after the kill of {kill.life.site} the others do not go on"))
                if kill.is_over():
                    self._close(kill)
                elif kill.new and not kill.new.steps and now > kill.new.started_at + self._args.back_s:
                    raise Failure(self._sites.told(f"site {kill.life.site} does not come back"))
            if now > limit:
                raise Failure(self._sites.told(f"all sites together: no {what} in time"))
            time.sleep(POLL_S)

    def _close(self, kill: Kill) -> None:
        self._open.remove(kill)
        self.rows.append(kill.measured(self.begin))
        self._records.add(params_of(self._args), kind="kill", **self.rows[-1])
        print(json.dumps(self.rows[-1]), flush=True)


# ---- runs ----


def params_of(args: argparse.Namespace) -> Record:
    names = ("minutes", "seed", "ranks", "codecs", "zero_stage", "timeout_s", "step_s", "wan", "delay", "unequal")
    return {name: getattr(args, name) for name in names}


def run(args: argparse.Namespace, records: Records) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all that was started ends, too
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.logs or Path(scratch)
        try:
            end = disturbed(args, folder / "killed", records)
            absent = json.loads((folder / "killed" / "absent").read_text())
            end["undisturbed"] = [
                undisturbed(args, folder / f"order-{order}", args.seed + order, end["steps"], absent, records)
                for order in range(args.orders + 1)
            ]
            end["all_count"] = undisturbed(args, folder / "all", args.seed, end["steps"], {}, records)
        except Failure as failure:
            print(failure, file=sys.stderr)
            records.add(params_of(args), kind="failure", what=str(failure).splitlines()[0])
            return 1
    end |= judged(end, args)
    records.add(params_of(args), kind="end", **end)
    return int(not end["is_good"])


def disturbed(args: argparse.Namespace, folder: Path, records: Records) -> Record:
    """Train while sites are killed; returns how it ended."""
    links = args.wan and LinkSpec(
        wan_bits_per_s=parse_rate(args.wan, "--wan"), wan_delay_s=parse_duration(args.delay, "--delay")
    )
    with ExitStack() as stack:
        network = stack.enter_context(EmulatedNetwork(Topology(len(NAMES) + 1, 1), links)) if links else None
        sites = Sites(args, folder, args.seed, args.step_s, stack, network=network)
        killer = Killer(args, sites, records)
        last = killer.run()
        ends = sites.ends(args.back_s + 2 * MORE_STEPS * (args.step_s + STEP_LIMIT_S))
        uplinks = network.counters()[: len(NAMES)] if network else ()
    rows, lives = killer.rows, sites.lives
    absent = steps_without(lives, last)
    (folder / "absent").write_text(json.dumps(absent))
    longest = max(lives, key=lambda life: life.ended_at - life.started_at)
    backs = [row["back_s"] for row in rows if row["back_s"] is not None]
    return {
        "steps": last, "steps_away": {name: len(steps) for name, steps in absent.items()},
        "kills": len(rows), "second_kills": sum(row["is_second"] for row in rows),
        "kills_by_place": dict(Counter(row["place"] for row in rows)), "restarts": len(lives) - len(NAMES),
        "pauses_s": [max(row["pause_s"].values()) for row in rows], "backs_s": backs,
        "late_s": [max(row["pause_s"].values()) - row["point_away_s"] for row in rows], "apart": sites.apart(),
        "point_kills": sum(row["point_away_s"] > 0 for row in rows),
        "uplink_bytes": [one.out_bytes for one in uplinks],
        "steps_missing": sum(life.num_missing() for life in lives),
        "same_processes": all(row["same_processes"] for row in rows),
        **equality_of(ends), "loss": ends[NAMES[0]][0]["loss"], **usage_in(longest),
    }  # fmt: skip


def steps_without(lives: Iterable[Life], last: int) -> dict[str, list[int]]:
    """Return the steps that each site has not made in any of its lives."""
    made: dict[str, set[int]] = {name: set() for name in NAMES}
    for life in lives:
        made[life.site] |= {step for _, step, _ in life.steps}
    return {name: sorted({*range(1, last + 1)} - steps) for name, steps in made.items()}


def undisturbed(
    args: argparse.Namespace, folder: Path, seed: int, last: int, absent: dict[str, list[int]], records: Records
) -> Record:
    """Train as far without kills or sleep.

    seed: of the order of the data.  absent: the steps in which the batches of a site do not count.
    """
    with ExitStack() as stack:
        sites, began = Sites(args, folder, seed, 0.0, stack, network=None, absent=absent), time.time()
        sites.tell_last(last)
        ends = sites.ends(args.back_s + last * STEP_LIMIT_S)
    found = {"seed": seed, "all_count": not absent, "seconds": round(time.time() - began), **equality_of(ends)}
    found |= {
        "loss": ends[NAMES[0]][0]["loss"],
        "apart": sites.apart(),
        "steps_missing": sum(life.num_missing() for life in sites.lives),
    }
    # A site that starts much later than the others joins them: then it had no part in the first steps.
    found["all_from_step_1"] = all(life.steps[0][1] == 1 for life in sites.lives)
    records.add(params_of(args), kind="undisturbed", **found)
    print(json.dumps(found), flush=True)
    return found


def equality_of(ends: dict[str, list[Record]]) -> Record:
    """Compare each rank's weights, optimizer, step and loss with those of its counterparts."""
    first = ends[NAMES[0]]
    return {
        **{f"{name}_equal": all(one[name] == ours[name] for theirs in ends.values() for one, ours in
                                zip(theirs, first, strict=True))
           for name in ("step", "weights", "optimizer", "loss")},
        "hashes": {site: [[one["weights"], one["optimizer"]] for one in of_site] for site, of_site in ends.items()},
    }  # fmt: skip


def usage_in(life: Life) -> Record:
    """Of the process that lived longest."""
    minutes = round((life.ended_at - life.started_at) / 60, 1)
    return {
        "longest_life": {"site": life.site, "minutes": minutes, "steps": len(life.steps)},
        "growth": growth_of(life.samples), "first_sample": life.samples[:1], "last_sample": life.samples[-1:],
    }  # fmt: skip


def judged(end: Record, args: argparse.Namespace) -> Record:
    """Whether all is as it must be; with the range in which one more undisturbed loss would lie, at 95%."""
    losses = [one["loss"] for one in end["undisturbed"]]
    low, high = -math.inf, math.inf
    if len(losses) > 1:
        margin = margin_95(losses) * math.sqrt(len(losses) + 1)  # of one more, not of the mean
        low, high = statistics.fmean(losses) - margin, statistics.fmean(losses) + margin
    names = ("step",) if args.unequal else ("step", "weights", "optimizer", "loss")
    runs = (end, *end["undisturbed"], end["all_count"])
    equal = all(one[f"{name}_equal"] and one["apart"] <= TOLERANCE for one in runs for name in names)
    within = low <= end["loss"] <= high
    goes_on = max(end["late_s"], default=0.0) <= args.timeout_s + EXTRA_S
    is_good = equal and within and goes_on and not end["steps_missing"] and end["same_processes"]
    band = [low, high] if len(losses) > 1 else None
    return {"band": band, "all_equal": equal, "is_within_noise": within, "others_go_on": goes_on, "is_good": is_good}


def report(records: list[Record], args: argparse.Namespace) -> str:
    """Markdown: one column for each run."""
    ends = [record for record in records if record["kind"] == "end"]
    failures = [f"FAILED: {record['what']}" for record in records if record["kind"] == "failure"]
    if not ends:
        return "\n".join(failures) or "no run has ended"
    rows: dict[str, Callable[[Record], object]] = {
        "minutes": lambda one: f"{one['params']['minutes']:g}",
        "steps": lambda one: one["steps"],
        "kills": lambda one: f"{one['kills']}, {one['second_kills']} of them second ones",
        "kills of the meeting point": lambda one: one["point_kills"],
        "killed before": lambda one: ", ".join(f"{name} {n}" for name, n in sorted(one["kills_by_place"].items())),
        "pause of the others [s], median, longest": lambda one: middle_and_most(one["pauses_s"]),
        "back after the restart [s], median, longest": lambda one: middle_and_most(one["backs_s"]),
        "steps missing": lambda one: one["steps_missing"],
        "steps without a site that was away": lambda one: ", ".join(
            f"{name} {n}" for name, n in one["steps_away"].items()),
        "the others' processes": lambda one: "the same" if one["same_processes"] else "NOT the same",
        "MB over each site's uplink": lambda one: ", ".join(f"{b / 1e6:.0f}" for b in one["uplink_bytes"]) or "-",
        "weights of the sites": lambda one: equality_told(one),
        "loss": lambda one: f"{one['loss']:.4f}",
        "undisturbed, same data": lambda one: f"{one['undisturbed'][0]['loss']:.4f}",
        "undisturbed, other orders": lambda one: ", ".join(f"{o['loss']:.4f}" for o in one["undisturbed"][1:]) or "-",
        "undisturbed, all batches count": lambda one: f"{one['all_count']['loss']:.4f}",
        "range of undisturbed runs, 95%": lambda one: "-" if one["band"] is None else "{:.4f} to {:.4f}".format(
            *one["band"]),
        "longest process": lambda one: f"{one['longest_life']['minutes']:g} min, {one['longest_life']['steps']} steps",
        "its memory [MB], descriptors, threads": usage_told,
        "verdict": lambda one: "good" if one["is_good"] else "NOT good",
    }  # fmt: skip
    header = ["", *(f"{one['params']['codecs']}, ZeRO {one['params']['zero_stage']}" for one in ends)]
    return "\n".join([table(header, [[name, *map(cell, ends)] for name, cell in rows.items()]), *failures])


def equality_told(one: Record) -> str:
    told = f"apart by {one['apart']:.1e}" if one["params"]["unequal"] else "bit-equal"
    return told if one["all_equal"] else f"NOT equal: apart by {one['apart']:.1e}"


def middle_and_most(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "-"


def usage_told(one: Record) -> str:
    if not one["last_sample"]:
        return "-"
    (first,), (last,) = one["first_sample"], one["last_sample"]
    return ", ".join(f"{first[name]:.0f} to {last[name]:.0f}" for name in ("rss_mb", "descriptors", "threads"))
