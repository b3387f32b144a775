"""The fuzzer finds what it should, shrinks it, and draws the same cases for the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fuzz
import pytest
import run
import torch

import lite_ext

SEED = 3
CASES = range(400)


def test_no_difference(backend: Any) -> None:
    assert run.run(SEED, CASES) == ""


def test_the_same_seed_draws_the_same_cases() -> None:
    first = [run.generate(SEED, number) for number in CASES]
    assert first == [run.generate(SEED, number) for number in CASES]
    assert first != [run.generate(SEED + 1, number) for number in CASES]
    assert len({repr(case) for case in first}) > len(CASES) * 0.9


def test_every_kind_is_drawn() -> None:
    kinds: set[str] = set()

    def look(tree: fuzz.Tree) -> None:
        kinds.add(tree[0] if tree[0] != "layout" else tree[2])
        for child in tree[1] if isinstance(tree[1], list) else ():
            look(child)

    for number in range(3000):
        look(run.generate(SEED, number)["tree"])
    assert kinds >= {*fuzz.CONTAINERS, *fuzz.LEAVES, "sized", "again", "kept leaf", "kept"}


_right = lite_ext.convert


def _shares_storages(tree: Any, *arguments: Any, **options: Any) -> Any:
    """Cuts the floating leaves of a list from one storage."""
    result = _right(tree, *arguments, **options)
    if type(result) is list and len(result) > 1 and all(type(leaf) is torch.Tensor for leaf in result):
        old = [leaf for leaf, before in zip(result, tree, strict=True) if leaf is not before and leaf.dim() == 1]
        if len(old) > 1 and not any(leaf.requires_grad for leaf in old):
            parts = iter(torch.cat(old).split([len(leaf) for leaf in old]))
            return [next(parts) if any(leaf is one for one in old) else leaf for leaf in result]
    return result


def _wrong_at_the_end(tree: Any, dtype: torch.dtype, **options: Any) -> Any:
    """Loses the last element of a leaf of more than 16."""
    result = _right(tree, dtype, **options)
    leaves = result if isinstance(result, list | tuple) else [result]
    for leaf in leaves:
        if type(leaf) is torch.Tensor and leaf.is_contiguous() and leaf.numel() > 16 and leaf.dtype == dtype:
            with torch.no_grad():
                leaf.view(-1)[-1] = 77
    return result


def _forgets_skip(tree: Any, dtype: torch.dtype, *, source: Any, skip: Any) -> Any:
    return _right(tree, dtype, source=source)


def _breaks_the_graph(tree: Any, dtype: torch.dtype, **options: Any) -> Any:
    with torch.no_grad():
        return _right(tree, dtype, **options)


def _copies_unchanged(tree: Any, *arguments: Any, **options: Any) -> Any:
    result = _right(tree, *arguments, **options)
    return list(result) if type(result) is list else result


FAULTS: tuple[Callable[..., Any], ...] = (
    _shares_storages,
    _wrong_at_the_end,
    _forgets_skip,
    _breaks_the_graph,
    _copies_unchanged,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]) -> None:
    monkeypatch.setattr(fuzz.lite_ext, "convert", fault)
    found = next((number for number in range(5000) if run.failure(run.generate(SEED, number))), None)
    assert found is not None
    report = run.run(SEED, range(found, found + 1))
    assert f"make fuzz SEED={SEED} CASE={found}" in report
    code = report[report.rindex("\nfuzz.check(") : report.index("reproduce it")]
    assert code.count("sized") + code.count("layout") <= 2, code
    with pytest.raises((AssertionError, RuntimeError)):
        exec(code, {"fuzz": fuzz})
    monkeypatch.undo()
    exec(code, {"fuzz": fuzz})
