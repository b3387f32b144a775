// What an instance holds besides its items: __dict__ and slots.
#include "containers.h"

namespace lite_ext::tree {

namespace {

Ref attribute_copy(PyObject* value, Attributes attributes) {
    if (attributes == Attributes::shared || !PyDict_Check(value)) return Ref::borrow(value);
    return Ref::checked(PyObject_CallOneArg(library().copy, value));
}

// Copies the slots that one Python class declares. The descriptors are found in the class's own namespace: a
// subclass may have hidden their names.
void copy_slots_of(PyTypeObject* type, PyObject* from, PyObject* to, Attributes attributes) {
    const Ref slots = Ref::steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), names().dunder_slots));
    if (!slots) {
        PyErr_Clear();
        return;
    }
    PyObject* space = type->tp_dict;
    if (space == nullptr) return;
    Py_ssize_t position = 0;
    PyObject* name = nullptr;
    PyObject* found = nullptr;
    while (PyDict_Next(space, &position, &name, &found) != 0) {
        if (Py_TYPE(found) != &PyMemberDescr_Type) continue;
        const Ref descriptor = Ref::borrow(found);
        const Ref value = Ref::steal(PyMemberDescr_Type.tp_descr_get(found, from, reinterpret_cast<PyObject*>(type)));
        if (!value) {
            PyErr_Clear();  // an empty slot
            continue;
        }
        const Ref kept = attribute_copy(value.get(), attributes);
        if (PyMemberDescr_Type.tp_descr_set(descriptor.get(), to, kept.get()) < 0) PyErr_Clear();  // a read-only one
    }
}

}  // namespace

Ref instance_dict(PyObject* object) {
    if (Py_TYPE(object)->tp_dictoffset == 0) return Ref();
    return Ref::checked(PyObject_GenericGetDict(object, nullptr));
}

void copy_instance_state(PyObject* from, PyObject* to, Attributes attributes) {
    const Ref state = instance_dict(from);
    if (state.get() == from) {  // a dict that is its own namespace stays one
        check(PyObject_GenericSetDict(to, to, nullptr));
    } else if (state && PyDict_GET_SIZE(state.get()) != 0) {
        const Ref copied = Ref::checked(PyDict_Copy(state.get()));
        Py_ssize_t position = 0;
        PyObject* name = nullptr;
        PyObject* value = nullptr;
        while (attributes == Attributes::dicts_copied && PyDict_Next(state.get(), &position, &name, &value) != 0) {
            const Ref owned_name = Ref::borrow(name);
            check(PyDict_SetItem(copied.get(), name, attribute_copy(Ref::borrow(value).get(), attributes).get()));
        }
        check(PyObject_GenericSetDict(to, copied.get(), nullptr));
    }
    PyObject* bases = Py_TYPE(from)->tp_mro;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bases); ++i) {
        auto* type = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, i));
        // Static types have no Python slots, and a Python class that adds none is no larger than its base.
        if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) break;
        if (type->tp_base != nullptr && type->tp_basicsize > type->tp_base->tp_basicsize) {
            copy_slots_of(type, from, to, attributes);
        }
    }
}

}  // namespace lite_ext::tree
