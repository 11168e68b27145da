# SPDX-License-Identifier: Apache-2.0
"""The states of a layer's experts, and what brings them from one to the next; without any communication."""

from unittest import mock

import pytest
import torch

from ds_hybridep.errors import GradientNotReturnedError
from ds_hybridep.experts import migration
from ds_hybridep.experts.migration import Gradients, LayerExperts, ReturnHandle, Weights
from ds_hybridep.sync.gradients import StepChanges


@pytest.fixture
def layer():
    replicas = mock.Mock(feedback=None, streams=None, layer="moe")
    replicas.take_returned.return_value = ["what came back"]
    with (
        mock.patch.object(migration, "WeightShipment", return_value=mock.Mock()),
        mock.patch.object(migration, "Reduce", side_effect=lambda *_: mock.Mock()),
    ):
        yield LayerExperts(replicas, mock.Mock(), mock.Mock())


def test_weights_are_stale_then_on_their_way_then_fresh(layer: LayerExperts) -> None:
    assert layer.weights is Weights.STALE
    layer.ship(is_exact=True)
    assert layer.weights is Weights.SHIPPING
    layer.weight_pipeline.wait.assert_not_called()  # to ship does not block
    layer.finish_shipment()
    assert layer.weights is Weights.FRESH
    layer.finish_shipment()
    layer.weight_pipeline.wait.assert_called_once()


def test_weights_that_change_while_they_travel_stay_stale(layer: LayerExperts) -> None:
    layer.ship(is_exact=False)
    layer.weights = Weights.STALE
    layer.finish_shipment()
    assert layer.weights is Weights.STALE


def test_gradients_accumulate_return_and_are_gone(layer: LayerExperts) -> None:
    handle = ReturnHandle()
    layer.add_gradients([])
    layer.add_gradients([])
    assert layer.gradients is Gradients.ACCUMULATING
    layer.start_return(handle)
    assert layer.gradients is Gradients.RETURNING
    assert layer.finish_return(handle) == ["what came back"]
    assert layer.gradients is Gradients.EMPTY
    assert layer.finish_return(handle) == ["what came back"]  # for a second node, without another wait
    layer.gradient_pipeline.wait.assert_called_once()


def test_a_layer_that_runs_twice_in_a_backward_finishes_its_first_return_before_it_adds(layer: LayerExperts) -> None:
    first, second = ReturnHandle(), ReturnHandle()
    layer.add_gradients([])
    layer.start_return(first)
    layer.add_gradients([])
    assert (first.collected, layer.gradients) == (["what came back"], Gradients.ACCUMULATING)
    layer.start_return(second)
    assert layer.returning is second


def test_gradients_that_are_dropped_on_their_way_are_taken_in_before_the_next_ones(layer: LayerExperts) -> None:
    layer.add_gradients([])
    layer.start_return(ReturnHandle())
    layer.drop_gradients(is_undone=False)
    assert layer.gradients is Gradients.DROPPED
    layer.replicas.add_gradients.reset_mock()
    layer.add_gradients([])
    layer.gradient_pipeline.wait.assert_called_once()
    assert layer.gradients is Gradients.ACCUMULATING


@pytest.mark.parametrize("is_undone", [False, True])
def test_what_codecs_note_of_dropped_gradients_is_undone_where_the_drop_was(
    layer: LayerExperts, is_undone: bool
) -> None:
    changes, undone = StepChanges(), []
    layer.replicas.feedback = mock.MagicMock()
    layer.replicas.feedback.gradients.changes = changes
    layer.replicas.feedback.gradients.noted.return_value = ["own"]
    layer.add_gradients([])
    layer.start_return(ReturnHandle())
    layer.drop_gradients(is_undone=is_undone)
    changes.note("own", lambda: undone.append("own"))
    changes.note("of another layer", lambda: undone.append("of another layer"))
    layer.finish_dropped()
    assert layer.gradients is Gradients.EMPTY
    assert undone == (["own"] if is_undone else [])
    assert list(changes.notes) == (["of another layer"] if is_undone else ["own", "of another layer"])


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_return_on_its_way_can_still_be_undone(layer: LayerExperts, is_dropped: bool) -> None:
    layer.undo_return()
    assert layer.gradients is Gradients.EMPTY
    layer.add_gradients([])
    layer.undo_return()
    assert layer.gradients is Gradients.ACCUMULATING
    layer.start_return(ReturnHandle())
    if is_dropped:
        layer.drop_gradients(is_undone=False)
    layer.undo_return()
    assert layer.gradients is Gradients.UNDONE
    layer.finish_dropped()
    assert layer.gradients is Gradients.EMPTY


def test_dropping_nothing_touches_nothing(layer: LayerExperts) -> None:
    layer.drop_gradients(is_undone=True)
    assert layer.gradients is Gradients.EMPTY
    layer.replicas.clear_sums.assert_not_called()


def test_a_backward_of_before_a_change_of_plan_is_refused(layer: LayerExperts) -> None:
    version = layer.replicas.version = 3
    layer.refuse_old(version)
    layer.replicas.version = 4
    with pytest.raises(GradientNotReturnedError, match="moe: this backward belongs to a forward that ran before"):
        layer.refuse_old(version)


def test_only_the_first_change_of_a_step_is_undone_and_none_after_an_applied_one() -> None:
    changes, undone, encoder = StepChanges(), [], object()
    changes.note(encoder, lambda: undone.append("first"))
    changes.note(encoder, lambda: undone.append("second"))
    assert encoder in changes
    changes.undo()
    assert undone == ["first"]
    assert encoder not in changes
    changes.note(encoder, lambda: undone.append("third"))
    changes.commit()
    changes.undo()
    assert undone == ["first"]


def test_changes_of_an_earlier_backward_are_undone_and_none_of_the_same() -> None:
    changes, found = StepChanges(), []

    def begin(gradient: torch.Tensor) -> None:
        changes.before_backward(lambda: (found.append("undone"), changes.undo()), found.append, "began")
        changes.note("encoder", lambda: None)

    x = torch.ones(1, requires_grad=True)
    outputs = x * 2, x * 3
    for output in outputs:
        output.register_hook(begin)
    for _ in range(2):  # through the same graph
        sum(outputs).backward(retain_graph=True)
    assert found == ["began", "began", "undone", "began", "began"]
    assert changes.notes


def test_changes_before_the_first_output_belong_to_the_same_backward() -> None:
    changes, found = StepChanges(), []
    x = torch.ones(1, requires_grad=True)
    behind, output = x * 2, x * 3
    output.register_hook(
        lambda gradient: changes.before_backward(lambda: found.append("undone"), found.append, "began")
    )
    total = (behind * output).sum()
    total.register_hook(lambda gradient: changes.note("layer", lambda: None))
    total.backward()
    assert found == ["began"]
    assert changes.notes
