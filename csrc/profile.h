// A range of torch.profiler around a conversion.
#pragma once

#include <ATen/record_function.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace lite_ext {

// Opens a range if a profiler runs on this thread; costs a look at thread-local memory if none does. `bytes` is asked
// only when there is one.
class ProfileRange {
   public:
    template <class Bytes>
    ProfileRange(const char* name, std::size_t leaves, const Bytes& bytes) {
        auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
        if (callbacks.has_value()) [[unlikely]] {
            open(name, *std::move(callbacks), static_cast<std::int64_t>(leaves), bytes());
        }
    }

   private:
    void open(const char* name, at::StepCallbacks&& callbacks, std::int64_t leaves, std::int64_t bytes);

    std::optional<at::RecordFunction> range_;
};

}  // namespace lite_ext
