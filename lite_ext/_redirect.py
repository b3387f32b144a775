"""Marked methods through a strategy's module, and the guard of unmarked ones.

``DistributedDataParallel(module)`` runs ``module.forward``. For a marked method to go through it, that one call of
``module.forward`` must run the method instead. Which call is meant is told by a context variable, so that threads
and tasks do not meet, and the module is as it was once the last such call has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

if TYPE_CHECKING:
    from lite_ext.wrapper import LiteModule

_meant: ContextVar[tuple[nn.Module, Callable[..., Any]] | None] = ContextVar("lite_ext_redirect", default=None)
_guarded: ContextVar[tuple[frozenset[int], str] | None] = ContextVar("lite_ext_guard", default=None)
_lock = threading.Lock()


class Redirect:
    """Lets one call of a module's forward run another of its methods."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._calls = 0
        self._hidden: Any = None

    @contextmanager
    def __call__(self, method: Callable[..., Any]) -> Iterator[None]:
        """Run ``method`` at the next call of the module's forward in this thread or task, within the block."""
        self._install()
        token = _meant.set((self._module, method))
        try:
            yield
        finally:
            _meant.reset(token)
            self._remove()

    def _install(self) -> None:
        with _lock:
            self._calls += 1
            if self._calls == 1:
                own = self._module.__dict__
                self._hidden = own.get("forward")  # an instance may have a forward of its own
                own["forward"] = _Dispatch(self._module, self._module.forward)

    def _remove(self) -> None:
        with _lock:
            self._calls -= 1
            if self._calls == 0:
                own = self._module.__dict__
                del own["forward"]
                if self._hidden is not None:
                    own["forward"] = self._hidden
                self._hidden = None


class _Dispatch:
    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meant = _meant.get()
        if meant is None or meant[0] is not self._module:
            return self._forward(*args, **kwargs)
        # The method may call the module's forward itself, and means the real one then.
        token = _meant.set(None)
        try:
            return meant[1](*args, **kwargs)
        finally:
            _meant.reset(token)


@contextmanager
def guard_submodules(module: nn.Module, method: str) -> Iterator[None]:
    """Raise ``RuntimeError`` within the block where a module below ``module`` runs its forward in this thread or task.

    Such a call would go past the strategy's module (DDP), which then does not exchange gradients.
    """
    token = _guarded.set((frozenset(map(id, module.modules())), method))
    hook = register_module_forward_pre_hook(_refuse)
    try:
        yield
    finally:
        hook.remove()
        _guarded.reset(token)


class Method:
    """A method of a wrapped module, reached through the wrapper.

    Args:
        wrapper: Runs it as it runs the forward, unless it is guarded.
        method: The bound method, or a function.
        guarded: The module none of whose parts it may run, or ``None``.
    """

    def __init__(self, wrapper: LiteModule, method: Callable[..., Any], guarded: nn.Module | None) -> None:
        self.__self__ = wrapper
        self.__wrapped__ = method
        self.__name__: str = getattr(method, "__name__", "method")
        self.__doc__ = method.__doc__
        self._guarded = guarded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._guarded is None:
            return self.__self__._call_marked(self.__wrapped__, args, kwargs)
        # A method that runs submodules past the forward module (DDP) would train without its communication.
        with guard_submodules(self._guarded, self.__name__):
            return self.__wrapped__(*args, **kwargs)


def _refuse(module: nn.Module, args: Any) -> None:
    guarded = _guarded.get()
    if guarded is not None and id(module) in guarded[0]:
        raise RuntimeError(
            f"the method {guarded[1]!r} runs the forward of a submodule past the module that the strategy made: "
            f"call mark_forward_method({guarded[1]!r}) on the wrapper first"
        )
