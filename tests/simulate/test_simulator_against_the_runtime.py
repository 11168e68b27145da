# SPDX-License-Identifier: Apache-2.0
"""The simulator's bytes are those that the runtime counts, once it is told how many rows were routed."""

from dataclasses import replace

import pytest
from counted_bytes import ACCUMULATION, TOKENS, TOY, counted_in_one_step, workload_of
from marks import slow
from parity import Case
from process_pool import ProcessPool

from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.geometry.token_route import expected_rows
from ds_hybridep.plan.plan import LevelCodecs, Plan
from ds_hybridep.plan.rates import Rates
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.simulator import simulate

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("domain_sizes", "exchange", "checkpointing"),
    [slow((1, 1), "direct", None), slow((2, 1), "direct", "reentrant"), ((1, 2), "hierarchical", None)],
)
def test_every_byte_is_simulated(pool4: ProcessPool, domain_sizes, exchange, checkpointing):
    levels = tuple((name, 2, size) for name, size in zip(("dc", "gpu"), domain_sizes, strict=True))
    toy = replace(TOY, checkpointing=checkpointing)
    case = Case(levels=levels, toy=toy, accumulation=ACCUMULATION, token_exchange=exchange)
    records = pool4.run(counted_in_one_step, case=case)
    plan = Plan(spans=(2, 2), domain_sizes=domain_sizes, codecs=(LevelCodecs(),) * 2, token_exchange=exchange)
    routed = sum(layer["rows_sent"] for record in records for layer in record["layers"])
    expected = sum(expected_rows(plan.domain_counts, toy.num_experts, toy.k, TOKENS, exchange=exchange))
    forwards = ACCUMULATION * (1 if checkpointing is None else 2)
    scale = routed / (expected * 4 * toy.num_layers * forwards)
    scenario = Scenario(
        cluster=Cluster((Level("dc", 2), Level("gpu", 2))),
        plan=plan,
        workload=replace(workload_of(case), row_scale=scale),
        rates=Rates(flops_per_s=1e9),
    )
    for is_reduced in (True, False):
        sent = simulate(scenario, is_reduced=is_reduced).sent_bytes

        def counted(kind: str) -> list[int]:
            return [sum(record["levels"][level]["sent_bytes"][kind] for record in records) for level in range(2)]

        # Weights leave three times: before the first forward, after the step, and for the refresh.
        for kind, times in (("expert_weights", 3), ("expert_gradients", 1)):
            assert counted(kind) == pytest.approx([times * kinds.get(kind, 0.0) for kinds in sent], rel=1e-12)
        assert sum(counted("tokens")) == pytest.approx(sum(kinds.get("tokens", 0.0) for kinds in sent), rel=1e-9)
