// SPDX-License-Identifier: Apache-2.0
//
// The compact form of fp32 tensors on CUDA devices.  A warp takes a block of 128 elements: lane l holds elements l,
// l + 32, l + 64 and l + 96, whose low bits share a word.  Reads and writes of a warp are consecutive.

#include "hybridep_compact.h"

#include "hybridep_codecs.h"
#include "hybridep_cuda_codecs.h"

namespace hybridep {

using namespace compact;

namespace {

constexpr int kCompactBlock = 256;
constexpr int kPerLane = 4;

// Grid: a warp per block of elements.
__global__ void __launch_bounds__(kCompactBlock)
    compact_blocks(const float* __restrict__ values, int64_t num_tensors, int64_t length, uint32_t seed,
                   int16_t* __restrict__ words) {
    const int64_t num_blocks = (length + kBlock - 1) / kBlock;
    const int lane = lane_idx();
    const int64_t block = global_thread() / kLanes;
    if (block >= num_tensors * num_blocks) return;
    const int64_t first = block % num_blocks * kBlock;
    const float* from = values + block / num_blocks * length + first;
    float value[kPerLane];
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const int64_t at = lane + j * kLanes;
        value[j] = first + at < length ? from[at] : 0.0f;
        largest = max(largest, magnitude_bits(value[j]));
    }
    for (int bits = kLanes / 2; bits > 0; bits /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, bits));
    const bool is_zero = largest < kSmallestNormalBits;
    const int32_t exponent = exponent_of(largest);
    const float inverse = power(19 - exponent);
    int16_t* to = words + block * kWords;
    uint32_t low = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const auto place = static_cast<uint32_t>(block * kBlock + lane + j * kLanes);
        const int32_t q = is_zero ? 0 : multiple_of(value[j], inverse, place, seed);
        to[lane + j * kLanes] = static_cast<int16_t>(q >> 4);
        low |= static_cast<uint32_t>(q & 15) << (4 * j);
    }
    to[kBlock + lane] = static_cast<int16_t>(low);
    if (lane == 0) to[kWords - 1] = static_cast<int16_t>(is_zero ? 0 : exponent + 127);
}

// The same grid.
__global__ void __launch_bounds__(kCompactBlock)
    expand_blocks(const int16_t* __restrict__ words, int64_t num_tensors, int64_t length, float* __restrict__ out) {
    const int64_t num_blocks = (length + kBlock - 1) / kBlock;
    const int lane = lane_idx();
    const int64_t block = global_thread() / kLanes;
    if (block >= num_tensors * num_blocks) return;
    const int64_t first = block % num_blocks * kBlock;
    const int16_t* from = words + block * kWords;
    float* to = out + block / num_blocks * length + first;
    const int32_t stored = from[kWords - 1];
    const float unit = stored == 0 ? 0.0f : power(stored - 127 - 19);
    const uint32_t low = static_cast<uint16_t>(from[kBlock + lane]);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const int64_t at = lane + j * kLanes;
        const int32_t q = from[at] * 16 + static_cast<int32_t>(low >> (4 * j) & 15);
        if (first + at < length) to[at] = static_cast<float>(q) * unit;
    }
}

Launch warps_for(int64_t n, int64_t length, Stream stream) {
    const int64_t num_blocks = n * ((length + kBlock - 1) / kBlock);
    return {.grid = blocks_for(num_blocks * kLanes, kCompactBlock), .block = kCompactBlock, .stream = stream};
}

}  // namespace

void compact_encode(const float* values, int64_t n, int64_t length, uint32_t seed, Stream stream, int16_t* words) {
    launch(warps_for(n, length, stream), compact_blocks, values, n, length, seed, words);
}

void compact_decode(const int16_t* words, int64_t n, int64_t length, Stream stream, float* out) {
    launch(warps_for(n, length, stream), expand_blocks, words, n, length, out);
}

}  // namespace hybridep
