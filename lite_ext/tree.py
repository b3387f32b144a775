"""The walk in plain Python: the oracle of the tests, what ``torch.compile`` traces, and ``LITE_EXT_BACKEND=python``.

A tree becomes leaves and a post-order list of nodes; then leaves become containers again. Both are loops over a stack
of our own, so that no tree can exhaust the interpreter's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from lite_ext.containers import Children, Kind, kind_of, registry
from lite_ext.dtypes import DEFAULT_SOURCE_MASK, FLOATING_BITS

MAX_DEPTH = 1000
"""A nest of this many containers is converted, one more is refused, whatever ``sys.setrecursionlimit`` says."""

_PATH_HEAD, _PATH_TAIL = 8, 4  # the steps shown of a long path


class _Leaf:
    """A tensor to convert."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self.result: Any = None


class _Place:
    """A container and the way to it. What becomes of it is held elsewhere, so that nothing here is a cycle."""

    def __init__(self, source: Any, kind: Kind, parent: _Place | None) -> None:
        self.source = source
        self.kind = kind
        self.parent: _Place | None = parent
        self.index: int = 0 if parent is None else parent.position
        self.children = Children(())
        self.position: int = -1

    def step(self, index: int) -> str:
        names, keys = self.children.names, self.children.keys
        if self.kind.step is not None:
            return self.kind.step
        if names is None:
            return f"[{index}]"
        return f"[{_text(repr, names[index])}]" if index < keys else f".{names[index]}"


class _Node:
    """A container of which a child changes."""

    def __init__(self, place: _Place, slots: dict[int, _Leaf | _Node]) -> None:
        self.place = place
        self.slots = slots
        self.result: Any = None


def _text(function: Callable[[Any], str], name: Any) -> str:
    with suppress(Exception):  # the message must come out whatever a key's repr does
        return function(name)
    return f"<{type(name).__name__}>"


def _path(parent: _Place | None, index: int, root: str = "output") -> str:
    steps: list[str] = []
    place = parent
    while place is not None:
        steps.append(place.step(index))
        index, place = place.index, place.parent
    steps.reverse()
    if len(steps) > _PATH_HEAD + _PATH_TAIL:
        steps[_PATH_HEAD:-_PATH_TAIL] = ["..."]
    return root + "".join(steps)


def _cannot(verb: str, source: Any, path: str, error: Exception) -> TypeError:
    name = type(source).__qualname__
    return TypeError(f"convert: cannot {verb} {name} at {path}: {error}; use lite_ext.register_node to say how")


# An object that was met, and what became of it; a place, as long as the walk is in it.
_Met: TypeAlias = "tuple[Any, _Leaf | _Node | _Place | None]"


class _Walk:
    def __init__(self, mask: int, skip: frozenset[str]) -> None:
        self.leaves: list[_Leaf] = []
        self.nodes: list[_Node] = []
        self.seen: dict[torch.dtype, tuple[_Place | None, int]] = {}  # where each dtype was met first
        self.root: _Leaf | _Node | None = None
        self._mask = mask
        self._skip = skip
        self._stack: list[tuple[_Place, dict[int, _Leaf | _Node]]] = []
        # It keeps the objects alive, for an address may otherwise be used twice.
        self._memo: dict[int, _Met] = {}
        # A compiler guards on what id() says of an input, so that every call would be compiled again.
        self._compiling = torch.compiler.is_compiling()
        self._traced_leaves: dict[torch.Tensor, _Leaf] = {}

    def run(self, tree: Any) -> None:
        self._visit(tree)
        while self._stack:
            place, slots = self._stack[-1]
            values, names = place.children.values, place.children.names
            place.position += 1
            if place.position == len(values):
                self._stack.pop()
                self._close(place, slots)
                continue
            name = None if names is None else names[place.position]
            if not (isinstance(name, str) and name in self._skip):
                self._visit(values[place.position])

    def _visit(self, child: Any) -> None:
        cls = type(child)  # the real type decides, never __class__, which an object may lie about
        if issubclass(cls, torch.Tensor):
            self._visit_leaf(child)
            return
        try:
            kind = None if cls in (tuple, list, dict) and not child else kind_of(cls)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a class may answer for itself
            raise _cannot("read", child, _path(*self._here()), error) from error
        if kind is None:
            return
        # Nor can it compare containers by identity; one that is shared is then rebuilt for each place that has it.
        met = None if self._compiling else self._memo.get(id(child))
        if met is not None:
            change = met[1]
            if isinstance(change, _Place):
                raise RecursionError(f"convert: a container holds itself at {_path(*self._here())}")
            self._deliver(change)
            return
        if len(self._stack) >= MAX_DEPTH:
            path = _path(*self._here())
            raise RecursionError(f"convert: the tree is more than {MAX_DEPTH} containers deep at {path}")
        place = _Place(child, kind, self._here()[0])
        try:
            place.children = kind.children(child)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            raise _cannot("read", child, _path(*self._here()), error) from error
        if not self._compiling:
            self._memo[id(child)] = (child, place)
        self._stack.append((place, {}))

    def _visit_leaf(self, leaf: torch.Tensor) -> None:
        bit = FLOATING_BITS.get(leaf.dtype, 0)
        if bit & DEFAULT_SOURCE_MASK and leaf.dtype not in self.seen:
            self.seen[leaf.dtype] = self._here()
        if not bit & self._mask:
            return
        met = self._traced_leaves.get(leaf) if self._compiling else self._memo.get(id(leaf), (leaf, None))[1]
        if met is None:
            met = _Leaf(leaf)
            if self._compiling:
                self._traced_leaves[leaf] = met
            else:
                self._memo[id(leaf)] = (leaf, met)
            self.leaves.append(met)
        self._deliver(met)

    def _close(self, place: _Place, slots: dict[int, _Leaf | _Node]) -> None:
        change = None
        if slots:
            if place.kind.reread:
                self._check_unchanged(place, slots)
            change = _Node(place, slots)
            self.nodes.append(change)
        if not self._compiling:
            self._memo[id(place.source)] = (place.source, change)
        self._deliver(change)

    def _deliver(self, change: Any) -> None:
        """Hand what becomes of the child to the container that is open, if there is one."""
        if not self._stack:
            self.root = change
        elif change is not None:
            place, slots = self._stack[-1]
            slots[place.position] = change

    def _check_unchanged(self, place: _Place, slots: dict[int, _Leaf | _Node]) -> None:
        now, before = place.kind.children(place.source).values, place.children.values
        if len(now) != len(before) or any(now[index] is not before[index] for index in slots):
            name, path = type(place.source).__name__, _path(place.parent, place.index)
            raise RuntimeError(f"convert: a {name} was changed while it was converted at {path}")

    def _here(self) -> tuple[_Place | None, int]:
        if not self._stack:
            return None, 0
        place, _ = self._stack[-1]
        return place, place.position


class Passthrough:
    """Which tensor each converted input was made of."""

    def __init__(self, leaves: Iterable[_Leaf]) -> None:
        # An inference tensor has no version counter, so nobody could tell whether it was written to.
        self._originals = {
            id(leaf.result): (leaf.result, leaf.source, leaf.result._version)
            for leaf in leaves
            if not leaf.result.is_inference()
        }

    def original(self, leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what ``leaf`` was converted from, if it has ``dtype`` and ``leaf`` was not written to since."""
        converted, original, version = self._originals.get(id(leaf), (None, leaf, -1))
        return original if converted is leaf and leaf._version == version and original.dtype == dtype else None


def _rebuild(walk: _Walk, tree: Any) -> Any:
    for node in walk.nodes:
        place = node.place
        values = list(place.children.values)
        for index, change in node.slots.items():
            values[index] = change.result
        try:
            node.result = place.kind.rebuild(place.source, place.children, values, node.slots)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            raise _cannot("rebuild", place.source, _path(place.parent, place.index), error) from error
    return tree if walk.root is None else walk.root.result


def convert(
    tree: Any,
    dtype: torch.dtype,
    source_mask: int,
    skip: frozenset[str],
    passthrough: Passthrough | None = None,
    /,
) -> Any:
    """Return ``tree`` with the tensors whose dtypes are in ``source_mask`` in ``dtype``.

    Args:
        tree: As for :func:`lite_ext.convert`.
        dtype: A floating dtype.
        source_mask: The bits of :data:`lite_ext.dtypes.FLOATING_BITS` of the dtypes to convert.
        skip: Names whose subtrees are returned as they are.
        passthrough: From :func:`convert_inputs`; a converted input is replaced by its original where that is the same.
    """
    walk = _Walk(source_mask & ~FLOATING_BITS[dtype], skip)
    walk.run(tree)
    for leaf in walk.leaves:
        original = passthrough.original(leaf.source, dtype) if passthrough is not None else None
        leaf.result = leaf.source.to(dtype) if original is None else original
    return _rebuild(walk, tree)


def convert_inputs(
    tree: Any, dtype: torch.dtype | None, source_mask: int, skip: frozenset[str], /
) -> tuple[Any, int, Passthrough | None]:
    """Return ``tree`` converted, the mask of the convertible dtypes met in it, and what :func:`convert` may undo.

    Args:
        tree, source_mask, skip: As for :func:`convert`.
        dtype: ``None`` converts nothing and only looks.
    """
    walk = _Walk(source_mask & ~FLOATING_BITS[dtype] if dtype is not None else 0, skip)
    walk.run(tree)
    for leaf in walk.leaves:
        leaf.result = leaf.source.to(dtype)
    seen = sum(FLOATING_BITS[met] for met in walk.seen)
    # A compiler cannot trace the questions about versions; there, a passed-through input is cast back.
    remembers = bool(walk.leaves) and not torch.compiler.is_compiling()
    return _rebuild(walk, tree), seen, Passthrough(walk.leaves) if remembers else None


def floating_paths(tree: Any, skip: frozenset[str], root: str = "output") -> dict[torch.dtype, str]:
    """Return the path of the first tensor of each convertible dtype outside the skipped subtrees, for messages."""
    walk = _Walk(0, skip)
    walk.run(tree)
    return {dtype: _path(parent, index, root) for dtype, (parent, index) in walk.seen.items()}


def cast_tensors(tensors: list[Any], dtype: torch.dtype, /) -> list[Any]:
    """Return a list of ``tensors`` in which those of convertible dtypes are in ``dtype``."""
    for index, tensor in enumerate(tensors):
        if not issubclass(type(tensor), torch.Tensor):
            got = f"{tensor!r} of type {type(tensor).__name__}"
            raise TypeError(f"cast_tensors: tensors[{index}] must be a tensor, got {got}")
    return list(convert(tensors, dtype, DEFAULT_SOURCE_MASK, frozenset()))


def register_node(cls: type, flatten: Callable[[Any], Any], unflatten: Callable[[Any, list[Any]], Any], /) -> None:
    """Make instances of exactly ``cls`` containers; see :func:`lite_ext.register_node`."""
    if not isinstance(cls, type):
        raise TypeError(f"register_node: cls must be a class, got {cls!r}")
    if issubclass(cls, torch.Tensor):
        raise TypeError(f"register_node: {cls!r} is a tensor class, always a leaf")
    if cls in (tuple, list, dict, set, frozenset):
        raise TypeError(f"register_node: {cls!r} is a container already")
    for name, function in (("flatten", flatten), ("unflatten", unflatten)):
        if not callable(function):
            raise TypeError(f"register_node: {name} must be callable, got {function!r}")
    if cls in registry:
        raise ValueError(f"register_node: {cls!r} is registered already")
    registry[cls] = (flatten, unflatten)
