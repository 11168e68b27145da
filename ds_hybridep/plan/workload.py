# SPDX-License-Identifier: Apache-2.0
"""Bytes, parameters and FLOPs of one training step of a Mixture-of-Experts model, per layer and rank."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.slots import Shape

DTYPE_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
MASTER_BYTES = 4  # the gate's weights, gradient sums, and ZeRO's copy of a 2-byte parameter are fp32
ADAM_BYTES = 8  # two fp32 moments for each trained parameter
INDEX_BYTES = 4  # an expert id beside a row
COUNT_BYTES = 16  # header of the first message to each destination of an exchange
MIN_CAPACITY = 4  # deepspeed.moe.layer.MoE's default


@dataclass(frozen=True)
class Scores:
    """Attention scores of some layers.

    elements: by which each pair of tokens is multiplied, queries and outputs together.
    window: tokens that a token looks back on at most, itself included; None: all of its sequence.
    """

    num_layers: int
    elements: int
    window: int | None = None

    def flops_per_token(self, sequence_tokens: int) -> float:
        """Forward FLOPs of one token of a sequence, on average: two for each element and each token it looks at."""
        seen = min(self.window or sequence_tokens, sequence_tokens)
        # The first tokens of a sequence see fewer: 1, 2, 3 ...
        mean_seen = seen - seen * (seen - 1) / (2 * sequence_tokens)
        return self.num_layers * 2.0 * self.elements * mean_seen


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Elements that one token has in the tensors of a layer; the estimate of activations needs them.

    num_layers: number of layers, including layers without routed experts.
    query, key, value, attention_out: elements in attention, over all heads; shared keys and values count once.
    num_heads: number of query heads.
    attention_norms: elements that norms inside attention see.
    expert_ffn, shared_ffn, dense_ffn: inner width of an expert, of all shared experts, of a layer without experts.
    vocabulary: number of logits; 0: the model has no head.
    scores: attention scores of the layers.  Scans of Mamba and of linear attention are left out.
    """

    num_layers: int
    query: int
    key: int
    value: int
    attention_out: int
    num_heads: int
    expert_ffn: int
    attention_norms: int = 0
    shared_ffn: int = 0
    dense_ffn: int = 0
    vocabulary: int = 0
    scores: tuple[Scores, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MoEModel:
    """Sizes of a model.

    expert_shapes: shapes of the tensors of one routed expert; a vector, where only their number is known.
    dense_shapes: of all others, on every rank, in the model's order: attention, norms, routers, shared experts, dense
        layers, embeddings.
    active_dense_params: dense parameters by which every token is multiplied (a table for look-ups does not count).
    attention_matrices, other_matrices: of the dense shapes, those beside which adapters may go: of attention and the
        like, and of shared experts and dense layers.
    num_adapter_params: parameters of adapters, which the shapes contain; see `adapters`.
    stacks_experts: True if one parameter holds the same tensor of all experts of a rank.
    known_widths: None: `widths` guesses them from the other fields.
    is_of_hub: a Hugging Face model, which needs DeepSpeed's AutoEP; else it has MoE layers of its own.
    autoep_preset: AutoEP's name for this kind of model; None: AutoEP does not train it.
    note: what a reader of the answer should know about these sizes.
    """

    name: str
    hidden: int
    num_experts: int
    top_k: int
    num_moe_layers: int
    expert_shapes: tuple[Shape, ...]
    dense_shapes: tuple[Shape, ...]
    active_dense_params: int
    attention_matrices: tuple[Shape, ...] = ()
    other_matrices: tuple[Shape, ...] = ()
    num_adapter_params: int = 0
    stacks_experts: bool = False
    known_widths: Widths | None = None
    is_of_hub: bool = False
    autoep_preset: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for field in ("hidden", "num_experts", "top_k", "num_moe_layers", "expert_params"):
            if getattr(self, field) < 1:
                raise PlanError(f"model {self.name!r}: {field} is {getattr(self, field)}, but must be at least 1")
        if self.top_k > self.num_experts:
            raise PlanError(
                f"model {self.name!r}: top_k is {self.top_k}, but there are only {self.num_experts} experts"
            )

    @cached_property
    def expert_params(self) -> int:
        """Parameters of one routed expert."""
        return num_params(self.expert_shapes)

    @cached_property
    def dense_params(self) -> int:
        """Parameters that every rank has."""
        return num_params(self.dense_shapes)

    @property
    def widths(self) -> Widths:
        """The known widths; else a guess: an attention of the hidden width, experts of three matrices, and no head."""
        return self.known_widths or Widths(
            num_layers=self.num_moe_layers,
            query=self.hidden,
            key=self.hidden,
            value=self.hidden,
            attention_out=self.hidden,
            num_heads=0,
            expert_ffn=-(-self.expert_params // (3 * self.hidden)),
            scores=(Scores(self.num_moe_layers, 2 * self.hidden),),
        )

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, without adapters."""
        experts = self.num_moe_layers * self.num_experts * self.expert_params
        return self.dense_params + experts - self.num_adapter_params

    @property
    def num_active_params(self) -> int:
        """Parameters by which one token is multiplied, adapters included."""
        return self.active_dense_params + self.num_moe_layers * self.top_k * self.expert_params


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of a model, as one rank sees it.

    tokens_per_rank: tokens of a micro-step.
    sequence_tokens: tokens of a sequence, which attention scores grow with; 0: scores are left out.
    param_bytes: bytes of a parameter, of its gradient, and of an element of a token row.
    offloads_optimizer: the states of DeepSpeed's optimizer are on the host.
    is_checkpointed: the backward recomputes activations and repeats the layers' exchanges.
    capacity_factor: capacity factor of DeepSpeed's gate, which pads its all-to-alls to the capacity.
    row_scale: measured rows over the rows of even routing, such as 0.9 if tokens prefer experts close by.
    trainable_expert_shapes, trainable_dense_shapes: shapes of the trained tensors of one expert, and of those that all
        ranks hold; None: all are trained. Adapters train few, and only those travel.
    learning_rate: learning rate of AdamW, on which the size of patches of 16-bit weights depends.
    has_fused_loss: the loss is computed in pieces, so the logits of all tokens are never in memory together.
    skew: rows that the fullest rank of the expert-parallel group computes over the mean, if every expert stays where
        it is; 1: even routing.  `choices.skewed_weights` says how the loads of experts fall.
    expert_loads: [E] measured rows of each expert, in any unit, in place of a skew.
    """

    model: MoEModel
    tokens_per_rank: int
    sequence_tokens: int = 0
    micro_steps: int = 1
    param_bytes: int = 2
    zero_stage: int = 1
    offloads_optimizer: bool = False
    is_checkpointed: bool = False
    capacity_factor: float = 1.0
    row_scale: float = 1.0
    trainable_expert_shapes: tuple[Shape, ...] | None = None
    trainable_dense_shapes: tuple[Shape, ...] | None = None
    learning_rate: float = 1e-5
    has_fused_loss: bool = False
    skew: float = 1.0
    expert_loads: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2):
            raise PlanError(f"zero_stage is {self.zero_stage}, but plans are made for stages 0, 1 and 2")
        if self.offloads_optimizer and self.zero_stage == 0:
            raise PlanError(
                "zero_stage is 0, but DeepSpeed offloads the optimizer under stages 1 and 2; use one of them"
            )
        if self.expert_loads is not None:
            num_used = sum(rows > 0 for rows in self.expert_loads)
            is_whole = len(self.expert_loads) == self.model.num_experts and min(self.expert_loads) >= 0
            if not is_whole or num_used < self.model.top_k:
                raise PlanError(
                    f"expert_loads has {len(self.expert_loads)} entries, {num_used} of them > 0; give one >= 0 for "
                    f"each of the {self.model.num_experts} experts, and at least {self.model.top_k} > 0"
                )

    @property
    def is_uneven(self) -> bool:
        """True if experts may get different numbers of rows."""
        return self.skew != 1.0 or self.expert_loads is not None

    def in_smaller_micro_batches(self) -> Iterator["Workload"]:
        """The same step in twice, four times ... as many micro-steps, down to micro-batches of one sequence."""
        parts = 2
        while self.tokens_per_rank // parts >= max(self.sequence_tokens, 1):
            yield replace(self, tokens_per_rank=self.tokens_per_rank // parts, micro_steps=self.micro_steps * parts)
            parts *= 2

    @cached_property
    def expert_travel_params(self) -> int:
        """Number of parameters of one expert that travel after each step, and whose gradients return."""
        return num_params(self.expert_tensors)

    @property
    def expert_travel_bytes(self) -> int:
        """Bytes of one expert's weights, or of its gradients, uncompressed: both travel in the parameter's type."""
        return self.expert_travel_params * self.param_bytes

    @property
    def num_train_params(self) -> int:
        """Trained parameters of the whole model."""
        model = self.model
        return self.dense_train_params + model.num_moe_layers * model.num_experts * self.expert_travel_params

    @cached_property
    def dense_train_params(self) -> int:
        """Number of dense parameters whose gradients are summed over all ranks."""
        return num_params(self.dense_tensors)

    @property
    def expert_tensors(self) -> tuple[Shape, ...]:
        """Shapes of one expert's tensors that travel."""
        return self.model.expert_shapes if self.trainable_expert_shapes is None else self.trainable_expert_shapes

    @property
    def dense_tensors(self) -> tuple[Shape, ...]:
        """Shapes of the dense tensors that are trained, in the model's order."""
        return self.model.dense_shapes if self.trainable_dense_shapes is None else self.trainable_dense_shapes

    def owned_tensors(self, num_owned: int) -> tuple[Shape, ...]:
        """Shapes of the trained tensors of `num_owned` experts in each layer, in the model's order."""
        if self.model.stacks_experts:
            of_layer = tuple((num_owned, *shape) for shape in self.expert_tensors)
        else:
            of_layer = self.expert_tensors * num_owned
        return of_layer * self.model.num_moe_layers

    @property
    def hot_expert_bytes(self) -> int:
        """Bytes of one hot expert on a rank, in all layers: a replica and its gradient sums."""
        of_layer = self.model.expert_params * self.param_bytes + self.expert_travel_params * MASTER_BYTES
        return self.model.num_moe_layers * of_layer

    @property
    def row_bytes(self) -> int:
        """Bytes of a hidden state or of its gradient."""
        return self.model.hidden * self.param_bytes

    @property
    def dispatch_extra_bytes(self) -> int:
        """Bytes that travel with a row to the experts: an id and an fp32 weight for each of its top_k experts."""
        return self.model.top_k * (INDEX_BYTES + MASTER_BYTES)

    @property
    def return_extra_bytes(self) -> int:
        """Bytes that travel with a row's input gradient: the fp32 gradient of each gate weight."""
        return self.model.top_k * MASTER_BYTES

    @property
    def expert_capacity(self) -> int:
        """Rows that DeepSpeed's gate reserves for each expert on a rank.  Source: its sharded_moe._capacity."""
        model = self.model
        rows = math.ceil(self.tokens_per_rank / model.num_experts * self.capacity_factor * model.top_k)
        return max(rows, MIN_CAPACITY)

    # ---- FLOPs ----
    #
    # A product with a matrix takes 2 FLOPs for each parameter and token.  Its backward takes as many for the gradient
    # of its input, and as many again for the gradient of the matrix, unless that is frozen.  The backward of scores
    # takes twice as many as their forward.

    @cached_property
    def score_flops(self) -> float:
        """Forward FLOPs of attention scores, divided evenly among the MoE layers."""
        if not self.sequence_tokens:
            return 0.0
        of_token = math.fsum(one.flops_per_token(self.sequence_tokens) for one in self.model.widths.scores)
        return self.tokens_per_rank * of_token / self.model.num_moe_layers

    @property
    def pre_expert_flops(self) -> float:
        """Forward FLOPs of all but the routed experts, divided evenly among the MoE layers."""
        # Source: paper (1), (2), with PE = (m+1) attention + m FFN.
        return self._dense_flops(self.model.active_dense_params) + self.score_flops

    @property
    def pre_expert_backward_flops(self) -> float:
        """Backward FLOPs of the same."""
        # A table for look-ups may be trained, and multiplies nothing.
        trained = min(self.dense_train_params, self.model.active_dense_params)
        return self._dense_flops(self.model.active_dense_params + trained) + 2.0 * self.score_flops

    def _dense_flops(self, num_params: int) -> float:
        return self.tokens_per_rank * 2.0 * num_params / self.model.num_moe_layers

    @property
    def expert_rows(self) -> int:
        """Number of (token, expert) pairs of one rank and layer, which are the rows that experts compute for it."""
        return self.tokens_per_rank * self.model.top_k

    @property
    def expert_flops_per_row(self) -> float:
        """Forward FLOPs of one expert on one row.  Source: paper (1)."""
        return 2.0 * self.model.expert_params

    @property
    def expert_backward_flops_per_row(self) -> float:
        """Backward FLOPs of one expert on one row."""
        return 2.0 * (self.model.expert_params + self.expert_travel_params)

    @property
    def backward_share(self) -> float:
        """Share of a micro-step's FLOPs that come after its forward, what is computed again included."""
        forward = self.pre_expert_flops + self.expert_rows * self.expert_flops_per_row
        backward = self.pre_expert_backward_flops + self.expert_rows * self.expert_backward_flops_per_row
        backward += forward if self.is_checkpointed else 0.0
        return backward / (forward + backward)


def num_params(shapes: Iterable[Shape]) -> int:
    """Elements of tensors of these shapes."""
    return sum(map(math.prod, shapes))
