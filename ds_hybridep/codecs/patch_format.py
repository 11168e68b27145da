# SPDX-License-Identifier: Apache-2.0
"""The bytes of a patch, in plain and slow code.  csrc/include/hybridep_patch.h does the same, faster.

A packet's header and length are followed by:

    lengths of the segments     4 bytes each
    segments

A segment holds 256 blocks of 4096 weights; the last segment and the last block may be short.  It takes

    0 bytes                     if no weight of it changed
    1 + 2 bytes per weight      if nothing shorter was found: byte 0, then the new values
    otherwise                   byte 1, top, 8 codes, the blocks' lengths in 2 bytes each, the blocks

The weights of a block are ordered by *class*, and within a class by place.  The class of a weight is how far its old
exponent is below `top`, from 0 to 7; larger weights have class 0, smaller ones class 7.

A block takes 0 bytes if no weight of it changed, and 2 bytes per weight if it is the new values.  Any other length is
that of a stream of bits, the most significant bit of each byte first, with zeros up to a whole byte.  Each changed
weight is a *token*, and one more token may end the block:

    code        a symbol's code word, up to 10 bits; the class of the first weight not passed yet gives the code
    gap         how many weights to pass, without its leading bit: gap 5 = 101 is the bits 01, gaps 0 and 1 no bits
    bit length  the size's bit length minus one, in 4 bits; only if the symbol says "3 or more"
    size        how far the weight moved, without its leading bit
    sign        1 for down

    symbol      0..15           gap 0, and size of 1..16 bits
                16 + 3 g + s    gap of g + 1 bits (g = 0..12), and size of 1 bit, of 2 bits, or of 3 or more (s = 0..2)

A weight moves along the numbers of its type in order: to the next larger number is 1 up, from +0 to -0 is 1 down.
A token that passes all remaining weights has size 1 and no sign, and ends the block.  If the last weight in order has
changed, there is no such token.

A code is written as 8 bytes, in which bit s says that symbol s is in use, and then the length of each used symbol's
code word in 4 bits, the first one in the low half of its byte, with zeros up to a whole byte.  Code words of equal
length are in order of their symbols, and shorter ones come first.  Numbers of several bytes are little-endian.
"""

import heapq

import torch
from torch import Tensor

MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}

BLOCK = 4096
SEGMENT = 256 * BLOCK
NUM_CLASSES = 8
NUM_SYMBOLS = 55
MAX_CODE_BITS = 10
RAW, CODED = 0, 1  # first byte of a segment
SAMPLE = 64  # weights at the start of each block, from which `top` is chosen
TOP_SHARE = 8  # more than 1 / TOP_SHARE of the sampled weights have an exponent of `top` or above

CHECK_MODULUS = 2**32


def encode(new: Tensor, sent: Tensor, payload: Tensor, *, mantissa_bits: int) -> tuple[int, int]:
    """Write the payload that turns `sent` into `new`, and set sent to new.  Returns bytes written and `checksum`."""
    values, old = _bits(new), _bits(sent)
    pairs = zip(_parts(values, SEGMENT), _parts(old, SEGMENT), strict=True)
    segments = [encode_segment(part, before, mantissa_bits) for part, before in pairs]
    result = b"".join([*(len(segment).to_bytes(4, "little") for segment in segments), *segments])
    payload[: len(result)] = _bytes(result).to(payload.device)
    sent.copy_(new)
    return len(result), checksum(values)


def decode(payload: Tensor, held: Tensor, *, mantissa_bits: int) -> tuple[str, int]:
    """Turn `held` into the new values.  Returns what is wrong with the payload ("" if nothing) and `checksum`."""
    data, values = bytes(payload.tolist()), _bits(held)
    parts = _parts(values, SEGMENT)
    try:
        for part, segment in zip(
            parts, _cut(data, 0, 4, len(parts), damage="its segments have other lengths"), strict=True
        ):
            decode_segment(segment, part, mantissa_bits)
    except _Damaged as damage:
        return str(damage), 0
    held.view(torch.int16).copy_(values.to(torch.int16))
    return "", checksum(values)


def checksum(values: Tensor) -> int:
    """Return the sum over blocks b of (2 b + 1) times the sum over weights i of factor i times bits i, modulo 2^32.

    Factors are odd, so that every single change changes the sum.  They are without order, because damage often does
    much the same to one weight as to the next.
    """
    place = 0x9E3779B1 * torch.arange(1, BLOCK + 1) % CHECK_MODULUS
    factors = (place ^ place >> 15) * 0x85EBCA77 % CHECK_MODULUS | 1
    sums = [int((block * factors[: len(block)]).sum()) for block in values.split(BLOCK)]
    return sum((2 * idx + 1) * one for idx, one in enumerate(sums)) % CHECK_MODULUS


class _Damaged(Exception):
    """What is wrong with a payload."""


def _bits(weights: Tensor) -> Tensor:
    """Return the bits of 16-bit weights as int64 from 0 to 65535, on the CPU."""
    return weights.view(torch.int16).cpu().long() & 0xFFFF


def _bytes(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _parts(values: Tensor, size: int) -> list[Tensor]:
    return list(values.split(size)) if len(values) else []


def _cut(data: bytes, at: int, width: int, count: int, *, damage: str) -> list[bytes]:
    """Return `count` parts of data; their lengths stand before them at `at`, in `width` bytes each."""
    lengths = [int.from_bytes(data[at + width * idx : at + width * (idx + 1)], "little") for idx in range(count)]
    at += width * count
    if len(data) != at + sum(lengths):
        raise _Damaged(damage)
    parts = []
    for length in lengths:
        parts.append(data[at : at + length])
        at += length
    return parts


def place_in_order(bits: Tensor) -> Tensor:
    """Return the place of these bits among all numbers of their type, -32768 to 32767; its own inverse modulo 2^16."""
    signed = bits - (bits >> 15 << 16)
    return signed ^ ((signed >> 15) & 0x7FFF)


# --- Classes, tokens and codes ---------------------------------------------------------------------------------------


def top_exponent(old: Tensor, mantissa_bits: int) -> int:
    """Return the largest exponent that more than 1 / TOP_SHARE of the sampled weights reach."""
    sample = torch.cat([block[:SAMPLE] for block in old.split(BLOCK)])
    exponents = (sample & 0x7FFF) >> mantissa_bits
    reached = torch.bincount(exponents).flip(0).cumsum(0).flip(0)  # [e]: how many have exponent e or above
    return int((reached * TOP_SHARE > len(sample)).nonzero().max())


def classes_of(old: Tensor, top: int, mantissa_bits: int) -> Tensor:
    return (top - ((old & 0x7FFF) >> mantissa_bits)).clamp(0, NUM_CLASSES - 1)


def tokens_of(new: Tensor, old: Tensor, classes: Tensor) -> tuple[Tensor, ...]:
    """Return the tokens of what changed in a segment, in order: block, class of the code, gap and move, [N] int64.

    A token that ends its block has the move 0.
    """
    n = len(new)
    # The sort is stable, so places stay in order.
    order = (torch.arange(n) // BLOCK * NUM_CLASSES + classes).argsort(stable=True)
    moves = ((place_in_order(new) - place_in_order(old) + 2**15) % 2**16 - 2**15)[order]
    found = moves.nonzero()[:, 0]
    ends = (((found // BLOCK).unique() + 1) * BLOCK).clamp(max=n)
    # Order tokens by where they lead to; an end comes before the next block's first weight, at the same place.
    keys = torch.cat([2 * ends, 2 * found + 1]).sort().values
    to, is_end = keys // 2, keys % 2 == 0
    block = (to - is_end.long()) // BLOCK
    start = block * BLOCK
    start[1:] = torch.where(block[1:] == block[:-1], to[:-1] + 1, start[1:])
    move = torch.where(is_end, 0, moves[to.clamp(max=n - 1)])
    tokens = (block, classes[order][start.clamp(max=n - 1)], to - start, move)
    is_needed = start < ((block + 1) * BLOCK).clamp(max=n)
    return tuple(one[is_needed] for one in tokens)


def bit_length(x: Tensor) -> Tensor:
    """Return the number of bits of the binary form of x from 0 to 65535, 0 for 0."""
    return torch.frexp(x.double())[1].long()


def code_lengths(counts: list[int]) -> list[int]:
    """Return the bits of each symbol's code word by Huffman's rule, 0 if its count is 0.

    Among equal counts, the lower symbol is merged first, and symbols before what was merged already.  If a word gets
    longer than MAX_CODE_BITS, all counts are halved, rounded up, and the words are made again.
    """
    used = [symbol for symbol, count in enumerate(counts) if count]
    if len(used) <= 1:
        return [int(symbol in used) for symbol in range(len(counts))]
    while True:
        nodes = [(counts[one], one, [one]) for one in used]  # count, rank among equal counts, symbols below
        lengths = [0] * len(counts)
        heapq.heapify(nodes)
        for merged in range(len(used) - 1):
            (count, _, symbols), (other_count, _, others) = heapq.heappop(nodes), heapq.heappop(nodes)
            for symbol in symbols + others:
                lengths[symbol] += 1
            heapq.heappush(nodes, (count + other_count, len(counts) + merged, symbols + others))
        if max(lengths) <= MAX_CODE_BITS:
            return lengths
        counts = [(count + 1) // 2 for count in counts]


def code_words(lengths: list[int]) -> list[int]:
    """Return the code word of each symbol, as a number with that many bits; 0 for symbols that have none."""
    words, word, bits = [0] * len(lengths), 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        word <<= length - bits
        words[symbol], bits = word, length
        word += 1
    return words


# --- Segments --------------------------------------------------------------------------------------------------------


def encode_segment(new: Tensor, old: Tensor, mantissa_bits: int) -> bytes:
    """Return the bytes of a segment that turns the bits `old` into `new`."""
    if torch.equal(new, old):
        return b""
    top = top_exponent(old, mantissa_bits)
    block, code, gap, move = tokens_of(new, old, classes_of(old, top, mantissa_bits))
    # 1. The code of each class.
    size = move.abs().clamp(min=1)
    gap_bits, size_bits = bit_length(gap), bit_length(size)
    symbol = torch.where(gap_bits == 0, size_bits - 1, 13 + 3 * gap_bits + size_bits.clamp(max=3) - 1)
    counts = torch.bincount(code * NUM_SYMBOLS + symbol, minlength=NUM_CLASSES * NUM_SYMBOLS)
    codes = [code_lengths(of_class) for of_class in counts.view(NUM_CLASSES, NUM_SYMBOLS).tolist()]
    words, lengths = torch.tensor([code_words(one) for one in codes]), torch.tensor(codes)
    # 2. The fields of each token, [N, 5], and how many bits each has.
    fields = torch.stack([words[code, symbol], gap, size_bits - 1, size, (move < 0).long()], dim=1)
    has_length = ((gap_bits > 0) & (size_bits >= 3)).long()
    gap_width = (gap_bits - 1).clamp(min=0)
    widths = torch.stack([lengths[code, symbol], gap_width, 4 * has_length, size_bits - 1, (move != 0).long()], dim=1)
    # 3. Blocks.
    last = torch.bincount(block, minlength=-(-len(new) // BLOCK)).cumsum(0).tolist()
    blocks = []
    for first, end, part in zip([0, *last], last, new.split(BLOCK), strict=False):
        packed = pack(fields[first:end].flatten(), widths[first:end].flatten())
        blocks.append(packed if len(packed) < 2 * len(part) else _raw(part))
    result = bytes([CODED, top]) + b"".join(map(write_code, codes))
    result += b"".join([*(len(one).to_bytes(2, "little") for one in blocks), *blocks])
    return result if len(result) <= 2 * len(new) else bytes([RAW]) + _raw(new)


def pack(values: Tensor, widths: Tensor) -> bytes:
    """Join the low `widths` bits of each of `values`, and add zeros up to a whole byte."""
    end = widths.cumsum(0).repeat_interleave(widths)
    bits = values.repeat_interleave(widths) >> (end - 1 - torch.arange(len(end))) & 1
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return bytes((padded * (1 << torch.arange(7, -1, -1))).sum(dim=1).tolist())


def write_code(lengths: list[int]) -> bytes:
    """Write a code, given the lengths of its words."""
    used = sum(1 << symbol for symbol, length in enumerate(lengths) if length)
    halves = [length for length in lengths if length]
    halves += [0] * (len(halves) % 2)
    pairs = zip(halves[::2], halves[1::2], strict=True)
    return used.to_bytes(8, "little") + bytes(low | high << 4 for low, high in pairs)


def _raw(values: Tensor) -> bytes:
    return b"".join(value.to_bytes(2, "little") for value in values.tolist())


def _from_raw(data: bytes) -> Tensor:
    return torch.tensor([data[at] | data[at + 1] << 8 for at in range(0, len(data), 2)], dtype=torch.int64)


def decode_segment(data: bytes, values: Tensor, mantissa_bits: int) -> None:
    """Turn the old bits `values` into the new ones, in place."""
    if not data:
        return
    if data[0] == RAW:
        if len(data) != 1 + 2 * len(values):
            raise _Damaged("a segment has another length")
        values.copy_(_from_raw(data[1:]))
        return
    if data[0] != CODED or len(data) < 2:
        raise _Damaged("a segment is of an unknown kind")
    codes, at = read_codes(data)
    blocks = values.split(BLOCK)
    for block, part in zip(blocks, _cut(data, at, 2, len(blocks), damage="blocks have other lengths"), strict=True):
        if len(part) == 2 * len(block):
            block.copy_(_from_raw(part))
        elif len(part) > 2 * len(block):
            raise _Damaged("a block is too long")
        elif part:
            decode_block(_Bits(part), block, classes_of(block, data[1], mantissa_bits), codes)


def read_codes(data: bytes) -> tuple[list[dict[str, int]], int]:
    """Return the symbols by code word for each class, and where the codes end."""
    codes, at = [], 2
    for _ in range(NUM_CLASSES):
        used = int.from_bytes(data[at : at + 8], "little")
        symbols = [symbol for symbol in range(64) if used >> symbol & 1]
        end = at + 8 + -(-len(symbols) // 2)
        if end > len(data) or used >> NUM_SYMBOLS:
            raise _Damaged("a code is cut off or has unknown symbols")
        halves = [half for byte in data[at + 8 : end] for half in (byte & 15, byte >> 4)]
        found = halves[: len(symbols)]
        # Every stream of bits must mean something; only a code with one symbol is the bit 0 and leaves 1 unused.
        share = sum(2.0**-length for length in found)
        is_whole = share == (0.5 if len(symbols) == 1 else 1.0)
        if any(not 1 <= length <= MAX_CODE_BITS for length in found) or (symbols and not is_whole):
            raise _Damaged("a code has words of impossible lengths")
        if any(halves[len(symbols) :]):
            raise _Damaged("a code is not followed by zeros")
        words = code_words(found)
        codes.append({f"{word:0{length}b}": one for one, word, length in zip(symbols, words, found, strict=True)})
        at = end
    return codes, at


class _Bits:
    """A stream of bits.  Zeros follow its end; `close` raises _Damaged unless exactly the stream was read."""

    def __init__(self, data: bytes) -> None:
        self.text = "".join(f"{byte:08b}" for byte in data) + "0" * 64
        self.at = 0
        self.num_bytes = len(data)

    def take(self, width: int) -> int:
        self.at += width
        return int(self.text[self.at - width : self.at] or "0", 2)

    def with_leading_bit(self, width: int) -> int:
        return 0 if width == 0 else 1 << (width - 1) | self.take(width - 1)

    def symbol(self, words: dict[str, int]) -> int:
        for length in range(1, MAX_CODE_BITS + 1):
            found = words.get(self.text[self.at : self.at + length])
            if found is not None:
                self.at += length
                return found
        raise _Damaged("a code word is not in use")

    def close(self) -> None:
        if -(-self.at // 8) != self.num_bytes or "1" in self.text[self.at :]:
            raise _Damaged("a block has another length")


def decode_block(bits: _Bits, block: Tensor, classes: Tensor, codes: list[dict[str, int]]) -> None:
    """Apply the tokens of one block to its old bits, in place."""
    order = classes.argsort(stable=True)
    of_class, moves = classes[order].tolist(), torch.zeros_like(block)
    start, count = 0, len(of_class)
    while start < count:
        symbol = bits.symbol(codes[of_class[start]])
        gap_bits, size_bits = (0, symbol + 1) if symbol < 16 else ((symbol - 13) // 3, (symbol - 13) % 3 + 1)
        place = start + bits.with_leading_bit(gap_bits)
        if place > count or (place == count and size_bits > 1):
            raise _Damaged("a token leads out of its block")
        if place == count:
            break
        if gap_bits and size_bits == 3:
            size_bits = bits.take(4) + 1
            if size_bits < 3:
                raise _Damaged("a size has another form")
        size = bits.with_leading_bit(size_bits)
        moves[order[place]] = -size if bits.take(1) else size
        start = place + 1
    bits.close()
    block.copy_(place_in_order((place_in_order(block) + moves) & 0xFFFF) & 0xFFFF)
