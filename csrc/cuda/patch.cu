// SPDX-License-Identifier: Apache-2.0
//
// Patches of 16-bit weights on CUDA devices.  hybridep_codecs.h says what each function computes;
// ds_hybridep/codecs/patch_format.py defines the layout.
//
// A warp takes a block of 4096 weights: all lanes make its masks, and one lane makes or reads its tokens with the same
// code as on the CPU.  Warps work on thousands of blocks at a time.  Each pass reads every block again:
//
//     encode   tops, counts of symbols, codes, lengths of blocks, places, and then the bytes
//     decode   places of segments, codes and places of blocks, and then the weights

#include "hybridep_codecs.h"
#include "hybridep_cuda.h"
#include "hybridep_patch.h"

namespace hybridep {
namespace {

using namespace patch;

constexpr int kPatchWarps = 4;
constexpr int kPatchBlock = kPatchWarps * kLanes;
constexpr int kTurns = 4;  // blocks of weights that a warp takes one after the other
constexpr int kGroups = kBlocksPerSegment / (kPatchWarps * kTurns);  // CUDA blocks to a segment
constexpr int kSampleBlock = 256;

int64_t segments_of(int64_t n) { return (n + kSegment - 1) / kSegment; }

// --- What encoding and decoding share -------------------------------------------------------------------------------

// Where this warp is: the segment of its CUDA block, and the blocks of weights that it takes there.
struct Place {
    int64_t segment;
    int64_t begin;   // weights before the segment
    int64_t length;  // weights in it
    int first;       // block of weights in the segment; the others follow

    __device__ explicit Place(int64_t n)
        : segment(blockIdx.x / kGroups),
          begin(segment * kSegment),
          length(segment_length(n, segment)),
          first((static_cast<int>(blockIdx.x) % kGroups * kPatchWarps + warp_idx()) * kTurns) {}

    __device__ int last() const {
        const int end = first + kTurns, num_blocks = blocks_of(length);
        return end < num_blocks ? end : num_blocks;
    }
};

// All lanes: makes the masks of a block; `changed` only if `values` is given.  Returns whether any has changed.
__device__ __forceinline__ bool make_masks(const uint16_t* values, const uint16_t* old, int count, int top,
                                           int mantissa_bits, Masks& masks) {
    auto* in_class = reinterpret_cast<uint32_t*>(masks.in_class);
    auto* changed = reinterpret_cast<uint32_t*>(masks.changed);
    unsigned any = 0;
    for (int word = 0; word < 2 * kWords; ++word) {
        const int i = word * kLanes + lane_idx();
        const bool is_weight = i < count;
        const uint16_t bits = is_weight ? old[i] : uint16_t{0};
        const int mine = class_of(bits, top, mantissa_bits);
        const unsigned weights = __ballot_sync(kAllLanes, is_weight);
        unsigned members = weights;
        for (int bit = 0; bit < 3; ++bit) {
            const unsigned plane = __ballot_sync(kAllLanes, mine >> bit & 1);
            members &= lane_idx() >> bit & 1 ? plane : ~plane;
        }
        if (lane_idx() < kClasses) in_class[lane_idx() * 2 * kWords + word] = members;
        if (values != nullptr) {
            const unsigned found = __ballot_sync(kAllLanes, is_weight && values[i] != bits);
            if (lane_idx() == 0) changed[word] = found;
            any |= found;
        }
    }
    __syncwarp();
    return any != 0;
}

// All lanes: adds what a block of weights adds to the checksum.
__device__ __forceinline__ void add_to_checksum(const uint16_t* weights, int count, int64_t block, int64_t* results) {
    uint32_t sum = 0;
    for (int i = lane_idx(); i < count; i += kLanes) {
        sum += weights[i] * check_factor(i);
    }
    sum = warp_sum(sum);
    // This adds to the low half of the result; the other half stays 0.
    if (lane_idx() == 0) atomicAdd(reinterpret_cast<uint32_t*>(results + 1), sum * check_factor_of_block(block));
}

// All lanes: copies `count` weights to or from bytes at any address.
__device__ __forceinline__ void copy_raw(const uint16_t* values, int64_t count, uint8_t* to) {
    for (int64_t i = lane_idx(); i < count; i += kLanes) {
        to[2 * i] = static_cast<uint8_t>(values[i]);
        to[2 * i + 1] = static_cast<uint8_t>(values[i] >> 8);
    }
}

__device__ __forceinline__ void copy_from_raw(const uint8_t* from, int64_t count, uint16_t* values) {
    for (int64_t i = lane_idx(); i < count; i += kLanes) {
        values[i] = static_cast<uint16_t>(from[2 * i] | from[2 * i + 1] << 8);
    }
}

__device__ __forceinline__ void put_bytes(uint8_t* to, uint32_t value, int num_bytes) {
    for (int byte = 0; byte < num_bytes; ++byte) to[byte] = static_cast<uint8_t>(value >> (8 * byte));
}

// --- Encoding -------------------------------------------------------------------------------------------------------

// What is known of each segment and block before bytes are written.
struct Plan {
    int32_t* tops;            // [segments]
    uint32_t* counts;         // [segments][kClasses][kSymbols]
    uint8_t* lengths;         // the same shape: bits of code words
    uint16_t* words;          // the same shape
    uint32_t* block_bytes;    // [segments][kBlocksPerSegment]
    uint32_t* block_begins;   // the same shape: counted from the begin of the segment's first block
    int64_t* segment_bytes;   // [segments]
    int64_t* segment_begins;  // [segments]: in the payload
};

Plan take_plan(Scratch& scratch, int64_t num_segments) {
    return {.tops = scratch.take<int32_t>(num_segments),
            .counts = scratch.take<uint32_t>(num_segments * kCodes),
            .lengths = scratch.take<uint8_t>(num_segments * kCodes),
            .words = scratch.take<uint16_t>(num_segments * kCodes),
            .block_bytes = scratch.take<uint32_t>(num_segments * kBlocksPerSegment),
            .block_begins = scratch.take<uint32_t>(num_segments * kBlocksPerSegment),
            .segment_bytes = scratch.take<int64_t>(num_segments),
            .segment_begins = scratch.take<int64_t>(num_segments)};
}

// A CUDA block per segment.
__global__ void __launch_bounds__(kSampleBlock)
    find_tops(const uint16_t* __restrict__ old, PatchShape shape, int32_t* __restrict__ tops) {
    __shared__ int reached[kExponents];
    __shared__ int sampled;
    const int64_t begin = blockIdx.x * kSegment, length = segment_length(shape.n, blockIdx.x);
    for (int i = static_cast<int>(threadIdx.x); i < kExponents; i += kSampleBlock) reached[i] = 0;
    if (threadIdx.x == 0) sampled = 0;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < blocks_of(length) * kSample; i += kSampleBlock) {
        const int64_t at = static_cast<int64_t>(i / kSample) * kBlock + i % kSample;
        if (at >= length) continue;
        atomicAdd(reached + ((old[begin + at] & 0x7fff) >> shape.mantissa_bits), 1);
        atomicAdd(&sampled, 1);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    int top = kExponents - 1, num_above = reached[top];
    while (num_above * kTopShare <= sampled) num_above += reached[--top];
    tops[blockIdx.x] = top;
}

// Functions of tokens are for host and device, because for_each_token is, and the compiler checks its calls for both.
struct CountToken {
    uint32_t* counts;
    HYBRIDEP_BOTH void operator()(const Token& token) const {
#if defined(__CUDA_ARCH__) || defined(HYBRIDEP_EMULATION)
        atomicAdd(counts + token.which, 1u);  // all warps of the block share the counts
#endif
    }
};

// Counts how often each symbol occurs in each class.
__global__ void __launch_bounds__(kPatchBlock)
    count_symbols(const uint16_t* __restrict__ values, const uint16_t* __restrict__ old, PatchShape shape, Plan plan) {
    __shared__ Masks masks[kPatchWarps];
    __shared__ uint32_t counts[kCodes];
    for (int i = static_cast<int>(threadIdx.x); i < kCodes; i += kPatchBlock) counts[i] = 0;
    __syncthreads();
    const Place place(shape.n);
    Masks& mine = masks[warp_idx()];
    for (int idx = place.first; idx < place.last(); ++idx) {
        const int64_t at = place.begin + static_cast<int64_t>(idx) * kBlock;
        const int count = block_length(place.length, idx);
        const bool is_changed =
            make_masks(values + at, old + at, count, plan.tops[place.segment], shape.mantissa_bits, mine);
        if (is_changed && lane_idx() == 0) for_each_token(mine, values + at, old + at, count, CountToken{counts});
        __syncwarp();
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kCodes; i += kPatchBlock) {
        if (counts[i] != 0) atomicAdd(plan.counts + place.segment * kCodes + i, counts[i]);
    }
}

// A warp per segment.  Each of its first kClasses lanes makes one code.
__global__ void __launch_bounds__(kLanes) make_codes(Plan plan) {
    if (lane_idx() >= kClasses) return;
    const int64_t first = blockIdx.x * static_cast<int64_t>(kCodes) + lane_idx() * kSymbols;
    code_lengths(plan.counts + first, plan.lengths + first);
    code_words(plan.lengths + first, plan.words + first);
}

struct MeasureToken {
    const uint8_t* lengths;
    uint32_t* num_bits;
    HYBRIDEP_BOTH void operator()(const Token& token) const {
        *num_bits += lengths[token.which] + uint32_t{token.num_bits};
    }
};

// Computes the bytes of each block.
__global__ void __launch_bounds__(kPatchBlock)
    measure_tokens(const uint16_t* __restrict__ values, const uint16_t* __restrict__ old, PatchShape shape,
                   Plan plan) {
    __shared__ Masks masks[kPatchWarps];
    const Place place(shape.n);
    Masks& mine = masks[warp_idx()];
    for (int idx = place.first; idx < place.last(); ++idx) {
        const int64_t at = place.begin + static_cast<int64_t>(idx) * kBlock;
        const int count = block_length(place.length, idx);
        const bool is_changed =
            make_masks(values + at, old + at, count, plan.tops[place.segment], shape.mantissa_bits, mine);
        if (lane_idx() == 0) {
            uint32_t num_bits = 0;
            const MeasureToken measure{plan.lengths + place.segment * kCodes, &num_bits};
            if (is_changed) for_each_token(mine, values + at, old + at, count, measure);
            const uint32_t bytes = (num_bits + 7) / 8, raw = static_cast<uint32_t>(2 * count);
            plan.block_bytes[place.segment * kBlocksPerSegment + idx] = bytes < raw ? bytes : raw;
        }
        __syncwarp();
    }
}

// A thread per segment: where its blocks begin, and how long it is.
__global__ void __launch_bounds__(kLanes) place_blocks(PatchShape shape, int64_t num_segments, Plan plan) {
    const int64_t segment = global_thread();
    if (segment >= num_segments) return;
    const int64_t length = segment_length(shape.n, segment);
    int64_t total = 0;
    for (int idx = 0; idx < blocks_of(length); ++idx) {
        plan.block_begins[segment * kBlocksPerSegment + idx] = static_cast<uint32_t>(total);
        total += plan.block_bytes[segment * kBlocksPerSegment + idx];
    }
    if (total > 0) {
        total += 2 + write_codes(plan.lengths + segment * kCodes, nullptr) + 2 * blocks_of(length);
        if (total > 2 * length) total = 1 + 2 * length;
    }
    plan.segment_bytes[segment] = total;
}

// One thread: where segments begin.
__global__ void place_segments(int64_t num_segments, Plan plan, uint8_t* __restrict__ payload,
                               int64_t* __restrict__ results) {
    int64_t at = kLengthBytes * num_segments;
    for (int64_t segment = 0; segment < num_segments; ++segment) {
        const int64_t bytes = plan.segment_bytes[segment];
        put_bytes(payload + kLengthBytes * segment, static_cast<uint32_t>(bytes), kLengthBytes);
        plan.segment_begins[segment] = at;
        at += bytes;
    }
    results[0] = at;
    results[1] = 0;
}

// Writes tokens, most significant bit first.
struct WriteToken {
    const uint8_t* lengths;
    const uint16_t* words;
    uint8_t** to;
    uint64_t* bits;
    int* filled;  // bits that were not written yet, below 8 between calls

    HYBRIDEP_BOTH void operator()(const Token& token) const {
        const int length = lengths[token.which];
        *bits = (*bits << length | words[token.which]) << token.num_bits | token.bits;
        for (*filled += length + token.num_bits; *filled >= 8; *filled -= 8) {
            *(*to)++ = static_cast<uint8_t>(*bits >> (*filled - 8));
        }
    }
};

__device__ __forceinline__ void write_tokens(const Masks& masks, const uint16_t* values, const uint16_t* old,
                                             int count, const uint8_t* lengths, const uint16_t* words, uint8_t* to) {
    uint64_t bits = 0;
    int filled = 0;
    for_each_token(masks, values, old, count, WriteToken{lengths, words, &to, &bits, &filled});
    if (filled > 0) *to = static_cast<uint8_t>(bits << (8 - filled));
}

// Writes the bytes of segments and the checksum, and sets sent = values.
__global__ void __launch_bounds__(kPatchBlock)
    write_patch(const uint16_t* __restrict__ values, uint16_t* __restrict__ sent, PatchShape shape, Plan plan,
                uint8_t* __restrict__ payload, int64_t* __restrict__ results) {
    __shared__ Masks masks[kPatchWarps];
    const Place place(shape.n);
    const int64_t segment = place.segment, bytes = plan.segment_bytes[segment];
    const bool is_raw = bytes > 2 * place.length;
    const uint8_t* lengths = plan.lengths + segment * kCodes;
    const uint16_t* words = plan.words + segment * kCodes;
    uint8_t* out = payload + plan.segment_begins[segment];
    uint8_t* block_lengths = out;
    if (bytes > 0 && !is_raw) {
        const bool is_first = place.first == 0 && lane_idx() == 0;
        block_lengths += 2 + write_codes(lengths, is_first ? out + 2 : nullptr);
        if (is_first) {
            out[0] = kCoded;
            out[1] = static_cast<uint8_t>(plan.tops[segment]);
        }
    } else if (is_raw && place.first == 0 && lane_idx() == 0) {
        out[0] = kRaw;
    }
    Masks& mine = masks[warp_idx()];
    for (int idx = place.first; idx < place.last(); ++idx) {
        const int64_t at = place.begin + static_cast<int64_t>(idx) * kBlock;
        const int count = block_length(place.length, idx);
        const int64_t which = segment * kBlocksPerSegment + idx;
        const auto block_bytes = static_cast<int>(plan.block_bytes[which]);
        add_to_checksum(values + at, count, which, results);
        if (is_raw) {
            copy_raw(values + at, count, out + 1 + 2 * static_cast<int64_t>(idx) * kBlock);
        } else if (bytes > 0) {
            if (lane_idx() == 0) put_bytes(block_lengths + 2 * idx, static_cast<uint32_t>(block_bytes), 2);
            uint8_t* to = block_lengths + 2 * blocks_of(place.length) + plan.block_begins[which];
            if (block_bytes == 2 * count) {
                copy_raw(values + at, count, to);
            } else if (block_bytes > 0) {
                make_masks(values + at, sent + at, count, plan.tops[segment], shape.mantissa_bits, mine);
                if (lane_idx() == 0) write_tokens(mine, values + at, sent + at, count, lengths, words, to);
            }
        }
        __syncwarp();  // the old values have been read
        for (int i = lane_idx(); block_bytes > 0 && i < count; i += kLanes) sent[at + i] = values[at + i];
        __syncwarp();
    }
}

}  // namespace

int64_t patch_encode_scratch_bytes(int64_t n) {
    Scratch scratch;
    take_plan(scratch, segments_of(n));
    return scratch.bytes();
}

void patch_encode(const uint16_t* values, uint16_t* sent, const PatchShape& shape, const Workspace& work,
                  uint8_t* payload, int64_t* results) {
    const Stream stream = work.stream;
    const int64_t num_segments = segments_of(shape.n);
    Scratch scratch(work.scratch);
    const Plan plan = take_plan(scratch, num_segments);
    fill_bytes(plan.counts, 0, num_segments * kCodes * static_cast<int64_t>(sizeof(uint32_t)), stream);
    const Launch by_warp{.grid = num_segments * kGroups, .block = kPatchBlock, .stream = stream};
    launch({.grid = num_segments, .block = kSampleBlock, .stream = stream}, find_tops, sent, shape, plan.tops);
    launch(by_warp, count_symbols, values, sent, shape, plan);
    launch({.grid = num_segments, .block = kLanes, .stream = stream}, make_codes, plan);
    launch(by_warp, measure_tokens, values, sent, shape, plan);
    launch({.grid = blocks_for(num_segments, kLanes), .block = kLanes, .stream = stream}, place_blocks, shape,
           num_segments, plan);
    launch({.grid = 1, .block = 1, .stream = stream}, place_segments, num_segments, plan, payload, results);
    launch(by_warp, write_patch, values, sent, shape, plan, payload, results);
}

// --- Decoding -------------------------------------------------------------------------------------------------------

namespace {

enum class Kind : uint8_t { kSkipped, kRaw, kCoded };  // skipped: unchanged, or damaged

struct Found {
    int64_t* segment_begins;  // [segments + 1]: in the payload
    Kind* kinds;              // [segments]
    int64_t* block_begins;    // [segments][kBlocksPerSegment + 1]: in the payload
    uint16_t* tables;         // [segments][kClasses][kCodeTable]
};

Found take_found(Scratch& scratch, int64_t num_segments) {
    return {.segment_begins = scratch.take<int64_t>(num_segments + 1),
            .kinds = scratch.take<Kind>(num_segments),
            .block_begins = scratch.take<int64_t>(num_segments * (kBlocksPerSegment + 1)),
            .tables = scratch.take<uint16_t>(num_segments * kClasses * kCodeTable)};
}

__device__ __forceinline__ void report(Damage damage, int64_t* results) {
    atomicMax(reinterpret_cast<unsigned long long*>(results), static_cast<unsigned long long>(damage));
}

// One thread.
__global__ void find_segments(const uint8_t* __restrict__ payload, int64_t bytes, int64_t num_segments, Found found,
                              int64_t* __restrict__ results) {
    int64_t at = kLengthBytes * num_segments;
    bool is_whole = at <= bytes;
    for (int64_t segment = 0; is_whole && segment < num_segments; ++segment) {
        found.segment_begins[segment] = at;
        for (int byte = 0; byte < kLengthBytes; ++byte) {
            at += static_cast<int64_t>(payload[kLengthBytes * segment + byte]) << (8 * byte);
        }
    }
    is_whole = is_whole && at == bytes;
    found.segment_begins[num_segments] = at;
    results[0] = static_cast<int64_t>(is_whole ? Damage::kNone : Damage::kSegmentLengths);
    results[1] = 0;
}

// One lane: reads the kind of a segment, its codes, and where its blocks begin.  kSkipped if something is wrong.
__device__ __forceinline__ Damage read_head(const uint8_t* payload, int64_t begin, int64_t bytes, int64_t length,
                                            uint8_t* lengths, int64_t* block_begins, Kind* kind) {
    *kind = Kind::kSkipped;
    if (bytes == 0) return Damage::kNone;
    const uint8_t* data = payload + begin;
    if (data[0] == kRaw) {
        if (bytes != 1 + 2 * length) return Damage::kSegmentLength;
        *kind = Kind::kRaw;
        return Damage::kNone;
    }
    if (data[0] != kCoded || bytes < 2) return Damage::kSegmentKind;
    int code_bytes = 0;
    const Damage damage = read_codes(data + 2, bytes - 2, lengths, &code_bytes);
    if (damage != Damage::kNone) return damage;
    const int num_blocks = blocks_of(length);
    const int64_t first = 2 + code_bytes;
    int64_t at = first + 2 * num_blocks;
    if (at > bytes) return Damage::kBlockLengths;
    for (int idx = 0; idx < num_blocks; ++idx) {
        block_begins[idx] = begin + at;
        at += data[first + 2 * idx] | data[first + 2 * idx + 1] << 8;
    }
    block_begins[num_blocks] = begin + at;
    if (at != bytes) return Damage::kBlockLengths;
    *kind = Kind::kCoded;
    return Damage::kNone;
}

// A warp per segment.
__global__ void __launch_bounds__(kLanes)
    read_heads(const uint8_t* __restrict__ payload, PatchShape shape, Found found, int64_t* __restrict__ results) {
    __shared__ uint8_t lengths[kCodes];
    __shared__ Kind kind;
    const int64_t segment = blockIdx.x;
    if (lane_idx() == 0) {
        // If the lengths of segments are wrong, nothing else may be read.
        Damage damage = Damage::kNone;
        kind = Kind::kSkipped;
        if (results[0] != static_cast<int64_t>(Damage::kSegmentLengths)) {
            const int64_t begin = found.segment_begins[segment], end = found.segment_begins[segment + 1];
            damage = read_head(payload, begin, end - begin, segment_length(shape.n, segment), lengths,
                               found.block_begins + segment * (kBlocksPerSegment + 1), &kind);
        }
        if (damage != Damage::kNone) report(damage, results);
        found.kinds[segment] = kind;
    }
    __syncthreads();
    if (kind != Kind::kCoded) return;
    for (int code = 0; code < kClasses; ++code) {
        fill_table(lengths + code * kSymbols, found.tables + (segment * kClasses + code) * kCodeTable, lane_idx(),
                   kLanes);
    }
}

// Changes the weights and computes the checksum.
__global__ void __launch_bounds__(kPatchBlock)
    apply_patch(const uint8_t* __restrict__ payload, PatchShape shape, Found found, uint16_t* __restrict__ held,
                int64_t* __restrict__ results) {
    __shared__ Masks masks[kPatchWarps];
    __shared__ uint16_t tables[kClasses * kCodeTable];
    const Place place(shape.n);
    const int64_t segment = place.segment;
    const Kind kind = found.kinds[segment];
    if (kind == Kind::kCoded) {
        const uint16_t* from = found.tables + segment * kClasses * kCodeTable;
        for (int i = static_cast<int>(threadIdx.x); i < kClasses * kCodeTable; i += kPatchBlock) tables[i] = from[i];
    }
    __syncthreads();
    const uint8_t* data = kind == Kind::kSkipped ? payload : payload + found.segment_begins[segment];
    Masks& mine = masks[warp_idx()];
    for (int idx = place.first; idx < place.last(); ++idx) {
        uint16_t* weights = held + place.begin + static_cast<int64_t>(idx) * kBlock;
        const int count = block_length(place.length, idx);
        if (kind == Kind::kRaw) {
            copy_from_raw(data + 1 + 2 * static_cast<int64_t>(idx) * kBlock, count, weights);
        } else if (kind == Kind::kCoded) {
            const int64_t* begins = found.block_begins + segment * (kBlocksPerSegment + 1) + idx;
            const int64_t bytes = begins[1] - begins[0];
            const uint8_t* from = payload + begins[0];
            if (bytes == 2 * count) {
                copy_from_raw(from, count, weights);
            } else if (bytes > 2 * count) {
                report(Damage::kBlockTooLong, results);
            } else if (bytes > 0) {
                make_masks(nullptr, weights, count, data[1], shape.mantissa_bits, mine);
                if (lane_idx() == 0) {
                    const Damage damage = decode_tokens(mine, from, bytes, tables, count, weights);
                    if (damage != Damage::kNone) report(damage, results);
                }
            }
        }
        __syncwarp();
        add_to_checksum(weights, count, segment * kBlocksPerSegment + idx, results);
        __syncwarp();
    }
}

}  // namespace

int64_t patch_decode_scratch_bytes(int64_t n) {
    Scratch scratch;
    take_found(scratch, segments_of(n));
    return scratch.bytes();
}

void patch_decode(const uint8_t* payload, int64_t bytes, const PatchShape& shape, const Workspace& work,
                  uint16_t* held, int64_t* results) {
    const Stream stream = work.stream;
    const int64_t num_segments = segments_of(shape.n);
    Scratch scratch(work.scratch);
    const Found found = take_found(scratch, num_segments);
    launch({.grid = 1, .block = 1, .stream = stream}, find_segments, payload, bytes, num_segments, found, results);
    launch({.grid = num_segments, .block = kLanes, .stream = stream}, read_heads, payload, shape, found, results);
    launch({.grid = num_segments * kGroups, .block = kPatchBlock, .stream = stream}, apply_patch, payload, shape,
           found, held, results);
}

}  // namespace hybridep
