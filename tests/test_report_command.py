# SPDX-License-Identifier: Apache-2.0
"""`ds_hybridep report`, on machines with and without a GPU."""

import importlib
import re

from ds_hybridep.commands.main import main

builder_module = importlib.import_module("ds_hybridep.op_builder.hybridep")


def test_report_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(builder_module.HybridEPBuilder, "why_not", lambda self: "no GPU" if self.is_cuda else None)
    monkeypatch.setattr(builder_module.HybridEPBuilder, "is_built", lambda self: False)
    assert main(["report"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.match(r"ds_hybridep \d.*ds_report", first)
    assert lines == [
        "kernels for cpu tensors: yes, on first use",
        "kernels for cuda tensors: no: no GPU; on these tensors the slower PyTorch definitions run",
    ]


def test_report_names_what_is_built(capsys, monkeypatch):
    monkeypatch.setattr(builder_module.HybridEPBuilder, "why_not", lambda self: None)
    monkeypatch.setattr(builder_module.HybridEPBuilder, "is_built", lambda self: True)
    assert main(["report"]) == 0
    assert re.search(r"kernels for cpu tensors: built: hybridep_rows_", capsys.readouterr().out)
