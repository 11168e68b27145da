// SPDX-License-Identifier: Apache-2.0
//
// Blockwise quantisation and packet headers on CUDA devices.  hybridep_codecs.h says what each function computes;
// ds_hybridep/codecs/ draws the layouts.
//
// A warp takes pieces of kSegments * 128 elements of a tensor: lane l holds elements s * 128 + 4 l .. + 3 of segment
// s, in one vector of 16 bytes.  Sums by halving add the upper half of a block to the lower half repeatedly.  The
// upper half is first in other segments, then in other lanes, then in the other half of a vector.

#include "hybridep_codecs.h"

#include "hybridep_cuda_codecs.h"

namespace hybridep {
namespace {

// --- Blockwise ------------------------------------------------------------------------------------------------------

// What a pass over the tensors is for.
enum class Pass {
    kTry,     // all tensors as if they were good; sets flags
    kProbe,   // sets flags only
    kAll,     // all tensors; flags are known
    kFlagged  // only tensors with flags
};

struct Blocks {
    int bits;
    int block;
    int lanes;  // number of lanes that hold a block, or one segment of it
};

// Writes the codes of the tensor's 4 elements from `at` on.  Codes of elements past `length` are not written.
__device__ __forceinline__ void store_codes(uint8_t* codes, int64_t at, int64_t length, int bits,
                                            const uint32_t (&code)[kVector]) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) word |= (at + j < length ? code[j] : 0) << (j * bits);
    uint8_t* to = codes + at * bits / 8;
    if (bits == 8 && at + 4 <= length && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
        *reinterpret_cast<uint32_t*>(to) = word;
    } else if (bits >= 4 && at + 4 <= length) {
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word);
        if (bits == 8) *reinterpret_cast<uint16_t*>(to + 2) = static_cast<uint16_t>(word >> 16);
    } else {
        for (int64_t element = at; element < length && element < at + 4; element += 8 / bits) {
            *to++ = static_cast<uint8_t>(word);
            word >>= 8;
        }
    }
}

// The mean or largest magnitude of the block that has this lane's elements.  The block has `count` real elements.
template <int kSegments>
__device__ __forceinline__ float size_of_block(const float (&values)[kSegments][kVector], Blocks blocks, float count) {
    if (blocks.bits >= 4) {
        uint32_t largest = 0;
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
#pragma unroll
            for (int j = 0; j < kVector; ++j) largest = max(largest, magnitude_bits(values[s][j]));
        }
        for (int bits = blocks.lanes / 2; bits > 0; bits /= 2) {
            largest = max(largest, __shfl_xor_sync(kAllLanes, largest, bits));
        }
        return std::bit_cast<float>(largest);
    }
    float sums[kSegments][kVector];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) sums[s][j] = fabsf(values[s][j]);
    }
#pragma unroll
    for (int half = kSegments / 2; half > 0; half /= 2) {
#pragma unroll
        for (int s = 0; s < half; ++s) {
#pragma unroll
            for (int j = 0; j < kVector; ++j) sums[s][j] += sums[s + half][j];
        }
    }
    for (int bits = blocks.lanes / 2; bits > 0; bits /= 2) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) sums[0][j] += __shfl_xor_sync(kAllLanes, sums[0][j], bits);
    }
    return ((sums[0][0] + sums[0][2]) + (sums[0][1] + sums[0][3])) / count;
}

// A warp per piece, grid-stride.  With this many blocks at a time on a multiprocessor, no register spills.
template <int kSegments>
inline constexpr int kBlocksAtATime = kSegments == 1 ? 4 : kSegments == 2 ? 3 : 2;

template <int kSegments, bool kIsAligned>
__global__ void __launch_bounds__(kCodecBlock, kBlocksAtATime<kSegments>)
    encode_blocks(Input input, Blocks blocks, Payloads payloads, Pass pass, uint32_t* __restrict__ flags) {
    constexpr int kPiece = kSegments * kSegment;
    const int64_t length = input.length, num_pieces = ceil_div(length, kPiece);
    const int64_t num_blocks = ceil_div(length, blocks.block);
    for (int64_t task = global_warp(); task < input.n * num_pieces; task += num_threads() / kLanes) {
        const int64_t tensor = task / num_pieces, begin = task % num_pieces * kPiece;
        const bool is_known = pass == Pass::kAll || pass == Pass::kFlagged;
        const uint32_t flag = is_known ? flags[tensor] : 0;
        if (pass == Pass::kFlagged && flag == 0) continue;

        // 1. The values to encode: zeros if the tensor is bad.
        const float* a = input.a + tensor * length;
        float* other = input.other + tensor * length;
        float values[kSegments][kVector], others[kSegments][kVector];
        uint32_t largest = 0;
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
            const int64_t at = begin + s * kSegment + lane_idx() * kVector;
            load4<kIsAligned>(a, at, length, values[s]);
            if (input.source != Source::kEncode) load4<kIsAligned>(other, at, length, others[s]);
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                const float value = encoded(input.source, values[s][j], others[s][j]);
                largest = max(largest, magnitude_bits(value));
                values[s][j] = (flag & kBad) != 0 ? 0.0f : value;
            }
        }

        // 2. The scale of the block that this lane is in.
        const int64_t block_idx = (begin + lane_idx() / blocks.lanes * blocks.block) / blocks.block;
        const int64_t left = length - block_idx * blocks.block;
        const auto count = static_cast<float>(left < blocks.block ? left : blocks.block);
        const uint16_t scale = scale_from(size_of_block<kSegments>(values, blocks, count), blocks.bits);
        if (!is_known) {
            const bool is_bad = largest >= kInfinity, is_overflow = left > 0 && !is_scale_finite(scale);
            if (is_bad || is_overflow) atomicOr(flags + tensor, (is_bad ? kBad : 0) | (is_overflow ? kOverflow : 0));
            if (pass == Pass::kProbe) continue;
        }

        // 3. Payload, and the mirror or the residual.
        // A tensor that only overflowed has its packet already.  Its mirror has changed, so codes would differ now.
        const bool is_written = pass != Pass::kFlagged || (flag & kBad) != 0;
        uint8_t* payload = payloads.data + tensor * payloads.stride;
        uint8_t* codes = payload + 2 * num_blocks;
        if (is_written && left > 0 && lane_idx() % blocks.lanes == 0)
            reinterpret_cast<uint16_t*>(payload)[block_idx] = scale;
        const float s_divisor = divisor(scale), s_value = scale_value(scale);
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
            const int64_t at = begin + s * kSegment + lane_idx() * kVector;
            uint32_t code[kVector];
#pragma unroll
            for (int j = 0; j < kVector; ++j) code[j] = code_of(values[s][j], s_divisor, blocks.bits);
            if (is_written) store_codes(codes, at, length, blocks.bits, code);
            if (input.source == Source::kEncode || (flag != 0 && input.source == Source::kResidual)) continue;
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                const float decoded = value_of(code[j], s_value, blocks.bits);
                others[s][j] = input.source == Source::kUpdate ? others[s][j] + decoded : values[s][j] - decoded;
                if (flag != 0) others[s][j] = std::bit_cast<float>(kNan);
            }
            store4<kIsAligned>(other, at, length, others[s]);
        }
        const int64_t used = 2 * num_blocks + ceil_div(length * blocks.bits, 8);
        if (begin == 0) {
            for (int64_t byte = used + lane_idx(); byte < payloads.bytes; byte += kLanes) payload[byte] = 0;
        }
    }
}

// Calls body(kernel, number of segments) with the kernel for blocks of `block` elements.
template <bool kIsAligned, typename Body>
void with_segments(int64_t block, Body&& body) {
    switch (block) {
        case 256:
            return body(encode_blocks<2, kIsAligned>, 2);
        case 512:
            return body(encode_blocks<4, kIsAligned>, 4);
        case 1024:
            return body(encode_blocks<8, kIsAligned>, 8);
        default:
            return body(encode_blocks<1, kIsAligned>, 1);
    }
}

// The element at `at` of a payload's codes.
__device__ __forceinline__ uint32_t read_code(const uint8_t* codes, int64_t at, int bits) {
    return codes[at * bits / 8] >> (at * bits % 8) & ((1u << bits) - 1);
}

// A thread per 4 elements, grid-stride.
template <bool kIsAligned>
__global__ void __launch_bounds__(kCodecBlock) decode_blocks(Payloads payloads, int64_t n, int64_t length, int bits,
                                                             int64_t block, bool is_add, float* __restrict__ out) {
    const int64_t num_vectors = ceil_div(length, kVector), num_blocks = ceil_div(length, block);
    for (int64_t task = global_thread(); task < n * num_vectors; task += num_threads()) {
        const int64_t tensor = task / num_vectors, at = task % num_vectors * kVector;
        const uint8_t* payload = payloads.data + tensor * payloads.stride;
        const uint8_t* codes = payload + 2 * num_blocks;
        const float scale = scale_value(reinterpret_cast<const uint16_t*>(payload)[at / block]);
        uint32_t word = 0;
        const uint8_t* from = codes + at * bits / 8;
        if (bits == 8 && at + 4 <= length) {
            word = *reinterpret_cast<const uint16_t*>(from) |
                   static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(from + 2)) << 16;
        } else if (bits == 4 && at + 4 <= length) {
            word = *reinterpret_cast<const uint16_t*>(from);
        } else {
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                if (at + j < length) word |= read_code(codes, at + j, bits) << (j * bits);
            }
        }
        float values[kVector];
        float* to = out + tensor * length;
        if (is_add) load4<kIsAligned>(to, at, length, values);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            const float value = value_of(word >> (j * bits) & ((1u << bits) - 1), scale, bits);
            values[j] = is_add ? values[j] + value : value;
        }
        store4<kIsAligned>(to, at, length, values);
    }
}

}  // namespace

int64_t flags_scratch_bytes(int64_t n) { return n * static_cast<int64_t>(sizeof(uint32_t)); }

void blockwise_encode(const Input& input, int bits, int64_t block, const Workspace& work, const Payloads& payloads,
                      uint8_t* is_bad) {
    require_even(payloads);
    const Stream stream = work.stream;
    auto* flags = static_cast<uint32_t*>(work.scratch);
    const Blocks blocks{bits, static_cast<int>(block), static_cast<int>(std::min<int64_t>(block / kVector, kLanes))};
    fill_bytes(flags, 0, flags_scratch_bytes(input.n), stream);
    const auto run = [&](auto* kernel, int num_segments) {
        const int64_t num_pieces = ceil_div(input.length, num_segments * kSegment);
        const int64_t grid = std::min(blocks_for(input.n * num_pieces * kLanes, kCodecBlock), kMaxGrid);
        const auto pass = [&](Pass which, int64_t of_blocks) {
            launch({.grid = of_blocks, .block = kCodecBlock, .stream = stream}, kernel, input, blocks, payloads, which,
                   flags);
        };
        // A residual must stay as it is if its packet is lost, so lost packets are found first.  A mirror becomes nan
        // then, so all mirrors are written at once, and tensors with flags a second time.
        if (input.source == Source::kResidual) {
            pass(Pass::kProbe, grid);
            pass(Pass::kAll, grid);
        } else {
            pass(Pass::kTry, grid);
            pass(Pass::kFlagged, std::min(grid, kRepairGrid));
        }
    };
    if (has_vectors(input.length, input.a, input.other)) {
        with_segments<true>(block, run);
    } else {
        with_segments<false>(block, run);
    }
    finish(flags, input.n, stream, is_bad);
}

void blockwise_decode(const Payloads& payloads, int64_t n, int64_t length, int bits, int64_t block, bool is_add,
                      Stream stream, float* out) {
    require_even(payloads);
    const int64_t grid = std::min(blocks_for(n * ceil_div(length, kVector), kCodecBlock), kMaxGrid);
    auto* kernel = has_vectors(length, out, nullptr) ? decode_blocks<true> : decode_blocks<false>;
    launch({.grid = grid, .block = kCodecBlock, .stream = stream}, kernel, payloads, n, length, bits, block, is_add,
           out);
}

// --- What other codecs need -----------------------------------------------------------------------------------------

namespace {

// A thread per element, grid-stride.
__global__ void prepare_elements(Input input, float* __restrict__ x, uint32_t* __restrict__ flags) {
    for (int64_t i = global_thread(); i < input.n * input.length; i += num_threads()) {
        const float value = encoded(input.source, input.a[i], input.other == nullptr ? 0.0f : input.other[i]);
        x[i] = value;
        if (magnitude_bits(value) >= kInfinity) atomicOr(flags + i / input.length, kBad);
    }
}

__global__ void clear_flagged(int64_t n, int64_t length, const uint32_t* __restrict__ flags, float* __restrict__ x) {
    for (int64_t i = global_thread(); i < n * length; i += num_threads()) {
        if (flags[i / length] != 0) x[i] = 0.0f;
    }
}

struct Words {
    uint32_t values[4];
};

// A thread per packet.  Packets may begin at any byte.
__global__ void put_headers(Payloads packets, int64_t n, Words words, const uint8_t* __restrict__ is_bad) {
    const int64_t tensor = global_thread();
    if (tensor >= n) return;
    uint8_t* packet = packets.data + tensor * packets.stride;
    for (int byte = 0; byte < 16; ++byte) {
        packet[byte] = byte == 3 ? is_bad[tensor] : static_cast<uint8_t>(words.values[byte / 4] >> (8 * (byte % 4)));
    }
}

// A thread per packet, likewise.
__global__ void look_at_headers(Payloads packets, int64_t n, uint32_t start, uint32_t stamp) {
    const int64_t tensor = global_thread();
    if (tensor >= n) return;
    const uint8_t* packet = packets.data + tensor * packets.stride;
    uint32_t found_start = 0, found_stamp = 0;
    for (int byte = 0; byte < 3; ++byte) found_start |= static_cast<uint32_t>(packet[byte]) << (8 * byte);
    for (int byte = 0; byte < 4; ++byte) found_stamp |= static_cast<uint32_t>(packet[12 + byte]) << (8 * byte);
    if (found_start != start || found_stamp != stamp) fail_packet(found_start, found_stamp, start, stamp);
}

}  // namespace

void prepare(const Input& input, const Workspace& work, float* x, uint8_t* is_bad) {
    const Stream stream = work.stream;
    auto* flags = static_cast<uint32_t*>(work.scratch);
    const int64_t grid = std::min(blocks_for(input.n * input.length, kCodecBlock), kMaxGrid);
    fill_bytes(flags, 0, flags_scratch_bytes(input.n), stream);
    launch({.grid = grid, .block = kCodecBlock, .stream = stream}, prepare_elements, input, x, flags);
    launch({.grid = std::min(grid, kRepairGrid), .block = kCodecBlock, .stream = stream}, clear_flagged, input.n,
           input.length, flags, x);
    finish(flags, input.n, stream, is_bad);
}

void write_headers(const Payloads& packets, int64_t n, const uint32_t* words, const uint8_t* is_bad, Stream stream) {
    launch({.grid = blocks_for(n, kCodecBlock), .block = kCodecBlock, .stream = stream}, put_headers, packets, n,
           Words{{words[0], words[1], words[2], words[3]}}, is_bad);
}

void check_headers(const Payloads& packets, int64_t n, uint32_t start, uint32_t stamp, Stream stream) {
    launch({.grid = blocks_for(n, kCodecBlock), .block = kCodecBlock, .stream = stream}, look_at_headers, packets, n,
           start, stamp);
}

}  // namespace hybridep
