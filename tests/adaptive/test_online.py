# SPDX-License-Identifier: Apache-2.0
"""Planning of a running job: what is open, what is expected of it, and what measuring changes."""

import dataclasses
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.adaptive.chooser import HOPE, HORIZON, MOST_CHANGES, RETURNS, THRESHOLD, Chooser, Look
from ds_hybridep.adaptive.plans import Job, label_of, open_plans
from ds_hybridep.adaptive.pulse import StepWatch
from ds_hybridep.adaptive.rates import assumed_patch
from ds_hybridep.config import parse_config
from ds_hybridep.config_codecs import IDENTITY as NO_CODEC
from ds_hybridep.config_codecs import PATCH, BlockwiseConfig, CodecConfig, TokenCodecConfig
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.plan.costs import row_counts
from ds_hybridep.plan.plan import HotLimit, plan_of, settings_of
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.stream_model import StepPrediction
from ds_hybridep.plan.workload import MoEModel, Workload

MODEL = MoEModel(
    name="toy", hidden=64, num_experts=8, top_k=2, num_moe_layers=4, expert_shapes=((33_000,),),
    dense_shapes=((100_000,),), active_dense_params=80_000,
)  # fmt: skip
RATES = Rates(flops_per_s=1e10, exchange_s=1e-3, all_to_all_s=1e-3)
INT8 = BlockwiseConfig(type="int8")
COSTS: dict[CodecConfig, CodecCost] = {INT8: CodecCost("int8", ratio=4.0)}


def job(mbit=100.0, tokens=1024, zero_stage=1, rates=RATES, costs=COSTS):
    levels = (Level("dc", 2, LinkSpeed(mbit * 1e6 / 8, 0.0)), Level("gpu", 2, LinkSpeed(1e10, 0.0)))
    workload = Workload(
        model=MODEL, tokens_per_rank=tokens, param_bytes=4, zero_stage=zero_stage, capacity_factor=1.25
    )
    return Job(Cluster(levels), workload, rates, costs)


def plans(sizes=("auto", 1), codec="identity", token_codec="identity", **settings):
    levels = [{"name": name, "size": 2, "domain_size": size} for name, size in zip(("dc", "gpu"), sizes, strict=True)]
    levels[0].update(weight_codec=codec, gradient_codec=codec, token_codec=token_codec)
    return open_plans(parse_config({"levels": levels, **settings}, world_size=4), (2, 2))


def one(sizes=(1, 1), tokens="direct", dense="deepspeed", **settings):
    return plans(sizes, token_exchange=tokens, dense_sync=dense, **settings)[0]


# -- what is open, and what it is expected to take --------------------------------------------------------------


def test_open_plans_are_what_can_be_run_each_once():
    # DeepSpeed's exchange has no domains, and level by level is another way only where both levels have several.
    assert [label_of(plan) for plan in plans()] == [
        "[1,1] tokens deepspeed",
        "[1,1] tokens direct",
        "[1,1] tokens hierarchical",
        "[2,1] tokens direct",
    ]
    assert {plan.dense_sync for plan in plans(dense_sync="hierarchical")} == {"hierarchical"}


def test_a_fixed_setting_is_a_choice_of_one():
    found = plans((2, 1), token_exchange="hierarchical")
    assert [label_of(plan) for plan in found] == ["[2,1] tokens hierarchical"]
    assert found[0].domain_sizes == (2, 1)
    assert found[0].token_exchange == "hierarchical"


def test_codecs_are_chosen_only_where_experts_travel_and_go_together():
    found = plans(codec="auto", auto_codecs=["int8"], token_exchange="direct")
    assert [plan.label for plan in found] == ["[1,1]", "[2,1]", "[2,1] int8|exact"]
    assert [plan.encodes_experts for plan in found] == [False, False, True]
    assert found[2].codecs[0].weight == found[2].codecs[0].gradient == INT8
    assert found[2].priced(COSTS).codecs[0].weight == COSTS[INT8]
    assert found[2].num_differences(found[1]) == 1


def test_codecs_are_also_chosen_where_only_dense_parameters_cross():
    found = plans(codec="auto", auto_codecs=["int8"], token_exchange="direct", dense_sync="hierarchical")
    assert [label_of(plan) for plan in found] == [
        "[1,1] tokens direct",
        "[1,1] int8|exact tokens direct",
        "[2,1] tokens direct",
        "[2,1] int8|exact tokens direct",
    ]
    assert [plan.encodes_experts for plan in found] == [False, True, False, True]
    exact, lossy = (job().predict(plan).uplink_bytes[0]["dense_sync"] for plan in found[:2])
    assert exact / lossy == pytest.approx(COSTS[INT8].ratio)
    # Sums by DeepSpeed are never encoded.
    rings = plans((2, 1), codec="int8", auto_codecs=["int8"], dense_sync="deepspeed")
    assert len({job().predict(plan).uplink_bytes[0]["dense_sync"] for plan in rings}) == 1


def with_hot_experts(hot_experts, domain_size=1):
    levels = [
        {"name": "dc", "size": 2, "domain_size": "auto"},
        {"name": "gpu", "size": 2, "domain_size": domain_size, "hot_experts": hot_experts},
    ]
    return open_plans(parse_config({"levels": levels}, world_size=4), (2, 2))


@pytest.mark.parametrize("hot_experts", [0, 2, "auto"])
def test_open_plans_keep_hot_experts_and_price_a_given_number_of_them(hot_experts):
    found = with_hot_experts(hot_experts)
    assert len(found) == (4 if hot_experts == 0 else 3)
    for plan in found:
        assert plan.hot == (None if hot_experts == 0 else HotLimit(1, hot_experts))
        assert hot_experts == 0 or plan.token_exchange != "deepspeed"
        priced = 2 if hot_experts == 2 else 0
        assert plan.hot_by_level == (0, priced)
        uneven = dataclasses.replace(job().workload, expert_loads=(9.0,) + (1.0,) * 7)
        sent = dataclasses.replace(job(), workload=uneven).predict(plan).uplink_bytes
        assert (sent[1]["expert_weights"] > 0) == (priced > 0)
    assert set(found).isdisjoint(with_hot_experts(1))


def test_codecs_of_gradients_are_tried_over_the_level_of_hot_experts():
    level = {"name": "gpu", "size": 4, "hot_experts": 2, "gradient_codec": "auto"}
    block = {"levels": [level], "auto_codecs": ["int8"], "dense_sync": "deepspeed"}
    config = parse_config(block, world_size=4)
    found = open_plans(config, (4,))
    assert [plan.codecs[0].gradient.type for plan in found] == ["identity", "int8"]
    uneven = dataclasses.replace(job().workload, expert_loads=(9.0,) + (1.0,) * 7)
    cluster = Cluster((Level("gpu", 4),))
    exact, encoded = (
        dataclasses.replace(job(), workload=uneven, cluster=cluster).predict(plan).uplink_bytes[0] for plan in found
    )
    assert exact["expert_gradients"] == pytest.approx(4 * encoded["expert_gradients"]) != 0


def test_domains_over_the_level_of_hot_experts_leave_none():
    found = with_hot_experts(2, domain_size="auto")
    assert {plan.hot for plan in found if plan.domain_sizes[1] == 2} == {None}


def test_patches_are_of_16_bit_weights_and_follow_the_learning_rate():
    workload = job().workload
    assert assumed_patch(workload).message_bytes([(1, 1, 1000)], 4) == 4000
    narrow = dataclasses.replace(workload, param_bytes=2, learning_rate=1e-4)
    assert assumed_patch(narrow).message_bytes([(1, 1, 16_000)], 2) == 2000 + 24


def test_codecs_of_dense_parameters_stay_in_all_plans():
    levels = [{"name": "dc", "size": 2, "domain_size": "auto", "weight_codec": "patch"}, {"name": "gpu", "size": 2}]
    config = parse_config({"levels": levels, "dense_sync": "hierarchical"}, world_size=4)
    for trains in (True, False):
        found = open_plans(config, (2, 2), trains_experts=trains)
        assert {plan.codecs[0].dense_weight for plan in found} == {PATCH}
        planned = config.levels[0].model_copy(update={"domain_size": 2})
        by_hand = settings_of(found[-1], config).model_copy(update={"levels": (planned, config.levels[1])})
        assert (plan_of(by_hand, (2, 2)) == found[-1]) == trains


@pytest.mark.parametrize("codec", ["identity", "auto"])
def test_a_plan_is_that_of_its_settings_and_equal_to_none_but_itself(codec):
    levels = [
        {"name": "dc", "size": 2, "domain_size": "auto", "weight_codec": codec, "gradient_codec": codec},
        {"name": "gpu", "size": 2, "domain_size": "auto", "hot_experts": 2},
    ]
    settings = {"auto_codecs": ["int8"], "dense_sync": "hierarchical", "state": "host"}
    config = parse_config({"levels": levels, **settings}, world_size=4)
    found = open_plans(config, (2, 2))
    assert len(set(found)) == len(found) > 3
    assert [plan_of(settings_of(plan, config), (2, 2)) for plan in found] == list(found)
    written = [plan.to_json() for plan in found]
    assert json.loads(json.dumps(written)) == written
    assert [written.index(plan.to_json()) for plan in found] == list(range(len(found)))


def test_a_token_codec_is_priced_where_tokens_are_not_left_to_deepspeed():
    for tokens, share in (("direct", 0.5), ("hierarchical", 0.5), ("deepspeed", 0.0)):
        pair = [
            next(plan for plan in plans((1, 1), token_codec=codec) if plan.token_exchange == tokens)
            for codec in ("identity", "fp8")
        ]
        costs = {TokenCodecConfig(type="fp8"): CodecCost("half", ratio=2.0)}
        sent = [job(costs=costs).predict(plan).uplink_bytes[0]["tokens"] for plan in pair]
        workload = job().workload
        rows = sum(row_counts(pair[0], workload)[:1]) * 2 * MODEL.num_moe_layers
        assert sent[0] - sent[1] == pytest.approx(share * rows * workload.row_bytes)


def test_sums_by_level_send_fewer_bytes_over_the_slow_link():
    ring, levels = (job().predict(one(dense=dense)) for dense in ("deepspeed", "hierarchical"))
    num_bytes = 4.0 * MODEL.dense_params
    # ZeRO 1 over four ranks: three passes of a ring, or one sum and one gather with half of the bytes from each DC.
    assert ring.uplink_bytes[0]["dense_sync"] == pytest.approx(3 * 3 / 4 * num_bytes)
    assert levels.uplink_bytes[0]["dense_sync"] == pytest.approx(2 * 1 / 2 * num_bytes)
    assert levels.uplink_bytes[0]["tokens"] == ring.uplink_bytes[0]["tokens"]


def test_filling_takes_as_long_as_all_weights_do_over_each_link():
    lossy = plans(codec="auto", auto_codecs=["int8"])[-1]
    num_bytes = MODEL.num_moe_layers * MODEL.num_experts / 2 * MODEL.expert_params * 4  # half of the experts, once
    assert job(mbit=20).filling_s(lossy) == pytest.approx(num_bytes * RATES.wire_factor / (20e6 / 8))
    assert job(mbit=20).filling_s(one((2, 1))) == 0.0  # ships as much at every step
    assert job(mbit=20).filling_s(one()) == 0.0
    codecs = tuple(dataclasses.replace(codec, weight=NO_CODEC) for codec in lossy.codecs)
    gradients_only = dataclasses.replace(lossy, codecs=codecs)
    assert job(mbit=20).filling_s(gradients_only) == 0.0


# -- one choice -------------------------------------------------------------------------------------------------

FIRST, SECOND, THIRD, FOURTH = one(tokens="deepspeed"), one(), one((2, 1)), one((2, 1), dense="hierarchical")


@dataclasses.dataclass
class Priced:
    """A job whose predictions are given, in place of its links."""

    cluster: dict
    filling: dict = dataclasses.field(default_factory=dict)
    workload: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(tokens_per_rank=1))

    def predict(self, plan):
        return StepPrediction({"tokens_s": self.cluster[plan]}, ({},))

    def memory(self, plan):
        return SimpleNamespace(total_bytes=0.0)

    def filling_s(self, plan):
        return self.filling.get(plan, 0.0)


def look(seconds, *, step_s=0.0, filling_s=None, **about):
    priced = Priced(seconds, filling_s or {})
    return Look(step=0, step_s=step_s, before=priced, job=priced, was_settled=False, **about)


def best(seconds, current, *, known=None, **about):
    chooser = Chooser(tuple(seconds), known=dict.fromkeys(seconds, 0.0) if known is None else known)
    return chooser.choose(current, look(seconds, **about))


def test_what_was_measured_of_the_running_option_is_expected_of_the_others_too():
    choice = best({FIRST: 1.0, SECOND: 0.5}, FIRST, known={FIRST: 0.5})
    assert choice.best == SECOND
    assert choice.expected_s == pytest.approx(0.5 + 0.5)
    assert (choice.runner_up, choice.runner_up_s) == (FIRST, 1.5)
    assert "saves 0.5 s on token exchange" in choice.describe()


def test_an_option_that_never_ran_is_judged_by_the_one_that_is_most_like_it():
    seconds = dict.fromkeys((FIRST, SECOND, THIRD, FOURTH), 1.0)
    choice = best(seconds, FIRST, known={FIRST: 0.4, THIRD: 0.1})
    assert choice.best == FOURTH
    assert choice.expected_s == pytest.approx(1.1)


def test_an_option_that_disappointed_is_left_again():
    choice = best({FIRST: 1.0, SECOND: 0.8}, SECOND, known={FIRST: 0.0, SECOND: 0.4})
    assert choice.best == FIRST
    assert choice.expected_s == 1.0
    assert "measured to be no slower" in choice.reason


def test_a_tie_keeps_what_runs_and_prefers_what_is_exact():
    lossy = plans((2, 1), codec="auto", auto_codecs=["int8"])[-1]
    assert best({FIRST: 0.995, SECOND: 1.0}, SECOND).best == SECOND
    assert best({FIRST: 1 - 0.9 * THRESHOLD, SECOND: 1.0}, SECOND).best == SECOND
    assert best({FIRST: 1 - 1.1 * THRESHOLD, SECOND: 1.0}, SECOND).best == FIRST
    assert best({FIRST: 9.0, THIRD: 1.0, lossy: 0.995}, FIRST).best == THIRD


def test_what_never_ran_is_tried_where_it_is_nearly_as_good():
    least = 1.0 - (1.0 - THRESHOLD) / (1.0 - HOPE)  # by so much less than what runs, as a share, is enough
    for second_s, wanted in ((1.0 - least - 0.01, SECOND), (1.0 - least + 0.01, FIRST)):
        assert best({FIRST: 1.0, SECOND: second_s}, FIRST, known={FIRST: 0.0}).best == wanted


def test_a_change_must_be_worth_the_time_that_it_takes():
    def chosen(filling_s, current=FIRST):
        return best({FIRST: 1.0, SECOND: 0.8, THIRD: 0.9}, current, filling_s={SECOND: filling_s}).best

    # SECOND is better by 0.1 s a step, in as many steps as a choice is expected to last.
    assert chosen(0.11 * HORIZON) == THIRD
    assert chosen(0.08 * HORIZON) == SECOND
    assert chosen(0.11 * HORIZON, current=SECOND) == SECOND  # what runs costs nothing
    assert best({FIRST: 1.0, SECOND: 0.9}, FIRST, change_s=0.11 * HORIZON).best == FIRST


def test_a_trial_must_be_worth_a_change_there_and_one_back():
    def chosen(change_s, known):
        return best({FIRST: 1.0, SECOND: 0.9}, FIRST, known=known, change_s=change_s).best

    change_s = 0.9 * (0.1 - THRESHOLD) * HORIZON
    assert chosen(change_s, {FIRST: 0.0, SECOND: 0.0}) == SECOND
    assert chosen(change_s, {FIRST: 0.0}) == SECOND  # there is hope that it is faster still
    assert chosen(2 * change_s, {FIRST: 0.0}) == FIRST


def test_what_does_not_fit_is_not_chosen_and_what_runs_stays():
    seconds = {FIRST: 1.0, SECOND: 0.5, THIRD: 0.8}

    def chosen(*fitting, current=FIRST):
        return best(seconds, current, fits=lambda plan: plan in fitting).best

    assert [chosen(SECOND, THIRD), chosen(THIRD), chosen()] == [SECOND, THIRD, FIRST]
    assert chosen(current=SECOND) == SECOND


@given(st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3), st.floats(-5.0, 5.0))
def test_no_expectation_is_below_zero(predicted, difference_s):
    seconds = dict(zip((FIRST, SECOND, THIRD), predicted, strict=True))
    choice = best(seconds, FIRST, known={FIRST: difference_s})
    assert 0.0 < choice.expected_s
    assert 0.0 < choice.runner_up_s


# -- whole jobs, simulated --------------------------------------------------------------------------------------


BUSY_HOSTS = dataclasses.replace(RATES, exchange_s=1e-4, all_to_all_s=1e-4, packet_s=5e-3)  # packets cost time


class SimulatedJob:
    """A job that is looked at as a real one is: one step after the watch has said so.

    true_s: (plan, step) -> seconds that a step takes.
    model: step -> a job that prices plans as links are at that step.
    """

    def __init__(self, found, true_s, model, first=None):
        self.chooser, self.watch = Chooser(tuple(found)), StepWatch()
        self.current, self.is_due, self.before = first or found[0], False, None
        self.true_s, self.model = true_s, model
        self.changes, self.steps = [], 0

    def run(self, num_steps):
        for _ in range(num_steps):
            self.steps += 1
            chosen = self._look() if self.is_due else self.current
            self.is_due = self.watch.note(self.true_s(self.current, self.steps))
            if chosen != self.current:
                self.current, self.is_due = chosen, False
                self.changes.append((self.steps, chosen))
                self.watch.try_plan(skipped=1)
        return self

    def _look(self):
        now = self.model(self.steps)
        about = Look(
            step=self.steps, step_s=self.watch.step_s, before=self.before or now, job=now,
            was_settled=self.watch.mode == "settled", change_s=0.1,
        )  # fmt: skip
        self.before = now
        chosen, is_over = self.chooser.look(self.current, about)
        if chosen == self.current:
            if is_over:
                self.watch.mode = "settled"
            else:
                self.watch.try_plan()
        return chosen


ALL = plans(("auto", "auto"), codec="auto", auto_codecs=["int8"], dense_sync="hierarchical")


def exactly(about):
    return lambda plan, step: about.predict(plan).step_s


@pytest.mark.parametrize("mbit", [1.0, 20.0, 100.0, 500.0, 10_000.0])
@pytest.mark.parametrize("tokens", [32, 1024])
def test_with_a_perfect_model_the_best_option_is_taken(mbit, tokens):
    about = job(mbit=mbit, tokens=tokens)
    done = SimulatedJob(ALL, exactly(about), lambda step: about).run(60)
    best_s = min(about.predict(plan).step_s for plan in ALL)
    assert about.predict(done.current).step_s <= best_s / (1.0 - THRESHOLD) + 2 * 1.0 / HORIZON
    assert done.watch.mode == "settled"
    assert not done.is_due


FEW = (FIRST, SECOND, THIRD, FOURTH)


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), st.lists(st.floats(0.95, 1.05), min_size=4, max_size=4))
def test_a_model_that_is_wrong_for_each_option_ends_near_the_best(true_s, factors):
    """The model is wrong for each plan by a factor of its own, by up to 5%."""
    true = dict(zip(FEW, true_s, strict=True))
    model = Priced({plan: true[plan] * factor for plan, factor in zip(FEW, factors, strict=True)})
    done = SimulatedJob(FEW, lambda plan, step: true[plan], lambda step: model).run(60)
    assert done.watch.mode == "settled"
    assert len(done.changes) <= MOST_CHANGES
    assert true[done.current] <= 1.05 * min(true.values())
    settled = list(done.changes)
    assert done.run(100).changes == settled


def test_a_drop_and_a_recovery_are_followed_within_five_steps():
    slow, fast = (job(mbit=mbit, tokens=512, rates=BUSY_HOSTS) for mbit in (20, 5000))

    def model(step):
        return slow if 100 < step <= 200 else fast

    done = SimulatedJob(ALL, lambda plan, step: model(step).predict(plan).step_s, model).run(100)
    before = done.current
    done.run(100)
    assert before.domain_sizes == (1, 1)
    assert done.current.domain_sizes != (1, 1)
    assert any(100 < step <= 105 for step, _ in done.changes)
    assert slow.predict(done.current).step_s <= 1.05 * min(slow.predict(plan).step_s for plan in ALL)
    done.run(100)
    assert done.current.domain_sizes == (1, 1)
    assert any(200 < step <= 205 for step, _ in done.changes)
    assert len(done.changes) <= 3 * MOST_CHANGES


def test_noisy_steps_bring_no_change_once_a_choice_is_over():
    noise = random.Random(1)
    about = job(mbit=100)
    done = SimulatedJob(
        ALL, lambda plan, step: about.predict(plan).step_s * noise.lognormvariate(0.0, 0.3), lambda step: about
    ).run(60)
    assert not done.chooser.is_open
    changes = len(done.changes)
    assert len(done.run(300).changes) == changes


def test_steps_from_before_a_change_are_not_believed():
    before, now = Priced({FIRST: 1.0, SECOND: 1.2}), Priced({FIRST: 5.0, SECOND: 1.0})
    chooser = Chooser((FIRST, SECOND), begin_step=6, is_open=False)
    late = Look(step=9, step_s=1.0, before=before, job=now, was_settled=True)
    assert chooser.look(FIRST, late) == (SECOND, False)
    assert chooser.known == {}
    after = Look(step=14, step_s=1.5, before=now, job=now, was_settled=False)
    assert chooser.look(SECOND, after) == (SECOND, True)


def test_a_choice_does_not_end_with_a_plan_that_is_worse_than_one_that_has_run():
    seconds = {FIRST: 1.0, SECOND: 1.0}
    chooser = Chooser((FIRST, SECOND), begin_step=6, changes_left=RETURNS, known={FIRST: 0.0, SECOND: 1.0})
    assert chooser.choose(SECOND, look(seconds)).best == FIRST
    assert chooser.is_open
