// SPDX-License-Identifier: Apache-2.0
//
// Row movement on CUDA devices.  hybridep_rows.h says what each function computes.  Here too, each output element has
// one writer and one order of summation, so results do not change from run to run.
//
// Rows move in pieces of 16 bytes if their size and addresses are multiples of 16, else in smaller pieces.

#include "hybridep_cuda_rows.h"

namespace hybridep {
namespace {

constexpr int kRowBlock = 256;
constexpr int kCombineBlock = 128;

}  // namespace

int64_t dispatch_rows(const void* x, const int64_t* slot_to_row, const RowSizes& sizes, int64_t element_bytes,
                      Stream stream, void* out) {
    launch_scatter<kRowBlock>(kMaxGrid, x, slot_to_row, sizes, sizes.hidden * element_bytes, stream, out);
    return kAllInRange;
}

int64_t quantise_rows(const void* x, Type x_type, const int64_t* slot_to_row, const RowSizes& sizes, RowFormat format,
                      Stream stream, uint8_t* records) {
    launch_quantise<kRowBlock>(kMaxGrid, x, x_type, slot_to_row, sizes, format, stream, records);
    return kAllInRange;
}

void dequantise_rows(const uint8_t* records, const RowSizes& sizes, RowFormat format, Stream stream, void* out,
                     Type out_type) {
    launch_dequantise<kRowBlock>(kMaxGrid, records, sizes, format, stream, out, out_type);
}

int64_t combine_rows(const void* rows, Type rows_type, const int64_t* slot_to_row, const float* weights,
                     const RowSizes& sizes, Stream stream, void* out, Type out_type) {
    with_views(const_cast<void*>(rows), rows_type, out, out_type, sizes.hidden, [&](auto from, auto to) {
        const int64_t num_pieces = blocks_for(sizes.hidden / from.kWidth, kCombineBlock);
        launch({.grid = std::min(sizes.num_tokens * num_pieces, kMaxGrid), .block = kCombineBlock, .stream = stream},
               combine_tokens<kCombineBlock, decltype(from), decltype(to)>, from, slot_to_row, weights, sizes, to);
    });
    return kAllInRange;
}

int64_t combine_rows_backward(const void* grad, Type grad_type, const void* rows, Type rows_type,
                              const int64_t* slot_to_row, const float* weights, const RowSizes& sizes,
                              Stream stream, int64_t* scratch, void* grad_rows, float* grad_weights) {
    launch_combine_backward<kRowBlock>(kMaxGrid, grad, grad_type, rows, rows_type, slot_to_row, weights, sizes, stream,
                                       scratch, grad_rows, grad_weights);
    return kAllInRange;
}

}  // namespace hybridep
