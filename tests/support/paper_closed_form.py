# SPDX-License-Identifier: Apache-2.0
"""The paper's closed form: one level, forward only, one expert per GPU, even routing.  An oracle for special cases."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PaperCase:
    """Arguments of the paper's stream model.

    num_gpus: G, at least 2.
    token_bytes: D, token data of one GPU.
    expert_bytes: P, of one expert.
    bandwidth_bytes_per_s: B.
    pre_expert_s: PE, computation before the experts, which gathering may hide behind.
    """

    num_gpus: int
    token_bytes: float
    expert_bytes: float
    bandwidth_bytes_per_s: float
    pre_expert_s: float


def exchanged_share(num_gpus: int, domain_size: int) -> float:
    """p of domains of `domain_size`: the share of other GPUs' chunks that go by all-to-all, (G - S) / (G - 1)."""
    return (num_gpus - domain_size) / (num_gpus - 1)


def all_to_all_s(case: PaperCase, share: float) -> float:
    """Seconds of one all-to-all: D (G - 1) p / (G B).  Source: paper (3)."""
    num_gpus = case.num_gpus
    return case.token_bytes * (num_gpus - 1) * share / (num_gpus * case.bandwidth_bytes_per_s)


def all_gather_s(case: PaperCase, share: float) -> float:
    """Seconds to gather the experts of a domain: P (G - 1) (1 - p) / B.  Source: paper (4)."""
    return case.expert_bytes * (case.num_gpus - 1) * (1.0 - share) / case.bandwidth_bytes_per_s


def latency_s(case: PaperCase, share: float) -> float:
    """Seconds before and around the experts: max(PE, AG) + 2 A2A.  Source: paper (5), (7), cases 1 and 2."""
    return max(case.pre_expert_s, all_gather_s(case, share)) + 2.0 * all_to_all_s(case, share)


def best_share(case: PaperCase) -> float:
    """The p in [0, 1] of least latency: 0 where 2 D >= G P, else 1 - B PE / (P (G - 1)).

    Source: paper, the two cases: gathering is free while it hides behind PE; beyond that it pays where 2 D >= G P.
    """
    if 2.0 * case.token_bytes >= case.num_gpus * case.expert_bytes:
        return 0.0
    hidden = case.bandwidth_bytes_per_s * case.pre_expert_s / (case.expert_bytes * (case.num_gpus - 1))
    return min(max(1.0 - hidden, 0.0), 1.0) if math.isfinite(hidden) else 0.0
