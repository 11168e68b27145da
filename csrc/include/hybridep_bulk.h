// SPDX-License-Identifier: Apache-2.0
//
// Bulk copies between global and shared memory, and the barriers that tell when they are done.  They need compute
// capability 9.0 or later.  One thread starts a copy of up to a megabyte.  For .cu files only.
//
// Addresses and sizes of copies are multiples of 16 bytes.  A barrier counts arrivals and bytes.  A phase ends when
// all its arrivals and all bytes that they announced have come.  Phases are numbered 0, 1, 0, 1, ...

#pragma once

#include "hybridep_cuda.h"

namespace hybridep {

#ifdef HYBRIDEP_EMULATION

using Barrier = emulation::Barrier;

inline void barrier_init(Barrier* barrier, int num_arrivals) { *barrier = {num_arrivals, num_arrivals, 0, 0}; }
inline void barrier_publish() {}
inline void barrier_arrive(Barrier* barrier, int num_bytes) { emulation::Machine::get().arrive(barrier, num_bytes); }
inline void barrier_wait(Barrier* barrier, int phase) { emulation::Machine::get().await(barrier, phase); }
inline void bulk_load(void* shared, const void* global, int num_bytes, Barrier* barrier) {
    emulation::Machine::get().bulk_load(shared, global, num_bytes, barrier);
}
inline void bulk_store(void* global, const void* shared, int num_bytes) {
    emulation::Machine::get().bulk_store(global, shared, num_bytes);
}
inline void bulk_commit() { emulation::Machine::get().bulk_commit(); }
template <int kAllowed>
void bulk_wait_read() {
    emulation::Machine::get().bulk_wait(kAllowed);
}

#else

using Barrier = uint64_t;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Called by one thread, before barrier_publish and a barrier of the block.
__device__ __forceinline__ void barrier_init(Barrier* barrier, int num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals)
                 : "memory");
}

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void barrier_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// One arrival, which announces that num_bytes will come.
__device__ __forceinline__ void barrier_arrive(Barrier* barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(num_bytes)
                 : "memory");
}

// Waits until the phase has ended.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, int phase) {
    uint32_t is_done = 0;
    while (is_done == 0) {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done;\n"
            "}"
            : "=r"(is_done)
            : "r"(shared_address(barrier)), "r"(phase)
            : "memory");
    }
}

__device__ __forceinline__ void bulk_load(void* shared, const void* global, int num_bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(num_bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, int num_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(num_bytes)
                 : "memory");
}

// Makes a group of the stores that this thread has started since the last call.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all groups of this thread, except the last kAllowed, have read the bytes that they store.
template <int kAllowed>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kAllowed) : "memory");
}

#endif
#endif

#if defined(HYBRIDEP_EMULATION) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define HYBRIDEP_HAS_BULK 1
#endif

// Whether the code of `kernel` that the current device runs has bulk copies.  The device alone does not tell: it can
// also run PTX that was compiled for an earlier device.
template <typename... Wanted>
bool has_bulk_copies([[maybe_unused]] void (*kernel)(Wanted...)) {
#ifdef HYBRIDEP_EMULATION
    return true;
#else
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel));
    return attributes.ptxVersion >= 90;
#endif
}

}  // namespace hybridep
