"""Modes and contexts of torch: what watches operations sees each conversion, what does not keeps the fast path."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from features import Counted, Model, gradients, leaves
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode
from zoo_classes import low

import lite_ext
from lite_ext import LiteModule

F32, BF16 = torch.float32, torch.bfloat16


class Logged(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class LoggedFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def written_out(model: nn.Module, x: torch.Tensor) -> Any:
    """What LiteModule(model, "bf16-mixed") means, in plain torch, for a model that returns a tuple."""
    with torch.autocast("cpu", BF16):
        outputs = model(x.to(BF16))
    return tuple(y.to(F32) for y in outputs)


def test_dispatch_mode_sees_what_it_would_see_of_to() -> None:
    inner, x = Model("tuple"), torch.randn(2, 4)
    model = LiteModule(inner, "bf16-mixed")
    with Logged() as ours, Counted() as counted:
        model(x)
    with Logged() as theirs:
        written_out(inner, x)
    assert ours.seen == theirs.seen
    assert ours.seen.count("aten._to_copy.default") == 5
    assert counted.fast == 0


def test_dispatch_mode_in_backward() -> None:
    inner, x = Model("tuple"), torch.randn(2, 4)
    seen = []
    for run in (LiteModule(inner, "bf16-mixed"), lambda x: written_out(inner, x)):
        inner.zero_grad()
        outputs = run(x)
        with Logged() as mode:
            (outputs[0].sum() + outputs[1].sum()).backward()
        seen.append(sorted(mode.seen))
    assert seen[0] == seen[1]


def test_flop_counter() -> None:
    inner, x = Model("tuple", 8), torch.randn(16, 8)
    counts = []
    for run in (LiteModule(inner, "bf16-mixed"), lambda x: written_out(inner, x)):
        with FlopCounterMode(display=False) as counter:
            sum(y.sum() for y in run(x)).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 2 * 2 * 16 * 8 * 8


def test_function_mode_sees_what_it_would_see_of_to(backend: Any) -> None:
    tree = [low(), (low(), low())]
    with LoggedFunctions() as ours:
        lite_ext.convert(tree, F32)
    with LoggedFunctions() as theirs:
        for leaf in leaves(tree):
            leaf.to(F32)
    # The Python walk reads dtypes, which a mode sees too.
    assert [f for f in ours.seen if f is torch.Tensor.to] == theirs.seen == [torch.Tensor.to] * 3


def test_function_mode_sees_the_casts_of_a_wrapper() -> None:
    model = LiteModule(Model("tuple"), "bf16-mixed")
    with LoggedFunctions() as mode, Counted() as counted:
        model(torch.randn(2, 4))
    assert mode.seen.count(torch.Tensor.to) == 3
    assert counted.fast == 0


def test_function_mode_may_change_the_result(backend: Any) -> None:
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is torch.Tensor.to else result

    with Doubling():
        assert lite_ext.convert([low(1.0)], F32)[0].tolist() == [2.0]


def test_disabled_function_modes_are_not_asked() -> None:
    with LoggedFunctions() as mode, torch._C.DisableTorchFunction(), Counted() as counted:
        lite_ext.convert([low()], F32)
    assert (mode.seen.count(torch.Tensor.to), counted.fast) == (0, 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_default_device_keeps_the_fast_path(device: str) -> None:
    """It changes where new tensors are made, never where a conversion goes: `.to(dtype)` stays on the device."""
    leaf = low()
    torch.set_default_device(device)
    try:
        with Counted() as counted:
            result = lite_ext.convert([leaf, (leaf + 0,)], F32)
        assert result[0].device.type == leaf.to(F32).device.type == "cpu"
        assert counted.fast == 2
        model = LiteModule(Model("tuple").to_empty(device="cpu"), "bf16-mixed")
        with Counted() as counted:
            model(leaf.float().repeat(1, 2)[:, :4].clone())
        assert (counted.fast, counted.fallback) == (3, 0)
    finally:
        torch.set_default_device(None)


def test_default_device_beside_another_mode_is_left_to_the_other() -> None:
    leaves_ = [low(), low()]
    for first, second in ((torch.device("meta"), LoggedFunctions()), (LoggedFunctions(), torch.device("meta"))):
        with first as one, second as two, Counted() as counted:
            lite_ext.convert(leaves_, F32)
        mode = one if isinstance(one, LoggedFunctions) else two
        assert mode.seen.count(torch.Tensor.to) == 2
        assert counted.fast == 0


GRAD_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled(False)": lambda: torch.set_grad_enabled(False),
    "set_grad_enabled(True)": lambda: torch.set_grad_enabled(True),
    "inference_mode(False)": lambda: torch.inference_mode(False),
}


@pytest.mark.parametrize("name", GRAD_MODES)
def test_grad_modes(backend: Any, name: str) -> None:
    parameter, plain = nn.Parameter(low()), low()
    with GRAD_MODES[name]():
        ours = lite_ext.convert([parameter, plain, parameter + 1], F32)
        theirs = [leaf.to(F32) for leaf in (parameter, plain, parameter + 1)]
        model = LiteModule(Model("tensor"), "bf16-mixed")
        output, wanted = model(torch.ones(1, 4)), written_out(nn.Sequential(Model("tuple")), torch.ones(1, 4))[0]
    for one, other in zip([*ours, output], [*theirs, wanted], strict=True):
        assert (one.requires_grad, one.is_inference(), one.is_leaf) == (
            other.requires_grad,
            other.is_inference(),
            other.is_leaf,
        )


def test_grad_modes_nested_and_inside_of_the_model() -> None:
    class Inside(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                frozen = x * 2
            return x * 3, frozen

    x = torch.ones(2, requires_grad=True)
    live, frozen = LiteModule(Inside(), "bf16-mixed")(x)
    assert (live.requires_grad, frozen.requires_grad) == (True, False)
    with torch.no_grad(), torch.enable_grad():
        assert lite_ext.convert([x], BF16)[0].requires_grad


def test_saved_tensors_hooks() -> None:
    """Nothing is saved for a conversion: the hooks see what they see of `.to`."""
    inner, x = Model("tuple"), torch.randn(2, 4)
    packed: list[list[torch.dtype]] = []
    found = []
    for run in (LiteModule(inner, "bf16-mixed"), lambda x: written_out(inner, x)):
        seen: list[torch.dtype] = []
        with saved_tensors_hooks(lambda t, s=seen: (s.append(t.dtype), t)[1], lambda t: t):
            output = run(x)
        found.append(gradients(inner, output))
        packed.append(seen)
    assert packed[0] == packed[1] != []
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_save_on_cpu() -> None:
    inner, x = Model("tuple"), torch.randn(2, 4)
    with torch.autograd.graph.save_on_cpu():
        output = LiteModule(inner, "bf16-mixed")(x)
    torch.testing.assert_close(gradients(inner, output), gradients(inner, written_out(inner, x)), rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outside", [True, False], ids=["around the wrapper", "inside of it"])
def test_checkpointing(reentrant: bool, outside: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Model("tuple")

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    inner = Checkpointed()
    x = torch.randn(2, 4, requires_grad=True)
    if outside:
        output = checkpoint(LiteModule(inner.part, "bf16-mixed"), x, use_reentrant=reentrant)
    else:
        output = LiteModule(inner, "bf16-mixed")(x)
    loss = sum((y * y).sum() for y in output)
    loss.backward()
    ours, x.grad = x.grad, None
    parameters = [p.grad for p in inner.parameters()]
    inner.zero_grad()
    sum((y * y).sum() for y in written_out(inner.part, x)).backward()
    torch.testing.assert_close([ours, *parameters], [x.grad, *(p.grad for p in inner.parameters())])


def test_checkpoint_sequential() -> None:
    stages = nn.Sequential(*(LiteModule(nn.Linear(4, 4), "bf16-mixed") for _ in range(4)))
    x = torch.randn(2, 4, requires_grad=True)
    plain, saved = stages(x), checkpoint_sequential(stages, 2, x, use_reentrant=False)
    torch.testing.assert_close(plain, saved, rtol=0, atol=0)
    (one,), (other,) = torch.autograd.grad(plain.sum(), x), torch.autograd.grad(saved.sum(), x)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_determinism_check_of_checkpointing_sees_the_same_metadata() -> None:
    """Recomputed casts must have the dtypes and shapes of the first run: the check of torch compares them."""
    x = torch.randn(2, 4, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return lite_ext.convert({"y": (x.bfloat16().sin(),)}, F32)["y"][0].exp()

    checkpoint(run, x, use_reentrant=False, determinism_check="default").sum().backward()
    (wanted,) = torch.autograd.grad(x.bfloat16().sin().to(F32).exp().sum(), x)
    torch.testing.assert_close(x.grad, wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode() -> None:
    x = low().requires_grad_()

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * torch.nan

    with torch.autograd.detect_anomaly():
        good = lite_ext.convert([x], F32)[0]
        good.sum().backward()
        broken = Broken.apply(lite_ext.convert([x], F32)[0])
        with pytest.raises(RuntimeError, match="'BrokenBackward' returned nan values"):
            broken.sum().backward()


def test_all_at_once() -> None:
    with ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.autocast("cpu", BF16))
        stack.enter_context(torch.no_grad())
        stack.enter_context(saved_tensors_hooks(lambda t: t, lambda t: t))
        counted = stack.enter_context(Counted())
        result = lite_ext.convert([low(), nn.Parameter(low())], F32)
    assert counted.fast == 2
    assert [leaf.requires_grad for leaf in result] == [False, False]
