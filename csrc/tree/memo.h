// Object -> what became of it, for the objects that can occur twice. Open addressing, reused between calls.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lite_ext::tree {

class Memo {
   public:
    // The value of the object, or NULL. Valid until the next insert. The object must be kept alive by the
    // caller.
    std::int32_t* find(PyObject* object) {
        if (count_ == 0) return nullptr;
        Entry& entry = entries_[probe(object)];
        return entry.object == nullptr ? nullptr : &entry.value;
    }

    void insert(PyObject* object, std::int32_t value) {
        if (2 * (count_ + 1) > entries_.size()) grow();
        Entry& entry = entries_[probe(object)];
        if (entry.object == nullptr) ++count_;
        entry = {object, value};
    }

    void clear() {
        if (entries_.size() > kKeptEntries) {
            entries_ = {};
        } else if (count_ != 0) {
            std::fill(entries_.begin(), entries_.end(), Entry{});
        }
        count_ = 0;
    }

   private:
    struct Entry {
        PyObject* object = nullptr;
        std::int32_t value = 0;
    };
    static constexpr std::size_t kFirstEntries = 64;
    static constexpr std::size_t kKeptEntries = 1024;

    std::size_t probe(PyObject* object) const {
        const std::size_t mask = entries_.size() - 1;
        // Objects are 16-byte aligned; the multiplication spreads the rest over the high bits.
        auto hash = static_cast<std::size_t>((reinterpret_cast<std::uintptr_t>(object) >> 4) * 0x9E3779B97F4A7C15ULL);
        std::size_t at = (hash >> 32) & mask;
        while (entries_[at].object != nullptr && entries_[at].object != object) at = (at + 1) & mask;
        return at;
    }

    void grow() {
        std::vector<Entry> old(entries_.empty() ? kFirstEntries : 2 * entries_.size());
        old.swap(entries_);
        for (const Entry& entry : old) {
            if (entry.object != nullptr) entries_[probe(entry.object)] = entry;
        }
    }

    std::vector<Entry> entries_;
    std::size_t count_ = 0;
};

}  // namespace lite_ext::tree
