# SPDX-License-Identifier: Apache-2.0
"""The training state of an engine that trains together with other sites: taken, compared and handed on as a whole."""

import hashlib
import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.deepspeed.engine_view import loss_scale, view_of
from ds_hybridep.errors import UnsupportedError

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


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

    # -- steps that other sites have made ---------------------------------------------------------------------------

    def take_step(self) -> None:
        """Take an optimizer step with the averaged gradients that are there, as after a whole accumulation."""
        engine, before = self._engine, self._engine.micro_steps
        engine._take_model_step({})
        engine.micro_steps = before + engine.gradient_accumulation_steps()

    def skip_to(self, step: int) -> None:
        """Count steps, and let the schedule take them, whose weights have come from other sites."""
        engine = self._engine
        for _ in range(step - engine.global_steps):
            engine.global_steps += 1
            engine.global_samples += engine.train_batch_size()
            engine.micro_steps += engine.gradient_accumulation_steps()
            if engine.lr_scheduler is not None:
                engine.lr_scheduler.step()

    def begin_accumulation(self, *, is_made: bool) -> None:
        """Let the next micro-step be the first of a step; the state may have been taken after some.

        is_made: the step in which it was taken is behind this site; False: this site makes it.
        """
        num_micro_steps = self._engine.gradient_accumulation_steps()
        extra = self._engine.micro_steps % num_micro_steps
        self._engine.micro_steps += -extra % num_micro_steps if is_made else -extra

    # -- the whole state --------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters that this rank holds, by name; under ZeRO 3 its partitions."""
        named: dict[str, Any] = dict(self._engine.module.named_parameters())
        return {name: getattr(parameter, "ds_tensor", parameter).detach() for name, parameter in named.items()}

    def _weights_and_buffers(self) -> dict[str, Tensor]:
        """Return parameters and buffers.  Buffers may differ between sites, for example counts of tokens."""
        buffers = dict(self._engine.module.named_buffers())
        return self.weights() | {f"buffer {name}": buffer.detach() for name, buffer in buffers.items()}

    def capture(self, more: Any = None) -> bytes:
        """Return weights, optimizer, loss scale, schedule, counters, and `more`."""
        engine, base, masters = self._engine, self._engine.basic_optimizer, self.view.masters()
        state = {
            "weights": self._weights_and_buffers(),
            "masters": [master.data for master in masters],
            "optimizer": [
                {
                    key: (value, isinstance(value, Tensor) and value.device == master.device)
                    for key, value in base.state.get(master, {}).items()
                }
                for master in masters
            ],
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in base.param_groups],
            "scalers": [
                {key: value for key, value in vars(scaler).items() if isinstance(value, int | float)}
                for scaler in self.view.scalers()
            ],
            "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
            "more": more,
            "counters": {name: getattr(engine, name) for name in COUNTERS},
        }
        stream = io.BytesIO()
        torch.save(state, stream)
        return stream.getvalue()

    def restore(self, state: bytes) -> Any:
        """Load what `capture` returned on another site, in place, and return `more`; all ranks must call."""
        saved = torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")  # a device may not hold it twice
        for name, tensor in self._weights_and_buffers().items():
            tensor.copy_(saved["weights"][name])
        self.view.gather_weights()
        engine, base = self._engine, self._engine.basic_optimizer
        for master, value, kept in zip(self.view.masters(), saved["masters"], saved["optimizer"], strict=True):
            master.data.copy_(value)
            known = base.state[master]
            for key, (one, follows) in kept.items():
                if isinstance(known.get(key), Tensor) and isinstance(one, Tensor):
                    known[key].copy_(one)  # others may refer to it
                else:
                    known[key] = one.to(master.device) if follows else one
        for group, options in zip(base.param_groups, saved["groups"], strict=True):
            group.update(options)
        for scaler, numbers in zip(self.view.scalers(), saved["scalers"], strict=True):
            vars(scaler).update(numbers)
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(saved["scheduler"])
        for name, value in saved["counters"].items():
            setattr(engine, name, value)
        return saved["more"]


def hash_of(tensors: Iterable[Tensor], step: int) -> bytes:
    """Return a hash of tensors and a step number, of 8 bytes."""
    digest = hashlib.blake2b(str(step).encode(), digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).view(dtype=torch.uint8).cpu().numpy().tobytes())
    return digest.digest()
