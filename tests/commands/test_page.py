# SPDX-License-Identifier: Apache-2.0
"""The record of a run as a page for a browser."""

import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from ds_hybridep.commands.main import main
from ds_hybridep.commands.page import Run, write_page

KINDS = {"tokens": 1_000_000, "expert_weights": 400_000, "expert_gradients": 500_000, "dense": None, "control": 10}
RECORD = {
    "steps": 10,
    "world_size": 4,
    "step_s": 0.25,
    "levels": [{"name": "<dc>", "sent_bytes": KINDS, "plain_ep_bytes": 38_000_000, "waits": 41.0}],
    "exposed_s": {"tokens": 0.5, "expert_weights": 0.1, "expert_gradients": 0.0, "dense": None},
    "slowest": {"rank": 2, "waited_s": 0.01, "others_waited_s": 0.08},
    "layers": [{"name": "blocks.0.moe", "imbalance": 1.25, "expert_load": 1.75, "codecs": {}}],
    "plan": "1 MoE layer, domain sizes dc 2, gpu 1, tokens direct, compiled kernels",
}
RUNS = (
    Run(title="plain", step_s=2.0, uplink_bytes=14e6, loss=3.0, valid_loss=3.1),
    Run(title="ours", step_s=0.5, uplink_bytes=0.079e6, loss=3.0, valid_loss=3.1),
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """Text, and elements that were not closed."""

    VOID = {"meta", "br"}

    def __init__(self, html):
        super().__init__()
        self.open, self.texts, self.links = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text.strip())


def page_of(path, record=RECORD, runs=()):
    write_page(path, record, runs)
    return Page(path.read_text())


def test_the_page_is_whole_and_needs_nothing_else(tmp_path):
    page = page_of(tmp_path / "page.html")
    assert page.open == []
    assert page.links == []
    assert "Level <dc>" in page.texts, "names are escaped"


def test_it_says_what_the_record_says(tmp_path):
    texts = page_of(tmp_path / "page.html").texts
    assert "5.0% of plain EP's bytes over level <dc>" in texts
    assert "4 ranks, 10 steps, 250 ms per step" in texts
    assert "0.190 MB, dense parameters not counted" in texts
    filled = [text for text in texts if text]
    waits = {name: filled[filled.index(name) + 1] for name in ("tokens", "computation and all else")}
    assert waits == {"tokens": "50.0 ms", "computation and all else": "190.0 ms"}
    assert {"1.25", "1.75", "4.1"} <= set(texts)
    assert "Slowest: rank 2, which waited 10.0 ms per step; the others waited 80.0 ms." in texts
    assert filled[filled.index("The plan") + 1] == RECORD["plan"]


def test_several_ways_are_compared(tmp_path):
    texts = page_of(tmp_path / "page.html", runs=RUNS).texts
    assert "ours is 4.0 times as fast as plain" in texts
    assert "0.50 s, 4.0x" in texts
    assert "14.0 MB" in texts
    assert "0.0790 MB" in texts


def test_show_writes_it_beside_the_table(tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps(RECORD))
    assert main(["show", str(tmp_path / "run.json"), "--html", str(tmp_path / "run.html")]) == 0
    shown = capsys.readouterr().out
    assert "MB sent per step" in shown
    assert f"plan: {RECORD['plan']}" in shown
    assert "Where the time of a step goes" in (tmp_path / "run.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_shows_it_without_scrolling_sideways(tmp_path, width):
    write_page(tmp_path / "page.html", RECORD, RUNS)
    html = (tmp_path / "page.html").read_text()
    script = "<script>document.title = document.documentElement.scrollWidth <= innerWidth</script></body>"
    (tmp_path / "page.html").write_text(html.replace("</body>", script))
    # A window may not become narrower than 500 pixels; a frame may.
    frame = f'<iframe src="page.html" style="width:{width}px;height:900px;border:0" id="f"></iframe>'
    script = "<script>f.onload = () => document.title = f.contentDocument.title</script>"
    (tmp_path / "frame.html").write_text(frame + script)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += ["--window-size=1300,1000", "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path}/frame.html"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout
    assert "<title>true</title>" in shown
