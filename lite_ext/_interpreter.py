"""Refuses an interpreter within the process's first one, where importing torch ends in a crash."""

from __future__ import annotations

import importlib
from contextlib import suppress


def refuse_within_another() -> None:
    """Raise ImportError unless this is the main interpreter of its process."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # from Python 3.13 on, and before
        with suppress(ModuleNotFoundError):
            interpreters = importlib.import_module(name)
            if interpreters.get_current() != interpreters.get_main():
                raise ImportError(
                    "lite_ext cannot be imported in a subinterpreter, for torch cannot: use the main interpreter, "
                    "threads, or processes"
                )
            return
