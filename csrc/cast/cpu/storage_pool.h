// Blocks for the storages of outputs. Most of the time of a conversion is the allocator's (small outputs) or goes into
// page faults (large ones): blocks of storages that died are kept and given out again. Each storage still owns a
// block of its own.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>

namespace lite_ext::cast::cpu {

// Up to this size a block goes to the free lists of the thread that frees it, above it to those of the process.
inline constexpr std::size_t kLargestSmall = std::size_t{64} << 10;

// Larger blocks come from torch's allocator and go back to it.
inline constexpr std::size_t kLargestPooled = std::size_t{1} << 30;

// Bytes that the free lists hold at most, until set_pool_limits.
struct PoolLimits {
    std::size_t thread = std::size_t{64} << 20;   // small blocks, of each thread
    std::size_t shared = std::size_t{256} << 20;  // large blocks, of the process
};

struct Block {
    c10::DataPtr data;  // 64-byte-aligned, uninitialised; its deleter returns the block to a free list
    bool reused;        // its pages are there already
};
Block allocate(std::size_t bytes);

// Bytes of a block for a tensor's own structure; a block that is kept counts with its version counter.
inline constexpr std::size_t kTensorBytes = 256;

// All that one output needs, at one visit to the free lists: memory for its elements, for its storage's own structure
// of `storage_bytes` and for its tensor's; and a version counter that nothing else holds, or none.
struct OutputMemory {
    Block data;
    void* storage;
    void* tensor;
    c10::VariableVersion counter;
};
OutputMemory allocate_output(std::size_t bytes, std::size_t storage_bytes);
void free_object(void* object, std::size_t bytes);
void free_tensor(void* tensor, c10::VariableVersion counter);

struct PoolStats {
    PoolLimits limits;
    std::size_t kept_small_bytes;  // in the free lists of all threads
    std::size_t kept_large_bytes;
    std::size_t kept_blocks;
    std::uint64_t reused;     // blocks given out from a free list
    std::uint64_t allocated;  // blocks taken from the system
};
PoolStats pool_stats();

// Gives every kept block back to the system, those of other threads too.
void empty_pool();

// Sets what may be kept, and empties the pool. A limit of 0 turns that part off; so does LITE_EXT_POOL=0 both,
// and the address sanitizer unless LITE_EXT_POOL=1.
void set_pool_limits(PoolLimits limits);

}  // namespace lite_ext::cast::cpu
