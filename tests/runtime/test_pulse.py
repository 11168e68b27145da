# SPDX-License-Identifier: Apache-2.0
"""Rank 0 notices changed steps; all ranks hear of it one step later."""

import pytest
from moe_refs import open_transport
from process_pool import ProcessPool

from ds_hybridep.adaptive.pulse import FAR, LEAST_STEPS, NEAR, Pulse, StepWatch
from ds_hybridep.plan.cluster import Cluster, Level

pytestmark = pytest.mark.timeout(120)


def seen(*steps: float) -> list[bool]:
    """What a watch says of steps, after enough of one second each."""
    watch = StepWatch()
    assert not any(watch.note(1.0) for _ in range(LEAST_STEPS))
    return [watch.note(step_s) for step_s in steps]


def test_one_step_far_off_or_two_in_a_row_off_by_less_are_a_change():
    assert seen(FAR + 0.01) == [True]
    assert seen(1 / FAR - 0.01) == [True]
    assert seen(NEAR + 0.01, NEAR + 0.01) == [False, True]
    assert seen(1 / NEAR - 0.01, 1 / NEAR - 0.01) == [False, True]
    assert seen(NEAR + 0.01, 1.0, NEAR + 0.01, 1 / NEAR - 0.01) == [False] * 4


def test_after_a_change_the_new_steps_are_usual():
    assert seen(5.0, *[5.0] * 9) == [True] + [False] * 9


def test_a_slow_drift_is_none():
    assert not any(seen(*[1.0 + 0.02 * step for step in range(60)]))


def beat(bits: list[bool]) -> list[bool]:
    transport = open_transport(Cluster((Level("dc", 2),)), timeout_s=20.0)
    pulse = Pulse(transport)
    heard = [pulse.take()]
    for bit in bits:
        pulse.send(bit and transport.rank == 0)
        heard.append(pulse.take())
    pulse.send(True)
    pulse.send(False)  # one that nobody took is gone
    heard += [pulse.take(), pulse.take()]
    transport.close()
    return heard


def test_all_ranks_hear_what_rank_0_said(pool2: ProcessPool):
    bits = [True, False, True, True, False]
    assert pool2.run(beat, bits=bits) == [[False, *bits, False, False]] * 2
