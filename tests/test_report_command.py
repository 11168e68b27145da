# SPDX-License-Identifier: Apache-2.0
"""`ds_hybridep report`, on machines with and without a GPU."""

import importlib
import json

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
        "devices",
        "links",
    ]
    assert any("kernels for cpu tensors" in line and line.endswith("yes, on first use") for line in lines)
    assert any(
        "kernels for cuda tensors" in line and "no: no GPU; on these tensors the slower" in line for line in lines
    )
    assert any("ninja" in line and "1.2.3" in line for line in lines)


def test_report_as_json(capsys, monkeypatch):
    monkeypatch.setattr(builder_module.HybridEPBuilder, "is_built", lambda self: True)
    assert main(["report", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"]
    assert report["ops"]["kernels for cpu tensors"].startswith("built: hybridep_rows_")


def test_links_are_listed_with_their_speed(monkeypatch, tmp_path):
    for name, speed in (("eth0", "10000"), ("eth1", "-1"), ("lo", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text("up\n")
        (tmp_path / name / "speed").write_text(speed)
    (tmp_path / "eth1" / "speed").unlink()
    monkeypatch.setattr(report_command, "NETWORK", tmp_path)
    rows = dict(report_command.links())
    assert rows["network eth0"] == "up, 10000 Mbit/s"
    assert rows["network eth1"] == "up, of unknown speed"
    assert "network lo" not in rows


def test_a_program_that_is_not_there_is_a_dash():
    assert report_command.first_line(["a-program-that-is-not-there"]) == "-"
