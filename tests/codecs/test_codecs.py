# SPDX-License-Identifier: Apache-2.0
"""What every codec promises: sizes, replicas, residuals, states, and what inf and nan do."""

import pickle

import pytest
import torch
from codec_cases import SHAPES, SPECS, assert_same_bits, make_codec, normal, settings_of, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hybridep.codecs import PacketOrder
from ds_hybridep.codecs.blockwise import to_blocks
from ds_hybridep.codecs.packet import header_words, non_finite
from ds_hybridep.errors import PacketError
from ds_hybridep.geometry.packets import HEADER_BYTES

pytestmark = pytest.mark.timeout(1500)  # the first test compiles the kernels where no cached build exists


@pytest.fixture(params=SPECS)
def codec(request):
    return make_codec(SPECS[request.param])


def decoded(codec, packets, like):
    return codec.decode(packets, torch.empty_like(like))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packets_are_as_long_as_promised(codec, shape):
    n, rows, cols = shape
    state = codec.new_state(*shape)
    for step in range(5):
        packets = codec.encode(normal(*shape, seed=step), state)
        assert packets.shape == (n, codec.packet_bytes(rows, cols))
        assert packets.shape[1] % 2 == 0
        assert decoded(codec, packets, normal(*shape)).isfinite().all()


def test_ratio_counts_every_byte(codec):
    last = codec.packet_bytes(48, 80)
    assert last > HEADER_BYTES


@settings(max_examples=25)
@given(x=tensors())
@pytest.mark.parametrize("name", SPECS)
def test_one_encoding_never_adds_error(name, x):
    codec = make_codec(SPECS[name])
    packets = codec.encode(x, codec.new_state(*x.shape))
    left = x.double() - decoded(codec, packets, x).double()
    before, after = (value.square().sum(dim=(1, 2)).sqrt() for value in (x.double(), left))
    # Rounded factors of a low rank matrix can leave a little more than there was where they capture nothing.
    assert (after <= before * 1.02 + 1e-30).all()


@settings(max_examples=5)
@given(x=tensors())
@pytest.mark.parametrize("name", SPECS)
def test_feedback_delivers_in_the_end(name, x):
    """A mirror of weights that stand still comes ever closer to them."""
    codec = make_codec(SPECS[name])
    mirror, state = torch.zeros_like(x), codec.new_state(*x.shape)
    for _ in range(66):  # low_rank finds a direction that Q is orthogonal to when Q starts anew, before the 64th
        codec.encode_update(x, mirror, state)
    size = x.double().norm()
    left = (x.double() - mirror.double()).norm()
    assert left <= 0.6 * size + 1e-30


@pytest.mark.parametrize("shape", [(2, 24, 40), (3, 1, 70)], ids=str)
def test_replica_equals_mirror_after_many_steps_and_lost_and_repeated_packets_are_found(codec, shape):
    weights = normal(*shape)
    mirror, state = weights.clone(), codec.new_state(*shape)
    replica, order = mirror.clone(), PacketOrder()
    lost = []  # what the link has not delivered yet
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        weights += normal(*shape, seed=step) * 0.01
        lost.append(codec.encode_update(weights, mirror, state))
        if torch.rand((), generator=generator) < 0.3:
            continue  # this one is late
        if len(lost) > 1:
            with pytest.raises(PacketError, match="one before it was lost, or it came twice"):
                order.check(lost[-1])
        for packets in lost:
            order.check(packets)
            codec.decode_add(packets, replica)
            order.advance()
            with pytest.raises(PacketError, match="one before it was lost, or it came twice"):
                order.check(packets)
        lost.clear()
        assert_same_bits(replica, mirror)
    assert order.expected + len(lost) == 100


@pytest.mark.parametrize("shape", [(2, 24, 40), (3, 1, 70)], ids=str)
def test_residual_is_exactly_what_the_packet_leaves_out(codec, shape):
    """With sums of few bits no addition rounds, and delivered + left equals what was to be sent."""
    residual, state = torch.zeros(shape), codec.new_state(*shape)
    for step in range(5):
        x = torch.round(normal(*shape, seed=step) * 8)
        total = x + residual
        packets = codec.encode_with_residual(x, residual, state)
        assert_same_bits(residual, total - decoded(codec, packets, x))


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_feedback_conserves_integer_sums_exactly(name):
    """Scales of powers of two and inputs of few bits: nothing rounds over many steps, so nothing may be lost."""
    codec = make_codec(SPECS[name])
    shape = (2, 4, 256)
    residual, state = torch.zeros(shape, dtype=torch.float32), codec.new_state(*shape)
    sent, delivered = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for step in range(20):
        x = normal(*shape, seed=step).sign() * 2.0
        packets = codec.encode_with_residual(x, residual, state)
        sent += x.double()
        delivered += decoded(codec, packets, x).double()
        # bf16 scales have 8 bits and codes 7, so a value has 15; 24 hold it beside the residual unless they part far.
        left = residual.double()
        assert ((sent - delivered - left).abs() <= 20 * 2.0**-22 * (sent.abs() + left.abs() + 4)).all()


@pytest.mark.parametrize("shape", [(4, 24, 40), (5, 1, 70)], ids=str)
def test_decoding_does_not_depend_on_batch_alignment_or_threads(codec, shape):
    n, rows, cols = shape
    mirror, state = normal(*shape, seed=3), codec.new_state(*shape)
    threads = torch.get_num_threads()
    for step in range(3):
        before = mirror.clone()
        packets = codec.encode_update(normal(*shape, seed=step), mirror, state)
        memory = torch.empty(n * rows * cols + 1)[1:].view(shape)  # off the alignment of 16 bytes
        memory.copy_(before)
        torch.set_num_threads(3)
        codec.decode_add(packets, memory)
        torch.set_num_threads(threads)
        assert_same_bits(memory, mirror)
        for idx in range(n):
            alone = before[idx : idx + 1].clone()
            codec.decode_add(packets[idx : idx + 1], alone)
            assert_same_bits(alone[0], mirror[idx])


def test_encoding_does_not_depend_on_the_batch(codec):
    shape = (4, 24, 40)
    together = codec.new_state(*shape)
    alone = [codec.new_state(1, 24, 40) for _ in range(4)]
    for step in range(6):
        x = normal(*shape, seed=step)
        packets = codec.encode(x, together)
        for idx, state in enumerate(alone):
            assert torch.equal(codec.encode(x[idx : idx + 1].clone(), state)[0], packets[idx])


@pytest.mark.parametrize("how", ["pickle", "state_dict"])
def test_a_restored_state_gives_the_same_packets(codec, how):
    shape = (2, 24, 40)
    state = codec.new_state(*shape)
    for step in range(7):
        codec.encode(normal(*shape, seed=step), state)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(state))
    else:
        other = codec.new_state(*shape)
        other.load_state_dict(state.state_dict())
    for step in range(7, 12):
        x = normal(*shape, seed=step)
        assert torch.equal(codec.encode(x, state), codec.encode(x, other))


def test_a_state_of_another_shape_is_refused_and_nothing_changes():
    codec = make_codec({"type": "low_rank", "rank": 4})
    state = codec.new_state(2, 24, 40)
    with pytest.raises(PacketError, match=r"'q': \[2, 2, 40\].*wanted .*'q': \[2, 4, 40\].*load it with the settings"):
        state.load_state_dict(make_codec({"type": "low_rank", "rank": 2}).new_state(2, 24, 40).state_dict())
    assert state.step == 0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_passes_on_and_leaves_residual_and_state_clean(codec, value):
    shape = (3, 24, 40)
    residual, state = normal(*shape, seed=1) * 0.1, codec.new_state(*shape)
    codec.encode_with_residual(normal(*shape), residual, state)
    saved, before = state.state_dict(), residual.clone()
    x = normal(*shape, seed=2)
    x[1, 3, 5] = value
    packets = codec.encode_with_residual(x, residual, state)
    assert non_finite(packets).tolist() == [False, True, False]
    values = decoded(codec, packets, x)
    assert values[1].isnan().all()
    assert values[[0, 2]].isfinite().all()
    assert_same_bits(residual[1], before[1])
    assert residual.isfinite().all()
    for name, tensor in saved["tensors"].items():
        assert_same_bits(state.tensors[name][1], tensor[1])
    into = torch.ones(shape)
    codec.decode_add(packets, into)
    assert into[1].isnan().all()
    assert into[[0, 2]].isfinite().all()
    # The next step goes on as if the bad one had not been.
    packets = codec.encode_with_residual(normal(*shape, seed=3), residual, state)
    assert decoded(codec, packets, x).isfinite().all()


@pytest.mark.parametrize("scale", [1e-38, 1e-44, 1e37])
def test_numbers_at_the_ends_of_the_range_make_no_nan(codec, scale):
    x = normal(2, 24, 40, scale=scale)
    mirror, state = torch.zeros_like(x), codec.new_state(2, 24, 40)
    for _ in range(3):
        packets = codec.encode_update(x, mirror, state)
        if not non_finite(packets).any():  # it may overflow, but then it says so
            assert mirror.isfinite().all()
        else:
            assert scale > 1
            break


def test_out_is_used_and_the_step_is_the_sequence_number(codec):
    state = codec.new_state(2, 24, 40)
    state.step = 2**32 + 7
    out = torch.zeros(2, codec.packet_bytes(24, 40), dtype=torch.uint8)
    packets = codec.encode(normal(2, 24, 40), state, out=out)
    assert packets is out
    assert header_words(out)[:, 2].tolist() == [7, 7]
    assert state.step == 2**32 + 8


@pytest.mark.parametrize(
    ("x", "mirror"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 4)),
        (torch.zeros(1, 3, 4).bfloat16(), torch.zeros(1, 3, 4)),
        (torch.zeros(1, 3, 4).transpose(1, 2), torch.zeros(1, 4, 3)),
        (torch.zeros(1, 3, 4), torch.zeros(1, 4, 3)),
    ],
    ids=["dimensions", "dtype", "strides", "mirror"],
)
def test_tensors_that_cannot_be_encoded_are_refused(x, mirror):
    codec = make_codec("int8")
    with pytest.raises(AssertionError):
        codec.encode_update(x, mirror, codec.new_state(1, 3, 4))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_settings_make_equal_codecs_however_they_are_written(spec):
    config = settings_of(spec)
    codecs = [
        make_codec(one, kernels=kernels) for one in (spec, config, config.spec) for kernels in ("auto", "reference")
    ]
    assert all(one == codecs[0] and one.settings() == codecs[0].settings() for one in codecs)


def test_different_specs_make_different_stamps():
    assert len({make_codec(spec).settings() for spec in SPECS.values()}) == len(SPECS)


# ---- the error bounds that the docstring of `Blockwise` states ----

TINY = 1e-36  # scales below the smallest normal number count as 0


def left_over(spec, x):
    codec = make_codec(spec)
    packets = codec.encode(x, codec.new_state(*x.shape))
    return x.double() - codec.decode(packets, torch.empty_like(x)).double()


@given(x=tensors())
@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
def test_int8_and_int4_err_by_half_a_scale(name, largest, x):
    error = to_blocks(left_over(name, x).flatten(1), 128).abs().amax(dim=-1)
    scale = to_blocks(x.double().flatten(1), 128).abs().amax(dim=-1) / largest * (1 + 2.0**-7)
    assert (error <= scale / 2 * (1 + 1e-6) + 127 * TINY).all()


@given(x=tensors())
def test_int2_leaves_less_than_there_was(x):
    error = to_blocks(left_over("int2", x).flatten(1), 128).square().sum(dim=-1)
    size = to_blocks(x.double().flatten(1), 128).square().sum(dim=-1)
    assert (error <= size * (1 - 0.8 / 128) + 1e-60).all()


@pytest.mark.parametrize(("name", "left"), [("int8", 0.01), ("int4", 0.12), ("int2", 0.36)])
def test_normal_numbers_keep_the_share_of_error_that_is_stated(name, left):
    x = normal(1, 64, 512)
    assert left_over(name, x).norm() <= left * x.double().norm()


# ---- packets ----


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
    with pytest.raises(PacketError, match="packet has sequence number 4, wanted 3"):
        PacketOrder(3).check(mixed)


@pytest.mark.parametrize(
    ("made", "spec", "shape", "message"),
    [
        (
            {"type": "int4", "block": 16},
            {"type": "int4", "block": 32},
            (2, 8, 16),
            r"packets: .*wanted .*int4\(block=32\)",
        ),
        ("int8", "int8", (2, 16, 8), "stamp 0x.*wanted.*for int8.*equal codec settings and shapes"),
    ],
    ids=["settings", "shape of equal size"],
)
def test_packets_of_something_else_are_refused(made, spec, shape, message):
    with pytest.raises(PacketError, match=message):
        make_codec(spec).decode(packets_of(0, made), torch.empty(shape))
