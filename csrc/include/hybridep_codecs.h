// SPDX-License-Identifier: Apache-2.0
//
// Payloads of compressed tensors on raw pointers.  No torch header: callers own all memory and have checked sizes.
//
// Layouts, blockwise codes and decoded values equal those of ds_hybridep/codecs/*.py to the bit: each product, sum and
// quotient is rounded by itself, and sums over a block are made by halving.  Results depend on neither threads nor n.
//
// Legend: n tensors of `length` = rows * cols fp32 elements; payloads of all tensors are `stride` bytes apart.
// num_threads is an upper bound: small inputs run on the calling thread alone.

#pragma once

#include <cstdint>

#include "hybridep_stream.h"

namespace hybridep {

// Where payloads lie: the payload of tensor i starts at data + i * stride and has `bytes` bytes.
struct Payloads {
    uint8_t* data;
    int64_t stride;
    int64_t bytes;
};

// What is encoded, and what becomes of `other` afterwards.
//
//   kEncode    a           other is not read
//   kUpdate    a - other   other += value of the packet (a mirror; all nan if the packet is bad)
//   kResidual  a + other   other  = that sum - value of the packet (a residual; unchanged if the packet is bad)
enum class Source : int { kEncode = 0, kUpdate = 1, kResidual = 2 };

struct Input {
    Source source;
    const float* a;
    float* other;
    int64_t n;
    int64_t length;
};

// x [n, length] = the values to encode of each tensor, all zeros if the tensor is bad.  is_bad [n] becomes 1 if an
// element is inf or nan, else 0.  For codecs that need the whole tensor at once.
void prepare(const Input& input, int num_threads, float* x, uint8_t* is_bad);

// Encodes blocks of `block` elements (a power of two, at most 1024) to `bits` bits (8, 4 or 2) each and a bf16 scale.
// is_bad [n] becomes 1 if an element is inf or nan, or a scale overflowed, else 0.
//   bits = 2, block = 8, a = {1, -3, 2, 2, 0, 0, 0, 0}  ->  scale 1.25, codes {2, 0, 3, 3, 2, 2, 2, 2}
void blockwise_encode(const Input& input, int bits, int64_t block, int num_threads, const Payloads& payloads,
                      uint8_t* is_bad);

// out [n, length] = the values of payloads, or += if is_add.
void blockwise_decode(const Payloads& payloads, int64_t n, int64_t length, int bits, int64_t block, bool is_add,
                      int num_threads, float* out);

// Writes the first 16 bytes of n packets: `words` [4], with is_bad [n] as the flags in byte 3.
void write_headers(const Payloads& packets, int64_t n, const uint32_t* words, const uint8_t* is_bad);

// The flags of n packets, joined by OR; -1 if one does not begin with the three bytes `start` or has another stamp.
int check_headers(const Payloads& packets, int64_t n, uint32_t start, uint32_t stamp);

// --- The compact form of what is kept between steps, see hybridep_compact.h ------------------------------------------

// words [n, ceil(length / 128), 161] = the compact form of finite values [n, length].
void compact_encode(const float* values, int64_t n, int64_t length, uint32_t seed, int num_threads, int16_t* words);

// out [n, length] = what the compact form holds.
void compact_decode(const int16_t* words, int64_t n, int64_t length, int num_threads, float* out);

// --- Patches of 16-bit weights --------------------------------------------------------------------------------------

// n weights of a type with mantissa_bits bits of mantissa: 7 (bf16) or 10 (fp16).
struct PatchShape {
    int64_t n;
    int mantissa_bits;
};

// Writes to `payload` the patch that turns `sent` [n] into `values` [n], and sets sent to values.  The payload has
// room for 2 n + 5 * ceil(n / 2^20) bytes.  results [2] become the bytes written and the checksum of the values.
void patch_encode(const uint16_t* values, uint16_t* sent, const PatchShape& shape, int num_threads, uint8_t* payload,
                  int64_t* results);

// Turns `held` [n] into the values that were encoded.  Reads no byte outside payload [bytes], even a damaged one.
// results [2] become a number of patch::Damage, 0 if the payload can be read, and the checksum of `held`.
void patch_decode(const uint8_t* payload, int64_t bytes, const PatchShape& shape, int num_threads, uint16_t* held,
                  int64_t* results);

// --- On CUDA devices, see hybridep_stream.h -------------------------------------------------------------------------
//
// Payloads start at even addresses and are an even number of bytes apart.

int64_t flags_scratch_bytes(int64_t n);  // of the first two

void prepare(const Input& input, const Workspace& work, float* x, uint8_t* is_bad);

void blockwise_encode(const Input& input, int bits, int64_t block, const Workspace& work, const Payloads& payloads,
                      uint8_t* is_bad);

void blockwise_decode(const Payloads& payloads, int64_t n, int64_t length, int bits, int64_t block, bool is_add,
                      Stream stream, float* out);

void compact_encode(const float* values, int64_t n, int64_t length, uint32_t seed, Stream stream, int16_t* words);

void compact_decode(const int16_t* words, int64_t n, int64_t length, Stream stream, float* out);

int64_t patch_encode_scratch_bytes(int64_t n);

void patch_encode(const uint16_t* values, uint16_t* sent, const PatchShape& shape, const Workspace& work,
                  uint8_t* payload, int64_t* results);

int64_t patch_decode_scratch_bytes(int64_t n);

void patch_decode(const uint8_t* payload, int64_t bytes, const PatchShape& shape, const Workspace& work,
                  uint16_t* held, int64_t* results);

void write_headers(const Payloads& packets, int64_t n, const uint32_t* words, const uint8_t* is_bad, Stream stream);

// A packet that begins otherwise, or has another stamp, ends the kernel like an index out of range.
void check_headers(const Payloads& packets, int64_t n, uint32_t start, uint32_t stamp, Stream stream);

}  // namespace hybridep
