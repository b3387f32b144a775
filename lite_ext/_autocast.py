"""Autocast around a forward: entered in C++ where nothing but its flags matter, else as ``torch.autocast``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from lite_ext import _backend

if _backend.NAME == "native":
    from lite_ext import _C

    _enter, _leave = _C.enter_autocast, _C.leave_autocast
    _device_number = _C.device_type_number
else:
    _enter = _leave = _device_number = None


class FusedAutocast:
    """What ``torch.autocast(device_type, dtype=dtype)`` does on entry and exit, on the device of a module.

    Args:
        module: Its first parameter or buffer says on which device autocast works, on each entry: it may be moved.
        dtype: float16 or bfloat16.

    Nothing of a call is kept in the object, so threads may share it.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype
        self._place: tuple[dict[str, Any], str] | None = _first_tensor(module)
        self._numbers: dict[str, int | None] = {}  # by device type; None: only torch.autocast will do

    def device_type(self) -> str:
        """Return the device type to autocast on."""
        if self._place is not None:
            tensors, name = self._place
            tensor = tensors.get(name)
            if tensor is not None:
                return str(tensor.device.type)
            self._place = _first_tensor(self._module)
            if self._place is not None:
                return self.device_type()
        return "cpu"

    def enter(self) -> Any:
        """Enter autocast; return what to give to :meth:`leave`."""
        device_type = self.device_type()
        if _enter is not None and not is_compiling():
            try:
                number = self._numbers[device_type]
            except KeyError:
                number = self._numbers[device_type] = self._number(device_type)
            if number is not None:
                saved = _enter(number, self._dtype)
                if saved is not None:
                    return saved
        context = self.context()
        context.__enter__()
        return context

    def leave(self, saved: Any) -> None:
        """Leave autocast, as it was before :meth:`enter`."""
        if type(saved) is int:
            _leave(saved)
        else:
            saved.__exit__(None, None, None)

    def context(self) -> torch.autocast:
        """Return the same as a context manager, for what runs piece by piece."""
        return torch.autocast(self.device_type(), dtype=self._dtype)

    def _number(self, device_type: str) -> int | None:
        """Return the number for C++ if ``torch.autocast`` accepts device and dtype without switching itself off."""
        with torch.autocast(device_type, dtype=self._dtype):
            works = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == self._dtype
        return _device_number(device_type) if works else None


def _first_tensor(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Return the dict that holds the module's first parameter or buffer, and its key: the tensor itself may change."""
    for kind in ("_parameters", "_buffers"):
        for part in module.modules():
            for name, tensor in part.__dict__[kind].items():
                if tensor is not None:
                    return part.__dict__[kind], name
    return None
