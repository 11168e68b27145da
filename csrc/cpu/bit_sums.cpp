// SPDX-License-Identifier: Apache-2.0
//
// Sums of bits on the CPU.  hybridep_rows.h says what is computed.

#include <algorithm>

#include "hybridep_rows.h"

namespace hybridep {
namespace {

constexpr int64_t kWordsPerThread = 256 * 1024;  // fewer take less time than waking a thread

template <typename Word>
void sum_words(const Word* words, int64_t num_words, int threads, int64_t* sums) {
    const int64_t num_rounds = (num_words + kPositions - 1) / kPositions;
    uint64_t all = 0, all_weighted = 0;
#pragma omp parallel for reduction(+ : all, all_weighted) schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t round = 0; round < num_rounds; ++round) {
        const Word* from = words + round * kPositions;
        const auto count = static_cast<int32_t>(std::min(kPositions, num_words - round * kPositions));
        int64_t sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
        for (int32_t i = 0; i < count; ++i) {
            const int32_t word = from[i];
            sum += word;
            weighted += word * (i + 1);
        }
        all += static_cast<uint64_t>(sum);
        all_weighted += static_cast<uint64_t>(weighted);
    }
    sums[0] = static_cast<int64_t>(all);
    sums[1] = static_cast<int64_t>(all_weighted);
}

}  // namespace

void bit_sums(const void* data, int64_t num_words, int word_bytes, int num_threads, int64_t* sums) {
    const auto threads =
        static_cast<int>(std::clamp<int64_t>(num_words / kWordsPerThread, 1, std::max(num_threads, 1)));
    if (word_bytes == 2) {
        sum_words(static_cast<const int16_t*>(data), num_words, threads, sums);
    } else {
        sum_words(static_cast<const uint8_t*>(data), num_words, threads, sums);
    }
}

}  // namespace hybridep
