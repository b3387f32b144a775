// The arguments of the kernel: what fits, what is written and where.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "../cast/cuda/launch_args.h"

namespace {

using namespace lite_ext;
using namespace lite_ext::cast;
using namespace lite_ext::cast::cuda;

std::vector<plan::CastLeaf> some_leaves(std::size_t count) {
    std::vector<plan::CastLeaf> leaves;
    for (std::size_t i = 0; i < count; ++i) {
        const auto source = static_cast<DType>(i % kKernelDTypes);
        const auto target = static_cast<DType>((i / kKernelDTypes + i + 1) % kKernelDTypes);
        leaves.push_back({reinterpret_cast<const void*>(0x1000 + i), reinterpret_cast<void*>(0x900000 + i),
                          static_cast<std::int64_t>(1 + i * 1'000'003), source, target});
    }
    return leaves;
}

template <std::uint32_t Capacity>
void check_packing(std::size_t count) {
    const std::vector<plan::CastLeaf> leaves = some_leaves(count);
    const plan::TilePlan plan = plan::plan_tiles(leaves, limits(Capacity == kLarge));
    ASSERT_EQ(plan.launches.size(), 1U);
    ASSERT_EQ(plan.launches[0].capacity, Capacity);
    auto args = std::make_unique<LaunchArgs<Capacity>>();
    std::memset(static_cast<void*>(args.get()), 0xEE, sizeof(*args));
    pack(leaves, plan.slots, *args);
    ASSERT_EQ(args->leaves, count);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t first = i == 0 ? 0U : plan.slots[i - 1].tile_end;
        const Tile tile = locate(*args, first);
        EXPECT_EQ(args->source[i], leaves[i].source);
        EXPECT_EQ(args->target[i], leaves[i].target);
        EXPECT_EQ(tile.leaf, i);
        EXPECT_EQ(tile.source_dtype, leaves[i].source_dtype);
        EXPECT_EQ(tile.target_dtype, leaves[i].target_dtype);
        EXPECT_EQ(tile.begin, 0);
        const Tile last = locate(*args, args->tile_end[i] - 1);
        EXPECT_EQ(last.leaf, i);
        EXPECT_EQ(last.begin + last.count, leaves[i].count);
    }
    // What lies beyond the leaves is left alone: filling 32 KB would cost more than the launch.
    if (count < Capacity) {
        EXPECT_EQ(args->tile_end[count], 0xEEEEEEEEU);
    }
}

TEST(LaunchArgs, EveryCapacityFullAndNot) {
    check_packing<kSmall>(1);
    check_packing<kSmall>(kSmall);
    check_packing<kMedium>(kSmall + 1);
    check_packing<kMedium>(kMedium);
    check_packing<kLarge>(kMedium + 1);
    check_packing<kLarge>(kLarge);
}

// github.com/pytorch/pytorch/issues/189827: tables were sized for other scalars than came, and read past their end.
TEST(LaunchArgs, TheirSizeIsCheckedWhenCompiled_pytorch189827) {
    EXPECT_LE(sizeof(LaunchArgs<kMedium>), 4096U);
    EXPECT_GT(sizeof(LaunchArgs<kMedium + 1>), 4096U);  // as many as fit
    EXPECT_LE(sizeof(LaunchArgs<kLarge>), 32764U);
    std::vector<plan::CastLeaf> leaves(380, {nullptr, nullptr, 9, DType::float64, DType::float32});
    for (const plan::Launch& launch : plan::plan_tiles(leaves, limits(false)).launches) {
        EXPECT_LE(launch.slots, kMedium);
    }
}

TEST(LaunchArgs, TheyAreCopiedByteByByte) {
    EXPECT_TRUE(std::is_trivially_copyable_v<LaunchArgs<kLarge>>);
    EXPECT_TRUE(std::is_standard_layout_v<LaunchArgs<kLarge>>);
}

TEST(LaunchArgs, LargeOnesOnlyWhereTheDeviceTakesThem) {
    const std::vector<plan::CastLeaf> leaves = some_leaves(kMedium + 1);
    EXPECT_EQ(plan::plan_tiles(leaves, limits(true)).launches.size(), 1U);
    const plan::TilePlan plan = plan::plan_tiles(leaves, limits(false));
    ASSERT_EQ(plan.launches.size(), 2U);
    EXPECT_EQ(plan.launches[0].capacity, kMedium);
    EXPECT_EQ(plan.launches[1].capacity, kSmall);
}

TEST(LaunchArgs, ExtentHoldsTheLargestCountAndEveryPair) {
    for (std::size_t source = 0; source < kKernelDTypes; ++source) {
        for (std::size_t target = 0; target < kKernelDTypes; ++target) {
            auto args = std::make_unique<LaunchArgs<1>>();
            args->extent[0] =
                make_extent(kMaxGrid * kTileElements, static_cast<DType>(source), static_cast<DType>(target));
            args->tile_end[0] = static_cast<std::uint32_t>(kMaxGrid);
            args->leaves = 1;
            const Tile tile = locate(*args, static_cast<std::uint32_t>(kMaxGrid - 1));
            EXPECT_EQ(tile.begin, (kMaxGrid - 1) * kTileElements);
            EXPECT_EQ(tile.count, kTileElements);
            EXPECT_EQ(tile.source_dtype, static_cast<DType>(source));
            EXPECT_EQ(tile.target_dtype, static_cast<DType>(target));
        }
    }
}

// Indices of leaves in a byte overflow from 256 leaves on.
TEST(LaunchArgs, TheSearchFindsEveryTileOfEveryNumberOfLeaves) {
    auto args = std::make_unique<LaunchArgs<kLarge>>();
    for (std::uint32_t leaves = 1; leaves <= kLarge; ++leaves) {
        std::uint32_t tiles = 0;
        for (std::uint32_t i = 0; i < leaves; ++i) {
            args->tile_end[i] = tiles += 1 + i % 3;
            args->extent[i] = make_extent((1 + i % 3) * kTileElements, DType::float16, DType::float32);
        }
        args->leaves = leaves;
        std::uint32_t leaf = 0;
        for (std::uint32_t block = 0; block < tiles; ++block) {
            if (block == args->tile_end[leaf]) ++leaf;
            ASSERT_EQ(locate(*args, block).leaf, leaf) << leaves << " leaves, block " << block;
        }
    }
}

}  // namespace
