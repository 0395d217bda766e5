"""Plain JSON, and the parts of a key in a URL, as values of the columns they are meant for."""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.model.literal import Json, Value, from_json, from_lit
from headwater.model.table import KINDS, Column, Key, Table
from headwater.queries.rows.column_values import check_key, column_of

MARK = "~"  # begins a part that says its own kind: ~str:~x, ~bytes:, ~i64:5

_FIELD = {"bytes": "b64", "date": "iso", "time": "iso", "datetime": "iso"}
_INTEGER = re.compile(r"-?\d{1,20}\Z", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,400}(\.\d{1,400})?([eE][+-]?\d{1,4})?\Z", re.ASCII)


def read_row(table: Table, body: Mapping[str, Any], *, lits: bool) -> dict[str, Value]:
    """The columns named in `body`, written as `Lit`s or in plain JSON, which leans on the kind of the column."""
    return {name: _of_column(column_of(table, name), value, lits) for name, value in body.items()}


def read_key(table: Table, parts: Sequence[str]) -> Key:
    """The primary key whose values are written in `parts`."""
    columns = [column_of(table, name) for name in table.primary_key]
    if not columns or len(columns) != len(parts):
        return check_key(table, parts)  # it says what is wrong
    return check_key(table, [_of_part(column, part) for column, part in zip(columns, parts, strict=True)])


def _of_column(column: Column, body: Any, lits: bool) -> Value:
    try:
        return from_json(body) if lits else _plain(column.kind, body)
    except InvalidRequest as error:
        hint = error.hint if lits else f"It is of kind {column.kind}; see Values for its plain form."
        raise InvalidRequest(f"column {column.name!r}: {error.message}", hint=hint) from None


def _plain(kind: str, body: Any) -> Value:
    if body is None:
        return None
    if kind == "any":
        if isinstance(body, dict):
            raise InvalidRequest("an object is no value of a column without a kind")
        return from_json(body)
    if kind in ("i64", "u64") and isinstance(body, str) and _INTEGER.match(body):
        body = int(body)  # beyond 2^53 plain JSON writes them as texts
    if kind in ("f64", "dec") and type(body) is int:
        return from_json(body)  # the column decides whether it holds this number exactly
    if kind == "f64" and isinstance(body, str):
        raise InvalidRequest("a number was expected")
    return from_lit({"t": kind, _FIELD.get(kind, "v"): body})


def _of_part(column: Column, part: str) -> Value:
    kind, text = column.kind, part
    if part.startswith(MARK):
        kind, colon, text = part[1:].partition(":")
        if kind == "null":
            raise InvalidRequest("a key with NULL in it does not name one row", hint="Use sql.exec for such rows.")
        if not colon or kind not in KINDS:
            hint = f"A text that begins with {MARK} is written {MARK}str:{MARK}…; the others are {MARK}kind:value."
            raise InvalidRequest(f"the key part {part[:40]!r} cannot be read", hint=hint)
    try:
        return _PARTS.get(kind, _text)(kind, text)
    except (HeadwaterError, ValueError):
        raise InvalidRequest(
            f"the key part {part[:40]!r} is no {kind} value, as column {column.name!r} needs",
            hint=_PART_HINTS.get(kind, "Write it as plain JSON does, without quotes."),
        ) from None


def _text(kind: str, text: str) -> Value:
    return from_json(text)


def _lit(kind: str, text: str) -> Value:
    return from_lit({"t": kind, _FIELD.get(kind, "v"): text})


def _integer(kind: str, text: str) -> Value:
    if not _INTEGER.match(text):
        raise ValueError(text)
    return from_lit({"t": kind, "v": int(text)})


def _float(kind: str, text: str) -> Value:
    if not _NUMBER.match(text):
        raise ValueError(text)
    return from_lit({"t": kind, "v": float(text)})


def _bool(kind: str, text: str) -> Value:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _json(kind: str, text: str) -> Value:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise ValueError(text) from None
    return Json(text)


_PARTS: dict[str, Callable[[str, str], Value]] = {
    "i64": _integer,
    "u64": _integer,
    "f64": _float,
    "bool": _bool,
    "bytes": lambda kind, text: binascii.unhexlify(text),
    "json": _json,
    **dict.fromkeys(("dec", "date", "time", "datetime", "uuid", "embedding"), _lit),
}
_PART_HINTS = {"bytes": "Write bytes in hex, such as 00ff.", "bool": "Write true or false."}
