# SPDX-License-Identifier: Apache-2.0
"""A port that strangers cannot fill or hold, proofs that are good once, for one protocol, and bounded messages."""

import json
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from selectors import DefaultSelector
from typing import Any

import pytest
from link_pair import LIMIT_S, SECRET, make_certificates

import ds_hybridep.link.door as doors
from ds_hybridep.link.door import MAX_STRANGERS, Door, run_ready
from ds_hybridep.link.line import LENGTH, MAX_MESSAGE_BYTES, Line
from ds_hybridep.link.options import listen
from ds_hybridep.link.trust import WELCOME, Protocol, Refused, accept, dial


def tuple_of(*claims: Any) -> tuple[Any, ...]:
    return claims


SPOKEN = Protocol(b"test 1\n", tuple_of, struct.Struct("!I"), {3: "it is closed today"})
OTHER = Protocol(b"test 2\n", tuple_of, struct.Struct("!I"))


def run_until(selector: DefaultSelector, is_true: Callable[[], Any], *places: Door) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline
        run_ready(selector, 0.02)
        for door in places:
            door.tick(time.monotonic())


class Place:
    """A door, and what became of the connections that came and went through it."""

    def __init__(self, verdict: int = WELCOME, protocol: Protocol = SPOKEN, contexts: Any = (None, None)) -> None:
        self.selector, self.taken, self.troubles = DefaultSelector(), [], []
        make_steps = partial(accept, SECRET, protocol, lambda claims: (verdict, (claims[0] + 1,)))
        self.door = Door(self.selector, contexts)
        self.address = ("127.0.0.1", self.door.open(listen("127.0.0.1", None), make_steps, self.ended))

    def ended(self, sock: socket.socket, claims: Any, error: Exception | None) -> bool:
        (self.troubles if claims is None else self.taken).append((sock, error if claims is None else claims[0]))
        return claims is not None

    def dial(self, secret: bytes = SECRET, protocol: Protocol = SPOKEN) -> tuple[Any, str]:
        """Dial the door itself; return what it has claimed, and the trouble."""
        found: list[tuple[Any, str]] = []

        def ended(_: socket.socket, claims: Any, error: Exception | None) -> bool:
            found.append((claims, "" if error is None else str(error)))
            return False

        self.door.begin(socket.socket(), dial(secret, protocol, (7,)), ended, place=self.address)
        run_until(self.selector, lambda: found, self.door)
        return found[0]

    def close(self) -> None:
        for sock, _ in self.taken:
            sock.close()
        self.door.close()
        self.selector.close()


@pytest.fixture
def place() -> Iterator[Place]:
    one = Place()
    yield one
    one.close()


def test_both_sides_learn_what_the_other_claims(place: Place) -> None:
    assert place.dial() == ((8,), "")
    assert [claim for _, claim in place.taken] == [7]


def test_another_secret_is_refused_on_both_sides(place: Place) -> None:
    assert place.dial(bytes(16)) == (None, "the two have different secrets; give both the same")
    assert place.taken == []
    assert place.door.num_refused == 1


def test_another_version_is_told_in_one_sentence(place: Place) -> None:
    claims, trouble = place.dial(protocol=OTHER)
    assert claims is None
    assert trouble.startswith("it does not speak this protocol; install the same version everywhere")
    assert place.taken == []


def test_a_verdict_of_the_protocols_own_is_told() -> None:
    place = Place(verdict=3)
    try:
        assert place.dial() == (None, "it is closed today")
        assert place.taken == []
    finally:
        place.close()


def test_a_verdict_that_is_not_proved_is_no_more_than_another_secret() -> None:
    steps = dial(SECRET, SPOKEN, (7,))
    next(steps)
    steps.send(SPOKEN.magic + bytes(32))
    with pytest.raises(Refused, match="different secrets"):
        steps.send(bytes([3]) + bytes(4 + 32))


def hello_for(challenge: bytes, protocol: Protocol = SPOKEN, secret: bytes = SECRET) -> bytes:
    steps = dial(secret, protocol, (7,))
    next(steps)
    return steps.send(challenge)[0]


@pytest.mark.parametrize("what", ["replayed", "of another protocol", "changed"])
def test_a_proof_is_good_for_what_it_was_made_for(what: str) -> None:
    steps = accept(SECRET, SPOKEN, lambda claims: (WELCOME, claims))
    challenge, count = next(steps)
    if what == "replayed":
        hello = hello_for(SPOKEN.magic + bytes(32))
    elif what == "of another protocol":  # of the same layout, with its magic exchanged afterwards
        hello = SPOKEN.magic + hello_for(challenge.replace(SPOKEN.magic, OTHER.magic), OTHER)[len(OTHER.magic) :]
    else:
        hello = bytearray(hello_for(challenge))
        hello[-33] ^= 1  # what it claims
    assert len(hello) == count
    answer, _ = steps.send(bytes(hello))
    assert answer == b"\1" + bytes(4 + 32)
    with pytest.raises(Refused, match="different secrets"):
        next(steps)


def test_slow_and_silent_strangers_have_their_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "HANDSHAKE_S", 0.3)
    silent, slow = (socket.create_connection(place.address) for _ in range(2))
    with silent, slow:
        run_until(place.selector, lambda: len(place.door.attempts) == 2)
        begin = time.monotonic()
        hello = iter(hello_for(SPOKEN.magic + bytes(32)))

        def drip() -> bool:
            if place.door.attempts:
                slow.send(bytes([next(hello)]))
                time.sleep(0.02)
            return not place.door.attempts

        run_until(place.selector, drip, place.door)
        assert time.monotonic() - begin < LIMIT_S / 10
        assert [str(error)[:22] for _, error in place.troubles] == ["no handshake in 0.3 s;"] * 2


def test_the_host_with_most_strangers_makes_room(place: Place) -> None:
    few = [socket.create_connection(place.address, source_address=("127.0.0.2", 0)) for _ in range(3)]
    many = []
    try:
        for _ in range(2 * MAX_STRANGERS):
            many.append(socket.create_connection(place.address))
            run_until(place.selector, lambda: sum(one.host == "127.0.0.1" for one in place.door.attempts))
            run_ready(place.selector, 0.0)
        run_until(place.selector, lambda: len(many) - place.door.num_refused <= MAX_STRANGERS - 3)
        assert len(place.door.attempts) == MAX_STRANGERS
        assert sum(one.host == "127.0.0.2" for one in place.door.attempts) == 3
        assert place.dial() == ((8,), "")
    finally:
        for sock in (*few, *many):
            sock.close()


# -- lines --------------------------------------------------------------------------------------------------------


class Pair:
    """Two ends of a connection: a line, and a plain socket."""

    def __init__(self) -> None:
        self.selector, self.heard = DefaultSelector(), list[Any]()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.far = socket.create_connection(listener.getsockname())
            near, _ = listener.accept()
        self.line = Line(near, self.selector, self.heard.append, undelivered_s=5.0)

    def come(self, said: bytes) -> None:
        self.far.sendall(said)

    def close(self) -> None:
        self.line.close()
        self.far.close()
        self.selector.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    one = Pair()
    yield one
    one.close()


def packed(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def test_messages_come_whole_in_order_and_before_the_end(pair: Pair) -> None:
    messages = [{"number": number, "text": "x" * number * 1000} for number in range(40)]
    said = b"".join(map(packed, messages))
    for begin in range(0, len(said), 70_001):
        pair.come(said[begin : begin + 70_001])
        run_ready(pair.selector, 1.0)
    pair.come(packed({"op": "leave"}))
    pair.line.send({"what": "nobody reads"})  # the far end closes the connection with a reset
    pair.far.close()
    with pytest.raises(OSError, match="closed|reset"):
        run_until(pair.selector, lambda: False)
    assert pair.heard == [*messages, {"op": "leave"}]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (LENGTH.pack(MAX_MESSAGE_BYTES + 1), f"a message of {MAX_MESSAGE_BYTES + 1} bytes"),
        (packed([1]), "not an object"),
        (LENGTH.pack(1) + b"{", "Expecting"),
        (LENGTH.pack(1) + b"\xff", "decode|Expecting|utf"),
    ],
    ids=["too long", "no object", "no JSON", "no text"],
)
def test_what_is_no_message_is_an_error(pair: Pair, said: bytes, error: str) -> None:
    pair.come(packed({}) + said)
    with pytest.raises(ValueError, match=error):
        run_until(pair.selector, lambda: False)
    assert pair.heard == [{}]


def test_what_the_system_does_not_take_waits(pair: Pair) -> None:
    messages = [{"text": str(number) * 100_000} for number in range(100)]
    for message in messages:
        pair.line.send(message)
    for _ in range(50):
        run_ready(pair.selector, 0.0)
    assert pair.line.is_sending
    wanted, got = b"".join(map(packed, messages)), bytearray()
    pair.far.setblocking(False)

    def read() -> bool:
        try:
            got.extend(pair.far.recv(2**20))
        except BlockingIOError:
            pass
        return len(got) >= len(wanted)

    run_until(pair.selector, read)
    assert got == wanted
    assert not pair.line.is_sending
    pair.line.close()
    pair.line.send({"to": "nobody"})
    assert not pair.line.is_sending


def test_messages_cross_tls(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path)
    place = Place(contexts=tls.contexts())
    heard: list[Any] = []
    mine: list[ssl.SSLSocket] = []

    def ended(sock: Any, claims: Any, error: Exception | None) -> bool:
        assert error is None
        mine.append(sock)
        return True

    try:
        place.door.begin(socket.socket(), dial(SECRET, SPOKEN, (7,)), ended, place=place.address)
        run_until(place.selector, lambda: place.taken and mine, place.door)
        assert mine[0].version() == "TLSv1.3"
        messages = [{"number": number, "text": "x" * number * 1000} for number in range(100)]
        with (
            closing(Line(mine[0], place.selector, heard.append, undelivered_s=5.0)) as near,
            closing(Line(place.taken[0][0], place.selector, lambda one: far.send(one), undelivered_s=5.0)) as far,
        ):
            for message in messages:
                near.send(message)
            run_until(place.selector, lambda: len(heard) == len(messages))
        assert heard == messages
    finally:
        place.close()
