#include "cast_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "gather.h"
#include "kernels.h"

namespace lite_ext::cast::cpu {

namespace {

Level detect() {
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
    const bool able = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
    if (able && at::get_cpu_capability() != "DEFAULT" && at::get_cpu_capability() != "NO AVX") return Level::avx2;
#endif
    return Level::baseline;
}

Level level() {
    static const Level detected = detect();
    return detected;
}

void run_part(const Item& item, std::int64_t begin, std::int64_t end, DType target) {
    const auto* source =
        static_cast<const char*>(item.source) + begin * static_cast<std::int64_t>(item_size(item.source_dtype));
    auto* destination = static_cast<char*>(item.target) + begin * static_cast<std::int64_t>(item_size(target));
    const bool streamed = item.resident && item.count * static_cast<std::int64_t>(item_size(target)) >= kStreamedBytes;
    const Level used = streamed && level() == Level::avx2 ? Level::avx2_streaming : level();
    kernel(item.source_dtype, target, used)(source, destination, end - begin);
}

}  // namespace

const char* level_name() { return level() == Level::avx2 ? "avx2" : "baseline"; }

void run(std::span<const Item> items, std::int64_t elements, DType target) {
    if (elements <= kGrain || at::get_num_threads() == 1 || at::in_parallel_region()) {
        for (const Item& item : items) run_part(item, 0, item.count, target);
        return;
    }
    // The leaves laid end to end: ends[i] is where leaf i ends. A thread takes a range of that line.
    std::vector<std::int64_t> ends;
    ends.reserve(items.size());
    std::int64_t total = 0;
    for (const Item& item : items) ends.push_back(total += item.count);
    at::parallel_for(0, total, kGrain, [&](std::int64_t begin, std::int64_t end) {
        auto at = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
        for (; begin < end; ++at) {
            const std::int64_t first = ends[at] - items[at].count;
            const std::int64_t stop = std::min(end, ends[at]);
            run_part(items[at], begin - first, stop - first, target);
            begin = stop;
        }
    });
}

bool can_gather(const c10::TensorImpl& leaf) {
    return leaf.dim() <= static_cast<std::int64_t>(kMostGatheredDims) && leaf.numel() <= kMostGathered;
}

void run_gathered(const at::Tensor& source, DType source_dtype, const at::Tensor& output, DType target) {
    std::array<std::int64_t, kMostGatheredDims> order{};  // of the dimensions, by falling stride of the output
    Places places{.sizes = {}, .steps = {}, .dims = 0};
    for (std::int64_t dim = 0; dim < output.dim(); ++dim) {
        if (output.size(dim) == 1) continue;
        std::size_t place = places.dims++;
        for (; place != 0 && output.stride(order[place - 1]) < output.stride(dim); --place) {
            order[place] = order[place - 1];
        }
        order[place] = dim;
    }
    for (std::size_t i = 0; i < places.dims; ++i) {
        places.sizes[i] = source.size(order[i]);
        places.steps[i] = source.stride(order[i]);
    }
    gather(source.const_data_ptr(), source_dtype, places, output.mutable_data_ptr(), target,
           kernel(source_dtype, target, level()));
}

}  // namespace lite_ext::cast::cpu
