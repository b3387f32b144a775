"""Chooses what runs the walk: the compiled library, or its pure-Python reference. Never one for the other in silence."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

BACKENDS = ("native", "python")

NAME = os.environ.get("LITE_EXT_BACKEND", "native")
if NAME not in BACKENDS:
    raise ImportError(f"LITE_EXT_BACKEND={NAME!r} is not a backend; use one of: {', '.join(BACKENDS)}")

if TYPE_CHECKING or NAME == "python":
    from lite_ext import tree as backend
else:
    from lite_ext import _build

    _build.check()
    from lite_ext import _C as backend

__all__ = ["BACKENDS", "NAME", "backend"]
