"""Descriptions of trees, made without the code under test, so that two trees can be held against each other."""

from __future__ import annotations

import dataclasses
import gc
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Collection, MutableMapping
from types import MappingProxyType, MemberDescriptorType
from typing import Any

import torch
from zoo import REGISTERED

CONVERTIBLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHOWN = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a floating tensor's elements as integers; every NaN is -1, for its bits are not promised."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    patterns = values.view(_INTEGERS[values.element_size()])
    return torch.where(values.isnan(), -1, patterns) if values.dtype in CONVERTIBLE else patterns


def _listed(patterns: torch.Tensor) -> Any:
    """Values that a failed comparison can show, or, of many, what is fast to compare."""
    return tuple(patterns.tolist()) if len(patterns) <= _SHOWN else patterns.numpy().tobytes()


def fingerprint(tensor: torch.Tensor) -> Any:
    """All that a user can ask of a tensor, apart from which object it is."""
    grad_fn = type(tensor.grad_fn).__name__ if tensor.requires_grad else None
    facts = (
        type(tensor),
        tensor.dtype,
        tensor.layout,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        grad_fn,
    )
    if tensor.is_nested:
        return facts, tuple(fingerprint(part) for part in tensor.unbind())
    if tensor.layout != torch.strided:
        return facts, tensor.shape, tuple(bits(tensor.detach().to_dense()).tolist())
    values = None if tensor.device.type == "meta" else _listed(bits(tensor))
    return facts, tensor.shape, tensor.stride(), tensor.is_neg(), tensor.is_inference(), values


def _state(tree: Any) -> list[tuple[str, Any]]:
    members = [
        (name, member)
        for base in type(tree).__mro__
        if "__slots__" in base.__dict__
        for name, member in base.__dict__.items()
        if type(member) is MemberDescriptorType
    ]
    slots = [(name, member.__get__(tree)) for name, member in members if hasattr(tree, name)]
    return [*(getattr(tree, "__dict__", {}).items()), *slots]


def _attributes(tree: Any, fields: tuple[str, ...]) -> tuple[Any, ...]:
    if getattr(tree, "__dict__", None) is tree:
        return ("is its own namespace",)
    described = []
    for name, value in _state(tree):
        if isinstance(tree, dict) and name in dict.keys(tree) and dict.__getitem__(tree, name) is value:
            described.append((name, "mirrors the item"))
        elif name not in fields:
            described.append((name, id(value)))
    return tuple(described)


def _first_value(element: Any) -> str:
    while isinstance(element, tuple):
        element = element[0]
    return repr(float(element.flatten()[0])) if isinstance(element, torch.Tensor) else repr(element)


def _parts(tree: Any) -> tuple[Any, list[tuple[Any, Any]]] | None:
    """What a container is, and its children with their labels; None for anything else."""
    cls = type(tree)
    head: tuple[Any, ...] = (cls,)
    fields: tuple[str, ...] = ()
    if cls in REGISTERED:
        children, context = REGISTERED[cls][0](tree)
        return (cls, context), list(enumerate(children))
    if hasattr(cls, "n_sequence_fields"):
        hidden = tree.__reduce__()[1][1]
        return (cls, {name: id(value) for name, value in hidden.items()}), list(enumerate(tuple.__iter__(tree)))
    if issubclass(cls, tuple):
        labels = list(enumerate(tuple.__iter__(tree)))
    elif issubclass(cls, list):
        labels = list(enumerate(list.__iter__(tree)))
    elif issubclass(cls, dict):
        order = list(OrderedDict.__iter__(tree) if issubclass(cls, OrderedDict) else dict.__iter__(tree))
        labels = [(("key", id(key)), dict.__getitem__(tree, key)) for key in order]
        head = (cls, id(getattr(tree, "default_factory", None)))
    elif issubclass(cls, set | frozenset):
        labels = [("element", element) for element in sorted(tree, key=_first_value)]
    elif issubclass(cls, deque):
        labels, head = list(enumerate(deque.__iter__(tree))), (cls, tree.maxlen)
    elif cls is MappingProxyType:
        return cls, [("mapping", gc.get_referents(tree)[0])]
    elif dataclasses.is_dataclass(cls):
        labels = []
    elif issubclass(cls, UserDict):
        labels, fields = [("data", tree.__dict__["data"])], ("data",)
    elif issubclass(cls, MutableMapping) and not hasattr(cls, "__torch_function__"):
        return cls, [(("key", id(key)), tree[key]) for key in tree]
    else:
        return None
    if dataclasses.is_dataclass(cls):
        fields = tuple(field.name for field in dataclasses.fields(cls))
        present = {name: value for name, value in _state(tree) if name in fields}
        mirrored = [name for name in present if isinstance(tree, dict) and dict.get(tree, name) is present[name]]
        labels += [(("field", name), value) for name, value in present.items() if name not in mirrored]
    return (*head, _attributes(tree, fields)), labels


def _name(container: Any, label: Any) -> Any:
    """By which name `skip` knows a child: its field, or its key; None if it has neither."""
    match label:
        case ("field", str(name)):
            return name
        case ("key", int(key)):
            keys = dict.keys(container) if isinstance(container, dict) else container
            return next(name for name in keys if id(name) == key)
        case int(index) if hasattr(type(container), "_fields"):
            return type(container)._fields[index]
    return None


def describe(
    tree: Any,
    leaf: Callable[[torch.Tensor], Any],
    same: Callable[[Any], bool],
    skip: frozenset[str] = frozenset(),
) -> Any:
    """The tree as nested tuples. `leaf` describes a tensor, None meaning that it is kept; `same` tells of a container
    whose children are all kept whether it counts as the original object; the children that `skip` names are kept. An
    object met again is only a number.
    """
    numbers: dict[int, int] = {}
    known: dict[int, Any] = {}
    alive: list[Any] = []

    def visit(value: Any) -> Any:
        if id(value) in numbers:
            return "again", numbers[id(value)]
        if id(value) in known:
            return known[id(value)]
        alive.append(value)
        if isinstance(value, torch.Tensor):
            found = leaf(value)
        else:
            parts = _parts(value)
            found = None
            if parts is not None:
                numbers[id(value)] = number = len(numbers)
                children = [
                    (label, ("same", id(child)) if _name(value, label) in skip else visit(child))
                    for label, child in parts[1]
                ]
                if all(child[0] == "same" for _, child in children) and same(value):
                    numbers.pop(id(value))
                    assert number == len(numbers), "a kept container holds a changed one"
                else:
                    return "container", parts[0], tuple(children)
        if found is None:
            known[id(value)] = ("same", id(value))
            return known[id(value)]
        numbers[id(value)] = len(numbers)
        return "leaf", found

    return visit(tree)


def expected(
    tree: Any,
    dtype: torch.dtype,
    source: Collection[torch.dtype] = CONVERTIBLE,
    skip: frozenset[str] = frozenset(),
) -> Any:
    """The description of the converted tree: each leaf as `.to` makes it, all else the same objects."""

    def leaf(tensor: torch.Tensor) -> Any:
        return fingerprint(tensor.to(dtype)) if tensor.dtype in source and tensor.dtype != dtype else None

    return describe(tree, leaf, lambda value: True, skip)


def children(tree: Any) -> list[Any]:
    """What a container holds, in an order that its conversion keeps; nothing for anything else."""
    parts = _parts(tree)
    return [child for _, child in parts[1]] if parts else []


def objects(tree: Any) -> dict[int, Any]:
    """All tensors and containers of a tree by their ids."""
    found: dict[int, Any] = {}
    stack = [tree]
    while stack:
        value = stack.pop()
        parts = None if isinstance(value, torch.Tensor) else _parts(value)
        if id(value) not in found and (parts is not None or isinstance(value, torch.Tensor)):
            found[id(value)] = value
            stack.extend(child for _, child in (parts[1] if parts else ()))
    return found


def actual(tree: Any, result: Any, skip: frozenset[str] = frozenset()) -> Any:
    """The description of what a conversion returned: an object of the original counts as the same."""
    originals = objects(tree)
    return describe(
        result, lambda t: None if id(t) in originals else fingerprint(t), lambda value: id(value) in originals, skip
    )


def snapshot(tree: Any) -> Any:
    """The description of a tree by the identities of all that it holds: equal as long as nobody writes to it."""
    found = objects(tree)
    return [
        (id(v), None if isinstance(v, torch.Tensor) else _ids(v), getattr(v, "_version", 0)) for v in found.values()
    ]


def _ids(container: Any) -> Any:
    parts = _parts(container)
    assert parts is not None
    return repr(parts[0]), [(label, id(child)) for label, child in parts[1]]
