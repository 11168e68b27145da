# SPDX-License-Identifier: Apache-2.0
"""The `plan` subcommand: reads its arguments, asks the planner, prints the answer as a table or as JSON."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from ds_hybridep.config import parse_config
from ds_hybridep.errors import ConfigError, PlanError
from ds_hybridep.lab.topology import Topology, parse_duration
from ds_hybridep.plan.cluster import Cluster, Level
from ds_hybridep.plan.layout import Codec, ExpertGroup, LevelCodecs, Rates, SyncModel
from ds_hybridep.plan.models import read_model_file, ready_names
from ds_hybridep.plan.planner import (
    Plan,
    Question,
    break_even_tokens,
    make_plan,
    reigns,
    step_times,
)
from ds_hybridep.plan.row_format import RowFormat, token_codec
from ds_hybridep.plan.summary import Extras, describe, ds_config_block, reigns_json, uses_codecs, verdict
from ds_hybridep.plan.workload import DTYPE_BYTES, MoEModel, Workload, model_from_mapping

BITS_PER_BYTE = 8
BITS_PER_UNIT = {
    "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9, "tbps": 1e12,
}  # fmt: skip
GIGA = 1e9
TERA = 1e12
DEFAULT_TFLOPS = 990.0  # of an H100 in bf16, dense
DEFAULT_MFU = 0.4
DEFAULT_TOKENS = 4096
SWEEP_BYTES_PER_S = [10 ** (6 + step / 4) for step in range(25)]  # 8 Mbit/s to 8 Tbit/s

DESCRIPTION = """\
Predicts the step time of every plan for a model on a cluster and says which to use, or that something else is better.
Nothing is run and no GPU is needed. Give the cluster as --ds-config, as --cluster or as --dcs with --wan, and the
model as --model.
"""
EXAMPLE = """\
example:
  ds_hybridep plan --model Qwen3-30B-A3B --dcs 2x8 --wan 10gbps --delay 10ms --tokens 16384
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `plan` to the subcommands of the program."""
    parser = subparsers.add_parser(
        "plan",
        help="predict step times and choose domain sizes",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--ds-config", type=Path, metavar="FILE", help="a ds_config.json; its hybridep.levels count")
    cluster.add_argument("--cluster", type=Path, metavar="FILE", help="a cluster file, with a list of levels")
    cluster.add_argument("--dcs", metavar="DCxGPUS", help="datacentres x GPUs in each, such as 2x8")
    cluster.add_argument("--wan", metavar="RATE", help="of each datacentre's uplink, such as 10gbps")
    cluster.add_argument("--delay", metavar="TIME", help="one way between datacentres, such as 10ms")
    cluster.add_argument("--lan", metavar="RATE", help="of each GPU's link inside; 8 times --wan by default")
    cluster.add_argument("--lan-delay", metavar="TIME", help="one way between GPUs of a datacentre")
    model = parser.add_argument_group("model and training")
    model.add_argument(
        "--model",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(ready_names())}, a Hugging Face config.json, or a file with layers, hidden, ffn, experts, "
        f"top_k",
    )
    model.add_argument(
        "--tokens", type=_positive, metavar="N", help=f"per GPU and micro-step; default {DEFAULT_TOKENS}"
    )
    model.add_argument("--seq-len", type=_positive, metavar="N", help="of a sequence; counts attention scores")
    model.add_argument("--accumulation", type=_positive, metavar="N", help="micro-steps in an optimizer step")
    model.add_argument("--zero-stage", type=int, choices=(0, 1, 2))
    model.add_argument("--dtype", choices=sorted(DTYPE_BYTES), help="of parameters and rows; default bf16")
    model.add_argument("--checkpointing", action="store_true", help="activations are recomputed in the backward")
    model.add_argument("--capacity-factor", type=float, default=1.0, help="of DeepSpeed's gate, for comparison")
    model.add_argument("--imbalance", type=float, default=1.0, help="rows of the busiest rank over the mean")
    model.add_argument("--lora-rank", type=_positive, metavar="R", help="only adapters of this rank are trained")
    model.add_argument("--ep-size", type=_positive, metavar="N", help="ranks that share the experts; searched")
    model.add_argument("--strided", action="store_true", help="with --ep-size: use_data_before_expert_parallelism")
    machine = parser.add_argument_group("machines")
    machine.add_argument("--tflops", type=float, default=DEFAULT_TFLOPS, help="peak of a GPU; default %(default)g")
    machine.add_argument("--mfu", type=float, default=DEFAULT_MFU, help="share of it reached; default %(default)g")
    machine.add_argument(
        "--overlap", type=float, default=1.0, metavar="SHARE", help="of what could be hidden, is; default all, 1"
    )
    machine.add_argument("--memory", type=float, metavar="GB", help="of a GPU, without activations; not limited")
    machine.add_argument("--sync", choices=("ring", "hierarchical"), default="ring", help="of dense gradients")
    machine.add_argument(
        "--what-if-codec",
        action="append",
        default=[],
        metavar="NAME=RATIO",
        help="also try expert weights and gradients made RATIO times smaller, at no cost of computation",
    )
    machine.add_argument(
        "--token-codec", choices=get_args(RowFormat), help="of token rows on their way to experts over the slow level"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--price-per-gb", type=float, metavar="PRICE", help="of what leaves a datacentre")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="step time against bandwidth, for all plans")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the parsed command line.  Returns 0.  Raises ConfigError or PlanError that name an argument."""
    question = read_question(args)
    plan = make_plan(question)
    extras = Extras(
        tokens_deduplicated=break_even_tokens(question, is_deduplicated=True),
        tokens_padded=break_even_tokens(question, is_deduplicated=False),
        reigns=reigns(question, plan, SWEEP_BYTES_PER_S),
        price_per_gb=args.price_per_gb,
    )
    if args.plot is not None:
        plot(question, plan, args.plot)
    if args.json:
        print(json.dumps(answer_json(question, plan, extras), indent=2))
        return 0
    print(describe(question, plan, extras))
    if args.ds_config is not None:
        print(_compare_with_config(plan, read_ds_config(args.ds_config)))
    assumed = uses_codecs(plan.best.layout)
    if assumed:
        print(
            f"\n{', '.join(assumed)} is a what-if: its ratio was given by hand, so there is nothing to paste. A codec "
            f"that has this ratio is written into weight_codec and gradient_codec of the slow level with its options."
        )
    elif plan.better is None:
        print("\nFor ds_config.json:\n" + json.dumps(ds_config_block(question, plan), indent=2))
    if args.plot is not None:
        print(f"plot: {args.plot}")
    return 0


def answer_json(question: Question, plan: Plan, extras: Extras) -> dict[str, Any]:
    """The plan and what was reckoned beside it, as JSON values."""
    return {
        **plan.to_json(),
        "digest": plan.digest,
        "verdict": verdict(question, plan),
        "break_even_tokens": {
            "deduplicated": extras.tokens_deduplicated,
            "padded": extras.tokens_padded,
        },
        "fastest_by_bandwidth": reigns_json(extras.reigns),
        "ds_config": ds_config_block(question, plan),
    }


def _compare_with_config(plan: Plan, config: "DsConfig") -> str:
    """What the ds_config's own domain sizes would take."""
    for candidate in (plan.best, *plan.others):
        is_transient = config.is_transient and candidate.layout.domain_size > 1
        if (candidate.layout.domain_sizes, candidate.layout.is_transient) == (config.domain_sizes, is_transient):
            sizes = ",".join(map(str, config.domain_sizes))
            return f"The ds_config has [{sizes}]: {candidate.step_s:.4g} s a step, {candidate.reason}."
    return 'The ds_config has no domain sizes that can be compared, or leaves some to the job ("auto").'


# ---- reading arguments ----


@dataclass(frozen=True)
class DsConfig:
    """What a ds_config.json says about the job; None where it does not, or says "auto"."""

    cluster: Cluster | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    zero_stage: int | None = None
    dtype: str | None = None
    is_strided: bool = False
    domain_sizes: tuple[int, ...] = ()
    row_formats: tuple[RowFormat | None, ...] = ()  # of token rows over each level
    is_transient: bool = False


def read_question(args: argparse.Namespace) -> Question:
    """What the command line asks; arguments win over the ds_config."""
    config = DsConfig() if args.ds_config is None else read_ds_config(args.ds_config)
    content = read_model_file(args.model)
    model = model_from_mapping(content, Path(args.model).stem if "/" in args.model else args.model)
    workload = read_workload(args, config, content, model)
    if not (args.tflops > 0 and 0 < args.mfu <= 1):
        raise ConfigError(f"--tflops and --mfu: got {args.tflops:g} and {args.mfu:g}, wanted > 0, and > 0 to 1")
    if args.strided and args.ep_size is None:
        raise ConfigError("--strided: needs --ep-size; without it both kinds of groups are tried")
    is_strided = args.strided or config.is_strided
    cluster = read_cluster(args, config)
    return Question(
        cluster=cluster,
        workload=workload,
        rates=Rates(flops_per_s=args.tflops * args.mfu * TERA, overlap=args.overlap),
        sync=SyncModel(algorithm=args.sync),
        groups=() if args.ep_size is None else (ExpertGroup(args.ep_size, is_strided),),
        codecs=(LevelCodecs(), *(read_codec(text) for text in args.what_if_codec)),
        token_codecs=tuple(
            token_codec(row_format, model.hidden, workload.param_bytes)
            for row_format in read_row_formats(args, config, cluster)
        ),
        memory_bytes=None if args.memory is None else args.memory * GIGA,
        is_transient=config.is_transient,
    )


def read_cluster(args: argparse.Namespace, config: DsConfig) -> Cluster:
    """The one cluster that was given, with the links that --wan and the others give.

    Raises ConfigError where none or several were given.
    """
    given = [name for name in ("dcs", "cluster") if getattr(args, name) is not None]
    if len(given) > 1:
        raise ConfigError("--dcs, --cluster: got both, wanted one of them")
    if args.dcs is not None:
        topology = Topology.parse(args.dcs)
        cluster = Cluster((Level("dc", topology.num_dcs), Level("gpu", topology.hosts_per_dc)))
        if args.wan is None:
            raise ConfigError("--wan: missing; --dcs needs the rate of a datacentre's uplink, such as 10gbps")
    elif args.cluster is not None:
        # Switched off, its sizes need not fit a world size.
        levels = parse_config({"enabled": False, "levels": str(args.cluster)}, world_size=0)
        cluster = levels.cluster()
    elif config.cluster is not None:
        cluster = config.cluster
    else:
        raise ConfigError(
            "--dcs: missing; give the cluster as --dcs 2x8 --wan 10gbps, as --cluster FILE, or as hybridep.levels in "
            "--ds-config FILE"
        )
    cluster = _with_link(cluster, 0, args.wan, args.delay, ("--wan", "--delay"))
    return _with_link(cluster, len(cluster.levels) - 1, args.lan, args.lan_delay, ("--lan", "--lan-delay"))


def read_row_formats(args: argparse.Namespace, config: DsConfig, cluster: Cluster) -> tuple[RowFormat | None, ...]:
    """Of token rows over each level, as in the ds_config; --token-codec says that of the slow one.

    Raises ConfigError where the ds_config has token codecs for another number of levels.
    """
    formats = config.row_formats
    if len(formats) != len(cluster.levels):
        if any(formats):
            raise ConfigError(
                f"hybridep.levels has token codecs for {len(formats)} levels, but the cluster given beside it has "
                f"{len(cluster.levels)}; give as many levels, or take token_codec out of the ds_config"
            )
        formats = (None,) * len(cluster.levels)
    return formats if args.token_codec is None else (args.token_codec, *formats[1:])


def _with_link(cluster: Cluster, index: int, rate: str | None, delay: str | None, names: tuple[str, str]) -> Cluster:
    """The cluster with what is given of one level's link."""
    link = cluster.levels[index].link
    if rate is not None:
        link = replace(link, bandwidth_bytes_per_s=parse_bits_per_s(rate, names[0]) / BITS_PER_BYTE)
    if delay is not None:
        link = replace(link, latency_s=parse_duration(delay, names[1]))
    levels = list(cluster.levels)
    levels[index] = replace(levels[index], link=link)
    return Cluster(tuple(levels))


def parse_bits_per_s(text: str, argument: str) -> float:
    """Bits per second of "10gbps" or "200mbit".  Raises ConfigError for anything else, bytes included."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*", text)
    unit = "" if match is None else match[2].lower()
    if match is None or unit not in BITS_PER_UNIT or float(match[1]) <= 0 or match[2].endswith("Bps"):
        raise ConfigError(f"{argument}: got '{text}', wanted bits per second, as in 10gbps or 200mbit")
    return float(match[1]) * BITS_PER_UNIT[unit]


def read_workload(args: argparse.Namespace, config: DsConfig, content: Mapping[str, Any], model: MoEModel) -> Workload:
    """One training step: from the arguments, else from the ds_config, else from the model file, else by default."""
    seq_len = args.seq_len or 0
    if args.tokens is not None:
        tokens = args.tokens
    elif config.micro_batch is not None and seq_len:
        tokens = config.micro_batch * seq_len
    else:
        tokens = int(content.get("tokens", DEFAULT_TOKENS))
    dtype = args.dtype or config.dtype or str(content.get("dtype", "bf16"))
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype: got '{dtype}', wanted one of {', '.join(DTYPE_BYTES)}")
    zero_stage = args.zero_stage if args.zero_stage is not None else config.zero_stage
    workload = Workload(
        model=model,
        tokens_per_rank=tokens,
        micro_steps=args.accumulation or config.accumulation or 1,
        param_bytes=DTYPE_BYTES[dtype],
        zero_stage=1 if zero_stage is None else zero_stage,
        is_checkpointed=args.checkpointing,
        seq_len=seq_len,
        capacity_factor=args.capacity_factor,
        imbalance=args.imbalance,
    )
    if args.lora_rank is None:
        return workload
    # Three matrices between hidden and ffn, each with two adapters; and four of hidden x hidden in attention.
    ffn = model.expert_params // (3 * model.hidden)
    return replace(
        workload,
        trainable_expert_params=3 * args.lora_rank * (model.hidden + ffn),
        trainable_dense_params=model.num_moe_layers * 4 * 2 * args.lora_rank * model.hidden,
    )


def read_codec(text: str) -> LevelCodecs:
    """NAME=RATIO as a codec both ways.  Raises ConfigError for other text."""
    name, equals, ratio = text.partition("=")
    try:
        codec = Codec(name.strip(), float(ratio))
    except (ValueError, PlanError) as error:
        raise ConfigError(f"--what-if-codec: got '{text}', wanted NAME=RATIO, as in low_rank=25") from error
    if not (equals and name.strip()):
        raise ConfigError(f"--what-if-codec: got '{text}', wanted NAME=RATIO, as in low_rank=25")
    return LevelCodecs(weight=codec, gradient=codec)


def read_ds_config(path: Path) -> DsConfig:
    """What a ds_config.json says.  Raises ConfigError where it cannot be read, or its block is wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--ds-config: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--ds-config: {path} is not JSON: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"--ds-config: {path} holds a {type(content).__name__}, wanted an object")
    cluster: Cluster | None = None
    domain_sizes: tuple[int, ...] = ()
    row_formats: tuple[RowFormat | None, ...] = ()
    is_transient = False
    if "hybridep" in content:
        # Switched off, its sizes need not fit a world size.
        block = {**content["hybridep"], "enabled": False}
        config = parse_config(block, world_size=0, base_dir=path.parent)
        is_transient = config.replicas == "transient"
        row_formats = tuple(level.row_format for level in config.levels)
        if config.levels:
            cluster, domain_sizes = config.cluster(), () if config.is_planned else config.domain_sizes
    zero = content.get("zero_optimization")
    dtypes = [name for name in ("bf16", "fp16") if _is_on(content.get(name))]
    return DsConfig(
        cluster=cluster,
        micro_batch=_count(content.get("train_micro_batch_size_per_gpu")),
        accumulation=_count(content.get("gradient_accumulation_steps")),
        zero_stage=zero.get("stage", 0) if isinstance(zero, Mapping) else 0,
        dtype=dtypes[0] if dtypes else "fp32",
        is_strided=bool(content.get("use_data_before_expert_parallelism", False)),
        domain_sizes=domain_sizes,
        row_formats=row_formats,
        is_transient=is_transient,
    )


def _is_on(section: object) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _count(value: object) -> int | None:
    """A count, None for "auto" and what is missing."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted at least 1")
    return number


# ---- plot ----


def plot(question: Question, plan: Plan, path: Path, bandwidths: Sequence[float] | None = None) -> None:
    """Step time against the bandwidth of level 0, for all plans.  Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError('--plot: needs matplotlib; install it with pip install "ds_hybridep[plot]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    bandwidths = list(bandwidths or SWEEP_BYTES_PER_S)
    gbps = [bandwidth * BITS_PER_BYTE / GIGA for bandwidth in bandwidths]
    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    best = plan.best.label
    for label, seconds in step_times(question, plan, bandwidths).items():
        style = "--" if label.startswith("DeepSpeed") else "-"
        axes.plot(gbps, seconds, style, label=label, linewidth=2.5 if label == best else 1.2)
    given = question.cluster.levels[0].link.bandwidth_bytes_per_s
    if given is not None:
        axes.axvline(given * BITS_PER_BYTE / GIGA, color="grey", linestyle=":")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=f"Gbit/s of a {question.cluster.levels[0].name}'s uplink",
        ylabel="predicted seconds per step",
        title=f"{question.workload.model.name}, {question.workload.tokens_per_rank} tokens per GPU and micro-step",
    )
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
