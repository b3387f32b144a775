"""Autocast around the forward leaves and shows the same state as ``torch.autocast`` does, everywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from lite_ext import LiteModule

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DEVICES = ("cpu", "cuda", "xpu", "mps")
NAMES = {F16: "16-mixed", BF16: "bf16-mixed"}

Body = Callable[[], Any]


def state() -> dict[str, Any]:
    """All that Python can see of autocast."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    seen: dict[str, Any] = {"nesting": nesting, "cache": torch.is_autocast_cache_enabled()}
    for device in DEVICES:
        seen[device] = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return seen


class Runs(nn.Module):
    def __init__(self, body: Body | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.body = body

    def forward(self) -> Any:
        assert self.body is not None
        return self.body()


def by_wrapper(dtype: torch.dtype, body: Body) -> Any:
    return LiteModule(Runs(body), NAMES[dtype])()


def by_torch(dtype: torch.dtype, body: Body) -> Any:
    with torch.autocast("cpu", dtype=dtype):
        return body()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


def states(run: Callable[[torch.dtype, Body], Any], dtype: torch.dtype) -> list[dict[str, Any]]:
    seen = [state()]
    run(dtype, lambda: seen.append(state()))
    seen.append(state())
    return seen


OUTSIDE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: torch.autocast("cpu", dtype=BF16, enabled=False),
    "enabled": lambda: torch.autocast("cpu", dtype=BF16),
    "other dtype": lambda: torch.autocast("cpu", dtype=F16),
    "no cache": lambda: torch.autocast("cpu", dtype=BF16, cache_enabled=False),
    "disabled without cache": lambda: torch.autocast("cpu", dtype=F16, enabled=False, cache_enabled=False),
    "other device": lambda: torch.autocast("xpu", dtype=F16),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
}


@pytest.mark.parametrize("dtype", NAMES)
def test_plain(dtype: torch.dtype) -> None:
    seen = states(by_wrapper, dtype)
    assert seen == states(by_torch, dtype)
    assert seen[1]["cpu"] == (True, dtype)
    assert seen[1]["nesting"] == seen[0]["nesting"] + 1
    assert seen[0] == seen[2]


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_within_another_block(dtype: torch.dtype, outside: str) -> None:
    with OUTSIDE[outside]():
        ours = states(by_wrapper, dtype)
        theirs = states(by_torch, dtype)
    assert ours == theirs
    assert ours[1]["cpu"] == (True, dtype)


@pytest.mark.parametrize("outer", NAMES)
@pytest.mark.parametrize("inner", NAMES)
def test_wrapper_within_wrapper(outer: torch.dtype, inner: torch.dtype) -> None:
    def nested(run: Callable[[torch.dtype, Body], Any]) -> list[dict[str, Any]]:
        seen = [state()]

        def body() -> None:
            seen.append(state())
            run(inner, lambda: seen.append(state()))
            seen.append(state())

        run(outer, body)
        return seen + [state()]

    assert nested(by_wrapper) == nested(by_torch)


@pytest.mark.parametrize("dtype", NAMES)
def test_body_that_changes_the_state_itself(dtype: torch.dtype) -> None:
    def run_with(run: Callable[[torch.dtype, Body], Any]) -> list[dict[str, Any]]:
        seen = []

        def body() -> None:
            torch.set_autocast_dtype("cpu", F16)
            torch.set_autocast_enabled("cpu", False)
            torch.set_autocast_cache_enabled(False)
            seen.append(state())

        run(dtype, body)
        return seen + [state()]

    assert run_with(by_wrapper) == run_with(by_torch)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_exception(error: type[BaseException]) -> None:
    def fails(run: Callable[[torch.dtype, Body], Any]) -> list[dict[str, Any]]:
        seen = [state()]

        def body() -> None:
            seen.append(state())
            raise error("from the body")

        with torch.autocast("cpu", dtype=F16, cache_enabled=False):
            with pytest.raises(error, match="from the body"):
                run(BF16, body)
            seen.append(state())
        return seen + [state()]

    assert fails(by_wrapper) == fails(by_torch)


def weight_cast(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Return the autograd node of the cast of ``weight`` that autocast makes, or finds in its cache."""
    return torch.mm(x, weight).grad_fn.next_functions[1][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("enabled", [False, True])
def test_cache_lives_as_long_as_the_outermost_block(enabled: bool) -> None:
    for run in (by_torch, by_wrapper):
        weight = nn.Parameter(torch.ones(4, 4))
        x = torch.ones(4, 4, dtype=BF16)
        casts: list[Any] = []
        with torch.autocast("cpu", dtype=BF16, enabled=enabled):
            for _ in range(3):
                run(BF16, lambda: casts.extend(weight_cast(x, weight) for _ in range(2)))  # noqa: B023
        assert len(casts) == 6
        assert len(set(casts)) == 1
        run(BF16, lambda: casts.append(weight_cast(x, weight)))  # noqa: B023
        assert len(set(casts)) == 2


def test_cache_is_cleared_when_the_outermost_block_ends() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    x = torch.ones(4, 4, dtype=BF16)
    for run in (by_torch, by_wrapper):
        casts: list[Any] = []
        run(BF16, lambda: casts.extend(weight_cast(x, weight) for _ in range(2)))  # noqa: B023
        run(BF16, lambda: casts.append(weight_cast(x, weight)))  # noqa: B023
        assert casts[0] is casts[1]
        assert casts[0] is not casts[2]


def test_changed_weight_is_seen_by_the_next_call() -> None:
    inner = nn.Linear(2, 2, bias=False)
    model = LiteModule(inner, "bf16-mixed")
    first = model(torch.eye(2))
    with torch.no_grad():
        inner.weight.mul_(2)
    assert torch.equal(model(torch.eye(2)), first * 2)


@pytest.mark.parametrize("threads", [4])
def test_threads_have_a_state_each(threads: int) -> None:
    barrier = threading.Barrier(threads, timeout=60)
    seen: list[Any] = [None] * threads

    def work(at: int) -> None:
        dtype = (F16, BF16)[at % 2]
        before = state()

        def body() -> dict[str, Any]:
            barrier.wait()  # all are inside at once
            inside = state()
            barrier.wait()
            return inside

        inside = by_wrapper(dtype, body)
        seen[at] = before == state(), inside == by_torch(dtype, state), inside["cpu"] == (True, dtype)

    workers = [threading.Thread(target=work, args=(at,)) for at in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert seen == [(True, True, True)] * threads
    assert not torch.is_autocast_enabled("cpu")


def test_graph_of_an_export_holds_autocast() -> None:
    inner = nn.Linear(2, 2)

    def with_torch(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return inner(x.to(BF16)).to(F32)

    for function in (with_torch, LiteModule(inner, "bf16-mixed")):
        graph = make_fx(function, pre_dispatch=True)(torch.ones(1, 2)).graph
        names = [str(node.target) for node in graph.nodes]
        entered = [node.args for node in graph.nodes if "_enter_autocast" in str(node.target)]
        assert [args[:3] for args in entered] == [("cpu", BF16, True)]
        assert sum("_exit_autocast" in name for name in names) == 1


# -------------------------------------------------------------------- the device


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a device which this machine may not have."""

    @staticmethod
    def __new__(cls, device: str) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=F32, device=device)
        assert isinstance(made, cls)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def enabled() -> dict[str, torch.dtype]:
    return {name: torch.get_autocast_dtype(name) for name in DEVICES if torch.is_autocast_enabled(name)}


class Placed(nn.Module):
    def __init__(self, *devices: str) -> None:
        super().__init__()
        for at, device in enumerate(devices):
            self.register_buffer(f"buffer_{at}", Elsewhere(device))

    def forward(self) -> Any:
        return enabled()


@pytest.mark.parametrize("device", ["cpu", "xpu", "mps", "xpu:0"])
@pytest.mark.parametrize("dtype", NAMES)
def test_device_type_of_the_module(device: str, dtype: torch.dtype) -> None:
    model = LiteModule(Placed(device), NAMES[dtype])
    for _ in range(2):
        assert model() == {device.partition(":")[0]: dtype}
    assert enabled() == {}


def test_first_tensor_decides_and_parameters_come_before_buffers() -> None:
    assert LiteModule(Placed("xpu", "cpu"), "bf16-mixed")() == {"xpu": BF16}
    placed = Placed("xpu")
    placed.weight = nn.Parameter(torch.ones(1))
    assert LiteModule(placed, "bf16-mixed")() == {"cpu": BF16}


def test_module_without_tensors_runs_as_on_the_cpu() -> None:
    assert LiteModule(Placed(), "bf16-mixed")() == {"cpu": BF16}


def test_module_that_moves_takes_its_device_type_along() -> None:
    placed = Placed("cpu")
    model = LiteModule(placed, "bf16-mixed")
    assert model() == {"cpu": BF16}
    placed.buffer_0 = Elsewhere("xpu")
    assert model() == {"xpu": BF16}
    del placed.buffer_0
    placed.register_buffer("other", Elsewhere("mps"))
    assert model() == {"mps": BF16}


def test_tensors_that_come_later_are_found() -> None:
    placed = Placed()
    model = LiteModule(placed, "bf16-mixed")
    assert model() == {"cpu": BF16}
    placed.register_buffer("late", Elsewhere("xpu"))
    assert model() == {"xpu": BF16}


@pytest.mark.parametrize("device", ["meta", "vulkan"])
def test_device_type_without_autocast(device: str) -> None:
    model = LiteModule(Placed(device), "bf16-mixed")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"unsupported autocast device_type '{device}'"):
            model()
    assert enabled() == {}
    assert LiteModule(Placed(device), "bf16-true")() == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where CUDA is missing")
def test_torch_warns_where_the_device_is_missing() -> None:
    model = LiteModule(Placed("cuda"), "bf16-mixed")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert model() == {}


class Asks(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return enabled()


@pytest.mark.parametrize("policy", ["default", "keep"])
def test_module_without_tensors_runs_where_its_inputs_are(policy: str) -> None:
    model = LiteModule(Asks(), "bf16-mixed", output_dtype=policy)
    there = Elsewhere("xpu")
    assert model([{"x": there}]) == {"xpu": BF16}
    assert model(None, "text", x=(1, there)) == {"xpu": BF16}
    assert model(torch.ones(1)) == {"cpu": BF16}
    assert model() == {"cpu": BF16}


def test_inputs_where_there_is_no_autocast() -> None:
    assert LiteModule(Asks(), "bf16-mixed")(torch.ones(1, device="meta")) == {"cpu": BF16}
