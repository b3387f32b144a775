"""Containers, keys and leaves that raise, lie, return garbage or change what is being walked.

The conversion is right, or an error says at which path; the caller's tree is as it was, and nothing crashes.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from abc import ABCMeta
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import pytest
import torch
from zoo import Plain, low

import lite_ext

F32 = torch.float32


class Hostile(Exception):
    """What the attacks raise."""


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise Hostile("hostile")


def _garbage(*args: Any, **kwargs: Any) -> Any:
    return 7


def _lies(*args: Any, **kwargs: Any) -> Any:
    return iter(())


def _clears(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.clear()
    return self


ATTACKS: dict[str, Callable[..., Any]] = {
    "raises": _raises,
    "garbage": _garbage,
    "lies": _lies,
    "clears itself": _clears,
}
METHODS = (
    *(
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__iter__",
        "__len__",
        "__contains__",
        "__reversed__",
        "__missing__",
    ),
    *("__eq__", "__hash__", "__bool__", "__init__", "__new__", "__init_subclass__", "__copy__", "__deepcopy__"),
    *("__reduce__", "__reduce_ex__", "__getattr__", "__getattribute__", "__setattr__", "__sizeof__", "__repr__"),
    *("items", "keys", "values", "get", "update", "copy", "pop", "append", "extend", "insert", "__class_getitem__"),
)
BASES: dict[str, Any] = {base.__name__: base for base in (list, dict, OrderedDict, defaultdict, Counter, deque, tuple)}


def _make(base: Any, cls: Any, items: list[Any]) -> Any:
    """An instance of `cls`, filled by its base alone."""
    if base is tuple:
        return tuple.__new__(cls, items)
    made = base.__new__(cls)
    if issubclass(base, dict):
        for key, item in enumerate(items):
            (OrderedDict if base is OrderedDict else dict).__setitem__(made, key, item)
    else:
        base.extend(made, items)
    return made


def _read(base: Any, tree: Any) -> list[Any]:
    return list(dict.values(tree) if issubclass(base, dict) else base.__iter__(tree))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", BASES)
def test_subclasses_of_containers_are_read_by_their_base(backend: Any, name: str, method: str, attack: str) -> None:
    base = BASES[name]
    hook = ATTACKS[attack]
    cls: Any = type("Subclass", (base,), {} if method == "__init_subclass__" else {method: hook})
    if method == "__init_subclass__":
        cls.__init_subclass__ = hook
    tree = _make(base, cls, [low(1.0), "text", low(2.0)])
    result = lite_ext.convert([tree], F32)[0]
    assert type(result) is cls
    assert result is not tree
    assert [item.dtype for item in _read(base, result)[::2]] == [F32, F32]
    assert _read(base, result)[1] == "text"
    assert [item.dtype for item in _read(base, tree)[::2]] == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    "method", ["__class__", "__dict__", "__slots__", "__dataclass_fields__", "_fields", "__torch_function__"]
)
@pytest.mark.parametrize("name", BASES)
def test_what_a_class_says_of_itself(backend: Any, name: str, method: str, attack: str) -> None:
    """Converted, left as it is, or refused with its path."""
    base = BASES[name]
    answer = ATTACKS[attack]
    members: Any = {method: ()} if method == "__slots__" else {method: property(answer)}
    tree = _make(base, type("Subclass", (base,), members), [low(1.0), "text", low(2.0)])
    try:
        result = lite_ext.convert([tree], F32)[0]
    except TypeError as error:
        assert re.match(r"convert: cannot (read|rebuild) Subclass at output\[0\]: ", str(error))
    else:
        assert {item.dtype for item in _read(base, result)[::2]} == {torch.bfloat16 if result is tree else F32}
    assert [item.dtype for item in _read(base, tree)[::2]] == [torch.bfloat16, torch.bfloat16]


class Mapped(MutableMapping):
    """The least that a mapping needs."""

    def __init__(self, **items: Any) -> None:
        self.held = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self.held[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def clear(self) -> None:
        self.held.clear()


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", [Mapped, UserDict], ids=["MutableMapping", "UserDict"])
def test_mappings_that_are_read_by_their_own_methods(backend: Any, base: Any, method: str, attack: str) -> None:
    tree = base(a=low(1.0), b="text")
    if (method, attack) == ("__getattribute__", "clears itself"):
        return  # the attack asks itself for what it calls, without end
    held = dict(tree)
    setattr(base := type("Subclass", (base,), {}), method, ATTACKS[attack])
    tree_dict = object.__getattribute__(tree, "__dict__")
    object.__setattr__(tree, "__class__", base)
    try:
        result = lite_ext.convert([tree], F32)[0]
    except (TypeError, RuntimeError) as error:
        assert "output[0]" in str(error)
        assert re.match(r"convert: (cannot (read|rebuild) Subclass|a container holds itself)", str(error))
    else:
        copied = object.__getattribute__(result, "__dict__")
        store = copied.get("held", copied.get("data"))
        assert store["a"].dtype == F32 or result is tree or not held
        assert type(result) is base
    store = tree_dict.get("held", tree_dict.get("data"))
    if attack != "clears itself":
        assert store.keys() == held.keys()
        assert all(store[key] is held[key] for key in held)


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("attack", ["raises", "garbage", "lies"])
@pytest.mark.parametrize("method", ["__new__", "__init__", "_make", "_replace", "__getnewargs__", "_asdict", "x"])
def test_namedtuples_with_methods_of_their_own(backend: Any, method: str, attack: str) -> None:
    member = property(ATTACKS[attack]) if method == "x" else ATTACKS[attack]
    cls: Any = type("Subclass", (Point,), {method: member})
    result = lite_ext.convert({"k": tuple.__new__(cls, (low(), 1))}, F32)["k"]
    assert type(result) is cls
    assert tuple.__getitem__(result, 0).dtype == F32


class Descriptor:
    """Stands where a field stands."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        if self.error is not None:
            raise self.error
        return instance.__dict__["kept"]

    def __set__(self, instance: Any, value: Any) -> None:
        if self.error is not None:
            raise self.error
        instance.__dict__["kept"] = value


@pytest.mark.parametrize("error", [None, Hostile("hostile"), AttributeError("hostile"), TypeError("hostile")])
def test_dataclasses_with_descriptors(backend: Any, error: Exception | None) -> None:
    cls: Any = dataclasses.make_dataclass("Described", ["x", "y"])
    tree = cls(low(1.0), low(2.0))
    cls.x = Descriptor(error)
    tree.__dict__["kept"] = low(3.0)
    if error is None or isinstance(error, AttributeError):  # a field that is not set
        assert lite_ext.convert([tree], F32)[0].__dict__["y"].dtype == F32
    else:
        with pytest.raises(TypeError, match=r"^convert: cannot read Described at output\[0\]: hostile"):
            lite_ext.convert([tree], F32)
    assert tree.__dict__["y"].dtype == torch.bfloat16


@pytest.mark.parametrize("attack", ["raises", "garbage", "lies"])
@pytest.mark.parametrize(
    "method",
    [
        "__init__",
        "__new__",
        "__post_init__",
        "__setattr__",
        "__getattribute__",
        "__getattr__",
        "__eq__",
        "__hash__",
        "__repr__",
    ],
)
def test_dataclasses_with_methods_of_their_own(backend: Any, method: str, attack: str) -> None:
    tree = Plain(low(), [low()])
    cls: Any = dataclasses.dataclass(eq=False)(type("Subclass", (Plain,), {}))
    setattr(cls, method, ATTACKS[attack])
    object.__setattr__(tree, "__class__", cls)
    result = lite_ext.convert([tree], F32)[0]
    assert type(result) is cls
    held = object.__getattribute__(result, "__dict__")
    assert (held["x"].dtype, held["y"][0].dtype) == (F32, F32)


def _register(flatten: Any, unflatten: Any = lambda context, children: list(children)) -> Any:
    cls = type("Custom", (), {})
    lite_ext.register_node(cls, flatten, unflatten)
    return cls()


def test_registered_functions_may_convert(backend: Any) -> None:
    seen: list[Any] = []

    def flatten(item: Any) -> Any:
        seen.append(lite_ext.convert([low()], torch.float64)[0].dtype)
        return [low()], None

    def unflatten(context: Any, children: Any) -> Any:
        seen.append(lite_ext.convert({"a": low()}, torch.float64)["a"].dtype)
        return list(children)

    result = lite_ext.convert([low(), _register(flatten, unflatten), low()], F32)
    assert [result[0].dtype, result[1][0].dtype, result[2].dtype] == [F32] * 3
    assert seen == [torch.float64] * 2


@pytest.mark.parametrize("given", [{}, {1: 2}, "text", iter([1]), (), {low()}])
def test_registered_children_of_any_iterable(backend: Any, given: Any) -> None:
    tree = _register(lambda item: (given, None))
    result = lite_ext.convert([tree, low()], F32)
    assert result[1].dtype == F32


def test_registered_unflatten_that_returns_the_original(backend: Any) -> None:
    tree: Any = _register(lambda item: ([low()], None), lambda context, children: tree)
    assert lite_ext.convert([tree], F32)[0] is tree


class OnDeath:
    """Runs a function when it dies."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def __del__(self) -> None:
        self.function()


@pytest.mark.parametrize("kind", [list, dict])
def test_a_leaf_whose_death_changes_the_tree(backend: Any, kind: Any) -> None:
    """The walk drops the last reference to something of a registered class, whose death clears what is walked."""
    tree: Any = kind()
    items = [low() for _ in range(20)]

    def flatten(item: Any) -> Any:
        children = [low(), OnDeath(tree.clear)]
        return children, None

    items.insert(10, _register(flatten, lambda context, children: "made"))
    if kind is list:
        tree.extend(items)
    else:
        tree.update(enumerate(items))
    try:
        result = lite_ext.convert(tree, F32)
    except RuntimeError as error:
        assert str(error) == f"convert: a {kind.__name__} was changed while it was converted at output"
    else:
        assert len(result) == 21
    del items
    assert not tree


class Key:
    """Hashable as often as it is told."""

    def __init__(self, often: int) -> None:
        self.often = often

    def __hash__(self) -> int:
        self.often -= 1
        if self.often < 0:
            raise Hostile("not hashable twice")
        return 7


def test_keys_that_are_hashable_once(backend: Any) -> None:
    tree = {Key(1): low(), "other": low()}
    with pytest.raises(TypeError, match=r"^convert: cannot rebuild dict at output: not hashable twice; "):
        lite_ext.convert(tree, F32)
    assert [leaf.dtype for leaf in tree.values()] == [torch.bfloat16] * 2


class Unequal:
    def __eq__(self, other: object) -> bool:
        raise Hostile("not comparable")

    def __hash__(self) -> int:
        return 7


def test_keys_that_cannot_be_compared(backend: Any) -> None:
    tree = {Unequal(): low(), 3: low()}
    result = lite_ext.convert(tree, F32, skip=["a"])
    assert [*map(id, result)] == [*map(id, tree)]
    assert [leaf.dtype for leaf in result.values()] == [F32, F32]


@pytest.mark.parametrize(
    "key",
    [10**5000, -(10**5000), True, None, (), "\ud800", "a\0b", float("nan"), b"\xff"],
    ids=lambda key: type(key).__name__,
)
def test_odd_keys(backend: Any, key: Any) -> None:
    assert lite_ext.convert({key: low()}, F32)[key].dtype == F32
    bad = _register(_raises)
    with pytest.raises(TypeError, match=r"^convert: cannot read Custom at output\[") as caught:
        lite_ext.convert({key: bad}, F32)
    assert str(caught.value).encode("utf-8", "replace")


class Meta(ABCMeta):
    """Answers for its classes with errors."""

    __instancecheck__ = __subclasscheck__ = _raises  # type: ignore[assignment]
    __eq__ = _raises
    __hash__ = type.__hash__

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__mro__", "__dataclass_fields__", "_fields", "n_sequence_fields", "__torch_function__"):
            raise Hostile(name)
        return type.__getattribute__(cls, name)


@pytest.mark.parametrize("base", [list, dict, tuple, object, deque, UserDict])
def test_metaclasses(backend: Any, base: Any) -> None:
    cls: Any = Meta("Subclass", (base,), {})
    filling: dict[type, Any] = {dict: {"k": low()}, object: None, UserDict: {"k": low()}}
    tree = cls() if base is object else cls(filling.get(base, [low()]))
    holder = [tree, low()]
    try:
        result = lite_ext.convert(holder, F32)
    except TypeError as error:
        assert re.match(r"convert: cannot (read|rebuild) Subclass at output\[0\]: ", str(error))
    else:
        assert type(result[0]) is cls
        assert result[1].dtype == F32
    assert holder[1].dtype == torch.bfloat16


def test_objects_that_die_during_the_walk(backend: Any) -> None:
    """Children that only the flatten function's list holds, which it empties later."""
    lists: list[list[Any]] = []

    def flatten(item: Any) -> Any:
        for earlier in lists:
            earlier.clear()
        gc.collect()
        lists.append([low(float(len(lists))), [low(9.0)]])
        return lists[-1], None

    tree = [_register(flatten) for _ in range(20)]
    result = lite_ext.convert(tree, F32)
    assert [children[0].item() for children in result] == [float(at) for at in range(20)]
    assert all(children[1][0].dtype == F32 for children in result)


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_interrupted_anywhere(backend: Any, error: type[BaseException], at: int) -> None:
    """In whichever of the user's functions it comes, it goes to the caller; the tree is as it was; the next call works."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error("interrupted")

    def flatten(item: Any) -> Any:
        count()
        return [low(), low()], None

    def unflatten(context: Any, children: Any) -> Any:
        count()
        return list(children)

    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") == "to":
                count()
            return super().__torch_function__(function, types, args, kwargs or {})

    tree = [low(), *(_register(flatten, unflatten) for _ in range(3)), low().as_subclass(Refuses), {"a": low()}]
    held = list(tree)
    interrupted = False
    try:
        lite_ext.convert(tree, F32)
    except error as raised:
        interrupted = True
        assert raised.args == ("interrupted",)
    assert interrupted == (at <= 7)
    assert all(now is before for now, before in zip(tree, held, strict=True))
    calls = 100
    assert lite_ext.convert(tree, F32)[0].dtype == F32
