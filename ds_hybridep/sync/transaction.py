# SPDX-License-Identifier: Apache-2.0
"""The transaction of an optimizer step: what was kept for it is made final if the step is applied, else undone.

join      whoever keeps something from step to step joins before it changes it
commit    the step is applied: all changes stay
undo      the step is skipped, or its gradients are dropped: everybody has again what the last applied step left

Gradients of a backward that no step uses must not join: `accumulates` tells them.
"""

from typing import Protocol

import torch
from torch import Tensor


class Participant(Protocol):
    """One that can join.  What it had when it joined is what `undo` brings back."""

    def commit(self) -> None: ...

    def undo(self) -> None: ...


class Transaction:
    """The optimizer step under way, shared by all that its fate decides about."""

    def __init__(self) -> None:
        self._participants: dict[Participant, None] = {}  # in the order in which they joined
        self._backward = -1  # autograd's number of the backward in which the first one joined

    def __contains__(self, participant: Participant) -> bool:
        return participant in self._participants

    def __len__(self) -> int:
        return len(self._participants)

    def join(self, participant: Participant) -> None:
        """Call before each change; only the first call in a step counts."""
        if not self._participants:
            self._backward = torch._C._current_graph_task_id()
        self._participants.setdefault(participant)

    def commit(self) -> None:
        """Make all changes final: the optimizer step is being applied."""
        for participant in self._participants:
            participant.commit()
        self._participants.clear()

    def undo(self) -> None:
        """Undo all changes: the optimizer step was skipped, or its gradients were dropped."""
        for participant in self._participants:
            participant.undo()
        self._participants.clear()

    def is_of_an_earlier_backward(self) -> bool:
        """Return True, in a backward, if somebody joined in an earlier one."""
        # Numbers grow, so a backward inside another one, as re-entrant checkpointing has it, is no earlier one.
        return bool(self._participants) and self._backward < torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """True inside a running backward: a forward that runs there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def accumulates(leaf: Tensor) -> bool:
    """Return True if the running backward, inside which it is called, adds to `leaf.grad`, which a step will use.

    False if `torch.autograd.grad` returns the gradient of this leaf instead, or if it is not one of `inputs`.

    leaf: a tensor without history.
    """
    if not leaf.requires_grad:  # since the forward
        return False
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch has no answer for a leaf whose gradient is returned
        return False
