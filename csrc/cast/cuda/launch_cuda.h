// Runs the CUDA part of a plan through torch: its allocator, its current stream, its errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "../../dtype.h"

namespace lite_ext::cast::cuda {

// Whether this build has the kernels. Without them there is no run(), and CUDA tensors go through Tensor.to.
#ifdef LITE_EXT_WITH_CUDA
inline constexpr bool kBuilt = true;
#else
inline constexpr bool kBuilt = false;
#endif

struct Item {
    const at::Tensor* source;
    at::Tensor* output;
    DType source_dtype;
};

// Makes the outputs, each with a storage of its own, and enqueues their conversion on the current stream of
// `device`, which holds all sources; they are non-overlapping and dense. Touches no Python object. Raises
// torch's own errors; outputs made before stay with the caller.
void run(std::span<const Item> items, c10::DeviceIndex device, c10::ScalarType type, DType target);

}  // namespace lite_ext::cast::cuda
