"""The trees that are converted in the benchmarks, and the ratios aimed at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TreeMaker = Callable[[Callable[..., Tensor]], Any]

# How many times longer a peer should take in each case. Printed beside the figure, never enforced.
TARGETS: dict[str, dict[str, float]] = {
    "tuple-1000": {"fabric": 10, "optree": 7, "floor": 1.05},
    "hf-74": {"fabric": 14, "optree": 8},
    "one-tensor": {"fabric": 6, "optree": 8},
    "detections-100": {"fabric": 12, "optree": 9},
    "nested-729": {"fabric": 18, "optree": 11},
    "tuple-1000/noop": {"fabric": 300, "optree": 250},
    "hf-74/noop": {"fabric": 150, "optree": 70},
    "detections-100/noop": {"fabric": 200, "optree": 80},
    "tuple-1000/grad": {"fabric": 5},
    "hf-74/grad": {"fabric": 5},
    "tuple-1000/grad-parameters": {"fabric": 5},
    "large-16M": {"fabric": 1, ".to": 3},
    "tuple-100000": {"fabric": 6},
}
PAIR_SHARE = 0.8  # of the target of bfloat16 to float32, for every other pair of dtypes


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: The tree, then a slash and the variant if there is one.
        make: Builds the tree anew.
        dtype: What the floating leaves are converted to.
        flat: Whether the tree is a tensor or a tuple of tensors, so that plain loops can be compared.
        grad: Whether the floating leaves require grad.
        noop: Whether the leaves have the dtype already.
        optional: Whether the case runs only when asked for.
        peers: The peers to compare with; ``None`` means all that can.
    """

    name: str
    make: Callable[[], Any]
    dtype: torch.dtype
    flat: bool = False
    grad: bool = False
    noop: bool = False
    optional: bool = False
    peers: tuple[str, ...] | None = None

    @property
    def targets(self) -> dict[str, float]:
        """The ratios aimed at, by peer."""
        if self.name in TARGETS:
            return TARGETS[self.name]
        tree, _, variant = self.name.partition("/")
        pairs = {name: PAIR_SHARE * target for name, target in TARGETS.get(tree, {}).items() if name != "floor"}
        return pairs if "-to-" in variant else {}


def tuple_of(count: int, elements: int) -> TreeMaker:
    """Return a maker of a tuple of ``count`` tensors of ``elements``."""
    return lambda leaf: tuple(leaf(elements) for _ in range(count))


def one_tensor(leaf: Callable[..., Tensor]) -> Tensor:
    """Make a lone tensor of 64 elements."""
    return leaf(64)


def transformer_outputs(leaf: Callable[..., Tensor]) -> dict[str, Any]:
    """Make what a 24-layer language model returns: 1 + 25 + 2 * 24 = 74 leaves of (2, 8, 64)."""
    return {
        "logits": leaf(2, 8, 64),
        "hidden_states": tuple(leaf(2, 8, 64) for _ in range(25)),
        "past_key_values": tuple((leaf(2, 8, 64), leaf(2, 8, 64)) for _ in range(24)),
    }


def detections(leaf: Callable[..., Tensor]) -> list[dict[str, Tensor]]:
    """Make what a detector returns for 100 images: 10 boxes each, with int64 labels and scores."""
    return [{"boxes": leaf(10, 4), "labels": torch.arange(10), "scores": leaf(10)} for _ in range(100)]


def nested_dict(leaf: Callable[..., Tensor], depth: int = 6, width: int = 3) -> Any:
    """Make dicts ``depth`` deep and ``width`` wide: 3 ** 6 = 729 leaves of 16 elements."""
    if depth == 0:
        return leaf(16)
    return {f"key{i}": nested_dict(leaf, depth - 1, width) for i in range(width)}


def in_dtype(make: TreeMaker, dtype: torch.dtype, grad: str = "none") -> Callable[[], Any]:
    """Return a function that makes the tree with leaves of random numbers in ``dtype``.

    ``grad`` is ``"none"``, ``"output"`` (as a model returns them: with a history) or ``"parameter"`` (without one, so
    that torch makes an accumulator for each as well).
    """

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape).to(dtype).requires_grad_(grad != "none")
        return values.clone() if grad == "output" else values

    return lambda: make(leaf)


TREES: dict[str, tuple[TreeMaker, bool]] = {
    "tuple-1000": (tuple_of(1000, 64), True),
    "hf-74": (transformer_outputs, False),
    "one-tensor": (one_tensor, True),
    "detections-100": (detections, False),
    "nested-729": (nested_dict, False),
}

LARGE_PEERS = ("fabric", ".to", "_foreach_copy_")
PAIR_PEERS = ("fabric", "optree", ".to", "floor")

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def pair_cases() -> list[Case]:
    """Return the tuple of 1,000 leaves once for every pair of dtypes other than bfloat16 to float32."""
    make, flat = TREES["tuple-1000"]
    return [
        Case(f"tuple-1000/{a}-to-{b}", in_dtype(make, source), target, flat, peers=PAIR_PEERS)
        for a, source in DTYPES.items()
        for b, target in DTYPES.items()
        if a != b and (a, b) != ("bf16", "f32")
    ]


def all_cases() -> list[Case]:
    """Return every case: each tree from bfloat16, then with nothing to convert, with grad, large, other dtypes."""
    low, high = torch.bfloat16, torch.float32
    cases = [Case(name, in_dtype(make, low), high, flat) for name, (make, flat) in TREES.items()]
    cases += [Case(f"{name}/noop", in_dtype(make, high), high, flat, noop=True) for name, (make, flat) in TREES.items()]
    for name in ("tuple-1000", "hf-74"):
        make, flat = TREES[name]
        cases.append(Case(f"{name}/grad", in_dtype(make, low, grad="output"), high, flat, grad=True))
    make, flat = TREES["tuple-1000"]
    cases.append(Case("tuple-1000/grad-parameters", in_dtype(make, low, grad="parameter"), high, flat, grad=True))
    large = in_dtype(tuple_of(1, 16 * 2**20), low)
    cases.append(Case("large-16M", large, high, flat=True, peers=LARGE_PEERS))
    many = in_dtype(tuple_of(100_000, 64), low)
    cases.append(Case("tuple-100000", many, high, flat=True, optional=True))
    return cases + pair_cases()
