// Makes the tensors that the CPU's casts write to.
#pragma once

#include <ATen/core/Tensor.h>

namespace lite_ext::cast::cpu {

// An uninitialised tensor of the sizes of `source` and of its strides, if it is non-overlapping and dense; else of
// dense strides in the same order, as Tensor.to has them. With a storage of its own that holds exactly its elements.
// As at::empty_strided under the inference mode in force.
// `resident` tells whether the pages of its memory are there already.
at::Tensor empty_like(const at::Tensor& source, caffe2::TypeMeta dtype, bool& resident);

}  // namespace lite_ext::cast::cpu
