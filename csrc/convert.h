// The conductor: walk, plan, cast, autograd, rebuild, in this order and never back.
#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "dtype.h"
#include "tree/python.h"

namespace lite_ext {

// What one call converts. Pointers are borrowed for the call.
struct Conversion {
    PyObject* dtype_object;  // the torch.dtype; NULL only looks
    c10::ScalarType scalar_type;
    DType target;
    std::uint32_t source_mask;
    PyObject* skip;  // frozenset of names
};

// A conversion to `dtype`, a torch.dtype or NULL.
Conversion conversion_to(PyObject* dtype, std::uint32_t source_mask, PyObject* skip);

// Returns the converted tree. A leaf that is a converted input, unchanged since, whose original has the
// target dtype is replaced by that original. Raises through tree::PythonError or as a C++ exception.
tree::Ref convert(PyObject* tree, const Conversion& conversion, PyObject* passthrough);

struct Inputs {
    tree::Ref tree;
    std::uint32_t seen;     // bits of the convertible dtypes met, whatever the source mask
    tree::Ref passthrough;  // a capsule for convert(), or empty when nothing was converted
};
Inputs convert_inputs(PyObject* tree, const Conversion& conversion);

// Converts the tensors of a list; the others, and those that have the dtype already, are passed on.
tree::Ref cast_tensors(PyObject* list, const Conversion& conversion);

// Leaves and calls since the module was loaded.
struct Counters {
    std::int64_t calls = 0;
    std::int64_t fast_cpu = 0;
    std::int64_t fast_cuda = 0;
    std::int64_t fallback = 0;
    std::int64_t alias = 0;  // passed-through inputs
};
const Counters& counters();

}  // namespace lite_ext
