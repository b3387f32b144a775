"""What tools see: one range a conversion with its counts, memory as of `.to`, and nothing where no profiler runs."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import load_backend
from features import Model
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import benchmark
from zoo_classes import low

import lite_ext
from lite_ext import LiteModule

F32, BF16 = torch.float32, torch.bfloat16
CPU = [ProfilerActivity.CPU]


def ranges(profiled: Any, name: str = "lite_ext::convert") -> list[Any]:
    return [event for event in profiled.events() if event.name == name]


def half(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=BF16)


def test_one_range_a_call_with_counts() -> None:
    with profile(activities=CPU, record_shapes=True) as profiled:
        lite_ext.convert([half(3), {"a": half(5), "ids": torch.arange(3), "same": torch.ones(2)}], F32)
        lite_ext.convert(half(7), torch.float64)
        lite_ext.cast_tensors([half(2), half(2)], F32)
    counts = [event.kwinputs for event in ranges(profiled)]
    assert counts == [{"leaves": 2, "bytes": 32}, {"leaves": 1, "bytes": 56}, {"leaves": 2, "bytes": 16}]


def test_1000_leaves_are_one_range() -> None:
    with profile(activities=CPU, record_shapes=True) as profiled:
        lite_ext.convert([half(4) for _ in range(1000)], F32)
    (event,) = ranges(profiled)
    assert event.kwinputs == {"leaves": 1000, "bytes": 16000}
    assert not ranges(profiled, "aten::to")


def test_counts_in_a_trace(tmp_path: Path) -> None:
    with profile(activities=CPU, record_shapes=True) as profiled:
        lite_ext.convert([half(3)], F32)
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (event,) = [event for event in events if event.get("name") == "lite_ext::convert"]
    assert (event["args"]["leaves"], event["args"]["bytes"], event["cat"]) == (1, 12, "cpu_op")


def test_range_without_shapes() -> None:
    with profile(activities=CPU) as profiled:
        lite_ext.convert([half(3)], F32)
    assert len(ranges(profiled)) == 1
    assert "lite_ext::convert" in profiled.key_averages().table()


def test_no_conversion_no_range() -> None:
    """A range of its own would cost more than looking at a tree in which nothing is to be done."""
    with profile(activities=CPU) as profiled:
        lite_ext.convert([torch.ones(3), torch.arange(3)], F32)
    assert not ranges(profiled)


def test_wrapper() -> None:
    model = LiteModule(Model("tuple"), "bf16-mixed")
    with profile(activities=CPU, record_shapes=True) as profiled:
        model(torch.ones(2, 4))
    (inputs,), (outputs,) = ranges(profiled, "lite_ext::convert_inputs"), ranges(profiled)
    assert inputs.kwinputs == {"leaves": 1, "bytes": 16}
    assert outputs.kwinputs == {"leaves": 2, "bytes": 64}
    assert inputs.time_range.end <= outputs.time_range.start


def test_leaves_that_are_not_plain_are_seen_inside() -> None:
    sparse = torch.eye(3, dtype=BF16).to_sparse()
    with profile(activities=CPU, record_shapes=True) as profiled:
        lite_ext.convert([sparse, half(2)], F32)
    (event,) = ranges(profiled)
    assert event.kwinputs["leaves"] == 2
    assert "aten::to" in [child.name for child in event.cpu_children]


@pytest.mark.parametrize("failing", [True, False])
def test_range_ends_with_an_error(failing: bool) -> None:
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if failing and function is torch.Tensor.to:
                raise ValueError("no")
            return super().__torch_function__(function, types, args, kwargs or {})

    with profile(activities=CPU) as profiled:
        with record_function("around"):
            try:
                lite_ext.convert([low().as_subclass(Refusing)], F32)
            except ValueError:
                assert failing
        with record_function("after"):
            pass
    (range_,), (after,) = ranges(profiled), ranges(profiled, "after")
    assert range_.cpu_parent.name == "around"
    assert after.cpu_parent is None


def test_range_in_another_thread() -> None:
    with profile(activities=CPU) as profiled:
        thread = threading.Thread(target=lambda: lite_ext.convert([half(3)], F32))
        thread.start()
        thread.join()
    assert len(ranges(profiled)) <= 1  # torch decides whether it profiles threads that it did not start


def test_range_in_backward_is_that_of_to() -> None:
    names = []
    for convert in (lambda x: lite_ext.convert([x], F32)[0], lambda x: x.to(F32)):
        y = convert(low().requires_grad_()).sum()
        with profile(activities=CPU) as profiled:
            y.backward()
        names.append(sorted(e.name for e in profiled.events() if e.name.startswith("aten::")))
    assert names[0] == names[1]


def test_nothing_is_recorded_without_a_profiler() -> None:
    """Nothing that was opened stays open: the next profile begins empty."""
    lite_ext.convert([half(3)], F32)
    with profile(activities=CPU) as profiled:
        pass
    assert not ranges(profiled)


def test_profile_memory_sees_the_outputs() -> None:
    """As of `.to`: the bytes of new storages are counted, unless they come from the pool."""
    limits = load_backend("native").pool_stats()
    load_backend("native").set_pool_limits(0, 0)
    try:
        found, kept, leaf = [], [], half(1000)
        for convert in (lambda x: lite_ext.convert([x], F32), lambda x: [x.to(F32)]):
            with profile(activities=CPU, profile_memory=True) as profiled:
                kept.append(convert(leaf))
            found.append(sum(event.cpu_memory_usage for event in profiled.events() if event.cpu_parent is None))
    finally:
        load_backend("native").set_pool_limits(limits["thread_limit_bytes"], limits["shared_limit_bytes"])
    assert found == [4000, 4000]


def test_benchmark_timer() -> None:
    timer = benchmark.Timer(
        "convert(tree, dtype)", globals={"convert": lite_ext.convert, "tree": [low()], "dtype": F32}
    )
    assert timer.timeit(10).number_per_run == 10
