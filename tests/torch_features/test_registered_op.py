"""torch.ops.lite_ext.cast: an operator of its own for graphs made ahead of time, equal to copies by `.to`."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import fingerprint
from features import Counted
from torch import func
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from zoo_classes import low
from zoo_leaves import LEAVES

import lite_ext

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLOATING = (F16, BF16, F32, F64)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own parts while it compiles
        yield


def cast(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return torch.ops.lite_ext.cast(tensors, dtype)


def written_out(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [t.to(dtype, copy=True) if t.dtype in FLOATING else t.clone() for t in tensors]


def same(result: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert [fingerprint(t) for t in result] == [fingerprint(t) for t in wanted]


def test_schema() -> None:
    schema = torch.ops.lite_ext.cast.default._schema
    assert str(schema) == "lite_ext::cast(Tensor[] tensors, ScalarType dtype) -> Tensor[]"
    assert torch.Tag.pt2_compliant_tag in torch.ops.lite_ext.cast.default.tags


SAMPLES: dict[str, Callable[[], list[torch.Tensor]]] = {
    "nothing": list,
    "one": lambda: [torch.randn(3, 4).bfloat16()],
    "every dtype": lambda: [torch.randn(2, 3).to(dtype) for dtype in FLOATING],
    "not floating": lambda: [torch.arange(3), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)],
    "strides": lambda: [torch.randn(4, 6).half().t(), torch.randn(8, 4).bfloat16()[::2], torch.randn(0, 3).double()],
    "gradients": lambda: [torch.randn(3, dtype=F64, requires_grad=True), torch.randn(2, dtype=F32, requires_grad=True)],
}


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    torch.library.opcheck(torch.ops.lite_ext.cast.default, (SAMPLES[name](), dtype))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_equal_to_copies(name: str, dtype: torch.dtype) -> None:
    tensors = SAMPLES[name]()
    same(cast(tensors, dtype), written_out(tensors, dtype))


@pytest.mark.parametrize("name", LEAVES)
def test_every_layout(name: str) -> None:
    tensor = LEAVES[name](BF16)
    same(cast([tensor], F32), written_out([tensor], F32))


def test_results_are_fresh() -> None:
    """An operator may not return its inputs, nor two results that share memory: leaves that need no cast are copied."""
    tensor, ids = torch.ones(3), torch.arange(3)
    results = cast([tensor, tensor, ids], F32)
    pointers = [t.untyped_storage().data_ptr() for t in (tensor, ids, *results)]
    assert len(set(pointers)) == 5
    results[0].add_(1)
    assert (tensor.tolist(), results[1].tolist()) == ([1.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_wrong_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="dtype must be float16, bfloat16, float32 or float64"):
        cast([low()], dtype)


def test_gradients() -> None:
    tensors = SAMPLES["gradients"]()
    found = []
    for function in (cast, written_out):
        results = function(tensors, BF16)
        assert len({r.grad_fn for r in results}) == 2
        found.append(torch.autograd.grad(sum((r.float() ** 2).sum() for r in results), tensors))
    same(list(found[0]), list(found[1]))
    assert torch.autograd.gradcheck(
        lambda x: cast([cast([x], F32)[0] ** 3], F64)[0], tensors[:1], eps=1e-2, atol=2e-2, rtol=2e-2
    )


def test_transforms() -> None:
    def function(x: torch.Tensor, op: Any) -> torch.Tensor:
        a, b = op([x, x.sin()], F32)
        return (a * b).sum()

    x = torch.linspace(-1, 1, 6, dtype=F64).reshape(2, 3)
    for transform in (
        lambda f: func.grad(f)(x),
        lambda f: func.vmap(f)(x),
        lambda f: func.vmap(func.grad(f))(x),
        lambda f: func.jvp(f, (x,), (torch.ones_like(x),))[1],
        lambda f: func.jacrev(f)(x),
        lambda f: func.hessian(f)(x[0]),
    ):
        results = [transform(lambda v, op=op: function(v, op)) for op in (cast, written_out)]
        torch.testing.assert_close(*results, rtol=0, atol=0)


def test_fake_and_meta_tensors() -> None:
    with FakeTensorMode(), Counted() as counted:
        results = cast([torch.empty(2, 3, dtype=BF16), torch.empty(2, dtype=torch.int64)], F32)
    assert [(type(r), r.dtype) for r in results] == [(FakeTensor, F32), (FakeTensor, torch.int64)]
    meta = cast([torch.empty(2, 3, dtype=BF16, device="meta").t()], F32)[0]
    assert (meta.device.type, meta.dtype, meta.stride()) == ("meta", F32, (1, 3))
    assert counted.fast == 0


def test_make_fx() -> None:
    graph = make_fx(lambda x: cast([x, x], F32), tracing_mode="symbolic")(low())
    assert graph.code.count("aten._to_copy") == 2
    same(graph(low(5.0)), [low(5.0).float()] * 2)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, dtype=BF16)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.linear(x)
        return torch.ops.lite_ext.cast([y, y * 2, x], torch.float32)


def test_compiled_in_one_graph() -> None:
    model, x = Model(), torch.randn(3, 4).bfloat16()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("strict", [True, False])
def test_exported_as_one_operator(strict: bool, tmp_path: Path) -> None:
    """The operator stays in the program; it may be saved, and decomposed into what every backend knows."""
    model, x = Model(), torch.randn(3, 4).bfloat16()
    program = torch.export.export(model, (x,), strict=strict)
    assert [str(n.target) for n in program.graph.nodes].count("lite_ext.cast.default") == 1
    torch.export.save(program, tmp_path / "model.pt2")
    for runs in (program, torch.export.load(tmp_path / "model.pt2"), program.run_decompositions()):
        torch.testing.assert_close(list(runs.module()(x)), list(model(x)))
    assert "lite_ext" not in str(program.run_decompositions().graph)


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler here")
def test_aot_inductor(tmp_path: Path) -> None:
    model, x = Model().eval(), torch.randn(3, 4).bfloat16()
    with torch.no_grad():
        rows = torch.export.Dim("rows", min=2, max=64)
        program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: rows}})
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        for count in (3, 7):
            x = torch.randn(count, 4).bfloat16()
            torch.testing.assert_close(list(loaded(x)), list(model(x)), rtol=2e-2, atol=2e-2)
            assert [t.dtype for t in loaded(x)] == [F32] * 3


def test_eager_conversion_does_not_go_through_it() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, Counted() as counted:
        lite_ext.convert([low(), low()], F32)
    assert "lite_ext::cast" not in {event.name for event in profile.events()}
    assert counted.fast == 2
