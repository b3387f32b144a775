// How leaves are cut into tiles and dealt to launches. The names that end in a number are public bugs of kernels of
// this kind; what they were is said at each.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "../plan/tiles.h"

namespace {

using namespace lite_ext;
using plan::CastLeaf;
using plan::Launch;
using plan::plan_tiles;
using plan::TileLimits;
using plan::TilePlan;

constexpr std::array<std::uint32_t, 3> kCapacities{4, 10, 30};
constexpr std::int64_t kTile = 4096;
constexpr std::int64_t kGrid = 0x7FFFFFFF;
constexpr TileLimits kLimits{.tile_elements = kTile, .launch_tiles = kGrid, .capacities = kCapacities};

std::vector<CastLeaf> leaves_of(const std::vector<std::int64_t>& counts) {
    std::vector<CastLeaf> leaves;
    for (const std::int64_t count : counts)
        leaves.push_back({nullptr, nullptr, count, DType::bfloat16, DType::float32});
    return leaves;
}

// Holds a plan against the leaves by the shortest means: one tile after another.
void check(const std::vector<std::int64_t>& counts, const TileLimits& limits) {
    const std::vector<CastLeaf> leaves = leaves_of(counts);
    const TilePlan plan = plan_tiles(leaves, limits);
    std::vector<std::uint32_t> planned;
    std::uint32_t next_slot = 0;
    for (const Launch& launch : plan.launches) {
        ASSERT_EQ(launch.first_slot, next_slot);
        ASSERT_GT(launch.slots, 0U);
        ASSERT_LE(launch.slots, launch.capacity);
        ASSERT_LE(launch.tiles, limits.launch_tiles);
        for (const std::uint32_t capacity : limits.capacities) {
            // A smaller one would not have done.
            ASSERT_TRUE(capacity >= launch.capacity || capacity < launch.slots);
        }
        std::int64_t tiles = 0;
        for (std::uint32_t i = 0; i < launch.slots; ++i) {
            const plan::Slot& slot = plan.slots[next_slot + i];
            ASSERT_GT(counts[slot.leaf], 0);
            tiles += (counts[slot.leaf] + limits.tile_elements - 1) / limits.tile_elements;
            ASSERT_EQ(slot.tile_end, tiles);
            planned.push_back(slot.leaf);
        }
        ASSERT_EQ(launch.tiles, tiles);
        next_slot += launch.slots;
    }
    ASSERT_EQ(next_slot, plan.slots.size());
    std::vector<std::uint32_t> expected;
    for (std::size_t i = 0; i < counts.size(); ++i) {
        if (counts[i] != 0) expected.push_back(static_cast<std::uint32_t>(i));
    }
    ASSERT_EQ(planned, expected);
}

TEST(Tiles, NothingIsNoLaunch) {
    EXPECT_TRUE(plan_tiles({}, kLimits).launches.empty());
    EXPECT_TRUE(plan_tiles(leaves_of({0, 0, 0}), kLimits).launches.empty());
}

TEST(Tiles, TheLastTileMayBeShort) {
    for (const std::int64_t count : {1L, kTile - 1, kTile, kTile + 1, 7 * kTile, 7 * kTile + 1}) {
        const TilePlan plan = plan_tiles(leaves_of({count}), kLimits);
        EXPECT_EQ(plan.launches[0].tiles, (count - 1) / kTile + 1) << count;
    }
}

TEST(Tiles, TheSmallestCapacityThatHoldsTheLeaves) {
    for (const auto& [leaves, capacity] :
         std::vector<std::pair<std::size_t, std::uint32_t>>{{1, 4}, {4, 4}, {5, 10}, {10, 10}, {11, 30}, {30, 30}}) {
        const TilePlan plan = plan_tiles(leaves_of(std::vector<std::int64_t>(leaves, 5)), kLimits);
        ASSERT_EQ(plan.launches.size(), 1U);
        EXPECT_EQ(plan.launches[0].capacity, capacity) << leaves;
    }
}

TEST(Tiles, ALaunchOfItsOwnForWhatIsLeft) {
    const TilePlan plan = plan_tiles(leaves_of(std::vector<std::int64_t>(62, 5)), kLimits);
    ASSERT_EQ(plan.launches.size(), 3U);
    EXPECT_EQ(plan.launches[0].slots, 30U);
    EXPECT_EQ(plan.launches[1].slots, 30U);
    EXPECT_EQ(plan.launches[2].slots, 2U);
    EXPECT_EQ(plan.launches[2].capacity, 4U);
    EXPECT_EQ(plan.launches[2].tiles, 2U);
}

TEST(Tiles, EverySeamWithAnEmptyLeafAtEachPlace) {
    for (const std::size_t leaves : {29U, 30U, 31U, 60U, 61U}) {
        check(std::vector<std::int64_t>(leaves, 5), kLimits);
        for (std::size_t empty = 0; empty <= leaves; ++empty) {
            std::vector<std::int64_t> counts(leaves, 5);
            counts.insert(counts.begin() + static_cast<std::ptrdiff_t>(empty), 0);
            check(counts, kLimits);
            counts.insert(counts.begin() + static_cast<std::ptrdiff_t>(empty), 3, 0);
            check(counts, kLimits);
        }
    }
}

TEST(Tiles, TheGridLimitOpensANewLaunch) {
    const TileLimits small{.tile_elements = kTile, .launch_tiles = 10, .capacities = kCapacities};
    check({9 * kTile, kTile, 1, 10 * kTile, 5, 0, 9 * kTile + 1}, small);
    const TilePlan plan = plan_tiles(leaves_of({9 * kTile, kTile, 1}), small);
    ASSERT_EQ(plan.launches.size(), 2U);
    EXPECT_EQ(plan.launches[0].tiles, 10U);
    EXPECT_EQ(plan.launches[1].tiles, 1U);
}

TEST(Tiles, RandomPlans) {
    std::mt19937_64 random(1);
    for (int round = 0; round < 2000; ++round) {
        const TileLimits limits{.tile_elements = 1 + static_cast<std::int64_t>(random() % 50),
                                .launch_tiles = 100 + static_cast<std::int64_t>(random() % 100),
                                .capacities = std::span(kCapacities).first(1 + random() % 3)};
        std::vector<std::int64_t> counts(random() % 100);
        for (std::int64_t& count : counts) count = random() % 3 == 0 ? 0 : static_cast<std::int64_t>(random() % 100);
        check(counts, limits);
    }
}

// github.com/pytorch/pytorch/pull/100811: the launch was made inside the loop over leaves, so a list whose last tensor
// was empty was never launched.
TEST(Tiles, EmptyLast_pytorch100811) {
    const TilePlan plan = plan_tiles(leaves_of({5, 7, 0}), kLimits);
    ASSERT_EQ(plan.launches.size(), 1U);
    EXPECT_EQ(plan.launches[0].slots, 2U);
}

// github.com/NVIDIA/TransformerEngine/issues/3202: an empty tensor in the last slot wrote past the tables.
TEST(Tiles, EmptyInTheLastSlot_TransformerEngine3202) {
    std::vector<std::int64_t> counts(31, 5);
    counts[29] = 0;
    const TilePlan plan = plan_tiles(leaves_of(counts), kLimits);
    ASSERT_EQ(plan.launches.size(), 1U);
    EXPECT_EQ(plan.launches[0].slots, 30U);
    counts.assign(31, 0);
    counts[30] = 5;
    EXPECT_EQ(plan_tiles(leaves_of(counts), kLimits).launches[0].slots, 1U);
}

// github.com/NVIDIA/TransformerEngine/issues/3207: an empty parameter at the end of a group, and the step was skipped.
TEST(Tiles, EmptyAtTheEndOfAFullLaunch_TransformerEngine3207) {
    std::vector<std::int64_t> counts(30, 5);
    counts.push_back(0);
    const TilePlan plan = plan_tiles(leaves_of(counts), kLimits);
    ASSERT_EQ(plan.launches.size(), 1U);
    EXPECT_EQ(plan.launches[0].slots, 30U);
}

// github.com/pytorch/pytorch/issues/156261, NVIDIA/TransformerEngine/issues/2918, NVIDIA/apex/issues/1654 and
// pull/1825, deepspeedai/DeepSpeed/issues/7640: sizes and offsets in 32 bits.
TEST(Tiles, SizesBeyond32Bits_pytorch156261) {
    const std::vector<std::int64_t> counts{27000008L * 192, 19345706L * 128, 2359332864L,   (1L << 31) - 1,
                                           1L << 31,        (1L << 31) + 1,  (1L << 32) + 1};
    for (const std::int64_t count : counts) check({count}, kLimits);
    check(counts, kLimits);
}

// DeepSpeed/issues/7640: what was too large was left unchanged in silence.
TEST(Tiles, TooLargeIsAnError_DeepSpeed7640) {
    constexpr std::int64_t kLargest = kGrid * kTile;
    check({kLargest}, kLimits);
    check({kLargest, 1, kLargest}, kLimits);
    EXPECT_THROW(plan_tiles(leaves_of({kLargest + 1}), kLimits), std::length_error);
    EXPECT_THROW(plan_tiles(leaves_of({INT64_MAX}), kLimits), std::length_error);
}

// github.com/vllm-project/vllm/issues/49276: 51,828 copies in one batch crashed the driver.
TEST(Tiles, ManyLeavesAreManyLaunches_vllm49276) { check(std::vector<std::int64_t>(51828, 3), kLimits); }

}  // namespace
