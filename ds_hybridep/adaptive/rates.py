# SPDX-License-Identifier: Apache-2.0
"""Speeds of a job's experts and codecs, measured at its start while all ranks compute."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ds_hybridep.adaptive.probe import WIRE_FACTOR, LinkProbe
from ds_hybridep.codecs import make_codec
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.config_codecs import AUTO_CODEC, IDENTITY, PATCH, CodecConfig
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.experts.slots import lay_out
from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.geometry.packets import packets_of
from ds_hybridep.geometry.slots import part_of, whole
from ds_hybridep.kernels import Mode
from ds_hybridep.plan.codec_costs import PATCHED_BYTES, codec_cost, patch_cost, token_codec
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.workload import Workload
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MessageLayout, PacketPart
from ds_hybridep.sync.mirrors import Mirror, Replica
from ds_hybridep.transport.streams import synchronize

EXPERT_ROWS = (16, 256)
TIMINGS = 3
PATCH_BYTES_PER_S = 1e9  # assumed speed of a CPU, to encode and to decode


def measure_experts(spec: LayerSpec, probe: LinkProbe, cluster: Cluster) -> Rates:
    """FLOP/s of an expert, forward and backward, and seconds of a call: means over all ranks, which must all call."""
    probe.table([0.0])
    few_s, many_s = (_expert_s(spec, rows) for rows in EXPERT_ROWS)
    few, many = EXPERT_ROWS
    few_s, many_s = _means(probe, few_s, many_s)
    row_s = max(many_s - few_s, 1e-9) / (many - few)
    call_s = max(few_s - few * row_s, 0.0) / 3.0  # a backward takes twice as long as a forward
    # Forward, gradient of the input, and gradients of what is trained: as `Workload` counts them.
    row_flops = 2.0 * (2 * expert_params(spec) + expert_params(spec, trainable_only=True))
    latency_s = cluster.levels[-1].link.latency_s or 0.0  # what a message is assumed to cost the host
    return Rates(
        flops_per_s=row_flops / row_s,
        expert_call_s=call_s,
        exchange_s=latency_s,
        all_to_all_s=latency_s,
        packet_s=latency_s,
        wire_factor=WIRE_FACTOR,
    )


def codec_costs(
    config: HybridEPConfig, spec: LayerSpec, workload: Workload, probe: LinkProbe
) -> dict[CodecConfig, CodecCost]:
    """The cost of every codec that may be used, except the exact default; all ranks must call."""
    fixed = [codec for level in config.levels for codec in level.all_codecs]
    costs: dict[CodecConfig, CodecCost] = {}
    for codec in dict.fromkeys([*config.auto_codecs, *fixed]):
        if codec == PATCH:
            costs[codec] = assumed_patch(workload)
        elif codec not in (IDENTITY, AUTO_CODEC) and expert_params(spec, trainable_only=True):
            costs[codec] = measure_codec(codec, spec, probe, config.advanced.kernels)
        elif codec not in (IDENTITY, AUTO_CODEC):
            parts = map(part_of, workload.dense_tensors)
            costs[codec] = codec_cost(codec.model_dump(), parts, spec.sample.element_size())
    for level in config.levels:
        costs[level.token_codec] = token_codec(level.row_format, spec.hidden, spec.sample.element_size())
    return costs


def assumed_patch(workload: Workload) -> CodecCost:
    """The assumed cost of patches.  Only 16-bit weights are patched; others are sent as they are."""
    if workload.param_bytes != PATCHED_BYTES:
        return CodecCost("patch", is_lossy=False)
    estimate = patch_cost(workload.learning_rate)
    return replace(estimate, encode_bytes_per_s=PATCH_BYTES_PER_S, decode_bytes_per_s=PATCH_BYTES_PER_S)


def measure_codec(config: CodecConfig, spec: LayerSpec, probe: LinkProbe, kernels: Mode) -> CodecCost:
    """Sizes and speed of a codec on one layer's experts: the mean over all ranks, which must all call."""
    codec = make_codec(config, kernels=kernels)
    parts = tuple(
        PacketPart(piece.shape, spec.num_local, (whole(piece.name, (spec.num_local, *piece.shape)),))
        for block in lay_out(spec.experts[0], is_grouped=spec.is_grouped)
        if block.is_trainable
        for piece in block.slices
    )
    layout, device = MessageLayout(codec, parts), spec.sample.device
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(p.num_experts, *p.shape, generator=generator).to(device) for p in parts]
    mirror, replica = Mirror(layout, Home(device)), Replica(layout, [torch.zeros_like(weight) for weight in weights])
    messages: list[Tensor] = []
    probe.table([0.0])
    encode_s = _median_s(lambda: messages.extend(mirror.encode(weights)), device)
    decode_s = _median_s(lambda: replica.apply([messages.pop(0)]), device)
    num_elements = sum(weight.numel() for weight in weights)
    means = _means(probe, encode_s, decode_s)
    travel_bytes = num_elements * spec.sample.element_size()
    return CodecCost(
        name=config.name,
        encode_bytes_per_s=travel_bytes / max(means[0], 1e-9),
        decode_bytes_per_s=travel_bytes / max(means[1], 1e-9),
        packets=packets_of(config.model_dump()),
    )


def _means(probe: LinkProbe, *own: float) -> list[float]:
    return [statistics.fmean(column) for column in zip(*probe.table(own), strict=True)]


def _expert_s(spec: LayerSpec, rows: int) -> float:
    """Seconds of one expert's forward and backward on some rows; leaves gradients and random numbers alone."""
    expert, sample = spec.experts[0], spec.sample
    generator = torch.Generator().manual_seed(0)
    num_experts = spec.num_local if spec.is_grouped else 1  # in one call
    values = torch.randn(num_experts * rows, spec.hidden, generator=generator).to(sample)
    parameters = [parameter for parameter in expert.parameters() if parameter.requires_grad]

    def call() -> None:
        x = values.clone().requires_grad_()
        output = spec.call(expert, {}, x, [rows] * num_experts)
        # autograd.grad, because DeepSpeed's hooks on gradients of parameters must not run.
        torch.autograd.grad(output.sum(), [x, *parameters], allow_unused=True)

    with torch.random.fork_rng(devices=[sample.device] if sample.is_cuda else []), torch.enable_grad():
        return _median_s(call, sample.device) / num_experts


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of some calls, without the first."""
    timings = []
    for _ in range(TIMINGS + 1):
        synchronize(device)
        begin_s = time.perf_counter()
        call()
        synchronize(device)
        timings.append(time.perf_counter() - begin_s)
    return statistics.median(timings[1:])


def expert_params(spec: LayerSpec, *, trainable_only: bool = False) -> int:
    """Parameters of one expert."""
    counted = [p.numel() for p in spec.experts[0].parameters() if p.requires_grad or not trainable_only]
    return sum(counted) // (spec.num_local if spec.is_grouped else 1)
