// SPDX-License-Identifier: Apache-2.0
//
// Low rank on CUDA devices.  hybridep_codecs.h says what each function computes; ds_hybridep/codecs/low_rank.py
// explains the scheme.
//
// The approximated matrix X (such as W - M) is never stored: every pass reads the parts that it is made of.  The order
// of sums over rows and columns depends on the shape alone.

#include <type_traits>

#include "hybridep_cuda_codecs.h"

namespace hybridep {
namespace {

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / kLanes;
constexpr int kMaxRank = 256;
constexpr int kRowsAtOnce = 4;         // rows of a warp for one load of q
constexpr int kTile = 64;              // rows that a block takes at a time
constexpr int kColumnsAtOnce = 128;    // columns of a block, one for each thread
constexpr int64_t kFactorBlock = 256;  // elements of a factor column that share a scale
constexpr int kPerLane = static_cast<int>(kFactorBlock) / kLanes;

constexpr int kMostWidth = 16;         // columns of a factor that are made together
constexpr int64_t kBlocksPerTensor = 2048;    // about as many as a device runs at a time
constexpr int64_t kPartialFloats = 16 << 20;  // what the chunks of several tensors may take

int64_t capped(int64_t grid) { return std::min(grid, kMaxGrid); }

Launch plain(int64_t num_threads, Stream stream, std::source_location where = std::source_location::current()) {
    return {.grid = capped(blocks_for(num_threads, kBlock)), .block = kBlock, .stream = stream, .where = where};
}

// --- X --------------------------------------------------------------------------------------------------------------

// X [n, rows, cols], divided by the weights of rows and columns if these are given.  It is 0 in tensors with flags.
struct Matrix {
    Input input;
    int64_t rows;
    int64_t cols;
    const float* row_weight;  // [n, rows] or null
    const float* col_weight;  // [n, cols] or null
    uint32_t* flags;          // [n]

    __device__ __forceinline__ float at(int64_t tensor, int64_t row, int64_t col, uint32_t flag) const {
        const int64_t idx = (tensor * rows + row) * cols + col;
        float value = encoded(input.source, input.a[idx], input.source == Source::kEncode ? 0.0f : input.other[idx]);
        if (magnitude_bits(value) >= kInfinity) atomicOr(flags + tensor, kBad);
        if (flag != 0) return 0.0f;
        if (row_weight != nullptr) value = value / col_weight[tensor * cols + col] / row_weight[tensor * rows + row];
        return value;
    }
};

// Columns [begin, begin + kWidth) of p [n, rank, rows] = X times q [n, rank, cols].  A warp per kRowsAtOnce rows.
template <int kWidth>
__global__ void __launch_bounds__(kBlock)
    times_columns(Matrix x, const float* __restrict__ q, int64_t rank, int64_t begin, float* __restrict__ p) {
    const int64_t num_groups = ceil_div(x.rows, kRowsAtOnce);
    for (int64_t task = global_warp(); task < x.input.n * num_groups; task += num_threads() / kLanes) {
        const int64_t tensor = task / num_groups, first = task % num_groups * kRowsAtOnce;
        const uint32_t flag = x.flags[tensor];
        float sum[kRowsAtOnce][kWidth] = {};
        for (int64_t col = lane_idx(); col < x.cols; col += kLanes) {
            float values[kRowsAtOnce];
#pragma unroll
            for (int row = 0; row < kRowsAtOnce; ++row) {
                values[row] = first + row < x.rows ? x.at(tensor, first + row, col, flag) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                const float right = begin + i < rank ? q[(tensor * rank + begin + i) * x.cols + col] : 0.0f;
#pragma unroll
                for (int row = 0; row < kRowsAtOnce; ++row) sum[row][i] = fmaf(values[row], right, sum[row][i]);
            }
        }
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                const float whole = warp_sum(sum[row][i]);
                if (lane_idx() == 0 && first + row < x.rows && begin + i < rank) {
                    p[(tensor * rank + begin + i) * x.rows + first + row] = whole;
                }
            }
        }
    }
}

// How rows are divided into chunks, whose products are summed separately: enough to keep a device busy.  It depends on
// the shape alone, so results depend neither on the device nor on n.
struct Chunks {
    int64_t rows;     // of a chunk, a multiple of kTile
    int64_t count;    // of a tensor
    int64_t tensors;  // that are multiplied at a time
};

Chunks chunks_of(int64_t n, int64_t rank, int64_t rows, int64_t cols) {
    const int64_t most = std::max<int64_t>(kBlocksPerTensor / std::max<int64_t>(ceil_div(cols, kColumnsAtOnce), 1), 1);
    const int64_t num_tiles = std::max<int64_t>(ceil_div(rows, kTile), 1), tiles_each = ceil_div(num_tiles, most);
    const int64_t count = ceil_div(num_tiles, tiles_each);
    const int64_t floats = std::max<int64_t>(count * std::min<int64_t>(rank, kMostWidth) * cols, 1);
    return {tiles_each * kTile, count, std::clamp<int64_t>(kPartialFloats / floats, 1, std::max<int64_t>(n, 1))};
}

// partial [tensors, chunks, width, cols] = columns [begin, begin + width) of p [n, rank, rows] times X, separately for
// each chunk of rows, of tensors from `first_tensor` on; width is kWidth or what is left.  A block per tensor, chunk
// and kColumnsAtOnce columns.
template <int kWidth>
__global__ void __launch_bounds__(kColumnsAtOnce)
    times_rows(Matrix x, const float* __restrict__ p, int64_t rank, int64_t begin, int64_t first_tensor, Chunks chunks,
               float* __restrict__ partial) {
    __shared__ float left[kTile][kWidth];
    const int64_t num_pieces = ceil_div(x.cols, kColumnsAtOnce);
    const int64_t piece = blockIdx.x % num_pieces, task = blockIdx.x / num_pieces;
    const int64_t tensor = first_tensor + task / chunks.count, chunk_begin = task % chunks.count * chunks.rows;
    const int64_t chunk_end = chunk_begin + chunks.rows < x.rows ? chunk_begin + chunks.rows : x.rows;
    const int width = static_cast<int>(rank - begin < kWidth ? rank - begin : kWidth);
    const int64_t col = piece * kColumnsAtOnce + threadIdx.x;
    const uint32_t flag = x.flags[tensor];
    float sum[kWidth] = {};
    const float* columns = p + (tensor * rank + begin) * x.rows;
    for (int64_t first = chunk_begin; first < chunk_end; first += kTile) {
        const int num_rows = static_cast<int>(chunk_end - first < kTile ? chunk_end - first : kTile);
        __syncthreads();  // all threads have read the tile before
        for (int i = static_cast<int>(threadIdx.x); i < kTile * kWidth; i += kColumnsAtOnce) {
            const int row = i % kTile, column = i / kTile;
            const bool is_there = row < num_rows && column < width;
            left[row][column] = is_there ? columns[column * x.rows + first + row] : 0.0f;
        }
        __syncthreads();
        if (col >= x.cols) continue;
        for (int row = 0; row < num_rows; ++row) {
            const float value = x.at(tensor, first + row, col, flag);
#pragma unroll
            for (int i = 0; i < kWidth; ++i) sum[i] = fmaf(left[row][i], value, sum[i]);
        }
    }
    if (col >= x.cols) return;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
        if (i < width) partial[(task * width + i) * x.cols + col] = sum[i];
    }
}

// A thread per element: columns [begin, begin + width) of q [n, rank, cols] = the sums of their chunks.
__global__ void add_chunks(const float* __restrict__ partial, int64_t num_tensors, int64_t num_chunks, int64_t width,
                           int64_t cols, int64_t first_tensor, int64_t rank, int64_t begin, float* __restrict__ q) {
    const int64_t size = width * cols;
    for (int64_t i = global_thread(); i < num_tensors * size; i += num_threads()) {
        float sum = 0.0f;
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            sum += partial[(i / size * num_chunks + chunk) * size + i % size];
        }
        q[((first_tensor + i / size) * rank + begin) * cols + i % size] = sum;
    }
}

// Calls body(first, width) for groups of factor columns that are made together; width is 4, 8 or 16.
template <typename Body>
void for_columns(int64_t rank, Body&& body) {
    for (int64_t begin = 0; begin < rank; begin += kMostWidth) {
        const int64_t left = rank - begin;
        if (left <= 4) {
            body(begin, std::integral_constant<int, 4>{});
        } else if (left <= 8) {
            body(begin, std::integral_constant<int, 8>{});
        } else {
            body(begin, std::integral_constant<int, kMostWidth>{});
        }
    }
}

void multiply_columns(const Matrix& x, const float* q, int64_t rank, Stream stream, float* p) {
    for_columns(rank, [&](int64_t begin, auto width) {
        launch(plain(x.input.n * ceil_div(x.rows, kRowsAtOnce) * kLanes, stream), times_columns<width.value>, x, q,
               rank, begin, p);
    });
}

void multiply_rows(const Matrix& x, const float* p, int64_t rank, Stream stream, float* partial, float* q) {
    const Chunks chunks = chunks_of(x.input.n, rank, x.rows, x.cols);
    for (int64_t first = 0; first < x.input.n; first += chunks.tensors) {
        const int64_t num_tensors = std::min(chunks.tensors, x.input.n - first);
        for_columns(rank, [&](int64_t begin, auto width) {
            const int64_t num_columns = std::min<int64_t>(width.value, rank - begin);
            launch({.grid = num_tensors * chunks.count * ceil_div(x.cols, kColumnsAtOnce),
                    .block = kColumnsAtOnce,
                    .stream = stream},
                   times_rows<width.value>, x, p, rank, begin, first, chunks, partial);
            launch(plain(num_tensors * num_columns * x.cols, stream), add_chunks, partial, num_tensors, chunks.count,
                   num_columns, x.cols, first, rank, begin, q);
        });
    }
}

// --- Scratch --------------------------------------------------------------------------------------------------------

struct LowRankScratch {
    uint32_t* flags;   // [n]
    float* p;          // [n, rank, rows]
    float* q;          // [n, rank, cols]
    float* read_p;     // as p and q, and as a decoder reads them
    float* read_q;
    float* partial;    // for times_rows
    double* gram;      // [n, rank, 2 rank]
    float* inverse;    // [n, rank, rank]
    double* squares;   // [n, rows + cols] with weighting, as what follows
    float* next_rms;
    float* weights;
};

LowRankScratch take_scratch(Scratch& scratch, int64_t n, int64_t rank, int64_t rows, int64_t cols, bool is_weighted) {
    const Chunks chunks = chunks_of(n, rank, rows, cols);
    const int64_t num_weights = is_weighted ? n * (rows + cols) : 0;
    return {.flags = scratch.take<uint32_t>(n),
            .p = scratch.take<float>(n * rank * rows),
            .q = scratch.take<float>(n * rank * cols),
            .read_p = scratch.take<float>(n * rank * rows),
            .read_q = scratch.take<float>(n * rank * cols),
            .partial = scratch.take<float>(chunks.tensors * chunks.count * std::min<int64_t>(rank, kMostWidth) * cols),
            .gram = scratch.take<double>(n * rank * 2 * rank),
            .inverse = scratch.take<float>(n * rank * rank),
            .squares = scratch.take<double>(num_weights),
            .next_rms = scratch.take<float>(num_weights),
            .weights = scratch.take<float>(num_weights)};
}

// --- Small matrices, a block of threads per tensor ------------------------------------------------------------------

__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

// Sum, or largest, of `value` over the block; every thread gets it.
template <bool kIsSum>
__device__ float over_block(float value) {
    __shared__ float of_warp[kWarps];
#pragma unroll
    for (int bits = kLanes / 2; bits > 0; bits /= 2) {
        const float other = __shfl_xor_sync(kAllLanes, value, bits);
        value = kIsSum ? value + other : larger(value, other);
    }
    if (lane_idx() == 0) of_warp[warp_idx()] = value;
    __syncthreads();
    float result = of_warp[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) {
        result = kIsSum ? result + of_warp[warp] : larger(result, of_warp[warp]);
    }
    __syncthreads();  // of_warp may be written again
    return result;
}

// Dot product by one warp; every lane gets it.
__device__ __forceinline__ float warp_dot(const float* a, const float* b, int64_t size) {
    float sum = 0.0f;
    for (int64_t i = lane_idx(); i < size; i += kLanes) sum = fmaf(a[i], b[i], sum);
    return warp_sum(sum);
}

// Removes from row `idx` of p [rank, rows] its parts along the rows before it, which are orthonormal.  Returns the
// squared length left.
__device__ float project_out(float* p, int64_t idx, int64_t rows, float* dots) {
    float* row = p + idx * rows;
    for (int64_t other = warp_idx(); other < idx; other += kWarps) {
        const float dot = warp_dot(p + other * rows, row, rows);
        if (lane_idx() == 0) dots[other] = dot;
    }
    __syncthreads();
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < rows; i += kBlock) {
        float value = row[i];
        for (int64_t other = 0; other < idx; ++other) value = fmaf(-dots[other], p[other * rows + i], value);
        row[i] = value;
        squares = fmaf(value, value, squares);
    }
    return over_block<true>(squares);  // after its barriers all threads see the row and may reuse dots
}

__device__ void scale_row(float* row, float factor, int64_t rows) {
    for (int64_t i = threadIdx.x; i < rows; i += kBlock) row[i] *= factor;
    __syncthreads();
}

// Makes rows of p [n, rank, rows] orthonormal, in place.  Tensors with flags count as 0; flags may be null.
__global__ void __launch_bounds__(kBlock)
    orthonormalise_rows(float* __restrict__ all, int64_t rank, int64_t rows, const uint32_t* __restrict__ flags) {
    constexpr float kDependent = 1e-9f;  // of the squared length before: what rounding leaves of a dependent row
    __shared__ float dots[kMaxRank];
    float* p = all + blockIdx.x * rank * rows;
    if (flags != nullptr && flags[blockIdx.x] != 0) {
        for (int64_t i = threadIdx.x; i < rank * rows; i += kBlock) p[i] = 0.0f;
    }
    __syncthreads();
    for (int64_t idx = 0; idx < rank; ++idx) {
        float* row = p + idx * rows;
        float largest = 0.0f;
        for (int64_t i = threadIdx.x; i < rows; i += kBlock) largest = larger(largest, fabsf(row[i]));
        largest = over_block<false>(largest);
        bool is_found = false;
        // Scale the largest element to 1 first: squares of numbers near the ends of the fp32 range over- or underflow.
        if (largest > 0.0f && magnitude_bits(largest) < kInfinity) {
            float squares = 0.0f;
            for (int64_t i = threadIdx.x; i < rows; i += kBlock) {
                row[i] /= largest;
                squares = fmaf(row[i], row[i], squares);
            }
            const float before = over_block<true>(squares);
            is_found = project_out(p, idx, rows, dots) > kDependent * before;
        }
        // At least one of the unit vectors keeps (rows - idx) / rows of its squared length.
        const float enough = 0.5f * static_cast<float>(rows - idx) / static_cast<float>(rows);
        for (int64_t axis = idx; !is_found && axis < idx + rows; ++axis) {
            for (int64_t i = threadIdx.x; i < rows; i += kBlock) row[i] = i == axis % rows ? 1.0f : 0.0f;
            __syncthreads();
            is_found = project_out(p, idx, rows, dots) >= enough;
        }
        float squares = 0.0f;
        for (int64_t i = threadIdx.x; i < rows; i += kBlock) squares = fmaf(row[i], row[i], squares);
        scale_row(row, 1.0f / sqrtf(over_block<true>(squares)), rows);
        const float left = project_out(p, idx, rows, dots);
        scale_row(row, 1.0f / sqrtf(left), rows);
    }
}

// inverse [n, rank, rank] of (P P^T + a little on the diagonal), by Gauss-Jordan without pivots in `work`
// [n, rank, 2 rank].
__global__ void __launch_bounds__(kBlock) invert_gram(const float* __restrict__ all, int64_t rank, int64_t rows,
                                                      double* __restrict__ work, float* __restrict__ inverse) {
    constexpr double kRidge = 1e-6, kSmallest = 1e-3;  // quantised rows can be dependent or 0
    __shared__ double column[kMaxRank];
    const float* p = all + blockIdx.x * rank * rows;
    double* both = work + blockIdx.x * rank * 2 * rank;  // the Gram matrix, then the identity
    for (int64_t pair = warp_idx(); pair < rank * rank; pair += kWarps) {
        const int64_t i = pair / rank, j = pair % rank;
        const double dot = warp_dot(p + i * rows, p + j * rows, rows);
        if (lane_idx() == 0) {
            both[i * 2 * rank + j] = i == j ? dot + kRidge * (dot > kSmallest ? dot : kSmallest) : dot;
            both[i * 2 * rank + rank + j] = i == j ? 1.0 : 0.0;
        }
    }
    __syncthreads();
    for (int64_t pivot = 0; pivot < rank; ++pivot) {
        for (int64_t i = threadIdx.x; i < rank; i += kBlock) column[i] = both[i * 2 * rank + pivot];
        __syncthreads();
        for (int64_t j = threadIdx.x; j < 2 * rank; j += kBlock) both[pivot * 2 * rank + j] /= column[pivot];
        __syncthreads();
        for (int64_t idx = threadIdx.x; idx < rank * 2 * rank; idx += kBlock) {
            const int64_t i = idx / (2 * rank), j = idx % (2 * rank);
            if (i != pivot) both[idx] -= column[i] * both[pivot * 2 * rank + j];
        }
        __syncthreads();
    }
    for (int64_t idx = threadIdx.x; idx < rank * rank; idx += kBlock) {
        inverse[blockIdx.x * rank * rank + idx] = static_cast<float>(both[idx / rank * 2 * rank + rank + idx % rank]);
    }
}

// A thread per element: to [n, rank, cols] = inverse [n, rank, rank] times q.
__global__ void multiply_small(const float* __restrict__ inverse, const float* __restrict__ q, int64_t n, int64_t rank,
                               int64_t cols, float* __restrict__ to) {
    for (int64_t idx = global_thread(); idx < n * rank * cols; idx += num_threads()) {
        const int64_t col = idx % cols, line = idx / cols, tensor = line / rank;
        float sum = 0.0f;
        for (int64_t j = 0; j < rank; ++j)
            sum = fmaf(inverse[line * rank + j], q[(tensor * rank + j) * cols + col], sum);
        to[idx] = sum;
    }
}

void require_rank(int64_t rank) {
    if (rank > kMaxRank) {
        throw std::runtime_error("rank: got " + std::to_string(rank) + ", wanted at most " + std::to_string(kMaxRank) +
                                 " on CUDA devices");
    }
}

void orthonormalise_flagged(float* p, int64_t n, int64_t rank, int64_t rows, const uint32_t* flags, Stream stream) {
    require_rank(rank);
    launch({.grid = n, .block = kBlock, .stream = stream}, orthonormalise_rows, p, rank, rows, flags);
}

void divide(const float* p, const float* q, int64_t n, int64_t rank, int64_t rows, int64_t cols, Stream stream,
            const LowRankScratch& scratch, float* to) {
    require_rank(rank);
    launch({.grid = n, .block = kBlock, .stream = stream}, invert_gram, p, rank, rows, scratch.gram, scratch.inverse);
    launch(plain(n * rank * cols, stream), multiply_small, scratch.inverse, q, n, rank, cols, to);
}

// --- Factors as they are written ------------------------------------------------------------------------------------

constexpr int kLogLevels = 8;

__device__ __forceinline__ float log_value(uint32_t code) {
    constexpr float kValues[kLogLevels] = {0.0f, 2.0f, 4.0f, 6.0f, 10.0f, 15.0f, 22.0f, 32.0f};
    float value = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kLogLevels; ++i) value = code % kLogLevels == i ? kValues[i] : value;
    return code >= kLogLevels ? -value : value;
}

__device__ __forceinline__ uint32_t log_code(float value, float s) {
    constexpr float kBetween[kLogLevels - 1] = {1.0f, 3.0f, 5.0f, 8.0f, 12.5f, 18.5f, 27.0f};
    const float magnitude = fabsf(value) / s;
    uint32_t code = 0;
#pragma unroll
    for (int i = 0; i < kLogLevels - 1; ++i) code += magnitude >= kBetween[i];
    return code > 0 && value < 0.0f ? code | kLogLevels : code;
}

HYBRIDEP_BOTH int bits_of(Factor factor) {
    switch (factor) {
        case Factor::kFp32:
            return 32;
        case Factor::kBf16:
            return 16;
        case Factor::kInt8:
            return 8;
        case Factor::kInt2:
            return 2;
        default:
            return 4;
    }
}

int64_t factor_bytes(int64_t length, Factor factor) {
    const int bits = bits_of(factor);
    if (bits >= 16) return length * bits / 8;
    return ceil_div(ceil_div(length, kFactorBlock) * 2 + ceil_div(length * bits, 8), 2) * 2;
}

// Columns [n, rank, length] of a factor, and where they lie in payloads.
struct FactorPlace {
    uint8_t* data;         // of the first column of the first tensor
    int64_t stride;        // from tensor to tensor
    int64_t column_bytes;  // from column to column
    int64_t n;
    int64_t rank;
    int64_t length;
    Factor factor;

    __device__ __forceinline__ uint8_t* column(int64_t line) const {
        return data + line / rank * stride + line % rank * column_bytes;
    }
};

__device__ __forceinline__ float code_value(uint32_t code, uint16_t scale, Factor factor) {
    if (factor == Factor::kLog4) return log_value(code) * scale_value(scale);
    return value_of(code, scale_value(scale), bits_of(factor));
}

// Size of a block of 256 elements: the largest magnitude, or the mean.  Lane l holds elements 8 l .. 8 l + 7.
__device__ __forceinline__ float size_of_lanes(const float (&values)[kPerLane], bool is_mean, float count) {
    float sizes[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) sizes[j] = fabsf(values[j]);
    for (int bits = kLanes / 2; bits > 0; bits /= 2) {
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const float other = __shfl_xor_sync(kAllLanes, sizes[j], bits);
            sizes[j] = is_mean ? sizes[j] + other : larger(sizes[j], other);
        }
    }
#pragma unroll
    for (int half = kPerLane / 2; half > 0; half /= 2) {
#pragma unroll
        for (int j = 0; j < half; ++j) {
            sizes[j] = is_mean ? sizes[j] + sizes[j + half] : larger(sizes[j], sizes[j + half]);
        }
    }
    return is_mean ? sizes[0] / count : sizes[0];
}

// A warp per 256 elements of a column.  Writes columns, times weight [n, length] if given, to the payload.  `read`
// becomes what a decoder reads.  `balanced`, if given, becomes `read` divided by weight, and may be `columns`.  flags
// may be null.
__global__ void __launch_bounds__(kBlock)
    write_columns(const float* columns, FactorPlace place, const float* __restrict__ weight, float* __restrict__ read,
                  float* balanced, uint32_t* __restrict__ flags) {
    const int64_t num_blocks = ceil_div(place.length, kFactorBlock);
    const int bits = bits_of(place.factor);
    for (int64_t task = global_warp(); task < place.n * place.rank * num_blocks; task += num_threads() / kLanes) {
        const int64_t line = task / num_blocks, block = task % num_blocks, tensor = line / place.rank;
        const int64_t begin = block * kFactorBlock + lane_idx() * kPerLane;
        uint8_t* to = place.column(line);
        auto* halves = reinterpret_cast<uint16_t*>(to);
        float values[kPerLane], weights[kPerLane], decoded[kPerLane];
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const bool is_there = begin + j < place.length;
            weights[j] = is_there && weight != nullptr ? weight[tensor * place.length + begin + j] : 1.0f;
            values[j] = is_there ? columns[line * place.length + begin + j] * weights[j] : 0.0f;
        }
        bool is_finite = true;
        if (bits >= 16) {
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                const uint32_t word = std::bit_cast<uint32_t>(values[j]);
                const uint16_t rounded = round_value(values[j]);
                decoded[j] = bits == 32 ? values[j] : scale_value(rounded);
                if (begin + j >= place.length) continue;
                if (bits == 16) {
                    halves[begin + j] = rounded;
                } else {  // as two halves, because the address is only even
                    halves[2 * (begin + j)] = static_cast<uint16_t>(word);
                    halves[2 * (begin + j) + 1] = static_cast<uint16_t>(word >> 16);
                }
            }
        } else {
            const int64_t left = place.length - block * kFactorBlock;
            const auto count = static_cast<float>(left < kFactorBlock ? left : kFactorBlock);
            const float size = size_of_lanes(values, place.factor == Factor::kInt2, count);
            const uint16_t scale =
                place.factor == Factor::kLog4 ? round_scale_up(size / 32.0f) : scale_from(size, bits);
            is_finite = is_scale_finite(scale);
            const float s = divisor(scale);
            if (lane_idx() == 0) halves[block] = scale;
            uint64_t word = 0;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                const uint32_t code =
                    place.factor == Factor::kLog4 ? log_code(values[j], s) : code_of(values[j], s, bits);
                decoded[j] = code_value(code, scale, place.factor);
                if (begin + j < place.length) word |= static_cast<uint64_t>(code) << (j * bits);
            }
            uint8_t* codes = to + 2 * num_blocks;
            for (int64_t byte = begin * bits / 8;
                 byte < ceil_div(place.length * bits, 8) && byte < (begin + 8) * bits / 8; ++byte) {
                codes[byte] = static_cast<uint8_t>(word);
                word >>= 8;
            }
            const int64_t used = 2 * num_blocks + ceil_div(place.length * bits, 8);
            if (block == 0 && lane_idx() == 0 && used < place.column_bytes) to[used] = 0;
        }
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            if (begin + j >= place.length) continue;
            is_finite &= magnitude_bits(values[j]) < kInfinity && magnitude_bits(decoded[j]) < kInfinity;
            read[line * place.length + begin + j] = decoded[j];
            if (balanced != nullptr) balanced[line * place.length + begin + j] = decoded[j] / weights[j];
        }
        if (!is_finite && flags != nullptr) atomicOr(flags + tensor, kOverflow);
    }
}

// A thread per element: reads what write_columns wrote.
__global__ void read_columns(FactorPlace place, float* __restrict__ columns) {
    const int bits = bits_of(place.factor);
    for (int64_t idx = global_thread(); idx < place.n * place.rank * place.length; idx += num_threads()) {
        const int64_t at = idx % place.length;
        const uint8_t* from = place.column(idx / place.length);
        const auto* halves = reinterpret_cast<const uint16_t*>(from);
        if (bits == 32) {
            columns[idx] = std::bit_cast<float>(halves[2 * at] | static_cast<uint32_t>(halves[2 * at + 1]) << 16);
        } else if (bits == 16) {
            columns[idx] = scale_value(halves[at]);
        } else {
            const uint8_t* codes = from + 2 * ceil_div(place.length, kFactorBlock);
            const uint32_t code = codes[at * bits / 8] >> (at * bits % 8) & ((1u << bits) - 1);
            columns[idx] = code_value(code, halves[at / kFactorBlock], place.factor);
        }
    }
}

void write(const float* columns, const FactorPlace& place, const float* weight, Stream stream, float* read,
           float* balanced, uint32_t* flags) {
    launch(plain(place.n * place.rank * ceil_div(place.length, kFactorBlock) * kLanes, stream), write_columns, columns,
           place, weight, read, balanced, flags);
}

void read(const FactorPlace& place, Stream stream, float* columns) {
    launch(plain(place.n * place.rank * place.length, stream), read_columns, place, columns);
}

// --- Products in place ----------------------------------------------------------------------------------------------

enum class Apply {
    kAssign,    // out  = P Q
    kAdd,       // out += P Q, nan where the packet is lost
    kResidual,  // out  = a + out - P Q, unchanged where the packet is lost
};

// A thread per 4 columns of a row: ((p0 q0 + p1 q1) + ...), p [n, rank, rows], q [n, rank, cols].  flags may be null.
template <bool kIsAligned>
__global__ void __launch_bounds__(kBlock)
    apply_product(const float* __restrict__ p, const float* __restrict__ q, int64_t n, int64_t rank, int64_t rows,
                  int64_t cols, Apply how, const uint32_t* __restrict__ flags, const float* __restrict__ a,
                  float* __restrict__ out) {
    const int64_t num_vectors = ceil_div(cols, kVector);
    for (int64_t task = global_thread(); task < n * rows * num_vectors; task += num_threads()) {
        const int64_t line = task / num_vectors, col = task % num_vectors * kVector, tensor = line / rows;
        const bool is_lost = flags != nullptr && flags[tensor] != 0;
        if (is_lost && how == Apply::kResidual) continue;
        const float* left = p + tensor * rank * rows + line % rows;
        const float* right = q + tensor * rank * cols;
        float sum[kVector] = {};
        for (int64_t column = 0; column < rank; ++column) {
            float values[kVector];
            load4<kIsAligned>(right + column * cols, col, cols, values);
            const float factor = left[column * rows];
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                sum[j] = column == 0 ? factor * values[j] : sum[j] + factor * values[j];
            }
        }
        float* to = out + line * cols;
        float before[kVector] = {}, given[kVector] = {};
        if (how != Apply::kAssign) load4<kIsAligned>(to, col, cols, before);
        if (how == Apply::kResidual) load4<kIsAligned>(a + line * cols, col, cols, given);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            if (how == Apply::kAdd) sum[j] = before[j] + sum[j];
            if (how == Apply::kResidual) sum[j] = (given[j] + before[j]) - sum[j];
            if (is_lost) sum[j] = std::bit_cast<float>(kNan);
        }
        store4<kIsAligned>(to, col, cols, sum);
    }
}

void apply(const float* p, const float* q, int64_t n, const LowRank& shape, Apply how, const uint32_t* flags,
           const float* a, Stream stream, float* out) {
    const int64_t num_threads = n * shape.rows * ceil_div(shape.cols, kVector);
    auto* kernel = has_vectors(shape.cols, a, out) && is_aligned(16, q) ? apply_product<true> : apply_product<false>;
    launch(plain(num_threads, stream), kernel, p, q, n, shape.rank, shape.rows, shape.cols, how, flags, a, out);
}

// --- Weighting by root mean squares ---------------------------------------------------------------------------------

constexpr double kRmsDecay = 0.95;     // of the mean of squares, each step
constexpr float kSmallestRms = 1e-3f;  // of the largest: rows and columns below this count as if they had it

// Sums of squares of x, or of sizes [n, rows, cols] if given: a warp per row, or a thread per column if kIsColumn.
// Also flags tensors whose x is bad.
template <bool kIsColumn>
__global__ void __launch_bounds__(kBlock, 1)
    sum_squares(Matrix x, const float* __restrict__ sizes, double* __restrict__ sums) {
    const int64_t num_lines = kIsColumn ? x.cols : x.rows, size = kIsColumn ? x.rows : x.cols;
    const int64_t step = kIsColumn ? 1 : kLanes, num_workers = kIsColumn ? num_threads() : num_threads() / kLanes;
    for (int64_t line = kIsColumn ? global_thread() : global_warp(); line < x.input.n * num_lines;
         line += num_workers) {
        const int64_t tensor = line / num_lines, idx = line % num_lines;
        double sum = 0.0;
        for (int64_t i = kIsColumn ? 0 : lane_idx(); i < size; i += step) {
            const int64_t row = kIsColumn ? i : idx, col = kIsColumn ? idx : i;
            const double of_x = x.at(tensor, row, col, 0);
            const double value = sizes != nullptr ? sizes[(tensor * x.rows + row) * x.cols + col] : of_x;
            sum += value * value;
        }
        if constexpr (!kIsColumn) sum = warp_sum(sum);
        if (kIsColumn || lane_idx() == 0) sums[line] = sum;
    }
}

// A block per tensor: next [n, size] = the root mean squares rms [n, size] after this step, and weight [n, size] =
// next relative to its largest.  Weights are 1 in tensors with flags.
__global__ void __launch_bounds__(kBlock)
    update_rms(const double* __restrict__ sums, const float* __restrict__ rms, int64_t size, int64_t of_how_many,
               const uint32_t* __restrict__ flags, float* __restrict__ next, float* __restrict__ weight) {
    const int64_t first = blockIdx.x * size;
    float largest = 0.0f;
    for (int64_t i = first + threadIdx.x; i < first + size; i += kBlock) {
        const double before = rms[i], mean = sums[i] / static_cast<double>(of_how_many);
        next[i] = static_cast<float>(sqrt(kRmsDecay * before * before + (1.0 - kRmsDecay) * mean));
        largest = larger(largest, next[i]);
    }
    largest = over_block<false>(largest);
    const bool is_weighted = largest > 0.0f && flags[blockIdx.x] == 0;
    for (int64_t i = first + threadIdx.x; i < first + size; i += kBlock) {
        weight[i] = is_weighted ? larger(next[i] / largest, kSmallestRms) : 1.0f;
    }
}

// --- State ----------------------------------------------------------------------------------------------------------

// to [n, size] = from [n, size], or from [size] for every tensor if kIsShared.  Skips tensors with flags, if given.
template <bool kIsShared>
__global__ void copy_tensors(const float* __restrict__ from, int64_t n, int64_t size,
                             const uint32_t* __restrict__ flags, float* __restrict__ to) {
    for (int64_t i = global_thread(); i < n * size; i += num_threads()) {
        if (flags == nullptr || flags[i / size] == 0) to[i] = from[kIsShared ? i % size : i];
    }
}

// Bytes from `used` on of each payload become 0.
__global__ void clear_rest(Payloads payloads, int64_t n, int64_t used) {
    const int64_t tensor = global_thread();
    if (tensor >= n) return;
    for (int64_t byte = used; byte < payloads.bytes; ++byte) payloads.data[tensor * payloads.stride + byte] = 0;
}

FactorPlace place_of(const Payloads& payloads, int64_t offset, int64_t n, int64_t rank, int64_t length,
                     Factor factor) {
    return {payloads.data + offset, payloads.stride, factor_bytes(length, factor), n, rank, length, factor};
}

}  // namespace

void orthonormalise(float* p, int64_t n, int64_t rank, int64_t rows, Stream stream) {
    orthonormalise_flagged(p, n, rank, rows, nullptr, stream);
}

int64_t low_rank_encode_scratch_bytes(int64_t n, int64_t rank, int64_t rows, int64_t cols, bool is_weighted) {
    Scratch scratch;
    take_scratch(scratch, n, rank, rows, cols, is_weighted);
    return scratch.bytes();
}

void divide_by_gram(const float* p, float* q, int64_t n, int64_t rank, int64_t rows, int64_t cols,
                    const Workspace& work) {
    const Stream stream = work.stream;
    Scratch pieces(work.scratch);
    const LowRankScratch scratch = take_scratch(pieces, n, rank, rows, cols, false);
    launch(plain(n * rank * cols, stream), copy_tensors<false>, q, n, rank * cols, nullptr, scratch.q);
    divide(p, scratch.q, n, rank, rows, cols, stream, scratch, q);
}

void low_rank_encode(const Input& input, const float* sizes, const LowRank& shape, const float* start,
                     const Workspace& work, const LowRankState& state, const Payloads& payloads, uint8_t* is_bad) {
    require_even(payloads);
    const Stream stream = work.stream;
    const auto [rank, rows, cols, factor, iterations] = shape;
    const int64_t n = input.n, q_size = n * rank * cols;
    const bool is_weighted = state.row_rms != nullptr;
    Scratch pieces(work.scratch);
    const LowRankScratch scratch = take_scratch(pieces, n, rank, rows, cols, is_weighted);
    const auto [flags, p, q, read_p, read_q, partial, gram, inverse, squares, next_rms, weights] = scratch;
    fill_bytes(flags, 0, n * sizeof(uint32_t), stream);
    launch(plain(q_size, stream), start != nullptr ? copy_tensors<true> : copy_tensors<false>,
           start != nullptr ? start : state.q, n, rank * cols, nullptr, q);

    // 1. If asked for, weights that scale rows and columns to about the same size.
    Matrix x{input, rows, cols, nullptr, nullptr, flags};
    const float* row_weight = nullptr;
    const float* col_weight = nullptr;
    if (is_weighted) {
        launch(plain(n * rows * kLanes, stream), sum_squares<false>, x, sizes, squares);
        launch(plain(n * cols, stream), sum_squares<true>, x, sizes, squares + n * rows);
        launch({.grid = n, .block = kBlock, .stream = stream}, update_rms, squares, state.row_rms, rows, cols, flags,
               next_rms, weights);
        launch({.grid = n, .block = kBlock, .stream = stream}, update_rms, squares + n * rows, state.col_rms, cols,
               rows, flags, next_rms + n * rows, weights + n * rows);
        row_weight = x.row_weight = weights;
        col_weight = x.col_weight = weights + n * rows;
    }

    // 2. P as the decoder will read it.  The first pass finds bad tensors; their P is 0 from then on.
    for (int iteration = 0; iteration < iterations; ++iteration) {
        if (iteration > 0) multiply_rows(x, p, rank, stream, partial, q);
        multiply_columns(x, q, rank, stream, p);
        orthonormalise_flagged(p, n, rank, rows, flags, stream);
    }
    const int64_t p_bytes = rank * factor_bytes(rows, factor), used = p_bytes + rank * factor_bytes(cols, factor);
    write(p, place_of(payloads, 0, n, rank, rows, factor), row_weight, stream, read_p, p, nullptr);

    // 3. Q for that P, and the start of the next step.  Until Q is written, read_q has the sums that it is made of.
    multiply_rows(x, p, rank, stream, partial, read_q);
    divide(p, read_q, n, rank, rows, cols, stream, scratch, q);
    write(q, place_of(payloads, p_bytes, n, rank, cols, factor), col_weight, stream, read_q, nullptr, flags);
    launch(plain(n, stream), clear_rest, payloads, n, used);
    launch(plain(q_size, stream), copy_tensors<false>, q, n, rank * cols, flags, state.q);
    if (is_weighted) {
        launch(plain(n * rows, stream), copy_tensors<false>, next_rms, n, rows, flags, state.row_rms);
        launch(plain(n * cols, stream), copy_tensors<false>, next_rms + n * rows, n, cols, flags, state.col_rms);
    }

    // 4. The mirror, or the residual.
    if (input.source != Source::kEncode) {
        const Apply how = input.source == Source::kUpdate ? Apply::kAdd : Apply::kResidual;
        apply(read_p, read_q, n, shape, how, flags, input.a, stream, input.other);
    }
    finish(flags, n, stream, is_bad);
}

int64_t low_rank_decode_scratch_bytes(int64_t n, int64_t rank, int64_t rows, int64_t cols) {
    return n * rank * (rows + cols) * static_cast<int64_t>(sizeof(float));
}

void low_rank_decode(const Payloads& payloads, int64_t n, const LowRank& shape, bool is_add, const Workspace& work,
                     float* out) {
    require_even(payloads);
    const auto [rank, rows, cols, factor, iterations] = shape;
    auto* q = static_cast<float*>(work.scratch);  // before P, because vectors of Q need the alignment
    float* p = q + n * rank * cols;
    read(place_of(payloads, 0, n, rank, rows, factor), work.stream, p);
    read(place_of(payloads, rank * factor_bytes(rows, factor), n, rank, cols, factor), work.stream, q);
    apply(p, q, n, shape, is_add ? Apply::kAdd : Apply::kAssign, nullptr, nullptr, work.stream, out);
}

}  // namespace hybridep
