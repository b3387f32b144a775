// Which way each leaf goes, and how leaves are grouped by device.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "../plan/plan.h"

namespace {

using namespace lite_ext;
using plan::Backends;
using plan::DeviceKind;
using plan::LeafFacts;
using plan::Plan;
using plan::Route;

constexpr Backends kBoth{.cpu = true, .cuda = true};
constexpr Backends kCpuOnly{.cpu = true, .cuda = false};

LeafFacts plain(DeviceKind device, DType source = DType::bfloat16) {
    return {.source = source, .device = device, .device_index = 0, .plain = true, .dense = true, .gathered = false};
}

TEST(Route, PlainLeavesOfADeviceWithKernelsAreFast) {
    EXPECT_EQ(plan::route(plain(DeviceKind::cpu), DType::float32, kBoth), Route::fast_cpu);
    EXPECT_EQ(plan::route(plain(DeviceKind::cuda), DType::float32, kBoth), Route::fast_cuda);
}

TEST(Route, WhatIsNotPlainFallsBack) {
    LeafFacts leaf = plain(DeviceKind::cpu);
    leaf.plain = false;
    EXPECT_EQ(plan::route(leaf, DType::float32, kBoth), Route::fallback);
    EXPECT_EQ(plan::route(plain(DeviceKind::other), DType::float32, kBoth), Route::fallback);
}

TEST(Route, WhatIsNotDenseIsGatheredOnTheCpuOnly) {
    LeafFacts leaf = plain(DeviceKind::cpu);
    leaf.dense = false;
    EXPECT_EQ(plan::route(leaf, DType::float32, kBoth), Route::fallback);
    leaf.gathered = true;
    EXPECT_EQ(plan::route(leaf, DType::float32, kBoth), Route::fast_cpu);
    leaf.device = DeviceKind::cuda;
    EXPECT_EQ(plan::route(leaf, DType::float32, kBoth), Route::fallback);
}

TEST(Route, DTypesWithoutKernelsFallBack) {
    EXPECT_EQ(plan::route(plain(DeviceKind::cpu, DType::float8_e5m2), DType::float32, kBoth), Route::fallback);
    EXPECT_EQ(plan::route(plain(DeviceKind::cpu), DType::float8_e4m3fn, kBoth), Route::fallback);
}

TEST(Route, CudaFallsBackWhereItWasNotBuilt) {
    EXPECT_EQ(plan::route(plain(DeviceKind::cuda), DType::float32, kCpuOnly), Route::fallback);
}

TEST(Plan, OneGroupADeviceInOrderOfTheFirstLeaf) {
    Plan plan;
    plan.add(0, Route::fast_cuda, 1);
    plan.add(1, Route::fast_cpu, -1);
    plan.add(2, Route::fallback, -1);
    plan.add(3, Route::fast_cuda, 1);
    plan.add(4, Route::fast_cuda, 0);
    plan.add(5, Route::fast_cpu, -1);
    ASSERT_EQ(plan.groups().size(), 3U);
    EXPECT_EQ(plan.groups()[0].leaves, (std::vector<std::uint32_t>{0, 3}));
    EXPECT_EQ(plan.groups()[0].device_index, 1);
    EXPECT_EQ(plan.groups()[1].leaves, (std::vector<std::uint32_t>{1, 5}));
    EXPECT_EQ(plan.groups()[2].leaves, (std::vector<std::uint32_t>{4}));
    EXPECT_EQ(plan.fallback(), (std::vector<std::uint32_t>{2}));
    plan.clear();
    EXPECT_TRUE(plan.groups().empty());
    EXPECT_TRUE(plan.fallback().empty());
}

TEST(DTypes, BitsAreDistinctAndSizesKnown) {
    std::uint32_t all = 0;
    for (unsigned i = 0; i < static_cast<unsigned>(DType::none); ++i) {
        EXPECT_EQ(all & bit(static_cast<DType>(i)), 0U);
        all |= bit(static_cast<DType>(i));
    }
    EXPECT_EQ(all, kAllMask);
    EXPECT_EQ(bit(DType::none), 0U);
    EXPECT_EQ(item_size(DType::bfloat16), 2U);
    EXPECT_EQ(item_size(DType::float64), 8U);
}

}  // namespace
