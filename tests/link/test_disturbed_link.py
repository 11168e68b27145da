# SPDX-License-Identifier: Apache-2.0
"""Training goes on, bit for bit, while connections are reset and strangers knock at the ports of the ranks."""

import contextlib
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from parity import Case, levels_of
from process_pool import ProcessPool
from torch import distributed as dist
from toy_model import ToyConfig
from training import engine_of, train

from ds_hybridep.link.admission import LINK, Claims
from ds_hybridep.link.trust import SECRET, dial

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]

DURATION_S = 60.0
STEPS_AT_ONCE = 5
MIB = 2**20
CASE = Case(levels=levels_of((2, 2), (2, 1)), toy=ToyConfig(num_layers=2), zero_stage=1)


def reset_all(link: Any, _: list[socket.socket]) -> None:
    """Shut down all connections of this rank, as found by its ports."""
    for peer in list(link.peers.values()):
        for lane in peer.lanes:
            if lane.sock is not None:
                with contextlib.suppress(OSError):
                    lane.sock.shutdown(socket.SHUT_RDWR)
    time.sleep(2.0)


def scan(link: Any, _: list[socket.socket]) -> None:
    for _ in range(50):
        with contextlib.suppress(OSError):
            socket.create_connection(link.address, timeout=1.0).close()
    time.sleep(0.05)


def keep_silent(link: Any, held: list[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        held.append(socket.create_connection(link.address, timeout=1.0))
    if len(held) > 1000:
        held.pop(0).close()
    time.sleep(0.002)


def send_garbage(link: Any, _: list[socket.socket]) -> None:
    with contextlib.suppress(OSError), socket.create_connection(link.address, timeout=1.0) as stranger:
        # Also what begins like a hello, and claims to be as long as can be.
        stranger.sendall(random.randbytes(400) if random.random() < 0.5 else b"hybridep link 1\n" + b"\xff" * 400)
        stranger.settimeout(1.0)
        stranger.recv(1000)
    time.sleep(0.01)


def send_without_end(link: Any, _: list[socket.socket]) -> None:
    """As much as the port takes, behind what begins like a hello."""
    with contextlib.suppress(OSError), socket.create_connection(link.address, timeout=1.0) as stranger:
        for _ in range(64):
            stranger.sendall(LINK.magic + b"\xff" * MIB)
    time.sleep(0.01)


def knock(link: Any, secret: bytes, challenge_of_hello: bytes = b"") -> bytes:
    """Go through the handshake as a rank that dials this one would; return the port's verdict, 0 for a welcome."""
    rank, peer = max(link.peers.items(), key=lambda one: one[0])
    with socket.create_connection(link.address, timeout=1.0) as stranger:
        challenge = stranger.recv(1000)
        steps = dial(secret, LINK, Claims(rank, 1, 4, 0, len(peer.lanes), peer.instance, 0))
        next(steps)
        stranger.sendall(steps.send(challenge_of_hello or challenge)[0])
        return stranger.recv(1000)[:1]


def replay(link: Any, _: list[socket.socket]) -> None:
    """A hello that was right for another challenge, as someone who has overheard it would send it."""
    with contextlib.suppress(OSError):
        assert knock(link, link.admission._secret, LINK.magic + bytes(32)) in (b"", bytes([SECRET]))
    time.sleep(0.01)


def guess(link: Any, _: list[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        assert knock(link, random.randbytes(32)) in (b"", bytes([SECRET]))
    time.sleep(0.01)


DISTURBANCES = {
    "resets": reset_all, "scan": scan, "silence": keep_silent, "garbage": send_garbage, "flood": send_without_end,
    "replay": replay, "wrong secret": guess,
}  # fmt: skip


@contextlib.contextmanager
def disturbing(link: Any, what: str) -> Iterator[None]:
    ends, held, failures = threading.Event(), list[socket.socket](), list[Exception]()

    def run() -> None:
        try:
            while not ends.is_set():
                DISTURBANCES[what](link, held)
        except Exception as error:  # noqa: BLE001  raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        for one in held:
            one.close()
        assert not failures, failures


def train_disturbed(what: str, num_rounds: int) -> dict[str, Any]:
    """Losses, and what has grown by the end; without num_rounds as long as DURATION_S.  Rank 1 is disturbed."""
    with engine_of(CASE, with_block=True) as engine:
        losses = train(engine, CASE, 0, STEPS_AT_ONCE)
        link = engine.__dict__["_hybridep_attachment"].runtime.transport.link
        gc.collect()
        before = psutil.Process().memory_info().rss
        with contextlib.ExitStack() as stack:
            if what and dist.get_rank() == 1:
                stack.enter_context(disturbing(link, what))
            begin, count = time.monotonic(), 0
            while True:
                goes_on = torch.tensor(float(time.monotonic() - begin < DURATION_S or count < num_rounds))
                dist.broadcast(goes_on, 0)
                if not goes_on or (num_rounds and count == num_rounds):
                    break
                count += 1
                losses += train(engine, CASE, STEPS_AT_ONCE * count, STEPS_AT_ONCE)
            # Of the strangers' connections at most 64 are open on this side; their own ends are in this process, too.
            grown = (psutil.Process().memory_info().rss - before) / MIB
        time.sleep(1.0)
        statistics = link.statistics()
        return {
            "losses": losses,
            "grown": grown,
            "files": len(os.listdir("/proc/self/fd")),
            "attempts": len(link.admission.door.attempts),
            "reconnects": sum(one.reconnects for one in statistics.values()),
        }


@pytest.mark.parametrize("what", DISTURBANCES)
def test_losses_are_bit_equal(pool4: ProcessPool, what: str) -> None:
    found = pool4.run(train_disturbed, what=what, num_rounds=0)
    num_rounds = len(found[0]["losses"]) // STEPS_AT_ONCE - 1
    plain = pool4.run(train_disturbed, what="", num_rounds=num_rounds)
    for rank in range(4):
        assert found[rank]["losses"] == plain[rank]["losses"]
        assert found[rank]["grown"] < plain[rank]["grown"] + 30
        assert found[rank]["attempts"] <= 64
    assert found[1]["files"] <= plain[1]["files"] + 64
    print(what, num_rounds, [{key: one[key] for key in one if key != "losses"} for one in found])
    if what == "resets":
        assert found[1]["reconnects"] > 5
