"""Values and names as JSON bytes: the same JSON as `to_lit` and `to_plain`, mostly without intermediate objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec

from headwater.model.literal import EXACT_JSON_INT, Json, Unavailable, Value, to_lit, to_plain

Write = Callable[[Any], bytes]
Form = Mapping[type, Write]  # the writer for values of each type

encode: Write = msgspec.json.Encoder().encode
_LOW, _HIGH = -EXACT_JSON_INT, EXACT_JSON_INT


def clean(text: str) -> str:
    """Return `text` as valid Unicode for JSON: a name in the database need not be valid."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def name(text: str) -> bytes:
    """Return a name, or other text that is not a value of a row, as JSON."""
    return encode(clean(text))


def _by(form: Callable[[Value], Any]) -> Write:
    return lambda value: encode(form(value))


def _json(value: Json) -> bytes:
    return encode(value.encodable())


def _lit_float(value: float) -> bytes:
    if value - value == 0:  # neither infinite nor NaN
        return b'{"t":"f64","v":' + encode(value) + b"}"
    return encode(to_lit(value))


def _lit_str(value: str) -> bytes:
    try:
        return b'{"t":"str","v":' + encode(value) + b"}"
    except UnicodeEncodeError:
        return encode(to_lit(value))


def _plain_str(value: str) -> bytes:
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(to_plain(value))


LIT: Form = dict.fromkeys(get_args(Value), _by(to_lit)) | {
    type(None): lambda value: b'{"t":"null"}',
    int: lambda value: b'{"t":"i64","v":' + encode(value) + b"}",
    float: _lit_float,
    str: _lit_str,
    Json: lambda value: b'{"t":"json","v":' + _json(value) + b"}",
}
# An unavailable value has no plain form: images leave it out.
PLAIN: Form = {kind: _by(to_plain) for kind in get_args(Value) if kind is not Unavailable} | {
    type(None): lambda value: b"null",
    bool: encode,
    int: lambda value: encode(value) if _LOW <= value <= _HIGH else b'"%d"' % value,
    float: encode,
    str: _plain_str,
    Json: _json,
}
