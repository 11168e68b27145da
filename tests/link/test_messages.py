# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks arrive whole, in memory of the caller's choice, within bounds."""

import gc
import threading
import time
import weakref

import pytest
import torch
from link_pair import LIMIT_S, close_all, connect_all, content, linked, make_link

from ds_hybridep.errors import CommunicationError
from ds_hybridep.link import BULK, URGENT
from ds_hybridep.link.messages import Mail
from ds_hybridep.link.wire import Frame, Kind

SIZES = [0, 1, 45, 2**14, 2**14 + 1, 2**16, 2**20, 2**20 + 1, 5_000_001]


@pytest.mark.parametrize("connections", [1, 3])
def test_messages_of_any_size_arrive_whether_awaited_or_not(connections):
    with linked(connections) as (left, right):
        ours, theirs = left.channel("x", (0, 1)), right.channel("x", (0, 1))
        expected = [content(size, num_bytes=size) for size in SIZES]
        early = [theirs.receive(0, max_bytes=size) for size in SIZES]
        sends = [ours.send(1, data) for data in (*expected, *expected)]
        for handle, data in zip(early, expected, strict=True):
            assert handle.wait(LIMIT_S) == data
        for send in sends:
            send.wait(LIMIT_S)
        rooms = [bytearray(size + 7) for size in SIZES]  # messages may be shorter than the room for them
        for room, data in zip(rooms, expected, strict=True):
            assert theirs.receive(0, into=room).wait(LIMIT_S) == data
            assert room[: len(data)] == data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_tensors_are_sent_and_filled_in_place(dtype):
    with linked() as (left, right):
        sent = (torch.arange(300_000) % 2).to(dtype).reshape(100, 3000)
        for awaited in (True, False):
            room = torch.zeros_like(sent)
            if awaited:
                handle = left.channel("t", (0, 1)).receive(1, into=room)
            right.channel("t", (0, 1)).send(0, sent).wait(LIMIT_S)
            if not awaited:
                handle = left.channel("t", (0, 1)).receive(1, into=room)
            handle.wait(LIMIT_S)
            assert torch.equal(room, sent)


def test_channels_kinds_and_generations_are_kept_apart():
    names = [("a", 0, ""), ("a", 0, "k"), ("a", 1, ""), ("b", 0, "")]
    with linked() as (left, right):
        channels = [
            [link.channel(name, (0, 1), generation=number) for link in (left, right)] for name, number, _ in names
        ]
        for (ours, _), name in zip(channels, names, strict=True):
            for index in range(3):
                ours.send(1, content(*name, index, num_bytes=50), kind=name[2])
        for (_, theirs), name in reversed(list(zip(channels, names, strict=True))):
            for index in range(3):
                got = theirs.receive(0, max_bytes=50, kind=name[2]).wait(LIMIT_S)
                assert got == content(*name, index, num_bytes=50)


@pytest.mark.parametrize("num_bytes", [200, 3_000_000])
def test_a_message_that_is_too_long_is_an_error_where_it_is_received_and_nothing_else_stops(num_bytes):
    with linked() as (left, right):
        ours, theirs = left.channel("x", (0, 1)), right.channel("x", (0, 1))
        awaited = theirs.receive(0, max_bytes=100)
        ours.send(1, bytes(num_bytes), kind="")
        with pytest.raises(CommunicationError, match=rf"from rank 0 .* it has {num_bytes} bytes.* at most 100"):
            awaited.wait(LIMIT_S)
        ours.send(1, bytes(num_bytes))
        ours.send(1, b"next").wait(LIMIT_S)
        after = theirs.receive(0, max_bytes=100, kind="")
        with pytest.raises(CommunicationError, match="at most 100"):
            after.wait(LIMIT_S)
        assert theirs.receive(0, max_bytes=100).wait(LIMIT_S) == b"next"


def test_early_messages_stay_within_their_bound_and_none_is_lost():
    bound, size, count = 3_000_000, 500_000, 40
    with linked(early_bytes=bound) as (left, right):
        ours, theirs = left.channel("x", (0, 1)), right.channel("x", (0, 1))
        sends = [ours.send(1, content(index, num_bytes=size)) for index in range(count)]
        sends[bound // size - 1].wait(LIMIT_S)
        with pytest.raises(CommunicationError, match="was not done after 0.3 s"):
            sends[-1].wait(0.3)
        assert sum(right.peer(0).mail.early_bytes) <= bound
        # Urgent messages have connections of their own.
        left.channel("u", (0, 1), priority=URGENT).send(1, b"now")
        assert right.channel("u", (0, 1), priority=URGENT).receive(0, max_bytes=10).wait(LIMIT_S) == b"now"
        for index in range(count):
            assert theirs.receive(0, max_bytes=size).wait(LIMIT_S) == content(index, num_bytes=size)
        assert right.peer(0).mail.early_bytes == [0, 0]


def test_an_awaited_message_behind_too_many_early_ones_still_comes():
    with linked(early_bytes=1_000_000) as (left, right):
        early, awaited = left.channel("early", (0, 1)), left.channel("awaited", (0, 1))
        for index in range(10):
            early.send(1, content(index, num_bytes=700_000))
        awaited.send(1, b"here")
        assert right.channel("awaited", (0, 1)).receive(0, max_bytes=4).wait(LIMIT_S) == b"here"


def test_an_acknowledgement_behind_too_many_early_messages_still_comes():
    with linked(early_bytes=1_000_000) as (left, right):
        for index in range(10):
            left.channel("early", (0, 1)).send(1, content(index, num_bytes=700_000))
        left.channel("back", (0, 1)).receive(1, max_bytes=5_000_000)
        right.channel("back", (0, 1)).send(0, bytes(5_000_000)).wait(LIMIT_S)


def test_a_callback_hears_of_the_end_of_a_message_and_may_fail(caplog):
    called = threading.Event()
    with linked() as (left, right):
        handle = right.channel("x", (0, 1)).receive(0, max_bytes=5)
        handle.add_done_callback(lambda handle: 1 / 0)
        handle.add_done_callback(lambda handle: called.set())
        left.channel("x", (0, 1)).send(1, b"hello")
        assert called.wait(LIMIT_S)
        assert handle.done()
        assert "ZeroDivisionError" in caplog.text
        again = []
        handle.add_done_callback(again.append)
        assert again == [handle]


def test_three_ranks_send_to_all_others_at_once():
    links = [make_link(rank, 3) for rank in range(3)]
    try:
        connect_all(links, connections=2)
        channels = [link.channel("all", (0, 1, 2)) for link in links]
        pairs = [(source, to) for source in range(3) for to in range(3) if source != to]
        data = {pair: content(*pair, num_bytes=2_000_000 + sum(pair)) for pair in pairs}
        handles = {(source, to): channels[to].receive(source, max_bytes=3_000_000) for source, to in pairs}
        for source, to in pairs:
            channels[source].send(to, data[source, to])
        for pair in pairs:
            assert handles[pair].wait(LIMIT_S) == data[pair]
    finally:
        close_all(links)


def test_statistics_count_what_was_exchanged():
    with linked() as (left, right):
        handle = right.channel("x", (0, 1)).receive(0, max_bytes=2_000_000)
        left.channel("x", (0, 1)).send(1, bytes(2_000_000)).wait(LIMIT_S)
        handle.wait(LIMIT_S)
        ours, theirs = left.statistics()[1], right.statistics()[0]
        assert ours.state == theirs.state == "alive"
        assert 2_000_000 < ours.sent_bytes < 2_010_000
        assert 2_000_000 < theirs.received_bytes < 2_010_000
        assert ours.round_trip_s > 0
        assert ours.reconnects == 0


def test_a_rank_that_was_not_connected_is_named():
    with (
        linked() as (left, _),
        pytest.raises(CommunicationError, match="no link was connected with rank 7; call connect first"),
    ):
        left.channel("x", (0, 7)).send(7, b"")


def test_a_message_is_freed_at_its_end_without_the_garbage_collector():
    gc.disable()
    try:
        with linked() as (left, right):
            sent, received = torch.ones(100_000), torch.zeros(100_000)
            known = [weakref.ref(sent), weakref.ref(received)]
            done = threading.Event()
            send = left.channel("x", (0, 1)).send(1, sent)
            send.add_done_callback(lambda handle: done.set() if handle.done() else None)
            receive = right.channel("x", (0, 1)).receive(0, into=received)
            receive.add_done_callback(lambda handle: handle.done())
            receive.wait(LIMIT_S)
            send.wait(LIMIT_S)
            assert done.wait(LIMIT_S)
            del sent, received, send, receive
            deadline = time.monotonic() + LIMIT_S
            while any(one() is not None for one in known) and time.monotonic() < deadline:
                time.sleep(0.01)  # the link's thread may just be leaving them
            assert [one() for one in known] == [None, None]
    finally:
        gc.enable()


def test_the_rest_of_an_awaited_message_comes_though_early_ones_fill_their_bound():
    mail = Mail(threading.Lock(), 100, 2)
    early, awaited = bytes(16), bytes([1] * 16)
    assert mail.place(Frame(Kind.DATA, 100, early, 1, 100, 0), BULK) is not None
    receive = mail.receive(awaited, "", None, 100)
    first = Frame(Kind.DATA, 50, awaited, 1, 100, 0)
    mail.arrived(first, mail.place(first, BULK))
    assert mail.place(Frame(Kind.DATA, 60, early, 2, 60, 0), BULK) is not None  # the rest lies behind it
    rest = Frame(Kind.DATA, 50, awaited, 1, 100, 50)
    mail.arrived(rest, mail.place(rest, BULK))
    assert receive.done()
    assert mail.place(Frame(Kind.DATA, 60, early, 3, 60, 0), BULK) is None
    assert mail.place(Frame(Kind.DATA, 60, early, 4, 60, 0), URGENT) is not None  # bulk ones never stop urgent ones


def test_messages_of_a_closed_channel_fail_or_are_thrown_away():
    with linked() as (left, right):
        ours, theirs = left.channel("x", (0, 1)), right.channel("x", (0, 1))
        awaited = theirs.receive(0, max_bytes=10)
        theirs.close()
        with pytest.raises(CommunicationError, match="the channel was closed"):
            awaited.wait(LIMIT_S)
        ours.send(1, bytes(100_000)).wait(LIMIT_S)
        mail = right.peer(0).mail
        assert (mail.early_bytes, mail._receives, mail._num_awaited) == ([0, 0], {}, 0)
