// SPDX-License-Identifier: Apache-2.0
//
// The type of a CUDA stream, without CUDA's headers.

#pragma once

struct CUstream_st;

namespace hybridep {

// cudaStream_t.  If a function takes a stream instead of num_threads, all its pointers are of the current device, and
// it only queues work.  It throws errors of CUDA as std::runtime_error with file and line.  An index out of range ends
// the kernel with a message on standard output and a CUDA error, since the host does not read indices.  Unless told
// otherwise, such a function returns kAllInRange.
using Stream = CUstream_st*;

// A stream, and memory for what the kernels of one call leave to each other there.  A function that takes it instead of
// num_threads needs as many bytes as ..._scratch_bytes says, at a multiple of 16.
struct Workspace {
    Stream stream;
    void* scratch;
};

}  // namespace hybridep
