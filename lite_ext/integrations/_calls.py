"""What the input of a running forward held, for its output: a stack per thread and task.

Fabric asks a plugin for three things in turn: ``convert_input``, ``forward_context`` and ``convert_output``; the last
one does not see the input. A call goes through three states in that order. Whatever is not running once the next call
begins was left behind by an exception, and is dropped then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch


class State(Enum):
    CONVERTED = 0
    RUNNING = 1
    DONE = 2


class Call:
    """One forward on its way. ``outer`` is the call whose forward it is part of."""

    __slots__ = ("outer", "output_dtype", "owner", "passthrough", "state")

    def __init__(self, owner: Any, output_dtype: torch.dtype | None, passthrough: Any, outer: Call | None) -> None:
        self.owner = owner
        self.output_dtype = output_dtype
        self.passthrough = passthrough
        self.outer = outer
        self.state = State.CONVERTED


# A context variable: threads start without a value, tasks with that of the code that made them.
_calls: ContextVar[Call | None] = ContextVar("lite_ext_fabric_calls", default=None)


def running() -> Call | None:
    """Return the innermost call whose forward runs now."""
    call = _calls.get()
    while call is not None and call.state is not State.RUNNING:
        call = call.outer
    return call


def begin(owner: Any, output_dtype: torch.dtype | None, passthrough: Any) -> None:
    """Note that ``owner`` converted an input."""
    _calls.set(Call(owner, output_dtype, passthrough, running()))


def end(owner: Any) -> Call | None:
    """Return the call of ``owner`` whose forward has just ended, and forget it."""
    call = _calls.get()
    if call is None or call.owner is not owner or call.state is not State.DONE:
        return None
    _calls.set(call.outer)
    return call


class ForwardContext:
    """The context of a forward: moves its call on, and drops it where the forward raises."""

    def __init__(self, owner: Any, inner: AbstractContextManager[Any]) -> None:
        self._owner = owner
        self._inner = inner
        self._call: Call | None = None

    def __enter__(self) -> Any:
        call = _calls.get()
        # Entered by itself, as Fabric.autocast does, it belongs to no call.
        if call is not None and call.owner is self._owner and call.state is State.CONVERTED:
            call.state = State.RUNNING
            self._call = call
        try:
            return self._inner.__enter__()
        except BaseException:
            self._leave(False)
            raise

    def __exit__(self, *error: Any) -> Any:
        self._leave(error[0] is None)
        return self._inner.__exit__(*error)

    def _leave(self, whole: bool) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.state = State.DONE
            _calls.set(call if whole else call.outer)
