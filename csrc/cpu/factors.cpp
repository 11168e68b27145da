// SPDX-License-Identifier: Apache-2.0
//
// Low rank with integer factors on the CPU, one matrix after the other.  Names and steps are those of
// ds_hybridep/codecs/low_rank.py and integer_factors.py, which explain them.

#include "hybridep_factors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "hybridep_blocks.h"

namespace hybridep {

namespace {

constexpr float kDecay = 0.95f, kSmallestRms = 1e-3f, kLargestRms = 1e30f;
constexpr float kSmallestUnit = 0x1p-100f, kLargestUnit = 0x1p126f, kSmallestSize = 1e-3f, kTiny = 1e-30f;
constexpr float kRidge = 3e-5f, kSolveRidge = 1e-3f;
constexpr float kStep = 0.335f, kLargest = 15.0f;
constexpr float kSmallestRowScale = 0x1p-98f, kSmallestColScale = 0x1p-28f;
constexpr int kShift = 19, kLargestByte = 255, kIterations = 2;
constexpr int32_t kLargestCode = (0x7f800000 >> kShift) - 1;
constexpr int64_t kBasesBytes = 4, kChunk = 64;
constexpr int64_t kLanes = 8, kRowsAtOnce = 4;

using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

float scale_of_code(int32_t code) { return std::bit_cast<float>(code << kShift); }

int32_t code_of_scale(float scale) {
    return std::min((std::bit_cast<int32_t>(scale) + (1 << (kShift - 1))) >> kShift, kLargestCode);
}

float largest_of(const float* values, int64_t count) {
    float largest = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
    return largest;
}

float dot(const float* a, const float* b, int64_t count) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
    return sum;
}

// out [rank, rows] = q [rank, cols] times the transposed y [rows, cols].  by_col [cols, kLanes] is scratch.
void times_rows(const float* q, const float* y, const FactorShape& s, float* by_col, float* out) {
    for (int64_t begin = 0; begin < s.rank; begin += kLanes) {
        const int64_t count = std::min(kLanes, s.rank - begin);
        for (int64_t j = 0; j < s.cols; ++j) {
            for (int64_t r = 0; r < kLanes; ++r) {
                by_col[j * kLanes + r] = r < count ? q[(begin + r) * s.cols + j] : 0.0f;
            }
        }
        for (int64_t i = 0; i < s.rows; i += kRowsAtOnce) {
            const int64_t rows = std::min(kRowsAtOnce, s.rows - i);
            const float* row[kRowsAtOnce];
            for (int64_t a = 0; a < kRowsAtOnce; ++a) row[a] = y + (i + std::min(a, rows - 1)) * s.cols;
            Lanes sums[kRowsAtOnce] = {};
            for (int64_t j = 0; j < s.cols; ++j) {
                Lanes weights;
                std::memcpy(&weights, by_col + j * kLanes, sizeof(weights));
                for (int64_t a = 0; a < kRowsAtOnce; ++a) sums[a] += row[a][j] * weights;
            }
            for (int64_t a = 0; a < rows; ++a) {
                for (int64_t r = 0; r < count; ++r) out[(begin + r) * s.rows + i + a] = sums[a][r];
            }
        }
    }
}

// out [m, cols] = p [m, k] times y [k, cols].
void product(const float* p, const float* y, int64_t m, int64_t k, int64_t cols, float* out) {
    std::fill(out, out + m * cols, 0.0f);
    for (int64_t begin = 0; begin < cols; begin += kChunk) {
        const int64_t count = std::min(kChunk, cols - begin);
        for (int64_t r = 0; r < m; ++r) {
            float* to = out + r * cols + begin;
            const float* weights = p + r * k;
            int64_t i = 0;
            for (; i + 4 <= k; i += 4) {
                const float a = weights[i], b = weights[i + 1], c = weights[i + 2], d = weights[i + 3];
                const float* from = y + i * cols + begin;
                const float *second = from + cols, *third = second + cols, *fourth = third + cols;
#pragma omp simd
                for (int64_t j = 0; j < count; ++j) {
                    to[j] += (a * from[j] + b * second[j]) + (c * third[j] + d * fourth[j]);
                }
            }
            for (; i < k; ++i) {
                const float a = weights[i];
                const float* from = y + i * cols + begin;
#pragma omp simd
                for (int64_t j = 0; j < count; ++j) to[j] += a * from[j];
            }
        }
    }
}

// gram [rank, rank] = the products of all pairs of rows of v [rank, count].
void gram_of(const float* v, int64_t rank, int64_t count, float* gram) {
    for (int64_t a = 0; a < rank; ++a) {
        for (int64_t b = 0; b <= a; ++b) {
            gram[a * rank + b] = gram[b * rank + a] = dot(v + a * count, v + b * count, count);
        }
    }
}

// The lower half of gram [rank, rank] becomes its Cholesky factor, after its diagonal has grown by `ridge`; where
// rounding has made it indefinite, the roots of the diagonal.
void cholesky(float* gram, int64_t rank, float ridge, float* diagonal) {
    for (int64_t a = 0; a < rank; ++a) {
        diagonal[a] = gram[a * rank + a] = std::max(gram[a * rank + a] * (1.0f + ridge), kTiny);
    }
    for (int64_t a = 0; a < rank; ++a) {
        float* row = gram + a * rank;
        for (int64_t b = 0; b < a; ++b) {
            row[b] = (row[b] - dot(row, gram + b * rank, b)) / gram[b * rank + b];
        }
        const float left = row[a] - dot(row, row, a);
        if (!(left > 0.0f)) {
            for (int64_t c = 0; c < rank; ++c) {
                std::fill(gram + c * rank, gram + c * rank + c, 0.0f);
                gram[c * rank + c] = std::sqrt(diagonal[c]);
            }
            return;
        }
        row[a] = std::sqrt(left);
    }
}

// v [rank, count] becomes L^-1 v for the lower half L of factor [rank, rank].
void solve_lower(const float* factor, int64_t rank, int64_t count, float* v) {
    for (int64_t a = 0; a < rank; ++a) {
        float* row = v + a * count;
        for (int64_t b = 0; b < a; ++b) {
            const float weight = factor[a * rank + b];
            const float* from = v + b * count;
#pragma omp simd
            for (int64_t j = 0; j < count; ++j) row[j] -= weight * from[j];
        }
        const float pivot = factor[a * rank + a];
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) row[j] /= pivot;
    }
}

// v becomes L^-T v.
void solve_upper(const float* factor, int64_t rank, int64_t count, float* v) {
    for (int64_t a = rank - 1; a >= 0; --a) {
        float* row = v + a * count;
        for (int64_t b = a + 1; b < rank; ++b) {
            const float weight = factor[b * rank + a];
            const float* from = v + b * count;
#pragma omp simd
            for (int64_t j = 0; j < count; ++j) row[j] -= weight * from[j];
        }
        const float pivot = factor[a * rank + a];
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) row[j] /= pivot;
    }
}

// rms [count] becomes that of the next step; weight [count] = rms over the largest.  squares: mean of each.
void weigh(float* rms, const double* squares, int64_t count, float* weight) {
    float largest = kSmallestUnit;
    for (int64_t i = 0; i < count; ++i) {
        const double mean = kDecay * double{rms[i]} * rms[i] + (1.0 - kDecay) * squares[i];
        rms[i] = static_cast<float>(std::min(std::sqrt(mean), double{kLargestRms}));
        largest = std::max(largest, rms[i]);
    }
    for (int64_t i = 0; i < count; ++i) weight[i] = std::max(rms[i] / largest, kSmallestRms);
}

// odd [rank, count] = odd integers for v; codes [count] = those of their scales times weight [count].
void quantise(const float* v, const float* weight, const float* gram, int64_t rank, int64_t count, float smallest,
              float* odd, int32_t* codes) {
    for (int64_t begin = 0; begin < count; begin += kChunk) {
        const int64_t size = std::min(kChunk, count - begin);
        alignas(64) float squares[kChunk] = {}, largest[kChunk] = {}, step[kChunk], across[kChunk];
        alignas(64) float linear[kChunk] = {}, square[kChunk] = {};
        for (int64_t r = 0; r < rank; ++r) {
            const float* from = v + r * count + begin;
#pragma omp simd
            for (int64_t j = 0; j < size; ++j) {
                squares[j] += from[j] * from[j];
                largest[j] = std::max(largest[j], std::fabs(from[j]));
            }
        }
#pragma omp simd
        for (int64_t j = 0; j < size; ++j) {
            const float rms = std::sqrt(squares[j] / static_cast<float>(rank));
            step[j] = std::min(kStep * rms, largest[j] / (kLargest / 2));
        }
        for (int64_t r = 0; r < rank; ++r) {
            const float* from = v + r * count + begin;
            float* to = odd + r * count + begin;
#pragma omp simd
            for (int64_t j = 0; j < size; ++j) {
                const float level = std::floor(from[j] / std::max(step[j], kTiny)) * 2 + 1;
                to[j] = std::min(std::max(level, -kLargest), kLargest);
            }
        }
        for (int64_t a = 0; a < rank; ++a) {
            std::fill(across, across + size, 0.0f);
            for (int64_t b = 0; b < rank; ++b) {
                const float both = gram[a * rank + b];
                const float* from = odd + b * count + begin;
#pragma omp simd
                for (int64_t j = 0; j < size; ++j) across[j] += both * from[j];
            }
            const float *of_v = v + a * count + begin, *of_odd = odd + a * count + begin;
#pragma omp simd
            for (int64_t j = 0; j < size; ++j) {
                linear[j] += across[j] * of_v[j];
                square[j] += across[j] * of_odd[j];
            }
        }
        for (int64_t j = 0; j < size; ++j) {
            float scale = linear[j] / std::max(square[j], kTiny);
            scale = std::min(std::max(scale, step[j] / 4), step[j]) * weight[begin + j];
            codes[begin + j] = scale >= smallest ? code_of_scale(scale) : 0;
        }
    }
}

// What the encoding of a matrix needs beside its arguments.  A thread keeps it, as making it takes a third of the time.
struct Scratch {
    void fit(const FactorShape& s) {
        for (auto* one : {&x, &y}) one->resize(s.rows * s.cols);
        for (auto* one : {&p, &mixed_p}) one->resize(s.rank * s.rows);
        for (auto* one : {&q, &mixed_q}) one->resize(s.rank * s.cols);
        for (auto* one : {&gram, &factor}) one->resize(s.rank * s.rank);
        for (auto* one : {&row_weight, &row_rms}) one->resize(s.rows);
        for (auto* one : {&col_weight, &col_rms, &inverse}) one->resize(s.cols);
        size.resize(s.rank);
        by_col.resize(s.cols * kLanes);
        row_squares.resize(s.rows);
        col_squares.resize(s.cols);
        row_codes.resize(s.rows);
        col_codes.resize(s.cols);
    }

    std::vector<float> x, y, p, q, mixed_p, mixed_q, gram, factor, size, by_col, inverse;
    std::vector<float> row_weight, col_weight, row_rms, col_rms;
    std::vector<double> row_squares, col_squares;
    std::vector<int32_t> row_codes, col_codes;
};

void find_weights(const float* sizes, const FactorShape& s, const float* row_rms, const float* col_rms, Scratch& w) {
    if (row_rms == nullptr) {
        std::fill(w.row_weight.begin(), w.row_weight.end(), 1.0f);
        std::fill(w.col_weight.begin(), w.col_weight.end(), 1.0f);
        return;
    }
    std::fill(w.col_squares.begin(), w.col_squares.end(), 0.0);
    for (int64_t i = 0; i < s.rows; ++i) {
        const float* row = sizes + i * s.cols;
        double* of_cols = w.col_squares.data();
        double of_row = 0.0;
#pragma omp simd reduction(+ : of_row)
        for (int64_t j = 0; j < s.cols; ++j) {
            const double square = double{row[j]} * row[j];
            of_row += square;
            of_cols[j] += square;
        }
        w.row_squares[i] = of_row / static_cast<double>(s.cols);
    }
    for (double& one : w.col_squares) one /= static_cast<double>(s.rows);
    std::copy(row_rms, row_rms + s.rows, w.row_rms.begin());
    std::copy(col_rms, col_rms + s.cols, w.col_rms.begin());
    weigh(w.row_rms.data(), w.row_squares.data(), s.rows, w.row_weight.data());
    weigh(w.col_rms.data(), w.col_squares.data(), s.cols, w.col_weight.data());
}

void write_payload(const Scratch& w, int32_t largest_row, int32_t largest_col, uint8_t* payload, int64_t bytes) {
    std::memset(payload, 0, static_cast<size_t>(bytes));
    int64_t place = 0;
    for (const auto* odd : {&w.mixed_p, &w.mixed_q}) {
        for (const float level : *odd) {
            const auto code = static_cast<uint8_t>(static_cast<int32_t>(level + kLargest) / 2);
            payload[place / 2] |= static_cast<uint8_t>(place % 2 ? code << 4 : code);
            ++place;
        }
    }
    uint8_t* to = payload + (place + 1) / 2;
    const int32_t row_base = std::max(largest_row - kLargestByte, 0), col_base = std::max(largest_col - kLargestByte, 0);
    store16(to, static_cast<uint16_t>(row_base));
    store16(to + 2, static_cast<uint16_t>(col_base));
    to += kBasesBytes;
    for (const int32_t code : w.row_codes) *to++ = static_cast<uint8_t>(std::max(code - row_base, 0));
    for (const int32_t code : w.col_codes) *to++ = static_cast<uint8_t>(std::max(code - col_base, 0));
}

// Returns true if it overflows; the payload is then zeros.
bool encode_one(const float* x, const float* sizes, const float* start, const float* mix, const FactorShape& s,
                bool is_bad, const FactorState& state, uint8_t* payload, Scratch& w) {
    const int64_t rank = s.rank;
    // 1. y = x over the weights of its rows and columns, and over a power of two.
    find_weights(sizes, s, state.row_rms, state.col_rms, w);
    const float largest = std::clamp(largest_of(x, s.rows * s.cols), kSmallestUnit, kLargestUnit);
    const float unit = std::bit_cast<float>(std::bit_cast<uint32_t>(largest) & 0x7f800000u);
    for (int64_t j = 0; j < s.cols; ++j) w.inverse[j] = 1.0f / w.col_weight[j];
    for (int64_t i = 0; i < s.rows; ++i) {
        const float *from = x + i * s.cols, *of_cols = w.inverse.data();
        float* to = w.y.data() + i * s.cols;
        const float of_row = 1.0f / unit / w.row_weight[i];
#pragma omp simd
        for (int64_t j = 0; j < s.cols; ++j) to[j] = from[j] * of_row * of_cols[j];
        w.row_weight[i] *= unit;
    }
    // 2. Two steps of power iteration.
    for (int step = 0; step < kIterations; ++step) {
        times_rows(step ? w.q.data() : start, w.y.data(), s, w.by_col.data(), w.p.data());
        gram_of(w.p.data(), rank, s.rows, w.gram.data());
        cholesky(w.gram.data(), rank, kRidge, w.size.data());
        solve_lower(w.gram.data(), rank, s.rows, w.p.data());
        product(w.p.data(), w.y.data(), rank, s.rows, s.cols, w.q.data());
    }
    // 3. Sizes are shared out between P and Q, and mixed.
    float most = 0.0f;
    for (int64_t r = 0; r < rank; ++r) {
        const float* row = w.q.data() + r * s.cols;
        w.size[r] = std::sqrt(dot(row, row, s.cols));
        most = std::max(most, w.size[r]);
    }
    for (int64_t r = 0; r < rank; ++r) {
        w.size[r] = std::sqrt(std::max({w.size[r], kSmallestSize * most, kTiny}));
        for (int64_t a = 0; a < rank; ++a) {
            w.gram[a * rank + r] = mix[a * rank + r] * w.size[r];
            w.factor[a * rank + r] = mix[a * rank + r] / w.size[r];
        }
    }
    product(w.gram.data(), w.p.data(), rank, rank, s.rows, w.mixed_p.data());
    product(w.factor.data(), w.q.data(), rank, rank, s.cols, w.mixed_q.data());
    // 4. P is rounded, and p becomes what the other side has of it.
    gram_of(w.mixed_q.data(), rank, s.cols, w.gram.data());
    std::swap(w.p, w.mixed_p);
    quantise(w.p.data(), w.row_weight.data(), w.gram.data(), rank, s.rows, kSmallestRowScale, w.mixed_p.data(),
             w.row_codes.data());
    for (int64_t i = 0; i < s.rows; ++i) {
        const float scale = scale_of_code(w.row_codes[i]) / w.row_weight[i];
        for (int64_t r = 0; r < rank; ++r) w.p[r * s.rows + i] = w.mixed_p[r * s.rows + i] * scale;
    }
    // 5. The best Q for it, rounded.
    gram_of(w.p.data(), rank, s.rows, w.gram.data());
    product(w.p.data(), w.y.data(), rank, s.rows, s.cols, w.q.data());
    w.factor = w.gram;
    cholesky(w.factor.data(), rank, kSolveRidge, w.size.data());
    solve_lower(w.factor.data(), rank, s.cols, w.q.data());
    solve_upper(w.factor.data(), rank, s.cols, w.q.data());
    quantise(w.q.data(), w.col_weight.data(), w.gram.data(), rank, s.cols, kSmallestColScale, w.mixed_q.data(),
             w.col_codes.data());
    // 6. The payload and the next state.
    const int32_t largest_row = *std::max_element(w.row_codes.begin(), w.row_codes.end());
    const int32_t largest_col = *std::max_element(w.col_codes.begin(), w.col_codes.end());
    const float bound = scale_of_code(largest_row) * (static_cast<float>(rank) * kLargest * kLargest) *
                        std::max(scale_of_code(largest_col), 1.0f);
    // As bits, so that nan counts.
    const float largest_q = std::bit_cast<float>(largest_magnitude_bits(w.q.data(), rank * s.cols));
    if (!std::isfinite(bound + largest_q)) {
        std::memset(payload, 0, static_cast<size_t>(s.bytes));
        return true;
    }
    write_payload(w, largest_row, largest_col, payload, s.bytes);
    if (is_bad) return false;
    if (largest_q > 0.0f) std::copy(w.q.begin(), w.q.end(), state.q);  // nothing can be found from zeros
    if (state.row_rms != nullptr) {
        std::copy(w.row_rms.begin(), w.row_rms.end(), state.row_rms);
        std::copy(w.col_rms.begin(), w.col_rms.end(), state.col_rms);
    }
    return false;
}

// What the decoding of a matrix needs beside its arguments; kept like Scratch.
struct Decoded {
    void fit(const FactorShape& s) {
        value.resize(s.rows * s.cols);
        odd.resize(s.rank * (s.rows + s.cols));
        row_scale.resize(s.rows);
        col_scale.resize(s.cols);
    }

    std::vector<float> value, odd, row_scale, col_scale;
};

// d.value [rows, cols] = that of the factors in a payload.
void decode_one(const uint8_t* payload, const FactorShape& s, Decoded& d) {
    const auto num_codes = static_cast<int64_t>(d.odd.size());
    for (int64_t place = 0; place < num_codes; ++place) {
        const int32_t code = place % 2 ? payload[place / 2] >> 4 : payload[place / 2] & 15;
        d.odd[place] = static_cast<float>(2 * code) - kLargest;
    }
    const uint8_t* from = payload + (num_codes + 1) / 2;
    const int32_t row_base = load16(from), col_base = load16(from + 2);
    from += kBasesBytes;
    for (float& scale : d.row_scale) scale = scale_of_code(*from ? *from + row_base : 0), ++from;
    for (float& scale : d.col_scale) scale = scale_of_code(*from ? *from + col_base : 0), ++from;
    const float* q = d.odd.data() + s.rank * s.rows;
    for (int64_t row = 0; row < s.rows; ++row) {
        for (int64_t begin = 0; begin < s.cols; begin += kChunk) {
            const int64_t count = std::min(kChunk, s.cols - begin);
            alignas(64) float value[kChunk] = {};
            for (int64_t k = 0; k < s.rank; ++k) {
                const float weight = d.odd[k * s.rows + row];
                const float* levels = q + k * s.cols + begin;
#pragma omp simd
                for (int64_t j = 0; j < count; ++j) value[j] += weight * levels[j];
            }
            const float of_row = d.row_scale[row];
            const float* of_cols = d.col_scale.data() + begin;
            float* to = d.value.data() + row * s.cols + begin;
#pragma omp simd
            for (int64_t j = 0; j < count; ++j) to[j] = value[j] * of_row * of_cols[j];
        }
    }
}

// The part of a payload that holds what its factors leave out.
Payloads rest_of(uint8_t* payload, const FactorShape& s, int64_t bytes) {
    return {payload + s.bytes, bytes - s.bytes, bytes - s.bytes};
}

FactorState state_of(const FactorState& state, const FactorShape& s, int64_t i) {
    if (state.row_rms == nullptr) return {state.q + i * s.rank * s.cols, nullptr, nullptr};
    return {state.q + i * s.rank * s.cols, state.row_rms + i * s.rows, state.col_rms + i * s.cols};
}

}  // namespace

void encode_factors(const Input& input, const float* start, const float* mix, const FactorShape& shape,
                    const FactorState& state, const Payloads& payloads, uint8_t* is_bad) {
    const int64_t length = input.length;
#pragma omp parallel num_threads(threads_for(input.n * length, shape.num_threads))
    {
        thread_local Scratch work;
        thread_local Decoded decoded;
        work.fit(shape);
        decoded.fit(shape);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < input.n; ++i) {
            const float* a = input.a + i * length;
            float* other = input.other == nullptr ? nullptr : input.other + i * length;
            uint8_t* payload = payloads.data + i * payloads.stride;
            float* x = work.x.data();
            prepare({input.source, a, other, 1, length}, 1, x, is_bad + i);
            const float* sizes = input.source == Source::kResidual && !is_bad[i] ? a : x;
            is_bad[i] |= encode_one(x, sizes, start + i * shape.rank * shape.cols, mix, shape, is_bad[i] != 0,
                                    state_of(state, shape, i), payload, work);
            if (input.source == Source::kEncode && shape.rest_bits == 0) continue;
            decode_one(payload, shape, decoded);
            if (shape.rest_bits) {
                uint8_t is_overflow = 0;
                blockwise_encode({Source::kUpdate, x, decoded.value.data(), 1, length}, shape.rest_bits,
                                 shape.rest_block, 1, rest_of(payload, shape, payloads.bytes), &is_overflow);
                is_bad[i] |= is_overflow;
            }
            if (input.source == Source::kEncode || is_bad[i]) continue;
            const float* arrives = decoded.value.data();
            if (input.source == Source::kUpdate) {
#pragma omp simd
                for (int64_t j = 0; j < length; ++j) other[j] += arrives[j];
            } else {
#pragma omp simd
                for (int64_t j = 0; j < length; ++j) other[j] = x[j] - arrives[j];
            }
        }
    }
    finish_bad(input, is_bad);
}

void decode_factors(const Payloads& payloads, const FactorShape& shape, bool is_add, float* out) {
    const int64_t length = shape.rows * shape.cols;
#pragma omp parallel num_threads(threads_for(shape.n * length, shape.num_threads))
    {
        thread_local Decoded decoded;
        decoded.fit(shape);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < shape.n; ++i) {
            uint8_t* payload = payloads.data + i * payloads.stride;
            decode_one(payload, shape, decoded);
            float* arrives = decoded.value.data();
            if (shape.rest_bits) {
                blockwise_decode(rest_of(payload, shape, payloads.bytes), 1, length, shape.rest_bits, shape.rest_block,
                                 true, 1, arrives);
            }
            float* to = out + i * length;
            if (is_add) {
#pragma omp simd
                for (int64_t j = 0; j < length; ++j) to[j] += arrives[j];
            } else {
                std::copy(arrives, arrives + length, to);
            }
        }
    }
}

}  // namespace hybridep
