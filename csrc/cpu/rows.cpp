// SPDX-License-Identifier: Apache-2.0
//
// Row movement on the CPU: plain loops, split over OpenMP threads by token or by row so that each output element has
// one writer and one order of summation.  hybridep_rows.h says what each function computes.

#include "hybridep_rows.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "hybridep_blocks.h"
#include "hybridep_elements.h"
#include "hybridep_scales.h"

namespace hybridep {
namespace {

// Columns summed at a time: the fp32 accumulators stay in the first-level cache, and the inner loops stay vectors.
constexpr int64_t kTile = 512;

// A thread is woken for at least this many bytes.  Fewer take less time than the wake-up.
constexpr int64_t kBytesPerThread = 64 * 1024;

int threads_for_bytes(int64_t num_bytes, int num_threads) {
    return static_cast<int>(std::clamp<int64_t>(num_bytes / kBytesPerThread, 1, std::max(num_threads, 1)));
}

// --- Indices --------------------------------------------------------------------------------------------------------

// Position of the first index outside [lowest, size), or kAllInRange.  The common case is one pass without a branch.
int64_t first_outside(const int64_t* index, int64_t count, int64_t lowest, int64_t size) {
    bool is_any = false;
#pragma omp simd reduction(| : is_any)
    for (int64_t i = 0; i < count; ++i) is_any |= (index[i] < lowest) | (index[i] >= size);
    if (!is_any) return kAllInRange;
    return std::find_if(index, index + count, [=](int64_t i) { return i < lowest || i >= size; }) - index;
}

constexpr int64_t kAnyNegative = std::numeric_limits<int64_t>::min();

// Position of the first row out of range, kAllInRange, or kNotAllRows.
int64_t check_slots(const int64_t* slot_to_row, const RowSizes& sizes) {
    const int64_t num_slots = sizes.num_tokens * sizes.top_k;
    const int64_t wrong = first_outside(slot_to_row, num_slots, kAnyNegative, sizes.num_rows);
    if (wrong != kAllInRange) return wrong;
    int64_t num_found = 0;
#pragma omp simd reduction(+ : num_found)
    for (int64_t slot = 0; slot < num_slots; ++slot) num_found += slot_to_row[slot] >= 0;
    return num_found == sizes.num_rows ? kAllInRange : kNotAllRows;
}

// --- Plan -----------------------------------------------------------------------------------------------------------

struct TokenRange {
    int64_t begin;
    int64_t end;
};

TokenRange chunk_tokens(int64_t num_tokens, int64_t chunk, int64_t num_chunks) {
    return {num_tokens * chunk / num_chunks, num_tokens * (chunk + 1) / num_chunks};
}

inline int32_t destination_of(const Routes& routes, int32_t expert) {
    return expert < 0 ? -1 : routes.expert_to_destination[expert];
}

// The first slot of `experts` [K] with the destination of slot k: k itself when k owns the row.
inline int64_t first_slot_of(const Routes& routes, const int32_t* experts, int64_t k, int32_t destination) {
    int64_t first = 0;
    while (first < k && destination_of(routes, experts[first]) != destination) ++first;
    return first;
}

}  // namespace

int64_t first_not_below(const int32_t* values, int64_t count, int64_t limit) {
    bool is_any = false;
#pragma omp simd reduction(| : is_any)
    for (int64_t i = 0; i < count; ++i) is_any |= values[i] >= limit;
    if (!is_any) return kAllInRange;
    return std::find_if(values, values + count, [=](int32_t value) { return value >= limit; }) - values;
}

int64_t plan_chunks(int64_t num_tokens, int64_t top_k, int num_threads) {
    // A slot costs about as much as 16 bytes of copying.
    return threads_for_bytes(num_tokens * top_k * 16, num_threads);
}

int64_t plan_count(const Routes& routes, int64_t num_chunks, int64_t* chunk_rows, int64_t* rows_per_destination) {
    const int64_t top_k = routes.top_k, num_destinations = routes.num_destinations;
    const int64_t wrong = first_not_below(routes.topk_idx, routes.num_tokens * top_k, routes.num_experts);
    if (wrong != kAllInRange) return wrong;

#pragma omp parallel for schedule(static) num_threads(num_chunks) if (num_chunks > 1)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        int64_t* rows = chunk_rows + chunk * num_destinations;
        std::fill_n(rows, num_destinations, 0);
        const auto [begin, end] = chunk_tokens(routes.num_tokens, chunk, num_chunks);
        for (int64_t token = begin; token < end; ++token) {
            const int32_t* experts = routes.topk_idx + token * top_k;
            for (int64_t k = 0; k < top_k; ++k) {
                const int32_t destination = destination_of(routes, experts[k]);
                if (destination >= 0 && first_slot_of(routes, experts, k, destination) == k) ++rows[destination];
            }
        }
    }

    std::fill_n(rows_per_destination, num_destinations, 0);
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        for (int64_t n = 0; n < num_destinations; ++n)
            rows_per_destination[n] += chunk_rows[chunk * num_destinations + n];
    }
    return kAllInRange;
}

void plan_fill(const Routes& routes, int64_t num_chunks, int64_t* chunk_rows, int64_t* row_to_token,
               int32_t* row_topk_idx, int64_t* slot_to_row, int64_t* first_slot_to_row) {
    const int64_t top_k = routes.top_k, num_destinations = routes.num_destinations;

    // Counts become the first row of each (destination, chunk): destinations in order, chunks in order within one.
    int64_t next = 0;
    for (int64_t n = 0; n < num_destinations; ++n) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            next += std::exchange(chunk_rows[chunk * num_destinations + n], next);
        }
    }

#pragma omp parallel for schedule(static) num_threads(num_chunks) if (num_chunks > 1)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        int64_t* next_row = chunk_rows + chunk * num_destinations;
        const auto [begin, end] = chunk_tokens(routes.num_tokens, chunk, num_chunks);
        for (int64_t token = begin; token < end; ++token) {
            const int32_t* experts = routes.topk_idx + token * top_k;
            int64_t* served_by = slot_to_row + token * top_k;
            int64_t* first_served_by = first_slot_to_row + token * top_k;
            for (int64_t k = 0; k < top_k; ++k) {
                const int32_t destination = destination_of(routes, experts[k]);
                served_by[k] = first_served_by[k] = -1;
                if (destination < 0) continue;
                const int64_t first = first_slot_of(routes, experts, k, destination);
                if (first == k) {
                    const int64_t row = next_row[destination]++;
                    first_served_by[k] = row;
                    row_to_token[row] = token;
                    std::fill_n(row_topk_idx + row * top_k, top_k, -1);
                }
                served_by[k] = first == k ? first_served_by[k] : served_by[first];
                row_topk_idx[served_by[k] * top_k + k] = experts[k];
            }
        }
    }
}

// --- Dispatch -------------------------------------------------------------------------------------------------------

int64_t dispatch_rows(const void* x, const int64_t* slot_to_row, const RowSizes& sizes, int64_t element_bytes,
                      int num_threads, void* out) {
    const int64_t row_bytes = sizes.hidden * element_bytes;
    const int64_t wrong = check_slots(slot_to_row, sizes);
    if (wrong != kAllInRange || row_bytes == 0) return wrong;
    const char* source = static_cast<const char*>(x);
    char* target = static_cast<char*>(out);
    const int threads = threads_for_bytes(sizes.num_rows * row_bytes, num_threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < sizes.num_tokens; ++token) {
        for (int64_t slot = token * sizes.top_k; slot < (token + 1) * sizes.top_k; ++slot) {
            const int64_t row = slot_to_row[slot];
            if (row >= 0) std::memcpy(target + row * row_bytes, source + token * row_bytes, row_bytes);
        }
    }
    return kAllInRange;
}

// --- Rows of one byte an element ------------------------------------------------------------------------------------

namespace {

template <typename Code, typename T>
void quantise_row(const T* row, int64_t hidden, uint8_t* record) {
    const int64_t num_blocks = num_scales(hidden);
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t begin = block * kScaleBlock, count = std::min(kScaleBlock, hidden - begin);
        alignas(64) float values[kScaleBlock];
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) values[i] = to_float(row[begin + i]);
        const uint8_t exponent = exponent_of<Code>(largest_magnitude_bits(values, count));
        const float inverse = inverse_scale(exponent);
        const bool is_finite = exponent != kNotFinite;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) record[begin + i] = row_code<Code>(values[i], inverse, is_finite);
        record[hidden + block] = exponent;
    }
    std::fill(record + hidden + num_blocks, record + record_bytes(hidden), uint8_t{0});
}

template <typename Code, typename T>
void dequantise_row(const uint8_t* record, int64_t hidden, T* row) {
    for (int64_t begin = 0; begin < hidden; begin += kScaleBlock) {
        const int64_t end = std::min(begin + kScaleBlock, hidden);
        const float scale = scale_of_exponent(record[hidden + begin / kScaleBlock]);
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
            row[i] = from_float<T>(row_value<Code>(record[i], scale, kLargestFinite<T>));
        }
    }
}

}  // namespace

int64_t quantise_rows(const void* x, Type x_type, const int64_t* slot_to_row, const RowSizes& sizes, RowFormat format,
                      int num_threads, uint8_t* records) {
    const int64_t wrong = check_slots(slot_to_row, sizes);
    if (wrong != kAllInRange) return wrong;
    const int64_t length = record_bytes(sizes.hidden);
    const int threads = threads_for(sizes.num_rows * sizes.hidden, num_threads);
    with_code(format, [&](auto code) {
        with_type(x_type, [&](auto element) {
            const auto* source = static_cast<const decltype(element)*>(x);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
            for (int64_t token = 0; token < sizes.num_tokens; ++token) {
                const uint8_t* first = nullptr;
                for (int64_t slot = token * sizes.top_k; slot < (token + 1) * sizes.top_k; ++slot) {
                    if (slot_to_row[slot] < 0) continue;
                    uint8_t* record = records + slot_to_row[slot] * length;
                    if (first == nullptr) {
                        quantise_row<decltype(code)>(source + token * sizes.hidden, sizes.hidden, record);
                        first = record;
                    } else {
                        std::copy_n(first, length, record);
                    }
                }
            }
        });
    });
    return kAllInRange;
}

void dequantise_rows(const uint8_t* records, const RowSizes& sizes, RowFormat format, int num_threads, void* out,
                     Type out_type) {
    const int threads = threads_for(sizes.num_rows * sizes.hidden, num_threads);
    with_code(format, [&](auto code) {
        with_type(out_type, [&](auto element) {
            auto* target = static_cast<decltype(element)*>(out);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
            for (int64_t row = 0; row < sizes.num_rows; ++row) {
                dequantise_row<decltype(code)>(records + row * record_bytes(sizes.hidden), sizes.hidden,
                                               target + row * sizes.hidden);
            }
        });
    });
}

// --- Combine --------------------------------------------------------------------------------------------------------

namespace {

template <typename Row, typename Out>
void combine_tokens(const Row* rows, const int64_t* slot_to_row, const float* weights, const RowSizes& sizes,
                    int threads, Out* out) {
    const int64_t top_k = sizes.top_k, hidden = sizes.hidden;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < sizes.num_tokens; ++token) {
        for (int64_t begin = 0; begin < hidden; begin += kTile) {
            const int64_t width = std::min(kTile, hidden - begin);
            alignas(64) float sum[kTile];
            std::fill_n(sum, width, 0.0f);
            for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
                if (slot_to_row[slot] < 0) continue;
                const Row* row = rows + slot_to_row[slot] * hidden + begin;
                const float weight = weights ? weights[slot] : 1.0f;
#pragma omp simd
                for (int64_t i = 0; i < width; ++i) sum[i] += weight * to_float(row[i]);
            }
            Out* result = out + token * hidden + begin;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) result[i] = from_float<Out>(sum[i]);
        }
    }
}

// Slots of each row as linked lists in slot order: head [R] and next [T * K] hold slots, -1 ends a list.
void list_slots(const int64_t* slot_to_row, const RowSizes& sizes, int64_t* head, int64_t* next) {
    std::fill_n(head, sizes.num_rows, -1);
    for (int64_t slot = sizes.num_tokens * sizes.top_k - 1; slot >= 0; --slot) {
        const int64_t row = slot_to_row[slot];
        if (row >= 0) next[slot] = std::exchange(head[row], slot);
    }
}

// Makes kLanes partial sums, whether or not a compiler makes vectors of them: a single running sum loses accuracy.
float sum_of(const float* values, int64_t count) {
    constexpr int64_t kLanes = 16;
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane];
    }
    for (; i < count; ++i) lanes[i % kLanes] += values[i];
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
        for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
}

template <typename Grad, typename Row>
void combine_backward_by_row(const Grad* grad, const Row* rows, const float* weights, const RowSizes& sizes,
                             int threads, const int64_t* head, const int64_t* next, Row* grad_rows,
                             float* grad_weights) {
    const int64_t top_k = sizes.top_k, hidden = sizes.hidden;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < sizes.num_rows; ++row) {
        for (int64_t begin = 0; begin < hidden; begin += kTile) {
            const int64_t width = std::min(kTile, hidden - begin);
            const Row* value = rows + row * hidden + begin;
            alignas(64) float sum[kTile];
            std::fill_n(sum, width, 0.0f);
            for (int64_t slot = head[row]; slot >= 0; slot = next[slot]) {
                const Grad* slot_grad = grad + slot / top_k * hidden + begin;
                const float weight = weights[slot];
                alignas(64) float product[kTile];
#pragma omp simd
                for (int64_t i = 0; i < width; ++i) {
                    const float g = to_float(slot_grad[i]);
                    sum[i] += weight * g;
                    product[i] = g * to_float(value[i]);
                }
                // A slot is in the list of one row only, so it has one writer.
                grad_weights[slot] += sum_of(product, width);
            }
            Row* result = grad_rows + row * hidden + begin;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) result[i] = from_float<Row>(sum[i]);
        }
    }
}

}  // namespace

int64_t combine_rows(const void* rows, Type rows_type, const int64_t* slot_to_row, const float* weights,
                     const RowSizes& sizes, int num_threads, void* out, Type out_type) {
    const int64_t num_slots = sizes.num_tokens * sizes.top_k;
    const int64_t wrong = first_outside(slot_to_row, num_slots, kAnyNegative, sizes.num_rows);
    if (wrong != kAllInRange) return wrong;
    const int threads = threads_for_bytes((num_slots + sizes.num_tokens) * sizes.hidden * 2, num_threads);
    with_type(rows_type, [&](auto row) {
        with_type(out_type, [&](auto result) {
            combine_tokens(static_cast<const decltype(row)*>(rows), slot_to_row, weights, sizes, threads,
                           static_cast<decltype(result)*>(out));
        });
    });
    return kAllInRange;
}

int64_t combine_rows_backward(const void* grad, Type grad_type, const void* rows, Type rows_type,
                              const int64_t* slot_to_row, const float* weights, const RowSizes& sizes,
                              int num_threads, int64_t* scratch, void* grad_rows, float* grad_weights) {
    const int64_t num_slots = sizes.num_tokens * sizes.top_k;
    const int64_t wrong = first_outside(slot_to_row, num_slots, kAnyNegative, sizes.num_rows);
    if (wrong != kAllInRange) return wrong;
    int64_t* head = scratch;
    int64_t* next = scratch + sizes.num_rows;
    list_slots(slot_to_row, sizes, head, next);
    std::fill_n(grad_weights, num_slots, 0.0f);
    const int threads = threads_for_bytes((num_slots + 2 * sizes.num_rows) * sizes.hidden * 2, num_threads);
    with_type(grad_type, [&](auto gradient) {
        with_type(rows_type, [&](auto row) {
            combine_backward_by_row(static_cast<const decltype(gradient)*>(grad),
                                    static_cast<const decltype(row)*>(rows), weights, sizes, threads, head, next,
                                    static_cast<decltype(row)*>(grad_rows), grad_weights);
        });
    });
    return kAllInRange;
}

}  // namespace hybridep
