#include "rebuild.h"

#include <span>

#include "containers.h"
#include "path.h"
#include "registry.h"

namespace lite_ext::tree {

namespace {

class Rebuild {
   public:
    Rebuild(const Flat& flat, const Node& node, const std::vector<Ref>& leaves)
        : flat_(flat), node_(node), leaves_(leaves), slots_(&flat.slots[node.first_slot], node.slot_count) {}

    Ref run() const {
        switch (node_.kind) {
            case Kind::tuple:
                return tuple(Py_SIZE(source()));
            case Kind::tuple_subclass:
                return tuple_subclass();
            case Kind::structseq:
                return structseq();
            case Kind::list:
                return list();
            case Kind::list_subclass:
                return list_subclass();
            case Kind::dict:
                return dict();
            case Kind::dict_subclass:
                return dict_subclass();
            case Kind::set:
                return set();
            case Kind::deque:
                return deque();
            case Kind::mapping_proxy:
                return Ref::checked(PyDictProxy_New(value(slots_[0])));
            case Kind::dataclass:
                return dataclass();
            case Kind::user_dict:
                return user_dict();
            case Kind::mapping:
                return mapping();
            default:
                return registered();
        }
    }

   private:
    PyObject* source() const { return node_.source.get(); }
    PyTypeObject* type() const { return Py_TYPE(source()); }
    PyObject* key(const Slot& slot) const { return PyTuple_GET_ITEM(node_.expansion.keys.get(), slot.index); }
    PyObject* old_value(const Slot& slot) const { return PyTuple_GET_ITEM(node_.expansion.values.get(), slot.index); }
    PyObject* value(const Slot& slot) const {
        return slot.value >= 0 ? leaves_[static_cast<std::size_t>(slot.value)].get()
                               : flat_.nodes[static_cast<std::size_t>(~slot.value)].result.get();
    }

    [[noreturn]] static void fail(PyObject* error, const char* reason) {
        PyErr_SetString(error, reason);
        throw PythonError();
    }
    static void same_length(Py_ssize_t before, Py_ssize_t after) {
        if (before != after) fail(PyExc_TypeError, "its length changed in the copy");
    }

    // base.__new__(type(source), ...): the interpreter refuses a base whose instances differ in layout.
    Ref allocate(PyTypeObject* base, PyObject* argument = nullptr) const {
        return Ref::checked(PyObject_CallMethodObjArgs(reinterpret_cast<PyObject*>(base), names().dunder_new,
                                                       reinterpret_cast<PyObject*>(type()), argument, nullptr));
    }

    // `size` items of the array of `old`, a tuple, with the slots' values set.
    Ref with_values(PyObject* old, Py_ssize_t size) const {
        Ref items = Ref::checked(PyTuple_New(size));
        auto slot = slots_.begin();
        for (Py_ssize_t i = 0; i < size; ++i) {
            PyObject* item = reinterpret_cast<PyTupleObject*>(old)->ob_item[i];
            if (slot != slots_.end() && slot->index == i) item = value(*slot++);
            Py_XINCREF(item);
            PyTuple_SET_ITEM(items.get(), i, item);
        }
        return items;
    }

    Ref tuple(Py_ssize_t size) const { return with_values(source(), size); }

    Ref tuple_subclass() const {
        Ref made = allocate(&PyTuple_Type, tuple(Py_SIZE(source())).get());
        same_length(Py_SIZE(source()), Py_SIZE(made.get()));
        copy_instance_state(source(), made.get());
        return made;
    }

    // Fields past Py_SIZE are reachable by name only; the constructor takes them at the end of its sequence.
    Ref structseq() const {
        const Ref count = Ref::checked(PyObject_GetAttr(reinterpret_cast<PyObject*>(type()), names().n_fields));
        const Py_ssize_t size = PyLong_AsSsize_t(count.get());
        if (size == -1 && PyErr_Occurred() != nullptr) throw PythonError();
        return allocate(type(), tuple(size).get());
    }

    Ref list() const {
        Ref made = Ref::borrow(node_.snapshot.get());
        for (const Slot& slot : slots_) {
            check(PyList_SetItem(made.get(), slot.index, Ref::borrow(value(slot)).release()));
        }
        return made;
    }

    Ref list_subclass() const {
        Ref made = allocate(&PyList_Type);
        check(PyList_SetSlice(made.get(), 0, PyList_GET_SIZE(made.get()), list().get()));
        same_length(PyList_GET_SIZE(node_.snapshot.get()), PyList_GET_SIZE(made.get()));
        copy_instance_state(source(), made.get());
        return made;
    }

    Ref dict() const {
        Ref made = Ref::borrow(node_.snapshot.get());
        const Py_ssize_t size = PyDict_GET_SIZE(made.get());
        for (const Slot& slot : slots_) check(PyDict_SetItem(made.get(), slot.key.get(), value(slot)));
        same_length(size, PyDict_GET_SIZE(made.get()));
        return made;
    }

    Ref dict_subclass() const {
        const Library& lib = library();
        const bool ordered = PyType_IsSubtype(type(), lib.ordered_dict) != 0;
        const bool defaults = !ordered && PyType_IsSubtype(type(), lib.default_dict) != 0;
        Ref made = allocate(ordered ? lib.ordered_dict : defaults ? lib.default_dict : &PyDict_Type);
        const auto set_item = ordered ? PyODict_SetItem : PyDict_SetItem;
        const Py_ssize_t items = PyLong_AsSsize_t(node_.expansion.extra.get());

        const Ref values = children();
        for (Py_ssize_t i = 0; i < items; ++i) {
            PyObject* name = PyTuple_GET_ITEM(node_.expansion.keys.get(), i);
            check(set_item(made.get(), name, PyTuple_GET_ITEM(values.get(), i)));
        }
        same_length(items, PyDict_GET_SIZE(made.get()));
        if (defaults) {
            auto* descriptor = lib.default_factory;
            const Ref factory = Ref::checked(
                Py_TYPE(descriptor)->tp_descr_get(descriptor, source(), reinterpret_cast<PyObject*>(type())));
            check(Py_TYPE(descriptor)->tp_descr_set(descriptor, made.get(), factory.get()));
        }
        copy_instance_state(source(), made.get());
        update_attributes(made.get(), items);
        return made;
    }

    // Attributes that mirror an item follow it; the fields of a dataclass that is a dict too are set.
    void update_attributes(PyObject* made, Py_ssize_t items) const {
        const Ref state = instance_dict(made);
        for (const Slot& slot : slots_) {
            PyObject* name = key(slot);
            if (slot.index >= items) {
                check(PyObject_GenericSetAttr(made, name, value(slot)));
            } else if (state && state.get() != made && PyUnicode_Check(name)) {
                PyObject* attribute = PyDict_GetItemWithError(state.get(), name);
                if (attribute == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
                if (attribute == old_value(slot)) check(PyDict_SetItem(state.get(), name, value(slot)));
            }
        }
    }

    // The children with the slots' values set, as a tuple.
    Ref children() const {
        PyObject* values = node_.expansion.values.get();
        return with_values(values, PyTuple_GET_SIZE(values));
    }

    Ref set() const {
        const Ref items = children();
        const bool frozen = PyType_IsSubtype(type(), &PyFrozenSet_Type) != 0;
        Ref made = frozen ? allocate(&PyFrozenSet_Type, items.get()) : allocate(&PySet_Type);
        if (!frozen) {
            for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
                check(PySet_Add(made.get(), PyTuple_GET_ITEM(items.get(), i)));
            }
        }
        same_length(PyTuple_GET_SIZE(items.get()), PySet_GET_SIZE(made.get()));
        copy_instance_state(source(), made.get());
        return made;
    }

    Ref deque() const {
        PyTypeObject* base = library().deque;
        PyObject* descriptor = library().maxlen;
        const Ref maxlen =
            Ref::checked(Py_TYPE(descriptor)->tp_descr_get(descriptor, source(), reinterpret_cast<PyObject*>(type())));
        Ref made = allocate(base);
        // maxlen can be set by deque's own __init__ only.
        const Ref done = Ref::checked(PyObject_CallMethodObjArgs(reinterpret_cast<PyObject*>(base), names().dunder_init,
                                                                 made.get(), children().get(), maxlen.get(), nullptr));
        copy_instance_state(source(), made.get());
        return made;
    }

    Ref dataclass() const {
        Ref made = allocate(&PyBaseObject_Type);
        copy_instance_state(source(), made.get());
        for (const Slot& slot : slots_) check(PyObject_GenericSetAttr(made.get(), key(slot), value(slot)));
        return made;
    }

    Ref user_dict() const {
        Ref made = allocate(&PyBaseObject_Type);
        copy_instance_state(source(), made.get());
        check(PyDict_SetItem(instance_dict(made.get()).get(), names().data, value(slots_[0])));
        return made;
    }

    // A shallow copy shares the store behind the mapping, so the dicts among its attributes are copied as
    // well.
    Ref copy_mapping() const {
        if (_PyType_Lookup(type(), names().dunder_copy) != nullptr) {
            return Ref::checked(PyObject_CallOneArg(library().copy, source()));
        }
        Ref made = allocate(&PyBaseObject_Type);
        copy_instance_state(source(), made.get(), Attributes::dicts_copied);
        return made;
    }

    static bool holds(PyObject* mapping, PyObject* key, PyObject* value) {
        return Ref::checked(PyObject_GetItem(mapping, key)).get() == value;
    }

    Ref mapping() const {
        Ref made = copy_mapping();
        if (Py_TYPE(made.get()) != type() || made.get() == source())
            fail(PyExc_TypeError, "its copy is of another type");
        for (const Slot& slot : slots_) {
            if (!holds(source(), key(slot), old_value(slot))) {
                fail(PyExc_TypeError, "it makes its values when they are read");
            }
            check(PyObject_SetItem(made.get(), key(slot), value(slot)));
            if (!holds(source(), key(slot), old_value(slot))) {
                check(PyObject_SetItem(source(), key(slot), old_value(slot)));
                fail(PyExc_TypeError, "its copy shares its storage");
            }
            if (!holds(made.get(), key(slot), value(slot))) {
                fail(PyExc_TypeError, "its copy does not hold what was written to it");
            }
        }
        const Ref keys = Ref::checked(PySequence_Tuple(made.get()));
        const int same = PyObject_RichCompareBool(keys.get(), node_.expansion.keys.get(), Py_EQ);
        check(same);
        if (same == 0) fail(PyExc_TypeError, "its keys changed in the copy");
        return made;
    }

    Ref registered() const {
        const Ref items = Ref::checked(PySequence_List(children().get()));
        return Ref::checked(PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(find_registered(type()), 1),
                                                         node_.expansion.extra.get(), items.get(), nullptr));
    }

    const Flat& flat_;
    const Node& node_;
    const std::vector<Ref>& leaves_;
    std::span<const Slot> slots_;
};

}  // namespace

Ref rebuild(Flat& flat, const std::vector<Ref>& leaves) {
    for (Node& node : flat.nodes) {
        try {
            node.result = Rebuild(flat, node, leaves).run();
        } catch (const PythonError&) {
            Caught caught;
            caught.raise("rebuild", node.source.get(), path_of(flat, node));
        }
    }
    if (flat.root >= 0) return Ref::borrow(leaves[static_cast<std::size_t>(flat.root)].get());
    return Ref::borrow(flat.nodes[static_cast<std::size_t>(~flat.root)].result.get());
}

}  // namespace lite_ext::tree
