#include "gather.h"

#include <type_traits>

#include "../element.h"

namespace lite_ext::cast::cpu {

namespace {

constexpr std::size_t kBuffered = 512;  // elements that are converted at a time
constexpr std::int64_t kDirect = 16;    // elements side by side from which a run needs no buffer

template <class Item>
class Gathering {
   public:
    Gathering(void* target, std::size_t target_item, Kernel kernel)
        : target_(static_cast<char*>(target)), target_item_(target_item), kernel_(kernel) {}

    void run(const Item* source, const Places& places) {
        if (places.dims == 0) {
            add(*source);
            return flush();
        }
        const std::size_t inner = places.dims - 1;
        std::array<std::int64_t, kMostGatheredDims> at{};
        while (true) {
            add_run(source, places.sizes[inner], places.steps[inner]);
            // The next place of the dimensions outside the inner one, as an odometer counts.
            std::size_t dim = inner;
            while (dim != 0) {
                --dim;
                source += places.steps[dim];
                if (++at[dim] < places.sizes[dim]) break;
                source -= at[dim] * places.steps[dim];
                at[dim] = 0;
                if (dim == 0) return flush();
            }
            if (inner == 0) return flush();
        }
    }

   private:
    void add_run(const Item* source, std::int64_t size, std::int64_t step) {
        if (step == 1 && size >= kDirect) {
            flush();
            return convert(source, size);
        }
        for (std::int64_t i = 0; i < size; ++i) add(source[i * step]);
    }

    void add(Item item) {
        buffer_[filled_++] = item;
        if (filled_ == kBuffered) flush();
    }

    void flush() {
        if (filled_ == 0) return;
        convert(buffer_.data(), static_cast<std::int64_t>(filled_));
        filled_ = 0;
    }

    void convert(const Item* from, std::int64_t count) {
        kernel_(from, target_, count);
        target_ += static_cast<std::size_t>(count) * target_item_;
    }

    std::array<Item, kBuffered> buffer_;
    std::size_t filled_ = 0;
    char* target_;
    std::size_t target_item_;
    Kernel kernel_;
};

}  // namespace

void gather(const void* source, DType source_dtype, const Places& places, void* target, DType target_dtype,
            Kernel kernel) {
    const std::size_t target_item = item_size(target_dtype);
    if (source_dtype == DType::float64) {
        using Item = storage_t<DType::float64>;
        Gathering<Item>(target, target_item, kernel).run(static_cast<const Item*>(source), places);
    } else if (source_dtype == DType::float32) {
        using Item = storage_t<DType::float32>;
        Gathering<Item>(target, target_item, kernel).run(static_cast<const Item*>(source), places);
    } else {
        using Item = storage_t<DType::float16>;
        static_assert(std::is_same_v<Item, storage_t<DType::bfloat16>>);
        Gathering<Item>(target, target_item, kernel).run(static_cast<const Item*>(source), places);
    }
}

}  // namespace lite_ext::cast::cpu
