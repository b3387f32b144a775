// All that the walk asks of a tensor: whether an object is one, and its dtype.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../dtype.h"

namespace lite_ext::tree {

constexpr DType dtype_of(c10::ScalarType type) {
    switch (type) {
        case c10::ScalarType::Half:
            return DType::float16;
        case c10::ScalarType::BFloat16:
            return DType::bfloat16;
        case c10::ScalarType::Float:
            return DType::float32;
        case c10::ScalarType::Double:
            return DType::float64;
        case c10::ScalarType::Float8_e4m3fn:
            return DType::float8_e4m3fn;
        case c10::ScalarType::Float8_e5m2:
            return DType::float8_e5m2;
        case c10::ScalarType::Float8_e4m3fnuz:
            return DType::float8_e4m3fnuz;
        case c10::ScalarType::Float8_e5m2fnuz:
            return DType::float8_e5m2fnuz;
        case c10::ScalarType::Float8_e8m0fnu:
            return DType::float8_e8m0fnu;
        case c10::ScalarType::Float4_e2m1fn_x2:
            return DType::float4_e2m1fn_x2;
        default:
            return DType::none;
    }
}

// Exactly torch.Tensor or torch.nn.Parameter.
inline bool is_plain_tensor_type(PyTypeObject* type) { return THPVariable_CheckTypeExact(type); }

// Any tensor. The real type decides, never __class__, which an object may lie about.
inline bool is_tensor_type(PyTypeObject* type) {
    return is_plain_tensor_type(type) || PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

inline DType leaf_dtype(PyObject* tensor) {
    return dtype_of(c10::typeMetaToScalarType(THPVariable_Unpack(tensor).unsafeGetTensorImpl()->dtype()));
}

}  // namespace lite_ext::tree
