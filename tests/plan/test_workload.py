# SPDX-License-Identifier: Apache-2.0
import pytest

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.model_sizes import model_from_mapping
from ds_hybridep.plan.models import read_model_file, ready_names
from ds_hybridep.plan.workload import MoEModel, Workload

SHORT = {"layers": 4, "hidden": 64, "ffn": 256, "experts": 8, "top_k": 2}


def ready(name):
    return model_from_mapping(read_model_file(name), name)


@pytest.mark.parametrize(
    ("name", "billions", "expert_megabytes"),
    [
        ("Qwen3-30B-A3B", 30.5, 9.4),
        ("Mixtral-8x7B", 46.7, 352.3),
        ("DeepSeek-V3", 671.0, 88.1),
        ("gpt-oss-120b", 116.8, 49.8),
    ],
)
def test_ready_models_have_the_published_sizes(name, billions, expert_megabytes):
    model = ready(name)
    assert model.num_params / 1e9 == pytest.approx(billions, rel=2e-3)
    assert 2 * model.expert_params / 1e6 == pytest.approx(expert_megabytes, rel=5e-3)


def test_ready_models_are_found_whatever_the_case_and_all_can_be_read():
    assert "Qwen3-30B-A3B" in ready_names()
    assert ready("qwen3-30b-a3b").num_experts == 128
    assert [ready(name).name for name in ready_names()] == list(ready_names())


def test_short_form():
    model = model_from_mapping(SHORT, "toy")
    assert (model.name, model.num_moe_layers, model.expert_params) == ("toy", 4, 3 * 64 * 256)


def test_dense_layers_of_a_config_are_not_counted_as_moe():
    content = {**read_model_file("Qwen3-30B-A3B"), "mlp_only_layers": [0, 1], "num_hidden_layers": 6}
    assert model_from_mapping(content).num_moe_layers == 4
    assert model_from_mapping({**content, "decoder_sparse_step": 2, "mlp_only_layers": []}).num_moe_layers == 3


def test_row_and_expert_bytes():
    workload = Workload(model=model_from_mapping(SHORT), tokens_per_rank=128, param_bytes=4)
    assert (workload.row_bytes, workload.dispatch_extra_bytes, workload.return_extra_bytes) == (256, 16, 8)
    assert workload.expert_travel_bytes == 4 * 3 * 64 * 256
    adapters = Workload(model=workload.model, tokens_per_rank=1, trainable_expert_shapes=((100,),))
    assert adapters.expert_travel_bytes == 200


@pytest.mark.parametrize(("tokens", "factor", "capacity"), [(128, 1.25, 40), (1024, 1.25, 320), (4, 1.0, 4)])
def test_capacity_is_that_of_deepspeeds_gate(tokens, factor, capacity):
    workload = Workload(model=model_from_mapping(SHORT), tokens_per_rank=tokens, capacity_factor=factor)
    assert workload.expert_capacity == capacity


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "neither hidden_size .* nor hidden"),
        ({**SHORT, "expert": 8}, "expert is not a known key"),
        ({"hidden": 64, "layers": 4}, "no key ffn"),
        ({**SHORT, "layers": 1.5}, "layers is 1.5, but must be an integer"),
        ({**SHORT, "top_k": 9}, "top_k is 9, but there are only 8 experts"),
        ({**SHORT, "experts": 0}, "num_experts is 0, but must be at least 1"),
        ({"hidden_size": 64, "num_hidden_layers": 2}, "none of the keys num_local_experts"),
    ],
)
def test_wrong_models_are_refused(content, message):
    with pytest.raises(PlanError, match=message):
        model_from_mapping(content)


def test_zero_3_is_refused():
    with pytest.raises(PlanError, match="zero_stage is 3, but plans are made for stages 0, 1 and 2"):
        Workload(model=model_from_mapping(SHORT), tokens_per_rank=1, zero_stage=3)


def test_model_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(PlanError, match="--model: qwen4 is no ready model .* Ready are DeepSeek-V3, Mixtral"):
        read_model_file("qwen4")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PlanError, match="cannot be parsed"):
        read_model_file(str(tmp_path / "bad.json"))
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(PlanError, match="holds a list"):
        read_model_file(str(tmp_path / "list.yaml"))


def test_a_file_is_read_as_the_mapping_that_it_holds(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text("layers: 4\nhidden: 64\nffn: 256\nexperts: 8\ntop_k: 2\n")
    assert isinstance(model_from_mapping(read_model_file(str(path))), MoEModel)
