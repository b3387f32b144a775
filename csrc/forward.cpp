#include "forward.h"

#include <c10/core/DefaultDtype.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <bit>
#include <optional>

#include "autocast.h"
#include "tree/leaf.h"

namespace lite_ext {

namespace {

using tree::Ref;

// Leaves autocast on every way out, exceptions included.
class AutocastGuard {
   public:
    AutocastGuard(c10::DeviceType device, c10::ScalarType dtype) : saved_(autocast::enter(device, dtype)) {}
    AutocastGuard(const AutocastGuard&) = delete;
    AutocastGuard& operator=(const AutocastGuard&) = delete;
    ~AutocastGuard() { autocast::leave(saved_); }

   private:
    autocast::Saved saved_;
};

c10::ScalarType scalar_type(PyObject* dtype) { return reinterpret_cast<THPDtype*>(dtype)->scalar_type; }

bool torch_must_call(const Forward& forward) {
    if (torch::jit::tracer::isTracing()) return true;
    for (const Ref& dict : forward.watched) {
        if (PyDict_GET_SIZE(dict.get()) != 0) return true;
    }
    return forward.autocast_dtype && autocast::mode_watches();
}

// The device type that autocast works on, or nothing where Python has to find out.
std::optional<c10::DeviceType> autocast_device(Forward& forward, PyObject* wrapper) {
    c10::DeviceType device = c10::DeviceType::CPU;
    if (forward.tensors) {
        PyObject* tensor = PyDict_GetItemWithError(forward.tensors.get(), forward.tensor_name.get());
        if (tensor == nullptr || !tree::is_tensor_type(Py_TYPE(tensor))) {
            PyErr_Clear();
            return std::nullopt;
        }
        device = THPVariable_Unpack(tensor).device().type();
    }
    const std::uint64_t known = std::uint64_t{1} << static_cast<unsigned>(device);
    if ((forward.autocast_devices & known) == 0) {
        const Ref answer = Ref::checked(PyObject_CallMethod(wrapper, "_takes_autocast", "i", static_cast<int>(device)));
        if (answer.get() != Py_True) return std::nullopt;
        forward.autocast_devices |= known;
    }
    return device;
}

PyObject* dtype_object(c10::ScalarType type) { return reinterpret_cast<PyObject*>(torch::getTHPDtype(type)); }

// The dtype that the outputs go to; empty: they are kept.
Ref output_dtype(const Forward& forward, PyObject* wrapper, c10::ScalarType default_dtype, std::uint32_t seen,
                 PyObject* args, PyObject* kwargs) {
    switch (forward.policy) {
        case OutputPolicy::default_dtype:
            return Ref::borrow(dtype_object(default_dtype));
        case OutputPolicy::dtype:
            return Ref::borrow(forward.output_dtype.get());
        case OutputPolicy::keep:
            return Ref();
        case OutputPolicy::input:
            break;
    }
    // One dtype among the inputs is the common case; the others are Python's to decide and to explain.
    if (std::has_single_bit(seen)) {
        constexpr c10::ScalarType kTypes[] = {c10::ScalarType::Half, c10::ScalarType::BFloat16, c10::ScalarType::Float,
                                              c10::ScalarType::Double};
        return Ref::borrow(dtype_object(kTypes[std::countr_zero(seen)]));
    }
    Ref resolved = Ref::checked(PyObject_CallMethod(wrapper, "_resolve", "IOO", seen, args, kwargs));
    return resolved.get() == Py_None ? Ref() : std::move(resolved);
}

bool is_lazy(PyObject* output) {
    return PyGen_CheckExact(output) || PyCoro_CheckExact(output) || PyAsyncGen_CheckExact(output);
}

}  // namespace

Ref run_forward(Forward& forward, PyObject* wrapper, PyObject* call, PyObject* args, PyObject* kwargs) {
    if (torch_must_call(forward)) return Ref();
    // Read before anything can let another thread set it for a forward of its own.
    const c10::ScalarType default_dtype = c10::get_default_dtype_as_scalartype();
    std::optional<c10::DeviceType> device;
    if (forward.autocast_dtype) {
        device = autocast_device(forward, wrapper);
        if (!device) return Ref();
    }

    Inputs inputs{.tree = Ref(), .seen = 0, .passthrough = Ref()};
    PyObject* inner_args = args;
    PyObject* inner_kwargs = kwargs;
    if (forward.input_dtype || forward.policy == OutputPolicy::input) {
        const Ref both = Ref::checked(PyTuple_Pack(2, args, kwargs));
        inputs = convert_inputs(both.get(),
                                conversion_to(forward.input_dtype.get(), kKernelMask, forward.skip_inputs.get()));
        inner_args = PyTuple_GET_ITEM(inputs.tree.get(), 0);
        inner_kwargs = PyTuple_GET_ITEM(inputs.tree.get(), 1);
    }
    const Ref wanted = output_dtype(forward, wrapper, default_dtype, inputs.seen, args, kwargs);

    Ref output;
    {
        std::optional<AutocastGuard> guard;
        if (device) guard.emplace(*device, scalar_type(forward.autocast_dtype.get()));
        PyObject* keywords = PyDict_GET_SIZE(inner_kwargs) == 0 ? nullptr : inner_kwargs;
        output = Ref::checked(PyObject_Call(call, inner_args, keywords));
    }
    if (is_lazy(output.get()) && (wanted || device)) {
        PyObject* dtype = wanted ? wanted.get() : Py_None;
        PyObject* passthrough = inputs.passthrough ? inputs.passthrough.get() : Py_None;
        return Ref::checked(PyObject_CallMethod(wrapper, "_convert_lazily", "OOO", output.get(), dtype, passthrough));
    }
    if (!wanted) return output;
    return convert(output.get(), conversion_to(wanted.get(), forward.source_mask, forward.skip_outputs.get()),
                   inputs.passthrough.get());
}

}  // namespace lite_ext
