// SPDX-License-Identifier: Apache-2.0
//
// Elements of fp32, bf16, fp16 and fp8 tensors, and their conversion on hosts and on CUDA devices.  Rounding is to
// nearest even everywhere; a nan stays a nan, but its bits may differ between hosts and devices.

#pragma once

#include <bit>
#include <cstdint>

#include "hybridep_rows.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HYBRIDEP_BOTH __host__ __device__ __forceinline__
#else
#define HYBRIDEP_BOTH inline
#endif

namespace hybridep {

// Conversions by integer arithmetic and selects: no branches, so loops over them become vectors on every target.

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

// e4m3fn: 4 bits of exponent, 3 of mantissa, no inf, nan is 0x7f; magnitudes from 2^-9 to 448.
struct Float8 {
    uint8_t bits;
};

HYBRIDEP_BOTH float to_float(float value) { return value; }

HYBRIDEP_BOTH float to_float(BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

// 5 exponent bits become 8: shifted into place the value is too small by 2^112, subnormals included; the largest
// exponent means inf or nan and needs the largest exponent again.
HYBRIDEP_BOTH float to_float(Float16 value) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(value.bits));
#else
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    // Built with a normal exponent and then reduced, because a subnormal product reads as 0 under flush-to-zero.
    const float normal = std::bit_cast<float>(magnitude + (112u << 23));
    const float subnormal = std::bit_cast<float>(magnitude + (113u << 23)) - std::bit_cast<float>(113u << 23);
    const float finite = magnitude < (1u << 23) ? subnormal : normal;
    const uint32_t special = magnitude | 0x7f800000u;
    const uint32_t bits = magnitude >= (31u << 23) ? special : std::bit_cast<uint32_t>(finite);
    return std::bit_cast<float>(bits | sign);
#endif
}

// As above for 4 exponent bits; one source for hosts and devices, since not all devices have the instructions.
HYBRIDEP_BOTH float to_float(Float8 value) {
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fu) << 20;
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80u) << 24;
    const float normal = std::bit_cast<float>(magnitude + (120u << 23));
    const float subnormal = std::bit_cast<float>(magnitude + (121u << 23)) - std::bit_cast<float>(121u << 23);
    const float finite = magnitude < (1u << 23) ? subnormal : normal;
    const uint32_t bits = magnitude == 0x7fu << 20 ? 0x7fc00000u : std::bit_cast<uint32_t>(finite);
    return std::bit_cast<float>(bits | sign);
}

template <typename T>
HYBRIDEP_BOTH T from_float(float value);

template <>
HYBRIDEP_BOTH float from_float<float>(float value) {
    return value;
}

// Round to nearest even: add just under half of the last kept bit, and the rest when that bit is odd.  A nan keeps its
// sign and payload and is made quiet, since dropping the low bits of a nan can leave inf.
template <>
HYBRIDEP_BOTH BFloat16 from_float<BFloat16>(float value) {
#ifdef __CUDA_ARCH__
    return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
#endif
}

// As above with 13 dropped bits and the exponent lowered by 112; rounding carries over into inf by itself.  Below the
// smallest normal 2^-14, adding 0.5 moves the kept bits to the low end of the fp32 mantissa, rounded by the addition.
template <>
HYBRIDEP_BOTH Float16 from_float<Float16>(float value) {
#ifdef __CUDA_ARCH__
    return {__half_as_ushort(__float2half_rn(value))};
#else
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - (126u << 23);
    const uint32_t nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    const uint32_t special = magnitude > 0x7f800000u ? nan : 0x7c00u;
    const uint32_t result = magnitude >= (143u << 23) ? special : finite;
    return {static_cast<uint16_t>(result | ((bits >> 16) & 0x8000u))};
#endif
}

// As above with 20 dropped bits and the exponent lowered by 120.  Values that are too large become 448.  Below the
// smallest normal 2^-6, adding 2^14 moves the kept bits to the low end.
template <>
HYBRIDEP_BOTH Float8 from_float<Float8>(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
    const uint32_t rounded = magnitude < (121u << 23) ? subnormal : normal;
    const uint32_t finite = rounded < 0x7eu ? rounded : 0x7eu;
    const uint32_t result = magnitude > 0x7f800000u ? 0x7fu : finite;
    return {static_cast<uint8_t>(result | ((bits >> 24) & 0x80u))};
}

template <typename T>
inline constexpr float kLargestFinite = 0x1.fffffep127f;
template <>
inline constexpr float kLargestFinite<BFloat16> = 0x1.fep127f;
template <>
inline constexpr float kLargestFinite<Float16> = 65504.0f;

// Calls body(T{}) with the element type that `type` names.
template <typename Body>
void with_type(Type type, Body&& body) {
    switch (type) {
        case Type::kFloat32:
            return body(float{});
        case Type::kBFloat16:
            return body(BFloat16{});
        case Type::kFloat16:
            return body(Float16{});
    }
}

}  // namespace hybridep
