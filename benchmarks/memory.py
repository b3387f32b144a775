"""The peak memory of a conversion, as the operating system counts it.

Run as a program, it measures one method on one tree and prints the bytes as JSON: a process of its own,
because an allocator keeps what it was given.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from cases import TreeMaker, in_dtype, tuple_of
from peers import OURS, all_peers
from torch.utils._pytree import tree_leaves

LIMIT = 1.05  # the peak aimed at, as a multiple of the bytes of the outputs

TREES: dict[str, TreeMaker] = {
    "64 x 1M": tuple_of(64, 2**20),
    "1 x 64M": tuple_of(1, 64 * 2**20),
    "16 x 1M, half int64": lambda leaf: {
        "scores": tuple(leaf(2**20) for _ in range(16)),
        "labels": tuple(torch.arange(2**19) for _ in range(16)),
    },
}
METHODS = (OURS, "fabric")


def status_bytes(field: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(tree_name: str, method: str) -> dict[str, int]:
    """Convert one tree once and return the bytes of the new outputs and the growth of the peak resident set.

    The tree is bfloat16 and becomes float32; what is not converted does not count as output.
    """
    torch.set_num_threads(1)
    convert = next(peer.convert for peer in all_peers()[0] if peer.name == method)
    convert((torch.ones(2**20, dtype=torch.bfloat16),), torch.float32)  # first use allocates tables of its own
    tree: Any = in_dtype(TREES[tree_name], torch.bfloat16)()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # makes the peak equal to what is resident now
    before = status_bytes("VmHWM")
    result = convert(tree, torch.float32)
    peak = status_bytes("VmHWM") - before
    kept = {id(leaf) for leaf in tree_leaves(tree)}
    outputs = sum(leaf.nbytes for leaf in tree_leaves(result) if id(leaf) not in kept)
    return {"outputs": outputs, "peak": peak}


def report() -> list[dict[str, Any]]:
    """Measure every method on every tree, each in a process of its own; empty where there is no ``/proc``."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return []
    rows = []
    for tree_name in TREES:
        for method in METHODS:
            command = [sys.executable, __file__, tree_name, method]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append({"tree": tree_name, "method": method, **json.loads(text)})
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
