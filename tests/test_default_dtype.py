"""Forwards that set torch's default dtype, which the process shares, beside threads that do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lite_ext
from lite_ext import LiteModule

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def leaves_the_default_dtype() -> Iterator[None]:
    yield
    assert torch.get_default_dtype() == F32


class Halting(nn.Module):
    """Waits in the middle of its forward, and says what a factory makes there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.inside = threading.Event()
        self.go_on = threading.Event()

    def forward(self, x: torch.Tensor) -> Any:
        self.inside.set()
        assert self.go_on.wait(30)
        return self.layer(x), torch.ones(1).dtype


class Run:
    """A forward in a thread of its own, halted in the middle."""

    def __init__(self, precision: str, output_dtype: Any = "default") -> None:
        self.module = Halting()
        self.wrapper = lite_ext.setup_module(self.module, precision, output_dtype=output_dtype)
        self.result: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.module.inside.wait(30)

    def _run(self) -> None:
        self.result = self.wrapper(torch.ones(1, 2))

    def finish(self) -> Any:
        self.module.go_on.set()
        self._thread.join()
        return self.result


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("precisions", [("bf16-true", "bf16-true"), ("bf16-true", "64-true")])
def test_forwards_that_overlap_end_in_any_order(precisions: tuple[str, str], first: int) -> None:
    runs = [Run(precision) for precision in precisions]
    for run in (runs[first], runs[1 - first]):
        output, _ = run.finish()
        assert output.dtype == F32
    assert torch.get_default_dtype() == F32


def test_a_default_set_before_all_of_them_is_restored() -> None:
    torch.set_default_dtype(F64)
    try:
        runs = [Run("bf16-true"), Run("16-true")]
        assert [run.finish()[0].dtype for run in runs] == [F64, F64]
        assert torch.get_default_dtype() == F64
    finally:
        torch.set_default_dtype(F32)


class Bodied(LiteModule):
    """Takes the general way, not the one in C++."""

    def convert_output(self, output: Any, inputs: Any) -> Any:
        return super().convert_output(output, inputs)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: LiteModule(nn.Linear(2, 2), "bf16-mixed"),
        lambda: Bodied(nn.Linear(2, 2), "bf16-mixed"),
        lambda: LiteModule(nn.Linear(2, 2), "bf16-mixed", output_dtype="input", ambiguous_input="default"),
    ],
    ids=["native", "general", "ambiguous"],
)
def test_policy_default_does_not_see_the_forward_of_another_thread(wrap: Callable[[], LiteModule]) -> None:
    wrapper = wrap()
    x = torch.ones(1, 2)
    x_or_ids = (x,) if wrapper._output_dtype == "default" else (x, torch.ones(1, dtype=F64))
    if len(x_or_ids) == 2:
        wrapper.module.forward = lambda x, other: nn.functional.linear(x, wrapper.module.weight)
    run = Run("64-true")
    assert torch.get_default_dtype() == F64  # torch has one for all threads
    assert wrapper(*x_or_ids).dtype == F32
    run.finish()
    assert wrapper(*x_or_ids).dtype == F32


def test_policy_default_within_a_forward_of_the_same_thread_is_that_of_the_forward() -> None:
    class Narrows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(BF16)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = LiteModule(Narrows())
            self.seen: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            self.seen = y.dtype
            return y

    outer = lite_ext.setup_module(Outer(), "64-true")
    other = Run("16-true")
    try:
        assert outer(torch.ones(1, 2)).dtype == F32
        assert outer.module.seen == F64
    finally:
        other.finish()


def test_many_threads_leave_nothing_behind() -> None:
    wrappers = [
        lite_ext.setup_module(nn.Linear(4, 4), name) for name in ("bf16-true", "64-true", "bf16-mixed", "32-true")
    ]
    wrong: list[Any] = []

    def work(at: int) -> None:
        for _ in range(200):
            dtype = wrappers[at % len(wrappers)](torch.ones(2, 4, dtype=F32)).dtype
            if dtype != F32:
                wrong.append((at, dtype))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.get_default_dtype() == F32
