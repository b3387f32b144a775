#include "leaf_facts.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <cstring>

#include "cast/cpu/cast_cpu.h"

namespace lite_ext {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// The raw bits that a plain dense tensor of one backend may have. Set differences keep backend bits: raw bits
// only.
std::uint64_t plain_keys(DispatchKey dense, DispatchKey autograd, DispatchKey autocast) {
    return (DispatchKeySet(dense) | DispatchKeySet(autograd) | DispatchKeySet(autocast) |
            DispatchKeySet(DispatchKey::ADInplaceOrView))
        .raw_repr();
}

const std::uint64_t kPlainCpu = plain_keys(DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU);
const std::uint64_t kPlainCuda = plain_keys(DispatchKey::CUDA, DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA);
const std::uint64_t kDenseCpu = DispatchKeySet(DispatchKey::CPU).raw_repr();
const std::uint64_t kDenseCuda = DispatchKeySet(DispatchKey::CUDA).raw_repr();

constexpr bool holds(std::uint64_t keys, std::uint64_t dense, std::uint64_t allowed) {
    return (keys & dense) == dense && (keys & ~allowed) == 0;
}

// torch.set_default_device works through a mode that changes factory functions only.
bool is_device_context(PyObject* mode) { return std::strcmp(Py_TYPE(mode)->tp_name, "DeviceContext") == 0; }

bool function_mode_watches() {
    if (!at::impl::torch_function_mode_enabled()) return false;
    if (at::impl::PythonTorchFunctionTLS::stack_len() != 1) return true;
    PyObject* mode = at::impl::PythonTorchFunctionTLS::get_stack_at(0)->ptr(getPyInterpreter());
    return !is_device_context(mode);
}

}  // namespace

ThreadFacts thread_facts() {
    const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    // Every transform and mode that interposes does so by including a key of its own.
    const bool default_keys = (keys.included_.raw_repr() & ~c10::default_included_set.raw_repr()) == 0;
    const bool grad = (keys.excluded_.raw_repr() & DispatchKeySet(DispatchKey::AutogradFunctionality).raw_repr()) == 0;
    return {
        .plain = default_keys && !c10::impl::TorchDispatchModeTLS::any_modes_set() && !torch::jit::tracer::isTracing(),
        .function_mode = function_mode_watches(),
        .records_grad = grad};
}

plan::LeafFacts leaf_facts(const at::Tensor& leaf, DType dtype) {
    const c10::TensorImpl* impl = leaf.unsafeGetTensorImpl();
    const std::uint64_t keys = impl->key_set().raw_repr();
    plan::LeafFacts facts{.source = dtype,
                          .device = plan::DeviceKind::other,
                          .device_index = -1,
                          .plain = false,
                          .dense = false,
                          .gathered = false};
    if (holds(keys, kDenseCpu, kPlainCpu)) {
        facts.device = plan::DeviceKind::cpu;
    } else if (holds(keys, kDenseCuda, kPlainCuda)) {
        facts.device = plan::DeviceKind::cuda;
        facts.device_index = static_cast<std::int8_t>(impl->device().index());
    } else {
        return facts;
    }
    const auto* autograd =
        static_cast<const torch::autograd::AutogradMeta*>(leaf.unsafeGetTensorImpl()->autograd_meta());
    const bool has_tangent = autograd != nullptr && autograd->fw_grad_ != nullptr;
    // A storage may have been freed under its tensor (resize_(0), as sharding does): ATen knows the error for that.
    facts.plain = !has_tangent && impl->storage_initialized();
    facts.dense = impl->is_non_overlapping_and_dense();
    facts.gathered = !facts.dense && cast::cpu::can_gather(*impl);
    return facts;
}

}  // namespace lite_ext
