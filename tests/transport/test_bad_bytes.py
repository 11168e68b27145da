# SPDX-License-Identifier: Apache-2.0
"""Messages that no healthy rank sends: refused with the name of the sender and the layer, before memory is taken."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ds_hybridep
from ds_hybridep.codecs import PatchCodec
from ds_hybridep.errors import CommunicationError
from ds_hybridep.kernels import load_kernels
from ds_hybridep.sync.mirrors import PatchReplica, PatchSender
from ds_hybridep.sync.transfers import Gather
from ds_hybridep.tokens import exchange as rows
from ds_hybridep.transport.channels import Purpose

HIDDEN, TOP_K = 4, 2


def exchange_of(layer: str = "blocks.1.moe", generation: int = 3) -> rows.Exchange:
    """Rank 5's, with rank 7."""
    channel = SimpleNamespace(transport=SimpleNamespace(generation=generation))
    places = torch.zeros(2, dtype=torch.int32)
    return rows.Exchange(layer, (5, 7), 0, places, channel, load_kernels("reference"), (None,) * 2, [8, 8], [8, 8])


PARTS = [(torch.zeros(0, 2 * TOP_K, dtype=torch.int32), torch.zeros(0, HIDDEN))] * 2


def message_of(num_rows: int, num_tokens: int, exchange: rows.Exchange) -> torch.Tensor:
    header = rows.header_of(num_rows, num_tokens, rows._stamp(exchange, PARTS[1]))
    return torch.frombuffer(bytearray(header) + bytearray(64), dtype=torch.uint8)


@given(st.integers(0, 2**31 - 1), st.data())
def test_a_header_says_the_number_of_rows(num_tokens, data):
    num_rows = data.draw(st.integers(0, num_tokens))
    exchange = exchange_of()
    assert rows.row_counts(exchange, [message_of(num_rows, num_tokens, exchange)], PARTS) == [num_rows]


@given(st.integers(0, 100), st.lists(st.tuples(st.integers(0, 15), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_damaged_header_is_refused_before_memory_is_taken(num_rows, changes):
    exchange = exchange_of()
    message = message_of(num_rows, 100, exchange)
    whole = message.clone()
    for place, change in changes:
        message[place] ^= change
    if torch.equal(message, whole):
        return
    with mock.patch.object(torch, "empty", side_effect=AssertionError("memory is taken")):
        with pytest.raises(CommunicationError, match=r"rank 5: a dispatch of blocks.1.moe from rank 7 has a header"):
            rows.row_counts(exchange, [message], PARTS)


@pytest.mark.parametrize(
    ("sender", "num_rows", "what"),
    [
        (exchange_of(), 101, "it says 101 rows of 100 tokens"),
        (exchange_of(), -1, "it says -1 rows of 100 tokens"),
        (exchange_of("blocks.0.moe"), 3, "of another layer, plan or type"),
        (exchange_of(generation=4), 3, "of another layer, plan or type"),
    ],
)
def test_a_header_that_cannot_be_right_is_refused(sender, num_rows, what):
    with pytest.raises(CommunicationError, match=f"from rank 7 .*{re.escape(what)}"):
        rows.row_counts(exchange_of(), [message_of(num_rows, 100, sender)], PARTS)


# -- packets ----------------------------------------------------------------------------------------------------


def gather_of(replica: PatchReplica, message: torch.Tensor) -> Gather:
    """A gather into which rank 7 has sent `message` for slot 1."""
    slots = SimpleNamespace(codecs=mock.MagicMock(), stages=(), own_slot=0, streams=None)
    purpose = Purpose("expert_weights", "gather of weights", "blocks.1.moe")
    gather = Gather(slots, purpose, {}, {1: replica}, is_exact=False)
    gather._fresh, gather._arrived = [(1, 7)], {1: [message]}
    return gather


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=3), st.integers(0, 40), st.booleans())
def test_a_patch_that_was_changed_is_refused_and_its_sender_named(changes, cut, is_of_other_step):
    old = torch.linspace(-1, 1, 300).bfloat16()
    new = old + torch.arange(300).remainder(7).eq(0).bfloat16() * 0.01
    sender = PatchSender(PatchCodec(kernels="reference"), [old.clone()], step=int(is_of_other_step))
    whole = sender.encode([new])[0]
    message = whole.clone()
    for place, change in changes:
        message[place % len(message)] ^= change
    message = message[: len(message) - cut] if cut else message
    held = old.clone()
    gather = gather_of(PatchReplica(PatchCodec(kernels="reference"), [held]), message)
    if torch.equal(message, whole) and not is_of_other_step:
        gather._finish_stage()
        assert torch.equal(held, new)
        return
    with pytest.raises(CommunicationError, match="gather of weights of blocks.1.moe from rank 7: "):
        gather._finish_stage()


def test_nothing_from_the_network_or_from_files_is_unpickled():
    """torch.load takes tensors and plain values alone, and nothing else in the package reads pickles.

    The reader of exports brings an unpickler of its own, which builds stand-ins: tests/export/test_export_errors.py
    shows that no code of a file runs.
    """
    package = Path(ds_hybridep.__file__).parent
    for path in package.rglob("*.py"):
        text, is_reader = path.read_text(), path == package / "export" / "stored.py"
        if not is_reader:
            assert not re.search(r"^\s*(import|from) (pickle|marshal|dill|cloudpickle)\b", text, re.MULTILINE), path
        for call in re.findall(r"torch\.load\((.*)\)", text):
            assert ("pickle_module=pickle_module" if is_reader else "weights_only=True") in call, path
        assert not re.search(r"(broadcast|gather|scatter|all_gather|send|recv)_object", text), path
