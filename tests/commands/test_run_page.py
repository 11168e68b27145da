# SPDX-License-Identifier: Apache-2.0
"""`show --html`: the record of a run as one page that loads nothing, as a reader and as a browser sees it."""

import json
import re
from html.parser import HTMLParser

import pytest
from browser import browser, measured

from ds_hybridep.commands.main import main
from ds_hybridep.commands.record import format_run_record

KINDS = ("tokens", "expert_weights", "expert_gradients", "dense", "control")
HOSTILE = "<script>alert('x')</script> \" & co"
LONG = "model.language_model.layers.17.mlp.deepspeed_moe.experts_of_a_very_long_name"


def level(name, plain_ep_bytes, *sent_bytes):
    sent = dict(zip(KINDS, sent_bytes, strict=True))
    return {"name": name, "sent_bytes": sent, "plain_ep_bytes": plain_ep_bytes, "waits": 40.0}


def layer(name, load):
    codecs = {
        "weight_bytes": 4e6, "weight_ratio": 54.1, "weight_error": 0.0123, "gradient_bytes": 8e6, "residual_norm": 1.5,
        "gradient_ratio": 27.0, "encode_s": 0.02, "decode_s": 0.01, "exposed_s": 0.5,
    }  # fmt: skip
    hot = {"hot_experts": [3, 5], "hot_changes": 2, "load_before": 2.5, "load_after": 1.125}
    return {"name": name, "codecs": codecs, "imbalance": load, "expert_load": 2 * load, **hot}


def peer(rank):
    return {
        "rank": rank, "state": "alive", "sent_bytes": 71_790_688, "received_bytes": 71_878_695,
        "round_trip_s": 0.000888, "retransmissions": 1, "reconnects": 0,
    }  # fmt: skip


OTHER_SITE = {"present": True, "step": 9, "waited_s": 1.5, "sent_bytes": 2e6, "received_bytes": 3e6}
RECORD = {
    "steps": 10,
    "world_size": 4,
    "step_s": 0.1,
    "levels": [
        level("dc", 100_000_000, 0, 20_000_000, 15_000_000, 5_000_000, 1000),
        level("gpu", 90_000_000, 80_000_000, 0, 0, None, 0),
    ],
    "exposed_s": {"tokens": 0.25, "expert_weights": 0.05, "dense": None},
    "slowest": {"rank": 2, "waited_s": 0.01, "others_waited_s": 0.02},
    "layers": [layer(f"{LONG}.{at}", 1 + at / 10) for at in range(12)],
    "link": [peer(1), peer(2)],
    "sites": {"site": "a", "step": 9, "quorum_s": 0.5, "repeated": 1, "drift": 1e-7, "others": {HOSTILE: OTHER_SITE}},
    "planning": {
        "plan": HOSTILE, "reason": "saves 0.5 s on token exchange", "runner_up": "[1,1]", "runner_up_s": 1.25,
        "predicted": {"step_s": 0.08, "terms_s": {"dense_s": 0.05, "tokens_s": 0.02, "dense_sync_s": 0.01}},
        "measured_step_s": 0.1, "measured": {"waited_s": {"tokens": 0.025, "expert_weights": 0.005}, "codec_s": 0.0},
        "links": [], "history": [{"step": 6, "to": "[2,1]", "reason": "told so"}],
    },
}  # fmt: skip
PLAIN = {key: RECORD[key] for key in ("steps", "world_size", "levels", "exposed_s")} | {"layers": []}


class Reader(HTMLParser):
    """Elements with what they have, and texts by the element around them."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "rect"):
            self._open.append(tag)

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self._open[-1], data.strip()))

    def of(self, tag):
        return [text for other, text in self.texts if other == tag]

    def bars(self):
        """(label, share of the width in percent) of each bar."""
        labels = [attrs["aria-label"] for tag, attrs in self.elements if tag == "svg"]
        widths = [float(attrs["width"].rstrip("%")) for tag, attrs in self.elements if tag == "rect"]
        return list(zip(labels, widths, strict=True))


def page_of(tmp_path, record):
    path, page = tmp_path / "run.json", tmp_path / "run.html"
    path.write_text(json.dumps(record))
    assert main(["show", str(path), "--html", str(page)]) == 0
    return page


def read(tmp_path, record):
    return Reader(page_of(tmp_path, record).read_text(encoding="utf-8"))


def test_bars_are_as_long_as_their_figures_say(tmp_path):
    bars = dict(read(tmp_path, PLAIN).bars())
    assert bars["plain EP: 10.000 MB"] == 100.0
    assert bars["this run, without dense: 3.500 MB"] == 35.0
    assert bars["sum: 4.000 MB"] == 100.0
    assert bars["expert weights: 2.000 MB"] == 50.0
    assert bars["expert gradients: 1.500 MB"] == 37.5
    assert bars["dense: not counted"] == bars["control: 0.000 MB"] == 0.0


def test_a_step_is_divided_into_waits_and_the_rest(tmp_path):
    bars = dict(read(tmp_path, RECORD).bars())
    assert bars["tokens: 25.0 ms"] == 25.0
    assert bars["expert weights: 5.0 ms"] == 5.0
    assert bars["all else: 70.0 ms"] == 70.0


def test_the_first_sentences_have_what_matters(tmp_path):
    said = read(tmp_path, RECORD).of("p")
    assert said[:3] == [
        "4 ranks, mean of 10 steps, 100 ms each.",
        "All ranks together send 4.000 MB per step over dc, the slowest level. Without dense, that is 35% of what "
        "plain EP would send.",
        "A rank waits 30.0 ms per step for transfers, 30% of the step.",
    ]
    assert "Slowest: rank 2, which waited 10.0 ms per step; the others waited 20.0 ms." in said


def test_the_page_ends_with_the_text_of_the_command(tmp_path):
    for record in (RECORD, PLAIN):
        assert read(tmp_path, record).of("pre") == [format_run_record(record)]


def test_all_layers_are_in_the_table_and_the_fullest_have_bars(tmp_path):
    page = read(tmp_path, RECORD)
    assert [name for name in page.of("td") if name == f"{LONG}.0"] == 2 * [f"{LONG}.0"]  # loads and codecs
    fullest = [label for label, _ in page.bars() if label.startswith(LONG)]
    assert fullest[0] == f"{LONG}.11: 2.10"
    assert len(fullest) == 16
    assert "1 is even: the others wait for the fullest. The 8 fullest of 12 layers; the table has all." in page.of("p")


def test_what_comes_from_the_file_is_escaped(tmp_path):
    record = {**RECORD, "planning": None, "plan": HOSTILE, "levels": [level(HOSTILE, 1, 0, 0, 0, 0, 0)]}
    record["layers"] = [layer(HOSTILE, 1.0)]
    for one in (record, RECORD):
        page = read(tmp_path, one)
        names = {tag for tag, _ in page.elements}
        assert not names & {"script", "link", "img", "iframe", "object", "form", "a"}
        assert not any(key in ("src", "href") or key.startswith("on") for _, attrs in page.elements for key in attrs)
        assert not re.search(r"url\(|@import|https?:", page.of("style")[0])
        assert HOSTILE in page.of("td")
        assert all(0 <= share <= 100 for _, share in page.bars())
    assert HOSTILE in read(tmp_path, record).of("p")


@pytest.mark.parametrize("change", [{"exposed_s": 3}, {"layers": [{"codecs": {}}], "link": [{}]}, {"planning": []}])
def test_what_is_no_record_makes_no_page(tmp_path, capsys, change):
    path, page = tmp_path / "run.json", tmp_path / "run.html"
    path.write_text(json.dumps({**RECORD, **change}))
    assert main(["show", str(path), "--html", str(page)]) == 2
    assert "is no record of a run" in capsys.readouterr().err
    assert not page.exists()


@pytest.mark.skipif(browser() is None, reason="there is no Chromium to open a page with")
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_shows_it_whole_and_readable_in_light_and_dark(tmp_path, width):
    page = page_of(tmp_path, RECORD)
    found = {scheme: measured(page, width, scheme) for scheme in ("light", "dark")}
    for scheme, one in found.items():
        assert one["width"] == width
        assert one["needed"] <= width, scheme
        assert one["outside"] == [], scheme
        assert one["smallest_px"] >= 13
        assert contrast(one["ink"], one["ground"]) >= 7
    assert brightness(found["light"]["ground"]) > 0.8 > 0.2 > brightness(found["dark"]["ground"])


def brightness(colour):
    """Relative luminance of "rgb(r, g, b)", after WCAG."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)
