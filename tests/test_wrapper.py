"""The wrapper as a module: state, names, attributes, signature, subclasses, hooks, lifetime."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import lite_ext
from lite_ext import LiteModule

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Model(nn.Module):
    """A module with everything that a wrapper could get in the way of."""

    kind = "of the class"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(3))
        self.rate = 0.5
        self.getter_runs = 0
        self._hidden = "hidden"

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, factor: float = 1.0) -> torch.Tensor:
        """Return a batch."""
        return self.norm(self.first(x)) * self.scale * factor

    @property
    def costly(self) -> int:
        self.getter_runs += 1
        return self.getter_runs

    @costly.setter
    def costly(self, value: int) -> None:
        self.rate = value

    def greet(self, name: str) -> str:
        return f"{name} {self.rate}"


@pytest.fixture(params=["32-true", "bf16-mixed", "bf16-true"])
def pair(request: pytest.FixtureRequest) -> tuple[Model, LiteModule]:
    inner = Model()
    return inner, lite_ext.setup_module(inner, request.param)


Pair = tuple[Model, LiteModule]

# -------------------------------------------------------------------- state and names


def test_names_have_no_prefix_and_nothing_comes_twice(pair: Pair) -> None:
    inner, model = pair
    for method in ("named_parameters", "named_buffers", "named_children"):
        ours, theirs = list(getattr(model, method)()), list(getattr(inner, method)())
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        assert all(mine is its for (_, mine), (_, its) in zip(ours, theirs, strict=True))
    names = [name for name, _ in inner.named_parameters()]
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert [name for name, _ in model.named_modules()] == [name for name, _ in inner.named_modules()]
    assert next(iter(model.modules())) is model
    assert list(model.modules())[1:] == list(inner.modules())[1:]
    assert model.get_parameter("first.weight") is inner.first.weight
    assert model.get_submodule("norm") is inner.norm


def test_state_dict_round_trip(pair: Pair) -> None:
    inner, model = pair
    state = model.state_dict()
    assert list(state) == list(inner.state_dict())
    other = LiteModule(Model(), "bf16-mixed")
    result = other.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for name, value in inner.state_dict().items():
        assert torch.equal(other.module.state_dict()[name], value)
    plain = Model()
    plain.load_state_dict(state)
    assert torch.equal(plain.first.weight, inner.first.weight)
    prefixed = model.state_dict(prefix="a.", keep_vars=True)
    assert prefixed["a.first.weight"] is inner.first.weight


def test_load_state_dict_strict(pair: Pair) -> None:
    inner, model = pair
    state = model.state_dict()
    state["more"] = state.pop("scale")
    with pytest.raises(RuntimeError, match='(?s)Unexpected key.*"more".*|Missing key.*"scale"'):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["scale"], ["more"])


def test_load_state_dict_assign(pair: Pair) -> None:
    inner, model = pair
    state = {name: value.clone() for name, value in Model().state_dict().items()}
    state = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in state.items()}
    model.load_state_dict(state, assign=True)
    assert inner.first.weight.data_ptr() == state["first.weight"].data_ptr()
    assert dict(model.named_parameters())["first.weight"] is inner.first.weight
    assert model(torch.ones(2, 2)).dtype == F32


@pytest.mark.parametrize("assign", [False, True])
def test_state_within_another_module(pair: Pair, assign: bool) -> None:
    inner, model = pair
    outer = nn.Sequential(model, nn.Linear(3, 1))
    plain = nn.Sequential(inner, outer[1])
    assert list(outer.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in outer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    state = {name: torch.full_like(value, 3) for name, value in plain.state_dict().items()}
    result = outer.load_state_dict(state, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(inner.first.weight, torch.full((3, 2), 3.0, dtype=inner.first.weight.dtype))
    assert torch.equal(inner.scale, torch.full_like(inner.scale, 3))
    assert (inner.scale.data_ptr() == state["0.scale"].data_ptr()) == assign
    del state["0.scale"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.scale"'):
        outer.load_state_dict(state)


class Versioned(nn.Module):
    """Keeps state of its own, and has had other names before."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.extra: Any = "nothing"
        self.loaded_version: Any = None

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *args: Any) -> None:
        self.loaded_version = local.get("version")
        if prefix + "old" in state:
            state[prefix + "weight"] = state.pop(prefix + "old")
        super()._load_from_state_dict(state, prefix, local, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("nested", [False, True])
def test_extra_state_version_and_renamed_keys(nested: bool) -> None:
    source, target = Versioned(), Versioned()
    source.extra = [1, 2]
    modules: list[nn.Module] = [LiteModule(source), LiteModule(target)]
    if nested:
        modules = [nn.Sequential(module) for module in modules]
    state = modules[0].state_dict()
    prefix = "0." if nested else ""
    assert state[prefix + "_extra_state"] == {"extra": [1, 2]}
    assert state._metadata["0" if nested else ""] == {"version": 2}
    state[prefix + "old"] = state.pop(prefix + "weight") * 5
    modules[1].load_state_dict(state)
    assert target.extra == [1, 2]
    assert target.loaded_version == 2
    assert target.weight.item() == 5


def test_parameters_added_later_are_seen(pair: Pair) -> None:
    inner, model = pair
    inner.late = nn.Parameter(torch.ones(1))
    model.later = nn.Linear(1, 1)
    assert "late" in dict(model.named_parameters())
    assert inner.later is model.later
    assert "later.weight" in model.state_dict()
    model.register_buffer("counts", torch.zeros(1), persistent=False)
    assert inner.counts is model.counts
    assert "counts" not in inner.state_dict()


# -------------------------------------------------------------------- what reaches the module


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (lambda m: m.half(), F16),
        (lambda m: m.to(BF16), BF16),
        (lambda m: m.double(), F64),
        (lambda m: m.bfloat16().float(), F32),
        (lambda m: m.to(torch.ones(1, dtype=F64)), F64),
        (lambda m: m.type(F16), F16),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_dtype_changes_reach_the_module(pair: Pair, change: Any, dtype: torch.dtype, nested: bool) -> None:
    inner, model = pair
    target = nn.Sequential(model) if nested else model
    assert change(target) is target
    assert {parameter.dtype for parameter in inner.parameters()} == {dtype}
    assert inner.norm.running_mean is not None
    assert inner.norm.running_mean.dtype == dtype
    assert model.dtype == dtype
    assert next(iter(model.parameters())) is next(iter(inner.parameters()))


def test_device_of_the_parameters() -> None:
    model = LiteModule(Model().to("meta"))
    assert model.device.type == "meta"
    assert model.to_empty(device="cpu").device.type == "cpu"
    assert model.module.scale.device.type == "cpu"
    assert LiteModule(nn.ReLU()).device.type == "cpu"
    assert LiteModule(nn.ReLU()).dtype == F32
    counter = nn.Module()
    counter.count = nn.Buffer(torch.zeros((), dtype=torch.int64))
    counter.mean = nn.Buffer(torch.zeros((), dtype=F64))
    assert LiteModule(counter).dtype == F64


def test_train_and_eval(pair: Pair) -> None:
    inner, model = pair
    outer = nn.Sequential(model)
    for switch, mode in ((model.eval, False), (model.train, True), (outer.eval, False), (outer.train, True)):
        switch()
        assert (model.training, inner.training, inner.norm.training) == (mode, mode, mode)
    assert model.train(False) is model
    assert inner.training is False
    assert LiteModule(inner).training is False


def test_training_set_on_the_module_itself_is_seen_by_the_forward(pair: Pair) -> None:
    inner, model = pair
    inner.eval()
    x = torch.randn(4, 2)
    assert torch.equal(model(x), model(x))
    assert torch.equal(inner.norm.running_mean, torch.zeros(3))  # type: ignore[arg-type]


def test_requires_grad_and_zero_grad(pair: Pair) -> None:
    inner, model = pair
    model(torch.randn(4, 2).to(model.dtype)).sum().backward()
    assert all(parameter.grad is not None for parameter in inner.parameters())
    model.zero_grad(set_to_none=False)
    assert inner.scale.grad is not None
    assert not inner.scale.grad.any()
    model.zero_grad()
    assert inner.scale.grad is None
    assert model.requires_grad_(False) is model
    assert not any(parameter.requires_grad for parameter in inner.parameters())
    nn.Sequential(model).requires_grad_()
    assert all(parameter.requires_grad for parameter in inner.parameters())


@pytest.mark.parametrize("nested", [False, True])
def test_apply_visits_every_module_once(pair: Pair, nested: bool) -> None:
    inner, model = pair
    visited: list[nn.Module] = []
    outer = nn.Sequential(model) if nested else model
    assert outer.apply(visited.append) is outer
    assert visited.count(inner) == visited.count(model) == visited.count(inner.first) == 1
    model.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Linear) else None)
    assert not inner.first.weight.any()


# -------------------------------------------------------------------- construction


def test_wrapping_what_cannot_be_wrapped() -> None:
    wrapper = LiteModule(nn.ReLU())
    for make in (LiteModule, lite_ext.setup_module):
        with pytest.raises(TypeError) as caught:
            make(wrapper, "bf16-mixed")
        assert str(caught.value) == (
            "the module is a LiteModule already: wrapped twice, its outputs would be converted twice. "
            "Wrap its .module instead (a wrapper deeper inside is fine)"
        )
        with pytest.raises(TypeError, match=r"LiteModule wraps an nn\.Module, got 'model' of type str"):
            make("model", "bf16-mixed")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"LiteModule wraps an nn\.Module, got <class .*ReLU'> of type type"):
            make(nn.ReLU, "bf16-mixed")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="the module is a LiteModule already"):
            make(nn.ReLU(), "bf16-mixed", original_module=wrapper)
        with pytest.raises(TypeError, match=r"LiteModule wraps an nn\.Module, got 3 of type int"):
            make(nn.ReLU(), "bf16-mixed", original_module=3)  # type: ignore[arg-type]
    assert isinstance(LiteModule(nn.Sequential(wrapper)), LiteModule)


def test_refused_module_is_not_converted() -> None:
    inner = Model()
    with pytest.raises(TypeError):
        lite_ext.setup_module(inner, "bf16-true", output_dtype=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ambiguous_input"):
        lite_ext.setup_module(inner, "bf16-true", ambiguous_input="perhaps")
    assert inner.scale.dtype == F32


def test_lifetime_without_garbage_collection() -> None:
    gc.disable()
    try:
        for precision in ("32-true", "bf16-mixed", "bf16-true"):
            inner = Model()
            model = lite_ext.setup_module(inner, precision, output_dtype="input", skip_inputs=("mask",))
            inner_dies, model_dies = weakref.ref(inner), weakref.ref(model)
            model(torch.ones(2, 2, dtype=model.dtype))
            inspect.signature(model.forward)
            model.greet("a")
            del model
            assert model_dies() is None
            assert inner_dies() is inner
            del inner
            assert inner_dies() is None
    finally:
        gc.enable()


# -------------------------------------------------------------------- hooks on the state


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("on_wrapper", [False, True])
def test_hooks_on_the_state_run_once_wherever_they_were_registered(pair: Pair, nested: bool, on_wrapper: bool) -> None:
    inner, model = pair
    runs: list[str] = []
    target: nn.Module = model if on_wrapper else inner
    target.register_state_dict_pre_hook(lambda *args: runs.append("save pre"))
    target.register_state_dict_post_hook(lambda *args: runs.append("save post"))
    target.register_load_state_dict_pre_hook(lambda *args: runs.append("load pre"))
    target.register_load_state_dict_post_hook(lambda *args: runs.append("load post"))
    whole: nn.Module = nn.Sequential(model) if nested else model
    whole.load_state_dict(whole.state_dict())
    assert runs == ["save pre", "save post", "load pre", "load post"]


def test_training_is_that_of_the_module(pair: Pair) -> None:
    inner, model = pair
    model.training = False
    assert not inner.training
    assert inner.first.training  # as with any module, only train() and eval() reach those below
    inner.training = True
    assert model.training
    assert "training" not in vars(model)
