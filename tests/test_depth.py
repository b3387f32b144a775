"""Nests at the bound and one past it, and trees that hold themselves: RecursionError with a path, never a crash."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from compare import snapshot
from zoo import AttrDict, Box, CustomOutput, Frozen, Plain, Point, SizedList, Slotted, Store, low

import lite_ext

F32 = torch.float32
MAX_DEPTH = 1000

# One container around a child, and the step to that child in a path.
WRAPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda child: [child], "[0]"),
    "tuple": (lambda child: (child,), "[0]"),
    "dict": (lambda child: {"k": child}, "['k']"),
    "namedtuple": (lambda child: Point(1, child), ".y"),
    "OrderedDict": (lambda child: OrderedDict(k=child), "['k']"),
    "defaultdict": (lambda child: defaultdict(list, {3: child}), "[3]"),
    "list subclass": (lambda child: SizedList(1, [child]), "[0]"),
    "deque": (lambda child: deque([0, child]), "[1]"),
    "dataclass": (lambda child: Plain(child), ".x"),
    "frozen dataclass": (lambda child: Frozen(1, child), ".y"),
    "dataclass with slots": (lambda child: Slotted(child), ".x"),
    "frozenset": (lambda child: frozenset([child]), "{...}"),
    "ModelOutput": (lambda child: CustomOutput(aux=child), "['aux']"),
    "registered class": (lambda child: Box(child), "[0]"),
    "MutableMapping": (lambda child: Store("first", k=child), "['k']"),
}


def _nest(wrap: Callable[[Any], Any], depth: int) -> Any:
    tree: Any = low()
    for _ in range(depth):
        tree = wrap(tree)
    return tree


def _shortened(step: str, count: int) -> str:
    return "output" + (step * 8 + "..." + step * 4 if count > 12 else step * count)


def test_the_bound(backend: Any) -> None:
    assert backend.MAX_DEPTH == MAX_DEPTH


@pytest.mark.parametrize("name", WRAPS)
def test_at_the_bound(backend: Any, name: str) -> None:
    wrap, _ = WRAPS[name]
    result = lite_ext.convert(_nest(wrap, MAX_DEPTH), F32)
    for _ in range(MAX_DEPTH):
        result = next(iter(result)) if name == "frozenset" else _only_child(result)
    assert result.dtype == F32


def _only_child(tree: Any) -> Any:
    if isinstance(tree, Plain | Slotted):
        return tree.x
    if isinstance(tree, Frozen | Point):
        return tree.y
    if isinstance(tree, Box):
        return tree.value
    if isinstance(tree, CustomOutput):
        return tree.aux
    return (
        next(reversed(tree.values())) if isinstance(tree, dict) else tree["k"] if isinstance(tree, Store) else tree[-1]
    )


@pytest.mark.parametrize("limit", [None, 10**6], ids=["default limit", "raised limit"])
@pytest.mark.parametrize("name", WRAPS)
def test_one_past_the_bound(backend: Any, name: str, limit: int | None) -> None:
    wrap, step = WRAPS[name]
    tree = _nest(wrap, MAX_DEPTH + 1)
    before = sys.getrecursionlimit()
    if limit is not None:
        sys.setrecursionlimit(limit)
    try:
        message = f"convert: the tree is more than {MAX_DEPTH} containers deep at {_shortened(step, MAX_DEPTH)}"
        with pytest.raises(RecursionError, match=f"^{re.escape(message)}$"):
            lite_ext.convert(tree, F32)
    finally:
        sys.setrecursionlimit(before)


def test_transparent_containers_count(backend: Any) -> None:
    tree = _nest(lambda child: MappingProxyType({"k": child}), MAX_DEPTH // 2)
    result = lite_ext.convert(tree, F32)
    for _ in range(MAX_DEPTH // 2):
        result = result["k"]
    assert result.dtype == F32
    with pytest.raises(
        RecursionError, match=r"^convert: the tree is more than 1000 containers deep at output\[0\]\['k'\]"
    ):
        lite_ext.convert([tree], F32)
    user = UserDict(k=_nest(lambda child: [child], MAX_DEPTH - 1))
    with pytest.raises(RecursionError, match=r" at output\['k'\]\[0\]"):
        lite_ext.convert(user, F32)


def test_bound_at_a_low_recursion_limit(backend: Any) -> None:
    tree = _nest(lambda child: [child], MAX_DEPTH)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        assert lite_ext.convert(tree, F32) is not tree
    finally:
        sys.setrecursionlimit(before)


def test_convert_inputs_has_the_same_bound(backend: Any) -> None:
    tree = _nest(lambda child: [child], MAX_DEPTH + 1)
    for dtype in (F32, None):
        with pytest.raises(RecursionError, match="more than 1000 containers deep"):
            backend.convert_inputs(tree, dtype, 15, frozenset())


def _cycle_of_list() -> Any:
    tree: list[Any] = [low()]
    tree.append(tree)
    return tree


def _cycle_of_dict(tree: Any) -> Any:
    tree["x"], tree["k"] = low(), tree
    return tree


def _cycle_through(tree: Any, inner: list[Any]) -> Any:
    inner.append(tree)
    return tree


def _cycle_of_attribute(tree: Any, name: str) -> Any:
    object.__setattr__(tree, name, tree)
    return tree


def _through(make: Callable[[list[Any]], Any]) -> Any:
    inner = [low()]
    return _cycle_through(make(inner), inner)


def _cycle_of_proxy() -> Any:
    under: dict[str, Any] = {"x": low()}
    under["k"] = MappingProxyType(under)
    return under["k"]


def _cycle_of_sized_list() -> Any:
    tree = SizedList(1, [low()])
    tree.append(tree)
    return tree


def _cycle_of_deque() -> Any:
    tree: deque[Any] = deque([low()])
    tree.append(tree)
    return tree


def _cycle_of_output() -> Any:
    tree = CustomOutput(logits=low())
    tree["aux"] = tree
    return tree


class Node:
    """Hashable by identity, so that it can be in a set that it holds."""

    def __init__(self) -> None:
        self.child: Any = None


CYCLES: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (_cycle_of_list, "output[1]"),
    "list subclass": (_cycle_of_sized_list, "output[1]"),
    "dict": (lambda: _cycle_of_dict({}), "output['k']"),
    "OrderedDict": (lambda: _cycle_of_dict(OrderedDict()), "output['k']"),
    "defaultdict": (lambda: _cycle_of_dict(defaultdict(list)), "output['k']"),
    "AttrDict": (lambda: _cycle_of_dict(AttrDict()), "output['k']"),
    "UserDict": (lambda: _cycle_of_dict(UserDict()), "output['k']"),
    "MutableMapping": (lambda: _cycle_of_dict(Store("first")), "output['k']"),
    "mappingproxy": (_cycle_of_proxy, "output['k']"),
    "ModelOutput": (_cycle_of_output, "output['aux']"),
    "deque": (_cycle_of_deque, "output[1]"),
    "tuple": (lambda: _through(lambda inner: (1, inner)), "output[1][1]"),
    "namedtuple": (lambda: _through(lambda inner: Point(1, inner)), "output.y[1]"),
    "dataclass": (lambda: _cycle_of_attribute(Plain(low()), "y"), "output.y"),
    "frozen dataclass": (lambda: _cycle_of_attribute(Frozen(low()), "y"), "output.y"),
    "dataclass with slots": (lambda: _cycle_of_attribute(Slotted(low()), "y"), "output.y"),
    "registered class": (lambda: _cycle_of_attribute(Box(None), "value"), "output[0]"),
    "inside": (lambda: {"a": [low(), {"loss": _cycle_of_list()}]}, "output['a'][1]['loss'][1]"),
    "without tensors": (lambda: _cycle_through(inner := [], inner), "output[0]"),
}


@pytest.mark.parametrize("name", CYCLES)
def test_cycle(backend: Any, name: str) -> None:
    make, path = CYCLES[name]
    tree = make()
    before = snapshot(tree)
    with pytest.raises(RecursionError, match=f"^{re.escape(f'convert: a container holds itself at {path}')}$"):
        lite_ext.convert(tree, F32)
    assert snapshot(tree) == before


def test_cycle_through_a_set(backend: Any) -> None:
    cls = type("Node", (Node,), {})
    lite_ext.register_node(cls, lambda node: ([node.child], None), lambda context, children: cls())
    node = cls()
    node.child = {node}
    with pytest.raises(RecursionError, match=r"^convert: a container holds itself at output\[0\]\{\.\.\.\}$"):
        lite_ext.convert(node, F32)


def test_next_call_after_an_error_is_right(backend: Any) -> None:
    with pytest.raises(RecursionError):
        lite_ext.convert(_cycle_of_list(), F32)
    leaf = low()
    first, second = lite_ext.convert([leaf, leaf], F32)
    assert first is second


PROGRAM = """
import sys
import torch
import lite_ext
sys.setrecursionlimit({limit})

def attempt(tree):
    try:
        lite_ext.convert(tree, torch.float32)
    except RecursionError as error:
        print("RecursionError:", error)

for wrap in (lambda tree: [tree], lambda tree: (tree,), lambda tree: {{"k": tree}}):
    tree = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(100_000):
        tree = wrap(tree)
    attempt(tree)
cycle = [torch.ones(1, dtype=torch.bfloat16)]
cycle.append((cycle,))
attempt(cycle)
print("end")
"""


@pytest.mark.parametrize("limit", [1000, 10**6])
@pytest.mark.parametrize("name", ["native", "python"])
def test_100_000_deep_in_a_process_of_its_own(name: str, limit: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(limit=limit)],
        env={**os.environ, "LITE_EXT_BACKEND": name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    deep = "RecursionError: convert: the tree is more than 1000 containers deep at "
    wanted = [deep + _shortened(step, 1000) for step in ("[0]", "[0]", "['k']")]
    assert done.stdout.splitlines() == [
        *wanted,
        "RecursionError: convert: a container holds itself at output[1][0]",
        "end",
    ]
