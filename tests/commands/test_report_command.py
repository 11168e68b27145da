# SPDX-License-Identifier: Apache-2.0
"""`ds_hybridep report` and DeepSpeed's `ds_report`, on machines with and without a GPU."""

import importlib
import re
import sysconfig
from pathlib import Path
from types import SimpleNamespace

from scripts import output_of

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


def test_report_has_versions_and_settings_for_an_issue(capsys, monkeypatch):
    monkeypatch.setattr(report, "gpus", lambda: ["Some GPU (9.0)", "Some GPU (9.0)"])
    monkeypatch.setenv("HYBRIDEP_SITE", "b")
    monkeypatch.setenv("MASTER_ADDR", "a-host-of-ours")
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    (versions,) = re.findall("^versions: (.*)$", text, re.MULTILINE)
    assert re.search(r"deepspeed \d.*, torch \d.*, Python 3\.\d+\.\d+\S*, Linux ", versions)
    assert "\nGPUs: Some GPU (9.0), Some GPU (9.0)\n" in text
    assert re.search("^environment: .*HYBRIDEP_SITE=b", text, re.MULTILINE)
    assert "a-host-of-ours" not in text


def test_report_reads_no_variable_that_the_document_leaves_out():
    text = (Path(__file__).resolve().parents[2] / "docs" / "environment.md").read_text()
    assert [name for name in report.SETTINGS if f"`{name}`" not in text] == []


def test_without_a_compiler_report_says_so_before_a_job_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    builder = builder_module.HybridEPBuilder("cpu")
    assert builder.why_not().startswith("no-such-compiler cannot be run; install a C++ compiler, or set CXX")
    assert not builder.is_compatible()


def test_ds_report_lists_the_kernels_as_compatible(tmp_path):
    said = output_of([Path(sysconfig.get_path("scripts")) / "ds_report"], tmp_path, 100)
    (line,) = [line for line in said.splitlines() if line.startswith("hybridep_")]
    assert re.fullmatch(r"hybridep_cpu \.+ \S*\[NO\]\S* \.+ \S*\[OKAY\]\S*", line)


def test_ds_report_lists_both_kinds_where_there_is_a_gpu_and_leaves_nothing_behind(capsys, monkeypatch):
    env_report = importlib.import_module("deepspeed.env_report")
    accelerator = SimpleNamespace(device_name=lambda: "cuda", _name="cuda")
    monkeypatch.setattr(env_report, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(env_report, "accelerator_name", "cuda")
    monkeypatch.setattr(builder_module.HybridEPBuilder, "is_ahead_of_time", lambda self: self.is_cuda)
    monkeypatch.setattr(builder_module.HybridEPBuilder, "why_not", lambda self: "no GPU" if self.is_cuda else None)
    before = env_report.ALL_OPS, env_report.installed_ops
    env_report.op_report(verbose=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hybridep_")]
    assert [re.findall(r"^\w+|\[\w+\]", line) for line in lines] == [
        ["hybridep_cpu", "[NO]", "[OKAY]"],
        ["hybridep_cuda", "[YES]", "[NO]"],
    ]
    assert (env_report.ALL_OPS, env_report.installed_ops) == before
