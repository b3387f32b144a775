// The floor of the benchmarks: what it costs torch to make the outputs of a conversion and to hand them to Python.
// Nothing is looked at but sizes, and nothing is written to the outputs.
#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

// A new tensor of the sizes of `source`, or NULL with an exception set.
PyObject* make_like(PyObject* source, c10::ScalarType dtype) {
    if (!THPVariable_Check(source)) {
        PyErr_Format(PyExc_TypeError, "floor takes a tensor or a tuple or list of tensors, got %R", source);
        return nullptr;
    }
    return THPVariable_Wrap(at::detail::empty_cpu(THPVariable_Unpack(source).sizes(), dtype));
}

PyObject* make(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || !THPDtype_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "floor takes a tree and a torch.dtype");
        return nullptr;
    }
    const c10::ScalarType dtype = reinterpret_cast<THPDtype*>(args[1])->scalar_type;
    PyObject* tree = args[0];
    const bool is_tuple = PyTuple_CheckExact(tree);
    if (!is_tuple && !PyList_CheckExact(tree)) return make_like(tree, dtype);

    const Py_ssize_t size = PySequence_Fast_GET_SIZE(tree);
    PyObject* made = is_tuple ? PyTuple_New(size) : PyList_New(size);
    for (Py_ssize_t i = 0; made != nullptr && i < size; ++i) {
        PyObject* output = make_like(PySequence_Fast_GET_ITEM(tree, i), dtype);
        if (output == nullptr) {
            Py_CLEAR(made);
        } else if (is_tuple) {
            PyTuple_SET_ITEM(made, i, output);
        } else {
            PyList_SET_ITEM(made, i, output);
        }
    }
    return made;
}

PyMethodDef methods[] = {
    {"make", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "floor", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_lite_ext_floor() { return PyModule_Create(&module); }
