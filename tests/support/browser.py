# SPDX-License-Identifier: Apache-2.0
"""A page as a real browser lays it out: Chromium without a window, where one is installed.

The page stands in a frame of the asked width, because windows have a least width.  A frame takes light or dark from
the element around it, as a page does from the system.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

PROGRAMS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
FRAME = """<!doctype html><meta charset="utf-8"><body style="margin: 0">
<iframe srcdoc="{page}" style="border: 0; width: {width}px; height: {height}px; color-scheme: {scheme}"></iframe>
<pre id="measured"></pre><script>
onload = () => {{
  const inside = document.querySelector("iframe").contentDocument, root = inside.documentElement;
  const all = [...inside.body.querySelectorAll("*")].filter(one => one.getClientRects().length);
  const style = inside.defaultView.getComputedStyle(inside.body);
  document.querySelector("#measured").textContent = JSON.stringify({{
    width: root.clientWidth, needed: root.scrollWidth, height: Math.ceil(inside.body.getBoundingClientRect().bottom),
    ink: style.color, ground: style.backgroundColor, font_px: parseFloat(style.fontSize),
    outside: all.filter(one => one.getBoundingClientRect().right > root.clientWidth + 0.5
      || (one.clientWidth && one.scrollWidth > one.clientWidth + 1)).map(one => one.outerHTML.slice(0, 200)),
    smallest_px: Math.min(...all.filter(one => one.innerText)
      .map(one => parseFloat(inside.defaultView.getComputedStyle(one).fontSize)))
  }});
  document.querySelector("#measured").hidden = {is_picture};
}}
</script>"""


def browser() -> str | None:
    """The program; none if there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def measured(page: Path, width: int, scheme: str) -> dict[str, Any]:
    """What the browser finds: sizes in px, colours, and elements that are wider than their place.

    scheme: "light" or "dark".
    """
    said = _run(page, width, 2000, scheme, ["--dump-dom"])
    found: dict[str, Any] = json.loads(
        html.unescape(re.findall(r'<pre id="measured"[^>]*>(.*?)</pre>', said, re.S)[0])
    )
    return found


def photographed(page: Path, width: int, height: int, scheme: str, out: Path) -> None:
    """Write a PNG of the page's upper `height` px."""
    _run(page, width, height, scheme, [f"--screenshot={out}"])


def _run(page: Path, width: int, height: int, scheme: str, options: list[str]) -> str:
    program = browser()
    assert program is not None
    frame = page.with_suffix(f".{width}-{scheme}.html")
    text = html.escape(page.read_text(encoding="utf-8"))
    is_picture = str(bool(options[0].startswith("--screenshot"))).lower()
    frame.write_text(
        FRAME.format(page=text, width=width, height=height, scheme=scheme, is_picture=is_picture), encoding="utf-8"
    )
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={frame.parent / 'browser'}", f"--window-size={width},{height}", *options]
    run = subprocess.run([*command, frame.as_uri()], capture_output=True, text=True, timeout=240, check=True)
    return run.stdout
