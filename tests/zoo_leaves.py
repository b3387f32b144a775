"""The shared table of leaves: `LEAVES` makes a floating tensor of a dtype in every layout, `KEPT_LEAVES` tensors that
are never converted, and `PLAIN_LAYOUTS` names the layouts that a compiled backend converts by itself, `GATHERED_LAYOUTS` those that it does on the CPU only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values that exist in every dtype, with a negative zero, infinities and a NaN among the first six."""
    numel = int(torch.Size(shape).numel())
    made = torch.arange(numel, dtype=torch.float64).remainder(509).mul(0.25).sub(8)
    special = torch.tensor([-0.0, float("inf"), float("nan"), -float("inf"), 0.0, 1.0], dtype=torch.float64)
    made[: min(numel, 6)] = special[: min(numel, 6)]
    return made.to(dtype).reshape(shape)


class Tagged(torch.Tensor):
    """Keeps its class, and counts the calls of its conversion."""

    calls = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "to":
            cls.calls += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def _misaligned(dtype: torch.dtype, offset: int) -> torch.Tensor:
    return values(dtype, 70)[offset:]


def _negative_view(dtype: torch.dtype) -> torch.Tensor:
    # The imaginary part of a conjugate is a view with the negative bit; where there is no complex dtype, make one.
    complex_dtype = {
        torch.float16: torch.complex32,
        torch.float32: torch.complex64,
        torch.float64: torch.complex128,
    }
    if dtype not in complex_dtype:
        return torch._neg_view(values(dtype, 4))
    return torch.view_as_complex(values(dtype, 4, 2)).conj().imag


def _graph_leaf(dtype: torch.dtype) -> torch.Tensor:
    return values(dtype, 3, 4).requires_grad_()


PLAIN_LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "contiguous": lambda dtype: values(dtype, 3, 5),
    "one element": lambda dtype: values(dtype, 1),
    "0-dim": lambda dtype: torch.tensor(-1.5, dtype=dtype),
    "0-size": lambda dtype: torch.empty(0, dtype=dtype),
    "0-size, 3-dim": lambda dtype: torch.empty(2, 0, 3, dtype=dtype),
    "large": lambda dtype: values(dtype, 3, 32771),  # enough for two threads
    "offset 1": lambda dtype: _misaligned(dtype, 1),
    "offset 2": lambda dtype: _misaligned(dtype, 2),
    "offset 3": lambda dtype: _misaligned(dtype, 3),
    "channels_last": lambda dtype: values(dtype, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda dtype: values(dtype, 4, 6).t(),
    "permuted": lambda dtype: values(dtype, 2, 3, 4).permute(2, 0, 1),
    "size-1 dimension with an odd stride": lambda dtype: values(dtype, 8).as_strided((1, 3), (7, 1)),
    "requires_grad": _graph_leaf,
    "requires_grad, not a leaf": lambda dtype: _graph_leaf(dtype) * 2,
    "view of a graph": lambda dtype: (_graph_leaf(dtype) * 2)[1:],
    "Parameter": lambda dtype: torch.nn.Parameter(values(dtype, 4)),
    "frozen Parameter": lambda dtype: torch.nn.Parameter(values(dtype, 4), requires_grad=False),
    "row of a matrix": lambda dtype: values(dtype, 4, 6)[2],
}

GATHERED_LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "every other": lambda dtype: values(dtype, 20)[::2],
    "every third of many": lambda dtype: values(dtype, 5000)[1::3],
    "columns": lambda dtype: values(dtype, 4, 6)[:, 1:4],
    "rows of 16, expanded": lambda dtype: values(dtype, 3, 700)[:, 3:603].unsqueeze(1)[..., :16].expand(3, 2, 16),
    "rows of 600": lambda dtype: values(dtype, 3, 700)[:, 3:603],
    "one column": lambda dtype: values(dtype, 700, 6)[:, 5],
    "one column, kept": lambda dtype: values(dtype, 7, 6)[:, 5:],
    "sliced and permuted": lambda dtype: values(dtype, 4, 6, 8)[:, ::2].permute(2, 0, 1),
    "sliced, permuted, size-1 dimensions": lambda dtype: values(dtype, 4, 1, 6, 1, 8)[:, :, ::2].permute(4, 1, 0, 3, 2),
    "eight dimensions": lambda dtype: values(dtype, *[3] * 8)[..., 1:].permute(7, 0, 6, 1, 5, 2, 4, 3),
    "expanded": lambda dtype: values(dtype, 1, 4).expand(3, 4),
    "expanded, permuted": lambda dtype: values(dtype, 2, 1, 4).expand(2, 3, 4).permute(2, 1, 0),
    "expanded scalar": lambda dtype: torch.tensor(2.5, dtype=dtype).expand(2, 3),
    "overlapping": lambda dtype: values(dtype, 8).as_strided((3, 4), (2, 1)),
    "0-size, odd strides": lambda dtype: values(dtype, 30).as_strided((2, 0), (9, 7)),
    "as many as are gathered": lambda dtype: values(dtype, 2 * 8192)[::2],
}

LEAVES: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    **PLAIN_LAYOUTS,
    **GATHERED_LAYOUTS,
    "more than are gathered": lambda dtype: values(dtype, 2 * 8193)[::2],
    "nine dimensions": lambda dtype: values(dtype, *[2] * 9, 4)[..., 1].permute(8, 0, 7, 1, 6, 2, 5, 3, 4),
    "negative view": _negative_view,
    "real part of a conjugate": lambda dtype: torch.view_as_real(torch.complex(*[values(torch.float32, 3)] * 2))[
        ..., 0
    ].to(dtype),
    "sparse COO": lambda dtype: torch.eye(3, dtype=dtype).to_sparse(),
    "sparse COO, hybrid": lambda dtype: torch.sparse_coo_tensor([[0, 2]], values(dtype, 2, 2), (3, 2)),
    "sparse CSR": lambda dtype: torch.eye(3, dtype=dtype).to_sparse_csr(),
    "meta": lambda dtype: torch.empty(2, 3, dtype=dtype, device="meta"),
    "nested, jagged": lambda dtype: torch.nested.nested_tensor(
        [values(dtype, 2, 3), values(dtype, 4, 3)], layout=torch.jagged
    ),
    "subclass with __torch_function__": lambda dtype: values(dtype, 3).as_subclass(Tagged),
}

KEPT_LEAVES: dict[str, Callable[[], torch.Tensor]] = {
    "int64": lambda: torch.arange(3),
    "uint8": lambda: torch.arange(3, dtype=torch.uint8),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "complex64": lambda: torch.ones(3, dtype=torch.complex64),
    "complex128, conjugate view": lambda: torch.ones(3, dtype=torch.complex128).conj(),
    "complex32": lambda: torch.ones(3, dtype=torch.complex32),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "float8_e4m3fn": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.ones(3).to(torch.float8_e5m2),
    "float8_e8m0fnu": lambda: torch.ones(3).to(torch.float8_e8m0fnu),
}
