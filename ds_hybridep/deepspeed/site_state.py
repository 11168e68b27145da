# SPDX-License-Identifier: Apache-2.0
"""The training state of an engine that trains together with other sites: handed to a joiner in fragments, compared.

    vector      fp32 weights and what the optimizer keeps of each element: crosses in fragments
    head        everything else: the step, groups, loss scale, schedule, buffers; crosses with the first fragment

16-bit weights do not cross: the next optimizer step makes them of the fp32 ones.  Frozen weights do not cross either:
sites compare them before they train.
"""

import io
from typing import Any, Literal

import torch
from torch import Tensor

from ds_hybridep.deepspeed.engine_view import loss_scale, view_of
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.sites.fragments import StateVector
from ds_hybridep.sites.local_steps import LocalSteps

InsideStep = Literal["", "before", "after"]  # where in `engine.step()` something happens

# What these do to an element depends on this element alone.
ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "CPUAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad",
    "DeepSpeedCPULion", "FusedAdam", "FusedLion", "Lion", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


class SiteState:
    """What one rank of a site has of the training.

    engine: may be a weak proxy; its optimizer exists.

    Raises UnsupportedError for an optimizer whose gradients sites cannot exchange.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self.view = engine, view_of(engine)
        if any(getattr(p, "use_muon", False) for p in engine.module.parameters()):
            raise UnsupportedError(
                "hybridep.sites: Muon changes gradients before sites can average them; choose another optimizer"
            )
        if any(id(parameter) not in self.view.names for parameter in self.view.trained()):
            raise UnsupportedError(
                "hybridep.sites: the optimizer has parameters that are not in the model, such as those of a learned "
                "loss, and sites exchange those of the model; make them a part of it"
            )

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return int(self._engine.global_steps)

    @property
    def loss_scale(self) -> float:
        """The factor that gradients are multiplied by now."""
        return loss_scale(self._engine)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of all parameter groups."""
        return tuple(float(group["lr"]) for group in self._engine.basic_optimizer.param_groups)

    @property
    def num_samples(self) -> int:
        """The samples of one step of this site."""
        return int(self._engine.train_batch_size())

    # -- steps that other sites have made ---------------------------------------------------------------------------

    def take_step(self) -> bool:
        """Take an optimizer step with the averaged gradients that are there, as after a whole accumulation.

        Returns False if it was skipped.
        """
        engine, before = self._engine, self._engine.micro_steps
        engine._take_model_step({})
        engine.micro_steps = before + engine.gradient_accumulation_steps()
        return bool(engine._step_applied)

    def skip_to(self, step: int) -> None:
        """Count steps, and let the schedule take them, whose weights have come from other sites."""
        engine = self._engine
        for _ in range(step - engine.global_steps):
            engine.global_steps += 1
            if engine.lr_scheduler is not None:
                engine.lr_scheduler.step()

    def count_as_if_always_here(self, inside_step: InsideStep) -> None:
        """Set the counters of samples and micro-steps to what this site would have after so many steps.

        inside_step: where in `engine.step()` this is called: before or after the optimizer's step, which is counted.
        """
        engine = self._engine
        num_micro_steps = engine.gradient_accumulation_steps()
        uncounted = {"": 0, "before": num_micro_steps - 1, "after": -1}[inside_step]  # `engine.step()` adds one
        engine.global_samples = engine.global_steps * engine.train_batch_size()
        engine.micro_steps = engine.global_steps * num_micro_steps + uncounted

    # -- the state as a vector and a head ---------------------------------------------------------------------------

    def vector(self, local: LocalSteps | None, *, of_all_sites: bool = False) -> StateVector:
        """Return what this rank owns of the state; the optimizer must have made its own part.

        local: of local steps; then the common weights and the outer momentum are a part, in place of this site's own.
        of_all_sites: only what is equal on all sites: not what the optimizer keeps for local steps.
        """
        base = self._engine.basic_optimizer
        groups = [] if local is None else local.groups()
        for master in () if local is not None and of_all_sites else self.view.masters():
            kept = [one for one in base.state.get(master, {}).values() if _is_like(one, master)]
            if local is None:
                kept.insert(0, master)
            if kept:
                groups.append(kept)
        return StateVector(groups, is_elementwise=type(base).__name__ in ELEMENTWISE)

    def head(self) -> bytes:
        """Return all but the vector."""
        engine, base = self._engine, self._engine.basic_optimizer
        head = {
            "step": engine.global_steps,
            "skipped": engine.skipped_steps,
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in base.param_groups],
            "kept": [
                {
                    key: (str(value.dtype), None) if _is_like(value, master) else ("", value)
                    for key, value in base.state.get(master, {}).items()
                }
                for master in self.view.masters()
            ],
            "scalers": [
                {key: value for key, value in vars(scaler).items() if isinstance(value, int | float)}
                for scaler in self.view.scalers()
            ],
            "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
            "buffers": {name: buffer.detach() for name, buffer in engine.module.named_buffers()},
        }
        stream = io.BytesIO()
        torch.save(head, stream)
        return stream.getvalue()

    def load_head(self, head: bytes) -> None:
        """Take over what `head` returned on another site, in place; make what the optimizer keeps, for the vector."""
        engine, base = self._engine, self._engine.basic_optimizer
        saved = torch.load(io.BytesIO(head), weights_only=True, map_location="cpu")
        for master, kept in zip(self.view.masters(), saved["kept"], strict=True):
            known = base.state[master]
            for key, (dtype, value) in kept.items():
                if dtype:
                    if not _is_like(known.get(key), master):
                        known[key] = torch.zeros_like(master.data, dtype=getattr(torch, dtype.removeprefix("torch.")))
                elif isinstance(known.get(key), Tensor) and isinstance(value, Tensor):
                    known[key].copy_(value)  # others may refer to it
                else:
                    known[key] = value
        for group, options in zip(base.param_groups, saved["groups"], strict=True):
            group.update(options)
        for scaler, numbers in zip(self.view.scalers(), saved["scalers"], strict=True):
            vars(scaler).update(numbers)
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(saved["scheduler"])
        for name, buffer in engine.module.named_buffers():
            buffer.copy_(saved["buffers"][name])
        engine.global_steps, engine.skipped_steps = saved["step"], saved["skipped"]


def _is_like(value: Any, master: Tensor) -> bool:
    """Return True for a tensor with a value for each element of a weight."""
    return isinstance(value, Tensor) and value.shape == master.shape and value.numel() > 1
