"""What stays behind after many conversions: nothing. Each container, each error, also where rebuilding fails halfway."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import objects
from test_hostile import OnDeath
from zoo import TREES, Box, Point, Store, low

import lite_ext

F32 = torch.float32
ROUNDS = 200  # of one tree, between two looks


class Stops(torch.Tensor):
    """Refuses to be converted."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "to":
            raise NotImplementedError("stays")
        return super().__torch_function__(function, types, args, kwargs or {})


class Broken(Box):
    """Cannot be made again."""


class Forgetful(Store):
    """Does not keep what is written to it."""

    def __setitem__(self, key: str, value: Any) -> None:
        pass


def _raise(*arguments: Any) -> Any:
    raise ValueError("broken")


def _cycle() -> Any:
    tree: list[Any] = [low()]
    tree.append({"k": tree})
    return tree


def _deep() -> Any:
    tree: Any = low()
    for _ in range(1001):
        tree = [tree]
    return tree


ERRORS: dict[str, Callable[[], Any]] = {
    "rebuilding": lambda: [low(), {"a": (low(), Point(low(), 1))}, Broken(low()), [low()]],
    "a leaf": lambda: [low(), low().as_subclass(Stops), {"k": low()}],
    "a cycle": _cycle,
    "too deep": _deep,
    "a mapping": lambda: [low(), Forgetful("first", a=low())],
}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    lite_ext.register_node(Broken, lambda box: ([box.value], None), _raise)  # with both backends


def _attempt(tree: Any) -> None:
    try:
        lite_ext.convert(tree, F32)
    except (TypeError, RecursionError, NotImplementedError):
        return


def _counts(tree: Any) -> list[int]:
    return [sys.getrefcount(value) for value in objects(tree).values()]


@pytest.mark.parametrize("name", [*TREES, *ERRORS])
def test_counts_of_references_and_objects(backend: Any, name: str) -> None:
    tree = (TREES.get(name) or ERRORS[name])()
    rounds = ROUNDS if len(objects(tree)) < 100 else 5
    _attempt(tree)
    gc.collect()
    before, known = _counts(tree), len(gc.get_objects())
    for _ in range(rounds):
        _attempt(tree)
    gc.collect()
    assert _counts(tree) == before
    assert len(gc.get_objects()) - known < rounds / 10  # caches of others may grow by a few


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_keeps_nothing_alive(backend: Any, name: str) -> None:
    tree = ERRORS[name]()
    leaves = [weakref.ref(value) for value in objects(tree).values() if isinstance(value, torch.Tensor)]
    assert leaves
    _attempt(tree)
    del tree
    gc.collect()
    assert not any(leaf() is not None for leaf in leaves)


def test_graphs_die_with_the_outputs(backend: Any) -> None:
    root = torch.ones(3, requires_grad=True)
    died: list[int] = []
    middle = root * 2
    middle.grad_fn.metadata["watch"] = OnDeath(lambda: died.append(1))  # type: ignore[union-attr]
    outputs = lite_ext.convert({"a": [middle.to(torch.bfloat16)], "b": middle}, torch.float64)
    del middle
    gc.collect()
    assert not died
    del outputs
    gc.collect()
    assert died == [1]
    assert sys.getrefcount(root) == 2


def _resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not say how much memory is in use")
@pytest.mark.skipif("LITE_EXT_SANITIZED" in os.environ, reason="the address sanitizer keeps freed memory for a while")
@pytest.mark.parametrize(
    "name", ["ModelOutput", "deque subclass", "MutableMapping", "frozen dataclass with slots", *ERRORS]
)
def test_resident_memory_is_flat(name: str) -> None:
    tree = (TREES.get(name) or ERRORS[name])()
    for _ in range(500):
        _attempt(tree)
    gc.collect()
    before = _resident()
    for _ in range(3000):
        _attempt(tree)
    gc.collect()
    assert _resident() - before < 3000 * 200  # less than any object of a call, were one kept in each
