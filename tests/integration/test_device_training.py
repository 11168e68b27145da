# SPDX-License-Identifier: Apache-2.0
"""Training on a GPU: two ranks share it and talk over gloo, each case beside unmodified DeepSpeed.

The same script runs on a CPU, which shows that the script is right.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import free_port

SCRIPT = Path(__file__).with_name("device_script.py")
WORLD_SIZE = 2
NUM_CASES = 5  # of the script
LIMIT_S = 600


def run_script(device: str, *words: str) -> list[list[dict]]:
    """What each rank has printed, one record for each case."""
    environment = {
        **os.environ,
        "DS_ACCELERATOR": device,
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_RANK": "0",  # the GPU's number: all ranks share it
        "LOCAL_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), device, *words],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-6000:]
    return [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output, _ in outputs]


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    ("device", "words"),
    [
        pytest.param("cpu", (), marks=pytest.mark.slow),
        pytest.param("cuda", (), marks=pytest.mark.gpu),
        pytest.param("cuda", ("side",), marks=pytest.mark.gpu),
    ],
    ids=["cpu", "cuda", "cuda, in a stream of its own"],
)
def test_training_on_a_device_is_that_of_deepspeed(device: str, words: tuple[str, ...]) -> None:
    for records in run_script(device, *words):
        assert len(records) == NUM_CASES
        assert [record for record in records if record["problems"]] == []
