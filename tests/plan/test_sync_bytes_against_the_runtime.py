# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes of parameters that several ranks hold, and of encoded experts, are those that the runtime counts."""

import math
from typing import Any

import pytest
from marks import slow
from parity import Case, levels_of
from plan_cases import SETTINGS
from process_pool import ProcessPool
from toy_model import ToyConfig
from training import engine_of, train

import ds_hybridep
from ds_hybridep.config import parse_config
from ds_hybridep.config_codecs import IDENTITY, PATCH, CodecConfig
from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.geometry.packets import PatchSizes, packets_of
from ds_hybridep.plan import rates as priced
from ds_hybridep.plan.plan import ExpertGroup, LevelCodecs, Plan
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.stream_model import predict
from ds_hybridep.plan.workload import MoEModel, Workload
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.simulator import simulate

pytestmark = pytest.mark.dist

CLUSTER = Cluster((Level("dc", 2), Level("gpu", 2)))
# Matrices large enough for the codecs of matrices, and an embedding that is cut between ranks.  Experts have no bias:
# neighbouring vectors are one part, and in which order experts' gradients come under ZeRO 2 is not in the plan.
TOY = {"hidden": 32, "ffn": 64, "vocab": 80, "routing": "by_token", "expert": "swiglu"}
ACCUMULATION = 2


def is_expert(name: str) -> bool:
    return "deepspeed_experts" in name


def counted(case: Case, codecs: list[dict[str, Any]]) -> dict[str, Any]:
    """What this rank sent in its second optimizer step, and the shapes of what it trains, in the model's order.

    In the first one everything is gathered as it is.
    """
    levels = case.ds_config(with_block=True)["hybridep"]["levels"]
    block = {"levels": [{**level, **own} for level, own in zip(levels, codecs, strict=True)]}
    with engine_of(case, with_block=True, hybridep=block) as engine:
        train(engine, case, 0, 1)
        first = sent_so_far(engine)
        train(engine, case, 1, 1)
        second = sent_so_far(engine)
        named = [(name, tuple(parameter.shape)) for name, parameter in engine.module.named_parameters()]
        return {
            "sent": [
                {kind: count - before[kind] for kind, count in after.items()}
                for before, after in zip(first, second, strict=True)
            ],
            "dense": tuple(shape for name, shape in named if not is_expert(name)),
            "expert": tuple(shape for name, shape in named if "blocks.0" in name and "deepspeed_experts.0" in name),
        }


def sent_so_far(engine: Any) -> list[dict[str, int]]:
    """By level and kind, when nothing is under way any more."""
    engine.__dict__["_hybridep_attachment"].runtime.migration.finish()
    return [level["sent_bytes"] for level in ds_hybridep.stats(engine)["levels"]]


def cost_of(codec: CodecConfig, bits: float) -> CodecCost:
    if codec == IDENTITY:
        return priced.IDENTITY
    if codec == PATCH:
        return CodecCost("patch", packets=PatchSizes(bits), is_lossy=False)
    return CodecCost(codec.type, packets=packets_of(codec.model_dump()))


def plan_for(case: Case, codecs: list[dict[str, Any]], bits: float) -> Plan:
    levels = case.ds_config(with_block=True)["hybridep"]["levels"]
    block = {"levels": [{**level, **own} for level, own in zip(levels, codecs, strict=True)]}
    config = parse_config(block, world_size=4).with_dtype(4 if case.dtype == "fp32" else 2)
    costs = [[cost_of(codec, bits) for codec in level.all_codecs] for level in config.levels]
    return Plan(
        spans=ExpertGroup(case.toy.ep_size).spans(CLUSTER),
        domain_sizes=tuple(size for _, _, size in case.levels),
        codecs=tuple(
            LevelCodecs(weight, gradient, dense_weight=dense_weight, dense_gradient=dense_gradient)
            for weight, gradient, dense_weight, dense_gradient in costs
        ),
    )


def workload_of(case: Case, record: dict[str, Any]) -> Workload:
    toy = case.toy
    model = MoEModel(
        name="toy", hidden=toy.hidden, num_experts=toy.num_experts, top_k=toy.k, num_moe_layers=toy.num_layers,
        expert_shapes=record["expert"], dense_shapes=record["dense"], active_dense_params=1,
    )  # fmt: skip
    return Workload(
        model=model, tokens_per_rank=8, micro_steps=case.accumulation, param_bytes=4 if case.dtype == "fp32" else 2,
        zero_stage=case.zero_stage,
    )  # fmt: skip


def predicted(plan: Plan, workload: Workload) -> list[dict[str, float]]:
    """Bytes by level and kind over all uplinks together, which the simulator sends too."""
    rates = Rates(flops_per_s=1.0)
    scenario = Scenario(cluster=CLUSTER, plan=plan, workload=workload, rates=rates)
    simulated = simulate(scenario).sent_bytes
    result = []
    for level, kinds in enumerate(predict(CLUSTER, plan, workload, rates).uplink_bytes):
        totals = {kind: count * math.prod(CLUSTER.sizes[: level + 1]) for kind, count in kinds.items()}
        for kind, count in totals.items():
            assert simulated[level].get(kind, 0.0) == pytest.approx(count, rel=1e-9), kind
        result.append({**totals, "dense": totals["dense_sync"] + totals["expert_sync"]})
    return result


def assert_bytes(records: list[dict[str, Any]], case: Case, codecs: list[dict[str, Any]]) -> None:
    plan, workload = plan_for(case, codecs, bits=1.0), workload_of(case, records[0])
    expected = predicted(plan, workload)
    for level in range(2):
        for kind in ("dense", "expert_gradients", "expert_weights"):
            found = sum(record["sent"][level][kind] for record in records)
            assert found == pytest.approx(expected[level][kind], rel=1e-9), kind


SETS: dict[str, list[dict[str, Any]]] = {
    "exact": [{}, {}],
    "recommended": [{"codecs": "recommended"}, {}],
    "inside": [{}, {"weight_codec": "int8", "gradient_codec": "int4"}],
    "both": [
        {"weight_codec": {"type": "low_rank", "rank": 2}, "gradient_codec": "int8", "dense_gradient_codec": "int2"},
        {"weight_codec": "int8", "gradient_codec": {"type": "low_rank", "ratio": 20}},
    ],
}


OFTEN = {(1, 2, "recommended"), (2, 2, "inside"), (1, 2, "exact")}
OFTEN |= {(0, 2, "both"), (1, 4, "both"), (2, 4, "both")}
CASES = [
    (stage, ep_size, name)
    if (stage, ep_size, name) in OFTEN
    else pytest.param(stage, ep_size, name, marks=pytest.mark.slow)
    for stage in (0, 1, 2)
    for ep_size in (4, 2)
    for name in SETS
]


@pytest.mark.parametrize(("stage", "ep_size", "codecs"), CASES)
def test_every_byte_of_sums_and_gathers_is_predicted(pool4: ProcessPool, stage: int, ep_size: int, codecs: str):
    toy, sizes = ToyConfig(ep_size=ep_size, **TOY), (2, 1) if ep_size == 4 else (1, 2)
    case = Case(
        levels=levels_of((2, 2), sizes), toy=toy, zero_stage=stage, accumulation=ACCUMULATION,
        dense_sync="hierarchical",
    )  # fmt: skip
    records = pool4.run(counted, case=case, codecs=SETS[codecs])
    assert_bytes(records, case, SETS[codecs])


@pytest.mark.parametrize("first", [first if first % 2 else slow(first) for first in range(0, len(SETTINGS), 3)])
def test_every_codec_of_fixed_size_has_the_bytes_predicted(pool4: ProcessPool, first: int):
    """Three at a time: of weights and of gradients over the slow level, and of gradients inside."""
    weight, gradient, inside = (SETTINGS[(first + index) % len(SETTINGS)] for index in range(3))
    toy = ToyConfig(ep_size=2, **TOY)
    case = Case(levels=levels_of((2, 2), (1, 2)), toy=toy, zero_stage=1, dense_sync="hierarchical")
    codecs = [{"weight_codec": weight, "gradient_codec": gradient}, {"gradient_codec": inside}]
    records = pool4.run(counted, case=case, codecs=codecs)
    assert_bytes(records, case, codecs)


@pytest.mark.parametrize(("stage", "ep_size"), [slow(1, 4), (1, 2), (2, 4), slow(2, 2)])
def test_bytes_of_patches_are_predicted_by_their_bits(pool4: ProcessPool, stage: int, ep_size: int):
    """How many bits a weight takes is taken from the slow link; all else follows, within 5%."""
    codecs, toy = [{"weight_codec": "patch"}, {}], ToyConfig(ep_size=ep_size, **TOY)
    case = Case(levels=levels_of((2, 2), (1, 2)), toy=toy, zero_stage=stage, dtype="bf16", dense_sync="hierarchical")
    records = pool4.run(counted, case=case, codecs=codecs)
    sent = [sum(record["sent"][level]["dense"] for record in records) for level in range(2)]
    workload = workload_of(case, records[0])
    none, one = (predicted(plan_for(case, codecs, bits), workload) for bits in (0.0, 1.0))
    bits = (sent[0] - none[0]["dense"]) / (one[0]["dense"] - none[0]["dense"])
    assert 0 < bits < 16
    expected = predicted(plan_for(case, codecs, bits), workload)
    assert sent[1] == pytest.approx(expected[1]["dense"], rel=0.05)
