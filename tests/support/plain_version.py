# SPDX-License-Identifier: Apache-2.0
"""The idea of this package in plain PyTorch and one process.  Read this first; the rest makes it fast.

Two datacentres train one model with a layer of E experts.  Plain expert parallelism sends each token to the rank of
its expert, also over the slow link.  Here tokens stay in their datacentre, and experts move:

    datacentre 0                     slow link              datacentre 1
    owner of E0, E1                                         owner of E2, E3
    replica of E2, E3       <- weights, as packets -        (the owner steps its experts)
                            - gradients, as packets ->      (and sums the gradients of both sides)

A packet is what a codec makes of a tensor.  It loses something, and two rules make up for that:

    gradients    the sender keeps what a packet left out, the residual, and adds it to its next gradient
    weights      the owner remembers what its replica holds, the mirror, and sends how its weights differ from that

So no part of a gradient is lost, only late, and a replica is never further from its owner than one packet's error.
`test_plain_version.py` trains the same model with the package on four ranks: the parameters must be equal.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]  # tokens and targets [B, S]
Code = Callable[[Tensor], Tensor]  # encodes a tensor, and returns what the packet decodes to
Experts = list[dict[str, Tensor]]  # by expert: the parameters by name


class PlainVersion:
    """A model with one MoE layer (top-1), and its training in two datacentres.

    Args:
        dense: all parameters but those of experts, by name.
        experts: the parameters of each of the E experts; the first half is owned in datacentre 0.
        gradient_code, weight_code: the codecs of the slow link.
        optimizer: makes the optimizer of the given parameters.
    """

    def __init__(
        self,
        dense: dict[str, Tensor],
        experts: Experts,
        *,
        gradient_code: Code,
        weight_code: Code,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.dense = {name: value.clone().requires_grad_() for name, value in dense.items()}
        # What each datacentre computes with, [datacentre][expert][name].  The first shipment of weights is exact.
        self.held = [_copies(experts), _copies(experts)]
        self.mirror = [
            {name: value.clone() for name, value in one.items()} for one in experts
        ]  # what the owner of an expert knows its replica to have
        self.residual = [{name: torch.zeros_like(value) for name, value in one.items()} for one in experts]
        self.gradient_code, self.weight_code = gradient_code, weight_code
        owned = [value for expert, one in enumerate(experts) for value in self.owners(expert).values()]
        self.optimizer = optimizer([*self.dense.values(), *owned])

    def home(self, expert: int) -> int:
        """The datacentre that owns the expert."""
        return 2 * expert // len(self.mirror)

    def owners(self, expert: int) -> dict[str, Tensor]:
        return self.held[self.home(expert)][expert]

    def replicas(self, expert: int) -> dict[str, Tensor]:
        return self.held[1 - self.home(expert)][expert]

    def step(self, micro_steps: Sequence[Sequence[Sequence[Batch]]]) -> list[float]:
        """One optimizer step.  micro_steps: by micro-step, datacentre and rank.  Returns the loss of each batch."""
        self.optimizer.zero_grad()
        for one in [one for experts in self.held for one in experts]:
            for value in one.values():
                value.grad = torch.zeros_like(value)

        # 1. Forward and backward.  Each datacentre uses its own copies, so no token crosses.
        count = sum(len(ranks) for datacentres in micro_steps for ranks in datacentres)
        losses = []
        for datacentres in micro_steps:
            for experts, ranks in zip(self.held, datacentres, strict=True):
                for tokens, targets in ranks:
                    loss = self.loss(experts, tokens, targets)
                    (loss / count).backward()  # the mean over all ranks and micro-steps
                    losses.append(loss.item())

        # 2. The replicas' gradients return to the owners, once per step.
        for expert, residual in enumerate(self.residual):
            for name, replica in self.replicas(expert).items():
                wanted = replica.grad + residual[name]
                arrived = self.gradient_code(wanted)
                residual[name] = wanted - arrived
                self.owners(expert)[name].grad += arrived

        # 3. The owners step.
        self.optimizer.step()

        # 4. The new weights go to the replicas.
        with torch.no_grad():
            for expert, mirror in enumerate(self.mirror):
                for name, weight in self.owners(expert).items():
                    mirror[name] += self.weight_code(weight - mirror[name])
                    self.replicas(expert)[name].copy_(mirror[name])
        return losses

    def loss(self, experts: Experts, tokens: Tensor, targets: Tensor) -> Tensor:
        """Embedding, one MoE layer beside a residual connection, head, cross entropy."""
        x = self.dense["embedding"][tokens.flatten()]
        chances = torch.softmax(x @ self.dense["gate"].T, dim=-1)  # [T, E]
        best, chosen = chances.max(dim=-1)
        outputs = torch.zeros_like(x)
        for expert, one in enumerate(experts):
            rows = (chosen == expert).nonzero().flatten()
            hidden = F.gelu(F.linear(x[rows], one["up.weight"], one["up.bias"]))
            outputs = outputs.index_add(0, rows, F.linear(hidden, one["down.weight"], one["down.bias"]))
        logits = (x + best[:, None] * outputs) @ self.dense["head"].T
        return F.cross_entropy(logits, targets.flatten())


def _copies(experts: Experts) -> Experts:
    return [{name: value.clone().requires_grad_() for name, value in one.items()} for one in experts]
