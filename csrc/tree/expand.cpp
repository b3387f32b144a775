// Children of the containers that are not read in place. Base-class functions read them, never overridden
// methods: what a subclass answers to iteration need not be what it stores.
#include "containers.h"
#include "registry.h"

namespace lite_ext::tree {

namespace {

Ref tuple_of_iterator(getiterfunc iter, PyObject* container) {
    const Ref iterator = Ref::checked(iter(container));
    return Ref::checked(PySequence_Tuple(iterator.get()));
}

bool is_real_field(PyObject* field) {
    const Ref kind = Ref::checked(PyObject_GetAttr(field, names().field_type));
    return kind.get() == library().dataclass_field;
}

// Appends the stored dataclass fields, except those whose value is the item of the same key in `items`.
void append_fields(PyObject* container, PyObject* items, PyObject* keys, PyObject* values) {
    const Ref fields = Ref::borrow(_PyType_Lookup(Py_TYPE(container), names().dataclass_fields));
    const Ref pairs = Ref::checked(PyDict_Items(fields.get()));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(pairs.get()); ++i) {
        PyObject* pair = PyList_GET_ITEM(pairs.get(), i);
        PyObject* name = PyTuple_GET_ITEM(pair, 0);
        if (!is_real_field(PyTuple_GET_ITEM(pair, 1))) continue;
        const Ref value = Ref::steal(PyObject_GenericGetAttr(container, name));
        if (!value) {
            if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw PythonError();
            PyErr_Clear();  // a field that was never set
            continue;
        }
        if (items != nullptr) {
            PyObject* item = PyDict_GetItemWithError(items, name);
            if (item == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
            if (item == value.get()) continue;
        }
        check(PyList_Append(keys, name));
        check(PyList_Append(values, value.get()));
    }
}

void append_items(PyObject* dict, PyObject* keys, PyObject* values) {
    if (PyODict_Check(dict)) {  // its order is its own, not that of the table below it
        const Ref ordered = tuple_of_iterator(PyODict_Type.tp_iter, dict);
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ordered.get()); ++i) {
            PyObject* key = PyTuple_GET_ITEM(ordered.get(), i);
            const Ref value = Ref::borrow(PyDict_GetItemWithError(dict, key));
            if (!value) {
                if (PyErr_Occurred() == nullptr) PyErr_SetObject(PyExc_KeyError, key);
                throw PythonError();
            }
            check(PyList_Append(keys, key));
            check(PyList_Append(values, value.get()));
        }
        return;
    }
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(dict, &position, &key, &value) != 0) {
        const Ref owned_key = Ref::borrow(key);
        const Ref owned_value = Ref::borrow(value);
        check(PyList_Append(keys, key));
        check(PyList_Append(values, value));
    }
}

Expansion expand_dict_subclass(PyObject* dict) {
    const Ref keys = Ref::checked(PyList_New(0));
    const Ref values = Ref::checked(PyList_New(0));
    append_items(dict, keys.get(), values.get());
    Ref items = Ref::checked(PyLong_FromSsize_t(PyList_GET_SIZE(keys.get())));
    if (is_dataclass(Py_TYPE(dict))) append_fields(dict, dict, keys.get(), values.get());
    return {Ref::checked(PyList_AsTuple(keys.get())), Ref::checked(PyList_AsTuple(values.get())), std::move(items)};
}

Expansion expand_dataclass(PyObject* object) {
    const Ref keys = Ref::checked(PyList_New(0));
    const Ref values = Ref::checked(PyList_New(0));
    append_fields(object, nullptr, keys.get(), values.get());
    return {Ref::checked(PyList_AsTuple(keys.get())), Ref::checked(PyList_AsTuple(values.get())), Ref()};
}

Expansion single(PyObject* child) { return {Ref(), Ref::checked(PyTuple_Pack(1, child)), Ref()}; }

int take_first(PyObject* object, void* target) {
    auto** first = static_cast<PyObject**>(target);
    if (*first == nullptr) *first = object;
    return 0;
}

// A mappingproxy owns one object, the mapping, and shows it to the garbage collector only.
Expansion expand_mapping_proxy(PyObject* proxy) {
    PyObject* mapping = nullptr;
    PyDictProxy_Type.tp_traverse(proxy, take_first, static_cast<void*>(&mapping));
    return single(mapping);
}

Expansion expand_user_dict(PyObject* object) {
    const Ref state = instance_dict(object);
    PyObject* data = state ? PyDict_GetItemWithError(state.get(), names().data) : nullptr;
    if (data != nullptr) return single(data);
    if (PyErr_Occurred() != nullptr) throw PythonError();
    return {Ref(), Ref::checked(PyTuple_New(0)), Ref()};
}

Expansion expand_mapping(PyObject* mapping) {
    Ref keys = Ref::checked(PySequence_Tuple(mapping));
    Ref values = Ref::checked(PyTuple_New(PyTuple_GET_SIZE(keys.get())));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys.get()); ++i) {
        PyTuple_SET_ITEM(values.get(), i,
                         Ref::checked(PyObject_GetItem(mapping, PyTuple_GET_ITEM(keys.get(), i))).release());
    }
    return {std::move(keys), std::move(values), Ref()};
}

Expansion expand_registered(PyObject* object) {
    PyObject* functions = find_registered(Py_TYPE(object));
    const Ref flat = Ref::checked(PyObject_CallOneArg(PyTuple_GET_ITEM(functions, 0), object));
    if (!PyTuple_Check(flat.get()) || PyTuple_GET_SIZE(flat.get()) != 2) {
        PyErr_Format(PyExc_TypeError, "flatten must return a tuple (children, context), got %R", flat.get());
        throw PythonError();
    }
    return {Ref(), Ref::checked(PySequence_Tuple(PyTuple_GET_ITEM(flat.get(), 0))),
            Ref::borrow(PyTuple_GET_ITEM(flat.get(), 1))};
}

}  // namespace

Expansion expand(Kind kind, PyObject* container) {
    switch (kind) {
        case Kind::dict_subclass:
            return expand_dict_subclass(container);
        case Kind::set:
            return {Ref(), tuple_of_iterator(PySet_Type.tp_iter, container), Ref()};
        case Kind::deque:
            return {Ref(), tuple_of_iterator(library().deque->tp_iter, container), Ref()};
        case Kind::mapping_proxy:
            return expand_mapping_proxy(container);
        case Kind::dataclass:
            return expand_dataclass(container);
        case Kind::user_dict:
            return expand_user_dict(container);
        case Kind::mapping:
            return expand_mapping(container);
        default:
            return expand_registered(container);
    }
}

Ref field_names(Kind kind, PyObject* container) {
    PyTypeObject* type = Py_TYPE(container);
    if (kind == Kind::tuple_subclass || kind == Kind::structseq) {
        const bool named = kind == Kind::tuple_subclass;
        PyObject* found = _PyType_Lookup(type, named ? names().fields : names().match_args);
        if (found != nullptr && PyTuple_CheckExact(found) && PyTuple_GET_SIZE(found) == PyTuple_GET_SIZE(container)) {
            return Ref::borrow(found);
        }
    }
    return Ref();
}

}  // namespace lite_ext::tree
