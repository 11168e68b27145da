# SPDX-License-Identifier: Apache-2.0
"""The estimate of activations against what PyTorch keeps of small Hugging Face models."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_hybridep.plan.activations import activations_of
from ds_hybridep.plan.model_sizes import model_from_mapping
from ds_hybridep.plan.workload import Workload

NUM_EXPERTS, TOP_K = 8, 2
SHAPE = (2, 256)  # sequences, tokens
SAVED_TOLERANCE = 0.02  # small tensors by head or token, and padding
PEAK_TOLERANCE = 0.10  # gradients of the moment are counted by their widest


def config_of(kind, **sizes):
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 300, "intermediate_size": 96, "num_experts_per_tok": TOP_K, **sizes,
    }  # fmt: skip
    import transformers  # takes four seconds, which no other test of this process needs to wait for

    if kind == "mixtral":
        return transformers.MixtralConfig(num_local_experts=NUM_EXPERTS, **sizes)
    return transformers.Qwen3MoeConfig(
        num_experts=NUM_EXPERTS, moe_intermediate_size=sizes["intermediate_size"], **sizes
    )


def estimate_of(config, dtype, *, is_checkpointed):
    model = model_from_mapping(config.to_dict(), "small")
    workload = Workload(
        model=model,
        tokens_per_rank=SHAPE[0] * SHAPE[1],
        param_bytes=dtype.itemsize,
        is_checkpointed=is_checkpointed,
    )
    return activations_of(workload, num_experts_held=NUM_EXPERTS)


def model_of(config, dtype):
    import transformers

    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def loss_of(model):
    tokens = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE) * 7919 % model.config.vocab_size
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def saved_bytes(model):
    """Of tensors that autograd keeps of a forward, parameters aside."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in own)


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that were made since and are still alive, and the most of them at once."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.sizes:
                    self._add(storage)
        return result

    def _add(self, storage):
        key = storage._cdata
        self.sizes[key] = storage.nbytes()
        self.now += self.sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key):
        self.now -= self.sizes.pop(key, 0)


def peak_bytes(model, *, is_checkpointed):
    """Of a forward and backward, gradients of parameters aside."""
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_of(model).backward()  # makes the gradients
    with LiveBytes() as live:
        loss_of(model).backward()
    return live.peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "sizes"), [("qwen3", {}), ("mixtral", {}), ("mixtral", {"hidden_size": 128, "head_dim": 16})]
)
def test_what_autograd_keeps(kind, sizes, dtype):
    config = config_of(kind, **sizes)
    expected = estimate_of(config, dtype, is_checkpointed=False)
    log_probabilities = 4 * SHAPE[0] * SHAPE[1] * config.vocab_size
    found = saved_bytes(model_of(config, dtype)) - log_probabilities
    assert expected.stored_bytes == pytest.approx(found, rel=SAVED_TOLERANCE)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("qwen3", {}), ("mixtral", {"intermediate_size": 512}), ("qwen3", {"vocab_size": 4000})],
    ids=["rows", "wide experts", "a large vocabulary"],
)
def test_the_most_at_once(kind, sizes, is_checkpointed):
    config = config_of(kind, **sizes)
    expected = estimate_of(config, torch.bfloat16, is_checkpointed=is_checkpointed)
    found = peak_bytes(model_of(config, torch.bfloat16), is_checkpointed=is_checkpointed)
    assert expected.total_bytes == pytest.approx(found, rel=PEAK_TOLERANCE)


def test_a_fused_loss_and_a_stage_of_a_pipeline():
    model = model_from_mapping(config_of("qwen3", vocab_size=4000, num_hidden_layers=4).to_dict())
    workload = Workload(model=model, tokens_per_rank=512, is_checkpointed=True)
    whole = activations_of(workload, num_experts_held=8)
    assert whole.loss_bytes == 512 * 4000 * 12 > whole.layer_bytes
    fused = Workload(model=model, tokens_per_rank=512, is_checkpointed=True, has_fused_loss=True)
    assert activations_of(fused, num_experts_held=8).loss_bytes == 0
    stage = activations_of(workload, num_experts_held=8, share=0.5, in_flight=3, has_loss=False)
    assert stage.stored_bytes == 3 * 2 * 512 * 64 * 2
    assert (stage.layer_bytes, stage.loss_bytes) == (whole.layer_bytes, 0)


def test_padded_experts_keep_their_capacity():
    model = model_from_mapping(config_of("mixtral").to_dict())
    workload = Workload(model=model, tokens_per_rank=512, capacity_factor=1.5)
    ours, padded = (activations_of(workload, num_experts_held=8, is_padded=one) for one in (False, True))
    more_rows = 0.5 * 512 * TOP_K
    assert padded.stored_bytes - ours.stored_bytes == 3 * more_rows * (2 * (2 * 64 + 4 * 96) + 28)
