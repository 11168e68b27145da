# SPDX-License-Identifier: Apache-2.0
"""Writes the full tables of all records, each beside its records, and the plots of the documents."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
IMAGES = HERE.parent / "docs" / "images"
TABLES = {  # by file of results/: the program that prints it, and its arguments
    "e2e-encoded-2x2": ("e2e_report.py", "e2e-encoded-2x2.jsonl", "--plots", str(IMAGES)),
    "e2e-2x2-latest": ("e2e_report.py", "e2e-2x2-latest.jsonl"),
    "e2e-4x1-latest": ("e2e_report.py", "e2e-4x1-latest.jsonl"),
    "e2e-encoded-bf16": ("e2e_report.py", "e2e-encoded-bf16.jsonl"),
    "e2e-2x2": ("e2e_report.py", "e2e-2x2.jsonl"),
    "e2e-4x1": ("e2e_report.py", "e2e-4x1.jsonl"),
    "e2e-codecs": ("e2e_report.py", "e2e-codecs.jsonl"),
    "e2e-tokens-2x2": ("e2e_report.py", "e2e-tokens-2x2.jsonl"),
    "e2e-sleep": ("e2e_report.py", "e2e-sleep-2x2.jsonl", "e2e-sleep-4x1.jsonl"),
    "e2e-hf-2x2": ("e2e_report.py", "e2e-hf-2x2.jsonl"),
    "e2e-auto": ("e2e_report.py", "e2e-auto.jsonl"),
    "e2e-auto-latest": ("e2e_report.py", "e2e-auto-latest.jsonl"),
    "e2e-limits": ("limits_report.py", "e2e-limits.jsonl"),
    "scale": ("scale.py", "--report", "scale.jsonl", "--plots", str(IMAGES)),
    "losses": ("losses.py", "--report", "losses.jsonl"),
    "residual-sums": ("residual_sums.py", "--report", "residual-sums.jsonl"),
    "skipped-layers": ("skipped_layers.py", "--report", "skipped-layers.jsonl"),
    "memory": ("memory.py", "--report", "memory.jsonl"),
    "codecs": ("codecs.py", "report", "codecs.jsonl"),
    "faults": ("faults.py", "--report", "faults.jsonl"),
    "transient-faults": ("transient_faults.py", "--report", "transient-faults.jsonl"),
    "goodput": ("goodput.py", "--report", "goodput.jsonl"),
    "latency": ("latency.py", "--report", "latency.jsonl"),
    "codec-ratios": ("codec_ratios.py", "report"),
}


def main() -> int:
    failed = []
    for name, (program, *arguments) in TABLES.items():
        arguments = [str(RESULTS / argument) if argument.endswith(".jsonl") else argument for argument in arguments]
        command = [sys.executable, str(HERE / program), *arguments]
        print(name, flush=True)
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            failed.append(f"{name}: {run.stderr.strip().splitlines()[-1:]}")
            continue
        said = f"Made by `python benchmarks/tables.py` from the records beside it (`{program}`).\n\n{run.stdout}"
        (RESULTS / f"{name}.md").write_text(said)
    print("\n".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
