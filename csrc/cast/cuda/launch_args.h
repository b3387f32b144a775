// From the plan to the arguments of the kernel: what a launch may hold on CUDA, and how it is filled.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../../plan/tiles.h"
#include "../tile.h"

namespace lite_ext::cast::cuda {

// Leaves of the three launches. The driver copies all arguments at each launch: few leaves do not pay for
// many.
inline constexpr std::uint32_t kSmall = 16;
inline constexpr std::uint32_t kMedium = 146;
inline constexpr std::uint32_t kLarge = 1150;

// Bytes of arguments that every device takes, and those that it takes from CUDA 12.1 and compute
// capability 7.0 on.
inline constexpr std::size_t kArgumentBytes = 4096;
inline constexpr std::size_t kLargeArgumentBytes = 32764;
static_assert(sizeof(LaunchArgs<kMedium>) <= kArgumentBytes);
static_assert(sizeof(LaunchArgs<kLarge>) <= kLargeArgumentBytes);

inline constexpr std::array<std::uint32_t, 3> kCapacities{kSmall, kMedium, kLarge};

inline constexpr std::int64_t kMaxGrid = 0x7FFFFFFF;

constexpr plan::TileLimits limits(bool large_arguments) {
    const std::span<const std::uint32_t> all(kCapacities);
    return {
        .tile_elements = kTileElements, .launch_tiles = kMaxGrid, .capacities = large_arguments ? all : all.first(2)};
}

template <std::uint32_t Capacity>
void pack(std::span<const plan::CastLeaf> leaves, std::span<const plan::Slot> slots, LaunchArgs<Capacity>& args) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const plan::CastLeaf& leaf = leaves[slots[i].leaf];
        args.source[i] = leaf.source;
        args.target[i] = leaf.target;
        args.extent[i] = make_extent(leaf.count, leaf.source_dtype, leaf.target_dtype);
        args.tile_end[i] = slots[i].tile_end;
    }
    args.leaves = static_cast<std::uint32_t>(slots.size());
}

}  // namespace lite_ext::cast::cuda
