// SPDX-License-Identifier: Apache-2.0
//
// Top-k on CUDA devices.  What each function computes is told in hybridep_codecs.h; the layout is drawn in
// ds_hybridep/codecs/top_k.py.

#include "hybridep_cuda_codecs.h"

namespace hybridep {
namespace {

constexpr int kRun = 256;  // kept values that share a scale, and threads that encode them
constexpr float kLow = 0.75f, kHigh = 1.5f, kBetween = 1.125f;

// Sizes that follow from length, block, k and value_bits.
struct Kept {
    int64_t length;
    int64_t num_blocks;
    int64_t count;      // kept elements of one tensor
    int64_t num_heads;  // scales, or values in bf16
    int64_t code_bytes;
    int block;
    int k;
    int value_bits;  // inside a code; 0 where values stand in front
    int code_bits;
};

Kept kept_of(int64_t length, int64_t block, int64_t k, int value_bits) {
    Kept kept{};
    kept.length = length;
    kept.num_blocks = ceil_div(length, block);
    kept.count = kept.num_blocks * k;
    kept.num_heads = value_bits == 16 ? kept.count : ceil_div(kept.count, kRun);
    kept.block = static_cast<int>(block);
    kept.k = static_cast<int>(k);
    kept.value_bits = value_bits == 16 ? 0 : value_bits;
    kept.code_bits = std::countr_zero(static_cast<uint64_t>(block)) + kept.value_bits;
    kept.code_bytes = ceil_div(kept.count * kept.code_bits, 8);
    return kept;
}

// --- 1. The kept elements of every block ----------------------------------------------------------------------------

// Number of keys in the warp that are `lowest` or more.
template <int kSegments>
__device__ __forceinline__ unsigned count_from(const uint32_t (&keys)[kSegments][kVector], uint32_t lowest) {
    unsigned count = 0;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) count += keys[s][j] >= lowest;
    }
    return __reduce_add_sync(kAllLanes, count);
}

// The k-th largest key of the warp, found bit by bit from the highest.
template <int kSegments>
__device__ __forceinline__ uint32_t threshold(const uint32_t (&keys)[kSegments][kVector], unsigned k) {
    uint32_t found = 0;
    for (int bit = 30; bit >= 0; --bit) {
        const uint32_t next = found | 1u << bit;
        const unsigned count = count_from<kSegments>(keys, next);
        if (count >= k) found = next;
        if (count == k) break;
    }
    return found;
}

// How many of a segment's elements before element j of this lane are marked, and how many in all.
struct Places {
    int before[kVector];
    int total;
};

__device__ __forceinline__ Places places_of(const bool (&is_marked)[kVector]) {
    Places places{};
    const unsigned lower_lanes = (1u << lane_idx()) - 1;
    int of_lower_lanes = 0, own = 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
        const unsigned lanes = __ballot_sync(kAllLanes, is_marked[j]);
        of_lower_lanes += __popc(lanes & lower_lanes);
        places.total += __popc(lanes);
        places.before[j] = own;
        own += is_marked[j];
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) places.before[j] += of_lower_lanes;
    return places;
}

// A warp per block.  index and value [n, kept.count] are in ascending order of index within a block; of equal
// magnitudes the first are taken.
template <int kSegments, bool kIsAligned>
__global__ void __launch_bounds__(kCodecBlock)
    choose_largest(Input input, Kept kept, uint16_t* __restrict__ index, float* __restrict__ value,
                   uint32_t* __restrict__ flags) {
    for (int64_t task = global_warp(); task < input.n * kept.num_blocks; task += num_threads() / kLanes) {
        const int64_t tensor = task / kept.num_blocks, block = task % kept.num_blocks;
        const int64_t begin = block * kept.block;
        const float* a = input.a + tensor * kept.length;
        const float* other = input.other + tensor * kept.length;

        // Keys are magnitudes plus 1, and 0 for what is not of this block.  All nans count as infinity: the largest one,
        // 0x7fffffff, which GPUs make, plus 1 would be beyond the bits that are searched.
        float values[kSegments][kVector];
        uint32_t keys[kSegments][kVector];
        uint32_t largest = 0;
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
            const int offset = s * kSegment + lane_idx() * kVector;
            float others[kVector];
            load4<kIsAligned>(a, begin + offset, kept.length, values[s]);
            if (input.source != Source::kEncode) load4<kIsAligned>(other, begin + offset, kept.length, others);
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                values[s][j] = encoded(input.source, values[s][j], others[j]);
                const uint32_t bits = offset + j < kept.block ? min(magnitude_bits(values[s][j]), kInfinity) : 0;
                largest = max(largest, bits);
                keys[s][j] = offset + j < kept.block ? bits + 1 : 0;
            }
        }
        if (largest >= kInfinity) atomicOr(flags + tensor, kBad);

        const uint32_t lowest = threshold<kSegments>(keys, static_cast<unsigned>(kept.k));
        const int num_equal_wanted = kept.k - static_cast<int>(count_from<kSegments>(keys, lowest + 1));
        const int64_t first = tensor * kept.count + block * kept.k;
        int num_equal = 0, num_chosen = 0;
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
            bool is_equal[kVector], is_chosen[kVector];
#pragma unroll
            for (int j = 0; j < kVector; ++j) is_equal[j] = keys[s][j] == lowest;
            const Places equals = places_of(is_equal);
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                is_chosen[j] = keys[s][j] > lowest || (is_equal[j] && num_equal + equals.before[j] < num_equal_wanted);
            }
            const Places chosen = places_of(is_chosen);
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                if (!is_chosen[j]) continue;
                const int64_t place = first + num_chosen + chosen.before[j];
                index[place] = static_cast<uint16_t>(s * kSegment + lane_idx() * kVector + j);
                value[place] = values[s][j];
            }
            num_equal += equals.total;
            num_chosen += chosen.total;
        }
    }
}

// --- 2. Payloads ----------------------------------------------------------------------------------------------------

// A block of threads per run of 256 kept elements, one thread each: their codes fill whole bytes.
__global__ void __launch_bounds__(kRun)
    encode_runs(Kept kept, const uint16_t* __restrict__ index, const float* __restrict__ value, Payloads payloads,
                uint32_t* __restrict__ flags) {
    __shared__ float sizes[kRun];
    __shared__ uint16_t codes[kRun];
    const int64_t num_runs = ceil_div(kept.count, kRun);
    const int64_t tensor = blockIdx.x / num_runs, run = blockIdx.x % num_runs;
    const int64_t at = run * kRun + threadIdx.x;
    const int64_t left = kept.count - run * kRun;
    const int count = static_cast<int>(left < kRun ? left : kRun);
    const bool is_there = at < kept.count;
    const bool is_bad = (flags[tensor] & kBad) != 0;  // then it is written as zeros, of which the first are kept
    uint8_t* payload = payloads.data + tensor * payloads.stride;
    auto* heads = reinterpret_cast<uint16_t*>(payload);
    const float x = !is_there || is_bad ? 0.0f : value[tensor * kept.count + at];
    uint32_t code = !is_there ? 0 : is_bad ? static_cast<uint32_t>(at % kept.k) : index[tensor * kept.count + at];

    if (kept.value_bits == 0) {
        const uint16_t rounded = round_value(x);
        if (is_there) heads[at] = rounded;
        if (!is_scale_finite(rounded)) atomicOr(flags + tensor, kOverflow);
    } else {
        sizes[threadIdx.x] = fabsf(x);
        __syncthreads();
        for (int half = kRun / 2; half > 0; half /= 2) {
            if (static_cast<int>(threadIdx.x) < half) {
                const float upper = sizes[threadIdx.x + half];
                sizes[threadIdx.x] =
                    kept.value_bits == 4 ? fmaxf(sizes[threadIdx.x], upper) : sizes[threadIdx.x] + upper;
            }
            __syncthreads();
        }
        const float size = kept.value_bits == 4 ? sizes[0] : sizes[0] / static_cast<float>(count);
        const uint16_t scale =
            scale_from(size, kept.value_bits == 2 ? 1 : kept.value_bits);  // 2 bits: the mean itself
        if (threadIdx.x == 0) {
            heads[run] = scale;
            if (!is_scale_finite(scale)) atomicOr(flags + tensor, kOverflow);
        }
        uint32_t value_code;
        if (kept.value_bits == 2) {
            value_code = (x >= 0.0f) << 1 | (fabsf(x) > kBetween * scale_value(scale));
        } else {
            value_code = code_of(x, divisor(scale), kept.value_bits);
        }
        code = code << kept.value_bits | value_code;
    }
    codes[threadIdx.x] = static_cast<uint16_t>(code);
    __syncthreads();

    uint8_t* stream = payload + 2 * kept.num_heads + run * (kRun / 8) * kept.code_bits;
    const int num_bytes = (count * kept.code_bits + 7) / 8;
    for (int byte = static_cast<int>(threadIdx.x); byte < num_bytes; byte += kRun) {
        uint32_t bits = 0;
        for (int i = 8 * byte / kept.code_bits; i < count && i * kept.code_bits < 8 * byte + 8; ++i) {
            const int shift = i * kept.code_bits - 8 * byte;
            bits |= shift >= 0 ? static_cast<uint32_t>(codes[i]) << shift : static_cast<uint32_t>(codes[i]) >> -shift;
        }
        stream[byte] = static_cast<uint8_t>(bits);
    }
    if (run == 0) {
        const int64_t used = 2 * kept.num_heads + kept.code_bytes;
        for (int64_t byte = used + threadIdx.x; byte < payloads.bytes; byte += kRun) payload[byte] = 0;
    }
}

// --- 3. Values of payloads, in place --------------------------------------------------------------------------------

enum class Apply {
    kAssign,    // out  = values
    kAdd,       // out += values, nan where the packet is lost
    kResidual,  // out  = a + out - values, as it was where the packet is lost
};

struct Element {
    int64_t position;
    float value;
};

__device__ __forceinline__ Element read_kept(const uint8_t* payload, const Kept& kept, int64_t at) {
    const auto* heads = reinterpret_cast<const uint16_t*>(payload);
    const uint8_t* codes = payload + 2 * kept.num_heads;
    const int64_t bit = at * kept.code_bits, byte = bit / 8;
    uint32_t window = 0;  // at most 14 bits from a start inside a byte: within three bytes
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        if (byte + i < kept.code_bytes) window |= static_cast<uint32_t>(codes[byte + i]) << (8 * i);
    }
    const uint32_t code = window >> (bit % 8) & ((1u << kept.code_bits) - 1);
    const int64_t position = at / kept.k * kept.block + (code >> kept.value_bits);
    if (kept.value_bits == 0) return {position, scale_value(heads[at])};
    const uint32_t value_code = code & ((1u << kept.value_bits) - 1);
    const float scale = scale_value(heads[at / kRun]);
    if (kept.value_bits != 2) return {position, value_of(value_code, scale, kept.value_bits)};
    const float magnitude = (value_code & 1) != 0 ? kHigh : kLow;
    return {position, (value_code >= 2 ? magnitude : -magnitude) * scale};
}

// A warp per block.  flags may be null.
template <bool kIsAligned>
__global__ void __launch_bounds__(kCodecBlock)
    apply_kept(Payloads payloads, Kept kept, Apply how, int64_t n, const uint32_t* __restrict__ flags,
               const float* __restrict__ a, float* __restrict__ out) {
    for (int64_t task = global_warp(); task < n * kept.num_blocks; task += num_threads() / kLanes) {
        const int64_t tensor = task / kept.num_blocks, block = task % kept.num_blocks;
        const bool is_lost = flags != nullptr && flags[tensor] != 0;
        if (is_lost && how == Apply::kResidual) continue;
        float* to = out + tensor * kept.length;
        if (is_lost || how != Apply::kAdd) {
            const int64_t begin = block * kept.block;
            const int64_t end = begin + kept.block < kept.length ? begin + kept.block : kept.length;
            for (int64_t at = begin + lane_idx() * kVector; at < end; at += kSegment) {
                float values[kVector] = {};
                if (how == Apply::kResidual) {
                    float own[kVector];
                    load4<kIsAligned>(a + tensor * kept.length, at, end, values);
                    load4<kIsAligned>(to, at, end, own);
#pragma unroll
                    for (int j = 0; j < kVector; ++j) values[j] = own[j] + values[j];
                }
#pragma unroll
                for (int j = 0; j < kVector; ++j) {
                    if (is_lost) values[j] = std::bit_cast<float>(kNan);
                }
                store4<kIsAligned>(to, at, end, values);
            }
            if (is_lost) continue;
            __syncwarp();  // what another lane has just written may be changed now
        }
        for (int64_t at = block * kept.k + lane_idx(); at < (block + 1) * kept.k; at += kLanes) {
            const Element element = read_kept(payloads.data + tensor * payloads.stride, kept, at);
            if (element.position >= kept.length) continue;
            const float before = to[element.position];
            to[element.position] = how == Apply::kAssign ? element.value
                                   : how == Apply::kAdd  ? before + element.value
                                                         : before - element.value;
        }
    }
}

void apply(const Payloads& payloads, const Kept& kept, Apply how, int64_t n, const uint32_t* flags, const float* a,
           Stream stream, float* out) {
    const int64_t grid = std::min(blocks_for(n * kept.num_blocks * kLanes, kCodecBlock), kMaxGrid);
    auto* kernel = has_vectors(kept.length, a, out) ? apply_kept<true> : apply_kept<false>;
    launch({.grid = grid, .block = kCodecBlock, .stream = stream}, kernel, payloads, kept, how, n, flags, a, out);
}

template <bool kIsAligned, typename Body>
void with_segments(int64_t block, Body&& body) {
    if (block > 512) return body(choose_largest<8, kIsAligned>);
    if (block > 256) return body(choose_largest<4, kIsAligned>);
    if (block > 128) return body(choose_largest<2, kIsAligned>);
    body(choose_largest<1, kIsAligned>);
}

}  // namespace

void top_k_encode(const Input& input, int64_t block, int64_t k, int value_bits, Stream stream,
                  const Payloads& payloads, uint8_t* is_bad) {
    require_even(payloads);
    const Kept kept = kept_of(input.length, block, k, value_bits);
    Scratch<uint32_t> flags(input.n, stream);
    Scratch<uint16_t> index(input.n * kept.count, stream);
    Scratch<float> value(input.n * kept.count, stream);
    fill_bytes(flags.get(), 0, input.n * sizeof(uint32_t), stream);
    const auto choose = [&](auto* kernel) {
        const int64_t grid = std::min(blocks_for(input.n * kept.num_blocks * kLanes, kCodecBlock), kMaxGrid);
        launch({.grid = grid, .block = kCodecBlock, .stream = stream}, kernel, input, kept, index.get(), value.get(),
               flags.get());
    };
    if (has_vectors(input.length, input.a, input.other)) {
        with_segments<true>(block, choose);
    } else {
        with_segments<false>(block, choose);
    }
    launch({.grid = input.n * ceil_div(kept.count, kRun), .block = kRun, .stream = stream}, encode_runs, kept,
           index.get(), value.get(), payloads, flags.get());
    if (input.source != Source::kEncode) {
        const Apply how = input.source == Source::kUpdate ? Apply::kAdd : Apply::kResidual;
        apply(payloads, kept, how, input.n, flags.get(), input.a, stream, input.other);
    }
    finish(flags.get(), input.n, stream, is_bad);
}

void top_k_decode(const Payloads& payloads, int64_t n, int64_t length, int64_t block, int64_t k, int value_bits,
                  bool is_add, Stream stream, float* out) {
    require_even(payloads);
    const Kept kept = kept_of(length, block, k, value_bits);
    apply(payloads, kept, is_add ? Apply::kAdd : Apply::kAssign, n, nullptr, nullptr, stream, out);
}

}  // namespace hybridep
