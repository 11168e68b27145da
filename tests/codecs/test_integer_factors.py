# SPDX-License-Identifier: Apache-2.0
"""Low rank with integer factors: what packets mean, to the bit, and how much they leave at so many bytes."""

import pytest
import torch
from codec_cases import BALANCED, assert_same_bits, make_codec, normal, ratio_of
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.codecs.packet import non_finite
from ds_hybridep.geometry.packets import HEADER_BYTES


@pytest.fixture(params=["reference", "compiled"])
def kernels(request):
    return request.param


def packet_of(x, kernels, **options):
    codec = make_codec({**BALANCED, **options}, kernels=kernels)
    return codec, codec.encode(x, codec.new_state(*x.shape))


def read_by_hand(packet, rank, rows, cols, some_rows=None, some_cols=None):
    """The value of a packet, as the module's docstring describes it: integers by Python, two products in fp32."""
    some_rows, some_cols = some_rows or range(rows), some_cols or range(cols)
    payload = packet[HEADER_BYTES:].tolist()
    codes = [code for byte in payload for code in (byte & 15, byte >> 4)]
    p = [[2 * codes[k * rows + i] - 15 for i in range(rows)] for k in range(rank)]
    q = [[2 * codes[rank * rows + k * cols + j] - 15 for j in range(cols)] for k in range(rank)]
    rest = payload[-(-rank * (rows + cols) // 2) :]
    bases, scales = (rest[0] | rest[1] << 8, rest[2] | rest[3] << 8), rest[4:]

    def scale(byte, base):
        code = (byte + base if byte else 0) << 19
        return torch.tensor(code, dtype=torch.int32).view(torch.float32)

    value = torch.empty(len(some_rows), len(some_cols))
    for at, i in enumerate(some_rows):
        for to, j in enumerate(some_cols):
            whole = torch.tensor(float(sum(p[k][i] * q[k][j] for k in range(rank))))
            value[at, to] = whole * scale(scales[i], bases[0]) * scale(scales[rows + j], bases[1])
    return value


@pytest.mark.parametrize(("rank", "rows", "cols"), [(1, 24, 40), (5, 23, 41), (7, 64, 33)])
def test_a_packet_means_what_its_description_says(rank, rows, cols, kernels):
    x = normal(2, rows, cols) * torch.linspace(1e-6, 1, rows)[:, None]
    codec, packets = packet_of(x, kernels, rank=rank, ratio=None)
    value = codec.decode(packets, torch.empty_like(x))
    for packet, one in zip(packets, value, strict=True):
        assert_same_bits(one, read_by_hand(packet, rank, rows, cols))


@given(st.integers(0, 2**16), st.floats(-25, 30), st.sampled_from(["reference", "compiled"]))
def test_rows_and_columns_of_zeros_stay_zeros(seed, exponent, kernels):
    x = normal(1, 40, 60, seed=seed) * 10.0**exponent
    x[0, seed % 40], x[0, :, seed % 60] = 0, 0
    codec, packets = packet_of(x, kernels, rank=4, ratio=None)
    value = codec.decode(packets, torch.empty_like(x))
    assert not value[0, seed % 40].any()
    assert not value[0, :, seed % 60].any()
    assert value.any()


@pytest.mark.parametrize("weighting", ["none", "rms"])
@pytest.mark.parametrize("rank", [1, 4, 11])
@pytest.mark.parametrize("shape", [(3, 256, 64), (2, 64, 256), (1, 37, 201), (1, 2, 300)], ids=str)
def test_both_kinds_of_kernels_leave_as_much_and_read_each_others_packets(shape, rank, weighting):
    x = normal(*shape) * torch.linspace(0.1, 3, shape[1])[:, None] * torch.linspace(2, 0.1, shape[2]) ** 2
    spec = {**BALANCED, "rank": min(rank, shape[1]), "ratio": None, "weighting": weighting}
    both = [make_codec(spec, kernels=kernels) for kernels in ("reference", "compiled")]
    states, left = [codec.new_state(*shape) for codec in both], [torch.zeros(shape) for _ in both]
    for step in range(4):
        packets = [
            codec.encode_with_residual(x, residual, state)
            for codec, residual, state in zip(both, left, states, strict=True)
        ]
        values = [codec.decode(one, torch.empty(shape)) for codec, one in zip(both, packets, strict=True)]
        assert_same_bits(values[0], both[1].decode(packets[0], torch.empty(shape)))
        assert_same_bits(values[1], both[0].decode(packets[1], torch.empty(shape)))
        assert_same_bits(both[1].decode_add(packets[0], x.clone()), both[0].decode_add(packets[0], x.clone()))
        assert left[1].norm() == pytest.approx(left[0].norm(), rel=0.03), step
    for name, tensor in states[0].tensors.items():
        if name != "q":
            torch.testing.assert_close(states[1].tensors[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 256, 512), (3, 100, 64), (1, 2048, 16)])
@pytest.mark.parametrize("ratio", [10.0, 50.0, 100.0])
def test_a_ratio_is_kept_where_a_rank_of_one_is_short_enough(shape, ratio):
    codec = make_codec({**BALANCED, "ratio": ratio})
    real = codec.resolve(*shape[1:])
    if real.settings().startswith("low_rank") and real.effective_rank(*shape[1:]) > 1:
        assert ratio_of(codec, *shape[1:]) >= ratio


def made(kind):
    generator = torch.Generator().manual_seed(0)
    if kind == "of rank two":
        return torch.randn(1, 64, 2, generator=generator) @ torch.randn(1, 2, 96, generator=generator)
    if kind == "ill conditioned":
        return torch.randn(1, 64, 96, generator=generator) * torch.logspace(0, -8, 96)
    if kind == "equal rows":
        return torch.randn(1, 1, 96, generator=generator).repeat(1, 64, 1)
    return torch.zeros(1, 64, 96)


@pytest.mark.parametrize("kind", ["of rank two", "ill conditioned", "equal rows", "zero"])
def test_degenerate_matrices_give_finite_values_and_come_ever_closer(kind, kernels):
    x = made(kind)
    codec = make_codec({**BALANCED, "weighting": "none", "rank": 8}, kernels=kernels)
    mirror, state = torch.zeros_like(x), codec.new_state(*x.shape)
    for _ in range(8):
        codec.encode_update(x, mirror, state)
    assert mirror.isfinite().all()
    assert (x - mirror).norm() <= 0.02 * x.norm()


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("num_zero_rows", [0, 4, 40])
def test_a_matrix_that_was_zero_is_found_in_its_next_step(num_zero_rows, before, kernels):
    """An expert without tokens leaves no directions to start from."""
    codec, mirror = make_codec({**BALANCED, "rank": 8}, kernels=kernels), torch.zeros(1, 64, 96)
    state, x = codec.new_state(1, 64, 96), made("of rank two")
    x[:, :num_zero_rows] = 0
    for _ in range(before):
        codec.encode_update(x, mirror, state)
    for _ in range(3):
        codec.encode_update(mirror.clone(), mirror, state)
    mirror.zero_()
    codec.encode_update(x, mirror, state)
    assert (x - mirror).norm() < 0.2 * x.norm()


def test_a_gradient_that_takes_back_what_waits_arrives(kernels):
    codec, residual = make_codec({**BALANCED, "rank": 8}, kernels=kernels), normal(1, 64, 96)
    for share in (1.0, 1.0 - 1e-6):
        packets = codec.encode_with_residual(-residual * share, residual, codec.new_state(1, 64, 96))
        assert codec.decode(packets, torch.empty(1, 64, 96)).isfinite().all()


def test_a_machine_that_takes_subnormal_numbers_for_zero_sends_and_reads_the_same(kernels):
    codec = make_codec({**BALANCED, "rank": 8}, kernels=kernels)
    for exponent in (0, -20, -28, -33, -38):
        x = torch.cat([made("of rank two"), torch.zeros(1, 64, 96)]) * 10.0**exponent
        packets = codec.encode(x, codec.new_state(2, 64, 96))
        values = []
        for flushes in (False, True):
            torch.set_flush_denormal(flushes)
            try:
                values.append(codec.decode(packets, torch.empty(2, 64, 96)))
                again = codec.encode(x, codec.new_state(2, 64, 96))
            finally:
                torch.set_flush_denormal(False)
            assert codec.decode(again, torch.empty(2, 64, 96)).isfinite().all()
        assert_same_bits(*values)


@pytest.mark.parametrize("huge", [1e25, 1e33])
def test_a_huge_gradient_does_not_spoil_the_steps_after_it(huge, kernels):
    codec, x, residual = (
        make_codec({**BALANCED, "rank": 8}, kernels=kernels),
        made("of rank two"),
        torch.zeros(1, 64, 96),
    )
    state = codec.new_state(1, 64, 96)
    sent, wanted = torch.zeros(1, 64, 96, dtype=torch.float64), torch.zeros(1, 64, 96, dtype=torch.float64)
    for factor in (1.0, huge, *[1.0] * 3):
        packets = codec.encode_with_residual(x * factor, residual, state)
        sent += codec.decode(packets, torch.empty(1, 64, 96))
        wanted += x * factor
        assert residual.isfinite().all()
    assert (sent + residual - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("size", [1e31, 1e33, 1e35, 1e37, 1e38])
@pytest.mark.parametrize("weighting", ["none", "rms"])
@pytest.mark.parametrize("rank", [1, 16])
def test_what_is_too_large_is_flagged_and_what_is_not_arrives(size, weighting, rank, kernels):
    codec, x = make_codec({**BALANCED, "rank": rank, "weighting": weighting}, kernels=kernels), torch.ones(1, 128, 256)
    state, waits = codec.new_state(1, 128, 256), x * size
    for _ in range(3):
        packets = codec.encode_with_residual(torch.zeros_like(x), waits, state)
        assert waits.isfinite().all()
        if non_finite(packets).any():
            assert torch.equal(waits, x * size)
            return
    assert (waits / size).norm() < 0.01 * x.norm()


def test_a_nan_in_the_state_is_flagged(kernels):
    codec, x = make_codec({**BALANCED, "rank": 4}, kernels=kernels), normal(1, 64, 96)
    state = codec.new_state(1, 64, 96)
    codec.encode(x, state)
    state.tensors["q"][0, 0, 5] = torch.nan
    assert non_finite(codec.encode(x, state)).all()


@pytest.mark.parametrize("rest", [None, "int2"])
def test_another_default_device_changes_nothing(rest, kernels):
    codec, x = make_codec({**BALANCED, "rank": 4, "rest": rest}, kernels=kernels), normal(1, 64, 96)
    wanted = codec.encode(x, codec.new_state(1, 64, 96))
    with torch.device("meta"):
        packets = codec.encode(x, codec.new_state(1, 64, 96))
    assert torch.equal(packets, wanted)


def test_the_largest_rank_decodes_as_its_description_says(kernels):
    """With sums of 256 products no integer is rounded, in any order."""
    codec = make_codec({**BALANCED, "rank": 256}, kernels=kernels)
    x = normal(1, 1024, 1100)
    packets = codec.encode(x, codec.new_state(1, 1024, 1100))
    value = codec.decode(packets, torch.empty(1, 1024, 1100))
    some = read_by_hand(packets[0], 256, 1024, 1100, range(0, 1024, 200), range(0, 1100, 220))
    assert_same_bits(value[0, ::200, ::220].contiguous(), some)


@pytest.mark.parametrize("elsewhere", ["autocast", "bf16 by default", "two threads", "other products"])
def test_what_a_script_has_set_changes_no_value(elsewhere, kernels):
    codec, x = make_codec({**BALANCED, "rank": 9, "rest": "int2"}, kernels=kernels), normal(2, 70, 90)
    packets = codec.encode(x, codec.new_state(2, 70, 90))
    value = codec.decode(packets, torch.empty(2, 70, 90))

    def again():
        ours = codec.encode(x, codec.new_state(2, 70, 90))
        return ours, codec.decode(packets, torch.empty(2, 70, 90, dtype=torch.float32))

    if elsewhere == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, same = again()
    else:
        before = torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision()
        try:
            torch.set_default_dtype(torch.bfloat16 if elsewhere == "bf16 by default" else before[0])
            torch.set_num_threads(2 if elsewhere == "two threads" else before[1])
            torch.set_float32_matmul_precision("medium" if elsewhere == "other products" else before[2])
            ours, same = again()
        finally:
            torch.set_default_dtype(before[0])
            torch.set_num_threads(before[1])
            torch.set_float32_matmul_precision(before[2])
    assert_same_bits(same, value)
    if elsewhere != "other products":
        assert torch.equal(ours, packets)
