# SPDX-License-Identifier: Apache-2.0
"""Low rank with integer factors: what packets mean, to the bit, and how much they leave at so many bytes."""

import pytest
import torch
from codec_cases import BALANCED, assert_same_bits, make_codec, normal, ratio_of
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.geometry.packets import HEADER_BYTES

INTEGER = {**BALANCED, "factors": "integer"}


def packet_of(x, **options):
    codec = make_codec({**INTEGER, **options})
    return codec, codec.encode(x, codec.new_state(*x.shape))


def read_by_hand(packet, rank, rows, cols):
    """The value of a packet, as the module's docstring describes it: integers by Python, two products in fp32."""
    payload = packet[HEADER_BYTES:].tolist()
    codes = [code for byte in payload for code in (byte & 15, byte >> 4)]
    p = [[2 * codes[k * rows + i] - 15 for i in range(rows)] for k in range(rank)]
    q = [[2 * codes[rank * rows + k * cols + j] - 15 for j in range(cols)] for k in range(rank)]
    rest = payload[-(-rank * (rows + cols) // 2) :]
    bases, scales = (rest[0] | rest[1] << 8, rest[2] | rest[3] << 8), rest[4:]

    def scale(byte, base):
        code = (byte + base if byte else 0) << 19
        return torch.tensor(code, dtype=torch.int32).view(torch.float32)

    value = torch.empty(rows, cols)
    for i in range(rows):
        for j in range(cols):
            whole = torch.tensor(float(sum(p[k][i] * q[k][j] for k in range(rank))))
            value[i, j] = whole * scale(scales[i], bases[0]) * scale(scales[rows + j], bases[1])
    return value


@pytest.mark.parametrize(("rank", "rows", "cols"), [(1, 24, 40), (5, 23, 41), (7, 64, 33)])
def test_a_packet_means_what_its_description_says(rank, rows, cols):
    x = normal(2, rows, cols) * torch.linspace(1e-6, 1, rows)[:, None]
    codec, packets = packet_of(x, rank=rank, ratio=None)
    value = codec.decode(packets, torch.empty_like(x))
    for packet, one in zip(packets, value, strict=True):
        assert_same_bits(one, read_by_hand(packet, rank, rows, cols))


@given(st.integers(0, 2**16), st.floats(-30, 30))
def test_rows_and_columns_of_zeros_stay_zeros(seed, exponent):
    x = normal(1, 40, 60, seed=seed) * 10.0**exponent
    x[0, seed % 40], x[0, :, seed % 60] = 0, 0
    codec, packets = packet_of(x, rank=4, ratio=None)
    value = codec.decode(packets, torch.empty_like(x))
    assert not value[0, seed % 40].any()
    assert not value[0, :, seed % 60].any()
    assert value.any()


@pytest.mark.parametrize("shape", [(1, 256, 512), (3, 100, 64), (1, 2048, 16)])
@pytest.mark.parametrize("ratio", [10.0, 50.0, 100.0])
def test_a_ratio_is_kept_where_a_rank_of_one_is_short_enough(shape, ratio):
    codec = make_codec({**INTEGER, "ratio": ratio})
    real = codec.resolve(*shape[1:])
    if real.settings().startswith("low_rank") and real.effective_rank(*shape[1:]) > 1:
        assert ratio_of(codec, *shape[1:]) >= ratio


@pytest.mark.parametrize("ratio", [50.0, 100.0])
def test_it_leaves_less_than_log4_where_singular_values_fall(ratio):
    u, v = torch.linalg.qr(normal(256, 256))[0], torch.linalg.qr(normal(512, 256, seed=1))[0]
    x = ((u / torch.arange(1, 257)) @ v.T * normal(256, 1, seed=2).mul(0.7).exp())[None].contiguous()
    left = {}
    for factors in ("log4", "integer"):
        codec = make_codec({**BALANCED, "factors": factors, "ratio": ratio})
        state = codec.new_state(*x.shape)
        for _ in range(4):
            packets = codec.encode(x, state)
        sizes = x.square().mean(2, keepdim=True).sqrt()
        left[factors] = float(((x - codec.decode(packets, torch.empty_like(x))) / sizes).norm() / (x / sizes).norm())
    assert left["integer"] < 0.8 * left["log4"]


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
def test_degenerate_matrices_give_finite_values_and_come_ever_closer(kind):
    x = made(kind)
    codec = make_codec({**INTEGER, "weighting": "none", "rank": 8})
    mirror, state = torch.zeros_like(x), codec.new_state(*x.shape)
    for _ in range(8):
        codec.encode_update(x, mirror, state)
    assert mirror.isfinite().all()
    assert (x - mirror).norm() <= 0.02 * x.norm()
