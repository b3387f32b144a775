"""The kinds of containers of the Python reference: what each holds, and how it is rebuilt from new values.

Base-class functions read and fill containers, never overridden methods: what a subclass answers need not be what it
stores. Constructors are never called.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from contextlib import suppress
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import Any, NamedTuple

import torch


class Children(NamedTuple):
    """What a container holds."""

    values: Sequence[Any]
    names: Sequence[Any] | None = None  # keys, then field names; None: the children are numbered
    keys: int = 0  # how many of the names are keys
    context: Any = None


class Kind(NamedTuple):
    """A kind of container: which classes it means, and its two operations."""

    matches: Callable[[type], bool]
    children: Callable[[Any], Children]
    # Of the source, its children, the new values and the indices of those that changed.
    rebuild: Callable[[Any, Children, list[Any], Collection[int]], Any]
    step: str | None = None  # what stands in a path for a child without a name
    reread: bool = False  # children may change under the walk


def _slots(cls: type) -> tuple[tuple[type, str], ...]:
    return tuple(
        (base, name)
        for base in cls.__mro__
        if "__slots__" in base.__dict__
        for name, member in base.__dict__.items()
        if type(member) is MemberDescriptorType
    )


# What torch.compiler.assume_constant_result does, which imports the whole compiler: a second at each import.
_slots._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _attributes(source: Any) -> Any:
    if torch.compiler.is_compiling():  # which cannot ask an OrderedDict for them
        return None if type(source) is OrderedDict else getattr(source, "__dict__", None)
    # By the slot of the class that has it: a subclass may have hidden the name, or answer for all of them.
    members = (base.__dict__.get("__dict__") for base in type(source).__mro__)
    member = next((member for member in members if type(member) is GetSetDescriptorType), None)
    return None if member is None else member.__get__(source)


def _copy_state(source: Any, made: Any, keep: Callable[[Any], Any] = lambda value: value) -> None:
    state = _attributes(source)
    if state is source:  # a dict that is its own namespace stays one
        object.__setattr__(made, "__dict__", made)
    elif state:
        _attributes(made).update({name: keep(value) for name, value in state.items()})
    for base, name in _slots(type(source)):
        member = base.__dict__[name]
        with suppress(AttributeError):  # an empty slot
            member.__set__(made, keep(member.__get__(source)))


def _same_length(before: int, after: int) -> None:
    if before != after:
        raise TypeError("its length changed in the copy")


def _tuple_children(source: Any) -> Children:
    fields = getattr(type(source), "_fields", None)
    values = source if type(source) is tuple else tuple(tuple.__iter__(source))
    return Children(values, fields if type(fields) is tuple and len(fields) == len(values) else None)


def _rebuild_tuple(source: Any, children: Children, values: list[Any], changed: Collection[int]) -> Any:
    if type(source) is tuple:
        return tuple(values)
    made = tuple.__new__(type(source), values)
    _copy_state(source, made)
    return made


def _structseq_children(source: Any) -> Children:
    values = tuple(tuple.__iter__(source))
    fields = getattr(type(source), "__match_args__", ())
    return Children(values, fields if len(fields) == len(values) else None)


def _rebuild_structseq(source: Any, children: Children, values: list[Any], changed: Collection[int]) -> Any:
    _, (_, hidden) = source.__reduce__()  # fields past the end of the sequence
    return type(source)(values, hidden)


def _list_children(source: Any) -> Children:
    return Children(list(source if type(source) is list else list.__iter__(source)))


def _rebuild_list(source: Any, children: Children, values: list[Any], changed: Collection[int]) -> Any:
    if type(source) is list:
        return values
    made = list.__new__(type(source))
    list.extend(made, values)
    _copy_state(source, made)
    return made


def _dict_base(cls: type) -> Any:
    return next(base for base in (OrderedDict, defaultdict, dict) if issubclass(cls, base))


def _dict_children(source: Any) -> Children:
    base = _dict_base(type(source))
    if base is dict and type(source) is dict:
        return Children(list(source.values()), list(source), len(source))
    names = list(base.__iter__(source))  # an OrderedDict's order is not that of the dict below it
    values = [dict.__getitem__(source, name) for name in names]
    keys = len(names)
    if _is_dataclass(type(source)):
        # A field that mirrors the item of its name is the same child; the others are children of their own.
        for name, value in _fields(source):
            if dict.get(source, name) is not value:
                names.append(name)
                values.append(value)
    return Children(values, names, keys)


def _rebuild_dict(source: Any, children: Children, values: list[Any], changed: Collection[int]) -> Any:
    base, names = _dict_base(type(source)), children.names or ()
    if type(source) is dict:
        return dict(zip(names, values, strict=True))
    # OrderedDict.__new__ loses the subclass where torch 2.14 traces it.
    traced = base is OrderedDict and type(source) is not OrderedDict and torch.compiler.is_dynamo_compiling()
    made = (dict if traced else base).__new__(type(source))
    for name, value in zip(names[: children.keys], values, strict=False):
        base.__setitem__(made, name, value)
    _same_length(children.keys, dict.__len__(made))
    if base is defaultdict:
        if type(source) is defaultdict:
            made.default_factory = source.default_factory
        else:
            factory = defaultdict.__dict__["default_factory"]
            factory.__set__(made, factory.__get__(source))
    _copy_state(source, made)
    state = _attributes(made)
    for index in changed:
        name = names[index]
        if index >= children.keys:
            object.__setattr__(made, name, values[index])
        elif state is not None and state is not made and isinstance(name, str):
            # An attribute that mirrors an item follows it. torch.compile cannot compare containers by identity.
            mirrors = name in state if torch.compiler.is_compiling() else state.get(name) is children.values[index]
            if mirrors:
                state[name] = values[index]
    return made


def _rebuild_set(source: Any, children: Children, values: list[Any], changed: Collection[int]) -> Any:
    made: Any = set.__new__(type(source)) if isinstance(source, set) else frozenset.__new__(type(source), values)
    if isinstance(source, set):
        set.update(made, values)
    _same_length(len(values), len(list(_set_iter(made))))
    _copy_state(source, made)
    return made


def _set_iter(source: Any) -> Iterable[Any]:
    return frozenset.__iter__(source) if isinstance(source, frozenset) else set.__iter__(source)


def _rebuild_deque(source: Any, children: Children, values: list[Any], changed: Collection[int]) -> Any:
    made = deque.__new__(type(source))
    maxlen = source.maxlen if type(source) is deque else deque.__dict__["maxlen"].__get__(source)
    deque.__init__(made, values, maxlen)  # which cannot be set elsewhere
    _copy_state(source, made)
    return made


def _is_dataclass(cls: type) -> bool:
    return isinstance(getattr(cls, "__dataclass_fields__", None), dict)


def _fields(source: Any) -> Iterable[tuple[str, Any]]:
    # torch.compile does not trace the lookup of a base class by name.
    compiling = torch.compiler.is_compiling()
    read: Any = getattr if compiling else object.__getattribute__
    for field in dataclasses.fields(source if compiling else type(source)):
        with suppress(AttributeError):  # a field that was never set
            yield field.name, read(source, field.name)


def _dataclass_children(source: Any) -> Children:
    fields = dict(_fields(source))
    return Children(list(fields.values()), list(fields))


def _rebuild_dataclass(source: Any, children: Children, values: list[Any], changed: Collection[int]) -> Any:
    made = object.__new__(type(source))
    _copy_state(source, made)
    names = children.names or ()
    for index in changed:
        object.__setattr__(made, names[index], values[index])
    return made


def _user_dict_children(source: Any) -> Children:
    state = _attributes(source)
    return Children([state["data"]] if "data" in state else [])


def _rebuild_user_dict(source: Any, children: Children, values: list[Any], changed: Collection[int]) -> Any:
    made = object.__new__(type(source))
    _copy_state(source, made)
    _attributes(made)["data"] = values[0]
    return made


def _is_mapping(cls: type) -> bool:
    # Tensor-likes that take part in torch's function protocol (TensorDict) have a conversion of their own.
    return issubclass(cls, MutableMapping) and not hasattr(cls, "__torch_function__")


def _mapping_children(source: Any) -> Children:
    names = list(source)
    return Children([source[name] for name in names], names, len(names))


def _rebuild_mapping(source: Any, children: Children, values: list[Any], changed: Collection[int]) -> Any:
    names = children.names or ()
    if hasattr(type(source), "__copy__"):
        made = copy.copy(source)
    else:
        made = object.__new__(type(source))
        # A shallow copy shares the store behind the mapping, so dicts among its attributes are copied as well.
        _copy_state(source, made, lambda value: copy.copy(value) if isinstance(value, dict) else value)
    if type(made) is not type(source) or made is source:
        raise TypeError("its copy is of another type")
    for index in changed:
        name, old = names[index], children.values[index]
        if source[name] is not old:
            raise TypeError("it makes its values when they are read")
        made[name] = values[index]
        if source[name] is not old:
            source[name] = old
            raise TypeError("its copy shares its storage")
        if made[name] is not values[index]:
            raise TypeError("its copy does not hold what was written to it")
    if list(made) != names:
        raise TypeError("its keys changed in the copy")
    return made


def _registered_children(source: Any) -> Children:
    flat = registry[type(source)][0](source)
    if not isinstance(flat, tuple) or len(flat) != 2:
        raise TypeError(f"flatten must return a tuple (children, context), got {flat!r}")
    return Children(list(flat[0]), context=flat[1])


def _rebuild_registered(source: Any, children: Children, values: list[Any], changed: Collection[int]) -> Any:
    return registry[type(source)][1](children.context, values)


registry: dict[type, tuple[Callable[[Any], Any], Callable[[Any, list[Any]], Any]]] = {}

# The first match decides.
KINDS = (
    Kind(lambda cls: cls in registry, _registered_children, _rebuild_registered),
    Kind(
        lambda cls: issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields"),
        _structseq_children,
        _rebuild_structseq,
    ),
    Kind(lambda cls: issubclass(cls, tuple), _tuple_children, _rebuild_tuple),
    Kind(
        lambda cls: issubclass(cls, list),
        _list_children,
        _rebuild_list,
        None,
        True,
    ),
    Kind(lambda cls: cls is dict, _dict_children, _rebuild_dict, None, True),
    Kind(lambda cls: issubclass(cls, dict), _dict_children, _rebuild_dict),
    Kind(
        lambda cls: issubclass(cls, set | frozenset),
        lambda source: Children(list(_set_iter(source))),
        _rebuild_set,
        "{...}",
    ),
    Kind(
        lambda cls: issubclass(cls, deque),
        lambda source: Children(list(deque.__iter__(source))),
        _rebuild_deque,
    ),
    Kind(
        lambda cls: cls is MappingProxyType,
        lambda source: Children(gc.get_referents(source)),  # its one reference: the mapping
        lambda source, children, values, changed: MappingProxyType(values[0]),
        "",
    ),
    Kind(_is_dataclass, _dataclass_children, _rebuild_dataclass),
    Kind(lambda cls: issubclass(cls, UserDict), _user_dict_children, _rebuild_user_dict, ""),
    Kind(_is_mapping, _mapping_children, _rebuild_mapping),
)


def kind_of(cls: type) -> Kind | None:
    """Return what instances of exactly ``cls`` are to the walk; ``None`` means no container."""
    return next((kind for kind in KINDS if kind.matches(cls)), None)
