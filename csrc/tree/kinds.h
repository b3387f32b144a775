// The kinds of containers: what each object of the tree is to the walk. One enum; containers.h has its
// operations.
#pragma once

#include <Python.h>

#include <cstdint>

#include "python.h"

namespace lite_ext::tree {

enum class Kind : std::uint8_t {
    opaque,  // not a container: returned as it is
    tuple,
    tuple_subclass,  // namedtuples too
    structseq,       // torch.return_types
    list,
    list_subclass,
    dict,
    dict_subclass,  // OrderedDict, defaultdict, Counter, ModelOutput
    set,            // set, frozenset and their subclasses
    deque,
    mapping_proxy,
    dataclass,
    user_dict,
    mapping,  // any other MutableMapping
    registered,
};

// The kind of an object that is no tensor. May run Python code (the subclass check of an abstract base
// class).
Kind classify(PyObject* object);

// Types whose instances are met often and never hold tensors.
inline bool is_atom(PyTypeObject* type) {
    return type == Py_TYPE(Py_None) || type == &PyBool_Type || type == &PyLong_Type || type == &PyFloat_Type ||
           type == &PyUnicode_Type || type == &PyBytes_Type || type == &PyRange_Type || type == &PyComplex_Type;
}

bool is_dataclass(PyTypeObject* type);

// What the walk needs of Python's library, looked up once when the module is loaded and never freed.
struct Library {
    PyTypeObject* ordered_dict;
    PyTypeObject* default_dict;
    PyTypeObject* deque;
    PyTypeObject* user_dict;
    PyObject* mutable_mapping;
    PyObject* dataclass_field;  // dataclasses._FIELD: marks real fields among class variables and InitVars
    PyObject* default_factory;  // the descriptor defaultdict.default_factory
    PyObject* maxlen;           // the descriptor deque.maxlen
    PyObject* copy;             // copy.copy
    newfunc structseq_new;      // shared by all struct sequences, and by nothing else
};
const Library& library();
void load_library();

// Interned attribute names.
struct Names {
    PyObject* dunder_new;
    PyObject* dunder_init;
    PyObject* dunder_copy;
    PyObject* dunder_slots;
    PyObject* dunder_torch_function;
    PyObject* dataclass_fields;
    PyObject* field_type;
    PyObject* fields;  // _fields of namedtuples
    PyObject* match_args;
    PyObject* n_fields;
    PyObject* data;
};
const Names& names();

}  // namespace lite_ext::tree
