// SPDX-License-Identifier: Apache-2.0
//
// Row movement of token routing on raw pointers.  No torch header: callers own all memory and have checked types.
//
// Legend: T tokens, K top_k, D hidden, R rows, N destinations, E experts.  All arrays are dense and row-major, and an
// empty one may be a null pointer.  A negative index means "none".  Products row * stride are int64.
//
// Functions that read indices return the position of the first index out of range, or kAllInRange.  If an index is out
// of range, they write nothing.  num_threads is an upper bound: small inputs run on the calling thread alone.  The
// results do not depend on num_threads.

#pragma once

#include <cstdint>
#include <string>

#include "hybridep_stream.h"

namespace hybridep {

enum class Type : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// How the elements of a quantised row are encoded.
enum class RowFormat : int { kInt8 = 0, kFloat8 = 1 };

inline constexpr int64_t kAllInRange = -1;

// C, the number of parts that tokens are split into while a plan is made, one thread each.  Part c holds tokens
// [T * c / C, T * (c + 1) / C).
int64_t plan_chunks(int64_t num_tokens, int64_t top_k, int num_threads);

// Inputs of a route plan: topk_idx [T, K], expert_to_destination [E].
struct Routes {
    const int32_t* topk_idx;
    const int32_t* expert_to_destination;
    int64_t num_tokens;
    int64_t top_k;
    int64_t num_experts;
    int64_t num_destinations;
};

// First half of a plan: counts rows, so that the caller can allocate the outputs of the second half.
//
//   chunk_rows           [C, N]  rows that the tokens of a chunk have at a destination; C = plan_chunks(...)
//   rows_per_destination [N]     their sum over chunks; its own sum is R
//
// A row is a distinct (token, destination).  Example, experts 0 and 1 at destination 0, expert 2 at destination 1:
//   topk_idx = {2, 0,  1, 0}, T = 2, K = 2  ->  rows_per_destination = {2, 1}
// Returns the position of the first id >= E in topk_idx.  expert_to_destination must be below N (see first_not_below).
int64_t plan_count(const Routes& routes, int64_t num_chunks, int64_t* chunk_rows, int64_t* rows_per_destination);

// Second half of a plan: writes the maps between slots and rows.  Takes chunk_rows from plan_count and overwrites it.
//
//   row_to_token [R], row_topk_idx [R, K], slot_to_row [T, K], first_slot_to_row [T, K]
//
// Example as above, three rows sorted by destination, then by token:
//   row_to_token = {0, 1, 0}                  slot_to_row       = {2, 0,  1, 1}
//   row_topk_idx = {-1, 0,  1, 0,  2, -1}     first_slot_to_row = {2, 0,  1, -1}
void plan_fill(const Routes& routes, int64_t num_chunks, int64_t* chunk_rows, int64_t* row_to_token,
               int32_t* row_topk_idx, int64_t* slot_to_row, int64_t* first_slot_to_row);

// Position of the first entry of values that is `limit` or more, or kAllInRange.
int64_t first_not_below(const int32_t* values, int64_t count, int64_t limit);

// Sizes of what follows.
struct RowSizes {
    int64_t num_tokens;
    int64_t top_k;
    int64_t num_rows;
    int64_t hidden;
};

// out [R, D] = the tokens of x [T, D] at their places in slot_to_row [T, K].  Each row of out belongs to one slot, as
// in first_slot_to_row.  Moves bytes, so it serves every dtype.  Reads a token once, whatever the number of its rows.
//   x = {aa, bb, cc}, slot_to_row = {-1, 1,  -1, -1,  2, 0}  ->  out = {cc, aa, cc}
// Returns kNotAllRows if the slots that have a row are not R in number.  On CUDA devices nobody counts them.
int64_t dispatch_rows(const void* x, const int64_t* slot_to_row, const RowSizes& sizes, int64_t element_bytes,
                      int num_threads, void* out);

inline constexpr int64_t kNotAllRows = -2;

// --- Rows of one byte an element ------------------------------------------------------------------------------------
//
// A row of D elements is a record of record_bytes(D): its codes, an exponent for each kScaleBlock elements, zeros.
// The arithmetic is that of reference.py (quantise_rows) and hybridep_scales.h.

inline constexpr int64_t kScaleBlock = 128;

inline constexpr int64_t num_scales(int64_t hidden) { return (hidden + kScaleBlock - 1) / kScaleBlock; }
inline constexpr int64_t record_bytes(int64_t hidden) { return (hidden + num_scales(hidden) + 15) / 16 * 16; }

// records [R, record_bytes(D)] of the rows of x [T, D], with slots and result as in dispatch_rows.
//   x = {254, -2, 3}, D = 3, slot_to_row = {0}, kInt8  ->  scale 2, record {127, -1, 2, 128, 0, ...}
int64_t quantise_rows(const void* x, Type x_type, const int64_t* slot_to_row, const RowSizes& sizes, RowFormat format,
                      int num_threads, uint8_t* records);

// out [R, D] from records; num_tokens and top_k are not read.
void dequantise_rows(const uint8_t* records, const RowSizes& sizes, RowFormat format, int num_threads, void* out,
                     Type out_type);

// out [T, D] = sum over k of weights [T, K] * rows [R, D] at slot_to_row [T, K]; weights may be null for ones.
// Sums are fp32 in slot order and rounded once.  Product and sum round separately (no fused multiply-add), so the same
// loop in any other language gives the same bits.
//   rows = {1, 10, 100}, D = 1, slot_to_row = {0, 2,  -1, 1}, weights = {.5, .5,  9, 2}  ->  out = {50.5, 20}
int64_t combine_rows(const void* rows, Type rows_type, const int64_t* slot_to_row, const float* weights,
                     const RowSizes& sizes, int num_threads, void* out, Type out_type);

// Gradients of combine_rows with weights, from grad [T, D]:
//
//   grad_rows    [R, D]  sum of weight * grad[t] over the slots that a row serves, in slot order, 0 if it serves none
//   grad_weights [T, K]  <grad[t], rows[slot_to_row[t, k]]>, 0 where there is no row
//
// scratch [2 R + T * K] is for lists of the slots that each row serves.
//   rows = {1, 10, 100}, D = 1, slot_to_row = {0, 2,  -1, 1}, weights = {.5, .5,  9, 2}, grad = {3, 4}
//     ->  grad_rows = {1.5, 8, 1.5}, grad_weights = {3, 300,  0, 40}
int64_t combine_rows_backward(const void* grad, Type grad_type, const void* rows, Type rows_type,
                              const int64_t* slot_to_row, const float* weights, const RowSizes& sizes,
                              int num_threads, int64_t* scratch, void* grad_rows, float* grad_weights);

// --- Sums of bits ---------------------------------------------------------------------------------------------------

// sums [2] = the sum of the words of data, and the sum of word * (position % kPositions + 1), both modulo 2^64.  A
// word is a signed integer of 2 bytes or an unsigned one of 1 byte.
//   data = {1, 2, -3} as 2-byte words  ->  sums = {0, -4}
void bit_sums(const void* data, int64_t num_words, int word_bytes, int num_threads, int64_t* sums);

inline constexpr int64_t kPositions = 65521;  // a word times its position fits 32 bits

// --- On CUDA devices, see hybridep_stream.h -------------------------------------------------------------------------

// Why the current device has no code of this module to run, in CUDA's words; empty if it has.
std::string code_error();

// A plan whose sizes the host does not know: the outputs have room for T * min(K, N) rows, and the first R rows are
// written.
//
//   counts   [N + 2]: rows_per_destination, then the first id of topk_idx and of expert_to_destination that is out of
//            range as position << 32 | id, or kNoneWrong; if one is out of range, the rows are meaningless
int64_t plan_scratch_bytes(int64_t num_tokens, int64_t num_destinations);

void plan_routes(const Routes& routes, const Workspace& work, int64_t* counts, int64_t* row_to_token,
                 int32_t* row_topk_idx, int64_t* slot_to_row, int64_t* first_slot_to_row);

inline constexpr int64_t kNoneWrong = 0x7f7f7f7f7f7f7f7f;

int64_t dispatch_rows(const void* x, const int64_t* slot_to_row, const RowSizes& sizes, int64_t element_bytes,
                      Stream stream, void* out);

int64_t quantise_rows(const void* x, Type x_type, const int64_t* slot_to_row, const RowSizes& sizes, RowFormat format,
                      Stream stream, uint8_t* records);

void dequantise_rows(const uint8_t* records, const RowSizes& sizes, RowFormat format, Stream stream, void* out,
                     Type out_type);

int64_t combine_rows(const void* rows, Type rows_type, const int64_t* slot_to_row, const float* weights,
                     const RowSizes& sizes, Stream stream, void* out, Type out_type);

int64_t combine_rows_backward(const void* grad, Type grad_type, const void* rows, Type rows_type,
                              const int64_t* slot_to_row, const float* weights, const RowSizes& sizes,
                              Stream stream, int64_t* scratch, void* grad_rows, float* grad_weights);

void bit_sums(const void* data, int64_t num_words, int word_bytes, Stream stream, int64_t* sums);

// The same on at most num_sms multiprocessors, with one block that stays on each; other kernels have the rest.  Bulk
// copies move the rows where they can (compute capability 9.0 or later, addresses and rows of whole 16 bytes).
int64_t dispatch_rows_on(int num_sms, const void* x, const int64_t* slot_to_row, const RowSizes& sizes,
                         int64_t element_bytes, Stream stream, void* out);

int64_t combine_rows_on(int num_sms, const void* rows, Type rows_type, const int64_t* slot_to_row,
                        const float* weights, const RowSizes& sizes, Stream stream, void* out, Type out_type);

int64_t quantise_rows_on(int num_sms, const void* x, Type x_type, const int64_t* slot_to_row, const RowSizes& sizes,
                         RowFormat format, Stream stream, uint8_t* records);

void dequantise_rows_on(int num_sms, const uint8_t* records, const RowSizes& sizes, RowFormat format, Stream stream,
                        void* out, Type out_type);

int64_t combine_rows_backward_on(int num_sms, const void* grad, Type grad_type, const void* rows, Type rows_type,
                                 const int64_t* slot_to_row, const float* weights, const RowSizes& sizes,
                                 Stream stream, int64_t* scratch, void* grad_rows, float* grad_weights);

}  // namespace hybridep
