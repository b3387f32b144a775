// For libFuzzer: any leaves, dealt to launches by the plan and converted by every thread of every block. See
// tools/fuzz_cpp.sh. Memory is as large as the leaves, so that the address sanitizer sees a step beyond; an element
// that is not what convert_element says, or written by nobody, ends the process.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../cast/cuda/launch_args.h"
#include "../plan/plan.h"

namespace {

using namespace lite_ext;
using namespace lite_ext::cast;
using namespace lite_ext::cast::cuda;

constexpr DType kDTypes[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};
constexpr std::int64_t kMostElements = 3 * kTileElements;  // of an input, so that many inputs are tried
constexpr std::size_t kMostLeaves = 1400;                  // more than a launch holds
constexpr std::size_t kAlignment = 64;

void require(bool holds) {
    if (!holds) std::abort();
}

// `bytes` that end where the allocation does, `offset` past an aligned address.
class Memory {
   public:
    Memory(std::size_t bytes, std::size_t offset)
        : begin_(static_cast<std::byte*>(::operator new(bytes + offset, std::align_val_t{kAlignment}))),
          offset_(offset) {}
    std::byte* get() const { return begin_.get() + offset_; }

   private:
    struct Delete {
        void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{kAlignment}); }
    };
    std::unique_ptr<std::byte, Delete> begin_;
    std::size_t offset_;
};

struct Leaf {
    Memory source;
    Memory target;
    plan::CastLeaf cast;
};

std::vector<Leaf> draw_leaves(FuzzedDataProvider& data) {
    std::vector<Leaf> leaves;
    std::int64_t left = kMostElements;
    const std::size_t repeats = data.ConsumeBool() ? data.ConsumeIntegralInRange<std::size_t>(1, 700) : 1;
    while (data.remaining_bytes() > 4 && leaves.size() < kMostLeaves) {
        const DType source = data.PickValueInArray(kDTypes);
        const DType target = data.PickValueInArray(kDTypes);
        if (source == target) continue;
        const auto most = data.ConsumeBool() ? std::int64_t{40} : left;
        const auto count = data.ConsumeIntegralInRange<std::int64_t>(0, most < left ? most : left);
        const std::size_t from = data.ConsumeIntegralInRange<std::size_t>(0, 9) * item_size(source);
        const std::size_t to = data.ConsumeIntegralInRange<std::size_t>(0, 9) * item_size(target);
        for (std::size_t i = 0; i < repeats && leaves.size() < kMostLeaves && left >= count; ++i) {
            const auto elements = static_cast<std::size_t>(count);
            Leaf leaf{{elements * item_size(source), from}, {elements * item_size(target), to}, {}};
            for (std::size_t at = 0; at < elements * item_size(source); ++at) {
                leaf.source.get()[at] = static_cast<std::byte>((at + i) * 2654435761U >> 7U);
            }
            leaf.cast = {leaf.source.get(), leaf.target.get(), count, source, target};
            leaves.push_back(std::move(leaf));
            left -= count;
        }
    }
    return leaves;
}

template <std::uint32_t Capacity>
void run_launch(const std::vector<plan::CastLeaf>& leaves, const plan::TilePlan& tiles, const plan::Launch& launch) {
    require(launch.slots <= Capacity);
    auto args = std::make_unique<LaunchArgs<Capacity>>();
    pack(leaves, std::span(tiles.slots).subspan(launch.first_slot, launch.slots), *args);
    for (std::uint32_t block = 0; block < launch.tiles; ++block) {
        for (std::uint32_t thread = 0; thread < kThreads; ++thread) run_block<PlainAccess>(*args, block, thread);
    }
}

template <DType Source, DType Target>
void check_pair(const plan::CastLeaf& leaf) {
    if constexpr (Source != Target) {
        const auto* from = static_cast<const storage_t<Source>*>(leaf.source);
        const auto* to = static_cast<const storage_t<Target>*>(leaf.target);
        for (std::int64_t i = 0; i < leaf.count; ++i) {
            const storage_t<Target> wanted = convert_element<Source, Target>(from[i]);
            require(std::memcmp(to + i, &wanted, sizeof(wanted)) == 0);
        }
    }
}

template <DType Source>
void check_source(const plan::CastLeaf& leaf) {
    if (leaf.target_dtype == DType::float16) check_pair<Source, DType::float16>(leaf);
    if (leaf.target_dtype == DType::bfloat16) check_pair<Source, DType::bfloat16>(leaf);
    if (leaf.target_dtype == DType::float32) check_pair<Source, DType::float32>(leaf);
    if (leaf.target_dtype == DType::float64) check_pair<Source, DType::float64>(leaf);
}

void check_leaf(const plan::CastLeaf& leaf) {
    if (leaf.source_dtype == DType::float16) check_source<DType::float16>(leaf);
    if (leaf.source_dtype == DType::bfloat16) check_source<DType::bfloat16>(leaf);
    if (leaf.source_dtype == DType::float32) check_source<DType::float32>(leaf);
    if (leaf.source_dtype == DType::float64) check_source<DType::float64>(leaf);
}

// Every leaf is in one group, of its own route and device, and leaves keep their order.
void check_plan(FuzzedDataProvider& data) {
    plan::Plan made;
    const auto leaves = data.ConsumeIntegralInRange<std::uint32_t>(0, 64);
    std::vector<int> met(leaves);
    for (std::uint32_t leaf = 0; leaf < leaves; ++leaf) {
        const auto route = static_cast<plan::Route>(data.ConsumeIntegralInRange<int>(0, 2));
        made.add(leaf, route, static_cast<std::int8_t>(data.ConsumeIntegralInRange<int>(-1, 7)));
    }
    for (const plan::Group& group : made.groups()) {
        require(group.route != plan::Route::fallback && !group.leaves.empty());
        for (std::size_t i = 0; i < group.leaves.size(); ++i) {
            ++met[group.leaves[i]];
            require(i == 0 || group.leaves[i - 1] < group.leaves[i]);
        }
    }
    for (const std::uint32_t leaf : made.fallback()) ++met[leaf];
    for (const int times : met) require(times == 1);
    made.clear();
    require(made.groups().empty() && made.fallback().empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
    FuzzedDataProvider data(bytes, size);
    const bool large_arguments = data.ConsumeBool();
    if (data.ConsumeBool()) check_plan(data);
    const std::vector<Leaf> leaves = draw_leaves(data);
    std::vector<plan::CastLeaf> casts;
    for (const Leaf& leaf : leaves) casts.push_back(leaf.cast);
    const plan::TilePlan tiles = plan::plan_tiles(casts, limits(large_arguments));
    for (const plan::Launch& launch : tiles.launches) {
        require(launch.capacity == kSmall || launch.capacity == kMedium || launch.capacity == kLarge);
        require(large_arguments || launch.capacity != kLarge);
        if (launch.capacity == kSmall) run_launch<kSmall>(casts, tiles, launch);
        if (launch.capacity == kMedium) run_launch<kMedium>(casts, tiles, launch);
        if (launch.capacity == kLarge) run_launch<kLarge>(casts, tiles, launch);
    }
    for (const plan::CastLeaf& leaf : casts) check_leaf(leaf);
    return 0;
}
