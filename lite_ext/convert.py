"""The one entry to the conversion: checks the arguments, then hands the tree to the backend in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from lite_ext import tree as reference
from lite_ext._backend import backend
from lite_ext._symbolic import Traced, proxy_classes, record_call, refuse
from lite_ext.dtypes import DEFAULT_SOURCE_MASK, FLOATING_BITS, check_dtype, skip_names, source_mask

T = TypeVar("T")

_NOTHING: tuple[str, ...] = ()
_NO_NAMES: frozenset[str] = frozenset()
_convert = backend.convert
_DTYPE = torch.dtype


def convert(
    tree: T, dtype: torch.dtype, *, source: Iterable[torch.dtype] | None = None, skip: Iterable[str] = _NOTHING
) -> T:
    """Return ``tree`` with every floating tensor in ``dtype``; each is indistinguishable from ``leaf.to(dtype)``.

    Args:
        tree: Tensors in any nest of tuples, lists, dicts, sets, deques, dataclasses, their subclasses, and classes
            named to :func:`register_node`. Anything else is returned as it is. Never changed.
        dtype: The floating dtype of the converted tensors; shapes, strides and devices stay.
        source: The dtypes to convert; ``None`` means float16, bfloat16, float32 and float64. Integer, bool, complex
            and quantised tensors are never converted, float8 and float4 only when named here.
        skip: Names of mapping keys and of dataclass or namedtuple fields, at any depth, whose whole subtree is
            returned as it is.

    Returns:
        A tree of the same types. A subtree in which nothing changes is the same object; a tensor or container that
        occurs twice is converted once.

    Raises:
        TypeError: ``dtype``, ``source`` or ``skip`` is not as above, or a container cannot be rebuilt.
        RecursionError: The tree contains itself, or is more than 1,000 containers deep.
        RuntimeError: A container was changed by other code during the walk.

    Example:
        >>> out = convert({"logits": torch.ones(2, dtype=torch.bfloat16), "ids": torch.arange(2)}, torch.float32)
        >>> out["logits"].dtype, out["ids"].dtype
        (torch.float32, torch.int64)

    Each leaf follows :meth:`torch.Tensor.to` with ``memory_format=torch.preserve_format``.
    """
    # These lines are a third of the time that one small tensor takes, so each takes the cheapest proof there is.
    if dtype.__class__ is not _DTYPE or dtype not in FLOATING_BITS:
        check_dtype(dtype)
    mask = DEFAULT_SOURCE_MASK if source is None else source_mask(source)
    names = _NO_NAMES if skip is _NOTHING else skip_names(skip)
    try:
        converted: T = (reference.convert if is_dynamo_compiling() else _convert)(tree, dtype, mask, names)
    except TypeError as error:
        return _recorded(error, tree, dtype, mask, names)
    return converted


def _recorded(error: TypeError, tree: T, dtype: torch.dtype, mask: int, names: frozenset[str]) -> T:
    """Return what stands for the converted tree in a graph of torch.fx, if it is that which stopped the walk."""
    if not isinstance(error.__cause__, Traced):
        raise error
    source = [named for named, bit in FLOATING_BITS.items() if bit & mask]
    recorded: T = record_call(convert, (tree, dtype), {"source": source, "skip": sorted(names)})
    return recorded


def cast_tensors(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return a list of ``tensors`` in ``dtype``: the batched cast without a tree.

    Args:
        tensors: Tensors of any shapes, dtypes and devices.
        dtype: The floating dtype that float16, bfloat16, float32 and float64 tensors are converted to; the others,
            and those that have it already, are returned as they are.

    Raises:
        TypeError: ``dtype`` is not a floating dtype, or an item is not a tensor.

    Example:
        >>> [t.dtype for t in cast_tensors([torch.ones(2), torch.arange(2)], torch.float16)]
        [torch.float16, torch.int64]

    ``torch.ops.lite_ext.cast(tensors, dtype)`` is the same as an operator, whose results are always new tensors: for
    graphs that are made ahead of time (``torch.export``, AOTInductor). See ``docs/torch.md``.
    """
    check_dtype(dtype)
    if isinstance(tensors, torch.Tensor):
        raise TypeError("tensors must be a sequence of tensors, got a lone tensor: write [tensor]")
    if is_compiling():
        return reference.cast_tensors(list(tensors), dtype)
    return backend.cast_tensors(list(tensors), dtype)


def register_node(
    cls: type[T],
    flatten: Callable[[T], tuple[Iterable[Any], Any]],
    unflatten: Callable[[Any, list[Any]], T],
) -> None:
    """Make instances of exactly ``cls`` containers, so that the tensors in them are converted.

    Args:
        cls: The class; subclasses are not meant.
        flatten: Returns the children and a context of any kind.
        unflatten: Takes that context and the children, converted, and returns the new instance.

    Raises:
        TypeError: ``cls`` is not a class, is a tensor class or a built-in container, or a function is not callable.
        ValueError: ``cls`` is registered already.

    Example:
        >>> class Box:
        ...     def __init__(self, value):
        ...         self.value = value
        >>> register_node(Box, lambda box: ([box.value], None), lambda context, children: Box(*children))
        >>> convert(Box(torch.ones(2)), torch.float16).value.dtype
        torch.float16

    The pair of functions follows :func:`torch.utils._pytree.register_pytree_node`, in the order of optree.
    """
    backend.register_node(cls, flatten, unflatten)
    if backend is not reference:
        reference.register_node(cls, flatten, unflatten)


for _proxy in proxy_classes():
    register_node(_proxy, refuse, refuse)
