# SPDX-License-Identifier: Apache-2.0
"""Rank 0 notices changed steps; all ranks hear of it one step later."""

from moe_refs import open_transport
from process_pool import ProcessPool

from ds_hybridep.adaptive.pulse import FAR, NEAR, TRIAL_STEPS, WARM_UP_STEPS, WINDOW, Pulse, StepWatch
from ds_hybridep.geometry.cluster import Cluster, Level


def settled() -> StepWatch:
    """A watch over a plan that stays, after steps of one second each."""
    watch = StepWatch()
    due = [watch.note(1.0) for _ in range(WARM_UP_STEPS + TRIAL_STEPS)]
    assert due == [False] * (WARM_UP_STEPS + TRIAL_STEPS - 1) + [True]
    watch.mode = "settled"
    return watch


def seen(*steps: float) -> list[bool]:
    watch = settled()
    return [watch.note(step_s) for step_s in steps]


def test_one_step_far_off_or_two_in_a_row_off_by_less_are_a_change():
    assert seen(FAR + 0.01) == [True]
    assert seen(1 / FAR - 0.01) == [True]
    assert seen(NEAR + 0.01, NEAR + 0.01) == [False, True]
    assert seen(1 / NEAR - 0.01, 1 / NEAR - 0.01) == [False, True]
    assert seen(NEAR + 0.01, 1.0, NEAR + 0.01, 1 / NEAR - 0.01) == [False] * 4


def test_after_a_change_the_new_steps_are_usual():
    assert seen(5.0, *[5.0] * 9) == [True] + [False] * 9


def test_a_slow_drift_is_a_change_in_the_end():
    assert any(seen(*[1.0 + 0.02 * step for step in range(WINDOW + 30)]))


def test_a_plan_on_trial_is_looked_at_after_some_steps_without_the_first():
    watch = settled()
    watch.try_plan(skipped=1)
    assert watch.step_s is None
    assert [watch.note(step_s) for step_s in (9.0, 3.0, 1.0, 2.0)] == [False, False, False, True]
    assert watch.step_s == 2.0


def test_a_watch_that_is_off_says_nothing():
    watch = settled()
    watch.mode = "off"
    assert not any(watch.note(step_s) for step_s in (1.0, 9.0, 9.0, 0.1))


def beat(bits: list[bool]) -> list[bool]:
    transport = open_transport(Cluster((Level("dc", 2),)), timeout_s=100.0)
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
