"""Chooses what runs the walk: the compiled library or its pure-Python reference, and never the other in silence."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

BACKENDS = ("native", "python")

NAME = os.environ.get("LITE_EXT_BACKEND", "native")
if NAME not in BACKENDS:
    raise ImportError(f"LITE_EXT_BACKEND={NAME!r} is not a backend; use one of: {', '.join(BACKENDS)}")

# The compiled library, or None: for what the Python reference has no counterpart of.
native: Any = None

if TYPE_CHECKING or NAME == "python":
    from lite_ext import tree as backend
else:
    from lite_ext import _build

    _build.check()
    from lite_ext import _C as backend

    native = backend

__all__ = ["BACKENDS", "NAME", "backend", "native"]
