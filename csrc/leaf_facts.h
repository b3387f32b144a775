// What torch knows of a leaf and of this thread, as the plain facts that the plan decides on.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

#include "plan/plan.h"

namespace lite_ext {

// What may watch or change an operation on this thread. Read once a call.
struct ThreadFacts {
    bool plain;          // no dispatch mode, transform, tracer or interposed dispatch key
    bool function_mode;  // a __torch_function__ mode other than that of torch.set_default_device
    bool records_grad;   // autograd sees operations of this thread
};
ThreadFacts thread_facts();

// Whether a leaf of exactly torch.Tensor or Parameter can be converted without the dispatcher, and on which
// device.
plan::LeafFacts leaf_facts(const at::Tensor& leaf, DType dtype);

}  // namespace lite_ext
