# SPDX-License-Identifier: Apache-2.0
"""Phase "build": compiles the kernels for the CPU and for CUDA, at once, unless they are there.

python -m benchmarks.gpu.build [--pretend]
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from ds_hybridep.errors import KernelBuildError
from ds_hybridep.kernels import load_kernels


def build(device_type: str) -> int:
    """Build in this process; a line says how that went."""
    begin_s = time.monotonic()
    try:
        name = type(load_kernels("compiled", device_type)).__name__
    except KernelBuildError as error:
        print(f"{device_type}: FAILED: {error}")
        return 1
    print(f"{device_type}: {name}, {time.monotonic() - begin_s:.0f} s")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.build", description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="those for the CPU alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.device:
        return build(args.device)
    command = [sys.executable, "-m", "benchmarks.gpu.build", "--device"]
    running = [
        subprocess.Popen([*command, device], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for device in (["cpu"] if args.pretend else ["cpu", "cuda"])
    ]
    said = [process.communicate()[0].strip() for process in running]
    if any(process.returncode for process in running):
        print("````", *said, "````", "", "no kernels: see above", sep="\n")
        return 1
    print("; ".join(text.splitlines()[-1] for text in said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
