# SPDX-License-Identifier: Apache-2.0
"""Whether emulated links have the rate, the delay that were asked for.

    sudo python benchmarks/emulated_network.py

Goodput is what a TCP receiver reads per second, over rate * 1448 / 1514: the rate counts Ethernet frames of up to 1514
bytes, each of which carries 1448 bytes of the application.  Other load on the machine makes a value too low and the
next too high, and lengthens round trips, so each is measured REPEATS times.  Needs root, iproute2 and a C++ compiler.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "lab"))
from traffic import flowing, round_trips_ms

from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import SEGMENT_FRAME_BYTES, SEGMENT_PAYLOAD_BYTES, LinkSpec, Topology

GOODPUT_SHARE = SEGMENT_PAYLOAD_BYTES / SEGMENT_FRAME_BYTES
REPEATS, SECONDS = 5, 0.8


def goodput(flows: list[Any], seconds: float) -> float:
    """Bits per second that arrive in all flows together, from each one's first to its last arrival."""
    start_s, total = time.monotonic(), 0.0
    time.sleep(seconds)
    for flow in flows:
        inside = [sample for sample in flow.read() if sample[0] >= start_s]
        total += 8 * (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
    return total


@contextmanager
def loaded(net: EmulatedNetwork, *pairs: tuple[int, int]) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        flows = [stack.enter_context(flowing(net, sender, receiver)) for sender, receiver in pairs]
        time.sleep(0.3)
        yield flows


def say(case: str, wanted: float, measure: Callable[[], float]) -> None:
    ratios = [measure() / wanted for _ in range(REPEATS)]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"{case:<62}{statistics.median(ratios):.3f}   {spread}", flush=True)


def rates() -> None:
    for delay_s in (0.0, 0.010):
        with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=10e6, wan_delay_s=delay_s)) as net:
            for mbit_per_s in (10, 50, 100, 500, 1000):
                net.set_wan_rate(mbit_per_s * 1e6)
                with loaded(net, (0, 1)) as flows:
                    wanted = mbit_per_s * 1e6 * GOODPUT_SHARE
                    say(
                        f"goodput, {mbit_per_s} Mbit/s, delay {1e3 * delay_s:g} ms",
                        wanted,
                        lambda: goodput(flows, SECONDS),
                    )
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=100e6, wan_delay_s=0.005)) as net:
        with loaded(net, (0, 1), (1, 0)) as flows:
            say("both directions at once, 100 Mbit/s each", 200e6 * GOODPUT_SHARE, lambda: goodput(flows, SECONDS))
    with EmulatedNetwork(Topology(2, 2), LinkSpec(wan_bits_per_s=50e6)) as net:
        with loaded(net, (0, 2), (1, 3)) as flows:
            say("two hosts of one DC together, 50 Mbit/s", 50e6 * GOODPUT_SHARE, lambda: goodput(flows, SECONDS))
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=200e6)) as net, loaded(net, (0, 1)) as flows:
        net.set_wan_rate(20e6)
        time.sleep(2.5)  # the queue of the old rate drains: 200 ms at 200 Mbit/s are 2 s at 20
        say("goodput after a change from 200 to 20 Mbit/s", 20e6 * GOODPUT_SHARE, lambda: goodput(flows, SECONDS))


def delays() -> None:
    for delay_s in (0.001, 0.010, 0.050):
        with EmulatedNetwork(Topology(2, 2), LinkSpec(wan_bits_per_s=100e6, wan_delay_s=delay_s)) as net:
            wanted = 2e3 * delay_s
            say(
                f"round trip, delay {1e3 * delay_s:g} ms", wanted, lambda: statistics.median(round_trips_ms(net, 0, 3))
            )
            inside = statistics.median(round_trips_ms(net, 0, 1))
            print(f"  inside a DC: {inside:.2f} ms")


def main() -> None:
    print(f"{'measured over wanted':<62}median  smallest to largest of {REPEATS}")
    rates()
    delays()


if __name__ == "__main__":
    main()
