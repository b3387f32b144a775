// Where in the tree: text for messages, computed only when an error is being raised.
#pragma once

#include <string>

#include "flat.h"

namespace lite_ext::tree {

// One step from a container to a child: `[3]`, `['key']`, `.field`, or nothing for containers without keys of
// their own. `key` is the key of an exact dict's child, else NULL.
std::string path_step(Kind kind, PyObject* container, const Expansion& expansion, Py_ssize_t index, PyObject* key);

// The steps joined behind `output`, shortened in the middle when there are many.
std::string join_path(const std::vector<std::string>& steps);

// The path of a finished node.
std::string path_of(const Flat& flat, const Node& node);

// The exception that is set, taken aside: computing a path runs Python code, which must not meet it.
class Caught {
   public:
    Caught();
    // Raises TypeError from it, naming class, path and the next step: "cannot <verb> <class> at <path>: ...".
    // Exceptions that are not about this container (KeyboardInterrupt, MemoryError, RecursionError) go on as
    // they are.
    [[noreturn]] void raise(const char* verb, PyObject* container, const std::string& path);

   private:
    Ref type_;
    Ref value_;
    Ref traceback_;
};

}  // namespace lite_ext::tree
