"""What records or fakes tensors: export, make_fx, FakeTensorMode, jit.trace and symbolic_trace see `.to`."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from features import OUTPUTS, POLICIES, Counted, Model, assert_same, floating, leaves
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from zoo_classes import Frozen, Plain

import lite_ext
from lite_ext import LiteModule

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own parts while it traces
        yield


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


# ------------------------------------------------------------------------------------------------ torch.export

# Outputs of other classes are refused by torch, whoever makes them: test_export_refuses_unknown_classes.
EXPORTABLE = [name for name in OUTPUTS if "dataclass" not in name and name != "nested"]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_export_under_every_policy(strict: bool, policy: Any) -> None:
    model = LiteModule(Model("tuple"), "32-true", output_dtype=policy)
    program = torch.export.export(model, (torch.randn(2, 4),), strict=strict)
    x = torch.randn(2, 4)
    assert_same(program.module()(x), model(x))
    assert not program.constants
    assert sorted(program.state_dict) == ["linear.bias", "linear.weight"]
    assert targets(program.graph).count("aten.to.dtype") == (2 if policy == torch.float64 else 0)


@pytest.mark.parametrize("output", EXPORTABLE)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_export_of_every_output(strict: bool, output: str) -> None:
    model = LiteModule(Model(output).to(BF16), "bf16-true", skip_outputs=("cache",))
    program = torch.export.export(model, (torch.randn(2, 4),), strict=strict)
    x = torch.randn(2, 4)
    assert_same(program.module()(x), model(x))
    assert not program.constants or output == "dict"  # the ids that the model makes


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_export_with_dynamic_shapes(strict: bool) -> None:
    model = LiteModule(Model("tuple").to(BF16), "bf16-true")
    shapes = {"x": {0: torch.export.Dim("rows")}}  # by the names of the module's own forward
    program = torch.export.export(model, (torch.randn(2, 4),), strict=strict, dynamic_shapes=shapes)
    for rows in (2, 3, 17):
        x = torch.randn(rows, 4)
        assert_same(program.module()(x), model(x))


def test_export_of_a_mixed_precision() -> None:
    model = LiteModule(Model("dict"), "bf16-mixed")
    program = torch.export.export(model, (torch.randn(2, 4),), strict=False)
    x = torch.randn(2, 4)
    assert_same(program.module()(x), model(x))
    decomposed = program.run_decompositions()
    assert_same(decomposed.module()(x), model(x))
    assert targets(decomposed.graph).count("aten._to_copy.default") == 5  # input, weight, bias; two outputs


class WrittenOut(nn.Module):
    """A mixed precision in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model("tuple")

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            outputs = self.inner(x.to(BF16))
        return tuple(y.to(F32) for y in outputs)


@pytest.mark.parametrize("model", [WrittenOut(), LiteModule(Model("tuple"), "bf16-mixed")], ids=["torch", "lite_ext"])
def test_strict_export_of_autocast_does_not_run(model: nn.Module) -> None:
    """torch 2.13 asserts in the graph that tensors under autocast have the dtypes that they have without it."""
    x = torch.randn(2, 4)
    program = torch.export.export(model, (x,), strict=True)
    with pytest.raises(RuntimeError, match="Tensor dtype mismatch! Expected: Float, Got: c10::BFloat16"):
        program.module()(x)


@pytest.mark.parametrize("convert", [lambda y: Frozen(y.to(F32)), lambda y: lite_ext.convert(Frozen(y), F32)])
def test_export_refuses_unknown_classes(convert: Any) -> None:
    class Wrapped(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return convert(x)

    with pytest.raises(RuntimeError, match="Found <class '.*Frozen'> in output, which is not a known type"):
        torch.export.export(Wrapped(), (torch.ones(2, dtype=BF16),), strict=False)


def test_export_of_a_registered_dataclass() -> None:
    class Wrapped(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return lite_ext.convert({"out": Plain(x, [x + 1])}, F32)

    if Plain not in pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(Plain)
    program = torch.export.export(Wrapped(), (torch.ones(2, dtype=BF16),), strict=False)
    x = torch.full((2,), 3.0, dtype=BF16)
    assert_same(program.module()(x), Wrapped()(x))


# ------------------------------------------------------------------------------------------------ make_fx and fakes


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("output", ["tensor", "tuple", "dict", "namedtuple"])  # a graph makes dicts of other mappings
def test_make_fx(backend: Any, output: str, mode: str) -> None:
    def function(x: torch.Tensor) -> Any:
        return lite_ext.convert(OUTPUTS[output](x), F32)

    with Counted() as counted:
        graph = make_fx(function, tracing_mode=mode)(torch.randn(2, 4).bfloat16())
    assert counted.fast == 0
    x = torch.randn(2, 4).bfloat16()
    assert_same(graph(x), function(x))
    assert targets(graph.graph).count("aten._to_copy.default") == len(floating(function(x)))
    assert not [node for node in graph.graph.nodes if node.op == "get_attr" and output != "dict"]


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_of_a_wrapper(mode: str) -> None:
    model = LiteModule(Model("tuple"), "bf16-mixed")

    def function(parameters: Any, x: torch.Tensor) -> Any:
        return torch.func.functional_call(model, parameters, (x,))

    parameters = dict(model.named_parameters())
    graph = make_fx(function, tracing_mode=mode)(parameters, torch.randn(2, 4))
    x = torch.randn(2, 4)
    assert_same(graph(parameters, x), model(x))
    assert targets(graph.graph).count("aten._to_copy.default") == 5


def test_make_fx_of_a_gradient(backend: Any) -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.func.grad(lambda v: lite_ext.convert([v], F32)[0].square().sum())(x)

    graph = make_fx(function)(torch.ones(3, dtype=BF16))
    x = torch.tensor([1.0, 2.0, 3.0], dtype=BF16)
    assert graph(x).tolist() == [2.0, 4.0, 6.0]
    assert graph(x).dtype == BF16


@pytest.mark.parametrize("inside", [True, False], ids=["in the mode", "outside of it"])
def test_fake_tensors_never_reach_a_pointer(backend: Any, inside: bool) -> None:
    """Reading the memory of a fake tensor would be a segmentation fault; the counters say that nothing tried."""
    mode = FakeTensorMode()
    with mode:
        tree = {"a": [torch.empty(2, 3, dtype=BF16), torch.empty(0, dtype=BF16)], "b": (torch.empty((), dtype=BF16),)}
    with Counted() as counted:
        if inside:
            with mode:
                result = lite_ext.convert(tree, F32)
        else:
            result = lite_ext.convert(tree, F32)
    assert [(type(leaf), leaf.dtype) for leaf in leaves(result)] == [(FakeTensor, F32)] * 3
    assert (counted.fast, counted.fallback) == (0, 3 * (backend.__name__ == "lite_ext._C"))


def test_fake_tensors_of_other_devices() -> None:
    with FakeTensorMode() as mode, Counted() as counted:
        fake = mode.from_tensor(torch.empty(2, 3, dtype=BF16, device="meta"))
        result = lite_ext.convert([fake, torch.empty(2, dtype=BF16, device="cuda")], F32)
    assert [leaf.device.type for leaf in result] == ["meta", "cuda"]
    assert [leaf.dtype for leaf in result] == [F32, F32]
    assert counted.fast == 0


def test_real_tensors_in_a_fake_mode() -> None:
    real = torch.ones(2, dtype=BF16)
    with FakeTensorMode(allow_non_fake_inputs=True), Counted() as counted:
        result = lite_ext.convert([real], F32)[0]
    assert type(result) is FakeTensor
    assert counted.fast == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_wrapper_of_fake_tensors(precision: str) -> None:
    with FakeTensorMode(), Counted() as counted:
        model = LiteModule(Model("nested"), precision, output_dtype="input")
        result = model(torch.randn(2, 4))
    assert {(type(leaf), leaf.dtype) for leaf in leaves(result)} == {(FakeTensor, F32)}
    assert counted.fast == 0


def test_meta_tensors(backend: Any) -> None:
    with Counted() as counted:
        result = lite_ext.convert([torch.empty(2, dtype=BF16, device="meta")], F32)[0]
    assert (result.device.type, result.dtype, counted.fast) == ("meta", F32, 0)


# ------------------------------------------------------------------------------------------------ jit.trace


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_jit_trace(precision: str, policy: Any) -> None:
    model = LiteModule(Model("tuple"), precision, output_dtype=policy).eval()
    traced = torch.jit.trace(model, (torch.randn(2, 4),))
    x = torch.randn(3, 4)
    assert_same(traced(x), model(x))
    assert list(traced.state_dict()) == list(model.state_dict())


def test_jit_trace_of_a_dict() -> None:
    model = LiteModule(Model("dict"), "bf16-mixed", skip_outputs=("cache",)).eval()
    traced = torch.jit.trace(model, (torch.randn(2, 4),), strict=False)
    x = torch.randn(3, 4)
    assert_same(traced(x), model(x))


# ------------------------------------------------------------------------------------------------ symbolic_trace


def symbolic(tree):  # without annotations, for torch.fx does not pickle them
    converted = lite_ext.convert({"x": tree * 2, "cache": tree}, F32, source={BF16}, skip=("cache",))
    return converted["x"] + 1, converted["cache"]


def test_symbolic_trace_of_a_function(backend: Any) -> None:
    """A proxy has no dtype, so the graph holds the call of convert; leaving it out would be silently wrong."""
    graph = fx.symbolic_trace(symbolic)
    x = torch.randn(3).bfloat16()
    for runs in (graph, pickle.loads(pickle.dumps(graph)), fx.symbolic_trace(graph)):
        assert_same(runs(x), symbolic(x))
        assert [leaf.dtype for leaf in runs(x)] == [F32, BF16]
    assert [node.target for node in graph.graph.nodes].count(lite_ext.convert) == 1


def test_symbolic_trace_of_other_proxies(backend: Any) -> None:
    class Attributes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=BF16))

        def forward(self, x: Any) -> Any:
            a, b = lite_ext.convert((x.mT, self.weight), F32)
            return a @ b

    graph, x = fx.symbolic_trace(Attributes()), torch.ones(2, 3, dtype=BF16)
    assert_same(graph(x), Attributes()(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = LiteModule(Model("dict"), "bf16-mixed")
        self.second = LiteModule(nn.Linear(4, 2), "16-mixed", output_dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.second(self.first(x)["logits"]) + 1}


def test_symbolic_trace_of_a_model_with_wrappers() -> None:
    """Each wrapper is one node, for a graph of torch.fx cannot hold the autocast that it runs its module under."""
    model = Outer()
    graph = fx.symbolic_trace(model)
    calls = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert calls == ["first", "second"]
    x = torch.randn(2, 4)
    assert_same(graph(x), model(x))
    assert list(graph.state_dict()) == list(model.state_dict())
    graph(x)["y"].sum().backward()
    assert all(p.grad is not None for p in graph.first.parameters())


def test_symbolic_trace_of_a_wrapper_alone() -> None:
    """torch.fx cannot call a forward of (*args, **kwargs), whose it may be."""

    class AnyArguments(nn.Module):
        def forward(self, *args: Any) -> Any:
            return nn.functional.relu(*args)

    for model in (AnyArguments(), LiteModule(Model("tensor"), "32-true")):
        with pytest.raises(fx.proxy.TraceError, match="Proxy object cannot be iterated"):
            fx.symbolic_trace(model)


def test_a_proxy_out_of_reach_is_an_error(backend: Any) -> None:
    class Sealed:
        def __init__(self, value: Any) -> None:
            self.value = value

    backend.register_node(Sealed, lambda sealed: ([sealed.value], None), lambda context, children: Sealed(*children))
    with pytest.raises(TypeError, match="cannot record a call of convert"):
        fx.symbolic_trace(lambda x: lite_ext.convert(Sealed(x), F32).value)
