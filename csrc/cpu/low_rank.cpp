// SPDX-License-Identifier: Apache-2.0
//
// Low rank on the CPU.  hybridep_codecs.h says what each function computes; ds_hybridep/codecs/low_rank.py explains
// the scheme.

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "hybridep_blocks.h"
#include "hybridep_codecs.h"

namespace hybridep {
namespace {

constexpr int64_t kWide = 64;  // columns summed at a time, so that their sums stay in registers
constexpr int64_t kRowsAtOnce = 4;
constexpr int64_t kFactorBlock = 256;  // elements of a factor column that share a scale
constexpr int64_t kLanes = 16;

// Memory of `size` elements for each thread of a parallel region.  It is made before, because an exception inside a
// region ends the process.
template <typename T>
class PerThread {
public:
    PerThread(int threads, int64_t size) : size_(size), all_(static_cast<size_t>(threads * size)) {}
    T* mine() { return all_.data() + omp_get_thread_num() * size_; }

private:
    int64_t size_;
    std::vector<T> all_;
};

// Threads for a loop over n tensors.
int threads_for_tensors(int64_t n, int64_t num_elements, int num_threads) {
    return static_cast<int>(std::clamp<int64_t>(n, 1, threads_for(num_elements, num_threads)));
}

// to [size] = or += ((p0 q0 + p1 q1) + ...) for one row of p and columns of q from `q` on; size is at most kWide.
template <bool kIsWhole>
void decode_piece(const float* p, int64_t rows, const float* q, int64_t cols, int64_t rank, int64_t size, bool is_add,
                  float* to) {
    alignas(64) float sum[kWide];
    const int64_t count = kIsWhole ? kWide : size;  // a constant if kIsWhole, so that the sum stays in registers
    for (int64_t i = 0; i < count; ++i) sum[i] = p[0] * q[i];
    for (int64_t column = 1; column < rank; ++column) {
        const float left = p[column * rows];
        const float* right = q + column * cols;
        for (int64_t i = 0; i < count; ++i) sum[i] += left * right[i];
    }
    if (is_add) {
        for (int64_t i = 0; i < count; ++i) to[i] += sum[i];
    } else {
        for (int64_t i = 0; i < count; ++i) to[i] = sum[i];
    }
}

// out [n, rows, cols] = or += ((p0 q0 + p1 q1) + ...), p [n, rank, rows], q [n, rank, cols].
void add_product(const float* p, const float* q, int64_t n, int64_t rank, int64_t rows, int64_t cols, bool is_add,
                     int num_threads, float* out) {
#pragma omp parallel for collapse(2) num_threads(threads_for(n * rows * cols, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t row = 0; row < rows; ++row) {
            const float* left = p + tensor * rank * rows + row;
            const float* right = q + tensor * rank * cols;
            float* to = out + (tensor * rows + row) * cols;
            int64_t begin = 0;
            for (; begin + kWide <= cols; begin += kWide) {
                decode_piece<true>(left, rows, right + begin, cols, rank, kWide, is_add, to + begin);
            }
            if (begin < cols) {
                decode_piece<false>(left, rows, right + begin, cols, rank, cols - begin, is_add, to + begin);
            }
        }
    }
}

// Sum of a[i] * b[i]: lane j holds the products at i = j modulo 64, and lanes are summed by halving.
float dot(const float* a, const float* b, int64_t size) {
    // Four sets of lanes hide the latency of the additions.
    alignas(64) float lanes[4 * kLanes] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
#pragma omp simd
        for (int64_t j = 0; j < 4 * kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
    }
    for (int64_t j = 0; i < size; ++i, ++j) lanes[j] += a[i] * b[i];
    return halving_sum(lanes, 4 * kLanes);
}

inline void subtract(float* to, float factor, const float* from, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) to[i] -= factor * from[i];
}

inline void scale_by(float* values, float factor, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) values[i] *= factor;
}

// Removes from row `idx` of p its parts along the orthonormal rows before it.  Returns the squared length left.
float project_out(float* p, int64_t idx, int64_t rows) {
    float* row = p + idx * rows;
    for (int64_t other = 0; other < idx; ++other) subtract(row, dot(p + other * rows, row, rows), p + other * rows, rows);
    return dot(row, row, rows);
}

void orthonormalise_one(float* p, int64_t rank, int64_t rows) {
    constexpr float kDependent = 1e-9f;  // of the squared length before: what rounding leaves of a dependent row
    for (int64_t idx = 0; idx < rank; ++idx) {
        float* row = p + idx * rows;
        // Scale the largest element to 1 first: squares of numbers near the ends of the fp32 range over- or underflow.
        const float largest = std::bit_cast<float>(largest_magnitude_bits(row, rows));
        bool is_found = false;
        if (largest > 0.0f && std::isfinite(largest)) {
            for (int64_t i = 0; i < rows; ++i) row[i] /= largest;
            const float before = dot(row, row, rows);
            is_found = project_out(p, idx, rows) > kDependent * before;
        }
        // At least one of the unit vectors keeps (rows - idx) / rows of its squared length.
        const float enough = 0.5f * static_cast<float>(rows - idx) / static_cast<float>(rows);
        for (int64_t axis = idx; !is_found && axis < idx + rows; ++axis) {
            std::fill(row, row + rows, 0.0f);
            row[axis % rows] = 1.0f;
            is_found = project_out(p, idx, rows) >= enough;
        }
        scale_by(row, 1.0f / std::sqrt(dot(row, row, rows)), rows);
        const float squared = project_out(p, idx, rows);
        scale_by(row, 1.0f / std::sqrt(squared), rows);
    }
}

// inverse [rank, rank] of the symmetric positive definite gram, by Gauss-Jordan without pivots; overwrites gram.
void invert(double* gram, double* inverse, int64_t rank) {
    std::fill(inverse, inverse + rank * rank, 0.0);
    for (int64_t i = 0; i < rank; ++i) inverse[i * rank + i] = 1.0;
    for (int64_t pivot = 0; pivot < rank; ++pivot) {
        const double factor = 1.0 / gram[pivot * rank + pivot];
        for (int64_t j = 0; j < rank; ++j) {
            gram[pivot * rank + j] *= factor;
            inverse[pivot * rank + j] *= factor;
        }
        for (int64_t i = 0; i < rank; ++i) {
            const double multiple = gram[i * rank + pivot];
            if (i == pivot || multiple == 0.0) continue;
            for (int64_t j = 0; j < rank; ++j) {
                gram[i * rank + j] -= multiple * gram[pivot * rank + j];
                inverse[i * rank + j] -= multiple * inverse[pivot * rank + j];
            }
        }
    }
}

}  // namespace

void orthonormalise(float* p, int64_t n, int64_t rank, int64_t rows, int num_threads) {
#pragma omp parallel for num_threads(threads_for(n * rank * rank * rows, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) orthonormalise_one(p + tensor * rank * rows, rank, rows);
}

void divide_by_gram(const float* p, float* q, int64_t n, int64_t rank, int64_t rows, int64_t cols, int num_threads) {
    constexpr double kRidge = 1e-6, kSmallest = 1e-3;  // quantised rows can be dependent or 0
    const int threads = threads_for_tensors(n, n * rank * rank * (rows + cols), num_threads);
    PerThread<double> grams(threads, rank * rank), inverses(threads, rank * rank);
    PerThread<float> befores(threads, rank * cols);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        const float* left = p + tensor * rank * rows;
        float* right = q + tensor * rank * cols;
        double *gram = grams.mine(), *inverse = inverses.mine();
        float* before = befores.mine();
        for (int64_t i = 0; i < rank; ++i) {
            for (int64_t j = 0; j <= i; ++j) {
                gram[i * rank + j] = gram[j * rank + i] = dot(left + i * rows, left + j * rows, rows);
            }
            gram[i * rank + i] += kRidge * std::max(gram[i * rank + i], kSmallest);
        }
        invert(gram, inverse, rank);
        std::copy(right, right + rank * cols, before);
        for (int64_t i = 0; i < rank; ++i) {
            float* to = right + i * cols;
            std::fill(to, to + cols, 0.0f);
            for (int64_t j = 0; j < rank; ++j) {
                subtract(to, -static_cast<float>(inverse[i * rank + j]), before + j * cols, cols);
            }
        }
    }
}

namespace {

// out [kGroup rows][kWidth] = rows of x times the columns of qt [cols][kWidth], summed over cols in order.
template <int64_t kWidth, int64_t kGroup>
void multiply_rows(const float* x, int64_t cols, const float* qt, float* out) {
    alignas(64) float sum[kGroup][kWidth] = {};
    for (int64_t col = 0; col < cols; ++col) {
        for (int64_t row = 0; row < kGroup; ++row) {
            const float value = x[row * cols + col];
#pragma omp simd
            for (int64_t i = 0; i < kWidth; ++i) sum[row][i] += value * qt[col * kWidth + i];
        }
    }
    std::memcpy(out, sum, sizeof(sum));
}

// Multiplies columns [begin, begin + count) of q by all of x; count is at most kWidth.
template <int64_t kWidth>
void times_some_columns(const float* x, const float* q, int64_t rank, int64_t begin, int64_t count, int64_t n,
                        int64_t rows, int64_t cols, int threads, float* out) {
    std::vector<float> transposed(static_cast<size_t>(n * cols * kWidth), 0.0f);
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t i = 0; i < count; ++i) {
            const float* from = q + (tensor * rank + begin + i) * cols;
            for (int64_t col = 0; col < cols; ++col) transposed[(tensor * cols + col) * kWidth + i] = from[col];
        }
    }
    const int64_t num_groups = ceil_div(rows, kRowsAtOnce);
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t group = 0; group < num_groups; ++group) {
            const int64_t first = group * kRowsAtOnce;
            const int64_t size = std::min(kRowsAtOnce, rows - first);
            const float* from = x + (tensor * rows + first) * cols;
            const float* qt = transposed.data() + tensor * cols * kWidth;
            alignas(64) float sums[kRowsAtOnce * kWidth];
            if (size == kRowsAtOnce) {
                multiply_rows<kWidth, kRowsAtOnce>(from, cols, qt, sums);
            } else {
                for (int64_t row = 0; row < size; ++row) {
                    multiply_rows<kWidth, 1>(from + row * cols, cols, qt, sums + row * kWidth);
                }
            }
            for (int64_t i = 0; i < count; ++i) {
                float* to = out + (tensor * rank + begin + i) * rows + first;
                for (int64_t row = 0; row < size; ++row) to[row] = sums[row * kWidth + i];
            }
        }
    }
}

// to [kWide columns] = left[0] x[0] + left[1] x[1] + ..., over rows in order.
template <bool kIsWhole>
void add_rows(const float* left, const float* x, int64_t rows, int64_t cols, int64_t size, float* to) {
    alignas(64) float sum[kWide] = {};
    const int64_t count = kIsWhole ? kWide : size;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < count; ++i) sum[i] += left[row] * x[row * cols + i];
    }
    std::memcpy(to, sum, static_cast<size_t>(count) * sizeof(float));
}

// out [n, rank, rows] = x [n, rows, cols] times q [n, rank, cols], over cols in order.
void times_columns(const float* x, const float* q, int64_t n, int64_t rank, int64_t rows, int64_t cols,
                   int num_threads, float* out) {
    const int threads = threads_for(n * rows * cols, num_threads);
    for (int64_t begin = 0; begin < rank;) {
        const int64_t left = rank - begin;
        if (left <= 4) {
            times_some_columns<4>(x, q, rank, begin, left, n, rows, cols, threads, out);
        } else if (left <= 8) {
            times_some_columns<8>(x, q, rank, begin, left, n, rows, cols, threads, out);
        } else {
            times_some_columns<16>(x, q, rank, begin, std::min<int64_t>(left, 16), n, rows, cols, threads, out);
        }
        begin += 16;
    }
}

// out [n, rank, cols] = p [n, rank, rows] times x [n, rows, cols], over rows in order.
void times_rows(const float* x, const float* p, int64_t n, int64_t rank, int64_t rows, int64_t cols, int num_threads,
                float* out) {
    const int64_t num_pieces = ceil_div(cols, kWide);
#pragma omp parallel for collapse(2) num_threads(threads_for(n * rows * cols, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t piece = 0; piece < num_pieces; ++piece) {
            const int64_t begin = piece * kWide;
            const int64_t size = std::min(kWide, cols - begin);
            const float* from = x + tensor * rows * cols + begin;
            for (int64_t column = 0; column < rank; ++column) {
                const float* left = p + (tensor * rank + column) * rows;
                float* to = out + (tensor * rank + column) * cols + begin;
                if (size == kWide) {
                    add_rows<true>(left, from, rows, cols, size, to);
                } else {
                    add_rows<false>(left, from, rows, cols, size, to);
                }
            }
        }
    }
}

constexpr int kLogLevels = 8;
constexpr float kLogValues[kLogLevels] = {0.0f, 2.0f, 4.0f, 6.0f, 10.0f, 15.0f, 22.0f, 32.0f};
constexpr float kLogBetween[kLogLevels - 1] = {1.0f, 3.0f, 5.0f, 8.0f, 12.5f, 18.5f, 27.0f};

int bits_of(Factor factor) {
    switch (factor) {
        case Factor::kFp32: return 32;
        case Factor::kBf16: return 16;
        case Factor::kInt8: return 8;
        case Factor::kInt2: return 2;
        default: return 4;
    }
}

int64_t factor_bytes(int64_t length, Factor factor) {
    const int bits = bits_of(factor);
    if (bits >= 16) return length * bits / 8;
    return ceil_div(ceil_div(length, kFactorBlock) * 2 + ceil_div(length * bits, 8), 2) * 2;
}

// Writes one column in kLog4 to a payload of zeros.  Returns whether a scale overflowed.
bool write_log4(const float* values, int64_t length, uint8_t* payload) {
    uint8_t* packed = payload + 2 * ceil_div(length, kFactorBlock);
    bool is_overflow = false;
    for (int64_t begin = 0; begin < length; begin += kFactorBlock) {
        const int64_t count = std::min(kFactorBlock, length - begin);
        const float largest = std::bit_cast<float>(largest_magnitude_bits(values + begin, count));
        const uint16_t scale = round_scale_up(largest / kLogValues[kLogLevels - 1]);
        is_overflow |= !is_scale_finite(scale);
        store16(payload + 2 * (begin / kFactorBlock), scale);
        const float s = divisor(scale);
        for (int64_t i = begin; i < begin + count; ++i) {
            const float magnitude = std::fabs(values[i]) / s;
            int code = 0;
            for (const float between : kLogBetween) code += magnitude >= between;
            if (code > 0 && values[i] < 0.0f) code |= kLogLevels;
            packed[i / 2] |= static_cast<uint8_t>(code << (4 * (i % 2)));
        }
    }
    return is_overflow;
}

void read_log4(const uint8_t* payload, int64_t length, float* values) {
    const uint8_t* packed = payload + 2 * ceil_div(length, kFactorBlock);
    for (int64_t i = 0; i < length; ++i) {
        const int code = packed[i / 2] >> (4 * (i % 2)) & 15;
        const float level = kLogValues[code % kLogLevels];
        values[i] = (code >= kLogLevels ? -level : level) * scale_value(load16(payload + 2 * (i / kFactorBlock)));
    }
}

void read_factor(const uint8_t* payload, int64_t num_columns, int64_t length, Factor factor, float* columns) {
    const int64_t bytes = factor_bytes(length, factor);
    for (int64_t column = 0; column < num_columns; ++column) {
        float* to = columns + column * length;
        const uint8_t* from = payload + column * bytes;
        if (factor == Factor::kFp32) {
            std::memcpy(to, from, static_cast<size_t>(bytes));
        } else if (factor == Factor::kBf16) {
            for (int64_t i = 0; i < length; ++i) to[i] = scale_value(load16(from + 2 * i));
        } else if (factor == Factor::kLog4) {
            read_log4(from, length, to);
        } else {
            const Payloads one{const_cast<uint8_t*>(from), bytes, bytes};
            blockwise_decode(one, 1, length, bits_of(factor), kFactorBlock, false, 1, to);
        }
    }
}

// Writes columns [num_columns, length] of one tensor to payload.  The columns become what a decoder reads from it.
// Returns whether something overflowed.
bool write_factor(float* columns, int64_t num_columns, int64_t length, Factor factor, uint8_t* payload) {
    const int64_t bytes = factor_bytes(length, factor);
    bool is_overflow = false;
    for (int64_t column = 0; column < num_columns; ++column) {
        float* from = columns + column * length;
        uint8_t* to = payload + column * bytes;
        std::memset(to, 0, static_cast<size_t>(bytes));
        if (factor == Factor::kFp32) {
            std::memcpy(to, from, static_cast<size_t>(bytes));
        } else if (factor == Factor::kBf16) {
            for (int64_t i = 0; i < length; ++i) store16(to + 2 * i, round_value(from[i]));
        } else if (factor == Factor::kLog4) {
            is_overflow |= write_log4(from, length, to);
        } else {
            uint8_t is_bad = 0;
            const Input input{Source::kEncode, from, nullptr, 1, length};
            blockwise_encode(input, bits_of(factor), kFactorBlock, 1, {to, bytes, bytes}, &is_bad);
            is_overflow |= is_bad != 0;
        }
    }
    read_factor(payload, num_columns, length, factor, columns);
    return is_overflow || largest_magnitude_bits(columns, num_columns * length) >= kInfinity;
}

// --- Weighting by root mean squares ---

constexpr double kRmsDecay = 0.95;   // of the mean of squares, each step
constexpr float kSmallestRms = 1e-3f;  // of the largest: rows and columns below this count as if they had it

// Moves rms [size] towards the root of mean_square(i), and sets weight [size] to rms relative to the largest.
template <typename MeanSquare>
void update_rms(int64_t size, MeanSquare mean_square, float* rms, float* weight) {
    float largest = 0.0f;
    for (int64_t i = 0; i < size; ++i) {
        const double before = rms[i];
        weight[i] = static_cast<float>(std::sqrt(kRmsDecay * before * before + (1.0 - kRmsDecay) * mean_square(i)));
        rms[i] = weight[i];
        largest = std::max(largest, weight[i]);
    }
    for (int64_t i = 0; i < size; ++i) {
        weight[i] = largest > 0.0f ? std::max(weight[i] / largest, kSmallestRms) : 1.0f;
    }
}

// Makes the weights of rows [rows] and columns [cols] from the sizes of one tensor x, and updates their state.
// sums [rows + cols] is for sums of squares.
void weigh(const float* x, int64_t rows, int64_t cols, double* sums, float* row_rms, float* col_rms, float* row_weight,
           float* col_weight) {
    double *row_sum = sums, *col_sum = sums + rows;
    std::fill(sums, sums + rows + cols, 0.0);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
            const double value = x[row * cols + col];
            row_sum[row] += value * value;
            col_sum[col] += value * value;
        }
    }
    update_rms(rows, [&](int64_t i) { return row_sum[i] / static_cast<double>(cols); }, row_rms, row_weight);
    update_rms(cols, [&](int64_t i) { return col_sum[i] / static_cast<double>(rows); }, col_rms, col_weight);
}

// lines [num_lines, length] times (or divided by) weight [length].
void multiply_lines(float* lines, int64_t num_lines, int64_t length, const float* weight) {
    for (int64_t line = 0; line < num_lines; ++line) {
        for (int64_t i = 0; i < length; ++i) lines[line * length + i] *= weight[i];
    }
}

void divide_lines(float* lines, int64_t num_lines, int64_t length, const float* weight) {
    for (int64_t line = 0; line < num_lines; ++line) {
        for (int64_t i = 0; i < length; ++i) lines[line * length + i] /= weight[i];
    }
}

}  // namespace

void low_rank_encode(const Input& input, const float* sizes, const LowRank& shape, const float* start,
                     int num_threads, const LowRankState& state, const Payloads& payloads, uint8_t* is_bad) {
    const auto [rank, rows, cols, factor, iterations] = shape;
    const int64_t n = input.n;
    const bool is_weighted = state.row_rms != nullptr;
    std::vector<float> x(static_cast<size_t>(n * rows * cols));
    std::vector<float> p(static_cast<size_t>(n * rank * rows)), q(static_cast<size_t>(n * rank * cols));
    prepare(input, num_threads, x.data(), is_bad);
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        const float* from = start != nullptr ? start : state.q + tensor * rank * cols;
        std::copy(from, from + rank * cols, q.data() + tensor * rank * cols);
    }

    // 1. If asked for, scale rows and columns to about the same size.
    std::vector<float> row_weight, col_weight, weighted, row_rms, col_rms;
    if (is_weighted) {
        weighted = x;
        row_weight.resize(static_cast<size_t>(n * rows));
        col_weight.resize(static_cast<size_t>(n * cols));
        row_rms.assign(state.row_rms, state.row_rms + n * rows);
        col_rms.assign(state.col_rms, state.col_rms + n * cols);
        const int threads = threads_for_tensors(n, n * rows * cols, num_threads);
        PerThread<double> sums(threads, rows + cols);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t tensor = 0; tensor < n; ++tensor) {
            float* to = weighted.data() + tensor * rows * cols;
            float* of_rows = row_weight.data() + tensor * rows;
            const float* of = sizes != nullptr && is_bad[tensor] == 0 ? sizes + tensor * rows * cols : to;
            weigh(of, rows, cols, sums.mine(), row_rms.data() + tensor * rows, col_rms.data() + tensor * cols, of_rows,
                  col_weight.data() + tensor * cols);
            divide_lines(to, rows, cols, col_weight.data() + tensor * cols);
            for (int64_t row = 0; row < rows; ++row) {
                for (int64_t col = 0; col < cols; ++col) to[row * cols + col] /= of_rows[row];
            }
        }
    }
    const float* balanced = is_weighted ? weighted.data() : x.data();

    // 2. P as the decoder will read it.
    for (int iteration = 0; iteration < iterations; ++iteration) {
        if (iteration > 0) times_rows(balanced, p.data(), n, rank, rows, cols, num_threads, q.data());
        times_columns(balanced, q.data(), n, rank, rows, cols, num_threads, p.data());
        orthonormalise(p.data(), n, rank, rows, num_threads);
    }
    const int64_t p_bytes = rank * factor_bytes(rows, factor), used = p_bytes + rank * factor_bytes(cols, factor);
    std::vector<float> read_p(p.size());
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        float* columns = p.data() + tensor * rank * rows;
        if (is_weighted) multiply_lines(columns, rank, rows, row_weight.data() + tensor * rows);
        write_factor(columns, rank, rows, factor, payloads.data + tensor * payloads.stride);
        std::copy(columns, columns + rank * rows, read_p.data() + tensor * rank * rows);
        if (is_weighted) divide_lines(columns, rank, rows, row_weight.data() + tensor * rows);
    }

    // 3. Q for that P, and the start of the next step.
    times_rows(balanced, p.data(), n, rank, rows, cols, num_threads, q.data());
    divide_by_gram(p.data(), q.data(), n, rank, rows, cols, num_threads);
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        uint8_t* payload = payloads.data + tensor * payloads.stride;
        float* columns = q.data() + tensor * rank * cols;
        const std::vector<float> unrounded(columns, columns + rank * cols);
        if (is_weighted) multiply_lines(columns, rank, cols, col_weight.data() + tensor * cols);
        const bool is_overflow = write_factor(columns, rank, cols, factor, payload + p_bytes);
        std::memset(payload + used, 0, static_cast<size_t>(payloads.bytes - used));
        if (is_bad[tensor] == 0 && !is_overflow) {
            std::copy(unrounded.begin(), unrounded.end(), state.q + tensor * rank * cols);
            if (is_weighted) {
                std::copy_n(row_rms.data() + tensor * rows, rows, state.row_rms + tensor * rows);
                std::copy_n(col_rms.data() + tensor * cols, cols, state.col_rms + tensor * cols);
            }
        }
        is_bad[tensor] |= is_overflow;
    }

    // 4. The mirror, or the residual.
    for (int64_t tensor = 0; tensor < n && input.source != Source::kEncode; ++tensor) {
        if (is_bad[tensor] != 0) continue;
        const float* left = read_p.data() + tensor * rank * rows;
        const float* right = q.data() + tensor * rank * cols;
        float* other = input.other + tensor * rows * cols;
        float* sum = x.data() + tensor * rows * cols;
        if (input.source == Source::kUpdate) {
            add_product(left, right, 1, rank, rows, cols, true, num_threads, other);
        } else {
            add_product(left, right, 1, rank, rows, cols, false, num_threads, other);
#pragma omp parallel for num_threads(threads_for(rows * cols, num_threads)) schedule(static)
            for (int64_t i = 0; i < rows * cols; ++i) other[i] = sum[i] - other[i];
        }
    }
    finish_bad(input, is_bad);
}

void low_rank_decode(const Payloads& payloads, int64_t n, const LowRank& shape, bool is_add, int num_threads,
                     float* out) {
    const auto [rank, rows, cols, factor, iterations] = shape;
    std::vector<float> p(static_cast<size_t>(n * rank * rows)), q(static_cast<size_t>(n * rank * cols));
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        const uint8_t* payload = payloads.data + tensor * payloads.stride;
        read_factor(payload, rank, rows, factor, p.data() + tensor * rank * rows);
        read_factor(payload + rank * factor_bytes(rows, factor), rank, cols, factor, q.data() + tensor * rank * cols);
    }
    add_product(p.data(), q.data(), n, rank, rows, cols, is_add, num_threads, out);
}

}  // namespace hybridep
