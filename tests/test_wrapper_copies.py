"""Copies of a wrapper are whole: they have their own weights, and still compute in mixed precision."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lite_ext import LiteModule

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.tied = self.linear
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, timestep: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        inside = torch.is_autocast_enabled("cpu"), x.dtype, None if timestep is None else timestep.dtype
        self.seen = [*self.seen, inside]
        return {"y": self.linear(x), "cache": x.clone()}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def autocasts(self) -> bool:
        return torch.is_autocast_enabled("cpu")


class Custom(LiteModule):
    """A subclass with a method and an attribute of its own."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self._scale = 3

    def convert_output(self, output: Any, inputs: Any) -> Any:
        output = super().convert_output(output, inputs)
        return {**output, "scale": self._scale} if isinstance(output, dict) else output


def by_torch_save(model: LiteModule) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


DEEP: dict[str, Callable[[LiteModule], Any]] = {
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda model, protocol=protocol: pickle.loads(pickle.dumps(model, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
    "torch.save": by_torch_save,
    "deepcopy of a pickle": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
    "within another module": lambda model: copy.deepcopy(nn.Sequential(model))[0],
}
SETTINGS: dict[str, Any] = {
    "precision": "bf16-mixed",
    "output_dtype": "input",
    "ambiguous_input": "promote",
    "source": {BF16},
    "skip_inputs": ("timestep",),
    "skip_outputs": ("cache",),
}


@pytest.fixture(params=DEEP)
def deep(request: pytest.FixtureRequest) -> Callable[[LiteModule], Any]:
    return DEEP[request.param]


@pytest.fixture(params=[LiteModule, Custom])
def model(request: pytest.FixtureRequest) -> LiteModule:
    made: LiteModule = request.param(Model(), **SETTINGS)
    made.mark_forward_method("encode")
    made(torch.ones(1, 2))  # a wrapper in use, not a fresh one
    return made


def check_computes(model: LiteModule) -> None:
    out = model(torch.ones(1, 2, dtype=F64), torch.ones(1, dtype=F32))
    assert model.module.seen[-1] == (True, BF16, F32)
    assert out["y"].dtype == F64
    assert out["cache"].dtype == BF16
    assert out.get("scale") == (3 if isinstance(model, Custom) else None)
    assert not torch.is_autocast_enabled("cpu")
    assert model.encode(torch.ones(1, 2)).dtype == F32


def test_copy_computes_as_the_original(model: LiteModule, deep: Callable[[LiteModule], Any]) -> None:
    made = deep(model)
    assert type(made) is type(model)
    assert repr(made) == repr(model)
    assert made.training
    check_computes(made)
    check_computes(model)
    x = torch.randn(3, 2)
    assert torch.equal(made(x)["y"], model(x)["y"])


def test_copy_has_weights_of_its_own(model: LiteModule, deep: Callable[[LiteModule], Any]) -> None:
    made = deep(model)
    x = torch.randn(3, 2)
    before = model(x)["y"]
    assert made.module is not model.module
    assert list(made.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert not made(x)["y"].any()
    assert torch.equal(model(x)["y"], before)
    assert made.module.linear is made.module.tied


def test_names_of_the_copy_are_those_of_its_module(model: LiteModule, deep: Callable[[LiteModule], Any]) -> None:
    made = deep(model)
    ours, theirs = dict(made.named_parameters()), dict(made.module.named_parameters())
    assert list(ours) == ["linear.weight", "linear.bias"]
    assert all(ours[name] is theirs[name] for name in theirs)
    made.extra = nn.Linear(1, 1)
    assert "extra.weight" in dict(made.named_parameters())
    assert not hasattr(model, "extra")
    made.half()
    assert made.module.linear.weight.dtype == torch.float16
    assert model.module.linear.weight.dtype == F32


def test_copy_trains(model: LiteModule, deep: Callable[[LiteModule], Any]) -> None:
    made = deep(model)
    made(torch.ones(1, 2))["y"].sum().backward()
    assert made.linear.weight.grad is not None
    assert model.linear.weight.grad is None
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    before = made.linear.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, made.linear.weight)


def test_marks_of_the_copy_are_its_own(model: LiteModule) -> None:
    made: LiteModule = copy.deepcopy(model)
    made.mark_forward_method("autocasts")
    assert made.autocasts()
    assert not model.autocasts()


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "16-mixed"])
def test_every_precision(precision: str, deep: Callable[[LiteModule], Any]) -> None:
    model = LiteModule(Model().to(F32), precision)
    made = deep(model)
    assert made.precision == model.precision
    assert repr(made) == repr(model)


def test_eval_mode_and_frozen_weights_survive(model: LiteModule, deep: Callable[[LiteModule], Any]) -> None:
    model.eval().requires_grad_(False)
    made = deep(model)
    assert not made.training
    assert not made.module.training
    assert not any(parameter.requires_grad for parameter in made.parameters())


def test_shallow_copy_shares_the_module(model: LiteModule) -> None:
    made = copy.copy(model)
    assert type(made) is type(model)
    assert made is not model
    assert made.module is model.module
    assert next(made.parameters()) is next(model.parameters())
    check_computes(made)
    check_computes(model)


def outer_hook(module: nn.Module, args: Any, out: Any) -> Any:
    return {**out, "hooked": True}


def test_hooks_survive(model: LiteModule, deep: Callable[[LiteModule], Any]) -> None:
    model.register_forward_hook(outer_hook)
    made = deep(model)
    assert made(torch.ones(1, 2))["hooked"] is True


def test_hooks_of_a_copy_are_its_own(model: LiteModule) -> None:
    made = copy.deepcopy(model)
    made(torch.ones(1, 2))
    made.register_forward_hook(outer_hook)
    assert made(torch.ones(1, 2))["hooked"] is True
    assert "hooked" not in model(torch.ones(1, 2))
    shallow = copy.copy(model)  # shares them, as that of any torch module
    model.register_forward_hook(outer_hook)
    assert "hooked" in model(torch.ones(1, 2))
    assert "hooked" in shallow(torch.ones(1, 2))


class Outer(nn.Module):
    """Stands for DistributedDataParallel: runs the forward of the module it has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module(*args, **kwargs)


def test_copy_of_a_wrapper_around_a_wrapping_module(deep: Callable[[LiteModule], Any]) -> None:
    inner = Model()
    model = LiteModule(Outer(inner), original_module=inner, **SETTINGS)
    model.mark_forward_method("encode")
    made = deep(model)
    outer = made._forward_module
    assert outer.module is made.module  # still one module, not two
    assert outer is not model._forward_module
    check_computes(made)
    assert outer.calls == 2
    check_computes(model)


def test_state_holds_no_derived_objects(model: LiteModule) -> None:
    assert b"FusedAutocast" not in pickle.dumps(model)


@pytest.mark.parametrize("deep", DEEP.values(), ids=DEEP)
def test_copy_of_a_wrapper_compiled_in_place_is_not_compiled(deep: Callable[[LiteModule], Any]) -> None:
    model = LiteModule(nn.Linear(2, 2), "bf16-mixed")
    model.compile(backend="eager")
    copied = deep(model)
    x = torch.ones(1, 2)
    assert copied._compiled_call_impl is None
    assert torch.equal(copied(x), LiteModule(model.module, "bf16-mixed")(x))
    assert copied(x).dtype == F32
