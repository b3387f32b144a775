"""The classes of the shared trees: containers with constructors, state and habits of their own."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import InitVar, dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from transformers.utils import ModelOutput


def low(*values: float) -> torch.Tensor:
    """A small bfloat16 tensor."""
    return torch.tensor(values or (1.5, -2.25, 3.0), dtype=torch.bfloat16)


class Point(NamedTuple):
    x: Any
    y: Any


class Scaled(Point):
    """A namedtuple with a constructor and an instance __dict__ of its own."""

    def __new__(cls, value: Any) -> Any:
        made = super().__new__(cls, value, "unit")
        made.note = "made by __new__"
        return made


class LabelledTuple(tuple):
    def __new__(cls, label: str, items: Any) -> Any:
        made = super().__new__(cls, items)
        made.label = label
        return made

    def __iter__(self) -> Iterator[Any]:
        return iter(("another", "answer"))


class SizedList(list):
    def __init__(self, size: int, items: Any) -> None:
        super().__init__(items)
        self.size = size


class SlottedList(list):
    __slots__ = ("extra", "unset")


class NamedDict(dict):
    """Constructor of its own, writing forbidden, and an attribute."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(items)
        self.name = name

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("read only")

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class AttrDict(dict):
    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        self.__dict__ = self


class LabelledSet(set):
    label = "class"


class LabelledDeque(deque):
    def __init__(self, label: str, items: Any) -> None:
        super().__init__(items, 4)
        self.label = label


class Settings(UserDict):
    def __init__(self, owner: str, **items: Any) -> None:
        super().__init__(items)
        self.owner = owner


class Store(MutableMapping):
    """A mapping that keeps its items to itself."""

    def __init__(self, first: str, **items: Any) -> None:
        self._items = dict(items)
        self.first = first

    def __getitem__(self, key: str) -> Any:
        return self._items[key.lower()]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key.lower()] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class SlottedStore(Store):
    __slots__ = ("_items", "first")


class CopyingStore(Store):
    """Its items are in a list, which only its own __copy__ knows to copy."""

    def __init__(self, first: str, **items: Any) -> None:
        super().__init__(first)
        self._items = SimpleNamespace(table=dict(items))

    def __copy__(self) -> CopyingStore:
        return type(self)(self.first, **self._items.table)

    def __getitem__(self, key: str) -> Any:
        return self._items.table[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items.table[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._items.table)

    def __len__(self) -> int:
        return len(self._items.table)


class TensorLikeStore(Store):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


@dataclass
class Plain:
    x: Any
    y: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = None


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any
    y: Any = None


@dataclass
class WithInitVar:
    x: Any
    scale: InitVar[int]
    kind: ClassVar[str] = "class variable"

    def __post_init__(self, scale: int) -> None:
        self.scaled_by = scale


@dataclass
class NotInInit:
    x: Any
    cache: Any = field(init=False)

    def __post_init__(self) -> None:
        self.cache = self.x + 1


@dataclass
class Mutating:
    x: Any

    def __post_init__(self) -> None:
        self.x += 1


@dataclass(slots=True)
class Inherited(Slotted):
    z: Any = field(kw_only=True, default=None)


@dataclass
class Guarded:
    x: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "x"):
            raise AttributeError("read only")
        object.__setattr__(self, name, value)


@dataclass
class Record(Mapping):
    """A dataclass and a Mapping at once."""

    x: Any
    y: Any = None

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(("x", "y"))

    def __len__(self) -> int:
        return 2


@dataclass
class CustomOutput(ModelOutput):
    loss: Any = None
    logits: Any = None
    aux: Any = None


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class Liar:
    """Says that it is a dict."""

    __class__ = property(lambda self: dict)
