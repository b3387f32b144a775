// One wrapped forward in one call: inputs, autocast, the module, outputs.
#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "convert.h"
#include "tree/python.h"

namespace lite_ext {

enum class OutputPolicy : std::uint8_t { default_dtype, input, keep, dtype };

// What a wrapper looks up once. lite_ext/wrapper.py makes it; nothing in it refers to the wrapper.
struct Forward {
    tree::Ref input_dtype;  // a torch.dtype, or empty: inputs stay as they are
    tree::Ref skip_inputs;
    OutputPolicy policy;
    tree::Ref output_dtype;  // of OutputPolicy::dtype
    std::uint32_t source_mask;
    tree::Ref skip_outputs;
    tree::Ref autocast_dtype;            // a torch.dtype, or empty
    tree::Ref tensors;                   // the dict and key of the tensor whose device autocast works on
    tree::Ref tensor_name;               // empty where the module has none
    std::vector<tree::Ref> watched;      // dicts: while one of these holds anything, the general way must do
    std::uint64_t autocast_devices = 0;  // bits of the device types that torch.autocast was asked about, and takes
};

// Runs `wrapper`'s module, `call`, on the arguments. Returns an empty reference, having done nothing, where only the
// general way will do: hooks, tracing, function modes. Raises through tree::PythonError or as a C++ exception.
tree::Ref run_forward(Forward& forward, PyObject* wrapper, PyObject* call, PyObject* args, PyObject* kwargs);

}  // namespace lite_ext
