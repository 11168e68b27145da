# SPDX-License-Identifier: Apache-2.0
"""The states of a layer's experts, and what brings them from one to the next; without any communication."""

from unittest import mock

import pytest

from ds_hybridep.errors import GradientNotReturnedError
from ds_hybridep.experts import migration
from ds_hybridep.experts.migration import Gradients, LayerExperts, ReturnHandle, Weights


@pytest.fixture
def layer():
    replicas = mock.Mock(codecs=None, streams=None)
    replicas.name = "moe"  # not an argument: that would name the mock
    replicas.take_returned.return_value = ["what came back"]
    with (
        mock.patch.object(migration, "make_shipment", return_value=mock.Mock()),
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


def test_gradients_that_are_dropped_on_their_way_are_taken_in_first(layer: LayerExperts) -> None:
    handle = ReturnHandle()
    layer.add_gradients([])
    layer.start_return(handle)
    under_way = handle.reduce
    layer.drop_gradients()
    layer.gradient_pipeline.wait.assert_called_once_with(under_way)
    assert (layer.gradients, layer.returning) == (Gradients.EMPTY, None)
    assert (handle.reduce, handle.collected) == (None, None)  # nothing is kept for a graph that may live on


def test_gradients_that_are_dropped_before_they_leave_need_no_wait(layer: LayerExperts) -> None:
    layer.add_gradients([])
    layer.drop_gradients()
    layer.gradient_pipeline.wait.assert_not_called()
    layer.replicas.drop_all_sums.assert_called_once()
    assert layer.gradients is Gradients.EMPTY


def test_dropping_nothing_touches_nothing(layer: LayerExperts) -> None:
    layer.drop_gradients()
    assert layer.gradients is Gradients.EMPTY
    layer.replicas.drop_all_sums.assert_not_called()


def test_a_backward_of_before_a_change_of_plan_is_refused(layer: LayerExperts) -> None:
    version = layer.replicas.version = 3
    layer.refuse_old(version)
    layer.replicas.version = 4
    with pytest.raises(GradientNotReturnedError, match="moe: this backward belongs to a forward that ran before"):
        layer.refuse_old(version)
