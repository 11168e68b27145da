# SPDX-License-Identifier: Apache-2.0
import pytest

from ds_hybridep.report import format_run_record

RECORD = {
    "steps": 10,
    "world_size": 4,
    "levels": [
        {
            "name": "dc",
            "sent_bytes": {
                "tokens": 0,
                "expert_weights": 20_000_000,
                "expert_gradients": 15_000_000,
                "dense": 5_000_000,
                "control": 1000,
            },
            "plain_ep_bytes": 100_000_000,
        },
        {"name": "gpu", "sent_bytes": {"tokens": 80_000_000, "expert_weights": 0}, "plain_ep_bytes": 0},
    ],
    "exposed_s": {"tokens": 0.25},
}


def table_of(record):
    """The table's lines as lists of cells; three blanks part cells, since names hold one."""
    table = format_run_record(record).split("\n\n")[1]
    return [[cell.strip() for cell in line.split("   ") if cell.strip()] for line in table.splitlines()]


def test_table_shows_megabytes_per_step_beside_plain_ep():
    header, dc, gpu = table_of(RECORD)
    assert ", ".join(header) == (
        "level, tokens, expert weights, expert gradients, dense, control, sum, plain EP, of plain EP"
    )
    assert dc == ["dc", "0.000", "2.000", "1.500", "0.500", "0.000", "4.000", "10.000", "35%"]
    assert gpu == ["gpu", "8.000", "0.000", "-", "-", "-", "8.000", "0.000", "-"]


def test_header_and_waits_name_their_units():
    text = format_run_record(RECORD)
    assert text.startswith("MB sent per step, 4 ranks together, mean of 10 steps\n")
    assert text.endswith("mean per step: tokens 25.0 ms")


def test_kinds_of_a_later_version_get_their_own_column():
    record = {**RECORD, "levels": [{"name": "dc", "sent_bytes": {"checksums": 10_000_000}}, *RECORD["levels"]]}
    header, first, *_ = table_of(record)
    assert header[6] == "checksums"
    assert first[6] == "1.000"


def test_columns_are_aligned():
    lines = format_run_record(RECORD).splitlines()[2:5]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("record", [{}, {"levels": None}, {"steps": 3, "levels": []}, {"levels": ["dc"]}])
def test_record_without_levels_says_so(record):
    assert format_run_record(record) == "no traffic was recorded"


@pytest.mark.parametrize(
    "record",
    [
        {"levels": [{}]},
        {"steps": 0, "levels": [{"name": "dc", "sent_bytes": {"tokens": 5}, "plain_ep_bytes": 5}]},
        {"steps": "many", "levels": [{"name": "dc", "sent_bytes": {"tokens": "few"}}], "exposed_s": [1]},
        {"steps": True, "levels": [{"name": None, "sent_bytes": None, "plain_ep_bytes": None}]},
    ],
)
def test_incomplete_record_is_shown_with_dashes(record):
    text = format_run_record(record)
    assert "-" in text.splitlines()[-1]


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
    layers = [{"name": "blocks.0", "imbalance": 1.0, "codecs": codecs}, {"name": "blocks.1", "codecs": {}}]
    title, table = format_run_record({**RECORD, "layers": layers}).split("\n\n")[-2:]
    assert title.startswith("encoded, MB per step of all ranks")
    head, *rows = [[cell.strip() for cell in line.split("   ") if cell.strip()] for line in table.splitlines()]
    assert head[:3] == ["layer", "weights", "ratio"]
    assert rows == [
        ["blocks.0", "0.400", "54.1x", "1.2e-02", "0.800", "27.0x", "1.5e+00", "2.00 ms", "1.00 ms", "50.00 ms"]
    ]
    assert "encoded" not in format_run_record({**RECORD, "layers": layers[1:]})
