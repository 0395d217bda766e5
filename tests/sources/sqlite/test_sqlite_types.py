"""Every value comes out as it went in: storage classes, odd texts, odd names, wide tables, declared types."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sources.sqlite_source import Rig, images

from headwater.errors import HeadwaterError
from headwater.model.literal import U64, Date, DateTime, Json, Time
from headwater.sources.sqlite.capture.triggers import MAX_COLUMNS
from headwater.sources.sqlite.types import FROM_STORED, to_stored

Attach = Callable[..., Rig]

ODD = [
    None,
    0,
    1,
    -1,
    2**63 - 1,
    -(2**63),
    0.0,
    -0.0,
    1.0,
    1.5,
    math.inf,
    -math.inf,
    5e-324,
    1.7976931348623157e308,
    "",
    "plain",
    "1",
    "1.0",
    "a\0b",
    "\0",
    "'quote' \"double\" ; -- \n\r\t",
    "\U0001f30a é \ufeff",
    b"",
    b"\0\xff\x00",
    b"plain",
]
BROKEN = [b"\xff", b"ok\xc3", b"\xed\xb2\x80", b"\xf5\x80\x80\x80", b"a\0\xfe"]
DECLARED = ["", "INTEGER", "REAL", "TEXT", "BLOB", "NUMERIC", "DECIMAL(10,2)", "BOOLEAN", "DATE", "TIME", "DATETIME"]
DECLARED += ["TIMESTAMP", "JSON", "JSON_TEXT", "JSONB", "UUID", "UUID_TEXT", "DECIMAL_TEXT", "UNSIGNED INTEGER"]
DECLARED += ["EMBEDDING_BLOB", "VARCHAR(30)", "DATE_TEXT", "FLOAT", "INT8", "CLOB", "nonsense ( 3 )"]


def test_every_value_in_every_declared_type_is_captured(rig: Attach) -> None:
    columns = ", ".join(f"c{place} {declared}" for place, declared in enumerate(DECLARED))
    r = rig(f"CREATE TABLE t(id INTEGER PRIMARY KEY, {columns})")
    marks = ", ".join("?" * len(DECLARED))
    for place, value in enumerate(ODD):
        r.foreign.run(f"INSERT INTO t VALUES ({place}, {marks})", *[value] * len(DECLARED))
    r.check()
    r.foreign.run(
        f"UPDATE t SET ({', '.join(f'c{n}' for n in range(len(DECLARED)))}) = ({marks})", *[-0.0] * len(DECLARED)
    )
    r.check()
    r.foreign.run("DELETE FROM t")
    r.check()


def test_text_that_is_not_utf8_is_captured(rig: Attach) -> None:
    r = rig("CREATE TABLE t(k TEXT PRIMARY KEY, v JSON, d DATE, n DECIMAL_TEXT) WITHOUT ROWID", "CREATE TABLE u(x)")
    for broken in BROKEN:
        r.foreign.run("INSERT INTO t SELECT k, k, k, k FROM (SELECT CAST(? AS TEXT) AS k)", broken)
        r.foreign.run("REPLACE INTO t SELECT k, 1, k, k FROM (SELECT CAST(? AS TEXT) AS k)", broken)
        r.foreign.run("INSERT INTO u VALUES (CAST(? AS TEXT))", broken)
    changes = r.check()
    assert changes[0].after is not None and changes[0].after[0] == "\udcff"
    r.foreign.run("UPDATE t SET k = k || k, v = 'good'")
    r.foreign.run("DELETE FROM t")
    r.check()


@pytest.mark.slow
def test_text_of_five_megabytes_is_captured(rig: Attach) -> None:
    r = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, x)")
    r.foreign.script(
        "INSERT INTO t VALUES (1, printf('%.5000000c', 'x')), (2, zeroblob(5000000))",
        "UPDATE t SET x = x || 'y' WHERE id = 1",
    )
    r.check()


@pytest.mark.parametrize(
    ("declared", "stored", "value"),
    [
        ("BOOLEAN", 1, True),
        ("BOOLEAN", 0, False),
        ("BOOLEAN", 2, 2),
        ("BOOLEAN", "yes", "yes"),
        ("BOOLEAN", 1.5, 1.5),
        ("DATE", "2026-11-15", Date("2026-11-15")),
        ("DATE", "15.11.2026", "15.11.2026"),
        ("DATE", 20261115, 20261115),
        ("TIME", "12:30", Time("12:30")),
        ("DATETIME", "2026-11-15 02:00:00", DateTime("2026-11-15 02:00:00")),
        ("TIMESTAMP", 1763172000, 1763172000),
        ("JSON", '{"a": [1, 2.50]}', Json('{"a": [1, 2.50]}')),
        ("JSON", "{broken", "{broken"),
        ("UUID", "12345678-1234-5678-1234-567812345678", UUID("12345678-1234-5678-1234-567812345678")),
        ("UUID", "12345678123456781234567812345678AB", "12345678123456781234567812345678AB"),
        ("UUID_TEXT", "12345678-1234-5678-1234-56781234ABCD", "12345678-1234-5678-1234-56781234ABCD"),
        ("DECIMAL_TEXT", "12.3400", Decimal("12.3400")),
        ("DECIMAL_TEXT", "-0", Decimal("-0")),
        ("DECIMAL_TEXT", "1_000", "1_000"),
        ("DECIMAL_TEXT", " 1", " 1"),
        ("DECIMAL_TEXT", "+1", "+1"),
        ("DECIMAL_TEXT", "1E5", "1E5"),
        ("DECIMAL_TEXT", "sNaN", "sNaN"),
        ("DECIMAL_TEXT", "inf", "inf"),
        ("DECIMAL_TEXT", "\u0661", "\u0661"),
        ("DECIMAL(10,2)", "1.50", 1.5),
        ("UNSIGNED INTEGER", 7, U64(7)),
        ("UNSIGNED INTEGER", -7, -7),
    ],
)
def test_value_that_is_invalid_for_its_declared_type_keeps_its_stored_type(
    rig: Attach, declared: str, stored: object, value: object
) -> None:
    r = rig(f"CREATE TABLE t(id INTEGER PRIMARY KEY, x {declared})")
    r.foreign.run("INSERT INTO t VALUES (1, ?)", stored)
    ((_, after),) = images(r.check())
    assert after == (1, value) and type(after[1]) is type(value)


@given(st.sampled_from(sorted(FROM_STORED)), st.one_of(st.text(), st.integers(-5, 5), st.floats(), st.binary()))
def test_stored_value_is_read_and_written_back_unchanged(kind: str, stored: object) -> None:
    found = FROM_STORED[kind](stored)  # type: ignore[arg-type]
    back = to_stored(found)
    assert type(back) is type(stored) or isinstance(found, bool)
    assert repr(back) == repr(stored)


@given(st.text(alphabet="0123456789.eE+-_ NaInfty", max_size=12))
def test_decimals_are_read_back_digit_for_digit(text: str) -> None:
    assert to_stored(FROM_STORED["dec"](text)) == text


def test_equal_decimals_with_different_texts_are_captured_as_different_keys(rig: Attach) -> None:
    r = rig("CREATE TABLE t(k DECIMAL_TEXT PRIMARY KEY, x)")
    r.foreign.script(
        "INSERT INTO t VALUES ('1.0', 'a'), ('1.00', 'b'), ('NaN', 'c')",
        "INSERT OR IGNORE INTO t VALUES ('1.0', 'n')",
        "DELETE FROM t WHERE k = '1.00'",
        "INSERT INTO t VALUES ('1.00', 'again')",
        "UPDATE t SET x = x || '!'",
        "UPDATE t SET x = x || '?'",
        "REPLACE INTO t VALUES ('NaN', 'd')",
    )
    r.check()


NAMES = [
    'a"b',
    "a b",
    "a'b",
    "a.b",
    "a;--b",
    "a\nb",
    "select",
    "tëst \U0001f30a",
    "a`b[c]",
    "1",
    "%s {x} ?1 :a $b",
    "/* x */",
    "rowid",
    "x",
    "s",
    "NEW",
    "old",
]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["PRIMARY KEY", "UNIQUE", ""])
def test_tables_with_hostile_names_are_captured(rig: Attach, name: str, kind: str) -> None:
    table, other = quoted(name), quoted(name + "2")
    r = rig(f"CREATE TABLE {table}({table} {kind}, {other}, UNIQUE ({other}))")
    r.foreign.script(
        f"INSERT INTO {table} VALUES (1, 2), (3, 4)",
        f"REPLACE INTO {table} VALUES (1, 4)",
        f"UPDATE OR REPLACE {table} SET {other} = 5",
        f"UPDATE {table} SET {table} = 9",
        f"INSERT OR IGNORE INTO {table} VALUES (9, 9), (8, 8)",
    )
    r.check()
    assert r.write(f"CREATE UNIQUE INDEX {quoted('i ' + name)} ON {table}({table} + 0, {other}) WHERE {table} > 0") == [
        ""
    ]
    r.check()
    r.foreign.script(f"REPLACE INTO {table} VALUES (8, 1)", f"DELETE FROM {table}")
    r.check()
    chunk = r.source.chunk(name, after=None, span=None, limit=10)
    assert chunk.rows == ()


def test_columns_named_like_capture_columns_are_captured(rig: Attach) -> None:
    r = rig(
        "CREATE TABLE t(c0, t, seq, op, head UNIQUE, id, c1, s, x, PRIMARY KEY (c0, c1))",
        "CREATE TABLE keyless(c0, c1 UNIQUE, t, rowid, oid)",
        "INSERT INTO t VALUES (1, 2, 3, 4, 5, 6, 7, 8, 9), (2, 2, 3, 4, 6, 6, 7, 8, 9)",
    )
    for statement in (
        "REPLACE INTO t VALUES (1, 0, 0, 0, 6, 0, 7, 0, 0)",
        "UPDATE OR REPLACE t SET c0 = 9, c1 = 9",
        "INSERT INTO keyless VALUES (1, 1, 1, 1, 1), (2, 2, 2, 2, 2)",
        "REPLACE INTO keyless VALUES (3, 1, 1, 1, 1)",
        "UPDATE OR REPLACE keyless SET c1 = 1",
        "DELETE FROM t",
    ):
        r.foreign.run(statement)
        r.check()


def test_table_that_hides_every_rowid_name_is_refused_with_a_reason(rig: Attach) -> None:
    r = rig("CREATE TABLE t(rowid, _rowid_, oid)", "CREATE TABLE ok(oid INTEGER PRIMARY KEY, rowid, _rowid_)")
    assert set(r.captured()) == {"ok"}
    assert "rowid" in r.source.status()["uncaptured"]["t"]
    r.foreign.script("INSERT INTO ok VALUES (1, 2, 3)", "UPDATE ok SET oid = 5", "REPLACE INTO ok VALUES (5, 5, 5)")
    r.check()


@pytest.mark.parametrize("width", [500, pytest.param(MAX_COLUMNS, marks=pytest.mark.slow)])
def test_wide_tables_are_captured(rig: Attach, width: int) -> None:
    names = [f"w{place}" for place in range(width - 1)]
    r = rig(f"CREATE TABLE t(id INTEGER PRIMARY KEY, {', '.join(names)})")
    values = ", ".join(map(str, range(width - 1)))
    for statement in (
        f"INSERT INTO t VALUES (1, {values})",
        f"UPDATE t SET w0 = 'x', {names[-1]} = 'y'",
        f"REPLACE INTO t VALUES (1, {values})",
        "UPDATE t SET id = 2",
        "DELETE FROM t",
    ):
        r.foreign.run(statement)
        r.check()


def test_capture_tables_are_widened_and_keep_their_rows(rig: Attach) -> None:
    r = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, x)", "INSERT INTO t VALUES (1, 'a')")
    r.foreign.run("REPLACE INTO t VALUES (1, CAST(x'ff' AS TEXT)), (2, -0.0), (3, x'00')")
    r.write(f"CREATE TABLE wide({', '.join(f'w{place}' for place in range(60))})", "INSERT INTO wide(w59) VALUES (1)")
    r.foreign.run("REPLACE INTO t VALUES (2, 1.0)")
    assert len(r.check()) == 6
    r.write(f"CREATE TABLE wider({', '.join(f'w{place}' for place in range(65))})", "INSERT INTO wider(w64) VALUES (1)")
    assert len(r.check()) == 2


def test_too_wide_table_is_refused_with_a_reason(rig: Attach) -> None:
    r = rig(f"CREATE TABLE t({', '.join(f'w{place}' for place in range(MAX_COLUMNS + 1))})", "CREATE TABLE ok(x)")
    assert set(r.captured()) == {"ok"}
    assert str(MAX_COLUMNS) in r.source.status()["uncaptured"]["t"]
    r.foreign.run("INSERT INTO t DEFAULT VALUES")
    assert r.check() == []


def test_strict_tables_are_captured(rig: Attach) -> None:
    r = rig(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, i INT, r REAL, x TEXT, b BLOB, a ANY) STRICT",
        "CREATE TABLE k(a ANY PRIMARY KEY, n) STRICT, WITHOUT ROWID".replace("n)", "n INT)"),
    )
    r.foreign.run("INSERT INTO t VALUES (1, 1, 1, 'x', x'00', '007')")
    r.foreign.script("INSERT INTO k VALUES ('1', 1), (1, 1), (1.5, 1), (x'31', 1)", "REPLACE INTO k VALUES (1.0, 2)")
    changes = r.check()
    assert changes[0].after == (1, 1, 1.0, "x", b"\0", "007")
    assert "cannot store" in r.foreign.attempt("INSERT INTO t(i) VALUES ('no')")
    assert r.check() == []


def test_broken_text_is_refused_as_a_parameter() -> None:
    with pytest.raises(HeadwaterError, match="UTF-8"):
        to_stored("\udcff")
