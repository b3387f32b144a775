// The leaves of one device cut into tiles and dealt to launches: sums over counts. What a launch can hold is
// told, so that the plan knows of no device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../dtype.h"

namespace lite_ext::plan {

// A dense leaf and the memory of its result, of the same order of elements.
struct CastLeaf {
    const void* source;
    void* target;
    std::int64_t count;  // elements
    DType source_dtype;
    DType target_dtype;
};

struct TileLimits {
    std::int64_t tile_elements;
    std::int64_t launch_tiles;
    // Leaves that a launch may hold, ascending: fewer leaves go out with smaller arguments. At least one.
    std::span<const std::uint32_t> capacities;
};

// A place in the arguments of a launch. Only leaves with elements have one.
struct Slot {
    std::uint32_t leaf;
    std::uint32_t tile_end;  // tiles of its launch up to the end of this leaf
};

struct Launch {
    std::uint32_t first_slot;
    std::uint32_t slots;
    std::uint32_t capacity;  // the least of the capacities that holds the slots
    std::uint32_t tiles;
};

struct TilePlan {
    std::vector<Slot> slots;
    std::vector<Launch> launches;  // of consecutive slots, in the order of the leaves; none without elements
};

constexpr std::int64_t tile_count(std::int64_t elements, std::int64_t tile_elements) {
    return elements / tile_elements + (elements % tile_elements != 0 ? 1 : 0);
}

// Throws std::length_error for a leaf of more tiles than a launch may have.
TilePlan plan_tiles(std::span<const CastLeaf> leaves, const TileLimits& limits);

}  // namespace lite_ext::plan
