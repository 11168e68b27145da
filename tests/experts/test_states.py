# SPDX-License-Identifier: Apache-2.0
"""The states of a layer's weights and gradients, and what brings them from one to the next; nothing communicates."""

from unittest import mock

import pytest

from ds_hybridep.errors import GradientNotReturnedError
from ds_hybridep.experts import gradient_return, migration
from ds_hybridep.experts.gradient_return import GradientReturn, ReturnHandle, ReturnState
from ds_hybridep.experts.migration import LayerExperts, Weights


@pytest.fixture
def layer():
    replicas = mock.Mock(codecs=None, streams=None, counting_wait=mock.MagicMock())
    replicas.name = "moe"  # not an argument: that would name the mock
    sums = mock.Mock()
    sums.pop_returned.return_value = ["what came back"]
    with (
        mock.patch.object(migration, "make_shipment", return_value=mock.Mock()),
        mock.patch.object(gradient_return, "Reduce", side_effect=lambda *_: mock.Mock()),
        mock.patch.object(gradient_return, "GradientSums", return_value=sums),
    ):
        yield LayerExperts(replicas, mock.Mock(), GradientReturn(replicas, mock.Mock(), lambda: True))


@pytest.fixture
def gradients(layer: LayerExperts) -> GradientReturn:
    return layer.gradients


def test_weights_are_stale_then_on_their_way_then_fresh(layer: LayerExperts) -> None:
    assert layer.weights is Weights.STALE
    layer.ship(is_exact=True)
    assert layer.weights is Weights.SHIPPING
    layer.pipeline.wait.assert_not_called()  # to ship does not block
    layer.finish_shipment()
    assert layer.weights is Weights.FRESH
    layer.finish_shipment()
    layer.pipeline.wait.assert_called_once()


def test_weights_that_change_while_they_travel_stay_stale(layer: LayerExperts) -> None:
    layer.ship(is_exact=False)
    layer.weights = Weights.STALE
    layer.finish_shipment()
    assert layer.weights is Weights.STALE


def test_gradients_accumulate_return_and_are_gone(gradients: GradientReturn) -> None:
    handle = ReturnHandle()
    gradients.add([])
    gradients.add([])
    assert gradients.state is ReturnState.ACCUMULATING
    gradients.start(handle)
    assert gradients.state is ReturnState.RETURNING
    assert gradients.finish(handle) == ["what came back"]
    assert gradients.state is ReturnState.EMPTY
    assert gradients.finish(handle) == ["what came back"]  # for a second node, without another wait
    gradients.pipeline.wait.assert_called_once()


def test_a_layer_that_runs_twice_in_a_backward_finishes_its_first_return_before_it_adds(
    gradients: GradientReturn,
) -> None:
    first, second = ReturnHandle(), ReturnHandle()
    gradients.add([])
    gradients.start(first)
    gradients.add([])
    assert (first.returned, gradients.state) == (["what came back"], ReturnState.ACCUMULATING)
    gradients.start(second)
    assert gradients.returning is second


def test_gradients_that_are_dropped_on_their_way_are_taken_in_first(gradients: GradientReturn) -> None:
    handle = ReturnHandle()
    gradients.add([])
    gradients.start(handle)
    under_way = handle.reduce
    gradients.drop()
    gradients.pipeline.wait.assert_called_once_with(under_way)
    assert (gradients.state, gradients.returning) == (ReturnState.EMPTY, None)
    assert (handle.reduce, handle.returned) == (None, None)  # nothing is kept for a graph that may live on


def test_gradients_that_are_dropped_before_they_leave_need_no_wait(gradients: GradientReturn) -> None:
    gradients.add([])
    gradients.drop()
    gradients.pipeline.wait.assert_not_called()
    gradients.sums.drop_all.assert_called_once()
    assert gradients.state is ReturnState.EMPTY


def test_dropping_nothing_touches_nothing(gradients: GradientReturn) -> None:
    gradients.drop()
    assert gradients.state is ReturnState.EMPTY
    gradients.sums.drop_all.assert_not_called()


def test_a_backward_of_before_a_change_of_plan_is_refused(gradients: GradientReturn) -> None:
    version = gradients.replicas.version = 3
    gradients.refuse_old(version)
    gradients.replicas.version = 4
    with pytest.raises(GradientNotReturnedError, match="moe: this backward belongs to a forward that ran before"):
        gradients.refuse_old(version)
