// SPDX-License-Identifier: Apache-2.0
//
// What the codecs on the CPU share: codes of a few bits, and the reading of inputs.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "hybridep_codecs.h"
#include "hybridep_scales.h"

namespace hybridep {

inline constexpr int64_t kMaxBlock = 1024;
inline constexpr int64_t kBlocksPerChunk = 32;  // a chunk is what one thread takes at a time

// A thread is woken for at least this many elements.  Fewer take less time than the wake-up.
inline constexpr int64_t kElementsPerThread = 16 * 1024;

inline int threads_for(int64_t num_elements, int num_threads) {
    return static_cast<int>(std::clamp<int64_t>(num_elements / kElementsPerThread, 1, std::max(num_threads, 1)));
}

inline uint16_t load16(const uint8_t* from) {
    uint16_t value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline void store16(uint8_t* to, uint16_t value) { std::memcpy(to, &value, sizeof(value)); }

// Sum of values [size] by halving; size is a power of two.  Overwrites the values.
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
    return round_scale(mean_magnitude(values, count, size) * 1.25f);
}

// --- Codes ----------------------------------------------------------------------------------------------------------

// codes [size], one a byte.  Adding 1.5 * 2^23 rounds to an integer, halves to even.
inline void make_codes(const float* values, int64_t size, int bits, uint16_t scale, uint8_t* codes) {
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
    } else {
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float code = values[i] / s;
            codes[i] = static_cast<uint8_t>((code >= -1.0f) + (code >= 0.0f) + (code >= 1.0f));
        }
    }
}

inline void make_values(const uint8_t* codes, int64_t size, int bits, uint16_t scale, float* values) {
    const float s = scale_value(scale);
    const float offset = bits == 8 ? 128.0f : bits == 4 ? 8.0f : 1.5f;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) values[i] = (static_cast<float>(codes[i]) - offset) * s;
}

// packed [ceil(count * bits / 8)] from codes, which are readable and 0 up to the next multiple of 8.
inline void pack_codes(const uint8_t* codes, int64_t count, int bits, uint8_t* packed) {
    const int64_t num_bytes = ceil_div(count * bits, 8);
    if (bits == 8) {
        std::memcpy(packed, codes, static_cast<size_t>(num_bytes));
    } else if (bits == 4) {
        for (int64_t i = 0; i < num_bytes; ++i) {
            packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
        }
    } else {
        for (int64_t i = 0; i < num_bytes; ++i) {
            const uint8_t* four = codes + 4 * i;
            packed[i] = static_cast<uint8_t>(four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6);
        }
    }
}

inline void unpack_codes(const uint8_t* packed, int64_t count, int bits, uint8_t* codes) {
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

// values [block] = the inputs to encode for elements [begin, begin + count), then zeros.  All zeros if is_bad.
inline void load(const Input& input, int64_t begin, int64_t count, int64_t block, bool is_bad, float* values) {
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
inline void find_bad(const Input& input, int64_t block, int threads, uint8_t* is_bad) {
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

// Fills the mirrors of bad tensors with nan.  Residuals stay as they are.
inline void finish_bad(const Input& input, const uint8_t* is_bad) {
    if (input.source != Source::kUpdate) return;
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        if (!is_bad[tensor]) continue;
        float* begin = input.other + tensor * input.length;
        std::fill(begin, begin + input.length, std::bit_cast<float>(0x7fc00000u));
    }
}

}  // namespace hybridep
