// SPDX-License-Identifier: Apache-2.0
//
// Low rank with integer factors, for small matrices on the CPU: what ds_hybridep/codecs/low_rank.py and
// integer_factors.py say in 200 operations of torch, in one call.  Larger matrices spend their time in products, which
// torch does faster.
//
// Decoded values equal those of low_rank.py to the bit.  Payloads do not: sums have another order.

#pragma once

#include <cstdint>

#include "hybridep_codecs.h"

namespace hybridep {

// n matrices [rows, cols], and factors with `rank` rows, which take the first `bytes` of a payload.  What they leave out
// follows, quantised as blockwise_encode does; rest_bits = 0: it does not.  num_threads is an upper bound.
struct FactorShape {
    int64_t n;
    int64_t rows;
    int64_t cols;
    int64_t rank;
    int64_t bytes;
    int rest_bits;
    int64_t rest_block;
    int num_threads;
};

// What an encoder remembers of each matrix.  Rows and columns count the same if row_rms and col_rms are null.
struct FactorState {
    float* q;        // [n, rank, cols]
    float* row_rms;  // [n, rows]
    float* col_rms;  // [n, cols]
};

// Writes payloads of what is encoded, and updates `state` and `other` but where is_bad [n] becomes 1: for inf, nan or
// an overflow.  Where only the rest overflows, `state` is updated.
//   start  [n, rank, cols], the q to start from; may be state.q
//   mix    [rank, rank], orthogonal
void encode_factors(const Input& input, const float* start, const float* mix, const FactorShape& shape,
                    const FactorState& state, const Payloads& payloads, uint8_t* is_bad);

// out [n, rows, cols] = the values of payloads, or += if is_add.
void decode_factors(const Payloads& payloads, const FactorShape& shape, bool is_add, float* out);

}  // namespace hybridep
