// SPDX-License-Identifier: Apache-2.0
//
// Kernels that move and sum rows, and views of rows, for whole devices (rows.cu) and for a few multiprocessors
// (persistent.cu).  For .cu files only.

#pragma once

#include "hybridep_cuda.h"
#include "hybridep_rows.h"
#include "hybridep_scales.h"

namespace hybridep {

// --- Dispatch -------------------------------------------------------------------------------------------------------

inline constexpr int kInFlight = 4;  // loads that a thread starts before it uses the first one

// Whether a token has a row; the whole warp asks.
__device__ __forceinline__ bool has_row(const int64_t* __restrict__ slot_to_row, int64_t token,
                                        const RowSizes& sizes) {
    bool is_any = false;
    for (int64_t k = lane_idx(); k < sizes.top_k; k += kLanes) {
        const int64_t row = slot_to_row[token * sizes.top_k + k];
        if (row >= sizes.num_rows) fail_index("slot_to_row", row, sizes.num_rows, "rows");
        is_any |= row >= 0;
    }
    return __ballot_sync(kAllLanes, is_any) != 0;
}

inline constexpr int64_t kPieceUnits = kInFlight * kLanes;

// A warp per piece of a token, grid-stride: loads it once, and stores it to each row of the token.
template <typename Unit, int kBlock>
__global__ void __launch_bounds__(kBlock, 1)
    scatter_tokens(const Unit* __restrict__ x, const int64_t* __restrict__ slot_to_row, RowSizes sizes,
                   int64_t num_units, Unit* __restrict__ out) {
    const int64_t num_pieces = ceil_div(num_units, kPieceUnits);
    for (int64_t task = global_warp(); task < sizes.num_tokens * num_pieces; task += num_threads() / kLanes) {
        const int64_t token = task / num_pieces;
        const int64_t begin = task % num_pieces * kPieceUnits + lane_idx();
        if (!has_row(slot_to_row, token, sizes)) continue;
        const Unit* from = x + token * num_units;
        Unit values[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (begin + i * kLanes < num_units) values[i] = from[begin + i * kLanes];
        }
        for (int64_t k = 0; k < sizes.top_k; ++k) {
            const int64_t row = slot_to_row[token * sizes.top_k + k];
            if (row < 0) continue;
            Unit* to = out + row * num_units;
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

// dispatch_rows with at most `most_blocks` blocks.
template <int kBlock>
void launch_scatter(int64_t most_blocks, const void* x, const int64_t* slot_to_row, const RowSizes& sizes,
                    int64_t row_bytes, Stream stream, void* out) {
    with_unit(x, out, row_bytes, [&](auto unit) {
        using Unit = decltype(unit);
        const int64_t num_units = row_bytes / static_cast<int64_t>(sizeof(Unit));
        const int64_t num_tasks = sizes.num_tokens * ceil_div(num_units, kPieceUnits);
        launch({.grid = std::min(blocks_for(num_tasks * kLanes, kBlock), most_blocks),
                .block = kBlock,
                .stream = stream},
               scatter_tokens<Unit, kBlock>, static_cast<const Unit*>(x), slot_to_row, sizes, num_units,
               static_cast<Unit*>(out));
    });
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
                   RowSizes sizes, Out out) {
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

// --- Rows of one byte an element ------------------------------------------------------------------------------------

// How a warp holds a piece of a token: kLanesEach lanes hold a block, kVectors vectors in each lane, and kTogether
// blocks are next to each other, kInFlight times.
template <typename Rows>
struct BlocksOfWarp {
    static constexpr int kLanesEach = kScaleBlock / Rows::kWidth < kLanes ? kScaleBlock / Rows::kWidth : kLanes;
    static constexpr int kVectors = kScaleBlock / Rows::kWidth / kLanesEach;
    static constexpr int kTogether = kLanes / kLanesEach;
    static constexpr int64_t kAll = kInFlight * kTogether;
};

// A warp per piece of a token, grid-stride: quantises it once, and stores it to each row of the token.
template <int kBlock, typename Code, typename Rows>
__global__ void __launch_bounds__(kBlock, kBlock > 256 ? 1 : 3)  // without a spill
    quantise_tokens(Rows x, const int64_t* __restrict__ slot_to_row, RowSizes sizes, int64_t length,
                    uint8_t* __restrict__ records) {
    using Blocks = BlocksOfWarp<Rows>;
    constexpr int kWidth = Rows::kWidth, kLanesEach = Blocks::kLanesEach, kVectors = Blocks::kVectors;
    const int64_t num_blocks = ceil_div(sizes.hidden, kScaleBlock);
    const int64_t num_pieces = ceil_div(num_blocks, Blocks::kAll);
    const int lane = lane_idx() % kLanesEach;
    for (int64_t task = global_warp(); task < sizes.num_tokens * num_pieces; task += num_threads() / kLanes) {
        const int64_t token = task / num_pieces;
        const int64_t begin = task % num_pieces * Blocks::kAll;
        if (!has_row(slot_to_row, token, sizes)) continue;
        const int64_t first = begin + lane_idx() / kLanesEach;
        const auto column_of = [&](int i, int v) {
            return (first + i * Blocks::kTogether) * kScaleBlock + (v * kLanesEach + lane) * kWidth;
        };
        typename Rows::Raw raw[kInFlight][kVectors] = {};
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (column_of(i, v) < sizes.hidden) raw[i][v] = x.load(token * sizes.hidden + column_of(i, v));
            }
        }
        Pack<uint8_t, kWidth> codes[kInFlight][kVectors];
        uint8_t exponents[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            uint32_t largest = 0;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) largest = max(largest, magnitude_bits(x.widen(raw[i][v], j)));
            }
#pragma unroll
            for (int bits = kLanesEach / 2; bits > 0; bits /= 2) {
                largest = max(largest, __shfl_xor_sync(kAllLanes, largest, bits));
            }
            exponents[i] = exponent_of<Code>(largest);
            const float inverse = inverse_scale(exponents[i]);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    codes[i][v].values[j] =
                        row_code<Code>(x.widen(raw[i][v], j), inverse, exponents[i] != kNotFinite);
                }
            }
        }
        const bool is_end = begin + Blocks::kAll >= num_blocks;
        for (int64_t k = 0; k < sizes.top_k; ++k) {
            const int64_t row = slot_to_row[token * sizes.top_k + k];
            if (row < 0) continue;
            uint8_t* record = records + row * length;
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    if (column_of(i, v) < sizes.hidden) store_pack(record + column_of(i, v), codes[i][v]);
                }
                const int64_t block = first + i * Blocks::kTogether;
                if (lane == 0 && block < num_blocks) record[sizes.hidden + block] = exponents[i];
            }
            const int64_t byte = sizes.hidden + num_blocks + lane_idx();  // records end with fewer than 16 zeros
            if (is_end && byte < length) record[byte] = 0;
        }
    }
}

// A thread per vector of a row, grid-stride.
template <int kBlock, typename Code, typename Rows>
__global__ void __launch_bounds__(kBlock)
    dequantise_records(const uint8_t* __restrict__ records, RowSizes sizes, int64_t length, Rows out) {
    constexpr int kWidth = Rows::kWidth;
    const int64_t num_vectors = sizes.hidden / kWidth;
    for (int64_t task = global_thread(); task < sizes.num_rows * num_vectors; task += num_threads()) {
        const int64_t row = task / num_vectors, column = task % num_vectors * kWidth;
        const uint8_t* record = records + row * length;
        const auto codes = load_pack<kWidth>(record + column);
        const float scale = scale_of_exponent(record[sizes.hidden + column / kScaleBlock]);
        float values[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[j] = row_value<Code>(codes.values[j], scale, out.largest());
        out.store(row * sizes.hidden + column, values);
    }
}

// Calls body(rows) with a tensor [_, hidden] as Vectors of 16 bytes, or as Scalars.
template <typename Body>
void with_view(void* rows, Type type, const void* records, int64_t hidden, Body&& body) {
    if (hidden % (type == Type::kFloat32 ? 4 : 8) != 0 || !is_aligned(16, rows, records)) {
        return body(Scalars{rows, type});
    }
    with_type(type, [&](auto element) {
        using Element = decltype(element);
        body(Vectors<Element, 16 / sizeof(Element)>{static_cast<Element*>(rows)});
    });
}

// quantise_rows with at most `most_blocks` blocks.
template <int kBlock>
void launch_quantise(int64_t most_blocks, const void* x, Type x_type, const int64_t* slot_to_row,
                     const RowSizes& sizes, RowFormat format, Stream stream, uint8_t* records) {
    with_code(format, [&](auto code) {
        with_view(const_cast<void*>(x), x_type, records, sizes.hidden, [&](auto rows) {
            const int64_t num_pieces = ceil_div(num_scales(sizes.hidden), BlocksOfWarp<decltype(rows)>::kAll);
            launch({.grid = std::min(blocks_for(sizes.num_tokens * num_pieces * kLanes, kBlock), most_blocks),
                    .block = kBlock,
                    .stream = stream},
                   quantise_tokens<kBlock, decltype(code), decltype(rows)>, rows, slot_to_row, sizes,
                   record_bytes(sizes.hidden), records);
        });
    });
}

template <int kBlock>
void launch_dequantise(int64_t most_blocks, const uint8_t* records, const RowSizes& sizes, RowFormat format,
                       Stream stream, void* out, Type out_type) {
    with_code(format, [&](auto code) {
        with_view(out, out_type, records, sizes.hidden, [&](auto rows) {
            const int64_t num_vectors = sizes.num_rows * (sizes.hidden / rows.kWidth);
            launch({.grid = std::min(blocks_for(num_vectors, kBlock), most_blocks),
                    .block = kBlock,
                    .stream = stream},
                   dequantise_records<kBlock, decltype(code), decltype(rows)>, records, sizes,
                   record_bytes(sizes.hidden), rows);
        });
    });
}

// --- Backward of combine: a row's slots lie between its first and its last, for most rows in one token --------------

// A thread per slot, grid-stride.
template <int kBlock>
__global__ void __launch_bounds__(kBlock, 1)
    find_slots(const int64_t* __restrict__ slot_to_row, RowSizes sizes, int64_t* first_slot, int64_t* last_slot) {
    for (int64_t slot = global_thread(); slot < sizes.num_tokens * sizes.top_k; slot += num_threads()) {
        const int64_t row = slot_to_row[slot];
        if (row < 0) continue;
        if (row >= sizes.num_rows) fail_index("slot_to_row", row, sizes.num_rows, "rows");
        atomicMin(reinterpret_cast<long long*>(first_slot + row), static_cast<long long>(slot));
        atomicMax(reinterpret_cast<long long*>(last_slot + row), static_cast<long long>(slot));
    }
}

// One warp, for a slot that is the first of its token with its row: the dot product of all the token's slots with that
// row, and the gradient of the row if no other token uses it.
template <typename Rows, typename Grad>
__device__ __forceinline__ void backward_of_slot(int64_t slot, Grad grad, Rows rows,
                                                 const int64_t* __restrict__ slot_to_row,
                                                 const float* __restrict__ weights, const RowSizes& sizes,
                                                 const int64_t* __restrict__ last_slot,
                                                 const int64_t* __restrict__ first_slot, Rows grad_rows,
                                                 float* __restrict__ grad_weights) {
    constexpr int kWidth = Rows::kWidth;
    const int64_t row = slot_to_row[slot];
    if (row < 0) {
        if (lane_idx() == 0) grad_weights[slot] = 0.0f;
        return;
    }
    const int64_t token = slot / sizes.top_k, end = (token + 1) * sizes.top_k;
    for (int64_t other = token * sizes.top_k; other < slot; ++other) {
        if (slot_to_row[other] == row) return;
    }
    const bool is_private = first_slot[row] == slot && last_slot[row] < end;
    float dot = 0.0f;
    for (int64_t column = lane_idx() * kWidth; column < sizes.hidden; column += kLanes * kWidth) {
        const auto raw_grad = grad.load(token * sizes.hidden + column);
        const auto raw_row = rows.load(row * sizes.hidden + column);
        float of_vector = 0.0f;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) of_vector = fmaf(grad.widen(raw_grad, i), rows.widen(raw_row, i), of_vector);
        dot += of_vector;
        if (!is_private) continue;
        float sum[kWidth] = {};
        for (int64_t other = slot; other <= last_slot[row]; ++other) {
            if (slot_to_row[other] != row) continue;
            const float weight = weights[other];
#pragma unroll
            for (int i = 0; i < kWidth; ++i) sum[i] += weight * grad.widen(raw_grad, i);
        }
        grad_rows.store(row * sizes.hidden + column, sum);
    }
    dot = warp_sum(dot);
    for (int64_t other = slot + lane_idx(); other < end; other += kLanes) {
        if (slot_to_row[other] == row) grad_weights[other] = dot;
    }
}

// A warp per slot, grid-stride.
template <int kBlock, typename Rows, typename Grad>
__global__ void __launch_bounds__(kBlock)
    combine_backward_by_slot(Grad grad, Rows rows, const int64_t* __restrict__ slot_to_row,
                             const float* __restrict__ weights, RowSizes sizes,
                             const int64_t* __restrict__ last_slot, const int64_t* __restrict__ first_slot,
                             Rows grad_rows, float* __restrict__ grad_weights) {
    for (int64_t slot = global_warp(); slot < sizes.num_tokens * sizes.top_k; slot += num_threads() / kLanes) {
        backward_of_slot(slot, grad, rows, slot_to_row, weights, sizes, last_slot, first_slot, grad_rows,
                         grad_weights);
    }
}

// One warp, for a row that several tokens use, or no token.  It is slow, but such rows are rare.
template <typename Rows, typename Grad>
__device__ __forceinline__ void backward_of_row(int64_t row, Grad grad, const int64_t* __restrict__ slot_to_row,
                                                const float* __restrict__ weights, const RowSizes& sizes,
                                                const int64_t* __restrict__ first_slot,
                                                const int64_t* __restrict__ last_slot, Rows grad_rows) {
    constexpr int kWidth = Rows::kWidth;
    const int64_t first = first_slot[row], last = last_slot[row];
    if (last >= 0 && first / sizes.top_k == last / sizes.top_k) return;
    for (int64_t column = lane_idx() * kWidth; column < sizes.hidden; column += kLanes * kWidth) {
        float sum[kWidth] = {};
        for (int64_t slot = first; slot <= last; ++slot) {
            if (slot_to_row[slot] != row) continue;
            const auto raw = grad.load(slot / sizes.top_k * sizes.hidden + column);
            const float weight = weights[slot];
#pragma unroll
            for (int i = 0; i < kWidth; ++i) sum[i] += weight * grad.widen(raw, i);
        }
        grad_rows.store(row * sizes.hidden + column, sum);
    }
}

// A warp per row, grid-stride.
template <int kBlock, typename Rows, typename Grad>
__global__ void __launch_bounds__(kBlock, 1)
    combine_backward_by_row(Grad grad, const int64_t* __restrict__ slot_to_row, const float* __restrict__ weights,
                            RowSizes sizes, const int64_t* __restrict__ first_slot,
                            const int64_t* __restrict__ last_slot, Rows grad_rows) {
    for (int64_t row = global_warp(); row < sizes.num_rows; row += num_threads() / kLanes) {
        backward_of_row(row, grad, slot_to_row, weights, sizes, first_slot, last_slot, grad_rows);
    }
}

template <int kBlock>
void launch_combine_backward(int64_t most_blocks, const void* grad, Type grad_type, const void* rows, Type rows_type,
                             const int64_t* slot_to_row, const float* weights, const RowSizes& sizes,
                             Stream stream, int64_t* scratch, void* grad_rows, float* grad_weights) {
    const int64_t num_slots = sizes.num_tokens * sizes.top_k;
    int64_t* first_slot = scratch;
    int64_t* last_slot = scratch + sizes.num_rows;
    fill_bytes(first_slot, 0x7f, sizes.num_rows * sizeof(int64_t), stream);
    fill_bytes(last_slot, 0xff, sizes.num_rows * sizeof(int64_t), stream);
    const auto grid = [&](int64_t num_threads) { return std::min(blocks_for(num_threads, kBlock), most_blocks); };
    launch({.grid = grid(num_slots), .block = kBlock, .stream = stream}, find_slots<kBlock>, slot_to_row, sizes,
           first_slot, last_slot);
    with_views(const_cast<void*>(rows), rows_type, const_cast<void*>(grad), grad_type, sizes.hidden,
               [&](auto row_view, auto grad_view) {
                   auto result = row_view;
                   result.data = static_cast<decltype(result.data)>(grad_rows);
                   using Rows = decltype(row_view);
                   using Grad = decltype(grad_view);
                   launch({.grid = grid(num_slots * kLanes), .block = kBlock, .stream = stream},
                          combine_backward_by_slot<kBlock, Rows, Grad>, grad_view, row_view, slot_to_row, weights,
                          sizes, last_slot, first_slot, result, grad_weights);
                   launch({.grid = grid(sizes.num_rows * kLanes), .block = kBlock, .stream = stream},
                          combine_backward_by_row<kBlock, Rows, Grad>, grad_view, slot_to_row, weights, sizes,
                          first_slot, last_slot, result);
               });
}

}  // namespace hybridep
