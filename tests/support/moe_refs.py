# SPDX-License-Identifier: Apache-2.0
"""What the runtime has to compute and to send, by loops over ranks, tokens and experts; and the cases it is asked for.

Everything that goes in is a closed-form function of the global token id, the layer and the global expert id, so the
test process knows what each rank should hold without asking any of them. Tensors are compared as float64 arrays.
"""

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

HIDDEN = 8
FFN = 12
COUNT_BYTES = 16  # one header

Routing = Sequence[Sequence[Sequence[int]]]  # [rank][token][slot] -> global expert id, -1 = dropped


@dataclass(frozen=True, kw_only=True)
class MoeCase:
    """Layers of experts on a cluster, and the tokens that each rank brings."""

    sizes: tuple[int, ...]  # children of each level, slowest first
    domain_sizes: tuple[int, ...]
    num_tokens: tuple[int, ...]  # of each rank
    exchange: str = "direct"
    top_k: int = 2
    num_experts: int = 8
    num_layers: int = 1
    dtype: str = "float32"
    groups: tuple[tuple[int, ...], ...] = ()  # expert-parallel groups, in group-rank order; empty: the world
    is_down_frozen: bool = False
    has_drops: bool = True
    prefetch_depth: int = 2

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def id(self) -> str:
        parts = ["x".join(map(str, self.sizes)), "S" + "x".join(map(str, self.domain_sizes)), self.exchange]
        parts += [f"k{self.top_k}", "T" + ".".join(map(str, self.num_tokens)), self.dtype, f"L{self.num_layers}"]
        parts += ["groups" + "_".join(".".join(map(str, group)) for group in self.groups)] if self.groups else []
        return "-".join([*parts, *(["frozen"] if self.is_down_frozen else [])])

    def group_of(self, rank: int) -> tuple[int, ...]:
        return next((group for group in self.groups if rank in group), tuple(range(self.world_size)))

    def experts_of(self, rank: int) -> range:
        """Global ids of the experts that `rank` owns: blocks in group-rank order."""
        group = self.group_of(rank)
        num_local = self.num_experts // len(group)
        first = group.index(rank) * num_local
        return range(first, first + num_local)

    def token_ids(self, rank: int) -> range:
        first = sum(self.num_tokens[:rank])
        return range(first, first + self.num_tokens[rank])

    def block(self, **options: Any) -> dict[str, Any]:
        """The "hybridep" block."""
        names = {1: ("dc",), 2: ("dc", "gpu"), 3: ("dc", "node", "gpu")}[len(self.sizes)]
        levels = [
            {"name": names[level], "size": size, "domain_size": domain_size}
            for level, (size, domain_size) in enumerate(zip(self.sizes, self.domain_sizes, strict=True))
        ]
        return {
            "levels": levels,
            "token_exchange": self.exchange,
            "advanced": {"kernels": "reference", "prefetch_depth": self.prefetch_depth},
            "timeout_s": 100,
            "report_interval": 0,
            **options,
        }


# -- closed forms -----------------------------------------------------------------------------------------------


def routing_of(case: MoeCase, layer: int = 0) -> Routing:
    """Experts of every token; one slot in five is dropped where the case says so, and every seventh token wholly."""
    routing = []
    for rank in range(case.world_size):
        routing.append([])
        for token in case.token_ids(rank):
            draw = random.Random(f"{layer}/{token}")
            experts = draw.sample(range(case.num_experts), case.top_k)
            if case.has_drops:
                experts = [-1 if token % 7 == 6 or draw.random() < 0.2 else expert for expert in experts]
            routing[-1].append(experts)
    return routing


def gate_weights(case: MoeCase, rank: int, layer: int = 0) -> Tensor:
    """[T, K] fp32, eighths: products with small integers are exact."""
    values = [
        [(1 + (5 * token + 3 * slot + layer) % 8) / 8 for slot in range(case.top_k)] for token in case.token_ids(rank)
    ]
    return torch.tensor(values).reshape(-1, case.top_k)


def integer_tokens(case: MoeCase, rank: int) -> Tensor:
    """[T, D] float32 of whole numbers that name token and column."""
    ids = torch.tensor(list(case.token_ids(rank)), dtype=torch.float32).reshape(-1, 1)
    return ids * HIDDEN + torch.arange(HIDDEN)


def smooth_tokens(case: MoeCase, rank: int, *, shift: float = 0.0) -> Tensor:
    """[T, D] float64 between -1 and 1, as float32 can hold them."""
    ids = torch.tensor(list(case.token_ids(rank)), dtype=torch.float64).reshape(-1, 1)
    return torch.sin(shift + 0.7 * ids + 1.3 * torch.arange(HIDDEN)).float().double()


class Expert(nn.Module):
    """Two linear maps around a tanh; its values are a function of layer and global expert id."""

    def __init__(self, layer: int, expert: int, *, dtype: str = "float64", is_down_frozen: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN)
        generator = torch.Generator().manual_seed(1000 * layer + expert)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.to(getattr(torch, dtype))
        self.down.requires_grad_(not is_down_frozen)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(rows)))


# -- the dense layer --------------------------------------------------------------------------------------------


def moe_output(x: Tensor, topk_idx: Sequence[Sequence[int]], weights: Tensor, experts: Sequence[nn.Module]) -> Tensor:
    """[T, D]: sum over the slots of weight times expert, token by token."""
    rows = [x[:0]]  # keeps the result in autograd's graph where there is no token
    for token, chosen in enumerate(topk_idx):
        total = torch.zeros_like(x[token])
        for slot, expert in enumerate(chosen):
            if expert >= 0:
                total = total + weights[token, slot] * experts[expert](x[token])
        rows.append(total[None])
    return torch.cat(rows)


def dense_results(case: MoeCase) -> list[dict[str, np.ndarray]]:
    """By rank: outputs and all gradients of the loss `sum(output * cotangent)` over all ranks of each group, fp64."""
    results: list[dict[str, np.ndarray]] = [{} for _ in range(case.world_size)]
    for group in dict.fromkeys(case.group_of(rank) for rank in range(case.world_size)):
        layers = [
            [Expert(layer, expert, is_down_frozen=case.is_down_frozen) for expert in range(case.num_experts)]
            for layer in range(case.num_layers)
        ]
        inputs = {rank: _inputs(case, rank, torch.float64) for rank in group}
        outputs = {}
        for rank in group:
            x, weights = inputs[rank]
            for layer, experts in enumerate(layers):
                x = moe_output(x, routing_of(case, layer)[rank], weights[layer].double(), experts)
            outputs[rank] = x
        sum(loss_of(case, rank, output) for rank, output in outputs.items()).backward()
        for rank in group:
            owned = [[experts[expert] for expert in case.experts_of(rank)] for experts in layers]
            # A tensor that no token came by has no gradient here; it stands for zeros.
            gradients = {
                f"{name}.grad": as_array(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf))
                for name, leaf in leaves_of(case, rank, *inputs[rank], owned).items()
            }
            results[rank] = {"output": as_array(outputs[rank]), **gradients}
    return results


def _inputs(case: MoeCase, rank: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    x = smooth_tokens(case, rank).to(dtype).requires_grad_()
    return x, [gate_weights(case, rank, layer).requires_grad_() for layer in range(case.num_layers)]


def loss_of(case: MoeCase, rank: int, output: Tensor) -> Tensor:
    """Scalar whose gradient differs for every token and column."""
    return (output * smooth_tokens(case, rank, shift=2.0).to(output.dtype)).sum()


def leaves_of(
    case: MoeCase, rank: int, x: Tensor, weights: Sequence[Tensor], owned: Sequence[Sequence[nn.Module]]
) -> dict[str, Tensor]:
    """One rank's tensors that take a gradient, by name, experts under their global id."""
    leaves = {"x": x}
    for layer, (gate, experts) in enumerate(zip(weights, owned, strict=True)):
        leaves[f"layer {layer} gate"] = gate
        for expert, module in zip(case.experts_of(rank), experts, strict=True):
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    leaves[f"layer {layer} expert {expert} {name}"] = parameter
    return leaves


def as_array(value: Tensor) -> np.ndarray:
    """A copy in float64; small enough to travel through a pipe."""
    return value.detach().double().numpy().copy()


def relative_distance(value: np.ndarray, reference: np.ndarray) -> float:
    """L2 distance in units of the reference; 0 where both are 0, infinite where only the reference is, or a shape is
    wrong."""
    if value.shape != reference.shape:
        return math.inf
    distance, norm = np.linalg.norm(value - reference), np.linalg.norm(reference)
    return 0.0 if distance == 0 else float(distance / norm) if norm > 0 else math.inf


# -- the way of a token -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A token on its way: where it came from, and the experts that it still needs here (-1: gone elsewhere)."""

    origin: int
    token: int  # index among the tokens of its origin
    slots: tuple[int, ...]


@dataclass
class Journey:
    """What a dispatch does to all rows of one expert-parallel group."""

    rows: dict[int, list[Row]]  # by rank, where they end, in order
    moved: list[Counter[tuple[int, int]]]  # by stage: rows of each (sender, receiver), receivers without rows too


def travel(case: MoeCase, group: Sequence[int], routing: Routing) -> Journey:
    """The rows of one dispatch, stage by stage.

    A row goes once to each rank that has the sender's offset inside its domain, and a domain coordinate, at the
    stage's levels, of an expert that the row needs.
    """
    rows = {rank: [Row(rank, t, tuple(slots)) for t, slots in enumerate(routing[rank])] for rank in group}
    levels = range(len(case.sizes))
    journey = Journey(rows, [])
    for stage in [tuple(levels)] if case.exchange == "direct" else [(level,) for level in levels]:
        peers = {rank: _peers(case, group, rank, stage) for rank in group}
        if all(len(ranks) == 1 for ranks in peers.values()):
            continue
        moved: Counter[tuple[int, int]] = Counter()
        arrived: dict[int, list[Row]] = {rank: [] for rank in group}
        for receiver in group:
            for sender in peers[receiver]:
                sent = _rows_for(case, group, stage, journey.rows[sender], receiver)
                arrived[receiver] += sent
                moved[sender, receiver] += len(sent)
        journey.rows = arrived
        journey.moved.append(moved)
    return journey


def _rows_for(case: MoeCase, group: Sequence[int], stage: Sequence[int], rows: list[Row], receiver: int) -> list[Row]:
    """Those of `rows` that need an expert in the receiver's domain, as far as the stage's levels tell."""
    num_local = case.num_experts // len(group)
    domains = [domain_and_offset(case, group, owner)[0] for owner in group]
    here = domain_and_offset(case, group, receiver)[0]
    sent = []
    for row in rows:
        slots = tuple(
            expert if expert >= 0 and all(domains[expert // num_local][i] == here[i] for i in stage) else -1
            for expert in row.slots
        )
        if any(expert >= 0 for expert in slots):
            sent.append(Row(row.origin, row.token, slots))
    return sent


def _peers(case: MoeCase, group: Sequence[int], rank: int, stage: Sequence[int]) -> list[int]:
    """Ranks with which `rank` exchanges rows, itself included, ordered by place."""
    domain, offset = domain_and_offset(case, group, rank)
    found = []
    for other in sorted(group):
        other_domain, other_offset = domain_and_offset(case, group, other)
        if offset == other_offset and all(domain[i] == other_domain[i] for i in range(len(domain)) if i not in stage):
            found.append(other)
    return found


def domain_and_offset(case: MoeCase, group: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Domain coordinate and offset inside the domain at each level."""
    places = {other: place_of(case.sizes, other) for other in group}
    domain, offset = [], []
    for level, domain_size in enumerate(case.domain_sizes):
        used = sorted({place[level] for place in places.values()})
        position = used.index(places[rank][level])
        domain.append(position // domain_size)
        offset.append(position % domain_size)
    return tuple(domain), tuple(offset)


def place_of(sizes: Sequence[int], rank: int) -> tuple[int, ...]:
    """The multi-level coordinate of a rank; the last level varies fastest."""
    return list(itertools.product(*(range(size) for size in sizes)))[rank]


def level_between(sizes: Sequence[int], rank_a: int, rank_b: int) -> int:
    """The slowest level at which two places differ."""
    pairs = zip(place_of(sizes, rank_a), place_of(sizes, rank_b), strict=True)
    return next(level for level, (a, b) in enumerate(pairs) if a != b)


def token_bytes(
    case: MoeCase, group: Sequence[int], routing: Routing, *, row_bytes: int, has_backward: bool = True
) -> Counter[tuple[int, int]]:
    """Token bytes that each rank of the group sends over each level in one call of one layer: (rank, level) -> bytes.

    Forward: a count to each peer; a row, its expert ids and gate weights there; a partial sum back.
    Backward: an output gradient there; an input gradient and the gate gradients back.
    """
    total: Counter[tuple[int, int]] = Counter()
    for moved in travel(case, group, routing).moved:
        for (sender, receiver), num_rows in moved.items():
            if sender == receiver:
                continue
            level = level_between(case.sizes, sender, receiver)
            there = COUNT_BYTES + num_rows * (row_bytes + 8 * case.top_k)
            back = num_rows * row_bytes
            if has_backward:
                there += num_rows * row_bytes
                back += num_rows * (row_bytes + 4 * case.top_k)
            total[sender, level] += there
            total[receiver, level] += back
    return total


# -- in the workers ---------------------------------------------------------------------------------------------


def build_case(
    case: MoeCase,
    rank: int,
    is_boundary: Callable[[], bool] = lambda: True,
    *,
    wait_s: float | None = None,
    **options: Any,
) -> Any:
    """The runtime of `case` on this rank, and its experts by layer.  All ranks must call.

    wait_s: the longest wait for a message, if not that of the settings, which also limits the start.
    """
    from ds_hybridep.config import parse_config
    from ds_hybridep.experts.layer_spec import LayerSpec
    from ds_hybridep.runtime import runtime
    from ds_hybridep.runtime.build import Facts
    from ds_hybridep.tokens.layer import call_expert

    owned = [
        [
            Expert(layer, expert, dtype=case.dtype, is_down_frozen=case.is_down_frozen)
            for expert in case.experts_of(rank)
        ]
        for layer in range(case.num_layers)
    ]
    specs = [
        LayerSpec(
            call=call_expert,
            name=f"layer {layer}",
            group="ep",
            group_ranks=case.group_of(rank),
            num_experts=case.num_experts,
            top_k=case.top_k,
            hidden=HIDDEN,
            experts=tuple(experts),
        )
        for layer, experts in enumerate(owned)
    ]
    config = parse_config(case.block(**options), world_size=case.world_size)
    # Else it would be torch's.
    with mock.patch.object(runtime, "longest_wait_s", lambda timeout_s: float(wait_s or timeout_s)):
        return runtime.prepare_runtime(config, Facts(tuple(specs), is_boundary))(), owned


def open_transport(cluster: Any, timeout_s: float) -> Any:
    """A transport of its own, after a start-up that all ranks of the pool must join.

    timeout_s: the longest wait for a message.  Connecting has a limit of its own, which a busy machine keeps.
    """
    from ds_hybridep.transport.agreement import agree
    from ds_hybridep.transport.channels import Transport
    from ds_hybridep.transport.job_link import LinkSettings

    return Transport(cluster, timeout_s, agree({}, 60.0), link=LinkSettings(max(timeout_s, 100.0)))


def come_after(first: int) -> None:
    """Return on rank `first`; on the other ranks, once it has begun its next start-up.  All ranks must call.

    A rank that comes before that to a start-up which the others have given up is told that it is late.
    """
    from torch import distributed as dist

    from ds_hybridep.transport.job import job_store

    dist.barrier()
    num_startups = job_store().add(f"startups/{first}", 0)  # a private key: nothing else tells where a rank waits
    dist.barrier()
    while dist.get_rank() != first and job_store().add(f"startups/{first}", 0) == num_startups:
        time.sleep(0.01)


def forward_case(case: MoeCase, rank: int, runtime: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output of all layers, the input, and the gate weights of each layer."""
    x, weights = _inputs(case, rank, getattr(torch, case.dtype))
    output = x
    for layer, hybrid in enumerate(runtime.layers.values()):
        topk_idx = torch.tensor(routing_of(case, layer)[rank], dtype=torch.int32).reshape(-1, case.top_k)
        output = hybrid.forward(output, topk_idx, weights[layer])
    return output, x, weights


def toy_engine(case: Any, **block_options: Any) -> Any:
    """A DeepSpeed engine with the toy model of a `parity.Case`, and with further settings in its block."""
    import parity
    import training

    hybridep = parity.merged({"advanced": {"kernels": "reference"}}, block_options)
    return training.engine_of(case, with_block=True, hybridep=hybridep)


def train_step(engine: Any, case: Any, step: int) -> None:
    """One optimizer step of a `parity.Case`."""
    from toy_model import batch

    for micro_step in range(case.accumulation):
        rank = torch.distributed.get_rank()
        tokens = batch(case.toy, seed=case.seed, step=step, micro_step=micro_step, rank=rank, num_sequences=4)
        engine.backward(engine(*tokens))
        engine.step()
