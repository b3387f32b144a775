"""Transforms of torch.func, forward mode and derivatives of derivatives: as with `.to` in place of the conversion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from features import Counted, Model, floating
from torch import func, nn

import lite_ext
from lite_ext import LiteModule

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def ours(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return lite_ext.convert({"x": (x,)}, dtype)["x"][0]


def theirs(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def function(cast: Cast) -> Callable[[torch.Tensor], torch.Tensor]:
    """float64 in, float32 between, float64 out."""
    return lambda x: cast(cast(x, F32).sin() * 3, F64).square().sum()


def point() -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, 6, dtype=F64)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: func.grad(f)(point()),
    "grad of grad": lambda f: func.grad(lambda x: func.grad(f)(x).sum())(point()),
    "vmap": lambda f: func.vmap(f)(torch.stack([point(), point() + 1])),
    "vmap of grad": lambda f: func.vmap(func.grad(f))(torch.stack([point(), point() + 1])),
    "vmap of vmap": lambda f: func.vmap(func.vmap(f))(point().reshape(1, 2, 3)),
    "jvp": lambda f: func.jvp(f, (point(),), (torch.ones(6, dtype=F64),)),
    "vjp": lambda f: func.vjp(f, point())[1](torch.tensor(2.0, dtype=F64)),
    "jacrev": lambda f: func.jacrev(lambda x: f(x) * x)(point()),
    "jacfwd": lambda f: func.jacfwd(lambda x: f(x) * x)(point()),
    "hessian": lambda f: func.hessian(f)(point()),
    "linearize": lambda f: func.linearize(f, point())[1](torch.ones(6, dtype=F64)),
    "functionalize": lambda f: func.functionalize(f)(point()),
}


def same(result: Any, wanted: Any) -> None:
    torch.testing.assert_close(result, wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # linearize
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(backend: Any, name: str) -> None:
    with Counted() as counted:
        result = TRANSFORMS[name](function(ours))
    same(result, TRANSFORMS[name](function(theirs)))
    # A wrapped tensor has no data of its own; linearize runs the function once as it is.
    assert counted.fast == (2 if name == "linearize" and backend.__name__ == "lite_ext._C" else 0)


def test_a_plain_tensor_under_a_transform_is_right_too(backend: Any) -> None:
    other = torch.ones(6, dtype=BF16)
    result = func.grad(lambda x: (x * ours(other, F64)).sum())(point())
    same(result, torch.ones(6, dtype=F64))


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.linear(x).tanh()}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_functional_call_of_a_wrapper(precision: str) -> None:
    """The gradients of all parameters for each sample, against the module with its casts written out."""
    inner = Affine()
    model = LiteModule(inner, precision)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    batch = torch.randn(4, 3)

    def wrapped(values: Any, x: torch.Tensor) -> torch.Tensor:
        return func.functional_call(model, values, (x,))["y"].sum()

    def written_out(values: Any, x: torch.Tensor) -> torch.Tensor:
        if precision == "32-true":
            return func.functional_call(inner, values, (x,))["y"].sum()
        with torch.autocast("cpu", BF16):
            y = func.functional_call(inner, values, (x.to(BF16),))["y"]
        return y.to(F32).sum()

    for transform in (
        lambda f: func.grad(f)(parameters, batch),
        lambda f: func.vmap(func.grad(f), in_dims=(None, 0))(parameters, batch),
        lambda f: func.jacrev(lambda x: f(parameters, x))(batch),
        lambda f: func.jvp(lambda x: f(parameters, x), (batch,), (torch.ones_like(batch),)),
    ):
        same(transform(wrapped), transform(written_out))
    assert all(p.grad is None for p in model.parameters())


def test_functional_call_with_other_parameters() -> None:
    model = LiteModule(Affine(), "bf16-mixed")
    x = torch.randn(2, 3)
    before = model(x)["y"]
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert func.functional_call(model, zeros, (x,))["y"].eq(0).all()
    same(model(x)["y"], before)


def test_stacked_models() -> None:
    models = [LiteModule(Affine(), "bf16-mixed") for _ in range(3)]
    parameters, buffers = func.stack_module_state(models)
    x = torch.randn(2, 3)
    result = func.vmap(lambda p, b: func.functional_call(models[0], (p, b), (x,)), in_dims=(0, 0))(parameters, buffers)
    torch.testing.assert_close(result["y"], torch.stack([model(x)["y"] for model in models]), rtol=2e-2, atol=2e-2)


def test_tangents_are_kept(backend: Any) -> None:
    x, tangent = point(), torch.arange(6.0, dtype=F64)
    with forward_ad.dual_level():
        for cast in (ours, theirs):
            primal, found = forward_ad.unpack_dual(cast(forward_ad.make_dual(x, tangent), F32))
            assert (primal.dtype, found.dtype) == (F32, F32)
            same(found, tangent.float())
        assert forward_ad.unpack_dual(ours(point(), F32)).tangent is None


def test_tangents_through_a_wrapper() -> None:
    model = LiteModule(Model("tuple"), "bf16-mixed")
    x = torch.randn(2, 4)
    with forward_ad.dual_level():
        outputs = model(forward_ad.make_dual(x, torch.ones_like(x)))
        tangents = [forward_ad.unpack_dual(leaf).tangent for leaf in floating(outputs)]
    assert [tangent.dtype for tangent in tangents] == [F32, F32]
    torch.testing.assert_close(tangents[1], tangents[0] * 2)
    assert tangents[0].abs().sum() > 0


@pytest.mark.parametrize("count", [1, 40])
def test_gradcheck_of_a_chain(backend: Any, count: int) -> None:
    """float64 to float32 and back: the numerical derivative sees the rounding of float32."""
    points = [torch.randn(3, dtype=F64, requires_grad=True) for _ in range(count)]

    def chain(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        between = lite_ext.convert({"deep": [list(leaves)]}, F32)
        squared = [leaf * leaf * (1 + leaf) for leaf in between["deep"][0]]
        return tuple(lite_ext.convert(squared, F64))

    tolerance = {"eps": 1e-2, "atol": 2e-2, "rtol": 2e-2}
    with Counted() as counted:
        assert torch.autograd.gradcheck(chain, points, check_forward_ad=count == 1, **tolerance)
    assert counted.fast > 0 or backend.__name__ != "lite_ext._C"
    assert torch.autograd.gradgradcheck(chain, points[:2], **tolerance)


def test_gradcheck_notices_a_wrong_gradient() -> None:
    """The tolerances above are not so wide that anything passes."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * 1.2

    x = torch.randn(3, dtype=F64, requires_grad=True)
    assert not torch.autograd.gradcheck(
        lambda x: ours(Wrong.apply(ours(x, F32)), F64), [x], eps=1e-2, atol=2e-2, rtol=2e-2, raise_exception=False
    )


def test_second_and_third_derivative(backend: Any) -> None:
    def derivatives(cast: Cast) -> list[torch.Tensor]:
        x = point().requires_grad_()
        value = cast(cast(x, F32).pow(4), F64).sum()
        found = []
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            found.append(value.detach())
        return found

    same(derivatives(ours), derivatives(theirs))
    assert all(d.dtype == F64 for d in derivatives(ours))


def test_vectorised_jacobian_and_batched_grad(backend: Any) -> None:
    x = point()
    for cast in (ours, theirs):
        jacobian = torch.autograd.functional.jacobian(lambda x, c=cast: c(c(x, F32).square(), F64), x, vectorize=True)
        torch.testing.assert_close(jacobian, torch.diag(2 * x), rtol=1e-6, atol=1e-6)
    leaf = x.clone().requires_grad_()
    (batched,) = torch.autograd.grad(ours(leaf, F32), leaf, torch.eye(6), is_grads_batched=True)
    same(batched, torch.eye(6, dtype=F64))
