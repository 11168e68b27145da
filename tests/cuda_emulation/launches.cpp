// SPDX-License-Identifier: Apache-2.0
//
// What tests ask the emulation about launches, through ctypes.

#include "cuda_emulation.h"

// Blocks of the largest launch since the last call.
extern "C" __attribute__((visibility("default"))) int64_t emulation_largest_grid() {
    return emulation::Machine::get().take_largest_grid();
}
