"""Plain data as JSON and back, type for type and bit for bit. Reading makes values of the types listed here and of no other.

What JSON has no word for is an object with one key that begins with ``$``: ``{"$tuple": [1, 2]}``. The list of these tags is
closed; a file cannot name a class or function. Tensors stay outside: JSON holds their names.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from kernel_core.checkpoint.per_rank import PerRank
from kernel_core.errors import CheckpointFormatError, UnsavableError
from kernel_core.timing import Time, Timestamp

MAX_DEPTH = 100  # nesting of containers; several frames of the interpreter each
MAX_PLAIN_BITS = 1024  # larger whole numbers are written in base 16, which takes linear time and knows no limit
PutTensor = Callable[[Any, str], str]
GetTensor = Callable[[str], Any]
PutRank = Callable[[Any, str], None]
GetRank = Callable[[str, str], Any]


def encode(value: Any, put_tensor: PutTensor, where: str = "", put_rank: PutRank | None = None) -> Any:
    """Return ``value`` as what ``json.dumps`` takes; nothing in the result is shared with ``value``.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, set, and the other types of ``decode``.
        put_tensor: Given a torch tensor or NumPy array and its path, keeps it and returns the name to write.
        where: The path of ``value``, for messages and for the names of tensors.
        put_rank: Given what a PerRank holds and its path, keeps it; None where there may be none.

    Raises:
        UnsavableError: names the path and type of what cannot be expressed.
    """
    try:
        return _Encoder(put_tensor, put_rank).encode(value, where, 0)
    except RecursionError:  # the caller was deep in calls already
        raise _too_deep(where) from None


class _Encoder:
    def __init__(self, put_tensor: PutTensor, put_rank: PutRank | None) -> None:
        self._put_tensor, self._put_rank = put_tensor, put_rank
        self._rank_paths: set[str] = set()

    def encode(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return value if _is_unicode(value) else {"$text": value.encode("utf-8", "surrogatepass").hex()}
        if kind is int:
            return value if value.bit_length() <= MAX_PLAIN_BITS else {"$int": hex(value)}
        if kind is float:
            return value if value - value == 0 else {"$float": struct.pack(">d", value).hex()}
        if depth > MAX_DEPTH:
            raise _too_deep(where)
        encoder = _ENCODERS.get(kind)
        if encoder is not None:
            return encoder(self, value, where, depth + 1)
        return self._foreign(value, where)

    def items(self, values: Any, where: str, depth: int) -> list[Any]:
        return [self.encode(value, f"{where}/{index}", depth) for index, value in enumerate(values)]

    def mapping(self, values: Mapping[Any, Any], where: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in values):
            return {key: self.encode(value, f"{where}/{key}" if where else key, depth) for key, value in values.items()}
        return {"$dict": self.pairs(values, where, depth)}

    def pairs(self, values: Mapping[Any, Any], where: str, depth: int) -> list[Any]:
        return [
            [self.encode(key, f"{where}/key {_repr(key)}", depth), self.encode(value, f"{where}/{_name(key)}", depth)]
            for key, value in values.items()
        ]

    def per_rank(self, value: PerRank, where: str) -> Any:
        if self._put_rank is None:
            raise UnsavableError(
                f"{where}: is a PerRank inside another one, or outside a plugin's state. Save its value."
            )
        where = _in_unicode(where)
        while where in self._rank_paths:  # of the keys 1 and "1" the paths are alike
            where += "#"
        self._rank_paths.add(where)
        self._put_rank(value.value, where)
        return {"$rank": [where, value.elastic]}

    def _foreign(self, value: Any, where: str) -> Any:
        """Encode what belongs to torch or NumPy, by the name of its type: this module imports neither."""
        module, name = type(value).__module__, type(value).__qualname__
        if module.partition(".")[0] == "torch" and hasattr(value, "untyped_storage"):
            return {"$tensor": self._put_tensor(value, _in_unicode(where))}
        if module == "torch" and name in ("dtype", "device"):
            return {f"${name}": str(value).removeprefix("torch.")}
        if module == "torch" and name == "Size":
            return {"$size": list(value)}
        if module == "numpy" and name == "ndarray" and _is_plain_dtype(value.dtype):
            return {"$array": self._put_tensor(value, _in_unicode(where))}
        if module == "numpy" and isinstance(value, sys.modules["numpy"].generic) and value.dtype.kind in "biuf":
            return {"$scalar": [value.dtype.str.lstrip("<>|="), value.tobytes().hex()]}
        what = f"an array of {value.dtype}" if module == "numpy" and name == "ndarray" else f"a {module}.{name}"
        raise UnsavableError(
            f"{where}: {what} cannot be saved. Expected plain data (numbers, text, lists, dicts, sets, times) and "
            "tensors, from which nothing is executed when it is read. Save what it is made of, and build it anew on loading."
        )


def _too_deep(where: str) -> UnsavableError:
    path = where if len(where) <= 120 else f"{where[:120]}…"
    return UnsavableError(
        f"{path}: is nested deeper than {MAX_DEPTH} containers, or holds itself. Expected plain data. Save less of it."
    )


def _in_unicode(path: str) -> str:
    return path if _is_unicode(path) else path.encode(errors="backslashreplace").decode()


def _name(key: Any) -> str:
    return key if type(key) is str else _repr(key)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a large {type(value).__name__}"


def _is_unicode(text: str) -> bool:
    """Say whether ``text`` has no lone surrogates: JSON joins two of them into one character."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain_dtype(dtype: Any) -> bool:
    return dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8


_ENCODERS: dict[type, Callable[[_Encoder, Any, str, int], Any]] = {
    list: lambda e, v, w, d: e.items(v, w, d),
    dict: lambda e, v, w, d: e.mapping(v, w, d),
    tuple: lambda e, v, w, d: {"$tuple": e.items(v, w, d)},
    set: lambda e, v, w, d: {"$set": e.items(sorted(v, key=_repr), w, d)},
    frozenset: lambda e, v, w, d: {"$frozenset": e.items(sorted(v, key=_repr), w, d)},
    OrderedDict: lambda e, v, w, d: {"$ordered": e.pairs(v, w, d)},
    deque: lambda e, v, w, d: {"$deque": [v.maxlen, e.items(v, w, d)]},
    range: lambda e, v, w, d: {"$range": [v.start, v.stop, v.step]},
    slice: lambda e, v, w, d: {"$slice": e.items((v.start, v.stop, v.step), w, d)},
    complex: lambda e, v, w, d: {"$complex": struct.pack(">dd", v.real, v.imag).hex()},
    bytes: lambda e, v, w, d: {"$bytes": base64.b64encode(v).decode()},
    bytearray: lambda e, v, w, d: {"$bytearray": base64.b64encode(v).decode()},
    timedelta: lambda e, v, w, d: {"$timedelta": [v.days, v.seconds, v.microseconds]},
    Time: lambda e, v, w, d: {"$time": [e.encode(v.value, w, d), v.unit.value]},
    PerRank: lambda e, v, w, d: e.per_rank(v, w),
    Timestamp: lambda e, v, w, d: {"$timestamp": e.items(v.counts, w, d)},
}


def decode(document: Any, get_tensor: GetTensor, where: str = "", get_rank: GetRank | None = None) -> Any:
    """Return the value that ``encode`` wrote as ``document``.

    Args:
        document: What ``read_json`` returned.
        get_tensor: Given a name, returns the tensor.
        where: The file, for messages.
        get_rank: Given path and elastic rule of a PerRank, returns its value.

    Raises:
        CheckpointFormatError: an unknown tag, or one whose content does not fit it.
    """
    try:
        return _Decoder(get_tensor, get_rank).decode(document, 0)
    except CheckpointFormatError as error:
        raise CheckpointFormatError(f"{where}: {error}") from None
    except RecursionError:
        raise CheckpointFormatError(f"{where}: is nested too deeply.") from None
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        raise CheckpointFormatError(f"{where}: holds a value that does not fit its tag: {error!s:.200}.") from None


class _Decoder:
    def __init__(self, get_tensor: GetTensor, get_rank: GetRank | None) -> None:
        self._get_tensor, self._get_rank = get_tensor, get_rank

    def decode(self, value: Any, depth: int) -> Any:
        if depth > 2 * MAX_DEPTH + 2:  # pairs of a dict are containers too
            raise CheckpointFormatError("is nested too deeply.")
        if isinstance(value, list):
            return [self.decode(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        tags = [key for key in value if key.startswith("$")]
        if not tags:
            return {key: self.decode(item, depth + 1) for key, item in value.items()}
        if len(value) != 1:
            raise CheckpointFormatError(f"mixes the tag {tags[0]!r:.60} with other keys.")
        return self._tagged(tags[0], value[tags[0]], depth + 1)

    def _tagged(self, tag: str, content: Any, depth: int) -> Any:
        if tag in ("$tensor", "$array"):
            if type(content) is not str:
                raise CheckpointFormatError(f"{tag}: got {content!r:.60}. Expected the name of a tensor.")
            tensor = self._get_tensor(content)
            return tensor.cpu().numpy() if tag == "$array" and hasattr(tensor, "numpy") else tensor
        if tag == "$rank" and self._get_rank is not None:
            where, elastic = _texts(content, 2)
            return self._get_rank(where, elastic)
        decoder = _DECODERS.get(tag)
        if decoder is None:
            raise CheckpointFormatError(f"holds the tag {tag!r:.60}, which does not belong here.")
        return decoder([self.decode(item, depth) for item in content] if isinstance(content, list) else content)


def _torch(kind: str, content: Any) -> Any:
    import torch  # only where a value of torch's is asked for

    if kind == "size":
        return torch.Size(_ints(content))
    if kind == "device":
        return torch.device(_text(content))
    found = vars(torch).get(_text(content))  # not getattr: for some names torch imports modules
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {content!r:.60}")
    return found


def _numpy_scalar(content: Any) -> Any:
    import numpy as np

    kind, text = _texts(content, 2)
    if not re.fullmatch(r"b1|[iu][1248]|f(?:2|4|8|12|16)", kind):
        raise ValueError(f"no kind of number {kind!r:.60}")
    (scalar,) = np.frombuffer(bytes.fromhex(text), dtype=np.dtype(f"<{kind}"))
    return scalar


def _text(content: Any) -> str:
    if type(content) is not str:
        raise ValueError(f"expected text, got {content!r:.60}")
    return content


def _list(content: Any, length: int | None = None) -> list[Any]:
    if type(content) is not list or length not in (None, len(content)):
        raise ValueError(f"expected a list{'' if length is None else f' of {length}'}, got {content!r:.60}")
    return content


def _texts(content: Any, length: int) -> list[str]:
    return [_text(item) for item in _list(content, length)]


def _ints(content: Any, length: int | None = None) -> list[int]:
    if not all(type(item) is int for item in _list(content, length)):
        raise ValueError(f"expected whole numbers, got {content!r:.60}")
    return list(content)


def _distinct(kind: Callable[[Any], Any], content: Any) -> Any:
    """Return ``kind`` of a list of elements or of pairs, none of which may come twice."""
    if kind in (dict, OrderedDict):
        content = [tuple(_list(pair, 2)) for pair in _list(content)]
    found = kind(_list(content))
    if len(found) != len(content):
        raise ValueError("an element or key comes twice")
    return found


def _int(content: Any) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", _text(content)):
        raise ValueError(f"no whole number {content!r:.60}")
    return int(content, 16)


def _bytes(content: Any) -> bytes:
    return base64.b64decode(_text(content), validate=True)


def _deque(content: Any) -> deque[Any]:
    length, items = _list(content, 2)
    if length is not None and (type(length) is not int or not len(_list(items)) <= length < 2**63):
        raise ValueError(f"a longest length of {length!r:.60}")
    return deque(_list(items), length)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$text": lambda c: bytes.fromhex(_text(c)).decode("utf-8", "surrogatepass"),
    "$int": _int,
    "$float": lambda c: struct.unpack(">d", bytes.fromhex(_text(c)))[0],
    "$complex": lambda c: complex(*struct.unpack(">dd", bytes.fromhex(_text(c)))),
    "$tuple": lambda c: tuple(_list(c)),
    "$set": lambda c: _distinct(set, c),
    "$frozenset": lambda c: _distinct(frozenset, c),
    "$dict": lambda c: _distinct(dict, c),
    "$ordered": lambda c: _distinct(OrderedDict, c),
    "$deque": _deque,
    "$range": lambda c: range(*_ints(c, 3)),
    "$slice": lambda c: slice(*_list(c, 3)),
    "$bytes": _bytes,
    "$bytearray": lambda c: bytearray(_bytes(c)),
    "$timedelta": lambda c: timedelta(*_ints(c, 3)),
    "$time": lambda c: Time(*_list(c, 2)),
    "$timestamp": lambda c: Timestamp.of(_list(c)),
    "$dtype": lambda c: _torch("dtype", c),
    "$device": lambda c: _torch("device", c),
    "$size": lambda c: _torch("size", c),
    "$scalar": _numpy_scalar,
}


def write_json(document: Any) -> bytes:
    """Return what ``encode`` made as bytes of ASCII, the same for equal documents."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def read_json(data: bytes, where: str, encoding: str = "ascii") -> Any:
    """Return the document in ``data``; numbers that are none or too large, and keys that come twice, are refused.

    Raises:
        CheckpointFormatError: it is not such a document.
    """

    def refuse(text: str) -> Any:
        raise ValueError(f"the number {text:.40}")

    def finite(text: str) -> float:
        number = float(text)
        return number if number - number == 0 else refuse(text)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key that comes twice")
        return found

    try:
        return json.loads(data.decode(encoding), parse_constant=refuse, parse_float=finite, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{where}: is not JSON as a checkpoint holds it: {error!s:.200}.") from None
