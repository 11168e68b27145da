// SPDX-License-Identifier: Apache-2.0
//
// Scales and codes of single elements, for the CPU and for CUDA devices.

#pragma once

#include <bit>
#include <cstdint>

#include "hybridep_elements.h"

namespace hybridep {

inline constexpr uint32_t kInfinity = 0x7f800000u;
inline constexpr uint32_t kNan = 0x7fc00000u;  // written where a packet was lost
inline constexpr float kSmallestNormal = 0x1p-126f;

HYBRIDEP_BOTH int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

HYBRIDEP_BOTH uint32_t magnitude_bits(float value) { return std::bit_cast<uint32_t>(value) & 0x7fffffffu; }

// --- Scales ---------------------------------------------------------------------------------------------------------
// A scale is the upper half of an fp32 number that is not negative.

inline constexpr uint16_t kScaleNan = 0x7fc0;  // for every nan: rounding the nan of GPUs, 0x7fffffff, would give 0

HYBRIDEP_BOTH bool is_nan(float value) { return magnitude_bits(value) > kInfinity; }

HYBRIDEP_BOTH float scale_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

HYBRIDEP_BOTH uint16_t drop_subnormal(uint16_t bits) { return scale_value(bits) < kSmallestNormal ? 0 : bits; }

HYBRIDEP_BOTH uint16_t round_scale(float value) {
    if (is_nan(value)) return kScaleNan;
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return drop_subnormal(static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16));
}

HYBRIDEP_BOTH uint16_t round_scale_up(float value) {
    if (is_nan(value)) return kScaleNan;
    return drop_subnormal(static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + 0xffffu) >> 16));
}

HYBRIDEP_BOTH bool is_scale_finite(uint16_t bits) { return (bits & 0x7f80u) != 0x7f80u; }

// The number to divide elements by.  It is infinite if the scale is 0, so that quotients are 0.
HYBRIDEP_BOTH float divisor(uint16_t scale) {
    const float value = scale_value(scale);
    return value == 0.0f ? std::bit_cast<float>(kInfinity) : value;
}

// --- Codes ----------------------------------------------------------------------------------------------------------

// The code of one element; s is divisor(scale).  Adding 1.5 * 2^23 rounds to an integer, halves to even.
HYBRIDEP_BOTH uint32_t code_of(float value, float s, int bits) {
    if (bits == 8 || bits == 4) {
        const float largest = bits == 8 ? 127.0f : 7.0f;
        float code = value / s + 0x1.8p23f;
        code -= 0x1.8p23f;
        code = code > largest ? largest : code;
        code = code < -largest ? -largest : code;
        return static_cast<uint32_t>(static_cast<int32_t>(code + largest + 1.0f));
    }
    const float code = value / s;
    return static_cast<uint32_t>((code >= -1.0f) + (code >= 0.0f) + (code >= 1.0f));
}

HYBRIDEP_BOTH float value_of(uint32_t code, float scale, int bits) {
    const float offset = bits == 8 ? 128.0f : bits == 4 ? 8.0f : 1.5f;
    return (static_cast<float>(code) - offset) * scale;
}

// The scale of a block, from its largest magnitude (8 and 4 bits) or its mean magnitude (2 bits).
HYBRIDEP_BOTH uint16_t scale_from(float size, int bits) {
    if (bits == 8) return round_scale_up(size / 127.0f);
    if (bits == 4) return round_scale_up(size / 7.0f);
    return round_scale(size * 1.25f);
}

// --- Rows of one byte an element ------------------------------------------------------------------------------------
// The scale of a block is a power of two.  It is stored as one byte, its exponent in fp32.  Elements are multiplied by
// the inverse of the scale, which is exact.

inline constexpr int32_t kSmallestExponent = 17;  // so that no step of a format is a subnormal number
inline constexpr uint8_t kNotFinite = 255;        // a scale of inf; all codes are 0, and inf times 0 makes nan

// Codes of elements divided by their scale.  kLargest is the largest magnitude that still rounds to the largest code.
struct Int8Code {
    static constexpr float kLargest = 127.0f;
    static HYBRIDEP_BOTH uint8_t encode(float scaled) {
        return static_cast<uint8_t>(std::bit_cast<uint32_t>(scaled + 0x1.8p23f));  // the low bits are the integer
    }
    static HYBRIDEP_BOTH float decode(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

struct Float8Code {
    static constexpr float kLargest = 464.0f;
    static HYBRIDEP_BOTH uint8_t encode(float scaled) { return from_float<Float8>(scaled).bits; }
    static HYBRIDEP_BOTH float decode(uint8_t code) { return to_float(Float8{code}); }
};

// Calls body(Code{}) for the codes of a format.
template <typename Body>
void with_code(RowFormat format, Body&& body) {
    switch (format) {
        case RowFormat::kInt8:
            return body(Int8Code{});
        case RowFormat::kFloat8:
            return body(Float8Code{});
    }
}

// Exponent of the least scale that brings the largest magnitude to kLargest or less; `largest` holds its bits.
template <typename Code>
HYBRIDEP_BOTH uint8_t exponent_of(uint32_t largest) {
    // Magnitudes have the order of their bits, and one more in the exponent is 2^23 more in the bits.
    constexpr int32_t code_bits = std::bit_cast<int32_t>(Code::kLargest);
    const int32_t exponent = ((static_cast<int32_t>(largest) - code_bits + 0x7fffff) >> 23) + 127;
    const int32_t finite = exponent < kSmallestExponent ? kSmallestExponent : exponent;
    return largest < kInfinity ? static_cast<uint8_t>(finite) : kNotFinite;
}

HYBRIDEP_BOTH float scale_of_exponent(uint8_t exponent) {
    return std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
}

// The number to multiply elements by.  The one of kNotFinite is not used.
HYBRIDEP_BOTH float inverse_scale(uint8_t exponent) {
    return std::bit_cast<float>((254u - static_cast<uint32_t>(exponent)) << 23);
}

template <typename Code>
HYBRIDEP_BOTH uint8_t row_code(float value, float inverse, bool is_finite) {
    return Code::encode(is_finite ? value * inverse : 0.0f);
}

// `largest` is the bound of finite values; nan passes.
template <typename Code>
HYBRIDEP_BOTH float row_value(uint8_t code, float scale, float largest) {
    const float value = Code::decode(code) * scale;
    const float bounded = value > largest ? largest : value;
    return bounded < -largest ? -largest : bounded;
}

}  // namespace hybridep
