# SPDX-License-Identifier: Apache-2.0
"""What a rank sends: rows to destinations of several formats, with one read of each token for a format."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_refs import payload, routes

from ds_hybridep.kernels import load_kernels
from ds_hybridep.tokens.exchange import Exchange, _outgoing, _rows_among

reference = load_kernels("reference")


def test_rows_among_some_destinations_as_documented():
    plan = reference.plan_routes(
        torch.tensor([[1, 0], [0, 2]], dtype=torch.int32), torch.arange(3, dtype=torch.int32), 3
    )
    assert plan.first_slot_to_row.tolist() == [[2, 0], [1, 3]]
    assert _rows_among(plan, plan.rows_per_destination, (True, False, True)).tolist() == [[-1, 0], [1, 2]]


@pytest.mark.parametrize("kind", ["reference", "compiled"])
@given(arguments=routes(), data=st.data())
def test_each_destination_gets_its_rows_in_its_format(kind, arguments, data):
    kernels = mock.Mock(wraps=load_kernels(kind))
    plan = reference.plan_routes(*arguments)
    (num_tokens, top_k), num_destinations = arguments[0].shape, arguments[2]
    any_format = st.sampled_from([None, "int8", "fp8"])
    formats = data.draw(st.lists(any_format, min_size=num_destinations, max_size=num_destinations))
    x, weights = payload(num_tokens, 130), payload(num_tokens, top_k, salt=1)
    exchange = mock.Mock(spec=Exchange, kernels=kernels, row_formats=tuple(formats))
    parts = _outgoing(exchange, plan, x, weights)
    assert kernels.dispatch_rows.call_count == (None in formats)
    assert kernels.quantise_rows.call_count == len({*formats} - {None})
    tokens_of = plan.row_to_token.split_with_sizes(plan.rows_per_destination)
    for (metadata, rows), tokens, row_format in zip(parts, tokens_of, formats, strict=True):
        wanted = x[tokens]
        if row_format is not None:
            wanted = reference.quantise_rows(wanted, torch.arange(len(wanted))[:, None], len(wanted), row_format)
        assert torch.equal(rows, wanted)
        assert torch.equal(metadata[:, top_k:], weights[tokens].view(torch.int32))
