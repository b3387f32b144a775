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

// Size classes: steps of 64 bytes up to 1 KiB, then four steps to each doubling. At most a quarter is wasted, and of
// a large block that quarter is address space, never touched. Tensors are a class of their own, before these: a block
// that held elements has no version counter.
constexpr std::size_t kTensorClass = 0;
constexpr std::size_t kFirst = 1;
constexpr std::size_t kStep = 64;
constexpr std::size_t kLastLinear = 1024;
constexpr std::size_t kLinearEnd = kFirst + kLastLinear / kStep;
constexpr std::size_t kDoublings = std::bit_width(kLargestPooled / kLastLinear) - 1;
constexpr std::size_t kClasses = kLinearEnd + 4 * kDoublings;

constexpr auto kClassSizes = [] {
    std::array<std::size_t, kClasses> sizes{};
    sizes[kTensorClass] = kTensorBytes;
    for (std::size_t i = kFirst; i < kLinearEnd; ++i) sizes[i] = (i - kFirst + 1) * kStep;
    for (std::size_t i = kLinearEnd; i < kClasses; ++i) {
        const std::size_t doubled = kLastLinear << (i - kLinearEnd) / 4;
        sizes[i] = doubled + ((i - kLinearEnd) % 4 + 1) * (doubled / 4);
    }
    return sizes;
}();
constexpr std::size_t class_size(std::size_t index) { return kClassSizes[index]; }

constexpr std::size_t class_of(std::size_t bytes) {
    if (bytes <= kLastLinear) return kFirst + (bytes - 1) / kStep;
    const auto doubling = static_cast<std::size_t>(std::bit_width((bytes - 1) / kLastLinear)) - 1;
    const std::size_t quarter = (kLastLinear << doubling) / 4;
    return kLinearEnd + 4 * doubling + (bytes - 1 - (kLastLinear << doubling)) / quarter;
}

constexpr std::size_t kSmallClasses = class_of(kLargestSmall) + 1;
static_assert(class_size(kSmallClasses - 1) == kLargestSmall);
static_assert(class_size(kClasses - 1) == kLargestPooled);

std::atomic<std::size_t> thread_limit{PoolLimits{}.thread};
std::atomic<std::size_t> shared_limit{PoolLimits{}.shared};

// A sanitizer must see each output's memory freed.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kUnlessSet = false;
#else
constexpr bool kUnlessSet = true;
#endif

bool allowed_at_start() {
    const char* setting = std::getenv("LITE_EXT_POOL");
    return setting == nullptr ? kUnlessSet : std::string_view(setting) != "0";
}

const bool allowed = allowed_at_start();

std::size_t limit_of(const std::atomic<std::size_t>& limit) {
    return allowed ? limit.load(std::memory_order_relaxed) : 0;
}

// A free block holds the address of the next one, and a dead tensor's its version counter.
struct FreeBlock {
    FreeBlock* next;
    c10::VariableVersion counter;
};
static_assert(sizeof(FreeBlock) <= kStep);

struct Taken {
    void* block;  // NULL if none is kept
    c10::VariableVersion counter;
};

// Free lists of a range of classes, and how much they hold. Whoever owns it locks it.
template <std::size_t First, std::size_t Last>
class FreeLists {
   public:
    Taken take(std::size_t index) {
        FreeBlock*& list = lists_[index - First];
        if (list == nullptr) {
            ++allocated_;
            return {.block = nullptr, .counter = {}};
        }
        kept_bytes_ -= class_size(index);
        --kept_blocks_;
        ++reused_;
        return pop(list);
    }

    // Blocks of other classes make room: they may be of sizes that are not asked for any more.
    bool give(std::size_t index, void* block, c10::VariableVersion&& counter, std::size_t limit) {
        if (class_size(index) > limit) return false;
        while (kept_bytes_ + class_size(index) > limit) {
            if (!drop_one_but_of(index)) return false;
        }
        FreeBlock*& list = lists_[index - First];
        list = new (block) FreeBlock{.next = list, .counter = std::move(counter)};
        kept_bytes_ += class_size(index);
        ++kept_blocks_;
        return true;
    }

    void empty() {
        for (FreeBlock*& list : lists_) {
            while (list != nullptr) c10::free_cpu(pop(list).block);
        }
        kept_bytes_ = 0;
        kept_blocks_ = 0;
    }

    std::size_t add_to(PoolStats& stats) const {
        stats.kept_blocks += kept_blocks_;
        stats.reused += reused_;
        stats.allocated += allocated_;
        return kept_bytes_;
    }

   private:
    static Taken pop(FreeBlock*& list) {
        FreeBlock* block = std::exchange(list, list->next);
        Taken taken{.block = block, .counter = std::move(block->counter)};
        block->~FreeBlock();
        return taken;
    }

    bool drop_one_but_of(std::size_t index) {
        for (std::size_t tried = 0; tried < lists_.size(); ++tried) {
            FreeBlock*& list = lists_[victim_];
            if (list != nullptr && victim_ != index - First) {
                c10::free_cpu(pop(list).block);
                kept_bytes_ -= class_size(First + victim_);
                --kept_blocks_;
                return true;
            }
            victim_ = (victim_ + 1) % lists_.size();
        }
        return false;
    }

    std::array<FreeBlock*, Last - First> lists_{};
    std::size_t victim_ = 0;  // the class that makes room next
    std::size_t kept_bytes_ = 0;
    std::size_t kept_blocks_ = 0;
    std::uint64_t reused_ = 0;
    std::uint64_t allocated_ = 0;
};

// The small blocks of one thread. Others come to empty it only, so the lock is all but never contended.
class Cache {
   public:
    Cache();
    ~Cache();
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    template <class Use>
    auto locked(const Use& use) {
        while (busy_.test_and_set(std::memory_order_acquire)) {
        }
        const Unlock unlock{busy_};
        return use(lists_);
    }

   private:
    struct Unlock {
        std::atomic_flag& busy;
        ~Unlock() { busy.clear(std::memory_order_release); }
    };
    FreeLists<0, kSmallClasses> lists_;
    std::atomic_flag busy_;
};

// Trivially destructible, so that both can be read while the thread ends. The model saves a call at each access.
[[gnu::tls_model("initial-exec")]] thread_local bool thread_ended = false;
[[gnu::tls_model("initial-exec")]] thread_local Cache* current = nullptr;

// What the process shares. Never destroyed: threads may end after its static objects have.
struct Shared {
    std::mutex mutex;
    std::vector<Cache*> caches;  // of the living threads
    std::uint64_t reused_by_dead = 0;
    std::uint64_t allocated_by_dead = 0;
    std::mutex large_mutex;  // taken after `mutex`
    FreeLists<kSmallClasses, kClasses> large;
};
Shared& shared();

void before_fork() {
    shared().mutex.lock();
    shared().large_mutex.lock();
}
void after_fork_in_parent() {
    shared().large_mutex.unlock();
    shared().mutex.unlock();
}
// A child process has one thread. The caches of the others are as they were when it was made, perhaps half changed.
void after_fork_in_child() {
    shared().caches.clear();
    if (current != nullptr) shared().caches.push_back(current);
    after_fork_in_parent();
}

Shared& shared() {
    static Shared* const instance = [] {
        pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
        return new Shared();
    }();
    return *instance;
}

Cache::Cache() {
    const std::lock_guard lock(shared().mutex);
    shared().caches.push_back(this);
    current = this;
}

Cache::~Cache() {
    thread_ended = true;
    current = nullptr;
    const std::lock_guard lock(shared().mutex);
    std::erase(shared().caches, this);
    lists_.empty();
    PoolStats stats{};
    lists_.add_to(stats);
    shared().reused_by_dead += stats.reused;
    shared().allocated_by_dead += stats.allocated;
}

[[gnu::noinline]] Cache* make_cache() {
    if (thread_ended) return nullptr;
    thread_local Cache cache;
    return &cache;
}

// The free lists of this thread, or NULL when it is ending.
Cache* thread_cache() { return current != nullptr ? current : make_cache(); }

// The lists that hold the small blocks of this thread, or NULL when it keeps none.
Cache* cache_in_use() { return limit_of(thread_limit) == 0 ? nullptr : thread_cache(); }

// Always as large as its class, whether or not the pool is on: that it is may change before the block dies.
void* or_from_system(void* block, std::size_t index) {
    return block != nullptr ? block : c10::alloc_cpu(class_size(index));
}

void give(std::size_t index, void* block, c10::VariableVersion counter = {}) {
    bool kept = false;
    if (index < kSmallClasses) {
        Cache* cache = cache_in_use();
        kept = cache != nullptr && cache->locked([&](auto& lists) {
            return lists.give(index, block, std::move(counter), limit_of(thread_limit));
        });
    } else if (const std::size_t limit = limit_of(shared_limit); limit != 0) {
        const std::lock_guard lock(shared().large_mutex);
        kept = shared().large.give(index, block, std::move(counter), limit);
    }
    if (!kept) c10::free_cpu(block);
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

bool is_pooled(std::size_t bytes) {
    const auto& limit = bytes <= kLargestSmall ? thread_limit : shared_limit;
    return bytes != 0 && bytes <= kLargestPooled && limit_of(limit) != 0;
}

// `taken` is a kept block of the size's class, or NULL.
Block block_for(std::size_t bytes, void* taken) {
    const std::size_t index = class_of(bytes);
    void* block = or_from_system(taken, index);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {.data = {block, block, kDeleters[index], c10::Device(c10::DeviceType::CPU)}, .reused = taken != nullptr};
}

}  // namespace

Block allocate(std::size_t bytes) {
    if (!is_pooled(bytes)) return {.data = c10::GetCPUAllocator()->allocate(bytes), .reused = false};
    const std::size_t index = class_of(bytes);
    Taken taken{};
    if (index >= kSmallClasses) {
        const std::lock_guard lock(shared().large_mutex);
        taken = shared().large.take(index);
    } else if (Cache* cache = cache_in_use(); cache != nullptr) {
        taken = cache->locked([=](auto& lists) { return lists.take(index); });
    }
    return block_for(bytes, taken.block);
}

OutputMemory allocate_output(std::size_t bytes, std::size_t storage_bytes) {
    OutputMemory memory{};
    const bool small = bytes <= kLargestSmall && is_pooled(bytes);
    if (!small) memory.data = allocate(bytes);  // first, for it may throw
    void* data = nullptr;
    if (Cache* cache = cache_in_use(); cache != nullptr) {
        cache->locked([&](auto& lists) {
            if (small) data = lists.take(class_of(bytes)).block;
            memory.storage = lists.take(class_of(storage_bytes)).block;
            Taken tensor = lists.take(kTensorClass);
            memory.tensor = tensor.block;
            memory.counter = std::move(tensor.counter);
        });
    }
    if (small) memory.data = block_for(bytes, data);
    memory.storage = or_from_system(memory.storage, class_of(storage_bytes));
    memory.tensor = or_from_system(memory.tensor, kTensorClass);
    return memory;
}

void free_object(void* object, std::size_t bytes) { give(class_of(bytes), object); }

void free_tensor(void* tensor, c10::VariableVersion counter) { give(kTensorClass, tensor, std::move(counter)); }

PoolStats pool_stats() {
    PoolStats stats{};
    stats.limits = {.thread = limit_of(thread_limit), .shared = limit_of(shared_limit)};
    const std::lock_guard lock(shared().mutex);
    stats.reused = shared().reused_by_dead;
    stats.allocated = shared().allocated_by_dead;
    for (Cache* cache : shared().caches) {
        cache->locked([&](auto& lists) { stats.kept_small_bytes += lists.add_to(stats); });
    }
    const std::lock_guard large_lock(shared().large_mutex);
    stats.kept_large_bytes = shared().large.add_to(stats);
    return stats;
}

void empty_pool() {
    const std::lock_guard lock(shared().mutex);
    for (Cache* cache : shared().caches) cache->locked([](auto& lists) { lists.empty(); });
    const std::lock_guard large_lock(shared().large_mutex);
    shared().large.empty();
}

void set_pool_limits(PoolLimits limits) {
    thread_limit.store(limits.thread);
    shared_limit.store(limits.shared);
    empty_pool();
}

}  // namespace lite_ext::cast::cpu
