# SPDX-License-Identifier: Apache-2.0
"""The plan of a running job: every way that its settings leave open, predicted, corrected by what was measured.

The stream model knows bytes and links; what it does not know of a machine (cores that are shared, the cost of a call)
shows as the difference between the measured and the predicted step. That difference is kept for each option that has
run:

    expected = predicted + (measured - predicted when it ran)

What is known of an option is a mean over the looks at which it ran. An option that never ran is given the difference
of the one that is most like it. The less is known, the more an option is hoped to be faster than that, so that near
ties are settled by trying them, and by trying them again. Looks are forgotten slowly while an option does not run.

Trying costs what the tried plan takes longer than the one that it replaced. Where that has come to more than a small
share of the training, nothing is hoped for until the share is small again.

A change itself takes time, most of it for filling working copies over the slow link. It has to be worth that within as
many steps as links and work have been what they are: how long they stay so is not known, and the longer they did, the
longer they will. What is only hoped for comes true now and then, and else costs a change there and one back.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ds_hybridep.plan.cluster import Cluster, divisors
from ds_hybridep.plan.costs import memory_of
from ds_hybridep.plan.layout import IDENTITY, Codec, Layout, LevelCodecs, Rates, SyncModel
from ds_hybridep.plan.planner import TERM_WORDS, TIE
from ds_hybridep.plan.stream_model import StepPrediction, predict
from ds_hybridep.plan.token_route import TokenExchange
from ds_hybridep.plan.workload import Workload

Exchange = Literal["direct", "hierarchical", "deepspeed"]
DenseSync = Literal["deepspeed", "hierarchical"]

OPTIMISM = 0.1  # share of a step by which an option is hoped to be faster than it is known to be; less by each look
MOST_OPTIMISM = 0.2  # where it never ran, and differs in several settings from all that did
FORGETTING = 0.02  # share of an option's looks that is lost at each look while it does not run
LEAST_WEIGHT = 0.1  # of the newest look in the mean, so that it follows what changes
ODDS = 0.25  # at which a hope is reckoned with
TRIAL_LOSS = 1.0  # steps that are lost, beside the changes there and back, where a hope does not come true
DOUBT = 0.15  # share of a step by which an option that never ran must be better while trying is suspended
TRIAL_SHARE = 0.01  # of the training that trying may cost
EARLY_SHARE = 0.05  # and so much more of a training that is young, until that is
TRIAL_STEPS = 6.0  # so many steps in all
TRIAL_S = 5.0  # and so many seconds: a change of plan takes about one, whatever a step takes
LEAST_HORIZON = 10  # steps in which a change of plan must be worth its time, where links or work have just changed


@dataclass(frozen=True, kw_only=True)
class Option:
    """All that can be changed while a job runs.

    codecs: of each level; without effect where the domain size is 1.
    exchange: how tokens travel; "deepspeed" leaves them to DeepSpeed's padded all-to-alls.
    dense_sync: how gradients and parameters of everything but the experts travel.
    """

    domain_sizes: tuple[int, ...]
    codecs: tuple[LevelCodecs, ...]
    exchange: Exchange = "direct"
    dense_sync: DenseSync = "deepspeed"

    def settings_other_than(self, other: "Option") -> int:
        """Number of settings in which two options differ."""
        ours = (self.domain_sizes, self.codecs, self.exchange, self.dense_sync)
        theirs = (other.domain_sizes, other.codecs, other.exchange, other.dense_sync)
        return sum(mine != its for mine, its in zip(ours, theirs, strict=True))

    def layout(self, spans: tuple[int, ...], prefetch_depth: int) -> Layout:
        """As the stream model takes it."""
        exchange: TokenExchange = "direct" if self.exchange == "deepspeed" else self.exchange
        return Layout(
            spans=spans,
            domain_sizes=self.domain_sizes,
            codecs=self.codecs,
            prefetch_depth=prefetch_depth,
            exchange=exchange,
            is_padded=self.exchange == "deepspeed",
        )

    @property
    def is_lossy(self) -> bool:
        """True where something that travels is not exact."""
        return any(
            size > 1 and codecs != LevelCodecs() for size, codecs in zip(self.domain_sizes, self.codecs, strict=True)
        )

    @property
    def label(self) -> str:
        """Short, for people; different for different options."""
        text = "[" + ",".join(map(str, self.domain_sizes)) + "]"
        for size, codecs in zip(self.domain_sizes, self.codecs, strict=True):
            if size > 1 and codecs != LevelCodecs():
                names = (codecs.weight.name, codecs.gradient.name)
                text += f" {names[0] if names[0] == names[1] else '/'.join(names)}"
        return f"{text} tokens {self.exchange}, dense {self.dense_sync}"


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the settings leave open, level by level; a fixed setting is a choice of one.

    spans: positions of the expert-parallel group at each level.
    domain_sizes: that may be taken at each level.
    weight_codecs, gradient_codecs: that may be taken at each level. Where both leave several, they go together.
    """

    spans: tuple[int, ...]
    domain_sizes: tuple[tuple[int, ...], ...]
    weight_codecs: tuple[tuple[Codec, ...], ...]
    gradient_codecs: tuple[tuple[Codec, ...], ...]
    exchanges: tuple[Exchange, ...]
    dense_syncs: tuple[DenseSync, ...]

    def options(self) -> Iterator[Option]:
        """Every option, each once, in a fixed order."""
        for domain_sizes in itertools.product(*self.domain_sizes):
            counts = [span // size for span, size in zip(self.spans, domain_sizes, strict=True)]
            for codecs in itertools.product(*(self._codecs(i, size) for i, size in enumerate(domain_sizes))):
                for exchange in self.exchanges:
                    if not _is_possible(exchange, domain_sizes, counts, self.exchanges):
                        continue
                    for dense_sync in self.dense_syncs:
                        yield Option(
                            domain_sizes=domain_sizes, codecs=codecs, exchange=exchange, dense_sync=dense_sync
                        )

    def _codecs(self, level: int, domain_size: int) -> tuple[LevelCodecs, ...]:
        if domain_size == 1:  # nothing travels: one of them stands for all
            return (LevelCodecs(),)
        weights, gradients = self.weight_codecs[level], self.gradient_codecs[level]
        if len(weights) > 1 and len(gradients) > 1:
            return tuple(LevelCodecs(weight=codec, gradient=codec) for codec in weights)
        return tuple(LevelCodecs(weight=w, gradient=g) for w, g in itertools.product(weights, gradients))


def _is_possible(
    exchange: Exchange, domain_sizes: Sequence[int], counts: Sequence[int], allowed: Sequence[Exchange]
) -> bool:
    """DeepSpeed's exchange knows no domains; level by level is another way only where several levels have domains."""
    if exchange == "deepspeed":
        return max(domain_sizes) == 1
    has_choice = sum(count > 1 for count in counts) > 1
    return exchange != "hierarchical" or has_choice or "direct" not in allowed


def open_sizes(span: int) -> tuple[int, ...]:
    """Domain sizes at a level of which a group spans so many positions."""
    return divisors(span)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an option is priced for; links and workload as measured last.

    token_codecs: of each level; without effect where tokens are left to DeepSpeed.
    """

    cluster: Cluster
    spans: tuple[int, ...]
    workload: Workload
    rates: Rates
    prefetch_depth: int
    token_codecs: tuple[Codec, ...]
    is_transient: bool = False

    def predict(self, option: Option) -> StepPrediction:
        """Seconds of one step by the stream model.

        Sums of DeepSpeed's ring pass twice (what it does over gloo). Level by level a ZeRO partition is summed for its
        owner alone, which is one pass. Experts that several groups hold are DeepSpeed's in either case.
        """
        layout = self._layout(option)
        ring = predict(self.cluster, layout, self.workload, self.rates, SyncModel())
        if option.dense_sync == "deepspeed":
            return ring
        passes = 1.0 if self.workload.zero_stage >= 1 else 2.0
        sync = SyncModel(algorithm="hierarchical", reduce_passes=passes)
        levels = predict(self.cluster, layout, self.workload, self.rates, sync)
        terms = replace(levels.terms, expert_sync_s=ring.terms.expert_sync_s)
        pairs = zip(levels.uplink_bytes, ring.uplink_bytes, strict=True)
        uplinks = tuple({**dict(ours), "expert_sync": theirs["expert_sync"]} for ours, theirs in pairs)
        return StepPrediction(terms, uplinks)

    def memory_bytes(self, option: Option) -> float:
        """Of one rank, activations left out."""
        return memory_of(self.cluster, self._layout(option), self.workload).total_bytes

    def filling_s(self, option: Option) -> float:
        """Seconds in which working copies are filled, exactly, over levels where later steps send less."""
        pairs = zip(option.domain_sizes, option.codecs, strict=True)
        is_encoded = [size > 1 and codecs.weight.is_lossy for size, codecs in pairs]
        if not any(is_encoded):
            return 0.0
        exact_option = replace(option, codecs=(LevelCodecs(),) * len(option.codecs))
        uplinks = zip(is_encoded, self.cluster.levels, self.predict(exact_option).uplink_bytes, strict=True)
        return sum(
            kinds["expert_weights"] * self.rates.wire_factor / level.link.bandwidth_bytes_per_s
            for is_less, level, kinds in uplinks
            if is_less and level.link.bandwidth_bytes_per_s is not None
        )

    def copies_bytes(self, option: Option) -> float:
        """Of one rank's working copies and what belongs to them."""
        return memory_of(self.cluster, self._layout(option), self.workload).replica_bytes

    def _layout(self, option: Option) -> Layout:
        layout = option.layout(self.spans, self.prefetch_depth)
        pairs = zip(layout.codecs, self.token_codecs, strict=True)
        codecs = tuple(replace(of_level, token=token) for of_level, token in pairs)
        return replace(layout, codecs=codecs, is_transient=self.is_transient)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The option of least expected step time, beside the one that runs now.

    expected_s: of `best`, with each step's share of the change to it; current_s: of the one that runs.
    runner_up: the best of the others, None if there is none.
    """

    best: Option
    expected_s: float
    current: Option
    current_s: float
    runner_up: Option | None
    runner_up_s: float | None
    reason: str

    def saves(self, threshold: float) -> bool:
        """True where the best saves more than this share of the step."""
        return self.best != self.current and self.expected_s < self.current_s * (1.0 - threshold)

    def describe(self) -> str:
        """Why, in one line."""
        text = f"{self.expected_s:.4g} s a step expected, {self.reason}"
        if self.runner_up is not None and self.runner_up_s is not None:
            text += f"; runner-up {self.runner_up.label}, {self.runner_up_s:.4g} s"
        return text


@dataclass
class Known:
    """Of an option that has run: its mean difference from the prediction, and looks, faded ones in part."""

    correction_s: float = 0.0
    looks: float = 0.0


@dataclass
class TrialBudget:
    """What trying plans has cost, and how long was trained; seconds."""

    elapsed_s: float = 0.0
    lost_s: float = 0.0
    last_s: float = 0.0  # what the last change has cost; the next one is taken to cost as much
    replaced_s: float | None = None  # a step of the plan that was left, while its successor has not proved itself

    def note_step(self, step_s: float) -> None:
        """One optimizer step was made."""
        self.elapsed_s += step_s
        if self.replaced_s is not None:
            self._lose(max(step_s - self.replaced_s, 0.0))

    def note_switch(self, seconds: float) -> None:
        """A change of plan took so long."""
        self.last_s = 0.0
        self._lose(seconds)

    def is_left(self, step_s: float) -> bool:
        """Whether another plan may be tried; a step takes `step_s` now."""
        early_s = min(EARLY_SHARE * self.elapsed_s, TRIAL_STEPS * step_s + TRIAL_S)
        return self.lost_s + self.last_s <= TRIAL_SHARE * self.elapsed_s + early_s

    def _lose(self, seconds: float) -> None:
        self.lost_s += seconds
        self.last_s += seconds


@dataclass
class Chooser:
    """Chooses among options; remembers how far each was from its prediction when it ran."""

    options: tuple[Option, ...]
    known: dict[Option, Known] = field(default_factory=dict)

    def note(self, option: Option, predicted_s: float, measured_s: float, weight: float = 1.0) -> None:
        """`option` ran at `measured_s` a step; what is known of the others fades.

        weight: 1 for a look at as many steps as usual, less for fewer.
        """
        own = self.known.setdefault(option, Known())
        for other in self.known.values():
            other.looks *= 1.0 if other is own else 1.0 - FORGETTING * weight
        own.looks += weight
        own.correction_s += weight * max(1.0 / own.looks, LEAST_WEIGHT) * (measured_s - predicted_s - own.correction_s)

    def correction_s(self, option: Option) -> float | None:
        """What is added to the option's prediction; None where it never ran."""
        known = self.known.get(option)
        return None if known is None else known.correction_s

    def forget(self) -> None:
        """The job's own work changed, such as its tokens: what was measured says nothing any more."""
        self.known.clear()

    def choose(
        self,
        current: Option,
        predict: Callable[[Option], StepPrediction],
        size: "OfOption",
        *,
        may_try: bool = True,
        change_s: "OfOption" = lambda option: 0.0,
        horizon: float = math.inf,
        fits: Callable[[Option], bool] = lambda option: True,
    ) -> Choice:
        """The best option now.

        predict: seconds of an option at the links and the work as they are now.
        size: bytes of an option, for ties.
        may_try: False: nothing is taken on a mere hope, and what never ran only where it promises much.
        change_s: seconds that a change to an option takes.
        horizon: steps in which it has to be worth that.
        fits: whether there is memory for an option; asked of all but the current one.
        """
        fitting = [option for option in self.options if option != current and fits(option)]
        predictions = {option: predict(option) for option in (current, *fitting)}
        share_s = {option: change_s(option) / horizon for option in predictions if option != current}
        expected = self._expected(current, predictions, share_s, horizon, may_try)
        fastest_s = min(expected.values())
        best = min(
            (option for option in expected if expected[option] <= fastest_s * (1 + TIE)),
            key=lambda option: (option != current, option.is_lossy, size(option), option.label),
        )
        others = [option for option in expected if option != best]
        runner_up = min(others, key=lambda option: expected[option], default=None)
        return Choice(
            best=best,
            expected_s=expected[best],
            current=current,
            current_s=expected[current],
            runner_up=runner_up,
            runner_up_s=None if runner_up is None else expected[runner_up],
            reason=_why(best, current if best != current else runner_up, predictions),
        )

    def _expected(
        self,
        current: Option,
        predictions: Mapping[Option, StepPrediction],
        share_s: Mapping[Option, float],
        horizon: float,
        may_try: bool,
    ) -> dict[Option, float]:
        """Seconds of each option, with its share of the change to it."""
        result = {}
        for option, prediction in predictions.items():
            correction_s, hope = self._known_or_like(option)
            if not may_try:
                hope = 0.0 if option in self.known else -DOUBT
            # A correction below zero must not make a step of nothing out of a short one.
            expected_s = max(prediction.step_s + correction_s, 0.1 * prediction.step_s)
            if option != current:
                trial_s = 2.0 * share_s[option] + TRIAL_LOSS * expected_s / horizon
                if ODDS * hope * expected_s < trial_s:
                    hope = min(hope, 0.0)
                expected_s = expected_s * (1.0 - hope) + share_s[option]
            result[option] = expected_s
        return result

    def _known_or_like(self, option: Option) -> tuple[float, float]:
        """(what is added to the prediction, share by which the option is hoped to be faster than that)."""
        if option in self.known:
            return self.known[option].correction_s, OPTIMISM / (1.0 + self.known[option].looks)
        if not self.known:
            return 0.0, OPTIMISM
        like = min(self.known, key=lambda other: (option.settings_other_than(other), -self.known[other].looks))
        hope = min(OPTIMISM * option.settings_other_than(like), MOST_OPTIMISM)
        return self.known[like].correction_s, hope


OfOption = Callable[[Option], float]


def _why(best: Option, other: Option | None, predictions: Mapping[Option, StepPrediction]) -> str:
    """The term on which `best` is predicted to save most."""
    if other is None:
        return "the only option"
    ours, theirs = predictions[best].terms.as_dict(), predictions[other].terms.as_dict()
    term = max(theirs, key=lambda name: theirs[name] - ours[name])
    saved_s = theirs[term] - ours[term]
    if saved_s <= 0:
        return f"measured to be no slower than {other.label}"
    return f"saves {saved_s:.3g} s on {TERM_WORDS[term]} against {other.label}"


def prediction_json(prediction: StepPrediction) -> dict[str, Any]:
    """JSON values of a prediction: seconds by term, and bytes of one uplink by level and kind."""
    return {
        "step_s": prediction.step_s,
        "terms_s": prediction.terms.as_dict(),
        "uplink_bytes": [dict(kinds) for kinds in prediction.uplink_bytes],
    }


def exact() -> tuple[Codec, ...]:
    """The choice of one where nothing lossy is allowed."""
    return (IDENTITY,)
