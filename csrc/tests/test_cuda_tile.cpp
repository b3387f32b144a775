// The kernel's tile function, run on the host for every thread of every block of the grids that a plan asks for. Each
// element must be written once, with what convert_element says, and nothing else touched. Reads out of bounds and
// misaligned accesses are what the sanitizers are for; this suite is run under them.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "../cast/cuda/launch_args.h"

#if __has_include(<cuda_fp16.h>)
#define LITE_EXT_CUDA_HEADERS 1
#include "../cast/cuda/device_access.h"
#else
#define LITE_EXT_CUDA_HEADERS 0
#endif

namespace {

using namespace lite_ext;
using namespace lite_ext::cast;
using namespace lite_ext::cast::cuda;
using plan::CastLeaf;
using plan::TilePlan;

constexpr std::size_t kGuard = 64;
constexpr std::byte kUntouched{0xA5};

struct Leaf {
    std::int64_t count;
    DType source = DType::bfloat16;
    DType target = DType::float32;
    std::size_t source_offset = 0;  // elements past an aligned address
    std::size_t target_offset = 0;
};

// Memory that begins aligned as the allocators of devices align it, and ends where the sanitizer watches.
class Buffer {
   public:
    explicit Buffer(std::size_t bytes)
        : begin_(static_cast<std::byte*>(::operator new(bytes, kAlignment))), bytes_(bytes) {}
    Buffer(Buffer&& other) noexcept : begin_(std::exchange(other.begin_, nullptr)), bytes_(other.bytes_) {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer() { ::operator delete(begin_, kAlignment); }
    std::byte* begin() const { return begin_; }
    std::size_t bytes() const { return bytes_; }

   private:
    static constexpr std::align_val_t kAlignment{512};
    std::byte* begin_;
    std::size_t bytes_;
};

// The memory of a tree and how often each byte of each target was written.
class Tree {
   public:
    Tree(const std::vector<Leaf>& leaves, std::uint64_t seed) : leaves_(leaves) {
        std::mt19937_64 random(seed);
        for (const Leaf& leaf : leaves_) {
            const auto count = static_cast<std::size_t>(leaf.count);
            const Buffer& source = sources_.emplace_back((leaf.source_offset + count) * item_size(leaf.source));
            for (std::size_t i = 0; i < source.bytes(); ++i) source.begin()[i] = static_cast<std::byte>(random());
            const Buffer& target =
                targets_.emplace_back(2 * kGuard + (leaf.target_offset + count) * item_size(leaf.target));
            std::fill_n(target.begin(), target.bytes(), kUntouched);
            writes_.emplace(target.begin(), std::vector<std::uint8_t>(target.bytes()));
        }
    }

    std::vector<CastLeaf> cast_leaves() const {
        std::vector<CastLeaf> result;
        for (std::size_t i = 0; i < leaves_.size(); ++i) {
            result.push_back({source(i), target(i), leaves_[i].count, leaves_[i].source, leaves_[i].target});
        }
        return result;
    }

    void written(const void* address, std::size_t bytes) {
        const auto* at = static_cast<const std::byte*>(address);
        auto found = writes_.upper_bound(at);
        ASSERT_NE(found, writes_.begin());
        --found;
        const auto offset = static_cast<std::size_t>(at - found->first);
        ASSERT_LE(offset + bytes, found->second.size());
        for (std::size_t i = 0; i < bytes; ++i) ++found->second[offset + i];
    }

    // `counted` is false where the accesses were not recorded.
    void check(bool counted) const {
        for (std::size_t i = 0; i < leaves_.size(); ++i) {
            const Leaf& leaf = leaves_[i];
            const Buffer& memory = targets_[i];
            const std::size_t first = static_cast<std::size_t>(target(i) - memory.begin());
            const std::size_t end = first + static_cast<std::size_t>(leaf.count) * item_size(leaf.target);
            const std::vector<std::uint8_t>& writes = writes_.at(memory.begin());
            for (std::size_t at = 0; at < memory.bytes(); ++at) {
                const bool inside = at >= first && at < end;
                ASSERT_TRUE(inside || memory.begin()[at] == kUntouched) << "leaf " << i << ", byte " << at;
                ASSERT_TRUE(!counted || writes[at] == (inside ? 1 : 0)) << "leaf " << i << ", byte " << at;
            }
            std::vector<std::byte> expected(end - first);
            oracle(leaf, source(i), expected.data());
            ASSERT_TRUE(std::equal(expected.begin(), expected.end(), target(i))) << "leaf " << i;
        }
    }

   private:
    const std::byte* source(std::size_t i) const {
        return sources_[i].begin() + leaves_[i].source_offset * item_size(leaves_[i].source);
    }
    std::byte* target(std::size_t i) const {
        return targets_[i].begin() + kGuard + leaves_[i].target_offset * item_size(leaves_[i].target);
    }

    template <DType Source, DType Target>
    static void convert_all(const std::byte* source, std::int64_t count, std::byte* expected) {
        if constexpr (Source != Target) {
            for (std::int64_t i = 0; i < count; ++i) {
                storage_t<Source> from;
                std::memcpy(&from, source + static_cast<std::size_t>(i) * sizeof(from), sizeof(from));
                const storage_t<Target> to = convert_element<Source, Target>(from);
                std::memcpy(expected + static_cast<std::size_t>(i) * sizeof(to), &to, sizeof(to));
            }
        }
    }
    template <DType Source>
    static void convert_from(const Leaf& leaf, const std::byte* source, std::byte* expected) {
        if (leaf.target == DType::float16) convert_all<Source, DType::float16>(source, leaf.count, expected);
        if (leaf.target == DType::bfloat16) convert_all<Source, DType::bfloat16>(source, leaf.count, expected);
        if (leaf.target == DType::float32) convert_all<Source, DType::float32>(source, leaf.count, expected);
        if (leaf.target == DType::float64) convert_all<Source, DType::float64>(source, leaf.count, expected);
    }
    static void oracle(const Leaf& leaf, const std::byte* source, std::byte* expected) {
        if (leaf.source == DType::float16) convert_from<DType::float16>(leaf, source, expected);
        if (leaf.source == DType::bfloat16) convert_from<DType::bfloat16>(leaf, source, expected);
        if (leaf.source == DType::float32) convert_from<DType::float32>(leaf, source, expected);
        if (leaf.source == DType::float64) convert_from<DType::float64>(leaf, source, expected);
    }

    std::vector<Leaf> leaves_;
    std::vector<Buffer> sources_;
    std::vector<Buffer> targets_;
    std::map<const std::byte*, std::vector<std::uint8_t>> writes_;
};

Tree* watched = nullptr;
std::int64_t vector_stores = 0;
std::int64_t scalar_stores = 0;

// Counts what is written, and refuses what a device would fault on.
struct WatchedAccess : PlainAccess {
    template <class Value>
    static Value load(const Value* from) {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(from) % sizeof(Value), 0U);
        return *from;
    }
    template <class Value>
    static void store(Value* to, const Value& value) {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(to) % sizeof(Value), 0U);
        watched->written(to, sizeof(Value));
        ++(std::is_arithmetic_v<Value> ? scalar_stores : vector_stores);
        *to = value;
    }
};

template <class Access, std::uint32_t Capacity>
void run_launch(const std::vector<CastLeaf>& leaves, const TilePlan& plan, const plan::Launch& launch) {
    auto args = std::make_unique<LaunchArgs<Capacity>>();
    std::memset(static_cast<void*>(args.get()), 0xEE, sizeof(*args));  // whoever reads past the leaves will notice
    pack(leaves, std::span(plan.slots).subspan(launch.first_slot, launch.slots), *args);
    for (std::uint32_t block = 0; block < launch.tiles; ++block) {
        for (std::uint32_t thread = 0; thread < kThreads; ++thread) run_block<Access>(*args, block, thread);
    }
}

template <class Access>
void run_grids(const std::vector<CastLeaf>& leaves, bool large_arguments) {
    const TilePlan plan = plan::plan_tiles(leaves, limits(large_arguments));
    for (const plan::Launch& launch : plan.launches) {
        if (launch.capacity == kSmall) run_launch<Access, kSmall>(leaves, plan, launch);
        if (launch.capacity == kMedium) run_launch<Access, kMedium>(leaves, plan, launch);
        if (launch.capacity == kLarge) run_launch<Access, kLarge>(leaves, plan, launch);
    }
}

void check(const std::vector<Leaf>& leaves, bool large_arguments = true, std::uint64_t seed = 1) {
    Tree tree(leaves, seed);
    watched = &tree;
    vector_stores = scalar_stores = 0;
    run_grids<WatchedAccess>(tree.cast_leaves(), large_arguments);
    watched = nullptr;
    tree.check(true);
}

constexpr DType kDTypes[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};

template <class Body>
void for_each_pair(const Body& body) {
    for (const DType source : kDTypes) {
        for (const DType target : kDTypes) {
            if (source != target) body(source, target);
        }
    }
}

TEST(CudaTile, EveryLengthUpToSomeVectors) {
    for_each_pair([](DType source, DType target) {
        std::vector<Leaf> leaves;
        for (std::int64_t count = 0; count <= 70; ++count) leaves.push_back({count, source, target});
        check(leaves);
    });
}

TEST(CudaTile, EveryMisalignmentOfSourceAndTarget) {
    for_each_pair([](DType source, DType target) {
        for (std::size_t source_offset = 0; source_offset < 9; ++source_offset) {
            std::vector<Leaf> leaves;
            for (std::size_t target_offset = 0; target_offset < 9; ++target_offset) {
                for (const std::int64_t count : {1, 2, 3, 5, 8, 13, 31, 100, 4095, 4096, 4097, 4103}) {
                    leaves.push_back({count, source, target, source_offset, target_offset});
                }
            }
            check(leaves);
        }
    });
}

TEST(CudaTile, LengthsAroundWholeTiles) {
    for_each_pair([](DType source, DType target) {
        std::vector<Leaf> leaves;
        for (const std::int64_t tiles : {1, 2, 3}) {
            for (std::int64_t by = -9; by <= 9; ++by) leaves.push_back({tiles * kTileElements + by, source, target});
        }
        check(leaves);
    });
}

TEST(CudaTile, OnlyTheEndOfAnOddLeafIsScalar) {
    check({{.count = 3 * kTileElements + 3}});
    EXPECT_EQ(vector_stores, 3 * kTileElements / 4);
    EXPECT_EQ(scalar_stores, 3);
    check({{.count = 3 * kTileElements + 3, .source_offset = 1}});  // nor is it for an odd source
    EXPECT_EQ(vector_stores, 3 * kTileElements / 4);
    EXPECT_EQ(scalar_stores, 3);
}

TEST(CudaTile, RandomTrees) {
    std::mt19937_64 random(2);
    const auto below = [&](std::uint64_t limit) { return random() % limit; };
    for (std::uint64_t round = 0; round < 60; ++round) {
        std::vector<Leaf> leaves(1 + below(round % 10 == 0 ? 2000 : 200));
        for (Leaf& leaf : leaves) {
            leaf.source = kDTypes[below(4)];
            do leaf.target = kDTypes[below(4)];
            while (leaf.target == leaf.source);
            const std::uint64_t kind = below(100);
            leaf.count = static_cast<std::int64_t>(kind < 20   ? 0
                                                   : kind < 60 ? 1 + below(40)
                                                   : kind < 90 ? below(3000)
                                                   : kind < 98 ? 4090 + below(12)
                                                               : below(20'000));
            if (below(3) == 0) leaf.source_offset = below(8);
            if (below(10) == 0) leaf.target_offset = below(8);
        }
        check(leaves, round % 2 == 0, round);
    }
}

// Without the watcher, as the sanitizers see it: the accesses are those of the tile alone.
TEST(CudaTile, PlainAccessAgrees) {
    std::vector<Leaf> leaves;
    for_each_pair([&](DType source, DType target) {
        for (std::size_t offset = 0; offset < 4; ++offset) leaves.push_back({4096 + 1001, source, target, offset});
    });
    Tree tree(leaves, 3);
    run_grids<PlainAccess>(tree.cast_leaves(), true);
    tree.check(false);
}

TEST(CudaTile, SeamsOfEveryCapacity) {
    for (const bool large : {false, true}) {
        const std::size_t most = large ? kLarge : kMedium;
        for (const std::size_t leaves : {most - 1, most, most + 1, 2 * most + 1}) {
            for (const std::size_t empty : {std::size_t{0}, most - 2, most - 1, most, leaves - 1}) {
                std::vector<Leaf> tree(leaves, Leaf{.count = 5});
                tree[std::min(empty, leaves - 1)].count = 0;
                check(tree, large);
                tree.insert(tree.begin() + static_cast<std::ptrdiff_t>(std::min(empty, leaves)), Leaf{.count = 0});
                check(tree, large);
            }
        }
    }
}

// github.com/pytorch/pytorch/pull/173531: the kernel was chosen by the first target's dtype.
TEST(CudaTile, MixedPairsInOneLaunch_pytorch173531) {
    std::vector<Leaf> leaves;
    for_each_pair([&](DType source, DType target) { leaves.push_back({1000, source, target}); });
    ASSERT_EQ(leaves.size(), 12U);
    check(leaves);
    std::ranges::reverse(leaves);
    check(leaves);
}

// github.com/pytorch/pytorch/pull/123844 and pull/127186: no bounds in the path for unaligned tensors.
TEST(CudaTile, TinyOddAndUnaligned_pytorch123844) {
    for_each_pair([](DType source, DType target) {
        std::vector<Leaf> leaves;
        for (const std::size_t offset : {1U, 2U, 3U}) {
            for (std::int64_t count = 1; count < 10; count += 2)
                leaves.push_back({count, source, target, offset, offset});
        }
        check(leaves);
    });
}

// github.com/pytorch/pytorch/pull/100811: nothing was written when the last tensor was empty.
TEST(CudaTile, EmptyLast_pytorch100811) { check({{.count = 7}, {.count = 9}, {.count = 0}}); }

// github.com/NVIDIA/TransformerEngine/issues/2189: at most so many tensors in a call.
TEST(CudaTile, TwentyThousandLeaves_TransformerEngine2189) { check(std::vector<Leaf>(20'001, Leaf{.count = 3})); }

// github.com/microsoft/onnxruntime/pull/32121: on replay the kernel read pointers that were no longer there. Here it
// has nothing but its arguments.
TEST(CudaTile, ArgumentsOutliveThePlan_onnxruntime32121) {
    Tree tree({{.count = 5000}, {.count = 3}}, 4);
    auto args = std::make_unique<LaunchArgs<kSmall>>();
    std::uint32_t tiles = 0;
    {
        const std::vector<CastLeaf> leaves = tree.cast_leaves();
        const TilePlan plan = plan::plan_tiles(leaves, limits(true));
        pack(leaves, plan.slots, *args);
        tiles = plan.launches[0].tiles;
    }
    const LaunchArgs<kSmall> copied = *args;
    args.reset();
    for (std::uint32_t block = 0; block < tiles; ++block) {
        for (std::uint32_t thread = 0; thread < kThreads; ++thread) run_block<PlainAccess>(copied, block, thread);
    }
    tree.check(false);
}

// github.com/pytorch/pytorch/pull/179282: the bits of a NaN differ by platform; that it is one must not.
TEST(CudaTile, EveryNarrowPatternKeepsItsKind_pytorch179282) {
    std::vector<std::uint16_t> source(65536);
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::uint16_t>(i);
    for (const DType from : {DType::float16, DType::bfloat16}) {
        std::vector<float> target(source.size());
        run_grids<PlainAccess>({{source.data(), target.data(), 65536, from, DType::float32}}, true);
        for (std::size_t i = 0; i < source.size(); ++i) {
            const std::uint32_t infinity = from == DType::float16 ? bits::kHalfInfinity : 0x7F80U;
            ASSERT_EQ(target[i] != target[i], (i & 0x7FFFU) > infinity) << i;
        }
    }
}

#if LITE_EXT_CUDA_HEADERS

template <DType Target>
bool same_off_nan(storage_t<Target> got, storage_t<Target> expected) {
    const auto number = [](storage_t<Target> value) {
        if constexpr (Target == DType::float64) {
            return value;
        } else {
            return convert_element<Target, DType::float64>(value);
        }
    };
    if (number(expected) != number(expected)) return number(got) != number(got);
    return std::memcmp(&got, &expected, sizeof(got)) == 0;
}

// The order of the elements in a vector, and the meaning of every conversion that the device does by instructions.
template <DType Source, DType Target>
void check_instructions(const std::vector<storage_t<Source>>& values) {
    using Cast = TileCast<DeviceAccess, Source, Target>;
    constexpr std::uint32_t kVector = Cast::kVector;
    for (std::size_t first = 0; first + kVector <= values.size(); first += kVector) {
        typename Cast::FromVector from;
        std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(first), kVector, from.items);
        const auto to = DeviceAccess::convert<Source, Target, kVector>(from);
        for (std::uint32_t i = 0; i < kVector; ++i) {
            const storage_t<Target> expected = convert_element<Source, Target>(from.items[i]);
            const auto one = DeviceAccess::convert<Source, Target, 1>({{from.items[i]}});
            ASSERT_TRUE(same_off_nan<Target>(to.items[i], expected)) << "value " << first + i;
            ASSERT_TRUE(same_off_nan<Target>(one.items[0], expected)) << "value " << first + i;
        }
    }
}

TEST(CudaTile, InstructionsAgreeWithTheArithmetic) {
    std::vector<std::uint16_t> narrow(65536);
    std::vector<float> floats;
    std::vector<double> doubles;
    for (std::size_t i = 0; i < narrow.size(); ++i) narrow[i] = static_cast<std::uint16_t>(i);
    std::mt19937_64 random(5);
    for (int i = 0; i < 300'000; ++i) {
        auto word = static_cast<std::uint32_t>(random());
        if (i % 3 == 0) word = (word & 0xFFFF0000U) | 0x8000U;      // ties of bfloat16
        if (i % 3 == 1) word = (word & 0x8FFFF000U) + 0x33001000U;  // ties and subnormals of float16
        floats.push_back(std::bit_cast<float>(word));
        doubles.push_back(i % 2 == 0 ? std::bit_cast<double>(random()) : floats.back() * (1.0 + 0x1p-40));
    }
    check_instructions<DType::float16, DType::bfloat16>(narrow);
    check_instructions<DType::float16, DType::float32>(narrow);
    check_instructions<DType::float16, DType::float64>(narrow);
    check_instructions<DType::bfloat16, DType::float16>(narrow);
    check_instructions<DType::bfloat16, DType::float32>(narrow);
    check_instructions<DType::bfloat16, DType::float64>(narrow);
    check_instructions<DType::float32, DType::float16>(floats);
    check_instructions<DType::float32, DType::bfloat16>(floats);
    check_instructions<DType::float32, DType::float64>(floats);
    check_instructions<DType::float64, DType::float16>(doubles);
    check_instructions<DType::float64, DType::bfloat16>(doubles);
    check_instructions<DType::float64, DType::float32>(doubles);
}

#endif

// Address space whose pages come into being when they are touched: tensors larger than this machine's memory.
class Reserved {
   public:
    explicit Reserved(std::size_t bytes)
        : bytes_(bytes),
          begin_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
    Reserved(const Reserved&) = delete;
    Reserved& operator=(const Reserved&) = delete;
    ~Reserved() {
        if (valid()) munmap(begin_, bytes_);
    }
    bool valid() const { return begin_ != MAP_FAILED; }
    template <class Element>
    Element* as() const {
        return static_cast<Element*>(begin_);
    }

   private:
    std::size_t bytes_;
    void* begin_;
};

void check_far_elements(std::int64_t count) {
    const auto elements = static_cast<std::size_t>(count);
    const Reserved source_memory(elements * 2);
    const Reserved target_memory(elements * 4 + 4);
    if (!source_memory.valid() || !target_memory.valid())
        GTEST_SKIP() << "no address space for " << count << " elements";
    auto* source = source_memory.as<std::uint16_t>();
    auto* target = target_memory.as<float>();
    const std::vector<CastLeaf> leaves{{source, target, count, DType::bfloat16, DType::float32}};
    const TilePlan plan = plan::plan_tiles(leaves, limits(true));
    LaunchArgs<kSmall> args;
    pack(leaves, plan.slots, args);
    const std::uint32_t tiles = plan.launches[0].tiles;
    std::vector<std::uint32_t> blocks{0, tiles / 2, tiles - 2, tiles - 1};
    for (const std::int64_t power : {1L << 31, 1L << 32}) {
        if (power < count) blocks.push_back(static_cast<std::uint32_t>(power / kTileElements) - 1);
        if (power < count) blocks.push_back(static_cast<std::uint32_t>(power / kTileElements));
    }
    for (const std::uint32_t block : blocks) {
        const std::int64_t begin = static_cast<std::int64_t>(block) * kTileElements;
        const std::int64_t end = std::min(begin + kTileElements, count);
        for (std::int64_t i = begin; i < end; ++i) source[i] = static_cast<std::uint16_t>(0x3F80 + i % 97);
        for (std::uint32_t thread = 0; thread < kThreads; ++thread) run_block<PlainAccess>(args, block, thread);
        for (std::int64_t i = begin; i < end; ++i) ASSERT_EQ(target[i], bits::bfloat16_to_float(source[i])) << i;
    }
    EXPECT_EQ(target[count], 0.0F);
}

// github.com/pytorch/pytorch/issues/156261: the offset of a chunk was a product of two ints.
TEST(CudaTile, Elements27000008x192_pytorch156261) { check_far_elements(27000008L * 192); }

// github.com/NVIDIA/TransformerEngine/issues/2918: the size of a tensor was an int.
TEST(CudaTile, Elements19345706x128_TransformerEngine2918) { check_far_elements(19345706L * 128); }

// github.com/NVIDIA/apex/issues/1654 and pull/1825.
TEST(CudaTile, ElementsBeyond32Bits_apex1825) {
    check_far_elements(2359332864L);
    check_far_elements((1L << 32) + 1);
}

// github.com/deepspeedai/DeepSpeed/issues/7640.
TEST(CudaTile, ElementsFrom31BitsOn_DeepSpeed7640) {
    check_far_elements(1L << 31);
    check_far_elements((1L << 31) + 1);
}

}  // namespace
