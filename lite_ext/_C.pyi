"""The compiled library. The functions that lite_ext.tree has too are described there."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

MAX_DEPTH: int

def convert(
    tree: Any, dtype: torch.dtype, source_mask: int, skip: frozenset[str], passthrough: Any = None, /
) -> Any: ...
def convert_inputs(
    tree: Any, dtype: torch.dtype | None, source_mask: int, skip: frozenset[str], /
) -> tuple[Any, int, Any]: ...
def cast_tensors(tensors: list[Any], dtype: torch.dtype, /) -> list[Any]: ...
def register_node(
    cls: type,
    flatten: Callable[[Any], tuple[Iterable[Any], Any]],
    unflatten: Callable[[Any, list[Any]], Any],
    /,
) -> None: ...

DECLINED: object

def make_forward(
    input_dtype: torch.dtype | None,
    skip_inputs: frozenset[str],
    policy: int,
    output_dtype: torch.dtype | None,
    source_mask: int,
    skip_outputs: frozenset[str],
    autocast_dtype: torch.dtype | None,
    tensors: dict[str, Any] | None,
    tensor_name: str | None,
    watched: tuple[dict[int, Any], ...],
) -> object: ...
def run_forward(forward: object, wrapper: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...
def device_type_number(type: str, /) -> int: ...
def counters() -> dict[str, int]: ...
def dtype_bit(dtype: torch.dtype, /) -> int: ...
def cpu_level() -> str: ...
def pool_stats() -> dict[str, Any]: ...
def empty_pool() -> None: ...
def set_pool_limits(thread_bytes: int, shared_bytes: int, /) -> None: ...
