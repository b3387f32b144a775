#include "output.h"

#include <ATen/ExpandUtils.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include "storage_pool.h"

namespace lite_ext::cast::cpu {

namespace {

// The structures of an output, unchanged but for where their memory comes from: there are two a leaf.
template <class Base>
class Pooled final : public Base {
   public:
    using Base::Base;
    static void* operator new(std::size_t bytes) { return allocate_object(bytes); }
    static void operator delete(void* object, std::size_t bytes) { free_object(object, bytes); }
};

}  // namespace

at::Tensor empty_like(const at::Tensor& source, caffe2::TypeMeta dtype, bool& resident) {
    const c10::TensorImpl& like = *source.unsafeGetTensorImpl();
    // The output is non-overlapping and dense: its elements span exactly their number, whatever the order of strides.
    const auto bytes = static_cast<std::size_t>(like.numel()) * dtype.itemsize();
    Block block = allocate(bytes);
    resident = block.reused;
    c10::intrusive_ptr<c10::StorageImpl> storage = c10::make_intrusive<Pooled<c10::StorageImpl>>(
        c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(bytes), std::move(block.data),
        c10::GetCPUAllocator(), true);
    auto output = at::detail::make_tensor<Pooled<c10::TensorImpl>>(std::move(storage),
                                                                   c10::DispatchKeySet(c10::DispatchKey::CPU), dtype);
    c10::TensorImpl* impl = output.unsafeGetTensorImpl();
    if (like.is_non_overlapping_and_dense()) {
        impl->set_sizes_and_strides(like.sizes(), like.strides());
    } else {
        impl->set_sizes_and_strides(like.sizes(), at::infer_dense_strides(like.sizes(), like.strides()));
    }
    return output;
}

}  // namespace lite_ext::cast::cpu
