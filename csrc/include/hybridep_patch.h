// SPDX-License-Identifier: Apache-2.0
//
// What CPU and CUDA kernels of patches share: codes, tokens, and the coding and decoding of one block.
// ds_hybridep/codecs/patch_format.py defines the layout.
//
// The weights of a block are never sorted.  For each class a mask of 4096 bits says which weights are in it, and
// another mask which weights have changed; a gap is a number of set bits.

#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "hybridep_elements.h"

namespace hybridep::patch {

inline constexpr int kBlock = 4096;
inline constexpr int kBlocksPerSegment = 256;
inline constexpr int64_t kSegment = static_cast<int64_t>(kBlock) * kBlocksPerSegment;
inline constexpr int kClasses = 8;
inline constexpr int kSymbols = 55;
inline constexpr int kCodes = kClasses * kSymbols;  // symbols of all classes
inline constexpr int kMaxCodeBits = 10;
inline constexpr int kCodeTable = 1 << kMaxCodeBits;
inline constexpr int kWords = kBlock / 64;  // of a mask
inline constexpr int kSample = 64;
inline constexpr int kTopShare = 8;
inline constexpr int kExponents = 256;
inline constexpr uint8_t kRaw = 0, kCoded = 1;
inline constexpr int kMaxTokenBits = 42;                                 // 10 + 12 + 4 + 15 + 1
inline constexpr int kMaxCodeBytes = 8 + (kSymbols + 1) / 2;             // as written
inline constexpr int kMaxHeadBytes = 2 + kClasses * kMaxCodeBytes;       // of a segment, before the blocks' lengths
inline constexpr int kMaxBlockBytes = (kBlock * kMaxTokenBits + 7) / 8;  // before a block is found to be raw
inline constexpr int kLengthBytes = 4;                                   // of a segment's length

// What is wrong with a payload.
enum class Damage : int64_t {
    kNone = 0,
    kSegmentLengths = 1,
    kSegmentLength = 2,
    kSegmentKind = 3,
    kCodeCut = 4,
    kCodeWords = 5,
    kCodePadding = 6,
    kBlockLengths = 7,
    kBlockTooLong = 8,
    kUnusedWord = 9,
    kOutOfBlock = 10,
    kSizeForm = 11,
    kBlockLength = 12,
};

HYBRIDEP_BOTH int64_t segment_length(int64_t n, int64_t segment) {
    const int64_t left = n - segment * kSegment;
    return left < kSegment ? left : kSegment;
}

HYBRIDEP_BOTH int blocks_of(int64_t length) { return static_cast<int>((length + kBlock - 1) / kBlock); }

HYBRIDEP_BOTH int block_length(int64_t length, int block) {
    const int64_t left = length - static_cast<int64_t>(block) * kBlock;
    return static_cast<int>(left < kBlock ? left : kBlock);
}

HYBRIDEP_BOTH int class_of(uint16_t bits, int top, int mantissa_bits) {
    const int below = top - ((bits & 0x7fff) >> mantissa_bits);
    return below < 0 ? 0 : below < kClasses - 1 ? below : kClasses - 1;
}

// The place of the number with these bits in the order of all numbers of its type.  The function is its own inverse.
HYBRIDEP_BOTH uint16_t place_in_order(uint16_t bits) { return static_cast<uint16_t>(bits ^ ((bits >> 15) * 0x7fffu)); }

// The checksum multiplies the bits of the weight at `place` of its block by this.
HYBRIDEP_BOTH constexpr uint32_t check_factor(int place) {
    const uint32_t mixed = 0x9e3779b1u * static_cast<uint32_t>(place + 1);
    return (mixed ^ mixed >> 15) * 0x85ebca77u | 1u;
}

HYBRIDEP_BOTH constexpr uint32_t check_factor_of_block(int64_t block) { return static_cast<uint32_t>(2 * block + 1); }

HYBRIDEP_BOTH int count_bits(uint64_t x) {
#ifdef __CUDA_ARCH__
    return __popcll(x);
#else
    return std::popcount(x);
#endif
}

HYBRIDEP_BOTH int first_bit(uint64_t x) {
#ifdef __CUDA_ARCH__
    return __ffsll(static_cast<long long>(x)) - 1;
#else
    return std::countr_zero(x);
#endif
}

HYBRIDEP_BOTH int bit_length(uint32_t x) {
#ifdef __CUDA_ARCH__
    return 32 - __clz(static_cast<int>(x));
#else
    return 32 - std::countl_zero(x);
#endif
}

// The set bit of `x` that has `rank` set bits below it; x has more than `rank` set bits.
HYBRIDEP_BOTH uint64_t select_bit(uint64_t x, int rank) {
#if defined(__BMI2__) && !defined(__CUDACC__)
    return __builtin_ia32_pdep_di(uint64_t{1} << rank, x);
#else
    int shift = 0;
    for (int half = 32; half > 0; half /= 2) {
        const int below = count_bits(x >> shift & ((uint64_t{1} << half) - 1));
        if (rank >= below) {
            rank -= below;
            shift += half;
        }
    }
    return uint64_t{1} << shift;
#endif
}

// --- Codes ----------------------------------------------------------------------------------------------------------

// lengths [kSymbols] of code words, from counts [kSymbols] of symbols; 0 for a symbol that does not occur.
//
// Huffman's rule with two queues: symbols by count, and sums in the order in which they are made.  Of equal counts the
// lower symbol goes first, and symbols before sums.  If a word is too long, all counts are halved, rounded up.
HYBRIDEP_BOTH void code_lengths(const uint32_t* counts, uint8_t* lengths) {
    uint32_t weights[2 * kSymbols];  // symbols in order of count, then sums
    uint8_t symbols[kSymbols];
    uint8_t parents[2 * kSymbols];
    uint8_t depths[2 * kSymbols];
    int used = 0;
    for (int symbol = 0; symbol < kSymbols; ++symbol) {
        lengths[symbol] = 0;
        if (counts[symbol] != 0) ++used;
    }
    for (int halvings = 0; used > 0; ++halvings) {
        int filled = 0;
        for (int symbol = 0; symbol < kSymbols; ++symbol) {
            if (counts[symbol] == 0) continue;
            uint32_t count = counts[symbol];
            for (int i = 0; i < halvings; ++i) count = count / 2 + count % 2;
            int at = filled++;
            for (; at > 0 && weights[at - 1] > count; --at) {
                weights[at] = weights[at - 1];
                symbols[at] = symbols[at - 1];
            }
            weights[at] = count;
            symbols[at] = static_cast<uint8_t>(symbol);
        }
        if (used == 1) {
            lengths[symbols[0]] = 1;
            return;
        }
        int leaf = 0, sum = used;
        const int root = 2 * used - 2;
        for (int made = used; made <= root; ++made) {
            weights[made] = 0;
            for (int i = 0; i < 2; ++i) {
                const bool is_leaf = leaf < used && (sum == made || weights[leaf] <= weights[sum]);
                const int taken = is_leaf ? leaf++ : sum++;
                weights[made] += weights[taken];
                parents[taken] = static_cast<uint8_t>(made);
            }
        }
        depths[root] = 0;
        int deepest = 0;
        for (int node = root - 1; node >= 0; --node) {
            depths[node] = static_cast<uint8_t>(depths[parents[node]] + 1);
            deepest = deepest > depths[node] ? deepest : depths[node];
        }
        if (deepest > kMaxCodeBits) continue;
        for (int i = 0; i < used; ++i) lengths[symbols[i]] = depths[i];
        return;
    }
}

// words [kSymbols]: the code word of each symbol.
HYBRIDEP_BOTH void code_words(const uint8_t* lengths, uint16_t* words) {
    int word = 0;
    for (int length = 1; length <= kMaxCodeBits; ++length) {
        word *= 2;
        for (int symbol = 0; symbol < kSymbols; ++symbol) {
            if (lengths[symbol] == length) words[symbol] = static_cast<uint16_t>(word++);
        }
    }
}

// Writes the codes with lengths [kClasses * kSymbols] to `out`, if that is given.  Returns the bytes that they take.
HYBRIDEP_BOTH int write_codes(const uint8_t* lengths, uint8_t* out) {
    int at = 0;
    for (int code = 0; code < kClasses; ++code) {
        uint64_t used = 0;
        int num_used = 0;
        for (int symbol = 0; symbol < kSymbols; ++symbol) {
            const uint8_t length = lengths[code * kSymbols + symbol];
            if (length == 0) continue;
            used |= uint64_t{1} << symbol;
            if (out != nullptr) {
                uint8_t* half = out + at + 8 + num_used / 2;
                *half = static_cast<uint8_t>(num_used % 2 == 0 ? length : *half | length << 4);
            }
            ++num_used;
        }
        for (int byte = 0; out != nullptr && byte < 8; ++byte)
            out[at + byte] = static_cast<uint8_t>(used >> (8 * byte));
        at += 8 + (num_used + 1) / 2;
    }
    return at;
}

// Entry of a decoding table, for all bits that begin with the symbol's code word.  An entry without a symbol is 0.
//
//   bits 0-3    bits of the word            bits 8-11   bits of the size that are written
//   bits 4-7    bits of the gap, written    bit 12      the gap is not 0, so it has a leading bit
//   bit 13      the size's bit length is written, and bits 8-11 say nothing
HYBRIDEP_BOTH uint16_t table_entry(int symbol, int length) {
    const int gap_bits = symbol < 16 ? 0 : (symbol - 13) / 3;
    const int size_bits = symbol < 16 ? symbol : (symbol - 13) % 3;
    const int has_gap = gap_bits > 0, has_length = has_gap && size_bits == 2;
    return static_cast<uint16_t>(length | (gap_bits - has_gap) << 4 | size_bits << 8 | has_gap << 12 |
                                 has_length << 13);
}

// Reads lengths [kClasses * kSymbols] from codes at data [bytes]; *used_bytes becomes the bytes that the codes take.
HYBRIDEP_BOTH Damage read_codes(const uint8_t* data, int64_t bytes, uint8_t* lengths, int* used_bytes) {
    int64_t at = 0;
    for (int code = 0; code < kClasses; ++code) {
        if (at + 8 > bytes) return Damage::kCodeCut;
        uint64_t used = 0;
        for (int byte = 0; byte < 8; ++byte) used |= static_cast<uint64_t>(data[at + byte]) << (8 * byte);
        const int num_used = count_bits(used);
        at += 8;
        if (used >> kSymbols != 0 || at + (num_used + 1) / 2 > bytes) return Damage::kCodeCut;
        int seen = 0, share = 0;
        for (int symbol = 0; symbol < kSymbols; ++symbol) {
            lengths[code * kSymbols + symbol] = 0;
            if ((used >> symbol & 1) == 0) continue;
            const int length = data[at + seen / 2] >> (seen % 2 * 4) & 15;
            ++seen;
            if (length < 1 || length > kMaxCodeBits) return Damage::kCodeWords;
            lengths[code * kSymbols + symbol] = static_cast<uint8_t>(length);
            share += kCodeTable >> length;
        }
        // Every sequence of bits must mean something.  If there is one symbol only, its word is one bit, a 0.
        if (num_used > 0 && share != (num_used == 1 ? kCodeTable / 2 : kCodeTable)) return Damage::kCodeWords;
        if (num_used % 2 == 1 && data[at + num_used / 2] >> 4 != 0) return Damage::kCodePadding;
        at += (num_used + 1) / 2;
    }
    *used_bytes = static_cast<int>(at);
    return Damage::kNone;
}

// Fills entries [first, kCodeTable) of a table, every `step`th, from lengths that read_codes has checked.
HYBRIDEP_BOTH void fill_table(const uint8_t* lengths, uint16_t* table, int first, int step) {
    uint16_t words[kSymbols];
    code_words(lengths, words);
    for (int i = first; i < kCodeTable; i += step) table[i] = 0;
    for (int symbol = 0; symbol < kSymbols; ++symbol) {
        const int length = lengths[symbol];
        if (length == 0) continue;
        const int begin = words[symbol] << (kMaxCodeBits - length), end = begin + (kCodeTable >> length);
        int i = begin / step * step + first;
        if (i < begin) i += step;
        for (; i < end; i += step) table[i] = table_entry(symbol, length);
    }
}

// --- Tokens ---------------------------------------------------------------------------------------------------------

// A symbol, and what follows its code word.
struct Token {
    uint32_t bits;
    uint16_t num_bits;
    uint16_t which;  // class * kSymbols + symbol; the class chooses the code
};

// `move` is how far the weight moves, modulo 2^16; the token that ends a block has none.  There are no branches,
// because no processor could predict them.
template <bool kIsEnd>
HYBRIDEP_BOTH Token make_token(int code, uint32_t gap, uint16_t move) {
    const uint32_t is_down = kIsEnd ? 0 : move >> 15;
    const uint32_t size = kIsEnd ? 1 : ((move ^ (0u - is_down)) + is_down) & 0xffff;
    const int gap_bits = bit_length(gap), size_bits = bit_length(size);
    const int has_gap = gap != 0, has_length = has_gap & (size_bits >= 3);
    const int symbol_of_none = size_bits - 1, symbol_of_some = 12 + 3 * gap_bits + (size_bits < 3 ? size_bits : 3);
    const int symbol = has_gap ? symbol_of_some : symbol_of_none;
    int num_bits = gap_bits - has_gap;
    uint32_t bits = gap & ((1u << num_bits) - 1);
    bits =
        bits << (4 * has_length) | (static_cast<uint32_t>(size_bits - 1) & (0u - static_cast<uint32_t>(has_length)));
    bits = bits << (size_bits - 1) | (size & ((1u << (size_bits - 1)) - 1));
    num_bits += 4 * has_length + size_bits - 1;
    if (!kIsEnd) {
        bits = bits << 1 | is_down;
        ++num_bits;
    }
    return {bits, static_cast<uint16_t>(num_bits), static_cast<uint16_t>(code * kSymbols + symbol)};
}

// The weights of a block: which are in each class, and which have changed.
struct Masks {
    uint64_t in_class[kClasses * kWords];
    uint64_t changed[kWords];
};

// Calls body(Token) for each token of a block of `count` weights, some of which have changed.
template <typename Body>
HYBRIDEP_BOTH void for_each_token(const Masks& masks, const uint16_t* values, const uint16_t* old, int count,
                                  Body&& body) {
    int start = 0, passed = 0, code = 0;  // start, passed: weights passed by tokens and by the loop, in order of class
    for (int c = 0; c < kClasses; ++c) {
        if (start == passed) code = c;
        for (int word = 0; word < kWords; ++word) {
            const uint64_t members = masks.in_class[c * kWords + word];
            for (uint64_t found = members & masks.changed[word]; found != 0; found &= found - 1) {
                const int rank = passed + count_bits(members & ((found & (0 - found)) - 1));
                const int place = word * 64 + first_bit(found);
                const auto move = static_cast<uint16_t>(place_in_order(values[place]) - place_in_order(old[place]));
                body(make_token<false>(code, static_cast<uint32_t>(rank - start), move));
                start = rank + 1;
                code = c;
            }
            passed += count_bits(members);
        }
    }
    if (start < count) body(make_token<true>(code, static_cast<uint32_t>(count - start), 0));
}

// --- Decoding -------------------------------------------------------------------------------------------------------

// Reads bits, most significant first.  Behind the end of the data it reads zeros.
struct BitReader {
    const uint8_t* data;
    int64_t bytes;
    int64_t at = 0;  // in bits

    // At least 57 bits from `at` on, in the upper end of a word.
    HYBRIDEP_BOTH uint64_t peek() const {
        const int64_t byte = at >> 3;
        uint64_t word = 0;
#ifndef __CUDA_ARCH__
        if (byte + 8 <= bytes) {
            std::memcpy(&word, data + byte, 8);
            return __builtin_bswap64(word) << (at & 7);
        }
#endif
        for (int i = 0; i < 8; ++i) {
            word = word << 8 | (byte + i < bytes ? data[byte + i] : 0);
        }
        return word << (at & 7);
    }
};

// Turns weights [count] from old to new ones by the tokens at data [bytes].  tables [kClasses * kCodeTable].
HYBRIDEP_BOTH Damage decode_tokens(const Masks& masks, const uint8_t* data, int64_t bytes, const uint16_t* tables,
                                   int count, uint16_t* weights) {
    BitReader reader{data, bytes};
    const uint64_t* words = masks.in_class;
    int word = 0, passed = 0;  // passed: weights, in order of class
    uint64_t left = words[0];  // weights of this word that no token has passed
    while (passed < count) {
        while (left == 0) left = words[++word];  // a next word exists, since not all weights were passed
        uint64_t bits = reader.peek();
        const uint32_t entry = tables[(word / kWords) * kCodeTable + static_cast<int>(bits >> (64 - kMaxCodeBits))];
        if (entry == 0) return Damage::kUnusedWord;
        const int length = entry & 15, gap_bits = entry >> 4 & 15;
        int size_bits = entry >> 8 & 15, used = length + gap_bits;
        bits <<= length;
        // Two shifts, since a word cannot be shifted by all its bits at once.
        int gap =
            static_cast<int>((entry >> 12 & 1) << gap_bits | static_cast<uint32_t>(bits >> 1 >> (63 - gap_bits)));
        bits <<= gap_bits;
        if (gap >= count - passed) {
            if (gap > count - passed || size_bits > 0) return Damage::kOutOfBlock;
            reader.at += used;
            break;
        }
        if ((entry >> 13 & 1) != 0) {
            size_bits = static_cast<int>(bits >> 60);
            if (size_bits < 2) return Damage::kSizeForm;
            bits <<= 4;
            used += 4;
        }
        const uint32_t size = 1u << size_bits | static_cast<uint32_t>(bits >> 1 >> (63 - size_bits));
        const uint32_t sign = 0u - static_cast<uint32_t>(bits << size_bits >> 63);
        reader.at += used + size_bits + 1;
        passed += gap + 1;
        for (int here = count_bits(left); gap >= here; here = count_bits(left)) {
            gap -= here;
            left = words[++word];  // a next word exists, since the gap is below the number of weights left
        }
        const uint64_t bit = select_bit(left, gap);
        left &= ~(bit | (bit - 1));
        uint16_t& weight = weights[word % kWords * 64 + first_bit(bit)];
        weight = place_in_order(static_cast<uint16_t>(place_in_order(weight) + ((size ^ sign) - sign)));
    }
    const int64_t padding = 8 * bytes - reader.at;
    if (padding < 0 || padding > 7) return Damage::kBlockLength;
    if (padding > 0 && (data[bytes - 1] & ((1 << padding) - 1)) != 0) return Damage::kBlockLength;
    return Damage::kNone;
}

}  // namespace hybridep::patch
