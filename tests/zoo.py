"""The shared table of trees. Each builder makes a fresh tree with at least one bfloat16 leaf; a fault becomes a row.

`TREES` has the trees, `KEPT` the objects that a conversion must return as they are, `REGISTERED` what is registered
with `register_node`. Leaves of every layout are in zoo_leaves.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding, DynamicCache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqModelOutput
from zoo_classes import (
    AttrDict,
    Box,
    CopyingStore,
    CustomOutput,
    Frozen,
    FrozenSlotted,
    Guarded,
    Inherited,
    LabelledDeque,
    LabelledSet,
    LabelledTuple,
    Liar,
    Mutating,
    NamedDict,
    NotInInit,
    Plain,
    Point,
    Record,
    Scaled,
    Settings,
    SizedList,
    Slotted,
    SlottedList,
    SlottedStore,
    Store,
    TensorLikeStore,
    WithInitVar,
    low,
)

REGISTERED: dict[type, tuple[Callable[[Any], Any], Callable[[Any, list[Any]], Any]]] = {
    Box: (lambda box: ([box.value], "context"), lambda context, children: Box(*children)),
}


def _with_attributes(tree: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(tree, name, value)
    return tree


def _with_unset(tree: Any, name: str) -> Any:
    object.__delattr__(tree, name)
    return tree


def _moved() -> OrderedDict[str, Any]:
    tree = OrderedDict(a=low(), b=1, c=low(2.0))
    tree.move_to_end("a")
    tree.move_to_end("c", last=False)
    return tree


def _named_set() -> LabelledSet:
    return _with_attributes(LabelledSet([low(1.0), low(2.0)]), label="instance")


def _mirrored_field_changed() -> CustomOutput:
    made = CustomOutput(loss=low(1.0), logits=low(2.0))
    made.__dict__["aux"] = low(3.0)  # a field that is no item
    return made


def _same_tensor() -> list[Any]:
    leaf = low()
    return [leaf, {"again": leaf}, Plain(leaf, (leaf,)), low()]


def _same_container() -> dict[str, Any]:
    shared, kept = [low()], [1]
    return {"a": shared, "b": (shared, kept), "c": kept, "d": Point(shared, [shared])}


def _doubling() -> Any:
    tree: Any = low()
    for _ in range(60):
        tree = (tree, tree)
    return tree


def _base_and_view() -> list[torch.Tensor]:
    base = torch.arange(8, dtype=torch.bfloat16)
    return [base, base[2:5], base.view(2, 4)]


def _nested(depth: int) -> Any:
    tree: Any = low()
    for level in range(depth):
        tree = ([tree], (tree,), {"k": tree}, deque([tree]), Plain(tree))[level % 5]
    return tree


def _detections() -> list[dict[str, Any]]:
    return [{"boxes": low(*range(4)), "labels": torch.arange(4), "scores": low(0.5)} for _ in range(20)]


def _causal_output() -> CausalLMOutputWithPast:
    last = low(7.0)
    cache = tuple((low(float(i)), low(-float(i))) for i in range(3))
    return CausalLMOutputWithPast(logits=last, past_key_values=cache, hidden_states=(low(), last))


def _with_cache() -> CausalLMOutputWithPast:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 2, dtype=torch.bfloat16), torch.ones(1, 1, 2, 2, dtype=torch.bfloat16), 0)
    return CausalLMOutputWithPast(logits=low(), past_key_values=cache)


TREES: dict[str, Callable[[], Any]] = {
    "leaf": low,
    "tuple": lambda: (low(), None, "text"),
    "list": lambda: [low(), 1, [], {}, ()],
    "dict": lambda: {"z": low(), 3: low(2.0), ("tuple", "key"): low(4.0), "a": "last"},
    "dict with a tensor for a key": lambda: {low(): low(2.0)},
    "none before a leaf": lambda: (None, low()),
    "namedtuple": lambda: Point(low(), 2),
    "namedtuple with its own __new__": lambda: Scaled(low()),
    "tuple subclass": lambda: LabelledTuple("label", [low(), 1]),
    "torch.return_types.max": lambda: torch.max(low(1.0, 2.0), 0),
    "torch.return_types.svd": lambda: torch.return_types.svd((low(1.0), low(2.0), low(3.0))),
    "structseq with hidden fields": lambda: time.struct_time([low(), *range(8)], {"tm_zone": "UTC", "tm_gmtoff": 5}),
    "PackedSequence": lambda: pack_sequence([low(1.0, 2.0), low(3.0)]),
    "list subclass": lambda: SizedList(3, [low(), 2]),
    "list subclass with slots": lambda: _with_attributes(SlottedList([low()]), extra="slot"),
    "dict subclass": lambda: NamedDict("name", a=low(), b=2),
    "AttrDict": lambda: AttrDict(a=low(), b=AttrDict(c=low(2.0))),
    "OrderedDict": lambda: OrderedDict(b=low(), a=2),
    "OrderedDict after move_to_end": _moved,
    "OrderedDict with an attribute": lambda: _with_attributes(OrderedDict(a=low()), note=[1]),
    "defaultdict": lambda: defaultdict(list, a=low()),
    "defaultdict without factory": lambda: defaultdict(None, {"a": low()}),
    "Counter": lambda: Counter({"a": low(), "b": 2}),
    "ModelOutput": lambda: CustomOutput(loss=low(1.0), logits=low(2.0)),
    "ModelOutput, first field None": lambda: CustomOutput(logits=low()),
    "ModelOutput in ModelOutput": lambda: CustomOutput(logits=low(), aux=BaseModelOutput(last_hidden_state=low(2.0))),
    "ModelOutput, field that is no item": _mirrored_field_changed,
    "ModelOutput with extra attribute": lambda: _with_attributes(CustomOutput(logits=low()), extra={"k": low(9.0)}),
    "ModelOutput with a shared state": _causal_output,
    "ModelOutput with DynamicCache": _with_cache,
    "Seq2SeqModelOutput": lambda: Seq2SeqModelOutput(
        last_hidden_state=low(),
        decoder_hidden_states=(low(1.0), low(2.0)),
        encoder_last_hidden_state=low(3.0),
    ),
    "BatchEncoding": lambda: BatchEncoding({"pixel_values": low(), "input_ids": torch.arange(3)}),
    "UserDict": lambda: UserDict(a=low(), b=1),
    "UserDict subclass": lambda: Settings("owner", a=low(), b=[low(2.0)]),
    "MutableMapping": lambda: Store("first", a=low(), b=2, c=[low(4.0)]),
    "MutableMapping with slots": lambda: SlottedStore("first", a=low(), b=2),
    "MutableMapping with __copy__": lambda: CopyingStore("first", a=low(), b=2),
    "mappingproxy": lambda: MappingProxyType({"a": low(), "b": 2}),
    "mappingproxy of OrderedDict": lambda: MappingProxyType(_moved()),
    "set": lambda: {low(1.0), low(2.0), "text"},
    "frozenset": lambda: frozenset([(low(1.0), 1), (low(2.0), 2)]),
    "set subclass": _named_set,
    "deque": lambda: deque([low(), 2], maxlen=3),
    "deque without maxlen": lambda: deque([low()]),
    "deque subclass": lambda: LabelledDeque("label", [low(1.0), low(2.0)]),
    "dataclass": lambda: Plain(low(), [low(2.0)]),
    "dataclass in dataclass": lambda: Plain(Frozen(Slotted(low())), 1),
    "dataclass with extra attribute": lambda: _with_attributes(
        Plain(low()), extra=low(9.0), graph=torch.ones(1, requires_grad=True) * 2
    ),
    "dataclass with unset field": lambda: _with_unset(NotInInit(low()), "cache"),
    "frozen dataclass": lambda: Frozen(low()),
    "dataclass with slots": lambda: Slotted(low(), 2),
    "dataclass with unset slot": lambda: _with_unset(Slotted(low()), "y"),
    "frozen dataclass with slots": lambda: FrozenSlotted(low(), low(2.0)),
    "dataclass with InitVar and ClassVar": lambda: WithInitVar(low(), 3),
    "dataclass with init=False": lambda: NotInInit(low()),
    "dataclass with mutating __post_init__": lambda: Mutating(low()),
    "inherited dataclass": lambda: Inherited(low(), 2, z=low(3.0)),
    "dataclass with raising __setattr__": lambda: Guarded(low()),
    "dataclass that is a Mapping": lambda: Record(low(), 2),
    "dataclass made on the fly": lambda: dataclasses.make_dataclass("Made", ["a", "b"])(low(), 1),
    "registered class": lambda: [Box(low()), Box(1)],
    "registered class in itself": lambda: Box(Box({"a": low()})),
    "same tensor twice": _same_tensor,
    "same container twice": _same_container,
    "doubling, 60 levels": _doubling,
    "base and views": _base_and_view,
    "200 levels": lambda: _nested(200),
    "detections": _detections,
    "1,000 leaves": lambda: tuple(low(float(i % 256)) for i in range(1000)),
    "integers beside": lambda: {
        "logits": low(),
        "ids": torch.arange(3),
        "mask": torch.ones(3, dtype=torch.bool),
    },
    "all convertible dtypes": lambda: [torch.ones(2, dtype=d) for d in (torch.float16, torch.bfloat16, torch.float64)],
    "Parameter": lambda: {"w": torch.nn.Parameter(low())},
    "unchanged beside changed": lambda: ([1, [2, ("a",)]], {"k": {"kept": torch.ones(2)}}, [low()]),
}


def _generator() -> Iterator[torch.Tensor]:
    yield low()


KEPT: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "number": lambda: 1.5,
    "string": lambda: "text",
    "bytes": lambda: b"bytes",
    "bytearray": lambda: bytearray(b"bytes"),
    "range": lambda: range(3),
    "numpy array": lambda: np.ones(2, dtype=np.float16),
    "torch.Size": lambda: torch.Size([2, 3]),
    "class": lambda: Plain,
    "generator": _generator,
    "custom object": lambda: _with_attributes(Liar(), leaf=low()),
    "object with a method to": lambda: _with_attributes(Liar(), to=None),
    "SimpleNamespace": lambda: SimpleNamespace(leaf=low()),
    "DynamicCache": DynamicCache,
    "module": lambda: torch.nn.Linear(2, 2, dtype=torch.bfloat16),
    "ParameterDict": lambda: torch.nn.ParameterDict({"w": low()}),
    "tensor-like mapping": lambda: TensorLikeStore("first", a=low()),
    "subclass of a registered class": lambda: type("SubBox", (Box,), {})(low()),
    "empty tuple": tuple,
    "empty list": list,
    "empty dict": dict,
    "empty OrderedDict": OrderedDict,
    "empty deque": deque,
    "empty set": set,
    "empty dataclass": dataclasses.make_dataclass("Empty", []),
    "empty UserDict": UserDict,
    "nothing to convert": lambda: {
        "a": [torch.ones(2), (torch.arange(2), None)],
        "b": Plain("text"),
        "c": {1, 2},
    },
}
