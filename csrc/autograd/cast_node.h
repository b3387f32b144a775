// One autograd node a leaf, the very one that Tensor.to makes.
#pragma once

#include <ATen/core/Tensor.h>

namespace lite_ext::autograd {

// Whether `source.to(dtype)` would record a node now: gradients are enabled on this thread and it requires
// one.
bool needs_node(const at::Tensor& source);

// Makes `output` the differentiable result of a cast of `source`. Call only when needs_node(source).
void attach_node(const at::Tensor& source, const at::Tensor& output);

}  // namespace lite_ext::autograd
