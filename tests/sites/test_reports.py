# SPDX-License-Identifier: Apache-2.0
"""What a user sees of sites: waits, and the record of a run."""

import pytest

from ds_hybridep.commands.record import site_table
from ds_hybridep.sites import patience as patience_module
from ds_hybridep.sites.patience import Patience

OTHER = {"present": True, "step": 9, "sent_bytes": 2_000_000, "received_bytes": 1_000_000, "waited_s": 1.25}
SITES = {"site": "a", "step": 10, "repeated": 1, "quorum_s": 3.0, "drift": None, "others": {"b": OTHER}}


def test_a_wait_is_announced_with_growing_pauses_and_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(patience_module.time, "monotonic", lambda: now)
    with caplog.at_level("WARNING", "ds_hybridep"), Patience("site 'a' waits for site 'b'") as patience:
        for second in range(60):
            now = float(second)
            patience.look("refused")
    first, second, third, last = (record.getMessage() for record in caplog.records)
    assert first == "hybridep: site 'a' waits for site 'b', for 5 s so far: refused"
    assert "for 15 s so far" in second
    assert "for 45 s so far" in third
    assert last == "hybridep: site 'a' waits for site 'b' no longer; it goes on after 59 s"


def test_short_waits_are_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "ds_hybridep"), Patience("site 'a' waits for site 'b'") as patience:
        patience.look()
    assert not caplog.records


def test_the_record_of_a_run_says_how_each_site_is() -> None:
    away = {**OTHER, "present": False, "step": None}
    title, rows = site_table({"sites": {**SITES, "others": {"b": OTHER, "c": away}}})
    assert rows[1:] == [
        ["b", "present", "9", "1.2 s", "2.000", "1.000"],
        ["c", "absent", "-", "1.2 s", "2.000", "1.000"],
    ]
    assert "site a sees them at step 10; waited 3.0 s for agreement, 1 exchanges repeated" in title
    assert "weights 1.0e-03 from the common ones" in site_table({"sites": {**SITES, "drift": 1e-3}})[0]
    assert site_table({"sites": None}) == site_table({}) == ("", [])
