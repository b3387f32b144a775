"""A compiled wrapper: one graph under every policy, equal to eager, its casts visible to the compiler."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import lite_ext


@dataclasses.dataclass
class Output:
    loss: Tensor
    steps: int = 1


Pair = collections.namedtuple("Pair", "first second")

OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, y * 2),
    "dict": lambda y: {"cache": y, "ids": torch.arange(3)},
    "namedtuple": lambda y: Pair(y, y + 1),
    "dataclass": Output,
    "ModelOutput": lambda y: CausalLMOutput(logits=y, hidden_states=(y, y * 2)),
    "nested": lambda y: {"a": [(y, Output(y * 3))], "b": {}},
}
POLICIES = ("default", "input", "keep", torch.float16)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.kind](self.linear(x))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the compiler's own
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def leaves(tree: Any) -> list[Tensor]:
    """Return the tensors of an output in order, without the code under test."""
    if isinstance(tree, Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, dict):
        return leaves([getattr(tree, field.name) for field in dataclasses.fields(tree)])
    if isinstance(tree, dict):
        return leaves(list(tree.values()))
    return list(itertools.chain(*map(leaves, tree))) if isinstance(tree, (list, tuple)) else []


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    assert [leaf.dtype for leaf in leaves(got)] == [leaf.dtype for leaf in leaves(wanted)]
    for one, other in zip(leaves(got), leaves(wanted), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("kind", OUTPUTS)
def test_one_graph_equal_to_eager(kind: str, policy: Any) -> None:
    model = lite_ext.LiteModule(Model(kind), "bf16-mixed", output_dtype=policy)
    x = torch.randn(2, 4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")(x)
    eager = model(x)
    assert_same(compiled, eager)
    gradients = []
    for output in (compiled, eager):
        loss = sum(leaf.float().square().sum() for leaf in leaves(output) if leaf.is_floating_point())
        gradients.append(torch.autograd.grad(loss, model.linear.weight)[0])
    torch.testing.assert_close(*gradients)


def test_skip() -> None:
    model = lite_ext.LiteModule(Model("dict"), "bf16-mixed", skip_outputs=("cache",))
    x = torch.randn(2, 4)
    output = torch.compile(model, fullgraph=True, backend="eager")(x)
    assert output["cache"].dtype is torch.bfloat16
    assert_same(output, model(x))


def test_casts_are_visible_as_to() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(lite_ext.LiteModule(Model("tuple"), "bf16-mixed"), fullgraph=True, backend=keep)(torch.randn(2, 4))
    (graph,) = graphs
    casts = [node for node in graph.graph.nodes if node.op == "call_method" and node.target == "to"]
    assert [node.args[1] for node in casts].count(torch.float32) == 2
    assert [node.args[1] for node in casts].count(torch.bfloat16) == 1


def test_inductor_fuses_the_casts() -> None:
    from torch._inductor import metrics

    class Elementwise(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = x * 2
            return {"a": y, "b": (y + 1, y - 1)}

    metrics.reset()
    model = lite_ext.LiteModule(Elementwise(), "bf16-mixed")
    x = torch.randn(64)
    output = torch.compile(model, fullgraph=True)(x)
    for one, other in zip(leaves(output), leaves(model(x)), strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)  # fused, the rounding in between is left out
    assert metrics.generated_kernel_count == 1


def test_new_shapes_do_not_recompile_each_call() -> None:
    compiled = torch.compile(
        lite_ext.LiteModule(Model("nested"), "bf16-mixed"), fullgraph=True, backend="eager", dynamic=True
    )
    for batch in (2, 3, 5, 8, 13):
        compiled(torch.randn(batch, 4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_module_inside() -> None:
    inner = Model("dict")
    model = lite_ext.LiteModule(torch.compile(inner, backend="eager"), "bf16-mixed")
    x = torch.randn(2, 4)
    assert_same(model(x), lite_ext.LiteModule(inner, "bf16-mixed")(x))
    assert list(model.state_dict()) == list(inner.state_dict())


def test_an_ambiguous_input_is_an_error_outside_of_one_graph() -> None:
    """Compiled as one graph, torch shows its own error around ours; otherwise ours comes as in eager mode."""
    model = lite_ext.LiteModule(nn.Embedding(4, 2), "bf16-mixed", output_dtype="input")
    with pytest.raises(ValueError, match="the inputs hold no floating tensor"):
        model(torch.arange(3))
    with pytest.raises(Exception, match="the inputs hold no floating tensor"):
        torch.compile(model, backend="eager")(torch.arange(3))


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    model = lite_ext.LiteModule(Model("dict"), "bf16-true", output_dtype=torch.float32).to(torch.bfloat16).eval()
    x, other = torch.randn(2, 4), torch.randn(2, 4)
    program = torch.export.export(model, (x,), strict=strict)
    assert list(program.state_dict) == ["linear.weight", "linear.bias"]
    assert_same(program.module()(other), model(other))


class PlainAutocast(nn.Module):
    """What the wrapper does, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model("dict")

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = self.inner(x.to(torch.bfloat16))
        return {"cache": output["cache"].to(torch.float32)}


def test_export_with_autocast() -> None:
    model = lite_ext.LiteModule(Model("dict"), "bf16-mixed").eval()
    x = torch.randn(2, 4)
    program = torch.export.export(model, (x,), strict=False)
    assert_same(program.module()(x), model(x))


@pytest.mark.parametrize("make", [PlainAutocast, lambda: lite_ext.LiteModule(Model("dict"), "bf16-mixed")])
def test_strict_export_with_autocast_is_beyond_torch(make: Callable[[], nn.Module]) -> None:
    """The strict tracer notes float32 for what autocast makes bfloat16, with or without the wrapper."""
    program = torch.export.export(make().eval(), (torch.randn(2, 4),), strict=True)
    with pytest.raises(RuntimeError, match="Tensor dtype mismatch! Expected: Float, Got: c10::BFloat16"):
        program.module()(torch.randn(2, 4))


class Broken(nn.Module):
    """Its graph breaks in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return {"y": y, "inside": y.dtype, "z": self.linear(y)}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
@pytest.mark.parametrize("policy", ["default", "keep", torch.float64])
def test_compiled_in_place_keeps_precision_and_policy_where_the_graph_breaks(precision: str, policy: Any) -> None:
    eager = lite_ext.setup_module(Broken(), precision, output_dtype=policy)
    compiled = copy.deepcopy(eager)
    compiled.compile(backend="eager")
    x = torch.randn(2, 4)
    wanted = eager(x)
    for _ in range(2):
        result = compiled(x)
        assert result["inside"] == wanted["inside"]
        assert (result["y"].dtype, result["z"].dtype) == (wanted["y"].dtype, wanted["z"].dtype)
        torch.testing.assert_close(result["z"], wanted["z"])
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() == torch.float32


class Mode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.training else x - 1


def test_compiled_wrapper_follows_the_training_mode() -> None:
    model = lite_ext.LiteModule(Mode(), "bf16-mixed")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(2)
    for mode in (True, False, True):
        model.train(mode)
        assert compiled(x)[0] == (2 if mode else 0)
