"""Which way a leaf takes: plain leaves the compiled one, all else `Tensor.to`, so that whatever watches torch sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import load_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import TREES, low
from zoo_leaves import GATHERED_LAYOUTS, LEAVES, PLAIN_LAYOUTS

import lite_ext

F32 = torch.float32


class Counted:
    """How many leaves took which way inside the block."""

    def __enter__(self) -> Any:
        self._before = load_backend("native").counters()
        return self

    def __exit__(self, *exception: object) -> None:
        after = load_backend("native").counters()
        self.leaves = {key: after[key] - self._before[key] for key in ("fast_cpu", "fallback", "alias")}
        self.calls = after["calls"] - self._before["calls"]


def convert(tree: Any, dtype: torch.dtype = F32) -> Any:
    return load_backend("native").convert(tree, dtype, 15, frozenset())


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_way_of_each_layout(name: str, source: torch.dtype) -> None:
    leaves = [LEAVES[name](source), LEAVES[name](source)]
    with Counted() as counted:
        convert(leaves)
    plain = name in PLAIN_LAYOUTS or name in GATHERED_LAYOUTS or name == "real part of a conjugate"
    assert counted.leaves == {"fast_cpu": 2 * plain, "fallback": 2 * (not plain), "alias": 0}
    assert counted.calls == 1


def test_all_pairs_are_compiled() -> None:
    dtypes = (torch.float16, torch.bfloat16, F32, torch.float64)
    for target in dtypes:
        with Counted() as counted:
            convert([torch.ones(3, dtype=dtype) for dtype in dtypes], target)
        assert counted.leaves == {"fast_cpu": 3, "fallback": 0, "alias": 0}


def test_1000_leaves_in_one_call() -> None:
    with Counted() as counted:
        convert(TREES["1,000 leaves"]())
    assert counted.leaves["fast_cpu"] == 1000
    assert counted.calls == 1


def test_kept_leaves_take_no_way() -> None:
    with Counted() as counted:
        convert({"a": torch.ones(2), "ids": torch.arange(2)})
    assert counted.leaves == {"fast_cpu": 0, "fallback": 0, "alias": 0}


def test_shared_leaf_is_one() -> None:
    leaf = low()
    with Counted() as counted:
        convert([leaf] * 10)
    assert counted.leaves["fast_cpu"] == 1


def test_inference_and_no_grad_are_plain() -> None:
    with torch.inference_mode(), Counted() as inference:
        convert([low(), low()])
    with torch.no_grad(), Counted() as no_grad:
        convert([torch.nn.Parameter(low())])
    assert (inference.leaves["fast_cpu"], no_grad.leaves["fast_cpu"]) == (2, 1)


def test_autocast_is_plain() -> None:
    with torch.autocast("cpu", torch.bfloat16), Counted() as counted:
        convert([low()])
    assert counted.leaves["fast_cpu"] == 1


def test_default_device_is_plain() -> None:
    leaf = low()
    with torch.device("cpu"), Counted() as counted:
        convert([leaf])
    assert counted.leaves["fast_cpu"] == 1


class Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_dispatch_mode_sees_every_conversion(backend: Any) -> None:
    with Recorded() as mode:
        lite_ext.convert([low(), low()], F32)
    assert mode.seen.count("aten._to_copy.default") == 2


def test_function_mode_sees_every_conversion(backend: Any) -> None:
    class Mode(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Mode.seen += function is torch.Tensor.to
            return function(*args, **(kwargs or {}))

    leaves = [low(), low()]
    with Mode():
        lite_ext.convert(leaves, F32)
    assert Mode.seen == 2
    with torch.device("cpu"), Mode():
        lite_ext.convert(leaves, F32)
    assert Mode.seen == 4


def test_fake_tensors(backend: Any) -> None:
    with FakeTensorMode() as mode:
        fake = torch.empty(2, 3, dtype=torch.bfloat16)
        result = lite_ext.convert([fake], F32)[0]
    outside = lite_ext.convert([mode.from_tensor(low())], F32)[0]
    assert type(result) is type(outside) is type(fake)
    assert result.dtype == outside.dtype == F32


class Wrapper(torch.Tensor):
    """A tensor without data of its own, such as those of quantisers: only its own `.to` knows what it means."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [arg.inner if isinstance(arg, cls) else arg for arg in args]
        return cls(function(*inner, **(kwargs or {})))


def test_wrapper_subclass_converts_itself(backend: Any) -> None:
    result = lite_ext.convert([Wrapper(low())], F32)[0]
    assert type(result) is Wrapper
    assert result.dtype == result.inner.dtype == F32


def test_make_fx_records_the_conversion(backend: Any) -> None:
    graph = make_fx(lambda x: lite_ext.convert({"x": x}, F32)["x"] + 1)(low())
    assert "_to_copy" in graph.code
    assert torch.equal(graph(low(5.0)), torch.tensor([6.0]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace_records_the_conversion(backend: Any) -> None:
    traced = torch.jit.trace(lambda x: lite_ext.convert([x], F32)[0] + 1, (low(),), check_trace=False)
    assert traced(low(5.0, 6.0, 7.0)).tolist() == [6.0, 7.0, 8.0]


def test_profiler_under_a_conversion(backend: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert lite_ext.convert([low()], F32)[0].dtype == F32


def test_a_source_without_its_memory_is_an_error(backend: Any) -> None:
    leaf = torch.ones(4, dtype=torch.bfloat16)
    leaf.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError) as expected:
        leaf.to(torch.float32)
    with pytest.raises(RuntimeError) as caught:
        lite_ext.convert([leaf], torch.float32)
    assert str(caught.value).split("\n")[0] == str(expected.value).split("\n")[0]
