// SPDX-License-Identifier: Apache-2.0
//
// Sums of bits on CUDA devices.  hybridep_rows.h says what is computed.

#include "hybridep_cuda.h"
#include "hybridep_rows.h"

namespace hybridep {
namespace {

constexpr int kSumBlock = 256;
constexpr int64_t kSumGrid = 1024;

// A thread per word, grid-stride; sums of integers do not depend on their order.
template <typename Word>
__global__ void __launch_bounds__(kSumBlock)
    sum_words(const Word* __restrict__ words, int64_t num_words, unsigned long long* __restrict__ sums) {
    unsigned long long sum = 0, weighted = 0;
    for (int64_t i = global_thread(); i < num_words; i += num_threads()) {
        const auto word = static_cast<unsigned long long>(static_cast<int64_t>(words[i]));
        sum += word;
        weighted += word * static_cast<unsigned long long>(i % kPositions + 1);
    }
    sum = warp_sum(sum);
    weighted = warp_sum(weighted);
    if (lane_idx() == 0) {
        atomicAdd(sums, sum);
        atomicAdd(sums + 1, weighted);
    }
}

}  // namespace

void bit_sums(const void* data, int64_t num_words, int word_bytes, Stream stream, int64_t* sums) {
    fill_bytes(sums, 0, 2 * sizeof(int64_t), stream);
    const int64_t grid = std::min(blocks_for(num_words, kSumBlock), kSumGrid);
    auto* to = reinterpret_cast<unsigned long long*>(sums);
    if (word_bytes == 2) {
        launch({.grid = grid, .block = kSumBlock, .stream = stream}, sum_words<int16_t>,
               static_cast<const int16_t*>(data), num_words, to);
    } else {
        launch({.grid = grid, .block = kSumBlock, .stream = stream}, sum_words<uint8_t>,
               static_cast<const uint8_t*>(data), num_words, to);
    }
}

}  // namespace hybridep
