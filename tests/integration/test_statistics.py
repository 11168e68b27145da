# SPDX-License-Identifier: Apache-2.0
"""What a job record says in the log and to DeepSpeed's monitor."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ds_hybridep.commands.record import format_run_record
from ds_hybridep.config import parse_config
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.plan.plan import plan_of
from ds_hybridep.runtime.build import PlannedLayer, describe
from ds_hybridep.runtime.statistics import monitor_events, summarize

RECORD: dict[str, Any] = {
    "steps": 10,
    "world_size": 4,
    "levels": [
        {
            "name": "dc",
            "sent_bytes": {
                "tokens": 0,
                "expert_weights": 20_000_000,
                "expert_gradients": 15_000_000,
                "dense": 5_000_000,
                "control": 0,
            },
            "plain_ep_bytes": 100_000_000,
        },
        {
            "name": "gpu",
            "sent_bytes": {"tokens": 80_000_000, "expert_weights": 0, "expert_gradients": 0, "dense": 0, "control": 0},
            "plain_ep_bytes": 0,
        },
    ],
    "exposed_s": {"tokens": 0.25, "expert_weights": 0.05, "expert_gradients": 0.1, "dense": 0.05},
    "slowest": {"rank": 3, "waited_s": 0.01, "others_waited_s": 0.06},
    "layers": [{"name": "blocks.0.moe", "imbalance": 1.5, "expert_load": 2.5, "codecs": {}}],
}


def test_the_log_line_counts_per_step_and_names_the_share_of_plain_ep() -> None:
    assert summarize(RECORD) == (
        "hybridep after 10 steps, per step: sent over dc 4.00 MB (35% of plain EP), gpu 8.00 MB; waited 0.045 s"
    )


def uncounted() -> dict[str, Any]:
    """The record of a job whose dense gradients DeepSpeed sends."""
    levels = [{**level, "sent_bytes": {**level["sent_bytes"], "dense": None}} for level in RECORD["levels"]]
    return {**RECORD, "levels": levels, "exposed_s": {**RECORD["exposed_s"], "dense": None}}


def test_dense_gradients_that_deepspeed_sends_are_not_counted_instead_of_nothing() -> None:
    assert summarize(uncounted()) == (
        "hybridep after 10 steps, per step: sent over dc 3.50 MB (35% of plain EP), gpu 8.00 MB "
        "(dense not counted: DeepSpeed sends it); waited 0.040 s"
    )
    assert not [tag for tag, _, _ in monitor_events(uncounted(), 640) if "dense" in tag]
    assert format_run_record(uncounted()).count("not counted") == 2


def test_monitor_gets_bytes_waits_and_imbalance_at_the_sample_count() -> None:
    events = {tag: (value, samples) for tag, value, samples in monitor_events(RECORD, 640)}
    assert events["HybridEP/dc/expert_weights_MB_per_step"] == (2.0, 640)
    assert events["HybridEP/gpu/tokens_MB_per_step"] == (8.0, 640)
    assert events["HybridEP/exposed_s/expert_gradients"] == (0.1, 640)
    assert events["HybridEP/imbalance/blocks.0.moe"] == (1.5, 640)
    assert events["HybridEP/expert_load/blocks.0.moe"] == (2.5, 640)
    assert events["HybridEP/slowest/rank"] == (3, 640)
    assert events["HybridEP/slowest/others_waited_s"] == (0.06, 640)
    assert len(events) == 2 * 5 + 4 + 2 + 3


def test_the_line_of_a_plan_says_where_a_token_codec_has_no_effect() -> None:
    said = []
    for size in (1, 2):
        levels = [{"name": "dc", "size": 2, "domain_size": size, "token_codec": "fp8"}, {"name": "gpu", "size": 2}]
        config = parse_config({"levels": levels}, world_size=4)
        spec: Any = SimpleNamespace(sample=torch.ones(1))
        partition = Partition.build(config.cluster(), range(4), config.domain_sizes)
        layer = PlannedLayer(spec, partition, plan_of(config, partition.spans, "direct"))
        said.append(describe([layer], config, (), "reference", memory="no replicas"))
    start = "hybridep: 1 MoE layers, domain sizes dc {}, gpu 1, tokens direct, reference kernels, no replicas"
    assert said[0] == start.format(1) + ", dispatched tokens fp8 over dc"
    assert said[1] == start.format(2) + ", dispatched tokens fp8 over dc (no effect: no tokens of ours cross it)"


def test_getting_started_shows_the_line_of_a_plan() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "getting-started.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^\[Rank 0\] (hybridep: .*)$", page, re.MULTILINE)
    levels = [{"name": "dc", "size": 2}, {"name": "gpu", "size": 2}]
    config = parse_config({"levels": levels}, world_size=4)
    spec: Any = SimpleNamespace(sample=torch.ones(1))
    partition = Partition.build(config.cluster(), range(4), config.domain_sizes)
    layer = PlannedLayer(spec, partition, plan_of(config, partition.spans, "direct"))
    line = describe([layer] * 4, config, (), "compiled", memory="no replicas")
    assert line.startswith(shown.removesuffix("..."))
