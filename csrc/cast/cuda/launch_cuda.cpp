#include "launch_cuda.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>
#include <vector>

#include "../../plan/tiles.h"
#include "cast_cuda.h"

namespace lite_ext::cast::cuda {

namespace {

// An uninitialised tensor of the sizes and strides of `source` on the current device.
at::Tensor empty_like(const at::Tensor& source, caffe2::TypeMeta dtype, c10::Allocator* allocator) {
    const c10::TensorImpl& like = *source.unsafeGetTensorImpl();
    // Non-overlapping and dense: the elements span exactly their number, whatever the order of the strides.
    const auto bytes = static_cast<std::size_t>(like.numel()) * dtype.itemsize();
    auto storage =
        c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(bytes),
                                              allocator->allocate(bytes), allocator, true);
    auto output = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
    output.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
    return output;
}

}  // namespace

void run(std::span<const Item> items, c10::DeviceIndex device, c10::ScalarType type, DType target) {
    // Before anything else: memory, stream and kernel are those of the current device.
    const c10::cuda::CUDAGuard guard(device);
    c10::Allocator* allocator = c10::cuda::CUDACachingAllocator::get();
    const auto dtype = c10::scalarTypeToTypeMeta(type);
    std::vector<plan::CastLeaf> leaves;
    leaves.reserve(items.size());
    for (const Item& item : items) {
        *item.output = empty_like(*item.source, dtype, allocator);
        leaves.push_back({.source = item.source->const_data_ptr(),
                          .target = item.output->mutable_data_ptr(),
                          .count = item.source->numel(),
                          .source_dtype = item.source_dtype,
                          .target_dtype = target});
    }
    // Sources need no record_stream: they are read on the stream on which `.to` would read them.
    C10_CUDA_CHECK(enqueue(leaves, device, c10::cuda::getCurrentCUDAStream(device)));
}

}  // namespace lite_ext::cast::cuda
