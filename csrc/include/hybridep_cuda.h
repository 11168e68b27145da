// SPDX-License-Identifier: Apache-2.0
//
// What all CUDA sources share: checked calls and launches, vectors of 16 bytes, sums over warps.  For .cu files only.
//
// The sources are compiled with -fmad=false, so products and sums round separately, as on the CPU.  Where that does
// not matter, they call fmaf.  With HYBRIDEP_EMULATION they compile as C++ and run on the CPU, in tests.

#pragma once

#ifdef HYBRIDEP_EMULATION
#include "cuda_emulation.h"
#else
#include <cuda_runtime.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>

#include "hybridep_elements.h"
#include "hybridep_stream.h"

namespace hybridep {

inline constexpr int kLanes = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// --- The host's side ------------------------------------------------------------------------------------------------

inline void check(cudaError_t error, std::source_location where = std::source_location::current()) {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error) + ", at " +
                             where.file_name() + ":" + std::to_string(where.line()) + " in " + where.function_name());
}

// Bytes of shared memory that a block can have on the current device.
inline int max_shared_bytes() {
    int device = 0, value = 0;
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return value;
}

// Allows launches of a kernel with as much shared memory as the current device has.  The limit is the kernel's, and
// threads launch it at the same time with different sizes, so it is set once and never lowered.
inline void allow_all_shared_memory(const void* kernel, std::source_location where) {
    static std::mutex mutex;
    static std::set<std::pair<int, const void*>> done;
    int device = 0;
    check(cudaGetDevice(&device), where);
    const std::lock_guard<std::mutex> lock(mutex);
    if (done.contains({device, kernel})) return;
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), where);
    const int left = max_shared_bytes() - static_cast<int>(attributes.sharedSizeBytes);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, left), where);
    done.emplace(device, kernel);
}

inline int64_t blocks_for(int64_t num_threads, int block) { return (num_threads + block - 1) / block; }

// How a kernel is launched.  A grid of 0 blocks launches nothing.
struct Launch {
    int64_t grid;
    int block;
    Stream stream;
    size_t shared_bytes = 0;
    std::source_location where = std::source_location::current();
};

inline constexpr int64_t kMaxGrid = 0x7fffffff;
inline constexpr size_t kPlainSharedBytes = 48 * 1024;  // for more than this, a kernel needs a permission

template <typename... Wanted, typename... Given>
void launch(const Launch& how, void (*kernel)(Wanted...), Given... arguments) {
    if (how.grid == 0) return;
    if (how.grid < 0 || how.grid > kMaxGrid) {
        throw std::runtime_error("grid of " + std::to_string(how.grid) + " blocks in " + how.where.function_name());
    }
    const auto* address = reinterpret_cast<const void*>(kernel);
    if (how.shared_bytes > kPlainSharedBytes) allow_all_shared_memory(address, how.where);
#ifdef HYBRIDEP_EMULATION
    emulation::Machine::get().launch(address, how.grid, how.block, how.shared_bytes, [=] { kernel(arguments...); });
#else
    kernel<<<static_cast<unsigned>(how.grid), how.block, how.shared_bytes, how.stream>>>(
        static_cast<Wanted>(arguments)...);
    check(cudaGetLastError(), how.where);
#endif
}

inline void fill_bytes(void* at, int value, int64_t bytes, Stream stream,
                       std::source_location where = std::source_location::current()) {
    if (bytes > 0) check(cudaMemsetAsync(at, value, static_cast<size_t>(bytes), stream), where);
}

// Divides the scratch of a workspace into pieces.  Without memory it only adds up the pieces, so the code that takes
// them also says how many bytes they need.
class Scratch {
   public:
    explicit Scratch(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}

    template <typename T>
    T* take(int64_t count) {
        constexpr int64_t kAlignment = 256;
        char* piece = memory_ == nullptr ? nullptr : memory_ + bytes_;
        bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
        return reinterpret_cast<T*>(piece);
    }

    int64_t bytes() const { return bytes_; }

   private:
    char* memory_;
    int64_t bytes_ = 0;
};

// Whether every pointer is a multiple of `bytes`.
template <typename... Pointers>
bool is_aligned(size_t bytes, Pointers... pointers) {
    return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

// --- The device's side ----------------------------------------------------------------------------------------------

// Ends the kernel, and with it all work of the process on this device.
__device__ __noinline__ inline void fail_index(const char* name, int64_t index, int64_t size, const char* of_what) {
#ifdef HYBRIDEP_EMULATION
    emulation::Machine::get().fail<std::out_of_range>(std::string(name) + ": holds " + std::to_string(index) +
                                                      ", but there are " + std::to_string(size) + " " + of_what);
#else
    printf("ds_hybridep: %s: holds %lld, but there are %lld %s\n", name, static_cast<long long>(index),
           static_cast<long long>(size), of_what);
    __trap();
#endif
}

// The same for a packet that begins with the bytes `start` or has a `stamp` other than what is wanted.
__device__ __noinline__ inline void fail_packet(uint32_t start, uint32_t stamp, uint32_t wanted_start,
                                                uint32_t wanted_stamp) {
    constexpr char kMessage[] =
        "ds_hybridep: packet starts with %#010x and stamp %#010x, wanted %#010x and %#010x; encode and decode with "
        "equal codec settings and shapes\n";
#ifdef HYBRIDEP_EMULATION
    char text[sizeof(kMessage) + 16];
    std::snprintf(text, sizeof(text), kMessage, start, stamp, wanted_start, wanted_stamp);
    emulation::Machine::get().fail<std::runtime_error>(text);
#else
    printf(kMessage, start, stamp, wanted_start, wanted_stamp);
    __trap();
#endif
}

// Shared memory whose size is given at the launch.
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
#ifdef HYBRIDEP_EMULATION
    return static_cast<T*>(emulation::Machine::get().shared());
#else
    extern __shared__ uint4 hybridep_shared[];
    return reinterpret_cast<T*>(hybridep_shared);
#endif
}

__device__ __forceinline__ int lane_idx() { return static_cast<int>(threadIdx.x) % kLanes; }
__device__ __forceinline__ int warp_idx() { return static_cast<int>(threadIdx.x) / kLanes; }
__device__ __forceinline__ int64_t global_thread() {
    return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t global_warp() { return global_thread() / kLanes; }
__device__ __forceinline__ int64_t num_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// kWidth neighbouring elements, loaded and stored in pieces of up to 16 bytes.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
    T values[kWidth];
};

template <int kWidth, typename T>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* from) {
    return *reinterpret_cast<const Pack<T, kWidth>*>(from);
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, kWidth>& pack) {
    *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
}

// Sum over the lanes of a warp by halving; every lane gets it.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int bits = kLanes / 2; bits > 0; bits /= 2) value += __shfl_xor_sync(kAllLanes, value, bits);
    return value;
}

}  // namespace hybridep
