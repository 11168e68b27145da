// SPDX-License-Identifier: Apache-2.0
//
// Kernels that move and sum rows, and views of rows.  The launchers for whole devices (rows.cu) and for a few
// multiprocessors (persistent.cu) share them.  For .cu files only.

#pragma once

#include "hybridep_cuda.h"
#include "hybridep_rows.h"

namespace hybridep {

// --- Dispatch -------------------------------------------------------------------------------------------------------

inline constexpr int kInFlight = 4;  // loads that a thread starts before it uses the first one

// A warp per row of out.
template <typename Unit, int kBlock>
__global__ void __launch_bounds__(kBlock, 1)
    gather_rows(const Unit* __restrict__ x, const int64_t* __restrict__ row_to_token, int64_t num_tokens,
                int64_t num_rows, int64_t num_units, Unit* __restrict__ out) {
    for (int64_t row = global_warp(); row < num_rows; row += num_threads() / kLanes) {
        const int64_t token = row_to_token[row];
        if (token < 0 || token >= num_tokens) fail_index("row_to_token", token, num_tokens, "tokens");
        const Unit* from = x + token * num_units;
        Unit* to = out + row * num_units;
        for (int64_t begin = lane_idx(); begin < num_units; begin += kInFlight * kLanes) {
            Unit values[kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                if (begin + i * kLanes < num_units) values[i] = from[begin + i * kLanes];
            }
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                if (begin + i * kLanes < num_units) to[begin + i * kLanes] = values[i];
            }
        }
    }
}

// Calls body(Unit{}) with the widest unit that rows of row_bytes at these addresses can be moved in.
template <typename Body>
void with_unit(const void* x, const void* out, int64_t row_bytes, Body&& body) {
    if (row_bytes % 16 == 0 && is_aligned(16, x, out)) return body(uint4{});
    if (row_bytes % 4 == 0 && is_aligned(4, x, out)) return body(uint32_t{});
    if (row_bytes % 2 == 0 && is_aligned(2, x, out)) return body(uint16_t{});
    body(uint8_t{});
}

// --- Combine --------------------------------------------------------------------------------------------------------

// A tensor read and written kWide elements at a time.
template <typename T, int kWide>
struct Vectors {
    [[maybe_unused]] static constexpr int kWidth = kWide;
    using Raw = Pack<T, kWide>;
    T* data;

    __device__ __forceinline__ Raw load(int64_t at) const { return load_pack<kWide>(data + at); }
    __device__ __forceinline__ float widen(const Raw& raw, int i) const { return to_float(raw.values[i]); }
    __device__ __forceinline__ float largest() const { return kLargestFinite<T>; }
    __device__ __forceinline__ void store(int64_t at, const float (&values)[kWide]) const {
        Raw raw;
#pragma unroll
        for (int i = 0; i < kWide; ++i) raw.values[i] = from_float<T>(values[i]);
        store_pack(data + at, raw);
    }
};

// A tensor read and written one element at a time, for rows that vectors do not fit.  One kernel serves all types.
struct Scalars {
    static constexpr int kWidth = 1;
    using Raw = float;
    void* data;
    Type type;

    __device__ __forceinline__ float load(int64_t at) const {
        if (type == Type::kBFloat16) return to_float(static_cast<const BFloat16*>(data)[at]);
        if (type == Type::kFloat16) return to_float(static_cast<const Float16*>(data)[at]);
        return static_cast<const float*>(data)[at];
    }
    __device__ __forceinline__ float widen(float raw, int) const { return raw; }
    __device__ __forceinline__ float largest() const {
        if (type == Type::kBFloat16) return kLargestFinite<BFloat16>;
        if (type == Type::kFloat16) return kLargestFinite<Float16>;
        return kLargestFinite<float>;
    }
    __device__ __forceinline__ void store(int64_t at, const float (&values)[1]) const {
        if (type == Type::kBFloat16) {
            static_cast<BFloat16*>(data)[at] = from_float<BFloat16>(values[0]);
        } else if (type == Type::kFloat16) {
            static_cast<Float16*>(data)[at] = from_float<Float16>(values[0]);
        } else {
            static_cast<float*>(data)[at] = values[0];
        }
    }
};

// Calls body(first, second) with two tensors [_, hidden] as Vectors of one width, 16 bytes of `first`, or as Scalars.
template <typename Body>
void with_views(void* first, Type first_type, void* second, Type second_type, int64_t hidden, Body&& body) {
    const int64_t width = first_type == Type::kFloat32 ? 4 : 8;
    if (hidden % width != 0 || !is_aligned(16, first, second)) {
        return body(Scalars{first, first_type}, Scalars{second, second_type});
    }
    with_type(first_type, [&](auto a) {
        with_type(second_type, [&](auto b) {
            constexpr int kWidth = 16 / sizeof(a);
            body(Vectors<decltype(a), kWidth>{static_cast<decltype(a)*>(first)},
                 Vectors<decltype(b), kWidth>{static_cast<decltype(b)*>(second)});
        });
    });
}

// A thread per token and vector of columns; blocks take pieces of a token's columns.
template <int kBlock, typename Rows, typename Out>
__global__ void __launch_bounds__(kBlock, 1)
    combine_tokens(Rows rows, const int64_t* __restrict__ slot_to_row, const float* __restrict__ weights,
                   CombineSizes sizes, Out out) {
    constexpr int kWidth = Rows::kWidth;
    const int64_t num_vectors = sizes.hidden / kWidth;
    const int64_t num_pieces = (num_vectors + kBlock - 1) / kBlock;
    for (int64_t task = blockIdx.x; task < sizes.num_tokens * num_pieces; task += gridDim.x) {
        const int64_t token = task / num_pieces;
        const int64_t vector = task % num_pieces * kBlock + threadIdx.x;
        if (vector >= num_vectors) continue;
        const int64_t begin = token * sizes.top_k, end = begin + sizes.top_k;
        float sum[kWidth] = {};
        for (int64_t first = begin; first < end; first += kInFlight) {
            int64_t row[kInFlight];
            typename Rows::Raw raw[kInFlight];
#pragma unroll
            for (int j = 0; j < kInFlight; ++j) {
                row[j] = first + j < end ? slot_to_row[first + j] : -1;
                if (row[j] >= sizes.num_rows) fail_index("slot_to_row", row[j], sizes.num_rows, "rows");
            }
#pragma unroll
            for (int j = 0; j < kInFlight; ++j) {
                if (row[j] >= 0) raw[j] = rows.load(row[j] * sizes.hidden + vector * kWidth);
            }
#pragma unroll
            for (int j = 0; j < kInFlight; ++j) {
                if (row[j] < 0) continue;
                const float weight = weights != nullptr ? weights[first + j] : 1.0f;
#pragma unroll
                for (int i = 0; i < kWidth; ++i) sum[i] += weight * rows.widen(raw[j], i);
            }
        }
        out.store(token * sizes.hidden + vector * kWidth, sum);
    }
}

}  // namespace hybridep
