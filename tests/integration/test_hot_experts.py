# SPDX-License-Identifier: Apache-2.0
"""Training with hot experts gives what unmodified DeepSpeed gives, while the hot experts change."""

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import resume_in_a_fresh_engine
from marks import slow
from parity import Case, assert_parity, levels_of
from process_pool import ProcessPool
from toy_model import ToyConfig

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

FEW = ToyConfig(routing="by_token", drift=2, drop_tokens=False)  # few experts get all tokens, other ones later


def hot4(*domain_sizes: int, **options: object) -> Case:
    options = {"hot_experts": 2, "toy": FEW, "steps": 6, **options}
    return Case(levels=levels_of((2, 2), domain_sizes), **options)


def assert_parity_and_changes(pool: ProcessPool, cases: list[Case]) -> None:
    for case, results in zip(cases, assert_parity(pool, cases), strict=True):
        layers = [layer for result in results for layer in result.stats["layers"]]
        assert any(layer["hot_changes"] > 1 for layer in layers), case.id


@pytest.mark.core
def test_zero_stages_with_accumulation_and_clipping(pool4: ProcessPool) -> None:
    cases = [
        hot4(1, 1, zero_stage=0, accumulation=2, optimizer="sgd"),
        hot4(1, 1, zero_stage=1, accumulation=2, gradient_clipping=0.5),
        hot4(1, 1, zero_stage=2, accumulation=3),
    ]
    assert_parity_and_changes(pool4, cases)


@pytest.mark.core
def test_beside_domains_over_slower_levels(pool4: ProcessPool) -> None:
    cases = [hot4(2, 1, optimizer="sgd"), hot4(2, 1, zero_stage=2, accumulation=2)]
    assert_parity_and_changes(pool4, cases)


def test_exchanges_and_other_levels(pool4: ProcessPool) -> None:
    cases = [
        hot4(1, 1, token_exchange="hierarchical", optimizer="sgd"),
        hot4(1, 1, token_exchange="direct", hot_level=0, optimizer="sgd"),
        hot4(1, 2, hot_level=0, optimizer="sgd"),
        hot4(1, 1, toy=replace(FEW, drop_tokens=True), optimizer="sgd"),
    ]
    assert_parity_and_changes(pool4, cases)


def test_checkpointing(pool4: ProcessPool) -> None:
    toy = replace(FEW, num_layers=3)
    cases = [
        hot4(1, 1, toy=replace(toy, checkpointing="nonreentrant"), zero_stage=2, accumulation=2),
        hot4(2, 1, toy=replace(toy, checkpointing="reentrant"), evaluate=True),
    ]
    assert_parity_and_changes(pool4, cases)


def test_models_of_autoep(pool4: ProcessPool) -> None:
    cases = [
        hot4(
            *sizes, family="mixtral", toy=replace(FEW, routing="learned"), zero_stage=stage, accumulation=1 + stage % 2
        )
        for stage, sizes in enumerate([(1, 1), (1, 1), (2, 1), (1, 1)])
    ]
    assert_parity_and_changes(pool4, cases)


def test_16_bits(pool4: ProcessPool) -> None:
    assert_parity_and_changes(pool4, [hot4(1, 1, dtype="bf16", zero_stage=1), hot4(2, 1, dtype="bf16")])


@pytest.mark.parametrize("zero_stage", [slow(0), 1, slow(2)])
def test_a_resumed_run_is_equal_in_every_bit(pool4: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    case = hot4(1, 1, zero_stage=zero_stage)
    for found in pool4.run(resume_in_a_fresh_engine, case=case, folder=str(tmp_path)):
        assert found["is_loaded"]
        assert found["losses"][0] == found["losses"][1]
        assert found["different"] == []
