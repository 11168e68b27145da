# SPDX-License-Identifier: Apache-2.0
"""What older versions of DeepSpeed do not have is done here instead; and which versions are tested."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import nn

from ds_hybridep.deepspeed import adapters, autoep, supported
from ds_hybridep.errors import UnsupportedError

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
    found, logits = autoep._finalize_output(layer, output, output.reshape(-1, 4), output, hidden=4)
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


# -- what is said of versions -----------------------------------------------------------------------------------


def test_what_is_called_tested_is_what_is_tested() -> None:
    nox = runpy.run_path(str(REPOSITORY / "noxfile.py"))
    assert nox["DEEPSPEED"] == tuple(supported.TESTED_VERSIONS)
    assert nox["TRANSFORMERS"] == tuple(supported.TESTED_TRANSFORMERS)
    text = (REPOSITORY / "docs" / "versions.md").read_text(encoding="utf-8")
    assert f"| DeepSpeed | {nox['DEEPSPEED'][0]} to {nox['DEEPSPEED'][-1]} |" in text
    assert f"| {nox['TRANSFORMERS'][0]} to {nox['TRANSFORMERS'][-1]} |" in text
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    for name, tested in {"transformers": supported.TESTED_TRANSFORMERS, **supported.TESTED_HELPERS}.items():
        assert f"{tested[0]} to {tested[-1]} |" in text
        assert f'"{name}>={tested[0]},<={tested[-1]}"' in project
