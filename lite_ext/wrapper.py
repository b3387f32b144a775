"""The wrapper: runs a module under a precision, and gives its outputs the dtype that was asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as module_hooks

from lite_ext import _default_dtype
from lite_ext import tree as reference
from lite_ext._arguments import Arguments, SkippedArguments, restore_named
from lite_ext._autocast import Autocast
from lite_ext._backend import backend, native
from lite_ext._default_dtype import default_dtype, default_dtype_here
from lite_ext._lazy import LAZY, convert_lazily
from lite_ext._redirect import Method, Redirect
from lite_ext._signature import ForwardOfInner, SignatureOfForward
from lite_ext._symbolic import MODULE_CALL, record_module
from lite_ext.dtypes import DEFAULT_SOURCE_MASK, dtypes_of, skip_names, source_mask
from lite_ext.policy import OUTPUT_DTYPES, check_ambiguous_input, check_output_dtype, resolve_input
from lite_ext.precision import Precision, PrecisionLike, precision

# Methods of a training loop that run the forward pass, as Lightning names them: marked from the start.
FORWARD_METHODS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})

# What a subclass may change about the forward; C++ knows only how LiteModule does it.
_OVERRIDABLE = ("forward", "convert_input", "convert_output")

# What the wrapper and the module have in common: one set of names, and of hooks on the state.
_SHARED = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

# Whose parameters the arguments being converted have: those of a marked method, where it is not the forward.
_called: ContextVar[tuple[LiteModule, SkippedArguments] | None] = ContextVar("lite_ext_called", default=None)


class Inputs(NamedTuple):
    """What :meth:`LiteModule.convert_output` has to know of the inputs. One a call, never kept."""

    output_dtype: torch.dtype | None  # what the policy asks for; None: keep
    passthrough: Any = None  # which converted tensor came from which of the caller's


class LiteModule(nn.Module):
    """A module that runs another under a precision and returns its outputs in a dtype that you chose.

    Args:
        forward_module: The module to run. Not wrapped already.
        precision: A name such as ``"bf16-mixed"``, or an object; see :func:`lite_ext.precision`. Parameters are left as
            they are: :func:`setup_module` converts them.
        output_dtype: ``"default"``: floating outputs go to ``torch.get_default_dtype()``, read on each call;
            ``"input"``: to the dtype that the floating inputs of the wrapper had; ``"keep"``: nowhere, the output is
            the very object that the module returned; or a floating ``torch.dtype``.
        ambiguous_input: With ``"input"``, what to do when the inputs have several floating dtypes or none:
            ``"error"``, ``"promote"`` (``torch.promote_types`` over them; with none, as ``"default"``), ``"default"``
            or ``"keep"``.
        source: The dtypes of outputs that are converted at all; ``None``: float16, bfloat16, float32 and float64.
        skip_inputs: Names of parameters of the forward, mapping keys and fields whose inputs are not converted.
        skip_outputs: Names of mapping keys and fields whose outputs are returned as they are.
        original_module: The module whose names, attributes and state the wrapper shows, where ``forward_module`` is
            itself a wrapper around it (``DistributedDataParallel``, a compiled module).

    Raises:
        TypeError: A module is not an ``nn.Module`` or is wrapped already, or an argument is of a wrong type.
        ValueError: A precision or policy is not known.

    The state is that of the original module, under the same names. Public attributes are read from and written to it.
    Override :meth:`convert_input` and :meth:`convert_output` for a policy of your own.

    Example:
        >>> model = LiteModule(nn.Linear(2, 2), "bf16-mixed")
        >>> model(torch.ones(1, 2)).dtype
        torch.float32
    """

    # Kept past __setattr__, which would make modules children and write the rest to the original.
    _original_module: nn.Module
    _forward_module: nn.Module
    _precision: Precision | PrecisionLike
    _autocast: Autocast | None

    def __init__(
        self,
        forward_module: nn.Module,
        precision: str | int | PrecisionLike = "32-true",
        *,
        output_dtype: str | torch.dtype = "default",
        ambiguous_input: str = "error",
        source: Iterable[torch.dtype] | None = None,
        skip_inputs: Iterable[str] = (),
        skip_outputs: Iterable[str] = (),
        original_module: nn.Module | None = None,
    ) -> None:
        super().__init__()
        original = _unwrap_compiled(forward_module) if original_module is None else original_module
        for module in (forward_module, original):
            _check_wrappable(module)
        own = self.__dict__
        own["_forward_module"] = forward_module
        own["_original_module"] = original
        own["_precision"] = _precision(precision)
        own["_output_dtype"] = check_output_dtype(output_dtype)
        own["_ambiguous_input"] = check_ambiguous_input(ambiguous_input)
        own["_source_mask"] = source_mask(source)
        own["_skip_inputs"] = skip_names(skip_inputs, "skip_inputs")
        own["_skip_outputs"] = skip_names(skip_outputs, "skip_outputs")
        own["_forward_methods"] = set(FORWARD_METHODS)
        self._share()
        self._prepare()

    def _share(self) -> None:
        original = self._original_module.__dict__
        for name in _SHARED:
            self.__dict__[name] = original[name]

    def _prepare(self) -> None:
        """Look up what every call needs; all of it is derived, and none of it is pickled."""
        own = self.__dict__
        row = self._precision if type(self._precision) is Precision else None
        own["_input_dtype"] = None if row is None else row.input_dtype
        own["_foreign"] = row is None
        own["_inner_default"] = None if row is None else row.default_dtype
        own["_autocast"] = None
        if row is not None and row.autocast_dtype is not None:
            own["_autocast"] = Autocast(self._original_module, row.autocast_dtype)
        own["_skipped"] = SkippedArguments(self._original_module.forward, self._skip_inputs)
        # Without a dtype to convert to and without a question about the dtypes, the inputs need no walk.
        own["_walks_inputs"] = self._input_dtype is not None or self._output_dtype == "input"
        own["_redirect"] = None
        if _unwrap_compiled(self._forward_module) is not self._original_module:
            own["_redirect"] = Redirect(self._original_module)
        own["_fast"] = self._make_fast()

    def _make_fast(self) -> Any:
        """Return what C++ needs to make the whole call, or ``None`` where it does not know how."""
        autocast = self._autocast
        overridden = any(inspect.getattr_static(self, name) is not LiteModule.__dict__[name] for name in _OVERRIDABLE)
        compiled = self.__dict__.get("_compiled_call_impl") is not None
        simple = not (self._foreign or self._inner_default is not None or self._skipped)
        placeless = autocast is not None and autocast.place is None  # tensors may come, and say where, between calls
        if native is None or overridden or compiled or placeless or not simple:
            return None
        wanted = self._output_dtype
        tensors, name = (autocast and autocast.place) or (None, None)
        return native.make_forward(
            self._input_dtype,
            self._skip_inputs,
            OUTPUT_DTYPES.index(wanted) if isinstance(wanted, str) else len(OUTPUT_DTYPES),
            None if isinstance(wanted, str) else wanted,
            self._source_mask,
            self._skip_outputs,
            None if autocast is None else autocast.dtype,
            tensors,
            name,
            (*_hook_dicts(self.__dict__), *_hook_dicts(vars(module_hooks)), _default_dtype.active),
        )

    # ---------------------------------------------------------------- the forward

    forward = ForwardOfInner()

    # A name of the class: compiled code reaches it again, by name, where a graph breaks.
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._forward_module, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module: as :meth:`torch.nn.Module.__call__`, with its hooks."""
        if not is_compiling():
            # torch.fx traces symbolically: its graphs cannot hold autocast, so the wrapper is one node in them.
            if nn.Module.__call__ is not MODULE_CALL and (node := record_module(self, args, kwargs)) is not None:
                return node
            if self._fast is not None:
                output = native.run_forward(self._fast, self, self._forward_module, args, kwargs)
                if output is not native.DECLINED:
                    return output
        return super().__call__(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward in place. As :meth:`torch.nn.Module.compile`."""
        super().compile(*args, **kwargs)
        self.__dict__["_fast"] = None

    def _takes_autocast(self, device: int) -> bool:
        autocast = self._autocast
        device_type = "" if autocast is None else autocast.device_type()
        return (
            autocast is not None and native.device_type_number(device_type) == device and autocast.is_taken(device_type)
        )

    def _resolve(self, seen: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        return resolve_input(seen, self._ambiguous_input, lambda: self._paths(args, kwargs))

    def _convert_lazily(
        self, output: Any, dtype: torch.dtype | None, passthrough: Any, arguments: Arguments = ((), {})
    ) -> Any:
        inputs = Inputs(dtype, passthrough)
        return convert_lazily(output, partial(self._context, arguments), lambda item: self.convert_output(item, inputs))

    def _run(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        skipped: SkippedArguments | None = None,
    ) -> Any:
        token = None if skipped is None else _called.set((self, skipped))
        try:
            args, kwargs, inputs = self.convert_input(args, kwargs)
        finally:
            if token is not None:
                _called.reset(token)
        with self._context((args, kwargs)):
            output = call(*args, **kwargs)
        if type(output) not in LAZY:
            return self.convert_output(output, inputs)
        untouched = inputs.output_dtype is None and not self._has_context
        if untouched and getattr(self.convert_output, "__func__", None) is LiteModule.convert_output:
            return output
        return self._convert_lazily(output, *inputs, (args, kwargs))

    @property
    def _has_context(self) -> bool:
        return self._foreign or self._autocast is not None or self._inner_default is not None

    def _context(self, arguments: Arguments) -> AbstractContextManager[Any]:
        """Return what the forward runs under, as a context manager."""
        if self._foreign:
            context: AbstractContextManager[Any] = self._precision.forward_context()
            return context
        if self._autocast is not None:
            return self._autocast.context(arguments)
        return nullcontext() if self._inner_default is None else default_dtype(self._inner_default)

    def convert_input(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Inputs]:
        """Return the arguments for the inner forward, and what :meth:`convert_output` has to know of them.

        Args:
            args: The positional arguments of the call. Never changed.
            kwargs: Its keyword arguments. Never changed.

        Returns:
            The arguments with floating tensors in the dtype of the precision (except those of ``skip_inputs``), and an
            :class:`Inputs` with the dtype that the policy asks of the outputs.

        Raises:
            ValueError: ``output_dtype="input"``, ``ambiguous_input="error"``, and the inputs do not have exactly one
                floating dtype.

        Override it to change what goes in, and pass on the ``Inputs`` of ``super().convert_input(args, kwargs)``.
        """
        called = None if is_compiling() else _called.get()
        skipped = called[1] if called is not None and called[0] is self else self._skipped
        seen, passthrough = 0, None
        given = args, kwargs
        shown = skipped.hide(args, kwargs) if self._walks_inputs or self._foreign else given
        if self._walks_inputs:
            convert_inputs = reference.convert_inputs if is_compiling() else backend.convert_inputs
            (args, kwargs), seen, passthrough = convert_inputs(
                shown, self._input_dtype, DEFAULT_SOURCE_MASK, self._skip_inputs
            )
        wanted = self._resolve(seen, *shown) if self._output_dtype == "input" else self._fixed_output_dtype()
        if self._foreign:
            args, kwargs = self._precision.convert_input(shown)
            if self._skip_inputs:
                args, kwargs = restore_named((args, kwargs), shown, self._skip_inputs)
        args, kwargs = skipped.restore((args, kwargs), given)
        return args, kwargs, Inputs(wanted, passthrough)

    def convert_output(self, output: Any, inputs: Inputs) -> Any:
        """Return the output of the inner forward with floating tensors in the dtype that the policy asks for.

        Args:
            output: Any nest; see :func:`lite_ext.convert` for what is converted in it.
            inputs: From :meth:`convert_input`.

        Override it for a policy of your own; ``super().convert_output(part, inputs)`` converts a part of the output.
        """
        dtype, passthrough = inputs
        if dtype is None:
            return output
        convert = reference.convert if is_compiling() else backend.convert
        return convert(output, dtype, self._source_mask, self._skip_outputs, passthrough)

    def _fixed_output_dtype(self) -> torch.dtype | None:
        wanted = self._output_dtype
        if wanted == "default":
            return default_dtype_here()
        return wanted if isinstance(wanted, torch.dtype) else None

    def _paths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[torch.dtype, str]:
        found = reference.floating_paths(kwargs, self._skip_inputs, "kwargs")
        return {**found, **reference.floating_paths(args, self._skip_inputs, "args")}

    # ---------------------------------------------------------------- methods that run the forward pass

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Make calls of this method of the module go through the wrapper, as its forward does.

        Args:
            method: The method or its name. Its inputs and outputs are converted, it runs under the precision, and
                where ``forward_module`` is another module (such as DDP) it goes through that module's forward.

        Raises:
            TypeError: ``method`` is neither a string nor a method.
            AttributeError: The module has no such method.

        The name and the meaning follow Lightning Fabric.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", None)
        if not isinstance(name, str):
            raise TypeError(f"mark_forward_method takes a method or its name, got {method!r}")
        if not callable(inspect.getattr_static(self._original_module, name, None)):
            raise AttributeError(f"{type(self._original_module).__name__} has no method {name!r} to mark")
        self._forward_methods.add(name)

    def _call_marked(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The names to skip are those of this method's parameters, not of the forward's.
        skipped = SkippedArguments(method, self._skip_inputs) if self._skip_inputs else None
        return self._run(self._through_strategy(method), args, kwargs, skipped)

    def _through_strategy(self, method: Callable[..., Any]) -> Callable[..., Any]:
        if self._redirect is None:
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._redirect(method):
                return self._forward_module(*args, **kwargs)

        return call

    # ---------------------------------------------------------------- the original module, seen through the wrapper

    @property
    def module(self) -> nn.Module:
        """The original module."""
        return self._original_module

    @property
    def precision(self) -> Precision | PrecisionLike:
        """The precision that the module runs under."""
        return self._precision

    @property
    def training(self) -> bool:
        """Whether the original module is in training mode."""
        training: bool = self._original_module.training
        return training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original_module" in self.__dict__:  # torch sets it at first
            self._original_module.training = mode

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating parameter, or of the first buffer, or the default dtype."""
        for tensor in (*self._original_module.parameters(), *self._original_module.buffers()):
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype()

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, or of the first buffer, or the CPU."""
        for tensor in (*self._original_module.parameters(), *self._original_module.buffers()):
            return tensor.device
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        original: Any = own.get("_original_module")
        # Private and special names are the wrapper's own business: copy, pickle and hasattr must see the wrapper.
        if name.startswith("_") or original is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if any(name in cls.__dict__ for cls in type(self).__mro__):
            return object.__getattribute__(self, name)  # a getter of the class failed, and says so once more
        value = getattr(original, name)
        if name in self._forward_methods and callable(value):
            return Method(self, value, None)
        if self._redirect is not None and inspect.ismethod(value) and value.__self__ is original:
            return Method(self, value, self._original_module)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_original_module")
        if original is None or name.startswith("_") or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
            if name in _OVERRIDABLE or name.endswith("_hooks"):
                self.__dict__["_fast"] = None
        else:
            setattr(original, name, value)

    def __delattr__(self, name: str) -> None:
        if name.startswith("_") or name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._original_module, name)

    def __dir__(self) -> list[str]:
        public = (name for name in dir(self._original_module) if not name.startswith("_"))
        return sorted({*object.__dir__(self), *public})

    __signature__ = SignatureOfForward()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the original module, under its own names. As :meth:`torch.nn.Module.state_dict`."""
        return self._original_module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the state of the original module. As :meth:`torch.nn.Module.load_state_dict`."""
        return self._original_module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # Called where a parent loads its own state; its loop over our children then reaches the module's.
        self._original_module._load_from_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> LiteModule:
        """Set training mode, or evaluation mode, on the wrapper and on the modules below it."""
        self._forward_module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> LiteModule:
        """Apply ``fn`` to every module below the wrapper, the original included, and to the wrapper."""
        self._forward_module.apply(fn)
        fn(self)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> LiteModule:
        self._forward_module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def requires_grad_(self, requires_grad: bool = True) -> LiteModule:
        """Set ``requires_grad`` of all parameters."""
        self._original_module.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self._original_module.zero_grad(set_to_none)

    def __repr__(self) -> str:
        lines = repr(self._forward_module).replace("\n", "\n  ")
        name = self._precision.name if isinstance(self._precision, Precision) else repr(self._precision)
        settings = [f"precision={name!r}" if isinstance(self._precision, Precision) else f"precision={name}"]
        settings.append(f"output_dtype={self._output_dtype!r}")
        if self._output_dtype == "input":
            settings.append(f"ambiguous_input={self._ambiguous_input!r}")
        if self._source_mask != DEFAULT_SOURCE_MASK:
            settings.append(f"source={{{', '.join(map(str, dtypes_of(self._source_mask)))}}}")
        for argument, names in (("skip_inputs", self._skip_inputs), ("skip_outputs", self._skip_outputs)):
            if names:
                settings.append(f"{argument}={tuple(sorted(names))!r}")
        return f"{type(self).__name__}(\n  {', '.join(settings)}\n  (module): {lines}\n)"

    # ---------------------------------------------------------------- copies

    _DERIVED = (
        "_input_dtype",
        "_foreign",
        "_inner_default",
        "_autocast",
        "_skipped",
        "_walks_inputs",
        "_redirect",
        "_fast",
    )

    def __getstate__(self) -> dict[str, Any]:
        # torch leaves out what it compiled in place.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name not in self._DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._share()
        self._prepare()


def _unwrap_compiled(module: Any) -> Any:
    """Return the module inside one that ``torch.compile`` made, so that names have no prefix."""
    return module._modules.get("_orig_mod", module) if isinstance(module, nn.Module) else module


def _check_wrappable(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"LiteModule wraps an nn.Module, got {module!r} of type {type(module).__name__}")
    if isinstance(module, LiteModule):
        raise TypeError(
            "the module is a LiteModule already: wrapped twice, its outputs would be converted twice. "
            "Wrap its .module instead (a wrapper deeper inside is fine)"
        )


def _hook_dicts(space: Mapping[str, Any]) -> Iterator[dict[int, Any]]:
    """Yield the hooks of a module, or those that torch keeps for all modules."""
    for name, value in space.items():
        if isinstance(value, dict) and name.endswith("_hooks") and ("_forward" in name or "_backward" in name):
            yield value


_precision = precision


def setup_module(
    module: nn.Module,
    precision: str | int | PrecisionLike,
    *,
    output_dtype: str | torch.dtype = "default",
    ambiguous_input: str = "error",
    source: Iterable[torch.dtype] | None = None,
    skip_inputs: Iterable[str] = (),
    skip_outputs: Iterable[str] = (),
    original_module: nn.Module | None = None,
) -> LiteModule:
    """Return ``module`` wrapped, its parameters converted as the precision asks (``"bf16-true"`` and its like).

    Args:
        module: Changed in place where its parameters are converted.
        precision: A name such as ``"bf16-mixed"``, or an object; see :func:`lite_ext.precision`.
        output_dtype, ambiguous_input, source, skip_inputs, skip_outputs, original_module: As for :class:`LiteModule`.

    Raises:
        TypeError, ValueError: As :class:`LiteModule`.

    Example:
        >>> setup_module(nn.Linear(2, 2), "bf16-true").dtype
        torch.bfloat16
    """
    for wrapped in (module, module if original_module is None else original_module):
        _check_wrappable(wrapped)
    meant = _precision(precision)
    # All arguments are checked before the first parameter is converted.
    output_dtype = check_output_dtype(output_dtype)
    ambiguous_input = check_ambiguous_input(ambiguous_input)
    source = dtypes_of(source_mask(source))
    skip_inputs = skip_names(skip_inputs, "skip_inputs")
    skip_outputs = skip_names(skip_outputs, "skip_outputs")
    return LiteModule(
        meant.convert_module(module),
        meant,
        output_dtype=output_dtype,
        ambiguous_input=ambiguous_input,
        source=source,
        skip_inputs=skip_inputs,
        skip_outputs=skip_outputs,
        original_module=original_module,
    )
