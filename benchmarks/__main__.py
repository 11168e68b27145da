# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks NAME [options]`: one program for each question."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import JOB_FOLDER, Records, read_records
from ds_hybridep.errors import LabError
from ds_hybridep.lab.namespaces import become_root

PROGRAMS = {
    "demo": "the same training in three ways over an emulated slow link (`make demo`)",
    "e2e": "step time and bytes of every plan, by the rate of the link",
    "one-at-a-time": "where the gain comes from: sums, codecs, domains and hot experts, one after the other",
    "latency": "what a long link costs a step",
    "sites": "step time if each datacentre is a job of its own, beside one job over both",
    "site-kills": "whether sites go on, and come back with the same weights, while random ones are killed",
    "site-joins": "how long a site takes to join over a slow link, and what that costs the one that trains",
    "faults": "how soon all ranks end when one breaks, and whether they name the cause",
    "cuts": "losses on links that misbehave for a while, against an undisturbed run",
    "soak": "training for hours on links and machines that misbehave",
    "losses": "what the recommended codecs cost in loss, with real engines",
    "gap": "whether the gap in loss between encoded and exact training grows with the steps",
    "fine-tuning": "what codecs and local steps cost in fine-tuning, in what is learned and what is forgotten",
    "larger": "a model of 300 million parameters beside DeepSpeed and the plan: losses, weights, bytes",
    "equal-bytes": "loss against bytes, beside PowerSGD, DeMo and DiLoCo",
    "residual-sums": "whether small gradients arrive",
    "skipped-layers": "what codecs keep if layers take part at times only",
    "codecs": "loss, time and size of single codecs, and of patches",
    "codec-ratios": "what low rank by ratio costs in loss, by width",
    "gpu": "what to run first on a machine with GPUs (`make gpu`)",
    "kernels": "time of each CUDA kernel",
    "link": "goodput over a long link, messages on one machine, and what the runtime costs over loopback",
    "overlap": "whether weights and gradients travel while layers compute",
    "hot": "what uneven routing costs a step, with and without hot experts",
    "memory": "bytes that replicas of experts take",
    "predict": "how well the planner predicts what e2e measured",
    "simulate": "how well the simulator predicts what e2e measured",
    "scale": "the paper's tables and sweeps, and our plans on a thousand datacentres",
    "replan": "whether a planned job follows a link that drops and recovers",
    "export": "memory and time of `ds_hybridep export`",
    "is-it-for-you": "writes docs/is-it-for-you.md",
}
ON_EMULATED_HOSTS = (
    "demo",
    "e2e",
    "one-at-a-time",
    "larger",
    "latency",
    "sites",
    "site-joins",
    "faults",
    "cuts",
    "soak",
    "link",
    "overlap",
    "replan",
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in PROGRAMS:
        print("python -m benchmarks NAME [options]; NAME --help says more\n")
        print("\n".join(f"  {name:<16}{line}" for name, line in PROGRAMS.items()))
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 2
    name, *rest = arguments
    folder = os.environ.get(JOB_FOLDER)
    is_question = "--report" in rest or "--help" in rest or "-h" in rest
    if name in ON_EMULATED_HOSTS and folder is None and not is_question:
        with contextlib.suppress(LabError):  # said where a network is made
            become_root()
    program: Any = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
    args = parse(name, program, rest)
    if folder is not None:
        program.rank(args, program.Job(Path(folder)))
        return 0
    if not hasattr(program, "report"):
        return int(program.run(args))
    if args.report:
        print(program.report(read_records(args.report), args))
        return 0
    records = Records(name, args.out)
    status = program.run(args, records) or 0
    if records.rows:
        print(program.report(records.rows, args))
    return int(status)


def parse(name: str, program: Any, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=program.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if hasattr(program, "report"):
        parser.add_argument("--out", type=Path, help="JSON lines are appended here")
        parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="print the tables of these records")
    program.add_arguments(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
