# SPDX-License-Identifier: Apache-2.0
"""Makes a site of pages that link to each other as they do in the repository.

A hook of mkdocs.  The README is the first page.  What pages link to outside of docs/, such as a record or an example,
is put below `repository/`; a link to a folder keeps its text only.  The reference of the Python interface is below
`python/`, made by reference.py.
"""

import posixpath
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
OUTSIDE = "repository"
REFERENCE = "python/index.html"


def place_of(path: str) -> str:
    """Return where a file of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def path_of(place: str) -> str:
    """Return which file of the repository is at a place in the site."""
    if place == "index.md":
        return "README.md"
    return place.removeprefix(f"{OUTSIDE}/") if place.startswith(f"{OUTSIDE}/") else f"docs/{place}"


def with_links(text: str, path: str, note: Callable[[str], Any]) -> str:
    """Return the text of a file with the site's links; `note` is called with each file that it links to."""

    def replace(found: re.Match[str]) -> str:
        image, label, link, part = found.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if (ROOT / target).is_dir():
            return label
        note(target)
        there = posixpath.relpath(place_of(target), posixpath.dirname(place_of(path)) or ".")
        return f"{image}[{label}]({there}{part or ''})"

    return LINK.sub(replace, text)


def on_files(files: Files, *, config: Any) -> Files:
    known = {path_of(file.src_uri) for file in files}
    files.append(File.generated(config, REFERENCE, content=""))  # so that the navigation can name it
    open_paths, read = ["README.md", *known], set[str]()
    while open_paths:
        path = open_paths.pop()
        if path in read:
            continue
        read.add(path)
        if path not in known:
            files.append(File.generated(config, place_of(path), content=(ROOT / path).read_bytes()))
        if path.endswith(".md"):
            with_links((ROOT / path).read_text(), path, open_paths.append)
    return files


def on_post_build(*, config: Any) -> None:
    folder = (Path(config["site_dir"]) / REFERENCE).parent
    subprocess.run([sys.executable, Path(__file__).with_name("reference.py"), folder], check=True)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    return with_links(markdown, path_of(page.file.src_uri), lambda one: None)
