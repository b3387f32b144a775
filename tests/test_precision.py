"""What a precision string means, and what is in force inside a forward that runs under it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lite_ext
from lite_ext import LiteModule, Precision

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# name: dtype of parameters, inputs, autocast, default inside the forward; None: as it is
ROWS: dict[str, tuple[torch.dtype | None, ...]] = {
    "32-true": (None, None, None, None),
    "64-true": (F64, F64, None, F64),
    "16-true": (F16, F16, None, F16),
    "bf16-true": (BF16, BF16, None, BF16),
    "16-mixed": (None, F16, F16, None),
    "bf16-mixed": (None, BF16, BF16, None),
}
ALIASES = {
    32: "32-true",
    "32": "32-true",
    64: "64-true",
    "64": "64-true",
    16: "16-mixed",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}


class Probe(nn.Module):
    """Notes what is in force inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        self.seen = {
            "input": x.dtype,
            "made": torch.zeros(()).dtype,
            "autocast": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        }
        if fail:
            raise ArithmeticError("inside the forward")
        return x @ self.weight


@pytest.fixture
def default() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ROWS)
def test_table(name: str) -> None:
    row = lite_ext.precision(name)
    assert isinstance(row, Precision)
    assert row.name == name
    assert (row.parameter_dtype, row.input_dtype, row.autocast_dtype, row.default_dtype) == ROWS[name]
    assert repr(row) == f"precision({name!r})"
    assert row == lite_ext.precision(name)
    assert hash(row) == hash(lite_ext.precision(name))
    assert row != name


def test_precisions_differ() -> None:
    assert len({lite_ext.precision(name) for name in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases(alias: str | int, name: str) -> None:
    assert lite_ext.precision(alias) == lite_ext.precision(name)
    assert LiteModule(Probe(), alias).precision == lite_ext.precision(name)


@pytest.mark.parametrize(
    ("spec", "near"),
    [
        ("bf16_mixed", "bf16-mixed"),
        ("bf-16-mixed", "bf16-mixed"),
        ("BF16-true", "bf16-true"),
        ("16mixed", "16-mixed"),
        ("32-tru", "32-true"),
        ("64true", "64-true"),
        ("bf1", "bf16"),
        (33, "32"),
    ],
)
def test_unknown_name_with_the_nearest_match(spec: str | int, near: str) -> None:
    with pytest.raises(ValueError) as caught:
        LiteModule(Probe(), spec)
    message = str(caught.value)
    assert message.startswith(f"precision {spec!r} is not known: did you mean {near!r}? Valid: '32-true', '64-true', ")
    for valid in (*ROWS, *ALIASES):
        assert repr(valid) in message


@pytest.mark.parametrize("spec", ["", "quux", 7])
def test_unknown_name_near_nothing(spec: str | int) -> None:
    with pytest.raises(ValueError, match=r"is not known\. Valid: '32-true'") as caught:
        lite_ext.precision(spec)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("spec", [None, True, 16.0, torch.bfloat16, object(), Precision, ["bf16-mixed"], nn.ReLU()])
def test_neither_a_name_nor_a_precision(spec: Any) -> None:
    with pytest.raises(TypeError, match="precision must be a name such as 'bf16-mixed' or an object with") as caught:
        LiteModule(Probe(), spec)
    assert str(caught.value).endswith(f"of type {type(spec).__name__}")


@pytest.mark.parametrize("name", ROWS)
def test_inside_and_after_the_forward(name: str) -> None:
    parameters, inputs, autocast, inner_default = ROWS[name]
    probe = Probe()
    model = lite_ext.setup_module(probe, name)
    assert model.precision == lite_ext.precision(name)
    assert probe.weight.dtype == (parameters or F32)
    assert probe.steps.dtype == torch.int64
    assert model.dtype == (parameters or F32)
    out = model(torch.ones(1, 2))
    assert probe.seen == {"input": inputs or F32, "made": inner_default or F32, "autocast": autocast}
    assert out.dtype == F32
    assert torch.equal(out, torch.full((1, 2), 2.0))
    assert torch.get_default_dtype() == F32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ROWS)
def test_forward_that_raises_leaves_nothing_behind(name: str) -> None:
    probe = Probe()
    model = lite_ext.setup_module(probe, name)
    with pytest.raises(ArithmeticError, match="inside the forward"):
        model(torch.ones(1, 2), fail=True)
    assert probe.seen["made"] == (ROWS[name][3] or F32)
    assert torch.get_default_dtype() == F32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.usefixtures("default")
def test_default_dtype_of_the_caller_is_the_output_dtype_and_is_restored(name: str) -> None:
    probe = Probe()
    model = lite_ext.setup_module(probe, name)
    x = torch.ones(1, 2)
    torch.set_default_dtype(F64)
    assert model(x).dtype == F64  # read on the call, not when the wrapper was made
    assert probe.seen["made"] == (ROWS[name][3] or F64)
    assert torch.get_default_dtype() == F64


def test_constructor_leaves_parameters_and_setup_converts_them_in_place() -> None:
    probe = Probe()
    weight = probe.weight
    assert LiteModule(probe, "bf16-true").dtype == F32
    assert lite_ext.setup_module(probe, "bf16-true").module is probe
    assert probe.weight is weight
    assert weight.dtype == BF16


@pytest.mark.parametrize("name", ROWS)
def test_methods_of_a_precision(name: str) -> None:
    parameters, inputs, autocast, inner_default = ROWS[name]
    row = lite_ext.precision(name)
    probe = Probe()
    assert row.convert_module(probe) is probe
    assert probe.weight.dtype == (parameters or F32)
    data = {"x": [torch.ones(2)], "ids": torch.arange(2)}
    converted = row.convert_input(data)
    assert converted["x"][0].dtype == (inputs or F32)
    assert converted["ids"] is data["ids"]
    assert data["x"][0].dtype == F32
    with row.forward_context():
        assert torch.is_autocast_enabled("cpu") == (autocast is not None)
        assert torch.get_default_dtype() == (inner_default or F32)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() == F32


class Halves:
    """A precision that is no class of lite_ext, as Lightning's plugins are."""

    def __init__(self) -> None:
        self.entered = 0
        self.left = 0

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.to(F16)

    def convert_input(self, data: Any) -> Any:
        return lite_ext.convert(data, F16)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        self.entered += 1
        try:
            yield
        finally:
            self.left += 1


def test_foreign_precision() -> None:
    foreign = Halves()
    assert lite_ext.precision(foreign) is foreign
    probe = Probe()
    model = lite_ext.setup_module(probe, foreign)
    assert model.precision is foreign
    assert probe.weight.dtype == F16
    assert model(torch.ones(1, 2)).dtype == F32
    assert probe.seen["input"] == F16
    assert (foreign.entered, foreign.left) == (1, 1)
    assert model(x=torch.ones(1, 2)).dtype == F32  # keywords are converted too
    assert probe.seen["input"] == F16
    with pytest.raises(ArithmeticError):
        model(torch.ones(1, 2), fail=True)
    assert (foreign.entered, foreign.left) == (3, 3)


def test_foreign_precision_with_the_dtype_of_the_inputs() -> None:
    probe = Probe()
    model = lite_ext.setup_module(probe, Halves(), output_dtype="input")
    assert model(torch.ones(1, 2, dtype=F64)).dtype == F64
    assert probe.seen["input"] == F16
    with pytest.raises(ValueError, match="the inputs hold no floating tensor"):
        model(torch.ones(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("missing", ["convert_module", "convert_input", "forward_context"])
def test_foreign_precision_lacking_a_method(missing: str) -> None:
    methods = {name: getattr(Halves, name) for name in ("convert_module", "convert_input", "forward_context")}
    del methods[missing]
    with pytest.raises(TypeError, match="convert_module, convert_input and forward_context"):
        lite_ext.precision(type("Lacking", (), methods)())


def test_mixed_float16_trains_with_a_grad_scaler() -> None:
    inner = nn.Linear(4, 1)
    model = lite_ext.setup_module(inner, "16-mixed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(32, 4)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        out = model(x)
        assert out.dtype == F32
        loss = nn.functional.mse_loss(out, y)
        scaler.scale(loss).backward()
        assert inner.weight.grad is not None
        assert inner.weight.grad.dtype == F32
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
    assert scaler.get_scale() == 2.0**10

    before = inner.weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale(model(x).sum() * float("inf")).backward()
    scaler.step(optimizer)  # left out: the gradients are not finite
    scaler.update()
    assert torch.equal(inner.weight, before)
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("alias", [32, "32", 64, "64", 16, "16", "bf16"])
def test_aliases_in_the_class(alias: str | int) -> None:
    assert Precision(alias) == lite_ext.precision(alias)


def test_unknown_name_in_the_class() -> None:
    with pytest.raises(ValueError, match="did you mean 'bf16-mixed'"):
        Precision("bf16-mixd")


class Odd(nn.Module):
    """Holds what a precision must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.tied = self.layer.weight
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex128))
        self.register_buffer("scaled", torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))
        self.register_buffer("mean", torch.ones(2, dtype=F64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "dtype"), [("bf16-true", BF16), ("16-true", F16), ("64-true", F64)])
def test_parameters_and_buffers_of_other_dtypes_stay_as_they_are(name: str, dtype: torch.dtype) -> None:
    inner = Odd()
    weight = inner.layer.weight
    kept = {name: inner.get_parameter(name) if name == "phase" else inner.get_buffer(name) for name in KEPT}
    model = lite_ext.setup_module(inner, name)
    assert {inner.layer.weight.dtype, inner.layer.bias.dtype, inner.mean.dtype} == {dtype}
    assert inner.layer.weight is inner.tied is weight
    assert all(getattr(inner, name) is tensor for name, tensor in kept.items())
    assert model(torch.ones(1, 2)).dtype == F32


KEPT = ("phase", "wave", "scaled", "count")


class Own(nn.Module):
    """Has a way of its own to be converted."""

    asked: Any = None

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.asked = args, kwargs
        return self


def test_module_is_asked_to_convert_itself() -> None:
    inner = Own()
    lite_ext.setup_module(inner, "bf16-true")
    assert inner.asked == ((), {"dtype": BF16})


@pytest.mark.parametrize("mixed_in", [False, True])
def test_foreign_precision_skips_inputs(mixed_in: bool) -> None:
    class Takes(nn.Module):
        def forward(self, x: Any, step: Any, *rest: Any, batch: Any = None, **more: Any) -> None:
            self.seen = x, step, rest, batch, more

    inner = Takes()
    names = ("step", "rest", "more", "mask")
    model = LiteModule(inner, Halves(), skip_inputs=names, output_dtype="input" if mixed_in else "keep")
    one = torch.ones(1)
    batch = {"mask": one, "image": torch.ones(1), "deep": [{"mask": [one]}]}
    model(torch.ones(1), one, one, [one], batch=batch, extra=one)
    x, step, rest, seen, more = inner.seen
    assert x.dtype == F16
    assert step is one
    assert rest[0] is one
    assert rest[1][0] is one
    assert (seen["mask"], seen["deep"][0]["mask"][0]) == (one, one)
    assert seen["image"].dtype == F16
    assert more["extra"] is one
    assert batch["image"].dtype == F32  # the caller's own is never changed
