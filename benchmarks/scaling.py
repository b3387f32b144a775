"""How the time grows: a leaf's with the number of leaves, and the bandwidth with the size of one leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import Case, in_dtype, tuple_of
from measure import Method, statistics, time_rounds
from peers import OURS, Peer

LEAVES = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
ELEMENTS_A_LEAF = 64
LEAF_PEERS = (OURS, "floor", "fabric", "optree", ".to", "_foreach_copy_")

OUTPUT_BYTES = tuple(2**exponent for exponent in range(10, 29, 2))  # of one leaf: 1 KiB to 256 MiB
SIZE_PEERS = (OURS, ".to")
MEMCPY = "memcpy"
TWO_THREADS = f"{OURS}, 2 threads"

LOW, HIGH = torch.bfloat16, torch.float32
Tick = Callable[[], None]


def peer_methods(peers: list[Peer], names: tuple[str, ...], case: Case) -> dict[str, Method]:
    """Return what to time of the named peers on the tree of ``case``."""
    tree = case.make()
    return {
        peer.name: Method("convert(tree, dtype)", {"convert": peer.convert, "tree": tree, "dtype": case.dtype})
        for peer in peers
        if peer.name in names
    }


def against_leaves(peers: list[Peer], rounds: int, tick: Tick, most: int = LEAVES[-1]) -> list[dict[str, Any]]:
    """Time tuples of 1 to 100,000 leaves of 64 elements, bfloat16 to float32."""
    rows = []
    for count in (count for count in LEAVES if count <= most):
        case = Case(f"tuple-{count}", in_dtype(tuple_of(count, ELEMENTS_A_LEAF), LOW), HIGH, flat=True)
        # The longest calls need no averaging and would take most of the time.
        turns = rounds if count <= 10_000 else min(rounds, 3)
        seconds = time_rounds(peer_methods(peers, LEAF_PEERS, case), turns, tick=tick)
        rows.append({"leaves": count, "methods": {name: statistics(values) for name, values in seconds.items()}})
    return rows


def copy_method(moved: int) -> Method:
    """Return a copy that reads and writes ``moved`` bytes, half each, to memory that is there already."""
    source = torch.ones(moved // 2 // HIGH.itemsize, dtype=HIGH)
    return Method("target.copy_(source)", {"target": torch.zeros_like(source), "source": source})


def against_size(peers: list[Peer], rounds: int, tick: Tick, threads: int = 1) -> list[dict[str, Any]]:
    """Time one leaf of growing size beside a copy of as many bytes; with several threads lite_ext alone.

    Bytes are those read and written. The copy is torch's own within float32, into memory that it has written before.
    """
    rows = []
    for size in OUTPUT_BYTES:
        elements = size // HIGH.itemsize
        moved = elements * (LOW.itemsize + HIGH.itemsize)
        case = Case(f"one-{size}", in_dtype(tuple_of(1, elements), LOW), HIGH, flat=True)
        if threads > 1:
            methods = {TWO_THREADS: peer_methods(peers, SIZE_PEERS, case)[OURS]}
        else:
            methods = {**peer_methods(peers, SIZE_PEERS, case), MEMCPY: copy_method(moved)}
        seconds = time_rounds(methods, rounds, threads, tick)
        figures = {name: statistics(values) for name, values in seconds.items()}
        for figure in figures.values():
            figure["bytes_a_second"] = moved / figure["median"]
        rows.append({"output_bytes": size, "moved_bytes": moved, "methods": figures})
    return rows


def round_count(rounds: int, most: int = LEAVES[-1]) -> int:
    """Return how often :func:`against_leaves` ticks."""
    return sum(rounds if count <= 10_000 else min(rounds, 3) for count in LEAVES if count <= most)
