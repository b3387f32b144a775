// Owned Python references. A raw PyObject* elsewhere in this room is borrowed and never outlives its
// statement.
#pragma once

#include <Python.h>

#include <utility>

namespace lite_ext::tree {

// Thrown when the Python error indicator is set.
struct PythonError {};

class Ref {
   public:
    Ref() = default;
    static Ref steal(PyObject* object) {
        Ref ref;
        ref.object_ = object;
        return ref;
    }
    static Ref borrow(PyObject* object) {
        Py_XINCREF(object);
        return steal(object);
    }
    // Takes a new reference that an API call returned; NULL means that the call raised.
    static Ref checked(PyObject* object) {
        if (object == nullptr) throw PythonError();
        return steal(object);
    }

    Ref(const Ref&) = delete;
    Ref& operator=(const Ref&) = delete;
    Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Ref& operator=(Ref&& other) noexcept {
        // The old object dies last: its destructor may run Python code that looks at this reference.
        PyObject* old = std::exchange(object_, std::exchange(other.object_, nullptr));
        Py_XDECREF(old);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }

    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

   private:
    PyObject* object_ = nullptr;
};

inline void check(int status) {
    if (status < 0) throw PythonError();
}

}  // namespace lite_ext::tree
