"""Forwards that are generators or coroutines: converted item by item, their bodies under the forward context."""

from __future__ import annotations

import asyncio
import gc
import types
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn

import lite_ext
from lite_ext import LiteModule

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


class Overriding(LiteModule):
    """Takes the general way through Python, and does nothing else."""

    def convert_output(self, output: Any, inputs: Any) -> Any:
        return super().convert_output(output, inputs)


Make = Callable[..., LiteModule]


@pytest.fixture(params=[LiteModule, Overriding])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


class Body(nn.Module):
    """Its forward is a generator; `log` tells what was in force at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.log: list[Any] = []

    def note(self, what: Any) -> None:
        self.log.append((what, torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))

    def forward(self, x: torch.Tensor) -> Generator[Any, Any, Any]:
        try:
            self.note("start")
            while True:
                try:
                    sent = yield {"y": self.linear(x), "x": x}
                    self.note(sent)
                    if sent == "stop":
                        return [self.linear(x)]
                except KeyError:
                    self.note("caught")
        finally:
            self.note("end")


class OtherBodies(Body):
    async def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        self.note("start")
        await asyncio.sleep(0)
        self.note("woken")
        return {"y": self.linear(x), "x": x}


class AsyncBody(Body):
    async def forward(self, x: torch.Tensor) -> AsyncGenerator[Any, Any]:  # type: ignore[override]
        try:
            self.note("start")
            while True:
                try:
                    await asyncio.sleep(0)
                    sent = yield {"y": self.linear(x), "x": x}
                    self.note(sent)
                    if sent == "stop":
                        return
                except KeyError:
                    self.note("caught")
        finally:
            await asyncio.sleep(0)
            self.note("end")


def unaffected() -> bool:
    return not torch.is_autocast_enabled("cpu") and torch.get_default_dtype() == F32


@pytest.fixture(params=["bf16-mixed", "bf16-true"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(make: Make, inner: Body, precision: str, **settings: Any) -> LiteModule:
    return make(lite_ext.precision(precision).convert_module(inner), precision, **settings)


def check_log(inner: Body, precision: str, *whats: Any) -> None:
    autocast, default = (True, F32) if precision == "bf16-mixed" else (False, BF16)
    assert inner.log == [(what, autocast, default) for what in whats]


def check_item(item: Any, x: torch.Tensor) -> None:
    assert item["y"].dtype == F32
    assert item["x"] is x
    assert unaffected()


# -------------------------------------------------------------------- generators


def test_generator(make: Make, precision: str) -> None:
    inner = Body()
    x = torch.full((1, 2), 0.1)
    running = build(make, inner, precision)(x)
    assert isinstance(running, types.GeneratorType)
    assert inner.log == []  # nothing runs before it is asked to
    check_item(next(running), x)
    check_item(running.send("a"), x)
    check_item(running.throw(KeyError("b")), x)
    check_item(next(running), x)
    with pytest.raises(StopIteration) as caught:
        running.send("stop")
    assert caught.value.value[0].dtype == F32
    check_log(inner, precision, "start", "a", "caught", None, "stop", "end")
    assert unaffected()
    assert list(running) == []


def test_generator_in_a_loop_with_code_of_the_consumer_outside(make: Make, precision: str) -> None:
    inner = Body()
    seen = 0
    for item in build(make, inner, precision)(torch.ones(1, 2)):
        assert unaffected()
        assert torch.ones(1).dtype == F32
        assert (torch.ones(1, 2) @ item["y"].mT).dtype == F32
        seen += 1
        if seen == 3:
            break
    assert seen == 3


def test_yield_from_gives_the_converted_result(make: Make, precision: str) -> None:
    model = build(make, Body(), precision)

    def consume() -> Generator[Any, Any, Any]:
        return (yield from model(torch.ones(1, 2)))

    running = consume()
    next(running)
    with pytest.raises(StopIteration) as caught:
        running.send("stop")
    assert caught.value.value[0].dtype == F32


@pytest.mark.parametrize("started", [False, True])
def test_generator_closed(make: Make, precision: str, started: bool) -> None:
    inner = Body()
    running = build(make, inner, precision)(torch.ones(1, 2))
    if started:
        next(running)
    running.close()
    check_log(inner, precision, *(["start", "end"] if started else []))
    assert unaffected()
    with pytest.raises(StopIteration):
        next(running)


def test_generator_dropped(make: Make, precision: str) -> None:
    inner = Body()
    running = build(make, inner, precision)(torch.ones(1, 2))
    next(running)
    del running
    check_log(inner, precision, "start", "end")


def test_generator_that_lets_an_exception_out(make: Make, precision: str) -> None:
    inner = Body()
    running = build(make, inner, precision)(torch.ones(1, 2))
    next(running)
    with pytest.raises(ValueError, match="thrown in"):
        running.throw(ValueError("thrown in"))
    check_log(inner, precision, "start", "end")
    assert unaffected()


def test_generator_that_returns_at_once_or_raises_at_once(make: Make, precision: str) -> None:
    class Ends(Body):
        def forward(self, x: torch.Tensor) -> Any:
            if x.numel() == 1:
                raise ArithmeticError("first step")
            return x + 1
            yield

    model = build(make, Ends(), precision)
    with pytest.raises(ArithmeticError, match="first step"):
        next(model(torch.ones(1)))
    with pytest.raises(StopIteration) as caught:
        next(model(torch.ones(2)))
    assert caught.value.value.dtype == F32
    assert unaffected()


def test_item_that_cannot_be_converted_closes_the_body(make: Make, precision: str) -> None:
    class Cyclic(Body):
        def forward(self, x: torch.Tensor) -> Any:
            cyclic: list[Any] = [x]
            cyclic.append(cyclic)
            try:
                yield cyclic
            finally:
                self.note("end")

    inner = Cyclic()
    running = build(make, inner, precision)(torch.ones(1))
    with pytest.raises(RecursionError):
        next(running)
    check_log(inner, precision, "end")
    assert unaffected()


@pytest.mark.parametrize("policy", ["input", "keep", F64])
def test_policy_of_a_generator(make: Make, precision: str, policy: Any) -> None:
    running = build(make, Body(), precision, output_dtype=policy)(torch.ones(1, 2, dtype=F64))
    item = next(running)
    assert item["y"].dtype == (BF16 if policy == "keep" else F64)


def test_interleaved_generators_of_one_wrapper(make: Make, precision: str) -> None:
    model = build(make, Body(), precision, output_dtype="input")
    single, double = model(torch.ones(1, 2)), model(torch.ones(1, 2, dtype=F64))
    for _ in range(3):
        assert next(single)["y"].dtype == F32
        assert next(double)["y"].dtype == F64
        assert unaffected()


def test_generator_trains(make: Make, precision: str) -> None:
    inner = Body()
    model = build(make, inner, precision)
    running = model(torch.ones(1, 2))
    sum(next(running)["y"].sum() for _ in range(2)).backward()
    assert inner.linear.bias.grad is not None
    assert torch.equal(inner.linear.bias.grad.float(), torch.full((2,), 2.0))


# -------------------------------------------------------------------- coroutines and async generators


def test_coroutine(make: Make, precision: str) -> None:
    inner = OtherBodies()
    x = torch.full((1, 2), 0.1)
    coroutine = build(make, inner, precision)(x)
    assert isinstance(coroutine, types.CoroutineType)
    assert inner.log == []
    check_item(asyncio.run(coroutine), x)
    check_log(inner, precision, "start", "woken")


def test_coroutine_closed_or_failing(make: Make, precision: str) -> None:
    class Fails(Body):
        async def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            try:
                await asyncio.sleep(0)
                raise ArithmeticError("inside")
            finally:
                self.note("end")

    inner = Fails()
    model = build(make, inner, precision)
    with pytest.raises(ArithmeticError, match="inside"):
        asyncio.run(model(torch.ones(1)))
    check_log(inner, precision, "end")
    coroutine = model(torch.ones(1))
    coroutine.send(None)
    coroutine.close()
    check_log(inner, precision, "end", "end")
    model(torch.ones(1)).close()  # closed before its first step: no warning that nobody awaited it
    with pytest.warns(RuntimeWarning, match="never awaited") as caught:
        model(torch.ones(1))
        gc.collect()
    assert len(caught) == 1
    assert unaffected()


def test_tasks_side_by_side_do_not_see_the_autocast_of_each_other(make: Make, precision: str) -> None:
    inner = OtherBodies()
    model = build(make, inner, precision)
    outside: list[bool] = []

    async def plain() -> None:
        for _ in range(4):
            outside.append(unaffected())
            await asyncio.sleep(0)

    async def main() -> Any:
        return await asyncio.gather(model(torch.ones(1, 2)), plain(), model(torch.ones(1, 2)), plain())

    first, _, second, _ = asyncio.run(main())
    assert first["y"].dtype == second["y"].dtype == F32
    assert outside == [True] * 8
    check_log(inner, precision, "start", "start", "woken", "woken")
    assert unaffected()


def test_async_generator(make: Make, precision: str) -> None:
    inner = AsyncBody()
    x = torch.full((1, 2), 0.1)
    model = build(make, inner, precision)

    async def consume() -> None:
        running = model(x)
        assert isinstance(running, types.AsyncGeneratorType)
        check_item(await anext(running), x)
        check_item(await running.asend("a"), x)
        check_item(await running.athrow(KeyError("b")), x)
        with pytest.raises(StopAsyncIteration):
            await running.asend("stop")
        check_log(inner, precision, "start", "a", "caught", "stop", "end")
        inner.log.clear()
        running = model(x)
        async for item in running:
            check_item(item, x)
            break
        await running.aclose()
        check_log(inner, precision, "start", "end")
        inner.log.clear()
        running = model(x)
        await anext(running)
        with pytest.raises(ValueError, match="thrown in"):
            await running.athrow(ValueError("thrown in"))
        check_log(inner, precision, "start", "end")
        assert unaffected()

    asyncio.run(consume())
    assert unaffected()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("body", [Body, OtherBodies, AsyncBody])
def test_kept_object_is_that_of_the_module_unless_its_body_needs_a_context(
    body: type[Body], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = body()
    made: list[Any] = []
    forward = inner.forward

    def remembers(x: torch.Tensor) -> Any:
        made.append(forward(x))
        return made[-1]

    inner.forward = remembers  # type: ignore[method-assign]
    output = build(LiteModule, inner, precision, output_dtype="keep")(torch.ones(1, 2))
    assert (output is made[0]) == (precision == "32-true")
    for coroutine in (output, made[0]):
        if isinstance(coroutine, types.CoroutineType):
            coroutine.close()
