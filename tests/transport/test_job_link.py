# SPDX-License-Identifier: Apache-2.0
"""The link between the ranks of a job: its settings, and how engines share it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from link_pair import make_certificates
from process_pool import ProcessPool
from scripts import free_port
from torch import distributed as dist

from ds_hybridep.config import parse_config
from ds_hybridep.errors import ConfigError, HybridEPError
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.transport.agreement import agree
from ds_hybridep.transport.channels import Purpose, Transport
from ds_hybridep.transport.job_link import LinkSettings

pytestmark = pytest.mark.dist

LIMIT_S = 20.0
TWO_DCS = Cluster((Level("dc", 2),))


def exchange(settings: list[LinkSettings]) -> dict[str, Any]:
    """Both ranks send each other a tensor, each with its own settings; what came, or the error."""
    rank = dist.get_rank()
    transport = Transport(TWO_DCS, LIMIT_S, agree({}, LIMIT_S), link=settings[rank])
    try:
        channel, received = transport.channel("rows", (0, 1)), torch.empty(3)
        channel.start(
            [(1 - rank, torch.full((3,), float(rank)))], [(1 - rank, received)], Purpose("tokens", "x")
        ).wait()
        dist.barrier()
        return {"received": received.tolist(), "port": transport.link.address[1]}
    except HybridEPError as error:
        return {"error": str(error)}
    finally:
        transport.close()


def free_range() -> tuple[int, int]:
    """Return a range of which some ports are free: others may be taken by whoever runs on this machine."""
    low = min(free_port(), 65_000)
    return low, low + 30


def test_ports_a_secret_and_certificates_of_the_users_own(pool2: ProcessPool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123\n")
    low, high = free_range()
    tls = {name: str(path) for name, path in vars(make_certificates(tmp_path)).items()}
    settings = link_of(ports=[low, high], secret_file=str(secret), tls=tls)
    for rank, found in enumerate(pool2.run(exchange, settings=[settings] * 2)):
        assert found["received"] == [1.0 - rank] * 3
        assert low <= found["port"] <= high


def test_a_rank_with_another_secret_is_told_so() -> None:
    settings = [LinkSettings(LIMIT_S, secret=f"{rank}123456789abcdef".encode()) for rank in range(2)]
    with ProcessPool(2) as pool:
        found = pool.run(exchange, settings=settings)
    assert "the two have different secrets" in found[1]["error"]  # the one that dials
    assert "connecting with rank 1" in found[0]["error"]


def share(num_engines: int) -> tuple[bool, bool]:
    """Whether transports of one time share the link, and whether the last one's end closes it."""
    made = [Transport(TWO_DCS, LIMIT_S, agree({}, LIMIT_S)) for _ in range(num_engines)]
    links = {id(one.link) for one in made}
    link = made[0].link
    for one in made:
        assert not link.is_closed
        one.close()
    link._thread.join(LIMIT_S) if link._thread.is_alive() else None
    return len(links) == 1, link.is_closed


def test_engines_share_one_link(pool2: ProcessPool) -> None:
    assert pool2.run(share, num_engines=3) == [(True, True)] * 2


def change_settings() -> tuple[bool, list[int]]:
    """Whether another time limit gives the same link, and how many connections another cluster's level has."""
    made = [Transport(TWO_DCS, LIMIT_S, agree({}, LIMIT_S), link=LinkSettings(one)) for one in (LIMIT_S, LIMIT_S + 1)]
    several = Cluster((Level("dc", 2, LinkSpeed(connections=3)),))
    made.append(Transport(several, LIMIT_S, agree({}, LIMIT_S), link=LinkSettings(LIMIT_S + 1)))
    for one in made:
        one.channel("rows", (0, 1))
    dist.barrier()
    lanes = [len(one.link.peers[1 - dist.get_rank()].lanes) for one in made]
    dist.barrier()
    for one in made:
        one.close()
    return made[0].link is made[1].link, lanes


def test_engines_with_other_settings_have_a_link_of_their_own(pool2: ProcessPool) -> None:
    assert pool2.run(change_settings) == [(False, [3, 3, 7])] * 2  # one carries no messages


def link_of(**settings: Any) -> LinkSettings:
    block = {"levels": [{"name": "dc", "size": 2}], "link": settings}
    return LinkSettings.of(parse_config(block, world_size=2))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("abc")
    with pytest.raises(ConfigError, match=r"hybridep\.link\.secret_file: .*short holds 3 bytes; give at least 16"):
        link_of(secret_file=str(short))
    with pytest.raises(ConfigError, match=r"hybridep\.link\.secret_file: .*No such file"):
        link_of(secret_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"hybridep\.link\.tls: .*No such file"):
        link_of(tls=dict.fromkeys(("certificate", "key", "authority"), str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ports": [29700, 29600]}, "hybridep.link.ports is [29700, 29600], but the first port"),
        ({"ports": 29600}, "hybridep.link.ports is 29600, but must be a list"),
        ({"secret_file": ""}, 'hybridep.link.secret_file is "", but must be something with at least 1 character'),
        ({"tls": {"key": "a", "authority": "b"}}, "hybridep.link.tls.certificate is missing"),
        ({"port": 1}, 'hybridep.link.port is not a known key; did you mean "ports"?'),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        link_of(**settings)
    assert said in str(caught.value)
