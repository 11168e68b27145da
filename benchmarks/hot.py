# SPDX-License-Identifier: Apache-2.0
"""What uneven routing costs a step, with and without hot experts.

    python -m benchmarks hot --out benchmarks/results/hot.jsonl

Each kind of model is one job over loopback that trains all plans in turn, in interleaved blocks, skew by skew.  The
skew is the largest number of rows of a rank over the mean.  Experts sleep for each row: ranks share too few cores for
real arithmetic to be uneven.  A drift moves the strong experts to other ranks every 20 steps.

"measuring" are the seconds of a step in which rank 0 sends and adds up loads, and chooses.
"""

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

import ds_hybridep
from benchmarks.common import Record, Records, interleaved, ratio, run_job, table
from benchmarks.training import VOCABULARY, Job, SleepingExpert, _Sleep, autoep, engine_of, moe_of, qwen3_moe
from ds_hybridep.runtime.hot_experts import HotExperts, HotLayer

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

KINDS = ("classic", "AutoEP")
DRIFT_STEPS = 20
PLANS: dict[str, dict[str, Any] | None] = {
    "deepspeed": None,
    "hybridep": {},
    "hybridep, domain over all": {"domain_size": 0},  # 0: all ranks
    "hybridep, 4 hot experts": {"hot_experts": 4},
    "hybridep, hot experts auto": {"hot_experts": "auto"},
}
STRONG = 3  # experts of the fullest rank that get its rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--skews", type=float, nargs="+", default=[1.0, 1.7, 2.6, 5.1])
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of one block; those of a drift last 2 drifts")
    parser.add_argument("--no-drift", action="store_true")
    parser.add_argument("--row-us", type=float, default=100.0, help="slept per row and expert, forward")
    parser.add_argument("--tokens", type=int, default=256, help="per rank")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")


def run(args: argparse.Namespace, records: Records) -> None:
    for kind in args.kinds:
        run_job(f"1x{args.ranks}", None, records, "--kinds", kind)


# ---- routing ----


class Routing:
    """Draws two experts for each token, by shares of the experts that change with the skew and the step."""

    def __init__(self, num_experts: int, num_ranks: int) -> None:
        self.num_experts, self.num_ranks = num_experts, num_ranks
        self.skew, self.at = 1.0, 0
        self.generator = torch.Generator().manual_seed(1 + dist.get_rank())

    @property
    def shares(self) -> Tensor:
        """Rows of each expert over all rows, [E]: those of the fullest rank go to STRONG of its experts."""
        local = self.num_experts // self.num_ranks
        fullest = self.skew / self.num_ranks
        shares = torch.full((self.num_experts,), (1 - fullest) / (self.num_experts - local))
        first = (3 * self.at % self.num_ranks) * local
        if self.skew == 1.0:
            return torch.full_like(shares, 1 / self.num_experts)
        shares[first : first + local] = 0.0
        shares[first : first + STRONG] = fullest / STRONG
        return shares

    def logits(self, num_tokens: int) -> Tensor:
        """Return [T, E] whose two largest are of different experts, drawn by their shares."""
        # The first and the second choice are drawn one after the other, so an expert gets its share of the rows unless
        # it has more than half of them: systematic sampling gives exactly 2 * share * T rows.
        places = (torch.arange(num_tokens) + torch.rand(1, generator=self.generator)) / num_tokens
        edges = (2 * self.shares).cumsum(0)
        logits = torch.zeros(num_tokens, self.num_experts)
        order = torch.randperm(num_tokens, generator=self.generator)
        for turn in (0.0, 1.0):
            chosen = torch.searchsorted(edges, places + turn).clamp(max=self.num_experts - 1)
            logits[order, chosen] += 10.0
        return logits + 0.01 * torch.rand(logits.shape, generator=self.generator)


class Model(nn.Module):
    """An embedding, MoE layers of sleeping experts whose gates do as `routing` says, and a loss that is real."""

    def __init__(self, args: argparse.Namespace, routing: Routing) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, args.hidden)
        self.layers = nn.ModuleList(
            moe_of(args, SleepingExpert(args.hidden, args.row_us * 1e-6)) for _ in range(args.layers)
        )
        self.head = nn.Linear(args.hidden, VOCABULARY)
        self.routing = routing
        for layer in self.layers:
            layer.deepspeed_moe.gate.wg.weight.data = torch.eye(args.experts, args.hidden)
            layer.deepspeed_moe.gate.wg.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        num_experts = self.routing.num_experts
        for layer in self.layers:
            logits = self.routing.logits(tokens.numel()).view(*tokens.shape, num_experts).to(x.dtype)
            x = x + layer(torch.cat([logits, x[..., num_experts:]], -1))[0]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten()), x.new_zeros(())


def sleep_in_autoep(row_us: float, routing: Routing) -> None:
    """Make the experts of AutoEP sleep, and its routers do as `routing` says."""
    from deepspeed.moe import ep_experts, ep_router

    def forward(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        seconds = float(num_tokens_per_expert.sum()) * row_us * 1e-6
        return 0.5 * _Sleep.apply(x, seconds, self.w1, self.w2, self.w3)

    made = ep_router.TokenChoiceTopKRouter.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        gate = self.gate
        gate.forward = lambda x: routing.logits(len(x)).to(x.dtype) + 0.0 * (x @ gate.weight.T)

    ep_experts.GroupedExperts.forward = forward
    ep_router.TokenChoiceTopKRouter.__init__ = make


# ---- measuring ----


def rank(args: argparse.Namespace, job: Job) -> None:
    kind = args.kinds[-1]
    routing, measuring = Routing(args.experts, args.ranks), Measuring()
    if kind == "AutoEP":
        sleep_in_autoep(args.row_us, routing)
    engines = {}
    for name in args.plans:
        if (engine := engine_for(name, kind, args, routing)) is not None:
            engines[name] = engine
    for skew in args.skews:
        for drifts in (False, *([True] if skew > 1.0 and not args.no_drift else [])):
            routing.skew = skew
            measured = phase(engines, args, routing, measuring, drifts=drifts)
            for name, found in measured.items():
                params = {"kind": kind, "plan": name, "skew": skew, "drifts": drifts}
                params |= {
                    key: getattr(args, key)
                    for key in ("ranks", "tokens", "layers", "experts", "hidden", "row_us", "dtype")
                }
                job.record(params, **found)
            job.say(f"{kind}, skew {skew:g}{', drifting' if drifts else ''}: done")
    job.end()


def engine_for(name: str, kind: str, args: argparse.Namespace, routing: Routing) -> Any:
    torch.manual_seed(0)
    sizes = argparse.Namespace(**vars(args), top_k=2, capacity_factor=0.0, ep_size=args.ranks)
    block = PLANS[name]
    if block is not None:
        level = {"name": "gpu", "size": args.ranks, **block}
        if level.get("domain_size") == 0:
            level["domain_size"] = args.ranks
        block = {"levels": [level], "advanced": {"verify_interval": 0}, "timeout_s": 60}
    if kind == "AutoEP":
        return engine_of(qwen3_moe(sizes), block, dtype=args.dtype, **autoep(args.ranks))
    model = Model(sizes, routing)
    for layer in model.layers:
        layer.deepspeed_moe.gate.drop_tokens = False
    return engine_of(model, block, dtype=args.dtype)


class Measuring:
    """Seconds that this process spends on loads and the choice, waiting for other ranks included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._time(HotExperts, "send_counts")
        self._time(HotExperts, "_take")
        self._time(HotLayer, "choose")

    def _time(self, kind: type, name: str) -> None:
        original = getattr(kind, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        setattr(kind, name, timed)


def phase(
    engines: dict[str, Any], args: argparse.Namespace, routing: Routing, measuring: Measuring, *, drifts: bool
) -> dict[str, Any]:
    """Blocks of all plans at one skew: seconds of a step, and the load that hot experts leave."""
    seconds: dict[str, list[float]] = defaultdict(list)
    on_loads: dict[str, list[float]] = defaultdict(list)
    steps = 2 * DRIFT_STEPS if drifts else args.steps
    rounds = 1 if drifts else args.rounds
    for name, engine in engines.items():
        if not (drifts and name == "deepspeed"):  # it does not change with the strong experts
            train(engine, args, routing, 3, drifts=False)
    for order in interleaved(list(engines), rounds):
        for name in order:
            if drifts and name == "deepspeed":
                continue
            count = 1 if name == "deepspeed" else steps
            dist.barrier()
            begin, before = time.perf_counter(), measuring.seconds
            train(engines[name], args, routing, count, drifts=drifts)
            dist.barrier()
            seconds[name].append((time.perf_counter() - begin) / count)
            on_loads[name].append((measuring.seconds - before) / count)
    found = {}
    for name, taken in seconds.items():
        layers = [] if name == "deepspeed" else ds_hybridep.stats(engines[name])["layers"]
        keys = ("hot_experts", "hot_changes", "load_before", "load_after", "rows_before", "rows_after")
        found[name] = {
            "step_s": taken,
            "measuring_s": on_loads[name],
            "layers": [{key: one.get(key) for key in keys} for one in layers],
        }
    return found


def train(engine: Any, args: argparse.Namespace, routing: Routing, num_steps: int, *, drifts: bool) -> None:
    for step in range(num_steps):
        routing.at = step // DRIFT_STEPS if drifts else 0
        tokens = torch.randint(VOCABULARY, (1, args.tokens), generator=routing.generator)
        loss, _ = engine(tokens, tokens.roll(-1, 1))
        engine.backward(loss)
        engine.step()


def report(records: list[Record], args: argparse.Namespace) -> str:
    """Markdown: the step by skew; and over that of the plan without hot experts, and of even routing."""
    by_key = {tuple(record["params"][key] for key in ("kind", "plan", "skew", "drifts")): record for record in records}
    rows = []
    for (kind, plan, skew, drifts), record in by_key.items():
        own = record["step_s"]

        def over(other: tuple[Any, ...], own: list[float] = own) -> str:
            found = by_key.get(other)
            if found is None:
                return "-"
            if len(found["step_s"]) != len(own):
                return f"{statistics.median(own) / statistics.median(found['step_s']):.3f}"
            return f"{ratio(own, found['step_s']).median:.3f}"

        load = record["layers"][0]["load_after"] if record["layers"] else None
        measuring = statistics.median(record.get("measuring_s", [0.0])) / statistics.median(own)
        rows.append(
            [
                kind, plan, f"{skew:g}", "yes" if drifts else "no", f"{statistics.median(own):.3f}",
                over((kind, "deepspeed", skew, False)), over((kind, "hybridep", skew, drifts)),
                over((kind, "hybridep", 1.0, False)), "-" if load is None else f"{load:.2f}",
                f"{measuring:.2%}",
            ]
        )  # fmt: skip
    header = [
        "kind", "plan", "skew", "drifts", "step [s]", "over DeepSpeed", "over hybridep", "over hybridep, even",
        "load after", "measuring",
    ]  # fmt: skip
    return "\n\n".join([table(header, rows), *gains(by_key)])


def gains(by_key: dict[tuple[Any, ...], Record]) -> list[str]:
    """Markdown: the gain of hot experts that loads predict, beside the measured one.

    Rows take the seconds that experts sleep.  What a copy of an expert costs is fitted to every other point, and the
    rest tells how good the prediction is.
    """
    points = []
    for (kind, plan, skew, drifts), record in by_key.items():
        plain = by_key.get((kind, "hybridep", skew, drifts))
        if plain is None or drifts or not record["layers"] or not record["layers"][0]["hot_experts"]:
            continue
        params = record["params"]
        row_s = 3e-6 * params["row_us"]  # forward, and backward twice
        saved_s = sum(row_s * (layer["rows_before"] - layer["rows_after"]) for layer in record["layers"])
        copies = sum(len(layer["hot_experts"]) for layer in record["layers"])
        measured_s = statistics.median(plain["step_s"]) - statistics.median(record["step_s"])
        points.append((kind, plan, skew, saved_s, copies, measured_s))
    if len(points) < 2:
        return []
    copy_s = max(statistics.median((saved - found) / copies for *_, saved, copies, found in points[::2]), 0.0)
    lines, errors = [], []
    for kind, plan, skew, saved_s, copies, measured_s in points[1::2]:
        predicted_s = saved_s - copies * copy_s
        errors.append(abs(predicted_s / measured_s - 1))
        cells = [f"{value:.3f}" for value in (predicted_s, measured_s)]
        lines.append([kind, plan, f"{skew:g}", *cells, f"{errors[-1]:.1%}"])
    title = (
        f"Seconds that hot experts save in a step, of points that were held back: predicted and measured; the median "
        f"error is {statistics.median(errors):.1%}. A copy costs {1e3 * copy_s:.2f} ms, by the other points."
    )
    return [title, table(["kind", "plan", "skew", "predicted", "measured", "error"], lines)]
