// SPDX-License-Identifier: Apache-2.0
//
// Patches of 16-bit weights on the CPU: a thread per segment.  hybridep_codecs.h says what each function computes;
// ds_hybridep/codecs/patch_format.py defines the layout.

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "hybridep_blocks.h"
#include "hybridep_codecs.h"
#include "hybridep_patch.h"

namespace hybridep {
namespace {

using namespace patch;

int threads_of(const PatchShape& shape, int num_threads) {
    const int64_t segments = ceil_div(shape.n, kSegment);
    return static_cast<int>(std::clamp<int64_t>(segments, 1, std::max(num_threads, 1)));
}

// --- Masks ----------------------------------------------------------------------------------------------------------

// Bit `bit` of each of 64 bytes, the first byte's in bit 0.
uint64_t gather_bits(const uint8_t* bytes, int bit) {
#ifdef __AVX2__
    const __m128i shift = _mm_cvtsi32_si128(7 - bit);
    const auto half = [&](const uint8_t* from) {
        const __m256i words = _mm256_sll_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), shift);
        return static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(words)));
    };
    return half(bytes) | half(bytes + 32) << 32;
#else
    uint64_t result = 0;
    for (int i = 0; i < 8; ++i) {
        uint64_t eight;
        std::memcpy(&eight, bytes + 8 * i, 8);
        // The product has the lowest bits of the bytes side by side in its highest byte.
        result |= ((eight >> bit & 0x0101010101010101u) * 0x0102040810204080u) >> 56 << (8 * i);
    }
    return result;
#endif
}

// Makes the masks of a block of `count` weights; `changed` is 0 without kIsChange.  Returns whether any has changed.
template <bool kIsChange>
bool make_masks(const uint16_t* values, const uint16_t* old, int count, int top, int mantissa_bits, Masks& masks) {
    // 1. A byte for each weight: its class in three bits, and one bit that says whether it has changed.
    alignas(64) uint8_t marks[kBlock];
    const auto highest = static_cast<uint16_t>(top);
#pragma omp simd
    for (int i = 0; i < count; ++i) {
        const auto exponent = static_cast<uint16_t>((old[i] & 0x7fff) >> mantissa_bits);
        const auto below = static_cast<uint16_t>(highest > exponent ? highest - exponent : 0);
        auto mark = static_cast<uint8_t>(below < kClasses - 1 ? below : kClasses - 1);
        if (kIsChange) mark = static_cast<uint8_t>(mark | (values[i] != old[i] ? kClasses : 0));
        marks[i] = mark;
    }
    std::memset(marks + count, 0, static_cast<size_t>(kBlock - count));

    // 2. For each bit of these bytes, masks of 64 weights; from those, the masks of the classes.
    alignas(64) uint64_t planes[3][kWords];
    for (int word = 0; word < kWords; ++word) {
        for (int bit = 0; bit < 3; ++bit) planes[bit][word] = gather_bits(marks + word * 64, bit);
        masks.changed[word] = kIsChange ? gather_bits(marks + word * 64, 3) : 0;
    }
    alignas(64) uint64_t is_weight[kWords];
    for (int word = 0; word < kWords; ++word) {
        const int left = count - word * 64;
        is_weight[word] = left >= 64 ? ~uint64_t{0} : left <= 0 ? 0 : (uint64_t{1} << left) - 1;
    }
    for (int c = 0; c < kClasses; ++c) {
        const uint64_t flip[3] = {c & 1 ? 0 : ~uint64_t{0}, c & 2 ? 0 : ~uint64_t{0}, c & 4 ? 0 : ~uint64_t{0}};
        uint64_t* members = masks.in_class + c * kWords;
        for (int word = 0; word < kWords; ++word) {
            members[word] = (planes[0][word] ^ flip[0]) & (planes[1][word] ^ flip[1]) & (planes[2][word] ^ flip[2]) &
                            is_weight[word];
        }
    }
    uint64_t any = 0;
    for (int word = 0; word < kWords; ++word) any |= masks.changed[word];
    return any != 0;
}

// --- Checksum -------------------------------------------------------------------------------------------------------

constexpr std::array<uint32_t, kBlock> kCheckFactors = [] {
    std::array<uint32_t, kBlock> factors{};
    for (int i = 0; i < kBlock; ++i) factors[static_cast<size_t>(i)] = check_factor(i);
    return factors;
}();

// What the block with this number adds to the checksum.
uint32_t check_block(const uint16_t* weights, int count, int64_t block) {
    uint32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < count; ++i) sum += weights[i] * kCheckFactors[static_cast<size_t>(i)];
    return sum * check_factor_of_block(block);
}

uint32_t check_segment(const uint16_t* weights, int64_t length, int64_t segment) {
    uint32_t sum = 0;
    for (int idx = 0; idx < blocks_of(length); ++idx) {
        sum += check_block(weights + static_cast<int64_t>(idx) * kBlock, block_length(length, idx),
                           segment * kBlocksPerSegment + idx);
    }
    return sum;
}

// --- Encoding -------------------------------------------------------------------------------------------------------

// Memory that one thread needs for a segment of up to `length` weights.  It is made before the parallel region, because
// an exception inside one ends the process.  `tokens` and `bytes` have room for the most that there can be; what is not
// written takes no memory.
struct Encoder {
    explicit Encoder(int64_t length)
        : tokens(new Token[static_cast<size_t>(length + kBlocksPerSegment)]),
          bytes(new uint8_t[static_cast<size_t>(kMaxHeadBytes + 2 * kBlocksPerSegment + 2 * length)]) {}

    Masks masks;
    std::unique_ptr<Token[]> tokens;
    std::unique_ptr<uint8_t[]> bytes;
    size_t ends[kBlocksPerSegment];  // tokens up to the end of each block
    uint32_t counts[kCodes];
    uint8_t lengths[kCodes];
    uint16_t words[kCodes];
    uint8_t block[kMaxBlockBytes + 8];
};

int top_exponent(const uint16_t* old, int64_t length, int mantissa_bits) {
    int reached[kExponents] = {};
    int sampled = 0;
    for (int64_t begin = 0; begin < length; begin += kBlock) {
        for (int64_t i = begin; i < std::min(begin + kSample, length); ++i) {
            ++reached[(old[i] & 0x7fff) >> mantissa_bits];
            ++sampled;
        }
    }
    int top = kExponents - 1, num_above = reached[top];
    while (num_above * kTopShare <= sampled) num_above += reached[--top];
    return top;
}

// Writes bits, most significant first.  It may overwrite up to 8 bytes behind the last one.
class BitWriter {
public:
    explicit BitWriter(uint8_t* out) : begin_(out), out_(out) {}

    // Appends up to 56 bits.  All other bits of `bits` must be 0.
    void put(uint64_t bits, int num_bits) {
        filled_ += num_bits;
        word_ |= bits << (64 - filled_);
        const uint64_t first = __builtin_bswap64(word_);
        std::memcpy(out_, &first, 8);
        out_ += filled_ / 8;
        word_ <<= filled_ & ~7;
        filled_ %= 8;
    }

    int64_t finish() const { return out_ + (filled_ > 0) - begin_; }

private:
    uint8_t* begin_;
    uint8_t* out_;
    uint64_t word_ = 0;  // bits that are not in whole bytes yet, at the upper end
    int filled_ = 0;
};

int64_t raw_segment(const uint16_t* values, int64_t length, uint8_t* out) {
    out[0] = kRaw;
    std::memcpy(out + 1, values, static_cast<size_t>(2 * length));
    return 1 + 2 * length;
}

// Finds the tokens of a segment, and counts each symbol.  It must not be inlined: in a parallel region the compiler
// runs out of registers, and the code is a third slower.
[[gnu::noinline]] void find_tokens(const uint16_t* values, const uint16_t* old, int64_t length, int top,
                                   int mantissa_bits, Encoder& encoder) {
    std::memset(encoder.counts, 0, sizeof(encoder.counts));
    size_t num_tokens = 0;
    for (int idx = 0; idx < blocks_of(length); ++idx) {
        const int64_t begin = static_cast<int64_t>(idx) * kBlock;
        const int count = block_length(length, idx);
        if (make_masks<true>(values + begin, old + begin, count, top, mantissa_bits, encoder.masks)) {
            Token* tokens = encoder.tokens.get();
            Token* to = tokens + num_tokens;
            uint32_t* counts = encoder.counts;
            for_each_token(encoder.masks, values + begin, old + begin, count, [&](const Token& token) {
                *to++ = token;
                ++counts[token.which];
            });
            num_tokens = static_cast<size_t>(to - tokens);
        }
        encoder.ends[idx] = num_tokens;
    }
}

// Writes the tokens [first, end) to encoder.block.  Returns their bytes.
int64_t write_tokens(size_t first, size_t end, Encoder& encoder) {
    BitWriter writer(encoder.block);
    for (const Token* token = encoder.tokens.get() + first; token < encoder.tokens.get() + end; ++token) {
        const uint64_t word = encoder.words[token->which];
        writer.put(word << token->num_bits | token->bits, encoder.lengths[token->which] + token->num_bits);
    }
    return writer.finish();
}

// Writes a segment to `out`, which has room for 1 + 2 * length bytes.  Returns its bytes.
int64_t encode_segment(const uint16_t* values, const uint16_t* old, int64_t length, int mantissa_bits,
                       Encoder& encoder, uint8_t* out) {
    if (std::memcmp(values, old, static_cast<size_t>(2 * length)) == 0) return 0;
    const int top = top_exponent(old, length, mantissa_bits);
    find_tokens(values, old, length, top, mantissa_bits, encoder);
    for (int code = 0; code < kClasses; ++code) {
        code_lengths(encoder.counts + code * kSymbols, encoder.lengths + code * kSymbols);
        code_words(encoder.lengths + code * kSymbols, encoder.words + code * kSymbols);
    }
    uint8_t* bytes = encoder.bytes.get();
    bytes[0] = kCoded;
    bytes[1] = static_cast<uint8_t>(top);
    const int num_blocks = blocks_of(length);
    uint8_t* block_lengths = bytes + 2 + write_codes(encoder.lengths, bytes + 2);
    uint8_t* to = block_lengths + 2 * num_blocks;
    size_t first = 0;
    for (int idx = 0; idx < num_blocks; ++idx) {
        const int64_t raw = 2 * block_length(length, idx);
        int64_t used = write_tokens(first, encoder.ends[idx], encoder);
        const void* from = encoder.block;
        if (used >= raw) {
            used = raw;
            from = values + static_cast<int64_t>(idx) * kBlock;
        }
        std::memcpy(to, from, static_cast<size_t>(used));
        store16(block_lengths + 2 * idx, static_cast<uint16_t>(used));
        to += used;
        first = encoder.ends[idx];
    }
    const int64_t total = to - bytes;
    if (total > 2 * length) return raw_segment(values, length, out);
    std::memcpy(out, bytes, static_cast<size_t>(total));
    return total;
}

void store32(uint8_t* to, int64_t value) {
    const auto word = static_cast<uint32_t>(value);
    std::memcpy(to, &word, sizeof(word));
}

int64_t load32(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof(word));
    return word;
}

}  // namespace

void patch_encode(const uint16_t* values, uint16_t* sent, const PatchShape& shape, int num_threads, uint8_t* payload,
                  int64_t* results) {
    const int64_t num_segments = ceil_div(shape.n, kSegment);
    uint32_t checksum = 0;

    // 1. Write segments, each at the place where it lies if all segments are as long as they can be.
    uint8_t* first = payload + kLengthBytes * num_segments;
    const int threads = threads_of(shape, num_threads);
    std::vector<Encoder> encoders;
    for (int i = 0; i < threads; ++i) encoders.emplace_back(std::min(shape.n, kSegment));
#pragma omp parallel num_threads(threads) reduction(+ : checksum)
    {
        Encoder& encoder = encoders[static_cast<size_t>(omp_get_thread_num())];
#pragma omp for schedule(dynamic)
        for (int64_t segment = 0; segment < num_segments; ++segment) {
            const int64_t begin = segment * kSegment, length = segment_length(shape.n, segment);
            const int64_t bytes = encode_segment(values + begin, sent + begin, length, shape.mantissa_bits, encoder,
                                                 first + segment * (1 + 2 * kSegment));
            store32(payload + kLengthBytes * segment, bytes);
            if (bytes > 0) std::memcpy(sent + begin, values + begin, static_cast<size_t>(2 * length));
            checksum += check_segment(values + begin, length, segment);
        }
    }

    // 2. Move them to their places, one behind the other.
    uint8_t* to = first;
    for (int64_t segment = 0; segment < num_segments; ++segment) {
        const int64_t bytes = load32(payload + kLengthBytes * segment);
        std::memmove(to, first + segment * (1 + 2 * kSegment), static_cast<size_t>(bytes));
        to += bytes;
    }
    results[0] = to - payload;
    results[1] = checksum;
}

// --- Decoding -------------------------------------------------------------------------------------------------------

namespace {

struct Decoder {
    Masks masks;
    uint8_t lengths[kCodes];
    uint16_t tables[kClasses * kCodeTable];
};

Damage decode_block(const uint8_t* data, int64_t bytes, int top, int mantissa_bits, int count, Decoder& decoder,
                    uint16_t* weights) {
    if (bytes == 0) return Damage::kNone;
    if (bytes > 2 * count) return Damage::kBlockTooLong;
    if (bytes == 2 * count) {
        std::memcpy(weights, data, static_cast<size_t>(bytes));
        return Damage::kNone;
    }
    make_masks<false>(nullptr, weights, count, top, mantissa_bits, decoder.masks);
    return decode_tokens(decoder.masks, data, bytes, decoder.tables, count, weights);
}

Damage decode_segment(const uint8_t* data, int64_t bytes, int64_t length, int mantissa_bits, Decoder& decoder,
                      uint16_t* weights) {
    if (bytes == 0) return Damage::kNone;
    if (data[0] == kRaw) {
        if (bytes != 1 + 2 * length) return Damage::kSegmentLength;
        std::memcpy(weights, data + 1, static_cast<size_t>(2 * length));
        return Damage::kNone;
    }
    if (data[0] != kCoded || bytes < 2) return Damage::kSegmentKind;
    int code_bytes = 0;
    const Damage damage = read_codes(data + 2, bytes - 2, decoder.lengths, &code_bytes);
    if (damage != Damage::kNone) return damage;
    const int num_blocks = blocks_of(length);
    const uint8_t* block_lengths = data + 2 + code_bytes;
    const uint8_t* from = block_lengths + 2 * num_blocks;
    int64_t left = data + bytes - from;
    if (left < 0) return Damage::kBlockLengths;
    for (int idx = 0; idx < num_blocks; ++idx) left -= load16(block_lengths + 2 * idx);
    if (left != 0) return Damage::kBlockLengths;
    for (int code = 0; code < kClasses; ++code) {
        fill_table(decoder.lengths + code * kSymbols, decoder.tables + code * kCodeTable, 0, 1);
    }
    for (int idx = 0; idx < num_blocks; ++idx) {
        const int64_t used = load16(block_lengths + 2 * idx);
        const Damage found = decode_block(from, used, data[1], mantissa_bits, block_length(length, idx), decoder,
                                          weights + static_cast<int64_t>(idx) * kBlock);
        if (found != Damage::kNone) return found;
        from += used;
    }
    return Damage::kNone;
}

}  // namespace

void patch_decode(const uint8_t* payload, int64_t bytes, const PatchShape& shape, int num_threads, uint16_t* held,
                  int64_t* results) {
    const int64_t num_segments = ceil_div(shape.n, kSegment);
    std::vector<int64_t> offsets(static_cast<size_t>(num_segments) + 1, kLengthBytes * num_segments);
    results[0] = static_cast<int64_t>(Damage::kSegmentLengths);
    results[1] = 0;
    if (bytes < offsets[0]) return;
    for (size_t i = 0; i < offsets.size() - 1; ++i) offsets[i + 1] = offsets[i] + load32(payload + kLengthBytes * i);
    if (offsets.back() != bytes) return;

    std::atomic<int64_t> damage = 0;
    uint32_t checksum = 0;
    const int threads = threads_of(shape, num_threads);
    std::vector<Decoder> decoders(static_cast<size_t>(threads));
#pragma omp parallel num_threads(threads) reduction(+ : checksum)
    {
        Decoder& decoder = decoders[static_cast<size_t>(omp_get_thread_num())];
#pragma omp for schedule(dynamic)
        for (int64_t segment = 0; segment < num_segments; ++segment) {
            const int64_t length = segment_length(shape.n, segment), from = offsets[segment];
            uint16_t* weights = held + segment * kSegment;
            const Damage found = decode_segment(payload + from, offsets[segment + 1] - from, length,
                                                shape.mantissa_bits, decoder, weights);
            if (found != Damage::kNone) damage = static_cast<int64_t>(found);
            checksum += check_segment(weights, length, segment);
        }
    }
    results[0] = damage;
    results[1] = checksum;
}

}  // namespace hybridep
