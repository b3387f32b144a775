// Runs the CPU's part of a plan: all elements of all leaves in one parallel region.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "../../dtype.h"

namespace lite_ext::cast::cpu {

struct Item {
    const void* source;
    void* target;
    std::int64_t count;  // elements
    DType source_dtype;
    bool resident;  // the target's pages are there: writing past the caches would fetch new ones slowly
};

// Elements a thread should have at least. Twice ATen's grain, so that a thousand leaves of 64 elements stay on one
// thread: waking another takes longer than it saves there.
inline constexpr std::int64_t kGrain = 65'536;

// Bytes of one output from which it is written past the caches: more than they hold.
inline constexpr std::int64_t kStreamedBytes = std::int64_t{8} << 20;

// The instruction set in use: "baseline" or "avx2". Follows ATen's choice, so ATEN_CPU_CAPABILITY=default
// lowers it.
const char* level_name();

// Touches no Python object; `elements` is the sum of all counts.
void run(std::span<const Item> items, std::int64_t elements, DType target);

// Whether a leaf that is not dense is converted here.
bool can_gather(const c10::TensorImpl& leaf);

// Converts such a leaf into `output`, which has elements.
void run_gathered(const at::Tensor& source, DType source_dtype, const at::Tensor& output, DType target);

}  // namespace lite_ext::cast::cpu
