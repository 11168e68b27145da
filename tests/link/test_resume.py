# SPDX-License-Identifier: Apache-2.0
"""Connections that break lose nothing and double nothing; peers that are gone are told from those that are not."""

import random
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from link_pair import LIMIT_S, Process, content, linked_through_proxy, make_link
from scripts import free_port

import ds_hybridep.link.peer as peers
from ds_hybridep.errors import CommunicationError
from ds_hybridep.link import BULK, URGENT, State

MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),  # channel
        st.sampled_from(["", "k"]),  # kind
        st.sampled_from([0, 1, 100, 20_000, 300_000, 1_500_000]),  # bytes
        st.booleans(),  # sent by rank 0
        st.booleans(),  # received before anything is sent
        st.booleans(),  # all connections are reset after it was sent
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.dist
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(MESSAGES, st.integers(1, 3), st.randoms(use_true_random=False))
def test_random_resets_change_no_byte(messages, connections, generator):
    with linked_through_proxy(connections) as (links, proxy):
        channels = {
            (name, rank): links[rank].channel(name, (0, 1), priority=URGENT if name == "a" else BULK)
            for name in "ab"
            for rank in (0, 1)
        }
        # The reference: what the n-th receive of a stream has to bring is what its n-th send was given.
        data = [content(*message[:3], index, num_bytes=message[2]) for index, message in enumerate(messages)]
        handles = {}

        def receive(index):
            name, kind, num_bytes, from_first, _, _ = messages[index]
            handles[index] = channels[name, int(from_first)].receive(
                1 - int(from_first), max_bytes=num_bytes, kind=kind
            )

        def stream(index):
            name, kind, _, from_first, _, _ = messages[index]
            return name, kind, from_first

        late = [index for index, message in enumerate(messages) if not message[4]]
        # In one stream receives keep their order, so only its first ones can come before all sends.
        first_late = {stream(index): index for index in reversed(late)}
        early = [index for index in range(len(messages)) if index < first_late.get(stream(index), len(messages))]
        for index in early:
            receive(index)
        for index, (name, kind, _, from_first, _, resets) in enumerate(messages):
            channels[name, 1 - int(from_first)].send(int(from_first), data[index], kind=kind)
            if resets:
                threading.Event().wait(generator.random() * 0.05)
                proxy.reset()
        for index in range(len(messages)):
            if index not in handles:
                receive(index)
        for index, handle in handles.items():
            assert handle.wait(LIMIT_S) == data[index]


def test_resets_under_load_change_no_byte_and_are_counted():
    generator = random.Random(0)
    with linked_through_proxy(2) as (links, proxy):
        stop = threading.Event()

        def reset_often():
            while not stop.wait(generator.random() * 0.2):
                proxy.reset()

        resetting = threading.Thread(target=reset_often)
        resetting.start()
        try:
            for turn in range(30):
                handles = []
                for rank, link in enumerate(links):
                    handles.append(link.channel("x", (0, 1)).receive(1 - rank, max_bytes=3_000_000))
                for rank, link in enumerate(links):
                    link.channel("x", (0, 1)).send(1 - rank, content(turn, rank, num_bytes=3_000_000))
                for rank, handle in enumerate(handles):
                    assert handle.wait(LIMIT_S) == content(turn, 1 - rank, num_bytes=3_000_000)
        finally:
            stop.set()
            resetting.join()
        assert links[0].statistics()[1].reconnects > 0


def test_a_half_open_connection_is_noticed_and_replaced(monkeypatch):
    monkeypatch.setattr(peers, "SILENT_S", 0.5)
    monkeypatch.setattr(peers, "BEAT_S", 0.1)
    states = []
    with linked_through_proxy(on_change=lambda fact: states.append(fact.kind)) as (links, proxy):
        proxy.freeze()
        send = links[1].channel("x", (0, 1)).send(0, content(num_bytes=2_000_000))
        while links[1].statistics()[0].state is not State.SILENT:
            with pytest.raises(CommunicationError, match="was not done"):
                send.wait(0.1)
        assert State.SILENT in states
        assert links[1].statistics()[0].state is State.SILENT
        proxy.thaw()
        proxy.reset()  # connections made meanwhile lead nowhere
        assert links[0].channel("x", (0, 1)).receive(1, max_bytes=2_000_000).wait(LIMIT_S) == content(
            num_bytes=2_000_000
        )


def test_a_peer_that_is_silent_for_too_long_is_gone_and_named(monkeypatch):
    monkeypatch.setattr(peers, "SILENT_S", 0.3)
    with linked_through_proxy(timeout_s=1.5) as (links, proxy):
        handles = [link.channel("x", (0, 1)).receive(1 - rank, max_bytes=10) for rank, link in enumerate(links)]
        proxy.freeze()
        for rank, handle in enumerate(handles):
            with pytest.raises(
                CommunicationError, match=rf"from rank {1 - rank} \(127.0.0.1:\d+\).* nothing was heard"
            ):
                handle.wait(LIMIT_S)
        assert links[0].statistics()[1].state is State.GONE
        with pytest.raises(CommunicationError, match="nothing was heard"):
            links[0].channel("x", (0, 1)).send(1, b"").wait(LIMIT_S)


@pytest.mark.dist
def test_a_restarted_peer_is_gone_and_is_told_so():
    first, port = make_link(0), free_port()
    try:
        with Process(first, "print('connected', flush=True); time.sleep(60)", port=port) as process:
            assert process.read() == "connected"
            handle = first.channel("x", (0, 1)).receive(1, max_bytes=10)
            process.kill()
        again = make_link(1, ports=(port, port))
        with pytest.raises(CommunicationError, match="was restarted"):
            again.connect({0: first.address})
        with pytest.raises(CommunicationError, match=r"from rank 1 .* was restarted"):
            handle.wait(LIMIT_S)
        again.close()
    finally:
        first.close()


@pytest.mark.dist
def test_a_killed_peer_is_gone_once_its_port_refuses_connections(monkeypatch):
    monkeypatch.setattr(peers, "REFUSED_S", 0.3)
    first = make_link(0)
    try:
        with Process(first, "time.sleep(60)", port=free_port()) as process:
            handle = first.channel("x", (0, 1)).receive(1, max_bytes=10)
            while not first.peer(1)._was_reached:
                time.sleep(0.05)
            process.kill()
        with pytest.raises(CommunicationError, match=r"from rank 1 .* its process has ended"):
            handle.wait(LIMIT_S)
        assert [fact.kind for fact in first.heard] == [State.GONE]
    finally:
        first.close()
