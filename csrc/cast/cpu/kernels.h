// Contiguous conversions on the CPU, one function a pair of dtypes, chosen for the processor once.
#pragma once

#include <cstdint>

#include "../../dtype.h"

namespace lite_ext::cast::cpu {

using Kernel = void (*)(const void* source, void* target, std::int64_t count);

// avx2 stands for AVX2 with F16C; streaming writes past the caches.
enum class Level : std::uint8_t { baseline, avx2, avx2_streaming };

// The kernel of a pair of different dtypes that both have kernels. Source and target do not overlap; both are
// aligned to their element.
Kernel kernel(DType source, DType target, Level level);

}  // namespace lite_ext::cast::cpu
