# SPDX-License-Identifier: Apache-2.0
"""Compiled codec kernels against the PyTorch definitions: the same bytes, values, mirrors and residuals.

"compiled" are those for the CPU, "emulated" those for CUDA run on the CPU (see cuda_emulation), "cuda" those on a GPU.
"""

from functools import partial
from itertools import product

import pytest
import torch
from codec_cases import SHAPES, SPECS, assert_same_bits, make_codec, normal, tensors
from cuda_emulation import load_emulated_codecs
from hypothesis import given, settings
from on_device import on_cuda

from ds_hybridep.codecs import interface
from ds_hybridep.codecs.packet import non_finite
from ds_hybridep.errors import PacketError
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


# Low rank multiplies with torch, and has kernels for its rest only.
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


@settings(max_examples=25)
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
    elsewhere, strides = "on device meta, wanted cpu, where", r"strides \(1, 2\), wanted bytes side by side"
    refused = [
        (f"other: {elsewhere}", partial(codecs.prepare, Source.UPDATE, x, far_x)),
        (f"is_bad: {elsewhere}", partial(codecs.write_headers, payload, **headers)),
    ]
    for bad, a, out in ((far, f"{elsewhere} a is", f"{elsewhere} out is"), (apart, strides, strides)):
        refused += [
            (f"payload: {a}", partial(codecs.blockwise_encode, Source.ENCODE, x, None, bad, bits=4, block=32)),
            (f"payload: {out}", partial(codecs.blockwise_decode, bad, x, bits=4, block=32, is_add=True)),
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
    for spec, shape in product(SPECS.values(), [(2, 61, 70), (1, 400, 400)]):  # the second is large for low rank
        codec, x = make_codec(spec, kernels="compiled"), normal(*shape)
        codec.decode(codec.encode_with_residual(x, normal(*shape), codec.new_state(*shape)), x)
    new, held, payload = normal(5001).bfloat16(), normal(5001, seed=1).bfloat16(), torch.empty(11_000).byte()
    num_bytes, _ = compiled_codecs.patch_encode(new, held.clone(), payload, mantissa_bits=7)
    compiled_codecs.patch_decode(payload[:num_bytes], held, mantissa_bits=7)
    assert torch.equal(held, new)
    assert len(taken) > 20
    assert all((memory[-GUARD_BYTES:] == 0xA5).all() for memory in taken)
