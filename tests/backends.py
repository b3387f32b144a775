"""The two backends, each with the classes of the shared table registered."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from zoo import REGISTERED


@functools.cache
def load_backend(name: str) -> ModuleType:
    backend = importlib.import_module({"native": "lite_ext._C", "python": "lite_ext.tree"}[name])
    for cls, functions in REGISTERED.items():
        backend.register_node(cls, *functions)
    return backend
