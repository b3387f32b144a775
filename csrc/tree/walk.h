// Python containers become leaves and a post-order list of nodes. One walk, with a stack of its own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flat.h"

namespace lite_ext::tree {

// A nest of this many containers is converted, one more is refused, whatever the interpreter's own limit is.
inline constexpr std::size_t kMaxDepth = 1000;

struct Request {
    std::uint32_t convert;  // bits of the dtypes to convert
    PyObject* skip;         // frozenset of names, or NULL when it is empty
};

// Fills an empty `flat`. A tree in which nothing changes leaves it without leaves, its root kUnchanged.
// Raises through PythonError: RecursionError, RuntimeError (a container changed during the walk), TypeError.
void walk(PyObject* root, const Request& request, Flat& flat);

}  // namespace lite_ext::tree
