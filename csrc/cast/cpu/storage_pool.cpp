#include "storage_pool.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

namespace lite_ext::cast::cpu {

namespace {

// Size classes: steps of 64 bytes up to 1 KiB, then four steps to each doubling. At most a quarter is wasted.
constexpr std::size_t kStep = 64;
constexpr std::size_t kLastLinear = 1024;
constexpr std::size_t kLinearClasses = kLastLinear / kStep;
constexpr std::size_t kDoublings = 6;  // from 1 KiB to 64 KiB
constexpr std::size_t kClasses = kLinearClasses + 4 * kDoublings;

constexpr std::size_t class_size(std::size_t index) {
    if (index < kLinearClasses) return (index + 1) * kStep;
    const std::size_t doubling = (index - kLinearClasses) / 4;
    const std::size_t quarter = (index - kLinearClasses) % 4 + 1;
    return (kLastLinear << doubling) + quarter * ((kLastLinear << doubling) / 4);
}
static_assert(class_size(kClasses - 1) == kLargestPooled);

constexpr std::size_t class_of(std::size_t bytes) {
    if (bytes <= kLastLinear) return (bytes - 1) / kStep;
    const auto doubling = static_cast<std::size_t>(std::bit_width((bytes - 1) / kLastLinear)) - 1;
    const std::size_t quarter = (kLastLinear << doubling) / 4;
    return kLinearClasses + 4 * doubling + (bytes - 1 - (kLastLinear << doubling)) / quarter;
}

// A free block holds the address of the next one.
struct FreeBlock {
    FreeBlock* next;
};

std::atomic<std::size_t> limit{kDefaultPoolLimit};

// The free lists of one thread. Others reach them to empty them only, so the lock is all but never contended.
class Cache {
   public:
    Cache();
    ~Cache();
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    void* take(std::size_t index) {
        const Lock lock(*this);
        FreeBlock* block = lists_[index];
        if (block == nullptr) {
            ++allocated_;
            return nullptr;
        }
        lists_[index] = block->next;
        kept_bytes_ -= class_size(index);
        --kept_blocks_;
        ++reused_;
        return block;
    }

    bool give(std::size_t index, void* block) {
        const Lock lock(*this);
        if (kept_bytes_ + class_size(index) > limit.load(std::memory_order_relaxed)) return false;
        lists_[index] = new (block) FreeBlock{lists_[index]};
        kept_bytes_ += class_size(index);
        ++kept_blocks_;
        return true;
    }

    void empty() {
        const Lock lock(*this);
        for (FreeBlock*& list : lists_) {
            while (list != nullptr) c10::free_cpu(std::exchange(list, list->next));
        }
        kept_bytes_ = 0;
        kept_blocks_ = 0;
    }

    void add_to(PoolStats& stats) {
        const Lock lock(*this);
        stats.kept_bytes += kept_bytes_;
        stats.kept_blocks += kept_blocks_;
        stats.reused += reused_;
        stats.allocated += allocated_;
    }

   private:
    class Lock {
       public:
        explicit Lock(Cache& cache) : cache_(cache) {
            while (cache_.busy_.test_and_set(std::memory_order_acquire)) {
            }
        }
        Lock(const Lock&) = delete;
        Lock& operator=(const Lock&) = delete;
        ~Lock() { cache_.busy_.clear(std::memory_order_release); }

       private:
        Cache& cache_;
    };

    std::array<FreeBlock*, kClasses> lists_{};
    std::size_t kept_bytes_ = 0;
    std::size_t kept_blocks_ = 0;
    std::uint64_t reused_ = 0;
    std::uint64_t allocated_ = 0;
    std::atomic_flag busy_;
};

// Trivially destructible, so that both can be read while the thread ends. The model saves a call at each
// access.
[[gnu::tls_model("initial-exec")]] thread_local bool thread_ended = false;
[[gnu::tls_model("initial-exec")]] thread_local Cache* current = nullptr;

// All caches of living threads. Never destroyed: threads may end after the process's static objects have.
struct Caches {
    std::mutex mutex;
    std::vector<Cache*> all;
    std::uint64_t reused_by_dead = 0;
    std::uint64_t allocated_by_dead = 0;
};
Caches& caches();

// A child process has one thread. The caches of the others are as they were when it was made, perhaps half
// changed.
void before_fork() { caches().mutex.lock(); }
void after_fork_in_parent() { caches().mutex.unlock(); }
void after_fork_in_child() {
    caches().all.clear();
    if (current != nullptr) caches().all.push_back(current);
    caches().mutex.unlock();
}

Caches& caches() {
    static Caches* const instance = [] {
        pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
        return new Caches();
    }();
    return *instance;
}

Cache::Cache() {
    const std::lock_guard lock(caches().mutex);
    caches().all.push_back(this);
    current = this;
}

Cache::~Cache() {
    thread_ended = true;
    current = nullptr;
    empty();
    const std::lock_guard lock(caches().mutex);
    caches().reused_by_dead += reused_;
    caches().allocated_by_dead += allocated_;
    std::erase(caches().all, this);
}

bool enabled_at_start() {
    const char* setting = std::getenv("LITE_EXT_POOL");
    return setting == nullptr || std::string_view(setting) != "0";
}

bool enabled() {
    static const bool at_start = enabled_at_start();
    return at_start && limit.load(std::memory_order_relaxed) != 0;
}

[[gnu::noinline]] Cache* make_cache() {
    if (thread_ended) return nullptr;
    thread_local Cache cache;
    return &cache;
}

// The free lists of this thread, or NULL when it is ending.
Cache* thread_cache() { return current != nullptr ? current : make_cache(); }

// A block of the class, from the free lists or from the system.
void* take(std::size_t index) {
    Cache* cache = thread_cache();
    void* block = cache == nullptr ? nullptr : cache->take(index);
    return block == nullptr ? c10::alloc_cpu(class_size(index)) : block;
}

void give(std::size_t index, void* block) {
    Cache* cache = thread_cache();
    if (cache == nullptr || !enabled() || !cache->give(index, block)) c10::free_cpu(block);
}

// One deleter a class: the class is all that has to be remembered of a block.
template <std::size_t Index>
void release(void* block) {
    c10::profiledCPUMemoryReporter().Delete(block);
    give(Index, block);
}

template <std::size_t... Indices>
constexpr std::array<c10::DeleterFnPtr, kClasses> make_deleters(std::index_sequence<Indices...> /*all*/) {
    return {release<Indices>...};
}
constexpr auto kDeleters = make_deleters(std::make_index_sequence<kClasses>());

}  // namespace

c10::DataPtr allocate(std::size_t bytes) {
    if (bytes == 0 || bytes > kLargestPooled || !enabled()) {
        return c10::GetCPUAllocator()->allocate(bytes);
    }
    const std::size_t index = class_of(bytes);
    void* block = take(index);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, kDeleters[index], c10::Device(c10::DeviceType::CPU)};
}

void* allocate_object(std::size_t bytes) {
    const std::size_t index = class_of(bytes);
    // Always as large as its class: whether the pool takes it back is decided when it dies.
    return enabled() ? take(index) : c10::alloc_cpu(class_size(index));
}

void free_object(void* object, std::size_t bytes) { give(class_of(bytes), object); }

PoolStats pool_stats() {
    PoolStats stats{
        .enabled = enabled(), .limit = limit.load(), .kept_bytes = 0, .kept_blocks = 0, .reused = 0, .allocated = 0};
    const std::lock_guard lock(caches().mutex);
    for (Cache* cache : caches().all) cache->add_to(stats);
    stats.reused += caches().reused_by_dead;
    stats.allocated += caches().allocated_by_dead;
    return stats;
}

void empty_pool() {
    const std::lock_guard lock(caches().mutex);
    for (Cache* cache : caches().all) cache->empty();
}

void set_pool_limit(std::size_t bytes) {
    limit.store(bytes);
    empty_pool();
}

}  // namespace lite_ext::cast::cpu
