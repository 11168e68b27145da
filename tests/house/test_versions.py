# SPDX-License-Identifier: Apache-2.0
"""What older versions of DeepSpeed do not have is done here instead; and the table that says which were tested."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import versions
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import nn

from ds_hybridep.errors import UnsupportedError
from ds_hybridep.integration import adapters, autoep, supported

REPOSITORY = Path(__file__).resolve().parents[2]

# -- what older versions do not have ----------------------------------------------------------------------------


def layer_with_a_tail(shape: str, has_shared: bool, has_gate: bool) -> Any:
    torch.manual_seed(0)
    return SimpleNamespace(
        moe_output_shape=shape,
        shared_experts=nn.Linear(4, 4) if has_shared else None,
        shared_experts_gate=nn.Linear(4, 1) if has_gate else None,
        return_router_logits=False,
        _cached_router_logits=None,
    )


@pytest.mark.skipif(not hasattr(AutoEPMoELayer, "_finalize_output"), reason="DeepSpeed before 0.19.7")
@pytest.mark.parametrize("shape", ["flat", "batched"])
@pytest.mark.parametrize(("has_shared", "has_gate"), [(False, False), (True, False), (True, True)])
def test_the_tail_for_older_versions_is_that_of_newer_ones(shape: str, has_shared: bool, has_gate: bool) -> None:
    layer = layer_with_a_tail(shape, has_shared, has_gate)
    hidden_states, output = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    arguments = output, hidden_states.reshape(-1, 4), hidden_states, 4
    expected = AutoEPMoELayer._finalize_output(layer, *arguments)
    found = autoep._finalize_output(layer, *arguments)
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_the_tail_for_older_versions_gives_router_logits_once() -> None:
    layer = layer_with_a_tail("batched", has_shared=False, has_gate=False)
    layer.return_router_logits, layer._cached_router_logits = True, torch.ones(6, 2)
    output = torch.randn(2, 3, 4)
    found, logits = autoep._finalize_output(layer, output, output.reshape(-1, 4), output, 4)
    assert torch.equal(found, output)
    assert torch.equal(logits, torch.ones(6, 2))
    assert layer._cached_router_logits is None


def test_what_older_layers_lack_is_not_asked_for_or_is_refused() -> None:
    autoep._refuse_unsupported("mlp", SimpleNamespace(folding_group_handles=None, combine_impl="weighted_sum"))
    assert autoep.experts_of(SimpleNamespace(num_local_experts=3), 2) == [6, 7, 8]
    with pytest.raises(UnsupportedError, match=r"model\.mlp: adapters of experts need DeepSpeed 0\.19\.7 or newer"):
        adapters.put_on(nn.Module(), {"model.mlp": []}, None)
    adapters.put_on(nn.Module(), {}, None)


# -- what newer versions of transformers have changed -------------------------------------------------------------


class RegistryOfModels(dict[str, dict[str, Any]]):
    """As in transformers 5.23 and newer: asked and written by model, kept by the name of its class."""

    def __setitem__(self, model: Any, outputs: Any) -> None:
        super().__setitem__(str(type(model)), outputs)

    def get(self, model: Any) -> Any:
        return super().get(str(type(model))) or {}


def test_autoep_sees_the_registry_of_transformers_as_the_dict_that_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorded = nn.Linear(1, 1), {"router_logits": "of the model"}
    registry = RegistryOfModels()
    registry[model] = recorded
    outputs = SimpleNamespace(_CAN_RECORD_REGISTRY=registry)
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", outputs)
    name, missing = str(type(model)), object()
    with autoep.plain_registry():
        seen = outputs._CAN_RECORD_REGISTRY
        assert isinstance(seen, dict)
        # What DeepSpeed does in auto_ep_presets/base.py, and transformers while it installs hooks for that.
        assert seen.get("another class", missing) is missing
        assert (seen.get(name, missing), seen.get(model), seen.get(nn.Identity())) == (recorded, recorded, {})
        seen.update({name: {"router_logits": "of AutoEP's layer"}})
        assert seen.get(model) == {"router_logits": "of AutoEP's layer"}
        seen[name] = recorded
    assert outputs._CAN_RECORD_REGISTRY is registry
    assert dict(registry) == {name: recorded}


# -- the table --------------------------------------------------------------------------------------------------


def test_what_is_called_tested_is_in_the_table_and_passed() -> None:
    assert sorted(versions.DEEPSPEED) == sorted(supported.TESTED_VERSIONS)
    assert versions.TRANSFORMERS == supported.TESTED_TRANSFORMERS
    text = versions.TABLE.read_text(encoding="utf-8")
    assert text.startswith(versions.ABOUT)
    assert f"| DeepSpeed | {supported.TESTED_VERSIONS[0]} to {supported.TESTED_VERSIONS[-1]} |" in text
    assert f"| {supported.TESTED_TRANSFORMERS[0]} to {supported.TESTED_TRANSFORMERS[-1]} |" in text
    rows = re.findall(r"^\| (\d\S+) \| \S+ \| (\S+) \|(.+)\|$", text, re.MULTILINE)
    assert {version for version, *_ in rows} == set(supported.TESTED_VERSIONS)
    assert {version for _, version, _ in rows} == set(supported.TESTED_TRANSFORMERS)
    assert all(cells.count(" passed ") == len(versions.COLUMNS) for *_, cells in rows)


RESULTS = """
<testsuites><testsuite>
  <testcase classname="tests.test_parity" name="test_one"/>
  <testcase classname="tests.test_parity" name="test_two"><failure message="x">
E       process_pool.RemoteError: parity:run failed on 4 ranks
E           AttributeError: 'Engine' object has no attribute 'step'
E           AssertionError: 1 of 2 cases failed
  </failure></testcase>
  <testcase classname="tests.test_autoep" name="test_checkpoints[1]">
    <failure message="">E   ds_hybridep.errors.UnsupportedError: DeepSpeed 0.19.3 is too old</failure>
  </testcase>
  <testcase classname="tests.test_autoep" name="test_bf16"><skipped message="needs transformers"/></testcase>
</testsuite></testsuites>
"""


def test_a_row_has_the_worst_result_of_each_column_and_its_reason() -> None:
    tests = [versions.result_of(case) for case in ElementTree.fromstring(RESULTS).iter("testcase")]
    row = versions.Row("0.19.3", "3.11", "5.3.0", tests)
    assert [row.cell(column) for column in versions.COLUMNS] == ["failed", "not run", "not run", "n/a", "refused"]
    assert [note.split(": ", 1) for note in row.notes()] == [
        ["DeepSpeed 0.19.3, transformers 5.3.0", "AttributeError: 'Engine' object has no attribute 'step'"],
        ["DeepSpeed 0.19.3, transformers 5.3.0", "ds_hybridep.errors.UnsupportedError: DeepSpeed 0.19.3 is too old"],
        ["DeepSpeed 0.19.3, transformers 5.3.0", "needs transformers"],
    ]
