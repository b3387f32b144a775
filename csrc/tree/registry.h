// Classes that users named as containers: exact class -> (flatten, unflatten).
#pragma once

#include <Python.h>

namespace lite_ext::tree {

// The pair (flatten, unflatten) of exactly this class, borrowed, or NULL.
PyObject* find_registered(PyTypeObject* type);

// Raises through PythonError. Classes are kept alive for good.
void register_node(PyObject* cls, PyObject* flatten, PyObject* unflatten);

}  // namespace lite_ext::tree
