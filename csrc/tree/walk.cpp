#include "walk.h"

#include <limits>
#include <string>

#include "containers.h"
#include "leaf.h"
#include "path.h"

namespace lite_ext::tree {

namespace {

constexpr ValueRef kDescend = std::numeric_limits<ValueRef>::max();   // the child was opened
constexpr ValueRef kOpen = std::numeric_limits<ValueRef>::max() - 1;  // memo: the container is being walked
constexpr Py_ssize_t kShortContainer = 16;  // read again where it occurs again, rather than remembered
constexpr std::size_t kMaxRefs = std::numeric_limits<ValueRef>::max() - 2;  // leaves, nodes, children of a container

// How the children of a container are read.
enum class Storage : std::uint8_t { tuple, list, dict };

struct Position {
    Py_ssize_t index = 0;
    Py_ssize_t in_dict = 0;  // PyDict_Next's own
};

struct Frame {
    Ref source;
    Expansion expansion;
    Ref names;                  // what skip is held against, or empty
    PyObject* items = nullptr;  // the tuple, list or dict that is read; owned by source or expansion
    Ref key;                    // dict: the key of the child that is open
    Position position;          // of the current child; in_dict is past it
    Py_ssize_t size = 0;
    std::size_t first_pending = 0;  // where this container's slots start on the stack of pending slots
    std::size_t foreign = 0;        // the count of foreign calls when it was opened
    Kind kind = Kind::opaque;
    Storage storage = Storage::tuple;
    bool in_memo = false;
};

class Walk {
   public:
    Walk(const Request& request, Flat& flat) : request_(request), flat_(flat) {}

    void run(PyObject* root) {
        flat_.root = visit(root);
        if (flat_.root != kDescend) return;
        while (!frames_.empty()) {
            Frame& frame = frames_.back();
            const bool done = frame.storage == Storage::tuple  ? scan_tuple(frame)
                              : frame.storage == Storage::list ? scan_list(frame)
                                                               : scan_dict(frame);
            if (done) close();
        }
    }

   private:
    ValueRef visit(PyObject* child) {
        PyTypeObject* type = Py_TYPE(child);
        if (is_plain_tensor_type(type)) return visit_leaf(child);
        if (is_atom(type)) return kUnchanged;
        return visit_other(child, type);
    }

    ValueRef visit_leaf(PyObject* leaf) {
        const std::uint32_t dtype = bit(leaf_dtype(leaf));
        flat_.seen |= dtype;
        if ((dtype & request_.convert) == 0) return kUnchanged;
        // Only an object that something else holds as well can occur twice.
        const bool shared = Py_REFCNT(leaf) > 1;
        if (shared) {
            if (const ValueRef* known = flat_.memo.find(leaf)) return *known;
        }
        const auto ref = static_cast<ValueRef>(flat_.leaves.size());
        if (flat_.leaves.size() >= kMaxRefs) raise(PyExc_RuntimeError, "too many leaves");
        flat_.leaves.push_back(Ref::borrow(leaf));
        if (shared) flat_.memo.insert(leaf, ref);
        return ref;
    }

    ValueRef visit_other(PyObject* child, PyTypeObject* type) {
        const bool shared = Py_REFCNT(child) > 1;
        if (type == &PyTuple_Type || type == &PyList_Type) {
            const bool is_tuple = type == &PyTuple_Type;
            PyObject** items = is_tuple ? reinterpret_cast<PyTupleObject*>(child)->ob_item
                                        : reinterpret_cast<PyListObject*>(child)->ob_item;
            Position start;
            if (may_read_ahead(shared, Py_SIZE(child))) start.index = unchanged_items(items, Py_SIZE(child));
            if (start.index == Py_SIZE(child)) return kUnchanged;
            return open_shared(child, is_tuple ? Kind::tuple : Kind::list, shared, start);
        }
        if (type == &PyDict_Type) {
            const Py_ssize_t size = PyDict_GET_SIZE(child);
            Position start;
            // With names to skip, a dict is read key by key.
            if (request_.skip == nullptr && may_read_ahead(shared, size)) start = unchanged_values(child);
            if (start.index == size) return kUnchanged;
            return open_shared(child, Kind::dict, shared, start);
        }
        if (is_tensor_type(type)) return visit_leaf(child);
        const Ref alive = Ref::borrow(child);
        ++foreign_;
        const Kind kind = kind_of(child);
        return kind == Kind::opaque ? kUnchanged : open_shared(child, kind, shared, Position());
    }

    // A class may answer for itself. Inlined, it costs the scans of plain leaves their own inlining: twice the time.
    [[gnu::noinline]] Kind kind_of(PyObject* child) {
        try {
            return classify(child);
        } catch (const PythonError&) {
            Caught caught;
            caught.raise("read", child, path());
        }
    }

    // A shared container is remembered, unless it is short; one too deep must be refused, not read.
    bool may_read_ahead(bool shared, Py_ssize_t size) const {
        return (!shared || size <= kShortContainer) && frames_.size() < kMaxDepth;
    }

    // Most containers of a tree in which little changes hold nothing but such leaves: they need no frame.
    bool is_unchanged_leaf(PyObject* child) {
        PyTypeObject* type = Py_TYPE(child);
        if (!is_plain_tensor_type(type)) return is_atom(type);
        const std::uint32_t dtype = bit(leaf_dtype(child));
        if ((dtype & request_.convert) != 0) return false;
        flat_.seen |= dtype;
        return true;
    }

    // How many items at the start are leaves that stay as they are.
    Py_ssize_t unchanged_items(PyObject** items, Py_ssize_t size) {
        Py_ssize_t index = 0;
        while (index < size && is_unchanged_leaf(items[index])) ++index;
        return index;
    }

    Position unchanged_values(PyObject* dict) {
        Position position;
        Py_ssize_t next = 0;
        PyObject* child = nullptr;
        while (PyDict_Next(dict, &next, nullptr, &child) != 0 && is_unchanged_leaf(child)) {
            ++position.index;
            position.in_dict = next;
        }
        return position;
    }

    // A container that something else holds as well may have been met before, also as one still open: a
    // cycle.
    ValueRef open_shared(PyObject* container, Kind kind, bool shared, Position start) {
        if (shared) {
            if (const ValueRef* known = flat_.memo.find(container)) {
                if (*known == kOpen) raise(PyExc_RecursionError, "a container holds itself");
                return *known;
            }
            flat_.memo.insert(container, kOpen);
            flat_.kept.push_back(Ref::borrow(container));
        }
        if (frames_.size() >= kMaxDepth) {
            raise(PyExc_RecursionError, "the tree is more than " + std::to_string(kMaxDepth) + " containers deep");
        }
        open(container, kind, shared, start);
        return kDescend;
    }

    void open(PyObject* container, Kind kind, bool in_memo, Position start) {
        Frame frame;
        frame.position = start;
        frame.source = Ref::borrow(container);
        frame.kind = kind;
        frame.in_memo = in_memo;
        frame.items = container;
        frame.first_pending = pending_.size();
        switch (kind) {
            case Kind::tuple_subclass:
            case Kind::structseq:
                if (request_.skip != nullptr) frame.names = field_names(kind, container);
                [[fallthrough]];
            case Kind::tuple:
                frame.size = PyTuple_GET_SIZE(container);
                break;
            case Kind::list:
            case Kind::list_subclass:
                frame.storage = Storage::list;
                frame.size = PyList_GET_SIZE(container);
                break;
            case Kind::dict:
                frame.storage = Storage::dict;
                frame.size = PyDict_GET_SIZE(container);
                break;
            default:
                ++foreign_;
                try {
                    frame.expansion = expand(kind, container);
                } catch (const PythonError&) {
                    Caught caught;
                    caught.raise("read", container, path());
                }
                frame.items = frame.expansion.values.get();
                frame.size = PyTuple_GET_SIZE(frame.items);
                if (request_.skip != nullptr) frame.names = Ref::borrow(frame.expansion.keys.get());
        }
        if (static_cast<std::size_t>(frame.size) >= kMaxRefs)
            raise(PyExc_RuntimeError, "a container has too many items");
        frame.foreign = foreign_;
        frames_.push_back(std::move(frame));
    }

    // The scans return true at the end of the container, false when a child was opened: the frame has moved
    // then.

    bool scan_tuple(Frame& frame) {
        for (; frame.position.index < frame.size; ++frame.position.index) {
            if (frame.names && skipped(PyTuple_GET_ITEM(frame.names.get(), frame.position.index))) continue;
            const ValueRef value = visit(PyTuple_GET_ITEM(frame.items, frame.position.index));
            if (value == kDescend) return false;
            if (value != kUnchanged) add_slot(frame, nullptr, value);
        }
        return true;
    }

    bool scan_list(Frame& frame) {
        for (; frame.position.index < frame.size; ++frame.position.index) {
            if (PyList_GET_SIZE(frame.items) != frame.size) raise_changed();
            const ValueRef value = visit(PyList_GET_ITEM(frame.items, frame.position.index));
            if (value == kDescend) return false;
            if (value != kUnchanged) add_slot(frame, nullptr, value);
        }
        return true;
    }

    bool scan_dict(Frame& frame) {
        PyObject* key = nullptr;
        PyObject* child = nullptr;
        for (; frame.position.index < frame.size; ++frame.position.index) {
            if (PyDict_GET_SIZE(frame.items) != frame.size) raise_changed();
            if (PyDict_Next(frame.items, &frame.position.in_dict, &key, &child) == 0) raise_changed();
            if (request_.skip != nullptr) {
                const Ref alive = Ref::borrow(child);
                if (skipped(key)) continue;
            }
            // Opening a child may run Python code, which may remove the key.
            if (!is_plain_tensor_type(Py_TYPE(child))) frame.key = Ref::borrow(key);
            const ValueRef value = visit(child);
            if (value == kDescend) return false;
            if (value != kUnchanged) add_slot(frame, frame.key ? frame.key.get() : key, value);
            frame.key = Ref();
        }
        return true;
    }

    bool skipped(PyObject* name) {
        if (!PyUnicode_Check(name)) return false;
        if (!PyUnicode_CheckExact(name)) ++foreign_;  // its hash and comparison may be Python code
        const Ref alive = Ref::borrow(name);
        const int found = PySet_Contains(request_.skip, name);
        check(found);
        return found == 1;
    }

    void add_slot(const Frame& frame, PyObject* key, ValueRef value) {
        pending_.push_back({Ref::borrow(key), static_cast<std::uint32_t>(frame.position.index), value});
    }

    // The current container ends: it becomes a node if a child changed, and its parent goes on.
    void close() {
        Frame& frame = frames_.back();
        ValueRef value = kUnchanged;
        if (pending_.size() != frame.first_pending) {
            value = add_node(frame);
        }
        if (frame.in_memo) flat_.memo.insert(frame.source.get(), value);
        const Frame closed = std::move(frame);
        frames_.pop_back();
        if (frames_.empty()) {
            flat_.root = value;
            return;
        }
        Frame& parent = frames_.back();
        if (value != kUnchanged) add_slot(parent, parent.key.get(), value);
        parent.key = Ref();
        ++parent.position.index;
    }

    ValueRef add_node(Frame& frame) {
        if (flat_.nodes.size() >= kMaxRefs) raise(PyExc_RuntimeError, "too many containers");
        if (frame.foreign != foreign_ && frame.storage != Storage::tuple) check_unchanged(frame);
        Node node{.kind = frame.kind,
                  .source = Ref::borrow(frame.source.get()),
                  .snapshot = Ref(),
                  .expansion = std::move(frame.expansion),
                  .first_slot = static_cast<std::uint32_t>(flat_.slots.size()),
                  .slot_count = static_cast<std::uint32_t>(pending_.size() - frame.first_pending),
                  .result = Ref()};
        // Taken now: later the lock may be released and other code may change the original.
        if (frame.storage == Storage::list) {
            node.snapshot = Ref::checked(PyList_GetSlice(frame.items, 0, frame.size));
            if (PyList_GET_SIZE(node.snapshot.get()) != frame.size) raise_changed();
        } else if (frame.storage == Storage::dict) {
            node.snapshot = Ref::checked(PyDict_Copy(frame.items));
            if (PyDict_GET_SIZE(node.snapshot.get()) != frame.size) raise_changed();
        }
        const auto first = pending_.begin() + static_cast<std::ptrdiff_t>(frame.first_pending);
        flat_.slots.insert(flat_.slots.end(), std::make_move_iterator(first), std::make_move_iterator(pending_.end()));
        pending_.erase(first, pending_.end());
        flat_.nodes.push_back(std::move(node));
        return node_ref(flat_.nodes.size() - 1);
    }

    // Python code ran since this list or dict was opened: each slot must still hold what was visited.
    void check_unchanged(const Frame& frame) {
        for (std::size_t i = frame.first_pending; i < pending_.size(); ++i) {
            const Slot& slot = pending_[i];
            PyObject* visited = slot.value >= 0 ? flat_.leaves[static_cast<std::size_t>(slot.value)].get()
                                                : flat_.nodes[static_cast<std::size_t>(~slot.value)].source.get();
            PyObject* now = nullptr;
            if (frame.storage == Storage::list) {
                if (slot.index < PyList_GET_SIZE(frame.items)) now = PyList_GET_ITEM(frame.items, slot.index);
            } else {
                now = PyDict_GetItemWithError(frame.items, slot.key.get());
                if (now == nullptr && PyErr_Occurred() != nullptr) throw PythonError();
            }
            if (now != visited) raise_changed();
        }
    }

    std::string path() const {
        std::vector<std::string> steps;
        for (const Frame& frame : frames_) {
            steps.push_back(
                path_step(frame.kind, frame.source.get(), frame.expansion, frame.position.index, frame.key.get()));
        }
        return join_path(steps);
    }

    [[noreturn]] void raise(PyObject* error, const std::string& what) const {
        PyErr_Format(error, "convert: %s at %s", what.c_str(), path().c_str());
        throw PythonError();
    }

    [[noreturn]] void raise_changed() {
        const Ref source = Ref::borrow(frames_.back().source.get());
        frames_.pop_back();
        raise(PyExc_RuntimeError,
              std::string("a ") + Py_TYPE(source.get())->tp_name + " was changed while it was converted");
    }

    const Request& request_;
    Flat& flat_;
    std::vector<Frame> frames_;
    std::vector<Slot> pending_;
    std::size_t foreign_ = 0;  // how often other code may have run
};

}  // namespace

void walk(PyObject* root, const Request& request, Flat& flat) { Walk(request, flat).run(root); }

}  // namespace lite_ext::tree
