"""Values and their JSON forms: `Lit` (tagged JSON) and plain JSON.

A value is a plain Python object if its type determines the tag (None, bool, int, float, str, bytes, Decimal, UUID),
else a small class (U64, Json, Embedding, Date, Time, DateTime).
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from array import array
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from itertools import accumulate
from typing import Any
from uuid import UUID

import msgspec

from headwater.errors import InvalidRequest
from headwater.model import json_decoder

I64_MIN, I64_MAX, U64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
EXACT_JSON_INT = 2**53  # beyond this a JSON number is not safe in JavaScript
MOST_PARSED = 256 << 10  # characters of a document that is parsed before it is sent, which takes about 10 ms
LARGE_JSON = 1 << 20  # characters of a document that is checked without creating objects
MAX_DECIMAL = 40_000  # characters of a decimal
MAX_EXPONENT, FEW_DIGITS_EXPONENT = 20_000, 1_000  # of a decimal; of one whose text has no more characters
MAX_JSON_DEPTH = 500  # levels of a JSON document; deeper ones are text
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # one level up, one level down
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))
_RAW_JSON = msgspec.json.Decoder(msgspec.Raw)


class U64(msgspec.Struct, frozen=True):
    """An unsigned 64-bit integer, which differs from the signed one as their `Lit`s do."""

    v: int


class Json(msgspec.Struct, frozen=True):
    """A JSON document as its text, parsed only on use."""

    text: str

    def value(self) -> Any:
        """Return the parsed document."""
        return json_decoder.decode(self.text)

    def encodable(self) -> Any:
        """Return the document for a JSON encoder: parsed, or if it is large or deep, its own text on one line.

        The parser does not release the interpreter lock, so parsing a large document would block all other threads. A
        document may also have been parsed with more stack than is left here.
        """
        if len(self.text) <= MOST_PARSED:
            try:
                return self.value()
            except RecursionError:
                pass
        return msgspec.Raw(self.text.replace("\n", " ").replace("\r", " ").encode())


class Date(msgspec.Struct, frozen=True):
    """A calendar date in ISO form."""

    iso: str


class Time(msgspec.Struct, frozen=True):
    """A time of day in ISO form."""

    iso: str


class DateTime(msgspec.Struct, frozen=True):
    """A date and time in ISO form."""

    iso: str


class Embedding(msgspec.Struct, frozen=True):
    """A vector of 32-bit floats and, if known, the model that made it."""

    values: tuple[float, ...]
    model: str | None = None


_EMPTY_DECIMAL = Decimal().__sizeof__()
# The approximate bytes of values of the types that have any length.
LENGTHS: dict[type, Callable[[Any], int]] = {
    str: len,
    bytes: len,
    Json: lambda value: len(value.text),
    Decimal: lambda value: 16 + 3 * (value.__sizeof__() - _EMPTY_DECIMAL) + abs(value.adjusted()),
    Embedding: lambda value: 8 * len(value.values),
}


class Unavailable:
    """A value that the source did not send, such as an unchanged TOAST value. It is unknown, not null."""

    _only: Unavailable | None = None

    def __new__(cls) -> Unavailable:
        cls._only = cls._only or super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "UNAVAILABLE"

    def __reduce__(self) -> tuple[type[Unavailable], tuple[()]]:
        return (Unavailable, ())


UNAVAILABLE = Unavailable()

Value = (
    None
    | bool
    | int
    | U64
    | float
    | Decimal
    | str
    | bytes
    | Json
    | Embedding
    | Date
    | Time
    | DateTime
    | UUID
    | Unavailable
)

_DATE = re.compile(r"\d{4}-\d\d-\d\d\Z", re.ASCII)
_TIME = re.compile(r"\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:?\d\d)?\Z", re.ASCII)
_DATETIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d(:?\d\d)?)?\Z", re.ASCII)
_DECIMAL = re.compile(r"-?\d++(\.\d++)?+([eE][+-]?\d++)?+\Z|NaN\Z|-?Infinity\Z", re.ASCII)  # never backtracks
_UUID = re.compile(r"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}\Z")
_ESCAPED = re.compile("[\udc80-\udcff]")
_ODD_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def is_date(text: str) -> bool:
    """Return whether `text` has the form of an ISO date, which need not be in the calendar."""
    return bool(_DATE.match(text))


def is_time(text: str) -> bool:
    """Return whether `text` has the form of an ISO time of day, whose hour may be above 23."""
    return bool(_TIME.match(text))


def is_datetime(text: str) -> bool:
    """Return whether `text` has the form of an ISO date and time, in any calendar or clock."""
    return bool(_DATETIME.match(text))


def is_json(text: str) -> bool:
    """Return whether `text` is JSON of at most MAX_JSON_DEPTH levels, so that parsing it cannot exhaust the stack."""
    try:
        (json_decoder.decode if len(text) <= LARGE_JSON else _RAW_JSON.decode)(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return not _is_deep(text)


def _is_deep(text: str) -> bool:
    """Return whether JSON has more than MAX_JSON_DEPTH levels, without creating an object for each of its values."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return False
    plain = text.replace("\\\\", "").replace('\\"', "").encode("utf-8", "surrogatepass")
    marks = plain.translate(_STEPS, _NO_MARKS).replace(b'""', b"")  # without texts that hold no bracket
    steps = array("b", b"".join(marks.split(b'"')[::2]))
    return max(accumulate(steps), default=0) > MAX_JSON_DEPTH


def is_broken_text(text: str) -> bool:
    """Return whether `text` represents bytes that are not UTF-8 (see `surrogateescape`)."""
    if text.isascii():
        return False
    try:
        text.encode()  # several times faster than the search, and fails for every surrogate
    except UnicodeEncodeError:
        return _ESCAPED.search(text) is not None
    return False


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _float_out(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _str_out(value: str) -> dict[str, Any]:
    if is_broken_text(value):
        return {"t": "bytes", "b64": _b64(value.encode("utf-8", "surrogateescape"))}
    return {"t": "str", "v": value}


def _embedding_out(value: Embedding) -> dict[str, Any]:
    lit: dict[str, Any] = {"t": "embedding", "dims": len(value.values), "v": list(value.values)}
    return lit if value.model is None else lit | {"model": value.model}


_TO_LIT: dict[type, Callable[[Any], dict[str, Any]]] = {
    type(None): lambda v: {"t": "null"},
    bool: lambda v: {"t": "bool", "v": v},
    int: lambda v: {"t": "i64", "v": v},
    U64: lambda v: {"t": "u64", "v": v.v},
    float: lambda v: {"t": "f64", "v": _float_out(v)},
    Decimal: lambda v: {"t": "dec", "v": decimal_text(v)},
    str: _str_out,
    bytes: lambda v: {"t": "bytes", "b64": _b64(v)},
    Json: lambda v: {"t": "json", "v": v.encodable()},
    Embedding: _embedding_out,
    Date: lambda v: {"t": "date", "iso": v.iso},
    Time: lambda v: {"t": "time", "iso": v.iso},
    DateTime: lambda v: {"t": "datetime", "iso": v.iso},
    UUID: lambda v: {"t": "uuid", "v": str(v)},
    Unavailable: lambda v: {"t": "unavailable"},
}


def decimal_text(value: Decimal) -> str:
    """Return all digits of the decimal without an exponent: `12.3400` stays `12.3400`."""
    return format(value, "f") if value.is_finite() else str(value)


def to_lit(value: Value) -> dict[str, Any]:
    """Return the tagged JSON form of `value`."""
    return _TO_LIT[type(value)](value)


def _plain_int(value: int) -> int | str:
    return value if -EXACT_JSON_INT <= value <= EXACT_JSON_INT else str(value)


_TO_PLAIN: dict[type, Callable[[Any], Any]] = {
    type(None): lambda v: None,
    bool: lambda v: v,
    int: _plain_int,
    U64: lambda v: _plain_int(v.v),
    float: lambda v: v if math.isfinite(v) else None,
    Decimal: decimal_text,
    str: lambda v: _b64(v.encode("utf-8", "surrogateescape")) if is_broken_text(v) else v,
    bytes: _b64,
    Json: Json.encodable,
    Embedding: lambda v: list(v.values),
    Date: lambda v: v.iso,
    Time: lambda v: v.iso,
    DateTime: lambda v: v.iso,
    UUID: str,
}


def to_plain(value: Value) -> Any:
    """Return the plain JSON form; KeyError for UNAVAILABLE: callers omit the column and list its name."""
    return _TO_PLAIN[type(value)](value)


# --- reading ---------------------------------------------------------------------------------------------


def _bad(tag: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"bad {tag} literal: {why}", hint='Values look like {"t": "i64", "v": 1}.')


def _typed(tag: str, body: dict[str, Any], field: str, wanted: type | tuple[type, ...]) -> Any:
    value = body.get(field)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise _bad(tag, f"`{field}` is missing or of the wrong type")
    return value


def _int_in(tag: str, low: int, high: int) -> Callable[[dict[str, Any]], int]:
    def read(body: dict[str, Any]) -> int:
        value: int = _typed(tag, body, "v", int)
        if not low <= value <= high:
            raise _bad(tag, f"the number must be from {low} to {high}")
        return value

    return read


_read_i64, _read_u64 = _int_in("i64", I64_MIN, I64_MAX), _int_in("u64", 0, U64_MAX)


def _read_f64(body: dict[str, Any]) -> float:
    value = body.get("v")
    if isinstance(value, str) and value in _ODD_FLOATS:
        return _ODD_FLOATS[value]
    try:
        return float(_typed("f64", body, "v", (int, float)))
    except OverflowError:
        raise _bad("f64", "the number is too large for a float of 64 bits") from None


def _read_dec(body: dict[str, Any]) -> Decimal:
    text: str = _typed("dec", body, "v", str)
    if len(text) > MAX_DECIMAL:
        raise _bad("dec", f"it has more than {MAX_DECIMAL} characters")
    if not _DECIMAL.match(text):
        raise _bad("dec", f"{text[:40]!r} is not a decimal number")
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise _bad("dec", f"{text[:40]!r} is not a decimal number") from None
    most = min(MAX_EXPONENT, max(FEW_DIGITS_EXPONENT, len(text)))
    if value.is_finite() and abs(value.adjusted()) > most:
        raise _bad("dec", f"the exponent must be from -{most} to {most}")  # in digits it would fill the memory
    return value


def _read_null(body: dict[str, Any]) -> None:
    if body.get("v") is not None:  # an extra "v": null is tolerated
        raise _bad("null", "`v` is not null")


def _clean(tag: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _bad(tag, "lone surrogates are not text") from None
    return text


def _read_str(body: dict[str, Any]) -> str:
    return _clean("str", _typed("str", body, "v", str))


def _read_bytes(body: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(_typed("bytes", body, "b64", str), validate=True)
    except (binascii.Error, ValueError):
        raise _bad("bytes", "`b64` is not base64") from None


def _read_json(body: dict[str, Any]) -> Json:
    if "v" not in body:
        raise _bad("json", "`v` is missing")
    try:
        found = Json(msgspec.json.encode(body["v"]).decode())
    except UnicodeEncodeError:
        raise _bad("json", "lone surrogates are not text") from None
    except RecursionError:
        raise _bad("json", "`v` is nested too deeply") from None
    if _is_deep(found.text):
        raise _bad("json", f"`v` has more than {MAX_JSON_DEPTH} levels")
    return found


def _read_embedding(body: dict[str, Any]) -> Embedding:
    values = _typed("embedding", body, "v", list)
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        raise _bad("embedding", "`v` must hold numbers only")
    dims = body.get("dims", len(values))
    if isinstance(dims, bool) or dims != len(values):
        raise _bad("embedding", "`dims` is not the length of `v`")
    model = body.get("model")
    if not isinstance(model, str | None):
        raise _bad("embedding", "`model` must be a string")
    try:
        return Embedding(tuple(float(v) for v in values), model and _clean("embedding", model))
    except OverflowError:
        raise _bad("embedding", "a number is too large for a float of 64 bits") from None


def _iso(tag: str, fits: Callable[[str], bool], make: Callable[[str], Any]) -> Callable[[dict[str, Any]], Any]:
    def read(body: dict[str, Any]) -> Any:
        text: str = _typed(tag, body, "iso", str)
        if not fits(text):
            raise _bad(tag, f"{text[:40]!r} is not an ISO {tag}")
        return make(text)

    return read


def _read_uuid(body: dict[str, Any]) -> UUID:
    text: str = _typed("uuid", body, "v", str)
    if not _UUID.match(text):
        raise _bad("uuid", "`v` is not a UUID")
    return UUID(text)


_FROM_LIT: dict[str, tuple[frozenset[str], Callable[[dict[str, Any]], Value]]] = {
    "null": (frozenset({"v"}), _read_null),
    "bool": (frozenset({"v"}), lambda body: _typed("bool", body, "v", bool)),
    "i64": (frozenset({"v"}), _read_i64),
    "u64": (frozenset({"v"}), lambda body: U64(_read_u64(body))),
    "f64": (frozenset({"v"}), _read_f64),
    "dec": (frozenset({"v"}), _read_dec),
    "str": (frozenset({"v"}), _read_str),
    "bytes": (frozenset({"b64"}), _read_bytes),
    "json": (frozenset({"v"}), _read_json),
    "embedding": (frozenset({"v", "dims", "model"}), _read_embedding),
    "date": (frozenset({"iso"}), _iso("date", is_date, Date)),
    "time": (frozenset({"iso"}), _iso("time", is_time, Time)),
    "datetime": (frozenset({"iso"}), _iso("datetime", is_datetime, DateTime)),
    "uuid": (frozenset({"v"}), _read_uuid),
    "unavailable": (frozenset(), lambda body: UNAVAILABLE),
}
TAGS = tuple(_FROM_LIT)


def from_lit(body: Any) -> Value:
    """Return the value of one `Lit`; InvalidRequest with the reason if it is malformed."""
    if not isinstance(body, dict) or not isinstance(body.get("t"), str):
        raise _bad("value", "an object with a `t` tag was expected")
    known = _FROM_LIT.get(body["t"])
    if known is None:
        raise _bad("value", f"unknown tag {body['t'][:40]!r}; known tags are {', '.join(TAGS)}")
    fields, read = known
    extra = set(body) - fields - {"t"}
    if extra:
        raise _bad(body["t"], f"unknown field {sorted(extra)[0][:40]!r}")
    return read(body)


def from_json(body: Any) -> Value:
    """Return the value of a `Lit` or of a plain JSON scalar; InvalidRequest if `body` is neither."""
    if isinstance(body, dict):
        return from_lit(body)
    if isinstance(body, int) and not isinstance(body, bool):
        return _read_i64({"v": body})
    if isinstance(body, str):
        return _read_str({"v": body})
    if body is None or isinstance(body, (bool, float)):
        return body
    raise _bad("value", "a scalar or a tagged object was expected")
