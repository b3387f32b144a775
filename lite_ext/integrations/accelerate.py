"""Hugging Face Accelerate: ``Accelerator.prepare(model)`` with the fused conversion of the outputs to float32.

Call :func:`enable` before the model is prepared. Versions tested: accelerate 1.15.0.

Accelerate replaces ``model.forward`` by a function that cannot be pickled: the copy of a prepared model comes back
without autocast, and without the conversion, and says nothing. What is put there instead can be pickled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from lite_ext.convert import convert

try:
    import accelerate
    from accelerate import accelerator as _accelerator
    from accelerate.utils import get_mixed_precision_context_manager
    from accelerate.utils import operations as _operations
except ImportError as error:
    raise ImportError(
        "lite_ext.integrations.accelerate needs Accelerate: pip install 'lite_ext[accelerate]'"
    ) from error

__all__ = ["UNDERSTOOD", "disable", "enable", "enabled"]

UNDERSTOOD = ("1.15",)
"""The versions of Accelerate whose ``prepare_model`` is known to do what this module expects."""

_LOW = frozenset({torch.float16, torch.bfloat16})

_replaced: tuple[Any, Any] | None = None  # Accelerate's own prepare_model, and ours that is in its place


class PreparedForward:
    """The forward of a prepared model: the model's own under autocast, its float16 and bfloat16 outputs in float32.

    Args:
        original: The forward of the model before it was prepared.
        autocast: The device type, dtype, whether it is on and whether it caches; ``None``: no autocast.
    """

    __name__ = "forward"

    def __init__(self, original: Callable[..., Any], autocast: tuple[str, torch.dtype, bool, bool] | None) -> None:
        self._original = original
        self._autocast = autocast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            output = self._original(*args, **kwargs)
        return convert(output, torch.float32, source=_LOW)

    def _context(self) -> Any:
        if self._autocast is None:
            return nullcontext()
        device_type, dtype, on, caches = self._autocast
        return torch.autocast(device_type, dtype=dtype, enabled=on, cache_enabled=caches)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._original)

    @property
    def __wrapped__(self) -> _Original:
        """What ``unwrap_model(keep_fp32_wrapper=False)`` goes on to, and binds to the model."""
        return _Original(self._original)


class _Original:
    """The original forward as a function of the model.

    It has no ``__wrapped__``: there Accelerate would go on, and take off the decorators of the model's author too.
    """

    __name__ = "forward"

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._original, MethodType):
            return self._original.__func__(model, *args, **kwargs)
        return self._original(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        inner = inspect.signature(self._original)
        model = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        return inner.replace(parameters=[model, *inner.parameters.values()])


def _is_conversion(forward: Any) -> bool:
    """Whether this is what Accelerate puts in place of a forward, with nothing around it."""
    return isinstance(getattr(forward, "__wrapped__", None), _operations.ConvertOutputsToFp32)


def _settings(context: Any) -> tuple[str, torch.dtype, bool, bool] | None:
    if not isinstance(context, torch.autocast):
        return None
    return context.device, context.fast_dtype, context._enabled, context._cache_enabled


def _wrap_prepare_model(prepare_model: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(prepare_model)
    def fused(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        before = model.__dict__.get("_original_forward")
        prepared = prepare_model(self, model, *args, **kwargs)
        original = model.__dict__.get("_original_forward")
        if original is not before and _is_conversion(model.__dict__.get("forward")):
            autocast = get_mixed_precision_context_manager(self.native_amp, self.autocast_handler)
            model.forward = PreparedForward(original, _settings(autocast))
        return prepared

    return fused


def _check() -> None:
    version = accelerate.__version__
    if ".".join(version.split(".")[:2]) not in UNDERSTOOD:
        raise RuntimeError(
            f"accelerate {version} is not understood by lite_ext.integrations.accelerate; versions that are: "
            f"{', '.join(f'{known}.*' for known in UNDERSTOOD)}. Without it: Accelerator() without mixed_precision, "
            "around lite_ext.setup_module(model, 'bf16-mixed')"
        )


def enable() -> None:
    """Make models that are prepared from now on use the fused conversion. Calling it again changes nothing.

    Outputs in float16 and bfloat16 go to float32, as Accelerate has it, but in every container that
    :func:`lite_ext.convert` knows. Where something else wraps the forward in its turn (Transformer Engine), Accelerate's
    own conversion stays.

    Raises:
        RuntimeError: This version of Accelerate is not understood; the message names those that are.

    Example:
        >>> enable()
        >>> model = Accelerator(mixed_precision="bf16").prepare(model)

    The rule is that of :func:`accelerate.utils.convert_outputs_to_fp32`.
    """
    global _replaced
    _check()
    if _replaced is None:
        own = _accelerator.Accelerator.prepare_model
        _replaced = own, _wrap_prepare_model(own)
        _accelerator.Accelerator.prepare_model = _replaced[1]


def disable() -> None:
    """Leave Accelerate as it was before :func:`enable`. Models prepared in between keep the fused conversion.

    Raises:
        RuntimeError: Something else replaced ``Accelerator.prepare_model`` after :func:`enable`; undo that first.
    """
    global _replaced
    if _replaced is not None:
        own, ours = _replaced
        if _accelerator.Accelerator.prepare_model is not ours:
            raise RuntimeError("Accelerator.prepare_model was replaced after enable(): undo that before disable()")
        _accelerator.Accelerator.prepare_model = own
        _replaced = None


@contextmanager
def enabled() -> Iterator[None]:
    """Enable within a block; afterwards it is as it was before.

    Raises:
        RuntimeError: As :func:`enable`.
    """
    before = _replaced
    enable()
    try:
        yield
    finally:
        if before is None:
            disable()
