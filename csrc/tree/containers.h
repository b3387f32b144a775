// The parts that the walk and the rebuilding share. All may run Python code and raise through PythonError.
#pragma once

#include "flat.h"

namespace lite_ext::tree {

// Children of the kinds that are not read in place (all but tuples, structseqs, lists and exact dicts).
Expansion expand(Kind kind, PyObject* container);

// What happens to the dicts that an instance holds as attributes.
enum class Attributes : std::uint8_t { shared, dicts_copied };

// Copies __dict__ and the slots of Python classes from one instance to another of the same class.
void copy_instance_state(PyObject* from, PyObject* to, Attributes attributes = Attributes::shared);

// The instance's __dict__, or an empty reference where its class has none.
Ref instance_dict(PyObject* object);

// The field names of a namedtuple or struct sequence, or an empty reference.
Ref field_names(Kind kind, PyObject* container);

}  // namespace lite_ext::tree
