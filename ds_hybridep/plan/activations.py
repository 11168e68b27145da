# SPDX-License-Identifier: Apache-2.0
"""Activation bytes of one rank: an estimate for Hugging Face's MoE models in PyTorch, operation by operation.

Autograd keeps these bytes of one token in a layer, with p bytes for an element (4 for fp32):

    two norms           2 x (4 + 2 p) hidden             the input in fp32, the normalised input, the output
    attention           p (query + key + value + out)    a fused kernel keeps no scores, but 4 B for each head
      norms inside      (4 + p) for each element         queries and keys in Qwen3
    router              4 x experts                      probabilities
    each routed expert  p (2 hidden + 4 ffn)             its row, gate, up, silu(gate), their product, its output
    shared experts, dense layer    4 p ffn

Without checkpointing, all layers keep this.  With checkpointing, every layer keeps its input, and only the layer at
work keeps the rest.  Its backward adds the widest gradients: 7 rows or 2 inner rows for each routed row, or the
gradients of all expert weights if they take more.  The loss takes 12 B for each logit, while no layer works:
log-probabilities and two gradients in fp32.  A loss in pieces (`has_fused_loss`) takes almost nothing.

The estimate leaves out packets, attention scores without a fused kernel, and memory that the allocator loses; `memory`
has an allowance for the allocator.  `tests/plan/test_activations.py` compares the estimate with what PyTorch keeps.
"""

from dataclasses import dataclass

from ds_hybridep.plan.workload import MASTER_BYTES, Workload

INDEX_BYTES_PER_ROW = 28  # three int64 and one fp32 beside each routed row
LOSS_BYTES_PER_LOGIT = 12
ROWS_OF_GRADIENTS, INNER_ROWS_OF_GRADIENTS = 7, 2


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one rank.

    stored_bytes: all layers keep them until their backward.
    layer_bytes: the layer at work needs them in addition.
    loss_bytes: the loss needs them in addition, while no layer works.
    """

    stored_bytes: float
    layer_bytes: float
    loss_bytes: float

    @property
    def total_bytes(self) -> float:
        """Largest number of bytes at one time."""
        return self.stored_bytes + max(self.layer_bytes, self.loss_bytes)


def activations_of(
    workload: Workload,
    *,
    num_experts_held: float,
    is_padded: bool = False,
    share: float = 1.0,
    in_flight: int = 1,
    has_loss: bool = True,
    fullest: float = 1.0,
) -> Activations:
    """Estimate the activations of one rank, or of one rank in a stage of a pipeline.

    num_experts_held: experts of each layer on a rank, copies included; their trained weights have gradients.
    is_padded: experts compute their whole capacity, as in DeepSpeed's layer.
    share, in_flight, has_loss: for a stage of a pipeline: its share of the layers, its micro-batches between forward
        and backward, and whether it is the last stage.
    fullest: rows that the rank computes over those of even routing.
    """
    model, widths = workload.model, workload.model.widths
    tokens, element = workload.tokens_per_rank, workload.param_bytes
    num_rows = workload.expert_capacity * model.num_experts if is_padded else workload.expert_rows * fullest
    kept = tokens * _attention_bytes(workload) + _experts_bytes(workload, num_rows)
    kept_dense = tokens * (_attention_bytes(workload) + 4 * element * widths.dense_ffn)
    num_dense = widths.num_layers - model.num_moe_layers
    widest = max(ROWS_OF_GRADIENTS * model.hidden, INNER_ROWS_OF_GRADIENTS * widths.expert_ffn)
    gradients = max(num_rows * element * widest, num_experts_held * workload.expert_travel_bytes)
    if workload.is_checkpointed:
        stored = share * widths.num_layers * tokens * element * model.hidden
        layer = max(kept + gradients, kept_dense if num_dense else 0.0)
    else:
        stored = share * (model.num_moe_layers * kept + num_dense * kept_dense)
        layer = gradients
    last_norm = tokens * _norm_bytes(workload) if has_loss else 0.0
    has_logits = has_loss and not workload.has_fused_loss
    loss = tokens * LOSS_BYTES_PER_LOGIT * widths.vocabulary if has_logits else 0.0
    return Activations(in_flight * stored + last_norm, layer, loss)


def _norm_bytes(workload: Workload) -> float:
    """Bytes of one token for one norm."""
    return (MASTER_BYTES + 2 * workload.param_bytes) * workload.model.hidden


def _attention_bytes(workload: Workload) -> float:
    """Bytes of one token in a layer, both norms included."""
    widths, element = workload.model.widths, workload.param_bytes
    kept = (
        element * (widths.query + widths.key + widths.value + widths.attention_out) + MASTER_BYTES * widths.num_heads
    )
    return 2 * _norm_bytes(workload) + kept + (MASTER_BYTES + element) * widths.attention_norms


def _experts_bytes(workload: Workload, num_rows: float) -> float:
    """Bytes of all tokens in a layer: router, routed and shared experts."""
    model, widths, element = workload.model, workload.model.widths, workload.param_bytes
    each_row = element * (2 * model.hidden + 4 * widths.expert_ffn) + INDEX_BYTES_PER_ROW
    each_token = MASTER_BYTES * model.num_experts + 4 * element * widths.shared_ffn
    return num_rows * each_row + workload.tokens_per_rank * each_token
