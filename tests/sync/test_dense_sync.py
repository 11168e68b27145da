# SPDX-License-Identifier: Apache-2.0
"""Training with "dense_sync": "hierarchical": what DeepSpeed gives, bit-equal on all ranks, bytes by a closed form."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.moe.utils import is_moe_param
from encoded import world2
from marks import slow
from parity import BF16_LOSS_TOLERANCE, Case, assert_parity, levels_of, use_expert_groups_of
from process_pool import ProcessPool
from toy_model import ToyConfig, build_model
from training import block_of, engine_of, error_of, train

import ds_hybridep

pytestmark = pytest.mark.dist

BY_TOKEN = ToyConfig(routing="by_token")
STEPS = 3


def world4(*domain_sizes: int, dense_sync: str | None = "hierarchical", **options: Any) -> Case:
    return Case(levels=levels_of((2, 2), domain_sizes), dense_sync=dense_sync, **options)


def world8(*domain_sizes: int, ep_size: int = 8, **options: Any) -> Case:
    toy = ToyConfig(ep_size=ep_size)
    return Case(levels=levels_of((2, 2, 2), domain_sizes), toy=toy, dense_sync="hierarchical", **options)


# -- parity -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parity_of_what_scales_gradients(pool4: ProcessPool) -> None:
    """Other cases are in tests/integration/test_parity.py."""
    cases = [
        world4(1, 2, zero_stage=0, gradient_clipping=0.5),
        world4(2, 2, zero_stage=1, gradient_clipping=0.5, accumulation=2, optimizer="sgd"),
        world4(1, 1, zero_stage=2, gradient_clipping=0.5, optimizer="sgd"),
        # Experts of groups smaller than the world are summed over groups of their own.
        world4(1, 2, toy=ToyConfig(ep_size=2), zero_stage=2, accumulation=2, gradient_clipping=0.5),
        world4(2, 1, toy=ToyConfig(num_layers=3, checkpointing="nonreentrant"), zero_stage=2, accumulation=2),
        world4(2, 1, zero_stage=1, accumulation=2, dtype="bf16", toy=BY_TOKEN),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
def test_parity_with_three_levels(pool8: ProcessPool) -> None:
    cases = [world8(2, 1, 1, zero_stage=0), world8(2, 2, 1, zero_stage=1), world8(1, 2, 1, zero_stage=2)]
    assert_parity(pool8, cases)


# -- bits and bytes ---------------------------------------------------------------------------------------------


def dense_digest(engine: deepspeed.DeepSpeedEngine) -> str:
    """Of all parameters but the experts', bit by bit."""
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        if not is_moe_param(parameter):
            digest.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train_and_look(case: Case, config: dict[str, Any]) -> dict[str, Any]:
    """Digest after every step, bytes per step of dense traffic and what they should be."""
    with engine_of(case, with_block=True, **config) as engine:
        digests = []
        for step in range(STEPS):
            train(engine, case, step, 1)
            digests.append(dense_digest(engine))
        levels = ds_hybridep.stats(engine)["levels"]
        dense = [p for p in engine.module.parameters() if not is_moe_param(p)]
        groups = getattr(engine.optimizer, "bit16_groups_flat", None)
        flat = None
        if groups is not None:
            flat = [group.numel() for i, group in enumerate(groups) if not engine.optimizer.is_moe_param_group[i]]
        return {
            "digests": digests,
            "sent": [level["sent_bytes"]["dense"] for level in levels],
            "received": [level["received_bytes"]["dense"] for level in levels],
            "num_elements": sum(p.numel() for p in dense),
            "flat": flat,
        }


@pytest.mark.parametrize("zero_stage", [0, slow(1), 2])
def test_dense_parameters_stay_bit_equal_and_bytes_are_those_of_the_closed_form(
    pool4: ProcessPool, zero_stage: int
) -> None:
    """Over the slow level each DC sends what the other owns: half a vector of sums and half a vector of parameters.

    ZeRO 2 sums in every micro-step, but over the slow level only once per optimizer step.
    """
    case = world4(2, 1, zero_stage=zero_stage, accumulation=2)
    found = pool4.run(train_and_look, case=case, config={})
    assert len({tuple(one["digests"]) for one in found}) == 1
    assert len(set(found[0]["digests"])) == STEPS  # training moved them
    num_elements = found[0]["num_elements"]
    sums = STEPS * (case.accumulation if zero_stage == 2 else 1)
    # ZeRO pads what it gathers to a multiple of the ranks; a sum has no padding.
    gathered = num_elements if zero_stage == 0 else sum(found[0]["flat"])
    assert sum(one["sent"][0] for one in found) == 4 * STEPS * (num_elements + gathered)
    # Inside a DC all four ranks trade halves of everything that they sum, and of everything they have gathered.
    assert sum(one["sent"][1] for one in found) == 2 * 4 * (sums * num_elements + STEPS * gathered)
    for level in (0, 1):
        assert sum(one["sent"][level] for one in found) == sum(one["received"][level] for one in found)


@pytest.mark.parametrize(
    "zero",
    [
        slow({"stage": 1, "overlap_comm": True}),
        slow({"stage": 2, "overlap_comm": True}),
        slow({"stage": 2, "round_robin_gradients": True}),
        # Many buckets, some parameters larger than one.
        slow({"stage": 2, "reduce_bucket_size": 500}),
        {"stage": 1, "reduce_bucket_size": 300, "allgather_bucket_size": 200},
    ],
    ids=lambda zero: "-".join(f"{key}={value}" for key, value in zero.items()),
)
def test_buckets_and_orders_of_zero_change_nothing(pool2: ProcessPool, zero: dict[str, Any]) -> None:
    case = world2(2, zero_stage=zero["stage"], accumulation=2)
    plain = pool2.run(losses_of, case=case, with_block=False, config={"zero_optimization": zero})
    ours = pool2.run(losses_of, case=case, with_block=True, config={"zero_optimization": zero})
    for rank in range(2):
        assert ours[rank]["losses"] == pytest.approx(plain[rank]["losses"], rel=1e-5)
    assert len({one["digest"] for one in ours}) == 1


def losses_of(case: Case, with_block: bool, config: dict[str, Any]) -> dict[str, Any]:
    with engine_of(case, with_block=with_block, **config) as engine:
        losses = train(engine, case, 0, STEPS)
        return {
            "losses": losses,
            "digest": dense_digest(engine),
            "optimizer": type(engine.optimizer).__name__,
            "num_elements": sum(p.numel() for p in engine.module.parameters() if not is_moe_param(p)),
            "slow bytes": ds_hybridep.stats(engine)["levels"][0]["sent_bytes"]["dense"] if with_block else 0,
        }


@pytest.mark.parametrize(
    "config",
    [
        slow({"prescale_gradients": True}),
        slow({"communication_data_type": "bf16"}),
    ],
    ids=lambda config: next(iter(config)),
)
def test_scaling_and_data_type_of_the_communication_stay_deepspeeds(
    pool4: ProcessPool, config: dict[str, Any]
) -> None:
    case = world4(2, 1, zero_stage=0)
    plain = pool4.run(losses_of, case=case, with_block=False, config=config)
    ours = pool4.run(train_and_look, case=case, config=config)
    losses = pool4.run(losses_of, case=case, with_block=True, config=config)
    # bf16 has 8 significant bits, and DeepSpeed's own sums are rounded at other places.
    tolerance = 2**-8 if "communication_data_type" in config else 1e-5
    for rank in range(4):
        assert losses[rank]["losses"] == pytest.approx(plain[rank]["losses"], rel=tolerance)
    item_bytes = 2 if "communication_data_type" in config else 4
    assert sum(one["sent"][0] for one in ours) == 2 * STEPS * item_bytes * ours[0]["num_elements"]


@pytest.mark.slow
def test_bf16_with_gradients_in_fp32(pool4: ProcessPool) -> None:
    """DeepSpeed takes another optimizer here: the engine sums gradients, and the optimizer gathers parameters."""
    case = world4(2, 1, zero_stage=1, dtype="bf16", toy=BY_TOKEN, accumulation=2)
    config = {"data_types": {"grad_accum_dtype": "fp32"}}
    plain = pool4.run(losses_of, case=case, with_block=False, config=config)
    ours = pool4.run(losses_of, case=case, with_block=True, config=config)
    for rank in range(4):
        assert ours[rank]["losses"] == pytest.approx(plain[rank]["losses"], rel=BF16_LOSS_TOLERANCE)
    assert len({one["digest"] for one in ours}) == 1
    assert ours[0]["optimizer"] == "BF16_Optimizer"
    # Per step and element, over both uplinks together: twice 2 bytes of the sum (gradients are kept in fp32, but
    # travel in bf16 unless "communication_data_type" says otherwise), and 2 bytes of the parameter, with padding.
    bytes_per_element = sum(one["slow bytes"] for one in ours) / (STEPS * ours[0]["num_elements"])
    assert 6 <= bytes_per_element < 6.1


# -- refusals ---------------------------------------------------------------------------------------------------


def refuse(case: Case, config: dict[str, Any]) -> tuple[str, str]:
    def build() -> None:
        with engine_of(case, with_block=True, **config):
            pass

    return error_of(build)


@pytest.mark.parametrize(
    ("stage", "setting"), [(1, "contiguous_gradients"), (1, "use_multi_rank_bucket_allreduce"), (2, "reduce_scatter")]
)
def test_other_ways_of_zero_to_reduce_are_refused(pool2: ProcessPool, stage: int, setting: str) -> None:
    config = {"zero_optimization": {"stage": stage, setting: False}}
    for kind, message in pool2.run(refuse, case=world2(2, zero_stage=stage), config=config):
        assert kind == "UnsupportedError"
        assert 'hybridep.dense_sync is "hierarchical"' in message
        assert f"zero_optimization.{setting} = false; leave it at true" in message
        assert 'or set hybridep.dense_sync to "deepspeed"' in message


def test_division_before_the_sums_is_refused(pool2: ProcessPool) -> None:
    config = {"gradient_predivide_factor": 2.0}
    for kind, message in pool2.run(refuse, case=world2(2, zero_stage=0), config=config):
        assert kind == "UnsupportedError"
        assert "does not work with gradient_predivide_factor; leave it at 1" in message


def refuse_sparse_embedding(case: Case) -> tuple[str, str]:
    use_expert_groups_of(case)
    model = build_model(case.toy, rank=dist.get_rank(), world_size=2, data_before_expert=False, seed=case.seed)
    model.extra = torch.nn.Embedding(8, 4, sparse=True)
    config = case.ds_config(with_block=True)
    return error_of(deepspeed.initialize, model=model, model_parameters=model.parameters(), config=config)


def test_sparse_gradients_are_refused(pool2: ProcessPool) -> None:
    for kind, message in pool2.run(refuse_sparse_embedding, case=world2(2)):
        assert kind == "UnsupportedError"
        assert "sparse gradients" in message
        assert "build them with sparse=False" in message


def refuse_part_of_the_job(case: Case, ranks: Sequence[int]) -> tuple[str, str]:
    with engine_of(replace(case, dense_sync=None), with_block=False) as engine:
        engine.seq_data_parallel_group = torch.distributed.new_group(list(ranks))
        return error_of(ds_hybridep.attach, engine, block_of(case))


def test_a_data_parallel_group_that_is_not_the_job_is_refused(pool4: ProcessPool) -> None:
    for rank, (kind, message) in enumerate(pool4.run(refuse_part_of_the_job, case=world4(2, 1), ranks=(0, 1, 2))):
        if rank < 3:
            assert kind == "UnsupportedError"
            assert "over ranks [0, 1, 2] of 4; leave out the mpu" in message
