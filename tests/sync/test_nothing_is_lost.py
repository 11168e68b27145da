# SPDX-License-Identifier: Apache-2.0
"""Gradients that codecs keep back, where a job does not go straight on: none is lost, counted twice, or piled up."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from encoded import over_slow_level, residuals, world2
from parity import Case
from process_pool import ProcessPool
from torch import nn
from training import batch_of, engine_of, train

import ds_hybridep
from ds_hybridep.deepspeed.data_parallel import DataParallelSync

pytestmark = pytest.mark.dist

INT4 = {"gradient_codec": "int4"}


def runtime_of(engine: Any) -> Any:
    return engine.__dict__["_hybridep_attachment"].runtime


def syncs_of(engine: Any) -> Any:
    return runtime_of(engine).syncs.values()


# -- parameters that take part at times -------------------------------------------------------------------------


class AtTimes:
    """Which layers of the toy take part in a step: as with stochastic depth, several heads, or freezing."""

    def __init__(self, engine: Any, kind: str) -> None:
        self.engine, self.kind = engine, kind
        self._blocks = list(engine.module.blocks)
        self._forwards = [block.dense.forward for block in self._blocks]
        self._embedding: nn.Parameter = engine.module.embedding.weight

    def begin(self, step: int) -> None:
        for at, (block, forward) in enumerate(zip(self._blocks, self._forwards, strict=True)):
            if self.kind == "stochastic depth":
                block.dense.forward = torch.zeros_like if step >> at & 1 else forward
            elif self.kind == "heads":
                block.dense.forward = forward if step % len(self._blocks) == at else torch.zeros_like
        if self.kind == "freezing":
            self._embedding.requires_grad_(step % 4 < 2)


def state_over_time(case: Case, kind: str, steps: int, folder: str) -> dict[str, Any]:
    """Tensors and bytes that codecs keep, and bytes of a checkpoint, after some steps and at the end."""
    found: dict[str, Any] = {"tensors": [], "bytes": []}
    with engine_of(case, with_block=True, hybridep=over_slow_level(case, **INT4)) as engine:
        at_times = AtTimes(engine, kind)
        for step in range(steps):
            at_times.begin(step)
            train(engine, case, step, 1)
            if step in (steps // 4, steps - 1):
                kept = [one for sync in syncs_of(engine) for one in sync.memory.sums.residuals]
                found["tensors"].append((len(kept), sum(tensor.nbytes for tensor in kept)))
                engine.save_checkpoint(folder, tag="now")
                files = [path.stat().st_size for path in Path(folder, "now").glob("hybridep_rank_*")]
                found["bytes"].append(sum(files))
        found["ratio"] = ds_hybridep.stats(engine)["synchronised"]["dense parameters"]["gradient_ratio"]
        dist.barrier()
    return found


@pytest.mark.parametrize(
    "kind", ["stochastic depth", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("heads", "freezing"))]
)
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_layers_that_are_skipped_at_times_pile_nothing_up(
    pool2: ProcessPool, stage: int, kind: str, tmp_path: Path
) -> None:
    case = world2(1, zero_stage=stage, optimizer="sgd")
    for found in pool2.run(state_over_time, case=case, kind=kind, steps=12, folder=str(tmp_path)):
        early, late = found["tensors"]
        assert early == late
        assert late[0] > 0
        early_bytes, late_bytes = found["bytes"]
        assert late_bytes <= early_bytes * 1.1  # all combinations of layers were not seen by then
        assert found["ratio"] > 3


def skip_and_deliver(case: Case) -> dict[str, tuple[float, float]]:
    """What a layer had kept back while it is skipped, and once an exact step has used it."""
    with engine_of(case, with_block=True, hybridep=over_slow_level(case, **INT4)) as engine:
        train(engine, case, 0, 2)
        name = "blocks.0.dense.weight"
        before = residuals(engine).get(name, 0.0)
        forward, engine.module.blocks[0].dense.forward = engine.module.blocks[0].dense.forward, torch.zeros_like
        train(engine, case, 2, 3)
        skipped = residuals(engine).get(name, 0.0)
        engine.module.blocks[0].dense.forward = forward
        ds_hybridep.replan(engine, case.ds_config(with_block=True)["hybridep"])
        train(engine, case, 5, 1)
        return {"waits": (before, skipped), "arrives": (0.0, residuals(engine).get(name, 0.0))}


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_left_out_of_a_skipped_layer_waits_for_it(pool2: ProcessPool, stage: int) -> None:
    results = pool2.run(skip_and_deliver, case=world2(1, zero_stage=stage, optimizer="sgd"))
    assert any(found["waits"][0] for found in results)
    for found in results:
        for before, after in found.values():
            assert before == after


# -- checkpoints ------------------------------------------------------------------------------------------------


def save_before_the_step(case: Case, folder: str) -> dict[str, bool]:
    """A checkpoint after a backward, whose gradients no step has used yet."""
    with engine_of(case, with_block=True, hybridep=over_slow_level(case, **INT4)) as engine:
        train(engine, case, 0, 2)
        ds_hybridep.replan(engine, over_slow_level(case, gradient_codec="int8"))  # what int4 left out now waits
        before = residuals(engine)
        engine.backward(engine(*batch_of(case, 2)))
        engine.save_checkpoint(folder, tag="between")
        engine.step()
    with engine_of(case, with_block=True, hybridep=over_slow_level(case, gradient_codec="int8")) as engine:
        engine.load_checkpoint(folder, tag="between")
        return {"has residuals": any(before.values()), "has them again": residuals(engine) == before}


def test_a_checkpoint_between_backward_and_step_has_what_was_kept_back(pool2: ProcessPool, tmp_path: Path) -> None:
    for found in pool2.run(save_before_the_step, case=world2(1, zero_stage=2), folder=str(tmp_path)):
        assert found == {"has residuals": True, "has them again": True}


def refresh_after_a_load(case: Case, folder: str) -> bool:
    """Whether ranks agree again after one has changed a parameter between a load and `refresh`."""
    block = over_slow_level(case, weight_codec="int8", gradient_codec="int8")
    with engine_of(case, with_block=True, hybridep=block) as engine:
        train(engine, case, 0, 2)
        engine.save_checkpoint(folder, tag="two")
    with engine_of(case, with_block=True, hybridep=block) as engine:
        engine.load_checkpoint(folder, tag="two")
        ds_hybridep.refresh(engine)
        sent = [dict(sync.transport.traffic.sent_bytes) for sync in syncs_of(engine)]
        train(engine, case, 2, 1)
        now = [sync.transport.traffic.sent_bytes for sync in syncs_of(engine)]
        whole_bytes = sum(p.numel() * 4 for name, p in engine.module.named_parameters() if "experts" not in name)
        grown = sum(one[0, "dense"] - before.get((0, "dense"), 0) for one, before in zip(now, sent, strict=True))
        return grown > whole_bytes / dist.get_world_size()  # this rank's share of the parameters, as it is


def test_the_first_gather_after_a_load_and_refresh_is_exact(pool2: ProcessPool, tmp_path: Path) -> None:
    assert all(pool2.run(refresh_after_a_load, case=world2(1, zero_stage=1), folder=str(tmp_path)))


# -- names --------------------------------------------------------------------------------------------------------


class Sums:
    """Notes what `DataParallelSync` asks a group to sum."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def all_reduce(self, _: torch.Tensor, spans: Any) -> None:
        self.asked.append([(span.name, span.start, span.num_elements) for span in spans])

    def reduce_to_owners(self, _: torch.Tensor, slices: Any, *, is_last: bool) -> None:
        self.asked.append([(owner, span.name, span.start, span.num_elements) for owner, span in slices])


@pytest.mark.parametrize(
    ("second", "asked"),
    [
        (1, [(0, "a", 0, 8), (1, "b", 0, 10), (1, "b", 10, 6)]),
        # As with Muon, which needs whole matrices: their sums go to all ranks.
        (frozenset((0, 1)), [("a", 0, 8), ("b", 0, 10), ("b", 10, 6)]),
    ],
)
def test_slices_have_the_names_of_their_parameters(second: Any, asked: list[Any]) -> None:
    """In a bucket that also has a parameter of another group in it, between the two."""
    a, other, b = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 4), (3,), (4, 4)))
    other.allreduce, other.group_name = False, "experts"  # as DeepSpeed marks an expert
    sums, sync = Sums(), DataParallelSync.__new__(DataParallelSync)
    sync._syncs, sync._names, sync._is_boundary = {"all": sums}, {id(a): "a", id(b): "b"}, lambda: True
    sync._optimizer = SimpleNamespace(
        dp_process_group="all",
        expert_dp_process_group={"experts": "few"},
        bit16_groups=[[a, b], [other]],
        ipg_buckets={torch.float32: SimpleNamespace(params=[(0, 0, 0), (1, 0, 1), (0, 1, 2)])},
        flatten=torch.cat,
        partition_gradients=False,
    )
    bucket = [(0, torch.zeros(8)), (second, torch.zeros(10)), (frozenset((1,)), torch.zeros(6))]

    def reduce(bucket: Any, dtype: Any, **kwargs: Any) -> None:
        sync._sum_for_owners(pytest.fail, [tensor for _, tensor in bucket], dtype, **kwargs)

    sync._label_slices(reduce, bucket, torch.float32, process_group="all")
    assert sums.asked == [asked]
