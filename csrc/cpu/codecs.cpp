// SPDX-License-Identifier: Apache-2.0
//
// Compression on the CPU: plain loops over blocks, split over OpenMP threads by tensor and by chunks of blocks.  What
// each function computes is told in hybridep_codecs.h; the layouts are drawn in ds_hybridep/codecs/.

#include "hybridep_codecs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace hybridep {
namespace {

constexpr int64_t kMaxBlock = 1024;
constexpr int64_t kBlocksPerChunk = 32;  // a chunk is what one thread takes at a time
constexpr int64_t kRun = 256;            // kept values of top-k that share a scale
constexpr int64_t kWide = 64;            // columns summed at a time, so that they stay in registers
constexpr int64_t kRowsAtOnce = 4;
constexpr int64_t kFactorBlock = 256;    // elements of a factor column that share a scale
constexpr int64_t kHeaderBytes = 16, kFlagByte = 3;
constexpr int64_t kLanes = 16;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kSmallestNormal = 0x1p-126f;
constexpr float kLow = 0.75f, kHigh = 1.5f, kBetween = 1.125f;

// A thread is woken for this many elements at least; less is done sooner than the wake-up.
constexpr int64_t kElementsPerThread = 16 * 1024;

int threads_for(int64_t num_elements, int num_threads) {
    return static_cast<int>(std::clamp<int64_t>(num_elements / kElementsPerThread, 1, std::max(num_threads, 1)));
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// --- Scales ---------------------------------------------------------------------------------------------------------
// A scale is the upper half of an fp32 number that is not negative.

inline float scale_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t drop_subnormal(uint16_t bits) { return scale_value(bits) < kSmallestNormal ? 0 : bits; }

inline uint16_t round_scale(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (bits > kInfinity) return 0x7fc0;  // nan
    return drop_subnormal(static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16));
}

inline uint16_t round_scale_up(float value) {
    return drop_subnormal(static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + 0xffffu) >> 16));
}

inline bool is_scale_finite(uint16_t bits) { return (bits & 0x7f80u) != 0x7f80u; }

inline uint16_t load16(const uint8_t* from) {
    uint16_t value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline void store16(uint8_t* to, uint16_t value) { std::memcpy(to, &value, sizeof(value)); }

// Sum of values [size], a power of two, by halving.  Overwrites them.
inline float halving_sum(float* values, int64_t size) {
    for (int64_t half = size / 2; half > 0; half /= 2) {
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) values[i] += values[i + half];
    }
    return values[0];
}

inline float mean_magnitude(const float* values, int64_t count, int64_t size) {
    alignas(64) float magnitude[kMaxBlock];
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) magnitude[i] = std::fabs(values[i]);
    return halving_sum(magnitude, size) / static_cast<float>(count);
}

inline uint32_t largest_magnitude_bits(const float* values, int64_t size) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < size; ++i) {
        largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
    }
    return largest;
}

// Scale of values [size], of which the first `count` are real and the rest 0.
inline uint16_t scale_of(const float* values, int64_t count, int64_t size, int bits) {
    if (bits == 8 || bits == 4) {
        const float largest = std::bit_cast<float>(largest_magnitude_bits(values, size));
        return round_scale_up(largest / (bits == 8 ? 127.0f : 7.0f));
    }
    const float mean = mean_magnitude(values, count, size);
    return round_scale(bits == 2 ? mean * 1.25f : mean);
}

// --- Codes ----------------------------------------------------------------------------------------------------------

inline float divisor(uint16_t scale) {
    const float value = scale_value(scale);
    return value == 0.0f ? std::numeric_limits<float>::infinity() : value;
}

// codes [size], one a byte.  Adding 1.5 * 2^23 rounds to an integer, halves to even.
void make_codes(const float* values, int64_t size, int bits, uint16_t scale, uint8_t* codes) {
    const float s = divisor(scale);
    if (bits == 8 || bits == 4) {
        const float largest = bits == 8 ? 127.0f : 7.0f;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            float code = values[i] / s + 0x1.8p23f;
            code -= 0x1.8p23f;
            code = code > largest ? largest : code;
            code = code < -largest ? -largest : code;
            codes[i] = static_cast<uint8_t>(static_cast<int32_t>(code + largest + 1.0f));
        }
    } else if (bits == 2) {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float code = values[i] / s;
            codes[i] = static_cast<uint8_t>((code >= -1.0f) + (code >= 0.0f) + (code >= 1.0f));
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) codes[i] = values[i] >= 0.0f;
    }
}

void make_values(const uint8_t* codes, int64_t size, int bits, uint16_t scale, float* values) {
    const float s = scale_value(scale);
    const float factor = bits == 1 ? 2.0f : 1.0f;
    const float offset = bits == 8 ? 128.0f : bits == 4 ? 8.0f : bits == 2 ? 1.5f : 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) values[i] = (static_cast<float>(codes[i]) * factor - offset) * s;
}

// packed [ceil(count * bits / 8)] from codes, which are readable and 0 up to the next multiple of 8.
void pack_codes(const uint8_t* codes, int64_t count, int bits, uint8_t* packed) {
    const int64_t num_bytes = ceil_div(count * bits, 8);
    if (bits == 8) {
        std::memcpy(packed, codes, static_cast<size_t>(num_bytes));
    } else if (bits == 4) {
        for (int64_t i = 0; i < num_bytes; ++i) {
            packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
        }
    } else if (bits == 2) {
        for (int64_t i = 0; i < num_bytes; ++i) {
            const uint8_t* four = codes + 4 * i;
            packed[i] = static_cast<uint8_t>(four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6);
        }
    } else {
        for (int64_t i = 0; i < num_bytes; ++i) {
            uint64_t eight;
            std::memcpy(&eight, codes + 8 * i, 8);
            // Moves bit 0 of byte j to bit j of the highest byte.
            packed[i] = static_cast<uint8_t>((eight * 0x0102040810204080u) >> 56);
        }
    }
}

void unpack_codes(const uint8_t* packed, int64_t count, int bits, uint8_t* codes) {
    const int64_t num_bytes = ceil_div(count * bits, 8);
    if (bits == 8) {
        std::memcpy(codes, packed, static_cast<size_t>(num_bytes));
        return;
    }
    const int per_byte = 8 / bits;
    const uint8_t mask = static_cast<uint8_t>((1 << bits) - 1);
    for (int64_t i = 0; i < num_bytes; ++i) {
        for (int j = 0; j < per_byte; ++j) {
            codes[i * per_byte + j] = static_cast<uint8_t>(packed[i] >> (bits * j)) & mask;
        }
    }
}

// --- Input ----------------------------------------------------------------------------------------------------------

// values [block] = what is to be encoded of elements [begin, begin + count), then zeros.  All zeros if is_bad.
void load(const Input& input, int64_t begin, int64_t count, int64_t block, bool is_bad, float* values) {
    const float* a = input.a + begin;
    const float* other = input.other == nullptr ? nullptr : input.other + begin;
    if (is_bad) {
        count = 0;
    } else if (input.source == Source::kEncode) {
        std::memcpy(values, a, static_cast<size_t>(count) * sizeof(float));
    } else if (input.source == Source::kUpdate) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) values[i] = a[i] - other[i];
    } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) values[i] = a[i] + other[i];
    }
    std::fill(values + count, values + block, 0.0f);
}

// Marks tensors that hold inf or nan.
void find_bad(const Input& input, int64_t block, int threads, uint8_t* is_bad) {
    const int64_t num_chunks = ceil_div(input.length, block * kBlocksPerChunk);
    std::fill(is_bad, is_bad + input.n, uint8_t{0});
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            alignas(64) float values[kMaxBlock];
            const int64_t end = std::min(input.length, (chunk + 1) * kBlocksPerChunk * block);
            uint32_t largest = 0;
            for (int64_t at = chunk * kBlocksPerChunk * block; at < end; at += block) {
                load(input, tensor * input.length + at, std::min(block, end - at), block, false, values);
                largest = std::max(largest, largest_magnitude_bits(values, block));
            }
            if (largest >= kInfinity) {
#pragma omp atomic write
                is_bad[tensor] = 1;
            }
        }
    }
}

// What happens to `other` where whole tensors are bad.
void finish_bad(const Input& input, const uint8_t* is_bad) {
    if (input.source != Source::kUpdate) return;
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        if (!is_bad[tensor]) continue;
        float* begin = input.other + tensor * input.length;
        std::fill(begin, begin + input.length, std::bit_cast<float>(0x7fc00000u));
    }
}

}  // namespace

void prepare(const Input& input, int num_threads, float* x, uint8_t* is_bad) {
    const int64_t num_blocks = ceil_div(input.length, kMaxBlock);
    std::fill(is_bad, is_bad + input.n, uint8_t{0});
#pragma omp parallel for collapse(2) num_threads(threads_for(input.n * input.length, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t begin = tensor * input.length + block * kMaxBlock;
            const int64_t count = std::min(kMaxBlock, input.length - block * kMaxBlock);
            load(input, begin, count, count, false, x + begin);
            if (largest_magnitude_bits(x + begin, count) >= kInfinity) {
#pragma omp atomic write
                is_bad[tensor] = 1;
            }
        }
    }
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        if (is_bad[tensor]) std::fill(x + tensor * input.length, x + (tensor + 1) * input.length, 0.0f);
    }
}

void blockwise_encode(const Input& input, int bits, int64_t block, int num_threads, const Payloads& payloads,
                      uint8_t* is_bad) {
    const int64_t num_blocks = ceil_div(input.length, block);
    const int64_t num_chunks = ceil_div(num_blocks, kBlocksPerChunk);
    const int threads = threads_for(input.n * input.length, num_threads);

    // 1. A bad tensor is written as zeros and must not change a residual, so it is found before anything is written.
    find_bad(input, block, threads, is_bad);

    // 2. Scales; they tell which tensors overflow.
    std::vector<uint8_t> is_overflow(static_cast<size_t>(input.n), 0);
    uint8_t* overflow = is_overflow.data();
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            alignas(64) float values[kMaxBlock];
            uint8_t* payload = payloads.data + tensor * payloads.stride;
            const int64_t end = std::min(num_blocks, (chunk + 1) * kBlocksPerChunk);
            for (int64_t idx = chunk * kBlocksPerChunk; idx < end; ++idx) {
                const int64_t count = std::min(block, input.length - idx * block);
                load(input, tensor * input.length + idx * block, count, block, is_bad[tensor] != 0, values);
                const uint16_t scale = scale_of(values, count, block, bits);
                store16(payload + 2 * idx, scale);
                if (!is_scale_finite(scale)) {
#pragma omp atomic write
                    overflow[tensor] = 1;
                }
            }
        }
    }

    // 3. Codes, and what the packet does to the mirror or leaves in the residual.
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            alignas(64) float values[kMaxBlock];
            alignas(64) float decoded[kMaxBlock];
            alignas(64) uint8_t codes[kMaxBlock];
            uint8_t* payload = payloads.data + tensor * payloads.stride;
            const bool is_lost = is_bad[tensor] || overflow[tensor];
            const int64_t end = std::min(num_blocks, (chunk + 1) * kBlocksPerChunk);
            for (int64_t idx = chunk * kBlocksPerChunk; idx < end; ++idx) {
                const int64_t count = std::min(block, input.length - idx * block);
                const int64_t begin = tensor * input.length + idx * block;
                load(input, begin, count, block, is_bad[tensor] != 0, values);
                const uint16_t scale = load16(payload + 2 * idx);
                make_codes(values, block, bits, scale, codes);
                std::fill(codes + count, codes + block, uint8_t{0});
                pack_codes(codes, count, bits, payload + 2 * num_blocks + idx * block * bits / 8);
                if (input.source == Source::kEncode || is_lost) continue;
                make_values(codes, block, bits, scale, decoded);
                float* other = input.other + begin;
                if (input.source == Source::kUpdate) {
#pragma omp simd
                    for (int64_t i = 0; i < count; ++i) other[i] += decoded[i];
                } else {
#pragma omp simd
                    for (int64_t i = 0; i < count; ++i) other[i] = values[i] - decoded[i];
                }
            }
        }
    }
    const int64_t used = 2 * num_blocks + ceil_div(input.length * bits, 8);
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        std::memset(payloads.data + tensor * payloads.stride + used, 0, static_cast<size_t>(payloads.bytes - used));
        is_bad[tensor] |= overflow[tensor];
    }
    finish_bad(input, is_bad);
}

void blockwise_decode(const Payloads& payloads, int64_t n, int64_t length, int bits, int64_t block, bool is_add,
                      int num_threads, float* out) {
    const int64_t num_blocks = ceil_div(length, block);
    const int64_t num_chunks = ceil_div(num_blocks, kBlocksPerChunk);
#pragma omp parallel for collapse(2) num_threads(threads_for(n * length, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            alignas(64) float values[kMaxBlock];
            alignas(64) uint8_t codes[kMaxBlock];
            const uint8_t* payload = payloads.data + tensor * payloads.stride;
            const int64_t end = std::min(num_blocks, (chunk + 1) * kBlocksPerChunk);
            for (int64_t idx = chunk * kBlocksPerChunk; idx < end; ++idx) {
                const int64_t count = std::min(block, length - idx * block);
                unpack_codes(payload + 2 * num_blocks + idx * block * bits / 8, count, bits, codes);
                make_values(codes, count, bits, load16(payload + 2 * idx), values);
                float* to = out + tensor * length + idx * block;
                if (is_add) {
#pragma omp simd
                    for (int64_t i = 0; i < count; ++i) to[i] += values[i];
                } else {
                    std::memcpy(to, values, static_cast<size_t>(count) * sizeof(float));
                }
            }
        }
    }
}

// --- Top-k ----------------------------------------------------------------------------------------------------------

namespace {

// Sizes that follow from block, k and value_bits.
struct Kept {
    int64_t count;      // of one tensor
    int64_t num_heads;  // scales, or values in bf16
    int64_t value_bits; // inside a code; 0 where values stand in front
    int64_t code_bits;
    int64_t code_bytes;
};

Kept kept_of(int64_t length, int64_t block, int64_t k, int value_bits) {
    Kept kept{};
    kept.count = ceil_div(length, block) * k;
    kept.num_heads = value_bits == 16 ? kept.count : ceil_div(kept.count, kRun);
    kept.value_bits = value_bits == 16 ? 0 : value_bits;
    kept.code_bits = std::countr_zero(static_cast<uint64_t>(block)) + kept.value_bits;
    kept.code_bytes = ceil_div(kept.count * kept.code_bits, 8);
    return kept;
}

// chosen [k], ascending: indices of the largest magnitudes of values [block]; of equals the first.
void choose(const float* values, int64_t block, int64_t k, uint64_t* keys, int64_t* chosen) {
    // Magnitude above, inverted index below: the largest keys are the largest magnitudes, the first of equals.
    for (int64_t i = 0; i < block; ++i) {
        const uint64_t magnitude = std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu;
        keys[i] = magnitude << 16 | static_cast<uint64_t>(kMaxBlock - i);
    }
    if (k == 1) {
        chosen[0] = kMaxBlock - static_cast<int64_t>(*std::max_element(keys, keys + block) & 0xffffu);
        return;
    }
    std::nth_element(keys, keys + k - 1, keys + block, std::greater<>());
    for (int64_t j = 0; j < k; ++j) chosen[j] = kMaxBlock - static_cast<int64_t>(keys[j] & 0xffffu);
    std::sort(chosen, chosen + k);
}

void encode_run(const float* values, int64_t count, int value_bits, uint8_t* codes, uint16_t* scale) {
    alignas(64) float padded[kRun] = {};
    std::copy(values, values + count, padded);
    if (value_bits != 2) {
        *scale = scale_of(padded, count, kRun, value_bits);
        make_codes(padded, kRun, value_bits, *scale, codes);
        return;
    }
    *scale = round_scale(mean_magnitude(padded, count, kRun));
    const float between = kBetween * scale_value(*scale);
    for (int64_t i = 0; i < count; ++i) {
        codes[i] = static_cast<uint8_t>((padded[i] >= 0.0f) << 1 | (std::fabs(padded[i]) > between));
    }
}

inline float decode_value(int64_t code, int value_bits, uint16_t scale) {
    const float s = scale_value(scale);
    if (value_bits == 1) return (static_cast<float>(code) * 2.0f - 1.0f) * s;
    if (value_bits == 4) return (static_cast<float>(code) - 8.0f) * s;
    const float magnitude = (code & 1) != 0 ? kHigh : kLow;
    return (code >= 2 ? magnitude : -magnitude) * s;
}

// One tensor's positions [count] and values [count] as a decoder reads them.
void read_kept(const uint8_t* payload, const Kept& kept, int64_t block, int64_t k, int value_bits, int64_t* position,
               float* values) {
    const uint8_t* codes = payload + 2 * kept.num_heads;
    const uint64_t mask = (uint64_t{1} << kept.code_bits) - 1;
    for (int64_t i = 0; i < kept.count; ++i) {
        const int64_t bit = i * kept.code_bits;
        // At most 14 bits from a start inside a byte: within three bytes.
        uint64_t window = 0;
        std::memcpy(&window, codes + bit / 8, static_cast<size_t>(std::min<int64_t>(3, kept.code_bytes - bit / 8)));
        const uint64_t code = window >> (bit % 8) & mask;
        position[i] = i / k * block + static_cast<int64_t>(code >> kept.value_bits);
        if (value_bits == 16) {
            values[i] = scale_value(load16(payload + 2 * i));
        } else {
            const int64_t value = static_cast<int64_t>(code & ((uint64_t{1} << kept.value_bits) - 1));
            values[i] = decode_value(value, value_bits, load16(payload + 2 * (i / kRun)));
        }
    }
}

inline uint16_t round_value(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Writes one tensor's payload; returns whether a scale or value overflowed.
bool encode_kept(const int64_t* index, const float* values, const Kept& kept, int value_bits, uint8_t* payload,
                 int64_t payload_bytes) {
    bool is_overflow = false;
    std::memset(payload, 0, static_cast<size_t>(payload_bytes));
    uint8_t* stream = payload + 2 * kept.num_heads;
    uint8_t value_codes[kRun] = {};
    for (int64_t i = 0; i < kept.count; ++i) {
        if (value_bits == 16) {
            const uint16_t value = round_value(values[i]);
            is_overflow |= !is_scale_finite(value);
            store16(payload + 2 * i, value);
        } else if (i % kRun == 0) {
            uint16_t scale;
            encode_run(values + i, std::min(kRun, kept.count - i), value_bits, value_codes, &scale);
            is_overflow |= !is_scale_finite(scale);
            store16(payload + 2 * (i / kRun), scale);
        }
        uint64_t code = static_cast<uint64_t>(index[i]) << kept.value_bits;
        if (value_bits != 16) code |= value_codes[i % kRun];
        const int64_t bit = i * kept.code_bits;
        code <<= bit % 8;
        for (int64_t byte = bit / 8; code != 0; ++byte, code >>= 8) stream[byte] |= static_cast<uint8_t>(code);
    }
    return is_overflow;
}

}  // namespace

void top_k_encode(const Input& input, int64_t block, int64_t k, int value_bits, int num_threads,
                  const Payloads& payloads, uint8_t* is_bad) {
    const Kept kept = kept_of(input.length, block, k, value_bits);
    const int64_t num_blocks = ceil_div(input.length, block);
    const int64_t num_chunks = ceil_div(num_blocks, kBlocksPerChunk);
    const int threads = threads_for(input.n * input.length, num_threads);
    find_bad(input, block, threads, is_bad);

    // 1. The kept elements of every block.
    std::vector<int64_t> all_index(static_cast<size_t>(input.n * kept.count));
    std::vector<float> all_values(static_cast<size_t>(input.n * kept.count));
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            alignas(64) float values[kMaxBlock];
            alignas(64) uint64_t keys[kMaxBlock];
            const int64_t end = std::min(num_blocks, (chunk + 1) * kBlocksPerChunk);
            for (int64_t idx = chunk * kBlocksPerChunk; idx < end; ++idx) {
                const int64_t count = std::min(block, input.length - idx * block);
                load(input, tensor * input.length + idx * block, count, block, is_bad[tensor] != 0, values);
                int64_t* index = all_index.data() + tensor * kept.count + idx * k;
                choose(values, block, k, keys, index);
                float* chosen = all_values.data() + tensor * kept.count + idx * k;
                for (int64_t j = 0; j < k; ++j) chosen[j] = values[index[j]];
            }
        }
    }

    // 2. Payloads, which hold a small part of the elements, and then the mirror or the residual.
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        int64_t* index = all_index.data() + tensor * kept.count;
        float* values = all_values.data() + tensor * kept.count;
        uint8_t* payload = payloads.data + tensor * payloads.stride;
        const bool is_overflow = encode_kept(index, values, kept, value_bits, payload, payloads.bytes);
        const bool is_lost = is_bad[tensor] != 0 || is_overflow;
        is_bad[tensor] = is_lost;
        if (input.source == Source::kEncode || is_lost) continue;
        float* other = input.other + tensor * input.length;
        const float* a = input.a + tensor * input.length;
        if (input.source == Source::kResidual) {
#pragma omp simd
            for (int64_t i = 0; i < input.length; ++i) other[i] += a[i];
        }
        read_kept(payload, kept, block, k, value_bits, index, values);
        const float sign = input.source == Source::kUpdate ? 1.0f : -1.0f;
        for (int64_t i = 0; i < kept.count; ++i) {
            if (index[i] < input.length) other[index[i]] += sign * values[i];
        }
    }
    finish_bad(input, is_bad);
}

void top_k_decode(const Payloads& payloads, int64_t n, int64_t length, int64_t block, int64_t k, int value_bits,
                  bool is_add, int num_threads, float* out) {
    const Kept kept = kept_of(length, block, k, value_bits);
#pragma omp parallel for num_threads(threads_for(n * length, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        std::vector<int64_t> position(static_cast<size_t>(kept.count));
        std::vector<float> values(static_cast<size_t>(kept.count));
        read_kept(payloads.data + tensor * payloads.stride, kept, block, k, value_bits, position.data(),
                  values.data());
        float* to = out + tensor * length;
        if (!is_add) std::fill(to, to + length, 0.0f);
        for (int64_t i = 0; i < kept.count; ++i) {
            if (position[i] >= length) continue;
            to[position[i]] = is_add ? to[position[i]] + values[i] : values[i];
        }
    }
}

// --- Low rank -------------------------------------------------------------------------------------------------------

namespace {

// to [size] = or += ((p0 q0 + p1 q1) + ...) for one row of p and columns of q from `q` on; size is at most kWide.
template <bool kIsWhole>
void decode_piece(const float* p, int64_t rows, const float* q, int64_t cols, int64_t rank, int64_t size, bool is_add,
                  float* to) {
    alignas(64) float sum[kWide];
    const int64_t count = kIsWhole ? kWide : size;  // a constant, so that the sum stays in registers
    for (int64_t i = 0; i < count; ++i) sum[i] = p[0] * q[i];
    for (int64_t column = 1; column < rank; ++column) {
        const float left = p[column * rows];
        const float* right = q + column * cols;
        for (int64_t i = 0; i < count; ++i) sum[i] += left * right[i];
    }
    if (is_add) {
        for (int64_t i = 0; i < count; ++i) to[i] += sum[i];
    } else {
        for (int64_t i = 0; i < count; ++i) to[i] = sum[i];
    }
}

// out [n, rows, cols] = or += ((p0 q0 + p1 q1) + ...), p [n, rank, rows], q [n, rank, cols].
void add_product(const float* p, const float* q, int64_t n, int64_t rank, int64_t rows, int64_t cols, bool is_add,
                     int num_threads, float* out) {
#pragma omp parallel for collapse(2) num_threads(threads_for(n * rows * cols, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t row = 0; row < rows; ++row) {
            const float* left = p + tensor * rank * rows + row;
            const float* right = q + tensor * rank * cols;
            float* to = out + (tensor * rows + row) * cols;
            int64_t begin = 0;
            for (; begin + kWide <= cols; begin += kWide) {
                decode_piece<true>(left, rows, right + begin, cols, rank, kWide, is_add, to + begin);
            }
            if (begin < cols) {
                decode_piece<false>(left, rows, right + begin, cols, rank, cols - begin, is_add, to + begin);
            }
        }
    }
}

// Sum of a[i] * b[i]: lane j holds the products at i = j modulo 64, and lanes are summed by halving.
float dot(const float* a, const float* b, int64_t size) {
    // Four sets of lanes hide the latency of the additions.
    alignas(64) float lanes[4 * kLanes] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
#pragma omp simd
        for (int64_t j = 0; j < 4 * kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
    }
    for (int64_t j = 0; i < size; ++i, ++j) lanes[j] += a[i] * b[i];
    return halving_sum(lanes, 4 * kLanes);
}

inline void subtract(float* to, float factor, const float* from, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) to[i] -= factor * from[i];
}

inline void scale_by(float* values, float factor, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) values[i] *= factor;
}

// Takes from row `idx` of p what lies in the rows before it, which are orthonormal; returns the squared length left.
float project_out(float* p, int64_t idx, int64_t rows) {
    float* row = p + idx * rows;
    for (int64_t other = 0; other < idx; ++other) subtract(row, dot(p + other * rows, row, rows), p + other * rows, rows);
    return dot(row, row, rows);
}

void orthonormalise_one(float* p, int64_t rank, int64_t rows) {
    constexpr float kDependent = 1e-9f;  // of the squared length before: what rounding leaves of a dependent row
    for (int64_t idx = 0; idx < rank; ++idx) {
        float* row = p + idx * rows;
        // Largest element 1 first: squares of numbers near the ends of the fp32 range over- or underflow.
        const float largest = std::bit_cast<float>(largest_magnitude_bits(row, rows));
        bool is_found = false;
        if (largest > 0.0f && std::isfinite(largest)) {
            for (int64_t i = 0; i < rows; ++i) row[i] /= largest;
            const float before = dot(row, row, rows);
            is_found = project_out(p, idx, rows) > kDependent * before;
        }
        // Among the unit vectors one at least keeps (rows - idx) / rows of its squared length.
        const float enough = 0.5f * static_cast<float>(rows - idx) / static_cast<float>(rows);
        for (int64_t axis = idx; !is_found && axis < idx + rows; ++axis) {
            std::fill(row, row + rows, 0.0f);
            row[axis % rows] = 1.0f;
            is_found = project_out(p, idx, rows) >= enough;
        }
        scale_by(row, 1.0f / std::sqrt(dot(row, row, rows)), rows);
        const float squared = project_out(p, idx, rows);
        scale_by(row, 1.0f / std::sqrt(squared), rows);
    }
}

// inverse [rank, rank] of the symmetric positive definite gram, by Gauss-Jordan without pivots; overwrites gram.
void invert(std::vector<double>& gram, std::vector<double>& inverse, int64_t rank) {
    std::fill(inverse.begin(), inverse.end(), 0.0);
    for (int64_t i = 0; i < rank; ++i) inverse[i * rank + i] = 1.0;
    for (int64_t pivot = 0; pivot < rank; ++pivot) {
        const double factor = 1.0 / gram[pivot * rank + pivot];
        for (int64_t j = 0; j < rank; ++j) {
            gram[pivot * rank + j] *= factor;
            inverse[pivot * rank + j] *= factor;
        }
        for (int64_t i = 0; i < rank; ++i) {
            const double multiple = gram[i * rank + pivot];
            if (i == pivot || multiple == 0.0) continue;
            for (int64_t j = 0; j < rank; ++j) {
                gram[i * rank + j] -= multiple * gram[pivot * rank + j];
                inverse[i * rank + j] -= multiple * inverse[pivot * rank + j];
            }
        }
    }
}

}  // namespace

void orthonormalise(float* p, int64_t n, int64_t rank, int64_t rows, int num_threads) {
#pragma omp parallel for num_threads(threads_for(n * rank * rank * rows, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) orthonormalise_one(p + tensor * rank * rows, rank, rows);
}

void divide_by_gram(const float* p, float* q, int64_t n, int64_t rank, int64_t rows, int64_t cols, int num_threads) {
    constexpr double kRidge = 1e-6, kSmallest = 1e-3;  // quantised rows can be dependent or 0
#pragma omp parallel for num_threads(threads_for(n * rank * rank * (rows + cols), num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        const float* left = p + tensor * rank * rows;
        float* right = q + tensor * rank * cols;
        std::vector<double> gram(static_cast<size_t>(rank * rank)), inverse(gram.size());
        for (int64_t i = 0; i < rank; ++i) {
            for (int64_t j = 0; j <= i; ++j) {
                gram[i * rank + j] = gram[j * rank + i] = dot(left + i * rows, left + j * rows, rows);
            }
            gram[i * rank + i] += kRidge * std::max(gram[i * rank + i], kSmallest);
        }
        invert(gram, inverse, rank);
        std::vector<float> before(right, right + rank * cols);
        for (int64_t i = 0; i < rank; ++i) {
            float* to = right + i * cols;
            std::fill(to, to + cols, 0.0f);
            for (int64_t j = 0; j < rank; ++j) {
                subtract(to, -static_cast<float>(inverse[i * rank + j]), before.data() + j * cols, cols);
            }
        }
    }
}

namespace {

// out [kGroup rows][kWidth] = rows of x times the columns of qt [cols][kWidth], summed over cols in order.
template <int64_t kWidth, int64_t kGroup>
void multiply_rows(const float* x, int64_t cols, const float* qt, float* out) {
    alignas(64) float sum[kGroup][kWidth] = {};
    for (int64_t col = 0; col < cols; ++col) {
        for (int64_t row = 0; row < kGroup; ++row) {
            const float value = x[row * cols + col];
#pragma omp simd
            for (int64_t i = 0; i < kWidth; ++i) sum[row][i] += value * qt[col * kWidth + i];
        }
    }
    std::memcpy(out, sum, sizeof(sum));
}

// Columns [begin, begin + count) of q, count at most kWidth, times all of x.
template <int64_t kWidth>
void times_some_columns(const float* x, const float* q, int64_t rank, int64_t begin, int64_t count, int64_t n,
                        int64_t rows, int64_t cols, int threads, float* out) {
    std::vector<float> transposed(static_cast<size_t>(n * cols * kWidth), 0.0f);
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t i = 0; i < count; ++i) {
            const float* from = q + (tensor * rank + begin + i) * cols;
            for (int64_t col = 0; col < cols; ++col) transposed[(tensor * cols + col) * kWidth + i] = from[col];
        }
    }
    const int64_t num_groups = ceil_div(rows, kRowsAtOnce);
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t group = 0; group < num_groups; ++group) {
            const int64_t first = group * kRowsAtOnce;
            const int64_t size = std::min(kRowsAtOnce, rows - first);
            const float* from = x + (tensor * rows + first) * cols;
            const float* qt = transposed.data() + tensor * cols * kWidth;
            alignas(64) float sums[kRowsAtOnce * kWidth];
            if (size == kRowsAtOnce) {
                multiply_rows<kWidth, kRowsAtOnce>(from, cols, qt, sums);
            } else {
                for (int64_t row = 0; row < size; ++row) {
                    multiply_rows<kWidth, 1>(from + row * cols, cols, qt, sums + row * kWidth);
                }
            }
            for (int64_t i = 0; i < count; ++i) {
                float* to = out + (tensor * rank + begin + i) * rows + first;
                for (int64_t row = 0; row < size; ++row) to[row] = sums[row * kWidth + i];
            }
        }
    }
}

// to [kWide columns] = left[0] x[0] + left[1] x[1] + ..., over rows in order.
template <bool kIsWhole>
void add_rows(const float* left, const float* x, int64_t rows, int64_t cols, int64_t size, float* to) {
    alignas(64) float sum[kWide] = {};
    const int64_t count = kIsWhole ? kWide : size;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < count; ++i) sum[i] += left[row] * x[row * cols + i];
    }
    std::memcpy(to, sum, static_cast<size_t>(count) * sizeof(float));
}

// out [n, rank, rows] = x [n, rows, cols] times q [n, rank, cols], over cols in order.
void times_columns(const float* x, const float* q, int64_t n, int64_t rank, int64_t rows, int64_t cols,
                   int num_threads, float* out) {
    const int threads = threads_for(n * rows * cols, num_threads);
    for (int64_t begin = 0; begin < rank;) {
        const int64_t left = rank - begin;
        if (left <= 4) {
            times_some_columns<4>(x, q, rank, begin, left, n, rows, cols, threads, out);
        } else if (left <= 8) {
            times_some_columns<8>(x, q, rank, begin, left, n, rows, cols, threads, out);
        } else {
            times_some_columns<16>(x, q, rank, begin, std::min<int64_t>(left, 16), n, rows, cols, threads, out);
        }
        begin += 16;
    }
}

// out [n, rank, cols] = p [n, rank, rows] times x [n, rows, cols], over rows in order.
void times_rows(const float* x, const float* p, int64_t n, int64_t rank, int64_t rows, int64_t cols, int num_threads,
                float* out) {
    const int64_t num_pieces = ceil_div(cols, kWide);
#pragma omp parallel for collapse(2) num_threads(threads_for(n * rows * cols, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t piece = 0; piece < num_pieces; ++piece) {
            const int64_t begin = piece * kWide;
            const int64_t size = std::min(kWide, cols - begin);
            const float* from = x + tensor * rows * cols + begin;
            for (int64_t column = 0; column < rank; ++column) {
                const float* left = p + (tensor * rank + column) * rows;
                float* to = out + (tensor * rank + column) * cols + begin;
                if (size == kWide) {
                    add_rows<true>(left, from, rows, cols, size, to);
                } else {
                    add_rows<false>(left, from, rows, cols, size, to);
                }
            }
        }
    }
}

constexpr int kLogLevels = 8;
constexpr float kLogValues[kLogLevels] = {0.0f, 2.0f, 4.0f, 6.0f, 10.0f, 15.0f, 22.0f, 32.0f};
constexpr float kLogBetween[kLogLevels - 1] = {1.0f, 3.0f, 5.0f, 8.0f, 12.5f, 18.5f, 27.0f};

int bits_of(Factor factor) {
    switch (factor) {
        case Factor::kFp32: return 32;
        case Factor::kBf16: return 16;
        case Factor::kInt8: return 8;
        case Factor::kInt2: return 2;
        default: return 4;
    }
}

int64_t factor_bytes(int64_t length, Factor factor) {
    const int bits = bits_of(factor);
    if (bits >= 16) return length * bits / 8;
    return ceil_div(ceil_div(length, kFactorBlock) * 2 + ceil_div(length * bits, 8), 2) * 2;
}

// One column in kLog4; payload is all zeros before.  Returns whether a scale overflowed.
bool write_log4(const float* values, int64_t length, uint8_t* payload) {
    uint8_t* packed = payload + 2 * ceil_div(length, kFactorBlock);
    bool is_overflow = false;
    for (int64_t begin = 0; begin < length; begin += kFactorBlock) {
        const int64_t count = std::min(kFactorBlock, length - begin);
        const float largest = std::bit_cast<float>(largest_magnitude_bits(values + begin, count));
        const uint16_t scale = round_scale_up(largest / kLogValues[kLogLevels - 1]);
        is_overflow |= !is_scale_finite(scale);
        store16(payload + 2 * (begin / kFactorBlock), scale);
        const float s = divisor(scale);
        for (int64_t i = begin; i < begin + count; ++i) {
            const float magnitude = std::fabs(values[i]) / s;
            int code = 0;
            for (const float between : kLogBetween) code += magnitude >= between;
            if (code > 0 && values[i] < 0.0f) code |= kLogLevels;
            packed[i / 2] |= static_cast<uint8_t>(code << (4 * (i % 2)));
        }
    }
    return is_overflow;
}

void read_log4(const uint8_t* payload, int64_t length, float* values) {
    const uint8_t* packed = payload + 2 * ceil_div(length, kFactorBlock);
    for (int64_t i = 0; i < length; ++i) {
        const int code = packed[i / 2] >> (4 * (i % 2)) & 15;
        const float level = kLogValues[code % kLogLevels];
        values[i] = (code >= kLogLevels ? -level : level) * scale_value(load16(payload + 2 * (i / kFactorBlock)));
    }
}

void read_factor(const uint8_t* payload, int64_t num_columns, int64_t length, Factor factor, float* columns) {
    const int64_t bytes = factor_bytes(length, factor);
    for (int64_t column = 0; column < num_columns; ++column) {
        float* to = columns + column * length;
        const uint8_t* from = payload + column * bytes;
        if (factor == Factor::kFp32) {
            std::memcpy(to, from, static_cast<size_t>(bytes));
        } else if (factor == Factor::kBf16) {
            for (int64_t i = 0; i < length; ++i) to[i] = scale_value(load16(from + 2 * i));
        } else if (factor == Factor::kLog4) {
            read_log4(from, length, to);
        } else {
            const Payloads one{const_cast<uint8_t*>(from), bytes, bytes};
            blockwise_decode(one, 1, length, bits_of(factor), kFactorBlock, false, 1, to);
        }
    }
}

// columns [num_columns, length] of one tensor become what a decoder reads of them, and payload what it reads.
// Returns whether something overflowed.
bool write_factor(float* columns, int64_t num_columns, int64_t length, Factor factor, uint8_t* payload) {
    const int64_t bytes = factor_bytes(length, factor);
    bool is_overflow = false;
    for (int64_t column = 0; column < num_columns; ++column) {
        float* from = columns + column * length;
        uint8_t* to = payload + column * bytes;
        std::memset(to, 0, static_cast<size_t>(bytes));
        if (factor == Factor::kFp32) {
            std::memcpy(to, from, static_cast<size_t>(bytes));
        } else if (factor == Factor::kBf16) {
            for (int64_t i = 0; i < length; ++i) store16(to + 2 * i, round_value(from[i]));
        } else if (factor == Factor::kLog4) {
            is_overflow |= write_log4(from, length, to);
        } else {
            uint8_t is_bad = 0;
            const Input input{Source::kEncode, from, nullptr, 1, length};
            blockwise_encode(input, bits_of(factor), kFactorBlock, 1, {to, bytes, bytes}, &is_bad);
            is_overflow |= is_bad != 0;
        }
    }
    read_factor(payload, num_columns, length, factor, columns);
    return is_overflow || largest_magnitude_bits(columns, num_columns * length) >= kInfinity;
}

// --- Weighting by root mean squares ---

constexpr double kRmsDecay = 0.95;   // of the mean of squares, each step
constexpr float kSmallestRms = 1e-3f;  // of the largest: rows and columns below count as if they had this

// rms [size] moves towards the root mean square of `lines`, and weight becomes it relative to the largest.
template <typename MeanSquare>
void update_rms(int64_t size, MeanSquare mean_square, float* rms, float* weight) {
    float largest = 0.0f;
    for (int64_t i = 0; i < size; ++i) {
        const double before = rms[i];
        weight[i] = static_cast<float>(std::sqrt(kRmsDecay * before * before + (1.0 - kRmsDecay) * mean_square(i)));
        rms[i] = weight[i];
        largest = std::max(largest, weight[i]);
    }
    for (int64_t i = 0; i < size; ++i) {
        weight[i] = largest > 0.0f ? std::max(weight[i] / largest, kSmallestRms) : 1.0f;
    }
}

// Weights of rows [rows] and columns [cols] of one tensor x, and the state they come from.
void weigh(const float* x, int64_t rows, int64_t cols, float* row_rms, float* col_rms, float* row_weight,
           float* col_weight) {
    std::vector<double> row_sum(static_cast<size_t>(rows), 0.0), col_sum(static_cast<size_t>(cols), 0.0);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
            const double value = x[row * cols + col];
            row_sum[row] += value * value;
            col_sum[col] += value * value;
        }
    }
    update_rms(rows, [&](int64_t i) { return row_sum[i] / static_cast<double>(cols); }, row_rms, row_weight);
    update_rms(cols, [&](int64_t i) { return col_sum[i] / static_cast<double>(rows); }, col_rms, col_weight);
}

// lines [num_lines, length] times (or divided by) weight [length].
void multiply_lines(float* lines, int64_t num_lines, int64_t length, const float* weight) {
    for (int64_t line = 0; line < num_lines; ++line) {
        for (int64_t i = 0; i < length; ++i) lines[line * length + i] *= weight[i];
    }
}

void divide_lines(float* lines, int64_t num_lines, int64_t length, const float* weight) {
    for (int64_t line = 0; line < num_lines; ++line) {
        for (int64_t i = 0; i < length; ++i) lines[line * length + i] /= weight[i];
    }
}

}  // namespace

void low_rank_encode(const Input& input, const LowRank& shape, const float* start, int num_threads,
                     const LowRankState& state, const Payloads& payloads, uint8_t* is_bad) {
    const auto [rank, rows, cols, factor, iterations] = shape;
    const int64_t n = input.n;
    const bool is_weighted = state.row_rms != nullptr;
    std::vector<float> x(static_cast<size_t>(n * rows * cols));
    std::vector<float> p(static_cast<size_t>(n * rank * rows)), q(static_cast<size_t>(n * rank * cols));
    prepare(input, num_threads, x.data(), is_bad);
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        const float* from = start != nullptr ? start : state.q + tensor * rank * cols;
        std::copy(from, from + rank * cols, q.data() + tensor * rank * cols);
    }

    // 1. Rows and columns of about one size, if asked for.
    std::vector<float> row_weight, col_weight, weighted, row_rms, col_rms;
    if (is_weighted) {
        weighted = x;
        row_weight.resize(static_cast<size_t>(n * rows));
        col_weight.resize(static_cast<size_t>(n * cols));
        row_rms.assign(state.row_rms, state.row_rms + n * rows);
        col_rms.assign(state.col_rms, state.col_rms + n * cols);
#pragma omp parallel for num_threads(threads_for(n * rows * cols, num_threads)) schedule(static)
        for (int64_t tensor = 0; tensor < n; ++tensor) {
            float* to = weighted.data() + tensor * rows * cols;
            float* of_rows = row_weight.data() + tensor * rows;
            weigh(to, rows, cols, row_rms.data() + tensor * rows, col_rms.data() + tensor * cols, of_rows,
                  col_weight.data() + tensor * cols);
            divide_lines(to, rows, cols, col_weight.data() + tensor * cols);
            for (int64_t row = 0; row < rows; ++row) {
                for (int64_t col = 0; col < cols; ++col) to[row * cols + col] /= of_rows[row];
            }
        }
    }
    const float* balanced = is_weighted ? weighted.data() : x.data();

    // 2. P, as the decoder will see it.
    for (int iteration = 0; iteration < iterations; ++iteration) {
        if (iteration > 0) times_rows(balanced, p.data(), n, rank, rows, cols, num_threads, q.data());
        times_columns(balanced, q.data(), n, rank, rows, cols, num_threads, p.data());
        orthonormalise(p.data(), n, rank, rows, num_threads);
    }
    const int64_t p_bytes = rank * factor_bytes(rows, factor), used = p_bytes + rank * factor_bytes(cols, factor);
    std::vector<float> read_p(p.size());
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        float* columns = p.data() + tensor * rank * rows;
        if (is_weighted) multiply_lines(columns, rank, rows, row_weight.data() + tensor * rows);
        write_factor(columns, rank, rows, factor, payloads.data + tensor * payloads.stride);
        std::copy(columns, columns + rank * rows, read_p.data() + tensor * rank * rows);
        if (is_weighted) divide_lines(columns, rank, rows, row_weight.data() + tensor * rows);
    }

    // 3. Q for that P, and the start of the next step.
    times_rows(balanced, p.data(), n, rank, rows, cols, num_threads, q.data());
    divide_by_gram(p.data(), q.data(), n, rank, rows, cols, num_threads);
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        uint8_t* payload = payloads.data + tensor * payloads.stride;
        float* columns = q.data() + tensor * rank * cols;
        const std::vector<float> unrounded(columns, columns + rank * cols);
        if (is_weighted) multiply_lines(columns, rank, cols, col_weight.data() + tensor * cols);
        const bool is_overflow = write_factor(columns, rank, cols, factor, payload + p_bytes);
        std::memset(payload + used, 0, static_cast<size_t>(payloads.bytes - used));
        if (is_bad[tensor] == 0 && !is_overflow) {
            std::copy(unrounded.begin(), unrounded.end(), state.q + tensor * rank * cols);
            if (is_weighted) {
                std::copy_n(row_rms.data() + tensor * rows, rows, state.row_rms + tensor * rows);
                std::copy_n(col_rms.data() + tensor * cols, cols, state.col_rms + tensor * cols);
            }
        }
        is_bad[tensor] |= is_overflow;
    }

    // 4. The mirror, or the residual.
    for (int64_t tensor = 0; tensor < n && input.source != Source::kEncode; ++tensor) {
        if (is_bad[tensor] != 0) continue;
        const float* left = read_p.data() + tensor * rank * rows;
        const float* right = q.data() + tensor * rank * cols;
        float* other = input.other + tensor * rows * cols;
        float* sum = x.data() + tensor * rows * cols;
        if (input.source == Source::kUpdate) {
            add_product(left, right, 1, rank, rows, cols, true, num_threads, other);
        } else {
            add_product(left, right, 1, rank, rows, cols, false, num_threads, other);
#pragma omp parallel for num_threads(threads_for(rows * cols, num_threads)) schedule(static)
            for (int64_t i = 0; i < rows * cols; ++i) other[i] = sum[i] - other[i];
        }
    }
    finish_bad(input, is_bad);
}

void low_rank_decode(const Payloads& payloads, int64_t n, const LowRank& shape, bool is_add, int num_threads,
                     float* out) {
    const auto [rank, rows, cols, factor, iterations] = shape;
    std::vector<float> p(static_cast<size_t>(n * rank * rows)), q(static_cast<size_t>(n * rank * cols));
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        const uint8_t* payload = payloads.data + tensor * payloads.stride;
        read_factor(payload, rank, rows, factor, p.data() + tensor * rank * rows);
        read_factor(payload + rank * factor_bytes(rows, factor), rank, cols, factor, q.data() + tensor * rank * cols);
    }
    add_product(p.data(), q.data(), n, rank, rows, cols, is_add, num_threads, out);
}

// --- Headers --------------------------------------------------------------------------------------------------------

void write_headers(const Payloads& packets, int64_t n, const uint32_t* words, const uint8_t* is_bad) {
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        uint8_t* packet = packets.data + tensor * packets.stride;
        std::memcpy(packet, words, kHeaderBytes);
        packet[kFlagByte] = is_bad[tensor];
    }
}

int check_headers(const Payloads& packets, int64_t n, uint32_t start, uint32_t stamp) {
    uint8_t flags = 0;
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        const uint8_t* packet = packets.data + tensor * packets.stride;
        uint32_t words[kHeaderBytes / 4];
        std::memcpy(words, packet, kHeaderBytes);
        if ((words[0] & 0xffffffu) != start || words[3] != stamp) return -1;
        flags |= packet[kFlagByte];
    }
    return flags;
}

}  // namespace hybridep
