# SPDX-License-Identifier: Apache-2.0
"""Two emulated hosts with sshd: DeepSpeed's launcher starts ranks on both, as docs/getting-started.md says."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from scripts import RESTART_CONFIG, run_together

from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "getting-started.md"
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
SLOTS = 2
NOT_HERE = (
    "git clone",
    "pip install",
    "ds_hybridep lab",
    "make ",
)  # this machine has it; the lab has tests of its own
TRAIN = f"""
import runpy, sys
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled on the first use, for a minute
sys.argv += "--layers 1 --hidden 32 --experts 4 --seq-len 16 --log-interval 1 --eval-interval 0 --steps 6".split()
runpy.run_path("{ROOT}/tests/support/restart_script.py", run_name="__main__")
"""
CONFIG = {key: value for key, value in RESTART_CONFIG.items() if key != "hybridep"}


def why_not() -> str | None:
    missing = [name for name, path in (("sshd", SSHD), ("pdsh", shutil.which("pdsh"))) if path is None]
    if missing:
        return f"{' and '.join(missing)} not found: apt-get install openssh-server pdsh"
    if os.geteuid() != 0:
        return "sshd needs root"
    return None


pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif((REASON := why_not()) is not None, reason=str(REASON)),
    pytest.mark.usefixtures("permitted_without_delay"),
]


@dataclass
class Hosts:
    """node1 and node2, which reach each other by ssh without a password; a home folder that both share."""

    network: EmulatedNetwork
    home: Path
    environment: dict[str, str]

    def run(self, command: str, node: int = 1, limit_s: float = 300.0, **environment: str) -> tuple[int | None, str]:
        """Exit status (None: it ran too long) and output of a command line on one of them."""
        words = self.network.command_on(node - 1, ["bash", "-c", command])
        (result,) = run_together([words], self.home, {**self.environment, **environment}, limit_s=limit_s)
        return result


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    tools = tmp_path / "bin"
    tools.mkdir()
    run = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
    for name in ("host_key", "id"):
        subprocess.run([*run, str(tmp_path / name)], check=True)
    own = {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path),
    }  # fmt: skip
    Path("/run/sshd").mkdir(exist_ok=True)
    ssh_config = "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=200e6)) as network:
        for rank in range(2):
            (tmp_path / f"sshd{rank}").write_text(
                f"HostKey {tmp_path}/host_key\nAuthorizedKeysFile {tmp_path}/id.pub\nPidFile none\nUsePAM no\n"
                f"StrictModes no\nPermitRootLogin yes\nMaxStartups 100\n"
                f"SetEnv {' '.join(f'{name}={value}' for name, value in own.items())}\n"
            )
            # It goes to the background by itself; the network ends it.
            subprocess.run(network.command_on(rank, [str(SSHD), "-f", str(tmp_path / f"sshd{rank}")]), check=True)
            ssh_config += f"Host node{rank + 1}\n  HostName {network.topology.address_of(rank)}\n"
            ssh_config += f"  IdentityFile {tmp_path}/id\n"
        (tmp_path / "ssh_config").write_text(ssh_config)
        (tools / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh_config "$@"\n')
        (tools / "ssh").chmod(0o755)
        (tmp_path / "train.py").write_text(TRAIN)
        yield Hosts(network, tmp_path, {**os.environ, **own})


def commands_of(page: Path) -> list[str]:
    """All command lines of a page, in order."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(text for kind, text in blocks if kind in ("", "sh", "bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if re.match(r"(deepspeed|ds_hybridep|ssh|ip|echo|torchrun|pip|git|make) ", line)]


def sized(text: str) -> str:
    """A page's job of 2 x 8 ranks as one of 2 x 2."""
    return re.sub(r'(slots=|gpu=|"size": )8\b', rf"\g<1>{SLOTS}", text)


def of_the_page(cluster: Path) -> None:
    """The links that were measured, of a job of 2 x 8 ranks, whose memory a plan for a real model needs."""
    found = yaml.safe_load(cluster.read_text())
    found["levels"][1]["size"] = 8
    cluster.write_text(yaml.safe_dump(found))


def test_the_commands_of_the_page_work_from_the_first_to_the_last(hosts: Hosts) -> None:
    page = PAGE.read_text()
    hostfile = re.search(r"^```\n(node1 slots=.*?)^```", page, re.MULTILINE | re.DOTALL)
    block = re.search(r'^```json\n("hybridep": .*?)^```', page, re.MULTILINE | re.DOTALL)
    assert hostfile
    assert block
    (hosts.home / "hosts").write_text(sized(hostfile[1]))
    config = {**CONFIG, **json.loads(f"{{{sized(block[1])}}}")}
    config["hybridep"] |= {"advanced": {"kernels": "reference"}, "report_interval": 2}
    (hosts.home / "ds_config.json").write_text(json.dumps(config))
    ran = []
    # Without a network interface named gloo takes the address of the host's name, which is a loopback address here.
    for command in sorted(commands_of(PAGE), key=lambda command: not command.startswith("echo")):
        if not command.startswith(NOT_HERE):
            if command.startswith("ds_hybridep plan"):
                of_the_page(hosts.home / "cluster.yaml")
            status, said = hosts.run(sized(command))
            assert status == 0, f"{command}\n{said[-3000:]}"
            ran.append(command.split("#")[0].strip())
    words = " ".join(ran)
    for wanted in ("ssh node2", "ds_hybridep probe", "ds_hybridep plan", "train.py", "ds_hybridep show"):
        assert wanted in words, f"{wanted} is not among the commands of {PAGE.name}: {ran}"
    assert json.loads((hosts.home / "run.json").read_text())["steps"] == 6


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_rank_of_the_second_host_is_killed_and_the_job_goes_on(hosts: Hosts, launcher: str) -> None:
    (hosts.home / "hosts").write_text(f"node1 slots={SLOTS}\nnode2 slots={SLOTS}\n")
    levels = [{"name": "dc", "size": 2, "domain_size": 2, "codecs": "recommended"}, {"name": "gpu", "size": SLOTS}]
    block = {"levels": levels, "timeout_s": 30, "advanced": {"kernels": "reference"}}
    (hosts.home / "ds_config.json").write_text(json.dumps({**CONFIG, "hybridep": block}))
    (hosts.home / ".deepspeed_env").write_text(
        f"GLOO_SOCKET_IFNAME=eth0\nFAULT_FILE={hosts.home}/fault\nFAULT_RANK=3\nFAULT_STEP=4\n"
    )
    settings = {
        "SAVE_INTERVAL": "2", "PAUSE_S": "1", "SCRIPT": str(hosts.home / "train.py"),
        "GLOO_SOCKET_IFNAME": "eth0", "FAULT_FILE": f"{hosts.home}/fault", "FAULT_RANK": "3", "FAULT_STEP": "4",
        "NNODES": "2", "RDZV": f"{hosts.network.topology.address_of(0)}:29400",
    }  # fmt: skip
    script = ROOT / "examples" / "restart" / f"with_{launcher}.sh"
    if launcher == "deepspeed":
        command = f"{script} checkpoints --hostfile hosts -- --deepspeed_config ds_config.json --json-file result.json"
    else:
        ours = f"{script} checkpoints {SLOTS} --deepspeed_config ds_config.json --json-file result.json"
        exports = " ".join(f"{name}={value}" for name, value in settings.items())
        first, second = (f"IS_HOST={1 - node} LOCAL_ADDR={hosts.network.topology.address_of(node)}" for node in (0, 1))
        command = f'ssh node2 "cd {hosts.home} && env {exports} {second} {ours}" > node2.log 2>&1 & '
        command += f"env {first} {ours}; status=$?; wait $!; cat node2.log; exit $status"
    status, said = hosts.run(command, **settings)
    assert status == 0, said[-6000:]
    assert (hosts.home / "fault").exists()
    assert "rank 3 ended without a word" in said
    assert "global_step4 is incomplete (its saving was interrupted): skipped" in said
    assert "goes on from step 2" in said
    assert [step for step, _ in json.loads((hosts.home / "result.json").read_text())["losses"]] == [3, 4, 5, 6]
