"""``forward`` of the wrapper, with the signature of the inner one, which transformers and others read."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling

if TYPE_CHECKING:
    from lite_ext.wrapper import LiteModule


class ForwardOfInner:
    """The descriptor behind ``LiteModule.forward``."""

    def __get__(self, wrapper: LiteModule | None, owner: type[LiteModule]) -> Any:
        if wrapper is None:
            return owner._forward
        return wrapper._forward if is_compiling() else _BoundForward(wrapper)


class SignatureOfForward:
    """The descriptor behind ``LiteModule.__signature__``: calls of an instance; the class has its constructor's."""

    def __get__(self, wrapper: LiteModule | None, owner: type[LiteModule]) -> inspect.Signature:
        if wrapper is None:
            raise AttributeError("__signature__")
        return inspect.signature(wrapper.forward)


class _BoundForward:
    __slots__ = ("__self__",)
    __name__ = "forward"

    def __init__(self, wrapper: LiteModule) -> None:
        self.__self__ = wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__self__._forward(*args, **kwargs)

    @property
    def _inner(self) -> Any:
        return self.__self__._original_module.forward

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._inner)

    # What typing.get_type_hints reads.
    __annotations__ = property(lambda self: getattr(self._inner, "__annotations__", {}))
    __globals__ = property(lambda self: getattr(inspect.unwrap(self._inner), "__globals__", {}))
    __doc__ = property(lambda self: self._inner.__doc__)

    __func__ = property(lambda self: type(self.__self__)._forward)
    __code__ = property(lambda self: self.__func__.__code__)  # torch.export says where a forward is
