// SPDX-License-Identifier: Apache-2.0
//
// The type of a CUDA stream, without CUDA's headers.

#pragma once

struct CUstream_st;

namespace hybridep {

// cudaStream_t.  Where a function takes a stream instead of num_threads, all its pointers are of the current device,
// work is only queued, and errors of CUDA are thrown as std::runtime_error with file and line.  Indices that are out
// of range end the kernel with a message on standard output and a CUDA error, since nobody reads them on the host;
// unless told otherwise such functions return kAllInRange.
using Stream = CUstream_st*;

}  // namespace hybridep
