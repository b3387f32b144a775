// torch.ops.lite_ext.cast: the conversion as an operator, for graphs that are made ahead of time.
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/to.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <vector>

namespace {

bool is_convertible(c10::ScalarType type) {
    return type == c10::kHalf || type == c10::kBFloat16 || type == c10::kFloat || type == c10::kDouble;
}

// Made of operators that torch knows, so that autograd, vmap, fake tensors and compilers need nothing from here. An
// operator must not return its inputs, so what needs no conversion is copied.
std::vector<at::Tensor> cast(const std::vector<at::Tensor>& tensors, c10::ScalarType dtype) {
    TORCH_CHECK_TYPE(is_convertible(dtype), "lite_ext::cast: dtype must be float16, bfloat16, float32 or float64, got ",
                     dtype);
    std::vector<at::Tensor> results;
    results.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
        results.push_back(is_convertible(tensor.scalar_type()) ? tensor.to(dtype, /*non_blocking=*/false, /*copy=*/true)
                                                               : tensor.clone());
    }
    return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(lite_ext, CompositeImplicitAutograd, library) { library.impl("cast", cast); }

// The key above does not reach vmap, which would look for a batching rule.
TORCH_LIBRARY_IMPL(lite_ext, FuncTorchBatched, library) { library.impl("cast", cast); }
