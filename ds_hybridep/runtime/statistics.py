# SPDX-License-Identifier: Apache-2.0
"""Counts what a rank and the job moved, as plain dicts for `ds_hybridep.stats`, the monitor and the run record."""

import itertools
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ds_hybridep.runtime.build import PlannedLayer
from ds_hybridep.runtime.hot_experts import HotExperts
from ds_hybridep.sync.encoding import CodecCounters
from ds_hybridep.tokens.layer import HybridMoE
from ds_hybridep.transport.channels import KINDS, Purpose, Transport

EXPOSED_KINDS = ("tokens", "expert_weights", "expert_gradients", "dense")
NUM_TIMED_STEPS = 100


class RuntimeStatistics:
    """Counters of one attached model.

    layers: each as it runs and as it was planned.
    hot: the hot experts of these layers.
    counts_dense: False if DeepSpeed itself sends what several ranks hold; records then have None for kind "dense".
    """

    def __init__(
        self,
        transport: Transport,
        layers: Sequence[tuple[HybridMoE, PlannedLayer]],
        hot: HotExperts,
        *,
        counts_dense: bool,
    ) -> None:
        self._hot = hot
        self._transport, self._layers, self._counts_dense = transport, list(layers), counts_dense
        self.num_steps = 0
        self._reported: tuple[int, list[float]] | None = None  # last report: steps, seconds waited by rank
        self.step_ends: deque[float] = deque(maxlen=NUM_TIMED_STEPS + 1)

    def local(self) -> dict[str, Any]:
        """Return this rank's counters since attach, JSON-able.  Bytes and messages are those given to the transport.

        Values that are not counted are None.  A layer's "codecs" is what lossy codecs do on this rank; to know it, all
        owned weights are read.
        """
        return {"rank": self._transport.rank, **self._record(self._counters(), 1)}

    def gather_job(self) -> dict[str, Any] | None:
        """Return the job's counters on rank 0, None on other ranks; all ranks must call at the same step.

        Counts are sums over ranks; exposed seconds and waits are means.  "step_s", the median seconds from one step to
        the next, and "link" are rank 0's.  A layer's "codecs" is `CodecCounters.record` of the sums over ranks,
        "imbalance" is max over mean of its rows per rank, and "expert_load" is max over mean of its rows per expert.
        With hot experts, "load_before" and "load_after" are max over mean of the rows per rank in the last steps,
        without and with the present "hot_experts".
        "slowest" is the rank that has waited least for others since the last report; it has the seconds that this rank
        waited per step, and the mean of the other ranks.
        """
        ranks = self._gather(self._counters())
        if ranks is None:
            return None
        total = tree_map(lambda *counts: sum(counts), *ranks)
        loads = [
            {
                "imbalance": _over_mean([one["layers"][at]["rows_computed"] for one in ranks]),
                "expert_load": _over_mean(layer["expert_rows"]),
            }
            for at, layer in enumerate(total["layers"])
        ]
        record = self._record(total, len(ranks))
        for layer, found in zip(record["layers"], loads, strict=True):
            layer.update(found)
        waited_s = [sum(one["exposed_s"].values()) for one in ranks]
        seconds = [later - earlier for earlier, later in itertools.pairwise(self.step_ends)]
        step_s = statistics.median(seconds) if seconds else None
        return {**record, "world_size": len(ranks), "step_s": step_s, "slowest": self._slowest(waited_s)}

    def _counters(self) -> dict[str, Any]:
        """Return numbers in dicts and lists of the same shape on all ranks; those of several ranks can be added."""
        traffic, layers = self._transport.traffic, []
        tables = {
            "sent_bytes": traffic.sent_bytes,
            "received_bytes": traffic.received_bytes,
            "sent_messages": traffic.sent_messages,
        }
        for layer, _ in self._layers:
            stats = layer.stats
            layers.append(
                {
                    "calls": stats.calls,
                    "rows_sent": stats.rows_sent,
                    "rows_computed": stats.rows_computed,
                    "expert_rows": [stats.expert_rows[expert] for expert in range(len(layer.held.table))],
                    "codecs": asdict(self._codec_counters(layer) or CodecCounters()),
                }
            )
        return {
            "levels": [
                {
                    **{name: {kind: table.get((at, kind), 0) for kind in KINDS} for name, table in tables.items()},
                    "plain_ep_bytes": num_bytes,
                    "waits": traffic.waits.get(at, 0),
                }
                for at, num_bytes in enumerate(self._plain_ep_bytes())
            ],
            "exposed_s": {kind: traffic.exposed_s.get(kind, 0.0) for kind in EXPOSED_KINDS},
            "layers": layers,
        }

    def _record(self, counters: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
        """Return the counters of some ranks together, with names; None for "dense" if DeepSpeed sends that."""
        levels = [
            {"name": level.name, **found, "waits": found["waits"] / num_ranks}
            for level, found in zip(self._transport.cluster.levels, counters["levels"], strict=True)
        ]
        layers = []
        for (layer, _), found in zip(self._layers, counters["layers"], strict=True):
            sums = CodecCounters(**found["codecs"])
            codecs = sums.record(num_ranks) if any(found["codecs"].values()) else {}
            layers.append({"name": layer.name, **found, "codecs": codecs, **self._hot.report(layer.name)})
            del layers[-1]["expert_rows"]
        exposed_s = {kind: seconds / num_ranks for kind, seconds in counters["exposed_s"].items()}
        # An earlier plan may have counted some.
        tables = [table for level in levels for table in level.values() if isinstance(table, dict)]
        if not self._counts_dense and not any(table["dense"] for table in tables):
            for table in (exposed_s, *tables):
                table["dense"] = None
        link = self._transport.link.report()
        return {"steps": self.num_steps, "levels": levels, "exposed_s": exposed_s, "layers": layers, "link": link}

    def _gather(self, counters: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Return the counters of all ranks on rank 0; None on other ranks."""
        transport = self._transport
        leaves, shape = tree_flatten(counters)
        own = torch.tensor(leaves, dtype=torch.float64)
        table = [own, *(torch.empty_like(own) for _ in range(1, transport.world_size))]
        if transport.world_size > 1:
            channel = transport.channel("report", range(transport.world_size), hub=0)
            purpose = Purpose("control", "report to rank 0")
            if transport.rank != 0:
                channel.start([(0, own)], [], purpose).wait()
                return None
            channel.start([], list(enumerate(table))[1:], purpose).wait()
        rows = ([type(leaf)(value) for leaf, value in zip(leaves, row.tolist(), strict=True)] for row in table)
        return [tree_unflatten(row, shape) for row in rows]

    def _codec_counters(self, layer: HybridMoE) -> CodecCounters | None:
        if layer.migration is None:
            return None
        replicas = layer.migration.layers[layer.position].replicas
        if replicas.codecs is None:
            return None
        streams = replicas.streams
        # This runs after the encoding of the next weights, which changes mirrors.
        with nullcontext() if streams is None else streams.aside():
            sums = replicas.codecs.stats(replicas.own.sources())
        if streams is not None:
            streams.wait_for_side()
        return sums

    def _slowest(self, waited_s: list[float]) -> dict[str, Any]:
        """Return the rank that waited least since the last report.  waited_s: by rank, since attach."""
        steps, before_s = self._reported or (0, [0.0] * len(waited_s))
        self._reported = self.num_steps, waited_s
        per_step_s = [
            (now - then) / max(self.num_steps - steps, 1) for now, then in zip(waited_s, before_s, strict=True)
        ]
        rank = per_step_s.index(min(per_step_s))
        others_s = (sum(per_step_s) - per_step_s[rank]) / max(len(per_step_s) - 1, 1)
        return {"rank": rank, "waited_s": per_step_s[rank], "others_waited_s": others_s}

    def _plain_ep_bytes(self) -> list[int]:
        """Return the bytes per level that this rank would have sent in DeepSpeed's own all-to-alls.

        A combine counts as much as its dispatch, which it mirrors.  The sum over all ranks is right.
        """
        transport = self._transport
        totals = [0] * len(transport.cluster.levels)
        for layer, planned in self._layers:
            ranks, spec = planned.partition.group_ranks, planned.spec
            rows_to_ranks = torch.as_tensor(layer.stats.plain_rows).expand(len(ranks)).tolist()
            for rank, num_rows in zip(ranks, rows_to_ranks, strict=True):
                if rank != transport.rank:
                    num_bytes = int(num_rows) * spec.hidden * spec.sample.element_size()
                    totals[transport.level_to(rank)] += num_bytes
        return totals


def _over_mean(numbers: Sequence[float]) -> float:
    return max(numbers) / max(statistics.fmean(numbers), 1e-30)


def summarize(record: Mapping[str, Any]) -> str:
    """Describe a job record in one line: what each level carried, beside what plain EP would have sent."""
    steps = max(record["steps"], 1)
    parts = []
    for level in record["levels"]:
        plain, dense = level["plain_ep_bytes"], level["sent_bytes"]["dense"] or 0
        sent = sum(count or 0 for count in level["sent_bytes"].values())
        # Plain EP sends dense gradients and parameters too, but its count leaves them out.
        share = f" ({(sent - dense) / plain:.0%} of plain EP)" if plain else ""
        parts.append(f"{level['name']} {sent / steps / 1e6:.2f} MB{share}")
    waited_s = sum(seconds or 0.0 for seconds in record["exposed_s"].values()) / steps
    uncounted = " (dense not counted: DeepSpeed sends it)" if record["exposed_s"]["dense"] is None else ""
    return (
        f"hybridep after {record['steps']} steps, per step: sent over {', '.join(parts)}{uncounted}; "
        f"waited {waited_s:.3f} s"
    )


def monitor_events(record: Mapping[str, Any], num_samples: int) -> list[tuple[str, float, int]]:
    """Return DeepSpeed monitor events (tag, value, samples) of a job record."""
    steps = max(record["steps"], 1)
    values = {
        f"{level['name']}/{kind}_MB_per_step": None if sent is None else sent / steps / 1e6
        for level in record["levels"]
        for kind, sent in level["sent_bytes"].items()
    }
    values |= {f"exposed_s/{kind}": value for kind, value in record["exposed_s"].items()}
    for name in ("imbalance", "expert_load", "load_before", "load_after"):
        values |= {f"{name}/{layer['name']}": layer.get(name) for layer in record["layers"]}
    values |= {f"slowest/{name}": value for name, value in record.get("slowest", {}).items()}
    return [(f"HybridEP/{tag}", value, num_samples) for tag, value in values.items() if value is not None]
