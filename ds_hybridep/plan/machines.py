# SPDX-License-Identifier: Apache-2.0
"""GPUs that people rent: what each computes, reads, holds and sends, by its data sheet.

Nothing here was measured.  A product reaches `mfu` of the peak; see `plan --mfu`.
"""

from dataclasses import dataclass

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.codec_costs import H100_RATES, DeviceRates

GPUS_OF_MACHINE = 8  # a datacentre with more GPUs has several machines
NETWORK_BYTES_PER_S = 400e9 / 8  # of each GPU, between the machines of a datacentre: one adapter of 400 Gbit/s
HOST_MEMORY_BYTES = 128e9  # of the host, for each GPU


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU.

    flops_per_s: peak of dense bf16 products with fp32 sums.  memory_bytes_per_s: of its own memory.
    link_bytes_per_s: to the others of its machine, each way: NVLink, or PCIe where it has none.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float


def _gpu(name: str, tflops: float, tb_per_s: float, gigabytes: float, link_gb_per_s: float) -> GPU:
    return GPU(
        name=name,
        flops_per_s=tflops * 1e12,
        memory_bytes_per_s=tb_per_s * 1e12,
        memory_bytes=gigabytes * 1e9,
        link_bytes_per_s=link_gb_per_s * 1e9,
    )


# Source: NVIDIA's data sheets; SXM where there are several forms.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40", 312.0, 1.555, 40, 300),
        _gpu("A100-80", 312.0, 2.039, 80, 300),
        _gpu("H100", 989.0, 3.35, 80, 450),
        _gpu("H200", 989.0, 4.8, 141, 450),
        _gpu("B200", 2250.0, 8.0, 180, 900),
        _gpu("L40S", 362.0, 0.864, 48, 32),
        _gpu("RTX-4090", 165.2, 1.008, 24, 32),
        _gpu("RTX-5090", 209.5, 1.792, 32, 64),
    )
}
DEFAULT_GPU = "H100"


def gpu_of(name: str) -> GPU:
    """The GPU of this name, whatever its case.  Raises PlanError that lists the names."""
    by_name = {known.lower(): gpu for known, gpu in GPUS.items()}
    found = by_name.get(name.lower().replace(" ", "-").replace("_", "-"))
    if found is None:
        raise PlanError(
            f"--gpu: got '{name}', wanted one of {', '.join(GPUS)}; or give --tflops and --memory of yours"
        )
    return found


def default_link_bytes_per_s(gpu: GPU, gpus_of_datacentre: int) -> float:
    """What a GPU sends to the others of its datacentre: inside one machine, or over the network of several."""
    if gpus_of_datacentre <= GPUS_OF_MACHINE:
        return gpu.link_bytes_per_s
    return min(gpu.link_bytes_per_s, NETWORK_BYTES_PER_S)


def codec_rates_of(gpu: GPU) -> DeviceRates:
    """What codecs reach on a GPU: what is assumed of an H100, in proportion to the rate of its memory."""
    ratio = gpu.memory_bytes_per_s / GPUS[DEFAULT_GPU].memory_bytes_per_s
    return DeviceRates(ratio * H100_RATES.memory_bytes_per_s, ratio * H100_RATES.product_flops_per_s)
