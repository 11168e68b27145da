# SPDX-License-Identifier: Apache-2.0
"""`ds_hybridep report`, on machines with and without a GPU."""

import importlib

from ds_hybridep.commands import report
from ds_hybridep.commands.main import main

builder_module = importlib.import_module("ds_hybridep.op_builder.hybridep")


def test_report_says_which_kernels_there_are_or_why_not(capsys, monkeypatch):
    monkeypatch.setattr(builder_module.HybridEPBuilder, "why_not", lambda self: "no GPU" if self.is_cuda else None)
    for is_built, expected in ((False, "yes, on first use"), (True, "built: hybridep_rows_")):
        monkeypatch.setattr(builder_module.HybridEPBuilder, "is_built", lambda self, found=is_built: found)
        assert main(["--local_rank=0", "report"]) == 0  # as DeepSpeed's launcher starts it
        text = capsys.readouterr().out
        assert f"kernels for cpu tensors: {expected}" in text
        assert "kernels for cuda tensors: no: no GPU; on these tensors the slower" in text
        assert "\nds_hybridep 0." in text


def test_report_says_whether_an_engine_will_find_its_block(monkeypatch):
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    assert report.state_of_hook() == "registered"
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert report.state_of_hook().startswith("off: unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    monkeypatch.setattr(report.metadata, "entry_points", lambda group: ())
    assert report.state_of_hook().startswith("missing: ")
