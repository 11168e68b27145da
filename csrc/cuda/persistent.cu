// SPDX-License-Identifier: Apache-2.0
//
// Dispatch and combine on a few multiprocessors: a block stays on each and takes every num_sms-th piece of work.
//
// With bulk copies, a pipeline of stages in shared memory keeps many bytes on their way with few threads.  Without
// them, for rows of one byte an element and for the backward of combine, blocks of 512 threads run the same kernels as
// rows.cu.

#include "hybridep_bulk.h"
#include "hybridep_cuda_rows.h"

namespace hybridep {
namespace {

constexpr int kLoopBlock = 512;

void require_sms(int num_sms) {
    if (num_sms < 1) throw std::runtime_error("num_sms: got " + std::to_string(num_sms) + ", wanted 1 or more");
}

// Number of tasks of this block: blockIdx.x, blockIdx.x + gridDim.x, ... below `all`.
[[maybe_unused]] __device__ __forceinline__ int64_t num_own_tasks(int64_t all) {
    return (all - blockIdx.x + gridDim.x - 1) / gridDim.x;
}

// --- Dispatch -------------------------------------------------------------------------------------------------------
//
// One warp.  A stage holds a piece of a token.  The first lane loads it, and each lane stores it to one row of the
// token.  A stage may be loaded again after its stores have read it; the warp checks that kLag tasks later.

constexpr int kStageBytes = 16 * 1024;
[[maybe_unused]] constexpr int kLag = 2;
constexpr int kMaxStages = 12;
constexpr int kMaxSlots = kLanes;  // of a token: a lane for each, here and in combine

__global__ void __launch_bounds__(kLanes)
    scatter_in_bulk(const char* __restrict__ x, const int64_t* __restrict__ slot_to_row, RowSizes sizes,
                    int64_t row_bytes, int num_stages, char* __restrict__ out) {
#ifdef HYBRIDEP_HAS_BULK
    char* stages = dynamic_shared<char>();
    auto* is_full = reinterpret_cast<Barrier*>(stages + num_stages * kStageBytes);
    const int64_t num_pieces = (row_bytes + kStageBytes - 1) / kStageBytes;
    const int64_t num_tasks = num_own_tasks(sizes.num_tokens * num_pieces);
    const int lane = lane_idx();

    const auto token_of = [&](int64_t i) { return (blockIdx.x + i * gridDim.x) / num_pieces; };
    const auto begin_of = [&](int64_t i) { return (blockIdx.x + i * gridDim.x) % num_pieces * kStageBytes; };
    const auto bytes_of = [&](int64_t i) {
        const int64_t left = row_bytes - begin_of(i);
        return static_cast<int>(left < kStageBytes ? left : kStageBytes);
    };
    const auto start_load = [&](int64_t i) {
        if (lane != 0) return;
        const int stage = static_cast<int>(i % num_stages);
        barrier_arrive(is_full + stage, bytes_of(i));
        bulk_load(stages + stage * kStageBytes, x + token_of(i) * row_bytes + begin_of(i), bytes_of(i),
                  is_full + stage);
    };

    if (lane == 0) {
        for (int stage = 0; stage < num_stages; ++stage) barrier_init(is_full + stage, 1);
        barrier_publish();
    }
    __syncwarp();
    for (int64_t i = 0; i < num_stages && i < num_tasks; ++i) start_load(i);
    for (int64_t i = 0; i < num_tasks; ++i) {
        const int stage = static_cast<int>(i % num_stages);
        const int64_t row = lane < sizes.top_k ? slot_to_row[token_of(i) * sizes.top_k + lane] : -1;
        if (row >= sizes.num_rows) fail_index("slot_to_row", row, sizes.num_rows, "rows");
        barrier_wait(is_full + stage, static_cast<int>(i / num_stages % 2));
        if (row >= 0) bulk_store(out + row * row_bytes + begin_of(i), stages + stage * kStageBytes, bytes_of(i));
        bulk_commit();
        bulk_wait_read<kLag>();
        __syncwarp();
        const int64_t next = i - kLag + num_stages;
        if (i >= kLag && next < num_tasks) start_load(next);
    }
    bulk_wait_read<0>();
#else
    __trap();
#endif
}

// --- Combine --------------------------------------------------------------------------------------------------------
//
// The first warp loads, the others sum.  A stage holds a piece of each row of a token, the weights of the rows, and a
// mask of the slots that have a row.

constexpr int kSummers = 256;
[[maybe_unused]] constexpr int kSummerWarps = kSummers / kLanes;
constexpr int kPieceBytes = 16 * kSummers;

struct StageInfo {
    Barrier is_full;
    Barrier is_empty;
    float weights[kMaxSlots];
    unsigned slots;
};

template <typename Rows, typename Out>
__global__ void __launch_bounds__(kLanes + kSummers)
    combine_in_bulk(Rows rows, const int64_t* __restrict__ slot_to_row, const float* __restrict__ weights,
                    RowSizes sizes, int num_stages, Out out) {
#ifdef HYBRIDEP_HAS_BULK
    constexpr int kWidth = Rows::kWidth;
    constexpr int kElementBytes = 16 / kWidth;
    const int top_k = static_cast<int>(sizes.top_k);
    const int64_t row_bytes = sizes.hidden * kElementBytes;
    const int64_t num_pieces = (row_bytes + kPieceBytes - 1) / kPieceBytes;
    const int64_t num_tasks = num_own_tasks(sizes.num_tokens * num_pieces);
    char* stages = dynamic_shared<char>();
    auto* infos = reinterpret_cast<StageInfo*>(stages + num_stages * top_k * kPieceBytes);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < num_stages; ++stage) {
            barrier_init(&infos[stage].is_full, 1);
            barrier_init(&infos[stage].is_empty, kSummerWarps);
        }
        barrier_publish();
    }
    __syncthreads();

    for (int64_t i = 0; i < num_tasks; ++i) {
        const int64_t task = blockIdx.x + i * gridDim.x;
        const int64_t token = task / num_pieces, begin = task % num_pieces * kPieceBytes;
        const int64_t left = row_bytes - begin;
        const int num_bytes = static_cast<int>(left < kPieceBytes ? left : kPieceBytes);
        const int stage = static_cast<int>(i % num_stages);
        const int64_t round = i / num_stages;
        StageInfo& info = infos[stage];
        char* pieces = stages + stage * top_k * kPieceBytes;

        if (warp_idx() == 0) {
            const int lane = lane_idx();
            const int64_t slot = token * top_k + lane;
            const int64_t row = lane < top_k ? slot_to_row[slot] : -1;
            if (row >= sizes.num_rows) fail_index("slot_to_row", row, sizes.num_rows, "rows");
            const float weight = row >= 0 && weights != nullptr ? weights[slot] : 1.0f;
            if (round > 0) barrier_wait(&info.is_empty, static_cast<int>((round - 1) % 2));
            const unsigned slots = __ballot_sync(kAllLanes, row >= 0);
            info.weights[lane] = weight;
            if (lane == 0) info.slots = slots;
            __syncwarp();
            if (lane == 0) barrier_arrive(&info.is_full, __popc(slots) * num_bytes);
            __syncwarp();
            if (row >= 0) {
                const char* from = reinterpret_cast<const char*>(rows.data) + row * row_bytes + begin;
                bulk_load(pieces + lane * kPieceBytes, from, num_bytes, &info.is_full);
            }
        } else {
            const int offset = (static_cast<int>(threadIdx.x) - kLanes) * 16;
            barrier_wait(&info.is_full, static_cast<int>(round % 2));
            if (offset < num_bytes) {
                float sum[kWidth] = {};
                const unsigned slots = info.slots;
                for (int k = 0; k < top_k; ++k) {
                    if ((slots >> k & 1) == 0) continue;
                    const auto raw = *reinterpret_cast<const typename Rows::Raw*>(pieces + k * kPieceBytes + offset);
#pragma unroll
                    for (int j = 0; j < kWidth; ++j) sum[j] += info.weights[k] * rows.widen(raw, j);
                }
                out.store(token * sizes.hidden + (begin + offset) / kElementBytes, sum);
            }
            __syncwarp();
            if (lane_idx() == 0) barrier_arrive(&info.is_empty, 0);
        }
    }
#else
    __trap();
#endif
}

}  // namespace

int64_t dispatch_rows_on(int num_sms, const void* x, const int64_t* slot_to_row, const RowSizes& sizes,
                         int64_t element_bytes, Stream stream, void* out) {
    require_sms(num_sms);
    const int64_t row_bytes = sizes.hidden * element_bytes;
    const bool fits = row_bytes > 0 && row_bytes % 16 == 0 && sizes.top_k <= kMaxSlots && is_aligned(16, x, out);
    if (!fits || !has_bulk_copies(scatter_in_bulk)) {
        launch_scatter<kLoopBlock>(num_sms, x, slot_to_row, sizes, row_bytes, stream, out);
        return kAllInRange;
    }
    const int64_t stage_bytes = kStageBytes + static_cast<int64_t>(sizeof(Barrier));
    const int64_t num_stages = std::min<int64_t>(max_shared_bytes() / stage_bytes, kMaxStages);
    launch({.grid = std::min<int64_t>(num_sms, sizes.num_tokens * blocks_for(row_bytes, kStageBytes)),
            .block = kLanes,
            .stream = stream,
            .shared_bytes = static_cast<size_t>(num_stages * stage_bytes)},
           scatter_in_bulk, static_cast<const char*>(x), slot_to_row, sizes, row_bytes, static_cast<int>(num_stages),
           static_cast<char*>(out));
    return kAllInRange;
}

int64_t combine_rows_on(int num_sms, const void* rows, Type rows_type, const int64_t* slot_to_row,
                        const float* weights, const RowSizes& sizes, Stream stream, void* out, Type out_type) {
    require_sms(num_sms);
    const int64_t stage_bytes = sizes.top_k * kPieceBytes + static_cast<int64_t>(sizeof(StageInfo));
    const int64_t num_stages = std::min<int64_t>(max_shared_bytes() / stage_bytes, kMaxStages);
    const bool has_room = num_stages >= 2 && sizes.top_k <= kMaxSlots;
    with_views(const_cast<void*>(rows), rows_type, out, out_type, sizes.hidden, [&](auto from, auto to) {
        using Rows = decltype(from);
        using Out = decltype(to);
        if constexpr (Rows::kWidth > 1) {
            if (has_room && has_bulk_copies(combine_in_bulk<Rows, Out>)) {
                const int64_t num_pieces = blocks_for(sizes.hidden / Rows::kWidth, kSummers);
                launch({.grid = std::min<int64_t>(num_sms, sizes.num_tokens * num_pieces),
                        .block = kLanes + kSummers,
                        .stream = stream,
                        .shared_bytes = static_cast<size_t>(num_stages * stage_bytes)},
                       combine_in_bulk<Rows, Out>, from, slot_to_row, weights, sizes, static_cast<int>(num_stages),
                       to);
                return;
            }
        }
        const int64_t num_pieces = blocks_for(sizes.hidden / Rows::kWidth, kLoopBlock);
        launch(
            {.grid = std::min<int64_t>(num_sms, sizes.num_tokens * num_pieces), .block = kLoopBlock, .stream = stream},
            combine_tokens<kLoopBlock, Rows, Out>, from, slot_to_row, weights, sizes, to);
    });
    return kAllInRange;
}

int64_t quantise_rows_on(int num_sms, const void* x, Type x_type, const int64_t* slot_to_row, const RowSizes& sizes,
                         RowFormat format, Stream stream, uint8_t* records) {
    require_sms(num_sms);
    launch_quantise<kLoopBlock>(num_sms, x, x_type, slot_to_row, sizes, format, stream, records);
    return kAllInRange;
}

void dequantise_rows_on(int num_sms, const uint8_t* records, const RowSizes& sizes, RowFormat format, Stream stream,
                        void* out, Type out_type) {
    require_sms(num_sms);
    launch_dequantise<kLoopBlock>(num_sms, records, sizes, format, stream, out, out_type);
}

int64_t combine_rows_backward_on(int num_sms, const void* grad, Type grad_type, const void* rows, Type rows_type,
                                 const int64_t* slot_to_row, const float* weights, const RowSizes& sizes,
                                 Stream stream, int64_t* scratch, void* grad_rows, float* grad_weights) {
    require_sms(num_sms);
    launch_combine_backward<kLoopBlock>(num_sms, grad, grad_type, rows, rows_type, slot_to_row, weights, sizes, stream,
                                        scratch, grad_rows, grad_weights);
    return kAllInRange;
}

}  // namespace hybridep
