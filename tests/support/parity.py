# SPDX-License-Identifier: Apache-2.0
"""The same training twice on the same ranks: DeepSpeed as it is, and with the "hybridep" block.

    case = Case(levels=(("dc", 2, 2), ("gpu", 2, 1)), zero_stage=2)
    assert_parity(pool4, [case, ...])                    # every failing case by its id, in one AssertionError

In each worker `run_case` trains both and hands back differences, not tensors. The plain runs are kept for the next
cases that differ only in what the block says, so cases that share one should stand next to each other.
"""

import functools
import gc
import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import groups, safe_get_full_fp32_param
from hf_models import build_hf_model, by_expert, hf_loss
from process_pool import ProcessPool, RemoteError
from torch import Tensor, nn
from toy_model import ToyConfig, batch, build_model, expert_parallel_rank, global_name

Levels = tuple[tuple[str, int, int], ...]  # (name, size, domain_size), slowest first

# Reassociated fp32 sums, carried through a few AdamW steps. Plain DeepSpeed against itself in another expert-parallel
# layout, which only changes the order of sums, is what this is to be read against (test_harness.py measures it).
FP32_TOLERANCE = 1e-5

# bf16, with routing="by_token" so that rounding moves no token to another expert (else runs part for good). Each value
# stands between what plain DeepSpeed does against itself in another expert-parallel layout (change 0.16, 0.45 units at
# most over 58 cases) and a planted fault, one expert's gradient halved or doubled (change 0.35 or more). Losses alone
# do not tell a fault.
BF16_CHANGE_TOLERANCE = 0.25  # ||hybrid - plain|| / ||plain - start||, each tensor
# The same for fp32 masters of Hugging Face models. Plain DeepSpeed against itself makes 0.02 (DeepSeek-V3 under ZeRO 1
# and 2) and 0.09 (Qwen3.5-MoE under ZeRO-3, but for the decay rates of its linear attention, 0.30), one expert's
# gradient 1.5 times too large 0.21 (DeepSeek-V3 under ZeRO-1).
BF16_MASTER_TOLERANCE = 0.15
# Plain DeepSpeed against itself stays below this in most cases, and reaches 8e-3 in one (k=1 without drops, ZeRO-1,
# EP 4 against EP 1).
BF16_LOSS_TOLERANCE = 5e-3
# Losses of a case, or one of its parameters, that are above are compared with what plain DeepSpeed does to itself on
# that very case; by this factor, since few layouts tell.
OWN_FACTOR = 2.0
# Of the distance of plain bf16 from plain fp32, all tensors and ranks together: no further from plain bf16 than plain
# bf16 is from the truth.
BF16_NOISE_UNITS = 1.0

BANDWIDTH_GBPS = {0: 1.0}  # the slow level; all others are fast. Written down so that nothing is probed
FAST_BANDWIDTH_GBPS = 100.0
LEARNING_RATE = {"adamw": 3e-2, "sgd": 0.5}
HF_LEARNING_RATE = {"adamw": 5e-3, "sgd": 0.1}  # deeper models, in which higher ones make any rounding grow
ADAM_EPS = 3e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run and the block it is compared with."""

    levels: Levels
    toy: ToyConfig = ToyConfig()
    family: str | None = None  # a Hugging Face model of the toy's shape through AutoEP, instead of the toy
    dtype: Literal["fp32", "bf16"] = "fp32"
    zero_stage: int = 0
    accumulation: int = 1
    steps: int = 5
    optimizer: Literal["adamw", "sgd"] = "adamw"
    gradient_clipping: float = 0.0
    offload: Literal[None, "hybrid", "both"] = None  # whose optimizer states are on the host
    use_data_before_expert_parallel: bool = False
    batch_sizes: tuple[int, ...] | None = None  # sequences of each global rank; None: 4 everywhere
    evaluate: bool = False  # also the loss of an evaluation batch after every step
    seed: int = 1
    # What only the block knows.
    prefetch_depth: int | None = None
    token_exchange: str | None = None
    kernels: str | None = None
    dense_sync: str | None = None
    token_codec: str | None = None  # over the first level
    codecs: str | None = None  # of weights and gradients over the first level; each step verifies all replicas
    hot_experts: int = 0
    hot_level: int = -1

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size, _ in self.levels)

    @property
    def id(self) -> str:
        """All that is not at its default, readable and unique."""
        toy, parts = self.toy, []
        parts.append("x".join(str(size) for _, size, _ in self.levels))
        parts.append("S" + "x".join(str(domain_size) for _, _, domain_size in self.levels))
        parts.append(f"ep{toy.ep_size}of{toy.num_experts}-k{toy.k}-{'drop' if toy.drop_tokens else 'nodrop'}")
        parts.append(f"z{self.zero_stage}-{self.dtype}-a{self.accumulation}")
        for owner, default in ((toy, ToyConfig()), (self, Case(levels=self.levels))):
            for name in owner.__dataclass_fields__:
                value = getattr(owner, name)
                if name not in _NAMED_ABOVE and value != getattr(default, name):
                    parts.append(f"{name}={value}".replace(" ", ""))
        return "-".join(parts)

    def without_block(self) -> "Case":
        """The same training with everything forgotten that only the block says; cases that share it share its run."""
        return replace(
            self,
            levels=(("all", self.world_size, 1),),
            prefetch_depth=None,
            token_exchange=None,
            kernels=None,
            dense_sync=None,
            token_codec=None,
            codecs=None,
            hot_experts=0,
            hot_level=-1,
            offload=None if self.offload == "hybrid" else self.offload,
        )

    def ds_config(self, *, with_block: bool) -> dict[str, Any]:
        """What the user would write."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # only its product with the others is checked, not the tensors
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.gradient_clipping,
            "zero_optimization": self._zero_config(),
            "zero_allow_untested_optimizer": True,
            "use_data_before_expert_parallelism": self.use_data_before_expert_parallel,
            "steps_per_print": 1_000_000,
            "optimizer": self._optimizer_config(),
        }
        if self.family is not None:
            config["expert_parallel"] = {"enabled": True, "autoep_size": self.toy.ep_size}
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if with_block:
            config["hybridep"] = self._block()
        return config

    def _zero_config(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"stage": self.zero_stage}
        if self.zero_stage == 3:  # else everything of a toy stays whole after its first use.  This leaves the norms.
            settings["stage3_param_persistence_threshold"] = 100
        if self.offload:
            settings["offload_optimizer"] = {"device": "cpu"}
        return settings

    def _optimizer_config(self) -> dict[str, Any]:
        learning_rate = (LEARNING_RATE if self.family is None else HF_LEARNING_RATE)[self.optimizer]
        if self.optimizer == "sgd":
            return {"type": "SGD", "params": {"lr": learning_rate}}
        # torch_adam: DeepSpeed's own is compiled on first use, minutes on two cores. eps is of the size of the
        # gradients: with the usual 1e-8 AdamW forgets their scale, and one twice too large would pass every test.
        params = {"lr": learning_rate, "eps": ADAM_EPS, "weight_decay": 0.01, "torch_adam": True}
        return {"type": "AdamW", "params": params}

    def _block(self) -> dict[str, Any]:
        levels = [
            {
                "name": name,
                "size": size,
                "bandwidth_gbps": BANDWIDTH_GBPS.get(index, FAST_BANDWIDTH_GBPS),
                "latency_ms": 0.01,
                "domain_size": domain_size,
            }
            for index, (name, size, domain_size) in enumerate(self.levels)
        ]
        if self.token_codec is not None:
            levels[0]["token_codec"] = self.token_codec
        if self.codecs is not None:
            levels[0]["codecs"] = self.codecs
        if self.hot_experts:
            levels[self.hot_level]["hot_experts"] = self.hot_experts
        asked = {"token_exchange": self.token_exchange, "dense_sync": self.dense_sync}
        advanced = {
            "prefetch_depth": self.prefetch_depth,
            "kernels": self.kernels,
            "verify_interval": None if self.codecs is None else 1,
        }
        return {
            "enabled": True,
            "levels": levels,
            "timeout_s": 100,
            **_given(asked),
            "advanced": _given(advanced),
        }


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


_NAMED_ABOVE = {
    "levels", "toy", "ep_size", "num_experts", "k", "drop_tokens", "zero_stage", "dtype", "accumulation"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of one engine, as one rank saw it."""

    losses: tuple[float, ...]  # every micro-step
    eval_losses: tuple[float, ...]  # one a step, where the case evaluates
    start: dict[str, Tensor]  # from `snapshot`
    parameters: dict[str, Tensor]
    stats: dict[str, Any] | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """How far the two runs of a case may be apart."""

    loss: float  # relative
    parameter: float  # bf16: of the change, else of the parameter
    by_name: dict[str, float] = field(default_factory=dict)  # parameters with one of their own

    def of(self, name: str) -> float:
        return self.by_name.get(name, self.parameter)


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What one rank found; small, since it travels through a pipe."""

    plain_losses: tuple[float, ...]
    hybrid_losses: tuple[float, ...]
    loss_difference: float  # largest relative difference over all micro-steps and evaluations
    parameter_difference: dict[str, float]  # ||hybrid - plain|| / ||plain||
    change_difference: dict[str, float]  # ||hybrid - plain|| / ||plain - start||; 0 where both are 0
    movement: float  # ||plain - start|| / ||start||, all parameters together
    distance: float  # ||hybrid - plain||, all parameters together
    noise: float | None  # bf16: ||plain bf16 - plain fp32||, all parameters together
    stats: dict[str, Any] | None = field(repr=False)
    plain_s: float
    hybrid_s: float


# -- in the workers ---------------------------------------------------------------------------------------------


def run_case(case: Case) -> CaseResult:
    """Trains plain and hybrid on this rank and compares.  Called on every rank at once."""
    return compare(case, plain=_kept_plain_run(case.without_block()), hybrid=train(case, with_block=True))


def run_with_fault(case: Case, gradient_factor: float, where: int | str) -> CaseResult:
    """Unmodified DeepSpeed against itself with gradients scaled: a fault that the harness has to see.

    where: the global id of an expert, or a part of parameters' names.
    """
    plain = _kept_plain_run(case.without_block())
    faulty = train(case.without_block(), with_block=False, scaled=(where, gradient_factor))
    return compare(case, plain=plain, hybrid=faulty)


def run_other_layout(case: Case, ep_size: int) -> CaseResult:
    """Unmodified DeepSpeed with the case's EP groups against itself with groups of `ep_size`.

    Both compute the same function of the same weights and tokens and differ in the order of sums only, which is just
    what the backend may change: the distance to expect of a correct backend. Experts are compared where a rank holds
    the same global expert in both.
    """
    other = replace(case, toy=replace(case.toy, ep_size=ep_size))
    runs = [_kept_plain_run(one.without_block()) for one in (case, other)]
    common = runs[0].parameters.keys() & runs[1].parameters.keys()
    plain, hybrid = (
        replace(run, start=_only(common, run.start), parameters=_only(common, run.parameters)) for run in runs
    )
    return compare(case, plain=plain, hybrid=hybrid)


def _global_name(case: Case, name: str) -> str:
    num_local_experts = case.toy.num_experts // case.toy.ep_size
    return global_name(name, ep_rank=_first_expert(case) // num_local_experts, num_local_experts=num_local_experts)


def _first_expert(case: Case) -> int:
    """Global id of the first expert that this rank owns."""
    ep_rank = expert_parallel_rank(
        dist.get_rank(),
        world_size=case.world_size,
        ep_size=case.toy.ep_size,
        data_before_expert=case.use_data_before_expert_parallel,
    )
    return ep_rank * (case.toy.num_experts // case.toy.ep_size)


def _only(names: Iterable[str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in sorted(names)}


def compare(case: Case, *, plain: Run, hybrid: Run) -> CaseResult:
    """Differences between the two runs of `case`.  For a bf16 case, plain fp32 is trained too, as the unit of noise.

    `hybrid` stands for whatever is compared with `plain`.
    """
    noise = None
    plain_losses, hybrid_losses = (run.losses + run.eval_losses for run in (plain, hybrid))
    if case.dtype == "bf16":
        exact = _kept_plain_run(replace(case.without_block(), dtype="fp32"))
        noise = _distance(plain.parameters, exact.parameters)
    difference = {name: _norm(hybrid.parameters[name] - plain.parameters[name]) for name in plain.parameters}
    return CaseResult(
        plain_losses=plain.losses,
        hybrid_losses=hybrid.losses,
        loss_difference=max(_ratio(abs(a - b), abs(a)) for a, b in zip(plain_losses, hybrid_losses, strict=True)),
        parameter_difference={
            name: _ratio(difference[name], _norm(value)) for name, value in plain.parameters.items()
        },
        change_difference={
            name: _ratio(difference[name], _norm(value - plain.start[name]))
            for name, value in plain.parameters.items()
        },
        movement=_ratio(_distance(plain.parameters, plain.start), _norm_of_all(plain.start.values())),
        distance=_distance(plain.parameters, hybrid.parameters),
        noise=noise,
        stats=hybrid.stats,
        plain_s=plain.seconds,
        hybrid_s=hybrid.seconds,
    )


@functools.lru_cache(maxsize=8)
def _kept_plain_run(case: Case) -> Run:
    # All ranks run the same cases in the same order, so all hit or all miss: nobody waits alone in a collective.
    return train(case, with_block=False)


def train(case: Case, *, with_block: bool, scaled: tuple[int | str, float] | None = None) -> Run:
    """Builds one engine, trains `case.steps` optimizer steps, reads everything off and destroys the engine.

    `scaled` (where as in `run_with_fault`, factor) plants a fault: those gradients are multiplied by the factor.
    """
    start_s = time.perf_counter()
    use_expert_groups_of(case)
    torch.manual_seed(case.seed)
    model = model_of(case, seed=case.seed)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=case.ds_config(with_block=with_block)
    )
    if scaled is not None:
        _scale_gradients(case, engine.module, *scaled)
    try:
        start = start_of(case, engine.module)
        losses: list[float] = []
        eval_losses: list[float] = []
        for step in range(case.steps):
            for micro_step in range(case.accumulation):
                loss = loss_of(engine, case, *_batch_of(case, step, micro_step))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            if case.evaluate:
                eval_losses.append(_evaluate(engine, case, step))
        if case.codecs is None:
            parameters = snapshot(case, engine.module, engine.optimizer)
        else:  # lossy ones: what others hold of a parameter is not its master rounded
            parameters = start_of(case, engine.module)
        stats = _stats(engine) if with_block else None
    finally:
        engine.destroy()
        del engine, model
        gc.collect()  # hooks of ZeRO keep cycles alive, and with them the next engine's memory
    return Run(
        losses=tuple(losses),
        eval_losses=tuple(eval_losses),
        start=start,
        parameters=parameters,
        stats=stats,
        seconds=time.perf_counter() - start_s,
    )


def model_of(case: Case, *, seed: int) -> nn.Module:
    """The model of `case` as this rank holds it before deepspeed.initialize."""
    if case.family is not None:
        return build_hf_model(case.family, case.toy, seed=seed)
    return build_model(
        case.toy,
        rank=dist.get_rank(),
        world_size=case.world_size,
        data_before_expert=case.use_data_before_expert_parallel,
        seed=seed,
    )


def loss_of(engine: deepspeed.DeepSpeedEngine, case: Case, tokens: Tensor, targets: Tensor) -> Tensor:
    """Training loss of one micro-batch."""
    return engine(tokens, targets) if case.family is None else hf_loss(engine, tokens, targets)


def _scale_gradients(case: Case, model: nn.Module, where: int | str, factor: float) -> None:
    experts = range(_first_expert(case), _first_expert(case) + case.toy.num_experts // case.toy.ep_size)
    for name, parameter in model.named_parameters():
        if where in experts and ".experts.w" in name:  # AutoEP's, [e, ...]
            scale = torch.tensor([factor if expert == where else 1.0 for expert in experts])[:, None, None]
        elif (where if isinstance(where, str) else f"deepspeed_experts.{where}.") in _global_name(case, name):
            scale = torch.tensor(factor)
        else:
            continue
        parameter.register_hook(lambda gradient, scale=scale: gradient * scale.to(gradient))


def _batch_of(case: Case, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    num_sequences = 4 if case.batch_sizes is None else case.batch_sizes[rank]
    return batch(case.toy, seed=case.seed, step=step, micro_step=micro_step, rank=rank, num_sequences=num_sequences)


def _evaluate(engine: deepspeed.DeepSpeedEngine, case: Case, step: int) -> float:
    engine.eval()
    with torch.no_grad():
        loss = loss_of(engine, case, *_batch_of(case, step, micro_step=1_000))  # a batch that training does not see
    engine.train()
    return loss.item()


def _stats(engine: deepspeed.DeepSpeedEngine) -> dict[str, Any]:
    import ds_hybridep  # here, so that the plain half works without it

    return ds_hybridep.stats(engine)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies by name.  Under ZeRO-3 all ranks must call."""
    copies = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):  # does nothing below ZeRO-3
            copies[name] = parameter.detach().clone()
    return copies


def snapshot(case: Case, model: nn.Module, optimizer: Any = None) -> dict[str, Tensor]:
    """fp32 copies by global name: of the optimizer's fp32 masters where DeepSpeed keeps any, else of the parameters.

    Five steps move a bf16 weight near 1 by one or two of its roundings, so the last rounding would count as a
    difference.  Parameters must equal their masters, rounded, bit for bit.  All ranks must call.
    """
    values = {name: value.float() for name, value in whole_parameters(model).items()}
    masters: dict[int, Tensor] = {}
    if case.zero_stage == 0:
        for group, of_group in zip(
            getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True
        ):
            masters |= {id(parameter): master for parameter, master in zip(group, of_group, strict=True)}
    for name, parameter in model.named_parameters():
        master = masters.get(id(parameter), safe_get_full_fp32_param(parameter))
        if master is not None:
            master = master.detach().reshape(values[name].shape).clone()
            assert torch.equal(master.to(parameter.dtype).float(), values[name]), f"{name} is not its master rounded"
            values[name] = master
    return _by_global_name(case, values)


def start_of(case: Case, model: nn.Module) -> dict[str, Tensor]:
    """The parameters; before the first step, what `snapshot` gives, since masters are copies.  All ranks must call."""
    return _by_global_name(case, {name: value.float() for name, value in whole_parameters(model).items()})


def _by_global_name(case: Case, values: dict[str, Tensor]) -> dict[str, Tensor]:
    if case.family is not None:
        return by_expert(values, first_expert=_first_expert(case))
    return {_global_name(case, name): value for name, value in values.items()}


# -- DeepSpeed's expert groups ----------------------------------------------------------------------------------

_GROUP_TABLES = (
    "_EXPERT_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP_RANKS",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
)


@functools.cache
def _tables_of_layout(ep_size: int, data_before_expert: bool) -> dict[str, dict[str, Any]]:
    """DeepSpeed's group tables for one layout, made once per process: every group costs connections to all members."""
    for table in _GROUP_TABLES:
        setattr(groups, table, {})
    groups._create_expert_and_data_parallel(ep_size, use_data_before_expert_parallel_=data_before_expert)
    return {table: getattr(groups, table) for table in _GROUP_TABLES}


def use_expert_groups_of(case: Case) -> None:
    """Makes DeepSpeed forget the expert groups of the last engine and take those of `case`.

    DeepSpeed finds groups by the name "ep_size_N" alone, so without this a strided layout would silently get the
    consecutive groups of an earlier engine.
    """
    tables = _tables_of_layout(case.toy.ep_size, case.use_data_before_expert_parallel)
    for table, by_name in tables.items():
        setattr(groups, table, dict(by_name))


# -- numbers ----------------------------------------------------------------------------------------------------


def _norm(value: Tensor) -> float:
    return torch.linalg.vector_norm(value.double()).item()


def _norm_of_all(values: Iterable[Tensor]) -> float:
    return math.sqrt(sum(_norm(value) ** 2 for value in values))


def _distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return _norm_of_all(left[name] - right[name] for name in left)


def _ratio(numerator: float, denominator: float) -> float:
    """Quotient in which nothing over nothing is nothing; nan stays nan, so that no comparison with it passes."""
    return 0.0 if numerator == 0.0 else numerator / denominator if denominator != 0.0 else math.inf


# -- in the test process ----------------------------------------------------------------------------------------


def assert_parity(pool: ProcessPool, cases: Sequence[Case]) -> list[list[CaseResult]]:
    """Runs every case on `pool`, whatever became of the ones before, and names all that failed.

    Returns: the results by case and rank.
    Raises: AssertionError with the id of each failing case and what was wrong with it.
    """
    results, failures = [], []
    for case in cases:
        try:
            by_rank = pool.run(run_case, case=case)
        except RemoteError as error:
            failures.append(f"{case.id}\n{error}")
            continue
        results.append(by_rank)
        if problems := problems_of(case, by_rank, tolerances_of(pool, case, by_rank)):
            failures.append("\n    ".join([case.id, *problems]))
    if failures:
        raise AssertionError(f"{len(failures)} of {len(cases)} cases failed\n\n" + "\n\n".join(failures))
    return results


def usual_tolerances(case: Case) -> Tolerances:
    """What holds for a case whatever its results are."""
    if case.dtype != "bf16":
        return Tolerances(loss=FP32_TOLERANCE, parameter=FP32_TOLERANCE)
    return Tolerances(
        loss=BF16_LOSS_TOLERANCE, parameter=BF16_MASTER_TOLERANCE if case.family else BF16_CHANGE_TOLERANCE
    )


def tolerances_of(pool: ProcessPool, case: Case, results: Sequence[CaseResult]) -> Tolerances:
    """The usual ones; for what is above them in bf16, what DeepSpeed against itself allows in this very case."""
    usual = usual_tolerances(case)
    differences = [(name, value) for result in results for name, value in result.change_difference.items()]
    far = {name for name, value in differences if not value <= usual.parameter}
    are_losses_far = any(not result.loss_difference <= usual.loss for result in results)
    if case.dtype != "bf16" or not (far or are_losses_far):
        return usual
    sizes = [size for size in (1, 2, 4, 8) if size != case.toy.ep_size and case.world_size % size == 0]
    others = [result for size in sizes for result in pool.run(run_other_layout, case=case, ep_size=size)]
    own_loss = max(result.loss_difference for result in others)
    own = {name: max(result.change_difference.get(name, 0.0) for result in others) for name in far}
    return Tolerances(
        loss=max(usual.loss, OWN_FACTOR * own_loss) if are_losses_far else usual.loss,
        parameter=usual.parameter,
        by_name={name: OWN_FACTOR * one for name, one in own.items() if usual.parameter < OWN_FACTOR * one < math.inf},
    )


def problems_of(case: Case, results: Sequence[CaseResult], tolerances: Tolerances) -> list[str]:
    """What is wrong with `case`, one line each; empty where it is right."""
    problems = numeric_problems(case, results, tolerances)
    if not _is_moved(results):
        problems.append(f"training moved the parameters by {results[0].movement:.1e} only: the case shows nothing")
    stats = [result.stats for result in results]
    if any(one is None for one in stats):
        return [*problems, "no stats: the block was not active"]
    return [*problems, *_byte_problems(case, stats)]


def _is_moved(results: Sequence[CaseResult]) -> bool:
    return all(result.movement > 1e-2 for result in results)


def noise_units(results: Sequence[CaseResult]) -> float:
    """Distance of hybrid from plain in units of plain bf16's distance from plain fp32, over all ranks together."""
    return _ratio(math.hypot(*(one.distance for one in results)), math.hypot(*(one.noise for one in results)))


def numeric_problems(case: Case, results: Sequence[CaseResult], tolerances: Tolerances | None = None) -> list[str]:
    """What is wrong with losses and parameters, one line each; by the usual tolerances if none are given."""
    is_bf16 = case.dtype == "bf16"
    tolerances = tolerances or usual_tolerances(case)
    problems = []
    # `not a <= b`, here and below: nan is a difference too.
    if is_bf16 and not noise_units(results) <= BF16_NOISE_UNITS:
        problems.append(f"parameters differ by {noise_units(results):.2f} units of bf16 noise")
    for rank, result in enumerate(results):
        if not result.loss_difference <= tolerances.loss:
            steps = [f"{a:.6f}/{b:.6f}" for a, b in zip(result.plain_losses, result.hybrid_losses, strict=True)]
            problems.append(
                f"rank {rank}: losses differ by {result.loss_difference:.1e}; plain/hybrid {' '.join(steps)}"
            )
        differences = result.change_difference if is_bf16 else result.parameter_difference
        far = {name: difference for name, difference in differences.items() if not difference <= tolerances.of(name)}
        if far:
            worst = max(far, key=far.__getitem__)
            problems.append(f"rank {rank}: {len(far)} parameters differ; worst {worst} by {far[worst]:.1e}")
    return problems


def _byte_problems(case: Case, stats: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Bytes over each level, summed over ranks, against what the domain sizes say about them."""
    spans = ep_spans(
        [size for _, size, _ in case.levels],
        ep_size=case.toy.ep_size,
        data_before_expert=case.use_data_before_expert_parallel,
    )
    trains = any(size > 0 for size in case.batch_sizes) if case.batch_sizes else True
    for index, ((name, size, domain_size), span) in enumerate(zip(case.levels, spans, strict=True)):
        sent = {
            kind: sum(one["levels"][index]["sent_bytes"][kind] or 0 for one in stats)
            for kind in ("tokens", "expert_weights", "expert_gradients", "dense", "control")
        }
        is_ours = case.token_exchange != "deepspeed"
        has_hot = case.hot_experts > 0 and index == case.hot_level % len(case.levels)
        has_tokens, has_experts = trains and domain_size < span and is_ours, domain_size > 1 or has_hot
        has_dense = case.dense_sync != "deepspeed" and case.zero_stage < 3 and size > 1
        expected = {
            "tokens": has_tokens,
            "expert_weights": has_experts,
            "expert_gradients": has_experts,
            "dense": has_dense,
        }
        for kind, is_expected in expected.items():
            if (sent[kind] > 0) != is_expected:
                yield (
                    f"level {name!r}: {sent[kind]} bytes of {kind} with domain size {domain_size} of {span}, "
                    f"expected {'some' if is_expected else 'none'}"
                )


def ep_spans(sizes: Sequence[int], *, ep_size: int, data_before_expert: bool) -> tuple[int, ...]:
    """Children of each level over which one EP group extends; their product is `ep_size`.

    sizes [2, 2], ep 2: consecutive [0, 1] -> (1, 2); strided [0, 2] -> (2, 1).
    Raises: ValueError for a group that is no regular sub-grid of the levels.
    """
    world_size = math.prod(sizes)
    stride = world_size // ep_size if data_before_expert else 1
    firsts = range(stride) if data_before_expert else range(0, world_size, ep_size)
    places = list(itertools.product(*(range(size) for size in sizes)))  # by rank: the last level varies fastest
    spans = set()
    for first in firsts:
        group = [places[first + position * stride] for position in range(ep_size)]
        spans.add(tuple(len({place[level] for place in group}) for level in range(len(sizes))))
    if len(spans) > 1 or math.prod(next(iter(spans))) != ep_size:
        raise ValueError(f"EP groups of {ep_size} with stride {stride} are no sub-grid of levels {list(sizes)}")
    return spans.pop()


def domain_size_choices(sizes: Sequence[int], *, ep_size: int, data_before_expert: bool = False) -> list[tuple]:
    """Every tuple of domain sizes that the block accepts for such EP groups: divisors of the span, level by level."""
    spans = ep_spans(sizes, ep_size=ep_size, data_before_expert=data_before_expert)
    divisors = [[divisor for divisor in range(1, span + 1) if span % divisor == 0] for span in spans]
    return list(itertools.product(*divisors))


def merged(block: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The block with other settings, those of "advanced" beside the ones that it has there."""
    advanced = {**block.get("advanced", {}), **settings.get("advanced", {})}
    return {**block, **settings, "advanced": advanced}


def levels_of(sizes: Sequence[int], domain_sizes: Sequence[int]) -> Levels:
    """Levels with the usual names: the slowest is "dc", the last "gpu"."""
    names = {1: ("dc",), 2: ("dc", "gpu"), 3: ("dc", "node", "gpu")}[len(sizes)]
    return tuple(zip(names, sizes, domain_sizes, strict=True))
