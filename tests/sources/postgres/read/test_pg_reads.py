"""Chunks, rows and samples of PostgreSQL's tables: complete, in key order, with their offset."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from tests.sources.postgres.pg_database import Rig
from tests.suite.deadlines import PATIENCE

from headwater.errors import Busy, InvalidRequest, NotFound, NotSupported
from headwater.model.keys.key import Span, encode_key, prefix_end
from headwater.model.literal import DateTime
from headwater.model.table import Column, Row, Table
from headwater.sources.postgres.key_order import is_own_order, order
from headwater.sources.postgres.read import key_order_page as room
from headwater.sources.postgres.read.key_order_page import Decoded
from headwater.sources.postgres.read.sample import read_sample
from headwater.sources.postgres.read.text_columns import TextColumns
from headwater.sources.postgres.values import to_text

Attach = Callable[..., Rig]
TYPES = {
    "int": ["-2147483648", "-1", "0", "1", "255", "256", "2147483647"],
    "bigint": ["-9223372036854775808", "-5", "0", "128", "9223372036854775807"],
    "smallint": ["-1", "0", "7"],
    "boolean": ["true", "false"],
    "numeric": ["-Infinity", "-10.5", "-1e-20", "0", "1e-20", "1.5", "1.50000000000000001", "1e30", "Infinity", "NaN"],
    "double precision": ["-Infinity", "-1.5", "-5e-324", "0", "1e-300", "0.1", "2", "1e300", "Infinity", "NaN"],
    "real": ["-3e38", "-1", "0", "0.1", "16777216", "Infinity", "NaN"],
    "date": ["-infinity", "4713-01-01 BC", "0044-03-15 BC", "0001-01-01", "2024-02-29", "12000-01-01", "infinity"],
    "timestamp": ["-infinity", "0100-01-01 BC", "2024-01-01", "2024-01-01 00:00:00.5", "20000-01-01", "infinity"],
    "timestamptz": [
        "-infinity",
        "0100-01-01 BC",
        "2024-01-01",
        "2024-01-01 00:00:00.000001",
        "20000-01-01",
        "infinity",
    ],
    "time": ["00:00", "10:00", "10:00:00.5", "24:00"],
    "timetz": ["10:00+02", "08:30+00", "23:00-05"],
    "uuid": ["00000000-0000-0000-0000-000000000001", "ffffffff-0000-0000-0000-000000000000"],
    "bytea": ["\\x", "\\x00", "\\x0001", "\\x61", "\\xff"],
    "text": ["", "a", "B", "é", "a b", "ab", "\uffff", "\U0001f600", "Z", "z"],
    "varchar(5)": ["", "a", "B", "é"],
    "char(4)": ["", "a", "B", "é", "a b"],
    'text COLLATE "en-x-icu"': ["", "a", "B", "b", "A", "é", "e", "z", "-", "_"],
    'char(3) COLLATE "en-x-icu"': ["a", "B", "b", "A", ""],
    "mood": ["sad", "ok", "happy"],
    "int[]": ["{}", "{1}", "{2,1}", "{10}"],
    "interval": ["1 day", "2 hours", "-1 mon"],
    "inet": ["10.0.0.1", "9.0.0.0/8", "::1"],
    "jsonb": ["1", '{"a": 1}', "[1]"],
    "money": ["1.5", "-2", "1000"],
    "label": ["x", "B", "a"],
    "small": ["5", "70"],
}
BEFORE = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')",
    "CREATE DOMAIN label AS varchar(5)",
    "CREATE DOMAIN small AS int CHECK (VALUE < 100)",
)


@pytest.fixture(params=[Decoded, TextColumns], ids=["decoded", "packed"])
def pg_rig(request: pytest.FixtureRequest, pg_rig: Attach) -> Attach:
    """Run each test with both representations of the rows of a chunk."""
    return lambda *statements, **options: pg_rig(*statements, take=request.param, **options)


def has_collation(r: Rig) -> bool:
    return bool(r.stream.db.execute("SELECT 1 FROM pg_collation WHERE collname = 'en-x-icu'").fetchone())


def all_rows(r: Rig, table: str, limit: int, span: Span | None = None) -> list[Row]:
    found: list[Row] = []
    after = None
    while True:
        chunk = r.reading.chunk(table, after=after, span=span, limit=limit)
        assert len(chunk.rows) <= limit
        found += chunk.rows
        if chunk.next_key is None:
            return found
        after = chunk.next_key


def test_table_with_any_type_of_key_is_read_completely_in_the_order_of_its_places(
    pg_rig: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = pg_rig(*BEFORE)
    monkeypatch.setattr(r.log, "barrier", lambda: 0)  # hundreds of reads, and nobody asks for their offsets
    has_icu = has_collation(r)
    names = {}
    for number, (declared, texts) in enumerate(TYPES.items()):
        if "icu" in declared and not has_icu:
            continue
        name = names[declared] = f"t{number}"
        r.stream.run(f"CREATE TABLE {name}(k {declared} PRIMARY KEY, v int)")
        for text in texts:
            r.stream.db.execute(f"INSERT INTO {name} VALUES (%s, 1)", [text])
    for declared, name in names.items():
        table = r.reading.chunk(name, after=None, span=None, limit=1).table
        place = order(table, table.key, r.columns.odd())
        rows = all_rows(r, name, 2)
        places = [place(table.key_of(row)) for row in rows]
        assert len(rows) == len(TYPES[declared]), declared
        assert places == sorted(places) and len(set(places)) == len(places), (declared, rows)
        if is_own_order(table.columns[0]):
            theirs = r.stream.db.execute(f"SELECT k::text AS shown FROM {name} ORDER BY k").fetchall()
            shown = [repr(float(text)) if table.columns[0].kind == "f64" else text for (text,) in theirs]
            assert [written(row[0]).rstrip() for row in rows] == shown, declared
        check_spans(r, name, declared, rows, places)


def written(value: Any) -> str:
    """Return a value as PostgreSQL writes it, except that floats are as Python writes them."""
    if isinstance(value, float):
        return repr(value)
    shown = to_text(value) or ""
    return shown.replace("T", " ").replace("+00:00", "+00") if isinstance(value, DateTime) else shown


def check_spans(r: Rig, name: str, declared: str, rows: list[Row], places: list[bytes]) -> None:
    generator = random.Random(declared)
    for _ in range(4):
        low, high = sorted(generator.choices([*places, b"", places[0] + b"\0", places[-1] + b"\xff"], k=2))
        span = Span(low, None if generator.random() < 0.2 else high)
        wanted = [row for row, place in zip(rows, places, strict=True) if span.contains(place)]
        assert repr(all_rows(r, name, 3, span)) == repr(wanted), (declared, span)
    for place, row in zip(places[:2], rows[:2], strict=True):
        assert repr(all_rows(r, name, 3, Span(place, prefix_end(place)))) == repr([row])


def test_composite_keys_are_paged_by_row_comparison(pg_rig: Attach) -> None:
    r = pg_rig()
    collation = 'COLLATE "en-x-icu"' if has_collation(r) else ""
    r.stream.run(f"CREATE TABLE t(v int, b text {collation}, a int, PRIMARY KEY (a, b))")
    values = "SELECT n, chr(65 + n % 7 + 32 * (n % 2)), n / 5 FROM generate_series(0, 60) n"
    r.run(f"INSERT INTO t {values} ON CONFLICT DO NOTHING")
    rows = all_rows(r, "t", 4)
    assert rows == sorted(rows, key=lambda row: (row[2], row[1])) and len(rows) > 40
    table = r.reading.chunk("t", after=None, span=None, limit=1).table
    assert table.key == ("a", "b")
    assert all_rows(r, "t", 3, Span.between(encode_key((3,)), encode_key((3,)))) == [row for row in rows if row[2] == 3]
    assert r.reading.get("t", (rows[0][2], rows[0][1]))[1] == rows[0]
    with pytest.raises(InvalidRequest):
        r.reading.chunk("t", after=(1,), span=None, limit=3)


@pytest.mark.every_server
def test_nondeterministic_collation_is_paged_by_the_database_and_has_no_spans(pg_rig: Attach) -> None:
    r = pg_rig()
    if not has_collation(r):
        pytest.skip("this PostgreSQL was built without ICU")
    r.stream.run("CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    r.stream.run("CREATE TABLE t(k text COLLATE ci PRIMARY KEY)", "INSERT INTO t VALUES ('a'), ('B'), ('c'), ('D')")
    assert all_rows(r, "t", 1) == [("a",), ("B",), ("c",), ("D",)]
    with pytest.raises(NotSupported, match="ci"):
        r.reading.chunk("t", after=None, span=Span(b"\x30"), limit=1)
    found = read_sample(r.pool, r.shapes, "t", 2, r.columns.odd)
    assert found.points == () and found.rows == 4


def test_chunk_and_row_have_the_offset_of_their_read(pg_rig: Attach) -> None:
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY, v text)")
    r.run("INSERT INTO t SELECT n, 'x' FROM generate_series(1, 10) n")
    with r.connect() as other, other.transaction():
        other.execute("INSERT INTO t VALUES (100)")
        chunk = r.reading.chunk("t", after=None, span=None, limit=5)
        assert (len(chunk.rows), chunk.next_key) == (5, (5,))
        assert chunk.offset == r.log.head
    chunk = r.reading.chunk("t", after=(5,), span=None, limit=50)
    assert (len(chunk.rows), chunk.next_key, chunk.offset) == (6, None, r.log.head)
    table, row, offset = r.reading.get("t", (100,))
    assert (table.name, row, offset) == ("t", (100, None), r.log.head)
    assert r.reading.get("t", (101,))[1] is None


def test_chunks_read_during_writes_equal_the_log_up_to_their_offset(pg_rig: Attach) -> None:
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY, v int)", "ALTER TABLE t REPLICA IDENTITY FULL")
    done = threading.Event()

    def write(seed: int) -> None:
        generator = random.Random(seed)
        with r.connect() as other:
            while not done.is_set():
                key, value = generator.randrange(30), generator.randrange(1000)
                with contextlib.suppress(psycopg.errors.DeadlockDetected), other.transaction():
                    change = "INSERT INTO t VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET v = excluded.v"
                    other.execute(change, [key, value])
                    other.execute("DELETE FROM t WHERE id = %s", [generator.randrange(30)])

    writers = [threading.Thread(target=write, args=[seed]) for seed in range(3)]
    for writer in writers:
        writer.start()
    chunks = []
    deadline = time.monotonic() + PATIENCE
    try:
        while len(chunks) < 10 or len({chunk.offset for chunk in chunks}) < 4:
            assert time.monotonic() < deadline, "the log did not grow while chunks were read"
            with contextlib.suppress(Busy):
                chunks.append(r.reading.chunk("t", after=None, span=None, limit=100))
    finally:
        done.set()
        for writer in writers:
            writer.join()
    for chunk in chunks:
        assert dict(chunk.rows) == fold(r, chunk.offset)


def fold(r: Rig, upto: int) -> dict[Any, Any]:
    """Return the rows of the table after the first `upto` changes of the log."""
    rows: dict[Any, Any] = {}
    changes = [change for item in r.log.transactions for change in item.changes]
    for change in changes[:upto]:
        if change.before is not None:
            rows.pop(change.before[0], None)
        if change.after is not None:
            rows[change.after[0]] = change.after[1]
    return rows


def test_read_without_an_exact_offset_is_retried_and_then_refused_as_busy(
    pg_rig: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    answers = [None, None, 7]
    monkeypatch.setattr(r.log, "exact", lambda snapshot: answers.pop(0))
    assert len(r.reading.chunk("t", after=None, span=None, limit=5).rows) == 1 and not answers
    monkeypatch.setattr(r.log, "exact", lambda snapshot: None)
    with pytest.raises(Busy):
        r.reading.chunk("t", after=None, span=None, limit=5)


def test_chunk_size_is_limited_in_bytes(pg_rig: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_BYTES", 100_000)
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY, v text)")
    r.run("INSERT INTO t SELECT n, repeat('x', 10000) FROM generate_series(1, 100) n")
    chunk = r.reading.chunk("t", after=None, span=None, limit=1000)
    assert 5 <= len(chunk.rows) <= 20 and chunk.next_key is not None
    assert len(all_rows(r, "t", 1000)) == 100


def test_table_without_a_primary_key_is_refused_for_chunks(pg_rig: Attach) -> None:
    r = pg_rig("CREATE TABLE bare(v int)", "CREATE VIEW v AS SELECT 1 AS x")
    with pytest.raises(NotSupported, match="no primary key"):
        r.reading.chunk("bare", after=None, span=None, limit=1)
    for name in ("nowhere", "v"):
        with pytest.raises(NotFound):
            r.reading.chunk(name, after=None, span=None, limit=1)


def test_partitions_are_paged_and_identity_index_is_the_key(pg_rig: Attach) -> None:
    r = pg_rig(
        "CREATE TABLE p(id int, k int NOT NULL, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)",
        "INSERT INTO p SELECT n, n FROM generate_series(50, 149) n",
        "CREATE TABLE i(id int PRIMARY KEY, k int NOT NULL)",
        "CREATE UNIQUE INDEX ik ON i(k)",
        "ALTER TABLE i REPLICA IDENTITY USING INDEX ik",
    )
    assert [row[0] for row in all_rows(r, "p", 7)] == list(range(50, 150))
    assert len(read_sample(r.pool, r.shapes, "p", 10).points) > 0
    assert r.do(lambda s: s.describe("i")).key == ("k",)


def test_read_statement_has_an_offset_and_writes_are_refused(pg_rig: Attach) -> None:
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    r.run("CREATE FUNCTION sly() RETURNS int LANGUAGE sql STABLE AS 'SELECT 1'")
    found = r.queries.read("SELECT id FROM t WHERE id > $1", [1])
    assert (found.columns, found.rows, found.offset) == (("id",), ((2,),), r.log.head)
    assert r.do(lambda s: s.is_read_only("SELECT sly()") and not s.is_read_only("DELETE FROM t"))
    for sql in ("DELETE FROM t", "CREATE TABLE u(x int)", "SELECT nextval('x')", "SELECT 1; SELECT 2"):
        with pytest.raises(InvalidRequest):
            r.queries.read(sql)
    r.stream.run(
        "SELECT pg_terminate_backend(pid, 120000) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND datname = current_database() AND backend_type = 'client backend'"
    )
    assert r.queries.read("SELECT count(*) FROM t").rows == ((2,),)


# --- samples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("analyse", [False, True])
def test_sample_estimates_rows_and_bytes_and_their_distribution(pg_rig: Attach, analyse: bool) -> None:
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY, v text)")
    r.stream.run("INSERT INTO t SELECT n, repeat('x', 100) FROM generate_series(1, 20000) n")
    if analyse:
        r.stream.run("ANALYZE t")
    found = read_sample(r.pool, r.shapes, "t", 100, r.columns.odd)
    assert 10_000 < found.rows < 40_000 and 50 * found.rows < found.bytes < 200 * found.rows
    assert 20 <= len(found.points) <= 200
    assert [point.place for point in found.points] == sorted(point.place for point in found.points)
    place = order(found.table, ("id",))
    left = sum(point.rows for point in found.points if point.place < place((10_000,)))
    assert 0.25 < left / found.rows < 0.75


def test_sample_of_a_small_table_is_exact(pg_rig: Attach) -> None:
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'abc'), (2, NULL)")
    found = read_sample(r.pool, r.shapes, "t", 10)
    assert (found.rows, found.bytes, len(found.points)) == (2, 8 + 4 + 8 + 1, 2)
    r.stream.run("DELETE FROM t")
    assert read_sample(r.pool, r.shapes, "t", 10).rows == 0


# --- what a column holds ---------------------------------------------------------------------------------

HELD: list[tuple[str, str, Any, Any]] = [
    ("character varying(3)", "str", "abc  ", "abc"),
    ("character(4)", "str", "ab", "ab  "),
    ("numeric(6,2)", "dec", Decimal("1.005"), Decimal("1.01")),
    ("numeric", "dec", 5, Decimal("5")),
    ("integer", "i64", Decimal("7"), 7),
    ("timestamp with time zone", "datetime", DateTime("2024-01-01T02:00:00+02"), DateTime("2024-01-01T00:00:00+00:00")),
    ("timestamp(0) without time zone", "datetime", DateTime("2024-01-01T02:00:00.6"), DateTime("2024-01-01T02:00:01")),
    ("label", "str", "abc", "abc"),
    ("small", "i64", 99, 99),
    ("mood", "str", "ok", "ok"),
    ("bytea", "bytes", b"\0", b"\0"),
    ("boolean", "bool", "yes", True),
    ("bit(3)", "str", "101", "101"),
]


def test_postgres_computes_the_value_that_a_column_stores(pg_rig: Attach) -> None:
    r = pg_rig(*BEFORE)
    for declared, kind, given, held in HELD:
        table = Table("t", (Column("c", kind, declared),))
        for _ in range(2):
            assert repr(r.columns.stored(table, ["c"], (given,))) == repr((held,)), declared
    for declared, kind, given in [
        ("character varying(3)", "str", "abcd"),
        ("character(2)", "str", "abc"),
        ("bit(3)", "str", "1"),
        ("numeric(3,1)", "dec", Decimal("123")),
        ("label", "str", "abcdef"),
        ("small", "i64", 100),
        ("mood", "str", "angry"),
        ("integer", "i64", 2**31),
        ("integer); DROP TABLE x; --", "i64", 1),
    ]:
        with pytest.raises(InvalidRequest):
            r.columns.stored(Table("t", (Column("c", kind, declared),)), ["c"], (given,))
    assert r.columns.stored(Table("t", (Column("c", "i64", "integer"),)), ["c"], (None,)) == (None,)
    with pytest.raises(InvalidRequest, match="NULL"):
        r.columns.stored(Table("t", (Column("c", "i64", "integer", nullable=False),)), ["c"], (None,))


def test_equal_values_are_encoded_as_equal_bytes() -> None:
    def same(kind: str, declared: str, *values: Any) -> bool:
        place = order(Table("t", (Column("c", kind, declared),)), ("c",))
        return len({place((value,)) for value in values}) == 1

    assert same("dec", "numeric", Decimal("1.0"), Decimal("1.00"), Decimal(1), "1.000", 1)
    assert same("dec", "numeric", Decimal("NaN"), Decimal("-NaN"))
    assert same("f64", "double precision", 0.0, -0.0)
    assert same("f64", "double precision", float("nan"), -float("nan"))
    assert same("str", "character(5)", "a", "a    ")
    assert same(
        "datetime", "timestamp with time zone", DateTime("2024-01-01T00:00:00Z"), DateTime("2024-01-01T00:00:00+00:00")
    )
    assert not same("str", "text", "a", "a ")
