# SPDX-License-Identifier: Apache-2.0
"""What somebody between two sites can read, without TLS and with it."""

import shutil
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from link_pair import Proxy, make_certificates
from site_jobs import Job, Meeting, block, end_together

from ds_hybridep.codecs import make_codec
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.geometry.slots import whole
from ds_hybridep.lab.network import HOST_DEVICE, EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology
from ds_hybridep.link import TLS
from ds_hybridep.sites.exchange import Counters, Header, SiteConnections
from ds_hybridep.sites.packets import OwnedSlice, Packets
from ds_hybridep.sync.home import Home

NAMES = ["a", "b"]
KNOWN_BYTES = 64
CAPTURE = f"""
import socket, sys
tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**26)
tap.bind(({HOST_DEVICE!r}, 0))
print("ready", flush=True)
with open(sys.argv[1], "wb") as file:
    while True:
        file.write(tap.recv(2**17))
        file.flush()
"""

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, which makes certificates")


class Noting:
    """A socket that notes what it receives."""

    def __init__(self, source: socket.socket, seen: bytearray) -> None:
        self.source, self.seen, self.shutdown = source, seen, source.shutdown

    def recv(self, size: int) -> bytes:
        self.seen.extend(data := self.source.recv(size))
        return data


class Tap(Proxy):
    """Forwards connections, and keeps what passes, by connection and direction."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.seen: defaultdict[int, bytearray] = defaultdict(bytearray)
        super().__init__(target)

    def _pump(self, source: socket.socket, sink: socket.socket, at: int | None) -> None:
        noting: Any = Noting(source, self.seen[id(source)])
        super()._pump(noting, sink, at)

    def __contains__(self, known: bytes) -> bool:
        return any(known in seen for seen in self.seen.values())


@contextmanager
def two_sites(tls: TLS | None) -> Iterator[tuple[list[SiteConnections], Tap]]:
    """Site b dials site a through a tap."""
    connections = [
        SiteConnections(NAMES, name, 0, b"a secret of sixteen", host="127.0.0.1", timeout_s=20.0,
        counters={one: Counters() for one in NAMES},
                 tls=tls)
        for name in NAMES
    ]  # fmt: skip
    tap = Tap(connections[0].address)
    addresses = {"a": tap.address, "b": connections[1].address}
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: one.open(1, NAMES, [], addresses), connections))
        yield connections, tap
    finally:
        with ThreadPoolExecutor() as pool:  # waits, so that nothing is dialled any more
            list(pool.map(lambda one: one._link.close(), connections))
        tap.close()


@needs_openssl
@pytest.mark.parametrize("encodes", [False, True], ids=["values", "packets"])
@pytest.mark.parametrize("encrypts", [False, True], ids=["open", "TLS"])
def test_gradients_are_read_between_sites_unless_tls_is_on(tmp_path: Path, encrypts: bool, encodes: bool) -> None:
    codec = make_codec(recommended_codecs(4).dense_gradient) if encodes else None
    gradient = torch.linspace(-1.0, 1.0, 64 * 64).view(64, 64)
    one = OwnedSlice((whole("w", gradient.shape),), (gradient,), False)
    packets = [
        Packets(name, codec, codec, torch.float32, home=Home(torch.device("cpu"))).encode(one) for name in NAMES
    ]
    with two_sites(make_certificates(tmp_path) if encrypts else None) as (connections, tap):
        with ThreadPoolExecutor() as pool:
            got = list(
                pool.map(
                    lambda pair: pair[0].swap([pair[1]], Header(0, 1.0, 1.0)), zip(connections, packets, strict=True)
                )
            )
        for received in got:
            assert all(torch.equal(one.data, packet) for one, packet in zip(received.values(), packets, strict=True))
        for packet in packets:
            known = packet.numpy().tobytes()
            assert len(known) > KNOWN_BYTES
            assert (known[:KNOWN_BYTES] in tap) is not encrypts
        assert sum(map(len, tap.seen.values())) > sum(map(len, packets))


@needs_openssl
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.usefixtures("permitted_without_delay")
@pytest.mark.parametrize("encrypts", [False, True], ids=["open", "TLS"])
def test_weights_of_a_job_are_read_between_sites_unless_tls_is_on(tmp_path: Path, encrypts: bool) -> None:
    files = make_certificates(tmp_path) if encrypts else None
    of_link = {"tls": {name: str(path) for name, path in vars(files).items()}} if files else {}
    captured = tmp_path / "captured"
    with EmulatedNetwork(Topology(2, 1), LinkSpec()) as network:
        capture = network.command_on(0, [sys.executable, "-c", CAPTURE, str(captured)])
        with subprocess.Popen(capture, stdout=subprocess.PIPE) as tap:
            assert tap.stdout is not None
            assert tap.stdout.readline() == b"ready\n"
            point = Meeting(tmp_path, network.topology.address_of(0), network.command_on(0, []), tls=files)
            with point as meeting:
                options = {"block": block(meeting, tmp_path, link=of_link), "ep_size": 1, "steps": 10**6, "lr": 0.0}
                options["until"] = str(tmp_path / "until")
                # Site b has other weights, so it joins site a, whose weights cross.
                jobs = [
                    Job(tmp_path, name, 1, network.command_on(host, []), site=name, first_rank=host, seed=1 + host,
                        **options)
                    for host, name in enumerate(NAMES)
                ]  # fmt: skip
                try:
                    jobs[1].wait_for_step(3)
                    (a,), (b,) = end_together(tmp_path, jobs)
                finally:
                    for job in jobs:
                        job.kill()
            tap.kill()
    assert a["weights"] == b["weights"]
    known = [bytes.fromhex(one) for one in a["first_bytes"]]
    assert min(map(len, known)) == KNOWN_BYTES
    seen = captured.read_bytes()
    found = sum(one in seen for one in known)  # one may be cut by the end of a frame
    assert found == 0 if encrypts else found > len(known) / 2
