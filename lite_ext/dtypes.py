"""Floating dtypes as bits of a mask, and the checks of the arguments that name them.

A mask is what crosses into C++: one ``int`` says which dtypes a call may touch. ``csrc/plan/dtype.h`` holds the
same numbers; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_NAMES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)

FLOATING_BITS: dict[torch.dtype, int] = {
    getattr(torch, name): 1 << position for position, name in enumerate(_NAMES) if hasattr(torch, name)
}
"""The bit of every floating dtype that this torch knows."""

DEFAULT_SOURCE: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes converted when ``source`` is not given: those whose values need no scale kept elsewhere."""

DEFAULT_SOURCE_MASK = sum(FLOATING_BITS[dtype] for dtype in DEFAULT_SOURCE)


def check_dtype(dtype: Any, argument: str = "dtype") -> torch.dtype:
    """Return ``dtype`` if it is a floating ``torch.dtype``, else raise ``TypeError`` naming what came."""
    if isinstance(dtype, torch.dtype):
        if dtype in FLOATING_BITS:
            return dtype
        raise TypeError(f"{argument} must be a floating torch.dtype such as torch.float32, got {dtype}")
    raise TypeError(
        f"{argument} must be a floating torch.dtype such as torch.float32, got {dtype!r} of type {type(dtype).__name__}"
    )


def source_mask(source: Iterable[torch.dtype] | None, argument: str = "source") -> int:
    """Return the mask of the dtypes that a call may convert; ``None`` means :data:`DEFAULT_SOURCE`."""
    if source is None:
        return DEFAULT_SOURCE_MASK
    if isinstance(source, torch.dtype):
        raise TypeError(f"{argument} must be a set of floating dtypes, got the lone dtype {source}: write {{{source}}}")
    if isinstance(source, str) or not isinstance(source, Iterable):
        raise TypeError(f"{argument} must be a set of floating dtypes, got {source!r} of type {type(source).__name__}")
    mask = 0
    for dtype in source:
        mask |= FLOATING_BITS[check_dtype(dtype, f"every item of {argument}")]
    return mask


def dtypes_of(mask: int) -> list[torch.dtype]:
    """Return the dtypes whose bits are set in ``mask``, in the order of :data:`FLOATING_BITS`."""
    return [dtype for dtype, bit in FLOATING_BITS.items() if mask & bit]


def skip_names(skip: Iterable[str], argument: str = "skip") -> frozenset[str]:
    """Return the names as a frozenset, or raise ``TypeError``: for a lone string, the usual slip, too."""
    if isinstance(skip, str):
        raise TypeError(f"{argument} must be a collection of names, got the lone string {skip!r}: write ({skip!r},)")
    if not isinstance(skip, Iterable):
        raise TypeError(f"{argument} must be a collection of names, got {skip!r} of type {type(skip).__name__}")
    names = frozenset(skip)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"every item of {argument} must be a string, got {name!r} of type {type(name).__name__}")
    return names
