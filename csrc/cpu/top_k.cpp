// SPDX-License-Identifier: Apache-2.0
//
// Top-k on the CPU.  What each function computes is told in hybridep_codecs.h; the layout is drawn in
// ds_hybridep/codecs/top_k.py.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "hybridep_blocks.h"
#include "hybridep_codecs.h"

namespace hybridep {
namespace {

constexpr int64_t kRun = 256;  // kept values of top-k that share a scale
constexpr float kLow = 0.75f, kHigh = 1.5f, kBetween = 1.125f;


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

}  // namespace hybridep
