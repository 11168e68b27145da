# SPDX-License-Identifier: Apache-2.0
"""Plans a running job: measures its links, its experts and its steps, and says when another plan is better.

    attach    links and experts are measured; the job begins as DeepSpeed has it
    steps     every `replan_interval` optimizer steps or more, and as soon as steps become longer or shorter, right
              before the optimizer: a short burst over slow levels, the median step since the last look, the
              tokens of a call; every plan is priced for them
    switch    where another plan is expected to be faster by more than `REPLAN_THRESHOLD` at two looks in a row

Rank 0 chooses and the others are told, so that ranks cannot differ however they round.  Transfers of training itself
are no measure of a link: they wait for the slower of two ranks, and DeepSpeed's are not ours to see.
"""

import hashlib
import json
import logging
import math
import resource
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ds_hybridep.adaptive import link_cache
from ds_hybridep.adaptive.options import (
    LEAST_HORIZON,
    Choice,
    Chooser,
    Exchange,
    Job,
    Option,
    Room,
    TrialBudget,
    exact,
    open_sizes,
    prediction_json,
)
from ds_hybridep.adaptive.probe import LinkProbe
from ds_hybridep.adaptive.pulse import Pulse, StepWatch
from ds_hybridep.adaptive.rates import expert_params, measure_codec, measure_experts
from ds_hybridep.config import AUTO, AUTO_CODEC, IDENTITY, CodecConfig, HybridEPConfig
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.layer_spec import LayerSpec, check_experts
from ds_hybridep.experts.migration import is_in_backward
from ds_hybridep.integration.runtime import HybridRuntime
from ds_hybridep.plan.cluster import Cluster, Level, Link
from ds_hybridep.plan.costs import ranks_below, row_counts
from ds_hybridep.plan.layout import Codec
from ds_hybridep.plan.partition import Partition
from ds_hybridep.plan.row_format import token_codec
from ds_hybridep.plan.stream_model import StepPrediction
from ds_hybridep.plan.workload import MoEModel, Workload
from ds_hybridep.transport.agreement import agree, announcing_failure
from ds_hybridep.transport.channels import Transport
from ds_hybridep.transport.job import backends_of
from ds_hybridep.transport.streams import streams_of
from ds_hybridep.version import __version__

log = logging.getLogger(__name__)

PROBE_LIMIT_S = 2.0  # of the links at start-up
WARM_UP_STEPS = 2  # that are not measured: first calls, first shipments, connections that are slow to start
FIRST_LOOK = 5
TRIAL_LOOK = 3  # steps after a change of plan; where the plan is a bad one, they are the price
THOROUGH_LOOKS = 4  # every so many, all levels' links are looked at
MOST_INTERVAL = 100  # steps from one look to the next, whatever a look costs
REPLAN_THRESHOLD = 0.03  # share of a step that another plan must be expected to save
PATIENCE = 2  # looks in a row at which another plan must be better
CLEARLY = 0.3  # share of a step; a plan that saves as much needs one look only
BURST_SHARE = 0.02  # of the time since the last look
LOOK_SHARE = 0.01  # of the time since the last look that one may take; else looks are made less often
LEAST_BURST_S = 0.01  # a shaper lets about a millisecond pass at once
LEAST_BURST_LATENCIES = 8  # a connection takes a few round trips to get up to speed
MOST_BURST_S = 0.05
MOST_BURST_BYTES = 1 << 24
LEAST_BURST_BYTES = 1 << 15
ROOM_SHARE = 0.9  # of the memory that is free; packets and other buffers of the moment need some
CHANGE = 0.2  # of a rate or of the tokens, from which on it counts as another one
CHANGED_STEP = 0.1  # share of a step by which another rate must change it to make what was measured worthless


@dataclass
class LayerWatch:
    """Counts what goes into one MoE layer, whoever serves it; a forward pre-hook of the layer."""

    calls: int = 0
    tokens: int = 0
    recomputed: int = 0
    begin_s: float | None = None  # of the first call in this optimizer step

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Before a forward of the layer; evaluations are not counted."""
        if not layer.training or not inputs:
            return
        if self.begin_s is None:
            self.begin_s = time.perf_counter()
        if is_in_backward():
            self.recomputed += 1
        else:
            self.calls += 1
            self.tokens += inputs[0].numel() // inputs[0].shape[-1]


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What DeepSpeed knows of a job and the layers do not say.

    dense_params, active_dense_params, trainable_dense_params: of all but the experts, see `plan.workload`.
    zero_stage: 0, 1 or 2.
    micro_steps: of one optimizer step, asked each time.
    capacity_factor: of the gates, as they train.
    can_sync_by_level: dense_sync "hierarchical" works with this engine.
    """

    dense_params: int
    active_dense_params: int
    trainable_dense_params: int
    zero_stage: int
    micro_steps: Callable[[], int]
    capacity_factor: float
    can_sync_by_level: bool


@dataclass
class Since:
    """What was measured since the last look."""

    step_s: list[float] = field(default_factory=list)
    calls: int = 0
    tokens: int = 0
    recomputed: int = 0
    rows: int = 0
    row_calls: int = 0


@dataclass(frozen=True)
class PlanBegin:
    """Counters of this rank when the plan began."""

    step: int = 0
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: Mapping[tuple[int, str], int] = field(default_factory=dict)


class JobPlanner:
    """The plan of one attached model; all ranks must make the same calls at the same steps.

    Args:
        config: with what is "auto" in it.
        specs: of the MoE layers, all of one expert-parallel group.
        facts: of the job.

    Raises:
        UnsupportedError: layers have different expert-parallel groups.
        AgreementError: ranks differ.
    """

    def __init__(self, config: HybridEPConfig, specs: Sequence[LayerSpec], facts: JobFacts) -> None:
        self._config, self._facts = config, facts
        self.watches = tuple(LayerWatch() for _ in specs)
        with announcing_failure():
            spec = _same_of_all(specs)
            partition = Partition.build(config.cluster(), spec.group_ranks, (1,) * len(config.levels))
            spans = zip(config.levels, partition.spans, strict=True)
            if any((span if level.domain_size == AUTO else level.domain_size) != 1 for level, span in spans):
                for one in specs:
                    check_experts(one)
            backends = backends_of(config, spec.sample.device)
            # Where all experts are frozen nothing travels encoded, and everything is as good as exact.
            codec_configs = _codecs_to_try(config) if expert_params(spec, trainable_only=True) else {}
        generation = agree({"version": __version__, "planned": config.canonical()}, config.timeout_s)
        self._transport = Transport(config.cluster(), config.timeout_s, generation, backends)
        self._probe = LinkProbe(self._transport, spec.sample.device)
        self._cluster = self._first_links()
        self._model = _model_of(specs, facts)
        self._param_bytes, self._device = spec.sample.element_size(), spec.sample.device
        self._free_bytes = math.inf  # of the fullest rank
        self._working_bytes = 0.0  # what a step takes of it for a while
        self._trainable_params = expert_params(spec, trainable_only=True)
        self._rates = measure_experts(spec, self._probe, self._cluster)
        self._codecs = {
            name: measure_codec(name, one, spec, self._probe, config.advanced.kernels)
            for name, one in codec_configs.items()
        }
        self._configs = {"identity": IDENTITY, **codec_configs}
        self._spans = partition.spans
        self._options = tuple(self._room().options())
        self._chooser = Chooser(self._options)
        self._current = self._options[0]
        self._is_by_hand = False  # what runs is none of the options
        self._workload: Workload | None = None
        self._row_scale = 1.0
        self._since = Since()
        self._plan_begin = PlanBegin()
        self._begin_s = self._paused_s = self._look_s = 0.0
        self._interval = config.advanced.replan_interval
        self._num_steps, self._next_look = 0, FIRST_LOOK
        self._skipped_steps = WARM_UP_STEPS
        self._pulse, self._step_watch = Pulse(self._transport), StepWatch()
        self._budget = TrialBudget()
        self._change_s = 0.0  # that the last change of plan took, without filling working copies
        self._unchanged_since = 0  # step from which on links and work are what they are; rank 0's
        self._predicted_s: dict[Option, float] = {}  # at the last look; rank 0's
        self._num_looks = 0
        self._after_s = 0.0  # when the last optimizer step was over
        self._is_changing = False  # between a decision and its being carried out
        self._num_wins = 0
        self._favourite = -1.0  # index of the option that was best at the last look
        self.num_quiet_looks = 0  # in a row at which no other plan was better
        self._choice: Choice | None = None
        self.history: list[dict[str, Any]] = []
        self.reason = ""  # of the last choice

    # -- what the settings leave open -------------------------------------------------------------------------------

    def _room(self) -> Room:
        config = self._config
        exchange = config.token_exchange
        dense = config.dense_sync
        # The first of all options is what DeepSpeed does: until something else is better, nothing is changed.
        exchanges: tuple[Exchange, ...] = ("deepspeed", "direct", "hierarchical") if exchange == AUTO else (exchange,)
        if dense == AUTO:
            dense_syncs = ("deepspeed", "hierarchical") if self._facts.can_sync_by_level else ("deepspeed",)
        else:
            dense_syncs = (dense,)
        return Room(
            spans=self._spans,
            domain_sizes=tuple(
                open_sizes(span) if level.domain_size == AUTO else (level.domain_size,)
                for level, span in zip(config.levels, self._spans, strict=True)
            ),
            weight_codecs=tuple(self._choices(level.weight_codec) for level in config.levels),
            gradient_codecs=tuple(self._choices(level.gradient_codec) for level in config.levels),
            exchanges=exchanges,
            dense_syncs=dense_syncs,
        )

    def _choices(self, codec: CodecConfig) -> tuple[Codec, ...]:
        if codec == IDENTITY or not self._codecs:
            return exact()
        if codec == AUTO_CODEC:
            return (*exact(), *(self._codecs[name_of(one)] for one in self._config.auto_codecs))
        return (self._codecs[name_of(codec)],)

    def config_of(self, option: Option) -> HybridEPConfig:
        """The settings that an option stands for."""
        levels = []
        for level, size, codecs in zip(self._config.levels, option.domain_sizes, option.codecs, strict=True):
            is_used = size > 1
            levels.append(
                level.model_copy(
                    update={
                        "domain_size": size,
                        "weight_codec": self._configs[codecs.weight.name] if is_used else _plain(level.weight_codec),
                        "gradient_codec": self._configs[codecs.gradient.name]
                        if is_used
                        else _plain(level.gradient_codec),
                    }
                )
            )
        links = zip(levels, self._cluster.levels, strict=True)
        levels = [level.model_copy(update=_link_settings(measured.link)) for level, measured in links]
        return self._config.model_copy(
            update={
                "levels": tuple(levels),
                "token_exchange": option.exchange,
                "dense_sync": option.dense_sync,
            }
        )

    @property
    def start_config(self) -> HybridEPConfig:
        """The settings of the first steps."""
        return self.config_of(self._current)

    def _option_of(self, config: HybridEPConfig, runtime: HybridRuntime) -> Option | None:
        """The option that given settings are; None where they are not among those left open."""
        config = config.model_copy(update={"token_exchange": runtime.token_exchange})
        return next((one for one in self._options if _same_settings(self.config_of(one), config)), None)

    # -- measuring --------------------------------------------------------------------------------------------------

    def _first_links(self) -> Cluster:
        """Links as the settings give them, as the cache has them, or as measured now."""
        config, probe = self._config, self._probe
        given = config.cluster()
        names = [int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:6], "big")]
        hosts = [int(row[0]) for row in probe.table([float(names[0])])]
        self._num_neighbours = hosts.count(hosts[self._transport.rank])
        about = {"levels": [[level.name, level.size] for level in given.levels], "hosts": hosts}
        fingerprint = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        nothing = [-1.0] * (2 * len(given.levels))
        cached = (
            link_cache.read(config.advanced.probe_cache, fingerprint, len(nothing))
            if self._transport.rank == 0
            else None
        )
        told = probe.table(nothing if cached is None else cached)[0]  # rank 0 has the file and tells the others
        levels, measured = [], list(told)
        for index, level in enumerate(given.levels):
            link = level.link
            if level.size > 1 and (link.bandwidth_bytes_per_s is None or link.latency_s is None):
                if told[2 * index] < 0:
                    limit_s = PROBE_LIMIT_S / len(given.levels)
                    link = probe.measure(index, is_thorough=False, limit_s=limit_s).level.link
                    measured[2 * index : 2 * index + 2] = [link.bandwidth_bytes_per_s or -1.0, link.latency_s or 0.0]
                else:
                    link = Link(told[2 * index], told[2 * index + 1])
            levels.append(Level(level.name, level.size, link))
        if self._transport.rank == 0 and config.advanced.probe_cache is not None and cached is None:
            link_cache.write(config.advanced.probe_cache, fingerprint, measured)
        return Cluster(tuple(levels))

    def _measure_links(self, elapsed_s: float, *, slowdown: float, has_changed: bool) -> None:
        """Look at the slow links again: the outermost at every look, all where steps have changed and now and then.

        slowdown: of the measured step against the usual one. A link may have become slower by as much, and a burst of
            the usual size would take as much longer.
        """
        self._num_looks += 1
        used = [index for index, level in enumerate(self._cluster.levels) if level.size > 1]
        is_thorough = has_changed or self._num_looks % THOROUGH_LOOKS == 0
        for level in used if is_thorough else used[:1]:
            self._measure_link(level, elapsed_s, slowdown)

    def _measure_link(self, index: int, elapsed_s: float, slowdown: float) -> None:
        level = self._cluster.levels[index]
        known, latency_s = level.link.bandwidth_bytes_per_s or 1e9, level.link.latency_s or 0.0
        below = ranks_below(self._cluster)[index]
        burst_s = max(min(BURST_SHARE * elapsed_s, MOST_BURST_S), LEAST_BURST_S, LEAST_BURST_LATENCIES * latency_s)
        rate = self._probe.table([known / slowdown])[0][0]  # rank 0's: sizes must be equal to the last byte
        for _ in range(3):
            num_bytes = int(min(max(rate * burst_s / below, LEAST_BURST_BYTES), MOST_BURST_BYTES))
            before, rate = rate, self._probe.burst(index, num_bytes, latency_s)
            if rate <= before * (1 + CHANGE):
                break  # a burst that was too short for a faster link is repeated
        if abs(rate / known - 1) <= CHANGE:
            rate = (rate + known) / 2  # bursts are short and noisy
        levels = list(self._cluster.levels)
        levels[index] = replace(level, link=replace(level.link, bandwidth_bytes_per_s=rate))
        self._cluster = Cluster(tuple(levels))

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def before_step(self, runtime: HybridRuntime) -> HybridEPConfig | None:
        """Call when gradients are complete and nothing is under way.

        Returns:
            The settings to go on with after this optimizer step; None: as before.
        """
        entry_s = time.perf_counter()
        # From the first layer's forward on: what a script does between two steps is not the plan's.
        self._begin_s = min((w.begin_s for w in self.watches if w.begin_s is not None), default=entry_s)
        for watch in self.watches:
            watch.begin_s = None
        self._num_steps += 1
        has_changed = self._pulse.take()
        chosen = None
        if self._num_steps >= self._next_look or (has_changed and math.isfinite(self._next_look)):
            chosen = self._look(runtime, has_changed=has_changed)
            self._look_s = time.perf_counter() - entry_s
        self._paused_s = time.perf_counter() - entry_s
        return chosen

    def after_step(self) -> None:
        """Call right after the optimizer step, before anything is changed."""
        streams_of(self._device).synchronize()
        self._after_s = time.perf_counter()
        step_s = self._after_s - self._begin_s - self._paused_s
        has_changed = False
        if self._skipped_steps > 0:
            self._skipped_steps -= 1
        else:
            self._since.step_s.append(step_s)
            has_changed = self._step_watch.note(step_s)
        self._budget.note_step(step_s)
        if math.isfinite(self._next_look):
            self._pulse.send(has_changed)

    def _look(self, runtime: HybridRuntime, *, has_changed: bool) -> HybridEPConfig | None:
        num_steps, earlier_wins = len(self._since.step_s), self._num_wins
        last_s = self._since.step_s[-1] if self._since.step_s else 0.0  # of this rank
        measured_s, elapsed_s = self._take_measures(runtime)
        if self._workload is None:  # no layer has trained yet (an evaluation is none), on any rank
            self._next_look = self._num_steps + max(self._interval, FIRST_LOOK)
            self._begin_anew(runtime)
            return None
        before_s = self._job().predict(self._current).step_s
        usual_s = before_s + (self._chooser.correction_s(self._current) or 0.0)
        slowest_s = max(measured_s or 0.0, last_s)
        slowdown = max(slowest_s / usual_s, 1.0) if usual_s > 0 else 1.0
        self._measure_links(elapsed_s, slowdown=slowdown, has_changed=has_changed)
        job = self._job()
        predicted_s = job.predict(self._current).step_s
        # Where the link is another one now, nobody knows for how many of the measured steps it has been.
        if measured_s is not None and abs(predicted_s - before_s) < CHANGED_STEP * measured_s:
            weight = min(num_steps / max(self._config.advanced.replan_interval - 1, 1), 1.0)
            self._chooser.note(self._current, predicted_s, measured_s, weight)
        told = [-1.0, 0.0, 0.0]
        if self._transport.rank == 0:
            if measured_s is not None:  # the plan that runs has shown what it takes
                self._budget.replaced_s = None
            predictions = {option: job.predict(option) for option in self._options}
            choice = self._choice = self._chooser.choose(
                self._current,
                predictions.__getitem__,
                job.memory_bytes,
                may_try=self._budget.is_left(measured_s or predicted_s),
                change_s=lambda option: self._change_s + job.filling_s(option),
                horizon=self._horizon(predictions, measured_s or predicted_s),
                fits=lambda option: self._fits(job, option),
            )
            # A plan that just began is left for what is known of it, not for what was known before.
            is_better = measured_s is not None and choice.saves(REPLAN_THRESHOLD)
            told = [self._options.index(choice.best), is_better, is_better and choice.saves(CLEARLY)]
        index, is_better, is_clear = self._probe.table(told)[0]
        self._num_wins = self._num_wins + (PATIENCE if is_clear else 1) if is_better else 0
        self.num_quiet_looks = 0 if is_better else self.num_quiet_looks + 1
        self._begin_anew(runtime)
        if index != self._favourite and is_better:
            self._num_wins -= earlier_wins  # they were another plan's
        self._favourite = index
        is_settled = not is_better and not self._config.advanced.replan_interval
        self._next_look = math.inf if is_settled else self._num_steps + (1 if is_better else self._interval)
        if self._num_wins < PATIENCE:
            return None
        self._is_changing = True
        self.reason = "chosen by rank 0" if self._choice is None else self._choice.describe()
        return self.config_of(self._options[int(index)])

    def _horizon(self, predictions: Mapping[Option, StepPrediction], step_s: float) -> float:
        """Steps in which a change must be worth its time: as many as links and work have been what they are."""
        now = {option: prediction.step_s for option, prediction in predictions.items()}
        if any(abs(now[option] - before_s) >= CHANGED_STEP * step_s for option, before_s in self._predicted_s.items()):
            self._unchanged_since = self._num_steps
        self._predicted_s = now
        if not self._config.advanced.replan_interval:  # the only choice
            return math.inf
        return max(self._num_steps - self._unchanged_since, LEAST_HORIZON)

    def _fits(self, job: Job, option: Option) -> bool:
        """Whether there is memory for both plans' working copies at the change, and for the new ones in a step."""
        copies_bytes, free_bytes = job.copies_bytes(option), ROOM_SHARE * self._free_bytes
        growth_bytes = copies_bytes - job.copies_bytes(self._current)
        return copies_bytes <= free_bytes and growth_bytes + self._working_bytes <= free_bytes

    def recall(self, path: Path) -> HybridEPConfig | None:
        """The settings that a checkpoint was saved with, if they are others than now; all ranks must call.

        path: of the file that rank 0 wrote beside the checkpoint; other ranks need not see it.
        """
        index = -1
        if self._transport.rank == 0 and path.is_file():
            label = _plan_in(path)
            index = next((i for i, option in enumerate(self._options) if option.label == label), -1)
        index = int(self._probe.table([float(index)])[0][0])
        if index < 0 or (self._options[index] == self._current and not self._is_by_hand):
            return None
        return self.config_of(self._options[index])

    def follow(self, config: HybridEPConfig, runtime: HybridRuntime, reason: str) -> None:
        """Other settings have taken over: what is measured from now on is theirs.

        Planning ends where they are not among those that the planned settings leave open.
        """
        before, option = self._label, self._option_of(config, runtime)
        self._is_by_hand = option is None
        if option is not None:
            self._current = option
        self._num_wins = self.num_quiet_looks = 0
        self._skipped_steps = 1  # the first step ships all weights and makes connections
        self._step_watch.forget()
        self._pulse.take()  # it told of steps under the plan before
        self._budget.replaced_s = None
        if self._is_changing and self._choice is not None:  # else somebody else wanted it, at any time
            self._change_s = time.perf_counter() - self._after_s
            self._budget.note_switch(self._change_s)
            self._budget.replaced_s = self._choice.current_s
        self._is_changing = False
        goes_on = self._config.advanced.replan_interval > 0 and option is not None
        self._next_look = self._num_steps + min(TRIAL_LOOK, self._interval) if goes_on else math.inf
        self.history.append({"step": self._num_steps, "from": before, "to": self._label, "reason": reason})
        self._begin_anew(runtime)

    def _begin_anew(self, runtime: HybridRuntime) -> None:
        self._since = Since(
            calls=sum(watch.calls for watch in self.watches),
            tokens=sum(watch.tokens for watch in self.watches),
            recomputed=sum(watch.recomputed for watch in self.watches),
            rows=sum(stats.rows_sent for stats in runtime.layer_stats.values()),
            row_calls=sum(stats.calls for stats in runtime.layer_stats.values()),
        )

    def _take_measures(self, runtime: HybridRuntime) -> tuple[float | None, float]:
        """Bring the workload up to date.

        Returns:
            The mean over ranks of the median step since the last look, None where there was none; and the seconds of
            all steps since then.  Equal on all ranks.
        """
        since = self._since
        calls = sum(watch.calls for watch in self.watches) - since.calls
        tokens = sum(watch.tokens for watch in self.watches) - since.tokens
        recomputed = sum(watch.recomputed for watch in self.watches) - since.recomputed
        rows = sum(stats.rows_sent for stats in runtime.layer_stats.values()) - since.rows
        row_calls = sum(stats.calls for stats in runtime.layer_stats.values()) - since.row_calls
        own_s = statistics.median(since.step_s) if since.step_s else -1.0
        own_elapsed_s = sum(since.step_s)
        memory = _free_and_working_bytes(self._device, self._num_neighbours)
        measures = [own_s, calls, tokens, recomputed, rows, row_calls, *memory, self._look_s, own_elapsed_s]
        table = self._probe.table(measures)
        step_s, calls, tokens, recomputed, rows, row_calls, *_ = (sum(column) for column in zip(*table, strict=True))
        self._free_bytes = min(row[-4] for row in table)
        if not self._working_bytes:  # later on plans and their changes are in it
            self._working_bytes = max(row[-3] for row in table)
        elapsed_s = max(row[-1] for row in table)
        if step_s > 0:
            look_s = min(row[-2] for row in table)  # of the rank that waited for no other
            steps = min(math.ceil(look_s * len(table) / (LOOK_SHARE * step_s)), MOST_INTERVAL)
            self._interval = max(self._config.advanced.replan_interval, steps)  # the user's own choice may be longer
        if not calls:
            return None, elapsed_s
        tokens_per_rank = max(round(tokens / calls), 1)
        before = self._workload
        if before is None or abs(tokens_per_rank / before.tokens_per_rank - 1) > CHANGE:
            self._chooser.forget()
        self._workload = Workload(
            model=self._model,
            tokens_per_rank=tokens_per_rank,
            micro_steps=max(self._facts.micro_steps(), 1),
            param_bytes=self._param_bytes,
            zero_stage=self._facts.zero_stage,
            is_checkpointed=recomputed > 0,
            capacity_factor=self._facts.capacity_factor,
            trainable_expert_params=self._trainable_params,
            trainable_dense_params=self._facts.trainable_dense_params,
        )
        if row_calls:
            layout = self._current.layout(self._spans, self._config.advanced.prefetch_depth)
            expected = sum(row_counts(layout, self._workload)) if not layout.is_padded else 0.0
            if expected > 0:
                self._row_scale = rows / row_calls / expected
        self._workload = replace(self._workload, row_scale=self._row_scale)
        return (step_s / len(table) if step_s > 0 else None), elapsed_s

    def _job(self) -> Job:
        workload = self._workload
        if workload is None:  # no layer ran yet
            workload = Workload(model=self._model, tokens_per_rank=1, param_bytes=self._param_bytes)
        return Job(
            cluster=self._cluster,
            spans=self._spans,
            workload=workload,
            rates=self._rates,
            prefetch_depth=self._config.advanced.prefetch_depth,
            token_codecs=tuple(
                token_codec(level.row_format, self._model.hidden, self._param_bytes) for level in self._config.levels
            ),
            is_transient=self._config.replicas == "transient",
        )

    @property
    def current(self) -> Option:
        """The option that runs; the last one that ran, while settings given by hand are none."""
        return self._current

    @property
    def _label(self) -> str:
        return "settings given by hand" if self._is_by_hand else self._current.label

    # -- telling ----------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """One line for the log at the start."""
        links = ", ".join(
            f"{level.name} {(level.link.bandwidth_bytes_per_s or math.nan) * 8e-9:.4g} Gbit/s "
            f"{(level.link.latency_s or 0.0) * 1e3:.3g} ms"
            for level in self._cluster.levels
            if level.size > 1
        )
        return (
            f"hybridep: links measured: {links}; {len(self._options)} plans are open, the first choice is made after "
            f"{FIRST_LOOK} optimizer steps"
        )

    def begin_plan(self, runtime: HybridRuntime) -> None:
        """`runtime` is what the plan is carried out by from now on."""
        traffic = runtime.transport.traffic
        self._plan_begin = PlanBegin(self._num_steps, dict(traffic.exposed_s), dict(traffic.sent_bytes))

    def _measured(self, runtime: HybridRuntime) -> dict[str, Any]:
        """Of this rank, per step since the plan began: seconds waited and spent on codecs, bytes of its uplinks."""
        begin, traffic = self._plan_begin, runtime.transport.traffic
        steps = max(self._num_steps - begin.step, 1)
        below = ranks_below(self._cluster)
        sent: list[dict[str, float]] = [{} for _ in self._cluster.levels]
        for (level, kind), num_bytes in traffic.sent_bytes.items():
            mine = num_bytes - begin.sent_bytes.get((level, kind), 0)
            sent[level][kind] = mine * below[level] / steps
        waited = {kind: (s - begin.exposed_s.get(kind, 0.0)) / steps for kind, s in traffic.exposed_s.items()}
        return {
            "steps": self._num_steps - begin.step,
            "waited_s": waited,
            "codec_s": runtime.codec_s / steps,
            "uplink_bytes": sent,
        }

    def record(self, runtime: HybridRuntime) -> dict[str, Any]:
        """The plan, what was predicted of it and what was measured; JSON-able.  Complete on rank 0 only."""
        job = self._job()
        correction = self._chooser.correction_s(self._current)
        prediction = job.predict(self._current)
        choice = self._choice
        return {
            "plan": None if self._is_by_hand else self._current.label,
            "predicted": None if self._is_by_hand else prediction_json(prediction),
            "measured_step_s": None if correction is None or self._is_by_hand else prediction.step_s + correction,
            "measured": self._measured(runtime),
            "workload": {
                "tokens_per_rank": job.workload.tokens_per_rank,
                "micro_steps": job.workload.micro_steps,
                "row_scale": job.workload.row_scale,
                "is_checkpointed": job.workload.is_checkpointed,
            },
            "links": [
                {"name": level.name, **{key: value for key, value in _link_settings(level.link).items()}}
                for level in self._cluster.levels
            ],
            "rates": {
                key: value for key, value in asdict(self._rates).items() if value is not None and math.isfinite(value)
            },
            "reason": self.history[-1]["reason"] if self.history else "the first steps",
            "runner_up": None if choice is None or choice.runner_up is None else choice.runner_up.label,
            "runner_up_s": None if choice is None else choice.runner_up_s,
            "history": list(self.history),
        }

    def close(self) -> None:
        """Drop the connections."""
        self._transport.close()


def name_of(codec: CodecConfig) -> str:
    """Of a codec with its options, for people; different for different settings."""
    options = sorted((key, value) for key, value in codec.spec.items() if key != "type")
    return " ".join([codec.type, *(f"{key} {value}" for key, value in options)])


def _same_of_all(specs: Sequence[LayerSpec]) -> LayerSpec:
    first = specs[0]
    for spec in specs:
        if spec.group_ranks != first.group_ranks or spec.num_experts != first.num_experts:
            raise UnsupportedError(
                f"hybridep plans layers of one expert-parallel group and number of experts, but {spec.name} has "
                f"{spec.num_experts} experts on ranks {list(spec.group_ranks)} and {first.name} {first.num_experts} "
                f'on {list(first.group_ranks)}; write sizes and codecs in place of "auto"'
            )
    return first


def _codecs_to_try(config: HybridEPConfig) -> dict[str, CodecConfig]:
    """Every lossy codec that may be used, by name."""
    fixed = [codec for level in config.levels for codec in (level.weight_codec, level.gradient_codec)]
    wanted = [*config.auto_codecs, *fixed]
    return {name_of(codec): codec for codec in wanted if codec not in (IDENTITY, AUTO_CODEC)}


def _plain(codec: CodecConfig) -> CodecConfig:
    return IDENTITY if codec == AUTO_CODEC else codec


def _same_settings(ours: HybridEPConfig, theirs: HybridEPConfig) -> bool:
    def settings(config: HybridEPConfig) -> Any:
        levels = [
            (level.domain_size, *((level.weight_codec, level.gradient_codec) if level.domain_size != 1 else ()))
            for level in config.levels
        ]
        return levels, [level.row_format for level in config.levels], config.token_exchange, config.dense_sync

    return settings(ours) == settings(theirs)


def _link_settings(link: Link) -> dict[str, Any]:
    bandwidth, latency = link.bandwidth_bytes_per_s, link.latency_s
    return {
        "bandwidth_gbps": None if bandwidth is None else float(f"{bandwidth * 8e-9:.4g}"),
        "latency_ms": None if latency is None else float(f"{latency * 1e3:.4g}"),
    }


def _model_of(specs: Sequence[LayerSpec], facts: JobFacts) -> MoEModel:
    first = specs[0]
    return MoEModel(
        name="this job",
        hidden=first.hidden,
        num_experts=first.num_experts,
        top_k=first.top_k,
        num_moe_layers=len(specs),
        expert_params=expert_params(first),
        dense_params=facts.dense_params,
        active_dense_params=facts.active_dense_params,
    )


def _free_and_working_bytes(device: torch.device, num_neighbours: int) -> tuple[float, float]:
    """Memory that this rank may still take, and by how much more than now it has had at most.

    num_neighbours: ranks on this host, which share its memory; a GPU is taken to be of one rank alone.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - allocated
        return float(torch.cuda.mem_get_info(device)[0] + cached), float(
            torch.cuda.max_memory_allocated(device) - allocated
        )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free_bytes = min(psutil.virtual_memory().available, _left_in_container())
    return free_bytes / num_neighbours, float(max(peak_bytes - psutil.Process().memory_info().rss, 0))


def _left_in_container(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes below this process's memory limit, files read long ago not counted; infinite where there is no limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return math.inf
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return float(int(limit) - int(used) + int(counts["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return math.inf


def _plan_in(path: Path) -> str | None:
    """The plan in the file beside a checkpoint; None where the file is not readable, or the plan was made by hand."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.warning("hybridep: the plan in %s cannot be read, planning goes on from the present one: %s", path, error)
        return None
    return content.get("plan") if isinstance(content, dict) else None
