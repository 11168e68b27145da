# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level Mixture-of-Experts language model on the sources of Python's own standard library.

An ordinary DeepSpeed script: the ds_config alone decides how it trains.

    deepspeed --num_gpus 4 examples/train_lm.py --deepspeed_config ds_configs/plain_ep.json

On a machine without an accelerator put `DS_ACCELERATOR=cpu OMP_NUM_THREADS=1` in front.  Two runs with the same
arguments and batch size start from the same weights and see the same batches.  The rest of the ds_config does not
matter for that, so their losses can be compared.
"""

import argparse
import json
import math
import statistics
import sysconfig
import time
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

VOCABULARY = 256  # bytes
HEAD_SIZE = 32
AUX_LOSS_WEIGHT = 0.01
VALID_EVERY = 20  # one file in twenty is kept for validation
WARM_UP_STEPS = 5  # not in the median step time


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=100, help="train until this optimizer step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64, help=f"a multiple of {HEAD_SIZE}")
    parser.add_argument("--experts", type=int, default=8, help="experts of one layer, over all ranks")
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--ep-size", type=int, default=0, help="ranks that share the experts; 0: all ranks")
    parser.add_argument("--capacity-factor", type=float, default=1.5, help="0: never drop a token")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-rank", type=int, default=0, help="ranks of other jobs whose batches come before ours")
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--eval-interval", type=int, default=50, help="0: only at the end")
    parser.add_argument("--eval-batches", type=int, default=2, help="batches per rank in one evaluation")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    parser.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints; 0: only at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --save, if any")
    parser.add_argument("--load", type=Path, help="folder of a checkpoint to go on from")
    parser.add_argument("--json-file", type=Path, help="where rank 0 writes the final record")
    args = deepspeed.add_config_arguments(parser).parse_args()
    if args.hidden % HEAD_SIZE:
        parser.error(f"--hidden {args.hidden} is not a multiple of {HEAD_SIZE}")
    return args


# ---------------------------------------------------------------------------------------------------------------- data


def read_corpus() -> tuple[Tensor, Tensor]:
    """The standard library's sources as (train, valid), uint8 [num_bytes] each, in the same order on every rank."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    train, valid = bytearray(), bytearray()
    for file_idx, path in enumerate(files):
        (valid if file_idx % VALID_EVERY == 0 else train).extend(path.read_bytes())
    if len(valid) < 100_000:
        raise SystemExit(
            f"{root} has too few .py files to train on; use a Python whose standard library is not zipped"
        )
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(valid, dtype=torch.uint8)


def batch_at(corpus: Tensor, place: tuple[int, ...], *, rows: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets), int64 [rows, seq_len] each: a pure function of `place` = (seed, step, micro-step, rank)."""
    key = 0
    for part in place:
        key = (key * 1_000_003 + part + 1) % 2**63
    starts = torch.randint(len(corpus) - seq_len - 1, (rows,), generator=torch.Generator().manual_seed(key))
    windows = torch.stack([corpus[start : start + seq_len + 1] for start in starts.tolist()])
    windows = windows.long().to(get_accelerator().current_device_name())
    return windows[:, :-1], windows[:, 1:]


# --------------------------------------------------------------------------------------------------------------- model


class Attention(nn.Module):
    """Causal self-attention, [rows, seq_len, hidden] -> the same."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.attend = F.scaled_dot_product_attention  # benchmarks put one in its place

    def forward(self, x: Tensor) -> Tensor:
        rows, seq_len, hidden = x.shape
        heads = self.qkv(x).view(rows, seq_len, 3, hidden // HEAD_SIZE, HEAD_SIZE).transpose(1, 3)
        query, key, value = heads.unbind(dim=2)  # each [rows, heads, seq_len, HEAD_SIZE]
        mixed = self.attend(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, seq_len, hidden))


class Block(nn.Module):
    """Attention, then a Mixture-of-Experts feed-forward, each with a residual connection."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        hidden = args.hidden
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden)
        self.moe_norm = nn.LayerNorm(hidden)
        expert = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.moe = MoE(
            hidden,
            expert,  # DeepSpeed makes its experts copies of this one, so the start does not depend on ep_size
            num_experts=args.experts,
            ep_size=args.ep_size,
            k=args.top_k,
            capacity_factor=args.capacity_factor or 1.0,
            eval_capacity_factor=args.capacity_factor or 1.0,
            drop_tokens=args.capacity_factor > 0,
            # Both draw random numbers while routing; off, so that a run can be repeated.
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        moe_output, aux_loss, _ = self.moe(self.moe_norm(x))
        return x + moe_output, aux_loss


class ByteModel(nn.Module):
    """(inputs, targets) -> (cross entropy in nats per byte, load-balancing loss)."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, args.hidden)
        self.positions = nn.Embedding(args.seq_len, args.hidden)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        self.head = nn.Linear(args.hidden, VOCABULARY, bias=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        aux_losses = []
        for block in self.blocks:
            x, aux_loss = block(x)
            aux_losses.append(aux_loss)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), torch.stack(aux_losses).float().mean()


# ------------------------------------------------------------------------------------------------------------ training


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, corpus: Tensor, args: argparse.Namespace) -> float:
    """Mean loss over the same validation windows at every call."""
    engine.eval()
    losses = []
    for batch_idx in range(args.eval_batches):
        place = (args.seed, batch_idx, 0, args.first_rank + engine.global_rank)
        batch = batch_at(corpus, place, rows=engine.train_micro_batch_size_per_gpu(), seq_len=args.seq_len)
        losses.append(engine(*batch)[0])
    engine.train()
    return mean_over_ranks(torch.stack(losses).mean())


def train_step(engine: deepspeed.DeepSpeedEngine, corpus: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """One optimizer step.  Returns this rank's mean loss, without the load-balancing part."""
    losses = []
    for micro_step in range(engine.gradient_accumulation_steps()):
        place = (args.seed, step, micro_step, args.first_rank + engine.global_rank)
        batch = batch_at(corpus, place, rows=engine.train_micro_batch_size_per_gpu(), seq_len=args.seq_len)
        loss, aux_loss = engine(*batch)
        engine.backward(loss + AUX_LOSS_WEIGHT * aux_loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    is_first = dist.get_rank() == 0
    args.ep_size = args.ep_size or dist.get_world_size()

    def say(text: str) -> None:
        if is_first:
            print(text, flush=True)

    # 1. The same model on every rank.  The optimizer comes from the ds_config, so DeepSpeed itself puts the experts'
    #    parameters into groups of their own; with an optimizer made here that would be the script's task
    #    (deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer).
    torch.manual_seed(args.seed)
    model = ByteModel(args)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    first_step = 0
    if args.load or (args.resume and args.save and args.save.is_dir()):
        loaded, client_state = engine.load_checkpoint(str(args.load or args.save))
        first_step = client_state["step"] if loaded is not None else 0
        say(f"goes on from step {first_step}")
    train, valid = read_corpus()
    bytes_per_step = engine.train_batch_size() * args.seq_len
    say(
        f"{args.layers} layers, hidden {args.hidden}, {args.experts} experts, top-{args.top_k}, "
        f"EP over {args.ep_size} of {dist.get_world_size()} ranks; "
        f"{len(train) / 1e6:.1f} MB of text, {bytes_per_step} tokens a step"
    )

    # 2. Training.  Each step waits for the device, so its time is that of finished work.
    step_s: list[float] = []
    losses: list[tuple[int, float]] = []
    for step in range(first_step, args.steps):
        start_s = time.perf_counter()
        loss = train_step(engine, train, step, args)
        get_accelerator().synchronize()
        step_s.append(time.perf_counter() - start_s)

        done = step + 1
        if done % args.log_interval == 0 or done in (first_step + 1, args.steps):
            losses.append((done, mean_over_ranks(loss)))
            recent_s = statistics.median(step_s[-args.log_interval :])
            say(
                f"step {done:>5}/{args.steps}  loss {losses[-1][1]:.4f}  {bytes_per_step / recent_s:>9,.0f} tokens/s  "
                f"ETA {recent_s * (args.steps - done):.0f} s"
            )
        if args.save and args.save_interval and done % args.save_interval == 0:
            engine.save_checkpoint(str(args.save), client_state={"step": done})
        if args.eval_interval and done % args.eval_interval == 0 and done < args.steps:
            say(f"step {done:>5}/{args.steps}  validation loss {evaluate(engine, valid, args):.4f}")

    # 3. The end: checkpoint, record, one last line.
    valid_loss = evaluate(engine, valid, args)
    if args.save:
        engine.save_checkpoint(str(args.save), client_state={"step": args.steps})
    timed_s = step_s[WARM_UP_STEPS:] or step_s
    median_step_s = statistics.median(timed_s) if timed_s else math.nan
    record = {
        "loss": losses[-1][1] if losses else None,
        "valid_loss": valid_loss,
        "median_step_s": median_step_s if timed_s else None,
        "steps": args.steps,
        "world_size": dist.get_world_size(),
        "tokens_per_step": bytes_per_step,
        "losses": losses,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
    }
    if args.json_file and is_first:
        args.json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    last_loss = f"{losses[-1][1]:.4f}" if losses else "none"
    say(f"done: loss {last_loss}, validation loss {valid_loss:.4f}, median step {median_step_s:.3f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
