# SPDX-License-Identifier: Apache-2.0
"""Plans a running job: one choice after a short warm-up, and a new one after a lasting change of links or work.

    attach    links, experts and codecs are measured; the job begins as DeepSpeed would run it
    choice    the step of every plan is predicted; the best runs a few steps and is measured, until one stays
    watch     steps that become longer or shorter trigger a look, which measures the links; if links or the tokens of
              a call have changed, earlier measurements are forgotten and a new choice starts

A look happens right before the optimizer.  Rank 0 decides and tells the others, so all ranks have the same plan.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ds_hybridep.adaptive.chooser import HORIZON, Chooser, Look
from ds_hybridep.adaptive.meter import JobMeter, PlannedRuntime
from ds_hybridep.adaptive.plans import Job, label_of, open_plans
from ds_hybridep.adaptive.probe import LinkProbe, probe_links
from ds_hybridep.adaptive.pulse import TRIAL_STEPS, WARM_UP_STEPS, Pulse, StepWatch
from ds_hybridep.adaptive.rates import codec_costs, expert_params, measure_experts
from ds_hybridep.config import AUTO, HybridEPConfig
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.layer_spec import LayerSpec, check_experts
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.plan.paste import level_settings
from ds_hybridep.plan.plan import JobPlan, settings_of
from ds_hybridep.plan.workload import Workload
from ds_hybridep.transport.agreement import agree, announcing_failure, together
from ds_hybridep.transport.channels import Transport
from ds_hybridep.transport.job import backends_of, longest_wait_s
from ds_hybridep.transport.job_link import LinkSettings
from ds_hybridep.version import __version__

log = logging.getLogger(__name__)

PROBE_LIMIT_S = 2.0  # for measuring all links at start-up


class JobPlanner:
    """The plan of one attached model; all ranks must make the same calls at the same steps.

    workload: the estimate before any step is measured.
    micro_steps: returns the micro-steps of an optimizer step; called at each look.
    Raises UnsupportedError if layers differ in expert-parallel group or number of experts, AgreementError if ranks
    differ or one fails.
    """

    def __init__(
        self, config: HybridEPConfig, specs: Sequence[LayerSpec], workload: Workload, *, micro_steps: Callable[[], int]
    ) -> None:
        self.history: list[dict[str, Any]] = []
        with announcing_failure():
            spec = _same_of_all(specs)
            spans = Partition.build(config.cluster(), spec.group_ranks, (1,) * len(config.levels)).spans
            levels = zip(config.levels, spans, strict=True)
            if any((span if level.domain_size == AUTO else level.domain_size) != 1 for level, span in levels):
                for one in specs:
                    check_experts(one)
            device = spec.sample.device
            backends = backends_of(config, device)
            link = LinkSettings.of(config)
        generation = agree({"version": __version__, "planned": config.canonical()}, config.timeout_s)
        made = ExitStack()
        with together(config.timeout_s, made.close):
            self._transport = Transport(
                config.cluster(), longest_wait_s(config.timeout_s), generation, backends, link=link
            )
            made.callback(self._transport.close)
            self._probe = LinkProbe(self._transport, device)
            cluster = probe_links(self._probe, limit_s=PROBE_LIMIT_S, only_unknown=True)
            rates = measure_experts(spec, self._probe, cluster)
            job = Job(cluster, workload, rates, codec_costs(config, spec, workload, self._probe))
            plans = open_plans(config, spans, trains_experts=expert_params(spec, trainable_only=True) > 0)
            self._meter = JobMeter(self._probe, job, len(specs), micro_steps)
        self._config = config
        self._chooser = Chooser(plans, HORIZON if config.advanced.replan else math.inf)
        self.current: JobPlan | None = plans[0]  # None while settings given by hand are none of the plans
        self.start_config, self.watches = settings_of(plans[0], config), self._meter.watches
        self._num_steps = 0
        self._next: HybridEPConfig | None = None  # chosen, but not applied yet
        self._change_s = 0.0  # seconds that the last change of plan took, without filling replicas
        self._watch, self._pulse = StepWatch(), Pulse(self._transport)

    @property
    def _label(self) -> str:
        return "settings given by hand" if self.current is None else label_of(self.current)

    def _links(self) -> list[dict[str, Any]]:
        """The levels as they would stand in a "hybridep" block."""
        return [level_settings(level) for level in self._meter.job.cluster.levels]

    @property
    def is_settled(self) -> bool:
        """True if no choice of a plan is under way.  Equal on all ranks."""
        return self._watch.mode != "trial"

    @property
    def reason(self) -> str:
        """Why the last choice was made; complete on rank 0 only."""
        choice = self._chooser.choice
        return "chosen by rank 0" if choice is None else choice.describe()

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def before_step(self, runtime: PlannedRuntime) -> HybridEPConfig | None:
        """Call when gradients are complete.  Returns the settings to use after this step, or None to keep them."""
        entry_s = time.perf_counter()
        self._meter.begin_step()
        self._num_steps += 1
        self._next = self._look(runtime) if self._pulse.take() else None
        self._meter.begin_s += time.perf_counter() - entry_s  # a look is no part of the step
        return self._next

    def after_step(self) -> None:
        """Call right after the optimizer step, before anything is changed."""
        is_due = self._watch.note(self._meter.end_step())
        if self._watch.mode != "off":
            self._pulse.send(is_due)

    def follow(self, config: HybridEPConfig, runtime: PlannedRuntime, reason: str) -> None:
        """Call when other settings have taken over.  Planning stops if their plan is none of the open ones."""
        if config is self._next:  # else the change was not the planner's and may have come at any time
            self._change_s = time.perf_counter() - self._meter.end_s
        before, is_off = self._label, self._watch.mode == "off"
        self.current = runtime.plan if runtime.plan in self._chooser.plans else None
        self.history.append({"step": self._num_steps, "from": before, "to": self._label, "reason": reason})
        self._begin_trial(runtime)
        if self.current is None or (is_off and not self._config.advanced.replan):
            self.hold()

    def choose_anew(self, runtime: PlannedRuntime) -> None:
        """Forget what was measured and choose again after a few steps.  All ranks must call this between two steps."""
        self._chooser.is_open, self._chooser.begin_step = True, None
        self._begin_trial(runtime)

    def hold(self) -> None:
        """Keep the plan until `choose_anew`.  All ranks must call this."""
        self._watch.mode = "off"

    def _begin_trial(self, runtime: PlannedRuntime) -> None:
        self._watch.try_plan(skipped=1)  # the first step sends all weights and makes connections
        self._pulse.take()  # drop the bit, which is about earlier steps
        self._meter.begin(runtime, self._num_steps)

    def _look(self, runtime: PlannedRuntime) -> HybridEPConfig | None:
        """Measure, and let rank 0 decide."""
        current = best = self.current
        before, was_settled = self._meter.job, self.is_settled
        measured_s = self._meter.measure(runtime, current, self._watch.step_s)
        if measured_s is None or current is None or best is None:
            self._watch.try_plan()
            return None
        is_over = False
        if self._transport.rank == 0:
            look = Look(
                step=self._num_steps, step_s=measured_s, before=before, job=self._meter.job, was_settled=was_settled,
                change_s=self._change_s, fits=partial(self._meter.has_room, current),
            )  # fmt: skip
            best, is_over = self._chooser.look(current, look)
        index, stays = self._probe.table([float(self._chooser.plans.index(best)), float(is_over)])[0]
        chosen = self._chooser.plans[int(index)]
        if chosen != current:
            return settings_of(chosen, self._config)
        if not stays:
            self._watch.try_plan()
        elif self._config.advanced.replan:
            self._watch.mode = "settled"
        else:  # it was the only choice
            self.hold()
        return None

    # -- checkpoints and records ------------------------------------------------------------------------------------

    def recall(self, path: Path) -> HybridEPConfig | None:
        """The settings in the file that rank 0 wrote beside a checkpoint; None if they are the current ones.

        All ranks must call this; only rank 0 reads the file.
        """
        saved = _plan_in(path) if self._transport.rank == 0 else None
        index = next((at for at, plan in enumerate(self._chooser.plans) if plan.to_json() == saved), -1)
        index = int(self._probe.table([float(index)])[0][0])
        if index < 0 or self._chooser.plans[index] == self.current:
            return None
        return settings_of(self._chooser.plans[index], self._config)

    def describe(self) -> str:
        """One line for the log at the start."""
        links = ", ".join(
            f"{link['name']} {link.get('bandwidth_gbps')} Gbit/s {link.get('latency_ms')} ms" for link in self._links()
        )
        return (
            f"hybridep: links: {links}; {len(self._chooser.plans)} plans are open, the first choice is made after "
            f"{WARM_UP_STEPS + TRIAL_STEPS + 1} optimizer steps"
        )

    def record(self, runtime: PlannedRuntime) -> dict[str, Any]:
        """The plan, its predictions and its measurements as JSON values.  Complete on rank 0 only."""
        job, plan, choice, prediction = self._meter.job, self.current, self._chooser.choice, None
        if plan is not None:
            predicted = job.predict(plan)
            prediction = {"step_s": predicted.step_s, "terms_s": predicted.terms_s}
        workload = ("tokens_per_rank", "micro_steps", "row_scale", "is_checkpointed")
        return {
            "plan": None if plan is None else label_of(plan),
            "decisions": None if plan is None else plan.to_json(),
            "predicted": prediction,
            "measured_step_s": None if plan is None else self._watch.step_s,
            "measured": self._meter.since_begin(runtime, self._num_steps),
            "workload": {key: getattr(job.workload, key) for key in workload},
            "links": self._links(),
            "reason": self.history[-1]["reason"] if self.history else "the first steps",
            "runner_up": label_of(choice.runner_up) if choice is not None and choice.runner_up is not None else None,
            "runner_up_s": None if choice is None else choice.runner_up_s,
            "history": list(self.history),
        }

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


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


def _plan_in(path: Path) -> dict[str, Any] | None:
    """The plan in the file beside a checkpoint; None if it cannot be read or the settings were given by hand."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        plan = content["decisions"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning(
            "hybridep: the plan in %s cannot be read (%s), or an earlier version wrote it; planning goes on from the "
            "present one",
            path,
            repr(error),
        )
        return None
    return plan if isinstance(plan, dict) else None
