// SPDX-License-Identifier: Apache-2.0
//
// The compact form of fp32 tensors: 20 bits per element, rounded at random.  ds_hybridep/codecs/compact.py draws the
// layout and says what each function computes.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "hybridep_elements.h"

namespace hybridep::compact {

inline constexpr int64_t kBlock = 128;
inline constexpr int64_t kLanesPerBlock = 32;  // lane l has elements l, l + 32, l + 64 and l + 96
inline constexpr int64_t kWords = 161;
inline constexpr float kLargest = 524287.0f;
inline constexpr int32_t kSmallestExponent = -107;
inline constexpr uint32_t kSmallestNormalBits = 0x00800000u;

HYBRIDEP_BOTH uint32_t mix(uint32_t number) {
    number ^= number >> 16;
    number *= 0x7feb352du;
    number ^= number >> 15;
    number *= 0x846ca68bu;
    return number ^ (number >> 16);
}

// 2^exponent, for exponents from -126 to 127.
HYBRIDEP_BOTH float power(int32_t exponent) {
    return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// e of a block whose largest magnitude has these bits.
HYBRIDEP_BOTH int32_t exponent_of(uint32_t largest) {
    int32_t exponent = static_cast<int32_t>(largest >> 23) - 126;
    if (exponent < kSmallestExponent) exponent = kSmallestExponent;
    return std::bit_cast<float>(largest) * power(19 - exponent) > kLargest ? exponent + 1 : exponent;
}

// The multiple of the unit that an element becomes.  inverse: 1 / unit.  place: its number in all blocks.
HYBRIDEP_BOTH int32_t multiple_of(float value, float inverse, uint32_t place, uint32_t seed) {
    const float scaled = value * inverse;
    const float below = floorf(scaled);
    const float chance = (static_cast<float>(mix((place * 0x9e3779b9u) ^ seed) >> 9) + 0.5f) * 0x1p-23f;
    return static_cast<int32_t>(below) + (chance < scaled - below ? 1 : 0);
}

}  // namespace hybridep::compact
