// Blocks come back, on whatever thread their storage dies, and the pool never keeps more than its limit.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "../cast/cpu/storage_pool.h"

namespace {

using namespace lite_ext::cast::cpu;

class StoragePool : public testing::Test {
   protected:
    void SetUp() override { set_pool_limit(kDefaultPoolLimit); }
    void TearDown() override { set_pool_limit(kDefaultPoolLimit); }
};

TEST_F(StoragePool, BlocksAreAlignedWritableAndDistinct) {
    std::vector<std::pair<c10::DataPtr, std::size_t>> blocks;
    for (std::size_t bytes = 1; bytes <= 2 * kLargestPooled; bytes += bytes / 7 + 1) {
        blocks.emplace_back(allocate(bytes), bytes);
        std::memset(blocks.back().first.get(), static_cast<int>(blocks.size()), bytes);
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        const auto* data = static_cast<const std::uint8_t*>(blocks[i].first.get());
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % 64, 0U);
        EXPECT_EQ(data[0], static_cast<std::uint8_t>(i + 1));
        EXPECT_EQ(data[blocks[i].second - 1], static_cast<std::uint8_t>(i + 1));
    }
}

TEST_F(StoragePool, AFreedBlockIsUsedAgain) {
    c10::DataPtr first = allocate(100);
    void* address = first.get();
    first.clear();
    EXPECT_EQ(pool_stats().kept_blocks, 1U);
    EXPECT_EQ(allocate(128).get(), address);  // 100 and 128 bytes are of one class
    EXPECT_NE(allocate(129).get(), address);
}

TEST_F(StoragePool, ABlockMayDieOnAnotherThread) {
    c10::DataPtr block = allocate(1000);
    std::thread([&] {
        block.clear();
        EXPECT_EQ(pool_stats().kept_blocks, 1U);
    }).join();
    EXPECT_EQ(pool_stats().kept_blocks, 0U);  // the thread ended, and its free lists with it
}

TEST_F(StoragePool, ABlockMayOutliveItsThread) {
    c10::DataPtr block;
    std::thread([&] { block = allocate(1000); }).join();
    std::memset(block.get(), 1, 1000);
    block.clear();
    EXPECT_EQ(pool_stats().kept_blocks, 1U);
}

TEST_F(StoragePool, KeepsNoMoreThanItsLimit) {
    set_pool_limit(10'000);
    std::vector<c10::DataPtr> blocks;
    for (int i = 0; i < 100; ++i) blocks.push_back(allocate(1000));
    blocks.clear();
    EXPECT_LE(pool_stats().kept_bytes, 10'000U);
    EXPECT_GT(pool_stats().kept_blocks, 0U);
}

TEST_F(StoragePool, EmptyPoolReachesOtherThreads) {
    allocate(1000).clear();
    std::thread([] {
        allocate(1000).clear();
        EXPECT_EQ(pool_stats().kept_blocks, 2U);
        empty_pool();
        EXPECT_EQ(pool_stats().kept_blocks, 0U);
        EXPECT_EQ(pool_stats().kept_bytes, 0U);
    }).join();
}

TEST_F(StoragePool, OffMeansTorchsAllocator) {
    set_pool_limit(0);
    EXPECT_FALSE(pool_stats().enabled);
    allocate(1000).clear();
    EXPECT_EQ(pool_stats().kept_blocks, 0U);
    void* object = allocate_object(100);
    set_pool_limit(kDefaultPoolLimit);
    free_object(object, 100);  // made while the pool was off, kept now: it must be as large as its class
    EXPECT_EQ(pool_stats().kept_blocks, 1U);
    c10::DataPtr reused = allocate(128);
    EXPECT_EQ(reused.get(), object);
    std::memset(reused.get(), 1, 128);
}

TEST_F(StoragePool, ManyThreadsGiveAndTake) {
    constexpr int kThreads = 4;
    constexpr int kRounds = 20'000;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([t] {
            std::vector<c10::DataPtr> held(16);
            for (int i = 0; i < kRounds; ++i) {
                c10::DataPtr& block = held[static_cast<std::size_t>(i * 7 + t) % held.size()];
                const auto bytes = static_cast<std::size_t>(1 + (i * 37) % 3000);
                block = allocate(bytes);
                std::memset(block.get(), t, bytes);
                if (i % 1000 == 0) empty_pool();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(pool_stats().kept_blocks, 0U);
}

}  // namespace
