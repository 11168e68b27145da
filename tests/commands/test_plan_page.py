# SPDX-License-Identifier: Apache-2.0
"""`plan --html`: the answer as one page that loads nothing, with the sentences and numbers of the text."""

import html
import json
import re
from html.parser import HTMLParser

import pytest

from ds_hybridep.commands.main import main
from ds_hybridep.config import parse_config
from ds_hybridep.plan.words import number

EXAMPLE = [
    *("plan", "--model", "Qwen3-30B-A3B", "--dcs", "2x8", "--wan", "10gbps", "--delay", "10ms", "--tokens", "8192"),
    *("--accumulation", "4", "--checkpointing", "--price-per-gb", "0.05"),
]


class Reader(HTMLParser):
    """Texts of a page by the element that they stand in, and all elements with what they have."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.elements, self._open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"{tag} closes another element"

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self._open[-1], data.strip()))

    def of(self, *tags):
        return [text for tag, text in self.texts if tag in tags]


def written(tmp_path, capsys, *arguments):
    page = tmp_path / "answer.html"
    assert main([*arguments, "--html", str(page)]) == 0
    return Reader(page.read_text(encoding="utf-8")), capsys.readouterr().out


def test_the_page_has_the_answer_of_the_text(tmp_path, capsys):
    page, said = written(tmp_path, capsys, *EXAMPLE)
    assert page.of("h1") == ["Qwen3-30B-A3B on 2 x 8 GPUs"]
    sentences = page.of("p")
    assert sentences[0].startswith("For you: ")
    (words,) = {sentence for sentence in sentences if sentence.startswith("Bold is what this program would run")}
    flat = " ".join(said.split())
    others = [sentence for sentence in sentences if sentence not in ("A bar twice as long is twice as much.", words)]
    others = [sentence for sentence in others if not sentence.startswith("Logarithmic, from ")]
    assert len(others) > 15
    assert all(sentence in flat for sentence in [*others, words.replace("Bold", "->")])
    settings, commands = page.of("pre")
    assert settings in said
    assert parse_config(json.loads(settings)["hybridep"], world_size=16).levels[0].size == 2
    assert commands == "deepspeed --hostfile hosts train.py --deepspeed_config ds_config.json"


def test_the_page_shows_each_row_in_the_table_and_in_both_pictures(tmp_path, capsys):
    page, _ = written(tmp_path, capsys, *EXAMPLE)
    main([*EXAMPLE, "--json"])
    rows = json.loads(capsys.readouterr().out)["table"]
    labels = [attrs["aria-label"] for tag, attrs in page.elements if tag == "svg" and "aria-label" in attrs]
    assert labels == [
        *(f"{row['name']}: {number(row['link_bytes'] / 1e9)}" for row in rows),
        *(f"{row['name']}: {number(row['step_s'])}" for row in rows),
    ]
    cells = page.of("td")
    assert all(row["name"] in cells and number(row["step_s"]) in cells for row in rows)
    # A bar is longer where the number is larger, and none leaves the picture.
    bars = [float(attrs["width"][:-1]) for tag, attrs in page.elements if tag == "rect" and "." in attrs["width"]]
    for values, widths in (
        ([row["link_bytes"] for row in rows], bars[: len(rows)]),
        ([row["step_s"] for row in rows], bars[len(rows) :]),
    ):
        assert sorted(range(len(rows)), key=values.__getitem__) == sorted(range(len(rows)), key=widths.__getitem__)
        assert 0 <= min(widths) <= max(widths) <= 100
        # One datacentre alone sends nothing.
        assert [width > 0 for width in widths] == [value > 0 for value in values]


def test_values_that_are_close_have_bars_in_proportion(tmp_path, capsys):
    arguments = ["plan", "--model", "OLMoE-1B-7B", "--dcs", "1x8", "--wan", "10gbps", "--checkpointing"]
    page, _ = written(tmp_path, capsys, *arguments)
    main([*arguments, "--json"])
    rows = json.loads(capsys.readouterr().out)["table"]
    bars = [float(attrs["width"][:-1]) for tag, attrs in page.elements if tag == "rect" and "." in attrs["width"]]
    longest = max(row["step_s"] for row in rows)
    assert "GB per step over the link of a dc" not in page.of("h3")  # there is one
    assert bars == [pytest.approx(100 * row["step_s"] / longest, abs=0.01) for row in rows]


def test_the_page_loads_nothing_and_runs_nothing(tmp_path, capsys):
    page, _ = written(tmp_path, capsys, *EXAMPLE)
    names = {tag for tag, _ in page.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "form"}
    assert not any(key in ("src", "href") or key.startswith("on") for _, attrs in page.elements for key in attrs)
    (style,) = page.of("style")
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style


def test_what_is_not_for_you_has_nothing_to_paste(tmp_path, capsys):
    page, said = written(tmp_path, capsys, *EXAMPLE, "--model", "OLMoE-1B-7B")
    assert page.of("p")[0] == said.splitlines()[0]
    assert page.of("p")[0].startswith("Not for you, because ")
    assert not page.of("pre")


def test_texts_are_escaped(tmp_path, capsys):
    model = tmp_path / "<b>bold<b> & 'co'.json"
    model.write_text(json.dumps({"layers": 2, "hidden": 64, "ffn": 256, "experts": 8, "top_k": 2}))
    page, said = written(tmp_path, capsys, "plan", "--model", str(model), "--dcs", "2x2", "--wan", "1gbps")
    assert page.of("h1") == page.of("title") == ["<b>bold<b> & 'co' on 2 x 2 GPUs"]
    assert "b" not in {tag for tag, _ in page.elements}
    assert html.escape("<b>bold<b> & 'co'") in (tmp_path / "answer.html").read_text()
    assert re.search(r"^<b>bold<b> & 'co': ", said, re.M)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--html", "missing/answer.html"], "--html: missing/answer.html cannot be written"),
        (["--html", "answer.html", "--sweep", "wan"], "--html: a page has one answer, but --sweep has many"),
    ],
)
def test_pages_that_cannot_be_are_refused(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*EXAMPLE, *arguments]) == 2
    assert words in capsys.readouterr().err
