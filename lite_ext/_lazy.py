"""Forwards that return before they ran: generators and coroutines, converted item by item.

The body runs under the forward context, the code of whoever consumes it does not: the context is entered for each step.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

LAZY = frozenset({GeneratorType, CoroutineType, AsyncGeneratorType})

Context = Callable[[], AbstractContextManager[Any]]
Convert = Callable[[Any], Any]


def convert_lazily(output: Any, context: Context, convert: Convert) -> Any:
    """Return a generator, coroutine or async generator like ``output`` whose items and result are converted.

    Args:
        output: What the forward returned.
        context: Makes the forward context.
        convert: Converts one item.
    """
    if isinstance(output, GeneratorType):
        return _generator(output, context, convert)
    if isinstance(output, AsyncGeneratorType):
        return _async_generator(output, context, convert)
    assert isinstance(output, CoroutineType)
    outer = _coroutine(output, context, convert)
    weakref.finalize(outer, _close_unstarted, output).atexit = False
    return outer


def _close_unstarted(inner: Any) -> None:
    """Close a coroutine whose outer one went before its first step: Python would warn of both, or of a closed one."""
    if inspect.getcoroutinestate(inner) == inspect.CORO_CREATED:
        inner.close()


def _generator(inner: Any, context: Context, convert: Convert) -> Generator[Any, Any, Any]:
    def step(resume: Callable[..., Any], *args: Any) -> Any:
        with context():
            return resume(*args)

    try:
        item = step(next, inner)
        while True:
            try:
                sent = yield convert(item)
            except GeneratorExit:
                raise
            except BaseException as error:
                item = step(inner.throw, error)
            else:
                item = step(inner.send, sent)
    except StopIteration as stop:
        return convert(stop.value)
    finally:
        step(inner.close)


class _Stepwise:
    """Awaits under the context: what passes between the body and the event loop is not touched."""

    def __init__(self, awaitable: Any, context: Context) -> None:
        self._awaitable = awaitable
        self._context = context

    def __await__(self) -> Generator[Any, Any, Any]:
        return _generator(self._awaitable.__await__(), self._context, lambda item: item)


async def _coroutine(inner: Any, context: Context, convert: Convert) -> Any:
    return convert(await _Stepwise(inner, context))


async def _async_generator(inner: Any, context: Context, convert: Convert) -> AsyncGenerator[Any, Any]:
    try:
        item = await _Stepwise(inner.__anext__(), context)
        while True:
            try:
                sent = yield convert(item)
            except GeneratorExit:
                raise
            except BaseException as error:
                item = await _Stepwise(inner.athrow(error), context)
            else:
                item = await _Stepwise(inner.asend(sent), context)
    except StopAsyncIteration:
        return
    finally:
        await _Stepwise(inner.aclose(), context)
