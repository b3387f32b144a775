"""What a wrapper shows of its module, and what it keeps to itself: attributes, signature, subclasses, hooks."""

from __future__ import annotations

import inspect
import typing
from collections import OrderedDict
from typing import Any

import pytest
import torch
from test_wrapper import Model, Pair
from test_wrapper import pair as pair
from torch import nn

from lite_ext import LiteModule

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def test_reads_pass_through(pair: Pair) -> None:
    inner, model = pair
    assert model.module is inner
    assert model.first is inner.first
    assert model.scale is inner.scale
    assert (model.rate, model.kind) == (0.5, "of the class")
    assert model.greet("hello") == "hello 0.5"
    assert model.greet.__doc__ == Model.greet.__doc__
    assert model.costly == 1
    assert model.costly == 2
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'missing'"):
        _ = model.missing
    assert not hasattr(model, "missing")


def test_writes_and_deletes_pass_through(pair: Pair) -> None:
    inner, model = pair
    model.rate = 0.25
    model.fresh = "new"
    model.scale = nn.Parameter(torch.zeros(3))
    assert (inner.rate, inner.fresh) == (0.25, "new")
    assert not {"rate", "fresh", "scale"} & set(vars(model))
    assert model.state_dict()["scale"].eq(0).all()
    with pytest.raises(TypeError, match="cannot assign 'str' as parameter 'scale'"):
        model.scale = "text"
    del model.fresh
    assert not hasattr(inner, "fresh")
    del model.scale
    assert "scale" not in dict(model.named_parameters())
    with pytest.raises(AttributeError):
        del model.fresh


def test_writing_runs_setters_but_no_getters(pair: Pair) -> None:
    inner, model = pair
    model.costly = 7
    assert inner.rate == 7
    assert inner.getter_runs == 0


def test_private_and_special_names_are_the_wrappers_own(pair: Pair) -> None:
    inner, model = pair
    with pytest.raises(AttributeError, match="'LiteModule' object has no attribute '_hidden'"):
        _ = model._hidden
    model._hidden = "of the wrapper"
    assert (inner._hidden, model._hidden) == ("hidden", "of the wrapper")
    del model._hidden
    assert inner._hidden == "hidden"
    inner.__len__ = lambda: 3
    inner.__deepcopy__ = None
    assert not hasattr(model, "__len__")
    assert not hasattr(model, "__deepcopy__")


class Guarded(nn.Module):
    """Answers for every name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return f"made up {name}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_module_that_answers_for_every_name() -> None:
    model = LiteModule(Guarded(), "bf16-mixed")
    assert model.anything == "made up anything"
    assert not hasattr(model, "_anything")
    assert model(torch.ones(1)).dtype == F32


class Uneasy(nn.Module):
    @property
    def broken(self) -> int:
        raise ValueError("not now")

    @property
    def dtype(self) -> str:
        return "of the module"

    def forward(self) -> None: ...


def test_property_that_raises() -> None:
    model = LiteModule(Uneasy())
    with pytest.raises(ValueError, match="not now"):
        _ = model.broken
    assert model.dtype == F32  # the wrapper's own names come first
    with pytest.raises(AttributeError):
        model.dtype = F64


def test_dir(pair: Pair) -> None:
    _, model = pair
    names = dir(model)
    assert {"rate", "greet", "first", "scale", "costly", "module", "precision", "mark_forward_method"} <= set(names)
    assert "_hidden" not in names
    assert names == sorted(set(names))


# -------------------------------------------------------------------- representation and signature


def test_repr_shows_module_precision_and_policy() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    lines = repr(LiteModule(inner, "bf16-mixed")).splitlines()
    assert lines[:3] == ["LiteModule(", "  precision='bf16-mixed', output_dtype='default'", "  (module): Sequential("]
    assert lines[-1] == ")"
    assert sum("Linear" in line for line in lines) == 1
    model = LiteModule(inner, 64, output_dtype="input", skip_inputs=["t"], skip_outputs=["b", "a"])
    settings = (
        "  precision='64-true', output_dtype='input', ambiguous_input='error', "
        "skip_inputs=('t',), skip_outputs=('a', 'b')"
    )
    assert repr(model).splitlines()[1] == settings
    assert "output_dtype=torch.float16" in repr(LiteModule(inner, output_dtype=torch.float16))


def test_repr_of_a_source() -> None:
    text = repr(LiteModule(nn.ReLU(), source=[BF16, torch.float16]))
    assert "output_dtype='default', source={torch.float16, torch.bfloat16}\n" in text
    assert "source" not in repr(LiteModule(nn.ReLU()))


def test_signature_of_the_inner_forward(pair: Pair) -> None:
    inner, model = pair
    wanted = inspect.signature(inner.forward)
    assert list(wanted.parameters) == ["x", "mask", "factor"]
    assert inspect.signature(model) == wanted
    assert inspect.signature(model.forward) == wanted
    assert model.forward.__self__ is model
    assert model.forward(torch.ones(2, 2)).dtype == F32


# -------------------------------------------------------------------- subclasses


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


class KeepsIds(LiteModule):
    """Changes both ends by the public methods."""

    def convert_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs, inputs = super().convert_input(args, kwargs)
        return (*args, "added"), kwargs, inputs

    def convert_output(self, output: Any, inputs: Any) -> Any:
        first, rest = output
        return super().convert_output(first, inputs), rest


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, word: str = "default") -> tuple[torch.Tensor, Any]:
        return x + 1, (x + 2, word)


@pytest.mark.parametrize("policy", ["default", "input", F64])
def test_overridden_conversions(policy: Any) -> None:
    model = KeepsIds(Echo(), "bf16-mixed", output_dtype=policy)
    first, (second, word) = model(torch.ones(1))
    assert first.dtype == (F64 if policy == F64 else F32)
    assert (second.dtype, word) == (BF16, "added")
    assert repr(model).startswith("KeepsIds(")


class Doubles(LiteModule):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, rest = super().forward(*args, **kwargs)
        return first * 2, rest


def test_overridden_forward() -> None:
    model = Doubles(Echo(), "bf16-mixed")
    first, (second, _) = model(torch.ones(1))
    assert (first.item(), first.dtype, second.dtype) == (4.0, F32, F32)


def test_overriding_on_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LiteModule(Echo(), "bf16-mixed")
    assert model(torch.ones(1))[0].dtype == F32
    monkeypatch.setattr(model, "convert_output", lambda output, inputs: "replaced")
    assert model(torch.ones(1)) == "replaced"


class WithSetting(LiteModule):
    """Has a constructor and attributes of its own."""

    limit = 3

    def __init__(self, module: nn.Module, limit: int) -> None:
        super().__init__(module, "bf16-mixed")
        self._own = "private"
        self.limit = limit

    @property
    def twice(self) -> int:
        return self.limit * 2

    def shout(self) -> str:
        return "wrapper"


def test_names_of_the_subclass_are_its_own() -> None:
    model = WithSetting(Echo(), 5)
    assert (model.limit, model.twice, model._own, model.shout()) == (5, 10, "private", "wrapper")
    assert not hasattr(model.module, "limit")
    model.limit = 6
    assert model.twice == 12
    del model.limit
    assert model.limit == 3


# -------------------------------------------------------------------- hooks

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


def count_hooks(module: nn.Module) -> int:
    on_tensors = sum(len(tensor._backward_hooks or {}) for tensor in module.parameters())
    return on_tensors + sum(len(getattr(part, name)) for part in module.modules() for name in HOOKS)


def test_hooks_see_the_dtypes_of_their_side() -> None:
    inner = nn.Linear(2, 2)
    model = LiteModule(inner, "bf16-mixed")
    seen: list[Any] = []
    handles = [
        model.register_forward_pre_hook(lambda m, args: seen.append(("wrapper in", m, args[0].dtype))),
        inner.register_forward_pre_hook(lambda m, args: seen.append(("module in", m, args[0].dtype))),
        inner.register_forward_hook(lambda m, args, out: seen.append(("module out", m, out.dtype))),
        model.register_forward_hook(lambda m, args, out: seen.append(("wrapper out", m, out.dtype))),
    ]
    wanted = [
        ("wrapper in", model, F32),
        ("module in", inner, BF16),
        ("module out", inner, BF16),
        ("wrapper out", model, F32),
    ]
    model(torch.ones(1, 2))
    assert seen == wanted
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 2))
    assert seen == wanted


def test_hooks_may_change_what_they_see() -> None:
    model = LiteModule(Same(), "bf16-mixed")
    model(torch.ones(1))  # the first call was without hooks
    pre = model.register_forward_pre_hook(lambda m, args: (args[0] * 3,))
    post = model.register_forward_hook(lambda m, args, out: out.double())
    out = model(torch.ones(1))
    assert (out.item(), out.dtype) == (3.0, F64)
    pre.remove()
    post.remove()
    with_kwargs = model.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {"input": torch.full((1,), 7.0)}), with_kwargs=True
    )
    assert model(input=torch.ones(1)).item() == 7.0
    with_kwargs.remove()


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_hook_after_the_dict_of_hooks_was_replaced(kind: str) -> None:
    model = LiteModule(Same(), "bf16-mixed")
    model(torch.ones(1))
    setattr(model, f"_{kind}_hooks", OrderedDict())  # the way that some remove all hooks
    seen: list[Any] = []
    getattr(model, f"register_{kind}_hook")(lambda *args: seen.append(args[0]))
    model(torch.ones(1))
    assert seen == [model]


@pytest.mark.parametrize("side", ["wrapper", "module"])
def test_backward_hooks(side: str) -> None:
    inner = nn.Linear(2, 2)
    model = LiteModule(inner, "bf16-mixed")
    model(torch.ones(1, 2))
    seen: list[Any] = []
    target = model if side == "wrapper" else inner
    target.register_full_backward_hook(lambda m, grads_in, grads_out: seen.append((m, grads_out[0].dtype)))
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert seen == [(target, F32 if side == "wrapper" else BF16)]


def test_always_called_hook_and_global_hooks() -> None:
    model = LiteModule(Echo(), "bf16-mixed")
    model(torch.ones(1))
    seen: list[Any] = []
    model.register_forward_hook(lambda m, args, out: seen.append(out), always_call=True)
    with pytest.raises(TypeError):
        model(torch.ones(1), 2, 3)
    assert seen == [None]
    called: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: called.append(m))
    try:
        model(torch.ones(1))
    finally:
        handle.remove()
    assert called == [model.module, model]


@pytest.mark.parametrize("output_dtype", ["default", "keep"])
def test_calls_add_no_hooks(output_dtype: str) -> None:
    class ReturnsParameter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> Any:
            return self.weight, x * self.weight

        def other(self, x: torch.Tensor) -> Any:
            return self.weight

    model = LiteModule(ReturnsParameter(), "bf16-mixed", output_dtype=output_dtype)
    model.mark_forward_method("other")
    before = count_hooks(model)
    for _ in range(3):
        weight, out = model(torch.ones(2))
        model.other(torch.ones(2))
        assert weight is model.weight
        assert out.grad_fn is not None
        out.sum().backward()
    assert count_hooks(model) == before == 0


# -------------------------------------------------------------------- what tools read


def test_signature_of_the_class_is_that_of_its_constructor() -> None:
    assert list(inspect.signature(LiteModule).parameters)[:2] == ["forward_module", "precision"]
    assert list(inspect.signature(KeepsIds).parameters)[:2] == ["forward_module", "precision"]


def test_type_hints_of_the_inner_forward(pair: Pair) -> None:
    inner, model = pair
    assert typing.get_type_hints(model.forward) == typing.get_type_hints(inner.forward)
    assert model.forward.__doc__ == inner.forward.__doc__ == "Return a batch."


class Unfinished(LiteModule):
    """A getter of the class that fails does not make way for the module's attribute of that name."""

    @property
    def rate(self) -> float:
        raise AttributeError("not yet known")


def test_getter_of_a_subclass_that_fails(pair: Pair) -> None:
    inner, _ = pair
    assert inner.rate == 0.5
    with pytest.raises(AttributeError, match="not yet known"):
        _ = Unfinished(inner).rate
