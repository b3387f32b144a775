// The dtypes lite_ext names, as one enum and one bit each: the vocabulary that all rooms share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lite_ext {

// The order is that of lite_ext/dtypes.py. The first four have kernels; the others only have a bit.
enum class DType : std::uint8_t {
    float16,
    bfloat16,
    float32,
    float64,
    float8_e4m3fn,
    float8_e5m2,
    float8_e4m3fnuz,
    float8_e5m2fnuz,
    float8_e8m0fnu,
    float4_e2m1fn_x2,
    none,  // integer, bool, complex, quantised: never converted
};

inline constexpr std::size_t kKernelDTypes = 4;
inline constexpr std::uint32_t kKernelMask = (1U << kKernelDTypes) - 1;
inline constexpr std::uint32_t kAllMask = (1U << static_cast<unsigned>(DType::none)) - 1;

constexpr std::uint32_t bit(DType dtype) { return dtype == DType::none ? 0U : 1U << static_cast<unsigned>(dtype); }

constexpr bool has_kernel(DType dtype) { return static_cast<std::size_t>(dtype) < kKernelDTypes; }

// Bytes an element, for the dtypes that have kernels.
constexpr std::size_t item_size(DType dtype) {
    switch (dtype) {
        case DType::float16:
        case DType::bfloat16:
            return 2;
        case DType::float32:
            return 4;
        case DType::float64:
            return 8;
        default:
            return 0;
    }
}

}  // namespace lite_ext
