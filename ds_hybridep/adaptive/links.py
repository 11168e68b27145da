# SPDX-License-Identifier: Apache-2.0
"""The links of a running job.  They are given or measured at its start, and measured again by short bursts.

Transfers of training cannot measure links: they wait for the slower of two ranks, and DeepSpeed's are not visible.
"""

import hashlib
import socket
from dataclasses import replace
from typing import Any

import torch

from ds_hybridep.adaptive.probe import LinkProbe
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.costs import ranks_below
from ds_hybridep.plan.summary import level_settings
from ds_hybridep.transport.channels import Transport

PROBE_LIMIT_S = 2.0  # for measuring all links at start-up
CHANGE = 0.2  # share by which a rate must differ to count as changed
LEAST_BURST_BYTES, MOST_BURST_BYTES = 1 << 15, 1 << 26
GROWTH = 4  # factor by which a burst grows that was too short
LEAST_BURST_S = 0.02  # a shaper lets about a millisecond pass at once, and other processes take about as long
LEAST_BURST_LATENCIES = 8  # a connection takes a few round trips to get up to speed
REPETITIONS = 4  # bursts in all, once one of them says that the link has changed


class JobLinks:
    """The known links of a job.  All ranks must make the same calls, while no other transfer runs."""

    def __init__(self, config: HybridEPConfig, transport: Transport, device: torch.device) -> None:
        self.probe = LinkProbe(transport, device)
        name = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:6], "big")
        hosts = [int(row[0]) for row in self.probe.table([float(name)])]
        self.num_neighbours = hosts.count(hosts[transport.rank])  # ranks on this host
        levels = []
        for index, level in enumerate(config.cluster().levels):
            link = level.link
            if level.size > 1 and (link.bandwidth_bytes_per_s is None or link.latency_s is None):
                level = self.probe.measure(index, limit_s=PROBE_LIMIT_S / len(config.levels))
            levels.append(level)
        self.cluster = Cluster(tuple(levels))

    def record(self) -> list[dict[str, Any]]:
        """The levels as they would stand in a "hybridep" block."""
        return [level_settings(level) for level in self.cluster.levels]

    def measure(self) -> None:
        """Measure all links again.  A known rate stays if the new one differs by no more than CHANGE."""
        levels = []
        for index, level in enumerate(self.cluster.levels):
            known = level.link.bandwidth_bytes_per_s
            if level.size > 1 and known is not None:
                rate = self._burst_rate(index, level.link.latency_s or 0.0, known)
                if abs(rate / known - 1) > CHANGE:
                    level = replace(level, link=replace(level.link, bandwidth_bytes_per_s=rate))
            levels.append(level)
        self.cluster = Cluster(tuple(levels))

    def _burst_rate(self, level: int, latency_s: float, known: float) -> float:
        """Bytes per second of the slowest uplink of a level, by bursts that grow until they take long enough.

        The first burst is short, because the link may have become much slower.  Other work on a machine can only make
        a burst slower, so the fastest of several counts.
        """
        least_s, below = max(LEAST_BURST_S, LEAST_BURST_LATENCIES * latency_s), ranks_below(self.cluster)[level]
        num_bytes = min(max(int(known * least_s / below / GROWTH), LEAST_BURST_BYTES), MOST_BURST_BYTES)
        rate = self.probe.burst(level, num_bytes, latency_s)
        while below * num_bytes / rate < least_s / 2 and num_bytes < MOST_BURST_BYTES:
            num_bytes *= GROWTH
            rate = self.probe.burst(level, num_bytes, latency_s)
        if abs(rate / known - 1) > CHANGE:
            rate = max(rate, *(self.probe.burst(level, num_bytes, latency_s) for _ in range(REPETITIONS - 1)))
        return rate
