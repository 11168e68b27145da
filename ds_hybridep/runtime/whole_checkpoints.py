# SPDX-License-Identifier: Apache-2.0
"""Tells which checkpoints are whole.

DeepSpeed's rank 0 writes the file `latest` after its own part, maybe before other ranks have written theirs, and not
atomically.  So a folder holds the file MARK from before the first rank writes until all ranks have written.  If saving
is interrupted, MARK stays, and a load of the newest checkpoint skips the folder.  Where there is no file `latest`,
nothing is loaded, as with DeepSpeed alone.
"""

from pathlib import Path

MARK = "hybridep_incomplete"
LATEST = "latest"


def why_not(folder: Path) -> str:
    """Return why a checkpoint that the user has named must not be loaded; empty if it may be."""
    if not (folder / MARK).exists():
        return ""
    return (
        f"checkpoint {folder} is incomplete: its saving was interrupted; load without a tag to get the newest "
        f"whole one, or name another tag"
    )


def named(file: Path) -> str | None:
    """Return the tag in a file such as `latest`; None if there is none."""
    return (file.read_text(encoding="utf-8").strip() if file.is_file() else "") or None


def newest(folder: Path) -> tuple[str | None, list[str]]:
    """Return the tag of the newest whole checkpoint in `folder` or None, and the incomplete ones that are skipped."""
    if not (folder / LATEST).is_file():
        return None, []
    latest = named(folder / LATEST)
    tags = [one.name for one in folder.iterdir() if any(one.glob("*.pt"))]
    skipped = sorted(tag for tag in tags if (folder / tag / MARK).exists())
    if latest and latest not in skipped and (folder / latest).is_dir():
        return latest, skipped
    whole = [tag for tag in tags if tag not in skipped]
    written_at = {tag: max(path.stat().st_mtime for path in (folder / tag).glob("*.pt")) for tag in whole}
    return max(whole, key=written_at.__getitem__, default=None), skipped
