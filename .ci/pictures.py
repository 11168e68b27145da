# SPDX-License-Identifier: Apache-2.0
"""Makes docs/images/demo.png and report.png from the record of the demo; needs Chromium.  See `make pictures`.

python .ci/pictures.py
"""

import argparse
import html
import json
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
IMAGES = REPOSITORY / "docs" / "images"
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "support")]

SCREEN = """<!doctype html><meta charset="utf-8"><body style="margin: 0; background: #1e1e1e; color: #e6e6e6">
<pre style="margin: 0; padding: 16px; font: 15px/1.4 'DejaVu Sans Mono', monospace; width: max-content">{text}</pre>"""
WIDE, HIGH = 1100, 1120  # px of the page of a run: as far as the loads


def main() -> int:
    from browser import browser, measured, photographed

    from benchmarks import demo
    from ds_hybridep.commands.run_page import write_run_page

    if browser() is None:
        raise SystemExit("there is no Chromium to make pictures with")
    lines = (REPOSITORY / "benchmarks" / "results" / "demo.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        screen, page = Path(folder, "demo.html"), Path(folder, "run.html")
        said = demo.report(records, argparse.Namespace())
        screen.write_text(SCREEN.format(text=html.escape(f"$ make demo\n...\n{said}")))
        needed = measured(screen, 100, "light")["needed"]
        height = measured(screen, needed, "light")["height"]
        photographed(screen, needed, height, "light", IMAGES / "demo.png")
        write_run_page(page, next(one["record"] for one in records if "record" in one))
        photographed(page, WIDE, HIGH, "light", IMAGES / "report.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
