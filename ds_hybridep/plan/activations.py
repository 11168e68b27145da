# SPDX-License-Identifier: Apache-2.0
"""Activation bytes of one rank: an estimate for Hugging Face's MoE models in PyTorch, operation by operation.

What autograd keeps of one token in a layer, p bytes an element (fp32 4):

    two norms           2 x (4 + 2 p) hidden             the input in fp32, normalised, and the output
    attention           p (query + key + value + out)    by a fused kernel, without scores; 4 B a head beside them
      norms inside      (4 + p) of what they see         queries and keys of Qwen3
    router              4 x experts                      probabilities
    each routed expert  p (2 hidden + 4 ffn)             its row, gate, up, silu(gate), their product, its output
    shared experts, dense layer    4 p ffn

Without checkpointing that is kept of all layers.  With checkpointing a layer's input is kept of all, and the rest of
the one that is at work.  In its backward the widest gradients come on top: 7 rows or 2 inner rows of each routed
expert, or where they are more those of all weights of experts.  The loss, at another time than any layer, takes 12 B a
logit: log-probabilities and two gradients in fp32; in pieces (`has_fused_loss`) it takes nothing to speak of.

Not counted: scores of an attention that is not fused, packets, and what the allocator loses, for which `memory` has an
allowance.
`tests/plan/test_activations.py` holds it against what PyTorch keeps.
"""

from dataclasses import dataclass

from ds_hybridep.plan.workload import MASTER_BYTES, Workload

INDEX_BYTES_PER_ROW = 28  # three int64 and one fp32 beside each routed row
LOSS_BYTES_PER_LOGIT = 12
ROWS_OF_GRADIENTS, INNER_ROWS_OF_GRADIENTS = 7, 2


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank.

    stored: of all layers until their backward.
    layer: of the layer at work, beside that.
    loss: of the loss, while no layer works.
    """

    stored_bytes: float
    layer_bytes: float
    loss_bytes: float

    @property
    def total_bytes(self) -> float:
        """The most at once."""
        return self.stored_bytes + max(self.layer_bytes, self.loss_bytes)


def activations_of(
    workload: Workload,
    *,
    num_experts_held: float,
    is_padded: bool = False,
    share: float = 1.0,
    in_flight: int = 1,
    has_loss: bool = True,
) -> Activations:
    """What training needs beside its state.

    num_experts_held: of each layer, on a rank, copies included: of their trained weights there are gradients.
    is_padded: experts compute their whole capacity, as in DeepSpeed's layer.
    share, in_flight, has_loss: of a pipeline's stage: its share of the layers, micro-batches between forward and
        backward, and whether it is the last one.
    """
    model, widths = workload.model, workload.model.widths
    tokens, element = workload.tokens_per_rank, workload.param_bytes
    num_rows = workload.expert_capacity * model.num_experts if is_padded else workload.expert_rows
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
    """Bytes of one token."""
    return (MASTER_BYTES + 2 * workload.param_bytes) * workload.model.hidden


def _attention_bytes(workload: Workload) -> float:
    """Bytes of one token in a layer, both norms included."""
    widths, element = workload.model.widths, workload.param_bytes
    kept = (
        element * (widths.query + widths.key + widths.value + widths.attention_out) + MASTER_BYTES * widths.num_heads
    )
    return 2 * _norm_bytes(workload) + kept + (MASTER_BYTES + element) * widths.attention_norms


def _experts_bytes(workload: Workload, num_rows: int) -> float:
    """Bytes of all tokens in a layer: router, routed and shared experts."""
    model, widths, element = workload.model, workload.model.widths, workload.param_bytes
    each_row = element * (2 * model.hidden + 4 * widths.expert_ffn) + INDEX_BYTES_PER_ROW
    each_token = MASTER_BYTES * model.num_experts + 4 * element * widths.shared_ffn
    return num_rows * each_row + workload.tokens_per_rank * each_token
