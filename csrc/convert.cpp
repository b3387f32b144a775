#include "convert.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/to.h>
#include <c10/util/Exception.h>
#include <pybind11/gil.h>
#include <torch/csrc/Dtype.h>

#include <memory>
#include <optional>
#include <vector>

#include "autograd/cast_node.h"
#include "cast/cpu/cast_cpu.h"
#include "cast/cpu/output.h"
#include "cast/cuda/launch_cuda.h"
#include "leaf_facts.h"
#include "plan/plan.h"
#include "profile.h"
#include "tree/leaf.h"
#include "tree/rebuild.h"
#include "tree/walk.h"

namespace lite_ext {

using tree::Ref;

class Passthrough {
   public:
    static constexpr const char* kCapsuleName = "lite_ext.Passthrough";

    void add(PyObject* original, PyObject* converted) {
        const at::Tensor& tensor = THPVariable_Unpack(converted);
        if (tensor.is_inference()) return;  // without a version counter nothing proves that it is unchanged
        entries_.push_back({Ref::borrow(original), Ref::borrow(converted), tensor._version()});
    }
    bool empty() const { return entries_.empty(); }

    // The original of a converted input that is unchanged, or NULL. Borrowed.
    PyObject* original(PyObject* leaf, DType target) const {
        for (const Entry& entry : entries_) {
            if (entry.converted.get() != leaf) continue;
            const bool unchanged = THPVariable_Unpack(leaf)._version() == entry.version;
            return unchanged && tree::leaf_dtype(entry.original.get()) == target ? entry.original.get() : nullptr;
        }
        return nullptr;
    }

   private:
    struct Entry {
        Ref original;
        Ref converted;
        std::int64_t version;
    };
    std::vector<Entry> entries_;
};

namespace {

// Bytes of output from which releasing the lock costs less than it gives other threads.
constexpr std::int64_t kReleaseGilBytes = 256 * 1024;

constexpr plan::Backends kBackends{.cpu = true, .cuda = cast::cuda::kBuilt};

Counters counted;

// What a call needs room for, kept by each thread so that a call in the steady state allocates outputs only.
struct Workspace {
    tree::Flat flat;
    std::vector<Ref> converted;
    std::vector<at::Tensor> outputs;
    std::vector<cast::cpu::Item> items;
    std::vector<cast::cuda::Item> cuda_items;
    plan::Plan plan;

    void clear() {
        flat.clear();
        converted.clear();
        outputs.clear();
        items.clear();
        cuda_items.clear();
        plan.clear();
    }
};

// Takes the thread's workspace for one call. Dropping objects may run Python code that converts again, so the
// workspace goes back only when it is empty, and a nested call makes its own.
class WorkspaceLease {
   public:
    WorkspaceLease() : workspace_(std::move(spare())) {
        if (!workspace_) workspace_ = std::make_unique<Workspace>();
    }
    WorkspaceLease(const WorkspaceLease&) = delete;
    WorkspaceLease& operator=(const WorkspaceLease&) = delete;
    ~WorkspaceLease() {
        workspace_->clear();
        if (!spare()) spare() = std::move(workspace_);
    }
    Workspace& operator*() const { return *workspace_; }

   private:
    static std::unique_ptr<Workspace>& spare() {
        thread_local std::unique_ptr<Workspace> kept;
        return kept;
    }
    std::unique_ptr<Workspace> workspace_;
};

// Keeps the garbage collector from starting while outputs are wrapped: it would look through them, all just made and
// all alive, again and again. Nothing but this thread runs meanwhile, and the collection is only put off.
class CollectorPause {
   public:
    CollectorPause() : was_enabled_(PyGC_Disable() != 0) {}
    CollectorPause(const CollectorPause&) = delete;
    CollectorPause& operator=(const CollectorPause&) = delete;
    ~CollectorPause() {
        if (was_enabled_) PyGC_Enable();
    }

   private:
    bool was_enabled_;
};

Ref wrap(at::Tensor&& tensor) { return Ref::checked(THPVariable_Wrap(std::move(tensor))); }

void warn_without_cuda() {
    TORCH_WARN_ONCE(
        "lite_ext was built without CUDA, so CUDA tensors are converted one by one, by Tensor.to. To build it with "
        "CUDA: LITE_EXT_CUDA=1 pip install --force-reinstall --no-deps --no-build-isolation --no-cache-dir lite_ext");
}

class Cast {
   public:
    Cast(const Conversion& conversion, const Passthrough* passthrough, Workspace& workspace)
        : conversion_(conversion), passthrough_(passthrough), work_(workspace), thread_(thread_facts()) {}

    // Fills work_.converted, one object a leaf of work_.flat.leaves.
    void run() {
        const auto& leaves = work_.flat.leaves;
        work_.converted.resize(leaves.size());
        work_.outputs.resize(leaves.size());
        for (std::size_t i = 0; i < leaves.size(); ++i) plan_leaf(static_cast<std::uint32_t>(i), leaves[i].get());
        for (const plan::Group& group : work_.plan.groups()) {
            if (group.route == plan::Route::fast_cuda) {
                run_cuda(group);
            } else {
                run_cpu(group);
            }
            finish(group);
        }
        for (const std::uint32_t leaf : work_.plan.fallback()) run_fallback(leaf);
    }

   private:
    void plan_leaf(std::uint32_t index, PyObject* leaf) {
        if (passthrough_ != nullptr) {
            if (PyObject* original = passthrough_->original(leaf, conversion_.target)) {
                work_.converted[index] = Ref::borrow(original);
                ++counted.alias;
                return;
            }
        }
        plan::Route route = plan::Route::fallback;
        std::int8_t device = -1;
        if (thread_.plain && !thread_.function_mode && tree::is_plain_tensor_type(Py_TYPE(leaf))) {
            const plan::LeafFacts facts = leaf_facts(THPVariable_Unpack(leaf), tree::leaf_dtype(leaf));
            if (!kBackends.cuda && facts.device == plan::DeviceKind::cuda) warn_without_cuda();
            route = plan::route(facts, conversion_.target, kBackends);
            device = facts.device_index;
        }
        work_.plan.add(index, route, device);
    }

    void run_cpu(const plan::Group& group) {
        std::int64_t elements = 0;
        const auto dtype = c10::scalarTypeToTypeMeta(conversion_.scalar_type);
        for (const std::uint32_t index : group.leaves) {
            const at::Tensor& source = THPVariable_Unpack(work_.flat.leaves[index].get());
            at::Tensor& output = work_.outputs[index];
            bool resident = false;
            output = cast::cpu::empty_like(source, dtype, resident);
            const std::int64_t count = source.numel();
            if (count == 0) continue;
            const DType source_dtype = tree::leaf_dtype(work_.flat.leaves[index].get());
            if (!source.is_non_overlapping_and_dense()) {
                cast::cpu::run_gathered(source, source_dtype, output, conversion_.target);
                continue;
            }
            elements += count;
            work_.items.push_back({.source = source.const_data_ptr(),
                                   .target = output.mutable_data_ptr(),
                                   .count = count,
                                   .source_dtype = source_dtype,
                                   .resident = resident});
        }
        if (elements != 0) {
            const auto bytes = elements * static_cast<std::int64_t>(item_size(conversion_.target));
            // No Python object is touched below: the leaves are owned here, and so is their memory.
            std::optional<pybind11::gil_scoped_release> unlocked;
            if (bytes >= kReleaseGilBytes) unlocked.emplace();
            cast::cpu::run(work_.items, elements, conversion_.target);
        }
        counted.fast_cpu += static_cast<std::int64_t>(group.leaves.size());
    }

    void run_cuda(const plan::Group& group) {
        if constexpr (cast::cuda::kBuilt) {
            work_.cuda_items.clear();  // of another device
            for (const std::uint32_t index : group.leaves) {
                PyObject* leaf = work_.flat.leaves[index].get();
                work_.cuda_items.push_back({&THPVariable_Unpack(leaf), &work_.outputs[index], tree::leaf_dtype(leaf)});
            }
            {
                // Making room on the device may take long, and may need another thread to go on.
                const pybind11::gil_scoped_release unlocked;
                cast::cuda::run(work_.cuda_items, group.device_index, conversion_.scalar_type, conversion_.target);
            }
            counted.fast_cuda += static_cast<std::int64_t>(group.leaves.size());
        }
    }

    // Turns the outputs of a group into Python's tensors, with their history.
    void finish(const plan::Group& group) {
        const CollectorPause pause;
        for (const std::uint32_t index : group.leaves) {
            const at::Tensor& source = THPVariable_Unpack(work_.flat.leaves[index].get());
            at::Tensor& output = work_.outputs[index];
            if (thread_.records_grad && autograd::needs_node(source)) autograd::attach_node(source, output);
            work_.converted[index] = wrap(std::move(output));
        }
    }

    // Tensor.to, by the way its overrides ask for: a subclass or a function mode is asked through Python, all
    // else that may interpose does so in the dispatcher.
    void run_fallback(std::uint32_t index) {
        ++counted.fallback;
        PyObject* leaf = work_.flat.leaves[index].get();
        if (thread_.function_mode || !tree::is_plain_tensor_type(Py_TYPE(leaf))) {
            work_.converted[index] = Ref::checked(PyObject_CallMethod(leaf, "to", "O", conversion_.dtype_object));
            return;
        }
        const at::Tensor& source = THPVariable_Unpack(leaf);
        at::Tensor output;
        {
            const pybind11::gil_scoped_release unlocked;
            output = source.to(conversion_.scalar_type);
        }
        work_.converted[index] = wrap(std::move(output));
    }

    const Conversion& conversion_;
    const Passthrough* passthrough_;
    Workspace& work_;
    ThreadFacts thread_;
};

PyObject* skip_or_null(const Conversion& conversion) {
    return PySet_GET_SIZE(conversion.skip) == 0 ? nullptr : conversion.skip;
}

// Bits that a call converts: what the source names, less what has the dtype already.
std::uint32_t convert_mask(const Conversion& conversion) {
    return conversion.dtype_object == nullptr ? 0U : conversion.source_mask & ~bit(conversion.target);
}

const Passthrough* unpack(PyObject* capsule) {
    if (capsule == nullptr || capsule == Py_None) return nullptr;
    void* pointer = PyCapsule_GetPointer(capsule, Passthrough::kCapsuleName);
    if (pointer == nullptr) throw tree::PythonError();
    return static_cast<const Passthrough*>(pointer);
}

void free_passthrough(PyObject* capsule) {
    delete static_cast<Passthrough*>(PyCapsule_GetPointer(capsule, Passthrough::kCapsuleName));
}

Ref pack(const tree::Flat& flat, const std::vector<Ref>& converted) {
    auto memory = std::make_unique<Passthrough>();
    for (std::size_t i = 0; i < converted.size(); ++i) memory->add(flat.leaves[i].get(), converted[i].get());
    if (memory->empty()) return Ref();
    Ref capsule = Ref::checked(PyCapsule_New(memory.get(), Passthrough::kCapsuleName, free_passthrough));
    memory.release();
    return capsule;
}

// Bytes of the outputs, as far as the leaves are plain: what others need is theirs to know.
std::int64_t output_bytes(const tree::Flat& flat, c10::ScalarType type) {
    std::int64_t elements = 0;
    for (const Ref& leaf : flat.leaves) {
        if (!tree::is_plain_tensor_type(Py_TYPE(leaf.get()))) continue;
        elements += THPVariable_Unpack(leaf.get()).sym_numel().maybe_as_int().value_or(0);
    }
    return elements * static_cast<std::int64_t>(c10::elementSize(type));
}

}  // namespace

const Counters& counters() { return counted; }

Conversion conversion_to(PyObject* dtype, std::uint32_t source_mask, PyObject* skip) {
    Conversion conversion{.dtype_object = dtype,
                          .scalar_type = c10::ScalarType::Undefined,
                          .target = DType::none,
                          .source_mask = source_mask,
                          .skip = skip};
    if (dtype != nullptr) {
        conversion.scalar_type = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
        conversion.target = tree::dtype_of(conversion.scalar_type);
    }
    return conversion;
}

Ref convert(PyObject* tree, const Conversion& conversion, PyObject* passthrough) {
    ++counted.calls;
    const WorkspaceLease lease;
    Workspace& work = *lease;
    tree::walk(tree, {.convert = convert_mask(conversion), .skip = skip_or_null(conversion)}, work.flat);
    if (work.flat.root == tree::kUnchanged) return Ref::borrow(tree);
    const auto bytes = [&] { return output_bytes(work.flat, conversion.scalar_type); };
    const ProfileRange range("lite_ext::convert", work.flat.leaves.size(), bytes);
    Cast(conversion, unpack(passthrough), work).run();
    return tree::rebuild(work.flat, work.converted);
}

Inputs convert_inputs(PyObject* tree, const Conversion& conversion) {
    ++counted.calls;
    const WorkspaceLease lease;
    Workspace& work = *lease;
    tree::walk(tree, {.convert = convert_mask(conversion), .skip = skip_or_null(conversion)}, work.flat);
    const std::uint32_t seen = work.flat.seen & kKernelMask;
    if (work.flat.root == tree::kUnchanged) return {Ref::borrow(tree), seen, Ref()};
    const auto bytes = [&] { return output_bytes(work.flat, conversion.scalar_type); };
    const ProfileRange range("lite_ext::convert_inputs", work.flat.leaves.size(), bytes);
    Cast(conversion, nullptr, work).run();
    Ref converted = tree::rebuild(work.flat, work.converted);
    return {std::move(converted), seen, pack(work.flat, work.converted)};
}

Ref cast_tensors(PyObject* list, const Conversion& conversion) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        PyObject* item = PyList_GET_ITEM(list, i);
        if (tree::is_tensor_type(Py_TYPE(item))) continue;
        PyErr_Format(PyExc_TypeError, "cast_tensors: tensors[%zd] must be a tensor, got %R of type %s", i, item,
                     Py_TYPE(item)->tp_name);
        throw tree::PythonError();
    }
    return convert(list, conversion, nullptr);
}

}  // namespace lite_ext
