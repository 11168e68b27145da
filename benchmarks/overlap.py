# SPDX-License-Identifier: Apache-2.0
"""How much of the travelling of expert weights and gradients is hidden behind computation: a trace of one step.

    python -m benchmarks overlap --trace step.json
    python -m benchmarks overlap --trace step.json --compute sleep --codec low_rank

Rank 0 writes the Chrome/Perfetto trace of one optimizer step and the forward and backward after it.  What could be
hidden: each message leaves when it did, or when the link has carried those before it, takes its bytes at that rate,
and computation goes on as soon as it is there.  While a rank waits for one that computes longer, it does not wait for
the link.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

import ds_hybridep
from benchmarks.common import Record, Records, run_job, table
from benchmarks.training import Job, Plan, add_model_arguments, build, train_lm, train_step
from ds_hybridep.lab.topology import LinkSpec, parse_rate
from ds_hybridep.transport.trace import TRANSFER_CATEGORY

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

KINDS = {"expert_weights": "shipping of expert weights", "expert_gradients": "return of expert gradients"}
Interval = tuple[float, float]  # microseconds of the trace
Events = Sequence[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wan", default="100mbit", help="rate of the uplinks")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--codec", default="identity", help="of weights and gradients between the DCs: a name or JSON")
    parser.add_argument("--trace", type=Path, default=Path("step.json"))
    add_model_arguments(parser)
    parser.set_defaults(layers=6)


def run(args: argparse.Namespace, records: Records) -> None:
    run_job("2x2", LinkSpec(wan_bits_per_s=parse_rate(args.wan, "--wan")), records)


def rank(args: argparse.Namespace, job: Job) -> None:
    codec = json.loads(args.codec) if args.codec.startswith("{") else args.codec
    plan = Plan("[2,1]", 4, (2, 1), {"weight_codec": codec, "gradient_codec": codec})
    engine = build(args, plan, 1, (2, 2)).engine
    corpus, _ = train_lm.read_corpus()
    for step in range(4):
        train_step(engine, corpus, step, rows=args.rows, seq_len=args.seq_len)

    def forward_and_backward(step: int) -> None:
        batch = train_lm.batch_at(corpus, (0, step, 0, job.rank), rows=args.rows, seq_len=args.seq_len)
        loss, aux_loss = engine(*batch)
        engine.backward(loss + train_lm.AUX_LOSS_WEIGHT * aux_loss)

    forward_and_backward(4)
    with ds_hybridep.trace(engine, job.folder / f"rank{job.rank}.json"):
        engine.step()
        forward_and_backward(5)
    engine.step()
    ds_hybridep.detach(engine)
    dist.barrier()  # all traces are written
    if job.rank == 0:
        args.trace.write_text((job.folder / "rank0.json").read_text())
    # Ranks 0 and 2 exchange experts.
    events = [json.loads((job.folder / f"rank{one}.json").read_text())["traceEvents"] for one in (0, 2)]
    wan_bytes_per_us = parse_rate(args.wan, "--wan") / 8e6
    params = {name: getattr(args, name) for name in ("wan", "rows", "codec", "compute", "layers", "hidden")}
    job.record(params, hidden=[hidden(events, kind, wan_bytes_per_us) for kind in KINDS])
    job.end()


def intervals(events: Events, name: str) -> list[Interval]:
    """When ranges of that name ran, in order of time."""
    found = [event for event in events if event.get("ph") == "X" and event["name"] == name]
    return sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in found)


def transfers_of(events: Events, kind: str) -> list[dict[str, Any]]:
    """Transfers of a kind by the time at which this rank was ready; ranks start them in one order."""
    found = [event for event in events if event.get("cat") == TRANSFER_CATEGORY and event["args"]["kind"] == kind]
    return sorted(found, key=lambda event: float(event["ts"]))


def hidden(events_of_ranks: Sequence[Events], kind: str, wan_bytes_per_us: float) -> Record:
    """How much of what travelled was hidden behind computation, and how much of it could have been.

    The ranks exchange experts, and are of one machine, whose clock they share.
    """
    transfers, *others = (transfers_of(events, kind) for events in events_of_ranks)
    # A rank's bytes are both directions'; the two ranks of a DC share its uplink.
    link_us = [event["args"]["bytes"] / wan_bytes_per_us for event in transfers]
    starts: list[float] = []
    waits: list[Interval | None] = []
    for ends in zip(transfers, *others, strict=True):
        layer = ends[0]["args"]["layer"]
        starts.append(max(float(end["ts"]) for end in ends))
        waited = intervals(events_of_ranks[0], f"hybridep::wait::{KINDS[kind]} of {layer}")
        waits.append(next(((max(begin, starts[-1]), end) for begin, end in waited if end > starts[-1]), None))
    waited_us = sum(wait[1] - wait[0] for wait in waits if wait is not None)
    return {
        "kind": kind, "link_us": sum(link_us), "waited_us": waited_us, "least_us": least_wait(starts, link_us, waits)
    }  # fmt: skip


def least_wait(starts: Sequence[float], link_us: Sequence[float], waits: Sequence[Interval | None]) -> float:
    """Microseconds that computation has to wait for messages if the link never idles and nothing else delays them.

    Args:
        starts: when each message was handed over, ascending.
        link_us: how long the link takes for each.
        waits: when the program waited for each; None where it was there already.
    """
    arrivals, free = [], float("-inf")
    for start, duration in zip(starts, link_us, strict=True):
        free = max(free, start) + duration
        arrivals.append(free)
    waited = saved = 0.0
    for arrival, wait in sorted(zip(arrivals, waits, strict=True), key=lambda pair: pair[1] or (0.0, 0.0)):
        if wait is not None:
            # What earlier messages took less than they did lets computation reach this wait sooner.
            needed = max(0.0, arrival - (wait[0] - saved))
            waited += needed
            saved += wait[1] - wait[0] - needed
    return waited


def report(records: list[Record], args: argparse.Namespace) -> str:
    rows = [
        [one["kind"], f"{one['link_us'] / 1e3:.1f}", f"{one['waited_us'] / 1e3:.1f}",
         f"{1 - one['waited_us'] / one['link_us']:.0%}", f"{1 - one['least_us'] / one['link_us']:.0%}"]
        for record in records
        for one in record["hidden"]
    ]  # fmt: skip
    return table(("what", "on the link, ms", "waited for, ms", "hidden", "could be hidden"), rows)
