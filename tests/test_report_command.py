# SPDX-License-Identifier: Apache-2.0
"""`ds_hybridep report`, on machines with and without a GPU."""

import importlib
import re

from ds_hybridep.commands import report as report_command
from ds_hybridep.commands.main import main

builder_module = importlib.import_module("ds_hybridep.op_builder.hybridep")


def test_report_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(report_command, "first_line", lambda command, containing="": f"{command[0]} 1.2.3")
    monkeypatch.setattr(builder_module.HybridEPBuilder, "why_not", lambda self: "no GPU" if self.is_cuda else None)
    monkeypatch.setattr(builder_module.HybridEPBuilder, "is_built", lambda self: False)
    assert main(["report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        "ops",
        "compilers",
        "versions",
    ]
    assert any("kernels for cpu tensors" in line and line.endswith("yes, on first use") for line in lines)
    assert any(
        "kernels for cuda tensors" in line and "no: no GPU; on these tensors the slower" in line for line in lines
    )
    assert any("ninja" in line and "1.2.3" in line for line in lines)


def test_report_names_what_is_built_and_the_versions(capsys, monkeypatch):
    monkeypatch.setattr(builder_module.HybridEPBuilder, "is_built", lambda self: True)
    assert main(["report"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"kernels for cpu tensors \.+ built: hybridep_rows_", out)
    assert re.search(r"torch \.+ \d", out)


def test_a_program_that_is_not_there_is_a_dash():
    assert report_command.first_line(["a-program-that-is-not-there"]) == "-"
