"""One call of a wrapper: what is converted on the way in and out, what passes through, what is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lite_ext import LiteModule, build_info

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Overriding(LiteModule):
    """Takes the general way through Python, and does nothing else."""

    def convert_output(self, output: Any, inputs: Any) -> Any:
        return super().convert_output(output, inputs)


Make = Callable[..., LiteModule]


@pytest.fixture(params=[LiteModule, Overriding])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


class Calls(nn.Module):
    """Runs a function as its forward; remembers the arguments."""

    def __init__(self, body: Callable[..., Any] = lambda *args, **kwargs: None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))  # says where the module is, as that of nearly any module
        self.body = body
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return self.body(*args, **kwargs)


class Pair(NamedTuple):
    image: torch.Tensor
    timestep: torch.Tensor


@dataclass
class Batch:
    image: torch.Tensor
    timestep: torch.Tensor


def ones(dtype: torch.dtype = F32, size: int = 2) -> torch.Tensor:
    return torch.ones(size, dtype=dtype)


def test_both_ways_are_tested(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled library makes a whole call where nothing is overridden; the tests below hold for both."""
    model = make(Calls(lambda x: x * 2), "bf16-mixed")
    general = LiteModule.convert_output
    calls: list[Any] = []

    def counts(self: LiteModule, output: Any, inputs: Any) -> Any:
        calls.append(output)
        return general(self, output, inputs)

    monkeypatch.setattr(LiteModule, "convert_output", counts)
    assert model(ones()).dtype == F32
    native = make is LiteModule and build_info()["backend"] == "native"
    assert len(calls) == (0 if native else 1)


# -------------------------------------------------------------------- inputs


class Diffusion(nn.Module):
    def forward(self, image: Any, timestep: Any = None, *rest: Any, guide: Any = None, **more: Any) -> Any:
        self.seen = image, timestep, rest, guide, more
        return image


@pytest.fixture(params=["bf16-mixed", "64-true"])
def diffusion(request: pytest.FixtureRequest, make: Make) -> tuple[Diffusion, LiteModule, torch.dtype]:
    inner = Diffusion()
    dtype = BF16 if request.param == "bf16-mixed" else F64
    return inner, make(inner, request.param, skip_inputs=("timestep", "guide"), output_dtype="keep"), dtype


def test_skip_inputs_by_position_and_by_keyword(diffusion: tuple[Diffusion, LiteModule, torch.dtype]) -> None:
    inner, model, dtype = diffusion
    image, step = ones(), ones()
    for args, kwargs in (
        ((image, step), {}),
        ((image,), {"timestep": step}),
        ((), {"timestep": step, "image": image}),
    ):
        model(*args, **kwargs)
        assert inner.seen[0].dtype == dtype
        assert inner.seen[1] is step
    model(image, [step, {"x": step}], step, guide=(step,), other=step)
    assert inner.seen[1][1]["x"] is inner.seen[3][0] is step
    assert inner.seen[2][0].dtype == inner.seen[4]["other"].dtype == dtype
    assert (image.dtype, step.dtype) == (F32, F32)
    model(image)
    assert inner.seen[1] is None


@pytest.mark.parametrize(
    ("nest", "look"),
    [
        (lambda x: {"timestep": x, "image": x.clone()}, lambda n: (n["image"], n["timestep"])),
        (lambda x: Batch(x.clone(), x), lambda n: (n.image, n.timestep)),
        (lambda x: Pair(x.clone(), x), lambda n: (n.image, n.timestep)),
        (lambda x: [{"a": Batch(x.clone(), x)}], lambda n: (n[0]["a"].image, n[0]["a"].timestep)),
    ],
)
def test_skip_inputs_by_key_and_field(
    diffusion: tuple[Diffusion, LiteModule, torch.dtype], nest: Any, look: Any
) -> None:
    inner, model, dtype = diffusion
    step = ones()
    given = nest(step)
    model(given)
    image, timestep = look(inner.seen[0])
    assert image.dtype == dtype
    assert timestep is step
    assert look(given)[0].dtype == F32  # the caller's own nest is as it was


def test_arguments_of_the_caller_are_never_changed(make: Make) -> None:
    inner = Calls()
    model = make(inner, "bf16-mixed")
    batch = {"x": ones(), "deep": [ones()]}
    model(batch, named=batch)
    assert batch["x"].dtype == batch["deep"][0].dtype == F32
    assert inner.args[0] is inner.kwargs["named"]  # what was one object is one object
    assert inner.args[0]["x"].dtype == BF16
    plain = {"ids": torch.arange(2), "text": "a"}
    model(plain)
    assert inner.args[0] is plain


def test_no_arguments(make: Make) -> None:
    inner = Calls(lambda: "nothing in")
    assert make(inner, "bf16-mixed")() == "nothing in"
    assert (inner.args, inner.kwargs) == ((), {})


# -------------------------------------------------------------------- outputs


def test_skip_outputs(make: Make) -> None:
    cache = [ones(BF16)]
    nested = Batch(ones(BF16), ones(BF16))
    inner = Calls(lambda: {"cache": cache, "rows": [{"cache": cache, "y": ones(BF16)}], "batch": nested, 3: ones(BF16)})
    out = make(inner, "bf16-mixed", skip_outputs=("cache", "timestep"))()
    assert out["cache"] is cache
    assert out["rows"][0]["cache"] is cache
    assert out["rows"][0]["y"].dtype == out[3].dtype == out["batch"].image.dtype == F32
    assert out["batch"].timestep is nested.timestep


@pytest.mark.parametrize("source", [{F16, BF16}, [BF16], {F64}, (), None])
def test_source(make: Make, source: Any) -> None:
    dtypes = [F16, BF16, F32, F64]
    given = {str(dtype): ones(dtype) for dtype in dtypes}
    out = make(Calls(lambda: given), source=source)()
    for dtype in dtypes:
        converted = source is None or dtype in source
        assert out[str(dtype)].dtype == (F32 if converted else dtype)
    assert (out is given) == (source == ())


@pytest.mark.parametrize("policy", ["default", "input", F64])
def test_source_holds_for_every_policy_but_not_for_inputs(make: Make, policy: Any) -> None:
    inner = Calls(lambda x: [x.to(F16), x.to(F64) + 0.5])
    out = make(inner, "bf16-mixed", output_dtype=policy, source={F16})(ones())
    assert inner.args[0].dtype == BF16
    assert [tensor.dtype for tensor in out] == [F64 if policy == F64 else F32, F64]


# -------------------------------------------------------------------- inputs that pass through


def test_input_passed_through_is_the_callers_own(make: Make) -> None:
    x, y = torch.tensor([0.1]), torch.tensor([0.2])
    model = make(Calls(lambda a, b, **more: {"a": a, "list": [b, a], "more": more}), "bf16-mixed")
    out = model(x, [y], k=x)
    assert out["a"] is out["list"][1] is out["more"]["k"] is x
    assert out["list"][0][0] is y
    assert x.item() == torch.tensor(0.1).item()


@pytest.mark.parametrize(
    ("policy", "own"), [("default", True), ("input", True), (F32, True), (F64, False), (BF16, False), ("keep", False)]
)
def test_only_where_its_dtype_is_the_one_asked_for(make: Make, policy: Any, own: bool) -> None:
    x = torch.tensor([0.1])
    out = make(Calls(lambda x: x), "bf16-mixed", output_dtype=policy)(x)
    assert (out is x) == own
    wanted = policy if isinstance(policy, torch.dtype) else BF16 if policy == "keep" else F32
    assert out.dtype == wanted


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.mul_(2),
        lambda t: t.copy_(t.clone()),
        lambda t: t.view(-1)[0].fill_(5),
        lambda t: t.detach().zero_(),
        lambda t: t.clone(),
        lambda t: t.view(1, -1),
        lambda t: t[:1],
    ],
)
def test_changed_input_is_not_taken_for_the_callers(make: Make, change: Any) -> None:
    kept: list[torch.Tensor] = []

    def body(t: torch.Tensor) -> torch.Tensor:
        result = change(t)
        # What is changed in place comes back itself; what is new, as it is.
        kept.append(t if t._version else result)
        return kept[0]

    x = torch.full((2,), 0.1)
    out = make(Calls(body), "bf16-mixed")(x)
    assert out is not x
    assert torch.equal(x, torch.full((2,), 0.1))
    assert torch.equal(out, kept[0].float())


def test_gradient_of_an_input_passed_through(make: Make) -> None:
    x = torch.tensor([0.1, 0.2], requires_grad=True)
    model = make(Calls(lambda x: (x, x * 2)), "bf16-mixed")
    same, doubled = model(x)
    assert same is x
    assert doubled.dtype == F32
    (same * 3 + doubled * 5).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2,), 13.0))
    non_leaf = x * 1
    same, _ = model(non_leaf)
    assert same is non_leaf
    assert torch.equal(torch.autograd.grad(same.sum(), x)[0], torch.ones(2))


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_input_passed_through_detached_or_without_grad(make: Make, context: Any) -> None:
    x = torch.tensor([0.1], requires_grad=True)

    def body(t: torch.Tensor) -> torch.Tensor:
        with context():
            return t.detach()

    out = make(Calls(body), "bf16-mixed")(x)
    assert out is not x
    assert not out.requires_grad
    with torch.no_grad():
        out = make(Calls(lambda t: t), "bf16-mixed")(x)
    assert out is x or not out.requires_grad


def test_input_passed_through_in_inference_mode(make: Make) -> None:
    model = make(Calls(lambda x: (x, x + 1)), "bf16-mixed")
    with torch.inference_mode():
        x = ones()
        same, new = model(x)
        assert same is x or torch.equal(same, x)
        assert new.dtype == F32
        assert new.is_inference()


def test_nothing_of_one_call_shows_in_the_next(make: Make) -> None:
    model = make(Calls(lambda x: x), "bf16-mixed")
    x, y = torch.tensor([0.1]), torch.tensor([0.2])
    assert model(x) is x
    assert model(y) is y
    inside = model.module.args[0]
    assert inside.dtype == BF16
    again = model(inside)  # no longer anybody's stand-in
    assert torch.equal(again, inside.float())


# -------------------------------------------------------------------- exceptions, nesting, threads


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration])
def test_exception_leaves_nothing_behind(make: Make, precision: str, error: type[BaseException]) -> None:
    def body(*args: Any) -> Any:
        raise error("inside")

    model = make(Calls(body), precision)
    with torch.autocast("cpu", dtype=F16):
        for _ in range(2):
            with pytest.raises(error, match="inside"):
                model(ones())
            assert torch.get_autocast_dtype("cpu") == F16
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == F32
    assert not torch.is_autocast_enabled("cpu")


def test_output_that_cannot_be_converted_leaves_nothing_behind(make: Make) -> None:
    cyclic: list[Any] = [ones(BF16)]
    cyclic.append(cyclic)
    model = make(Calls(lambda: cyclic), "bf16-mixed")
    with pytest.raises(RecursionError, match="output"):
        model()
    assert not torch.is_autocast_enabled("cpu")
    assert cyclic[0].dtype == BF16


def test_wrapper_within_a_wrapper(make: Make) -> None:
    inner = Calls(lambda x: x * 1)
    middle = make(inner, "16-mixed", output_dtype=F64)
    outer = make(nn.Sequential(middle, Calls(lambda x: (x, torch.get_autocast_dtype("cpu")))), "bf16-mixed")
    out, dtype = outer(ones())
    assert inner.args[0].dtype == F16
    assert outer.module[1].args[0].dtype == F64
    assert (out.dtype, dtype) == (F32, BF16)


def test_wrapper_that_calls_itself(make: Make) -> None:
    def body(x: torch.Tensor, depth: int) -> Any:
        return [x + 1] if depth == 0 else [x + 1, *model(x + 1, depth - 1)]

    model = make(Calls(body), "bf16-mixed")
    out = model(ones(), 3)
    assert [tensor.dtype for tensor in out] == [F32] * 4
    assert [tensor[0].item() for tensor in out] == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("policy", ["default", "input"])
def test_threads_share_a_wrapper(make: Make, policy: str) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor, passed: torch.Tensor, fail: bool) -> Any:
            assert torch.get_autocast_dtype("cpu") == BF16
            assert x.dtype == BF16
            if fail:
                raise ArithmeticError
            return {"y": self.linear(x), "passed": passed}

    model = make(Adds(), "bf16-mixed", output_dtype=policy)
    threads, calls = 8, 40
    start = threading.Barrier(threads, timeout=60)
    done: list[int] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        dtype = F64 if seed % 2 and policy == "input" else F32
        x = torch.full((1, 4), float(seed), dtype=dtype)
        expected = torch.nn.functional.linear(x.to(BF16), model.linear.weight.to(BF16)).to(dtype)
        try:
            start.wait()
            for call in range(calls):
                if call % 5 == 4:
                    with pytest.raises(ArithmeticError):
                        model(x, x, True)
                    continue
                out = model(x, x, False)
                assert torch.equal(out["y"], expected)
                assert out["y"].dtype == dtype
                assert out["passed"] is x
                assert not torch.is_autocast_enabled("cpu")
            done.append(seed)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert errors == []
    assert sorted(done) == list(range(threads))


# -------------------------------------------------------------------- all further arguments


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
@pytest.mark.parametrize("policy", ["keep", "input"])
def test_skip_inputs_by_the_name_of_all_further_arguments(make: Make, precision: str, policy: str) -> None:
    inner = Diffusion()
    model = make(inner, precision, skip_inputs=("rest", "more"), output_dtype=policy)
    inside = BF16 if precision == "bf16-mixed" else F64
    first, other = ones(), ones(F64)
    model(first, first, other, [other], guide=first, extra=other, nested={"x": other})
    image, timestep, rest, guide, more = inner.seen
    assert image.dtype == timestep.dtype == guide.dtype == inside
    assert rest[0] is other
    assert rest[1][0] is other
    assert more["extra"] is other
    assert more["nested"]["x"] is other


def test_ambiguous_input_does_not_name_a_skipped_argument(make: Make) -> None:
    model = make(Diffusion(), "bf16-mixed", skip_inputs=("rest",), output_dtype="input")
    with pytest.raises(ValueError, match=r"args\[0\].*args\[1\]") as caught:
        model(ones(), ones(F64), ones(F16))
    assert "args[2]" not in str(caught.value)
