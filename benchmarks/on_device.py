# SPDX-License-Identifier: Apache-2.0
"""Times of operations on a device.  With a CPU in the GPU's place the same programs run, and their times mean nothing.

Times are between CUDA events.  The queue is filled while the device sleeps, so the host's time is not in them.
"""

import statistics
import time
from collections.abc import Callable

import torch

COPY_BYTES = {"cuda": 2**31, "cpu": 2**20}  # read, and as many written
WARM_UP, CALLS = 5, 30
MOST_S = 2.0  # for all calls of one operation: slow ones are called less often, but FEWEST times
FEWEST = 3
CALLS_ON_CPU = 2
COLD = 3  # the inputs of all turns together are so many times the L2 cache
SLEEP_CYCLES = 40_000_000  # some 20 ms, in which the host fills the queue


def device_for(pretends: bool) -> torch.device:
    """The device that is measured: the first GPU, or a CPU that stands for it."""
    return torch.device("cpu") if pretends else torch.device("cuda", 0)


def name_of(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def wait(device: torch.device) -> None:
    """Return when the device has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def num_turns(num_bytes: int, device: torch.device) -> int:
    """Sets of inputs of `num_bytes` each that are more than the L2 cache holds."""
    if device.type == "cpu":
        return 2
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-COLD * l2_bytes // num_bytes) + 1)


def times_us(call: Callable[[int], object], turns: int, device: torch.device, most_s: float = MOST_S) -> list[float]:
    """Microseconds on the device of each of up to CALLS calls, the inputs of which take turns."""
    begin_s = time.perf_counter()
    num_warm = 0
    while num_warm < WARM_UP and (num_warm == 0 or time.perf_counter() - begin_s < most_s / 2):
        call(num_warm % turns)
        wait(device)
        num_warm += 1
    if device.type == "cpu":
        return [_host_us(call, turn % turns) for turn in range(CALLS_ON_CPU)]
    begin_s = time.perf_counter()
    call(num_warm % turns)
    wait(device)
    each_s = time.perf_counter() - begin_s
    num_calls = max(FEWEST, min(CALLS, int(most_s / each_s)))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_calls)]
    torch.cuda._sleep(SLEEP_CYCLES)
    for turn, (start, end) in enumerate(events):
        start.record()
        call(turn % turns)
        end.record()
    wait(device)
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def median_us(call: Callable[[int], object], device: torch.device, turns: int = 1, most_s: float = MOST_S) -> float:
    return statistics.median(times_us(call, turns, device, most_s))


def _host_us(call: Callable[[int], object], turn: int) -> float:
    begin_s = time.perf_counter()
    call(turn)
    return (time.perf_counter() - begin_s) * 1e6


def queueing_us(call: Callable[[], object], device: torch.device, calls: int = 5) -> float:
    """Microseconds of the host for a call that only queues work; about the device's time if the call waits for it."""
    call()
    wait(device)
    begin_s = time.perf_counter()
    for _ in range(calls):
        call()
    spent_s = time.perf_counter() - begin_s
    wait(device)
    return spent_s / calls * 1e6


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read plus written each second by a large copy from device to device."""
    num_bytes = COPY_BYTES[device.type]
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / (median_us(lambda _: target.copy_(source), device) * 1e-6)
