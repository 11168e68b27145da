# SPDX-License-Identifier: Apache-2.0
"""Runs user_script.py on two ranks, and reads what they write; the ds_config of jobs that start again."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("user_script.py")
LIMIT_S = 240
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_two_ranks(folder: Path, configs: Sequence[Mapping[str, Any]], *arguments: str) -> list[tuple[int, str]]:
    """Exit status and output of each rank; `configs` by rank."""
    port = free_port()
    processes = []
    for rank, config in enumerate(configs):
        path = folder / f"ds_config_{rank}.json"
        path.write_text(json.dumps(config))
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(SCRIPT), "--deepspeed_config", str(path), *arguments]
        with (folder / f"said_{rank}").open("w") as said:
            processes.append(subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, **environment}))
    try:
        statuses = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(status, (folder / f"said_{rank}").read_text()) for rank, status in enumerate(statuses)]
