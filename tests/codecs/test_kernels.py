# SPDX-License-Identifier: Apache-2.0
"""Compiled codec kernels against the PyTorch definitions: the same bytes, values, mirrors and residuals.

"compiled" are those for the CPU, "emulated" those for CUDA run on the CPU (see cuda_emulation), "cuda" those on a GPU.
"""

from functools import partial

import pytest
import torch
from codec_cases import SHAPES, SPECS, assert_same_bits, make_codec, normal, tensors
from cuda_emulation import load_emulated_codecs
from hypothesis import given, settings
from on_device import on_cuda

from ds_hybridep.codecs import interface
from ds_hybridep.codecs.low_rank import divide_by_gram, orthonormal
from ds_hybridep.codecs.packet import non_finite
from ds_hybridep.errors import PacketError
from ds_hybridep.geometry.packets import LARGEST_RANK
from ds_hybridep.kernels import Source, build
from ds_hybridep.kernels import codecs as codecs_module

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
KERNELS = ["compiled", "emulated", CUDA]
NOT_EMULATED = ["compiled", CUDA]  # what takes long there, or is about threads


@pytest.fixture(scope="module", params=KERNELS, autouse=True)
def compiled_codecs(request):
    """Kernels that codecs with kernels="compiled" use on CPU tensors in this test."""
    if request.param == "cuda":
        chosen = on_cuda(build.load_codec_kernels("compiled", "cuda"))
    else:
        chosen = load_emulated_codecs() if request.param == "emulated" else build.load_codec_kernels("compiled")

    def load(mode, device="cpu"):
        return chosen if mode == "compiled" else build.load_codec_kernels(mode, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "load_codec_kernels", load)
        yield chosen


# Their encoding multiplies matrices, in an order of its own; what they decode is the same to the bit.
SAME_BYTES = {name: spec for name, spec in SPECS.items() if not name.startswith("low_rank")}


def assert_same_encoding(spec, x, other):
    for method in ("encode", "encode_update", "encode_with_residual"):
        results = []
        for kernels in ("compiled", "reference"):
            codec, changed = make_codec(spec, kernels=kernels), other.clone()
            state = codec.new_state(*x.shape)
            arguments = (x, state) if method == "encode" else (x, changed, state)
            results.append((getattr(codec, method)(*arguments), changed))
        (packets, changed), (wanted_packets, wanted) = results
        assert torch.equal(packets, wanted_packets)
        assert_same_bits(changed, wanted)


@settings(max_examples=40)
@given(x=tensors())
@pytest.mark.parametrize("name", SAME_BYTES)
def test_encoding_equals_the_definition_bit_for_bit(name, x):
    assert_same_encoding(SAME_BYTES[name], x, normal(*x.shape, seed=5) * x.abs().mean())


NANS_OF_GPUS = [0x7FFFFFFF, -1]  # as int32: all that a GPU's arithmetic makes, and the same with a sign


def odd(value):
    """Tensors, two of which hold other numbers; the largest nan, rounded to 16 bits as a number, would become 0."""
    x = normal(5, 20, 50)
    bits = value if isinstance(value, int) else torch.tensor(value).view(torch.int32).item()
    x.view(torch.int32)[[0, 2]] = bits
    x.view(torch.int32)[3, 7, 11] = bits
    return x


@pytest.mark.parametrize("name", SAME_BYTES)
@pytest.mark.parametrize(
    "x",
    [
        *(pytest.param(normal(*shape), id=str(shape)) for shape in (*SHAPES, (1, 11, 421))),
        *(
            pytest.param(odd(value), id=str(value))
            for value in (float("inf"), float("nan"), 3e38, 1e-40, *NANS_OF_GPUS)
        ),
    ],
)
def test_encoding_of_all_shapes_and_odd_numbers_equals_the_definition(name, x):
    assert_same_encoding(SAME_BYTES[name], x, normal(*x.shape, seed=1))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("bits", NANS_OF_GPUS)
def test_a_tensor_of_the_largest_nan_is_flagged(name, bits):
    codec = make_codec(SPECS[name], kernels="compiled")
    x = normal(3, 20, 50)
    x.view(torch.int32)[1] = bits
    for method in ("encode", "encode_update", "encode_with_residual"):
        arguments = (x,) if method == "encode" else (x, torch.zeros(3, 20, 50))
        packets = getattr(codec, method)(*arguments, codec.new_state(3, 20, 50))
        assert non_finite(packets).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("compiled_codecs", "num_threads"),
    [("compiled", 1), ("compiled", 3), ("emulated", 1), pytest.param("cuda", 1, marks=pytest.mark.gpu)],
    indirect=["compiled_codecs"],
)
@pytest.mark.parametrize("name", SPECS)
def test_decoding_equals_the_definition_bit_for_bit(name, num_threads):
    compiled, reference = make_codec(SPECS[name], kernels="compiled"), make_codec(SPECS[name], kernels="reference")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    for shape in [(2, 48, 80), (3, 1, 70), (2, 33, 17), (2, 64, 1100)]:
        for encoder in (compiled, reference):
            x = normal(*shape)
            packets = encoder.encode(x, encoder.new_state(*shape))
            assert not non_finite(packets).any()
            wanted = reference.decode(packets, torch.empty(shape))
            assert_same_bits(compiled.decode(packets, torch.empty(shape)), wanted)
            into = normal(*shape, seed=2)
            wanted = reference.decode_add(packets, into.clone())
            assert_same_bits(compiled.decode_add(packets, into.clone()), wanted)
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(2, 3, 200), (1, 8, 8), (3, 5, 33), (1, 1, 1)], ids=str)
def test_orthonormal_rows_span_what_the_definition_spans(compiled_codecs, shape):
    p, wanted = normal(*shape), orthonormal(normal(*shape))
    compiled_codecs.orthonormalise(p)
    assert (p @ p.transpose(1, 2) - torch.eye(shape[1])).abs().max() < 1e-6
    torch.testing.assert_close(
        p.transpose(1, 2) @ p, wanted.transpose(1, 2) @ wanted, rtol=0, atol=1e-5
    )  # projections


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, 1.0, 1e30])
def test_dependent_rows_become_orthonormal(compiled_codecs, scale):
    p = torch.ones(2, 6, 1) @ normal(2, 1, 9) * scale
    p[:, 3] = 0
    compiled_codecs.orthonormalise(p)
    assert (p @ p.transpose(1, 2) - torch.eye(6)).abs().max() < 1e-6


def test_division_by_the_gram_matrix_equals_the_definition(compiled_codecs):
    kernels, p, q = compiled_codecs, normal(2, 4, 50), normal(2, 4, 30, seed=1)
    wanted = divide_by_gram(q, p)
    kernels.divide_by_gram(p, q)
    torch.testing.assert_close(q, wanted, rtol=1e-4, atol=1e-6)
    p[:, 2] = p[:, 1]
    p[:, 3] = 0
    kernels.divide_by_gram(p, q)
    assert q.isfinite().all()


@pytest.mark.parametrize("compiled_codecs", NOT_EMULATED, indirect=True)
@pytest.mark.parametrize("name", SPECS)
def test_packets_do_not_depend_on_threads(name):
    shape, packets = (3, 128, 300), []
    before = torch.get_num_threads()
    for num_threads in (1, 4):
        torch.set_num_threads(num_threads)
        codec = make_codec(SPECS[name], kernels="compiled")
        state, residual = codec.new_state(*shape), torch.zeros(shape)
        packets.append([codec.encode_with_residual(normal(*shape, seed=s), residual, state) for s in range(4)])
    torch.set_num_threads(before)
    for one, other in zip(*packets, strict=True):
        assert torch.equal(one, other)


def test_tensors_on_two_devices_and_bytes_that_lie_apart_are_refused(compiled_codecs):
    if hasattr(compiled_codecs, "_kernels"):
        pytest.skip("on_cuda moves all tensors to one device and makes them dense")
    codecs, x, payload = compiled_codecs, normal(2, 4, 8), torch.zeros(2, 64, dtype=torch.uint8)
    far, far_x, apart = payload.to("meta"), x.to("meta"), torch.zeros(64, 2, dtype=torch.uint8).t()
    headers = {"start": 0, "number": 0, "sequence": 0, "stamp": 0, "is_bad": far[:, 0]}
    low_rank = {"sizes": None, "q": x, "row_rms": None, "col_rms": None, "start": None, "factor": 0, "iterations": 1}
    encode_low_rank = partial(codecs.low_rank_encode, Source.ENCODE, x, None, payload)
    elsewhere, strides = "on device meta, wanted cpu, where", r"strides \(1, 2\), wanted bytes side by side"
    refused = [
        (f"other: {elsewhere}", partial(codecs.prepare, Source.UPDATE, x, far_x)),
        (f"q: {elsewhere}", partial(codecs.divide_by_gram, x, far_x)),
        (f"is_bad: {elsewhere}", partial(codecs.write_headers, payload, **headers)),
    ]
    for name in ("sizes", "q", "row_rms", "col_rms", "start"):
        refused.append((f"{name}: {elsewhere} a is", partial(encode_low_rank, **{**low_rank, name: far_x})))
    for bad, a, out in ((far, f"{elsewhere} a is", f"{elsewhere} out is"), (apart, strides, strides)):
        refused += [
            (f"payload: {a}", partial(codecs.blockwise_encode, Source.ENCODE, x, None, bad, bits=4, block=32)),
            (f"payload: {out}", partial(codecs.blockwise_decode, bad, x, bits=4, block=32, is_add=True)),
            (f"payload: {out}", partial(codecs.low_rank_decode, bad, x, rank=1, factor=0, is_add=True)),
        ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()


SHAPE_OF_PACKETS = (2, 8, 16)


def encoded(spec="int8"):
    codec = make_codec(spec, kernels="compiled")
    return codec, codec.encode(normal(*SHAPE_OF_PACKETS), codec.new_state(*SHAPE_OF_PACKETS))


@pytest.mark.parametrize("compiled_codecs", ["compiled", "emulated"], indirect=True)  # a GPU's error ends the process
def test_packets_of_another_shape_are_refused_on_every_device():
    codec, packets = encoded()
    message = "packet .*starts with .* and stamp 0x.*, wanted .* and 0x.*encode and decode with equal codec settings"
    for decode in (codec.decode, codec.decode_add):
        with pytest.raises((PacketError, RuntimeError), match=message):
            decode(packets, torch.zeros(2, 16, 8))
        damaged = packets.clone()
        damaged[1, 2] += 1
        with pytest.raises((PacketError, RuntimeError), match=message):
            decode(damaged, torch.zeros(SHAPE_OF_PACKETS))


TWO_SPECS = pytest.mark.parametrize("spec", ["int8", {"type": "low_rank", "rank": 2, "rest": "int2"}], ids=str)


@TWO_SPECS
def test_packets_on_another_device_than_their_target_are_refused(spec):
    codec, packets = encoded(spec)
    for one, other in ((packets.to("meta"), "cpu"), (packets, "meta")):
        with pytest.raises(AssertionError, match=f"packets: on {one.device}, wanted {other}"):
            codec.decode(one, torch.zeros(SHAPE_OF_PACKETS, device=other))


@TWO_SPECS
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_packets_whose_bytes_lie_apart_are_refused(kernels, spec):
    _, packets = encoded(spec)
    codec, apart = make_codec(spec, kernels=kernels), packets.repeat_interleave(2, dim=1)[:, ::2]
    with pytest.raises(
        ValueError, match=r"packets: strides \(\d+, 2\), wanted bytes side by side; pass packets.contig"
    ):
        codec.decode(apart, torch.zeros(SHAPE_OF_PACKETS))
    codec.decode(apart.contiguous(), torch.zeros(SHAPE_OF_PACKETS))


LOW_RANKS = [
    {"type": "low_rank", "rank": rank, "factors": factors}
    for rank, factors in [(1, "int4"), (5, "log4"), (7, "int4"), (13, "log4"), (35, "int4")]
]


def low_rank_cases():
    """Each rank with each shape; under emulation, where one takes seconds, each rank with one shape."""
    shapes = [(2, 130, 64), (3, 61, 203), (1, 200, 77)]
    for place, spec in enumerate(LOW_RANKS):
        for at, shape in enumerate(shapes):
            for kernels in ("compiled", "emulated", "cuda"):
                marks = [pytest.mark.gpu] if kernels == "cuda" else []
                marks += [pytest.mark.slow] if kernels == "emulated" and at != (place + 1) % 3 else []
                name = f"{kernels}-{spec['rank']}-{spec['factors']}-{shape}"
                yield pytest.param(kernels, spec, shape, marks=marks, id=name)


@pytest.mark.parametrize(("compiled_codecs", "spec", "shape"), list(low_rank_cases()), indirect=["compiled_codecs"])
def test_low_rank_leaves_as_much_as_the_definition(spec, shape):
    """Products round in another order, which may move a factor's code; the error that is left stays the same."""
    x = normal(shape[0], shape[1], 6) @ normal(shape[0], 6, shape[2], seed=1) + 0.1 * normal(*shape, seed=2)
    left = []
    for kernels in ("compiled", "reference"):
        codec, mirror = make_codec(spec, kernels=kernels), torch.zeros(shape)
        state, residual = codec.new_state(*shape), normal(*shape, seed=3) * 0.1
        other_state = codec.new_state(*shape)
        for _ in range(3):
            codec.encode_update(x, mirror, state)
            codec.encode_with_residual(x, residual, other_state)
        left.append([float((x - mirror).norm()), float(residual.norm())])
    # Of noise that is the same in all directions, another one may be taken; with few bits that shows.
    assert left[0] == pytest.approx(left[1], rel=0.05)


@pytest.mark.parametrize("compiled_codecs", ["emulated", CUDA], indirect=True)
@pytest.mark.parametrize("shape", [(1, 131, 130945), (9, 2, 2**20)], ids=["chunks of several tiles", "several turns"])
@pytest.mark.slow  # under emulation
def test_low_rank_of_wide_tensors_leaves_as_much_as_on_the_cpu(compiled_codecs, shape):
    n, rows, cols = shape
    x = normal(n, rows, 2) @ normal(n, 2, cols, seed=1) + 0.1 * normal(*shape, seed=2)
    left = []
    for kernels in (compiled_codecs, build.load_codec_kernels("compiled")):
        residual, payload = torch.zeros(shape), torch.empty(n, 8 * (rows + cols), dtype=torch.uint8)
        kernels.low_rank_encode(
            *(Source.RESIDUAL, x, residual, payload),
            **{"sizes": None, "row_rms": None, "col_rms": None, "start": None, "factor": 0, "iterations": 1},
            q=normal(n, 2, cols, seed=3),
        )
        left.append([float(one.norm()) for one in residual])
    assert left[0] == pytest.approx(left[1], rel=1e-4, abs=1e-2)


GUARD_BYTES = 4096


def test_kernels_stay_inside_their_scratch(compiled_codecs, monkeypatch):
    """Memory from torch has neighbours."""
    if hasattr(compiled_codecs, "_kernels"):
        pytest.skip("on_cuda takes the scratch on the GPU")
    taken = []

    def guarded(number, device):
        taken.append(torch.full((number + GUARD_BYTES,), 0xA5, dtype=torch.uint8))
        return taken[-1][:number]

    monkeypatch.setattr(codecs_module, "_bytes", guarded)
    shape = (2, 61, 70)
    for spec in (*SPECS.values(), *LOW_RANKS):
        codec, x = make_codec(spec, kernels="compiled"), normal(*shape)
        codec.decode(codec.encode_with_residual(x, normal(*shape), codec.new_state(*shape)), x)
    compiled_codecs.divide_by_gram(normal(2, 5, 33), normal(2, 5, 70))
    new, held, payload = normal(5001).bfloat16(), normal(5001, seed=1).bfloat16(), torch.empty(11_000).byte()
    num_bytes, _ = compiled_codecs.patch_encode(new, held.clone(), payload, mantissa_bits=7)
    compiled_codecs.patch_decode(payload[:num_bytes], held, mantissa_bits=7)
    assert torch.equal(held, new)
    assert len(taken) > 50
    assert all((memory[-GUARD_BYTES:] == 0xA5).all() for memory in taken)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("n", "rows", "cols"),
    [(1, 14336, 4096), (8, 4096, 14336), (1, 151936, 4096), (1, 4096, 151936)],
    ids=["expert", "eight experts", "embedding", "head"],
)
@pytest.mark.parametrize("compiled_codecs", ["emulated", CUDA], indirect=True)
def test_low_rank_needs_little_memory_beside_large_tensors(compiled_codecs, n, rows, cols, weighted):
    """A sum for each 64 rows and each column of Q took rank / 64 times the tensors: 0.94 GB for one expert."""
    extension = getattr(compiled_codecs, "_kernels", compiled_codecs)._extension
    before = 4 * n * (rows // 64) * LARGEST_RANK * cols
    assert before / (4 * n * rows * cols) == LARGEST_RANK / 64
    scratch = extension.low_rank_encode_scratch_bytes(n, LARGEST_RANK, rows, cols, weighted)
    factors = 4 * n * LARGEST_RANK * (rows + cols)
    assert scratch < 2.2 * factors + 2**26 < before / 8
    assert scratch < 4 * n * rows * cols / 4


def test_a_state_of_another_shape_is_refused_before_the_kernel_reads_it():
    codec = make_codec(LOW_RANKS[2], kernels="compiled")
    with pytest.raises(AssertionError, match=r"state: holds q of shape \(2, 7, 64\), wanted \(3, 7, 64\)"):
        codec.encode(normal(3, 130, 64), codec.new_state(2, 130, 64))
