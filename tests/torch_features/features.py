"""What the tests of torch's features share: a model, the outputs it may have, and the leaves of a nest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from backends import load_backend
from torch import nn
from zoo_classes import CustomOutput, Frozen, Plain, Point

OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, y * 2),
    "dict": lambda y: {"logits": y, "cache": y * 2, "ids": torch.arange(3)},
    "dataclass": lambda y: Plain(y, [y + 1]),
    "frozen dataclass": lambda y: Frozen(y, y + 1),
    "namedtuple": lambda y: Point(y, y * 2),
    "ModelOutput": lambda y: CustomOutput(loss=y.sum(), logits=y),
    "nested": lambda y: {"deep": [(y, {"cache": y + 1}), Point(Plain(y * 3), "text")], "cache": (y * 2, None)},
}
POLICIES = ("default", "input", "keep", torch.float64)
PRECISIONS = ("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")


class Model(nn.Module):
    """Its output is one of OUTPUTS, made of a linear layer."""

    def __init__(self, output: str = "nested", width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        return OUTPUTS[self.output](self.linear(x))


def leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors of an output in order, found without the code under test."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return leaves(list(tree.values()))
    if dataclasses.is_dataclass(tree):
        return leaves([getattr(tree, field.name) for field in dataclasses.fields(tree)])
    return [leaf for child in tree for leaf in leaves(child)] if isinstance(tree, list | tuple) else []


def floating(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if leaf.is_floating_point()]


def skeleton(tree: Any) -> Any:
    """The tree with types and dtypes in place of its tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tuple(tree.shape)
    if isinstance(tree, dict):
        return type(tree), {key: skeleton(value) for key, value in tree.items()}
    if dataclasses.is_dataclass(tree):
        return type(tree), [skeleton(getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return (type(tree), [skeleton(child) for child in tree]) if isinstance(tree, list | tuple) else tree


def assert_same(result: Any, wanted: Any) -> None:
    """Same types, dtypes and values; within rounding, for compiled code rounds less often."""
    assert skeleton(result) == skeleton(wanted)
    for one, other in zip(leaves(result), leaves(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def gradients(model: nn.Module, output: Any) -> list[torch.Tensor]:
    """Of a loss that reaches every floating leaf."""
    loss = torch.stack([(leaf.float() * (1 + at)).square().sum() for at, leaf in enumerate(floating(output))]).sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


class Counted:
    """How many leaves took which way inside the block."""

    def __enter__(self) -> Counted:
        self._before = load_backend("native").counters()
        return self

    def __exit__(self, *exception: object) -> None:
        after = load_backend("native").counters()
        self.fast, self.fallback, self.calls = (after[k] - self._before[k] for k in ("fast_cpu", "fallback", "calls"))
