// SPDX-License-Identifier: Apache-2.0
//
// As much of CUDA as the kernels of csrc/cuda use, on the CPU and for tests only: the same sources compile with a C++
// compiler and -DHYBRIDEP_EMULATION.  Every CUDA thread is a fiber; a fiber runs until it reaches a barrier or a warp
// operation, and who runs next is drawn anew each time, with one warp far behind the others, so a missing barrier
// shows as a wrong result sooner or later.
//
// Bulk copies are made as late as the barriers allow, so shared memory that is used again too early shows as well.
//
// What it finds: wrong indices and arithmetic, barriers that not all threads reach, lanes that name different masks,
// reads of shared memory before it is written (it starts as 0xcd).  What it cannot find: data races between barriers
// inside a warp, memory ordering, wrong instructions, anything about speed.

#pragma once

#include <math.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

// An mbarrier: arrivals and bytes that the current phase still waits for.
struct Barrier {
    int num_arrivals;
    int num_missing;
    int64_t num_bytes;
    int phase;
};

struct Copy {
    void* to;
    const void* from;
    int num_bytes;
    Barrier* barrier;
};

enum class State { kReady, kAtBlock, kAtWarp, kDone };

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::unique_ptr<char[]> stack;
    bool is_started = false;
    State state = State::kDone;
    unsigned mask = 0;                         // of the warp operation it waits in
    int operation = 0;                         // which one
    uint64_t given = 0;                        // what it gave to it
    uint64_t taken[32];                        // what all lanes gave to it
    std::vector<std::vector<Copy>> stores{1};  // groups of bulk stores that were not made yet, the last one open
};

class Machine {
   public:
    static Machine& get() {
        static Machine machine;
        return machine;
    }

    void launch(const void* kernel, int64_t grid, int block, size_t shared_bytes, std::function<void()> body) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (block < 1 || block > 1024) throw std::runtime_error("emulation: block of " + std::to_string(block));
        if (shared_bytes > kPlainSharedBytes && static_cast<int>(shared_bytes) > shared_limit_of(kernel)) {
            throw std::runtime_error("emulation: more shared memory than the kernel is allowed");
        }
        largest_grid_ = std::max(largest_grid_, grid);
        while (static_cast<int>(fibers_.size()) < block) fibers_.push_back(std::make_unique<Fiber>());
        body_ = std::move(body);
        is_backwards_ = !is_backwards_;
        blockDim = {static_cast<unsigned>(block)};
        gridDim = {static_cast<unsigned>(grid)};
        for (int64_t i = 0; i < grid; ++i) {
            blockIdx = {static_cast<unsigned>(is_backwards_ ? grid - 1 - i : i), 0, 0};
            shared_.assign(shared_bytes / sizeof(uint4) + 1, uint4{0xcdcdcdcd, 0xcdcdcdcd, 0xcdcdcdcd, 0xcdcdcdcd});
            run_block(block);
        }
    }

    // Dynamic shared memory that a kernel may be launched with; it belongs to the kernel and not to a launch.
    void allow_shared(const void* kernel, int bytes) {
        const std::lock_guard<std::mutex> lock(limits_mutex_);
        shared_limits_[kernel] = bytes;
    }

    int64_t take_largest_grid() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return std::exchange(largest_grid_, 0);
    }

    void* shared() { return shared_.data(); }

    // Ends the launch with an error of the type Error.
    template <typename Error>
    [[noreturn]] void fail(const std::string& message) {
        error_ = std::make_exception_ptr(Error(message));
        _longjmp(scheduler_, 1);
    }

    void block_barrier() { wait(State::kAtBlock); }

    // The values of all lanes in `mask`, once they have all called this.
    const uint64_t* exchange(unsigned mask, int operation, uint64_t value) {
        Fiber& self = *fibers_[current_];
        if ((mask >> (current_ % 32) & 1) == 0) fail<std::logic_error>("emulation: a lane is not in its own mask");
        self.mask = mask;
        self.operation = operation;
        self.given = value;
        wait(State::kAtWarp);
        return self.taken;
    }

    int lane() const { return current_ % 32; }

    void arrive(Barrier* barrier, int num_bytes) {
        barrier->num_bytes += num_bytes;
        --barrier->num_missing;
        turn(barrier);
    }

    // Until the phase has ended; meanwhile copies that were started may be made, one at each look.
    void await(Barrier* barrier, int phase) {
        for (int64_t looks = 0; barrier->phase == phase; ++looks) {
            if (looks > 100000) fail<std::logic_error>("emulation: a barrier's phase never ends");
            if (!loads_.empty()) {
                const Copy copy = loads_.back();
                loads_.pop_back();
                require_16_bytes(copy);
                std::memcpy(copy.to, copy.from, copy.num_bytes);
                copy.barrier->num_bytes -= copy.num_bytes;
                turn(copy.barrier);
            }
            wait(State::kReady);
        }
    }

    void bulk_load(void* to, const void* from, int num_bytes, Barrier* barrier) {
        loads_.push_back({to, from, num_bytes, barrier});
        std::swap(loads_.back(), loads_[draw(loads_.size())]);
    }

    void bulk_store(void* to, const void* from, int num_bytes) {
        fibers_[current_]->stores.back().push_back({to, from, num_bytes, nullptr});
    }

    void bulk_commit() { fibers_[current_]->stores.emplace_back(); }

    // Makes all but the last `num_allowed` groups.
    void bulk_wait(int num_allowed) {
        auto& groups = fibers_[current_]->stores;
        while (static_cast<int>(groups.size()) - 1 > num_allowed) {
            for (const Copy& copy : groups.front()) {
                require_16_bytes(copy);
                std::memcpy(copy.to, copy.from, copy.num_bytes);
            }
            groups.erase(groups.begin());
        }
    }

   private:
    size_t draw(size_t below) {
        random_ = random_ * 6364136223846793005u + 1442695040888963407u;
        return (random_ >> 33) % below;
    }

    static void turn(Barrier* barrier) {
        if (barrier->num_missing > 0 || barrier->num_bytes != 0) return;
        barrier->num_missing = barrier->num_arrivals;
        barrier->phase ^= 1;
    }

    void require_16_bytes(const Copy& copy) {
        if ((reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from) | copy.num_bytes) % 16 !=
            0) {
            fail<std::logic_error>("emulation: a bulk copy is not of whole pieces of 16 bytes");
        }
    }

    int shared_limit_of(const void* kernel) {
        const std::lock_guard<std::mutex> lock(limits_mutex_);
        return shared_limits_[kernel];
    }

    static constexpr size_t kPlainSharedBytes = 48 * 1024;
    static constexpr size_t kStackBytes = 64 * 1024;
    static constexpr int64_t kTurnsOfSlowWarp = 2048;  // for so long one warp waits while any other can go on

    static void enter() {
        Machine& machine = get();
        for (;;) {  // the fiber serves the same thread of every block to come
            machine.body_();
            machine.wait(State::kDone);
        }
    }

    void wait(State state) {
        Fiber& self = *fibers_[current_];
        self.state = state;
        if (_setjmp(self.at) == 0) _longjmp(scheduler_, 1);
    }

    void resume(int thread) {
        Fiber& fiber = *fibers_[thread];
        current_ = thread;
        threadIdx = {static_cast<unsigned>(thread), 0, 0};
        if (_setjmp(scheduler_) != 0) return;
        if (fiber.is_started) _longjmp(fiber.at, 1);
        fiber.is_started = true;
        if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.get();
        fiber.start.uc_stack.ss_size = kStackBytes;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, &Machine::enter, 0);
        setcontext(&fiber.start);
    }

    void run_block(int block) {
        std::vector<int> ready(block);
        for (int i = 0; i < block; ++i) {
            ready[i] = i;
            fibers_[i]->state = State::kReady;
        }
        int num_done = 0, num_at_barrier = 0;
        while (num_done < block) {
            if (ready.empty()) {
                if (num_at_barrier == 0 || num_at_barrier + num_done < block) {
                    abandon(block, "emulation: some threads wait for lanes or threads that never come");
                }
                for (int i = 0; i < block; ++i) {
                    if (fibers_[i]->state == State::kAtBlock) make_ready(i, ready);
                }
                num_at_barrier = 0;
            }
            if (++num_turns_ % kTurnsOfSlowWarp == 0) slow_warp_ = static_cast<int>(draw(block / 32 + 1));
            size_t drawn = draw(ready.size());
            for (int again = 0; again < 8 && ready[drawn] / 32 == slow_warp_; ++again) drawn = draw(ready.size());
            std::swap(ready[drawn], ready.back());
            const int thread = ready.back();
            ready.pop_back();
            resume(thread);
            if (error_) abandon(block, "");
            const State state = fibers_[thread]->state;
            num_done += state == State::kDone;
            num_at_barrier += state == State::kAtBlock;
            if (state == State::kAtWarp) finish_exchange(thread, block, ready);
            if (state == State::kReady) ready.push_back(thread);
            if (state == State::kDone && (fibers_[thread]->stores.size() > 1 || !fibers_[thread]->stores[0].empty())) {
                abandon(block, "emulation: a thread ends while its bulk stores still read shared memory");
            }
        }
    }

    // Lets the lanes go on that `thread` waits for, if it was the last of them.
    void finish_exchange(int thread, int block, std::vector<int>& ready) {
        const Fiber& last = *fibers_[thread];
        const int first_lane = thread / 32 * 32;
        for (int lane = 0; lane < 32; ++lane) {
            if ((last.mask >> lane & 1) == 0) continue;
            const int other = first_lane + lane;
            if (other >= block || fibers_[other]->state == State::kDone) {
                abandon(block, "emulation: a mask names a lane that has ended or never was");
            }
            if (fibers_[other]->state != State::kAtWarp) return;
            if (fibers_[other]->mask != last.mask || fibers_[other]->operation != last.operation) {
                abandon(block, "emulation: lanes of a warp meet in different operations or masks");
            }
        }
        for (int lane = 0; lane < 32; ++lane) {
            if ((last.mask >> lane & 1) == 0) continue;
            for (int from = 0; from < 32; ++from) {
                if (last.mask >> from & 1) fibers_[first_lane + lane]->taken[from] = fibers_[first_lane + from]->given;
            }
            make_ready(first_lane + lane, ready);
        }
    }

    void make_ready(int thread, std::vector<int>& ready) {
        fibers_[thread]->state = State::kReady;
        ready.push_back(thread);
    }

    // Forgets fibers that stand somewhere inside a kernel, and throws.
    [[noreturn]] void abandon(int block, const char* message) {
        for (int i = 0; i < block; ++i) {
            if (fibers_[i]->state != State::kDone || error_) fibers_[i]->is_started = false;
            fibers_[i]->stores.assign(1, {});
        }
        loads_.clear();
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
        throw std::logic_error(message);
    }

    std::mutex mutex_;
    int64_t largest_grid_ = 0;
    std::mutex limits_mutex_;  // another one: limits are set while a kernel runs
    std::map<const void*, int> shared_limits_;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<uint4> shared_;
    std::vector<Copy> loads_;  // started and not made
    std::function<void()> body_;
    std::exception_ptr error_;
    jmp_buf scheduler_;
    int current_ = 0;
    bool is_backwards_ = false;
    uint64_t random_ = 1;
    int64_t num_turns_ = 0;
    int slow_warp_ = 0;
};

template <typename T>
uint64_t to_word(T value) {
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    return word;
}

template <typename T>
T from_word(uint64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof(T));
    return value;
}

enum Operation { kShuffle, kVote, kSync };

}  // namespace emulation

// --- Barriers and warp operations -----------------------------------------------------------------------------------

inline void __syncthreads() { emulation::Machine::get().block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::Machine::get().exchange(mask, emulation::kSync, 0); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int from) {
    auto& machine = emulation::Machine::get();
    return emulation::from_word<T>(machine.exchange(mask, emulation::kShuffle, emulation::to_word(value))[from & 31]);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return __shfl_sync(mask, value, emulation::Machine::get().lane() ^ bits);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
    const int lane = emulation::Machine::get().lane();
    return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}

inline unsigned __ballot_sync(unsigned mask, int is_true) {
    const uint64_t* votes = emulation::Machine::get().exchange(mask, emulation::kVote, is_true != 0);
    unsigned result = 0;
    for (int lane = 0; lane < 32; ++lane) {
        if (mask >> lane & 1) result |= static_cast<unsigned>(votes[lane]) << lane;
    }
    return result;
}

// --- Arithmetic and atomics: fibers run one at a time, so plain operations are atomic -------------------------------

using std::max;
using std::min;
inline int __popc(unsigned value) { return std::popcount(value); }

template <typename T, typename U>
T atomicAdd(T* at, U value) {
    return std::exchange(*at, static_cast<T>(*at + value));
}

template <typename T, typename U>
T atomicOr(T* at, U value) {
    return std::exchange(*at, static_cast<T>(*at | value));
}

template <typename T, typename U>
T atomicMin(T* at, U value) {
    return std::exchange(*at, std::min(*at, static_cast<T>(value)));
}

template <typename T, typename U>
T atomicMax(T* at, U value) {
    return std::exchange(*at, std::max(*at, static_cast<T>(value)));
}

// --- The host's side ------------------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {
    size_t sharedSizeBytes = 0;
};
struct CUstream_st;
using cudaStream_t = CUstream_st*;

inline const char* cudaGetErrorName(cudaError_t) { return "cudaSuccess"; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

// EMULATED_SHARED_KIB says how much a block may have: 227 on an H100, and by default less, where less fits.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    const char* given = std::getenv("EMULATED_SHARED_KIB");
    *value = (given == nullptr ? 64 : std::atoi(given)) * 1024;
    return cudaSuccess;
}

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
    emulation::Machine::get().allow_shared(kernel, value);
    return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
    if (bytes > 0) std::memset(at, value, bytes);
    return cudaSuccess;
}
