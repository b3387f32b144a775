#include "plan.h"

namespace lite_ext::plan {

Route route(const LeafFacts& leaf, DType target, Backends backends) {
    if (!leaf.plain || !has_kernel(leaf.source) || !has_kernel(target)) return Route::fallback;
    if (leaf.device == DeviceKind::cpu && backends.cpu && (leaf.dense || leaf.gathered)) return Route::fast_cpu;
    if (leaf.device == DeviceKind::cuda && backends.cuda && leaf.dense) return Route::fast_cuda;
    return Route::fallback;
}

void Plan::add(std::uint32_t leaf, Route route, std::int8_t device_index) {
    if (route == Route::fallback) {
        fallback_.push_back(leaf);
        return;
    }
    for (Group& group : groups_) {  // as many groups as devices: a handful
        if (group.route == route && group.device_index == device_index) {
            group.leaves.push_back(leaf);
            return;
        }
    }
    groups_.push_back({route, device_index, {leaf}});
}

void Plan::clear() {
    groups_.clear();
    fallback_.clear();
}

}  // namespace lite_ext::plan
