"""Random trees, leaves and operations, held against `Tensor.to` leaf by leaf.

A case is made of plain values: the arguments of `check`. A failing one is shrunk and printed as a call of it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias

import torch
import zoo_classes as classes
from compare import CONVERTIBLE, actual, bits, children, expected, objects, snapshot
from torch import nn
from zoo import KEPT
from zoo_leaves import KEPT_LEAVES, LEAVES

import lite_ext

Tree: TypeAlias = tuple[Any, ...]
Case: TypeAlias = dict[str, Any]

FLOATING = {str(dtype).removeprefix("torch."): dtype for dtype in CONVERTIBLE}
SKIPPABLE = ("x", "y", "a", "cache", "logits")
LARGEST = 1_000_000
SIZES = sorted({max(0, edge + around) for edge in (0, 8, 16, 32, 64, 512, 4096, 8192) for around in (-1, 0, 1)})
RARE_SIZES = [65535, 65536, 65537, 131073, LARGEST]
MOST_ATTEMPTS = 5000  # to shrink a case
_RARE = 1 / 400  # of the leaves are large
_values = {
    dtype: torch.arange(LARGEST + 8, dtype=torch.float64).remainder(251).sub(99).to(dtype) for dtype in CONVERTIBLE
}


def _named(children: list[Any]) -> dict[str, Any]:
    return dict(zip(itertools.chain(SKIPPABLE, map(str, itertools.count())), children))  # noqa: B905


def _two(make: Callable[[Any, Any], Any]) -> Callable[[list[Any]], Any]:
    return lambda children: make(*[*children, None, None][:2])


def _hashable(children: list[Any]) -> list[Any]:
    """What a set can hold; its elements are told apart by their first values, which a conversion must not make equal."""
    return [torch.full((2,), float(at), dtype=torch.bfloat16) for at, _ in enumerate(children)]


def _attrs(children: list[Any]) -> Any:
    made = classes.AttrDict()
    made.update({name: child for name, child in _named(children).items() if name.isidentifier()})
    return made


CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "dict": _named,
    "dict with other keys": lambda children: {(at, "key"): child for at, child in enumerate(children)},
    "OrderedDict": lambda children: OrderedDict(_named(children)),
    "defaultdict": lambda children: defaultdict(list, _named(children)),
    "Counter": lambda children: Counter(_named(children)),
    "UserDict": lambda children: UserDict(_named(children)),
    "mappingproxy": lambda children: MappingProxyType(_named(children)),
    "set": lambda children: set(_hashable(children)),
    "frozenset": lambda children: frozenset(_hashable(children)),
    "deque": lambda children: deque(children, maxlen=7),
    "Point": _two(classes.Point),
    "Scaled": lambda children: classes.Scaled((*children, None)[0]),
    "LabelledTuple": lambda children: classes.LabelledTuple("label", children),
    "SizedList": lambda children: classes.SizedList(3, children),
    "NamedDict": lambda children: classes.NamedDict("label", **_named(children)),
    "AttrDict": _attrs,
    "LabelledDeque": lambda children: classes.LabelledDeque("label", children),
    "Settings": lambda children: classes.Settings("label", **_named(children)),
    "Store": lambda children: classes.Store("label", **_named(children)),
    "SlottedStore": lambda children: classes.SlottedStore("label", **_named(children)),
    "CopyingStore": lambda children: classes.CopyingStore("label", **_named(children)),
    "Plain": _two(classes.Plain),
    "Frozen": _two(classes.Frozen),
    "Slotted": _two(classes.Slotted),
    "FrozenSlotted": _two(classes.FrozenSlotted),
    "Inherited": lambda children: classes.Inherited(*[*children, None, None, None][:2], z=(*children, 1)[-1]),
    "Guarded": lambda children: classes.Guarded((*children, None)[0]),
    "Record": _two(classes.Record),
    # Not by its first field, of which a ModelOutput makes its items.
    "CustomOutput": lambda children: classes.CustomOutput(**dict(zip(("logits", "aux"), children))),  # noqa: B905
    "Box": lambda children: classes.Box((*children, None)[0]),
}


_DTYPES = sorted(FLOATING)
_CONTAINERS = sorted(CONTAINERS)
_LAYOUTS = sorted(LEAVES)
_KEPT_LEAVES = sorted(KEPT_LEAVES)
_KEPT = sorted(KEPT.keys() - {"generator"})  # which a wrapper converts


def _sized(dtype: torch.dtype, size: int, offset: int, step: int) -> torch.Tensor:
    return _values[dtype][: (size + offset) // step * step].clone()[offset::step]


# ---------------------------------------------------------------- what a case is made of


class Generator:
    """Draws cases. A tree is a tuple: what it is, and of what; a container holds the trees of its children."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def case(self) -> Case:
        draw = self._random
        self._left = draw.choice([1, 8, 16, 16, 40, 40, 80])
        return {
            "tree": self._tree(0),
            "dtype": draw.choice(_DTYPES),
            "source": None if draw.random() < 0.75 else draw.sample(_DTYPES, draw.randrange(4)),
            "skip": [] if draw.random() < 0.75 else draw.sample(SKIPPABLE, draw.randrange(1, 3)),
            "mode": draw.choice(["plain", "plain", "plain", "no_grad", "inference_mode"]),
            "policy": draw.choice(["convert", "convert", "convert", "convert", "dtype", "default", "input", "keep"]),
        }

    def _tree(self, depth: int) -> Tree:
        draw = self._random
        self._left -= 1
        if self._left > 0 and draw.random() < (0.9, 0.5, 0.5, 0.4)[min(depth, 3)]:
            count = min(draw.choice([0, 1, 2, 2, 3, 3, 4, 6, 12]), self._left)
            return draw.choice(_CONTAINERS), [self._tree(depth + 1) for _ in range(count)]
        chance = draw.random()
        if chance < 0.08:
            return "again", draw.randrange(30)
        if chance < 0.14:
            return "kept leaf", draw.choice(_KEPT_LEAVES)
        if chance < 0.20:
            return "kept", draw.choice(_KEPT)
        graph = draw.choice(["", "", "", "leaf", "inner", "view"])
        if chance < 0.45:
            return "layout", draw.choice(_DTYPES), draw.choice(_LAYOUTS), graph
        offset, step = draw.choice([0, 0, 0, 1, 2, 3]), draw.choice([1, 1, 1, 1, 2])
        return "sized", draw.choice(_DTYPES), self._size(), offset, step, graph

    def _size(self) -> int:
        draw = self._random
        if draw.random() < _RARE:
            return draw.choice(RARE_SIZES)
        return draw.randrange(40) if draw.random() < 0.7 else draw.choice(SIZES)


def simpler(case: Case) -> Iterator[Case]:
    """The cases that are one step simpler, those that leave out most first."""
    for tree in _simpler_tree(case["tree"]):
        yield {**case, "tree": tree}
    for name, plain in (("source", None), ("skip", []), ("mode", "plain"), ("policy", "convert")):
        if case[name] != plain:
            yield {**case, name: plain}
    for name in case["skip"] if len(case["skip"]) > 1 else ():
        yield {**case, "skip": [other for other in case["skip"] if other != name]}


def _simpler_tree(tree: Tree) -> Iterator[Tree]:
    match tree:
        case ("sized", dtype, size, offset, step, graph):
            for less in (0, 1, size // 2, size - 1):
                if 0 <= less < size:
                    yield "sized", dtype, less, offset, step, graph
            if (offset, step) != (0, 1):
                yield "sized", dtype, size, 0, 1, graph
            if graph:
                yield "sized", dtype, size, offset, step, ""
        case ("layout", dtype, name, graph):
            yield "sized", dtype, 3, 0, 1, graph
            if graph:
                yield "layout", dtype, name, ""
        case (str(name), list(children)):
            yield from children
            chunk = len(children)
            while chunk:  # many at once first
                for at in range(0, len(children), chunk):
                    yield name, children[:at] + children[at + chunk :]
                chunk //= 2
            for at, child in enumerate(children):
                for less in _simpler_tree(child):
                    yield name, [*children[:at], less, *children[at + 1 :]]
            if name != "list":
                yield "list", children


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The simplest case found on the way down from `case` that still fails, after at most so many attempts."""
    attempts = 0
    found: Case | None = case
    while found is not None:
        case, found = found, None
        for less in simpler(case):
            attempts += 1
            if attempts > MOST_ATTEMPTS:
                return case
            if fails(less):
                found = less
                break
    return case


class _Builder:
    def __init__(self) -> None:
        self.made: list[Any] = []
        self.roots: list[torch.Tensor] = []

    def build(self, recipe: Any) -> Any:
        match recipe:
            case ("sized", dtype, size, offset, step, graph):
                made = self._graph(_sized(FLOATING[dtype], size, offset, step), graph)
            case ("layout", dtype, name, graph):
                made = LEAVES[name](FLOATING[dtype])
                plain = type(made) is torch.Tensor and made.layout == torch.strided and made.device.type == "cpu"
                made = self._graph(made, graph) if plain and not made.requires_grad else made
            case ("again", index):
                return self.made[index % len(self.made)] if self.made else None
            case ("kept leaf", name):
                made = KEPT_LEAVES[name]()
            case ("kept", name):
                made = KEPT[name]()
            case (name, children):
                made = CONTAINERS[name]([self.build(child) for child in children])
            case _:
                raise AssertionError(recipe)
        self.made.append(made)
        return made

    def _graph(self, values: torch.Tensor, graph: str) -> torch.Tensor:
        if not graph:
            return values
        root = values.requires_grad_()
        self.roots.append(root)
        match graph:
            case "inner":
                return root * 2
            case "view":
                return (root * 2).view_as(root)
        return root


# ---------------------------------------------------------------- the check


class _Returns(nn.Module):
    def __init__(self, tree: Any) -> None:
        super().__init__()
        # Out of the sight of nn.Module, which would take a Parameter for its own.
        self.tree = SimpleNamespace(tree=tree)

    def forward(self, x: torch.Tensor) -> Any:
        return self.tree.tree


def _run(tree: Any, dtype: torch.dtype, source: Collection[torch.dtype], skip: frozenset[str], policy: str) -> Any:
    """The converted tree by one of the public ways, and the dtype that it should be in."""
    if policy == "convert":
        return lite_ext.convert(tree, dtype, source=source, skip=skip), dtype
    output_dtype = dtype if policy == "dtype" else policy
    wanted = {"default": torch.float32, "input": torch.float16, "dtype": dtype, "keep": None}[policy]
    wrapper = lite_ext.LiteModule(_Returns(tree), output_dtype=output_dtype, source=source, skip_outputs=skip)  # type: ignore[arg-type]
    return wrapper(torch.ones(1, dtype=torch.float16)), wanted


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type == "cpu"


def check(tree: Any, dtype: str, source: list[str] | None, skip: list[str], mode: str, policy: str) -> None:
    """Raise AssertionError where a conversion differs from what `Tensor.to` does with each leaf."""
    builder = _Builder()
    made = builder.build(tree)
    sources = CONVERTIBLE if source is None else tuple(FLOATING[name] for name in source)
    names = frozenset(skip)
    modes: dict[str, Any] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with modes.get(mode, nullcontext)():
        before = snapshot(made)
        result, wanted = _run(made, FLOATING[dtype], sources, names, policy)
        assert snapshot(made) == before, "the caller's tree was changed"
        if wanted is None:
            assert result is made
            return
        assert actual(made, result, names) == expected(made, wanted, sources, names)
        converted = [(old, new) for old, new in _converted(made, result) if _is_plain(new)]
        _check_storages(made, converted)
    _check_graphs([(old, new) for old, new in converted if new.requires_grad], builder.roots, wanted)


def _converted(tree: Any, result: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The leaves that were converted, each with what became of it: the trees have the same shape."""
    seen: dict[tuple[int, int], Any] = {}
    stack = [(tree, result)]
    while stack:
        old, new = stack.pop()
        if old is new or (id(old), id(new)) in seen:
            continue
        seen[id(old), id(new)] = (old, new)
        if not isinstance(old, torch.Tensor):
            stack.extend(zip(children(old), children(new), strict=True))
    return [(old, new) for old, new in seen.values() if isinstance(old, torch.Tensor)]


def _check_storages(tree: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    taken = {
        old.untyped_storage()._cdata
        for old in objects(tree).values()
        if isinstance(old, torch.Tensor) and _is_plain(old)
    }
    for old, new in pairs:
        storage, alone = new.untyped_storage(), old.to(new.dtype)
        assert storage._cdata not in taken, "a storage is shared"
        taken.add(storage._cdata)
        assert storage.nbytes() == alone.untyped_storage().nbytes()
        assert new.storage_offset() == alone.storage_offset()
        assert new.is_inference() or new._version == alone._version
    written = [new for _, new in pairs if not new.is_inference() and new.numel()]
    if written:
        versions = [new._version for new in written]
        copies = [bits(new) for new in written[1:]]
        with torch.no_grad():
            written[0].add_(1)
        assert [new._version for new in written] == [versions[0] + 1, *versions[1:]]
        assert all(torch.equal(bits(new), copy) for new, copy in zip(written[1:], copies, strict=True))


def _check_graphs(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], roots: list[torch.Tensor], dtype: torch.dtype
) -> None:
    functions = [new.grad_fn for _, new in pairs]
    assert len(set(map(id, functions))) == len(functions), "two leaves share a node of the graph"
    inputs = [root for root in roots if root.requires_grad]
    if not pairs or not inputs:
        return
    weights = [_values[torch.float32][: new.numel()].to(new.dtype).reshape(new.shape) for _, new in pairs]
    ours = torch.autograd.grad([new for _, new in pairs], inputs, weights, retain_graph=True, allow_unused=True)
    with torch.enable_grad():
        alone = [old.to(dtype) for old, _ in pairs]
    theirs = torch.autograd.grad(alone, inputs, weights, allow_unused=True)
    for grad, oracle in zip(ours, theirs, strict=True):
        assert (grad is None) == (oracle is None)
        if grad is not None and oracle is not None:
            assert grad.dtype == oracle.dtype
            assert grad.stride() == oracle.stride()
            assert torch.equal(bits(grad), bits(oracle))
