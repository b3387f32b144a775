"""Lightning: precision plugins that convert with ``lite_ext`` and are Lightning's own in everything else.

``Fabric(plugins=FusedPrecision("bf16-mixed"))``. Versions tested: lightning 2.6.6.

Fabric visits the outputs once more after the plugin, to guard ``backward``; its visit rebuilds containers, and refuses
frozen dataclasses. For modules under one of these plugins that visit is replaced, from the first plugin made on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module

from lite_ext import tree as reference
from lite_ext._arguments import SkippedArguments
from lite_ext._backend import backend
from lite_ext._default_dtype import default_dtype, default_dtype_here
from lite_ext._lazy import LAZY, convert_lazily
from lite_ext.containers import kind_of
from lite_ext.dtypes import DEFAULT_SOURCE_MASK, skip_names, source_mask
from lite_ext.integrations import _calls
from lite_ext.policy import check_ambiguous_input, check_output_dtype, resolve_input
from lite_ext.precision import Precision as Meaning
from lite_ext.precision import precision as meaning_of

try:
    from lightning.fabric import wrappers as _wrappers
    from lightning.fabric.plugins.precision import HalfPrecision, MixedPrecision, Precision
    from lightning.fabric.plugins.precision.double import DoublePrecision
    from lightning.fabric.plugins.precision.fsdp import FSDPPrecision
except ImportError as error:
    raise ImportError(
        "lite_ext.integrations.lightning needs Lightning 2.6 or newer: pip install 'lite_ext[lightning]'"
    ) from error

if TYPE_CHECKING:
    from lite_ext.integrations._lightning_trainer import TrainerPrecision as TrainerPrecision

__all__ = [
    "FusedDoublePrecision",
    "FusedFSDPPrecision",
    "FusedFullPrecision",
    "FusedHalfPrecision",
    "FusedMixedPrecision",
    "FusedPrecision",
    "TrainerPrecision",
]


class InputConversion(Precision):
    """The input side, shared by the plugins of Fabric and of the Trainer: a mixin in front of Lightning's class."""

    _input_dtype: torch.dtype | None
    _skip_inputs: frozenset[str]
    _skipped: tuple[SkippedArguments, ...] = ()  # of the forward of each module set up
    _module: ref[Module] | None = None

    def convert_module(self, module: Module) -> Module:
        """As Lightning's plugin of the same precision, but complex and float8 tensors stay as they are."""
        meaning = Meaning(self.precision)
        module = super().convert_module(module) if meaning.parameter_dtype is None else meaning.convert_module(module)
        self._module = ref(module)
        if self._skip_inputs:
            skipped = SkippedArguments(module.forward, self._skip_inputs)
            if skipped not in self._skipped:
                self._skipped = (*self._skipped, skipped)
        return module

    def _convert(self, data: Any) -> tuple[Any, int, Any]:
        skipped = self._agreed(*data) if self._skipped and _is_arguments(data) else None
        shown = data if skipped is None else skipped.hide(*data)
        convert_inputs = reference.convert_inputs if is_compiling() else backend.convert_inputs
        converted, seen, passthrough = convert_inputs(shown, self._input_dtype, DEFAULT_SOURCE_MASK, self._skip_inputs)
        if skipped is not None:
            converted = skipped.restore(converted, data)
        return converted, seen, passthrough

    def _agreed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SkippedArguments:
        """Return which arguments are skipped: nothing tells for which of the modules they are meant."""
        first, *others = self._skipped
        for other in others:
            for at in range(len(args)):
                if first.position(at) != other.position(at):
                    raise ValueError(
                        f"skip_inputs={tuple(sorted(self._skip_inputs))!r}: position {at} of the arguments is a skipped "
                        "parameter in some of the modules set up with this plugin and not in others; pass it by keyword"
                    )
            for name in kwargs:
                if first.keyword(name) != other.keyword(name):
                    raise ValueError(
                        f"skip_inputs={tuple(sorted(self._skip_inputs))!r}: the keyword argument {name!r} is skipped "
                        "in some of the modules set up with this plugin and not in others"
                    )
        return first

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_module"}


class FusedPrecision(InputConversion):
    """A precision plugin for Lightning Fabric that converts inputs and outputs with ``lite_ext``.

    Args:
        precision: A name such as ``"bf16-mixed"``; see :func:`lite_ext.precision`. What is made is an instance of
            Lightning's plugin of that precision too: :class:`FusedMixedPrecision` for ``"16-mixed"`` and
            ``"bf16-mixed"``, and so on. Subclass one of these.
        output_dtype, ambiguous_input, source, skip_outputs: As for :class:`lite_ext.LiteModule`.
        skip_inputs: As there. Parameters that are passed by position are those of the modules' ``forward``; where the
            modules set up with one plugin differ in them, pass such an input by keyword.
        device: The device type of autocast, ``"cpu"`` or ``"cuda"``; ``None``: that of the module set up last.
        scaler: For ``"16-mixed"``: a ``torch.amp.GradScaler``; ``None``: a new one.

    Raises:
        TypeError, ValueError: As :class:`lite_ext.LiteModule`.

    Fabric itself raises ``ValueError`` where a plugin and ``precision=`` are both given.

    Example:
        >>> fabric = Fabric(accelerator="cpu", plugins=FusedPrecision("bf16-mixed", output_dtype="input"))
        >>> model = fabric.setup(nn.Linear(2, 2))

    Scaler, clipping, checkpoints and the forward context are those of Lightning's plugins.
    """

    def __new__(cls, precision: str | int = "32-true", *args: Any, **kwargs: Any) -> FusedPrecision:
        """Make an instance of the class for this precision."""
        if cls is FusedPrecision:
            cls = _CLASSES[_name(precision)]
        made: FusedPrecision = super().__new__(cls)
        return made

    def __init__(
        self,
        precision: str | int,
        output_dtype: str | torch.dtype = "default",
        skip_inputs: Iterable[str] = (),
        skip_outputs: Iterable[str] = (),
        ambiguous_input: str = "error",
        source: Iterable[torch.dtype] | None = None,
        *,
        device: str | None = None,
        scaler: Any = None,
    ) -> None:
        name = _name(precision)
        if not isinstance(self, (_CLASSES[name], FSDPPrecision)):
            raise TypeError(f"{type(self).__name__} is not for {name!r}: use or subclass {_CLASSES[name].__name__}")
        self._output_dtype = check_output_dtype(output_dtype)
        self._ambiguous_input = check_ambiguous_input(ambiguous_input)
        self._source_mask = source_mask(source)
        self._skip_inputs = skip_names(skip_inputs, "skip_inputs")
        self._skip_outputs = skip_names(skip_outputs, "skip_outputs")
        self._input_dtype = Meaning(name).input_dtype
        self._asked_device = device
        if scaler is not None and name != "16-mixed":
            raise ValueError(f"precision={name!r} does not use a scaler, found {scaler!r}")
        self._set_up(name, device or _default_device(), scaler)
        _replace_visit()

    def _set_up(self, name: Any, device: str, scaler: Any) -> None:
        """Run the constructor of Lightning's class."""

    def convert_input(self, data: Any) -> Any:
        """Return the nest ``data`` with its floating tensors in the dtype of the inputs.

        Raises:
            ValueError: ``output_dtype="input"``, ``ambiguous_input="error"``, and the inputs do not have exactly one
                floating dtype.
        """
        converted, seen, passthrough = self._convert(data)
        wanted = None
        if self._output_dtype == "input":
            wanted = resolve_input(seen, self._ambiguous_input, lambda: self._paths(data))
        if not is_compiling() or self._output_dtype == "input":
            _calls.begin(self, wanted, passthrough)
        return converted

    def forward_context(self) -> AbstractContextManager[Any]:
        """As Lightning's plugin of the same precision."""
        return _calls.ForwardContext(self, self._inner_context())

    def _inner_context(self) -> AbstractContextManager[Any]:
        inside = Meaning(self.precision).default_dtype
        context: AbstractContextManager[Any] = super().forward_context() if inside is None else default_dtype(inside)
        return context

    def convert_output(self, data: Any) -> Any:
        """Return the nest ``data`` with its floating tensors in the dtype that the policy asks for.

        A generator or coroutine is converted item by item, and runs under the forward context.
        """
        call = None if is_compiling() and self._output_dtype != "input" else _calls.end(self)
        passthrough = None
        if self._output_dtype == "default":
            dtype = default_dtype_here()
        elif isinstance(self._output_dtype, torch.dtype):
            dtype = self._output_dtype
        elif self._output_dtype == "keep" or call is None or call.output_dtype is None:
            dtype = None
        else:
            dtype = call.output_dtype
        if call is not None:
            passthrough = call.passthrough
        convert = reference.convert if is_compiling() else backend.convert

        def one(item: Any) -> Any:
            return item if dtype is None else convert(item, dtype, self._source_mask, self._skip_outputs, passthrough)

        return convert_lazily(data, self._inner_context, one) if type(data) in LAZY else one(data)

    def _paths(self, data: Any) -> dict[torch.dtype, str]:
        if not _is_arguments(data):
            return reference.floating_paths(data, self._skip_inputs, "input")
        args, kwargs = data
        if self._skipped:
            args, kwargs = self._agreed(args, kwargs).hide(args, kwargs)
        found = reference.floating_paths(kwargs, self._skip_inputs, "kwargs")
        return {**found, **reference.floating_paths(args, self._skip_inputs, "args")}

    def _device_type(self) -> str:
        """Return where autocast works: the module may have been moved since it was set up."""
        module = None if self._module is None else self._module()
        if self._asked_device is None and module is not None:
            for parameter in module.parameters():
                return str(parameter.device.type)
        return self._asked_device or _default_device()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.precision!r}, output_dtype={self._output_dtype!r})"


class FusedFullPrecision(FusedPrecision, Precision):
    """:class:`FusedPrecision` for ``"32-true"``: inputs are not converted."""


class FusedDoublePrecision(FusedPrecision, DoublePrecision):
    """:class:`FusedPrecision` for ``"64-true"``."""


class FusedHalfPrecision(FusedPrecision, HalfPrecision):
    """:class:`FusedPrecision` for ``"16-true"`` and ``"bf16-true"``."""

    def _set_up(self, name: Any, device: str, scaler: Any) -> None:
        HalfPrecision.__init__(self, name)


class FusedMixedPrecision(FusedPrecision, MixedPrecision):
    """:class:`FusedPrecision` for ``"16-mixed"`` and ``"bf16-mixed"``."""

    def _set_up(self, name: Any, device: str, scaler: Any) -> None:
        MixedPrecision.__init__(self, name, device, scaler)

    def _inner_context(self) -> AbstractContextManager[Any]:
        self.device = self._device_type()
        return super()._inner_context()


class FusedFSDPPrecision(FusedPrecision, FSDPPrecision):
    """:class:`FusedPrecision` for FSDP strategies, which accept only subclasses of Lightning's ``FSDPPrecision``.

    Args:
        precision: Not ``"64-true"``. In mixed precision the inputs go to float32, as Lightning has it: FSDP converts
            them once more, to the dtype of the parameters.

    The other arguments are those of :class:`FusedPrecision`.
    """

    def _set_up(self, name: Any, device: str, scaler: Any) -> None:
        FSDPPrecision.__init__(self, name)
        self._input_dtype = self._desired_input_dtype
        if scaler is not None:
            self.scaler = scaler

    def _inner_context(self) -> AbstractContextManager[Any]:
        if "mixed" in self.precision:  # Lightning's own is for CUDA only
            return torch.autocast(self._device_type(), dtype=Meaning(self.precision).autocast_dtype)
        return super()._inner_context()


_CLASSES: dict[str, type[FusedPrecision]] = {
    "32-true": FusedFullPrecision,
    "64-true": FusedDoublePrecision,
    "16-true": FusedHalfPrecision,
    "bf16-true": FusedHalfPrecision,
    "16-mixed": FusedMixedPrecision,
    "bf16-mixed": FusedMixedPrecision,
}


def _name(precision: Any) -> str:
    meaning = meaning_of(precision)
    if not isinstance(meaning, Meaning):
        raise TypeError(f"precision must be a name such as 'bf16-mixed', got {precision!r}")
    return meaning.name


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _is_arguments(data: Any) -> bool:
    """Whether ``data`` is what Fabric hands over: positional and keyword arguments."""
    return type(data) is tuple and len(data) == 2 and type(data[0]) is tuple and type(data[1]) is dict


def _tensors(tree: Any) -> Iterator[Tensor]:
    stack, met = [tree], {}
    while stack:
        child = stack.pop()
        if id(child) in met:
            continue
        met[id(child)] = child  # kept, for an address may otherwise be used twice
        if isinstance(child, Tensor):
            yield child
            continue
        kind = kind_of(type(child))
        if kind is not None:
            stack.extend(kind.children(child).values)


_visit = _wrappers.apply_to_collection


def _visit_outputs(data: Any, *args: Any, **kwargs: Any) -> Any:
    function: Any = kwargs.get("function")
    if getattr(function, "__func__", None) is not _wrappers._FabricModule._register_backward_hook:
        return _visit(data, *args, **kwargs)
    if not isinstance(function.__self__._strategy.precision, FusedPrecision):
        return _visit(data, *args, **kwargs)
    for tensor in _tensors(data):
        if not tensor.is_leaf:  # a parameter, or the caller's own tensor, would gather one more hook on each forward
            function(tensor)
    return data


def _replace_visit() -> None:
    if _wrappers.apply_to_collection is not _visit_outputs:
        _wrappers.apply_to_collection = _visit_outputs


def __getattr__(name: str) -> Any:
    if name == "TrainerPrecision":  # lightning.pytorch takes seconds to import
        from lite_ext.integrations._lightning_trainer import TrainerPrecision

        return TrainerPrecision
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
