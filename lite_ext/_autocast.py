"""Where autocast works: on the device of the module that is wrapped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lite_ext.containers import kind_of


class Autocast:
    """Makes ``torch.autocast(device_type, dtype=dtype)`` for the device of a module.

    Args:
        module: Its first parameter or buffer says on which device autocast works, on each entry: it may be moved.
            Where it has none, the first tensor of the arguments does.
        dtype: float16 or bfloat16.

    Nothing of a call is kept in the object, so threads may share it.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self.dtype = dtype
        self.place = first_tensor(module)
        self._taken: dict[str, bool] = {}  # by device type: asked once, for torch.autocast warns when it is not

    def device_type(self, arguments: Any = None) -> str:
        """Return the device type to autocast on: that of the module, else of the arguments if it can, else the CPU."""
        tensor = None if self.place is None else self.place[0].get(self.place[1])
        if tensor is None:  # there was none yet, or it has gone
            self.place = first_tensor(self._module)
            tensor = None if self.place is None else self.place[0].get(self.place[1])
        if tensor is None:
            tensor = _first_in(arguments)
            if tensor is None or not torch.amp.is_autocast_available(tensor.device.type):
                return "cpu"
        return str(tensor.device.type)

    def context(self, arguments: Any) -> torch.autocast:
        """Return the context manager for one forward on these arguments, any nest."""
        return torch.autocast(self.device_type(arguments), dtype=self.dtype)

    def is_taken(self, device_type: str) -> bool:
        """Return whether ``torch.autocast`` works with the device and the dtype, and does not switch itself off."""
        if device_type not in self._taken:
            with torch.autocast(device_type, dtype=self.dtype):
                works = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == self.dtype
            self._taken[device_type] = works
        return self._taken[device_type]


def _first_in(tree: Any) -> torch.Tensor | None:
    if isinstance(tree, torch.Tensor):
        return tree
    kind = kind_of(type(tree))
    children = () if kind is None else kind.children(tree).values
    return next((tensor for tensor in map(_first_in, children) if tensor is not None), None)


def first_tensor(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Return the dict that holds the module's first parameter or buffer, and its key: the tensor itself may change."""
    for kind in ("_parameters", "_buffers"):
        for part in module.modules():
            for name, tensor in part.__dict__[kind].items():
                if tensor is not None:
                    return part.__dict__[kind], name
    return None
