# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_closed_form import PaperCase, all_gather_s, all_to_all_s

from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.plan.plan import LevelCodecs, Plan
from ds_hybridep.plan.program import MessageStage, Peers
from ds_hybridep.simulate.classes import merge_ranks
from ds_hybridep.simulate.events import Engine, Operation, TimedPost, TimedRun, TimedWait
from ds_hybridep.simulate.flows import Flows, fair_rates
from ds_hybridep.simulate.traffic import Ranks, SimulatedRouting, TrafficMaker

properties = settings(max_examples=60)


def flows_of(*flows, weights=None):
    """Flows from (actors, links, bytes, latency)."""
    members = [(index, actor) for index, (actors, *_) in enumerate(flows) for actor in actors]
    entries = [(index, link) for index, (_, links, *_) in enumerate(flows) for link in links]
    return Flows(
        num_bytes=np.array([num_bytes for _, _, num_bytes, _ in flows], dtype=float),
        weights=np.ones(len(flows)) if weights is None else np.array(weights),
        latencies_s=np.array([latency_s for *_, latency_s in flows], dtype=float),
        member_flow=np.array([index for index, _ in members], dtype=np.int64),
        member_actor=np.array([actor for _, actor in members], dtype=np.int64),
        entry_flow=np.array([index for index, _ in entries], dtype=np.int64),
        entry_link=np.array([link for _, link in entries], dtype=np.int64),
        entry_load=np.ones(len(entries)),
    )


def run(program, operations, *, capacities=(100.0,), num_actors=2, **settings):
    return Engine(np.array(capacities), num_actors, program, operations, **settings).run()


def seconds(*values):
    return np.array(values, dtype=float)


# ---- fair shares ----


@st.composite
def shared_links(draw):
    num_links, num_flows = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    capacities = draw(st.lists(st.floats(1.0, 1e6), min_size=num_links, max_size=num_links))
    weights = draw(st.lists(st.floats(0.1, 10.0), min_size=num_flows, max_size=num_flows))
    paths = draw(
        st.lists(
            st.sets(st.integers(0, num_links - 1), min_size=1, max_size=num_links),
            min_size=num_flows, max_size=num_flows,
        )
    )  # fmt: skip
    load = draw(st.integers(1, 5))
    return capacities, weights, paths, load


@properties
@given(shared_links())
def test_no_link_carries_too_much_and_every_flow_has_a_full_link_on_which_none_gets_more(case):
    capacities, weights, paths, load = case
    entries = [(flow, link) for flow, path in enumerate(paths) for link in sorted(path)]
    flow, link = (np.array(column, dtype=np.int64) for column in zip(*entries, strict=True))
    rates = fair_rates(np.array(capacities), np.array(weights), flow, link, load=np.full(len(flow), float(load)))
    used = np.bincount(link, load * rates[flow], len(capacities))
    assert (used <= np.array(capacities) * (1 + 1e-9)).all()
    for one, path in enumerate(paths):  # this is what max-min fair means
        assert any(
            used[at] >= capacities[at] * (1 - 1e-9)
            and rates[one] / weights[one]
            >= max(rates[other] / weights[other] for other, others in enumerate(paths) if at in others) * (1 - 1e-9)
            for at in path
        )


def test_a_flow_without_links_is_not_limited():
    nothing = np.zeros(0, dtype=np.int64)
    assert fair_rates(np.array([5.0]), np.ones(1), nothing, nothing, load=np.zeros(0)) == math.inf


# ---- time ----


def test_one_flow_takes_latency_and_bytes_over_bandwidth():
    send = Operation("send", "tokens", flows_of(((0, 1), (0,), 50.0, 0.25)))
    outcome = run([TimedPost(0), TimedWait(0, "tokens")], [send])
    assert outcome.end_s.tolist() == [0.75, 0.75]
    assert outcome.seconds["tokens"].tolist() == [0.75, 0.75]


def test_a_transfer_starts_when_both_ends_are_there():
    send = Operation("send", "tokens", flows_of(((0, 1), (0,), 50.0, 0.0)))
    outcome = run([TimedRun("compute", "", seconds(0.0, 2.0)), TimedPost(0), TimedWait(0, "tokens")], [send])
    assert outcome.end_s.tolist() == [2.5, 2.5]
    assert outcome.seconds["tokens"].tolist() == [2.5, 0.5]


def test_two_operations_share_a_link_until_one_is_done():
    weights = Operation("weights", "weights", flows_of(((0,), (0,), 150.0, 0.0)))
    rows = Operation("rows", "tokens", flows_of(((0,), (0,), 50.0, 0.0)))
    outcome = run(
        [TimedPost(0), TimedPost(1), TimedWait(1, "tokens"), TimedWait(0, "weights")], [weights, rows], num_actors=1
    )
    assert outcome.seconds["tokens"][0] == pytest.approx(1.0)  # half of the link for 50 bytes
    assert outcome.end_s[0] == pytest.approx(2.0)  # all bytes over the whole link


def test_operations_of_a_channel_follow_each_other_and_latencies_overlap():
    packets = [Operation(f"packet {i}", "weights", flows_of(((0,), (0,), 100.0, 0.5))) for i in range(3)]
    outcome = run([*map(TimedPost, range(3)), TimedWait(0, "first"), TimedWait(2, "last")], packets, num_actors=1)
    assert outcome.seconds["first"][0] == 1.5
    assert outcome.end_s[0] == 3.5


def test_an_operation_waits_for_the_arrival_of_the_one_before_it():
    outer = Operation("outer", "weights 0", flows_of(((0,), (0,), 100.0, 0.5)))
    inner = Operation("inner", "weights 1", flows_of(((0,), (1,), 100.0, 0.0)), after=0)
    outcome = run(
        [TimedPost(0), TimedPost(1), TimedWait(1, "weights")], [outer, inner], capacities=(100.0, 200.0), num_actors=1
    )
    assert outcome.end_s[0] == 2.0


def test_packets_flow_while_ranks_compute():
    packet = Operation("packet", "weights", flows_of(((0,), (0,), 100.0, 0.0)))
    program = [TimedPost(0), TimedRun("compute", "", seconds(3.0)), TimedWait(0, "weights")]
    assert run(program, [packet], num_actors=1).end_s[0] == 3.0
    # Where the cores that compute also send, the packet goes at a quarter of its rate meanwhile.
    assert run(program, [packet], num_actors=1, busy_share=0.25).end_s[0] == 3.25
    assert run(program, [packet], num_actors=1, busy_share=0.0).end_s[0] == 4.0


def test_ranks_that_wait_for_each_other_for_ever_are_named():
    both = Operation("both", "tokens", flows_of(((0, 1), (0,), 1.0, 0.0)), after=1)
    never = Operation("never", "weights", flows_of(((0, 1), (0,), 1.0, 0.0)), after=0)
    with pytest.raises(AssertionError, match=r"actors \[0, 1\] wait for operations that never arrive"):
        run([TimedPost(0), TimedPost(1), TimedWait(1, "tokens")], [both, never])


def test_spans_tell_what_a_rank_did():
    packet = Operation("packet", "weights", flows_of(((0,), (0,), 100.0, 0.5)))
    outcome = run(
        [TimedPost(0), TimedRun("dense", "forward 0", seconds(2.0)), TimedWait(0, "w")],
        [packet],
        num_actors=1,
        traced=[0],
    )
    spans = [(span.stream, span.label, span.begin_s, span.end_s) for span in outcome.spans[0]]
    assert spans == [("weights", "packet", 0.0, 1.5), ("compute", "forward 0", 0.0, 2.0)]


# ---- single collectives against closed forms ----


def made(cluster, peers, *, is_reduced):
    """Classes and traffic of one group of all ranks."""
    plan = Plan(spans=cluster.sizes, domain_sizes=cluster.sizes, codecs=(LevelCodecs(),) * len(cluster.sizes))
    ranks = Ranks.of(cluster, plan)
    ones = np.ones(cluster.num_ranks)
    classes = merge_ranks(cluster, {peers: ranks.groups(peers)}, [] if is_reduced else [np.cumsum(ones)])
    return classes, TrafficMaker(ranks, SimulatedRouting((ones,) * len(cluster.sizes), ones), classes)


@pytest.mark.parametrize("is_reduced", [True, False])
@pytest.mark.parametrize("num_gpus", [2, 5, 16])
def test_an_all_to_all_and_an_all_gather_take_what_the_paper_says(num_gpus, is_reduced):
    case = PaperCase(
        num_gpus=num_gpus, token_bytes=6e6, expert_bytes=3.6e5, bandwidth_bytes_per_s=1.25e8, pre_expert_s=0.0
    )
    cluster = Cluster((Level("gpu", num_gpus),))
    everyone = Peers(("offset",), (0,))
    classes, maker = made(cluster, everyone, is_reduced=is_reduced)
    assert classes.num_classes == (1 if is_reduced else num_gpus)
    capacities = np.full(maker.num_links, case.bandwidth_bytes_per_s)
    for num_bytes, expected_s in (
        (case.token_bytes / num_gpus, all_to_all_s(case, 1.0)),
        (case.expert_bytes, all_gather_s(case, 0.0)),
    ):
        traffic = maker.traffic_of(
            MessageStage(
                peers=everyone,
                fixed_bytes=(num_bytes,),
                row_bytes=(0.0,),
                uplink_bytes=(num_bytes,),
                latencies_s=(0.0,),
            )
        )
        assert traffic.sent_bytes == (pytest.approx(num_gpus * (num_gpus - 1) * num_bytes),)
        program = [TimedPost(0), TimedWait(0, "tokens")]
        engine = Engine(capacities, classes.num_classes, program, [Operation("one", "tokens", traffic.flows)])
        assert engine.run().end_s == pytest.approx(np.full(classes.num_classes, expected_s), rel=1e-12)


@pytest.mark.parametrize("is_reduced", [True, False])
def test_a_ring_takes_the_bytes_of_its_slowest_edge_and_the_way_around(is_reduced):
    cluster = Cluster((Level("dc", 3), Level("gpu", 2)))
    ring = Peers(("offset",), (0, 1), is_ring=True)
    classes, maker = made(cluster, ring, is_reduced=is_reduced)
    capacities = np.full(maker.num_links, 1000.0)
    capacities[: maker.first_link[1]] = 10.0
    around_s = 2 * (3 * 0.5 + 2 * 0.01)  # two passes
    traffic = maker.traffic_of(
        MessageStage(
            peers=ring,
            fixed_bytes=(20.0,) * 2,
            row_bytes=(0.0,) * 2,
            uplink_bytes=(20.0,) * 2,
            latencies_s=(around_s,) * 2,
        )
    )
    assert traffic.sent_bytes == (60.0, 60.0)  # three edges between DCs, three inside
    program = [TimedPost(0), TimedWait(0, "sync")]
    outcome = Engine(capacities, classes.num_classes, program, [Operation("ring", "sync", traffic.flows)]).run()
    assert outcome.end_s == pytest.approx(np.full(classes.num_classes, 20.0 / 10.0 + around_s))
