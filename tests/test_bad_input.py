"""Wrong arguments, containers that cannot be rebuilt, and containers changed during the walk. Nothing is half done."""

from __future__ import annotations

import re
import threading
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import snapshot
from zoo import Box, Frozen, Plain, Store, low

import lite_ext

F32 = torch.float32


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


@pytest.mark.parametrize("function", [lite_ext.convert, lite_ext.cast_tensors], ids=["convert", "cast_tensors"])
@pytest.mark.parametrize(
    ("dtype", "got"),
    [
        (torch.int64, "torch.int64"),
        (torch.bool, "torch.bool"),
        (torch.complex64, "torch.complex64"),
        (torch.qint8, "torch.qint8"),
        ("float32", "'float32' of type str"),
        (float, "<class 'float'> of type type"),
        (None, "None of type NoneType"),
        (32, "32 of type int"),
        ([], "[] of type list"),
    ],
)
def test_dtype(backend: Any, function: Callable[..., Any], dtype: Any, got: str) -> None:
    message = f"dtype must be a floating torch.dtype such as torch.float32, got {got}"
    with pytest.raises(TypeError, match=exactly(message)):
        function([low()], dtype)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            torch.float16,
            "source must be a set of floating dtypes, got the lone dtype torch.float16: write {torch.float16}",
        ),
        ("float16", "source must be a set of floating dtypes, got 'float16' of type str"),
        (16, "source must be a set of floating dtypes, got 16 of type int"),
        (
            {torch.int8},
            "every item of source must be a floating torch.dtype such as torch.float32, got torch.int8",
        ),
        (
            ["float16"],
            "every item of source must be a floating torch.dtype such as torch.float32, got 'float16' of type str",
        ),
        (
            [torch.float16, None],
            "every item of source must be a floating torch.dtype such as torch.float32, got None of type NoneType",
        ),
    ],
)
def test_source(backend: Any, source: Any, message: str) -> None:
    with pytest.raises(TypeError, match=exactly(message)):
        lite_ext.convert([low()], F32, source=source)


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ("cache", "skip must be a collection of names, got the lone string 'cache': write ('cache',)"),
        ("", "skip must be a collection of names, got the lone string '': write ('',)"),
        (5, "skip must be a collection of names, got 5 of type int"),
        (None, "skip must be a collection of names, got None of type NoneType"),
        ((1,), "every item of skip must be a string, got 1 of type int"),
        (["a", b"b"], "every item of skip must be a string, got b'b' of type bytes"),
    ],
)
def test_skip(backend: Any, skip: Any, message: str) -> None:
    with pytest.raises(TypeError, match=exactly(message)):
        lite_ext.convert([low()], F32, skip=skip)


@pytest.mark.parametrize(("item", "got"), [(None, "None of type NoneType"), ("x", "'x' of type str")])
def test_cast_tensors_items(backend: Any, item: Any, got: str) -> None:
    with pytest.raises(TypeError, match=exactly(f"cast_tensors: tensors[1] must be a tensor, got {got}")):
        lite_ext.cast_tensors([low(), item], F32)


def test_cast_tensors_of_a_lone_tensor(backend: Any) -> None:
    message = "tensors must be a sequence of tensors, got a lone tensor: write [tensor]"
    with pytest.raises(TypeError, match=exactly(message)):
        lite_ext.cast_tensors(torch.ones(2, 2), F32)  # type: ignore[arg-type]


def test_cast_tensors(backend: Any) -> None:
    tensors = [
        low(),
        torch.arange(2),
        torch.ones(2),
        torch.ones(1, dtype=torch.float64),
        torch.ones(1).to(torch.float8_e5m2),
    ]
    result = lite_ext.cast_tensors(tensors, F32)
    assert [t.dtype for t in result] == [F32, torch.int64, F32, F32, torch.float8_e5m2]
    assert [r is t for r, t in zip(result, tensors, strict=True)] == [False, True, True, False, True]
    assert lite_ext.cast_tensors((), F32) == []
    first, second = lite_ext.cast_tensors([tensors[0], tensors[0]], F32)
    assert first is second
    kept = [torch.ones(1)]
    assert lite_ext.cast_tensors(kept, F32) is not kept


class Unregistered:
    pass


def _flatten(tree: Any) -> Any:
    return [], None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ("Unregistered", _flatten, print),
            TypeError,
            "register_node: cls must be a class, got 'Unregistered'",
        ),
        (
            (torch.nn.Parameter, _flatten, print),
            TypeError,
            f"register_node: {torch.nn.Parameter!r} is a tensor class, always a leaf",
        ),
        ((dict, _flatten, print), TypeError, "register_node: <class 'dict'> is a container already"),
        ((tuple, _flatten, print), TypeError, "register_node: <class 'tuple'> is a container already"),
        ((Unregistered, 3, print), TypeError, "register_node: flatten must be callable, got 3"),
        ((Unregistered, _flatten, None), TypeError, "register_node: unflatten must be callable, got None"),
        ((Box, _flatten, print), ValueError, f"register_node: {Box!r} is registered already"),
    ],
)
def test_register_node(backend: Any, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=exactly(message)):
        lite_ext.register_node(*arguments)


@dataclass
class Failure(Exception):
    """A dataclass that object.__new__ refuses to make."""

    x: Any


class ListStore(Store):
    """Its items are in a list that a shallow copy shares."""

    def __init__(self, value: Any) -> None:
        self.items_ = [value]

    def __getitem__(self, key: str) -> Any:
        return self.items_[0]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[0] = value

    def __iter__(self) -> Any:
        return iter(["k"])

    def __len__(self) -> int:
        return 1


class Computed(ListStore):
    """Makes its values when they are read."""

    written = 0

    def __getitem__(self, key: str) -> Any:
        return self.items_[0].clone()

    def __setitem__(self, key: str, value: Any) -> None:
        Computed.written += 1


@dataclass(frozen=True, eq=False)
class ByDtype:
    """Equal when the dtypes are."""

    x: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByDtype) and self.x.dtype == other.x.dtype

    def __hash__(self) -> int:
        return hash(self.x.dtype)


def _rebuild_message(name: str, path: str, reason: str, verb: str = "rebuild") -> str:
    return f"convert: cannot {verb} {name} at {path}: {reason}; use lite_ext.register_node to say how"


HOLDERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "root": (lambda tree: tree, "output"),
    "inside": (lambda tree: {"loss": Plain(1, (2, 3, 4, [tree, low()]))}, "output['loss'].y[3][0]"),
    "after a skipped name": (
        lambda tree: {"cache": [low()], "x": UserDict(k=[low(), tree])},
        "output['x']['k'][1]",
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Failure(low()), "object.__new__(Failure) is not safe, use Failure.__new__()"),
        (lambda: ListStore(low()), "its copy shares its storage"),
        (lambda: {ByDtype(low()), ByDtype(low().half())}, "its length changed in the copy"),
    ],
    ids=["Failure", "ListStore", "set"],
)
def test_cannot_rebuild(backend: Any, make: Callable[[], Any], reason: str, holder: str) -> None:
    wrap, path = HOLDERS[holder]
    bad = make()
    tree = wrap(bad)
    before = snapshot(tree)
    with pytest.raises(TypeError, match=exactly(_rebuild_message(type(bad).__qualname__, path, reason))) as caught:
        lite_ext.convert(tree, F32, skip=["cache"])
    assert isinstance(caught.value.__cause__, TypeError)
    assert str(caught.value.__cause__) == reason
    assert snapshot(tree) == before


def test_mapping_that_computes_its_values_is_never_written_to(backend: Any) -> None:
    Computed.written = 0
    message = _rebuild_message("Computed", "output[0]", "it makes its values when they are read")
    with pytest.raises(TypeError, match=exactly(message)):
        lite_ext.convert([Computed(low())], F32)
    assert Computed.written == 0


def _registered(flatten: Any, unflatten: Any = lambda context, children: children) -> Any:
    cls = type("Custom", (), {})
    lite_ext.register_node(cls, flatten, unflatten)
    return cls()


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("flatten", "reason"),
    [
        (lambda tree: _raise(ValueError("no")), "no"),
        (lambda tree: [1, 2], "flatten must return a tuple (children, context), got [1, 2]"),
        (lambda tree: (1,), "flatten must return a tuple (children, context), got (1,)"),
        (lambda tree: (5, None), "'int' object is not iterable"),
    ],
)
def test_flatten_fails(backend: Any, flatten: Any, reason: str) -> None:
    tree = {"k": [low(), _registered(flatten)]}
    with pytest.raises(TypeError, match=exactly(_rebuild_message("Custom", "output['k'][1]", reason, "read"))):
        lite_ext.convert(tree, F32)


def test_unflatten_fails(backend: Any) -> None:
    custom = _registered(lambda tree: ([low()], None), lambda context, children: _raise(KeyError("gone")))
    message = _rebuild_message("Custom", "output.x", "'gone'")
    with pytest.raises(TypeError, match=exactly(message)) as caught:
        lite_ext.convert(Frozen(custom), F32)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), MemoryError("full"), RecursionError("deep")])
def test_errors_that_are_not_about_the_container(backend: Any, error: BaseException) -> None:
    for functions in (
        (lambda tree: _raise(error),),
        (lambda tree: ([low()], None), lambda context, children: _raise(error)),
    ):
        with pytest.raises(type(error)) as caught:
            lite_ext.convert([_registered(*functions)], F32)
        assert caught.value is error


def test_error_of_a_leaf_is_passed_on(backend: Any) -> None:
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") == "to":
                raise NotImplementedError("this tensor stays")
            return super().__torch_function__(function, types, args, kwargs or {})

    tree = [low(), low().as_subclass(Refusing)]
    before = snapshot(tree)
    with pytest.raises(NotImplementedError, match=r"^this tensor stays$"):
        lite_ext.convert(tree, F32)
    assert snapshot(tree) == before


def test_broken_repr_of_a_key(backend: Any) -> None:
    class Key:
        def __repr__(self) -> str:
            raise ValueError("no repr")

    with pytest.raises(TypeError, match=r"^convert: cannot rebuild ListStore at output\[<.*Key>\]: its copy shares"):
        lite_ext.convert({Key(): ListStore(low())}, F32)


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (lambda item: [low(), item, low()], list.pop, "list"),
        (lambda item: [low(), item, low()], lambda tree: tree.append(low()), "list"),
        (lambda item: [low(), item, low()], lambda tree: tree.clear(), "list"),
        (lambda item: [low(), item, low()], lambda tree: tree.__setitem__(0, low()), "list"),
        (lambda item: {"a": low(), "k": item, "b": low()}, lambda tree: tree.pop("a"), "dict"),
        (lambda item: {"a": low(), "k": item, "b": low()}, lambda tree: tree.update(c=1), "dict"),
        (lambda item: {"a": low(), "k": item, "b": low()}, lambda tree: tree.clear(), "dict"),
        (lambda item: {"a": low(), "k": item, "b": low()}, lambda tree: tree.update(a=low()), "dict"),
    ],
)
def test_container_changed_during_the_walk(backend: Any, make: Any, change: Any, name: str) -> None:
    held: list[Any] = []
    tree = make(_registered(lambda item: (change(held[0]), ([low()], None))[1]))
    held.append(tree)
    message = f"convert: a {name} was changed while it was converted at output[0]"
    with pytest.raises(RuntimeError, match=exactly(message)):
        lite_ext.convert([tree], F32)


def test_container_changed_by_a_destructor(backend: Any) -> None:
    tree: list[Any] = [low() for _ in range(100)]

    class Clears:
        def __del__(self) -> None:
            tree.clear()

    def flatten(item: Any) -> Any:
        Clears()
        return [low()], None

    tree.insert(50, _registered(flatten))
    with pytest.raises(RuntimeError, match=exactly("convert: a list was changed while it was converted at output")):
        lite_ext.convert(tree, F32)


def test_containers_changed_by_another_thread(backend: Any) -> None:
    """No crash; a result that was right at some moment, or RuntimeError."""
    tree: Any = {"list": [low() for _ in range(20)], "dict": {i: low() for i in range(20)}}
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            tree["list"].append(low())
            tree["dict"].pop(next(iter(tree["dict"])))
            tree["dict"][object()] = low()
            tree["list"].pop(0)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            try:
                result = lite_ext.convert(tree, F32)
            except (RuntimeError, TypeError) as error:
                assert "changed" in str(error)
                continue
            leaves = [*result["list"], *result["dict"].values()]
            assert all(leaf.dtype == F32 for leaf in leaves)
    finally:
        stop.set()
        thread.join()
