# SPDX-License-Identifier: Apache-2.0
"""Headers, and the order in which packets are applied."""

import pytest
import torch
from codec_cases import normal
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.codecs import PacketOrder, make_codec, sequence_of
from ds_hybridep.errors import PacketError


def packets_of(sequence, spec="int8", shape=(2, 8, 16)):
    codec = make_codec(spec)
    state = codec.new_state(*shape)
    state.step = sequence
    return codec.encode(normal(*shape), state)


def test_header_layout():
    packets = packets_of(0x01020304)
    assert packets[0, :4].tolist() == [0x9D, 1, 1, 0]
    assert packets[0, 4:8].tolist() == [8, 0, 0, 0]  # bits of int8
    assert packets[0, 8:12].tolist() == [4, 3, 2, 1]
    assert torch.equal(packets[0, :16], packets[1, :16])


@given(start=st.integers(0, 2**32 - 1), arrivals=st.lists(st.integers(-3, 3), max_size=40))
def test_each_packet_comes_once_and_in_order(start, arrivals):
    order, applied = PacketOrder(start), 0
    for offset in arrivals:
        packets = torch.zeros(1, 16, dtype=torch.uint8)
        packets.view(torch.int32)[0, 2] = (start + applied + offset + 2**31) % 2**32 - 2**31
        if offset:
            with pytest.raises(PacketError, match="one before it was lost, or it came twice"):
                order.check(packets)
        else:
            order.check(packets)
            order.advance()
            applied += 1
    assert order.expected == (start + applied) % 2**32


def test_packets_of_different_steps_are_refused():
    mixed = torch.cat([packets_of(3)[:1], packets_of(4)[:1]])
    with pytest.raises(PacketError, match=r"sequence numbers \[3, 4\].*decode the packets of one step together"):
        sequence_of(mixed)


def test_a_lost_packet_is_named():
    with pytest.raises(PacketError, match="has sequence number 7, wanted 5: one before it was lost.*last checkpoint"):
        PacketOrder(5).check(packets_of(7))


def test_packets_of_other_settings_are_refused():
    packets = packets_of(0, {"type": "int4", "block": 16}, (2, 8, 16))
    with pytest.raises(
        PacketError, match=r"packets: got .* wanted .*int4\(block=32\).*encode and decode with equal settings"
    ):
        make_codec({"type": "int4", "block": 32}).decode(packets, torch.empty(2, 8, 16))


def test_packets_of_another_shape_of_equal_size_are_refused():
    packets = packets_of(0, "int8", (2, 8, 16))
    with pytest.raises(PacketError, match="stamp 0x.*wanted.*for int8.*equal codec settings and shapes"):
        make_codec("int8").decode(packets, torch.empty(2, 16, 8))
