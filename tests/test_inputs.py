"""`convert_inputs`: what was seen on the way in, and the way back of an input that passed through unchanged."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from compare import actual, expected
from zoo import TREES, Plain, low

from lite_ext.dtypes import FLOATING_BITS
from lite_ext.tree import floating_paths

F32, BF16 = torch.float32, torch.bfloat16
NO_NAMES: frozenset[str] = frozenset()


def mask(*dtypes: torch.dtype) -> int:
    return sum(FLOATING_BITS[dtype] for dtype in dtypes)


@pytest.mark.parametrize("name", TREES)
def test_converts_like_convert(backend: Any, name: str) -> None:
    tree = TREES[name]()
    wanted = expected(tree, F32)
    result, seen, passthrough = backend.convert_inputs(tree, F32, 15, NO_NAMES)
    assert actual(tree, result) == wanted
    assert seen & mask(BF16)
    assert passthrough is not None


@pytest.mark.parametrize("name", TREES)
def test_only_looks_without_a_dtype(backend: Any, name: str) -> None:
    tree = TREES[name]()
    result, seen, passthrough = backend.convert_inputs(tree, None, 15, NO_NAMES)
    assert result is tree
    assert seen & mask(BF16)
    assert passthrough is None


def test_seen_is_about_all_convertible_dtypes_outside_skipped_subtrees(backend: Any) -> None:
    tree = {
        "image": torch.ones(1),
        "ids": torch.arange(2),
        "complex": torch.ones(1, dtype=torch.complex64),
        "scale": torch.ones(1).to(torch.float8_e4m3fn),
        "cache": [low()],
        "deep": (Plain(torch.ones(1, dtype=torch.float64)),),
    }
    for dtype, source in ((F32, 15), (BF16, 0), (None, 15), (torch.float16, mask(torch.float16))):
        _, seen, _ = backend.convert_inputs(tree, dtype, source, frozenset(["cache"]))
        assert seen == mask(F32, torch.float64)
    assert backend.convert_inputs([torch.arange(2)], F32, 15, NO_NAMES)[1] == 0
    assert backend.convert_inputs((), None, 15, NO_NAMES) == ((), 0, None)


def test_no_passthrough_when_nothing_is_converted(backend: Any) -> None:
    assert backend.convert_inputs([torch.ones(1)], F32, 15, NO_NAMES)[2] is None
    assert backend.convert_inputs([low()], F32, mask(torch.float16), NO_NAMES)[2] is None


def _round_trip(backend: Any, tree: Any, change: Any = None) -> tuple[Any, Any]:
    inner, _, passthrough = backend.convert_inputs(tree, BF16, 15, NO_NAMES)
    output = inner if change is None else change(inner)
    return output, passthrough


def test_unchanged_input_comes_back_as_the_callers_own(backend: Any) -> None:
    tree = {"x": torch.tensor([1.001]), "y": [torch.ones(2)]}
    inner, passthrough = _round_trip(backend, tree)
    result = backend.convert({"out": inner["x"], "new": inner["y"][0] * 2}, F32, 15, NO_NAMES, passthrough)
    assert result["out"] is tree["x"]
    assert result["new"].dtype == F32
    assert backend.convert(inner["x"], F32, 15, NO_NAMES, passthrough) is tree["x"]


def test_written_input_is_converted(backend: Any) -> None:
    tree = [torch.ones(2), torch.ones(2)]
    inner, passthrough = _round_trip(backend, tree)
    inner[0].add_(1)
    result = backend.convert(inner, F32, 15, NO_NAMES, passthrough)
    assert result[0].tolist() == [2.0, 2.0]
    assert result[1] is tree[1]


def test_other_objects_are_converted(backend: Any) -> None:
    tree = [torch.tensor([1.001])]
    inner, passthrough = _round_trip(backend, tree)
    for other in (inner[0].detach(), inner[0][:], inner[0].clone(), inner[0].view(1)):
        result = backend.convert(other, F32, 15, NO_NAMES, passthrough)
        assert result is not tree[0]
        assert result.item() == 1.0


def test_original_of_another_dtype_is_not_returned(backend: Any) -> None:
    tree = [torch.ones(2, dtype=torch.float64)]
    inner, passthrough = _round_trip(backend, tree)
    result = backend.convert(inner, F32, 15, NO_NAMES, passthrough)
    assert result[0].dtype == F32
    assert backend.convert(inner, BF16, 15, NO_NAMES, passthrough) is inner
    assert backend.convert(inner, torch.float64, 15, NO_NAMES, passthrough)[0] is tree[0]


def test_skip_and_source_come_before_passthrough(backend: Any) -> None:
    tree = {"x": torch.ones(2)}
    inner, passthrough = _round_trip(backend, tree)
    assert backend.convert(inner, F32, 15, frozenset(["x"]), passthrough) is inner
    assert backend.convert(inner, F32, mask(torch.float16), NO_NAMES, passthrough) is inner


def test_handle_may_be_none(backend: Any) -> None:
    assert backend.convert([low()], F32, 15, NO_NAMES, None)[0].dtype == F32


def test_inference_tensors_have_no_way_back(backend: Any) -> None:
    with torch.inference_mode():
        inner, passthrough = _round_trip(backend, [torch.tensor([1.001])])
        result = backend.convert(inner, F32, 15, NO_NAMES, passthrough)
    assert result[0].item() == 1.0


def test_gradient_of_an_input_that_passed_through(backend: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    inner, passthrough = _round_trip(backend, (x, x * 1))
    first, second = backend.convert(inner, F32, 15, NO_NAMES, passthrough)
    (first.sum() + second.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def test_paths_of_the_first_of_each_dtype() -> None:
    args = (
        torch.arange(2),
        {"image": torch.ones(1), "other": torch.ones(1)},
        OrderedDict(cache=low()),
        Plain(low()),
    )
    assert floating_paths(args, NO_NAMES, "args") == {F32: "args[1]['image']", BF16: "args[2]['cache']"}
    assert floating_paths(args, frozenset(["cache"]), "args") == {F32: "args[1]['image']", BF16: "args[3].x"}
    assert floating_paths(torch.ones(1), NO_NAMES, "args[0]") == {F32: "args[0]"}
    assert floating_paths([torch.ones(1)], NO_NAMES) == {F32: "output[0]"}
    assert floating_paths([torch.arange(2), "text"], NO_NAMES) == {}
