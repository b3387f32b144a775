#include "tiles.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace lite_ext::plan {

namespace {

// Collects the slots of one launch after another.
class Builder {
   public:
    Builder(const TileLimits& limits, std::size_t leaves) : limits_(limits) { plan_.slots.reserve(leaves); }

    void add(std::uint32_t leaf, std::int64_t tiles) {
        if (open_slots() == limits_.capacities.back() || tiles_ + tiles > limits_.launch_tiles) close();
        tiles_ += tiles;
        plan_.slots.push_back({leaf, static_cast<std::uint32_t>(tiles_)});
    }

    void close() {
        const auto slots = open_slots();
        if (slots == 0) return;
        const std::uint32_t capacity = *std::ranges::lower_bound(limits_.capacities, slots);
        plan_.launches.push_back({first_slot_, slots, capacity, static_cast<std::uint32_t>(tiles_)});
        first_slot_ += slots;
        tiles_ = 0;
    }

    TilePlan take() { return std::move(plan_); }

   private:
    std::uint32_t open_slots() const { return static_cast<std::uint32_t>(plan_.slots.size()) - first_slot_; }

    const TileLimits& limits_;
    TilePlan plan_;
    std::uint32_t first_slot_ = 0;
    std::int64_t tiles_ = 0;  // of the open launch
};

}  // namespace

TilePlan plan_tiles(std::span<const CastLeaf> leaves, const TileLimits& limits) {
    Builder builder(limits, leaves.size());
    for (std::size_t i = 0; i < leaves.size(); ++i) {
        const std::int64_t tiles = tile_count(leaves[i].count, limits.tile_elements);
        if (tiles == 0) continue;
        if (tiles > limits.launch_tiles) {
            throw std::length_error("a tensor of " + std::to_string(leaves[i].count) +
                                    " elements is too large for one launch");
        }
        builder.add(static_cast<std::uint32_t>(i), tiles);
    }
    // After the loop: the last leaf may be empty, and what is open still has to go out.
    builder.close();
    return builder.take();
}

}  // namespace lite_ext::plan
