"""Every converted leaf is indistinguishable from `leaf.to(dtype)`: bits, strides, storage, and what else one can ask."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from compare import bits, fingerprint
from hypothesis import given
from hypothesis import strategies as st
from zoo import low
from zoo_leaves import GATHERED_LAYOUTS, LEAVES, PLAIN_LAYOUTS, Tagged, values

import lite_ext

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PAIRS = list(itertools.permutations(DTYPES, 2))
HALVES = (torch.float16, torch.bfloat16)
pairs = pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda d: str(d).removeprefix("torch."))


def assert_same_bits(result: torch.Tensor, wanted: torch.Tensor) -> None:
    assert result.dtype == wanted.dtype
    differing = (bits(result) != bits(wanted)).nonzero()
    assert not len(differing), f"{len(differing)} elements differ, the first at {differing[0].item()}"


@pairs
@pytest.mark.parametrize("name", LEAVES)
def test_every_layout(backend: Any, name: str, source: torch.dtype, target: torch.dtype) -> None:
    leaf = LEAVES[name](source)
    result = lite_ext.convert(leaf, target)
    assert fingerprint(result) == fingerprint(leaf.to(target))
    assert result is not leaf


@pairs
@pytest.mark.parametrize("name", [*PLAIN_LAYOUTS, *GATHERED_LAYOUTS])
def test_storage_is_its_own_and_of_exact_size(
    backend: Any, name: str, source: torch.dtype, target: torch.dtype
) -> None:
    leaves = [LEAVES[name](source) for _ in range(3)]
    results = lite_ext.convert(leaves, target)
    for result in results:
        assert result.untyped_storage().nbytes() == result.numel() * target.itemsize
        assert (result.storage_offset(), result._version, result._base) == (0, 0, None)
        assert not result._is_view()
        assert result.untyped_storage().resizable() == leaves[0].to(target).untyped_storage().resizable()
    pointers = {t.data_ptr() for t in [*leaves, *results] if t.numel()}
    assert len(pointers) == (len(leaves) + len(results) if results[0].numel() else 0)


def test_version_counters_are_separate(backend: Any) -> None:
    results = lite_ext.convert([low(), low(), low()], torch.float32)
    results[1].add_(1)
    assert [r._version for r in results] == [0, 1, 0]


def test_saving_one_leaf_writes_only_that_leaf(backend: Any) -> None:
    results = lite_ext.convert([torch.ones(5, dtype=torch.bfloat16) for _ in range(1000)], torch.float32)
    ours, theirs = io.BytesIO(), io.BytesIO()
    torch.save(results[3], ours)
    torch.save(torch.ones(5, dtype=torch.bfloat16).to(torch.float32), theirs)
    assert abs(len(ours.getvalue()) - len(theirs.getvalue())) < 64


@pytest.mark.parametrize("source", HALVES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_all_16_bit_patterns(backend: Any, source: torch.dtype, target: torch.dtype) -> None:
    leaf = torch.arange(-(2**15), 2**15).to(torch.int16).view(source)
    result = lite_ext.convert([leaf], target)[0]
    assert_same_bits(result, leaf.to(target))
    assert torch.equal(result.isnan(), leaf.isnan())
    # The tail of a vector loop takes another path than its body.
    for start in (0x7F70, 0xFF70, 0):
        parts = [leaf[start : start + length] for length in (1, 3, 7, 13, 31)]
        for part, converted in zip(parts, lite_ext.convert(parts, target), strict=True):
            assert_same_bits(converted, part.to(target))


# 32-bit patterns around every decision of a narrowing: denormals, ties, largest, infinities, NaNs.
_EDGES_32 = [
    *(exponent << 23 | mantissa for exponent in range(256) for mantissa in (0, 1, 0x1000, 0x8000, 0x7FFFFF)),
    *(exponent << 23 | high | low_bits for exponent in (0, 1, 103, 112, 113, 127, 142, 143, 254) for high in
      (0x000000, 0x2000, 0x10000, 0x20000, 0x7F0000, 0x7FE000) for low_bits in (0, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)),
]  # fmt: skip


def _edges_32() -> torch.Tensor:
    positive = torch.tensor(_EDGES_32, dtype=torch.int64)
    return torch.cat([positive, positive - 2**31]).to(torch.int32).view(torch.float32)


def _edges_64() -> torch.Tensor:
    exponents = torch.arange(2048, dtype=torch.int64) << 52
    mantissas = [
        0,
        1,
        1 << 28,
        1 << 29,
        1 << 41,
        1 << 42,
        (1 << 44) + 1,
        (1 << 45) + (1 << 12),
        (1 << 52) - 1,
    ]
    positive = (exponents[:, None] | torch.tensor(mantissas)[None]).flatten()
    return torch.cat([positive, positive ^ torch.iinfo(torch.int64).min]).view(torch.float64)


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("edges", [_edges_32, _edges_64], ids=["float32", "float64"])
def test_edges_of_narrowing(backend: Any, edges: Any, target: torch.dtype) -> None:
    leaf = edges()
    for part in (leaf, leaf[1:], leaf[3:10]):
        assert_same_bits(lite_ext.convert([part], target)[0], part.to(target))


def test_float64_is_rounded_twice_on_the_way_to_bfloat16(backend: Any) -> None:
    leaf = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert lite_ext.convert(leaf, torch.bfloat16).item() == 1.0  # once would give 1.0078125


def test_nan_never_becomes_infinity(backend: Any) -> None:
    patterns = torch.tensor([0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int64).to(torch.int32)
    for target in (torch.float16, torch.bfloat16, torch.float64):
        for length in (1, 5, 40):
            leaf = patterns.repeat(8)[:length].view(torch.float32)
            assert lite_ext.convert(leaf, target).isnan().all()


def test_denormals_survive(backend: Any) -> None:
    tiny = torch.tensor([2**-24, -(2**-20)], dtype=torch.float16)
    assert lite_ext.convert(tiny, torch.float32).tolist() == [2**-24, -(2**-20)]
    assert lite_ext.convert(torch.tensor([1e-40, 2**-149]), torch.float64).tolist() == [
        torch.tensor(1e-40).item(),
        2**-149,
    ]


@pairs
@given(data=st.data())
def test_random_bit_patterns(backend: Any, source: torch.dtype, target: torch.dtype, data: Any) -> None:
    """Any bits in any layout, in a list of leaves of several dtypes."""
    width = source.itemsize
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    length = data.draw(st.integers(0, 300))
    raw = torch.frombuffer(bytearray(data.draw(st.binary(min_size=8, max_size=64)) * 300), dtype=torch.uint8)
    flat = raw[: (raw.numel() // 8) * 8].view(integer)[: max(length, 12)].view(source)
    offset = data.draw(st.integers(0, 3))
    layouts = [
        flat[offset:],
        flat[offset::2],
        flat[:12].view(3, 4).t(),
        flat[:12].view(1, 3, 2, 2).to(memory_format=torch.channels_last),
        flat[:12].as_strided((3, 4), (2, 1)),
        flat[:1].expand(7),
        flat[:0],
        flat[0],
    ]
    chosen = data.draw(st.lists(st.sampled_from(layouts), max_size=6))
    for leaf, result in zip(chosen, lite_ext.convert(chosen, target), strict=True):
        wanted = leaf.to(target)
        assert (result.shape, result.stride()) == (wanted.shape, wanted.stride())
        assert_same_bits(result, wanted)


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 145, 146, 147, 1149, 1150, 1151, 2301])
def test_many_leaves(backend: Any, count: int, target: torch.dtype) -> None:
    """Sizes around vectors and tiles, empties among them and last, all dtypes in one call."""
    sizes = [0, 1, 4095, 4096, 4097, 3, 8, 16, 17, 0]
    leaves = [values(DTYPES[i % 4], sizes[i % len(sizes)]) for i in range(count)]
    for leaf, result in zip(leaves, lite_ext.convert(leaves, target), strict=True):
        assert_same_bits(result, leaf.to(target))


def test_large_leaves_beside_small_ones(backend: Any) -> None:
    """More elements than one thread takes, so that borders between threads fall inside leaves."""
    leaves = [values(torch.bfloat16, n) for n in (5, 100_003, 1, 32_768, 65_537, 0)]
    for leaf, result in zip(leaves, lite_ext.convert(leaves, torch.float32), strict=True):
        assert_same_bits(result, leaf.to(torch.float32))


def test_subclass_keeps_its_class_and_is_asked(backend: Any) -> None:
    leaf = low().as_subclass(Tagged)
    Tagged.calls = 0
    result = lite_ext.convert({"a": leaf}, torch.float32)["a"]
    assert type(result) is Tagged
    assert Tagged.calls == 1


def test_inference_mode(backend: Any) -> None:
    outside = [low(), torch.nn.Parameter(low()), low()[1:]]
    with torch.inference_mode():
        inside = [low(), low().t()]
        results = lite_ext.convert([*outside, *inside], torch.float32)
        wanted = [leaf.to(torch.float32) for leaf in (*outside, *inside)]
    later = lite_ext.convert(inside, torch.float32)
    assert [fingerprint(r) for r in results] == [fingerprint(w) for w in wanted]
    assert all(r.is_inference() for r in results)
    assert [fingerprint(r) for r in later] == [fingerprint(leaf.to(torch.float32)) for leaf in inside]


def test_default_device_mode(backend: Any) -> None:
    leaf = low()
    with torch.device("meta"):
        assert lite_ext.convert([leaf], torch.float32)[0].device.type == "cpu"


def test_fill_of_uninitialised_memory(backend: Any) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(lite_ext.convert([low()], torch.float32)[0], low().to(torch.float32))
    finally:
        torch.use_deterministic_algorithms(before)
