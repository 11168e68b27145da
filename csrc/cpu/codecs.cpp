// SPDX-License-Identifier: Apache-2.0
//
// Blockwise quantisation and packet headers on the CPU: plain loops over blocks, split over OpenMP threads by tensor
// and by chunks of blocks.  hybridep_codecs.h says what each function computes; ds_hybridep/codecs/ draws the layouts.

#include <algorithm>
#include <cstring>
#include <vector>

#include "hybridep_blocks.h"
#include "hybridep_codecs.h"

namespace hybridep {

void prepare(const Input& input, int num_threads, float* x, uint8_t* is_bad) {
    const int64_t num_blocks = ceil_div(input.length, kMaxBlock);
    std::fill(is_bad, is_bad + input.n, uint8_t{0});
#pragma omp parallel for collapse(2) num_threads(threads_for(input.n * input.length, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t begin = tensor * input.length + block * kMaxBlock;
            const int64_t count = std::min(kMaxBlock, input.length - block * kMaxBlock);
            load(input, begin, count, count, false, x + begin);
            if (largest_magnitude_bits(x + begin, count) >= kInfinity) {
#pragma omp atomic write
                is_bad[tensor] = 1;
            }
        }
    }
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        if (is_bad[tensor]) std::fill(x + tensor * input.length, x + (tensor + 1) * input.length, 0.0f);
    }
}

void blockwise_encode(const Input& input, int bits, int64_t block, int num_threads, const Payloads& payloads,
                      uint8_t* is_bad) {
    const int64_t num_blocks = ceil_div(input.length, block);
    const int64_t num_chunks = ceil_div(num_blocks, kBlocksPerChunk);
    const int threads = threads_for(input.n * input.length, num_threads);

    // 1. A bad tensor is written as zeros and must not change a residual, so it is found before anything is written.
    find_bad(input, block, threads, is_bad);

    // 2. Scales; they tell which tensors overflow.
    std::vector<uint8_t> is_overflow(static_cast<size_t>(input.n), 0);
    uint8_t* overflow = is_overflow.data();
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            alignas(64) float values[kMaxBlock];
            uint8_t* payload = payloads.data + tensor * payloads.stride;
            const int64_t end = std::min(num_blocks, (chunk + 1) * kBlocksPerChunk);
            for (int64_t idx = chunk * kBlocksPerChunk; idx < end; ++idx) {
                const int64_t count = std::min(block, input.length - idx * block);
                load(input, tensor * input.length + idx * block, count, block, is_bad[tensor] != 0, values);
                const uint16_t scale = scale_of(values, count, block, bits);
                store16(payload + 2 * idx, scale);
                if (!is_scale_finite(scale)) {
#pragma omp atomic write
                    overflow[tensor] = 1;
                }
            }
        }
    }

    // 3. Codes, and the new mirror or residual.
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            alignas(64) float values[kMaxBlock];
            alignas(64) float decoded[kMaxBlock];
            alignas(64) uint8_t codes[kMaxBlock];
            uint8_t* payload = payloads.data + tensor * payloads.stride;
            const bool is_lost = is_bad[tensor] || overflow[tensor];
            const int64_t end = std::min(num_blocks, (chunk + 1) * kBlocksPerChunk);
            for (int64_t idx = chunk * kBlocksPerChunk; idx < end; ++idx) {
                const int64_t count = std::min(block, input.length - idx * block);
                const int64_t begin = tensor * input.length + idx * block;
                load(input, begin, count, block, is_bad[tensor] != 0, values);
                const uint16_t scale = load16(payload + 2 * idx);
                make_codes(values, block, bits, scale, codes);
                std::fill(codes + count, codes + block, uint8_t{0});
                pack_codes(codes, count, bits, payload + 2 * num_blocks + idx * block * bits / 8);
                if (input.source == Source::kEncode || is_lost) continue;
                make_values(codes, block, bits, scale, decoded);
                float* other = input.other + begin;
                if (input.source == Source::kUpdate) {
#pragma omp simd
                    for (int64_t i = 0; i < count; ++i) other[i] += decoded[i];
                } else {
#pragma omp simd
                    for (int64_t i = 0; i < count; ++i) other[i] = values[i] - decoded[i];
                }
            }
        }
    }
    const int64_t used = 2 * num_blocks + ceil_div(input.length * bits, 8);
    for (int64_t tensor = 0; tensor < input.n; ++tensor) {
        std::memset(payloads.data + tensor * payloads.stride + used, 0, static_cast<size_t>(payloads.bytes - used));
        is_bad[tensor] |= overflow[tensor];
    }
    finish_bad(input, is_bad);
}

void blockwise_decode(const Payloads& payloads, int64_t n, int64_t length, int bits, int64_t block, bool is_add,
                      int num_threads, float* out) {
    const int64_t num_blocks = ceil_div(length, block);
    const int64_t num_chunks = ceil_div(num_blocks, kBlocksPerChunk);
#pragma omp parallel for collapse(2) num_threads(threads_for(n * length, num_threads)) schedule(static)
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            alignas(64) float values[kMaxBlock];
            alignas(64) uint8_t codes[kMaxBlock];
            const uint8_t* payload = payloads.data + tensor * payloads.stride;
            const int64_t end = std::min(num_blocks, (chunk + 1) * kBlocksPerChunk);
            for (int64_t idx = chunk * kBlocksPerChunk; idx < end; ++idx) {
                const int64_t count = std::min(block, length - idx * block);
                unpack_codes(payload + 2 * num_blocks + idx * block * bits / 8, count, bits, codes);
                make_values(codes, count, bits, load16(payload + 2 * idx), values);
                float* to = out + tensor * length + idx * block;
                if (is_add) {
#pragma omp simd
                    for (int64_t i = 0; i < count; ++i) to[i] += values[i];
                } else {
                    std::memcpy(to, values, static_cast<size_t>(count) * sizeof(float));
                }
            }
        }
    }
}

// --- Headers --------------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kHeaderBytes = 16, kFlagByte = 3;

}  // namespace

void write_headers(const Payloads& packets, int64_t n, const uint32_t* words, const uint8_t* is_bad) {
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        uint8_t* packet = packets.data + tensor * packets.stride;
        std::memcpy(packet, words, kHeaderBytes);
        packet[kFlagByte] = is_bad[tensor];
    }
}

int check_headers(const Payloads& packets, int64_t n, uint32_t start, uint32_t stamp) {
    uint8_t flags = 0;
    for (int64_t tensor = 0; tensor < n; ++tensor) {
        const uint8_t* packet = packets.data + tensor * packets.stride;
        uint32_t words[kHeaderBytes / 4];
        std::memcpy(words, packet, kHeaderBytes);
        if ((words[0] & 0xffffffu) != start || words[3] != stamp) return -1;
        flags |= packet[kFlagByte];
    }
    return flags;
}

}  // namespace hybridep
