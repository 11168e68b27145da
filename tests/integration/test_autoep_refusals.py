# SPDX-License-Identifier: Apache-2.0
"""What is refused of DeepSpeed's AutoEP, and which versions of transformers."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hybridep.errors import ConfigError, UnsupportedError
from ds_hybridep.integration import autoep as autoep_layer
from ds_hybridep.integration import supported

PLAIN = {
    "folding_group_handles": None,
    "comm_backend": "comm",
    "combine_impl": "weighted_sum",
    "async_split_plan": False,
    "ep_group": None,
}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"folding_group_handles": SimpleNamespace(spec=SimpleNamespace(tp_size=2))}, "tensor_parallel.autotp_size"),
        ({"comm_backend": "deepep"}, 'expert_parallel.comm_backend "deepep"'),
        ({"combine_impl": "legacy_bmm"}, 'expert_parallel.combine_impl "legacy_bmm"'),
        ({"async_split_plan": True}, "expert_parallel.async_split_plan"),
    ],
    ids=["folded tensor parallelism", "deepep", "combine", "split plan"],
)
def test_features_that_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        autoep_layer.spec_of("model.layers.1.mlp", SimpleNamespace(**PLAIN | settings))
    assert str(caught.value).startswith("model.layers.1.mlp: ")
    assert f"{text}" in str(caught.value)
    assert '"hybridep": {"enabled": false}' in str(caught.value)


def test_a_layer_without_its_group() -> None:
    with pytest.raises(ConfigError, match="model.layers.1.mlp: .* no expert-parallel group yet"):
        autoep_layer.spec_of("model.layers.1.mlp", SimpleNamespace(**PLAIN))


def test_a_transformers_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.2.0"))
    with pytest.raises(UnsupportedError, match=r"transformers 5\.2\.0 is too old .* tested with 5\.3\.0 to "):
        supported.check_transformers()


@pytest.mark.parametrize("version", [*supported.TESTED_TRANSFORMERS, "5.99.0"])
def test_a_transformers_that_was_not_tested_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
    supported.check_transformers()
    assert (f"transformers {version} was not tested" in caplog.text) == (version == "5.99.0")


def test_the_extra_installs_a_tested_version() -> None:
    setup = (Path(__file__).resolve().parents[2] / "setup.py").read_text()
    assert re.search(r'"transformers==([^"]+)"', setup)[1] in supported.TESTED_TRANSFORMERS
