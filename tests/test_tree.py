"""What a converted tree is: the same types, the same objects where nothing changes, one result per object."""

from __future__ import annotations

import collections
import gc
import time
import weakref
from collections import OrderedDict, UserDict, deque
from types import MappingProxyType
from typing import Any

import pytest
import torch
from compare import actual, expected, snapshot
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from zoo import KEPT, TREES, AttrDict, Box, CustomOutput, Frozen, Inherited, Plain, Point, Slotted, Store, low
from zoo_leaves import KEPT_LEAVES

import lite_ext

F32 = torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TREES)
def test_every_tree(backend: Any, name: str, dtype: torch.dtype) -> None:
    tree = TREES[name]()
    before, wanted = snapshot(tree), expected(tree, dtype)
    result = lite_ext.convert(tree, dtype)
    assert actual(tree, result) == wanted
    assert result is not tree
    assert snapshot(tree) == before, "the caller's tree was written to"


@pytest.mark.parametrize("name", TREES)
def test_second_conversion_is_identity(backend: Any, name: str) -> None:
    result = lite_ext.convert(TREES[name](), F32)
    assert lite_ext.convert(result, F32) is result


@pytest.mark.parametrize("name", KEPT)
def test_kept_objects(backend: Any, name: str) -> None:
    tree = KEPT[name]()
    assert lite_ext.convert(tree, F32) is tree
    holder = [tree, low()]
    result = lite_ext.convert(holder, F32)
    assert result[0] is tree
    assert result[1].dtype == F32


@pytest.mark.parametrize("name", KEPT_LEAVES)
def test_kept_leaves(backend: Any, name: str) -> None:
    leaf = KEPT_LEAVES[name]()
    tree = {"kept": leaf, "changed": low()}
    assert lite_ext.convert(leaf, F32) is leaf
    assert lite_ext.convert(tree, F32)["kept"] is leaf


def test_unchanged_subtrees_are_the_same_objects(backend: Any) -> None:
    tree = {"kept": [torch.ones(2), {"k": (1, torch.ones(1))}], "changed": [low(), ["kept"]]}
    result = lite_ext.convert(tree, F32)
    assert result["kept"] is tree["kept"]
    assert result["changed"] is not tree["changed"]
    assert result["changed"][1] is tree["changed"][1]


def test_same_tensor_twice_is_converted_once(backend: Any) -> None:
    leaf = low()
    result = lite_ext.convert([leaf, {"k": (leaf,)}, low()], F32)
    assert result[0] is result[1]["k"][0]
    assert result[2] is not result[0]


def test_equal_tensors_stay_two(backend: Any) -> None:
    base = low()
    result = lite_ext.convert([base, base[:], base.view(3)], F32)
    assert len({t.data_ptr() for t in result}) == 3


def test_shared_leaf_sums_its_gradient_in_the_wider_dtype(backend: Any) -> None:
    leaf = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    first, second = lite_ext.convert((leaf, [leaf]), F32)
    total = 1.0 * first.sum() + 0.00390625 * second[0].sum() + 0.00390625 * first.sum()
    total.backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 1.0078125  # two sums rounded in bfloat16 would give 1.0


def test_same_container_twice_is_rebuilt_once(backend: Any) -> None:
    shared = {"k": [low()]}
    result = lite_ext.convert([shared, (shared,), shared["k"]], F32)
    assert result[0] is result[1][0]
    assert result[2] is result[0]["k"]


def test_an_address_used_again_is_another_object(backend: Any) -> None:
    count = iter(range(100))
    cls = type("Maker", (), {})  # hands out a list that nothing else holds, whose address is soon free again

    def flatten(maker: Any) -> Any:
        number = next(count)
        return [[low(float(number)) if number % 2 else number]], None

    lite_ext.register_node(cls, flatten, lambda context, items: items)
    makers = [cls() for _ in range(50)]
    result = lite_ext.convert(makers, F32)
    assert all(made is maker for made, maker in zip(result[::2], makers[::2], strict=True))
    assert [(made[0][0].item(), made[0][0].dtype) for made in result[1::2]] == [(n, F32) for n in range(1, 50, 2)]


def test_dict_order_is_insertion_order(backend: Any) -> None:
    tree = {"z": low(), "a": 1, "m": low(2.0)}
    assert list(lite_ext.convert(tree, F32)) == ["z", "a", "m"]
    ordered = OrderedDict(a=low(), b=low(), c=1)
    ordered.move_to_end("a")
    assert list(lite_ext.convert(ordered, F32)) == ["b", "c", "a"]
    assert list(reversed(lite_ext.convert(ordered, F32))) == ["a", "c", "b"]


def test_model_output_answers_by_key_attribute_and_position(backend: Any) -> None:
    output = CustomOutput(logits=low(2.0), aux=(low(3.0),))
    result = lite_ext.convert(output, F32)
    assert type(result) is CustomOutput
    assert result.loss is None
    assert result.logits is result["logits"] is result[0]
    assert result.aux is result["aux"] is result[1]
    assert result.to_tuple() == (result.logits, result.aux)
    assert result.logits.dtype == result.aux[0].dtype == F32
    result["logits"] = 5
    assert result.logits == 5
    assert output.logits.dtype == torch.bfloat16


def test_attr_dict_stays_its_own_namespace(backend: Any) -> None:
    result = lite_ext.convert(AttrDict(a=low()), F32)
    assert result.a is result["a"]
    result.b = 1
    assert result["b"] == 1


def test_post_init_is_not_run_again(backend: Any) -> None:
    tree = TREES["dataclass with mutating __post_init__"]()
    assert torch.equal(lite_ext.convert(tree, F32).x, tree.x.to(F32))


def test_hidden_fields_of_struct_sequences(backend: Any) -> None:
    tree = time.struct_time([low(), *range(8)], {"tm_zone": "XYZ", "tm_gmtoff": 7200})
    result = lite_ext.convert(tree, F32)
    assert (result.tm_zone, result.tm_gmtoff, result[8]) == ("XYZ", 7200, 7)


def test_packed_sequence_can_be_unpacked(backend: Any) -> None:
    packed = pack_sequence([low(1.0, 2.0), low(3.0)])
    result = lite_ext.convert(packed, F32)
    assert isinstance(result, PackedSequence)
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(result)
    assert padded.dtype == F32
    assert lengths.tolist() == [2, 1]


def test_new_containers_are_independent_of_the_old(backend: Any) -> None:
    tree: Any = [OrderedDict(a=low()), UserDict(a=low()), Store("first", a=low()), deque([low()]), {low()}]
    result = lite_ext.convert(tree, F32)
    for index in range(3):
        result[index]["new"] = 1
        assert "new" not in tree[index]
    result[3].append(1)
    result[4].add(1)
    assert (len(tree[3]), len(tree[4])) == (1, 1)


SKIPPABLE: dict[str, Any] = {
    "dict": lambda inner: {"cache": inner, "x": low()},
    "OrderedDict": lambda inner: OrderedDict(cache=inner, x=low()),
    "UserDict": lambda inner: UserDict(cache=inner, x=low()),
    "MutableMapping": lambda inner: Store("first", cache=inner, x=low()),
    "mappingproxy": lambda inner: MappingProxyType({"cache": inner, "x": low()}),
    "AttrDict": lambda inner: AttrDict(cache=inner, x=low()),
    "namedtuple": lambda inner: collections.namedtuple("Named", ["cache", "x"])(inner, low()),
    "deep": lambda inner: [({"k": [{"cache": inner}]}, low())],
}


@pytest.mark.parametrize("name", SKIPPABLE)
def test_skip_returns_the_subtree_as_it_is(backend: Any, name: str) -> None:
    inner = [low(), {"k": (low(),)}]
    tree = SKIPPABLE[name](inner)
    result = lite_ext.convert(tree, F32, skip=("cache",))
    if name == "deep":
        assert result[0][0] is tree[0][0]
        assert result[0][1].dtype == F32
        return
    cache, x = (result.cache, result.x) if name == "namedtuple" else (result["cache"], result["x"])
    assert cache is inner
    assert x.dtype == F32


@pytest.mark.parametrize("make", [Plain, Frozen, Slotted, Inherited, Point], ids=lambda cls: cls.__name__)
def test_skip_names_fields(backend: Any, make: Any) -> None:
    tree = make(low(1.0), low(2.0))
    result = lite_ext.convert(tree, F32, skip={"y", "unknown"})
    assert result.y is tree.y
    assert result.x.dtype == F32


def test_skip_names_fields_of_outputs_and_results(backend: Any) -> None:
    output = CustomOutput(loss=low(1.0), logits=low(2.0))
    result = lite_ext.convert(output, F32, skip=["logits"])
    assert result.logits is result["logits"] is output.logits
    assert result.loss.dtype == F32

    svd = torch.return_types.svd((low(1.0), low(2.0), low(3.0)))
    converted = lite_ext.convert(svd, F32, skip=["S"])
    assert converted.S is svd.S
    assert (converted.U.dtype, converted.V.dtype) == (F32, F32)

    largest = torch.max(low(1.0, 2.0), 0)
    assert lite_ext.convert(largest, F32, skip=["values"]) is largest
    packed = pack_sequence([low()])
    assert lite_ext.convert(packed, F32, skip=["data"]) is packed


def test_skip_is_for_names_only(backend: Any) -> None:
    tree = {0: low(), ("a",): low(), "list": [low()], "set": {"a"}, "box": Box(low())}
    result = lite_ext.convert(tree, F32, skip=["0", "value", "('a',)"])
    leaves = [result[0], result[("a",)], result["list"][0], result["box"].value]
    assert [leaf.dtype for leaf in leaves] == [F32] * 4


def test_skip_understands_string_subclasses(backend: Any) -> None:
    name = type("Name", (str,), {})("cache")
    tree = {name: low()}
    assert lite_ext.convert(tree, F32, skip=["cache"]) is tree
    assert lite_ext.convert({"cache": low()}, F32, skip=[name])["cache"].dtype == torch.bfloat16


def test_skip_compares_strings_only(backend: Any) -> None:
    class Poser:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return hash("cache")

    result = lite_ext.convert({Poser(): low()}, F32, skip=["cache"])
    assert [leaf.dtype for leaf in result.values()] == [F32]


def test_skipped_here_and_converted_there(backend: Any) -> None:
    shared = [low()]
    result = lite_ext.convert({"cache": shared, "other": shared}, F32, skip=["cache"])
    assert result["cache"] is shared
    assert result["other"][0].dtype == F32


def test_skipped_subtrees_are_not_walked(backend: Any) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert lite_ext.convert({"cache": cycle, "x": low()}, F32, skip=["cache"])["cache"] is cycle


def test_source_limits_what_is_converted(backend: Any) -> None:
    tree = {
        "half": torch.ones(1, dtype=torch.float16),
        "low": low(),
        "double": torch.ones(1, dtype=torch.float64),
    }
    result = lite_ext.convert(tree, F32, source={torch.float16, torch.bfloat16})
    assert [leaf.dtype for leaf in result.values()] == [F32, F32, torch.float64]
    assert result["double"] is tree["double"]
    assert lite_ext.convert(tree, F32, source=[F32]) is tree
    assert lite_ext.convert(tree, F32, source=()) is tree
    assert lite_ext.convert(tree, F32, source=iter([torch.float64]))["double"].dtype == F32


def test_float8_is_converted_when_named(backend: Any) -> None:
    leaf = torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn)
    assert lite_ext.convert([leaf], F32, source={torch.float8_e4m3fn})[0].tolist() == [1.0, -448.0]
    assert lite_ext.convert([low(1.0)], torch.float8_e4m3fn)[0].dtype == torch.float8_e4m3fn


def test_registered_subclass_of_a_container(backend: Any) -> None:
    cls = type("Special", (dict,), {})
    lite_ext.register_node(cls, lambda tree: (list(tree.values()), list(tree)), lambda keys, values: (keys, values))
    assert lite_ext.convert(cls(a=low(), b=1), F32)[0] == ["a", "b"]


def test_registered_functions_see_what_they_gave(backend: Any) -> None:
    cls, context = type("Held", (), {}), object()
    seen: list[Any] = []
    lite_ext.register_node(
        cls, lambda tree: (iter([low(), "x"]), context), lambda given, values: seen.append((given, values))
    )
    assert lite_ext.convert([cls()], F32) == [None]
    assert seen[0][0] is context
    assert type(seen[0][1]) is list
    assert (seen[0][1][0].dtype, seen[0][1][1]) == (F32, "x")


def _build(shape: Any, pool: list[Any]) -> Any:
    kind, value = shape
    if kind == "leaf":
        return pool[value]
    children = [_build(child, pool) for child in value]
    makers = {
        "list": list,
        "tuple": tuple,
        "deque": lambda items: deque(items, len(items) + 1),
        "dict": lambda items: {f"key{i}": item for i, item in enumerate(items)},
        "ordered": lambda items: OrderedDict((i, item) for i, item in enumerate(items)),
        "point": lambda items: Point(items, len(items)),
        "plain": lambda items: Plain(*items[:2]) if items else (),
        "slotted": lambda items: Slotted(tuple(items)),
        "output": lambda items: CustomOutput(logits=items) if items else None,
        "user": lambda items: UserDict(a=items),
        "proxy": lambda items: MappingProxyType({"a": items}),
        "box": Box,
        "twice": lambda items: (items, [items]),
    }
    return makers[kind](children)


_KINDS = [
    "list",
    "tuple",
    "deque",
    "dict",
    "ordered",
    "point",
    "plain",
    "slotted",
    "output",
    "user",
    "proxy",
    "box",
]
SHAPES = st.recursive(
    st.tuples(st.just("leaf"), st.integers(0, 9)),
    lambda inner: st.tuples(st.sampled_from([*_KINDS, "twice"]), st.lists(inner, max_size=4)),
    max_leaves=25,
)


@given(shape=SHAPES)
def test_random_trees(backend: Any, shape: Any) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float64, F32)
    pool = [
        *(torch.ones(i, dtype=d) for i, d in enumerate(dtypes)),
        low(),
        torch.arange(2),
        None,
        "text",
        1,
        [low()],
    ]
    tree = _build(shape, pool)
    before, wanted = snapshot(tree), expected(tree, F32)
    assert actual(tree, lite_ext.convert(tree, F32)) == wanted
    assert snapshot(tree) == before


def test_nothing_is_kept_alive(backend: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        tree = {"a": [low(), (low(),)], "b": Plain(low()), "c": CustomOutput(logits=low())}
        alive = [weakref.ref(tree["a"][0]), weakref.ref(tree["b"]), weakref.ref(tree["c"].logits)]
        result = lite_ext.convert(tree, F32)
        alive += [weakref.ref(result["a"][0]), weakref.ref(result["b"])]
        del tree, result
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()
