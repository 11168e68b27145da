// SPDX-License-Identifier: Apache-2.0
//
// The compact form of fp32 tensors on the CPU: a loop over blocks, split over OpenMP threads.

#include "hybridep_compact.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "hybridep_blocks.h"
#include "hybridep_codecs.h"

namespace hybridep {

using namespace compact;

void compact_encode(const float* values, int64_t n, int64_t length, uint32_t seed, int num_threads, int16_t* words) {
    const int64_t num_blocks = ceil_div(length, kBlock);
#pragma omp parallel for collapse(2) num_threads(threads_for(n * length, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t block = 0; block < num_blocks; ++block) {
            alignas(64) float from[kBlock] = {};
            alignas(64) int32_t q[kBlock] = {};
            const int64_t count = std::min(kBlock, length - block * kBlock);
            std::memcpy(from, values + tensor * length + block * kBlock, static_cast<size_t>(count) * sizeof(float));
            const uint32_t largest = largest_magnitude_bits(from, kBlock);
            const bool is_zero = largest < kSmallestNormalBits;
            const int32_t exponent = exponent_of(largest);
            const auto place = static_cast<uint32_t>((tensor * num_blocks + block) * kBlock);
            if (!is_zero) {
                const float inverse = power(19 - exponent);
#pragma omp simd
                for (int32_t i = 0; i < kBlock; ++i) {
                    q[i] = multiple_of(from[i], inverse, place + static_cast<uint32_t>(i), seed);
                }
            }
            int16_t* to = words + (tensor * num_blocks + block) * kWords;
#pragma omp simd
            for (int32_t i = 0; i < kBlock; ++i) to[i] = static_cast<int16_t>(q[i] >> 4);
#pragma omp simd
            for (int32_t i = 0; i < kLanesPerBlock; ++i) {
                const int32_t low = (q[i] & 15) | (q[i + 32] & 15) << 4 | (q[i + 64] & 15) << 8 | (q[i + 96] & 15) << 12;
                to[kBlock + i] = static_cast<int16_t>(low);
            }
            to[kWords - 1] = static_cast<int16_t>(is_zero ? 0 : exponent + 127);
        }
    }
}

void compact_decode(const int16_t* words, int64_t n, int64_t length, int num_threads, float* out) {
    const int64_t num_blocks = ceil_div(length, kBlock);
#pragma omp parallel for collapse(2) num_threads(threads_for(n * length, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t block = 0; block < num_blocks; ++block) {
            alignas(64) float values[kBlock];
            const int16_t* from = words + (tensor * num_blocks + block) * kWords;
            const int32_t stored = from[kWords - 1];
            const float unit = stored == 0 ? 0.0f : power(stored - 127 - 19);
            for (int32_t part = 0; part < 4; ++part) {
                const int16_t* high = from + part * kLanesPerBlock;
#pragma omp simd
                for (int32_t i = 0; i < kLanesPerBlock; ++i) {
                    const int32_t low = (static_cast<uint16_t>(from[kBlock + i]) >> (4 * part)) & 15;
                    values[part * kLanesPerBlock + i] = static_cast<float>(high[i] * 16 + low) * unit;
                }
            }
            const int64_t count = std::min(kBlock, length - block * kBlock);
            std::memcpy(out + tensor * length + block * kBlock, values, static_cast<size_t>(count) * sizeof(float));
        }
    }
}

}  // namespace hybridep
