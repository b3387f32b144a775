"""Trees and leaves far beyond what anybody uses."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo import low

import lite_ext

F32 = torch.float32
MILLION = 10**6
SMALLEST_STACK = 256 * 1024  # bytes


def test_a_million_leaves(backend: Any) -> None:
    leaf = low()
    leaves = [leaf] * (MILLION // 2) + [low() for _ in range(MILLION // 20)]
    result = lite_ext.convert(leaves, F32)
    assert len(result) == len(leaves)
    assert len({id(leaf) for leaf in result}) == MILLION // 20 + 1
    assert all(leaf.dtype == F32 for leaf in result)


def test_a_million_leaves_of_their_own() -> None:
    leaves = list(torch.zeros(MILLION, dtype=torch.bfloat16).unbind())
    result = lite_ext.convert(tuple(leaves), F32)
    assert len({leaf.data_ptr() for leaf in result}) == MILLION
    assert all(leaf.dtype == F32 for leaf in result)


@pytest.mark.parametrize("make", [list, dict, set, lambda: [[]], lambda: ({},), lambda: {"a": []}])
def test_a_million_empty_containers(make: Callable[[], Any]) -> None:
    tree = [make() for _ in range(MILLION)]
    assert lite_ext.convert(tree, F32) is tree
    tree.append(low())
    result = lite_ext.convert(tree, F32)
    assert all(new is old for new, old in zip(result[:-1], tree[:-1], strict=True))
    assert result[-1].dtype == F32


def test_ten_gigabytes(backend: Any) -> None:
    elements = 5 * 2**30
    leaf = torch.empty(elements, dtype=torch.bfloat16, device="meta")
    out = lite_ext.convert([leaf], F32)[0]
    assert (out.device.type, out.shape, out.dtype) == ("meta", (elements,), F32)
    with FakeTensorMode():
        fake = torch.empty(elements, dtype=torch.bfloat16)
        out = lite_ext.convert([fake], F32)[0]
    assert (type(out), out.shape, out.dtype) == (type(fake), (elements,), F32)


@pytest.mark.parametrize("tree", ["deep", "cycle", "wide", "error"])
def test_on_a_thread_with_a_small_stack(backend: Any, tree: str) -> None:
    cycle: list[Any] = [low()]
    cycle.append(("k", {"again": cycle}))
    deep: Any = low()
    for _ in range(10**5 if tree == "deep" else 0):
        deep = [deep]
    made = {"deep": deep, "cycle": cycle, "wide": [low() for _ in range(1000)], "error": [object, {}, [cycle]]}[tree]
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(lite_ext.convert(made, F32))
        except RecursionError as error:
            outcome.append(error)

    before = threading.stack_size(SMALLEST_STACK)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    if tree == "wide":
        assert all(leaf.dtype == F32 for leaf in outcome[0])
    else:
        assert isinstance(outcome[0], RecursionError)
        assert str(outcome[0]).startswith("convert: ")
    while isinstance(deep, list) and deep:  # one by one: the interpreter's own way down is as deep as the tree
        deep = deep.pop()


def test_a_grown_tree_dies_quietly() -> None:
    """Outputs of a tree at the bound are freed on the smallest stack."""
    code = f"""
import threading, torch, lite_ext
tree = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
for _ in range(1000):
    tree = (tree,)
threading.stack_size({SMALLEST_STACK})
thread = threading.Thread(target=lambda: lite_ext.convert(tree, torch.float32))
thread.start()
thread.join()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
