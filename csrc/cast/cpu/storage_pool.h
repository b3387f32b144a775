// Blocks for the storages of outputs. Most of the time of a small conversion is the allocator's: blocks of
// storages that died are kept and given out again. Each storage still owns a block of its own.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>

namespace lite_ext::cast::cpu {

// Larger blocks come from torch's allocator and go back to it.
inline constexpr std::size_t kLargestPooled = 64 * 1024;

// Bytes that the free lists of one thread hold at most, until set_pool_limit.
inline constexpr std::size_t kDefaultPoolLimit = 16 * 1024 * 1024;

// 64-byte-aligned, uninitialised. The deleter returns the block to the free list of the thread it runs on.
c10::DataPtr allocate(std::size_t bytes);

// The same blocks, for small objects that die elsewhere: operator new and delete of the tensors' own
// structures.
void* allocate_object(std::size_t bytes);
void free_object(void* object, std::size_t bytes);

struct PoolStats {
    bool enabled;
    std::size_t limit;       // bytes a thread may keep
    std::size_t kept_bytes;  // in the free lists of all threads
    std::size_t kept_blocks;
    std::uint64_t reused;     // blocks given out from a free list
    std::uint64_t allocated;  // blocks taken from the system
};
PoolStats pool_stats();

// Gives every kept block back to the system, those of other threads too.
void empty_pool();

// Sets how many bytes each thread may keep; what lies above it is freed. 0 turns the pool off.
void set_pool_limit(std::size_t bytes);

}  // namespace lite_ext::cast::cpu
