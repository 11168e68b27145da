# SPDX-License-Identifier: Apache-2.0
"""Shows that expert weights and gradients travel while other layers compute: a trace and a table of one step.

    sudo ds_hybridep lab --dcs 2x2 --wan 200mbit -- python benchmarks/overlap.py --trace step.json

    sudo ds_hybridep lab --dcs 2x2 --wan 100mbit -- python benchmarks/overlap.py --trace step.json --compute sleep \
        --wan-mbit 100 --codec '{"type": "low_rank", "rank": 7, "factors": "int4"}'

Rank 0 writes the Chrome/Perfetto trace of one optimizer step and the forward and backward after it, then prints for
each layer when its weights and its gradients travelled, and during which layers' computation.  With --wan-mbit it also
says how much of the travelling was hidden, and how much could have been: each message leaves when it did, or when the
link has carried those before it, takes its bytes at that rate, and computation goes on as soon as it is there.  While
a rank waits for one that computes longer, it does not wait for the link.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

import ds_hybridep
from ds_hybridep.transport.trace import TRANSFER_CATEGORY

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_lm
from sleep_model import SleepModel

KINDS = {"expert_weights": "shipping of expert weights", "expert_gradients": "return of expert gradients"}
Interval = tuple[float, float]  # microseconds of the trace


def build_engine(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    args.ep_size = dist.get_world_size()
    model = SleepModel(args) if args.compute == "sleep" else train_lm.ByteModel(args)
    codec = json.loads(args.codec) if args.codec.startswith("{") else args.codec
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1_000_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "hybridep": {
            "levels": [
                {"name": "dc", "size": 2, "domain_size": 2, "weight_codec": codec, "gradient_codec": codec},
                {"name": "gpu", "size": args.ep_size // 2, "domain_size": 1},
            ],
            "advanced": {"prefetch_depth": args.prefetch_depth},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def intervals(events: Sequence[dict[str, Any]], prefix: str, layer: str) -> list[Interval]:
    """When ranges of that name ran, in order of time."""
    return sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event["name"] == f"{prefix}{layer}"
    )


def backward_window(events: Sequence[dict[str, Any]], layer: str) -> list[Interval]:
    """The time from the first to the last exchange of tokens in the layer's backward."""
    first = intervals(events, "hybridep::dispatch of output gradients::", layer)
    last = intervals(events, "hybridep::return of input gradients::", layer)
    return [(first[0][0], last[-1][1])] if first and last else []


def overlap(one: Interval, others: Sequence[Interval]) -> float:
    """Microseconds that `one` shares with any of `others` (which do not overlap each other)."""
    return sum(max(0.0, min(one[1], end) - max(one[0], start)) for start, end in others)


def report(trace: dict[str, Any], layers: Sequence[str]) -> None:
    events = trace["traceEvents"]
    transfers = [event for event in events if event.get("cat") == TRANSFER_CATEGORY]
    start = min(float(event["ts"]) for event in transfers)
    experts = {layer: intervals(events, "hybridep::experts::", layer) for layer in layers}
    backwards = {layer: backward_window(events, layer) for layer in layers}
    print(f"{'layer':30} {'what':18} {'travels [ms]':>18} {'waited for [ms]':>16}   travels during")
    for layer in layers:
        for kind, what in KINDS.items():
            for event in (e for e in transfers if e["args"]["kind"] == kind and e["args"]["layer"] == layer):
                travel = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
                waits = intervals(events, "hybridep::wait::", f"{what} of {layer}")
                waited_ms = sum(overlap(travel, [wait]) for wait in waits) / 1e3
                others = experts if kind == "expert_weights" else backwards
                during = [name for name in layers if name != layer and overlap(travel, others[name]) > 0]
                when = f"{(travel[0] - start) / 1e3:8.1f} {(travel[1] - start) / 1e3:8.1f}"
                names = ", ".join(str(layers.index(name)) for name in during) or "none"
                verb = "forward of layers" if kind == "expert_weights" else "backward of layers"
                print(f"{layer:30} {kind:18} {when:>18} {waited_ms:16.1f}   {verb} {names}")


def transfers_of(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Transfers of a kind by the time at which this rank was ready; ranks start them in one order."""
    transfers = [e for e in trace["traceEvents"] if e.get("cat") == TRANSFER_CATEGORY and e["args"]["kind"] == kind]
    return sorted(transfers, key=lambda event: float(event["ts"]))


def report_hidden(traces: Sequence[dict[str, Any]], ranks_per_dc: int, wan_bytes_per_us: float) -> None:
    """How much of what travelled was hidden behind computation, and how much of it could have been.

    traces: of the ranks that exchange experts, the one to tell of first; of one machine, whose clock they share.
    """
    print(f"\n{'what':18} {'on the link [ms]':>17} {'waited for [ms]':>16} {'hidden':>8} {'could be hidden':>16}")
    for kind, what in KINDS.items():
        transfers, *others = (transfers_of(trace, kind) for trace in traces)
        # A rank's bytes are both directions'; all ranks of a DC share its uplink.
        link_us = [event["args"]["bytes"] / 2 * ranks_per_dc / wan_bytes_per_us for event in transfers]
        starts, waits = [], []
        for ends in zip(transfers, *others, strict=True):
            layer = ends[0]["args"]["layer"]
            assert all(end["args"]["layer"] == layer for end in ends)
            start = max(float(end["ts"]) for end in ends)
            waited = intervals(traces[0]["traceEvents"], "hybridep::wait::", f"{what} of {layer}")
            clipped = [(max(begin, start), end) for begin, end in waited if end > start]
            starts.append(start)
            waits.append(clipped[0] if clipped else None)
        waited_us = sum(wait[1] - wait[0] for wait in waits if wait is not None)
        least_us = least_wait(starts, link_us, waits)
        total_us = sum(link_us)
        print(
            f"{kind:18} {total_us / 1e3:17.1f} {waited_us / 1e3:16.1f} {1 - waited_us / total_us:8.0%} "
            f"{1 - least_us / total_us:16.0%}"
        )


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
            begin = wait[0] - saved
            needed = max(0.0, arrival - begin)
            waited += needed
            saved += wait[1] - wait[0] - needed
    return waited


def layer_names(trace: dict[str, Any], model: torch.nn.Module) -> list[str]:
    """Names like "blocks.3.moe.deepspeed_moe", in the order of the model."""
    names = {e["args"]["layer"] for e in trace["traceEvents"] if e.get("cat") == TRANSFER_CATEGORY}
    return [name for name, _ in model.named_modules() if name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 64), ("layers", 6), ("experts", 8), ("top-k", 2), ("seq-len", 128), ("rows", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--prefetch-depth", type=int, default=2)
    parser.add_argument("--compute", choices=("real", "sleep"), default="real", help="see sleep_model.py")
    parser.add_argument("--dense-ms", type=float, default=2.0, help="slept per dense sublayer and sequence, forward")
    parser.add_argument("--row-us", type=float, default=10.0, help="slept per row and expert, forward")
    parser.add_argument("--codec", default="identity", help="of weights and gradients between the DCs: a name or JSON")
    parser.add_argument("--wan-mbit", type=float, help="rate of the uplinks, to say what could be hidden")
    parser.add_argument("--trace", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    engine = build_engine(args)
    corpus, _ = train_lm.read_corpus()

    def forward_and_backward(step: int) -> None:
        batch = train_lm.batch_at(corpus, (0, step, 0, dist.get_rank()), rows=args.rows, seq_len=args.seq_len)
        loss, aux_loss = engine(*batch)
        engine.backward(loss + train_lm.AUX_LOSS_WEIGHT * aux_loss)

    for step in range(4):
        forward_and_backward(step)
        engine.step()
    forward_and_backward(4)
    with ds_hybridep.trace(engine, args.trace.with_suffix(f".rank{dist.get_rank()}.json")):
        engine.step()
        forward_and_backward(5)
    engine.step()
    ds_hybridep.detach(engine)
    dist.barrier()  # all traces are written
    if dist.get_rank() == 0:
        trace = json.loads(args.trace.with_suffix(".rank0.json").read_text())
        report(trace, layer_names(trace, engine.module))
        if args.wan_mbit is not None:
            partner = args.trace.with_suffix(f".rank{args.ep_size // 2}.json")
            report_hidden([trace, json.loads(partner.read_text())], args.ep_size // 2, args.wan_mbit / 8)
    dist.barrier()


if __name__ == "__main__":
    main()
