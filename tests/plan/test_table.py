# SPDX-License-Identifier: Apache-2.0
"""The answer's rows, its first sentence, what it says to paste, and the sweep over bandwidths."""

from dataclasses import replace

import pytest
from plan_cases import toy

from ds_hybridep.config import parse_config
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.plan.answer import TIE
from ds_hybridep.plan.paste import ds_config_of, launch_of, reminders_of
from ds_hybridep.plan.plan import RECOMMENDED, LevelCodecs
from ds_hybridep.plan.planner import answer_of, make_plan
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.summary import describe
from ds_hybridep.plan.sweep import describe_sweep, sweep_wan
from ds_hybridep.plan.table import bill_of, chosen_row, row_of_way, rows_of
from ds_hybridep.plan.verdict import is_for_you, verdict
from ds_hybridep.plan.words import count, number

SMALL = CodecCost("low_rank", 50.0)
BOTH = LevelCodecs(), LevelCodecs(gradient=SMALL, dense_gradient=SMALL, name=RECOMMENDED)


def question_of(gbps=0.01, num_dcs=2, *, codecs=BOTH, memory_bytes=8e10, **workload):
    levels = Level("dc", num_dcs, LinkSpeed(gbps * 1e9 / 8, 0.01)), Level("gpu", 4, LinkSpeed(1e11, 0.0))
    settings = {"param_bytes": 2, "tokens_per_rank": 4096, "micro_steps": 4, **workload}
    return Question(
        cluster=Cluster(levels), workload=toy(**settings), rates=Rates(flops_per_s=1e12), codecs=codecs,
        memory_bytes=memory_bytes, host_memory_bytes=1e11,
    )  # fmt: skip


def where_one_is_too_small(answer):
    """The answer where the model does not fit into one datacentre alone."""
    ways = (replace(way, lacking_bytes=1e9) if way is answer.alone else way for way in answer.alternatives)
    return replace(answer, alternatives=tuple(ways))


def test_rows_are_at_most_eleven_and_differ():
    answer = make_plan(question_of())
    rows = rows_of(answer)
    assert len(rows) <= 11
    assert len({row.name for row in rows}) == len(rows)
    assert [row.is_chosen for row in rows].count(True) == 1
    assert {row.kind for row in rows} == {"now", "ours", "sites", "elsewhere"}
    assert {row.training for row in rows if row.kind == "ours"} == {"exact", "lossy"}
    assert all(0 <= row.wait_s <= row.step_s for row in rows)


def test_all_rows_compute_alike_and_wait_for_the_rest_inside_a_datacentre_too():
    """Of sites, pipelines and local SGD, what a rank waits for inside its own datacentre was taken for computing."""
    question = question_of()
    slow = replace(question.cluster.levels[1], link=LinkSpeed(1e7, 0.0))
    rows = rows_of(make_plan(replace(question, cluster=Cluster((question.cluster.levels[0], slow)))))
    assert {row.kind for row in rows} == {"now", "ours", "sites", "elsewhere"}
    # One datacentre alone has half of the GPUs for the same tokens.
    of_all = [(row.step_s - row.wait_s) * row.num_gpus for row in rows]
    assert of_all == len(rows) * [pytest.approx(of_all[0])]


def test_now_is_the_fastest_that_fits_and_trains_this():
    answer = make_plan(question_of())
    assert answer.now.step_s == min(way.step_s for way in answer.alternatives if way.is_now)
    refused = tuple(replace(way, refused="no") if way is answer.now else way for way in answer.alternatives)
    assert replace(answer, alternatives=refused).now.name != answer.now.name


def test_the_first_sentence_is_for_you_where_it_is_clearly_faster():
    answer = where_one_is_too_small(make_plan(question_of()))
    assert is_for_you(answer)
    assert verdict(answer)[0].startswith("For you: ")
    assert (
        f"{number(answer.now.step_s / answer.chosen.step_s)} times as fast with lossy gradients" in verdict(answer)[0]
    )
    assert " ".join(describe(answer, 1).split()).startswith(verdict(answer)[0])


def test_the_first_sentence_is_not_for_you_where_the_link_is_fast():
    answer = make_plan(question_of(gbps=8000, codecs=(LevelCodecs(),)))
    assert not is_for_you(answer)
    assert verdict(answer)[0].startswith("Not for you, because ")


def test_what_waits_most_of_the_time_is_said_so():
    answer = where_one_is_too_small(make_plan(question_of(gbps=1e-4)))
    assert chosen_row(answer).wait_s > chosen_row(answer).step_s / 2
    assert any("the link decides" in line for line in verdict(answer))


def test_a_plan_that_only_waits_is_not_for_you_even_if_all_else_waits_longer_or_does_not_fit():
    answer = where_one_is_too_small(make_plan(question_of(gbps=1e-4)))
    assert answer.now.step_s > 2 * answer.chosen.step_s
    assert verdict(answer)[0].startswith("Not for you, because GPUs would compute 1% of the time: ")
    alone = tuple(replace(way, lacking_bytes=1e9) if way.is_now else way for way in answer.alternatives)
    found = replace(answer, alternatives=alone)
    assert verdict(found)[0].startswith("Not for you, because GPUs would compute 1% of the time: ")
    assert "Nothing without this program can do it" in verdict(found)[0]


def test_hours_and_money():
    question = question_of(num_dcs=3)
    row = row_of_way(make_plan(question), make_plan(question).now)
    bill = bill_of(row, question, 100, 0.05)
    assert bill.hours == pytest.approx(100 * row.step_s / 3600)
    assert bill.price == pytest.approx(0.05 * 3 * 100 * row.link_bytes / 1e9)
    assert bill_of(row, question, 100, None).price is None


def test_a_block_of_levels_is_complete():
    answer = make_plan(question_of(gbps=100, param_bytes=2, zero_stage=2, offloads_optimizer=True))
    settings = ds_config_of(answer)
    assert settings["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert settings["gradient_accumulation_steps"] == 4
    assert settings["bf16"] == {"enabled": True}
    assert "expert_parallel" not in settings  # layers of its own
    assert parse_config(settings["hybridep"], world_size=8).levels[0].size == 2


@pytest.mark.parametrize("num_gpus", [4, 16])
def test_a_block_of_sites_and_how_they_start(num_gpus):
    question = question_of()
    levels = question.cluster.levels
    question = replace(question, cluster=Cluster((levels[0], replace(levels[1], size=num_gpus))))
    answer = make_plan(question)
    sites = next(way for way in answer.alternatives if way.sites is not None)
    slower = replace(answer.best, prediction=replace(answer.best.prediction, terms_s={"dense_s": 10 * sites.step_s}))
    chosen = replace(answer, best=slower)
    assert chosen.chosen is sites
    block = ds_config_of(chosen)["hybridep"]
    assert block["sites"]["names"] == ["a", "b"]
    assert block["sites"]["codecs"] == "recommended"
    meet, first, _ = launch_of(chosen)
    assert meet == "ds_hybridep meet --port 29400 --secret-file secret --folder meeting"
    assert any(line.startswith("meet runs on one machine that all sites reach") for line in reminders_of(chosen))
    assert any("slots=8" in line for line in reminders_of(chosen)) == (num_gpus == 16)
    # A launch with a hostfile does not pass the variable on.
    assert ("HYBRIDEP_SITE=a" in first) == ("--hostfile" not in first) == (num_gpus == 4)


def test_the_sweep_finds_where_each_layout_begins_to_win():
    question = question_of()
    points = sweep_wan(question, (0.001, 1, 1000))
    assert [point.gbps for point in points] == sorted(point.gbps for point in points)
    assert points[0].gbps == 0.001
    assert points[-1].gbps == 1000
    assert len({(point.layout, point.why_not) for point in points}) > 1
    assert points[-1].step_s <= points[0].step_s * (1 + TIE)
    lines = describe_sweep(question, points).splitlines()
    assert max(map(len, lines)) <= 120  # of a terminal
    assert lines[1].split()[:2] == ["1.00", "Mbit/s"]
    assert lines[len(points)].split()[:2] == ["1,000", "Gbit/s"]
    (asked,) = [line for line in lines[1 : len(points) + 1] if line.startswith("->")]
    assert asked.split()[1:3] == ["10.0", "Mbit/s"]


def test_the_sweep_says_at_each_rate_what_plan_says_there():
    question = question_of(memory_bytes=3.3e9)
    points = sweep_wan(question, (0.001, 1, 1000))
    assert {point.for_you for point in points} == {True, False}
    for point in points:
        cluster = question.cluster.with_link(0, bandwidth_bytes_per_s=point.gbps * 1e9 / 8)
        answer = answer_of(replace(question, cluster=cluster))
        row = chosen_row(answer)
        assert (point.name, point.training, point.step_s) == (row.name, row.training, row.step_s)
        assert (point.now_name, point.now_step_s) == (answer.now.name, answer.now.step_s)
        assert point.for_you == is_for_you(answer) == verdict(answer)[0].startswith("For you")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0009, "<0.001"), (0.143, "0.143"), (6, "6.00"), (549.6, "550"), (999.9, "1,000"), (21624, "21,624")],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert number(value) == text


def test_counts_have_a_unit():
    assert [count(one) for one in (7, 65_536, 13_400_000, 6.69e9)] == ["7", "65.5 k", "13.4 M", "6.69 B"]
