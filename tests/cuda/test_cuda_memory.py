"""Memory: what is allocated, what comes back, and what happens when there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from devices import NEEDS_CUDA

import lite_ext

pytestmark = NEEDS_CUDA

BF16, F32 = torch.bfloat16, torch.float32
MIB = 2**20


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Lets this process have 300 MiB beyond what it holds."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 300 * MIB) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_results_take_what_they_need_and_give_it_back() -> None:
    tree = [torch.ones(MIB, dtype=BF16, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    results = lite_ext.convert(tree, F32)
    assert torch.cuda.memory_allocated() - before == 8 * 4 * MIB
    del results
    assert torch.cuda.memory_allocated() == before


def test_out_of_memory_is_torchs_error_and_leaves_nothing(little_memory: None) -> None:
    tree = [torch.ones(16 * MIB, dtype=BF16, device="cuda") for _ in range(5)]  # 160 MiB, and 320 for the results
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            lite_ext.convert({"a": tree, "b": (tree[0], [tree[1][1:]])}, F32)
        gc.collect()
        assert torch.cuda.memory_allocated() == before
    result = lite_ext.convert(tree[:1], F32)[0]
    assert bool(result.eq(1).all())


def test_sources_may_die_before_the_kernel_has_run() -> None:
    for round in range(20):
        torch.cuda._sleep(10_000_000)
        tree = [torch.full((10_000,), float(round), dtype=BF16, device="cuda") for _ in range(30)]
        results = lite_ext.convert(tree, F32)
        del tree
        other = [torch.full((10_000,), -1.0, dtype=BF16, device="cuda") for _ in range(30)]
        assert all(bool(result.eq(round).all()) for result in results)
        del other


def test_a_source_without_its_memory_is_an_error() -> None:
    leaf = torch.ones(5, dtype=BF16, device="cuda")
    leaf.untyped_storage().resize_(0)  # as FSDP does between uses
    with pytest.raises(RuntimeError):
        lite_ext.convert([leaf], F32)
