// The map from objects to results, over addresses that are never looked into.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <unordered_map>

#include "../tree/memo.h"

namespace {

using lite_ext::tree::Memo;

PyObject* at(std::uintptr_t address) { return reinterpret_cast<PyObject*>(address); }

TEST(Memo, EmptyFindsNothing) {
    Memo memo;
    EXPECT_EQ(memo.find(at(16)), nullptr);
}

TEST(Memo, AgreesWithAMapThroughGrowthOverwritingAndClearing) {
    std::mt19937_64 random(3);
    Memo memo;
    for (const int objects : {1, 31, 32, 33, 500, 5000, 10}) {
        std::unordered_map<std::uintptr_t, std::int32_t> expected;
        for (int i = 0; i < objects; ++i) {
            // Close together, as objects of one arena are.
            const std::uintptr_t address = 0x7F0000000000U + 16 * (random() % (2 * static_cast<unsigned>(objects)));
            const auto value = static_cast<std::int32_t>(random());
            memo.insert(at(address), value);
            expected[address] = value;
        }
        for (const auto& [address, value] : expected) {
            ASSERT_NE(memo.find(at(address)), nullptr);
            EXPECT_EQ(*memo.find(at(address)), value);
        }
        EXPECT_EQ(memo.find(at(0x10)), nullptr);
        memo.clear();
        for (const auto& entry : expected) EXPECT_EQ(memo.find(at(entry.first)), nullptr);
    }
}

}  // namespace
