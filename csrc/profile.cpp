#include "profile.h"

#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>
#include <utility>

namespace lite_ext {

void ProfileRange::open(const char* name, at::StepCallbacks&& callbacks, std::int64_t leaves, std::int64_t bytes) {
    range_.emplace(std::move(callbacks));
    if (!range_->isActive()) return;
    const std::unordered_map<std::string, c10::IValue> counts = {{"leaves", leaves}, {"bytes", bytes}};
    if (range_->needsInputs()) {
        const c10::IValue shown[] = {leaves, bytes};
        range_->before(name, c10::ArrayRef<const c10::IValue>(shown), &counts);
    } else {
        range_->before(name, &counts);
    }
}

}  // namespace lite_ext
