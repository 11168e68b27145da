# SPDX-License-Identifier: Apache-2.0
"""How well the simulator gives the step times that e2e measured: as benchmarks/predict.py, event by event.

python -m benchmarks simulate benchmarks/results/e2e-sleep-2x2.jsonl benchmarks/results/e2e-sleep-4x1.jsonl
"""

import argparse

from benchmarks import predict
from benchmarks.common import Records
from benchmarks.predict import add_arguments, report, simulated_s

__all__ = ["add_arguments", "report", "run"]


def run(args: argparse.Namespace, records: Records) -> None:
    predict.run(args, records, simulated_s)
