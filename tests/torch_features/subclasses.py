"""Tensor subclasses such as libraries make them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

F32, BF16 = torch.float32, torch.bfloat16


class Asked(torch.Tensor):
    """Takes part in the function protocol only, and keeps a note."""

    calls: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(function)
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, cls):
            result.note = getattr(args[0], "note", None)
        return result


class Pair(torch.Tensor):
    """A wrapper of two tensors with a dispatch of its own, as sharded and tagged tensors are."""

    one: torch.Tensor
    two: torch.Tensor

    @staticmethod
    def __new__(cls, one: torch.Tensor, two: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, one.shape, strides=one.stride(), dtype=one.dtype, device=one.device, requires_grad=one.requires_grad
        )

    def __init__(self, one: torch.Tensor, two: torch.Tensor) -> None:
        self.one, self.two = one, two

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Pair({self.one}, {self.two})"

    def __tensor_flatten__(self) -> Any:
        return ["one", "two"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return Pair(parts["one"], parts["two"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run(name: str) -> Any:
            return function(
                *pytree.tree_map_only(Pair, lambda p: getattr(p, name), args),
                **pytree.tree_map_only(Pair, lambda p: getattr(p, name), kwargs or {}),
            )

        one, two = run("one"), run("two")
        return cls(one, two) if isinstance(one, torch.Tensor) else one


class Quantized(torch.Tensor):
    """int8 values with a scale, shown as the dtype that they stand for: the way of torchao's quantised tensors."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=dtype, device=values.device, requires_grad=False
        )

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.values, self.scale = values, scale

    @classmethod
    def quantize(cls, tensor: torch.Tensor) -> Quantized:
        scale = tensor.float().abs().max() / 127
        return cls((tensor.float() / scale).round().to(torch.int8), scale, tensor.dtype)

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        return (self.values.float() * self.scale).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Quantized({self.values}, {self.scale}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            self = args[0]
            return cls(self.values, self.scale, kwargs.get("dtype") or self.dtype)
        plain = pytree.tree_map_only(cls, lambda q: q.dequantize(), (args, kwargs))
        return function(*plain[0], **plain[1])
