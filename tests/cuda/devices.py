"""What the tests on a CUDA device share: when they are skipped, and how launches and fast leaves are counted."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import lite_ext

BUILT = "cuda" in (lite_ext.build_info()["built_for"] or {"kernels": []})["kernels"]

_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NEEDS_CUDA = [
    pytest.mark.cuda,
    _device,
    pytest.mark.skipif(not BUILT, reason="lite_ext was built without CUDA"),
]
NEEDS_A_BUILD_WITHOUT = [
    pytest.mark.cuda,
    _device,
    pytest.mark.skipif(BUILT, reason="lite_ext was built with CUDA"),
]

SECOND = torch.device("cuda", 1)
needs_two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device, two are needed")


@contextmanager
def all_fast(leaves: int) -> Iterator[None]:
    """Within it exactly ``leaves`` leaves must take the kernel, and none any other way."""
    native: Any = importlib.import_module("lite_ext._C")
    before = native.counters()
    yield
    after = native.counters()
    assert after["fast_cuda"] - before["fast_cuda"] == leaves
    assert after["fallback"] == before["fallback"]


def launches(run: Callable[[], Any]) -> int:
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
