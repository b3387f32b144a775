"""Devices, streams and graphs: the cast runs where its leaves are, on the stream that is current there."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from devices import NEEDS_CUDA, SECOND, launches, needs_two_devices

import lite_ext

pytestmark = NEEDS_CUDA

BF16, F32 = torch.bfloat16, torch.float32
LONG = 50_000_000  # cycles: some tens of milliseconds


def leaves(count: int, device: torch.device | str = "cuda") -> list[torch.Tensor]:
    return [torch.randn(100 + i, device=device).to(BF16) for i in range(count)]


def check(results: list[torch.Tensor], tree: list[torch.Tensor]) -> None:
    for result, leaf in zip(results, tree, strict=True):
        assert result.device == leaf.device
        assert torch.equal(result, leaf.to(F32))


def test_leaves_on_the_host_and_on_the_device() -> None:
    tree = [*leaves(3), *leaves(3, "cpu"), *leaves(2)]
    check(lite_ext.convert(tree, F32), tree)


# github.com/NVIDIA/apex/issues/319 and 371, deepseek-ai/FlashMLA/pull/176.
@needs_two_devices
def test_leaves_on_a_device_that_is_not_current() -> None:
    assert torch.cuda.current_device() == 0
    tree = leaves(5, SECOND)
    check(lite_ext.convert(tree, F32), tree)
    assert torch.cuda.current_device() == 0


@needs_two_devices
def test_leaves_on_several_devices() -> None:
    tree = [leaf for pair in zip(leaves(5), leaves(5, SECOND), strict=True) for leaf in pair]
    check(lite_ext.convert(tree, F32), tree)
    assert launches(lambda: lite_ext.convert(tree, F32)) == 2


@needs_two_devices
def test_side_stream_of_another_device() -> None:
    tree = leaves(5, SECOND)
    torch.cuda.synchronize(SECOND)
    stream = torch.cuda.Stream(SECOND)
    with torch.cuda.device(SECOND), torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        for leaf in tree:
            leaf.fill_(3)
        with torch.cuda.device(0):
            results = lite_ext.convert(tree, F32)
    torch.cuda.synchronize(SECOND)
    check(results, tree)


def test_side_stream() -> None:
    tree = leaves(50)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        for leaf in tree:
            leaf.fill_(3)  # a cast on any other stream reads what was there before
        results = lite_ext.convert(tree, F32)
        assert not stream.query()  # nor does the call wait for the device
    torch.cuda.synchronize()
    check(results, tree)
    assert all(result.eq(3).all() for result in results)


def test_threads_with_streams_of_their_own() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    tree = [torch.full((100 + i,), float(seed), dtype=BF16, device="cuda") for i in range(20)]
                    results = lite_ext.convert(tree, F32)
                    assert all(bool(result.eq(seed).all()) for result in results)
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# github.com/microsoft/onnxruntime/pull/32121: pointers staged in memory that was used again before the replay.
@pytest.mark.parametrize("count", [3, 100, 1000, 2500])
def test_graph_replay_with_other_work_in_between(count: int) -> None:
    tree = leaves(count)
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        lite_ext.convert(tree, F32)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = lite_ext.convert(tree, F32)
    for round in range(3):
        for leaf in tree:
            leaf.fill_(round + 1)
        other = [torch.randn(1000 + i, device="cuda").to(torch.float16) for i in range(count)]
        lite_ext.convert(other, F32)
        del other
        gc.collect()
        graph.replay()
        torch.cuda.synchronize()
        assert all(bool(result.eq(round + 1).all()) for result in results)
        check(results, tree)


# github.com/pytorch/pytorch/issues/155398: record_stream while capturing keeps memory for ever.
def test_graph_on_several_streams_gives_its_memory_back() -> None:
    tree = leaves(20)
    lite_ext.convert(tree, F32)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            first = lite_ext.convert(tree, F32)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                second = lite_ext.convert(first, BF16)
            torch.cuda.current_stream().wait_stream(side)
        graph.replay()
        torch.cuda.synchronize()
        check(first, tree)
        del graph, first, second
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before
