# SPDX-License-Identifier: Apache-2.0
"""A page for a browser: one file without scripts that loads nothing, wide or narrow, light or dark."""

import html
from pathlib import Path

from ds_hybridep.errors import ConfigError

# Colours follow the browser's setting; `plan_page` uses --now, --ours, --sites and --elsewhere.
STYLE = """
:root { color-scheme: light dark;
  --ink: #1c2126; --faint: #5a646e; --ground: #ffffff; --panel: #f3f5f7; --line: #d4dae0; --good: #14713d;
  --bad: #b3261e; --now: #8a949e; --ours: #0b62c4; --sites: #0f766e; --elsewhere: #8a6d1f }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6e9ec; --faint: #a3adb7; --ground: #14181c; --panel: #1f252b; --line: #39424b; --good: #5fc98d;
  --bad: #f28b82; --now: #87919b; --ours: #5aa5f5; --sites: #3dbbae; --elsewhere: #cda53c } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; color: var(--ink); background: var(--ground);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem; line-height: 1.25; margin: .5rem 0 1rem }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { margin: .5rem 0 }
pre { margin: .5rem 0; padding: .75rem; background: var(--panel); border-radius: .4rem; font-size: .875rem;
  white-space: pre-wrap; overflow-wrap: anywhere }
"""


def write_page(path: Path, title: str, body: str, style: str = "") -> None:
    """Write a page that needs no other file.

    title: text.  body: HTML, whose texts are escaped.  style: CSS beside that of all pages.

    Raises ConfigError if the file cannot be written.
    """
    name = html.escape(title)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{STYLE}{style}</style></head>\n"
        f"<body>\n<h1>{name}</h1>\n{body}\n</body></html>\n"
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--html: {path} cannot be written ({error.strerror}); give a file in a folder that exists"
        ) from error
