// SPDX-License-Identifier: Apache-2.0
//
// Row movement on CUDA devices.  What each function computes is told in hybridep_rows.h; here each output element has
// one writer and one order of summation too, so results do not change from run to run.
//
// Rows whose bytes are a multiple of 16 are moved in pieces of 16 bytes, others element by element.

#include "hybridep_rows.h"

#include "hybridep_cuda.h"

namespace hybridep {
namespace {

// --- Plan ------------------------------------------------------------------------------------------------------------
//
// Tokens are taken in chunks of 32, so that the tokens of a chunk which go to a destination are the bits of one word:
// repeats of a destination in a token set the same bit, a row's place among its neighbours is a count of lower bits.

constexpr int kPlanBlock = 256;

struct PlanScratch {
    int64_t* chunk_start;        // [N, C] rows of a destination before a chunk
    int64_t* destination_start;  // [N] rows before a destination
    uint32_t* token_bits;        // [N, C]
    int64_t num_chunks;          // C
};

PlanScratch plan_scratch(void* scratch, int64_t num_tokens, int64_t num_destinations) {
    const int64_t num_chunks = blocks_for(num_tokens, 32);
    auto* chunk_start = static_cast<int64_t*>(scratch);
    auto* destination_start = chunk_start + num_destinations * num_chunks;
    return {chunk_start, destination_start, reinterpret_cast<uint32_t*>(destination_start + num_destinations),
            num_chunks};
}

// Where slot's expert is, or -1 where it is nowhere or wrong.
__device__ __forceinline__ int64_t destination_of(const Routes& routes, int64_t slot) {
    const int32_t expert = routes.topk_idx[slot];
    if (expert < 0 || expert >= routes.num_experts) return -1;
    const int32_t destination = routes.expert_to_destination[expert];
    return destination < routes.num_destinations ? destination : -1;
}

__device__ __forceinline__ void report_wrong(int64_t* first_wrong, int64_t position, int32_t id) {
    const auto word = static_cast<unsigned long long>(position) << 32 | static_cast<uint32_t>(id);
    atomicMin(reinterpret_cast<unsigned long long*>(first_wrong), word);
}

// A thread per slot, or per expert for the check of expert_to_destination.
__global__ void mark_tokens(Routes routes, PlanScratch scratch, int64_t* first_wrong) {
    const int64_t i = global_thread();
    if (i < routes.num_experts && routes.expert_to_destination[i] >= routes.num_destinations) {
        report_wrong(first_wrong + 1, i, routes.expert_to_destination[i]);
    }
    if (i >= routes.num_tokens * routes.top_k) return;
    if (routes.topk_idx[i] >= routes.num_experts) report_wrong(first_wrong, i, routes.topk_idx[i]);
    const int64_t destination = destination_of(routes, i);
    if (destination < 0) return;
    const int64_t token = i / routes.top_k;
    atomicOr(scratch.token_bits + destination * scratch.num_chunks + token / 32, 1u << (token % 32));
}

// Sum of `value` over the threads before this one; `total` becomes that over all.  For blocks of kPlanBlock threads.
__device__ int64_t exclusive_sum(int64_t value, int64_t* total) {
    __shared__ int64_t of_warp[kPlanBlock / kLanes];
    int64_t sum = value;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        const int64_t before = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane_idx() >= distance) sum += before;
    }
    if (lane_idx() == kLanes - 1) of_warp[warp_idx()] = sum;
    __syncthreads();
    int64_t before = 0, all = 0;
#pragma unroll
    for (int warp = 0; warp < kPlanBlock / kLanes; ++warp) {
        if (warp < warp_idx()) before += of_warp[warp];
        all += of_warp[warp];
    }
    __syncthreads();  // of_warp may be written again
    *total = all;
    return before + sum - value;
}

// A block per destination: rows before each chunk, and rows altogether.
__global__ void __launch_bounds__(kPlanBlock) count_rows(PlanScratch scratch, int64_t* rows_per_destination) {
    const int64_t first = blockIdx.x * scratch.num_chunks;
    int64_t before = 0;
    for (int64_t begin = 0; begin < scratch.num_chunks; begin += kPlanBlock) {
        const int64_t chunk = begin + threadIdx.x;
        const bool is_there = chunk < scratch.num_chunks;
        int64_t total;
        const int64_t count = is_there ? __popc(scratch.token_bits[first + chunk]) : 0;
        const int64_t start = exclusive_sum(count, &total);
        if (is_there) scratch.chunk_start[first + chunk] = before + start;
        before += total;
    }
    if (threadIdx.x == 0) rows_per_destination[blockIdx.x] = before;
}

// One block: rows before each destination.
__global__ void __launch_bounds__(kPlanBlock)
    start_destinations(const int64_t* rows_per_destination, int64_t num_destinations, int64_t* destination_start) {
    int64_t before = 0;
    for (int64_t begin = 0; begin < num_destinations; begin += kPlanBlock) {
        const int64_t n = begin + threadIdx.x;
        int64_t total;
        const int64_t start = exclusive_sum(n < num_destinations ? rows_per_destination[n] : 0, &total);
        if (n < num_destinations) destination_start[n] = before + start;
        before += total;
    }
}

// A thread per slot.  The first slot of a row also writes what the row is for.
__global__ void fill_plan(Routes routes, PlanScratch scratch, int64_t* row_to_token, int32_t* row_topk_idx,
                          int64_t* slot_to_row, int64_t* first_slot_to_row) {
    const int64_t slot = global_thread();
    if (slot >= routes.num_tokens * routes.top_k) return;
    const int64_t destination = destination_of(routes, slot);
    if (destination < 0) {
        slot_to_row[slot] = first_slot_to_row[slot] = -1;
        return;
    }
    const int64_t token = slot / routes.top_k;
    const int64_t word = destination * scratch.num_chunks + token / 32;
    const uint32_t lower = scratch.token_bits[word] & ((1u << (token % 32)) - 1);
    const int64_t row = scratch.destination_start[destination] + scratch.chunk_start[word] + __popc(lower);
    slot_to_row[slot] = row;
    bool is_first = true;
    for (int64_t other = token * routes.top_k; other < slot; ++other) {
        is_first &= destination_of(routes, other) != destination;
    }
    first_slot_to_row[slot] = is_first ? row : -1;
    if (!is_first) return;
    row_to_token[row] = token;
    for (int64_t k = 0; k < routes.top_k; ++k) {
        const int64_t other = token * routes.top_k + k;
        const bool is_here = destination_of(routes, other) == destination;
        row_topk_idx[row * routes.top_k + k] = is_here ? routes.topk_idx[other] : -1;
    }
}

}  // namespace

int64_t plan_scratch_bytes(int64_t num_tokens, int64_t num_destinations) {
    const int64_t num_words = num_destinations * blocks_for(num_tokens, 32);
    return num_words * static_cast<int64_t>(sizeof(int64_t) + sizeof(uint32_t)) +
           num_destinations * static_cast<int64_t>(sizeof(int64_t));
}

void plan_routes(const Routes& routes, Stream stream, void* scratch, int64_t* counts, int64_t* row_to_token,
                 int32_t* row_topk_idx, int64_t* slot_to_row, int64_t* first_slot_to_row) {
    const PlanScratch parts = plan_scratch(scratch, routes.num_tokens, routes.num_destinations);
    int64_t* first_wrong = counts + routes.num_destinations;
    fill_bytes(first_wrong, 0x7f, 2 * sizeof(int64_t), stream);
    fill_bytes(parts.token_bits, 0, routes.num_destinations * parts.num_chunks * sizeof(uint32_t), stream);
    const int64_t num_slots = routes.num_tokens * routes.top_k;
    launch({.grid = blocks_for(std::max(num_slots, routes.num_experts), kPlanBlock),
            .block = kPlanBlock,
            .stream = stream},
           mark_tokens, routes, parts, first_wrong);
    launch({.grid = routes.num_destinations, .block = kPlanBlock, .stream = stream}, count_rows, parts, counts);
    launch({.grid = 1, .block = kPlanBlock, .stream = stream}, start_destinations, counts, routes.num_destinations,
           parts.destination_start);
    launch({.grid = blocks_for(num_slots, kPlanBlock), .block = kPlanBlock, .stream = stream}, fill_plan, routes, parts,
           row_to_token, row_topk_idx, slot_to_row, first_slot_to_row);
}

// --- Dispatch --------------------------------------------------------------------------------------------------------

namespace {

constexpr int kRowBlock = 256;
constexpr int kInFlight = 4;  // loads of a thread before their first use

// A warp per row of out.
template <typename Unit>
__global__ void __launch_bounds__(kRowBlock)
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

// A warp per token and piece of kInFlight * 32 units, which it reads once and writes to each of the token's rows.
template <typename Unit>
__global__ void __launch_bounds__(kRowBlock)
    scatter_tokens(const Unit* __restrict__ x, const int64_t* __restrict__ slot_to_row, int64_t num_tokens,
                   int64_t top_k, int64_t num_rows, int64_t num_units, Unit* __restrict__ out) {
    const int64_t num_pieces = (num_units + kInFlight * kLanes - 1) / (kInFlight * kLanes);
    for (int64_t task = global_warp(); task < num_tokens * num_pieces; task += num_threads() / kLanes) {
        const int64_t token = task / num_pieces;
        const int64_t begin = task % num_pieces * (kInFlight * kLanes) + lane_idx();
        Unit values[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (begin + i * kLanes < num_units) values[i] = x[token * num_units + begin + i * kLanes];
        }
        for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
            const int64_t row = slot_to_row[slot];
            if (row < 0) continue;
            if (row >= num_rows) fail_index("slot_to_row", row, num_rows, "rows");
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                if (begin + i * kLanes < num_units) out[row * num_units + begin + i * kLanes] = values[i];
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

}  // namespace

int64_t dispatch_rows(const void* x, const int64_t* row_to_token, int64_t num_tokens, int64_t num_rows,
                      int64_t row_bytes, Stream stream, void* out) {
    with_unit(x, out, row_bytes, [&](auto unit) {
        using Unit = decltype(unit);
        launch({.grid = blocks_for(num_rows * kLanes, kRowBlock), .block = kRowBlock, .stream = stream},
               gather_rows<Unit>, static_cast<const Unit*>(x), row_to_token, num_tokens, num_rows,
               row_bytes / static_cast<int64_t>(sizeof(Unit)), static_cast<Unit*>(out));
    });
    return kAllInRange;
}

int64_t scatter_rows(const void* x, const int64_t* slot_to_row, int64_t num_tokens, int64_t top_k, int64_t num_rows,
                     int64_t row_bytes, Stream stream, void* out) {
    with_unit(x, out, row_bytes, [&](auto unit) {
        using Unit = decltype(unit);
        const int64_t num_units = row_bytes / static_cast<int64_t>(sizeof(Unit));
        const int64_t num_tasks = num_tokens * blocks_for(num_units, kInFlight * kLanes);
        launch({.grid = std::min(blocks_for(num_tasks * kLanes, kRowBlock), kMaxGrid),
                .block = kRowBlock,
                .stream = stream},
               scatter_tokens<Unit>, static_cast<const Unit*>(x), slot_to_row, num_tokens, top_k, num_rows, num_units,
               static_cast<Unit*>(out));
    });
    return kAllInRange;
}

// --- Combine ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int kCombineBlock = 128;

// A tensor read and written kWide elements at a time.
template <typename T, int kWide>
struct Vectors {
    [[maybe_unused]] static constexpr int kWidth = kWide;
    using Raw = Pack<T, kWide>;
    T* data;

    __device__ __forceinline__ Raw load(int64_t at) const { return load_pack<kWide>(data + at); }
    __device__ __forceinline__ float widen(const Raw& raw, int i) const { return to_float(raw.values[i]); }
    __device__ __forceinline__ void store(int64_t at, const float (&values)[kWide]) const {
        Raw raw;
#pragma unroll
        for (int i = 0; i < kWide; ++i) raw.values[i] = from_float<T>(values[i]);
        store_pack(data + at, raw);
    }
};

// One element at a time, of a type known when the kernel runs: for rows that vectors do not fit, one kernel for all.
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
template <typename Rows, typename Out>
__global__ void __launch_bounds__(kCombineBlock)
    combine_tokens(Rows rows, const int64_t* __restrict__ slot_to_row, const float* __restrict__ weights,
                   CombineSizes sizes, Out out) {
    constexpr int kWidth = Rows::kWidth;
    const int64_t num_vectors = sizes.hidden / kWidth;
    const int64_t num_pieces = (num_vectors + kCombineBlock - 1) / kCombineBlock;
    for (int64_t task = blockIdx.x; task < sizes.num_tokens * num_pieces; task += gridDim.x) {
        const int64_t token = task / num_pieces;
        const int64_t vector = task % num_pieces * kCombineBlock + threadIdx.x;
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

// --- Backward of combine: a row's slots lie between its first and its last, for most rows in one token ---------------

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

// A warp per slot that is the first of its token with its row: the dot product of all such slots, and the gradient of
// the row where no other token uses it.
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

// A warp per row that several tokens use, or none: slow, and rare.
template <typename Rows, typename Grad>
__global__ void __launch_bounds__(kRowBlock)
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
               combine_tokens<decltype(from), decltype(to)>, from, slot_to_row, weights, sizes, to);
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
                   launch({.grid = blocks_for(sizes.num_rows * kLanes, kRowBlock),
                           .block = kRowBlock,
                           .stream = stream},
                          combine_backward_by_row<Rows, Grad>, grad_view, slot_to_row, weights, sizes, first_slot,
                          last_slot, result);
               });
    return kAllInRange;
}

}  // namespace hybridep
