# SPDX-License-Identifier: Apache-2.0
"""Reads the question for `plan` and `simulate` from the command line: cluster, model, training and machines."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_hybridep.config import parse_config, read_cluster_file
from ds_hybridep.config_codecs import PATCH, CodecConfig, recommended_codecs
from ds_hybridep.errors import ConfigError
from ds_hybridep.geometry.cluster import BITS_PER_BYTE, Cluster, Level, LinkSpeed
from ds_hybridep.geometry.packets import Part
from ds_hybridep.geometry.slots import part_of
from ds_hybridep.lab.topology import parse_duration, parse_number
from ds_hybridep.plan.adapters import WHERE, with_adapters
from ds_hybridep.plan.choices import skewed_loads
from ds_hybridep.plan.codec_costs import (
    DEFAULT_ADAPTER_RATE,
    DEFAULT_LEARNING_RATE,
    DeviceRates,
    codec_cost,
    patch_cost,
)
from ds_hybridep.plan.costs import expert_parts
from ds_hybridep.plan.machines import (
    DEFAULT_GPU,
    GPUS,
    GPUS_OF_MACHINE,
    HOST_MEMORY_BYTES,
    NETWORK_BYTES_PER_S,
    codec_rates_of,
    default_link_bytes_per_s,
    gpu_of,
)
from ds_hybridep.plan.model_sizes import model_from_mapping
from ds_hybridep.plan.models import model_name, read_model_file, ready_names
from ds_hybridep.plan.plan import EXACT, RECOMMENDED, CodecCosts, ExpertGroup, LevelCodecs
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.words import GIGA
from ds_hybridep.plan.workload import DTYPE_BYTES, MoEModel, Workload

BITS_PER_UNIT = {
    "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9, "tbps": 1e12,
}  # fmt: skip
TERA = 1e12
DEFAULT_MFU = 0.4
DEFAULT_TOKENS = 4096
DEFAULT_SEQUENCE = 4096
DEFAULT_LORA_RANK = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `read_question` reads."""
    _add_cluster_arguments(parser)
    _add_training_arguments(parser)
    add = parser.add_argument_group("machines").add_argument
    add("--gpu", default=DEFAULT_GPU, metavar="NAME", help=f"{', '.join(GPUS)}; default %(default)s")
    add("--tflops", type=float, help="peak TFLOPS of a GPU, dense, bf16; default: of --gpu")
    add("--mfu", type=float, default=DEFAULT_MFU, help="share of the peak that is reached; default %(default)g")
    add("--memory", type=float, metavar="GB", help="memory of a GPU, activations included; default: of --gpu")
    add(
        "--host-memory", type=float, default=HOST_MEMORY_BYTES / GIGA, metavar="GB",
        help="memory of the host for each GPU; default %(default)g",
    )  # fmt: skip
    add(
        "--overlap", type=float, default=1.0, metavar="SHARE",
        help="share of transfers that hide behind computation, where they can; default %(default)g",
    )  # fmt: skip
    add(
        "--hot-memory-gb", type=float, metavar="GB",
        help="memory of a GPU for hot experts, with --skew; no limit of its own by default",
    )  # fmt: skip
    add(
        "--dense-sync", choices=("hierarchical", "deepspeed"), default="hierarchical",
        help="who synchronises what several ranks hold: this package, level by level, or DeepSpeed, without codecs",
    )  # fmt: skip
    add(
        "--codecs", choices=(RECOMMENDED, EXACT), default=RECOMMENDED,
        help="codecs to try at each level; default %(default)s, which includes exact ones",
    )  # fmt: skip


def _add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("cluster").add_argument
    add("--cluster", type=Path, metavar="FILE", help="a cluster file, with a list of levels")
    add("--dcs", metavar="DCxGPUS", help="datacentres x GPUs in each, such as 2x8")
    add("--wan", metavar="RATE", help="bandwidth of each datacentre's uplink, such as 10gbps")
    add("--delay", metavar="TIME", help="one-way delay between datacentres, such as 10ms; default 0")
    add(
        "--lan", metavar="RATE",
        help=f"bandwidth of each GPU's link inside its datacentre; default: NVLink or PCIe of --gpu, with more than "
        f"{GPUS_OF_MACHINE} GPUs at most {NETWORK_BYTES_PER_S * BITS_PER_BYTE / GIGA:g}gbps",
    )  # fmt: skip


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model and training").add_argument
    names = ", ".join(ready_names())
    add(
        "--model", required=True, metavar="NAME|FILE",
        help=f"{names}; the config.json of any MoE model of the Hugging Face hub, or its folder; or a file with "
        f"layers, hidden, ffn, experts, top_k",
    )  # fmt: skip
    add(
        "--tokens", type=_positive, default=DEFAULT_TOKENS, metavar="N",
        help="tokens per GPU and micro-step: its batch x its sequences' length; default %(default)s",
    )  # fmt: skip
    add(
        "--seq", type=_positive, metavar="N",
        help=f"tokens of a sequence, for attention scores; default {DEFAULT_SEQUENCE}, or --tokens if that is less",
    )  # fmt: skip
    add(
        "--accumulation",
        type=_positive,
        default=1,
        metavar="N",
        help="gradient_accumulation_steps; default %(default)s",
    )
    add("--zero-stage", type=int, default=1, metavar="0|1|2", help="beside expert parallelism; default %(default)s")
    add("--offload-optimizer", action="store_true", help="zero_optimization.offload_optimizer: count its states there")
    add("--dtype", metavar="|".join(sorted(DTYPE_BYTES)), help="of parameters and activations; default bf16")
    add(
        "--learning-rate", type=float, metavar="LR",
        help=f"of AdamW, for the ds_config; the less weights change, the fewer bytes encode them; default "
        f"{DEFAULT_LEARNING_RATE:g}, with --lora {DEFAULT_ADAPTER_RATE:g}",
    )  # fmt: skip
    add("--checkpointing", action="store_true", help="activation checkpointing")
    add("--fused-loss", action="store_true", help="the loss is computed in pieces, without all logits in memory")
    add(
        "--lora", choices=WHERE, default="none",
        help="train adapters only: of attention, of routed experts, or of both, shared experts and dense layers, of "
        "routers never; default %(default)s, which trains everything",
    )  # fmt: skip
    add("--lora-rank", type=_positive, metavar="R", help=f"rank of the adapters; default {DEFAULT_LORA_RANK}")
    add(
        "--skew", type=float, default=1.0, metavar="X",
        help="rows of the fullest GPU over the mean, as 'imbalance' in a report; default %(default)g, even routing",
    )  # fmt: skip
    add("--ep-size", type=_positive, metavar="N", help="size of the expert-parallel group; default: the best")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted at least 1")
    return number


def read_question(args: argparse.Namespace) -> Question:
    """The question on the command line.  Raises ConfigError or PlanError that name an argument."""
    _check_combinations(args)
    gpu = gpu_of(args.gpu)
    content = read_model_file(args.model)
    model = model_from_mapping(content, model_name(args.model))
    workload = read_workload(args, content, model)
    cluster = read_cluster(args)
    tflops = gpu.flops_per_s / TERA if args.tflops is None else args.tflops
    memory = gpu.memory_bytes / GIGA if args.memory is None else args.memory
    _check_numbers(args, tflops, memory)
    question = Question(
        cluster=cluster,
        workload=workload,
        rates=Rates(flops_per_s=tflops * args.mfu * TERA, overlap=args.overlap),
        dense_sync=args.dense_sync,
        groups=() if args.ep_size is None else (ExpertGroup(args.ep_size),),
        codecs=read_codecs(args, workload),
        memory_bytes=memory * GIGA,
        host_memory_bytes=args.host_memory * GIGA,
        hot_bytes=None if args.hot_memory_gb is None else args.hot_memory_gb * GIGA,
        adapters=None if args.lora == "none" else (args.lora, args.lora_rank or DEFAULT_LORA_RANK),
    )
    return with_skew(question, args.skew)


def _check_combinations(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not go together, before anything is computed."""
    sequence = args.seq or 0
    wrong = {
        "--lora-rank: gives the rank of adapters, but --lora is none; add --lora attention, experts or all":
            args.lora_rank is not None and args.lora == "none",
        f"--zero-stage: got {args.zero_stage}, wanted 0, 1 or 2; the table has ZeRO-3 in any case":
            args.zero_stage not in (0, 1, 2),
        f"--zero-stage: got 2 with --lora {args.lora}, but adapters of experts need stage 0 or 1":
            args.zero_stage == 2 and args.lora in ("experts", "all"),
        f"--seq: got {sequence}, but a GPU has only {args.tokens} tokens in a micro-step; raise --tokens":
            sequence > args.tokens,
        "--hot-memory-gb: limits hot experts, but routing is even; add --skew": (
            args.hot_memory_gb is not None and args.skew == 1.0
        ),
        "--offload-optimizer: DeepSpeed offloads under ZeRO 1 and 2, but --zero-stage is 0; give 1 or 2":
            args.offload_optimizer and args.zero_stage == 0,
    }  # fmt: skip
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(message)


def _check_numbers(args: argparse.Namespace, tflops: float, memory: float) -> None:
    if not (tflops > 0 and 0 < args.mfu <= 1):
        raise ConfigError(f"--tflops and --mfu: got {tflops:g} and {args.mfu:g}, wanted > 0, and > 0 to 1")
    if not (memory > 0 and args.host_memory >= 0):
        raise ConfigError(f"--memory and --host-memory: got {memory:g} and {args.host_memory:g}, wanted > 0, and >= 0")
    if args.hot_memory_gb is not None and not args.hot_memory_gb > 0:
        raise ConfigError(f"--hot-memory-gb: got {args.hot_memory_gb:g}, wanted > 0")


def with_skew(question: Question, skew: float) -> Question:
    """The question for experts whose loads are the same in all plans: those of the skew over the largest group.

    Raises PlanError for a skew that no routing has.
    """
    if skew == 1.0:
        return question
    workload = question.workload
    num_ranks = max(group.ep_size for group in question.expert_groups)
    loads = skewed_loads(skew, workload.model.num_experts, num_ranks, workload.model.top_k)
    return replace(question, workload=replace(workload, skew=skew, expert_loads=loads))


def read_cluster(args: argparse.Namespace) -> Cluster:
    """The cluster with its links.  Raises ConfigError unless exactly one of --dcs and --cluster is given."""
    if (args.dcs is None) == (args.cluster is None):
        raise ConfigError("--dcs, --cluster: give one of them, as in --dcs 2x8 --wan 10gbps or --cluster FILE")
    if args.dcs is not None:
        match = re.fullmatch(r"\s*([1-9]\d{0,5})\s*[xX]\s*([1-9]\d{0,5})\s*", args.dcs)
        if match is None:
            raise ConfigError(
                f"--dcs: got '{args.dcs}', wanted DATACENTRESxGPUS, for example 2x8; each has as many GPUs as the "
                f"others, so give the fewest, and ask for the largest alone too, as 1x16"
            )
        if args.wan is None and int(match[1]) > 1:
            raise ConfigError("--wan: missing; --dcs needs the rate of a datacentre's uplink, such as 10gbps")
        num_gpus = int(match[2])
        link = LinkSpeed(default_link_bytes_per_s(gpu_of(args.gpu), num_gpus), None)
        cluster = Cluster((Level("dc", int(match[1])), Level("gpu", num_gpus, link)))
    else:
        # A block that is not enabled may have sizes that do not match the world size.
        cluster = parse_config({"enabled": False, "levels": str(args.cluster)}, world_size=0).cluster()
    for level, rate, argument in ((0, args.wan, "--wan"), (len(cluster.levels) - 1, args.lan, "--lan")):
        if rate is not None:
            cluster = cluster.with_link(level, bandwidth_bytes_per_s=parse_bits_per_s(rate, argument) / BITS_PER_BYTE)
    if args.delay is not None:
        cluster = cluster.with_link(0, latency_s=parse_duration(args.delay, "--delay"))
    return cluster


def parse_bits_per_s(text: str, argument: str) -> float:
    """Parses a rate such as "10gbps" or "200mbit" to bits/s.  Raises ConfigError for other text, also for bytes/s."""
    bits_per_s = parse_number(text, BITS_PER_UNIT)
    if not bits_per_s or "Bps" in text:
        raise ConfigError(
            f"{argument}: got '{text}', wanted bits per second, as in 10gbps or 200mbit; 1 GB/s is 8gbps"
        )
    return bits_per_s


def read_workload(args: argparse.Namespace, content: Mapping[str, Any], model: MoEModel) -> Workload:
    """One training step: from the arguments, else from the model file, else by default."""
    dtype = args.dtype or str(content.get("dtype", "bf16"))
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"--dtype: got '{dtype}', wanted one of {', '.join(DTYPE_BYTES)}; 4-bit weights (QLoRA) are not priced"
        )
    usual_rate = DEFAULT_LEARNING_RATE if args.lora == "none" else DEFAULT_ADAPTER_RATE
    adapted, (of_expert, of_dense) = with_adapters(model, args.lora, args.lora_rank or DEFAULT_LORA_RANK)
    return Workload(
        model=adapted,
        tokens_per_rank=args.tokens,
        sequence_tokens=args.seq or min(args.tokens, DEFAULT_SEQUENCE),
        micro_steps=args.accumulation,
        param_bytes=DTYPE_BYTES[dtype],
        zero_stage=args.zero_stage,
        offloads_optimizer=args.offload_optimizer,
        is_checkpointed=args.checkpointing,
        has_fused_loss=args.fused_loss,
        trainable_expert_shapes=of_expert,
        trainable_dense_shapes=of_dense,
        learning_rate=usual_rate if args.learning_rate is None else args.learning_rate,
    )


def read_device_rates(args: argparse.Namespace) -> DeviceRates:
    """What codecs reach: as `ds_hybridep probe` has measured it, if the cluster file has it, else by --gpu."""
    device = None if args.cluster is None else read_cluster_file(str(args.cluster))[1].get("device")
    if device is None:
        return codec_rates_of(gpu_of(args.gpu))
    try:
        found = DeviceRates(1e9 * device["memory_gb_per_s"], 1e12 * device["product_tflops"])
        if not min(found.memory_bytes_per_s, found.product_flops_per_s) > 0:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--cluster: device in {args.cluster} is {device!r}, wanted memory_gb_per_s and product_tflops above 0, "
            f"as `ds_hybridep probe` writes them; remove it to take those of --gpu"
        ) from error
    return found


def read_codecs(args: argparse.Namespace, workload: Workload) -> tuple[CodecCosts, ...]:
    """Sets of codecs to try at each level: exact, and by default recommended."""
    if args.codecs == EXACT:
        return (LevelCodecs(),)
    wanted = recommended_codecs(workload.param_bytes)
    experts = expert_parts(workload, 1)
    dense = tuple(map(part_of, workload.dense_tensors))
    rates = read_device_rates(args)

    def cost(codec: CodecConfig, parts: tuple[Part, ...]) -> CodecCost:
        if codec == PATCH:
            return patch_cost(workload.learning_rate, rates)
        return codec_cost(codec.model_dump(), parts, workload.param_bytes, rates)

    recommended = LevelCodecs(
        weight=cost(wanted.weight, experts),
        gradient=cost(wanted.gradient, experts),
        dense_weight=cost(wanted.dense_weight, dense),
        dense_gradient=cost(wanted.dense_gradient, dense),
        name=RECOMMENDED,
    )
    return LevelCodecs(), recommended
