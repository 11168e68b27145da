// SPDX-License-Identifier: Apache-2.0
//
// The kernels as a Python module: addresses, sizes and type codes in, errors out.  pybind11 alone, so it compiles in
// seconds.  Callers have checked dtypes, devices and contiguity; sizes, type codes and index ranges are checked here.
// The GIL is released while a kernel runs.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "hybridep_rows.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

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

void require_sizes(std::initializer_list<int64_t> sizes) {
    for (const int64_t size : sizes) {
        if (size < 0) throw py::value_error("size: got " + std::to_string(size) + ", wanted 0 or more");
    }
}

[[noreturn]] void throw_id(const char* name, int64_t id, int64_t limit, const char* of_what) {
    throw py::value_error(std::string(name) + ": holds " + std::to_string(id) + ", but there are " +
                          std::to_string(limit) + " " + of_what + ": wanted ids below " + std::to_string(limit));
}

[[noreturn]] void throw_index(const char* name, int64_t index, int64_t size, const char* of_what) {
    throw py::index_error(std::string(name) + ": holds " + std::to_string(index) + ", but there are " +
                          std::to_string(size) + " " + of_what);
}

hybridep::Routes to_routes(Address topk_idx, Address expert_to_destination, int64_t num_tokens, int64_t top_k,
                           int64_t num_experts, int64_t num_destinations, int64_t num_chunks) {
    require_sizes({num_tokens, top_k, num_experts, num_destinations, num_chunks});
    return {at<const int32_t>(topk_idx),
            at<const int32_t>(expert_to_destination),
            num_tokens,
            top_k,
            num_experts,
            num_destinations};
}

int64_t plan_chunks(int64_t num_tokens, int64_t top_k, int num_threads) {
    require_sizes({num_tokens, top_k});
    return hybridep::plan_chunks(num_tokens, top_k, num_threads);
}

// Returns R.
int64_t plan_count(Address topk_idx, Address expert_to_destination, int64_t num_tokens, int64_t top_k,
                   int64_t num_experts, int64_t num_destinations, int64_t num_chunks, Address chunk_rows,
                   Address rows_per_destination) {
    const hybridep::Routes routes =
        to_routes(topk_idx, expert_to_destination, num_tokens, top_k, num_experts, num_destinations, num_chunks);
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
    const hybridep::Routes routes =
        to_routes(topk_idx, expert_to_destination, num_tokens, top_k, num_experts, num_destinations, num_chunks);
    hybridep::plan_fill(routes, num_chunks, at<int64_t>(chunk_rows), at<int64_t>(row_to_token),
                        at<int32_t>(row_topk_idx), at<int64_t>(slot_to_row), at<int64_t>(first_slot_to_row));
}

void dispatch_rows(Address x, Address row_to_token, int64_t num_tokens, int64_t num_rows, int64_t row_bytes,
                   int num_threads, Address out) {
    require_sizes({num_tokens, num_rows, row_bytes});
    const int64_t wrong = hybridep::dispatch_rows(at<const void>(x), at<const int64_t>(row_to_token), num_tokens,
                                                  num_rows, row_bytes, num_threads, at<void>(out));
    if (wrong != hybridep::kAllInRange) {
        throw_index("row_to_token", at<const int64_t>(row_to_token)[wrong], num_tokens, "tokens");
    }
}

void combine_rows(Address rows, int rows_type, Address slot_to_row, Address weights, int64_t num_tokens, int64_t top_k,
                  int64_t num_rows, int64_t hidden, int num_threads, Address out, int out_type) {
    require_sizes({num_tokens, top_k, num_rows, hidden});
    const int64_t wrong = hybridep::combine_rows(
        at<const void>(rows), to_type(rows_type), at<const int64_t>(slot_to_row), at<const float>(weights),
        {num_tokens, top_k, num_rows, hidden}, num_threads, at<void>(out), to_type(out_type));
    if (wrong != hybridep::kAllInRange) {
        throw_index("slot_to_row", at<const int64_t>(slot_to_row)[wrong], num_rows, "rows");
    }
}

void combine_rows_backward(Address grad, int grad_type, Address rows, int rows_type, Address slot_to_row,
                           Address weights, int64_t num_tokens, int64_t top_k, int64_t num_rows, int64_t hidden,
                           int num_threads, Address scratch, Address grad_rows, Address grad_weights) {
    require_sizes({num_tokens, top_k, num_rows, hidden});
    const int64_t wrong = hybridep::combine_rows_backward(
        at<const void>(grad), to_type(grad_type), at<const void>(rows), to_type(rows_type),
        at<const int64_t>(slot_to_row), at<const float>(weights), {num_tokens, top_k, num_rows, hidden}, num_threads,
        at<int64_t>(scratch), at<void>(grad_rows), at<float>(grad_weights));
    if (wrong != hybridep::kAllInRange) {
        throw_index("slot_to_row", at<const int64_t>(slot_to_row)[wrong], num_rows, "rows");
    }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    using release_gil = py::call_guard<py::gil_scoped_release>;
    module.doc() = "Row movement of token routing on raw addresses; use it through ds_hybridep.kernels.";
    module.def("plan_chunks", &plan_chunks);
    module.def("plan_count", &plan_count, release_gil());
    module.def("plan_fill", &plan_fill, release_gil());
    module.def("dispatch_rows", &dispatch_rows, release_gil());
    module.def("combine_rows", &combine_rows, release_gil());
    module.def("combine_rows_backward", &combine_rows_backward, release_gil());
}
