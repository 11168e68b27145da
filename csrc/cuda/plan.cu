// SPDX-License-Identifier: Apache-2.0
//
// Route plans on CUDA devices.  hybridep_rows.h says what is computed.

#include "hybridep_rows.h"

#include "hybridep_cuda.h"

namespace hybridep {
namespace {

// Tokens are taken in chunks of 32.  For each destination, the bits of one word say which tokens of a chunk go there.
// A destination that a token repeats sets the same bit.  A row's place in its chunk is the count of lower bits.

constexpr int kPlanBlock = 256;

struct PlanScratch {
    int64_t* chunk_start;        // [N, C] rows of a destination before a chunk
    int64_t* destination_start;  // [N] rows before a destination
    uint32_t* token_bits;        // [N, C]
    int64_t num_chunks;          // C
};

PlanScratch take_plan(Scratch& scratch, int64_t num_tokens, int64_t num_destinations) {
    const int64_t num_chunks = blocks_for(num_tokens, 32);
    return {.chunk_start = scratch.take<int64_t>(num_destinations * num_chunks),
            .destination_start = scratch.take<int64_t>(num_destinations),
            .token_bits = scratch.take<uint32_t>(num_destinations * num_chunks),
            .num_chunks = num_chunks};
}

// Destination of the slot's expert; -1 if there is none, or if an id is out of range.
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

// Sum of `value` over the threads before this one; `total` becomes the sum over all.  For kPlanBlock threads a block.
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

// A block per destination: counts the rows before each chunk, and all rows.
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

// One block: counts the rows before each destination.
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

// A thread per slot.  The first slot of a row also writes the row's token and experts.
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

std::string code_error() {
#ifdef HYBRIDEP_EMULATION
    return "";
#else
    cudaFuncAttributes attributes{};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, fill_plan);
    if (error == cudaSuccess) return "";
    cudaGetLastError();  // otherwise the next launch would report the error
    return cudaGetErrorString(error);
#endif
}

int64_t plan_scratch_bytes(int64_t num_tokens, int64_t num_destinations) {
    Scratch scratch;
    take_plan(scratch, num_tokens, num_destinations);
    return scratch.bytes();
}

void plan_routes(const Routes& routes, const Workspace& work, int64_t* counts, int64_t* row_to_token,
                 int32_t* row_topk_idx, int64_t* slot_to_row, int64_t* first_slot_to_row) {
    const Stream stream = work.stream;
    Scratch scratch(work.scratch);
    const PlanScratch parts = take_plan(scratch, routes.num_tokens, routes.num_destinations);
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
    launch({.grid = blocks_for(num_slots, kPlanBlock), .block = kPlanBlock, .stream = stream}, fill_plan, routes,
           parts, row_to_token, row_topk_idx, slot_to_row, first_slot_to_row);
}

}  // namespace hybridep
