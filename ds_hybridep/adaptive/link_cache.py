# SPDX-License-Identifier: Apache-2.0
"""The file in which measured links are kept, by a fingerprint of the cluster."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def read(path: str | None, fingerprint: str, length: int) -> list[float] | None:
    """Rate and latency of each level as they were measured; None where the file has nothing for this cluster."""
    if path is None or not os.path.isfile(path):
        return None
    try:
        content: Mapping[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    values = content.get(fingerprint) if isinstance(content, dict) else None
    is_table = isinstance(values, list) and all(isinstance(value, int | float) for value in values)
    return values if is_table and len(values) == length else None


def write(path: str, fingerprint: str, values: Sequence[float]) -> None:
    """Keep what was measured; where the file cannot be written, a later job measures again."""
    try:
        _update(Path(path), fingerprint, values)
    except OSError as error:
        log.warning("hybridep: measured links are not kept in hybridep.advanced.probe_cache: %s", error)


def _update(target: Path, fingerprint: str, values: Sequence[float]) -> None:
    content = None
    if target.is_file():
        try:
            content = json.loads(target.read_text(encoding="utf-8"))
        except ValueError:
            log.warning("hybridep: %s is no JSON and is written anew", target)
    content = content if isinstance(content, dict) else {}
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(target.suffix + ".partial")
    partial.write_text(json.dumps({**content, fingerprint: list(values)}, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, target)
