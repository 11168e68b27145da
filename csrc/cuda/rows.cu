// SPDX-License-Identifier: Apache-2.0
//
// Row movement on CUDA devices.  hybridep_rows.h says what each function computes.  Here too, each output element has
// one writer and one order of summation, so results do not change from run to run.
//
// Rows move in pieces of 16 bytes if their size and addresses are multiples of 16, else in smaller pieces.

#include "hybridep_cuda_rows.h"
#include "hybridep_scales.h"

namespace hybridep {
namespace {

constexpr int kRowBlock = 256;
constexpr int kCombineBlock = 128;

}  // namespace

int64_t dispatch_rows(const void* x, const int64_t* row_to_token, int64_t num_tokens, int64_t num_rows,
                      int64_t row_bytes, Stream stream, void* out) {
    with_unit(x, out, row_bytes, [&](auto unit) {
        using Unit = decltype(unit);
        launch({.grid = blocks_for(num_rows * kLanes, kRowBlock), .block = kRowBlock, .stream = stream},
               gather_rows<Unit, kRowBlock>, static_cast<const Unit*>(x), row_to_token, num_tokens, num_rows,
               row_bytes / static_cast<int64_t>(sizeof(Unit)), static_cast<Unit*>(out));
    });
    return kAllInRange;
}

// --- Rows of one byte an element ------------------------------------------------------------------------------------

namespace {

// A warp per row takes several blocks of it at a time: kLanesEach lanes hold a block, kVectors vectors in each lane.
template <typename Code, typename Rows>
__global__ void __launch_bounds__(kRowBlock)
    quantise_tokens(Rows x, const int64_t* __restrict__ row_to_token, RowSizes sizes, int64_t length,
                    uint8_t* __restrict__ records) {
    constexpr int kWidth = Rows::kWidth;
    constexpr int kLanesEach = kScaleBlock / kWidth < kLanes ? kScaleBlock / kWidth : kLanes;
    constexpr int kVectors = kScaleBlock / kWidth / kLanesEach;
    constexpr int kTogether = kLanes / kLanesEach;
    const int64_t num_blocks = ceil_div(sizes.hidden, kScaleBlock);
    const int lane = lane_idx() % kLanesEach;
    for (int64_t row = global_warp(); row < sizes.num_rows; row += num_threads() / kLanes) {
        const int64_t token = row_to_token[row];
        if (token < 0 || token >= sizes.num_tokens) fail_index("row_to_token", token, sizes.num_tokens, "tokens");
        uint8_t* record = records + row * length;
        for (int64_t begin = 0; begin < num_blocks; begin += kInFlight * kTogether) {
            const int64_t first = begin + lane_idx() / kLanesEach;
            typename Rows::Raw raw[kInFlight][kVectors] = {};
            const auto column_of = [&](int i, int v) {
                return (first + i * kTogether) * kScaleBlock + (v * kLanesEach + lane) * kWidth;
            };
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    if (column_of(i, v) < sizes.hidden) raw[i][v] = x.load(token * sizes.hidden + column_of(i, v));
                }
            }
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
                const uint8_t exponent = exponent_of<Code>(largest);
                const float inverse = inverse_scale(exponent);
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    Pack<uint8_t, kWidth> codes;
#pragma unroll
                    for (int j = 0; j < kWidth; ++j) {
                        codes.values[j] = row_code<Code>(x.widen(raw[i][v], j), inverse, exponent != kNotFinite);
                    }
                    if (column_of(i, v) < sizes.hidden) store_pack(record + column_of(i, v), codes);
                }
                const int64_t block = first + i * kTogether;
                if (lane == 0 && block < num_blocks) record[sizes.hidden + block] = exponent;
            }
        }
        for (int64_t byte = sizes.hidden + num_blocks + lane_idx(); byte < length; byte += kLanes) record[byte] = 0;
    }
}

// A thread per vector of a row, grid-stride.
template <typename Code, typename Rows>
__global__ void __launch_bounds__(kRowBlock)
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

}  // namespace

int64_t quantise_rows(const void* x, Type x_type, const int64_t* row_to_token, const RowSizes& sizes, RowFormat format,
                      Stream stream, uint8_t* records) {
    with_code(format, [&](auto code) {
        with_view(const_cast<void*>(x), x_type, records, sizes.hidden, [&](auto rows) {
            launch({.grid = blocks_for(sizes.num_rows * kLanes, kRowBlock), .block = kRowBlock, .stream = stream},
                   quantise_tokens<decltype(code), decltype(rows)>, rows, row_to_token, sizes,
                   record_bytes(sizes.hidden), records);
        });
    });
    return kAllInRange;
}

void dequantise_rows(const uint8_t* records, const RowSizes& sizes, RowFormat format, Stream stream, void* out,
                     Type out_type) {
    with_code(format, [&](auto code) {
        with_view(out, out_type, records, sizes.hidden, [&](auto rows) {
            const int64_t num_vectors = sizes.num_rows * (sizes.hidden / rows.kWidth);
            launch({.grid = std::min(blocks_for(num_vectors, kRowBlock), kMaxGrid),
                    .block = kRowBlock,
                    .stream = stream},
                   dequantise_records<decltype(code), decltype(rows)>, records, sizes, record_bytes(sizes.hidden),
                   rows);
        });
    });
}

namespace {

// --- Backward of combine: a row's slots lie between its first and its last, for most rows in one token --------------

// A thread per slot.
__global__ void find_slots(const int64_t* __restrict__ slot_to_row, CombineSizes sizes, int64_t* first_slot,
                           int64_t* last_slot) {
    const int64_t slot = global_thread();
    if (slot >= sizes.num_tokens * sizes.top_k) return;
    const int64_t row = slot_to_row[slot];
    if (row < 0) return;
    if (row >= sizes.num_rows) fail_index("slot_to_row", row, sizes.num_rows, "rows");
    atomicMin(reinterpret_cast<long long*>(first_slot + row), static_cast<long long>(slot));
    atomicMax(reinterpret_cast<long long*>(last_slot + row), static_cast<long long>(slot));
}

// A warp per slot that is the first of its token with its row.  It computes the dot product of all the token's slots
// with that row, and the gradient of the row if no other token uses it.
template <typename Rows, typename Grad>
__global__ void __launch_bounds__(kRowBlock)
    combine_backward_by_slot(Grad grad, Rows rows, const int64_t* __restrict__ slot_to_row,
                             const float* __restrict__ weights, CombineSizes sizes,
                             const int64_t* __restrict__ last_slot, const int64_t* __restrict__ first_slot,
                             Rows grad_rows, float* __restrict__ grad_weights) {
    constexpr int kWidth = Rows::kWidth;
    const int64_t slot = global_warp();
    if (slot >= sizes.num_tokens * sizes.top_k) return;
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

// A warp per row that several tokens use, or no token.  It is slow, but such rows are rare.
template <typename Rows, typename Grad>
__global__ void __launch_bounds__(kRowBlock, 1)
    combine_backward_by_row(Grad grad, const int64_t* __restrict__ slot_to_row, const float* __restrict__ weights,
                            CombineSizes sizes, const int64_t* __restrict__ first_slot,
                            const int64_t* __restrict__ last_slot, Rows grad_rows) {
    constexpr int kWidth = Rows::kWidth;
    const int64_t row = global_warp();
    if (row >= sizes.num_rows) return;
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

}  // namespace

int64_t combine_rows(const void* rows, Type rows_type, const int64_t* slot_to_row, const float* weights,
                     const CombineSizes& sizes, Stream stream, void* out, Type out_type) {
    with_views(const_cast<void*>(rows), rows_type, out, out_type, sizes.hidden, [&](auto from, auto to) {
        const int64_t num_pieces = blocks_for(sizes.hidden / from.kWidth, kCombineBlock);
        launch({.grid = std::min(sizes.num_tokens * num_pieces, kMaxGrid), .block = kCombineBlock, .stream = stream},
               combine_tokens<kCombineBlock, decltype(from), decltype(to)>, from, slot_to_row, weights, sizes, to);
    });
    return kAllInRange;
}

int64_t combine_rows_backward(const void* grad, Type grad_type, const void* rows, Type rows_type,
                              const int64_t* slot_to_row, const float* weights, const CombineSizes& sizes,
                              Stream stream, int64_t* scratch, void* grad_rows, float* grad_weights) {
    const int64_t num_slots = sizes.num_tokens * sizes.top_k;
    int64_t* first_slot = scratch;
    int64_t* last_slot = scratch + sizes.num_rows;
    fill_bytes(first_slot, 0x7f, sizes.num_rows * sizeof(int64_t), stream);
    fill_bytes(last_slot, 0xff, sizes.num_rows * sizeof(int64_t), stream);
    launch({.grid = blocks_for(num_slots, kRowBlock), .block = kRowBlock, .stream = stream}, find_slots, slot_to_row,
           sizes, first_slot, last_slot);
    with_views(const_cast<void*>(rows), rows_type, const_cast<void*>(grad), grad_type, sizes.hidden,
               [&](auto row_view, auto grad_view) {
                   auto result = row_view;
                   result.data = static_cast<decltype(result.data)>(grad_rows);
                   using Rows = decltype(row_view);
                   using Grad = decltype(grad_view);
                   launch({.grid = blocks_for(num_slots * kLanes, kRowBlock), .block = kRowBlock, .stream = stream},
                          combine_backward_by_slot<Rows, Grad>, grad_view, row_view, slot_to_row, weights, sizes,
                          last_slot, first_slot, result, grad_weights);
                   launch(
                       {.grid = blocks_for(sizes.num_rows * kLanes, kRowBlock), .block = kRowBlock, .stream = stream},
                       combine_backward_by_row<Rows, Grad>, grad_view, slot_to_row, weights, sizes, first_slot,
                       last_slot, result);
               });
    return kAllInRange;
}

}  // namespace hybridep
