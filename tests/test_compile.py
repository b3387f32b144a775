"""`torch.compile` traces the Python reference into one graph, whatever the backend."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import actual, expected
from zoo_classes import Frozen, Plain, Point, low

import lite_ext

MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "nest": lambda x: {"a": x, "l": [x + 1, (x, None, "text")], "ids": x.long()},
    "namedtuple": lambda x: Point(x, 2),
    "OrderedDict": lambda x: OrderedDict(b=x, a=1),
    "dataclass": lambda x: Plain(x, [x]),
    "frozen dataclass": lambda x: Frozen(x),
}


@pytest.mark.parametrize("name", MAKERS)
def test_one_graph(name: str) -> None:
    make = MAKERS[name]

    def function(x: torch.Tensor) -> Any:
        return lite_ext.convert(make(x), torch.float32)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    x = low()
    tree = make(x)
    result, wanted = compiled(x), lite_ext.convert(tree, torch.float32)
    assert repr(result) == repr(wanted)
    assert expected(tree, torch.float32)[:1] == actual(tree, result)[:1]


def test_skip_and_source_under_compile() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def function(x: torch.Tensor) -> Any:
        return lite_ext.convert(
            {"cache": x, "y": x * 2, "d": x.double()}, torch.float32, source={torch.bfloat16}, skip=("cache",)
        )

    assert [leaf.dtype for leaf in function(low()).values()] == [torch.bfloat16, torch.float32, torch.float64]
