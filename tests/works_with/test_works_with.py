# SPDX-License-Identifier: Apache-2.0
"""Each row of the table runs on four ranks in its three columns, and docs/works-with.md says what came out."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from process_pool import ProcessPool, RemoteError

import ds_hybridep.errors
from works_with import scripts
from works_with.everyday import COLUMNS, run_script
from works_with.table import SECTIONS, Cell, Row, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "works-with.md"
ROWS = [row for _, rows in SECTIONS for row in rows]
LIMIT_S = 200.0
FAR = 0.2  # the largest difference of another result that is right too
needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}: '.[dev,hf]'")
    for name in ("transformers", "trl")
}


def _params() -> list[Any]:
    return [slow(row, id=row.script) if row.is_slow else pytest.param(row, id=row.script) for row in ROWS]


@needs["transformers"]
@needs["trl"]
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", _params())
def test_everyday_script(pool4: ProcessPool, tmp_path: Path, row: Row) -> None:
    ends = tuple(column for column in COLUMNS if not row.cell(column).waits)
    results = pool4.run(run_script, script=row.script, folder=str(tmp_path), columns=ends, timeout_s=LIMIT_S)
    for column in ends:
        _check(row, column, [one[column] for one in results], [one["plain"] for one in results])
    if row.autoep == row.block and row.block.kind == "other":
        assert _difference(results[0]["block"], results[0]["autoep"]) <= row.close


@needs["transformers"]
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("row", "column"),
    [pytest.param(row, c, id=f"{row.script}-{c}") for row in ROWS for c in COLUMNS if row.cell(c).waits],
)
def test_ranks_that_wait_for_each_other(tmp_path: Path, row: Row, column: str) -> None:
    said = row.cell(column).text or "still at work|died with exit code"
    with ProcessPool(4) as pool, pytest.raises(RemoteError, match=said):
        pool.run(run_script, script=row.script, folder=str(tmp_path), columns=(column,), timeout_s=90.0)


def _check(row: Row, column: str, ranks: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    """Raise AssertionError if a column did not end on all ranks as its cell says."""
    cell = row.cell(column)
    errors = [one.get("error", "") for one in ranks]
    if cell.is_an_error:
        assert any(cell.text in error for error in errors), f"{column}: expected {cell.text!r}, got {errors}"
        is_ours = any("AgreementError" in error or "hybridep" in error for error in errors) or _is_ours(errors)
        assert is_ours == (cell.kind == "refused"), f"{column}: {errors}"
        return
    assert not any(errors), f"{column}: {errors}\n{next((one['traceback'] for one in ranks if 'error' in one), '')}"
    assert ranks[0]["weights"], f"{column}: nothing was saved"
    differences = [_difference(found, reference) for found, reference in zip(ranks, plain, strict=True)]
    if cell.kind == "same":
        assert max(differences) <= row.close, f"{column}: {differences} from plain"
        return
    assert max(differences) > row.close, f"{column}: not {cell.kind}: {differences} from plain"
    if cell.kind == "other":
        assert max(differences) <= FAR, f"{column}: {differences} from plain"


def _is_ours(errors: list[str]) -> bool:
    names = tuple(name for name, kind in vars(ds_hybridep.errors).items() if isinstance(kind, type))
    return any(error.startswith(names) for error in errors)


def _difference(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest relative difference of losses, other numbers and saved weights.

    Infinite where some are missing or not finite.
    """
    differences = [0.0]
    for name in (set(found) | set(reference)) - {"weights"}:
        left, right = (torch.tensor(one.get(name, []), dtype=torch.float64) for one in (found, reference))
        if left.shape != right.shape:
            return float("inf")
        differences += ((left - right).abs() / right.abs().clamp(min=1e-3)).flatten().tolist()
    weights, expected = found["weights"], reference["weights"]
    if {name: one.shape for name, one in weights.items()} != {name: one.shape for name, one in expected.items()}:
        return float("inf")
    for name, one in weights.items():
        norm = torch.linalg.vector_norm(expected[name].double()).item()
        differences.append(torch.linalg.vector_norm(one.double() - expected[name].double()).item() / max(norm, 1e-6))
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def test_numbers_that_are_missing_or_not_finite_are_no_small_difference() -> None:
    good = {"losses": [1.0, 2.0], "weights": {"a": torch.ones(2)}}
    assert _difference(good, good) == 0.0
    bad: list[dict[str, Any]] = [
        {"losses": [1.0, math.nan]},
        {"losses": [1.0]},
        {"weights": {"a": torch.tensor([1.0, math.nan])}},
        {"weights": {}},
    ]
    assert [_difference({**good, **one}, good) for one in bad] == [math.inf] * len(bad)


def test_the_page_says_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python tests/works_with/table.py"


def test_each_script_has_one_row() -> None:
    named = [row.script for row in ROWS]
    assert len(set(named)) == len(named)
    written = {name for name, one in vars(scripts).items() if getattr(one, "__module__", "") == scripts.__name__}
    public = {name for name in written if not name.startswith("_") and name[0].islower()}
    assert public == set(named)


def test_each_cell_that_says_more_than_same_has_its_words() -> None:
    for row in ROWS:
        for column in COLUMNS:
            cell: Cell = row.cell(column)
            assert (cell.kind in ("same", "hangs")) or cell.text, (row.script, column)
