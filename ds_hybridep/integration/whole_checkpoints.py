# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are whole.

DeepSpeed's rank 0 writes the file `latest` when it has written its own part, maybe before other ranks have written
theirs, and not in one piece.  So a folder holds the file MARK from before the first rank writes until all have
written: a checkpoint whose saving was interrupted keeps it, and is skipped when the newest one is asked for.
"""

from pathlib import Path

MARK = "hybridep_incomplete"
LATEST = "latest"


def begin(folder: Path) -> None:
    """Call on one rank, before any rank writes into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def end(folder: Path) -> None:
    """Call on one rank, when all ranks have written."""
    (folder / MARK).unlink(missing_ok=True)


def why_not(folder: Path) -> str:
    """Why a checkpoint that was asked for by its name is not to be loaded; empty where it is."""
    if not (folder / MARK).exists():
        return ""
    return (
        f"checkpoint {folder} is incomplete: its saving was interrupted; load without a tag to get the newest "
        f"whole one, or name another tag"
    )


def named(file: Path) -> str | None:
    """The tag in a file such as `latest`; None for none."""
    return (file.read_text(encoding="utf-8").strip() if file.is_file() else "") or None


def newest(folder: Path) -> tuple[str | None, list[str]]:
    """The tag of the newest whole checkpoint in `folder`, None for none; and the incomplete ones that are skipped."""
    latest = named(folder / LATEST)
    tags = [one.name for one in folder.iterdir() if any(one.glob("*.pt"))] if folder.is_dir() else []
    skipped = sorted(tag for tag in tags if (folder / tag / MARK).exists())
    if latest and latest not in skipped and (folder / latest).is_dir():
        return latest, skipped
    whole = [tag for tag in tags if tag not in skipped]
    return max(whole, key=lambda tag: _written_at(folder / tag), default=None), skipped


def _written_at(folder: Path) -> float:
    return max(path.stat().st_mtime for path in folder.glob("*.pt"))
