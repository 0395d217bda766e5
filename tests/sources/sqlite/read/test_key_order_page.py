"""Chunks: the pages of any table are the table; each has the offset of its own read, a size limit, and a span."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.guarantees.fold import raw_row
from tests.sources.sqlite_source import Rig

from headwater.errors import NotFound
from headwater.model.keys.key import Span, encode_key, prefix_end
from headwater.model.table import Key, Row
from headwater.sources.sqlite.read.key_order_page import MAX_BYTES, _statement

Attach = Callable[..., Rig]

ANY = "(NULL, 1), (1, 1), (1.5, 1), ('a', 1), ('A', 1), ('b', 1), (x'61', 1), (-3, 1), (2, 1), ('', 1), (x'', 1)"
TABLES = {
    "integer": (
        "CREATE TABLE t(k INTEGER PRIMARY KEY, v)",
        "(5, 1), (-5, 1), (0, 1), (9223372036854775807, 1), (7, 1)",
    ),
    "any": ("CREATE TABLE t(k PRIMARY KEY, v)", ANY),
    "text": ("CREATE TABLE t(k TEXT PRIMARY KEY, v)", "('b', 1), ('a', 1), ('', 1), ('ä', 1), ('B', 1), (NULL, 1)"),
    "nocase": ("CREATE TABLE t(k TEXT COLLATE NOCASE PRIMARY KEY, v)", "('b', 1), ('A', 1), ('c', 1), ('Aa', 1)"),
    "rtrim": ("CREATE TABLE t(k TEXT COLLATE RTRIM PRIMARY KEY, v)", "('b ', 1), ('a', 1), ('a b', 1), ('  ', 1)"),
    "blob": ("CREATE TABLE t(k BLOB PRIMARY KEY, v)", "(x'00', 1), (x'ff00', 1), (x'', 1), (x'61', 1)"),
    "real": ("CREATE TABLE t(k REAL PRIMARY KEY, v)", "(1, 1), (-0.5, 1), (9e999, 1), (-9e999, 1), (1e-300, 1)"),
    "without rowid": ("CREATE TABLE t(k TEXT PRIMARY KEY, v) WITHOUT ROWID", "('b', 1), ('a', 1), ('c', 1)"),
    "composite": (
        "CREATE TABLE t(k, v, PRIMARY KEY (k, v))",
        "(1, 1), (1, 2), (1, NULL), (2, 'a'), (NULL, 1), (NULL, 2), ('x', x'00'), (1, 'b'), (0, 9)",
    ),
    "composite the other way": (
        "CREATE TABLE t(k, v, PRIMARY KEY (v, k)) WITHOUT ROWID",
        "(1, 1), (1, 2), (2, 1), (0, 2)",
    ),
    "no key": ("CREATE TABLE t(k, v)", "(1, 1), (1, 1), (NULL, NULL), ('x', 2)"),
    "null twins": ("CREATE TABLE t(k TEXT PRIMARY KEY, v)", "(NULL, 1), (NULL, 2), (NULL, 2), ('a', 1), (NULL, 3)"),
    "decimal": (
        "CREATE TABLE t(k DECIMAL_TEXT PRIMARY KEY, v)",
        "('10', 1), ('9', 1), ('-1', 1), ('1.0', 1), ('1.00', 1), ('x', 1)",
    ),
    "date": ("CREATE TABLE t(k DATE PRIMARY KEY, v)", "('2026-01-02', 1), ('2025-12-31', 1), ('soon', 1), (5, 1)"),
    "uuid": (
        "CREATE TABLE t(k UUID_TEXT PRIMARY KEY, v)",
        "('ffffffff-0000-0000-0000-000000000000', 1), ('00000000-0000-0000-0000-000000000001', 1), ('a', 1), ('g', 1)",
    ),
    "boolean": ("CREATE TABLE t(k BOOLEAN PRIMARY KEY, v)", "(1, 1), (0, 1), (2, 1), ('no', 1)"),
    "unsigned": ("CREATE TABLE t(k UNSIGNED INTEGER PRIMARY KEY, v)", "(1, 1), (0, 1), (-2, 1)"),
    "descending": ("CREATE TABLE t(k INTEGER PRIMARY KEY DESC, v)", "(1, 1), (5, 1), (3, 1)"),
    "empty": ("CREATE TABLE t(k INTEGER PRIMARY KEY, v)", ""),
}


def pages(r: Rig, limit: int, span: Span | None = None, table: str = "t") -> list[tuple[Row, ...]]:
    found: list[tuple[Row, ...]] = []
    after: Key | None = None
    while len(found) < 1000:
        chunk = r.source.chunk(table, after=after, span=span, limit=limit)
        found.append(chunk.rows)
        if (after := chunk.next_key) is None:
            return found
    raise AssertionError("it never ends")


def raws(rows: Any) -> list[Any]:
    return sorted((raw_row(row) for row in rows), key=repr)


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
@pytest.mark.parametrize("name", TABLES)
def test_pages_of_a_table_hold_every_row(rig: Attach, name: str, limit: int) -> None:
    create, values = TABLES[name]
    r = rig(create, f"INSERT INTO t(k, v) VALUES {values}" if values else "SELECT 1")
    found = pages(r, limit)
    shape = r.source.describe()["t"]
    assert raws(row for page in found for row in page) == sorted(r.foreign.rows("t", shape.names), key=repr)
    assert all(len(page) <= limit for page in found) or "NULL" in values


@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize("name", [name for name in TABLES if name != "null twins"])
def test_pages_of_a_span_hold_exactly_its_rows(rig: Attach, name: str, limit: int) -> None:
    create, values = TABLES[name]
    r = rig(create, f"INSERT INTO t(k, v) VALUES {values}" if values else "SELECT 1")
    shape = r.source.describe()["t"]
    rows = [row for page in pages(r, 100) for row in page]
    order = r.source.order(shape, shape.key)
    keys = sorted(order(shape.key_of(row)) for row in rows) or [encode_key((3,))]
    spans = [Span.all(), Span(keys[0], keys[-1]), Span(keys[len(keys) // 2]), Span(b"", keys[len(keys) // 2])]
    spans += [
        Span(prefix_end(keys[len(keys) // 2]) or b"", None),
        Span(b"\x31", b"\x41"),
        Span(keys[-1], keys[-1] + b"\0"),
    ]
    for span in spans:
        expected = [row for row in rows if span.contains(order(shape.key_of(row)))]
        assert raws(row for page in pages(r, limit, span) for row in page) == raws(expected), span


def test_keys_of_broken_text_are_paged_through(rig: Attach) -> None:
    r = rig("CREATE TABLE t(k TEXT, n, PRIMARY KEY (k, n)) WITHOUT ROWID")
    for broken in (b"\xff", b"a\xc3", b"ok", b"\xc3\xa9", b"\xfe\0z"):
        r.foreign.run("INSERT INTO t VALUES (CAST(? AS TEXT), 1), (CAST(? AS TEXT), 2)", broken, broken)
    assert len([row for page in pages(r, 1) for row in page]) == 10
    start = encode_key(("\udcfe",))
    assert len([row for page in pages(r, 1, Span(start)) for row in page]) == 4


def test_chunk_has_the_offset_of_its_own_read(rig: Attach) -> None:
    r = rig("CREATE TABLE t(k INTEGER PRIMARY KEY, v)", "INSERT INTO t VALUES (1, 'old'), (2, 'old')")
    r.foreign.run("UPDATE t SET v = 'new' WHERE k = 1")
    first = r.source.chunk("t", after=None, span=None, limit=1)
    r.foreign.run("UPDATE t SET v = 'newer' WHERE k = 1")
    second = r.source.chunk("t", after=first.next_key, span=None, limit=1)
    assert (first.rows, second.rows) == (((1, "new"),), ((2, "old"),))
    offsets = [part.first + place for part in r.source.follow(after=0) for place in range(len(part.changes))]
    assert (first.offset, second.offset) == (offsets[0], offsets[1])


def test_chunks_and_later_changes_fold_to_the_table(rig: Attach) -> None:
    r = rig("CREATE TABLE t(k INTEGER PRIMARY KEY, v)", "INSERT INTO t VALUES (1, 0), (2, 0), (3, 0), (4, 0)")
    copy: dict[Any, Any] = {}
    seen: dict[Any, int] = {}
    after: Key | None = None
    for turn in range(9):
        chunk = r.source.chunk("t", after=after, span=None, limit=1)
        copy |= {row[0]: row for row in chunk.rows}
        low = after[0] if after else -1
        high = chunk.next_key[0] if chunk.next_key else 10**9
        seen |= {key: chunk.offset for key in range(-1, 99) if low < key <= high}  # type: ignore[operator]
        r.foreign.script(f"REPLACE INTO t VALUES ({turn % 6}, {turn})", f"DELETE FROM t WHERE k = {(turn * 5) % 7}")
        if (after := chunk.next_key) is None:
            break
    for part in r.source.follow(after=0):
        for offset, change in enumerate(part.changes, part.first):
            if change.before and offset > seen[change.before[0]]:
                copy.pop(change.before[0])
            if change.after and offset > seen[change.after[0]]:
                copy[change.after[0]] = change.after
    assert raws(copy.values()) == sorted(r.foreign.rows("t", ("k", "v")), key=repr)


def test_chunk_size_is_limited_in_bytes(rig: Attach) -> None:
    r = rig("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
    numbers = "WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 24)"
    r.foreign.run(f"{numbers} INSERT INTO t SELECT i, zeroblob(2000000) FROM n")
    found = pages(r, 100)
    assert sum(map(len, found)) == 24
    assert all(sum(len(row[1]) for row in page) <= MAX_BYTES + 2_000_000 for page in found)
    assert len(found) > 1


def test_chunk_of_a_missing_table_is_refused_without_the_name_of_another(rig: Attach) -> None:
    r = rig("CREATE TABLE orders(k)")
    with pytest.raises(NotFound) as caught:
        r.source.chunk("order", after=None, span=None, limit=1)
    assert "orders" not in caught.value.hint and "schema.list_tables" in caught.value.hint


def test_paging_seeks_instead_of_reading_from_the_start(rig: Attach) -> None:
    r = rig("CREATE TABLE t(a INTEGER, b INTEGER, v, PRIMARY KEY (a, b)) WITHOUT ROWID")
    sql, bindings = _statement(r.source.describe()["t"], (5, 7), None)
    ((_, _, _, detail),) = r.foreign.run(f"EXPLAIN QUERY PLAN {sql} LIMIT 10", *bindings)
    assert b"SEARCH t USING PRIMARY KEY ((a,b)>(?,?))" in detail
