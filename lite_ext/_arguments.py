"""Which arguments of a call go to the parameters that a user named, however they are passed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lite_ext.containers import kind_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class SkippedArguments:
    """The arguments of one function that are not to be converted.

    Args:
        function: Its signature says where the parameters are. Read only if there are names.
        names: Of parameters. That of ``*args`` means all further positions, that of ``**kwargs`` all further keywords.

    True if there is more to skip than keywords with these names.
    """

    def __init__(self, function: Callable[..., Any], names: frozenset[str]) -> None:
        parameters = list(inspect.signature(function).parameters.values()) if names else []
        order = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
        kinds = {parameter.kind for parameter in parameters if parameter.name in names}
        self._names = names
        self._positions = frozenset(at for at, parameter in enumerate(order) if parameter.name in names)
        self._rest = len(order) if inspect.Parameter.VAR_POSITIONAL in kinds else None
        self._other_keywords = inspect.Parameter.VAR_KEYWORD in kinds
        self._known = frozenset(p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY)

    def __bool__(self) -> bool:
        return bool(self._positions) or self._rest is not None or self._other_keywords

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SkippedArguments) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def position(self, at: int) -> bool:
        """Return whether the positional argument with this index is skipped."""
        return at in self._positions or (self._rest is not None and at >= self._rest)

    def keyword(self, name: str) -> bool:
        """Return whether the keyword argument with this name is skipped."""
        return name in self._names or (self._other_keywords and name not in self._known)

    def hide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments with ``None`` for each that is skipped."""
        if not self:
            return args, kwargs
        return (
            tuple(None if self.position(at) else value for at, value in enumerate(args)),
            {name: None if self.keyword(name) else value for name, value in kwargs.items()},
        )

    def restore(self, converted: Arguments, original: Arguments) -> Arguments:
        """Return the arguments as converted, with those that are skipped as they are in ``original``."""
        if not self:
            return converted
        args, kwargs = original
        return (
            tuple(args[at] if self.position(at) else value for at, value in enumerate(converted[0])),
            {name: kwargs[name] if self.keyword(name) else value for name, value in converted[1].items()},
        )


def restore_named(converted: Any, original: Any, names: frozenset[str]) -> Any:
    """Return ``converted``, which somebody else made of ``original``, with the subtrees under these names as they were.

    Where the two are not alike, it is left as it came.
    """
    if converted is original or type(converted) is not type(original):
        return converted
    kind = kind_of(type(converted))
    if kind is None:
        return converted
    new, old = kind.children(converted), kind.children(original)
    if len(new.values) != len(old.values):
        return converted
    values = list(new.values)
    for at, (value, before) in enumerate(zip(new.values, old.values, strict=True)):
        name = None if new.names is None else new.names[at]
        skipped = isinstance(name, str) and name in names
        values[at] = before if skipped else restore_named(value, before, names)
    changed = [at for at, value in enumerate(values) if value is not new.values[at]]
    return kind.rebuild(converted, new, values, changed) if changed else converted
