// Which leaves go where: a pure function over plain structs, told what each leaf is and what this build can
// do.
#pragma once

#include <cstdint>
#include <vector>

#include "../dtype.h"

namespace lite_ext::plan {

enum class DeviceKind : std::uint8_t { cpu, cuda, other };

// What is known of a leaf that has to be converted.
struct LeafFacts {
    DType source;
    DeviceKind device;
    std::int8_t device_index;  // -1 for the CPU
    bool plain;                // a strided tensor that no subclass, mode or transform watches
    bool dense;                // its elements fill their memory, in whatever order
    bool gathered;             // it is not, and small enough for the CPU to gather them
};

enum class Route : std::uint8_t { fast_cpu, fast_cuda, fallback };

struct Backends {
    bool cpu = true;
    bool cuda = false;
};

Route route(const LeafFacts& leaf, DType target, Backends backends);

// The leaves that one launch (or one parallel region) of one device converts, by their index.
struct Group {
    Route route;
    std::int8_t device_index;
    std::vector<std::uint32_t> leaves;
};

class Plan {
   public:
    // Leaves of one device share a group; groups are in the order of their first leaf.
    void add(std::uint32_t leaf, Route route, std::int8_t device_index);
    const std::vector<Group>& groups() const { return groups_; }
    const std::vector<std::uint32_t>& fallback() const { return fallback_; }
    void clear();

   private:
    std::vector<Group> groups_;
    std::vector<std::uint32_t> fallback_;
};

}  // namespace lite_ext::plan
