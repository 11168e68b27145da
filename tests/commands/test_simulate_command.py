# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from ds_hybridep.commands.main import main
from ds_hybridep.commands.simulate import read_deviation
from ds_hybridep.errors import ConfigError
from ds_hybridep.simulate.scenario import Deviation

MODEL = """\
layers: 3
hidden: 256
ffn: 512
experts: 16
top_k: 2
"""
CLUSTER = ("--dcs", "4x2", "--wan", "1gbps", "--delay", "2ms", "--lan", "100gbps", "--tokens", "2048")


@pytest.fixture
def simulate(tmp_path, capsys):
    (tmp_path / "moe.yaml").write_text(MODEL)

    def run(*arguments):
        assert main(["simulate", "--model", str(tmp_path / "moe.yaml"), *CLUSTER, *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_the_best_plan_stands_beside_what_it_is_compared_with(simulate):
    lines = simulate("--domains", "2,1").splitlines()
    assert lines[0].split()[:2] == ["plan", "s/step"]
    assert lines[1].startswith("best plan, [")
    starts = (
        "DeepSpeed, EP 8",
        "EP 8 across dcs, exchange",
        "DeepSpeed, EP 2 in",
        "EP 2 in",
        "[2,1]",
    )
    assert all(line.startswith(start) for line, start in zip(lines[2:], starts, strict=True))


def test_json_says_what_was_simulated(simulate):
    plans = json.loads(simulate("--json", "--tflops", "1"))["plans"]
    for plan in plans:
        assert sum(plan["terms_s"].values()) == pytest.approx(plan["step_s"])
        assert (plan["classes"], plan["quantisation"]) == (1, 0.0)
    assert plans[0]["step_s"] <= min(plan["step_s"] for plan in plans) * 1.05


def test_conditions_make_steps_longer(simulate):
    def seconds(*arguments):
        return json.loads(simulate("--json", *arguments))["plans"][2]["step_s"]  # exchange de-duplicated

    even = seconds()
    assert seconds("--slow", "1:bandwidth=0.5") > 1.5 * even
    assert seconds("--slow", "1.0:compute=100") > even
    assert seconds("--skew", "2") > even
    assert seconds("--jitter", "0.5") > even


def test_a_trace_has_a_process_for_each_rank_and_a_thread_for_each_stream(simulate, tmp_path):
    path = tmp_path / "step.json"
    simulate("--trace", str(path), "--rank", "1", "--rank", "6")
    events = json.loads(path.read_text())
    assert {event["pid"] for event in events} == {1, 6}
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"rank 1", "rank 6", "compute", "bulk over dc"} <= names
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in spans)
    assert {"forward 0", "backward 2", "dense sync"} <= {event["name"] for event in spans}


def test_there_may_be_more_datacentres_than_can_be_emulated(tmp_path, capsys):
    (tmp_path / "moe.yaml").write_text(MODEL.replace("experts: 16", "experts: 2000"))
    command = ["simulate", "--model", str(tmp_path / "moe.yaml"), "--dcs", "1000x2", "--wan", "1gbps", "--json"]
    assert main(command) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans[0]["spans"] == [1000, 2]


def test_places_that_are_slower_are_read():
    expected = Deviation(place=(3, 1), bandwidth_factor=0.5, slowdown=2.0)
    assert read_deviation("3.1:bandwidth=0.5,compute=2") == expected


@pytest.mark.parametrize("text", ["3", "3:", "x:bandwidth=1", "3:speed=2", "3:bandwidth=fast"])
def test_places_that_cannot_be_read_are_refused(text):
    with pytest.raises(ConfigError, match=f"--slow: got '{text}', wanted a place and what is slower there"):
        read_deviation(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--domains", "2"), "--domains: got '2', wanted a size for each of the levels dc (4) x gpu (2)"),
        (("--domains", "two,1"), "--domains: got 'two,1', wanted a size for each level, as in 2,1"),
        (("--jitter", "-1"), "--jitter: got -1, wanted at least 0"),
        (("--slow", "9:bandwidth=0.5"), "a deviation is at (9,), but the cluster dc (4) x gpu (2) has no such place"),
        (("--trace", "x.json", "--rank", "8"), "rank 8 is outside the cluster"),
    ],
)
def test_arguments_that_make_no_sense_are_named(tmp_path, capsys, arguments, message):
    (tmp_path / "moe.yaml").write_text(MODEL)
    command = ["simulate", "--model", str(tmp_path / "moe.yaml"), *CLUSTER, *arguments]
    assert main(command) == 2
    assert message in capsys.readouterr().err
