# SPDX-License-Identifier: Apache-2.0
"""SECURITY.md, step by step: certificates that the link takes, and a tunnel that carries all of a job's traffic."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from link_pair import content, linked
from scripts import SCRIPT, run_together

from ds_hybridep.config import parse_config
from ds_hybridep.lab.launcher import rank_environment
from ds_hybridep.lab.network import HOST_DEVICE, EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology
from ds_hybridep.link import TLS

PAGE = Path(__file__).resolve().parents[2] / "SECURITY.md"
FILES = "/etc/hybridep/"
# Counts IPv4 packets of an interface by protocol, and by port where they are UDP's, until the file `end` is there.
SNIFFER = """
import collections, json, pathlib, socket, struct, sys
device, out, end = sys.argv[1:]
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
sock.bind((device, 0))
sock.settimeout(0.2)
counts = collections.Counter()
pathlib.Path(out + ".ready").touch()
while not pathlib.Path(end).exists():
    try:
        frame = sock.recv(65536)
    except TimeoutError:
        continue
    if frame[12:14] == b"\\x08\\x00":
        protocol, start = frame[23], 14 + 4 * (frame[14] & 15)
        port = struct.unpack("!H", frame[start + 2:start + 4])[0]
        counts[f"{protocol}:{port}" if protocol == 17 else str(protocol)] += 1
pathlib.Path(out).write_text(json.dumps(counts))
"""


def blocks_of(section: str, language: str = "") -> list[str]:
    """The fenced blocks of one language in a section of the page."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    return [body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if kind == language]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl not found")
def test_the_link_takes_the_certificates_that_the_page_makes(tmp_path: Path) -> None:
    make, look, _ = blocks_of("TLS, step by step")
    subprocess.run(["bash", "-e", "-c", make], cwd=tmp_path, check=True, capture_output=True, timeout=500)
    (block,) = blocks_of("TLS, step by step", "json")
    for node in ("node1", "node2"):  # one block, and the files of each host at the same place
        (tmp_path / node).mkdir()
        for name, there in (("authority.pem", "authority.pem"), ("secret", "secret"),
                            (f"{node}.pem", "host.pem"), (f"{node}.key", "host.key")):  # fmt: skip
            shutil.copy(tmp_path / name, tmp_path / node / there)
    config = parse_config(json.loads(f"{{{block}}}")["hybridep"], world_size=16, base_dir=tmp_path)
    assert config.link.ports == (29600, 29699)
    tls = config.link.tls
    assert tls is not None
    first, second = (
        TLS(*(str(path).replace(FILES, f"{tmp_path}/{node}/") for path in (tls.certificate, tls.key, tls.authority)))
        for node in ("node1", "node2")
    )
    secret = (tmp_path / "secret").read_bytes().strip()
    with linked(secret=secret, tls=first) as links:
        links[0].channel("x", (0, 1)).send(1, content(num_bytes=1000))
        assert links[1].channel("x", (0, 1)).receive(0, max_bytes=1000).wait(60) == content(num_bytes=1000)
        host, port = links[0].address
        seen = subprocess.run(
            ["bash", "-c", look.replace("node1:29600", f"{host}:{port}")],
            cwd=tmp_path, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
    assert "Verification: OK" in seen.stdout + seen.stderr
    assert second.contexts()


def why_no_wireguard() -> str | None:
    missing = [name for name in ("wg", "wg-quick", "wireguard-go") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: apt-get install wireguard-tools wireguard-go"
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        return "a tunnel needs root and /dev/net/tun"
    return None


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.skipif((REASON := why_no_wireguard()) is not None, reason=str(REASON))
@pytest.mark.usefixtures("permitted_without_delay")
def test_all_traffic_of_a_job_passes_the_tunnel_of_the_page(tmp_path: Path) -> None:
    keys, *configs, start, tell = blocks_of("WireGuard, for the rest")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "hybridep": {"levels": [{"name": "dc", "size": 2, "domain_size": 2}], "advanced": {"kernels": "reference"}},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    variables = dict(re.findall(r"^echo (\w+)=(\S+) >>", tell, re.M))
    assert variables["GLOO_SOCKET_IFNAME"] == "wg0"
    network = EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=200e6))
    folders = [tmp_path / name for name in ("node1", "node2")]
    for folder in folders:
        folder.mkdir()
        lines = [line for line in keys.splitlines() if line.startswith(("umask", "wg "))]
        subprocess.run(["bash", "-e", "-c", "\n".join(lines)], cwd=folder, check=True, timeout=500)
    addresses = {"203.0.113.1": network.topology.address_of(0), "198.51.100.2": network.topology.address_of(1)}
    key_of = {
        f"{kind.upper()}-KEY-OF-{folder.name.upper()}": (folder / f"{kind}.key").read_text().strip()
        for kind in ("private", "public")
        for folder in folders
    }
    assert len(configs) == len(folders)
    for folder, text in zip(folders, configs, strict=True):
        for there, here in {**addresses, **key_of}.items():
            text = text.replace(there, here)
        (folder / "wg0.conf").write_text(text)
        (folder / "wg0.conf").chmod(0o600)
    end, sniffed = tmp_path / "end", tmp_path / "sniffed"
    up, ping = start.replace("wg0", "./wg0.conf").splitlines()
    train = f"{sys.executable} {SCRIPT} --deepspeed_config ../ds_config.json"
    with network:
        watch = [sys.executable, "-c", SNIFFER, HOST_DEVICE, str(sniffed), str(end)]
        with subprocess.Popen(network.command_on(0, watch)) as sniffer:
            try:
                commands, environments = [], []
                for rank, folder in enumerate(folders):
                    wait = f"until test -e {sniffed}.ready; do sleep 0.1; done"
                    steps = [
                        f"cd {folder}",
                        "mount -t tmpfs tmpfs /run",
                        wait,
                        up,
                        *([ping] if rank == 0 and shutil.which("ping") else []),
                        train,
                    ]
                    commands.append(network.command_on(rank, ["bash", "-c", " && ".join(steps)]))
                    environment = rank_environment(rank, 2, "10.88.0.1", "wg0", port=29500)
                    environments.append({**environment, **variables})
                results = run_together(commands, tmp_path, *environments, limit_s=300)
            finally:
                end.touch()
                sniffer.wait(30)
    assert [status for status, _ in results] == [0, 0], "\n".join(said for _, said in results)[-6000:]
    assert "losses " in results[0][1]
    counts = json.loads(sniffed.read_text())
    counts.pop("1", None)  # ICMP: the other host's tunnel was not up yet
    assert set(counts) == {"17:51820"}, counts  # UDP to WireGuard's port, and nothing else
    assert counts["17:51820"] > 100
