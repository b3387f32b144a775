"""Where autocast works: on the device of the module that is wrapped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Autocast:
    """Makes ``torch.autocast(device_type, dtype=dtype)`` for the device of a module.

    Args:
        module: Its first parameter or buffer says on which device autocast works, on each entry: it may be moved.
        dtype: float16 or bfloat16.

    Nothing of a call is kept in the object, so threads may share it.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self.dtype = dtype
        self.place = first_tensor(module)
        self._taken: dict[str, bool] = {}  # by device type: asked once, for torch.autocast warns when it is not

    def device_type(self) -> str:
        """Return the device type to autocast on."""
        tensor = None if self.place is None else self.place[0].get(self.place[1])
        if tensor is None:  # there was none yet, or it has gone
            self.place = first_tensor(self._module)
            tensor = None if self.place is None else self.place[0].get(self.place[1])
        return "cpu" if tensor is None else str(tensor.device.type)

    def context(self) -> torch.autocast:
        """Return the context manager for one forward."""
        return torch.autocast(self.device_type(), dtype=self.dtype)

    def is_taken(self, device_type: str) -> bool:
        """Return whether ``torch.autocast`` works with the device and the dtype, and does not switch itself off."""
        if device_type not in self._taken:
            with torch.autocast(device_type, dtype=self.dtype):
                works = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == self.dtype
            self._taken[device_type] = works
        return self._taken[device_type]


def first_tensor(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Return the dict that holds the module's first parameter or buffer, and its key: the tensor itself may change."""
    for kind in ("_parameters", "_buffers"):
        for part in module.modules():
            for name, tensor in part.__dict__[kind].items():
                if tensor is not None:
                    return part.__dict__[kind], name
    return None
