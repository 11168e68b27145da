# SPDX-License-Identifier: Apache-2.0
"""Runs user_script.py on two ranks, and reads what they write; the ds_config of jobs that start again."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ds_hybridep.lab.ports import hold_port

SCRIPT = Path(__file__).with_name("user_script.py")
LIMIT_S = 500
RESTART_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 1_000_000,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "hybridep": {
        "levels": [{"name": "dc", "size": 2, "domain_size": 2, "bandwidth_gbps": 1, "codecs": "recommended"}],
        "timeout_s": 20,
        "advanced": {"kernels": "reference"},
    },
}


def output_of(command: Sequence[str | Path], folder: Path, limit_s: float, **environment: str) -> str:
    """What a program prints that ends well; `environment` is added to ours."""
    ours = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=folder, env={**ours, **environment}, capture_output=True, text=True, timeout=limit_s
    )
    assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
    return run.stdout


def blocks_of(page: str, section: str) -> list[str]:
    """The commands and programs that a section of a page of docs/ shows."""
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text(encoding="utf-8")
    blocks = text.split(f"## {section}\n")[1].split("\n## ")[0].split("```")[1::2]
    return [block.split("\n", 1)[1].strip() for block in blocks]


def free_port() -> int:
    """Return a free port; the system gives it to nobody else before this process ends."""
    holder = hold_port()
    port = int(holder.getsockname()[1])
    holder.detach()  # it stays open
    return port


def run_together(
    commands: Sequence[Sequence[str | Path]], folder: Path, *environments: Mapping[str, str], limit_s: float = LIMIT_S
) -> list[tuple[int | None, str]]:
    """Exit status (None: it ran too long) and output of programs that run at the same time, with these environments.

    Whatever is left of them is ended: gently first, since launchers have ranks in other process groups.
    """
    said = [folder / f"said_{place}" for place in range(len(commands))]
    processes = []
    for command, environment, path in zip(commands, environments, said, strict=True):
        with path.open("w") as log:
            ours = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environment}
            processes.append(
                subprocess.Popen(
                    command, cwd=folder, env=ours, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )
            )  # fmt: skip
    statuses = []
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
            statuses.append(process.poll())
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
    return [(status, path.read_text()) for status, path in zip(statuses, said, strict=True)]


def run_two_ranks(folder: Path, configs: Sequence[Mapping[str, Any]], *arguments: str) -> list[tuple[int | None, str]]:
    """As `run_together`, of user_script.py with these configs, by rank."""
    commands, environments, port = [], [], str(free_port())
    for rank, config in enumerate(configs):
        path = folder / f"ds_config_{rank}.json"
        path.write_text(json.dumps(config))
        commands.append([sys.executable, str(SCRIPT), "--deepspeed_config", str(path), *arguments])
        environments.append({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"})
        environments[-1] |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    return run_together(commands, folder, *environments)
