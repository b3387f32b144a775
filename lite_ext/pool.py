"""The pool of storages for small outputs on the CPU.

Making outputs, not casting them, is what a conversion of small tensors costs. The memory of outputs that died is kept
and given out again; each output still has a storage and a block of its own. ``LITE_EXT_POOL=0`` turns the pool off.
"""

from __future__ import annotations

from typing import Any

from lite_ext._backend import native


def pool_stats() -> dict[str, Any]:
    """Return what the pool holds and did.

    Returns:
        ``enabled``; ``limit_bytes`` that each thread may keep; ``kept_bytes`` and ``kept_blocks`` of all threads;
        ``reused`` and ``allocated``: blocks given out since the start, from the pool and from the system. Without the
        compiled library there is no pool, and only ``enabled`` (``False``) is there.

    Example:
        >>> pool_stats()["enabled"]
        True
    """
    return {"enabled": False} if native is None else dict(native.pool_stats())


def empty_pool() -> None:
    """Give every block that no tensor uses back to the system, those of other threads too."""
    if native is not None:
        native.empty_pool()


def set_pool_limit(limit_bytes: int) -> None:
    """Set how many bytes of unused blocks each thread may keep, and empty the pool.

    Args:
        limit_bytes: In bytes; 0 turns the pool off. The default is 16 MiB.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is negative.
    """
    if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int):
        raise TypeError(f"limit_bytes must be an integer, got {limit_bytes!r} of type {type(limit_bytes).__name__}")
    if limit_bytes < 0:
        raise ValueError(f"limit_bytes must not be negative, got {limit_bytes}")
    if native is not None:
        native.set_pool_limit(limit_bytes)
