// Casts the elements of a leaf that is not dense (a column, every other row): they are gathered in the order in which
// the output's memory holds them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "../../dtype.h"
#include "kernels.h"

namespace lite_ext::cast::cpu {

inline constexpr std::size_t kMostGatheredDims = 8;

// Elements up to which a leaf is gathered by one thread; ATen's copy of more is parallel and pays for its set-up.
inline constexpr std::int64_t kMostGathered = 8'192;

// Where the elements are, from the dimension that the output's memory steps through last to the one that it steps
// through first.
struct Places {
    std::array<std::int64_t, kMostGatheredDims> sizes;  // each at least 1
    std::array<std::int64_t, kMostGatheredDims> steps;  // in elements of the source; 0 where it is expanded
    std::size_t dims;
};

void gather(const void* source, DType source_dtype, const Places& places, void* target, DType target_dtype,
            Kernel kernel);

}  // namespace lite_ext::cast::cpu
