"""`torch.compile`: one graph for every kind of output, equal to eager, with casts that the compiler sees."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from features import OUTPUTS, POLICIES, PRECISIONS, Model, assert_same, gradients
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._functorch import config as functorch_config

import lite_ext
from lite_ext import LiteModule


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own parts while it compiles
        yield


def inputs(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4)


class Graphs:
    """A backend that keeps the graphs it is given."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def casts(self, dtype: torch.dtype) -> int:
        calls = [node for graph in self.graphs for node in graph.graph.nodes if node.op == "call_method"]
        return sum(node.target == "to" and dtype in node.args for node in calls)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("output", OUTPUTS)
def test_every_output_under_every_policy(output: str, policy: Any) -> None:
    model = LiteModule(Model(output), "bf16-mixed", output_dtype=policy, skip_outputs=("cache",))
    x = inputs()
    compiled, eager = torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x)
    assert_same(compiled, eager)
    for one, other in zip(gradients(model, compiled), gradients(model, eager), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision(precision: str) -> None:
    model = lite_ext.setup_module(Model("nested"), precision)
    x = inputs()
    compiled, eager = torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x)
    assert_same(compiled, eager)
    for one, other in zip(gradients(model, compiled), gradients(model, eager), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("ambiguous", ["promote", "default", "keep"])
def test_ambiguous_inputs(ambiguous: str) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return {"sum": x + y}

    model = LiteModule(Sum(), "bf16-mixed", output_dtype="input", ambiguous_input=ambiguous)
    arguments = (inputs(), inputs().double())
    assert_same(torch.compile(model, backend="eager", fullgraph=True)(*arguments), model(*arguments))


def test_ambiguous_inputs_are_the_same_error() -> None:
    model = LiteModule(nn.Embedding(4, 2), "bf16-mixed", output_dtype="input")
    ids = torch.arange(3)
    with pytest.raises(ValueError, match="the inputs hold no floating tensor") as eager:
        model(ids)
    with pytest.raises(ValueError, match="the inputs hold no floating tensor") as compiled:
        torch.compile(model, backend="eager")(ids)
    assert str(compiled.value) == str(eager.value)


def test_ambiguous_inputs_within_one_graph_are_reported_by_torch() -> None:
    """With fullgraph=True no exception leaves a graph as it is: torch raises its own, with ours in it."""
    model = LiteModule(nn.Embedding(4, 2), "bf16-mixed", output_dtype="input")
    message = re.escape('raised exception ValueError(\'output_dtype="input" needs exactly one floating dtype')
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(model, backend="eager", fullgraph=True)(torch.arange(3))


def test_casts_are_plain_calls_of_to() -> None:
    backend = Graphs()
    model = LiteModule(Model("tuple"), "bf16-mixed", output_dtype=torch.float64)
    torch.compile(model, backend=backend, fullgraph=True)(inputs())
    assert len(backend.graphs) == 1
    assert (backend.casts(torch.bfloat16), backend.casts(torch.float64)) == (1, 2)


def test_skipped_and_shared_leaves_are_not_cast_again() -> None:
    backend = Graphs()

    def function(x: torch.Tensor) -> Any:
        y = x * 2
        return lite_ext.convert({"a": y, "again": [y, (y,)], "cache": x + 1}, torch.float32, skip=("cache",))

    result = torch.compile(function, backend=backend, fullgraph=True)(inputs().bfloat16())
    assert backend.casts(torch.float32) == 1
    assert result["a"] is result["again"][0] is result["again"][1][0]
    assert result["cache"].dtype == torch.bfloat16


def test_inductor_fuses_the_casts() -> None:
    """As many kernels as the model has without any cast."""
    from torch._inductor import metrics

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = x * 2
            return {"a": y, "b": (y + 1, y - 1)}

    x = inputs(64)
    kernels = []
    for model in (Scaled(), LiteModule(Scaled(), "bf16-mixed")):
        torch._dynamo.reset()
        metrics.reset()
        # A graph from a cache would have no kernels generated for it.
        with torch._inductor.config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
            compiled = torch.compile(model, fullgraph=True)(x)
        kernels.append(metrics.generated_kernel_count)
        assert_same(compiled, model(x))
    assert kernels == [1, 1]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any, *, scale: torch.Tensor) -> Any:
        return {"y": self.linear(batch["x"]) * scale, "again": batch["extra"]}


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_new_inputs_do_not_compile_again(dynamic: bool | None) -> None:
    """Containers and tensors of the inputs are new at each call: nothing may hang on which objects they are."""
    counter = CompileCounter()
    model = LiteModule(Packed(), "bf16-mixed", output_dtype="input")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
    for rows in (3, 4, 5, 6, 7):
        batch = {"x": inputs(rows), "extra": [inputs(rows), (inputs(rows),)]}
        result = compiled(batch, scale=torch.ones(rows, 1))
        assert [leaf.dtype for leaf in (result["y"], result["again"][0])] == [torch.float32] * 2
    assert counter.frame_count == (1 if dynamic else 2)


def test_same_shapes_do_not_compile_again() -> None:
    counter = CompileCounter()
    compiled = torch.compile(LiteModule(Model("nested"), "bf16-mixed"), backend=counter, fullgraph=True)
    for _ in range(4):
        compiled(inputs())
    assert counter.frame_count == 1


def test_default_dtype_is_read_at_each_call() -> None:
    compiled = torch.compile(LiteModule(Model("tensor"), "bf16-mixed"), backend="eager", fullgraph=True)
    x = inputs()
    assert compiled(x).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert compiled(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert compiled(x).dtype == torch.float32


def test_reduce_overhead() -> None:
    model = LiteModule(Model("dict"), "bf16-mixed")
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        x = inputs()
        with torch.no_grad():
            assert_same(compiled(x), model(x))


@pytest.mark.parametrize("output", ["tensor", "nested"])
def test_compiled_module_inside(output: str) -> None:
    """The casts are then made by the compiled library, after the graph."""
    inner = Model(output)
    model = LiteModule(torch.compile(inner, backend="aot_eager", fullgraph=True), "bf16-mixed")
    x = inputs()
    result = model(x)
    assert_same(result, LiteModule(inner, "bf16-mixed")(x))
    assert list(model.state_dict()) == list(inner.state_dict())
    for one, other in zip(gradients(model, result), gradients(model, LiteModule(inner, "bf16-mixed")(x)), strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_in_place() -> None:
    model, counter = LiteModule(Model("nested"), "bf16-mixed"), CompileCounter()
    eager = model(x := inputs())
    model.compile(backend=counter, fullgraph=True)
    assert_same(model(x), eager)
    assert counter.frame_count == 1


def test_part_of_a_compiled_model() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = LiteModule(Model("dict"), "bf16-mixed", output_dtype="keep")
            self.head = LiteModule(nn.Linear(4, 2), "16-mixed", output_dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.part(x)["logits"])

    model, x = Outer(), inputs()
    assert_same(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


def test_cast_tensors() -> None:
    def function(x: torch.Tensor) -> Any:
        return lite_ext.cast_tensors([x, x + 1, x.long()], torch.float64)

    x = inputs()
    assert_same(torch.compile(function, backend="eager", fullgraph=True)(x), function(x))


def test_shared_containers_are_not_shared_in_a_compiled_result() -> None:
    """A graph cannot tell whether two containers are one object; the tensors in them stay shared."""

    def function(x: torch.Tensor) -> Any:
        part = [x * 2]
        return lite_ext.convert({"a": part, "b": part}, torch.float32)

    x = inputs().bfloat16()
    eager, compiled = function(x), torch.compile(function, backend="eager", fullgraph=True)(x)
    assert eager["a"] is eager["b"]
    assert compiled["a"] is not compiled["b"]
    assert compiled["a"][0] is compiled["b"][0]
