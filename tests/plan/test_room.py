# SPDX-License-Identifier: Apache-2.0
"""What is said to make room makes room, and nothing is said that does not."""

import argparse
from dataclasses import replace

import pytest
from plan_cases import toy

from ds_hybridep.commands.question import add_arguments, read_question
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.plan.planner import answer_of
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rates import Rates
from ds_hybridep.plan.room import changes_on_as_many_gpus, changes_that_fit, least_lacking_bytes

LEVELS = Level("dc", 2, LinkSpeed(1e9, 0.01)), Level("gpu", 4, LinkSpeed(1e11, 0.0))


def question_of(memory_bytes, **workload):
    settings = {"param_bytes": 2, "tokens_per_rank": 1 << 20, "sequence_tokens": 4096, **workload}
    return Question(
        cluster=Cluster(LEVELS), workload=toy(**settings), rates=Rates(flops_per_s=1e12), memory_bytes=memory_bytes
    )


def asked(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_question(parser.parse_args(["--model", "Qwen3-30B-A3B", "--wan", "10gbps", *arguments]))


def words(changes):
    return [change.words for change in changes]


def test_each_change_alone_makes_the_smallest_plan_fit():
    question = question_of(6e9)
    assert least_lacking_bytes(question) > 0
    changes = changes_that_fit(question)
    assert words(changes)[1:] == ["GPUs of 32 GB, such as RTX-5090 (--memory 32)"]
    for change in changes:
        assert not least_lacking_bytes(change.question)
        assert not answer_of(change.question).lacking_bytes


def test_smaller_micro_batches_are_the_same_step_and_the_largest_that_fit():
    question = question_of(6e9)
    (smaller,) = [change for change in changes_that_fit(question) if change.words.startswith("--tokens")]
    workload = smaller.question.workload
    assert workload.tokens_per_rank * workload.micro_steps == question.workload.tokens_per_rank
    twice = replace(workload, tokens_per_rank=2 * workload.tokens_per_rank, micro_steps=workload.micro_steps // 2)
    assert least_lacking_bytes(replace(question, workload=twice)) > 0


def test_savings_come_together_where_none_is_enough():
    """Qwen3-30B-A3B on eight RTX 4090: each option alone leaves a lack, all together do not."""
    question = asked("--dcs", "2x4", "--tokens", "16384", "--gpu", "RTX-4090")
    (change,) = changes_that_fit(question)
    assert change.words == ("--checkpointing --zero-stage 2 --offload-optimizer --tokens 4096 --accumulation 4")
    assert not answer_of(change.question).lacking_bytes


def test_more_gpus_come_beside_what_saves_memory_where_that_is_not_enough():
    question = asked("--model", "DeepSeek-V3", "--dcs", "2x8")
    (change,) = changes_that_fit(question)
    assert change.words == "128 GPUs instead of 16, beside --checkpointing --zero-stage 2 --offload-optimizer"
    assert not least_lacking_bytes(change.question)
    assert changes_on_as_many_gpus(question, least_lacking_bytes) == []


def test_only_those_savings_are_said_that_are_needed_and_they_go_together():
    """Four GPUs: adapters need checkpointing only, and never --zero-stage 2, which those of experts refuse."""
    changes = words(changes_that_fit(asked("--dcs", "2x2", "--tokens", "16384", "--zero-stage", "2")))
    assert changes == [
        "--lora all --zero-stage 1 (only adapters are trained), beside --checkpointing",
        "8 GPUs instead of 4, beside --checkpointing --offload-optimizer",
    ]


@pytest.mark.parametrize("memory_bytes", [1e9, 2.9e9])
def test_nothing_is_said_where_the_allowance_alone_is_too_much_for_all_but_larger_gpus(memory_bytes):
    changes = words(changes_that_fit(question_of(memory_bytes)))
    assert changes
    assert all("GPUs of" in change for change in changes)


def test_a_question_without_a_limit_lacks_nothing():
    assert least_lacking_bytes(question_of(None)) == 0
