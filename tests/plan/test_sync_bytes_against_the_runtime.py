# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes of parameters that several ranks hold, and of encoded experts, are those that the runtime counts."""

import math
from typing import Any

import pytest
from parity import Case, levels_of
from process_pool import ProcessPool
from test_engine import engine_of, train
from test_packets import SETTINGS
from toy_model import ToyConfig

import ds_hybridep
from ds_hybridep.config import parse_config
from ds_hybridep.config_codecs import IDENTITY, PATCH, CodecConfig
from ds_hybridep.plan import layout as plan
from ds_hybridep.plan.cluster import Cluster, Level
from ds_hybridep.plan.layout import CodecCost, ExpertGroup, Layout, LevelCodecs, Rates
from ds_hybridep.plan.packets import Patches, packets_of
from ds_hybridep.plan.stream_model import StepPrediction, predict
from ds_hybridep.plan.workload import MoEModel, Workload

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

CLUSTER = Cluster((Level("dc", 2), Level("gpu", 2)))
# Matrices large enough for the codecs of matrices, and an embedding that is cut between ranks.  Experts without biases:
# neighbouring vectors are one part, and in which order experts' gradients come under ZeRO 2 is not in the plan.
TOY = {"hidden": 32, "ffn": 64, "vocab": 80, "routing": "by_token", "expert": "swiglu"}
ACCUMULATION = 2


def is_expert(name: str) -> bool:
    return "deepspeed_experts" in name


def counted(case: Case, codecs: list[dict[str, Any]], steps: int = 1) -> dict[str, Any]:
    """This rank's counters after some optimizer steps, and the shapes of what it trains, in the model's order."""
    levels = case.ds_config(with_block=True)["hybridep"]["levels"]
    block = {"levels": [{**level, **own} for level, own in zip(levels, codecs, strict=True)]}
    with engine_of(case, with_block=True, hybridep=block) as engine:
        train(engine, case, 0, steps)
        ds_hybridep.refresh(engine)  # returns when nothing is under way any more
        named = [(name, tuple(parameter.shape)) for name, parameter in engine.module.named_parameters()]
        return {
            "sent": [level["sent_bytes"] for level in ds_hybridep.stats(engine)["levels"]],
            "dense": tuple(shape for name, shape in named if not is_expert(name)),
            "expert": tuple(shape for name, shape in named if "blocks.0" in name and "deepspeed_experts.0" in name),
        }


def totals(records: list[dict[str, Any]], kind: str) -> list[int]:
    return [sum(record["sent"][level][kind] for record in records) for level in range(2)]


def cost_of(codec: CodecConfig, bits: float) -> CodecCost:
    if codec == IDENTITY:
        return plan.IDENTITY
    if codec == PATCH:
        return CodecCost("patch", packets=Patches(bits), is_lossy=False)
    return CodecCost(codec.type, packets=packets_of(codec.model_dump()))


def predicted(
    case: Case, codecs: list[dict[str, Any]], record: dict[str, Any], bits: float = 1.0
) -> tuple[StepPrediction, list[int]]:
    """A step of the case, and the number of uplinks of each level."""
    levels = case.ds_config(with_block=True)["hybridep"]["levels"]
    block = {"levels": [{**level, **own} for level, own in zip(levels, codecs, strict=True)]}
    param_bytes = 4 if case.dtype == "fp32" else 2
    config = parse_config(block, world_size=4).with_dtype(param_bytes)
    sets = [LevelCodecs(*(cost_of(one, bits) for one in level.all_codecs[:2]), plan.IDENTITY,
                        *(cost_of(one, bits) for one in level.all_codecs[2:])) for level in config.levels]  # fmt: skip
    toy = case.toy
    count = lambda shapes: sum(map(math.prod, shapes))  # noqa: E731
    model = MoEModel(
        name="toy", hidden=toy.hidden, num_experts=toy.num_experts, top_k=toy.k, num_moe_layers=toy.num_layers,
        expert_params=count(record["expert"]), dense_params=count(record["dense"]), active_dense_params=1,
        expert_shapes=record["expert"], dense_shapes=record["dense"],
    )  # fmt: skip
    workload = Workload(
        model=model, tokens_per_rank=8, micro_steps=case.accumulation, param_bytes=param_bytes,
        zero_stage=case.zero_stage,
    )  # fmt: skip
    layout = Layout(
        spans=ExpertGroup(toy.ep_size).spans(CLUSTER),
        domain_sizes=tuple(size for _, _, size in case.levels),
        codecs=tuple(sets),
    )
    uplinks = [math.prod(CLUSTER.sizes[: level + 1]) for level in range(2)]
    return predict(CLUSTER, layout, workload, Rates(flops_per_s=1.0)), uplinks


def assert_bytes(records: list[dict[str, Any]], prediction: StepPrediction, uplinks: list[int]) -> None:
    for level, kinds in enumerate(prediction.uplink_bytes):
        found = {kind: totals(records, kind)[level] for kind in ("dense", "expert_gradients")}
        assert found["dense"] == pytest.approx((kinds["dense_sync"] + kinds["expert_sync"]) * uplinks[level], rel=1e-9)
        assert found["expert_gradients"] == pytest.approx(kinds["expert_gradients"] * uplinks[level], rel=1e-9)


SETS: dict[str, list[dict[str, Any]]] = {
    "exact": [{}, {}],
    "recommended": [{"codecs": "recommended"}, {}],
    "inside": [{}, {"weight_codec": "int8", "gradient_codec": "int4"}],
    "both": [
        {"weight_codec": {"type": "low_rank", "rank": 2}, "gradient_codec": "int8", "dense_gradient_codec": "int2"},
        {"weight_codec": "int8", "gradient_codec": {"type": "low_rank", "ratio": 20}},
    ],
}


@pytest.mark.parametrize("codecs", SETS)
@pytest.mark.parametrize("ep_size", [4, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_byte_of_sums_and_gathers_is_predicted(pool4: ProcessPool, stage: int, ep_size: int, codecs: str):
    toy, sizes = ToyConfig(ep_size=ep_size, **TOY), (2, 1) if ep_size == 4 else (1, 2)
    case = Case(
        levels=levels_of((2, 2), sizes), toy=toy, zero_stage=stage, accumulation=ACCUMULATION,
        dense_sync="hierarchical",
    )  # fmt: skip
    records = pool4.run(counted, case=case, codecs=SETS[codecs])
    assert_bytes(records, *predicted(case, SETS[codecs], records[0]))


FIXED = [spec for spec in SETTINGS if "first_steps" not in spec]  # the plan is of later steps


@pytest.mark.parametrize("first", range(0, len(FIXED), 3))
def test_every_codec_of_fixed_size_has_the_bytes_predicted(pool4: ProcessPool, first: int):
    """Three at a time: of weights and of gradients over the slow level, and of gradients inside."""
    weight, gradient, inside = (FIXED[(first + index) % len(FIXED)] for index in range(3))
    toy = ToyConfig(ep_size=2, **TOY)
    case = Case(levels=levels_of((2, 2), (1, 2)), toy=toy, zero_stage=1, dense_sync="hierarchical")
    codecs = [{"weight_codec": weight, "gradient_codec": gradient}, {"gradient_codec": inside}]
    records = pool4.run(counted, case=case, codecs=codecs)
    assert_bytes(records, *predicted(case, codecs, records[0]))


@pytest.mark.parametrize("stage", [1, 2])
def test_bytes_of_patches_are_predicted_by_their_bits(pool4: ProcessPool, stage: int):
    """How many bits a weight takes is taken from the slow link; all else follows, within 5%."""
    codecs = [{"weight_codec": "patch"}, {}]
    for ep_size, sizes in ((4, (1, 2)), (2, (1, 2))):
        toy = ToyConfig(ep_size=ep_size, **TOY)
        case = Case(
            levels=levels_of((2, 2), sizes), toy=toy, zero_stage=stage, dtype="bf16", dense_sync="hierarchical"
        )
        records = pool4.run(counted, case=case, codecs=codecs)
        sent = totals(records, "dense")

        def bytes_at(bits: float, level: int, case: Case = case, record: dict[str, Any] = records[0]) -> float:
            prediction, uplinks = predicted(case, codecs, record, bits)
            kinds = prediction.uplink_bytes[level]
            return (kinds["dense_sync"] + kinds["expert_sync"]) * uplinks[level]

        slope = bytes_at(1.0, 0) - bytes_at(0.0, 0)
        bits = (sent[0] - bytes_at(0.0, 0)) / slope
        assert 0 < bits < 16
        assert sent[1] == pytest.approx(bytes_at(bits, 1), rel=0.05)
