"""Plain data goes through a checkpoint's JSON and comes back as what it was, bit for bit, or is refused by name."""

import base64
import enum
import inspect
import json
import math
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_core import Time, Timestamp
from kernel_core.checkpoint.codec import MAX_DEPTH, decode, encode, read_json, write_json
from kernel_core.checkpoint.per_rank import PerRank, value_for, without_dropped
from kernel_core.checkpoint.pieces import check_savable
from kernel_core.errors import CheckpointFormatError, CheckpointMismatchError, UnsavableError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.uint16, torch.bool]


def through_bytes(value: Any) -> Any:
    """Write ``value`` as JSON and read it again; tensors and arrays wait in a dict meanwhile."""
    kept: dict[str, torch.Tensor] = {}

    def put(tensor: Any, where: str) -> str:
        name = f"{len(kept)}:{where}"
        kept[name] = tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor.copy())
        return name

    data = write_json(encode(value, put, "state"))
    assert data.isascii()
    return decode(read_json(data, "state.json"), kept.__getitem__, "state.json")


def same(a: Any, b: Any) -> bool:
    """Say whether two values are alike down to types, bits of numbers, and the order of dicts."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, set | frozenset):
        return sorted(map(bits, a)) == sorted(map(bits, b))
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, Timestamp):
        return same(a.counts, b.counts)
    if isinstance(a, Time):
        return same((a.value, a.unit), (b.value, b.unit))
    if isinstance(a, torch.Tensor):
        raw = [one.contiguous().view(-1).view(torch.uint8) for one in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bits(a) == bits(b)


def bits(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    if type(value) is int:
        return hex(value)
    if isinstance(value, set | frozenset):
        return repr(sorted(map(bits, value)))
    if isinstance(value, complex):
        return bits(value.real) + bits(value.imag)
    return repr([bits(one) for one in value]) if isinstance(value, tuple) else repr(value)


def float_of(raw: int) -> float:
    return float(struct.unpack(">d", struct.pack(">Q", raw))[0])


floats = st.integers(0, 2**64 - 1).map(float_of) | st.floats()
texts = st.text(st.characters(codec=None, categories=None), max_size=6) | st.sampled_from(
    ["", "$tensor", "$", "\ud800\udc00", "\udc00", "\U0001f600", "\x00", "__proto__", "é", "a/b"]
)
hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**5000), 2**5000)
    | floats
    | texts
    | st.binary(max_size=5),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=3,
)
times = st.builds(Time, st.integers(-(10**15), 10**15), st.sampled_from(["ep", "ba", "sp", "tok", "iter", "sec"]))
tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
arrays = st.builds(
    lambda shape, kind: np.arange(math.prod(shape)).astype(kind).reshape(shape),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["f4", "f8", "f2", "i8", "u2", "u8", "?"]),
)
others = st.one_of(
    st.complex_numbers(),
    st.binary(max_size=9).map(bytearray),
    st.timedeltas(),
    times,
    floats.filter(math.isfinite).map(lambda value: Time(value, "dur")),
    st.builds(Timestamp, epoch=st.integers(0, 2**40), batch=st.integers(0, 2**40), total_wct=st.floats(0, 1e9)),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 2**70)),
    st.builds(slice, hashable, hashable, hashable),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from(
        [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"), torch.Size([]), torch.Size([2, 0])]
    ),
    st.sampled_from(
        [np.float32(1.1), np.float64("nan"), np.int8(-3), np.bool_(True), np.uint64(2**63), np.float16(0.1)]
    ),
    tensors,
    arrays,
)
values = st.recursive(
    hashable | others,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(hashable, inner, max_size=3),
        st.dictionaries(texts, inner, max_size=3),
        st.dictionaries(texts, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3).map(deque),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 3)),
        st.sets(hashable, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=250, deadline=None, database=None)
@given(values)
def test_every_value_comes_back_with_its_types_and_bits(value: Any) -> None:
    assert same(value, through_bytes(value))


@pytest.mark.parametrize(
    "value",
    [
        float_of(0x7FF8_0000_0000_1234),  # nan with a payload
        float_of(0xFFF0_0000_0000_0001),  # a signalling one
        -0.0,
        float("inf"),
        5e-324,
        -(10**6000),  # more digits than Python turns into text
        2**1024 - 1,
        True,
        {2**20000: 1, frozenset({2**20000}): {2**20000, -(2**20000)}},
        {1: "a", "1": "b", (1, 2): "c", None: "d", 1.5: "e"},
        {"$tensor": "a name"},
        {"$unknown": 1, "b": [{"$": {}}]},
        {"b": 1, "a": 2},
        OrderedDict([("z", 1), (2, "y")]),
        {float_of(0x7FF8_0000_0000_0001): 1, float_of(0x7FF8_0000_0000_0002): 2},
        timedelta.min,
        "\ud83d\ude00",  # two surrogates are not the character they would make
        {"\udfff": "\ud800"},
        [[], (), {}, set(), frozenset(), "", b"", bytearray(), deque(), deque(maxlen=0), range(0), OrderedDict()],
        torch.tensor(3.0),
        np.array(3.0),
        torch.empty(0, 3, dtype=torch.bfloat16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_odd_ones_come_back_too(value: Any) -> None:
    assert same(value, through_bytes(value))


def test_a_parameter_is_kept_as_the_tensor_it_is() -> None:
    found = through_bytes(torch.nn.Parameter(torch.ones(2)))
    assert torch.equal(found, torch.ones(2))


def test_equal_documents_are_equal_bytes_whatever_the_order_of_sets() -> None:
    a, b = {str(n) for n in range(50)}, {str(n) for n in reversed(range(50))}
    assert write_json(encode(a, str)) == write_json(encode(b, str))


class Text(str):
    pass


class Number(int):
    pass


class Colour(enum.IntEnum):
    RED = 1


class Word(enum.StrEnum):
    RED = "red"


Point = namedtuple("Point", "x y")
masked = np.ma.masked_array([1, 2], mask=[0, 1])
nested: list[Any] = []
nested.append(nested)
a_dict: dict[str, Any] = {}
a_dict["again"] = (a_dict,)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Text("a"), "Text"),
        (Number(1), "Number"),
        (Colour.RED, "Colour"),
        (Word.RED, "Word"),
        (defaultdict(int), "collections.defaultdict"),
        (Counter("a"), "collections.Counter"),
        (Point(1, 2), "Point"),
        (len, "builtins.builtin_function_or_method"),
        (lambda: 1, "builtins.function"),
        (int, "builtins.type"),
        (math, "builtins.module"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        ((n for n in ()), "builtins.generator"),
        (object(), "builtins.object"),
        (datetime(2026, 1, 1), "datetime.datetime"),
        (torch.Generator(), "torch._C.Generator"),
        (torch.ones(1).untyped_storage(), "torch.storage.UntypedStorage"),
        (np.dtype("f4"), "numpy.dtypes.Float32DType"),
        (np.str_("a"), "numpy.str_"),
        (np.datetime64(1, "s"), "numpy.datetime64"),
        (np.array([1, {}], dtype=object), "an array of object"),
        (np.array(["a"]), "an array of <U1"),
        (np.array([1], ">i4"), "an array of >i4"),
        (np.array([1], "g"), f"an array of {np.dtype('g')}"),
        (np.array([[1]]).view(np.matrix), "numpy.matrix"),
        (np.array([1]).view(np.recarray), "numpy.rec"),
        (masked, "numpy.ma"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_expressed_is_refused_with_its_path_and_type(value: Any, kind: str) -> None:
    with pytest.raises(UnsavableError, match=r"^plugins/mine/a/1: .*cannot be saved. Expected plain data") as told:
        encode({"a": (0, value)}, str, "plugins/mine")
    assert kind in str(told.value)


def test_an_object_as_key_is_refused_with_its_path() -> None:
    with pytest.raises(UnsavableError, match=r"^state/key <object .*: a builtins.object cannot be saved"):
        encode({object(): 1}, str, "state")


@pytest.mark.parametrize("value", [nested, a_dict], ids=["list", "dict"])
def test_what_holds_itself_is_refused(value: Any) -> None:
    with pytest.raises(UnsavableError, match=r"nested deeper than 100 containers, or holds itself"):
        encode(value, str, "loop")


def deep(levels: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"dict": {1: value}, "list": [value], "tuple": (value,)}[kind]
    return value


@pytest.mark.parametrize("kind", ["dict", "list", "tuple"])
def test_the_deepest_that_is_allowed_comes_back(kind: str) -> None:
    value = deep(MAX_DEPTH, kind)
    assert through_bytes(value) == value
    with pytest.raises(UnsavableError, match="nested deeper"):
        encode(deep(MAX_DEPTH + 2, kind), str)


def test_one_who_is_deep_in_calls_gets_the_same_refusal() -> None:
    def call(levels: int) -> None:
        if levels:
            return call(levels - 1)
        with pytest.raises(UnsavableError, match="nested deeper"):
            encode(deep(MAX_DEPTH, "dict"), str, "loop")
        with pytest.raises(CheckpointFormatError, match="nested too deeply"):
            decode(deep(MAX_DEPTH, "list"), str, "state.json")

    call(sys.getrecursionlimit() - len(inspect.stack()) - 120)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.eye(2).to_sparse(), "is a sparse_coo tensor"),
        (lambda: torch.eye(2).to_sparse_csr(), "is a sparse_csr tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "is a jagged tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is a quantized tensor"),
        (lambda: torch.ones(1, dtype=torch.complex128), "has dtype torch.complex128"),
        (lambda: torch.ones(1, device="meta"), "is on the meta device"),
    ],
    ids=["coo", "csr", "jagged", "quantized", "complex128", "meta"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_plain_numbers_are_refused_by_name(make: Any, problem: str) -> None:
    with pytest.raises(UnsavableError, match=rf"^optimizers/0: {problem}.*\."):
        check_savable(make(), "optimizers/0")


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_a_name_that_no_file_can_hold_is_refused(name: str) -> None:
    with pytest.raises(UnsavableError, match="is no name for a tensor in a safetensors file"):
        check_savable(torch.ones(1), name)


# --- reading what nobody wrote ----------------------------------------------------------------------------------------

HOSTILE = [
    {"$object": "os.system"},
    {"$pickle": base64.b64encode(b"x").decode()},
    {"$": 1},
    {"$tuple": [1], "a": 2},
    {"$tuple": [1], "$set": [2]},
    {"$tuple": "ab"},
    {"$tuple": {"a": 1}},
    {"$set": [[1]]},
    {"$set": [1, True]},
    {"$set": "ab"},
    {"$dict": ["ab", "cd"]},
    {"$dict": [[1, 2, 3]]},
    {"$dict": [[1, 2], [1.0, 3]]},
    {"$dict": [[[], 2]]},
    {"$ordered": {"a": 1}},
    {"$ordered": [["a", 1], ["a", 2]]},
    {"$deque": [1]},
    {"$deque": ["ab", "cd"]},
    {"$deque": [-1, []]},
    {"$deque": [1, [1, 2]]},
    {"$deque": [True, [1]]},
    {"$deque": [2**70, []]},
    {"$range": [1]},
    {"$range": [0, 1, 0]},
    {"$range": [0, True, 1]},
    {"$range": [0, 1.5, 1]},
    {"$slice": [1]},
    {"$float": 1.5},
    {"$float": "00"},
    {"$float": "zz" * 8},
    {"$complex": "00" * 8},
    {"$int": "12"},
    {"$int": "0x"},
    {"$int": "0x1_0"},
    {"$int": 5},
    {"$text": "ff"},
    {"$text": 1},
    {"$bytes": "not base64!"},
    {"$bytes": "é"},
    {"$bytes": 5},
    {"$bytearray": 10**9},
    {"$timedelta": [10**12, 0, 0]},
    {"$timedelta": [1]},
    {"$time": ["1", "ep"]},
    {"$time": [1, "parsec"]},
    {"$time": [1.5, "ep"]},
    {"$time": [1]},
    {"$timestamp": [1]},
    {"$timestamp": [-1] * 15},
    {"$timestamp": {"epoch": 1}},
    {"$dtype": "load"},
    {"$dtype": "_dynamo"},
    {"$dtype": "nn.Module"},
    {"$dtype": "__class__"},
    {"$dtype": ["float32"]},
    {"$dtype": 1},
    {"$device": "evil"},
    {"$device": 0},
    {"$device": "cpu:-1"},
    {"$size": [-1.5]},
    {"$size": "ab"},
    {"$scalar": ["O", "00"]},
    {"$scalar": ["f3", "000000"]},
    {"$scalar": ["i8", "00"]},
    {"$scalar": ["i4", "00" * 8]},
    {"$scalar": "f4"},
    {"$scalar": ["V8", "00" * 8]},
    {"$tensor": 1},
    {"$tensor": ["a"]},
    {"$array": {"a": 1}},
    {"$rank": ["state", "first"]},
    {"$tensor": "missing"},
    deep(700, "list"),
]


@pytest.mark.parametrize("document", HOSTILE, ids=lambda one: json.dumps(one)[:40])
def test_an_unknown_tag_or_one_with_other_content_is_refused(document: Any) -> None:
    def get(name: str) -> torch.Tensor:
        raise CheckpointFormatError(f"has no tensor {name!r}.")

    with pytest.raises(CheckpointFormatError, match=r"^state\.json: ") as told:
        decode([1, {"a": document}], get, "state.json")
    assert len(str(told.value)) < 400
    assert "Error(" not in str(told.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
TAGS = (
    "text int float complex tuple set frozenset dict ordered deque range slice bytes bytearray timedelta time timestamp "
    "dtype device size scalar tensor array rank"
).split()


@settings(max_examples=250, deadline=None, database=None)
@given(st.sampled_from(TAGS), json_values)
def test_any_tag_with_any_content_is_read_or_refused(tag: str, content: Any) -> None:
    try:
        decode({f"${tag}": content}, lambda name: torch.ones(1), "state.json")
    except CheckpointFormatError:
        return  # and with no other error


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "Expecting value"),
        (b"\x80\x04\x95", "ascii"),
        (b'{"a":1,"a":2}', "comes twice"),
        (b"NaN", "the number NaN"),
        (b"[-Infinity]", "the number -Infinity"),
        (b"1e999", "the number 1e999"),
        (b"1" * 5000, "digits"),
        (b"[" * 100_000, "recursion"),
        (b'{"a":' * 100_000, "recursion"),
        (b"[1] [2]", "Extra data"),
        ("é".encode(), "ascii"),
        (b"\xef\xbb\xbf1", "ascii"),
    ],
    ids=lambda one: repr(one[:12]),
)
def test_text_that_is_not_strict_json_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(CheckpointFormatError, match=r"^lock\.json: is not JSON as a checkpoint holds it: ") as told:
        read_json(data, "lock.json")
    assert problem in str(told.value)
    assert len(str(told.value)) < 300


def test_the_name_of_a_lazy_module_imports_nothing() -> None:
    code = (
        "import sys, torch\nfrom kernel_core.checkpoint.codec import decode\nbefore = set(sys.modules)\n"
        "for name in ('_dynamo', '_inductor', 'onnx', '_export'):\n"
        "    try: decode({'$dtype': name}, None)\n    except ValueError: pass\n    else: raise SystemExit('read')\n"
        "raise SystemExit(str(set(sys.modules) - before) if set(sys.modules) - before else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- values that each rank has of its own -----------------------------------------------------------------------------


def test_values_of_one_rank_are_kept_apart_under_paths_of_their_own() -> None:
    kept: dict[str, Any] = {}
    value = {1: PerRank("a", "first"), "1": PerRank("b", "sum"), "c": [PerRank({"d": 1})]}
    document = encode(value, str, "plugins/x", lambda value, where: kept.update({where: value}))
    assert sorted(map(str, kept.values())) == ["a", "b", "{'d': 1}"]
    read = decode(read_json(write_json(document), ""), str, "", lambda where, elastic: (kept[where], elastic))
    assert read == {1: ("a", "first"), "1": ("b", "sum"), "c": [({"d": 1}, "refuse")]}


def test_a_value_of_one_rank_inside_another_is_refused() -> None:
    with pytest.raises(UnsavableError, match=r"^state/a: is a PerRank inside another one"):
        encode({"a": PerRank(1)}, str, "state")


def test_the_rules_for_another_number_of_ranks() -> None:
    saved = [
        {"n": 1, "t": torch.tensor([1.0, 2.0]), "l": (1, [2])},
        {"n": 5, "t": torch.tensor([3.0, 4.0]), "l": (3, [4])},
    ]
    assert value_for(1, 2, saved, "refuse", "x") is saved[1]
    assert value_for(2, 3, saved, "first", "x") is saved[0]
    total, rest = value_for(0, 1, saved, "sum", "x"), value_for(2, 3, saved, "sum", "x")
    assert (total["n"], total["t"].tolist(), total["l"]) == (6, [4.0, 6.0], (4, [6]))
    assert (rest["n"], rest["t"].tolist(), rest["l"]) == (0, [0.0, 0.0], (0, [0]))
    dropped = {"a": value_for(0, 1, saved, "drop", "x"), "b": [{"c": value_for(0, 1, saved, "drop", "x")}]}
    assert without_dropped(dropped) == {"b": [{}]}
    with pytest.raises(
        CheckpointMismatchError, match=r"^plugins/x: each of 2 ranks has a value of its own, and the run has 3"
    ):
        value_for(0, 3, saved, "refuse", "plugins/x")
    with pytest.raises(ValueError, match=r"PerRank.elastic: got 'mean'. Expected one of first, sum, drop, refuse"):
        PerRank(1, "mean")  # type: ignore[arg-type]
