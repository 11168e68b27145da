# SPDX-License-Identifier: Apache-2.0
"""Patches: exact for all bits, equal bytes from all kernels, within their bounds, and safe against damage."""

import random

import pytest
import torch
from cuda_emulation import load_emulated_codecs
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import on_cuda

from ds_hybridep.codecs import PatchCodec
from ds_hybridep.codecs import patch as patch_module
from ds_hybridep.codecs import patch_format as form
from ds_hybridep.errors import PacketError
from ds_hybridep.geometry.packets import HEADER_BYTES
from ds_hybridep.kernels import build

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
NOT_EMULATED = ["reference", "compiled", CUDA]  # what takes long there
DTYPES = [torch.bfloat16, torch.float16]
BLOCK, SEGMENT, GUARD = form.BLOCK, form.SEGMENT, 64


@pytest.fixture(scope="module", params=["reference", "compiled", "emulated", CUDA])
def patch(request):
    """The codec with one kind of kernels.  "emulated" are those for CUDA run on the CPU, "cuda" those on a GPU."""
    if request.param in ("reference", "compiled"):
        yield PatchCodec(kernels=request.param)
        return
    if request.param == "cuda":
        chosen = on_cuda(build.load_codec_kernels("compiled", "cuda"))
    else:
        chosen = load_emulated_codecs()

    def load(mode, device="cpu"):
        return chosen if mode == "compiled" else build.load_codec_kernels(mode, device)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(patch_module, "load_codec_kernels", load)
        yield PatchCodec(kernels="compiled")


def bits_of(weights):
    return weights.view(torch.int16)


def from_bits(bits, dtype):
    """Weights with these bits, of which the low 16 count."""
    return (bits & 0xFFFF).to(torch.int16).view(dtype)


def normal(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def trained(n, step, dtype=torch.bfloat16, seed=0):
    """Weights before and after a step of about that size."""
    master = normal(n, seed) * 0.02
    return master.to(dtype), (master + step * normal(n, seed + 1)).to(dtype)


def encoded(patch, old, new, sequence=0):
    """The packet that turns `old` into `new`, after checks of what encoding must leave behind."""
    sent, out = old.clone(), torch.full((patch.max_bytes(len(new)) + GUARD,), 0xA5, dtype=torch.uint8)
    length = patch.encode(new, sent, out, sequence)
    assert torch.equal(bits_of(sent), bits_of(new))
    assert length <= patch.max_bytes(len(new))
    assert bool((out[-GUARD:] == 0xA5).all())
    assert (patch.length(out), patch.sequence(out)) == (length, sequence)
    return out[:length].clone()


def decoded(patch, packet, old):
    """What `packet` makes of `old`, which lies between weights that must stay as they are."""
    around = torch.full((len(old) + 2 * GUARD,), 1.5, dtype=old.dtype)
    held = around[GUARD : GUARD + len(old)]
    held.copy_(old)
    bits_of(held).copy_(bits_of(old))  # a copy of numbers may change the bits of nan
    try:
        patch.decode(packet, held)
    finally:
        assert bool((around[:GUARD] == 1.5).all())
        assert bool((around[GUARD + len(old) :] == 1.5).all())
    return held


def assert_exact(patch, old, new):
    """Returns the packet, which is the definition's."""
    packet = encoded(patch, old, new)
    assert torch.equal(bits_of(decoded(patch, packet, old)), bits_of(new))
    assert torch.equal(packet, encoded(PatchCodec(kernels="reference"), old, new))
    return packet


# --- Exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        "shuffled",
        "previous",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("reversed", "negated", "next", "none")),
    ],
)
def test_every_number_can_be_old_and_new(patch, dtype, change):
    every = torch.arange(2**16)
    new = {
        "reversed": every.flip(0),
        "shuffled": every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))],
        "negated": every ^ 0x8000,
        "next": every + 1,
        "previous": every - 1,
        "none": every,
    }[change]
    assert_exact(patch, from_bits(every, dtype), from_bits(new, dtype))


@st.composite
def changes(draw):
    """Old and new weights: any number of them, of all kinds, with few or many changes, small or large."""
    n = draw(st.one_of(st.integers(0, 70), st.sampled_from([4095, 4096, 4097, 8192]), st.integers(0, 9000)))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    any_bits = torch.randint(2**16, (n,), generator=generator)
    kind = draw(st.sampled_from(["normal", "any", "zeros", "one value"]))
    if kind == "normal":
        old = bits_of((normal(n, seed) * 10.0 ** draw(st.integers(-8, 2))).to(dtype)).long()
    else:
        old = {"any": any_bits, "zeros": torch.zeros_like(any_bits), "one value": torch.full_like(any_bits, 0x3C01)}[
            kind
        ]
    move = {
        "steps": torch.randint(-3, 4, (n,), generator=generator),
        "octaves": (2.0 ** (16 * torch.rand(n, generator=generator))).long(),
        "any": torch.randint(2**16, (n,), generator=generator),
    }[draw(st.sampled_from(["steps", "octaves", "any"]))]
    share = draw(st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.5, 1.0]))
    is_changed = torch.rand(n, generator=generator) < share
    return from_bits(old, dtype), from_bits(torch.where(is_changed, old + move, old), dtype)


@settings(max_examples=60)
@given(case=changes())
def test_any_change_arrives_exactly_and_takes_the_same_bytes_from_all_kernels(patch, case):
    assert_exact(patch, *case)


@pytest.mark.parametrize("patch", NOT_EMULATED, indirect=True)
@pytest.mark.parametrize(
    ("n", "step"), [(SEGMENT - 1, 1e-6), pytest.param(SEGMENT + 4100, 1e-4, marks=pytest.mark.slow)]
)
def test_more_than_a_segment(patch, n, step):
    assert_exact(patch, *trained(n, step))


@pytest.mark.parametrize("patch", ["compiled"], indirect=True)
def test_packets_do_not_depend_on_threads(patch):
    old, new = trained(3 * SEGMENT + 7, 3e-6)
    new[SEGMENT : 2 * SEGMENT] = old[SEGMENT : 2 * SEGMENT]  # of no bytes
    packets, before = [], torch.get_num_threads()
    for num_threads in (1, 4):
        torch.set_num_threads(num_threads)
        packets.append(encoded(patch, old, new))
        assert torch.equal(bits_of(decoded(patch, packets[-1], old)), bits_of(new))
    torch.set_num_threads(before)
    assert torch.equal(*packets)


def test_code_words_that_would_be_too_long(patch):
    """Counts like Fibonacci's numbers make the longest words of Huffman's rule."""
    counts = [1, 1]
    while len(counts) < 15:
        counts.append(counts[-1] + counts[-2])
    assert max(merged_lengths(counts)) == 14
    assert max(form.code_lengths(counts)) <= form.MAX_CODE_BITS
    sizes = torch.repeat_interleave(2 ** torch.arange(15), torch.tensor(counts))
    old = torch.zeros(len(sizes), dtype=torch.int64)
    assert_exact(patch, from_bits(old, torch.bfloat16), from_bits(old + sizes, torch.bfloat16))


def merged_lengths(counts):
    """Huffman's rule with nothing else: the two rarest groups of symbols become one, again and again."""
    groups = [(count, [symbol]) for symbol, count in enumerate(counts) if count]
    lengths = [0] * len(counts)
    while len(groups) > 1:
        groups.sort(key=lambda group: group[0])
        merged = groups[0][1] + groups[1][1]
        groups[:2] = [(groups[0][0] + groups[1][0], merged)]
        for symbol in merged:
            lengths[symbol] += 1
    return lengths


@given(counts=st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**20)), min_size=2, max_size=55))
def test_code_lengths_are_the_best_where_those_are_short_enough(counts):
    lengths, best = form.code_lengths(counts), merged_lengths(counts)
    assert all((length > 0) == (count > 0) for count, length in zip(counts, lengths, strict=True))
    if sum(count > 0 for count in counts) < 2:
        return
    assert sum(2.0**-length for length in lengths if length) == 1
    assert max(lengths) <= form.MAX_CODE_BITS
    num_bits, fewest = (sum(count * length for count, length in zip(counts, x, strict=True)) for x in (lengths, best))
    assert num_bits >= fewest
    if max(best) <= form.MAX_CODE_BITS:
        assert num_bits == fewest


def test_a_sequence_of_packets(patch):
    old, _ = trained(5000, 0)
    sent, held, out = old.clone(), old.clone(), torch.empty(patch.max_bytes(5000), dtype=torch.uint8)
    for step in range(4):
        new = (old.float() + step * 1e-4 * normal(5000, step)).bfloat16()
        length = patch.encode(new, sent, out, 2**32 - 2 + step)  # the number begins anew at 2^32
        assert patch.sequence(out) == (2**32 - 2 + step) % 2**32
        patch.decode(out, held)  # with more behind the packet
        assert torch.equal(bits_of(held), bits_of(new))
        assert patch.length(out) == length


# --- Size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 100, 4096, 100_000, SEGMENT + 1])
def test_no_packet_is_much_longer_than_its_values(n):
    patch, every = PatchCodec(), torch.randint(2**16, (2, n), generator=torch.Generator().manual_seed(0))
    old, new = (from_bits(bits, torch.bfloat16) for bits in every)
    length = len(encoded(patch, old, new))
    assert length <= patch.max_bytes(n) <= 1.01 * 2 * n + 34
    if n:
        assert length == patch.max_bytes(n)  # random bits: that is the worst
    assert len(encoded(patch, new, new)) == 24 + 4 * -(-n // SEGMENT)


@pytest.mark.parametrize("step", [3e-7, 1e-6, 3e-6, 1e-5])
def test_packets_are_smaller_than_the_entropy_of_the_change(step):
    """From 1% to 20% of the weights change by these steps."""
    old, new = trained(2**20, step)
    share = float((bits_of(old) != bits_of(new)).float().mean())
    assert 0.01 < share < 0.205
    moves = form.place_in_order(bits_of(new).long() & 0xFFFF) - form.place_in_order(bits_of(old).long() & 0xFFFF)
    shares = moves.unique(return_counts=True)[1] / len(moves)
    entropy = float(-(shares * shares.log2()).sum())
    assert 8 * len(encoded(PatchCodec(), old, new)) / len(old) < 0.9 * entropy


def test_the_order_of_numbers_is_theirs():
    for dtype in DTYPES:
        every = torch.arange(2**16)
        numbers = from_bits(every, dtype).float()
        is_number = ~numbers.isnan()
        by_place = numbers[is_number][form.place_in_order(every[is_number]).argsort()]
        assert bool((by_place.diff() >= 0).all())
        places = form.place_in_order(every)
        assert torch.equal(form.place_in_order(places & 0xFFFF) & 0xFFFF, every)
        assert places[0] == 0
        assert places[0x8000] == -1


# --- Damage ----------------------------------------------------------------------------------------------------------


def mutated(packet, others, draw):
    """A copy of `packet` with one kind of damage."""
    data = bytearray(packet.tolist())
    kind = draw.randrange(6)
    if kind == 0:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        for _ in range(draw.randrange(1, 9)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif kind == 2:  # cut off, with and without a header that says so
        del data[draw.randrange(len(data)) :]
        if len(data) >= 24 and draw.randrange(2):
            data[16:24] = len(data).to_bytes(8, "little")
    elif kind == 3:  # the end of another packet
        other, at = draw.choice(others).tolist(), draw.randrange(len(data))
        data[at:] = other[at:]
        if len(data) >= 24:
            data[16:24] = len(data).to_bytes(8, "little")
    elif kind == 4:  # bytes lost or repeated
        at, length = draw.randrange(24, len(data)), draw.randrange(1, 40)
        data[at : at + length] = b"" if draw.randrange(2) else 2 * data[at : at + length]
        data[16:24] = len(data).to_bytes(8, "little")
    else:  # in the tables and lengths at the start, where most is decided
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(min(24, len(data) - 1), min(300, len(data)))] ^= 1 << draw.randrange(8)
    return torch.tensor(list(data), dtype=torch.uint8)


NUM_MUTATIONS = {"reference": 60, "compiled": 500, "emulated": 40, "cuda": 500}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [3e-6, 3e-4])
def test_a_damaged_packet_is_an_error_or_does_no_harm(request, patch, dtype, step):
    draw = random.Random(f"{dtype} {step}")
    cases = [trained(n, step, dtype, seed) for seed, n in enumerate([5000, 12288, 300, 12288])]
    cases[-1][0][4096:] = cases[-1][1][4096:]  # blocks of no bytes
    packets = [encoded(patch, *case) for case in cases]
    kernels = next(name for name in NUM_MUTATIONS if name in request.node.name)
    num_errors = 0
    for idx in range(NUM_MUTATIONS[kernels]):
        which = idx % len(cases)
        old, new = cases[which]
        packet = mutated(packets[which], packets, draw)
        try:
            held = decoded(patch, packet, old)
        except PacketError:
            num_errors += 1
            continue
        assert torch.equal(bits_of(held), bits_of(new))
    assert num_errors > 0.8 * NUM_MUTATIONS[kernels]


@pytest.mark.parametrize("byte", [0, 1, 2, 3, 4, 7, 8, 11, 12, 15, 16, 19, 20, 23])
def test_every_bit_of_the_header_counts(patch, byte):
    old, new = trained(300, 1e-4)
    packet = encoded(patch, old, new, sequence=77)
    for bit in range(8):
        damaged = packet.clone()
        damaged[byte] ^= 1 << bit
        with pytest.raises(PacketError):
            decoded(patch, damaged, old)


DAMAGES = {
    "its segments have other lengths": lambda packet: packet[24:28].copy_(torch.tensor([1, 2, 3, 0])),
    "a segment is of an unknown kind": lambda packet: packet[28:29].fill_(7),
    "a code is cut off or has unknown symbols": lambda packet: packet[30:38].fill_(0xFF),
    "a code has words of impossible lengths": lambda packet: packet[38:39].fill_(0xFF),
    "blocks have other lengths": lambda packet: packet[form_of(packet)[0] : form_of(packet)[0] + 2].fill_(1),
    "a block has another length": lambda packet: packet[-1:].bitwise_xor_(1),
}


def form_of(packet):
    """Where the lengths of blocks begin, and the blocks, in a packet of one segment of one block."""
    _, at = form.read_codes(bytes(packet[28:].tolist()))
    return 28 + at, 28 + at + 2


@pytest.mark.parametrize("what", DAMAGES)
def test_messages_say_what_is_damaged(patch, what):
    old, new = trained(300, 1e-4)
    packet = encoded(patch, old, new, sequence=9)
    DAMAGES[what](packet)
    with pytest.raises(PacketError, match=f"packet 9 is damaged: {what}; get the weights anew"):
        decoded(patch, packet, old)


def test_a_packet_for_other_values_is_an_error(patch):
    old, new = trained(3000, 1e-5)
    packet = encoded(patch, old, new)
    with pytest.raises(PacketError, match="packet 0"):
        decoded(patch, packet, new)  # a second time
    other = old.clone()
    other[1234] *= 2
    with pytest.raises(PacketError, match="packet 0"):
        decoded(patch, packet, other)


def test_packets_of_something_else_are_refused(patch):
    old, new = trained(300, 1e-4)
    packet = encoded(patch, old, new)
    with pytest.raises(PacketError, match=r"stamp 0x\w+, wanted 0x\w+ for a patch of torch.bfloat16 \[299\]"):
        decoded(patch, packet, old[:299])
    with pytest.raises(PacketError, match=r"stamp .*torch.float16 \[300\]; encode and decode tensors of one dtype"):
        decoded(patch, packet, old.half())
    with pytest.raises(PacketError, match="has 23 bytes, wanted 24 or more"):
        patch.length(packet[:23])
    with pytest.raises(PacketError, match=f"has 40 bytes, wanted {len(packet)} as its header says; it was cut off"):
        decoded(patch, packet[:40], old)
    wrong = packet.clone()
    wrong[2] = 1
    with pytest.raises(PacketError, match="packet starts with 0x0001019d, wanted 0x0004019d for a patch"):
        patch.sequence(wrong)
    wrong = packet.clone()
    wrong[22] = 9
    with pytest.raises(PacketError, match=r"says that it has \d+ bytes, wanted 24 or more; it is damaged"):
        patch.length(wrong)
    assert patch.length(packet[:24]) == len(packet) > HEADER_BYTES


def test_wrong_arguments_are_refused(patch):
    old, new = trained(300, 1e-4)
    out = torch.empty(patch.max_bytes(300), dtype=torch.uint8)
    refused = [
        ("new: torch.float32", lambda: patch.encode(new.float(), old, out, 0)),
        ("sent: ", lambda: patch.encode(new, old[:-1], out, 0)),
        ("sent: torch.float16", lambda: patch.encode(new, old.half(), out, 0)),
        ("held: ", lambda: patch.decode(out, old[::2])),
        (r"out: .* wanted 629", lambda: patch.encode(new, old, out[:-1], 0)),
        ("out: on meta, wanted cpu", lambda: patch.encode(new, old, out.to("meta"), 0)),
    ]
    for message, call in refused:
        with pytest.raises(AssertionError, match=message):
            call()
