# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels where memory runs out: an error in Python, and not the end of the process."""

import subprocess
import sys

import pytest

# Little more than what is mapped already may be mapped during the call.
PROGRAM = """
import resource
import torch
from ds_hybridep.kernels import load_codec_kernels

kernels = load_codec_kernels("compiled")
{prepare}
used_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used_bytes + {allowed_bytes}, resource.RLIM_INFINITY))
try:
    {call}
except MemoryError as error:
    print("MemoryError", error)
"""
MIB = 2**20


@pytest.mark.parametrize(
    ("prepare", "call", "allowed_bytes"),
    [
        (
            "new, sent, payload = torch.randint(2**15, (3 * 2**20,)).short(), torch.zeros(3 * 2**20).short(), "
            "torch.zeros(7 * 2**20).byte()",
            "kernels.patch_encode(new, sent, payload, mantissa_bits=7)",
            MIB,
        ),
    ],
    ids=["patch"],
)
def test_a_kernel_without_memory_raises_an_error(prepare, call, allowed_bytes):
    program = PROGRAM.format(prepare=prepare, call=call, allowed_bytes=allowed_bytes)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("MemoryError")
