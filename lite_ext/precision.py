"""What a precision string means: the dtypes of parameters and inputs, and what is in force inside the forward."""

from __future__ import annotations

import difflib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from lite_ext._default_dtype import default_dtype
from lite_ext.convert import convert
from lite_ext.dtypes import DEFAULT_SOURCE


class _Row(NamedTuple):
    parameters: torch.dtype | None  # None: as they are
    inputs: torch.dtype | None
    autocast: torch.dtype | None
    default: torch.dtype | None  # torch.get_default_dtype() inside the forward


_F16, _BF16, _F64 = torch.float16, torch.bfloat16, torch.float64

# The meanings are those of Lightning's precision plugins (lightning.fabric.plugins.precision).
TABLE: dict[str, _Row] = {
    #            parameters  inputs  autocast  default
    "32-true": _Row(None, None, None, None),
    "64-true": _Row(_F64, _F64, None, _F64),
    "16-true": _Row(_F16, _F16, None, _F16),
    "bf16-true": _Row(_BF16, _BF16, None, _BF16),
    "16-mixed": _Row(None, _F16, _F16, None),
    "bf16-mixed": _Row(None, _BF16, _BF16, None),
}

ALIASES: dict[str | int, str] = {
    32: "32-true",
    "32": "32-true",
    64: "64-true",
    "64": "64-true",
    16: "16-mixed",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}


@runtime_checkable
class PrecisionLike(Protocol):
    """What the wrapper asks of a precision: a Lightning ``Precision`` plugin has it, and so may a class of yours."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with its parameters in the dtype of this precision."""

    def convert_input(self, data: Any) -> Any:
        """Return the nest ``data`` with its floating tensors in the dtype of the inputs."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return what the forward runs under."""


class Precision:
    """One row of the table of precisions.

    Args:
        name: As for :func:`precision`.

    Raises:
        ValueError: The name is not known; the message has the nearest one that is.

    Attributes:
        name: Such as ``"bf16-mixed"``.
        parameter_dtype: The dtype of floating parameters and buffers, or ``None``: as they are.
        input_dtype: The dtype of floating inputs inside the forward, or ``None``: as they are.
        autocast_dtype: The dtype of ``torch.autocast`` inside the forward, or ``None``: not used.
        default_dtype: ``torch.get_default_dtype()`` inside the forward, or ``None``: as it is.
    """

    def __init__(self, name: str | int) -> None:
        known = ALIASES.get(name, name)
        if known not in TABLE:
            near = difflib.get_close_matches(str(name).lower(), [*TABLE, *map(str, ALIASES)], n=1, cutoff=0.3)
            hint = f": did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"precision {name!r} is not known{hint} Valid: {', '.join(map(repr, [*TABLE, *ALIASES]))}")
        self.name = str(known)
        self.parameter_dtype, self.input_dtype, self.autocast_dtype, self.default_dtype = TABLE[self.name]

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with its parameters and buffers of 16 to 64 bits in :attr:`parameter_dtype`.

        Changes it in place. What is of another dtype (complex, float8, integer) stays as it is.
        """
        dtype = self.parameter_dtype
        if dtype is None:
            return module
        tensors = (*module.parameters(), *module.buffers())
        if all(tensor.dtype in DEFAULT_SOURCE or not _converted_by_torch(tensor) for tensor in tensors):
            return module.to(dtype=dtype)  # the module may have a way of its own
        return module._apply(lambda tensor: tensor.to(dtype) if tensor.dtype in DEFAULT_SOURCE else tensor)  # type: ignore[no-untyped-call, no-any-return]

    def convert_input(self, data: Any) -> Any:
        """Return the nest ``data`` with floating tensors in :attr:`input_dtype`; see :func:`lite_ext.convert`."""
        return data if self.input_dtype is None else convert(data, self.input_dtype)

    def forward_context(self, device_type: str = "cpu") -> AbstractContextManager[Any]:
        """Return the context of a forward on ``device_type``: autocast, or the default dtype, or nothing."""
        if self.autocast_dtype is not None:
            return torch.autocast(device_type, dtype=self.autocast_dtype)
        if self.default_dtype is not None:
            return default_dtype(self.default_dtype)
        return nullcontext()

    def __repr__(self) -> str:
        return f"precision({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Precision) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def _converted_by_torch(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def precision(spec: str | int | PrecisionLike) -> Precision | PrecisionLike:
    """Return the precision that ``spec`` names.

    Args:
        spec: ``"32-true"``, ``"64-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"``, ``"bf16-mixed"``; an alias
            as Lightning spells them (``32``, ``"32"``, ``64``, ``"64"``, ``16``, ``"16"``, ``"bf16"``); or an object
            with ``convert_module``, ``convert_input`` and ``forward_context``, which is returned as it is.

    Raises:
        ValueError: The name is not known; the message has the nearest one that is.
        TypeError: ``spec`` is neither a name nor such an object.

    Example:
        >>> precision("bf16-mixed").autocast_dtype
        torch.bfloat16
    """
    if isinstance(spec, (str, int)) and not isinstance(spec, bool):
        return Precision(spec)
    if isinstance(spec, type) or not isinstance(spec, PrecisionLike):
        raise TypeError(
            "precision must be a name such as 'bf16-mixed' or an object with convert_module, convert_input and "
            f"forward_context, got {spec!r} of type {type(spec).__name__}"
        )
    return spec
