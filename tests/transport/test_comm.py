# SPDX-License-Identifier: Apache-2.0
"""Channels: what is counted, what a time limit or a dead peer leads to, start-up agreement, and use after close."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from moe_refs import MoeCase, build_case, come_after, dense_results, forward_case, open_transport, relative_distance
from process_pool import ProcessPool, RemoteError
from scripts import free_port
from torch import distributed as dist

from ds_hybridep.config import parse_config
from ds_hybridep.errors import AgreementError, CommunicationError, ConfigError, UnsupportedError
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.transport.agreement import agree, announcing_failure, result_of_rank_0, together
from ds_hybridep.transport.channels import Purpose
from ds_hybridep.transport.job import backends_of

pytestmark = pytest.mark.dist

TWO_DCS = Cluster((Level("dc", 2),))
TWO_BY_TWO = Cluster((Level("dc", 2), Level("gpu", 2)))
# What is missing is missing: for this long it is waited for.  Connecting does not count towards it.
LIMIT_S = 0.5
START_LIMIT_S = 3.0  # for the start itself, whose ranks have met right before it
ROWS = Purpose("tokens", "dispatch of rows", "blocks.3.moe")


@pytest.fixture
def own_pool2() -> Iterator[ProcessPool]:
    """Two ranks of this test alone: what a failed transfer leaves behind must not reach other tests."""
    with ProcessPool(2) as pool:
        yield pool


@pytest.fixture
def own_pool4() -> Iterator[ProcessPool]:
    with ProcessPool(4) as pool:
        yield pool


def failure_of(action: Any, *arguments: Any) -> tuple[str, str]:
    """Type and message of what `action` raises ("" if nothing)."""
    try:
        action(*arguments)
    except (AgreementError, CommunicationError) as error:
        return type(error).__name__, str(error)
    return "", ""


# -- time limit and dead peers ----------------------------------------------------------------------------------


def wait_for_a_silent_peer(peer: int, is_background: bool) -> list[tuple[str, str]]:
    """Rank 0 receives from `peer`, which joins the channel and then does nothing; two waits of rank 0."""
    transport = open_transport(TWO_BY_TWO if dist.get_world_size() == 4 else TWO_DCS, LIMIT_S)
    failures = []
    if dist.get_rank() in (0, peer):
        channel = transport.channel("rows", (0, peer), background=is_background)
    if dist.get_rank() == 0:
        tensors = [(peer, torch.ones(5, 3)), (peer, torch.ones(4, dtype=torch.int64))]
        transfer = channel.start([], tensors, ROWS)
        failures = [failure_of(transfer.wait), failure_of(transfer.wait)]
    dist.barrier()  # were the peer to close the channel before, rank 0 would learn that at once
    if dist.get_rank() == 0:
        transport.close()
    return failures


@pytest.mark.parametrize("is_background", [slow(False), True], ids=["foreground", "background"])
def test_the_time_limit_ends_a_wait_and_says_what_did_not_come(own_pool2: ProcessPool, is_background: bool) -> None:
    (kind, message), (again, _) = own_pool2.run(wait_for_a_silent_peer, peer=1, is_background=is_background)[0]
    assert kind == again == "CommunicationError"
    assert message.startswith("rank 0: dispatch of rows of blocks.3.moe over level 'dc' (92 bytes, ")
    assert "from ranks [1, 1]" in message
    assert "hybridep.timeout_s" in message


@pytest.mark.slow  # a rank that skips a layer, below, gets such a message
def test_the_message_names_the_level_between_the_ranks(own_pool4: ProcessPool) -> None:
    ((_, message), _) = own_pool4.run(wait_for_a_silent_peer, peer=1, is_background=False)[0]
    assert "over level 'gpu'" in message


def count_ranks() -> int:
    return dist.get_world_size()


def wait_for_a_dead_peer(is_background: bool, pause_s: float) -> None:
    """The peer dies while this rank waits for it or, after a pause, while it computes."""
    transport = open_transport(TWO_DCS, timeout_s=600)
    channel = transport.channel("rows", (0, 1), background=is_background)
    received = torch.empty(3)
    if dist.get_rank() == 1:
        channel.start([(0, torch.ones(3))], [], ROWS).wait()
        os._exit(7)
    channel.start([], [(1, received)], ROWS).wait()
    time.sleep(pause_s)
    channel.start([(1, received)] if pause_s else [], [(1, received)], ROWS).wait()


@pytest.mark.parametrize(("is_background", "pause_s"), [(False, 0.0), (True, 0.0), slow(False, 0.5)])
def test_a_dead_peer_is_an_error_at_once(own_pool2: ProcessPool, is_background: bool, pause_s: float) -> None:
    own_pool2.run(count_ranks)
    with pytest.raises(RemoteError) as caught:
        own_pool2.run(wait_for_a_dead_peer, is_background=is_background, pause_s=pause_s)
    # The pool gives the survivor some seconds after the death; the limit of the wait itself is ten minutes.
    assert "died with exit code 7" in str(caught.value)
    assert "CommunicationError: rank 0: dispatch of rows of blocks.3.moe over level 'dc' (" in str(caught.value)


def run_layer_without_rank_1(case: MoeCase) -> list[tuple[str, str]]:
    rank = dist.get_rank()
    runtime, _ = build_case(case, rank, timeout_s=100, wait_s=LIMIT_S)
    if rank == 1:
        return []
    return [failure_of(forward_case, case, rank, runtime), failure_of(runtime.close)]


@pytest.mark.parametrize(
    ("domain_sizes", "operation"),
    [
        pytest.param((1, 1), "dispatch of rows of layer 0 over level 'dc'", marks=pytest.mark.slow),
        ((1, 2), "shipping of expert weights of layer 0 over level 'gpu'"),
    ],
    ids=str,
)
def test_a_rank_that_skips_a_layer_is_an_error_on_those_who_wait_for_it(
    own_pool4: ProcessPool, domain_sizes: tuple[int, ...], operation: str
) -> None:
    case = MoeCase(sizes=(2, 2), domain_sizes=domain_sizes, num_tokens=(3, 3, 3, 3))
    (kind, message), _ = own_pool4.run(run_layer_without_rank_1, case=case)[0]
    assert kind == "CommunicationError"
    assert message.startswith(f"rank 0: {operation}")


def use_channel_after_an_unseen_failure() -> tuple[int, str]:
    """A background transfer fails; then everything is closed and made anew."""
    transport = open_transport(TWO_DCS, LIMIT_S)
    channel = transport.channel("weights", (0, 1), background=True)
    transfer = channel.start([], [(1 - dist.get_rank(), torch.empty(3))], ROWS)
    assert failure_of(transfer.wait)[0] == "CommunicationError"
    transport.close()
    transport = open_transport(TWO_DCS, timeout_s=100)
    channel = transport.channel("weights", (0, 1))
    received, peer = torch.empty(3), 1 - dist.get_rank()
    _, message = failure_of(lambda: channel.start([(peer, torch.ones(3))], [(peer, received)], ROWS).wait())
    return int(received.sum()), message


def test_a_failed_transfer_does_not_reach_the_next_runtime(own_pool2: ProcessPool) -> None:
    assert own_pool2.run(use_channel_after_an_unseen_failure) == [(3, ""), (3, "")]


# -- counters ---------------------------------------------------------------------------------------------------


def count_bytes(is_background: bool) -> dict[str, Any]:
    """Rank r sends s + 1 floats and 2 s bytes to each rank s, two batches of different kinds."""
    rank, others = dist.get_rank(), [other for other in range(4) if other != dist.get_rank()]
    transport = open_transport(TWO_BY_TWO, timeout_s=100)
    channel = transport.channel("all", range(4), background=is_background)
    floats = {other: torch.empty(rank + 1) for other in others}
    channel.start(
        [(other, torch.full((other + 1,), float(rank))) for other in others],
        list(floats.items()),
        Purpose("expert_weights", "shipping", "a"),
    ).wait()
    octets = {other: torch.empty(2 * rank, dtype=torch.uint8) for other in others}
    channel.start(
        [(other, torch.full((2 * other,), rank, dtype=torch.uint8)) for other in others],
        list(octets.items()),
        Purpose("control", "report"),
    ).wait()
    transport.close()
    traffic = transport.traffic
    return {
        "received": [all((t == r).all() for r, t in group.items()) for group in (floats, octets)],
        "sent_bytes": dict(traffic.sent_bytes),
        "received_bytes": dict(traffic.received_bytes),
        "sent_messages": dict(traffic.sent_messages),
        "exposed": {kind: seconds >= 0 for kind, seconds in traffic.exposed_s.items()},
    }


@pytest.mark.parametrize("is_background", [False, True], ids=["foreground", "background"])
def test_counters_are_the_bytes_handed_over_by_level_and_kind(pool4: ProcessPool, is_background: bool) -> None:
    for rank, result in enumerate(pool4.run(count_bytes, is_background=is_background)):
        near, far = [rank ^ 1], [other for other in range(4) if other // 2 != rank // 2]
        sent, received, messages = {}, {}, {}
        for level, others in ((0, far), (1, near)):
            sent[level, "expert_weights"] = sum(4 * (other + 1) for other in others)
            received[level, "expert_weights"] = 4 * (rank + 1) * len(others)
            messages[level, "expert_weights"] = len(others)
            sent[level, "control"] = sum(2 * other for other in others)
            received[level, "control"] = 2 * rank * len(others)
            messages[level, "control"] = sum(other > 0 for other in others)  # nothing of no bytes is sent
        assert result["received"] == [True, True]
        assert result["sent_bytes"] == without_zeros(sent)
        assert result["received_bytes"] == without_zeros(received)
        assert result["sent_messages"] == without_zeros(messages)
        assert result["exposed"].keys() <= {"expert_weights", "control"}


def without_zeros(counts: dict[tuple[int, str], int]) -> dict[tuple[int, str], int]:
    return {key: count for key, count in counts.items() if count}


def exchange_nothing(is_background: bool) -> tuple[dict, dict]:
    """Only rank 0 calls: were anything sent or received for an empty tensor, it would wait for rank 1."""
    transport = open_transport(TWO_DCS, timeout_s=LIMIT_S)
    channel = transport.channel("rows", (0, 1), background=is_background)
    if dist.get_rank() == 0:
        nothing = [(1, torch.empty(0, 8)), (1, torch.empty(0, dtype=torch.int32))]
        channel.start(nothing, nothing, ROWS).wait()
        channel.start([], [], ROWS).wait()
    dist.barrier()  # rank 1 may still be connecting, and would find a closed connection
    transport.close()
    return dict(transport.traffic.sent_messages), dict(transport.traffic.sent_bytes)


@pytest.mark.parametrize("is_background", [False, True], ids=["foreground", "background"])
def test_empty_tensors_send_nothing(pool2: ProcessPool, is_background: bool) -> None:
    assert pool2.run(exchange_nothing, is_background=is_background) == [({}, {})] * 2


# -- congestion control -----------------------------------------------------------------------------------------

SYSTEM_S_CHOICE = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def connect_by_level(wanted: str | None) -> dict[int, set[str]]:
    """Congestion controls of the connections with each rank."""
    cluster = Cluster((Level("dc", 2, LinkSpeed(congestion_control=wanted)), Level("gpu", 2)))
    transport = open_transport(cluster, timeout_s=100)
    transport.channel("rows", (0, 1, 2, 3))
    dist.barrier()
    found = {
        rank: {
            lane.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
            for lane in peer.lanes
        }
        for rank, peer in transport.link.peers.items()
    }
    dist.barrier()
    transport.close()
    return found


@pytest.mark.skipif(not SYSTEM_S_CHOICE.exists(), reason="congestion control is chosen by socket on Linux only")
@pytest.mark.parametrize("wanted", ["reno", slow(None)])
def test_a_level_s_connections_have_its_congestion_control(own_pool4: ProcessPool, wanted: str | None) -> None:
    chosen = SYSTEM_S_CHOICE.read_text().strip()
    for rank, found in enumerate(own_pool4.run(connect_by_level, wanted=wanted)):
        for other, used in found.items():
            assert used == {wanted or chosen if other // 2 != rank // 2 else chosen}


def test_a_congestion_control_that_the_system_lacks_is_an_error_with_its_key_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level = {"name": "dc", "size": 2, "congestion_control": "bbr"}
    config = parse_config({"levels": [{"name": "gpu", "size": 1}, level]}, world_size=2)
    monkeypatch.setattr(socket, "TCP_CONGESTION", -1)  # an option that no system has
    with pytest.raises(UnsupportedError, match=r'hybridep.levels\[1\].congestion_control is "bbr", but .*tcp_bbr'):
        backends_of(config, torch.device("cpu"))


# -- messages shorter than the room made for them ---------------------------------------------------------------


def receive_less_than_there_is_room_for(is_posted_first: bool) -> list[tuple[list[int], list[int]]]:
    """Rank 0 makes room for 12 bytes, and then for 4; of each first message 5 bytes come, of each second one 4."""
    transport = open_transport(TWO_DCS, timeout_s=100)
    channel = transport.channel("rows", (0, 1))
    found = []
    for value in range(1, 4):
        rooms = [torch.full((size,), 99, dtype=torch.uint8) for size in (12, 4)]
        messages = [torch.full((size,), value, dtype=torch.uint8) for size in (5, 4)]
        parts = [(1 - dist.get_rank(), tensor) for tensor in (messages if dist.get_rank() == 1 else rooms)]
        is_first = is_posted_first == (dist.get_rank() == 0)
        if not is_first:
            dist.barrier()
        transfer = channel.start(*((parts, []) if dist.get_rank() == 1 else ([], parts)), ROWS)
        if is_first:
            dist.barrier()
        transfer.wait()
        found.append(tuple(room.tolist() for room in rooms))
    transport.close()
    return found


@pytest.mark.parametrize("is_posted_first", [True, False], ids=["receive first", "send first"])
def test_a_message_may_be_shorter_than_its_room(own_pool2: ProcessPool, is_posted_first: bool) -> None:
    """First messages of a dispatch count on it: the sender's length decides, and the rest of the room is untouched."""
    found = own_pool2.run(receive_less_than_there_is_room_for, is_posted_first=is_posted_first)[0]
    assert found == [([value] * 5 + [99] * 7, [value] * 4) for value in range(1, 4)]


# -- background completion --------------------------------------------------------------------------------------


def many_small_transfers(num_transfers: int) -> dict[str, Any]:
    """Started at once and waited for by count alone; the same in the other direction."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    transport = open_transport(TWO_DCS, timeout_s=100)
    channel = transport.channel("weights", (0, 1), background=True)
    transport.records = []
    received = [torch.empty(1 + i % 5) for i in range(num_transfers)]
    transfers = [
        channel.start([(peer, torch.full((1 + i % 5,), float(i + rank)))], [(peer, received[i])], ROWS)
        for i in range(num_transfers)
    ]
    wake_ups, seen, was_lost = 0, 0, False
    while seen < num_transfers and not was_lost:
        was_lost = not transport.wait_for_more_than(seen, 100)
        seen = transport.num_finished
        wake_ups += 1
    is_done = [transfer.is_done() for transfer in transfers]
    for transfer in transfers:
        transfer.wait()
    records, transport.records = transport.records, None
    # Nothing more will end: a wait for it comes back empty-handed, after the limit.
    was_woken_for_nothing = transport.wait_for_more_than(num_transfers, 0.2)
    transport.close()
    return {
        "is_done": all(is_done),
        "values": all((t == i + peer).all() for i, t in enumerate(received)),
        "was_lost": was_lost,
        "wake_ups": wake_ups,
        "was_woken_for_nothing": was_woken_for_nothing,
        "record_bytes": [record.num_bytes for record in records],
        "are_records_in_time": all(record.start_ns <= record.end_ns for record in records),
        "exposed_s": transport.traffic.exposed_s["tokens"],
    }


def test_every_end_of_a_background_transfer_wakes_who_waits_for_it(pool2: ProcessPool) -> None:
    for result in pool2.run(many_small_transfers, num_transfers=300):
        assert result["is_done"]
        assert result["values"]
        assert not result["was_lost"]
        assert not result["was_woken_for_nothing"]
        assert 1 <= result["wake_ups"] <= 300
        assert result["record_bytes"] == [2 * 4 * (1 + i % 5) for i in range(300)]
        assert result["are_records_in_time"]
        assert result["exposed_s"] == 0  # all had ended when they were waited for


def not_done_before_the_peer_sends() -> tuple[bool, bool]:
    transport = open_transport(TWO_DCS, timeout_s=100)
    channel = transport.channel("weights", (0, 1), background=True)
    received = torch.zeros(4)
    if dist.get_rank() == 1:
        dist.barrier()  # rank 0 has looked
        channel.start([(0, torch.ones(4))], [], ROWS).wait()
        transport.close()
        return False, True
    transfer = channel.start([], [(1, received)], ROWS)
    time.sleep(0.1)
    was_done = transfer.is_done()
    dist.barrier()
    transfer.wait()
    transport.close()
    return was_done, transfer.is_done() and bool(received.all())


def test_a_transfer_is_not_done_before_it_is(pool2: ProcessPool) -> None:
    assert pool2.run(not_done_before_the_peer_sends) == [(False, True)] * 2


def profile_while_transfers_are_under_way() -> int:
    """Any profiler, not only the trace of this package: torch ends a send's range when it has been waited for."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    transport = open_transport(TWO_DCS, timeout_s=100)
    channel = transport.channel("weights", (0, 1), background=True)
    for _ in range(20):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            received = [torch.empty(1000) for _ in range(20)]
            transfers = [
                channel.start([(peer, torch.full((1000,), float(rank)))], [(peer, tensor)], ROWS)
                for tensor in received
            ]
        profiler.events()
        for transfer in transfers:
            transfer.wait()
    transport.close()
    return int(received[-1].sum())


def test_a_profiler_may_end_while_transfers_are_under_way(own_pool2: ProcessPool) -> None:
    assert own_pool2.run(profile_while_transfers_are_under_way) == [1000, 0]


# -- agreement --------------------------------------------------------------------------------------------------

PAYLOAD = {"version": "1", "config": {"levels": [{"name": "dc", "size": 2}, {"name": "gpu", "size": 2}], "x": None}}


def agree_on(payloads: list[dict], timeout_s: float = 20.0) -> tuple[str, str]:
    return failure_of(agree, payloads[dist.get_rank()], timeout_s)


def test_equal_payloads_agree_again_and_again(pool4: ProcessPool) -> None:
    reordered = dict(reversed(PAYLOAD.items()))
    for _ in range(3):
        assert pool4.run(agree_on, payloads=[PAYLOAD, PAYLOAD, reordered, PAYLOAD]) == [("", "")] * 4


def test_a_difference_names_rank_key_path_and_both_values(pool4: ProcessPool) -> None:
    other = {
        **PAYLOAD,
        "config": {**PAYLOAD["config"], "levels": [{"name": "dc", "size": 2}, {"name": "gpu", "size": 3}]},
    }
    results = pool4.run(agree_on, payloads=[PAYLOAD, PAYLOAD, other, {**PAYLOAD, "version": "2"}])
    for kind, message in results:
        assert kind == "AgreementError"
        assert "rank 2 differs from rank 0 in config.levels[1].size: 3 instead of 2" in message
        assert "rank 3 differs from rank 0 in version: '2' instead of '1'" in message
        assert "rank 1" not in message
    assert pool4.run(agree_on, payloads=[PAYLOAD] * 4)[0] == ("", "")  # a later try starts afresh


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"layers": [1, 2]}, "layers: [1, 2] instead of [1, 2, 3]"),
        ({"layers": [1, 2, 3], "more": True}, "more: True instead of None"),
        ({}, "layers: None instead of [1, 2, 3]"),
    ],
    ids=str,
)
def test_lists_of_other_lengths_and_missing_keys_differ(pool2: ProcessPool, other: dict, expected: str) -> None:
    for _, message in pool2.run(agree_on, payloads=[{"layers": [1, 2, 3]}, other]):
        assert message == f"rank 1 differs from rank 0 in {expected}"


def refuse_on(refusing_rank: int) -> tuple[str, str]:
    if dist.get_rank() == refusing_rank:
        with pytest.raises(ConfigError), announcing_failure():
            raise ConfigError("the model has no MoE layer")
        return "", ""
    return failure_of(agree, PAYLOAD, 600.0)  # far more than the pool's limit


@pytest.mark.parametrize("refusing_rank", [0, 2])
def test_a_rank_that_refuses_fails_the_others_at_once(pool4: ProcessPool, refusing_rank: int) -> None:
    results = pool4.run(refuse_on, refusing_rank=refusing_rank)
    for rank, (kind, message) in enumerate(results):
        if rank != refusing_rank:
            assert kind == "AgreementError"
            assert message == f"rank {refusing_rank} cannot start: ConfigError: the model has no MoE layer"
    assert results[refusing_rank] == ("", "")
    assert pool4.run(agree_on, payloads=[PAYLOAD] * 4)[0] == ("", "")


def come_to_different_points() -> tuple[str, str]:
    def end_a_start() -> None:
        with together(30.0, lambda: None):
            pass

    return failure_of(end_a_start) if dist.get_rank() == 0 else failure_of(result_of_rank_0, lambda: "said", 30.0)


def test_ranks_that_have_come_to_different_points_do_not_agree(pool2: ProcessPool) -> None:
    for kind, message in pool2.run(come_to_different_points):
        assert kind == "AgreementError"
        assert "rank 1 differs from rank 0 in hears: 'rank 0' instead of None" in message
    assert pool2.run(agree_on, payloads=[PAYLOAD] * 2)[0] == ("", "")


def refuse_in_turn(pause_s: dict[int, float], times: int) -> tuple[str, str]:
    """Every rank refuses some times, each at its own pace, and then agrees."""
    for _ in range(times):
        time.sleep(pause_s.get(dist.get_rank(), 0.0))
        with pytest.raises(ConfigError), announcing_failure():
            raise ConfigError("the model has no MoE layer")
    return failure_of(agree, PAYLOAD, 30.0)


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_rank_that_refused_several_times_in_a_row_meets_the_others_again(pool2: ProcessPool, slow_rank: int) -> None:
    for result in pool2.run(refuse_in_turn, pause_s={slow_rank: 0.2}, times=3):
        assert result == ("", "")


def agree_after_a_missed_one(missing: int) -> list[tuple[str, str]]:
    """Results of two start-ups, the first of which one rank leaves out."""
    results = []
    for step in range(2):
        if step or dist.get_rank() != missing:
            results.append(failure_of(agree, PAYLOAD, 1.0 if step == 0 else 20.0))
        if step == 0:
            come_after(1 - missing)
    return results


@pytest.mark.parametrize(
    ("missing", "named", "limit_s"), [pytest.param(0, "rank 0", 6.25, marks=pytest.mark.slow), (1, "ranks [1]", 1.0)]
)
def test_a_rank_that_left_one_out_is_named_and_joins_the_next(
    own_pool2: ProcessPool, missing: int, named: str, limit_s: float
) -> None:
    for rank, results in enumerate(own_pool2.run(agree_after_a_missed_one, missing=missing)):
        assert results[-1] == ("", "")
        assert len(results) == (1 if rank == missing else 2)
        for kind, message in results[:-1]:
            assert kind == "AgreementError"
            assert f"{named} did not join the hybridep start-up within {limit_s:g} s" in message


def agree_without(missing: tuple[int, ...], limit_s: float) -> tuple[str, str]:
    dist.barrier()
    if dist.get_rank() in missing:
        return "", ""
    return failure_of(agree, PAYLOAD, limit_s)


@pytest.mark.parametrize("missing", [pytest.param((3,), marks=pytest.mark.slow), (1, 2)], ids=str)
def test_missing_ranks_are_named(own_pool4: ProcessPool, missing: tuple[int, ...]) -> None:
    results = own_pool4.run(agree_without, missing=missing, limit_s=START_LIMIT_S)
    for rank, (kind, message) in enumerate(results):
        if rank not in missing:
            assert kind == "AgreementError"
            assert f"ranks {list(missing)} did not join the hybridep start-up within {START_LIMIT_S:g} s" in message


# -- use after close --------------------------------------------------------------------------------------------


def attach_and_detach(cases: list[MoeCase]) -> list[dict[str, Any]]:
    """One forward of each case in turn, each with a runtime of its own; and the files that are open afterwards."""
    rank, results = dist.get_rank(), []
    for case in cases:
        runtime, _ = build_case(case, rank)
        output, _, _ = forward_case(case, rank, runtime)
        output.sum().backward()
        runtime.finish()
        runtime.close()
        runtime.transport.link._thread.join(60)
        results.append({"output": output.detach().double().numpy(), "open_files": len(os.listdir("/proc/self/fd"))})
    return results


def test_a_runtime_can_be_made_again_after_close(pool4: ProcessPool) -> None:
    case = MoeCase(sizes=(2, 2), domain_sizes=(2, 1), num_tokens=(6, 3, 0, 4), num_layers=2)
    other = replace(case, domain_sizes=(1, 2), exchange="hierarchical")
    reference = [result["output"] for result in dense_results(case)]
    for rank, results in enumerate(pool4.run(attach_and_detach, cases=[case, other] * 2)):
        for result in results:
            assert relative_distance(result["output"], reference[rank]) < 1e-6
        # Connections of a closed runtime are gone: the number of open files does not grow with the rounds.
        assert results[-1]["open_files"] <= results[1]["open_files"] + 4


def two_at_once(case: MoeCase) -> list[Any]:
    """Two runtimes in one process: a message of one must not reach the other."""
    rank = dist.get_rank()
    with contextlib.ExitStack() as stack:
        runtimes = [build_case(case, rank)[0] for _ in range(2)]
        for runtime in runtimes:
            stack.callback(runtime.close)
        outputs = [forward_case(case, rank, runtime)[0] for runtime in runtimes]
        outputs[1].sum().backward()
        outputs[0].sum().backward()
    return [output.detach().double().numpy() for output in outputs]


def test_two_runtimes_do_not_mix(pool4: ProcessPool) -> None:
    case = MoeCase(sizes=(2, 2), domain_sizes=(2, 1), num_tokens=(6, 3, 0, 4), num_layers=2)
    reference = [result["output"] for result in dense_results(case)]
    for rank, outputs in enumerate(pool4.run(two_at_once, case=case)):
        assert all(relative_distance(output, reference[rank]) < 1e-6 for output in outputs)


# -- the end of the process -------------------------------------------------------------------------------------

SCRIPT_THAT_ENDS_DURING_A_TRANSFER = """
import os, sys, time
import torch, torch.distributed as dist
from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.transport.channels import Purpose, Transport

port, rank = int(sys.argv[1]), None
ranks = []
for one in range(2):
    pid = os.fork()
    if pid == 0:
        rank = one
        break
    ranks.append(pid)
if rank is None:
    print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks])
    sys.exit()
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
transport = Transport(Cluster((Level("dc", 2),)), timeout_s=100, generation=0)
channel = transport.channel("weights", (0, 1), background=True)
purpose = Purpose("expert_weights", "shipping")
if rank == 0:
    received = torch.zeros(1000)
    channel.start([], [(1, received)], purpose)
    class Slow:  # the interpreter takes long to end: what comes in meanwhile meets a dying process
        def __del__(self, mkdir=os.mkdir, exists=os.path.exists, sleep=time.sleep):
            mkdir("dying")
            while not exists("sent"): sleep(0.02)
    keep = Slow()
else:
    while not os.path.exists("dying"): time.sleep(0.02)
    channel.start([(0, torch.ones(1000))], [], purpose).wait()
    os.mkdir("sent")
"""


def test_a_process_may_end_while_a_transfer_is_under_way(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_THAT_ENDS_DURING_A_TRANSFER)
    command = [sys.executable, str(script), str(free_port())]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert run.communicate(timeout=300)[0] == "[0, 0]\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(300)
