"""Which dtype the outputs go to: every policy, every answer to ambiguous inputs, every message."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lite_ext import LiteModule
from lite_ext.policy import check_ambiguous_input, check_output_dtype

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
IDS = torch.arange(3)

OPTIONS = (
    'Choose with ambiguous_input="promote", "default" or "keep", or give output_dtype="default", "keep" or a dtype'
)
NEEDS = 'output_dtype="input" needs exactly one floating dtype among the inputs, but '


class Returns(nn.Module):
    """Returns bfloat16, whatever comes in; keeps the very object that it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.last: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.last = {"y": torch.ones(2, dtype=BF16), "ids": IDS}
        return self.last


def ones(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(2, dtype=dtype)


@pytest.fixture(params=["32-true", "bf16-mixed", "64-true"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(before)


def test_default_is_the_default(precision: str) -> None:
    assert LiteModule(Returns(), precision)(ones(F64))["y"].dtype == F32
    assert LiteModule(Returns(), precision, output_dtype="default")(ones(F64))["y"].dtype == F32


@pytest.mark.usefixtures("double_by_default")
def test_default_is_read_on_the_call(precision: str) -> None:
    model = LiteModule(Returns(), precision)
    assert model(ones(F32))["y"].dtype == F64
    torch.set_default_dtype(F16)
    assert model(ones(F32))["y"].dtype == F16


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_input(precision: str, dtype: torch.dtype) -> None:
    model = LiteModule(Returns(), precision, output_dtype="input")
    assert model(ones(dtype))["y"].dtype == dtype
    assert model(batch={"ids": IDS, "x": [ones(dtype)]})["y"].dtype == dtype
    assert model(ones(dtype), IDS, other=ones(dtype))["y"].dtype == dtype
    assert model(ones(F64))["y"].dtype == F64  # nothing is remembered of the calls before


def test_keep_returns_the_very_object(precision: str) -> None:
    inner = Returns()
    out = LiteModule(inner, precision, output_dtype="keep")(ones(F64))
    assert out is inner.last
    assert out["y"].dtype == BF16


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64, torch.float8_e4m3fn])
def test_dtype(precision: str, dtype: torch.dtype) -> None:
    inner = Returns()
    out = LiteModule(inner, precision, output_dtype=dtype)(ones(F64))
    assert out["y"].dtype == dtype
    assert out["ids"] is IDS
    assert (out is inner.last) == (dtype == BF16)


@pytest.mark.parametrize(
    ("ambiguous", "dtypes", "wanted"),
    [
        ("promote", (F32, F64), F64),
        ("promote", (F16, BF16), F32),
        ("promote", (BF16, F64, F16), F64),
        ("promote", (F16, F32), F32),
        ("promote", (), F32),
        ("default", (F64, F16), F32),
        ("default", (), F32),
        ("keep", (F64, F16), BF16),
        ("keep", (), BF16),
        *((name, (F64,), F64) for name in ("error", "promote", "default", "keep")),
    ],
)
def test_ambiguous_input(precision: str, ambiguous: str, dtypes: tuple[torch.dtype, ...], wanted: torch.dtype) -> None:
    inner = Returns()
    model = LiteModule(inner, precision, output_dtype="input", ambiguous_input=ambiguous)
    out = model(IDS, *map(ones, dtypes), "text", None)
    assert out["y"].dtype == wanted
    assert (out is inner.last) == (wanted == BF16)


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize("ambiguous", ["promote", "default"])
def test_nothing_floating_goes_to_the_default_of_the_call(precision: str, ambiguous: str) -> None:
    model = LiteModule(Returns(), precision, output_dtype="input", ambiguous_input=ambiguous)
    assert model(IDS)["y"].dtype == F64


@pytest.mark.parametrize("dtype", [F16, F64, torch.complex64])
def test_integers_complex_numbers_and_skipped_inputs_do_not_count(precision: str, dtype: torch.dtype) -> None:
    model = LiteModule(Returns(), precision, output_dtype="input", skip_inputs=("timestep",))
    others = (IDS, torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.complex64), 1.5)
    assert model(*others, ones(F16), {"timestep": ones(dtype)})["y"].dtype == F16
    assert model(*others, ones(F16), timestep=ones(dtype))["y"].dtype == F16


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        (
            ({"image": ones(F32)}, ones(BF16)),
            {},
            ("args[0]['image']: torch.float32", "args[1]: torch.bfloat16"),
        ),
        (
            (IDS, (ones(F32), ones(F32))),
            {"mask": [IDS, ones(F64)]},
            ("args[1][0]: torch.float32", "kwargs['mask'][1]: torch.float64"),
        ),
        (
            (),
            {"a": ones(F16), "b": ones(F32), "c": ones(F64)},
            ("kwargs['a']: torch.float16", "kwargs['b']: torch.float32", "kwargs['c']: torch.float64"),
        ),
        # The first place of each dtype, and args before kwargs.
        ((ones(F32), ones(F64)), {"x": ones(F32)}, ("args[0]: torch.float32", "args[1]: torch.float64")),
    ],
)
def test_several_dtypes_are_an_error_with_a_path_each(
    precision: str, args: tuple[Any, ...], kwargs: dict[str, Any], found: tuple[str, ...]
) -> None:
    inner = Returns()
    model = LiteModule(inner, precision, output_dtype="input")
    with pytest.raises(ValueError) as caught:
        model(*args, **kwargs)
    start, end = f"{NEEDS}the inputs have several floating dtypes (", f"). {OPTIONS}"
    message = str(caught.value)
    assert message.startswith(start)
    assert message.endswith(end)
    listed = message[len(start) : -len(end)].split(", ")
    assert sorted(listed) == sorted(found)
    assert inner.last is None  # before the forward, not after it
    assert model(ones(F16))["y"].dtype == F16  # and the wrapper still works


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((IDS,), {}), ((), {"ids": [IDS], "text": "a"})])
def test_no_floating_input_is_an_error(precision: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inner = Returns()
    with pytest.raises(ValueError) as caught:
        LiteModule(inner, precision, output_dtype="input")(*args, **kwargs)
    assert str(caught.value) == f"{NEEDS}the inputs hold no floating tensor. {OPTIONS}"
    assert inner.last is None


@pytest.mark.parametrize("policy", ["default", "keep", F16])
def test_other_policies_do_not_ask(precision: str, policy: Any) -> None:
    LiteModule(Returns(), precision, output_dtype=policy)(ones(F16), ones(F64), IDS)
    LiteModule(Returns(), precision, output_dtype=policy)(IDS)


# -------------------------------------------------------------------- arguments


def test_accepted_values_come_back() -> None:
    for value in ("default", "input", "keep", F16, torch.float8_e5m2):
        assert check_output_dtype(value) == value
    for value in ("error", "promote", "default", "keep"):
        assert check_ambiguous_input(value) == value


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("inputs", ": did you mean 'input'? "),
        ("Default", ": did you mean 'default'? "),
        ("kep", ": did you mean 'keep'? "),
        ("zzz", ". "),
        ("", ". "),
    ],
)
def test_unknown_output_dtype(value: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        LiteModule(Returns(), output_dtype=value)
    valid = "Valid: 'default', 'input', 'keep', or a floating torch.dtype"
    assert str(caught.value) == f"output_dtype={value!r} is not known{hint}{valid}"


@pytest.mark.parametrize(
    ("value", "hint"),
    [("promoted", ": did you mean 'promote'? "), ("err", ": did you mean 'error'? "), ("zzz", ". ")],
)
def test_unknown_ambiguous_input(value: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        LiteModule(Returns(), output_dtype="input", ambiguous_input=value)
    valid = "Valid: 'error', 'promote', 'default', 'keep'"
    assert str(caught.value) == f"ambiguous_input={value!r} is not known{hint}{valid}"


def upcast(output: Any) -> Any:
    return output


@pytest.mark.parametrize(
    "value", [upcast, lambda output: output, functools.partial(upcast), torch.float, nn.Identity()]
)
def test_callables_are_refused(value: Any) -> None:
    if isinstance(value, torch.dtype):  # a dtype is not mistaken for one
        assert LiteModule(Returns(), output_dtype=value)(ones(F16))["y"].dtype == F32
        return
    with pytest.raises(TypeError) as caught:
        LiteModule(Returns(), output_dtype=value)
    message = "output_dtype does not take a callable: subclass LiteModule and override convert_output"
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [torch.int64, torch.complex64, torch.bool])
def test_output_dtype_that_is_not_floating(value: Any) -> None:
    with pytest.raises(TypeError, match=f"output_dtype must be a floating torch.dtype .*, got {value}"):
        LiteModule(Returns(), output_dtype=value)


@pytest.mark.parametrize("value", [None, 32, ("default",)])
def test_output_dtype_of_another_type(value: Any) -> None:
    with pytest.raises(TypeError, match=f"output_dtype must be .*of type {type(value).__name__}"):
        LiteModule(Returns(), output_dtype=value)


@pytest.mark.parametrize("value", [None, F32, ["error"]])
def test_ambiguous_input_of_another_type(value: Any) -> None:
    with pytest.raises(TypeError, match=f"ambiguous_input must be a string, got .* of type {type(value).__name__}"):
        LiteModule(Returns(), ambiguous_input=value)


@pytest.mark.parametrize("argument", ["skip_inputs", "skip_outputs"])
def test_names_to_skip_are_checked(argument: str) -> None:
    with pytest.raises(TypeError) as caught:
        LiteModule(Returns(), **{argument: "cache"})
    assert (
        str(caught.value) == f"{argument} must be a collection of names, got the lone string 'cache': write ('cache',)"
    )
    with pytest.raises(TypeError, match=f"every item of {argument} must be a string, got 3 of type int"):
        LiteModule(Returns(), **{argument: ["cache", 3]})
    with pytest.raises(TypeError, match=f"{argument} must be a collection of names, got None of type NoneType"):
        LiteModule(Returns(), **{argument: None})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (F16, r"source must be a set of floating dtypes, got the lone dtype torch.float16: write \{torch.float16\}"),
        ("float16", "source must be a set of floating dtypes, got 'float16' of type str"),
        ({F16, torch.int8}, "every item of source must be a floating torch.dtype .* got torch.int8"),
        ([F16, "float32"], "every item of source must be a floating torch.dtype .* got 'float32' of type str"),
        (16, "source must be a set of floating dtypes, got 16 of type int"),
    ],
)
def test_source_is_checked(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        LiteModule(Returns(), source=value)
