// The conversion of one element, as arithmetic on bits: what every device and every tail agrees on.
// Rounding is to nearest, ties to even; whatever is narrower than float32 goes through float32, as in ATen.
#pragma once

#include <bit>
#include <cstdint>

#include "../dtype.h"

#ifdef __CUDACC__
#define LITE_EXT_HOST_DEVICE __host__ __device__
#else
#define LITE_EXT_HOST_DEVICE
#endif

namespace lite_ext::cast {

// The element types as they lie in memory.
template <DType>
struct Storage;
template <>
struct Storage<DType::float16> {
    using type = std::uint16_t;
};
template <>
struct Storage<DType::bfloat16> {
    using type = std::uint16_t;
};
template <>
struct Storage<DType::float32> {
    using type = float;
};
template <>
struct Storage<DType::float64> {
    using type = double;
};
template <DType D>
using storage_t = typename Storage<D>::type;

namespace bits {

inline constexpr std::uint32_t kFloatSign = 0x80000000U;
inline constexpr std::uint32_t kFloatInfinity = 0x7F800000U;
inline constexpr std::uint16_t kHalfInfinity = 0x7C00U;
inline constexpr std::uint16_t kHalfQuietNan = 0x7E00U;
inline constexpr std::uint16_t kBFloatQuietNan = 0x7FC0U;

LITE_EXT_HOST_DEVICE constexpr float bfloat16_to_float(std::uint16_t value) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

LITE_EXT_HOST_DEVICE constexpr std::uint16_t float_to_bfloat16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    // Rounding a NaN up could carry into the exponent and make it infinite.
    const bool nan = (word & ~kFloatSign) > kFloatInfinity;
    const std::uint32_t rounded = (word + 0x7FFFU + ((word >> 16) & 1U)) >> 16;
    return static_cast<std::uint16_t>(nan ? kBFloatQuietNan : rounded);
}

LITE_EXT_HOST_DEVICE constexpr float half_to_float(std::uint16_t value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x8000U) << 16;
    const std::uint32_t magnitude = value & 0x7FFFU;
    if (magnitude >= kHalfInfinity) {  // infinity, NaN: the payload stays, made quiet
        const std::uint32_t quiet = magnitude > kHalfInfinity ? 0x00400000U : 0U;
        return std::bit_cast<float>(sign | kFloatInfinity | ((magnitude & 0x03FFU) << 13) | quiet);
    }
    if (magnitude < 0x0400U) {  // zero, subnormal: a small integer times 2^-24
        const float scaled = static_cast<float>(magnitude) * 0x1p-24F;
        return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
    }
    return std::bit_cast<float>(sign | ((magnitude << 13) + ((127U - 15U) << 23)));
}

LITE_EXT_HOST_DEVICE constexpr std::uint16_t float_to_half(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>((word & kFloatSign) >> 16);
    const std::uint32_t magnitude = word & ~kFloatSign;
    std::uint32_t half = 0;
    if (magnitude > kFloatInfinity) {
        half = kHalfQuietNan;
    } else if (magnitude >= std::bit_cast<std::uint32_t>(65520.0F)) {  // rounds past the largest half
        half = kHalfInfinity;
    } else if (magnitude >= std::bit_cast<std::uint32_t>(0x1p-14F)) {  // a normal half
        const std::uint32_t odd = (magnitude >> 13) & 1U;
        half = (magnitude - ((127U - 15U) << 23) + 0x0FFFU + odd) >> 13;
    } else {
        // The sum's last mantissa bit is worth 2^-24, the half's least subnormal: the addition rounds to it.
        const float sum = std::bit_cast<float>(magnitude) + 0.5F;
        half = std::bit_cast<std::uint32_t>(sum) - std::bit_cast<std::uint32_t>(0.5F);
    }
    return static_cast<std::uint16_t>(half | sign);
}

}  // namespace bits

template <DType Source, DType Target>
LITE_EXT_HOST_DEVICE constexpr storage_t<Target> convert_element(storage_t<Source> value) {
    static_assert(has_kernel(Source) && has_kernel(Target) && Source != Target);
    if constexpr (Source == DType::float32 && Target == DType::float64) {
        return static_cast<double>(value);
    } else if constexpr (Target == DType::float64) {
        return static_cast<double>(convert_element<Source, DType::float32>(value));
    } else if constexpr (Source == DType::float64 && Target == DType::float32) {
        return static_cast<float>(value);
    } else if constexpr (Source == DType::float64) {
        return convert_element<DType::float32, Target>(static_cast<float>(value));
    } else if constexpr (Source == DType::float32) {
        return Target == DType::bfloat16 ? bits::float_to_bfloat16(value) : bits::float_to_half(value);
    } else if constexpr (Target == DType::float32) {
        return Source == DType::bfloat16 ? bits::bfloat16_to_float(value) : bits::half_to_float(value);
    } else {
        return convert_element<DType::float32, Target>(convert_element<Source, DType::float32>(value));
    }
}

}  // namespace lite_ext::cast
