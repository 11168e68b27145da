# SPDX-License-Identifier: Apache-2.0
"""Chooses the plan of a running job by predictions that measured steps correct.

The stream model knows bytes and links, but not a machine's shared cores or the cost of a call.  Those show as the
difference between the measured and the predicted step of a plan that has run:

    expected = predicted + (measured - predicted when it ran)

A plan that has not run gets the difference of the most similar one that has.  Plans that are nearly as good as
the best are tried too, one by one.  A choice holds until links or work change: the differences are useless then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from ds_hybridep.adaptive.plans import Job, label_of
from ds_hybridep.plan.answer import TIE
from ds_hybridep.plan.plan import JobPlan
from ds_hybridep.plan.stream_model import StepPrediction, largest_difference

MOST_CHANGES = 6  # changes of plan in one choice, at most
RETURNS = 3  # the last changes of a choice, which may only go back to a plan that has run
THRESHOLD = 0.03  # share of a step that another plan must save
HOPE = 0.1  # share of a step by which a plan that has not run may be faster than expected
CHANGE = 0.2  # share by which the tokens of a call must change to count as other work
CHANGED_STEP = 0.2  # share by which new links must change a step to start a new choice
HORIZON = 100  # steps in which a change must pay off


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The plan to run next; it is the current one when the choice is over."""

    best: JobPlan
    expected_s: float  # of a step, with its share of the time that the change takes
    runner_up: JobPlan | None
    runner_up_s: float | None
    reason: str

    def describe(self) -> str:
        """The reason, in one line."""
        other = "" if self.runner_up is None else f"; runner-up {label_of(self.runner_up)}, {self.runner_up_s:.4g} s"
        return f"{self.expected_s:.4g} s a step expected, {self.reason}{other}"


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is known when a plan is looked at; `before` and `job` hold links and work at the last look and now."""

    step: int  # optimizer steps so far
    step_s: float  # the median of the measured steps
    before: Job
    job: Job
    was_settled: bool  # the plan was settled before its steps changed
    change_s: float = 0.0  # seconds that a change of plan takes, without filling replicas
    fits: Callable[[JobPlan], bool] = lambda plan: True  # whether memory suffices; not asked for the current plan

    def has_changed(self, plans: Sequence[JobPlan]) -> bool:
        """Whether work or links have changed by enough to matter to one of the plans."""
        if abs(self.job.workload.tokens_per_rank / self.before.workload.tokens_per_rank - 1) > CHANGE:
            return True
        earlier = replace(self.job, cluster=self.before.cluster)
        differences_s = [abs(self.job.predict(one).step_s - earlier.predict(one).step_s) for one in plans]
        return max(differences_s) >= CHANGED_STEP * self.step_s


@dataclass
class Chooser:
    """Chooses among plans; a new choice starts when links or work change.

    horizon: steps in which a change must pay off; infinite if there is only one choice.
    known: for each plan that has run, the measured minus the predicted seconds of a step.
    """

    plans: tuple[JobPlan, ...]
    horizon: float = HORIZON
    _: KW_ONLY
    known: dict[JobPlan, float] = field(default_factory=dict)
    changes_left: int = MOST_CHANGES
    is_open: bool = True  # the next look may change the plan
    begin_step: int | None = None  # when links or work last changed; None before the first choice
    choice: Choice | None = None  # the last one

    def look(self, current: JobPlan, look: Look) -> tuple[JobPlan, bool]:
        """The plan to run next, and whether it stays until steps change."""
        is_first = self.begin_step is None
        if is_first or look.has_changed((current, self.plans[0])):
            self.known.clear()
            self.changes_left, self.is_open, self.begin_step = MOST_CHANGES, True, look.step
        elif not self.is_open:
            # Steps have changed, but links and work measured the same.  A few more steps show if the work has changed.
            return current, not look.was_settled
        # Right after a change, the measured steps may be from before it.
        if is_first or self.begin_step != look.step:
            self.note(current, look.job.predict(current).step_s, look.step_s)
        self.choice = self.choose(current, look)
        return self.choice.best, not self.is_open

    def note(self, plan: JobPlan, predicted_s: float, measured_s: float) -> None:
        """Note that `plan` took `measured_s` a step.  If it ran before, the mean of both differences counts."""
        difference_s = measured_s - predicted_s
        self.known[plan] = (self.known.get(plan, difference_s) + difference_s) / 2

    def choose(self, current: JobPlan, look: Look) -> Choice:
        """The best plan now."""
        job, change_s, fits = look.job, look.change_s, look.fits
        predictions = {one: job.predict(one) for one in self.plans if one == current or fits(one)}
        expected = {current: self._expected_s(current, predictions[current].step_s)}
        # The worth of a plan includes the change to it, and for one that has not run, also the change back.
        worth = dict(expected)
        for plan in predictions:
            if plan == current:
                continue
            share_s = (change_s + job.filling_s(plan)) / self.horizon
            step_s = self._expected_s(plan, predictions[plan].step_s)
            expected[plan] = step_s + share_s
            if plan in self.known and self.changes_left > 0:
                worth[plan] = step_s + share_s
            elif plan not in self.known and self.changes_left > RETURNS:
                worth[plan] = step_s * (1.0 - HOPE) + 2.0 * share_s
        least_s = min(worth.values())
        best = min(
            (plan for plan in worth if worth[plan] <= least_s * (1 + TIE)),
            key=lambda one: (one != current, one.encodes_experts, job.memory(one).total_bytes, self.plans.index(one)),
        )
        if worth[best] > worth[current] * (1.0 - THRESHOLD):
            best = current
        self.is_open = best != current
        self.changes_left -= self.is_open
        runner_up = min((plan for plan in expected if plan != best), key=expected.__getitem__, default=None)
        return Choice(
            best=best,
            expected_s=expected[best],
            runner_up=runner_up,
            runner_up_s=None if runner_up is None else expected[runner_up],
            reason=_why(best, current if best != current else runner_up, predictions),
        )

    def _expected_s(self, plan: JobPlan, predicted_s: float) -> float:
        """Expected seconds of a step; a difference below zero must not bring them near or below zero."""
        if not self.known:
            return predicted_s
        # If `plan` itself has run, it is the most similar one.
        like = min(self.known, key=lambda other: plan.num_differences(other))
        return max(predicted_s + self.known[like], 0.1 * predicted_s)


def _why(best: JobPlan, other: JobPlan | None, predictions: Mapping[JobPlan, StepPrediction]) -> str:
    """Names the term on which `best` is predicted to save most against `other`."""
    if other is None:
        return "the only plan"
    saved_s, words = largest_difference(predictions[other], predictions[best])
    if saved_s <= 0:
        return f"measured to be no slower than {label_of(other)}"
    return f"saves {saved_s:.3g} s on {words} against {label_of(other)}"
