# SPDX-License-Identifier: Apache-2.0
"""Training on a GPU: two ranks share it and talk over gloo, each case beside unmodified DeepSpeed and beside CPUs.

test_gpu_page.py runs the same program on CPUs, which shows that the program is right.
"""

import sys
from pathlib import Path

import pytest
from scripts import output_of

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--own-stream"]], ids=["default stream", "a stream of its own"])
def test_training_on_a_gpu_is_that_of_deepspeed(options: list[str]) -> None:
    said = output_of([sys.executable, "-m", "benchmarks.gpu.two_ranks", *options], REPOSITORY, 500)
    assert "FAILED" not in said
