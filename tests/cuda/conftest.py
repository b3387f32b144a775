"""Tests marked `cuda` need a device and a lite_ext built with CUDA; without them each is skipped, and says so."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lite_ext

BUILT = "cuda" in (lite_ext.build_info()["built_for"] or {"kernels": []})["kernels"]


def native() -> Any:
    return importlib.import_module("lite_ext._C")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    available = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("cuda") is None:
            continue
        if not available:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif not BUILT and "without_cuda" not in item.fixturenames:
            item.add_marker(pytest.mark.skip(reason="lite_ext was built without CUDA"))


@pytest.fixture
def without_cuda() -> None:
    if BUILT:
        pytest.skip("lite_ext was built with CUDA")


@pytest.fixture
def second_device() -> torch.device:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, two are needed")
    return torch.device("cuda", 1)


@pytest.fixture
def all_fast() -> Iterator[Callable[[int], None]]:
    """Call it at the end with the number of leaves that must have taken the kernel; no other may have been met."""
    before = native().counters()

    def check(leaves: int) -> None:
        after = native().counters()
        assert after["fast_cuda"] - before["fast_cuda"] == leaves
        assert after["fallback"] == before["fallback"]

    yield check


def count_launches(run: Callable[[], Any]) -> int:
    """How many times the kernel was launched by ``run``, as torch's profiler saw it on the device."""
    run()  # what is done once is not part of the count
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with torch.profiler.profile(activities=activities) as profile:
            run()
            torch.cuda.synchronize()
        return sum(event.count for event in profile.key_averages() if "cast_kernel" in event.key)


@pytest.fixture
def launches() -> Callable[[Callable[[], Any]], int]:
    return count_launches
