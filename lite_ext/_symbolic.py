"""torch.fx.symbolic_trace: the conversion of what stands for a tensor becomes a call in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Proxy
from torch.fx.node import map_aggregate

MODULE_CALL = nn.Module.__call__
"""What it is as long as nothing patches it: ``torch.fx.Tracer`` does."""


class Traced(Exception):
    """Raised where a walk meets a ``torch.fx.Proxy``, which has no dtype to decide by."""


def refuse(proxy: Any, *_: Any) -> Any:
    """Stop a walk; registered for each of :func:`proxy_classes`."""
    raise Traced(f"{proxy} has no dtype before the graph runs")


def proxy_classes() -> list[type[Proxy]]:
    """Return torch's own classes of proxies."""
    return [Proxy, *Proxy.__subclasses__()]


def first_proxy(tree: Any) -> Proxy | None:
    """Return a proxy in a nest of what a graph may hold, or ``None``."""
    found: list[Proxy] = []
    map_aggregate(tree, lambda part: found.append(part) if isinstance(part, Proxy) else None)
    return found[0] if found else None


def record_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call of ``function``; the arguments are what a graph may hold, a proxy among them."""
    proxy = first_proxy((args, kwargs))
    if proxy is None:
        raise TypeError(f"torch.fx cannot record a call of {function.__name__} with a proxy inside of an opaque object")
    return proxy.tracer.create_proxy("call_function", function, args, kwargs)


def record_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call of ``module``, or return ``None`` where no proxy is among the arguments."""
    proxy = first_proxy((args, kwargs))
    if proxy is None:
        return None
    path = proxy.tracer.path_of_module(module)  # type: ignore[attr-defined]
    return proxy.tracer.create_proxy("call_module", path, args, kwargs)
