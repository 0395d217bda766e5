"""Reading a table in key order, a bounded stretch at a time, each with the offset of its own read."""

from __future__ import annotations

from typing import Any

from headwater.errors import HeadwaterError
from headwater.model.key import Span, decode_key, encode_key
from headwater.model.table import Key, Row, Table
from headwater.sources.source import Chunk
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.fetch import fetch
from headwater.sources.sqlite.opening import Connected
from headwater.sources.sqlite.sql import column_list, order_by
from headwater.sources.sqlite.values import to_stored

MAX_BYTES = 16 * 1024 * 1024


def read_chunk(reader: Connected, name: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
    """At most `limit` rows (and about 16 MiB) with keys after `after`, inside `span`."""
    shape = reader.catalog.shape(name)
    table = shape.table
    offset = reader.offset()
    rows, more = _bounded(_rows(reader, table, after, span, limit), table, span, limit, reader, shape)
    next_key = table.key_of(rows[-1]) if more and rows else None
    if next_key is not None and None in next_key:
        # NULLs in a key are equal to nothing: rows that share them stay together.
        rows = [r for r in rows if table.key_of(r) != next_key] + _twins(reader, table, next_key)
    return Chunk(table, tuple(rows), offset, next_key)


def _rows(reader: Connected, table: Table, after: Key | None, span: Span | None, limit: int) -> list[tuple[Any, ...]]:
    conditions, bindings = [], []
    if after is not None:
        condition, values = _beyond(table, after)
        conditions.append(condition)
        bindings += values
    if span is not None and (low := _decodable(span.start)) is not None:
        names = ", ".join(ident(n) for n in table.key[: len(low)])
        conditions.append(f"({names}) >= ({', '.join('?' * len(low))})")
        bindings += [to_stored(value) for value in low]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    sql = f"SELECT {column_list(table)} FROM {ident(table.name)}{where} ORDER BY {order_by(table)} LIMIT {limit + 1}"
    return fetch(lambda text, args: reader.db.execute(text, args), sql, bindings, len(table.columns))


def _beyond(table: Table, after: Key) -> tuple[str, list[Any]]:
    """Keys greater than `after`, column by column: row values would lose NULLs, which sort first."""
    parts, bindings = [], []
    for place, value in enumerate(after):
        same = [f"{ident(name)} IS ?" for name in table.key[:place]]
        name = ident(table.key[place])
        parts.append(" AND ".join([*same, f"{name} IS NOT NULL" if value is None else f"{name} > ?"]))
        bindings += [to_stored(v) for v in after[:place]] + ([] if value is None else [to_stored(value)])
    if len(after) == 1:
        return parts[0], bindings
    return "(" + " OR ".join(f"({part})" for part in parts) + ")", bindings


def _decodable(start: bytes) -> Key | None:
    """The key a span starts at, if its bytes are one without NULLs."""
    try:
        key = decode_key(start)
    except HeadwaterError:
        return None
    return key if key and None not in key else None


def _bounded(
    stored: list[tuple[Any, ...]], table: Table, span: Span | None, limit: int, reader: Connected, shape: Any
) -> tuple[list[Row], bool]:
    more = len(stored) > limit
    rows = reader.catalog.decode(shape, stored[:limit])
    if span is not None:
        collations = [table.columns[place].collation for place in table.key_places]
        keys = [encode_key(table.key_of(row), collations) for row in rows]
        if span.end is not None and any(key >= span.end for key in keys):
            more = False
        rows = [row for row, key in zip(rows, keys, strict=True) if span.contains(key)]
    size = 0
    for place, row in enumerate(rows):
        size += sum(len(v) if isinstance(v, (str, bytes)) else 8 for v in row)
        if size > MAX_BYTES and place + 1 < len(rows):
            return rows[: place + 1], True
    return rows, more


def _twins(reader: Connected, table: Table, key: Key) -> list[Row]:
    same = " AND ".join(f"{ident(name)} IS ?" for name in table.key)
    sql = f"SELECT {column_list(table)} FROM {ident(table.name)} WHERE {same}"
    stored = fetch(
        lambda text, args: reader.db.execute(text, args), sql, [to_stored(v) for v in key], len(table.columns)
    )
    return reader.catalog.decode(reader.catalog.shape(table.name), stored)
