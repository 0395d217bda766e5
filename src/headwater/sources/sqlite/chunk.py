"""Reading a table in key order, a bounded stretch at a time, each with the offset of its own read."""

from __future__ import annotations

from typing import Any

from headwater.errors import HeadwaterError
from headwater.model.key import Span, decode_key, encode_key
from headwater.model.literal import Value, is_broken_text
from headwater.model.table import Key, Row, Table
from headwater.sources.source import Chunk
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.fetch import fetch, fetch_upto
from headwater.sources.sqlite.opening import Connected
from headwater.sources.sqlite.sql import column_list, order_by
from headwater.sources.sqlite.values import Stored, to_stored

MAX_BYTES = 16 * 1024 * 1024
# SQLite orders these as text, and text of another form may stand among them; spans order them by value.
UNORDERED_KINDS = {"dec", "uuid"}


def read_chunk(reader: Connected, name: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
    """At most `limit` rows (and about 16 MiB) with keys after `after`, inside `span`."""
    shape = reader.catalog.shape(name)
    table = shape.table
    offset = reader.offset()
    limit = max(limit, 1)
    sql, bindings = _statement(table, after, span)
    sql += f" LIMIT {limit + 1}"
    stored, more = fetch_upto(reader.db.execute, sql, bindings, len(table.columns), rows=limit, weight=MAX_BYTES)
    rows = reader.catalog.decode(shape, stored)
    next_key = table.key_of(rows[-1]) if more else None
    if next_key is not None and None in next_key:
        # NULLs in a key are equal to nothing: rows that share them stay together.
        rows = [row for row in rows if table.key_of(row) != next_key] + _twins(reader, table, next_key)
    if span is not None:
        rows, past = _inside(span, table, rows)
        next_key = None if past and _is_ordered(table) else next_key
    return Chunk(table, tuple(rows), offset, next_key)


def _statement(table: Table, after: Key | None, span: Span | None) -> tuple[str, list[Stored]]:
    conditions: list[str] = []
    bindings: list[Stored] = []
    if after is not None:
        condition, values = _beyond(table, after)
        conditions.append(condition)
        bindings += values
    if span is not None and _is_ordered(table) and (low := _decodable(span.start)) is not None:
        names = ", ".join(ident(n) for n in table.key[: len(low)])
        conditions.append(f"({names}) >= ({', '.join(map(_mark, low))})")
        bindings += map(_bound, low)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"SELECT {column_list(table)} FROM {ident(table.name)}{where} ORDER BY {order_by(table)}", bindings


def _beyond(table: Table, after: Key) -> tuple[str, list[Stored]]:
    """Keys greater than `after`, column by column: row values would lose NULLs, which sort first."""
    parts: list[str] = []
    bindings: list[Stored] = []
    for place, value in enumerate(after):
        same = [f"{ident(name)} IS {_mark(v)}" for name, v in zip(table.key[:place], after, strict=False)]
        name = ident(table.key[place])
        parts.append(" AND ".join([*same, f"{name} IS NOT NULL" if value is None else f"{name} > {_mark(value)}"]))
        bindings += [_bound(v) for v in after[:place]] + ([] if value is None else [_bound(value)])
    if len(after) == 1:
        return parts[0], bindings
    beyond = "(" + " OR ".join(f"({part})" for part in parts) + ")"
    if after[0] is None:
        return beyond, bindings
    # Says nothing new, but lets SQLite seek in the key's index: an OR alone reads it from the start.
    return f"{ident(table.key[0])} >= {_mark(after[0])} AND {beyond}", [_bound(after[0]), *bindings]


def _mark(value: Value) -> str:
    return "CAST(? AS TEXT)" if isinstance(value, str) and is_broken_text(value) else "?"


def _bound(value: Value) -> Stored:
    """What to bind at `_mark(value)`: text that is not UTF-8 can only be bound as its bytes."""
    if isinstance(value, str) and is_broken_text(value):
        return value.encode("utf-8", "surrogateescape")
    return to_stored(value)


def _is_ordered(table: Table) -> bool:
    """Whether rows in SQLite's key order are in the order of encoded keys."""
    return not any(table.columns[place].kind in UNORDERED_KINDS for place in table.key_places)


def _decodable(start: bytes) -> Key | None:
    """The key a span starts at, if its bytes are one without NULLs."""
    try:
        key = decode_key(start)
    except HeadwaterError:
        return None
    return key if key and None not in key else None


def _inside(span: Span, table: Table, rows: list[Row]) -> tuple[list[Row], bool]:
    """The rows inside `span`, and whether one lay past its end."""
    collations = [table.columns[place].collation for place in table.key_places]
    keys = [encode_key(table.key_of(row), collations) for row in rows]
    past = span.end is not None and any(key >= span.end for key in keys)
    return [row for row, key in zip(rows, keys, strict=True) if span.contains(key)], past


def _twins(reader: Connected, table: Table, key: Key) -> list[Row]:
    same = " AND ".join(f"{ident(name)} IS {_mark(value)}" for name, value in zip(table.key, key, strict=True))
    sql = f"SELECT {column_list(table)} FROM {ident(table.name)} WHERE {same}"
    bindings: Any = list(map(_bound, key))
    stored = fetch(reader.db.execute, sql, bindings, len(table.columns))
    return reader.catalog.decode(reader.catalog.shape(table.name), stored)
