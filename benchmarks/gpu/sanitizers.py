# SPDX-License-Identifier: Apache-2.0
"""Phase "sanitizers": small cases of the kernels under compute-sanitizer, for bad addresses and for races.

    python -m benchmarks.gpu.sanitizers [--pretend]

Says "skipped" where the CUDA toolkit's compute-sanitizer is not to be found.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.toolkit import program

# All at once, two processes for each tool.  Low rank is torch's products.  Graphs of `streams` need the cache of
# memory, which would hide bad addresses.
OF_ROWS, OF_CODECS = ("plan", "rows", "few_sms"), ("records", "blockwise", "patch", "others")
JOBS = [(tool, groups) for tool in ("memcheck", "racecheck") for groups in (OF_ROWS, OF_CODECS)]
OPTIONS = ("--error-exitcode", "9", "--kernel-regex", "kns=hybridep")  # our kernels only
FOUND = re.compile(r"SUMMARY: [1-9]")
LIMIT_S = 220  # of each; the phase has a little more
TAIL_LINES = 12


class Outcome(NamedTuple):
    name: str
    result: str
    seconds: float
    output: str


def check(tool: Path, kind: str, groups: Sequence[str], options: Sequence[str]) -> Outcome:
    """Run some groups of cases under one of the tools."""
    begin_s, name = time.monotonic(), f"{kind} of {', '.join(groups)}"
    cases = [sys.executable, "-m", "benchmarks.gpu.definitions", "--small", "--in-one", *options, *groups]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    try:
        run = subprocess.run(
            [tool, "--tool", kind, *OPTIONS, *cases], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome(name, "FAILED: not done in time", time.monotonic() - begin_s, "")
    is_clean = run.returncode == 0 and not FOUND.search(run.stdout)
    result = "clean" if is_clean else f"FAILED: exit status {run.returncode}"
    return Outcome(name, result, time.monotonic() - begin_s, run.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sanitizers", description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="with what is called compute-sanitizer here, if any")
    args = parser.parse_args(arguments)
    tool = program("compute-sanitizer")
    if tool is None:
        print("skipped: compute-sanitizer is neither on PATH nor in the CUDA toolkit")
        return 0
    options = ["--pretend"] if args.pretend else []
    with ThreadPoolExecutor(len(JOBS)) as pool:
        outcomes = list(pool.map(lambda job: check(tool, job[0], job[1], options), JOBS))
    failed = [one for one in outcomes if one.result != "clean"]
    print("\n".join(f"- {one.name}: {one.result}, {one.seconds:.0f} s" for one in outcomes))
    for one in failed:
        print(f"\n{one.name}:", "````", *one.output.splitlines()[-TAIL_LINES:], "````", sep="\n")
    print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} runs are clean")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
