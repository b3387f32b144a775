#include "kinds.h"

#include "registry.h"

namespace lite_ext::tree {

namespace {

Library loaded;
Names interned;

Ref attribute(PyObject* object, const char* name) { return Ref::checked(PyObject_GetAttrString(object, name)); }

Ref module_attribute(const char* module, const char* name) {
    return attribute(Ref::checked(PyImport_ImportModule(module)).get(), name);
}

PyTypeObject* module_type(const char* module, const char* name) {
    return reinterpret_cast<PyTypeObject*>(module_attribute(module, name).release());
}

PyObject* intern(const char* name) { return Ref::checked(PyUnicode_InternFromString(name)).release(); }

bool is_structseq(PyTypeObject* type) {
    return type->tp_new == loaded.structseq_new && PyType_IsSubtype(type, &PyTuple_Type) != 0;
}

// An abstract base class decides by inheritance or registration. Tensor-likes that take part in torch's
// function protocol (TensorDict) have a conversion of their own and stay opaque.
bool is_mutable_mapping(PyTypeObject* type) {
    if (type->tp_as_mapping == nullptr || type->tp_as_mapping->mp_subscript == nullptr ||
        type->tp_as_mapping->mp_ass_subscript == nullptr) {
        return false;
    }
    const int answer = PyObject_IsSubclass(reinterpret_cast<PyObject*>(type), loaded.mutable_mapping);
    check(answer);
    return answer == 1 && _PyType_Lookup(type, interned.dunder_torch_function) == nullptr;
}

}  // namespace

const Library& library() { return loaded; }
const Names& names() { return interned; }

void load_library() {
    interned = {
        .dunder_new = intern("__new__"),
        .dunder_init = intern("__init__"),
        .dunder_copy = intern("__copy__"),
        .dunder_slots = intern("__slots__"),
        .dunder_torch_function = intern("__torch_function__"),
        .dataclass_fields = intern("__dataclass_fields__"),
        .field_type = intern("_field_type"),
        .fields = intern("_fields"),
        .match_args = intern("__match_args__"),
        .n_fields = intern("n_fields"),
        .data = intern("data"),
    };
    loaded.ordered_dict = &PyODict_Type;
    loaded.default_dict = module_type("collections", "defaultdict");
    loaded.deque = module_type("collections", "deque");
    loaded.user_dict = module_type("collections", "UserDict");
    loaded.mutable_mapping = module_attribute("collections.abc", "MutableMapping").release();
    loaded.dataclass_field = module_attribute("dataclasses", "_FIELD").release();
    loaded.default_factory = attribute(reinterpret_cast<PyObject*>(loaded.default_dict), "default_factory").release();
    loaded.maxlen = attribute(reinterpret_cast<PyObject*>(loaded.deque), "maxlen").release();
    loaded.copy = module_attribute("copy", "copy").release();
    loaded.structseq_new = reinterpret_cast<PyTypeObject*>(module_attribute("time", "struct_time").get())->tp_new;
}

bool is_dataclass(PyTypeObject* type) {
    PyObject* fields = _PyType_Lookup(type, interned.dataclass_fields);
    return fields != nullptr && PyDict_Check(fields);
}

Kind classify(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    if (find_registered(type) != nullptr) return Kind::registered;
    if (type == &PyTuple_Type) return Kind::tuple;
    if (type == &PyList_Type) return Kind::list;
    if (type == &PyDict_Type) return Kind::dict;
    if (PyTuple_Check(object)) return is_structseq(type) ? Kind::structseq : Kind::tuple_subclass;
    if (PyList_Check(object)) return Kind::list_subclass;
    if (PyDict_Check(object)) return Kind::dict_subclass;
    if (PyAnySet_Check(object)) return Kind::set;
    if (PyType_IsSubtype(type, loaded.deque) != 0) return Kind::deque;
    if (type == &PyDictProxy_Type) return Kind::mapping_proxy;
    if (is_dataclass(type)) return Kind::dataclass;
    if (PyType_IsSubtype(type, loaded.user_dict) != 0) return Kind::user_dict;
    return is_mutable_mapping(type) ? Kind::mapping : Kind::opaque;
}

}  // namespace lite_ext::tree
