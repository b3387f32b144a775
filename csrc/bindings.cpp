// The module: names, arguments and exceptions. What they do is elsewhere.
#include <c10/core/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "cast/cpu/cast_cpu.h"
#include "cast/cpu/storage_pool.h"
#include "convert.h"
#include "forward.h"
#include "tree/kinds.h"
#include "tree/leaf.h"
#include "tree/registry.h"
#include "tree/walk.h"

namespace {

using lite_ext::Conversion;
using lite_ext::tree::PythonError;

[[noreturn]] void wrong_argument(const char* what) {
    PyErr_SetString(PyExc_TypeError, what);
    throw PythonError();
}

// The arguments (tree, dtype, source_mask, skip, ...) that the conversions share. lite_ext/convert.py has
// checked what users pass; these checks keep a wrong internal call from crashing.
Conversion parse(PyObject* const* args, bool dtype_optional) {
    PyObject* dtype = dtype_optional && args[1] == Py_None ? nullptr : args[1];
    if (dtype != nullptr && !THPDtype_Check(dtype)) wrong_argument("dtype must be a torch.dtype");
    const unsigned long mask = PyLong_AsUnsignedLong(args[2]);
    if (mask == static_cast<unsigned long>(-1) && PyErr_Occurred() != nullptr) throw PythonError();
    if (!PyFrozenSet_CheckExact(args[3])) wrong_argument("skip must be a frozenset");
    const Conversion conversion =
        lite_ext::conversion_to(dtype, static_cast<std::uint32_t>(mask) & lite_ext::kAllMask, args[3]);
    if (dtype != nullptr && conversion.target == lite_ext::DType::none) {
        wrong_argument("dtype must be a floating dtype");
    }
    return conversion;
}

// Runs `body` and turns C++ exceptions into Python's.
template <class Body>
PyObject* guarded(const Body& body) {
    HANDLE_TH_ERRORS
    try {
        return body();
    } catch (const PythonError&) {
        return nullptr;
    }
    END_HANDLE_TH_ERRORS
}

PyObject* convert(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
    return guarded([&] {
        if (count != 4 && count != 5) wrong_argument("convert takes (tree, dtype, source_mask, skip[, passthrough])");
        return lite_ext::convert(args[0], parse(args, false), count == 5 ? args[4] : nullptr).release();
    });
}

PyObject* convert_inputs(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
    return guarded([&] {
        if (count != 4) wrong_argument("convert_inputs takes (tree, dtype, source_mask, skip)");
        const lite_ext::Inputs inputs = lite_ext::convert_inputs(args[0], parse(args, true));
        PyObject* passthrough = inputs.passthrough ? inputs.passthrough.get() : Py_None;
        return Py_BuildValue("(OIO)", inputs.tree.get(), inputs.seen, passthrough);
    });
}

PyObject* cast_tensors(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
    return guarded([&] {
        if (count != 2 || !PyList_CheckExact(args[0])) wrong_argument("cast_tensors takes (tensors: list, dtype)");
        const lite_ext::tree::Ref all = lite_ext::tree::Ref::checked(PyLong_FromUnsignedLong(lite_ext::kKernelMask));
        const lite_ext::tree::Ref no_names = lite_ext::tree::Ref::checked(PyFrozenSet_New(nullptr));
        PyObject* const conversion[] = {args[0], args[1], all.get(), no_names.get()};
        lite_ext::tree::Ref converted = lite_ext::cast_tensors(args[0], parse(conversion, false));
        // The caller's list is never handed back.
        return converted.get() == args[0] ? PySequence_List(args[0]) : converted.release();
    });
}

constexpr const char* kForwardCapsule = "lite_ext.Forward";

lite_ext::tree::Ref owned(const py::object& object) {
    return lite_ext::tree::Ref::borrow(object.is_none() ? nullptr : object.ptr());
}

py::capsule make_forward(const py::object& input_dtype, const py::frozenset& skip_inputs, int policy,
                         const py::object& output_dtype, std::uint32_t source_mask, const py::frozenset& skip_outputs,
                         const py::object& autocast_dtype, const py::object& tensors, const py::object& tensor_name,
                         const py::tuple& watched) {
    auto forward = std::make_unique<lite_ext::Forward>();
    forward->input_dtype = owned(input_dtype);
    forward->skip_inputs = owned(skip_inputs);
    forward->policy = static_cast<lite_ext::OutputPolicy>(policy);
    forward->output_dtype = owned(output_dtype);
    forward->source_mask = source_mask;
    forward->skip_outputs = owned(skip_outputs);
    forward->autocast_dtype = owned(autocast_dtype);
    forward->tensors = owned(tensors);
    forward->tensor_name = owned(tensor_name);
    for (const py::handle dict : watched) {
        if (!PyDict_Check(dict.ptr())) throw py::type_error("watched must be dicts");
        forward->watched.push_back(lite_ext::tree::Ref::borrow(dict.ptr()));
    }
    return py::capsule(forward.release(), kForwardCapsule, [](PyObject* capsule) {
        delete static_cast<lite_ext::Forward*>(PyCapsule_GetPointer(capsule, kForwardCapsule));
    });
}

// What run_forward returns where it declines: an object that no module can return.
PyObject* declined = nullptr;

PyObject* run_forward(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
    return guarded([&] {
        if (count != 5 || !PyTuple_CheckExact(args[3]) || !PyDict_CheckExact(args[4])) {
            wrong_argument("run_forward takes (forward, wrapper, call, args, kwargs)");
        }
        void* forward = PyCapsule_GetPointer(args[0], kForwardCapsule);
        if (forward == nullptr) throw PythonError();
        lite_ext::tree::Ref output =
            lite_ext::run_forward(*static_cast<lite_ext::Forward*>(forward), args[1], args[2], args[3], args[4]);
        return output ? output.release() : Py_NewRef(declined);
    });
}

PyMethodDef fast_functions[] = {
    {"run_forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_forward)), METH_FASTCALL,
     "run_forward(forward, wrapper, call, args, kwargs, /)\n--\n\n"
     "Run a wrapped forward, or return DECLINED where only the general way will do."},
    {"convert", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(convert)), METH_FASTCALL,
     "convert(tree, dtype, source_mask, skip, passthrough=None, /)\n--\n\nConvert the floating tensors of a "
     "tree."},
    {"cast_tensors", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(cast_tensors)), METH_FASTCALL,
     "cast_tensors(tensors, dtype, /)\n--\n\nConvert the floating tensors of a list."},
    {"convert_inputs", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(convert_inputs)), METH_FASTCALL,
     "convert_inputs(tree, dtype, source_mask, skip, /)\n--\n\n"
     "Convert a tree of inputs; return it with the dtypes seen and a handle to its originals."},
    {nullptr, nullptr, 0, nullptr},
};

void register_node(const py::object& cls, const py::object& flatten, const py::object& unflatten) {
    try {
        lite_ext::tree::register_node(cls.ptr(), flatten.ptr(), unflatten.ptr());
    } catch (const PythonError&) {
        throw py::error_already_set();
    }
}

py::dict counters() {
    const lite_ext::Counters& counted = lite_ext::counters();
    py::dict result;
    result["calls"] = counted.calls;
    result["fast_cpu"] = counted.fast_cpu;
    result["fast_cuda"] = counted.fast_cuda;
    result["fallback"] = counted.fallback;
    result["alias"] = counted.alias;
    return result;
}

py::dict pool_stats() {
    const lite_ext::cast::cpu::PoolStats stats = lite_ext::cast::cpu::pool_stats();
    py::dict result;
    result["enabled"] = stats.limits.thread != 0 || stats.limits.shared != 0;
    result["thread_limit_bytes"] = stats.limits.thread;
    result["shared_limit_bytes"] = stats.limits.shared;
    result["kept_small_bytes"] = stats.kept_small_bytes;
    result["kept_large_bytes"] = stats.kept_large_bytes;
    result["kept_blocks"] = stats.kept_blocks;
    result["reused"] = stats.reused;
    result["allocated"] = stats.allocated;
    return result;
}

void set_pool_limits(std::size_t thread, std::size_t shared) {
    lite_ext::cast::cpu::set_pool_limits({.thread = thread, .shared = shared});
}

int dtype_bit(const py::object& dtype) {
    if (!THPDtype_Check(dtype.ptr())) throw py::type_error("dtype must be a torch.dtype");
    const auto type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    return static_cast<int>(lite_ext::bit(lite_ext::tree::dtype_of(type)));
}

}  // namespace

// What it does is in registered_op.cpp.
TORCH_LIBRARY(lite_ext, library) {
    library.def("cast(Tensor[] tensors, ScalarType dtype) -> Tensor[]", {at::Tag::pt2_compliant_tag});
}

PYBIND11_MODULE(_C, m) {
    try {
        lite_ext::tree::load_library();
    } catch (const PythonError&) {
        throw py::error_already_set();
    }
    if (PyModule_AddFunctions(m.ptr(), fast_functions) < 0) throw py::error_already_set();
    declined = py::module_::import("builtins").attr("object")().release().ptr();
    m.attr("DECLINED") = py::handle(declined);
    m.attr("MAX_DEPTH") = lite_ext::tree::kMaxDepth;
    m.def("register_node", register_node, py::arg("cls"), py::arg("flatten"), py::arg("unflatten"), py::pos_only());
    m.def("counters", counters, "Leaves by the way they were converted, and calls, since the import.");
    m.def("dtype_bit", dtype_bit, py::arg("dtype"), py::pos_only(), "The bit of a dtype in source masks, or 0.");
    m.def("make_forward", make_forward, py::arg("input_dtype"), py::arg("skip_inputs"), py::arg("policy"),
          py::arg("output_dtype"), py::arg("source_mask"), py::arg("skip_outputs"), py::arg("autocast_dtype"),
          py::arg("tensors"), py::arg("tensor_name"), py::arg("watched"), "What run_forward needs, looked up once.");
    m.def(
        "device_type_number", [](const std::string& type) { return static_cast<int>(c10::Device(type).type()); },
        py::arg("type"), py::pos_only(), "torch's number for a device type such as 'cpu'.");
    m.def("pool_stats", pool_stats, "What the pool of storages holds and did.");
    m.def("empty_pool", lite_ext::cast::cpu::empty_pool, "Give every kept block back to the system.");
    m.def("set_pool_limits", set_pool_limits, py::arg("thread_bytes"), py::arg("shared_bytes"), py::pos_only(),
          "Set how many bytes each thread and the process may keep; 0 turns a part off.");
    m.def("cpu_level", lite_ext::cast::cpu::level_name, "The instruction set of the CPU kernels.");
}
