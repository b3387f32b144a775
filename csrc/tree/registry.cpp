#include "registry.h"

#include <unordered_map>

#include "leaf.h"
#include "python.h"

namespace lite_ext::tree {

namespace {

// Only grows, and only under the GIL. Never destroyed: it may be read while the interpreter shuts down.
std::unordered_map<PyTypeObject*, PyObject*>& registry() {
    static auto* const classes = new std::unordered_map<PyTypeObject*, PyObject*>();
    return *classes;
}

[[noreturn]] void refuse(PyObject* error, const char* format, PyObject* object) {
    PyErr_Format(error, format, object);
    throw PythonError();
}

bool is_builtin_container(PyTypeObject* type) {
    return type == &PyTuple_Type || type == &PyList_Type || type == &PyDict_Type || type == &PySet_Type ||
           type == &PyFrozenSet_Type;
}

}  // namespace

PyObject* find_registered(PyTypeObject* type) {
    const auto& classes = registry();
    if (classes.empty()) return nullptr;
    const auto found = classes.find(type);
    return found == classes.end() ? nullptr : found->second;
}

void register_node(PyObject* cls, PyObject* flatten, PyObject* unflatten) {
    if (!PyType_Check(cls)) refuse(PyExc_TypeError, "register_node: cls must be a class, got %R", cls);
    auto* type = reinterpret_cast<PyTypeObject*>(cls);
    if (is_tensor_type(type)) refuse(PyExc_TypeError, "register_node: %R is a tensor class, always a leaf", cls);
    if (is_builtin_container(type)) refuse(PyExc_TypeError, "register_node: %R is a container already", cls);
    if (PyCallable_Check(flatten) == 0) {
        refuse(PyExc_TypeError, "register_node: flatten must be callable, got %R", flatten);
    }
    if (PyCallable_Check(unflatten) == 0) {
        refuse(PyExc_TypeError, "register_node: unflatten must be callable, got %R", unflatten);
    }
    if (find_registered(type) != nullptr) {
        refuse(PyExc_ValueError, "register_node: %R is registered already", cls);
    }
    Ref functions = Ref::checked(PyTuple_Pack(2, flatten, unflatten));
    registry().emplace(type, functions.get());
    functions.release();
    Py_INCREF(cls);
}

}  // namespace lite_ext::tree
