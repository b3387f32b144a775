"""Which dtype the outputs go to: pure functions of the policy, the default dtype and the dtypes of the inputs."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch

from lite_ext._default_dtype import default_dtype_here
from lite_ext.dtypes import check_dtype, dtypes_of

OUTPUT_DTYPES = ("default", "input", "keep")
AMBIGUOUS_INPUTS = ("error", "promote", "default", "keep")


def _choose(value: Any, names: tuple[str, ...], argument: str, also: str = "") -> str:
    if value in names:
        return str(value)
    near = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.3)
    hint = f": did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"{argument}={value!r} is not known{hint} Valid: {', '.join(map(repr, names))}{also}")


def check_output_dtype(value: Any) -> str | torch.dtype:
    """Return ``output_dtype`` if it is a policy's name or a floating dtype.

    Raises:
        ValueError: The name is not known.
        TypeError: It is neither a name nor a floating dtype; a callable is refused here, for lambdas do not pickle.
    """
    if isinstance(value, str):
        return _choose(value, OUTPUT_DTYPES, "output_dtype", ", or a floating torch.dtype")
    if callable(value) and not isinstance(value, torch.dtype):
        raise TypeError("output_dtype does not take a callable: subclass LiteModule and override convert_output")
    return check_dtype(value, "output_dtype")


def check_ambiguous_input(value: Any) -> str:
    """Return ``ambiguous_input`` if it is a known name.

    Raises:
        ValueError: The name is not known.
        TypeError: It is not a string.
    """
    if not isinstance(value, str):
        raise TypeError(f"ambiguous_input must be a string, got {value!r} of type {type(value).__name__}")
    return _choose(value, AMBIGUOUS_INPUTS, "ambiguous_input")


def resolve_input(seen: int, ambiguous: str, paths: Callable[[], dict[torch.dtype, str]]) -> torch.dtype | None:
    """Return the dtype for ``output_dtype="input"``, or ``None`` to keep the outputs.

    Args:
        seen: The mask of the floating dtypes among the inputs.
        ambiguous: What to do when it does not have exactly one.
        paths: Called for the message only: a path to one input of each dtype.

    Raises:
        ValueError: ``ambiguous`` is ``"error"`` and there is not exactly one dtype.
    """
    dtypes = dtypes_of(seen)
    if len(dtypes) == 1:
        return dtypes[0]
    if ambiguous == "keep":
        return None
    if ambiguous == "default" or (ambiguous == "promote" and not dtypes):
        return default_dtype_here()
    if ambiguous == "promote":
        promoted = dtypes[0]
        for dtype in dtypes[1:]:
            promoted = torch.promote_types(promoted, dtype)
        return promoted
    if dtypes:
        found = ", ".join(f"{path}: {dtype}" for dtype, path in paths().items())
        problem = f"the inputs have several floating dtypes ({found})"
    else:
        problem = "the inputs hold no floating tensor"
    raise ValueError(
        f'output_dtype="input" needs exactly one floating dtype among the inputs, but {problem}. '
        'Choose with ambiguous_input="promote", "default" or "keep", or give output_dtype="default", "keep" or a dtype'
    )
