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
    void SetUp() override { set_pool_limits({}); }
    void TearDown() override { set_pool_limits({}); }
};

TEST_F(StoragePool, BlocksAreAlignedWritableAndDistinct) {
    std::vector<std::pair<c10::DataPtr, std::size_t>> blocks;
    for (std::size_t bytes = 1; bytes <= 64 * kLargestSmall; bytes += bytes / 7 + 1) {
        blocks.emplace_back(allocate(bytes).data, bytes);
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
    c10::DataPtr first = allocate(100).data;
    void* address = first.get();
    first.clear();
    EXPECT_EQ(pool_stats().kept_blocks, 1U);
    EXPECT_EQ(allocate(128).data.get(), address);  // 100 and 128 bytes are of one class
    EXPECT_NE(allocate(129).data.get(), address);
    EXPECT_TRUE(allocate(100).reused);
    EXPECT_FALSE(allocate(5000).reused);
}

TEST_F(StoragePool, ABlockMayDieOnAnotherThread) {
    c10::DataPtr block = allocate(1000).data;
    std::thread([&] {
        block.clear();
        EXPECT_EQ(pool_stats().kept_blocks, 1U);
    }).join();
    EXPECT_EQ(pool_stats().kept_blocks, 0U);  // the thread ended, and its free lists with it
}

TEST_F(StoragePool, ABlockMayOutliveItsThread) {
    c10::DataPtr block;
    std::thread([&] { block = allocate(1000).data; }).join();
    std::memset(block.get(), 1, 1000);
    block.clear();
    EXPECT_EQ(pool_stats().kept_blocks, 1U);
}

TEST_F(StoragePool, KeepsNoMoreThanItsLimit) {
    set_pool_limits({.thread = 10'000, .shared = 0});
    std::vector<c10::DataPtr> blocks;
    for (int i = 0; i < 100; ++i) blocks.push_back(allocate(1000).data);
    blocks.clear();
    EXPECT_LE(pool_stats().kept_small_bytes, 10'000U);
    EXPECT_GT(pool_stats().kept_blocks, 0U);
}

TEST_F(StoragePool, ALargeBlockIsSharedByThreads) {
    void* address = nullptr;
    std::thread([&] {
        c10::DataPtr block = allocate(10 * kLargestSmall).data;
        address = block.get();
    }).join();
    EXPECT_EQ(pool_stats().kept_large_bytes, 10 * kLargestSmall);
    EXPECT_EQ(allocate(10 * kLargestSmall - 5).data.get(), address);
}

TEST_F(StoragePool, TheLargestBlockIsPooledAndTheNextIsNot) {
    set_pool_limits({.thread = 0, .shared = 4 * kLargestPooled});
    allocate(kLargestPooled).data.clear();
    EXPECT_EQ(pool_stats().kept_large_bytes, kLargestPooled);
    allocate(kLargestPooled + 1).data.clear();
    EXPECT_EQ(pool_stats().kept_blocks, 1U);
}

TEST_F(StoragePool, EmptyPoolReachesOtherThreads) {
    allocate(1000).data.clear();
    std::thread([] {
        allocate(1000).data.clear();
        EXPECT_EQ(pool_stats().kept_blocks, 2U);
        empty_pool();
        EXPECT_EQ(pool_stats().kept_blocks, 0U);
        EXPECT_EQ(pool_stats().kept_small_bytes, 0U);
    }).join();
}

TEST_F(StoragePool, OffMeansTorchsAllocator) {
    set_pool_limits({.thread = 0, .shared = 0});
    allocate(1000).data.clear();
    EXPECT_EQ(pool_stats().kept_blocks, 0U);
    OutputMemory memory = allocate_output(1000, 100);
    set_pool_limits({});
    free_object(memory.storage, 100);  // made while the pool was off, kept now: it must be as large as its class
    EXPECT_EQ(pool_stats().kept_blocks, 1U);
    c10::DataPtr reused = allocate(128).data;
    EXPECT_EQ(reused.get(), memory.storage);
    std::memset(reused.get(), 1, 128);
    free_tensor(memory.tensor, {});
    EXPECT_EQ(pool_stats().kept_blocks, 1U);
}

TEST_F(StoragePool, ATensorsMemoryComesBackWithItsVersionCounter) {
    OutputMemory first = allocate_output(kTensorBytes, kTensorBytes);
    EXPECT_FALSE(first.counter.enabled());
    free_tensor(first.tensor, c10::VariableVersion(7));
    EXPECT_EQ(pool_stats().kept_small_bytes, kTensorBytes);
    EXPECT_FALSE(allocate(kTensorBytes).reused);  // elements never take a tensor's block
    OutputMemory second = allocate_output(kTensorBytes, kTensorBytes);
    EXPECT_EQ(second.tensor, first.tensor);
    EXPECT_EQ(second.counter.current_version(), 7U);
    EXPECT_TRUE(second.counter.unique());
    free_object(first.storage, kTensorBytes);
    free_object(second.storage, kTensorBytes);
    free_tensor(second.tensor, std::move(second.counter));
    empty_pool();
    EXPECT_EQ(pool_stats().kept_blocks, 0U);
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
                block = allocate(bytes).data;
                std::memset(block.get(), t, bytes);
                if (i % 1000 == 0) empty_pool();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(pool_stats().kept_blocks, 0U);
}

}  // namespace
