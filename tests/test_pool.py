"""The pool of storages, seen from Python: nothing that torch can do with an output may notice it."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import lite_ext

SMALL = 1000  # elements; the block of such an output belongs to a thread
LARGE = 1_000_000  # and that of such a one to the process
SIZES = pytest.mark.parametrize("elements", [SMALL, LARGE])


def make(elements: int = SMALL) -> Tensor:
    """Convert a tensor of ones."""
    return lite_ext.convert(torch.ones(elements, dtype=torch.bfloat16), torch.float32)


@pytest.fixture(autouse=True)
def fresh_pool() -> Iterator[None]:
    """Start each test with the default limit and nothing kept."""
    gc.collect()
    lite_ext.set_pool_limit(64 * 2**20, 256 * 2**20)
    yield
    lite_ext.set_pool_limit(64 * 2**20, 256 * 2**20)


@SIZES
def test_memory_of_a_dead_output_is_used_again(elements: int) -> None:
    first = make(elements)
    address = first.data_ptr()
    del first
    before = lite_ext.pool_stats()["reused"]
    assert make(elements).data_ptr() == address
    assert lite_ext.pool_stats()["reused"] > before


def test_living_outputs_never_share_memory() -> None:
    outputs = [make(1 + index % 300) for index in range(2000)]
    spans = sorted((o.data_ptr(), o.data_ptr() + o.untyped_storage().nbytes()) for o in outputs)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(torch.equal(o, torch.ones_like(o)) for o in outputs)


def test_a_new_output_is_at_version_zero_whatever_the_last_one_was_at() -> None:
    for _ in range(3):
        out = make()
        assert out._version == 0
        out.add_(1).mul_(2)
        assert out._version == 2
        del out


@pytest.mark.parametrize("share", [Tensor.detach, lambda out: out[1:], lambda out: out.view(-1, 2)])
def test_a_view_keeps_the_version_counter_of_a_dead_output(share: Callable[[Tensor], Tensor]) -> None:
    out = make()
    view = share(out)
    out.add_(1)
    del out
    other = make()
    other.add_(1).add_(1)
    assert (view._version, other._version) == (1, 2)
    view.add_(1)
    assert (view._version, other._version) == (2, 2)


def test_a_graph_keeps_the_version_counter_of_a_dead_output() -> None:
    weight = torch.ones(SMALL, requires_grad=True)
    out = make()
    loss = (out * weight).sum()
    del out
    make().add_(1)
    loss.backward()
    assert torch.equal(weight.grad, torch.ones(SMALL))
    out = make()
    loss = (out * weight).sum()
    out.add_(1)
    del out
    make()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_outputs_have_no_version_counter_and_leave_none() -> None:
    for _ in range(3):
        with torch.inference_mode():
            out = make()
            assert out.is_inference()
            out.add_(1)
        with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
            _ = out._version
        del out
        out = make()
        assert not out.is_inference() and out._version == 0
        del out


@SIZES
def test_storage_is_as_large_as_the_output(elements: int) -> None:
    assert make(elements + 1).untyped_storage().nbytes() == 4 * elements + 4


@SIZES
@pytest.mark.parametrize("keep", ["view", "detach", "numpy", "dlpack", "storage"])
def test_memory_lives_as_long_as_anything_refers_to_it(keep: str, elements: int) -> None:
    output = make(elements)
    keeping: dict[str, Callable[[Tensor], Any]] = {
        "view": lambda tensor: tensor[3:7],
        "detach": lambda tensor: tensor.detach(),
        "numpy": lambda tensor: tensor.numpy(),
        "dlpack": torch.from_dlpack,
        "storage": lambda tensor: tensor.untyped_storage(),
    }
    kept = keeping[keep](output)
    address = output.data_ptr()
    del output
    others = [make(elements).fill_(7) for _ in range(5)]
    assert all(other.data_ptr() != address for other in others)
    values = torch.tensor([], dtype=torch.float32).set_(kept) if keep == "storage" else torch.as_tensor(kept)
    assert torch.equal(values, torch.ones_like(values))


def test_resize_swaps_the_memory() -> None:
    output = make()
    output.resize_(100_000).fill_(2)
    assert output.untyped_storage().nbytes() == 400_000
    assert output.sum() == 200_000


def test_set_and_swapped_data() -> None:
    first, second = make(), make()
    first.set_(second)
    assert first.data_ptr() == second.data_ptr()
    third = make()
    third.data = torch.zeros(5)
    assert third.tolist() == [0.0] * 5


def test_share_memory_and_pickle() -> None:
    output = make()
    copied = pickle.loads(pickle.dumps(output))
    assert torch.equal(copied, output)
    output.share_memory_()
    assert output.is_shared()
    assert torch.equal(output, torch.ones(SMALL))


def test_deepcopy_of_an_output_has_its_own_memory() -> None:
    output = make()
    other = copy.deepcopy(output)
    other.zero_()
    assert output.sum() == SMALL


def test_limits_are_kept() -> None:
    lite_ext.set_pool_limit(100_000, 10_000_000)
    outputs = [make(elements) for _ in range(20) for elements in (*[SMALL] * 10, LARGE)]
    del outputs
    stats = lite_ext.pool_stats()
    assert 0 < stats["kept_small_bytes"] <= stats["thread_limit_bytes"] == 100_000
    assert 0 < stats["kept_large_bytes"] <= stats["shared_limit_bytes"] == 10_000_000


@pytest.mark.parametrize("elements", [2**10, 2**16])
def test_sizes_not_used_any_more_make_room(elements: int) -> None:
    lite_ext.set_pool_limit(8 * 4 * elements, 8 * 4 * elements)
    old = [make(2 * elements) for _ in range(20)]
    del old
    make(elements)  # its block is kept
    before = lite_ext.pool_stats()["allocated"]
    output = make(elements)
    assert lite_ext.pool_stats()["allocated"] == before
    assert output.sum() == elements


def test_beyond_the_largest_block_torch_allocates() -> None:
    before = lite_ext.pool_stats()
    make(2**28 + 1)  # 1 GiB and four bytes of output
    after = lite_ext.pool_stats()
    assert after["kept_large_bytes"] == before["kept_large_bytes"] == 0


def test_one_limit_leaves_the_other() -> None:
    lite_ext.set_pool_limit(1000, 2000)
    lite_ext.set_pool_limit(3000)
    stats = lite_ext.pool_stats()
    assert (stats["thread_limit_bytes"], stats["shared_limit_bytes"]) == (3000, 2000)


def test_empty_pool_gives_everything_back() -> None:
    outputs = [make(elements) for elements in (SMALL, LARGE)]
    del outputs
    stats = lite_ext.pool_stats()
    assert stats["kept_small_bytes"] > 0
    assert stats["kept_large_bytes"] > 0
    lite_ext.empty_pool()
    stats = lite_ext.pool_stats()
    assert (stats["kept_blocks"], stats["kept_small_bytes"], stats["kept_large_bytes"]) == (0, 0, 0)


def test_off() -> None:
    lite_ext.set_pool_limit(0, 0)
    assert not lite_ext.pool_stats()["enabled"]
    outputs = [make(elements) for elements in (SMALL, LARGE)]
    del outputs
    assert lite_ext.pool_stats()["kept_blocks"] == 0


def test_off_by_the_environment() -> None:
    code = (
        "import torch, lite_ext\n"
        "for _ in range(3): lite_ext.convert(torch.ones(9), torch.float16)\n"
        "stats = lite_ext.pool_stats()\n"
        "print(stats['enabled'], stats['reused'], stats['kept_blocks'])"
    )
    environment = {**os.environ, "LITE_EXT_POOL": "0"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.split() == ["False", "0", "0"]


def test_bad_limits() -> None:
    with pytest.raises(TypeError, match=r"thread_bytes must be an integer, got 1\.5 of type float"):
        lite_ext.set_pool_limit(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shared_bytes must not be negative, got -1"):
        lite_ext.set_pool_limit(0, -1)


def test_outputs_that_die_on_other_threads() -> None:
    outputs = [make() for _ in range(64)]
    failures: list[str] = []

    def work() -> None:
        for _ in range(200):
            with suppress(IndexError):
                outputs.pop()
            made = [make(n) for n in (1, 100, SMALL)]
            if not all(bool((m == 1).all()) for m in made):
                failures.append("wrong values")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not outputs


def test_outputs_that_outlive_their_thread_and_the_interpreter() -> None:
    code = (
        "import threading, torch, lite_ext\n"
        "kept = []\n"
        "def work(): kept.append(lite_ext.convert(torch.ones(99, dtype=torch.float16), torch.float32))\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
        "assert kept[0].sum() == 99\n"
        "import builtins; builtins.kept = kept  # dies after the modules\n"
        "print('done')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "done"), result.stderr


def test_after_a_fork() -> None:
    code = (
        "import os, threading, torch, lite_ext\n"
        "make = lambda: lite_ext.convert(torch.ones(99, dtype=torch.float16), torch.float32)\n"
        "stop = threading.Event()\n"
        "def work():\n    while not stop.is_set(): make()\n"
        "threads = [threading.Thread(target=work) for _ in range(3)]\n"
        "[t.start() for t in threads]\n"
        "for _ in range(20):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        ok = make().sum() == 99; lite_ext.empty_pool(); ok = ok and lite_ext.pool_stats()['kept_blocks'] == 0\n"
        "        os._exit(0 if ok else 1)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "stop.set(); [t.join() for t in threads]\n"
        "print('done')"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.strip()) == (0, "done"), result.stderr


def test_memory_profiler_sees_the_output() -> None:
    source = torch.ones(SMALL, dtype=torch.bfloat16)
    make()
    with torch.profiler.profile(profile_memory=True) as profile:
        output = lite_ext.convert(source, torch.float32)
    [event] = [e for e in profile.events() if e.name == "lite_ext::convert"]
    assert event.self_cpu_memory_usage == 4 * SMALL
    assert output.sum() == SMALL
