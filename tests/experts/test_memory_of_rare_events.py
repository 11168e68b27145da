# SPDX-License-Identifier: Apache-2.0
"""Verification and a resume under another plan happen rarely, and must not need memory that training does not."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from ds_hybridep.runtime import codec_state

MIB = 2**20


def growth_of(program: str, *arguments: str) -> float:
    """MiB by which the peak memory of a process grows in `run()`, which `program` defines after its preparations."""
    measured = textwrap.dedent(program) + textwrap.dedent(
        """
        import resource
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", measured, *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stderr
    return float(result.stdout.split()[-1])


@pytest.mark.slow
def test_verification_makes_no_copies_of_the_weights() -> None:
    program = """
        import torch
        from ds_hybridep.sync.stages import gather_stages
        from ds_hybridep.experts.replicas import Replicas
        from ds_hybridep.experts.verification import checksums
        from ds_hybridep.kernels import load_kernels
        from ds_hybridep.sync.encoding import Encoding
        from ds_hybridep.sync.transaction import Transaction
        from ds_hybridep.geometry.cluster import Cluster, Level
        from ds_hybridep.geometry.partition import Partition

        experts = [torch.nn.Linear(8192, 4096, bias=False)]  # 128 MiB, and as much for each slot
        partition = Partition.build(Cluster((Level("dc", 2),)), (0, 1), (2,))
        stages = gather_stages(partition, 0)
        encoding = Encoding((None,), (None,))
        replicas = Replicas(
            "layer", experts, partition, stages, rank=0, encoding=encoding, transaction=Transaction()
        )
        kernels = load_kernels("reference")
        kernels.bit_sums(torch.zeros(4 * 2**20))

        def run():
            checksums(replicas, kernels)
    """
    assert growth_of(program) < 32


@pytest.mark.slow
def test_a_resume_under_another_plan_reads_only_what_concerns_the_own_experts(tmp_path: Path) -> None:
    big = torch.zeros(64 * MIB // 4)
    layer = {
        "mirrors": {"int8()": {"values": [big.clone(), big.clone()], "states": []}},
        "replicas": {1: {"values": [big.clone()], "expected": 3}},
        "gradients": {
            "sent": [
                {"piece": ["moe w", 7 * big.numel()], "shape": [1, 1, big.numel()], "residual": big.clone()},
                {"piece": ["moe w", 16], "shape": [2, 2, 4], "residual": torch.ones(2, 2, 4)},
            ],
        },
    }
    saved = {"experts": {"moe": layer}, "synchronised": {}, "undelivered": [], "places": {}}
    codec_state.write(tmp_path, 0, 1, saved)
    program = """
        import sys
        from pathlib import Path
        import torch
        from ds_hybridep.runtime.codec_state import PATTERN, read
        from ds_hybridep.sync.undelivered import kept_back_in

        def run():
            (path,) = Path(sys.argv[1]).glob(PATTERN)
            found = list(kept_back_in(read(path), 2, lambda name, start, stop: 0.5 * (start < 32)))
            assert [one.start for one in found] == [16]
            assert torch.equal(found[0].values, torch.full((16,), 0.25))
    """
    assert growth_of(program, str(tmp_path)) < 32
