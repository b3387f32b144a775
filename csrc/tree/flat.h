// What a walk leaves behind: the leaves to convert, and the containers around them in post-order.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "kinds.h"
#include "memo.h"
#include "python.h"

namespace lite_ext::tree {

// Names a value of the new tree: a leaf (>= 0), or a node (< 0, the complement of its index).
using ValueRef = std::int32_t;
inline constexpr ValueRef kUnchanged = std::numeric_limits<ValueRef>::min();
inline constexpr ValueRef node_ref(std::size_t node) { return ~static_cast<ValueRef>(node); }

// A place in a container whose value changes.
struct Slot {
    Ref key;  // of an exact dict; elsewhere empty
    std::uint32_t index;
    ValueRef value;
};

// The children of a container whose own storage the walk does not read.
struct Expansion {
    Ref keys;    // a tuple of keys or field names, or empty where children have none
    Ref values;  // a tuple of the children
    Ref extra;   // dict subclass: how many of the keys are items (the rest are dataclass fields);
                 // registered: the context; mapping: nothing
};

// A container that has to be rebuilt. Its nodes and leaves come before it.
struct Node {
    Kind kind;
    Ref source;
    Ref snapshot;  // list and dict: a copy made while nothing else could run
    Expansion expansion;
    std::uint32_t first_slot;
    std::uint32_t slot_count;
    Ref result;
};

struct Flat {
    std::vector<Ref> leaves;
    std::vector<Slot> slots;
    std::vector<Node> nodes;
    ValueRef root = kUnchanged;
    std::uint32_t seen = 0;  // the bits of the dtypes met
    Memo memo;
    std::vector<Ref> kept;  // containers in the memo: an address must not be used twice

    void clear() {
        leaves.clear();
        slots.clear();
        nodes.clear();
        root = kUnchanged;
        seen = 0;
        memo.clear();
        kept.clear();
    }
};

}  // namespace lite_ext::tree
