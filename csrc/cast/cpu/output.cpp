#include "output.h"

#include <ATen/ExpandUtils.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <new>
#include <utility>

#include "storage_pool.h"

namespace lite_ext::cast::cpu {

namespace {

// torch's own structures, unchanged but for where their memory comes from and goes to: there are two a leaf.
class OutputStorage final : public c10::StorageImpl {
   public:
    OutputStorage(std::size_t bytes, c10::DataPtr data)
        : StorageImpl(use_byte_size_t(), static_cast<std::int64_t>(bytes), std::move(data), c10::GetCPUAllocator(),
                      true) {}
    static void* operator new(std::size_t /*bytes*/, void* memory) { return memory; }
    static void operator delete(void* memory, std::size_t bytes) { free_object(memory, bytes); }
};

// Is made without a version counter, as an inference tensor is, and given one: a dead output's that nothing shares
// (a view or a graph may) serves the next, for it would cost more than the tensor.
class OutputTensor final : public c10::TensorImpl {
   public:
    OutputTensor(c10::Storage storage, caffe2::TypeMeta dtype, c10::VariableVersion counter)
        : TensorImpl(VIEW, std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype) {
        const c10::BackendComponent backend = c10::BackendComponent::CPUBit;
        key_set_ = key_set_ | c10::getAutocastRelatedKeySetFromBackend(backend);
        if (c10::InferenceMode::is_enabled()) return;
        key_set_ = key_set_ | c10::getAutogradRelatedKeySetFromBackend(backend);
        if (counter.enabled()) {
            counter.set_version(0);
            version_counter_ = std::move(counter);
        } else {
            version_counter_ = c10::VariableVersion(0);
        }
    }
    static void* operator new(std::size_t /*bytes*/, void* memory) { return memory; }
    static void operator delete(OutputTensor* dead, std::destroying_delete_t /*destroys*/) {
        c10::VariableVersion counter = std::move(dead->version_counter_);
        if (!counter.unique()) counter = c10::VariableVersion();
        dead->~OutputTensor();
        free_tensor(dead, std::move(counter));
    }
};
static_assert(sizeof(OutputTensor) <= kTensorBytes);

}  // namespace

at::Tensor empty_like(const at::Tensor& source, caffe2::TypeMeta dtype, bool& resident) {
    const c10::TensorImpl& like = *source.unsafeGetTensorImpl();
    // The output is non-overlapping and dense: its elements span exactly their number, whatever the order of strides.
    const auto bytes = static_cast<std::size_t>(like.numel()) * dtype.itemsize();
    OutputMemory memory = allocate_output(bytes, sizeof(OutputStorage));
    resident = memory.data.reused;
    auto storage = c10::intrusive_ptr<c10::StorageImpl>::unsafe_steal_from_new(
        new (memory.storage) OutputStorage(bytes, std::move(memory.data.data)));
    auto tensor = c10::intrusive_ptr<c10::TensorImpl>::unsafe_steal_from_new(
        new (memory.tensor) OutputTensor(std::move(storage), dtype, std::move(memory.counter)));
    c10::TensorImpl* impl = tensor.get();
    if (like.is_non_overlapping_and_dense()) {
        impl->set_sizes_and_strides(like.sizes(), like.strides());
    } else {
        impl->set_sizes_and_strides(like.sizes(), at::infer_dense_strides(like.sizes(), like.strides()));
    }
    return at::Tensor(std::move(tensor));
}

}  // namespace lite_ext::cast::cpu
