"""Parsing of plain JSON and of keys in URLs into values, by the kind of their column."""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.model.literal import Json, Value, from_json, from_lit, is_json
from headwater.model.table import KINDS, Column, Key, Table
from headwater.queries.rows.column_values import check_key, column_of

MARK = "~"  # prefix of a key part with an explicit kind: ~str:~x, ~bytes:, ~i64:5

_FIELD = {"bytes": "b64", "date": "iso", "time": "iso", "datetime": "iso"}
_INTEGER = re.compile(r"-?\d{1,20}\Z", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,400}(\.\d{1,400})?([eE][+-]?\d{1,4})?\Z", re.ASCII)


def read_row(table: Table, body: Mapping[str, Any], *, lits: bool) -> dict[str, Value]:
    """Return the values of the columns in `body`, parsed as `Lit`s or as plain JSON by the kind of each column."""
    return {name: _of_column(column_of(table, name), value, lits) for name, value in body.items()}


def read_key(table: Table, parts: Sequence[str]) -> Key:
    """Return the primary key whose values are written in `parts`."""
    columns = [column_of(table, name) for name in table.primary_key]
    if not columns or len(columns) != len(parts):
        return check_key(table, parts)  # raises the error
    return check_key(table, [_of_part(column, part) for column, part in zip(columns, parts, strict=True)])


def _of_column(column: Column, body: Any, lits: bool) -> Value:
    try:
        return from_json(body) if lits else _plain(column.kind, body)
    except InvalidRequest as error:
        hint = error.hint if lits else f"The column is of kind {column.kind}; see Values for its plain form."
        raise InvalidRequest(f"column {column.name!r}: {error.message}", hint=hint) from None


def _plain(kind: str, body: Any) -> Value:
    if body is None:
        return None
    if kind == "any":
        if isinstance(body, dict):
            raise InvalidRequest("a column without a kind cannot hold an object")
        return from_json(body)
    if kind in ("i64", "u64") and isinstance(body, str) and _INTEGER.match(body):
        body = int(body)  # plain JSON has integers beyond 2^53 as strings
    if kind in ("f64", "dec") and type(body) is int:
        return from_json(body)  # whether the column holds this number exactly is checked later
    if kind == "f64" and isinstance(body, str):
        raise InvalidRequest("a number was expected")
    return from_lit({"t": kind, _FIELD.get(kind, "v"): body})


def _of_part(column: Column, part: str) -> Value:
    kind, text = column.kind, part
    if part.startswith(MARK):
        kind, colon, text = part[1:].partition(":")
        if kind == "null":
            raise InvalidRequest("a key with NULL does not identify one row", hint="Use sql.exec for such rows.")
        if not colon or kind not in KINDS:
            hint = f"Write a text that begins with {MARK} as {MARK}str:{MARK}…, other values as {MARK}kind:value."
            raise InvalidRequest(f"the key part {part[:40]!r} cannot be read", hint=hint)
    try:
        return _PARTS[kind](kind, text) if kind in _PARTS else from_json(text)
    except (HeadwaterError, ValueError):
        raise InvalidRequest(
            f"the key part {part[:40]!r} is not a {kind} value, which column {column.name!r} needs",
            hint=_PART_HINTS.get(kind, "Write the value as in plain JSON, without quotes."),
        ) from None


def _lit(kind: str, text: str) -> Value:
    return from_lit({"t": kind, _FIELD.get(kind, "v"): text})


def _number(kind: str, text: str) -> Value:
    pattern, to_number = (_NUMBER, float) if kind == "f64" else (_INTEGER, int)
    if not pattern.match(text):
        raise ValueError(text)
    return from_lit({"t": kind, "v": to_number(text)})


def _bool(kind: str, text: str) -> Value:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _json(kind: str, text: str) -> Value:
    if not is_json(text):
        raise ValueError(text)
    return Json(text)


_PARTS: dict[str, Callable[[str, str], Value]] = {
    **dict.fromkeys(("i64", "u64", "f64"), _number),
    "bool": _bool,
    "bytes": lambda kind, text: binascii.unhexlify(text),
    "json": _json,
    **dict.fromkeys(("dec", "date", "time", "datetime", "uuid", "embedding"), _lit),
}
_PART_HINTS = {"bytes": "Write bytes in hex, such as 00ff.", "bool": "Write true or false."}
