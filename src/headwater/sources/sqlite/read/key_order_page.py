"""Reads of a table in key order, one bounded chunk at a time, each with the offset of its own read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import apsw

from headwater.model.keys.key import Span
from headwater.model.literal import Value, is_broken_text
from headwater.model.table import Column, Key, Table
from headwater.sources.key_span import SpanRows, key_at
from headwater.sources.read import Chunk
from headwater.sources.sqlite.capture.change_decoder import row_decoder
from headwater.sources.sqlite.capture.trigger_plan import Layout
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.key_order import order
from headwater.sources.sqlite.query.affinity import affinity
from headwater.sources.sqlite.row_fetch import fetch, fetch_upto
from headwater.sources.sqlite.sql import column_list, order_by
from headwater.sources.sqlite.types import Stored, to_stored

MAX_BYTES = 4 << 20  # approximate size of a chunk
SLICE = 64  # rows fetched from SQLite at a time
WEIGHED = 32  # one of so many rows is measured for all of them

StoredRow = tuple[Any, ...]
# Text that SQLite converts to a number in a numeric column; other text remains text and sorts above all numbers.
_NUMERIC = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)


def read_chunk(reader: GuardedConnection, name: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
    """Return at most `limit` rows (and about 4 MiB) with keys after `after`, inside `span`."""
    shape = reader.catalog.shape(name)
    table = shape.table
    offset = reader.offset()
    bounds = None if span is None or span == Span() else SpanRows(table, span, order(table, table.key))
    sql, bindings = _statement(table, after, span)
    stored, more = _fetch(reader.db, sql, bindings, len(table.columns), max(limit, 1), bounds)
    last = stored[-1] if more else None
    if last is not None and bounds is not None and bounds.is_past(last):
        last = None
    elif last is not None and None in (key := table.key_of(last)):
        # NULLs in a key are never equal, so rows that share such a key must be in one chunk.
        stored = [row for row in stored if table.key_of(row) != key] + _twins(reader.db, table, key)
    decode = row_decoder(Layout(0, shape))
    rows: Sequence[StoredRow] = stored if bounds is None else bounds.inside(stored)
    if decode is not tuple:  # otherwise stored values are the values, and apsw's rows are tuples
        rows = list(map(decode, rows))
    return Chunk(table, tuple(rows), offset, None if last is None else table.key_of(decode(last)))


# --- fetching rows ---------------------------------------------------------------------------------------


def _fetch(
    db: apsw.Connection, sql: str, bindings: list[Stored], width: int, limit: int, bounds: SpanRows | None
) -> tuple[list[StoredRow], bool]:
    """Return the first rows of `sql`, at most `limit` and about MAX_BYTES, and whether there may be more."""
    sql += f" LIMIT {limit + 1}"
    try:
        return _taken(db.execute(sql, bindings), limit, bounds)
    except UnicodeDecodeError:
        return fetch_upto(db.execute, sql, bindings, width, rows=limit, weight=MAX_BYTES)


def _taken(cursor: apsw.Cursor, limit: int, bounds: SpanRows | None) -> tuple[list[StoredRow], bool]:
    found: list[StoredRow] = []
    weight = heaviest = 0
    with closing(cursor):  # an unfinished statement would keep its read transaction open
        while len(found) <= limit and weight < MAX_BYTES:
            # A slice of rows as large as the largest so far takes an eighth of the rest: one large row is harmless.
            size = min(SLICE, limit + 1 - len(found), max((MAX_BYTES - weight) // (8 * heaviest or MAX_BYTES), 1))
            some = list(islice(cursor, size))
            if not some:
                return found, False
            found += some
            weighed = [*map(_weight, some[::WEIGHED])]
            heaviest = max(heaviest, *weighed)
            weight += sum(weighed) * len(some) // len(weighed)
            if bounds is not None and bounds.is_past(some[-1]):
                return found, True
    return found[:limit], True


def _weight(row: StoredRow) -> int:
    return sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row)


def _twins(db: apsw.Connection, table: Table, key: Key) -> list[StoredRow]:
    same = " AND ".join(f"{ident(name)} IS {_mark(value)}" for name, value in zip(table.key, key, strict=True))
    sql = f"SELECT {column_list(table)} FROM {ident(table.name)} WHERE {same}"
    return fetch(db.execute, sql, list(map(_bound, key)), len(table.columns))


# --- start position --------------------------------------------------------------------------------------


def _statement(table: Table, after: Key | None, span: Span | None) -> tuple[str, list[Stored]]:
    start = b"" if span is None else span.start
    condition, bindings = ("", []) if after is None else _beyond(table, after)
    if start and (after is None or order(table, table.key)(after) < start):
        begin, values = _from(table, start)
        condition, bindings = " AND ".join(filter(None, (begin, condition))), values + bindings
    where = f" WHERE {condition}" if condition else ""
    return f"SELECT {column_list(table)} FROM {ident(table.name)}{where} ORDER BY {order_by(table)}", bindings


def _beyond(table: Table, after: Key) -> tuple[str, list[Stored]]:
    """Return the condition for keys greater than `after`."""
    if None not in after:
        # A NULL in a row's key makes this NULL only where the row sorts before `after`: NULLs sort first.
        return _compared(table, ">", after)
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
    # The redundant comparison lets SQLite seek in the key's index: an OR alone reads the index from the start.
    return f"{ident(table.key[0])} >= {_mark(after[0])} AND {beyond}", [_bound(after[0]), *bindings]


def _from(table: Table, start: bytes) -> tuple[str, list[Stored]]:
    """Return a condition for keys at or after `start`, and possibly some before, to which SQLite can seek."""
    found = key_at(start)
    if found is None:
        return "", []
    key, is_behind = found
    columns = [table.columns[place] for place in table.key_places]
    fits = 0
    while fits < min(len(key), len(columns)) and _compares_by_place(columns[fits], key[fits]):
        fits += 1
    return _compared(table, ">" if is_behind and fits == len(key) else ">=", key[:fits]) if fits else ("", [])


def _compares_by_place(column: Column, value: Value) -> bool:
    """Return whether SQLite leaves a bound `value` unchanged in a comparison with `column`."""
    wants = affinity(column)
    match value:
        case bytes():
            return True
        case str():
            return wants in ("TEXT", "BLOB") or not _NUMERIC.fullmatch(value)
        case int() | float():
            return wants != "TEXT" and not math.isnan(value)
    return False


def _compared(table: Table, comparison: str, key: Key) -> tuple[str, list[Stored]]:
    names, marks = [ident(name) for name in table.key[: len(key)]], list(map(_mark, key))
    if len(key) == 1:
        return f"{names[0]} {comparison} {marks[0]}", [_bound(key[0])]
    return f"({', '.join(names)}) {comparison} ({', '.join(marks)})", list(map(_bound, key))


def _mark(value: Value) -> str:
    # The plus removes the affinity of CAST, which would turn the numbers of a column without affinity into text.
    return "+CAST(? AS TEXT)" if isinstance(value, str) and is_broken_text(value) else "?"


def _bound(value: Value) -> Stored:
    """Return the value to bind at `_mark(value)`: text that is not UTF-8 can only be bound as bytes."""
    if isinstance(value, str) and is_broken_text(value):
        return value.encode("utf-8", "surrogateescape")
    return to_stored(value)
