// SPDX-License-Identifier: Apache-2.0
//
// The kernels as a Python module.  Functions take addresses, sizes and type codes, and throw errors.  The file needs
// pybind11 alone, so it compiles in seconds.  Callers have checked dtypes, devices and contiguity.  This file checks
// sizes, type codes and, on the CPU, index ranges.  The GIL is released while a kernel runs.
//
// One module is for the CPU.  Another, compiled with HYBRIDEP_CUDA, is for CUDA devices.  Functions in both take the
// same arguments.  The argument `lane` is a number of threads on the CPU and a stream on CUDA devices.  `scratch` is
// memory for intermediate results there; kernels for the CPU take their own.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "hybridep_codecs.h"
#include "hybridep_factors.h"
#include "hybridep_lifeline.h"
#include "hybridep_rows.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

#ifdef HYBRIDEP_CUDA
using Lane = Address;
hybridep::Stream to_lane(Lane lane) { return reinterpret_cast<hybridep::Stream>(lane); }
hybridep::Workspace to_work(Lane lane, Address scratch) { return {to_lane(lane), reinterpret_cast<void*>(scratch)}; }
#else
using Lane = int;
int to_lane(Lane lane) { return lane; }
int to_work(Lane lane, Address) { return lane; }
#endif

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

hybridep::Type to_type(int code) {
    if (code < 0 || code > 2) {
        throw py::value_error("type code: got " + std::to_string(code) + ", wanted 0 (fp32), 1 (bf16) or 2 (fp16)");
    }
    return static_cast<hybridep::Type>(code);
}

hybridep::RowFormat to_row_format(int code) {
    if (code < 0 || code > 1) {
        throw py::value_error("row format: got " + std::to_string(code) + ", wanted 0 (int8) or 1 (fp8)");
    }
    return static_cast<hybridep::RowFormat>(code);
}

void require_sizes(std::initializer_list<int64_t> sizes) {
    for (const int64_t size : sizes) {
        if (size < 0) throw py::value_error("size: got " + std::to_string(size) + ", wanted 0 or more");
    }
}

// On CUDA devices `wrong` is always kAllInRange, because the kernels check the indices themselves.
void require_in_range(const char* name, Address values, int64_t wrong, int64_t size, const char* of_what) {
    if (wrong == hybridep::kAllInRange) return;
    throw py::index_error(std::string(name) + ": holds " + std::to_string(at<const int64_t>(values)[wrong]) +
                          ", but there are " + std::to_string(size) + " " + of_what);
}

// The same for slots that must have each row once.
void require_slots(Address slot_to_row, int64_t wrong, const hybridep::RowSizes& sizes) {
    if (wrong != hybridep::kNotAllRows) {
        return require_in_range("slot_to_row", slot_to_row, wrong, sizes.num_rows, "rows");
    }
    const auto* rows = at<const int64_t>(slot_to_row);
    const int64_t num_slots = sizes.num_tokens * sizes.top_k;
    const auto found = std::count_if(rows, rows + num_slots, [](int64_t row) { return row >= 0; });
    throw py::value_error("slot_to_row: " + std::to_string(found) + " slots have a row, but there are " +
                          std::to_string(sizes.num_rows) + " rows: wanted one slot for each");
}

hybridep::Routes to_routes(Address topk_idx, Address expert_to_destination, int64_t num_tokens, int64_t top_k,
                           int64_t num_experts, int64_t num_destinations) {
    require_sizes({num_tokens, top_k, num_experts, num_destinations});
    return {at<const int32_t>(topk_idx),
            at<const int32_t>(expert_to_destination),
            num_tokens,
            top_k,
            num_experts,
            num_destinations};
}

#ifdef HYBRIDEP_CUDA

void plan_routes(Address topk_idx, Address expert_to_destination, int64_t num_tokens, int64_t top_k,
                 int64_t num_experts, int64_t num_destinations, Lane lane, Address scratch, Address counts,
                 Address row_to_token, Address row_topk_idx, Address slot_to_row, Address first_slot_to_row) {
    const hybridep::Routes routes =
        to_routes(topk_idx, expert_to_destination, num_tokens, top_k, num_experts, num_destinations);
    hybridep::plan_routes(routes, to_work(lane, scratch), at<int64_t>(counts), at<int64_t>(row_to_token),
                          at<int32_t>(row_topk_idx), at<int64_t>(slot_to_row), at<int64_t>(first_slot_to_row));
}

#else

[[noreturn]] void throw_id(const char* name, int64_t id, int64_t limit, const char* of_what) {
    throw py::value_error(std::string(name) + ": holds " + std::to_string(id) + ", but there are " +
                          std::to_string(limit) + " " + of_what + ": wanted ids below " + std::to_string(limit));
}

int64_t plan_chunks(int64_t num_tokens, int64_t top_k, int num_threads) {
    require_sizes({num_tokens, top_k});
    return hybridep::plan_chunks(num_tokens, top_k, num_threads);
}

// Returns R, the number of rows.
int64_t plan_count(Address topk_idx, Address expert_to_destination, int64_t num_tokens, int64_t top_k,
                   int64_t num_experts, int64_t num_destinations, int64_t num_chunks, Address chunk_rows,
                   Address rows_per_destination) {
    require_sizes({num_chunks});
    const hybridep::Routes routes =
        to_routes(topk_idx, expert_to_destination, num_tokens, top_k, num_experts, num_destinations);
    int64_t wrong = hybridep::first_not_below(routes.expert_to_destination, num_experts, num_destinations);
    if (wrong != hybridep::kAllInRange) {
        throw_id("expert_to_destination", routes.expert_to_destination[wrong], num_destinations, "destinations");
    }
    int64_t* counts = at<int64_t>(rows_per_destination);
    wrong = hybridep::plan_count(routes, num_chunks, at<int64_t>(chunk_rows), counts);
    if (wrong != hybridep::kAllInRange) throw_id("topk_idx", routes.topk_idx[wrong], num_experts, "experts");
    int64_t num_rows = 0;
    for (int64_t n = 0; n < num_destinations; ++n) num_rows += counts[n];
    return num_rows;
}

void plan_fill(Address topk_idx, Address expert_to_destination, int64_t num_tokens, int64_t top_k, int64_t num_experts,
               int64_t num_destinations, int64_t num_chunks, Address chunk_rows, Address row_to_token,
               Address row_topk_idx, Address slot_to_row, Address first_slot_to_row) {
    require_sizes({num_chunks});
    const hybridep::Routes routes =
        to_routes(topk_idx, expert_to_destination, num_tokens, top_k, num_experts, num_destinations);
    hybridep::plan_fill(routes, num_chunks, at<int64_t>(chunk_rows), at<int64_t>(row_to_token),
                        at<int32_t>(row_topk_idx), at<int64_t>(slot_to_row), at<int64_t>(first_slot_to_row));
}

#endif

void dispatch_rows(Address x, Address slot_to_row, int64_t num_tokens, int64_t top_k, int64_t num_rows,
                   int64_t hidden, int64_t element_bytes, Lane lane, Address out) {
    require_sizes({num_tokens, top_k, num_rows, hidden, element_bytes});
    const hybridep::RowSizes sizes{num_tokens, top_k, num_rows, hidden};
    const int64_t wrong = hybridep::dispatch_rows(at<const void>(x), at<const int64_t>(slot_to_row), sizes,
                                                  element_bytes, to_lane(lane), at<void>(out));
    require_slots(slot_to_row, wrong, sizes);
}

void quantise_rows(Address x, int x_type, Address slot_to_row, int64_t num_tokens, int64_t top_k, int64_t num_rows,
                   int64_t hidden, int format, Lane lane, Address records) {
    require_sizes({num_tokens, top_k, num_rows, hidden});
    const hybridep::RowSizes sizes{num_tokens, top_k, num_rows, hidden};
    const int64_t wrong =
        hybridep::quantise_rows(at<const void>(x), to_type(x_type), at<const int64_t>(slot_to_row), sizes,
                                to_row_format(format), to_lane(lane), at<uint8_t>(records));
    require_slots(slot_to_row, wrong, sizes);
}

void dequantise_rows(Address records, int64_t num_rows, int64_t hidden, int format, Lane lane, Address out,
                     int out_type) {
    require_sizes({num_rows, hidden});
    hybridep::dequantise_rows(at<const uint8_t>(records), {0, 0, num_rows, hidden}, to_row_format(format), to_lane(lane),
                              at<void>(out), to_type(out_type));
}

void combine_rows(Address rows, int rows_type, Address slot_to_row, Address weights, int64_t num_tokens, int64_t top_k,
                  int64_t num_rows, int64_t hidden, Lane lane, Address out, int out_type) {
    require_sizes({num_tokens, top_k, num_rows, hidden});
    const int64_t wrong = hybridep::combine_rows(
        at<const void>(rows), to_type(rows_type), at<const int64_t>(slot_to_row), at<const float>(weights),
        {num_tokens, top_k, num_rows, hidden}, to_lane(lane), at<void>(out), to_type(out_type));
    require_in_range("slot_to_row", slot_to_row, wrong, num_rows, "rows");
}

void combine_rows_backward(Address grad, int grad_type, Address rows, int rows_type, Address slot_to_row,
                           Address weights, int64_t num_tokens, int64_t top_k, int64_t num_rows, int64_t hidden,
                           Lane lane, Address scratch, Address grad_rows, Address grad_weights) {
    require_sizes({num_tokens, top_k, num_rows, hidden});
    const int64_t wrong = hybridep::combine_rows_backward(
        at<const void>(grad), to_type(grad_type), at<const void>(rows), to_type(rows_type),
        at<const int64_t>(slot_to_row), at<const float>(weights), {num_tokens, top_k, num_rows, hidden}, to_lane(lane),
        at<int64_t>(scratch), at<void>(grad_rows), at<float>(grad_weights));
    require_in_range("slot_to_row", slot_to_row, wrong, num_rows, "rows");
}

#ifdef HYBRIDEP_CUDA

void dispatch_rows_on(int num_sms, Address x, Address slot_to_row, int64_t num_tokens, int64_t top_k,
                      int64_t num_rows, int64_t hidden, int64_t element_bytes, Lane lane, Address out) {
    require_sizes({num_tokens, top_k, num_rows, hidden, element_bytes});
    hybridep::dispatch_rows_on(num_sms, at<const void>(x), at<const int64_t>(slot_to_row),
                               {num_tokens, top_k, num_rows, hidden}, element_bytes, to_lane(lane), at<void>(out));
}

void combine_rows_on(int num_sms, Address rows, int rows_type, Address slot_to_row, Address weights,
                     int64_t num_tokens, int64_t top_k, int64_t num_rows, int64_t hidden, Lane lane, Address out,
                     int out_type) {
    require_sizes({num_tokens, top_k, num_rows, hidden});
    hybridep::combine_rows_on(num_sms, at<const void>(rows), to_type(rows_type), at<const int64_t>(slot_to_row),
                              at<const float>(weights), {num_tokens, top_k, num_rows, hidden}, to_lane(lane),
                              at<void>(out), to_type(out_type));
}

void quantise_rows_on(int num_sms, Address x, int x_type, Address slot_to_row, int64_t num_tokens, int64_t top_k,
                      int64_t num_rows, int64_t hidden, int format, Lane lane, Address records) {
    require_sizes({num_tokens, top_k, num_rows, hidden});
    hybridep::quantise_rows_on(num_sms, at<const void>(x), to_type(x_type), at<const int64_t>(slot_to_row),
                               {num_tokens, top_k, num_rows, hidden}, to_row_format(format), to_lane(lane),
                               at<uint8_t>(records));
}

void dequantise_rows_on(int num_sms, Address records, int64_t num_rows, int64_t hidden, int format, Lane lane,
                        Address out, int out_type) {
    require_sizes({num_rows, hidden});
    hybridep::dequantise_rows_on(num_sms, at<const uint8_t>(records), {0, 0, num_rows, hidden}, to_row_format(format),
                                 to_lane(lane), at<void>(out), to_type(out_type));
}

void combine_rows_backward_on(int num_sms, Address grad, int grad_type, Address rows, int rows_type,
                              Address slot_to_row, Address weights, int64_t num_tokens, int64_t top_k,
                              int64_t num_rows, int64_t hidden, Lane lane, Address scratch, Address grad_rows,
                              Address grad_weights) {
    require_sizes({num_tokens, top_k, num_rows, hidden});
    hybridep::combine_rows_backward_on(num_sms, at<const void>(grad), to_type(grad_type), at<const void>(rows),
                                       to_type(rows_type), at<const int64_t>(slot_to_row), at<const float>(weights),
                                       {num_tokens, top_k, num_rows, hidden}, to_lane(lane), at<int64_t>(scratch),
                                       at<void>(grad_rows), at<float>(grad_weights));
}

#endif

void bit_sums(Address data, int64_t num_words, int word_bytes, Lane lane, Address sums) {
    require_sizes({num_words});
    if (word_bytes != 1 && word_bytes != 2) {
        throw py::value_error("word_bytes: got " + std::to_string(word_bytes) + ", wanted 1 or 2");
    }
    hybridep::bit_sums(at<const void>(data), num_words, word_bytes, to_lane(lane), at<int64_t>(sums));
}

// --- Compressed tensors ---------------------------------------------------------------------------------------------

void require_block(int64_t block) {
    if (block < 8 || block > 1024 || (block & (block - 1)) != 0) {
        throw py::value_error("block: got " + std::to_string(block) + ", wanted a power of two from 8 to 1024");
    }
}

void require_bits(int bits) {
    if (bits != 2 && bits != 4 && bits != 8) {
        throw py::value_error("bits: got " + std::to_string(bits) + ", wanted 2, 4 or 8");
    }
}

hybridep::Input to_input(int source, Address a, Address other, int64_t n, int64_t length) {
    require_sizes({n, length});
    if (source < 0 || source > 2) {
        throw py::value_error("source: got " + std::to_string(source) + ", wanted 0, 1 (update) or 2 (residual)");
    }
    return {static_cast<hybridep::Source>(source), at<const float>(a), at<float>(other), n, length};
}

hybridep::Payloads to_payloads(Address payload, int64_t stride, int64_t bytes) {
    require_sizes({stride, bytes});
    return {at<uint8_t>(payload), stride, bytes};
}

void prepare(int source, Address a, Address other, int64_t n, int64_t length, Lane lane, Address scratch, Address x,
             Address is_bad) {
    hybridep::prepare(to_input(source, a, other, n, length), to_work(lane, scratch), at<float>(x),
                      at<uint8_t>(is_bad));
}

void blockwise_encode(int source, Address a, Address other, int64_t n, int64_t length, int bits, int64_t block,
                      Lane lane, Address scratch, Address payload, int64_t stride, int64_t bytes, Address is_bad) {
    require_block(block);
    require_bits(bits);
    hybridep::blockwise_encode(to_input(source, a, other, n, length), bits, block, to_work(lane, scratch),
                               to_payloads(payload, stride, bytes), at<uint8_t>(is_bad));
}

void blockwise_decode(Address payload, int64_t stride, int64_t bytes, int64_t n, int64_t length, int bits,
                      int64_t block, bool is_add, Lane lane, Address out) {
    require_sizes({n, length});
    require_block(block);
    require_bits(bits);
    hybridep::blockwise_decode(to_payloads(payload, stride, bytes), n, length, bits, block, is_add, to_lane(lane),
                               at<float>(out));
}

void write_headers(Address packets, int64_t stride, int64_t n, uint32_t start, uint32_t number, uint32_t sequence,
                   uint32_t stamp, Address is_bad, [[maybe_unused]] Lane lane) {
    const uint32_t words[] = {start, number, sequence, stamp};
#ifdef HYBRIDEP_CUDA
    hybridep::write_headers(to_payloads(packets, stride, 0), n, words, at<const uint8_t>(is_bad), to_lane(lane));
#else
    hybridep::write_headers(to_payloads(packets, stride, 0), n, words, at<const uint8_t>(is_bad));
#endif
}

int check_headers(Address packets, int64_t stride, int64_t n, uint32_t start, uint32_t stamp,
                  [[maybe_unused]] Lane lane) {
#ifdef HYBRIDEP_CUDA
    hybridep::check_headers(to_payloads(packets, stride, 0), n, start, stamp, to_lane(lane));
    return 1;
#else
    return hybridep::check_headers(to_payloads(packets, stride, 0), n, start, stamp);
#endif
}

void compact_encode(Address values, int64_t n, int64_t length, uint32_t seed, Lane lane, Address words) {
    require_sizes({n, length});
    hybridep::compact_encode(at<const float>(values), n, length, seed, to_lane(lane), at<int16_t>(words));
}

void compact_decode(Address words, int64_t n, int64_t length, Lane lane, Address out) {
    require_sizes({n, length});
    hybridep::compact_decode(at<const int16_t>(words), n, length, to_lane(lane), at<float>(out));
}

hybridep::PatchShape to_patch_shape(int64_t n, int mantissa_bits) {
    require_sizes({n});
    if (mantissa_bits != 7 && mantissa_bits != 10) {
        throw py::value_error("mantissa_bits: got " + std::to_string(mantissa_bits) +
                              ", wanted 7 (bf16) or 10 (fp16)");
    }
    return {n, mantissa_bits};
}

void patch_encode(Address values, Address sent, int64_t n, int mantissa_bits, Lane lane, Address scratch,
                  Address payload, Address results) {
    hybridep::patch_encode(at<const uint16_t>(values), at<uint16_t>(sent), to_patch_shape(n, mantissa_bits),
                           to_work(lane, scratch), at<uint8_t>(payload), at<int64_t>(results));
}

void patch_decode(Address payload, int64_t bytes, int64_t n, int mantissa_bits, Lane lane, Address scratch,
                  Address held, Address results) {
    require_sizes({bytes});
    hybridep::patch_decode(at<const uint8_t>(payload), bytes, to_patch_shape(n, mantissa_bits),
                           to_work(lane, scratch), at<uint16_t>(held), at<int64_t>(results));
}

#ifdef HYBRIDEP_CUDA

using hybridep::flags_scratch_bytes, hybridep::patch_decode_scratch_bytes, hybridep::patch_encode_scratch_bytes;

#else

hybridep::FactorShape to_factor_shape(int64_t n, int64_t rows, int64_t cols, int64_t rank, int64_t factors_bytes,
                                      int rest_bits, int64_t rest_block, int num_threads, int64_t bytes) {
    require_sizes({n, rows - 1, cols - 1, rank - 1});
    int64_t of_rest = 0;
    if (rest_bits) {
        require_block(rest_block);
        require_bits(rest_bits);
        of_rest = 2 * ((rows * cols + rest_block - 1) / rest_block) + (rows * cols * rest_bits + 7) / 8;
    }
    const int64_t of_factors = (rank * (rows + cols) + 1) / 2 + 4 + rows + cols;
    if (factors_bytes < of_factors || bytes < factors_bytes + of_rest) {
        throw py::value_error("payload: got " + std::to_string(factors_bytes) + " of " + std::to_string(bytes) +
                              " bytes for factors, wanted " + std::to_string(of_factors) + ", and " +
                              std::to_string(of_rest) + " for the rest");
    }
    return {n, rows, cols, rank, factors_bytes, rest_bits, rest_block, num_threads};
}

void encode_factors(int source, Address a, Address other, Address start, Address mix, int64_t n, int64_t rows,
                    int64_t cols, int64_t rank, int64_t factors_bytes, int rest_bits, int64_t rest_block,
                    int num_threads, Address q, Address row_rms, Address col_rms, Address payload, int64_t stride,
                    int64_t bytes, Address is_bad) {
    const hybridep::FactorShape shape =
        to_factor_shape(n, rows, cols, rank, factors_bytes, rest_bits, rest_block, num_threads, bytes);
    hybridep::encode_factors(to_input(source, a, other, n, rows * cols), at<const float>(start),
                             at<const float>(mix), shape,
                             {at<float>(q), at<float>(row_rms), at<float>(col_rms)},
                             to_payloads(payload, stride, bytes), at<uint8_t>(is_bad));
}

void decode_factors(Address payload, int64_t stride, int64_t bytes, int64_t n, int64_t rows, int64_t cols,
                    int64_t rank, int64_t factors_bytes, int rest_bits, int64_t rest_block, int num_threads,
                    bool is_add, Address out) {
    const hybridep::FactorShape shape =
        to_factor_shape(n, rows, cols, rank, factors_bytes, rest_bits, rest_block, num_threads, bytes);
    hybridep::decode_factors(to_payloads(payload, stride, bytes), shape, is_add, at<float>(out));
}

int64_t flags_scratch_bytes(int64_t) { return 0; }
int64_t patch_encode_scratch_bytes(int64_t) { return 0; }
int64_t patch_decode_scratch_bytes(int64_t) { return 0; }

#endif

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    using release_gil = py::call_guard<py::gil_scoped_release>;
    module.doc() = "Token routing and codecs on raw addresses; use it through ds_hybridep.kernels.";
#ifdef HYBRIDEP_CUDA
    module.def("code_error", &hybridep::code_error);
    module.def("plan_scratch_bytes", &hybridep::plan_scratch_bytes);
    module.def("plan_routes", &plan_routes, release_gil());
    module.def("dispatch_rows_on", &dispatch_rows_on, release_gil());
    module.def("combine_rows_on", &combine_rows_on, release_gil());
    module.def("quantise_rows_on", &quantise_rows_on, release_gil());
    module.def("dequantise_rows_on", &dequantise_rows_on, release_gil());
    module.def("combine_rows_backward_on", &combine_rows_backward_on, release_gil());
    module.attr("NONE_WRONG") = hybridep::kNoneWrong;
#else
    module.def("plan_chunks", &plan_chunks);
    module.def("plan_count", &plan_count, release_gil());
    module.def("plan_fill", &plan_fill, release_gil());
    module.def("encode_factors", &encode_factors, release_gil());
    module.def("decode_factors", &decode_factors, release_gil());
#endif
    module.def("start_lifeline", [](int socket, int ms) { return hybridep::Lifeline::get().start(socket, ms); });
    module.def("stop_lifeline", [](int copy) { hybridep::Lifeline::get().stop(copy); });
    module.def("dispatch_rows", &dispatch_rows, release_gil());
    module.def("quantise_rows", &quantise_rows, release_gil());
    module.def("dequantise_rows", &dequantise_rows, release_gil());
    module.def("combine_rows", &combine_rows, release_gil());
    module.def("combine_rows_backward", &combine_rows_backward, release_gil());
    module.def("bit_sums", &bit_sums, release_gil());
    module.def("flags_scratch_bytes", &flags_scratch_bytes);
    module.def("patch_encode_scratch_bytes", &patch_encode_scratch_bytes);
    module.def("patch_decode_scratch_bytes", &patch_decode_scratch_bytes);
    module.def("prepare", &prepare, release_gil());
    module.def("blockwise_encode", &blockwise_encode, release_gil());
    module.def("blockwise_decode", &blockwise_decode, release_gil());
    module.def("compact_encode", &compact_encode, release_gil());
    module.def("compact_decode", &compact_decode, release_gil());
    module.def("patch_encode", &patch_encode, release_gil());
    module.def("patch_decode", &patch_decode, release_gil());
    module.def("write_headers", &write_headers, release_gil());
    module.def("check_headers", &check_headers, release_gil());
}
