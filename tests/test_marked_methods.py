"""Methods that run the forward pass: marked, redirected through a strategy's module, guarded where unmarked."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lite_ext import LiteModule

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.name = "model"

    def forward(self, x: torch.Tensor) -> Any:
        return {"forward": self.linear(x)}

    def training_step(self, x: torch.Tensor) -> Any:
        return {"training": self.linear(x)}

    def encode(self, x: torch.Tensor, *, factor: float = 1.0) -> Any:
        """Return the encoded batch."""
        assert torch.is_autocast_enabled("cpu")
        assert x.dtype == BF16
        return {"encode": self.linear(x) * factor}

    def by_forward(self, x: torch.Tensor) -> Any:
        return {"outer": self.forward(x)["forward"] + 1, "inner": self(x)["forward"]}

    def fails(self, x: torch.Tensor) -> Any:
        self.linear(x)
        raise ArithmeticError("in the method")

    def describe(self) -> str:
        return f"{self.name} {sum(p.numel() for p in self.parameters())}"

    def counts(self) -> Iterator[int]:
        yield from range(2)

    @property
    def title(self) -> str:
        return "a property"

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Strategy(nn.Module):
    """Stands for DistributedDataParallel: its forward runs the module's, and must not be gone past."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module(*args, **kwargs)


class Picky(Strategy):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("before the module")


@pytest.fixture
def plain() -> tuple[Model, LiteModule]:
    inner = Model()
    return inner, LiteModule(inner, "bf16-mixed")


@pytest.fixture
def behind() -> tuple[Model, Strategy, LiteModule]:
    inner = Model()
    outer = Strategy(inner)
    return inner, outer, LiteModule(outer, "bf16-mixed", original_module=inner)


X = torch.ones(1, 2)

# -------------------------------------------------------------------- without a strategy


def test_marked_method_runs_under_the_precision(plain: tuple[Model, LiteModule]) -> None:
    _, model = plain
    with pytest.raises(AssertionError):
        model.encode(X)
    model.mark_forward_method("encode")
    out = model.encode(X, factor=2.0)
    assert list(out) == ["encode"]
    assert out["encode"].dtype == F32
    assert not torch.is_autocast_enabled("cpu")
    assert model.encode.__doc__ == Model.encode.__doc__
    assert model.encode.__name__ == "encode"
    with pytest.raises(TypeError):
        model.encode(X, 3, 4)
    with pytest.raises(AssertionError):
        model.module.encode(X)


def test_marking_by_the_method_itself(plain: tuple[Model, LiteModule]) -> None:
    for method in (Model.encode, plain[0].encode, plain[1].encode):
        model = LiteModule(Model(), "bf16-mixed")
        model.mark_forward_method(method)
        assert model.encode(X)["encode"].dtype == F32


@pytest.mark.parametrize("policy", ["input", "keep", F64])
def test_policies_hold_for_marked_methods(policy: Any) -> None:
    model = LiteModule(Model(), "bf16-mixed", output_dtype=policy)
    model.mark_forward_method("encode")
    wanted = BF16 if policy == "keep" else F64
    assert model.encode(X.double())["encode"].dtype == wanted


def test_steps_of_lightning_are_marked_from_the_start(plain: tuple[Model, LiteModule]) -> None:
    assert plain[1].training_step(X)["training"].dtype == F32


@pytest.mark.parametrize("method", ["absent", "name", "title", "linear", "", "__missing__"])
def test_no_such_method(plain: tuple[Model, LiteModule], method: str) -> None:
    with pytest.raises(AttributeError, match=f"Model has no method '{method}' to mark"):
        plain[1].mark_forward_method(method)


@pytest.mark.parametrize("method", [3, None, object()])
def test_neither_a_method_nor_a_name(plain: tuple[Model, LiteModule], method: Any) -> None:
    with pytest.raises(TypeError, match="mark_forward_method takes a method or its name, got"):
        plain[1].mark_forward_method(method)


# -------------------------------------------------------------------- through a strategy's module


def test_forward_goes_through(behind: tuple[Model, Strategy, LiteModule]) -> None:
    inner, outer, model = behind
    assert model.module is inner
    assert model(X)["forward"].dtype == F32
    assert outer.calls == 1
    assert [name for name, _ in model.named_parameters()] == ["linear.weight", "linear.bias"]
    assert list(model.state_dict()) == ["linear.weight", "linear.bias"]


@pytest.mark.parametrize("method", ["encode", "training_step"])
def test_marked_method_goes_through(behind: tuple[Model, Strategy, LiteModule], method: str) -> None:
    inner, outer, model = behind
    model.mark_forward_method(method)
    before = dict(vars(inner))
    for call in range(1, 3):
        (value,) = getattr(model, method)(X).values()
        assert value.dtype == F32
        assert outer.calls == call
        assert dict(vars(inner)) == before
    assert "forward" in model(X)
    assert "forward" in outer(X)


def test_marked_method_that_calls_the_forward(behind: tuple[Model, Strategy, LiteModule]) -> None:
    inner, outer, model = behind
    model.mark_forward_method("by_forward")
    out = model.by_forward(X)
    assert torch.equal(out["outer"], (out["inner"].to(BF16) + 1).float())
    assert outer.calls == 1
    assert "forward" not in vars(inner)


def test_module_with_a_forward_of_its_own(behind: tuple[Model, Strategy, LiteModule]) -> None:
    inner, outer, model = behind

    def own(x: torch.Tensor) -> str:
        return "own"

    inner.forward = own  # type: ignore[method-assign, assignment]
    model.mark_forward_method("encode")
    assert list(model.encode(X)) == ["encode"]
    assert inner.forward is own
    assert model(X) == "own"


@pytest.mark.parametrize("where", ["inputs", "strategy", "method", "outputs", "arguments"])
def test_failing_marked_call_leaves_nothing_behind(where: str) -> None:
    inner = Model()
    outer = Picky(inner) if where == "strategy" else Strategy(inner)
    model = LiteModule(outer, "bf16-mixed", output_dtype="input", original_module=inner)
    for method in ("encode", "fails"):
        model.mark_forward_method(method)
    before = dict(vars(inner))
    cyclic: list[Any] = [X]
    cyclic.append(cyclic)
    failing: dict[str, tuple[type[Exception], Any]] = {
        "inputs": (RecursionError, lambda: model.encode(cyclic)),
        "strategy": (ConnectionError, lambda: model.encode(X)),
        "method": (ArithmeticError, lambda: model.fails(X)),
        "outputs": (ValueError, lambda: model.encode(torch.arange(2))),
        "arguments": (TypeError, lambda: model.encode(X, wrong=1)),
    }
    error, call = failing[where]
    with pytest.raises(error):
        call()
    assert dict(vars(inner)) == before
    assert not torch.is_autocast_enabled("cpu")
    if where != "strategy":
        assert list(model(X)) == ["forward"]  # not the method of the failed call
        assert list(outer(X)) == ["forward"]
        assert list(model.encode(X)) == ["encode"]


def test_threads_run_different_methods_of_one_module(behind: tuple[Model, Strategy, LiteModule]) -> None:
    inner, _, model = behind
    for method in ("encode", "by_forward"):
        model.mark_forward_method(method)
    wanted = {"encode": ["encode"], "by_forward": ["outer", "inner"], "training_step": ["training"]}
    calls = [*wanted, "forward"] * 2
    start = threading.Barrier(len(calls), timeout=60)
    results: list[Any] = []

    def work(method: str) -> None:
        try:
            start.wait()
            for _ in range(30):
                out = model(X) if method == "forward" else getattr(model, method)(X)
                assert list(out) == wanted.get(method, ["forward"])
            results.append(None)
        except BaseException as error:
            results.append(error)

    workers = [threading.Thread(target=work, args=(method,)) for method in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert results == [None] * len(calls)
    assert "forward" not in vars(inner)


# -------------------------------------------------------------------- unmarked methods


def hooks_of_all_modules() -> int:
    return len(nn.modules.module._global_forward_pre_hooks)


@pytest.mark.parametrize("method", ["encode", "by_forward", "fails"])
def test_unmarked_method_that_runs_a_submodule(behind: tuple[Model, Strategy, LiteModule], method: str) -> None:
    inner, outer, model = behind
    with torch.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError) as caught:
        getattr(model, method)(X.to(BF16))
    assert str(caught.value) == (
        f"the method {method!r} runs the forward of a submodule past the module that the strategy made: "
        f"call mark_forward_method({method!r}) on the wrapper first"
    )
    assert hooks_of_all_modules() == 0
    assert inner.linear(X).dtype == F32  # used directly, nothing is refused
    assert list(model(X)) == ["forward"]
    assert outer.calls == 1


def test_unmarked_method_that_runs_no_submodule(behind: tuple[Model, Strategy, LiteModule]) -> None:
    _, outer, model = behind
    assert model.describe() == "model 6"
    assert list(model.counts()) == [0, 1]
    assert model.static(X).dtype == F32
    assert model.title == "a property"
    assert outer.calls == 0
    assert hooks_of_all_modules() == 0


def test_other_modules_and_other_threads_are_not_refused(behind: tuple[Model, Strategy, LiteModule]) -> None:
    inner, _, model = behind
    elsewhere = nn.Linear(2, 2)
    results: list[Any] = []

    def describe() -> str:
        results.append(elsewhere(X).dtype)
        worker = threading.Thread(target=lambda: results.append(inner.linear(X).dtype))
        worker.start()
        worker.join(60)
        return "described"

    class Tells(Model):
        def tell(self) -> str:
            return describe()

    inner.__class__ = Tells
    assert model.tell() == "described"
    assert results == [F32, F32]


def test_without_a_strategy_nothing_is_guarded(plain: tuple[Model, LiteModule]) -> None:
    assert list(plain[1].by_forward(X)) == ["outer", "inner"]


# -------------------------------------------------------------------- the real one


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch is built without gloo")
@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel() -> None:
    inner = Model()
    reference = LiteModule(copy.deepcopy(inner), "bf16-mixed")
    reduced: list[int] = []

    def counts(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
        reduced.append(bucket.buffer().numel())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    outer = DistributedDataParallel(inner)
    outer.register_comm_hook(None, counts)
    model = LiteModule(outer, "bf16-mixed", original_module=inner)
    for each in (model, reference):
        each.mark_forward_method("encode")
    assert [name for name, _ in model.named_parameters()] == ["linear.weight", "linear.bias"]
    for call in range(1, 4):
        for each in (model, reference):
            each.zero_grad()
            out = each.encode(X)["encode"] if call != 2 else each(X)["forward"]
            assert out.dtype == F32
            out.sum().backward()
        assert reduced == [6] * call  # DDP exchanged the gradients, of every parameter and once
        assert inner.linear.weight.grad is not None
        assert reference.linear.weight.grad is not None
        assert torch.equal(inner.linear.weight.grad, reference.linear.weight.grad)
    with pytest.raises(RuntimeError, match="mark_forward_method"):
        model.by_forward(X)
    assert "forward" not in vars(inner)


def test_a_skipped_parameter_is_that_of_the_method() -> None:
    class TwoOrders(nn.Module):
        def forward(self, scale: torch.Tensor, x: torch.Tensor) -> Any:
            return scale.dtype, x.dtype

        def validation_step(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
            return scale.dtype, x.dtype

    model = LiteModule(TwoOrders(), "bf16-mixed", skip_inputs=("scale",))
    one = torch.ones(1)
    assert model(one, one) == (torch.float32, torch.bfloat16)
    assert model.validation_step(one, one) == (torch.float32, torch.bfloat16)
    assert model.validation_step(one, scale=one) == (torch.float32, torch.bfloat16)


def test_compiled_module_is_no_strategy() -> None:
    inner = Model()
    model = LiteModule(torch.compile(inner, backend="eager"), "bf16-mixed")
    assert model.by_forward(X)["inner"].dtype == F32
    model.mark_forward_method("encode")
    assert model.encode(X)["encode"].dtype == F32


@pytest.mark.parametrize("bound", [False, True])
def test_method_set_on_the_instance(bound: bool) -> None:
    inner = Model()

    def step(self: Model, x: torch.Tensor) -> Any:
        return x.dtype, torch.is_autocast_enabled("cpu"), self.linear(x)

    if bound:
        inner.step = types.MethodType(step, inner)
    else:
        inner.step = lambda x: step(inner, x)
    model = LiteModule(inner, "bf16-mixed")
    model.mark_forward_method("step")
    seen, autocasts, out = model.step(X)
    assert (seen, autocasts, out.dtype) == (BF16, True, F32)


def test_skipped_parameters_of_a_method_in_every_position() -> None:
    class Positional(nn.Module):
        def forward(self, scale: torch.Tensor) -> Any:
            return scale.dtype

        def validation_step(self, x: Any, scale: Any, /, *rest: Any, **more: Any) -> Any:
            return x.dtype, scale.dtype, [value.dtype for value in rest], more["other"].dtype, self_dtype(self)

    def self_dtype(module: nn.Module) -> torch.dtype:
        return model(one)

    model = LiteModule(Positional(), "bf16-mixed", skip_inputs=("scale", "rest", "x_of_another"))
    one = torch.ones(1)
    assert model.validation_step(one, one, one, other=one) == (BF16, F32, [F32], BF16, F32)
