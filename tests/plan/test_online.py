# SPDX-License-Identifier: Apache-2.0
"""Planning of a running job: what is open, what is expected of it, and what measuring changes."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.adaptive.options import (
    DOUBT,
    EARLY_SHARE,
    ODDS,
    OPTIMISM,
    TRIAL_LOSS,
    TRIAL_S,
    TRIAL_SHARE,
    TRIAL_STEPS,
    Chooser,
    Job,
    Known,
    Option,
    Room,
    TrialBudget,
)
from ds_hybridep.plan.cluster import Cluster, Level, Link
from ds_hybridep.plan.costs import row_counts
from ds_hybridep.plan.layout import IDENTITY, Codec, LevelCodecs, Rates
from ds_hybridep.plan.stream_model import StepPrediction, StepTerms
from ds_hybridep.plan.workload import MoEModel, Workload

MODEL = MoEModel(
    name="toy", hidden=64, num_experts=8, top_k=2, num_moe_layers=4, expert_params=33_000, dense_params=100_000,
    active_dense_params=80_000,
)  # fmt: skip
RATES = Rates(flops_per_s=1e10, exchange_s=1e-3, all_to_all_s=1e-3)
INT8 = Codec("int8", ratio=4.0)


def job(mbit=100.0, tokens=1024, zero_stage=1, token_codec=IDENTITY):
    levels = (Level("dc", 2, Link(mbit * 1e6 / 8, 0.0)), Level("gpu", 2, Link(1e10, 0.0)))
    workload = Workload(
        model=MODEL, tokens_per_rank=tokens, param_bytes=4, zero_stage=zero_stage, capacity_factor=1.25
    )
    return Job(
        cluster=Cluster(levels), spans=(2, 2), workload=workload, rates=RATES, prefetch_depth=2,
        token_codecs=(token_codec, IDENTITY),
    )  # fmt: skip


def room(**changes):
    settings = {
        "spans": (2, 2),
        "domain_sizes": ((1, 2), (1,)),
        "weight_codecs": ((IDENTITY,), (IDENTITY,)),
        "gradient_codecs": ((IDENTITY,), (IDENTITY,)),
        "exchanges": ("direct", "hierarchical", "deepspeed"),
        "dense_syncs": ("deepspeed", "hierarchical"),
    }
    return Room(**{**settings, **changes})


def plain(domain_sizes=(1, 1), exchange="direct", dense_sync="deepspeed"):
    codecs = (LevelCodecs(),) * len(domain_sizes)
    return Option(domain_sizes=domain_sizes, codecs=codecs, exchange=exchange, dense_sync=dense_sync)


def test_options_are_what_can_be_run_each_once():
    labels = [option.label for option in room().options()]
    assert len(labels) == len(set(labels))
    # DeepSpeed's exchange has no domains, and level by level is another way only where both levels have several.
    assert [label.split(",")[0] + label.split("tokens")[1].split(",")[0] for label in labels[::2]] == [
        "[1 direct", "[1 hierarchical", "[1 deepspeed", "[2 direct",
    ]  # fmt: skip


def test_a_job_with_transient_replicas_is_priced_as_such():
    kept = job()
    transient = dataclasses.replace(kept, is_transient=True, prefetch_depth=0)
    option = plain((2, 1))
    assert transient.memory_bytes(option) < kept.memory_bytes(option)
    weights = [one.predict(option).uplink_bytes[0]["expert_weights"] for one in (kept, transient)]
    layers = MODEL.num_moe_layers
    assert weights[1] / weights[0] == pytest.approx((2 * layers - 1) / layers)
    assert transient.predict(plain()) == kept.predict(plain())


def test_a_token_codec_is_reckoned_with_where_tokens_are_not_left_to_deepspeed():
    exact, halved = job(), job(token_codec=Codec("half", ratio=2.0))
    for exchange, share in (("direct", 0.5), ("hierarchical", 0.5), ("deepspeed", 0.0)):
        option = plain(exchange=exchange)
        tokens = [one.predict(option).uplink_bytes[0]["tokens"] for one in (exact, halved)]
        rows = sum(row_counts(option.layout((2, 2), 2), exact.workload)[:1]) * 2 * MODEL.num_moe_layers
        assert tokens[0] - tokens[1] == pytest.approx(share * rows * exact.workload.row_bytes)


def test_a_fixed_setting_is_a_choice_of_one():
    options = list(room(domain_sizes=((2,), (1,)), exchanges=("hierarchical",), dense_syncs=("deepspeed",)).options())
    assert options == [plain((2, 1), "hierarchical")]


def test_codecs_are_chosen_only_where_experts_travel_and_go_together():
    codecs = ((IDENTITY, INT8), (IDENTITY,))
    options = list(
        room(weight_codecs=codecs, gradient_codecs=codecs, exchanges=("direct",), dense_syncs=("deepspeed",)).options()
    )
    assert [option.label.split(" tokens")[0] for option in options] == ["[1,1]", "[2,1]", "[2,1] int8"]
    assert [option.is_lossy for option in options] == [False, False, True]


def test_sums_by_level_send_fewer_bytes_over_the_slow_link():
    ring = job().predict(plain())
    levels = job().predict(plain(dense_sync="hierarchical"))
    num_bytes = 4.0 * MODEL.dense_params
    # ZeRO 1 over four ranks: three passes of a ring, or one sum and one gather with half of the bytes from each DC.
    assert ring.uplink_bytes[0]["dense_sync"] == pytest.approx(3 * 3 / 4 * num_bytes)
    assert levels.uplink_bytes[0]["dense_sync"] == pytest.approx(2 * 1 / 2 * num_bytes)
    assert levels.uplink_bytes[0]["tokens"] == ring.uplink_bytes[0]["tokens"]


def steps_of(seconds):
    """A `predict` that knows the seconds of some options."""
    return lambda option: StepPrediction(StepTerms(tokens_s=seconds[option]), ({},))


WELL_KNOWN = Known(0.0, 1e9)
FIRST, SECOND, THIRD = plain(), plain((2, 1)), plain(exchange="deepspeed")


def choose(chooser, current, seconds):
    return chooser.choose(current, steps_of(seconds), lambda option: 0.0)


def test_what_was_measured_of_the_running_option_is_expected_of_the_others_too():
    chooser = Chooser((FIRST, SECOND))
    chooser.note(FIRST, predicted_s=1.0, measured_s=1.5)
    choice = choose(chooser, FIRST, {FIRST: 1.0, SECOND: 0.5})
    assert choice.best == SECOND
    assert choice.current_s == pytest.approx(1.5)
    assert choice.expected_s == pytest.approx((0.5 + 0.5) * (1 - OPTIMISM))
    assert choice.saves(0.05)
    assert not choice.saves(0.5)


def test_an_option_that_disappointed_is_left_again():
    chooser = Chooser((FIRST, SECOND))
    chooser.note(FIRST, predicted_s=1.0, measured_s=1.0)
    seconds = {FIRST: 1.0, SECOND: 0.8}
    assert choose(chooser, FIRST, seconds).best == SECOND
    chooser.note(SECOND, predicted_s=0.8, measured_s=1.2)
    choice = choose(chooser, SECOND, seconds)
    assert choice.best == FIRST
    assert choice.saves(0.05)
    # Measured once at 1.0, a look that has faded a little, so the hope is a little above half of the first.
    assert 1.0 - 0.51 * OPTIMISM < choice.expected_s < 1.0 - 0.49 * OPTIMISM
    assert "measured to be no slower" in choice.reason


def test_a_tie_keeps_what_runs_and_prefers_what_is_exact():
    chooser = Chooser((FIRST, SECOND, THIRD), {one: WELL_KNOWN for one in (FIRST, SECOND, THIRD)})
    assert choose(chooser, THIRD, {FIRST: 0.995, SECOND: 1.0, THIRD: 1.0}).best == THIRD
    lossy = Option(domain_sizes=(2, 1), codecs=(LevelCodecs(weight=INT8, gradient=INT8), LevelCodecs()))
    chooser = Chooser((lossy, SECOND, FIRST), {one: WELL_KNOWN for one in (lossy, SECOND, FIRST)})
    assert choose(chooser, FIRST, {FIRST: 9.0, SECOND: 1.0, lossy: 0.995}).best == SECOND


def test_what_is_known_is_a_mean_that_follows_and_fades():
    chooser = Chooser((FIRST, SECOND))
    chooser.note(FIRST, predicted_s=1.0, measured_s=1.2)
    chooser.note(FIRST, predicted_s=1.0, measured_s=1.4)
    assert chooser.correction_s(FIRST) == pytest.approx(0.3)
    assert chooser.correction_s(SECOND) is None
    for _ in range(100):
        chooser.note(FIRST, predicted_s=1.0, measured_s=2.0)
    assert chooser.correction_s(FIRST) == pytest.approx(1.0, abs=1e-3)
    looks = chooser.known[FIRST].looks
    chooser.note(SECOND, predicted_s=1.0, measured_s=1.0)
    assert chooser.known[FIRST].looks < looks


def test_near_ties_are_tried_until_they_are_known_well_enough():
    chooser, seconds, current = Chooser((FIRST, SECOND)), {FIRST: 1.0, SECOND: 1.0}, FIRST
    tried = []
    for _ in range(40):
        chooser.note(current, predicted_s=1.0, measured_s=1.0 if current == FIRST else 1.1)
        choice = choose(chooser, current, seconds)
        if choice.saves(0.03):
            current = choice.best
        tried.append(current)
    assert SECOND in tried  # it was not known to be slower
    assert tried[-10:] == [FIRST] * 10


def test_an_option_that_never_ran_is_judged_by_the_one_that_is_most_like_it():
    far, near = plain((2, 1), dense_sync="hierarchical"), plain((1, 1), dense_sync="hierarchical")
    chooser = Chooser((FIRST, SECOND, far, near), {FIRST: Known(1.0, 3.0), SECOND: Known(5.0, 3.0)})
    choice = choose(chooser, FIRST, {FIRST: 1.0, SECOND: 1.0, far: 1.0, near: 1.0})
    assert choice.best == near
    assert choice.expected_s == pytest.approx((1.0 + 1.0) * (1 - OPTIMISM))  # one setting differs from FIRST
    assert chooser._known_or_like(far) == (5.0, OPTIMISM)  # and one from SECOND


def test_other_work_is_measured_anew():
    chooser = Chooser((FIRST, SECOND), {SECOND: Known(5.0, 1.0)})
    chooser.forget()
    assert choose(chooser, FIRST, {FIRST: 1.0, SECOND: 0.5}).best == SECOND


@given(st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3), st.floats(-5.0, 5.0))
def test_no_expectation_is_below_zero_and_the_best_is_the_least(predicted, correction):
    seconds = dict(zip((FIRST, SECOND, THIRD), predicted, strict=True))
    choice = choose(Chooser((FIRST, SECOND, THIRD), {FIRST: Known(correction, 1.0)}), FIRST, seconds)
    assert 0.0 <= choice.expected_s <= choice.current_s * (1 + 1e-9)
    assert choice.runner_up is not None
    assert choice.expected_s <= choice.runner_up_s * (1 + 0.011)
    assert math.isfinite(choice.expected_s)


def test_slow_links_want_domains_and_fast_ones_with_few_tokens_do_not():
    chooser = Chooser(tuple(room().options()))
    slow, fast = job(mbit=20), job(mbit=10_000, tokens=32)
    assert chooser.choose(plain(), slow.predict, slow.memory_bytes).best.domain_sizes == (2, 1)
    assert chooser.choose(plain(), fast.predict, fast.memory_bytes).best.domain_sizes == (1, 1)


def test_nothing_is_hoped_for_while_trying_has_cost_too_much():
    chooser, seconds = Chooser((FIRST, SECOND)), {FIRST: 1.0, SECOND: 1.0}
    chooser.note(FIRST, predicted_s=1.0, measured_s=1.0)

    def best(may_try):
        return chooser.choose(FIRST, steps_of(seconds), lambda option: 0.0, may_try=may_try).best

    assert best(may_try=True) == SECOND  # never ran: hoped to be faster
    assert best(may_try=False) == FIRST
    seconds[SECOND] = 1.04 / (1.0 + DOUBT)  # promises less than it has to
    assert best(may_try=False) == FIRST
    seconds[SECOND] = 0.96 / (1.0 + DOUBT)
    assert best(may_try=False) == SECOND
    seconds[SECOND] = 0.9
    chooser.note(SECOND, predicted_s=0.9, measured_s=0.9)  # what is known needs no hope
    assert best(may_try=False) == SECOND


def test_a_change_must_be_worth_the_time_that_it_takes():
    chooser = Chooser((FIRST, SECOND, THIRD), {one: WELL_KNOWN for one in (FIRST, SECOND, THIRD)})

    def best(cost_s, horizon, current=FIRST):
        seconds = steps_of({FIRST: 1.0, SECOND: 0.8, THIRD: 0.9})
        costs = {FIRST: 0.0, SECOND: cost_s, THIRD: 0.0}
        return chooser.choose(current, seconds, lambda option: 0.0, change_s=costs.__getitem__, horizon=horizon).best

    assert best(2.0, horizon=15) == THIRD  # 2 s in 15 steps are more than the 0.1 s by which SECOND is the better one
    assert best(2.0, horizon=25) == SECOND
    assert best(2.0, horizon=15, current=SECOND) == SECOND  # what runs costs nothing


def test_filling_takes_as_long_as_all_weights_do_over_each_link():
    lossy = Option(domain_sizes=(2, 1), codecs=(LevelCodecs(weight=INT8, gradient=INT8), LevelCodecs()))
    num_bytes = MODEL.num_moe_layers * MODEL.num_experts / 2 * MODEL.expert_params * 4  # half of the experts, once
    assert job(mbit=20).filling_s(lossy) == pytest.approx(num_bytes * RATES.wire_factor / (20e6 / 8))
    assert job(mbit=20).filling_s(plain((2, 1))) == 0.0  # ships as much at every step
    assert job(mbit=20).filling_s(plain()) == 0.0
    gradients_only = dataclasses.replace(lossy, codecs=(LevelCodecs(gradient=INT8), LevelCodecs()))
    assert job(mbit=20).filling_s(gradients_only) == 0.0


def test_what_does_not_fit_is_not_chosen_and_what_runs_stays():
    chooser = Chooser((FIRST, SECOND, THIRD), {one: WELL_KNOWN for one in (FIRST, SECOND, THIRD)})
    seconds = steps_of({FIRST: 1.0, SECOND: 0.5, THIRD: 0.8})

    def best(*fitting, current=FIRST):
        return chooser.choose(current, seconds, lambda option: 0.0, fits=lambda option: option in fitting).best

    assert [best(SECOND, THIRD), best(THIRD), best()] == [SECOND, THIRD, FIRST]
    assert best(current=SECOND) == SECOND


def test_a_hope_must_be_worth_a_change_there_and_one_back():
    chooser = Chooser((FIRST, SECOND), {FIRST: WELL_KNOWN})

    def best(cost_s, horizon, second_s=1.0):
        return chooser.choose(
            FIRST, steps_of({FIRST: 1.0, SECOND: second_s}), lambda _: 0.0, change_s=lambda _: cost_s, horizon=horizon
        ).best

    assert ODDS * OPTIMISM < 0.03
    trial_s = 2.0 + TRIAL_LOSS
    assert best(cost_s=1.0, horizon=0.9 * trial_s / (ODDS * OPTIMISM)) == FIRST
    assert best(cost_s=1.0, horizon=1.1 * trial_s / (ODDS * OPTIMISM)) == SECOND
    assert best(cost_s=1.0, horizon=10, second_s=0.8) == SECOND  # predicted to save 2 s, which is no hope
    assert best(cost_s=1.0, horizon=10, second_s=0.95) == FIRST


def test_what_trying_may_cost_is_a_share_of_the_training():
    budget = TrialBudget()
    assert budget.is_left(1.0)  # of the first change nobody knows what it costs
    most_s = TRIAL_STEPS + TRIAL_S
    budget.note_step(most_s / EARLY_SHARE)
    elapsed_s = most_s / EARLY_SHARE
    budget.lost_s = (EARLY_SHARE + TRIAL_SHARE) * elapsed_s - 9.0
    budget.note_switch(2.0)
    budget.replaced_s = 1.0
    budget.note_step(3.0)
    assert budget.lost_s == pytest.approx((EARLY_SHARE + TRIAL_SHARE) * elapsed_s - 5.0)
    assert budget.last_s == pytest.approx(4.0)
    assert budget.is_left(1.0)  # another change like that one is affordable
    budget.note_step(3.0)
    assert not budget.is_left(1.0)  # and now it is not
    budget.replaced_s = None
    wanted_s = budget.lost_s + budget.last_s - most_s
    budget.note_step(wanted_s / TRIAL_SHARE - elapsed_s - 6.0 - 0.5)
    assert not budget.is_left(1.0)
    budget.note_step(1.0)
    assert budget.is_left(1.0)


def test_a_young_training_tries_less():
    budget = TrialBudget()
    budget.note_step(20.0)
    budget.note_switch(0.5)
    assert budget.is_left(0.1)  # another half second is below 6% of 20 s
    budget.note_switch(0.5)
    assert not budget.is_left(0.1)
