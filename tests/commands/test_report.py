# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from ds_hybridep.commands.main import main
from ds_hybridep.commands.record import explain_plan, format_run_record


def level(name, plain_ep_bytes, *sent_bytes):
    kinds = ("tokens", "expert_weights", "expert_gradients", "dense", "control")
    return {"name": name, "sent_bytes": dict(zip(kinds, sent_bytes, strict=True)), "plain_ep_bytes": plain_ep_bytes}


RECORD = {
    "steps": 10,
    "world_size": 4,
    "levels": [
        level("dc", 100_000_000, 0, 20_000_000, 15_000_000, 5_000_000, 1000),
        level("gpu", 0, 80_000_000, 0, 0, 0, 0),
    ],
    "exposed_s": {"tokens": 0.25},
    "layers": [],
}


def table_of(record):
    """The table's lines as lists of cells; two blanks part cells, since names hold one."""
    table = format_run_record(record).split("\n\n")[1]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table.splitlines()]


def test_table_shows_megabytes_per_step_beside_plain_ep():
    header, dc, gpu = table_of(RECORD)
    assert ", ".join(header) == (
        "level, tokens, expert weights, expert gradients, dense, control, sum, plain EP, of plain EP"
    )
    assert dc == ["dc", "0.000", "2.000", "1.500", "0.500", "0.000", "4.000", "10.000", "35%"]
    assert gpu == ["gpu", "8.000", "0.000", "0.000", "0.000", "0.000", "8.000", "0.000", "-"]


def test_header_and_waits_name_their_units():
    text = format_run_record(RECORD)
    assert text.startswith("MB sent per step, 4 ranks together, mean of 10 steps\n")
    assert text.endswith("mean per step: tokens 25.0 ms")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"levels": []}', '{"steps": 2, "levels": [{}]}'])
def test_what_is_no_record_is_named(tmp_path, capsys, content):
    record = tmp_path / "run.json"
    if content is not None:
        record.write_text(content)
    assert main(["show", str(record)]) == 2
    message = capsys.readouterr().err
    assert f"RUN.json: {record} is no record of a run" in message
    assert "report_file" in message


def test_show_prints_a_run_record(tmp_path, capsys):
    record = tmp_path / "run.json"
    record.write_text(json.dumps(RECORD))
    assert main(["show", str(record)]) == 0
    assert capsys.readouterr().out == format_run_record(RECORD) + "\n"


def test_show_writes_a_page_for_a_browser(tmp_path):
    record, page = tmp_path / "run.json", tmp_path / "run.html"
    record.write_text(json.dumps({**RECORD, "plan": "<b> & co"}))
    assert main(["show", str(record), "--html", str(page)]) == 0
    text = page.read_text()
    assert format_run_record(RECORD).splitlines()[0] in text
    assert "&lt;b&gt; &amp; co" in text


def test_codecs_get_a_table_of_their_own():
    codecs = {
        "weight_bytes": 4_000_000.0,
        "weight_ratio": 54.1,
        "weight_error": 0.0123,
        "gradient_bytes": 8_000_000.0,
        "gradient_ratio": 27.0,
        "residual_norm": 1.5,
        "encode_s": 0.02,
        "decode_s": 0.01,
        "exposed_s": 0.5,
    }
    layers = [{"name": "blocks.0", "codecs": codecs}, {"name": "blocks.1", "codecs": {}}]
    title, table = format_run_record({**RECORD, "layers": layers}).split("\n\n")[-2:]
    assert title.startswith("encoded, MB per step of all ranks")
    head, *rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table.splitlines()]
    assert head[:3] == ["layer", "weights", "ratio"]
    assert rows == [
        ["blocks.0", "0.400", "54.1x", "1.2e-02", "0.800", "27.0x", "1.5e+00", "2.00 ms", "1.00 ms", "50.00 ms"]
    ]
    assert "encoded" not in format_run_record({**RECORD, "layers": layers[1:]})


PLANNING = {
    "plan": "[2,1] tokens direct, dense hierarchical",
    "reason": "saves 0.5 s on token exchange",
    "runner_up": "[1,1] tokens direct, dense hierarchical",
    "runner_up_s": 1.25,
    "predicted": {
        "step_s": 1.0,
        "terms_s": dict(dense_s=0.25, tokens_s=0.5, expert_weights_s=0.25, dense_sync_s=0.125, expert_sync_s=0.125),
    },
    "measured_step_s": 1.5,
    "measured": {"waited_s": {"tokens": 0.75, "expert_weights": 0.125}, "codec_s": 0.0},
    "links": [
        {"name": "dc", "bandwidth_gbps": 0.1, "latency_ms": 5.0},
        {"name": "gpu", "bandwidth_gbps": None, "latency_ms": None},
    ],
    "history": [{"step": 6, "to": "[2,1] tokens direct, dense hierarchical", "reason": "told so"}],
}


def test_a_planned_run_is_explained_term_by_term():
    lines = [line.split("  ") for line in explain_plan(PLANNING).splitlines()]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in lines}
    assert cells["token exchange"] == ["0.5000", "0.7500"]
    assert cells["waiting for expert weights"] == ["0.2500", "0.1250"]
    assert cells["computation outside the experts"] == ["0.2500", "-"]
    # 1.5 s less what was waited for.
    assert cells["all else"] == ["-", "0.6250"]
    assert cells["the step"] == ["1.0000", "1.5000"]
    assert cells["sums and gathers of what several ranks hold"] == ["0.2500", "not counted"]
    text = explain_plan(PLANNING)
    assert "runner-up at the last look: [1,1]" in text
    assert "step 6: [2,1] tokens direct, dense hierarchical (told so)" in text


def test_the_record_of_a_planned_run_says_why_it_had_its_plan():
    assert explain_plan(PLANNING) in format_run_record({**RECORD, "planning": PLANNING, "plan": "unused"})
    assert "because" not in format_run_record({**RECORD, "planning": None, "plan": "2 MoE layers"})


def test_step_time_and_loads_are_shown():
    layer = {"name": "blocks.0", "codecs": {}, "imbalance": 1.25, "expert_load": 1.75}
    text = format_run_record({**RECORD, "step_s": 0.25, "layers": [layer]})
    assert "mean of 10 steps, 250 ms each" in text
    assert text.splitlines()[-1].split() == ["blocks.0", "1.25", "1.75"]


def test_hot_experts_are_shown_beside_the_loads():
    layer = {"name": "blocks.0", "codecs": {}, "imbalance": 1.25, "expert_load": 1.75}
    hot = {"hot_experts": [3, 5], "hot_changes": 2, "load_before": 2.5, "load_after": 1.125}
    unknown = {"hot_experts": [], "hot_changes": 0, "load_before": None, "load_after": None}
    lines = format_run_record({**RECORD, "layers": [{**layer, **hot}, {**layer, **unknown}]}).splitlines()
    assert lines[-2].split() == ["blocks.0", "1.25", "1.75", "1.12", "2.50", "3,", "5", "2"]
    assert lines[-1].split() == ["blocks.0", "1.25", "1.75", "-", "-", "none", "0"]
