# SPDX-License-Identifier: Apache-2.0
"""What was tested is accepted, whatever else is switched on is refused by name."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ds_hybridep.deepspeed import autoep, supported
from ds_hybridep.errors import ConfigError, UnsupportedError

REPOSITORY = Path(__file__).resolve().parents[2]
NEWER = ("0.19.9", "0.20.0", "1.0.0+cu130")


@pytest.mark.parametrize("version", [*supported.TESTED_VERSIONS, "0.19.8+unknown"])
def test_versions_that_were_tested_are_taken_without_a_word(version: str) -> None:
    with mock.patch.object(supported, "warn_once") as warn:
        supported.check_version(version)
    warn.assert_not_called()


@pytest.mark.parametrize("version", NEWER)
def test_an_untested_version_is_warned_of_where_the_table_fits(version: str) -> None:
    with mock.patch.object(supported, "warn_once") as warn:
        supported.check_version(version)
    ((message,), _) = warn.call_args
    assert message.startswith(f"DeepSpeed {version} was not tested; hybridep was with 0.19.4 to 0.19.8")


@pytest.mark.parametrize("version", NEWER)
def test_an_untested_version_is_refused_where_something_is_missing(version: str) -> None:
    with mock.patch.object(supported, "misfits", return_value=["deepspeed.moe.sharded_moe:MOELayer.forward"]):
        with pytest.raises(
            UnsupportedError,
            match=rf"DeepSpeed {re.escape(version)} has no deepspeed.moe.sharded_moe:MOELayer.forward",
        ):
            supported.check_version(version)


@pytest.mark.parametrize("version", ["0.19.3", "0.18.9", "0.9.0"])
def test_an_older_version_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"DeepSpeed {version} is too old .* tested with 0.19.4 to 0.19.8"):
        supported.check_version(version)


def test_the_project_asks_for_the_versions_that_are_taken() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'"deepspeed>=([0-9.]+)"', project)[1] == supported.TESTED_VERSIONS[0]
    assert re.search(r'"transformers==([^"]+)"', project)[1] in supported.TESTED_TRANSFORMERS


@pytest.mark.parametrize(
    ("ds_config", "zero", "found"),
    [
        ({"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "steps_per_print": 10}, {"stage": 2}, []),
        ({"flops_profiler": {"enabled": True}, "wall_clock_breakdown": True}, {"overlap_comm": True}, []),
        ({"gradient_clipping": 1.0, "prescale_gradients": True, "communication_data_type": "bf16"}, {}, []),
        ({"notes": "ours", "autotuning": {"enabled": False}, "compile": {}, "disable_allgather": False}, {}, []),
        ({"compile": {"deepcompile": True}}, {}, ["compile"]),
        ({"data_efficiency": {"enabled": True}}, {}, ["data_efficiency"]),
        ({"hybrid_engine": {"enabled": True}}, {}, ["hybrid_engine"]),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {}, []),
        ({"weight_quantization": {"quantized_initialization": {"num_bits": 8}}}, {}, ["weight_quantization"]),
        ({"disable_allgather": True}, {}, ["disable_allgather"]),
        ({"gradient_allreduce_op": "sum"}, {}, ["gradient_allreduce_op"]),
        ({}, {"stage": 1, "offload_optimizer": {"device": "none"}}, []),
        ({}, {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False, "fast_init": True}}, []),
        (
            {},
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}},
            ["zero_optimization.offload_optimizer.device = 'nvme'"],
        ),
        (
            {},
            {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5, "super_offload": True}},
            [f"zero_optimization.offload_optimizer.{one}" for one in ("ratio = 0.5", "super_offload = True")],
        ),
        ({}, {"stage": 3, "offload_param": {"device": "cpu"}}, ["zero_optimization.offload_param"]),
        ({}, {"stage": 2, "zenflow": {"update_interval": 2}}, ["zero_optimization.zenflow"]),
        ({}, {"stage": 3, "zero_quantized_weights": True}, ["zero_optimization.zero_quantized_weights"]),
        ({}, {"stage": 3, "zero_hpz_partition_size": 2}, ["zero_optimization.zero_hpz_partition_size"]),
        ({}, {"stage": 3, "stage3_max_live_parameters": 1000}, []),
        ({}, {"stage": 2, "parameter_alignment": True}, ["zero_optimization.parameter_alignment"]),
    ],
    ids=str,
)
def test_what_is_on_and_was_not_tested_is_named(
    ds_config: dict[str, Any], zero: dict[str, Any], found: list[str]
) -> None:
    assert supported.untested_settings(ds_config, DeepSpeedZeroConfig(**zero)) == found


def test_an_optimizer_that_was_not_tested_is_warned_of_and_a_wrapper_is_refused() -> None:
    class Unknown(supported.torch.optim.SGD):
        pass

    class ZenFlowZeroOptimizer:
        __module__ = "deepspeed.runtime.zenflow.zenflow_stage_1_and_2"

    parameters = [supported.nn.Parameter(supported.torch.ones(1))]
    for basic, num_warnings in ((supported.torch.optim.SGD, 0), (Unknown, 1)):
        optimizer = basic(parameters, lr=0.1)
        with mock.patch.object(supported, "warn_once") as warn:
            supported.check_optimizer(mock.Mock(optimizer=optimizer, basic_optimizer=optimizer))
        assert warn.call_count == num_warnings
    with pytest.raises(
        UnsupportedError, match='ZenFlowZeroOptimizer was not tested together with the "hybridep" block'
    ):
        supported.check_optimizer(mock.Mock(optimizer=ZenFlowZeroOptimizer(), basic_optimizer=optimizer))


# -- AutoEP -----------------------------------------------------------------------------------------------------

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
def test_features_of_autoep_that_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        autoep.spec_of("model.layers.1.mlp", SimpleNamespace(**PLAIN | settings))
    assert str(caught.value).startswith("model.layers.1.mlp: ")
    assert f"{text}" in str(caught.value)
    assert '"hybridep": {"enabled": false}' in str(caught.value)


def test_a_layer_without_its_group() -> None:
    with pytest.raises(ConfigError, match="model.layers.1.mlp: .* no expert-parallel group yet"):
        autoep.spec_of("model.layers.1.mlp", SimpleNamespace(**PLAIN))


def test_a_transformers_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.2.0"))
    with pytest.raises(UnsupportedError, match=r"transformers 5\.2\.0 is too old .* tested with 5\.3\.0 to "):
        supported.check_hugging_face()


@pytest.mark.parametrize("version", [*supported.TESTED_TRANSFORMERS, "5.99.0"])
def test_a_transformers_that_was_not_tested_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
    supported.check_hugging_face()
    assert (f"transformers {version} was not tested" in caplog.text) == (version == "5.99.0")


@pytest.mark.parametrize(
    ("name", "version", "is_told"),
    [("peft", "0.17.1", True), ("peft", "0.18.1", False), ("peft", "0.99.0", True), ("accelerate", "1.10.0", True)],
)
def test_a_peft_or_accelerate_that_was_not_tested_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, version: str, is_told: bool
) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=version))
    supported.check_hugging_face()
    assert (f"{name} {version} was not tested with hybridep" in caplog.text) == is_told
