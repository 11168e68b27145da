# SPDX-License-Identifier: Apache-2.0
"""What sites cost, against arithmetic by hand."""

from dataclasses import replace

import pytest

from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.geometry.packets import MOST_LEAVES
from ds_hybridep.plan.plan import LevelCodecs
from ds_hybridep.plan.planner import make_plan
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.rivals import CARRIED, SITES_EVERY, sites_at
from ds_hybridep.plan.summary import describe
from ds_hybridep.plan.workload import MoEModel, Workload

# 4 layers of 8 experts of 2 x 1000 x 1000, and dense parameters of 16 x 1000 x 1000.
MODEL = MoEModel(
    name="toy", hidden=1000, num_experts=8, top_k=2, num_moe_layers=4, expert_shapes=((1000, 1000), (1000, 1000)),
    dense_shapes=((1000, 1000),) * 16, active_dense_params=16_000_000,
)  # fmt: skip
DELAY_S, BYTES_PER_S, RANKS = 0.05, 1e8, 4
OWNED = 4 * 8 * 2_000_000 / RANKS + 16_000_000 / RANKS  # parameters of a rank's ZeRO partitions


def question_of(
    num_sites: int = 2, *, codecs: tuple[LevelCodecs, ...] = (LevelCodecs(),), **workload: int
) -> Question:
    levels = Level("dc", num_sites, LinkSpeed(BYTES_PER_S, DELAY_S)), Level("gpu", RANKS, LinkSpeed(1e11, 0.0))
    return Question(
        cluster=Cluster(levels),
        workload=Workload(model=MODEL, tokens_per_rank=1000, param_bytes=2, **workload),
        rates=Rates(flops_per_s=1e12),
        codecs=codecs,
    )


def sites_in(question: Question) -> dict[int, object]:
    return {way.sites.every: way for way in make_plan(question).alternatives if way.sites is not None}


def sites_of(question: Question) -> dict[int, object]:
    return {every: sites_at(question, every) for every in (1, 10, 100)}


@pytest.mark.parametrize("num_sites", [2, 3])
def test_each_rank_sends_its_partition_to_all_other_sites(num_sites: int) -> None:
    ways = sites_of(question_of(num_sites))
    exact = (num_sites - 1) * RANKS * OWNED * 2
    for every, way in ways.items():
        assert way.crossing_bytes == pytest.approx(exact / every)
        assert way.sites.exchange_s == pytest.approx(exact / every / BYTES_PER_S + 2 * DELAY_S)
        assert way.is_provided
        assert not way.is_now
    alone_s = {round(way.step_s - way.sites.exchange_s, 9) for way in ways.values()}
    assert len(alone_s) == 1, "the step of a job in one site"


def test_local_steps_keep_common_weights_and_momentum_of_what_a_rank_owns() -> None:
    ways = sites_of(question_of())
    assert ways[10].memory_bytes - ways[1].memory_bytes == pytest.approx(OWNED * 8)
    assert "loss may differ" in ways[10].note
    assert "loss may differ" not in ways[1].note
    assert list(sites_in(question_of(zero_stage=0))) == [1], "local steps need partitions"


def test_packets_are_smaller_and_leave_residuals() -> None:
    gradient = CodecCost("int8", 4.0, encode_bytes_per_s=1e9, decode_bytes_per_s=2e9)
    encoded = LevelCodecs(gradient=gradient, dense_gradient=gradient)
    exact = sites_in(question_of())[1]
    one = sites_in(question_of(codecs=(LevelCodecs(), encoded)))[1]
    assert one.crossing_bytes == pytest.approx(exact.crossing_bytes / 4)
    codec_s = OWNED * 2 / 1e9 + 2 * OWNED * 2 / 2e9  # two sites' packets are decoded
    assert one.sites.exchange_s == pytest.approx(one.crossing_bytes / BYTES_PER_S + codec_s + 2 * DELAY_S)
    assert one.memory_bytes - exact.memory_bytes == pytest.approx(OWNED * 2 * 161 * 2 / 128)
    assert "encoded" in one.note


def test_under_zero_2_the_exchange_hides_behind_the_last_backward() -> None:
    one, other = (sites_in(question_of(zero_stage=stage))[1] for stage in (1, 2))
    assert other.sites.exchange_s == pytest.approx(one.sites.exchange_s - other.sites.hidden_s)
    transfer_s = other.crossing_bytes / BYTES_PER_S
    assert 0 < other.sites.hidden_s <= transfer_s * (1 - 1 / MOST_LEAVES)
    slow = replace(question_of(zero_stage=2, micro_steps=4), rates=Rates(flops_per_s=1e10))
    way = sites_in(slow)[1]
    computing_s = way.step_s - way.sites.exchange_s  # sums inside a site take next to nothing
    assert way.sites.hidden_s <= slow.workload.backward_share * computing_s / 4 + 1e-9
    assert "more are hidden" in way.note


def test_sites_that_are_faster_are_named_with_the_reason() -> None:
    """Under ZeRO 2: gradients of two sites hide behind the backward."""
    question = question_of(zero_stage=2)
    answer = make_plan(question)
    assert answer.better_as_sites is not None
    assert answer.chosen is answer.better_as_sites
    assert "one job in each dc, which exchange gradients at every step (sites, H = 1)." in " ".join(
        describe(answer, 1).split()
    )
    assert "a job in each dc, EP over 4 inside" in answer.better_as_sites.note


def test_local_steps_are_as_few_as_the_link_carries() -> None:
    question = question_of(micro_steps=50)
    ways = sites_in(question)
    assert min(ways) == 1
    assert len(ways) == 2
    carried = max(ways)
    less = SITES_EVERY[SITES_EVERY.index(carried) - 1]

    def share(every: int) -> float:
        way = sites_at(question, every)
        return way.sites.exchange_s / way.step_s

    assert share(carried) <= CARRIED < share(less)
    fast = replace(question, cluster=question.cluster.with_link(0, bandwidth_bytes_per_s=1e12, latency_s=0.0))
    assert list(sites_in(fast)) == [1], "a link that carries every step needs no local steps"


def test_a_cluster_of_one_level_has_no_sites() -> None:
    question = replace(question_of(), cluster=Cluster((Level("gpu", 4, LinkSpeed(1e9, 0.0)),)))
    assert not sites_in(question)


def test_state_on_the_host_makes_room() -> None:
    question = question_of()
    ways = sites_of(question)
    tight = replace(question, memory_bytes=ways[1].memory_bytes + 1e6)
    assert not sites_at(tight, 1).lacking_bytes
    way = sites_at(tight, 10)
    assert (way.name, way.state) == ("sites, H = 10 (DiLoCo-like)", "host")
    assert not way.lacking_bytes
    assert way.step_s > ways[10].step_s
