# SPDX-License-Identifier: Apache-2.0
"""The table of what is changed in foreign code: each row says why, and nothing is left of it after detach."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from parity import Case
from process_pool import ProcessPool
from torch.utils import checkpoint as torch_checkpointing
from torch.utils.checkpoint import checkpoint
from toy_model import ToyConfig
from training import block_of, engine_of, moe_layers, train, world4

import ds_hybridep
from ds_hybridep.deepspeed import patches
from ds_hybridep.deepspeed.checkpoint_guard import install
from ds_hybridep.deepspeed.patches import TABLE, Patch, Patches, find, misfits
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.tokens.layer import HybridMoE, computing_layer

LIMIT_S = 100.0


def state_of(row: Patch, engine: Any) -> list[Any]:
    """What a row changes, as it is now: the very objects, by owner."""
    experts = [module for layer in moe_layers(engine.module) for module in layer.experts.modules()]
    owners = {
        patches.ENGINE: [engine],
        patches.ZERO_OPTIMIZER: [engine.optimizer],
        patches.AUTOEP_LAYER: [],
        patches.MODULE: [engine.module, *moe_layers(engine.module), *experts],
    }
    if row.attribute == "forward_pre_hook":
        return [dict(module._forward_pre_hooks) for module in owners[patches.MODULE]]
    if row.attribute == "forward_hook":
        return [dict(module._forward_hooks) for module in owners[patches.MODULE]]
    if row.attribute == "load_state_dict_post_hook":
        return [dict(module._load_state_dict_post_hooks) for module in owners[patches.MODULE]]
    if row.owner == patches.OPTIMIZER:
        return [dict(engine.basic_optimizer._optimizer_step_pre_hooks)]
    instances = owners[row.owner] if row.until == "detach" else [find(row.owner)]
    return [(name := row.attribute, vars(owner).get(name), name in vars(owner)) for owner in instances]


# Of models of transformers, which tests/export has, of peft, which test_adapters_off.py has, and of sites.
OPTIONAL = ("peft.", "accelerate.", "transformers.")
OF_MODELS = ("save_16bit_model", "_zero3_consolidated_16bit_state_dict", "state_dict_pre_hook")
ELSEWHERE = [
    row
    for row in TABLE
    if row.owner.startswith(OPTIONAL) or row.attribute in (*OF_MODELS, "load_module_state_dict", "reduce_ipg_grads")
]


def walk_the_table(case: Case) -> dict[str, list[str]]:
    """Rows that are changed while attached, and rows that are not as before afterwards."""

    def all_states() -> dict[str, list[Any]]:
        return {f"{row.owner}.{row.attribute}": state_of(row, engine) for row in TABLE if row not in ELSEWHERE}

    def differing(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> list[str]:
        return [name for name in one if not same(one[name], other[name])]

    with engine_of(case, with_block=False) as engine:
        train(engine, case, 0, 1)
        before = all_states()
        ds_hybridep.attach(engine, block_of(case))
        train(engine, case, 1, 2)
        attached = differing(before, all_states())
        ds_hybridep.detach(engine)
        return {"attached": attached, "left": differing(before, all_states())}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or (isinstance(one, str | bool | int) and one == other)


@pytest.mark.dist
@pytest.mark.parametrize("zero_stage", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_after_detach_each_row_is_the_very_object_it_was(pool4: ProcessPool, zero_stage: int) -> None:
    # Two groups hold each expert, so that groups of experts are changed too.
    case = world4(1, 2, zero_stage=zero_stage, dense_sync="hierarchical", toy=ToyConfig(ep_size=2))
    own_rows = (patches.ZERO_OPTIMIZER, patches.AUTOEP_LAYER)
    changed_only_then = {
        f"{row.owner}.{row.attribute}"
        for row in TABLE
        if row.until not in ("AutoEP", "exit")
        and row not in ELSEWHERE
        and (row.owner not in own_rows or row.attribute == "zero_grad" or (zero_stage and row.owner == own_rows[0]))
        and (zero_stage or row.attribute != "all_gather_dp_groups")
    }
    for found in pool4.run(walk_the_table, case=case):
        assert found["left"] == []
        assert set(found["attached"]) == changed_only_then


def test_each_row_says_why_and_fits_the_deepspeed_that_is_here() -> None:
    assert all(len(row.why) > 15 for row in TABLE)
    assert len({(row.owner, row.attribute) for row in TABLE}) == len(TABLE)
    assert misfits() == []


def test_what_a_row_relies_on_and_is_not_there_is_named() -> None:
    rows = (
        Patch(patches.MOE_LAYER, "forwards", "a method that was renamed"),
        Patch(patches.ENGINE, "load_checkpoint", "an argument that went away", parameters=("load_module_first",)),
        Patch("deepspeed.moe.gone:Layer", "forward", "a module that went away"),
    )
    assert misfits(rows) == [
        "deepspeed.moe.sharded_moe:MOELayer.forwards",
        "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint(load_module_first=)",
        "deepspeed.moe.gone:Layer.forward",
    ]


def test_what_has_no_row_cannot_be_changed() -> None:
    with pytest.raises(AssertionError, match="has no row in the table"):
        Patches().wrap(patches.ENGINE, "train_batch", SimpleNamespace(train_batch=print), lambda _: lambda: None)


SHARED = [row for row in TABLE if row.until == "last detach" and not row.owner.startswith(OPTIONAL)]


@pytest.mark.parametrize("row", SHARED, ids=lambda row: f"{row.owner}.{row.attribute}")
def test_a_class_is_given_back_when_the_last_attachment_goes(row: Patch) -> None:
    owner = find(row.owner)
    original = vars(owner).get(row.attribute)
    one, other = Patches(), Patches()
    for patched in (one, other):
        patched.share(row.owner, row.attribute, lambda original: lambda *args: original(*args))
    one.undo()
    assert vars(owner).get(row.attribute) is not original
    other.undo()
    assert vars(owner).get(row.attribute) is original


KINDS = {
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "nonreentrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "deepspeed reentrant": lambda run, x: deepspeed_checkpointing.checkpoint(run, x),
    "deepspeed nonreentrant": lambda run, x: deepspeed_checkpointing.non_reentrant_checkpoint(run, x),
}


@pytest.mark.parametrize("kind", KINDS)
def test_overlapping_expert_calls_of_two_threads_leave_the_originals_in_place(kind: str) -> None:
    rows = [row for row in TABLE if row.why == "see checkpoint_guard"]
    before = [(vars(find(row.owner)).get(row.attribute), find(row.owner)) for row in rows]
    patched, barrier, found = Patches(), threading.Barrier(2, timeout=LIMIT_S), {}
    install(patched)

    def compute(name: str, leaves_first: bool) -> None:
        layer: Any = SimpleNamespace(name=name, migration=object())
        barrier.wait()
        with HybridMoE._computing_experts(layer):
            barrier.wait()
            try:
                KINDS[kind](torch.sin, torch.ones(2, requires_grad=True))
            except UnsupportedError as error:
                found[name] = str(error)
            if not leaves_first:
                barrier.wait()
        if leaves_first:
            barrier.wait()
        found[name, "afterwards"] = KINDS[kind](torch.sin, torch.ones(2, requires_grad=True))

    threads = [threading.Thread(target=compute, args=(name, name == "first")) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    patched.undo()
    for name in ("first", "second"):
        assert found[name].startswith(f"{name}: an expert uses activation checkpointing inside itself")
        assert torch.equal(found[name, "afterwards"], torch.ones(2).sin())
    assert [(vars(owner).get(row.attribute), owner) for row, (_, owner) in zip(rows, before, strict=True)] == before
    assert computing_layer() is None


@pytest.mark.parametrize("module", [torch_checkpointing, deepspeed_checkpointing])
def test_a_users_own_kind_of_checkpoint_computes_what_it_did_before(module: Any) -> None:
    original = module.CheckpointFunction

    class Added(original):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x + 100.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    patched = Patches()
    install(patched)
    x = torch.ones(1, requires_grad=True)
    attached = Added.apply(x).item()
    patched.undo()
    assert attached == Added.apply(x).item() == 101.0
