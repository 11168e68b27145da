# SPDX-License-Identifier: Apache-2.0
"""What a user sees of sites: waits, and the record of a run."""

from typing import Any

import pytest
import torch

from ds_hybridep.commands.record import site_table
from ds_hybridep.integration.site_exchange import SiteExchange
from ds_hybridep.integration.site_overlap import Departures
from ds_hybridep.kernels.reference import ReferenceKernels
from ds_hybridep.plan.slots import whole
from ds_hybridep.sites import patience as patience_module
from ds_hybridep.sites.packets import OwnedSlice, Packets
from ds_hybridep.sites.patience import Patience
from ds_hybridep.sync.home import Home

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


class TakesOver(SiteExchange):
    """A site that gets another one's state, and with it another loss scale, before its first exchange."""

    def __init__(self) -> None:
        self.scale, self.sent = 8.0, torch.empty(0)
        self.members = self.names = ["a", "b"]
        self.num_exchanges, self._interval, self._needs_quorum, self._last_steps = 1, 0, True, {}
        self._packets = Packets("a", None, None, torch.float32, Home(torch.device("cpu")))
        self._engine = type("Engine", (), {"global_steps": 3})
        self._departures = Departures(None, self._packets, ReferenceKernels(), lambda: None, lambda: True, lambda: 1.0)

    @property
    def _others(self) -> list[str]:
        return ["b"]

    def _form(self, *, is_complete: bool) -> bool:
        self.scale, self._needs_quorum = 2.0, False
        return True

    def _swap(self, packets: list[torch.Tensor]) -> Any:
        return [packets[0], packets[0].clone()], True

    def _agree(self, is_complete: bool, digest: bytes) -> tuple[bool, bool]:
        return True, False


def test_gradients_follow_a_loss_scale_that_came_with_another_sites_state() -> None:
    gradient = torch.full((4,), 8.0 * 0.5)
    site = TakesOver()
    one = OwnedSlice((whole("w", torch.Size([4])),), (gradient,), False)
    assert site._average([one], lambda: site.scale)
    assert torch.equal(gradient, torch.full((4,), 2.0 * 0.5))
