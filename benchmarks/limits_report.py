# SPDX-License-Identifier: Apache-2.0
"""Step times on a slow link over those without a limit, from phases of one job of benchmarks/e2e.py that take turns.

    sudo python benchmarks/e2e.py --rates none 100mbit none 50mbit none 20mbit none ... --out limits.jsonl
    python benchmarks/limits_report.py limits.jsonl

A phase is compared with the mean of its two neighbours, because the machine gets faster and slower within minutes.
"""

import argparse
import json
import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from e2e_report import rate_order

SHOWN = "dcs", "tokens_per_rank", "accumulation", "plan"


def ratios(records: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return the ratios by case, JSON of all parameters but the rate, and by rate."""
    phases: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for record in records:
        params = record["params"]
        case = json.dumps([record["delay"], {name: value for name, value in params.items() if name != "rate"}])
        phases[case].append((params["rate"], statistics.median(record["step_s"])))
    found: dict[str, dict[str, list[float]]] = {}
    for case, of_case in phases.items():
        found[case] = defaultdict(list)
        for (before, (rate, step_s)), (_, after) in pairwise(pairwise(of_case)):
            if before[0] == after[0] == "none" != rate:
                found[case][rate].append(2 * step_s / (before[1] + after[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    found = ratios([json.loads(line) for line in parser.parse_args().records.read_text().splitlines()])
    rates = sorted({rate for of_case in found.values() for rate in of_case}, key=rate_order)
    print("Step time over that of the neighbouring phases without a limit; one number for each phase.\n")
    print("| DCs x ranks | tokens | accumulation | plan | " + " | ".join(rates) + " |")
    print("|---" * (4 + len(rates)) + "|")
    for case, of_case in found.items():
        cells = (", ".join(f"{ratio:.2f}" for ratio in of_case[rate]) for rate in rates)
        params = json.loads(case)[1]
        print("| " + " | ".join((*(str(params[name]) for name in SHOWN), *cells)) + " |")
    for rate in rates:
        every = [ratio for of_case in found.values() for ratio in of_case[rate]]
        print(f"\n{rate}: mean {statistics.mean(every):.2f}, {min(every):.2f} to {max(every):.2f}.")


if __name__ == "__main__":
    main()
