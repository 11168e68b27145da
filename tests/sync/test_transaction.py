# SPDX-License-Identifier: Apache-2.0
"""What a step's fate does to those who joined its transaction."""

import torch

from ds_hybridep.sync.transaction import Transaction


class Participant:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def commit(self) -> None:
        self.seen.append("commit")

    def undo(self) -> None:
        self.seen.append("undo")


def test_who_joined_hears_once_what_became_of_the_step() -> None:
    transaction, participant = Transaction(), Participant()
    transaction.join(participant)
    transaction.join(participant)
    assert participant in transaction
    transaction.undo()
    assert participant.seen == ["undo"]
    assert participant not in transaction
    transaction.join(participant)
    transaction.commit()
    transaction.undo()
    assert participant.seen == ["undo", "commit"]


def test_changes_of_an_earlier_backward_are_undone_and_none_of_the_same() -> None:
    transaction, found = Transaction(), []

    def begin(gradient: torch.Tensor) -> None:
        if transaction.is_of_an_earlier_backward():
            found.append("undone")
            transaction.undo()
        found.append("began")
        transaction.join(participant)

    participant, x = Participant(), torch.ones(1, requires_grad=True)
    outputs = x * 2, x * 3
    for output in outputs:
        output.register_hook(begin)
    for _ in range(2):  # through the same graph
        sum(outputs).backward(retain_graph=True)
    assert found == ["began", "began", "undone", "began", "began"]
    assert len(transaction) == 1


def test_changes_before_the_first_output_belong_to_the_same_backward() -> None:
    transaction, found = Transaction(), []
    x = torch.ones(1, requires_grad=True)
    behind, output = x * 2, x * 3
    output.register_hook(lambda gradient: found.append(transaction.is_of_an_earlier_backward()))
    total = (behind * output).sum()
    total.register_hook(lambda gradient: transaction.join(Participant()))
    total.backward()
    assert found == [False]
    assert len(transaction) == 1
