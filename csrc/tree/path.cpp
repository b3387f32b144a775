#include "path.h"

#include <algorithm>

#include "containers.h"

namespace lite_ext::tree {

namespace {

constexpr std::size_t kPathHead = 8;  // steps shown at the start of a long path
constexpr std::size_t kPathTail = 4;  // and at its end

std::string text(PyObject* object, reprfunc function) {
    const Ref shown = Ref::steal(function(object));
    const char* utf8 = shown && PyUnicode_Check(shown.get()) ? PyUnicode_AsUTF8(shown.get()) : nullptr;
    if (utf8 != nullptr) return utf8;
    PyErr_Clear();  // the message must come out whatever a key's repr does
    return std::string("<").append(Py_TYPE(object)->tp_name).append(">");
}

std::string in_brackets(const std::string& inner) { return std::string("[").append(inner).append("]"); }
std::string field(PyObject* name) { return std::string(".").append(text(name, PyObject_Str)); }
std::string item(PyObject* key) { return in_brackets(text(key, PyObject_Repr)); }

std::string class_name(PyTypeObject* type) {
    // type's own lookup: a metaclass may answer differently.
    const Ref attribute = Ref::steal(PyUnicode_FromString("__qualname__"));
    const Ref name =
        Ref::steal(attribute ? PyType_Type.tp_getattro(reinterpret_cast<PyObject*>(type), attribute.get()) : nullptr);
    const char* utf8 = name && PyUnicode_Check(name.get()) ? PyUnicode_AsUTF8(name.get()) : nullptr;
    if (utf8 != nullptr) return utf8;
    PyErr_Clear();
    return type->tp_name;
}

}  // namespace

std::string path_step(Kind kind, PyObject* container, const Expansion& expansion, Py_ssize_t index, PyObject* key) {
    switch (kind) {
        case Kind::dict:
            return key == nullptr ? "[...]" : item(key);
        case Kind::tuple_subclass:
        case Kind::structseq: {
            const Ref names = field_names(kind, container);
            return names ? field(PyTuple_GET_ITEM(names.get(), index)) : in_brackets(std::to_string(index));
        }
        case Kind::dict_subclass: {
            const bool is_item = index < PyLong_AsSsize_t(expansion.extra.get());
            PyObject* name = PyTuple_GET_ITEM(expansion.keys.get(), index);
            return is_item ? item(name) : field(name);
        }
        case Kind::mapping:
            return item(PyTuple_GET_ITEM(expansion.keys.get(), index));
        case Kind::dataclass:
            return field(PyTuple_GET_ITEM(expansion.keys.get(), index));
        case Kind::set:
            return "{...}";
        case Kind::mapping_proxy:
        case Kind::user_dict:
            return "";
        default:
            return in_brackets(std::to_string(index));
    }
}

std::string join_path(const std::vector<std::string>& steps) {
    std::string path = "output";
    for (std::size_t i = 0; i < steps.size(); ++i) {
        if (steps.size() > kPathHead + kPathTail && i == kPathHead) {
            path += "...";
            i = steps.size() - kPathTail;
        }
        path += steps[i];
    }
    return path;
}

std::string path_of(const Flat& flat, const Node& node) {
    std::vector<std::string> steps;
    ValueRef value = node_ref(static_cast<std::size_t>(&node - flat.nodes.data()));
    // A node's parent is the node that holds the slot naming it; parents come later.
    for (bool found = true; found && value != flat.root;) {
        found = false;
        for (const Node& parent : flat.nodes) {
            for (std::uint32_t i = 0; i < parent.slot_count && !found; ++i) {
                const Slot& slot = flat.slots[parent.first_slot + i];
                if (slot.value != value) continue;
                steps.push_back(
                    path_step(parent.kind, parent.source.get(), parent.expansion, slot.index, slot.key.get()));
                value = node_ref(static_cast<std::size_t>(&parent - flat.nodes.data()));
                found = true;
            }
            if (found) break;
        }
    }
    std::reverse(steps.begin(), steps.end());
    return join_path(steps);
}

Caught::Caught() {
    PyObject* type = nullptr;
    PyObject* value = nullptr;
    PyObject* traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr) PyException_SetTraceback(value, traceback);
    type_ = Ref::steal(type);
    value_ = Ref::steal(value);
    traceback_ = Ref::steal(traceback);
}

void Caught::raise(const char* verb, PyObject* container, const std::string& path) {
    const auto is_a = [this](PyObject* kind) { return PyErr_GivenExceptionMatches(type_.get(), kind) != 0; };
    if (!is_a(PyExc_Exception) || is_a(PyExc_MemoryError) || is_a(PyExc_RecursionError)) {
        PyErr_Restore(type_.release(), value_.release(), traceback_.release());
        throw PythonError();
    }
    PyErr_Format(PyExc_TypeError, "convert: cannot %s %s at %s: %s; use lite_ext.register_node to say how", verb,
                 class_name(Py_TYPE(container)).c_str(), path.c_str(), text(value_.get(), PyObject_Str).c_str());
    Caught raised;
    PyException_SetCause(raised.value_.get(), Ref::borrow(value_.get()).release());
    PyException_SetContext(raised.value_.get(), value_.release());
    PyErr_Restore(raised.type_.release(), raised.value_.release(), raised.traceback_.release());
    throw PythonError();
}

}  // namespace lite_ext::tree
