"""The pool of storages for outputs on the CPU.

Making outputs, not casting them, is what most conversions cost: allocation when they are small, page faults when they
are large. The memory of outputs that died is kept and given out again; each output still has a storage and a block of
its own. ``LITE_EXT_POOL=0`` turns the pool off.
"""

from __future__ import annotations

from typing import Any

from lite_ext._backend import native


def pool_stats() -> dict[str, Any]:
    """Return what the pool holds and did.

    Returns:
        ``enabled``; ``thread_limit_bytes`` and ``shared_limit_bytes``: see :func:`set_pool_limit`;
        ``kept_small_bytes``, ``kept_large_bytes`` and ``kept_blocks``: unused now, of all threads; ``reused`` and
        ``allocated``: blocks given out since the start, from the pool and from the system. Without the compiled
        library there is no pool, and only ``enabled`` (``False``) is there.

    Example:
        >>> pool_stats()["enabled"]
        True
    """
    return {"enabled": False} if native is None else dict(native.pool_stats())


def empty_pool() -> None:
    """Give every block that no tensor uses back to the system, those of other threads too."""
    if native is not None:
        native.empty_pool()


def set_pool_limit(thread_bytes: int, shared_bytes: int | None = None) -> None:
    """Set how many bytes of unused memory may be kept, and empty the pool.

    Args:
        thread_bytes: By each thread, in blocks of up to 64 KiB. The default is 64 MiB; 0 keeps none.
        shared_bytes: By the process, in blocks above that and up to 1 GiB. The default is 256 MiB; 0 keeps none;
            ``None`` leaves the limit as it is.

    Raises:
        TypeError: A limit is not an integer.
        ValueError: A limit is negative.

    Example:
        >>> set_pool_limit(0, 0)  # no pool
        >>> pool_stats()["enabled"]
        False
    """
    for name, value in (("thread_bytes", thread_bytes), ("shared_bytes", 0 if shared_bytes is None else shared_bytes)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if native is not None:
        shared = native.pool_stats()["shared_limit_bytes"] if shared_bytes is None else shared_bytes
        native.set_pool_limits(thread_bytes, shared)
