// SPDX-License-Identifier: Apache-2.0
//
// What the codecs on CUDA devices share: how a warp reads a tensor, and flags of bad tensors.  For .cu files only.
//
// A warp takes segments of 128 elements: lane l holds elements 4 l .. 4 l + 3 of a segment, in one vector of 16 bytes
// if the tensor allows it.

#pragma once

#include "hybridep_codecs.h"
#include "hybridep_cuda.h"
#include "hybridep_scales.h"

namespace hybridep {

inline constexpr int kCodecBlock = 256;
inline constexpr int kVector = 4;
inline constexpr int kSegment = kLanes * kVector;
inline constexpr int64_t kRepairGrid = 512;  // enough to look at all flags; bad tensors are rare

inline constexpr uint32_t kBad = 1;       // the tensor holds inf or nan
inline constexpr uint32_t kOverflow = 2;  // a scale is inf

inline void require_even(const Payloads& payloads) {
    if (!is_aligned(2, payloads.data) || payloads.stride % 2 != 0) {
        throw std::runtime_error("payload: wanted even addresses and an even distance");
    }
}

// values [4] = elements [at, at + 4) of a tensor of `length`, 0 from its end on.
template <bool kIsAligned>
__device__ __forceinline__ void load4(const float* tensor, int64_t at, int64_t length, float (&values)[kVector]) {
    if constexpr (kIsAligned) {
        Pack<float, kVector> pack{};
        if (at < length) pack = load_pack<kVector>(tensor + at);
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[j] = pack.values[j];
    } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[j] = at + j < length ? tensor[at + j] : 0.0f;
    }
}

template <bool kIsAligned>
__device__ __forceinline__ void store4(float* tensor, int64_t at, int64_t length, const float (&values)[kVector]) {
    if constexpr (kIsAligned) {
        Pack<float, kVector> pack;
#pragma unroll
        for (int j = 0; j < kVector; ++j) pack.values[j] = values[j];
        if (at < length) store_pack(tensor + at, pack);
    } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            if (at + j < length) tensor[at + j] = values[j];
        }
    }
}

// Whether tensors of `length` elements can be read in vectors.
inline bool has_vectors(int64_t length, const void* a, const void* other) {
    return length % kVector == 0 && is_aligned(16, a, other);
}

__device__ __forceinline__ float encoded(Source source, float a, float other) {
    return source == Source::kEncode ? a : source == Source::kUpdate ? a - other : a + other;
}

static __global__ void finish_flags(const uint32_t* __restrict__ flags, int64_t n, uint8_t* __restrict__ is_bad) {
    const int64_t tensor = global_thread();
    if (tensor < n) is_bad[tensor] = flags[tensor] != 0;
}

// is_bad [n] from flags [n].
inline void finish(const uint32_t* flags, int64_t n, Stream stream, uint8_t* is_bad) {
    launch({.grid = blocks_for(n, kCodecBlock), .block = kCodecBlock, .stream = stream}, finish_flags, flags, n,
           is_bad);
}

}  // namespace hybridep
