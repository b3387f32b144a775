"""torch's default dtype, set for the length of a forward, though the whole process shares it.

Forwards of several threads overlap and end in any order. The dtype from before the first of them is what the last one
restores, and what the threads that are in none of them go on to see.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

# The forwards that hold a default dtype now, in the order they began: the thread and the dtype of each. C++ looks
# whether it is empty. Under the lock.
active: dict[object, tuple[int, torch.dtype]] = {}

_lock = threading.Lock()
_outside = torch.get_default_dtype()  # of meaning while a forward is active


@contextmanager
def _shared(dtype: torch.dtype) -> Iterator[None]:
    global _outside
    key = object()
    with _lock:
        if not active:
            _outside = torch.get_default_dtype()
        active[key] = (threading.get_ident(), dtype)
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        with _lock:
            remaining = [held for other, (_, held) in active.items() if other is not key]
            torch.set_default_dtype(remaining[-1] if remaining else _outside)
            del active[key]  # last: where none is active, torch's own is the one from outside


@contextmanager
def _traced(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return a context manager that sets torch's default dtype for the duration of a block."""
    return _traced(dtype) if torch.compiler.is_compiling() else _shared(dtype)


def default_dtype_here() -> torch.dtype:
    """Return torch's default dtype as this thread would see it without the forwards of others."""
    if torch.compiler.is_compiling():
        return torch.get_default_dtype()
    me = threading.get_ident()
    with _lock:
        others = [dtype for thread, dtype in active.values() if thread != me]
        if not others:
            return torch.get_default_dtype()
        own = [dtype for thread, dtype in active.values() if thread == me]
        return own[-1] if own else _outside
