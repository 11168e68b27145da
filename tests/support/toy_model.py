# SPDX-License-Identifier: Apache-2.0
"""A tiny MoE language model whose weights and data are closed-form functions, so every rank knows what all ranks hold.

    tokens [B, S] -> embedding -> L x [ + dense(norm(x)), + MoE(norm(x)) ] -> norm -> head -> loss

Weights are a function of (seed, parameter name with the *global* expert id): no expert equals another, and the same
model results for any expert-parallel layout. Batches are a function of (seed, step, micro-step, global rank).
"""

import re
import zlib
from dataclasses import dataclass
from typing import Literal

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

AUX_LOSS_WEIGHT = 0.01
ROUTING_GAP = 1.25  # logits between a token's n-th and (n+1)-th choice under "by_token"
STARVED_LOGIT = -30.0  # below anything that a few optimizer steps can lift into the top k

_LOCAL_EXPERT = re.compile(r"deepspeed_experts\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """Shape and behaviour of the model; everything that changes what is computed, nothing about how it is trained."""

    hidden: int = 16  # more than num_experts + 1 for routing by token
    ffn: int = 32
    vocab: int = 64
    sequence: int = 8  # tokens of one sequence; a rank's batch is a number of sequences
    num_layers: int = 2
    num_experts: int = 8
    ep_size: int = 4
    k: int = 2
    drop_tokens: bool = True
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.5
    min_capacity: int = 2
    expert: Literal["mlp", "swiglu"] = "mlp"
    checkpointing: Literal[None, "reentrant", "nonreentrant"] = None
    use_residual: bool = False
    # "learned": as in any model. "by_token": fixed features give each token a wide preference for certain experts, so
    # that bf16 rounding moves none from one expert to another, which would drown everything that a test could see.
    routing: Literal["learned", "by_token"] = "learned"
    drift: int = 0  # steps after which other two tokens are the only ones; 0: all tokens, always
    starved_experts: tuple[int, ...] = ()  # global ids that no token is ever routed to


class MlpExpert(nn.Module):
    """Two linear maps with bias around a GELU."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(rows)))


class SwigluExpert(nn.Module):
    """Gated expert without bias."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(rows)) * self.up(rows))


class Block(nn.Module):
    """One dense and one MoE sublayer, both residual; returns the auxiliary loss beside the activations."""

    def __init__(self, config: ToyConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.dense_norm = nn.LayerNorm(config.hidden)
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.moe_norm = nn.LayerNorm(config.hidden)
        expert_type = {"mlp": MlpExpert, "swiglu": SwigluExpert}[config.expert]
        self.moe = MoE(
            hidden_size=config.hidden,
            expert=expert_type(config.hidden, config.ffn),
            num_experts=config.num_experts,
            ep_size=config.ep_size,
            k=config.k,
            capacity_factor=config.capacity_factor,
            eval_capacity_factor=config.eval_capacity_factor,
            min_capacity=config.min_capacity,
            drop_tokens=config.drop_tokens,
            use_residual=config.use_residual,
            # Both draw random numbers, so that two runs would agree only as long as nothing else draws any.
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Activations [B, S, D] after the block and the auxiliary loss; `tokens` [B, S] only steer the routing."""
        x = x + torch.tanh(self.dense(self.dense_norm(x)))
        # DeepSpeed's gate has no bias: a feature that is always 1 gives its last column that role.
        normed = self.moe_norm(x)
        fixed = [torch.ones_like(normed[..., -1:])]
        if self.config.routing == "by_token":
            fixed.insert(0, self._preferences(tokens).to(normed.dtype))
        num_fixed = sum(feature.shape[-1] for feature in fixed)
        moe_input = torch.cat([normed[..., :-num_fixed], *fixed], dim=-1)
        moe_output, aux_loss, _ = self.moe(moe_input)
        return x + moe_output, aux_loss

    def _preferences(self, tokens: Tensor) -> Tensor:
        """[B, S, E]: 0 for the favourite expert, -1/E for the next, and so on in a circle; each layer has its own."""
        num_experts = self.config.num_experts
        experts = torch.arange(num_experts, device=tokens.device)
        return -((experts - (tokens * 3 + self.layer).unsqueeze(-1)) % num_experts) / num_experts


class ToyModel(nn.Module):
    """`forward(tokens, targets)` is the training loss of one micro-batch, auxiliary losses included."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy plus weighted auxiliary losses; tokens, targets [B, S] int64, B may be 0."""
        x = self.embedding(tokens)
        aux_losses = []
        for block in self.blocks:
            if self.config.checkpointing is not None and self.training:
                reentrant = self.config.checkpointing == "reentrant"
                x, aux_loss = checkpoint(block, x, tokens, use_reentrant=reentrant, preserve_rng_state=False)
            else:
                x, aux_loss = block(x, tokens)
            aux_losses.append(aux_loss)
        logits = self.head(self.norm(x)).float().flatten(0, 1)
        # Sum over count, not the mean: of no tokens the mean is nan, and so is DeepSpeed's auxiliary loss.
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / max(1, targets.numel())
        if targets.numel() > 0:
            loss = loss + AUX_LOSS_WEIGHT * sum(aux_losses)
        return loss


def expert_parallel_rank(rank: int, *, world_size: int, ep_size: int, data_before_expert: bool) -> int:
    """Position of `rank` in its EP group: groups are consecutive ranks, or strided ones with `data_before_expert`.

    World 4, ep 2: consecutive [0,1] [2,3]; strided [0,2] [1,3].
    """
    return rank // (world_size // ep_size) if data_before_expert else rank % ep_size


def global_name(name: str, *, ep_rank: int, num_local_experts: int) -> str:
    """Parameter name with the local expert number replaced by the global one; other names as they are."""
    return _LOCAL_EXPERT.sub(
        lambda match: f"deepspeed_experts.{ep_rank * num_local_experts + int(match.group(1))}.", name
    )


def initial_value(name: str, shape: torch.Size, *, config: ToyConfig, seed: int) -> Tensor:
    """What the parameter of that global name holds before the first step, fp32."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return (1.0 if name.endswith("weight") else 0.0) + 0.1 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if name.endswith("gate.wg.weight"):
        return _initial_gate(noise, config)
    return noise if "embedding" in name else noise / shape[-1] ** 0.5


def _initial_gate(noise: Tensor, config: ToyConfig) -> Tensor:
    """[E, D] from noise of that shape: the last column is the bias, the E before it read the preferences."""
    num_experts, _ = noise.shape
    value = noise.clone()
    value[:, -1] = 0.3 * noise[:, -1]
    if config.routing == "by_token":
        value = 0.02 * noise
        value[:, -1 - num_experts : -1] += ROUTING_GAP * num_experts * torch.eye(num_experts)
    value[list(config.starved_experts), :-1] = 0.0
    value[list(config.starved_experts), -1] = STARVED_LOGIT
    return value


def build_model(config: ToyConfig, *, rank: int, world_size: int, data_before_expert: bool, seed: int) -> ToyModel:
    """The model as `rank` holds it: its local experts and everything shared."""
    model = ToyModel(config)
    ep_rank = expert_parallel_rank(
        rank, world_size=world_size, ep_size=config.ep_size, data_before_expert=data_before_expert
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full_name = global_name(name, ep_rank=ep_rank, num_local_experts=config.num_experts // config.ep_size)
            parameter.copy_(initial_value(full_name, parameter.shape, config=config, seed=seed))
    return model


def batch(
    config: ToyConfig, *, seed: int, step: int, micro_step: int, rank: int, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """Tokens and targets [num_sequences, S] int64 of one micro-step of one rank; the targets can be learnt."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{step}/{micro_step}/{rank}".encode()))
    tokens = torch.randint(config.vocab, (num_sequences, config.sequence), generator=generator)
    if config.drift:
        tokens = (tokens % 2 + 2 * (step // config.drift)) % config.vocab
    return tokens, (3 * tokens + 1) % config.vocab
