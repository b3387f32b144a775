"""The fused cast on a device: every result as `.to` gives it, by as few launches as promised."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from compare import bits, fingerprint
from devices import NEEDS_CUDA, all_fast, launches

import lite_ext

pytestmark = NEEDS_CUDA

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BF16, F32 = torch.bfloat16, torch.float32
FEW_LEAVES, MANY_LEAVES = 146, 1150  # that a launch holds where large arguments are not taken, and where they are


def random(count: int, dtype: torch.dtype, device: str = "cuda") -> torch.Tensor:
    return (torch.randn(count, device=device, dtype=torch.float64) * 1000).to(dtype)


def same(tree: list[torch.Tensor], dtype: torch.dtype) -> None:
    results = lite_ext.convert(tree, dtype)
    torch.cuda.synchronize()
    for index, (result, leaf) in enumerate(zip(results, tree, strict=True)):
        assert fingerprint(result) == fingerprint(leaf.to(dtype)), index


def leaves_a_launch() -> int:
    driver = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver)) == 0
    return MANY_LEAVES if driver.value >= 12010 and torch.cuda.get_device_capability() >= (7, 0) else FEW_LEAVES


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DTYPES, 2)))
def test_every_pair(source: torch.dtype, target: torch.dtype) -> None:
    special = torch.tensor(
        [0.0, -0.0, 1e-8, 6e-8, 1e-40, -1e-45, 65504, 65520, 3.4e38, 1e300, torch.inf, -torch.inf, torch.nan],
        dtype=torch.float64,
        device="cuda",
    )
    tree = [special.to(source), random(100_003, source), random(1, source)[0], random(12, source).reshape(3, 4)]
    with all_fast(4):
        same(tree, target)


@pytest.mark.parametrize("source", [torch.float16, BF16])
@pytest.mark.parametrize("target", [torch.float16, BF16, F32, torch.float64])
def test_every_pattern_of_16_bits(source: torch.dtype, target: torch.dtype) -> None:
    if source == target:
        return
    patterns = torch.arange(-32768, 32768, dtype=torch.int32, device="cuda").to(torch.int16).view(source)
    assert torch.equal(bits(lite_ext.convert([patterns], target)[0]), bits(patterns.to(target)))


@pytest.mark.parametrize("target", [torch.float16, BF16])
def test_rounding_at_and_around_ties(target: torch.dtype) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (1_000_000,), dtype=torch.int64, device="cuda").to(torch.int32)
    ties = (words & ~0xFFFF) | 0x8000
    tree = [words.view(F32), ties.view(F32), (ties + 1).view(F32), (ties - 1).view(F32)]
    results = lite_ext.convert(tree, target)
    for result, leaf in zip(results, tree, strict=True):
        assert torch.equal(bits(result), bits(leaf.to(target)))


@pytest.mark.parametrize(("source", "target"), [(BF16, F32), (F32, BF16), (torch.float64, F32), (torch.float16, BF16)])
def test_lengths_and_misaligned_sources(source: torch.dtype, target: torch.dtype) -> None:
    lengths = [*range(1, 40), 4095, 4096, 4097, 8191, 8192, 8193, 3 * 4096 + 7]
    tree = [random(length + 8, source)[offset : offset + length] for length in lengths for offset in (0, 1, 2, 3, 5)]
    with all_fast(len(tree)):
        same(tree, target)


def test_mixed_sources_are_one_launch() -> None:
    tree = [random(1000 + i, dtype) for i, dtype in enumerate(DTYPES * 3)]
    same(tree, F32)
    assert launches(lambda: lite_ext.convert(tree, F32)) == 1


def test_permuted_channels_last_and_odd_strides_of_one() -> None:
    base = random(2 * 3 * 4 * 5, BF16)
    tree = [
        base.reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        base.reshape(2, 3, 4, 5).permute(3, 1, 0, 2),
        base.reshape(24, 5).t(),
        base.as_strided((1, 120), (7, 1)),
        base.as_strided((120, 1), (1, 999)),
        base[0],
    ]
    with all_fast(len(tree)):
        same(tree, F32)
    assert launches(lambda: lite_ext.convert(tree, F32)) == 1


def test_sliced_expanded_and_overlapping_leaves() -> None:
    base = random(240, BF16).reshape(24, 10)
    tree = [base[:, ::2], base[:, :3], base[:1].expand(5, 10), base.as_strided((5, 5), (1, 1)), base[:0], base.conj()]
    same(tree, F32)


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0], [0, 5], [5, 0], [5, 0, 7], [0, 5, 0, 0, 7, 0]])
def test_empty_leaves(counts: list[int]) -> None:
    tree = [random(count, BF16) for count in counts]
    same(tree, F32)
    assert launches(lambda: lite_ext.convert(tree, F32)) == (1 if any(counts) else 0)


@pytest.mark.parametrize("by", [-1, 0, 1])
@pytest.mark.parametrize("full", [1, 2])
def test_more_leaves_than_a_launch_holds(full: int, by: int) -> None:
    most = leaves_a_launch()
    counts = [3] * (full * most + by)
    for empty in (None, most - 1, most, len(counts)):
        placed = counts if empty is None else [*counts[:empty], 0, *counts[empty:]]
        tree = [random(count, BF16) for count in placed]
        same(tree, F32)
        assert launches(lambda tree=tree: lite_ext.convert(tree, F32)) == -(-len(counts) // most)


def test_twenty_thousand_leaves() -> None:
    tree = list(random(60_003, BF16).split(3))
    results = lite_ext.convert(tree, F32)
    assert torch.equal(torch.cat(results), torch.cat(tree).to(F32))


def test_more_than_2_31_elements() -> None:
    count = 2**31 + 1
    free, _ = torch.cuda.mem_get_info()
    if free < 16 * 2**30:
        pytest.skip("less than 16 GiB of device memory are free")
    leaf = torch.empty(count, dtype=BF16, device="cuda").random_(0, 128)
    result = lite_ext.convert([leaf, leaf[:5]], F32)[0]
    for begin in range(0, count, 2**28):
        end = min(begin + 2**28, count)
        assert torch.equal(result[begin:end], leaf[begin:end].to(F32))


def test_each_output_has_a_storage_of_its_own() -> None:
    results = lite_ext.convert([random(5, BF16) for _ in range(20)], F32)
    assert len({result.untyped_storage().data_ptr() for result in results}) == 20
    assert all(result.untyped_storage().nbytes() == 20 for result in results)
    assert all(result._base is None and result.storage_offset() == 0 for result in results)
    results[0].add_(1)
    assert [result._version for result in results[:3]] == [1, 0, 0]
    results[1].untyped_storage().resize_(4000)  # by the allocator that made it
