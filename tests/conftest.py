"""Fixtures: threads and seeds are pinned, and the public functions run over both backends."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from backends import load_backend
from hypothesis import HealthCheck, settings

import lite_ext

settings.register_profile(
    "lite_ext",
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("lite_ext")
torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=["native", "python"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Each backend in turn; `lite_ext.convert` and its siblings run on it during the test."""
    loaded = load_backend(request.param)
    entry = sys.modules["lite_ext.convert"]
    monkeypatch.setattr(entry, "backend", loaded)
    monkeypatch.setattr(entry, "_convert", loaded.convert)
    assert lite_ext.convert.__module__ == entry.__name__
    return loaded
