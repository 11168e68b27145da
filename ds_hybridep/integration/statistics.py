# SPDX-License-Identifier: Apache-2.0
"""Counts what a rank and the job moved, as plain dicts for `ds_hybridep.stats`, the monitor and the run record."""

import itertools
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, fields
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.plan.partition import Partition
from ds_hybridep.sync.counters import CodecSums
from ds_hybridep.tokens.layer import HybridMoE
from ds_hybridep.transport.channels import KINDS, Purpose, Transport

NUM_CODEC_SUMS = len(fields(CodecSums))
EXPOSED_KINDS = ("tokens", "expert_weights", "expert_gradients", "dense")
NUM_TIMED_STEPS = 100
LAYER_COUNTERS = ("calls", "rows_sent", "rows_computed")


class Statistics:
    """Counters of one attached model.

    layers: each with its partition and the bytes of one row.
    counts_dense: False if DeepSpeed itself sends what several ranks hold; records then have None for kind "dense".
    """

    def __init__(
        self, transport: Transport, layers: Sequence[tuple[HybridMoE, Partition, int]], *, counts_dense: bool = True
    ) -> None:
        self._transport = transport
        self._layers = list(layers)
        self._counts_dense = counts_dense
        self.num_steps = 0
        self._reported: tuple[int, Tensor] = 0, torch.zeros(())  # last report: steps, seconds waited by rank
        self.step_ends: deque[float] = deque(maxlen=NUM_TIMED_STEPS + 1)

    def step_s(self) -> float | None:
        """Return the median seconds from one step to the next, over this rank's last steps; None before the second."""
        seconds = [later - earlier for earlier, later in itertools.pairwise(self.step_ends)]
        return statistics.median(seconds) if seconds else None

    def local(self) -> dict[str, Any]:
        """Return this rank's counters since attach, JSON-able.  Bytes and messages are those given to the transport.

        Values that are not counted are None.
        """
        record = self._counts()
        if not self._counts_dense:
            _leave_out_dense(record, ("sent_bytes", "received_bytes", "sent_messages"))
        return record

    def _counts(self) -> dict[str, Any]:
        traffic = self._transport.traffic
        counters = {name: getattr(traffic, name) for name in ("sent_bytes", "received_bytes", "sent_messages")}
        levels = zip(self._transport.cluster.levels, self._plain_ep_bytes(), strict=True)
        return {
            "rank": self._transport.rank,
            "steps": self.num_steps,
            "levels": [
                {
                    "name": level.name,
                    **{
                        name: {kind: counts.get((index, kind), 0) for kind in KINDS}
                        for name, counts in counters.items()
                    },
                    "plain_ep_bytes": plain_ep_bytes,
                    "waits": traffic.waits.get(index, 0),
                }
                for index, (level, plain_ep_bytes) in enumerate(levels)
            ],
            "exposed_s": {kind: traffic.exposed_s.get(kind, 0.0) for kind in EXPOSED_KINDS},
            "layers": [
                {"name": layer.name, **{name: getattr(layer.stats, name) for name in LAYER_COUNTERS}}
                for layer, _, _ in self._layers
            ],
            "link": self._transport.link.report(),
        }

    def codecs(self) -> list[dict[str, float]]:
        """Return what lossy codecs do in each layer on this rank; reads all owned weights."""
        return [sums.record() if (sums := self._codec_sums(layer)) is not None else {} for layer, _, _ in self._layers]

    def _codec_sums(self, layer: HybridMoE) -> CodecSums | None:
        if layer.migration is None:
            return None
        replicas = layer.migration.layers[layer.position].replicas
        if replicas.feedback is None:
            return None
        streams = replicas.streams
        # This runs after the encoding of the next weights, which changes mirrors.
        with nullcontext() if streams is None else streams.aside():
            sums = replicas.feedback.sums(replicas.own.sources())
        if streams is not None:
            streams.join()
        return sums

    def gather_job(self) -> dict[str, Any] | None:
        """Return the job's counters on rank 0, None on other ranks; all ranks must call at the same step.

        Bytes are sums over ranks; exposed seconds and waits are means.  "step_s" and "link" are rank 0's.  A layer's
        "codecs" is `CodecSums.record` of the sums over ranks, "imbalance" is max over mean of its rows per rank, and
        "expert_load" is max over mean of its rows per expert.  "slowest" is the rank that has waited least for others
        since the last report; it has the seconds that this rank waited per step, and the mean of the other ranks.
        """
        transport = self._transport
        local = self._counts()
        codecs = [astuple(self._codec_sums(layer) or CodecSums()) for layer, _, _ in self._layers]
        numbers: list[float] = []  # in the order in which `_job_record` reads them
        for level in local["levels"]:
            numbers += [*level["sent_bytes"].values(), level["plain_ep_bytes"], level["waits"]]
        numbers += [*local["exposed_s"].values(), *(layer["rows_computed"] for layer in local["layers"])]
        loads = [layer.stats.expert_rows[expert] for layer, num in self._num_experts() for expert in range(num)]
        own = torch.tensor([*numbers, *itertools.chain(*codecs), *loads], dtype=torch.float64)
        if transport.world_size == 1:
            return self._job_record([own])
        channel = transport.channel("report", range(transport.world_size), hub=0)
        purpose = Purpose("control", "report to rank 0")
        if transport.rank != 0:
            channel.start([(0, own)], [], purpose).wait()
            return None
        tables = [own, *(torch.empty_like(own) for _ in range(1, transport.world_size))]
        channel.start([], [(rank, tables[rank]) for rank in range(1, transport.world_size)], purpose).wait()
        return self._job_record(tables)

    def _num_experts(self) -> list[tuple[HybridMoE, int]]:
        return [(layer, len(layer.expert_to_slot)) for layer, _, _ in self._layers]

    def _slowest(self, waited_s: Tensor) -> dict[str, Any]:
        """Return the rank that waited least since the last report.  waited_s: [ranks], since attach."""
        steps, before_s = self._reported
        self._reported = self.num_steps, waited_s
        per_step_s = (waited_s - before_s) / max(self.num_steps - steps, 1)
        rank = int(per_step_s.argmin())
        others_s = (per_step_s.sum() - per_step_s[rank]) / max(len(per_step_s) - 1, 1)
        return {"rank": rank, "waited_s": float(per_step_s[rank]), "others_waited_s": float(others_s)}

    def _job_record(self, tables: Sequence[Tensor]) -> dict[str, Any]:
        stacked, num_layers = torch.stack(list(tables)), len(self._layers)
        num_experts = [num for _, num in self._num_experts()]
        num_others = stacked.shape[1] - num_layers * (1 + NUM_CODEC_SUMS) - sum(num_experts)
        others, rows, sums, loads = stacked.split(
            [num_others, num_layers, num_layers * NUM_CODEC_SUMS, sum(num_experts)], dim=1
        )
        slowest = self._slowest(others[:, -len(EXPOSED_KINDS) :].sum(1))
        totals = iter(others.sum(0).tolist())
        levels: list[dict[str, Any]] = []
        for level in self._transport.cluster.levels:
            sent_bytes = {kind: int(next(totals)) for kind in KINDS}
            plain_ep_bytes, waits = int(next(totals)), next(totals) / len(tables)
            levels.append(
                {"name": level.name, "sent_bytes": sent_bytes, "plain_ep_bytes": plain_ep_bytes, "waits": waits}
            )
        exposed_s = {kind: next(totals) / len(tables) for kind in EXPOSED_KINDS}
        imbalance = (rows.max(0).values / rows.mean(0).clamp_min(1e-30)).tolist()
        load = [float(one.max() / one.mean().clamp_min(1e-30)) for one in loads.sum(0).split(num_experts)]
        codecs = sums.sum(0).view(num_layers, NUM_CODEC_SUMS).tolist()
        layers = []
        for (layer, _, _), value, most, own in zip(self._layers, imbalance, load, codecs, strict=True):
            encoded = CodecSums(*own).record(len(tables)) if any(own) else {}
            layers.append({"name": layer.name, "imbalance": value, "expert_load": most, "codecs": encoded})
        record: dict[str, Any] = {
            "steps": self.num_steps,
            "world_size": len(tables),
            "step_s": self.step_s(),
            "levels": levels,
            "exposed_s": exposed_s,
            "slowest": slowest,
            "layers": layers,
            "link": self._transport.link.report(),
        }
        if not self._counts_dense:
            _leave_out_dense(record, ("sent_bytes",))
        return record

    def _plain_ep_bytes(self) -> list[int]:
        """Return the bytes per level that this rank would have sent in DeepSpeed's own all-to-alls.

        A combine counts as much as its dispatch, which it mirrors.  The sum over all ranks is right.
        """
        transport = self._transport
        totals = [0] * len(transport.cluster.levels)
        for layer, partition, row_bytes in self._layers:
            rows_to_ranks = torch.as_tensor(layer.stats.plain_rows).expand(len(partition.group_ranks)).tolist()
            for rank, num_rows in zip(partition.group_ranks, rows_to_ranks, strict=True):
                if rank != transport.rank:
                    totals[transport.level_to(rank)] += int(num_rows) * row_bytes
        return totals


def _leave_out_dense(record: dict[str, Any], counters: Sequence[str]) -> None:
    """Set kind "dense" to None, unless an earlier plan has counted some."""
    found = [level[name] for level in record["levels"] for name in counters]
    if not any(counts["dense"] for counts in found):
        for counts in (record["exposed_s"], *found):
            counts["dense"] = None


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
    for name in ("imbalance", "expert_load"):
        values |= {f"{name}/{layer['name']}": layer.get(name) for layer in record["layers"]}
    values |= {f"slowest/{name}": value for name, value in record.get("slowest", {}).items()}
    return [(f"HybridEP/{tag}", value, num_samples) for tag, value in values.items() if value is not None]
