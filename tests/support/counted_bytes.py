# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a small training count, and the same job as a workload of the planner."""

from typing import Any

from parity import Case
from toy_model import ToyConfig
from training import engine_of, train

import ds_hybridep
from ds_hybridep.plan.workload import MoEModel, Workload

TOY = ToyConfig(ep_size=4, checkpointing=None)
TOKENS = 3 * TOY.sequence  # of `train`, which runs three sequences a micro-step
ACCUMULATION = 2


def counted_in_one_step(case: Case) -> dict[str, Any]:
    """This rank's counters after one optimizer step."""
    with engine_of(case, with_block=True) as engine:
        train(engine, case, 0, 1)
        ds_hybridep.refresh(engine)  # returns when nothing is under way any more
        return ds_hybridep.stats(engine)


def counted_with_hot_experts(
    case: Case, num_steps: int, gradient_codec: str = "identity"
) -> tuple[list[int], list[dict[str, dict[str, int]]]]:
    """The hot experts of the first layer after some steps, and by level what this rank counts in one more.

    gradient_codec: of experts, over all levels.
    """
    levels = [
        {**level, "gradient_codec": gradient_codec, "dense_gradient_codec": "identity"}
        for level in case.ds_config(with_block=True)["hybridep"]["levels"]
    ]
    with engine_of(case, with_block=True, hybridep={"levels": levels}) as engine:
        counted = []
        for first, count in ((0, num_steps), (num_steps, 1)):
            train(engine, case, first, count)
            engine.__dict__["_hybridep_attachment"].runtime.migration.finish_shipments()
            counted.append(ds_hybridep.stats(engine))
    before, after = (one["levels"] for one in counted)
    ways = ("sent_bytes", "received_bytes")
    found = [
        {way: {kind: now[way][kind] - then[way][kind] for kind in now[way]} for way in ways}
        for then, now in zip(before, after, strict=True)
    ]
    assert counted[0]["layers"][0]["hot_experts"] == counted[1]["layers"][0]["hot_experts"]
    return counted[0]["layers"][0]["hot_experts"], found


def workload_of(case: Case) -> Workload:
    toy = case.toy
    model = MoEModel(
        name="toy", hidden=toy.hidden, num_experts=toy.num_experts, top_k=toy.k, num_moe_layers=toy.num_layers,
        expert_shapes=((2 * toy.hidden * toy.ffn + toy.ffn + toy.hidden,),), dense_shapes=((1,),),
        active_dense_params=1,
    )  # fmt: skip
    return Workload(
        model=model, tokens_per_rank=TOKENS, micro_steps=case.accumulation, param_bytes=4,
        capacity_factor=toy.capacity_factor, is_checkpointed=toy.checkpointing is not None,
    )  # fmt: skip
