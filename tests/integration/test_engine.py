# SPDX-License-Identifier: Apache-2.0
"""How hybridep joins an engine and leaves it, what it refuses, and how ranks that disagree find out."""

import copy
import json
import time
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from marks import slow
from parity import BF16_LOSS_TOLERANCE, Case, levels_of
from process_pool import ProcessPool
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy_model import ToyConfig
from training import (
    THREAD_LIMIT_S,
    Engine,
    batch_of,
    block_of,
    close_to,
    engine_of,
    error_of,
    evaluate,
    hybridep_threads,
    moe_layers,
    train,
    world2,
    world4,
)

import ds_hybridep
from ds_hybridep.errors import ConfigError, VerificationError
from ds_hybridep.runtime import runtime

pytestmark = pytest.mark.dist

LAYERS = ("blocks.0.moe.deepspeed_moe", "blocks.1.moe.deepspeed_moe")
COUNTERS = ("sent_bytes", "received_bytes", "sent_messages")
START_UP_LIMIT_S = 5.0


# -- in the workers ---------------------------------------------------------------------------------------------


def traces_of_hybridep(engine: Engine) -> dict[str, Any]:
    """Everything on an engine that attach may have put there; threads that are to end get some time for it."""
    deadline = time.monotonic() + THREAD_LIMIT_S
    while "_hybridep_attachment" not in engine.__dict__:
        if not hybridep_threads() or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    names = ("_take_model_step", "zero_grad", "load_checkpoint", "destroy", "compile", "coalesce_grad_reduction")
    return {
        "methods": [name for name in names if name in engine.__dict__],
        "layers": [layer.__dict__.get("_hybridep") is not None for layer in moe_layers(engine.module)],
        "hooks": len(engine.module._load_state_dict_post_hooks),
        "parameter hooks": sum(len(p._backward_hooks or {}) for p in engine.module.parameters()),
        "optimizer": "zero_grad" in engine.optimizer.__dict__,
        "threads": hybridep_threads(),
    }


def attach_and_detach(case: Case) -> dict[str, Any]:
    """Plain and hybrid, each four steps; the hybrid one is attached by hand for steps 1 and 2 only."""
    found: dict[str, Any] = {}
    with engine_of(case, with_block=False) as engine:
        found["plain losses"] = train(engine, case, 0, 4)
    with engine_of(case, with_block=False) as engine:
        found["before"] = traces_of_hybridep(engine)
        found["hybrid losses"] = train(engine, case, 0, 1)
        ds_hybridep.attach(engine, block_of(case))
        found["attached"] = traces_of_hybridep(engine)
        found["twice"] = error_of(ds_hybridep.attach, engine, block_of(case))
        found["hybrid losses"] += train(engine, case, 1, 2)
        ds_hybridep.detach(engine)
        found["after"] = traces_of_hybridep(engine)
        found["stats after"] = error_of(ds_hybridep.stats, engine)
        found["detach twice"] = error_of(ds_hybridep.detach, engine)
        found["hybrid losses"] += train(engine, case, 3, 1)
        ds_hybridep.attach(engine, block_of(case))  # and once more
        found["again"] = traces_of_hybridep(engine)
    return found


def detach_between_micro_steps(case: Case) -> tuple[tuple[str, str], list[float], list[float]]:
    """Error of detaching after the first of two micro-steps, and losses of plain and of the hybrid that goes on."""
    losses: list[list[float]] = []
    error = ("", "")
    for with_block in (False, True):
        with engine_of(case, with_block=with_block) as engine:
            engine.backward(engine(*batch_of(case, 0, 0)))
            engine.step()
            if with_block:
                error = error_of(ds_hybridep.detach, engine)
            engine.backward(engine(*batch_of(case, 0, 1)))
            engine.step()
            losses.append(train(engine, case, 1, 2))
    return error, losses[0], losses[1]


def stats_after_two_steps(case: Case) -> dict[str, Any]:
    with engine_of(case, with_block=True, hybridep={"report_interval": 2}) as engine:
        fresh = ds_hybridep.stats(engine)
        train(engine, case, 0, 2)
        engine.eval()
        with torch.no_grad():
            engine(*batch_of(case, 2))  # waits for the weights of the last step, so that all counters stand still
        trained = json.loads(json.dumps(ds_hybridep.stats(engine)))
        dist.barrier()  # none ends before all have looked
        return {"fresh": fresh, "trained": trained}


def change_by_hand(case: Case, ranks: tuple[int, ...], layer: int, *, refreshes: bool) -> tuple[str, list[float]]:
    """Error of a step after `ranks` changed their experts of `layer`, and the losses of all steps.

    Changed through `.data`, which torch does not count as a change of the parameter.
    """
    with engine_of(case, with_block=True, hybridep={"advanced": {"verify_interval": 1}}) as engine:
        losses = train(engine, case, 0, 2)
        _shift_experts(engine, ranks, layer)
        if refreshes:
            ds_hybridep.refresh(engine)
        try:
            losses += train(engine, case, 2, 2)
        except VerificationError as error:
            return str(error), losses
        return "", losses


def change_by_hand_without_hybridep(case: Case, ranks: tuple[int, ...], layer: int) -> list[float]:
    with engine_of(case, with_block=False) as engine:
        losses = train(engine, case, 0, 2)
        _shift_experts(engine, ranks, layer)
        return losses + train(engine, case, 2, 2)


def _shift_experts(engine: Engine, ranks: tuple[int, ...], layer: int) -> None:
    if dist.get_rank() in ranks:
        with torch.no_grad():
            for parameter in moe_layers(engine.module)[layer].experts.parameters():
                parameter.data.add_(0.5)


def untouched(case: Case) -> dict[str, Any]:
    """Losses and traces without a block and with one that is switched off, in ds_config and by hand."""
    found = {}
    for name, block in (
        ("none", None),
        ("off", {"enabled": False}),
        ("off in full", {**block_of(case), "enabled": False}),
        ("off by hand", None),
    ):
        with engine_of(case, with_block=False, hybridep=block) as engine:
            if name == "off by hand":
                ds_hybridep.attach(engine, {"enabled": False})
            found[name] = (train(engine, case, 0, 2), traces_of_hybridep(engine), error_of(ds_hybridep.stats, engine))
    return found


def train_beside_a_copy(case: Case) -> dict[str, Any]:
    """What a copy of the module is and computes, and losses of a training during which rank 1 alone loads into it."""
    with engine_of(case, with_block=True, hybridep={"timeout_s": 100}) as engine:
        losses = train(engine, case, 0, 1)
        loss = evaluate(engine.module, case)
        twin = copy_of(engine.module)
        calls = [layer["calls"] for layer in ds_hybridep.stats(engine)["layers"]]
        found: dict[str, Any] = {
            "plain": all(layer.__dict__.get("_hybridep") is None for layer in moe_layers(twin)),
            "loss": loss,
            "copied loss": evaluate(twin, case),
        }
        found["calls"] = calls == [layer["calls"] for layer in ds_hybridep.stats(engine)["layers"]]
        if dist.get_rank() == 1:
            twin.load_state_dict(engine.module.state_dict())
        return {**found, "losses": losses + train(engine, case, 1, 2)}


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy that shares the process groups, which cannot be copied, hybridep or not.

    Nor can a gate's auxiliary loss while it has a graph: evaluate first.
    """
    groups = [layer.ep_group for layer in moe_layers(model)]
    return copy.deepcopy(model, {id(group): group for group in groups})


class OneBitAdam(torch.optim.SGD):
    """Goes by the name of a 1-bit optimizer, which hybridep does not look behind; DeepSpeed 0.19 ships none."""


def refusals(case: Case) -> dict[str, tuple[str, str]]:
    """By feature: the error of attaching to an engine that uses it.  One plain engine, changed back after each."""
    found = {}
    block = block_of(case)
    alone = block_of(Case(levels=levels_of((2,), (1,)), toy=case.toy, kernels="reference"))
    with engine_of(case, with_block=False) as engine:
        layer = moe_layers(engine.module)[1]
        expert = layer.experts.deepspeed_experts[1]

        layer.use_tutel = True
        found["tutel"] = error_of(ds_hybridep.attach, engine, block)
        layer.use_tutel = False

        engine.pipeline_parallelism = True
        found["pipeline"] = error_of(ds_hybridep.attach, engine, block)
        engine.pipeline_parallelism = False

        expert.register_buffer("scale", torch.ones(1))
        found["buffers"] = error_of(ds_hybridep.attach, engine, block)
        found["buffers alone"] = error_of(_attach_train_detach, engine, case, alone)
        del expert.scale

        for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
            handle = getattr(expert.up, register)(lambda *_: None)
            found[register] = error_of(ds_hybridep.attach, engine, block)
            if register != "register_full_backward_hook":
                found[f"{register} alone"] = error_of(_attach_train_detach, engine, case, alone)
            handle.remove()

        engine.client_optimizer = OneBitAdam(engine.module.parameters(), lr=0.1)
        found["one bit"] = error_of(ds_hybridep.attach, engine, block)
        engine.client_optimizer = None

        module, engine.module = engine.module, nn.Linear(2, 2)
        found["no layer"] = error_of(ds_hybridep.attach, engine, block)
        engine.module = module
        found["no block"] = error_of(ds_hybridep.attach, engine)
        found["afterwards"] = error_of(_attach_train_detach, engine, case, block)
    return found


def _attach_train_detach(engine: Engine, case: Case, block: dict[str, Any]) -> None:
    ds_hybridep.attach(engine, block)
    train(engine, case, 0, 1)
    ds_hybridep.detach(engine)


def destroy_after_a_failed_transfer(case: Case) -> tuple[str, str]:
    """On rank 0, whose backward waits for one that rank 1 never runs: the errors of backward and of destroy."""
    own_limit = mock.patch.object(runtime, "longest_wait_s", float)  # else it would be torch's
    with own_limit, engine_of(case, with_block=True, hybridep={"timeout_s": 10}) as engine:
        loss = engine(*batch_of(case, 0))
        if dist.get_rank() == 1:
            return "", ""
        kind, _ = error_of(engine.backward, loss)
        second_kind, _ = error_of(engine.destroy)
        return kind, second_kind


def initialize_with(case: Case, config: dict[str, Any]) -> tuple[str, str]:
    """Error of deepspeed.initialize with the block and `config`."""

    def enter() -> None:
        with engine_of(case, with_block=True, **config):
            pass

    return error_of(enter)


def call_refused_methods(case: Case) -> dict[str, tuple[str, str]]:
    with engine_of(case, with_block=True) as engine:
        return {name: error_of(getattr(engine, name)) for name in ("coalesce_grad_reduction",)}


def initialize_differently(case: Case, by_rank: dict[int, dict[str, Any]]) -> tuple[str, str]:
    """Error of deepspeed.initialize where some ranks have other settings in the block."""

    def enter() -> None:
        with engine_of(case, with_block=True, hybridep=by_rank.get(dist.get_rank(), {})):
            pass

    return error_of(enter)


def attach_without(case: Case, missing_rank: int) -> tuple[str, str]:
    """Error of attaching on all ranks but one."""
    with engine_of(case, with_block=False) as engine:
        found = ("", "")
        if dist.get_rank() != missing_rank:
            found = error_of(ds_hybridep.attach, engine, block_of(case, timeout_s=START_UP_LIMIT_S))
        dist.barrier()
        if dist.get_rank() == missing_rank:  # comes too late, and is told so at once
            found = error_of(ds_hybridep.attach, engine, block_of(case, timeout_s=60.0))
        dist.barrier()
        return found


class SelfCheckpointing(nn.Module):
    """An expert that recomputes its own activations."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.kind.startswith("deepspeed"):
            function = "checkpoint" if self.kind == "deepspeed reentrant" else "non_reentrant_checkpoint"
            return getattr(deepspeed_checkpointing, function)(self.inner, rows)
        return checkpoint(self.inner, rows, use_reentrant=self.kind == "reentrant")


def train_self_checkpointing_experts(case: Case, kind: str) -> tuple[str, str]:
    """Error of the first step of a model whose experts checkpoint inside themselves."""
    with engine_of(case, with_block=False) as engine:
        for block in engine.module.blocks:
            experts = block.moe.deepspeed_moe.experts.deepspeed_experts
            for index, expert in enumerate(experts):
                experts[index] = SelfCheckpointing(expert, kind)
        ds_hybridep.attach(engine, block_of(case))
        first = error_of(lambda: engine.backward(engine(*batch_of(case, 0))))
        assert first == error_of(lambda: engine.backward(engine(*batch_of(case, 0))))  # also when tried again
        return first


def thaw_after_attach(case: Case) -> tuple[str, str]:
    """Error of the first step after a frozen expert parameter was made trainable."""
    with engine_of(case, with_block=False) as engine:
        experts = engine.module.blocks[1].moe.deepspeed_moe.experts.deepspeed_experts
        for expert in experts:
            expert.up.weight.requires_grad_(False)
        ds_hybridep.attach(engine, block_of(case))
        engine.backward(engine(*batch_of(case, 0)))
        experts[0].up.weight.requires_grad_(True)
        return error_of(lambda: engine(*batch_of(case, 1)))


def losses_beside_groups_of_some_ranks(case: Case) -> list[float]:
    """Losses where the user made process groups that not all ranks are in, before the start and after it."""
    dist.new_group([0, 2])
    with engine_of(
        case, with_block=True, hybridep={"report_interval": 1, "advanced": {"verify_interval": 1}}
    ) as engine:
        dist.new_group([1, 2, 3])
        return train(engine, case, 0, 3)


def losses_where_adam_counts_as_fused(case: Case) -> tuple[str, Any, list[float], list[float]]:
    """DeepSpeed's wrapper of a fused optimizer, its loss scale, and losses of plain and of hybrid."""
    losses, wrapper, scale = [], "", 0.0
    for with_block in (False, True):
        # FusedAdam itself is compiled on first use, for minutes on a CPU.
        with (
            mock.patch("deepspeed.runtime.engine.FusedAdam", torch.optim.AdamW),
            engine_of(case, with_block=with_block) as engine,
        ):
            wrapper, scale = type(engine.optimizer).__name__, engine.optimizer.loss_scale
            losses.append(train(engine, case, 0, 3))
    return wrapper, scale, losses[0], losses[1]


def plain_losses(case: Case) -> list[float]:
    with engine_of(case, with_block=False) as engine:
        return train(engine, case, 0, 3)


# -- the tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "zero_stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_attach_and_detach_between_steps(pool2: ProcessPool, zero_stage: int) -> None:
    for found in pool2.run(attach_and_detach, case=world2(zero_stage=zero_stage, accumulation=2)):
        assert found["hybrid losses"] == close_to(found["plain losses"])
        assert found["after"] == found["before"]
        assert found["before"]["layers"] == [False, False]
        assert found["before"]["threads"] == []
        assert found["attached"]["layers"] == found["again"]["layers"] == [True, True]
        assert "_take_model_step" in found["attached"]["methods"]
        kind, message = found["twice"]
        assert kind == "ConfigError"
        assert "ds_hybridep.detach(engine)" in message
        for kind, message in (found["stats after"], found["detach twice"]):
            assert kind == "ConfigError"
            assert "not attached" in message


def test_detach_between_micro_steps_is_an_error_and_loses_no_gradient(pool2: ProcessPool) -> None:
    for (kind, message), plain, hybrid in pool2.run(detach_between_micro_steps, case=world2(accumulation=2)):
        assert kind == "GradientNotReturnedError"
        assert "before detach" in message
        assert hybrid == close_to(plain)


def test_stats(pool4: ProcessPool) -> None:
    case = world4(2, 1, dense_sync="deepspeed")
    num_elements = 2 * 16 * 32 + 32 + 16
    shipment = 2 * 2 * num_elements * 4  # layers x experts of a rank x fp32
    for rank, found in enumerate(pool4.run(stats_after_two_steps, case=case)):
        fresh, trained = found["fresh"], found["trained"]
        keys = {"rank", "steps", "levels", "exposed_s", "layers", "synchronised", "job", "planning"}
        keys |= {"replica_bytes", "host_bytes", "checksums", "link", "sites"}
        assert set(trained) == keys
        assert trained["synchronised"] == {}  # DeepSpeed does it
        # A slot of another rank in two layers: fp32 weights.  The own one has memory only while it is sent.
        assert (fresh["replica_bytes"], trained["replica_bytes"]) == (shipment, shipment)
        assert trained["host_bytes"] == 0
        assert trained["planning"] is None  # nothing is "auto"
        assert trained["sites"] is None
        assert {peer["state"] for peer in trained["link"]} == {"alive"}, trained["link"]
        assert sum(peer["sent_bytes"] for peer in trained["link"]) > 0
        assert [peer["reconnects"] for peer in trained["link"]] == [0] * len(trained["link"])
        assert (trained["rank"], fresh["steps"], trained["steps"]) == (rank, 0, 2)
        assert [level["name"] for level in trained["levels"]] == ["dc", "gpu"]
        slow, fast = trained["levels"]
        for level in trained["levels"]:
            assert set(level) == {"name", "sent_bytes", "received_bytes", "sent_messages", "plain_ep_bytes", "waits"}
            for counter in COUNTERS:
                assert set(level[counter]) == {"tokens", "expert_weights", "expert_gradients", "dense", "control"}
            assert level["plain_ep_bytes"] > 0
        assert slow["sent_bytes"]["expert_weights"] == slow["received_bytes"]["expert_weights"] == 3 * shipment
        assert slow["sent_bytes"]["expert_gradients"] == slow["received_bytes"]["expert_gradients"] == 2 * shipment
        assert slow["sent_bytes"]["tokens"] == fast["sent_bytes"]["expert_weights"] == 0
        assert fast["sent_bytes"]["tokens"] > 0
        assert fast["sent_messages"]["tokens"] > 0
        assert set(trained["exposed_s"]) == {"tokens", "expert_weights", "expert_gradients", "dense"}
        # DeepSpeed sends them: how much is not known.
        assert trained["exposed_s"].pop("dense") is None
        assert {level[counter]["dense"] for level in trained["levels"] for counter in COUNTERS} == {None}
        assert all(seconds > 0 for seconds in trained["exposed_s"].values())
        assert [layer["name"] for layer in trained["layers"]] == list(LAYERS)
        assert [layer["calls"] for layer in trained["layers"]] == [3, 3]
        assert not any(count for level in fresh["levels"] for count in level["sent_bytes"].values())
        assert fresh["job"] is None
        if rank > 0:
            assert trained["job"] is None
            continue
        job = trained["job"]
        assert (job["steps"], job["world_size"]) == (2, 4)
        assert job["levels"][0]["sent_bytes"]["expert_gradients"] == 4 * 2 * shipment
        assert job["levels"][0]["sent_bytes"]["dense"] is job["exposed_s"]["dense"] is None
        assert [layer["name"] for layer in job["layers"]] == list(LAYERS)
        assert all(layer["imbalance"] >= 1 for layer in job["layers"])


def test_a_parameter_changed_by_hand_is_found_by_verification(pool2: ProcessPool) -> None:
    results = pool2.run(change_by_hand, case=world2(), ranks=(1,), layer=1, refreshes=False)
    for message, losses in results:
        assert f"{LAYERS[1]}: the copies of the experts of rank 1 on ranks [0] differ" in message
        assert "ds_hybridep.refresh(engine)" in message
        assert len(losses) == 2


def test_refresh_after_a_parameter_was_changed_by_hand(pool2: ProcessPool) -> None:
    check_refresh(pool2, world2(), ranks=(1,))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=str)
def test_refresh_on_four_ranks_after_a_parameter_was_changed_by_hand(
    pool4: ProcessPool, sizes: tuple[int, int]
) -> None:
    check_refresh(pool4, world4(*sizes), ranks=(1, 2))


def check_refresh(pool: ProcessPool, case: Case, *, ranks: tuple[int, ...]) -> None:
    plain = pool.run(change_by_hand_without_hybridep, case=case, ranks=ranks, layer=0)
    hybrid = pool.run(change_by_hand, case=case, ranks=ranks, layer=0, refreshes=True)
    for losses_of_plain, (message, losses) in zip(plain, hybrid, strict=True):
        assert message == ""
        assert losses == close_to(losses_of_plain)


def test_no_effect_without_the_block_or_when_it_is_off(pool2: ProcessPool) -> None:
    for found in pool2.run(untouched, case=world2(zero_stage=1)):
        losses, traces, _ = found["none"]
        assert traces["methods"] == []
        assert traces["layers"] == [False, False]
        for name in ("off", "off in full", "off by hand"):
            assert found[name][:2] == (losses, traces)  # bit for bit
            kind, message = found[name][2]
            assert kind == "ConfigError"
            assert "not attached" in message


def test_a_copy_of_the_module_is_plain_and_no_business_of_the_engine(pool2: ProcessPool) -> None:
    plain = pool2.run(plain_losses, case=world2())
    for losses, found in zip(plain, pool2.run(train_beside_a_copy, case=world2()), strict=True):
        assert found["plain"]
        assert found["calls"]  # the copy's forward is not the engine's
        assert found["copied loss"] == close_to(found["loss"])
        assert found["losses"] == close_to(losses)


def test_a_model_without_an_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="attach got a Linear; give it the engine that deepspeed.initialize returns"):
        ds_hybridep.attach(nn.Linear(1, 1), {"levels": [{"name": "all", "size": 1}]})


def test_destroy_after_a_failed_transfer_does_not_fail() -> None:
    with ProcessPool(2) as pool:  # its own: the channels are out of step afterwards
        kind, second_kind = pool.run(destroy_after_a_failed_transfer, case=world2())[0]
    assert kind == "CommunicationError"
    assert second_kind == ""


def test_a_fused_optimizer_in_bf16_which_has_no_loss_scale_trains_as_without_the_block(pool2: ProcessPool) -> None:
    case = world2(dtype="bf16", toy=ToyConfig(ep_size=2, routing="by_token", hidden=32))
    found = pool2.run(losses_where_adam_counts_as_fused, case=case)
    for wrapper, scale, plain, hybrid in found:
        assert (wrapper, scale) == ("FP16_Optimizer", None)
        assert hybrid == pytest.approx(plain, rel=BF16_LOSS_TOLERANCE, abs=0.0)


# -- refusals ---------------------------------------------------------------------------------------------------


def test_features_that_are_refused(pool2: ProcessPool) -> None:
    name = "blocks.1.moe.deepspeed_moe"
    expected = {
        "tutel": f"{name}: Tutel does not work",
        "pipeline": 'pipeline parallelism (PipelineModule) was not tested together with the "hybridep" block',
        "buffers": f"{name}: local expert 1 has buffers ['scale']",
        "register_forward_hook": f"{name}: local expert 1 has forward or backward hooks (on ['up'])",
        "register_forward_pre_hook": f"{name}: local expert 1 has forward or backward hooks (on ['up'])",
        "register_full_backward_hook": f"{name}: local expert 1 has forward or backward hooks (on ['up'])",
        "one bit": "the 1-bit optimizer OneBitAdam was not tested",
        "no layer": "the model has no deepspeed.moe.layer.MoE layer",
    }
    for found in pool2.run(refusals, case=world2()):
        for feature, text in expected.items():
            kind, message = found.pop(feature)
            assert kind == "UnsupportedError", feature
            assert text in message
        kind, message = found.pop("no block")
        assert kind == "ConfigError"
        assert 'has no "hybridep" block' in message
        # What remains was allowed: domains of one rank, and the same engine after all those refusals.
        assert set(found.values()) == {("", "")}, found


@pytest.mark.parametrize(
    ("zero", "text"),
    [
        (
            {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}},
            "zero_optimization.offload_optimizer.device = 'nvme' was not tested",
        ),
        ({"stage": 3}, "ZeRO stage 3 with native MoE layers"),
    ],
    ids=["nvme", "stage3"],
)
def test_settings_of_zero_that_are_refused(pool2: ProcessPool, zero: dict[str, Any], text: str) -> None:
    for kind, message in pool2.run(initialize_with, case=world2(), config={"zero_optimization": zero}):
        assert kind == "UnsupportedError"
        assert text in message
        assert '"hybridep": {"enabled": false}' in message


def test_an_optimizer_on_the_host_of_a_site_is_refused(pool2: ProcessPool) -> None:
    sites = {"name": "a", "names": ["a", "b"], "meeting_point": "127.0.0.1:1", "secret_file": __file__}
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    config = {"zero_optimization": zero, "hybridep": {"sites": sites}}
    for kind, message in pool2.run(initialize_with, case=world2(), config=config):
        assert kind == "UnsupportedError"
        assert message.startswith("zero_optimization.offload_optimizer was not tested together with hybridep.sites")


def test_methods_that_are_refused(pool2: ProcessPool) -> None:
    for found in pool2.run(call_refused_methods, case=world2(zero_stage=1)):
        for name, (kind, message) in found.items():
            assert kind == "UnsupportedError"
            assert f"engine.{name}() does not work together with hybridep yet" in message


def test_a_domain_beyond_the_span_of_the_group(pool4: ProcessPool) -> None:
    case = world4(2, 1, toy=ToyConfig(ep_size=2))
    for kind, message in pool4.run(initialize_with, case=case, config={}):
        assert kind == "PlanError"
        assert "hybridep.levels[0].domain_size is 2" in message
        assert "spans 1 of the 2 children of level 'dc'" in message
        assert '"use_data_before_expert_parallelism": true' in message


# -- ranks that disagree ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "named", "values"),
    [(1, (1,), "5 instead of 2"), (3, (3,), "5 instead of 2"), (0, (1, 2, 3), "2 instead of 5")],
)
def test_a_rank_with_another_setting_is_named_on_all_ranks(
    pool4: ProcessPool, rank: int, named: tuple[int, ...], values: str
) -> None:
    by_rank = {rank: {"advanced": {"prefetch_depth": 5}}}
    for kind, message in pool4.run(initialize_differently, case=world4(2, 1), by_rank=by_rank):
        assert kind == "AgreementError"
        for one in named:
            assert f"rank {one} differs from rank 0 in config.advanced.prefetch_depth: {values}" in message


@pytest.mark.parametrize("missing_rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_does_not_attach_is_named(pool4: ProcessPool, missing_rank: int) -> None:
    results = pool4.run(attach_without, case=world4(2, 1), missing_rank=missing_rank)
    for rank, (kind, message) in enumerate(results):
        if rank != missing_rank:
            assert kind == "AgreementError"
            assert f"rank {missing_rank}" in message or f"ranks [{missing_rank}]" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_config_error_of_one_rank_reaches_the_others_at_once(pool4: ProcessPool, rank: int) -> None:
    by_rank = {rank: {"advanced": {"prefetch_depht": 5}}}
    # The block's own time limit is 60 s: they do not wait for it.
    results = pool4.run(initialize_differently, case=world4(2, 1), by_rank=by_rank)
    for other, (kind, message) in enumerate(results):
        assert kind == ("ConfigError" if other == rank else "AgreementError")
        assert 'hybridep.advanced.prefetch_depht is not a known key; did you mean "prefetch_depth"?' in message
        if other != rank:
            assert f"rank {rank} cannot start" in message


def test_after_a_disagreement_the_same_ranks_can_start(pool4: ProcessPool) -> None:
    assert {kind for kind, _ in pool4.run(initialize_differently, case=world4(2, 1), by_rank={})} == {""}


@pytest.mark.parametrize(
    "kind", ["reentrant", slow("nonreentrant"), slow("deepspeed reentrant"), slow("deepspeed nonreentrant")], ids=str
)
def test_experts_that_checkpoint_inside_themselves_are_refused(pool2: ProcessPool, kind: str) -> None:
    for error, message in pool2.run(train_self_checkpointing_experts, case=world2(), kind=kind):
        assert error == "UnsupportedError"
        assert "blocks.0.moe.deepspeed_moe: an expert uses activation checkpointing inside itself" in message
    allowed = Case(levels=levels_of((2,), (1,)), toy=ToyConfig(ep_size=2), kernels="reference")
    assert pool2.run(train_self_checkpointing_experts, case=allowed, kind=kind) == [("", "")] * 2


def test_thawing_a_parameter_after_attach_is_refused(pool2: ProcessPool) -> None:
    for kind, message in pool2.run(thaw_after_attach, case=world2()):
        assert kind == "UnsupportedError"
        assert "blocks.1.moe.deepspeed_moe: a frozen parameter of local expert 0 became trainable" in message


def test_process_groups_that_only_some_ranks_made_do_no_harm(pool4: ProcessPool) -> None:
    case = world4(2, 1)
    for plain, hybrid in zip(
        pool4.run(plain_losses, case=case), pool4.run(losses_beside_groups_of_some_ranks, case=case), strict=True
    ):
        assert hybrid == close_to(plain)
