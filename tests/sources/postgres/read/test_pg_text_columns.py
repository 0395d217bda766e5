"""Rows kept as columns of PostgreSQL's text equal the rows decoded value by value, as values and in Arrow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from psycopg import pq
from tests.pipeline.servers import missing
from tests.sources.postgres.pg_database import Rig

from headwater.errors import NotSupported
from headwater.model import arrow
from headwater.model.table import Row
from headwater.sources.postgres.read import key_order_page
from headwater.sources.postgres.read import text_cells as cells
from headwater.sources.postgres.read.reads import PostgresReads
from headwater.sources.postgres.read.text_columns import PackedRows, TextColumns
from headwater.sources.read import Chunk

Attach = Callable[..., Rig]
COMPILED = cells.COMPILED
ROWS = 60
TABLES = 6

HOSTILE = [
    "",
    " ",
    '""',
    "'",
    "NULL",
    "null",
    "\\N",
    "\\.",
    "\\x",
    "t",
    "NaN",
    "a,b",
    "a\nb",
    "a\r\n",
    "\t",
    "é",
    "\U0001f600",
]
HOSTILE += ["x" * 3000, "\u2028", "{}", "\x01", "\x7f", "e\u0301", "\\", "0", "-0", "infinity"]


def _one_of(*texts: str) -> Callable[[random.Random], str]:
    return lambda generator: generator.choice(texts)


def _moment(generator: random.Random) -> str:
    year = generator.choice([1, 44, 999, 1970, 2024, 9999])
    fraction = generator.choice(["", ".5", ".000001", ".123456"])
    return f"{year:04}-{generator.randint(1, 12):02}-28 {generator.randint(0, 23):02}:59:07{fraction}"


ODD_TIMES = ("infinity", "-infinity", "0044-03-15 10:00:00 BC", "20000-01-01 00:00:00", "1999-12-31 24:00:00")
# By type: what most values are like, and what is rare, and often does not fit the kind.
TYPES: dict[str, tuple[Callable[[random.Random], str], Callable[[random.Random], str]]] = {
    "boolean": (_one_of("t", "f"), _one_of("t")),
    "smallint": (lambda g: str(g.randint(-(2**15), 2**15 - 1)), _one_of("0")),
    "integer": (lambda g: str(g.randint(-(2**31), 2**31 - 1)), _one_of("-2147483648")),
    "bigint": (lambda g: str(g.randint(-(2**63), 2**63 - 1)), _one_of("-9223372036854775808", "9223372036854775807")),
    "oid": (lambda g: str(g.randint(0, 2**32 - 1)), _one_of("4294967295")),
    "xid": (lambda g: str(g.randint(0, 2**32 - 1)), _one_of("0")),
    "xid8": (lambda g: str(g.randint(0, 2**64 - 1)), _one_of("18446744073709551615", "0")),
    "real": (lambda g: repr(g.uniform(-1e6, 1e6)), _one_of("NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4e38")),
    "double precision": (
        lambda g: repr(g.uniform(-1, 1) * 10 ** g.randint(-300, 300)),
        _one_of("NaN", "Infinity", "-Infinity", "-0", "5e-324", "1.7976931348623157e308", "0.1"),
    ),
    "numeric": (
        lambda g: f"{g.randint(-(10**30), 10**30)}.{g.randint(0, 10**9)}",
        _one_of("NaN", "Infinity", "-Infinity", "0.000", "-0", "1e-40", "1e3000", "1" * 20_001, "0." + "0" * 300 + "1"),
    ),
    "numeric(12,4)": (lambda g: repr(round(g.uniform(-1e6, 1e6), 4)), _one_of("NaN", "0")),
    "date": (lambda g: _moment(g)[:10], _one_of("infinity", "-infinity", "0044-03-15 BC", "12000-01-01")),
    "time": (lambda g: _moment(g)[11:], _one_of("24:00:00", "00:00")),
    "timetz": (lambda g: _moment(g)[11:] + g.choice(["+00", "-05", "+05:30"]), _one_of("24:00:00+15:59:59")),
    "timestamp": (_moment, _one_of(*ODD_TIMES)),
    "timestamp(0)": (_moment, _one_of(*ODD_TIMES)),
    "timestamptz": (lambda g: _moment(g) + g.choice(["+00", "+02", "-11:30"]), _one_of(*ODD_TIMES)),
    "interval": (_one_of("1 day", "-2 mons 3 days 04:05:06.7", "0"), _one_of("1000 years")),
    "uuid": (lambda g: f"{g.getrandbits(128):032x}", _one_of("A" * 32)),
    "bytea": (lambda g: "\\x" + g.randbytes(g.randint(0, 40)).hex(), _one_of("\\x", "\\x00", "\\x" + "ff" * 5000)),
    "json": (
        _one_of("1", '{"a": [1, null, "x\\n"]}', '  [ ]', '"é"', "null"),
        _one_of("1e999", '"\\ud800"', "[" * 3000 + "]" * 3000),
    ),
    "jsonb": (_one_of("1", '{"b":1,"a":2}', "1.50", '"x"', "null"), _one_of("1" * 400)),
    "text": (lambda g: "".join(g.choices(HOSTILE[:20], k=g.randint(0, 3))), _one_of(*HOSTILE)),
    "varchar(40)": (_one_of("", "a", "é "), _one_of(*(text for text in HOSTILE if len(text) < 40))),
    "char(6)": (_one_of("", "a", "é", "a b"), _one_of("\n", '"')),
    "name": (_one_of("a", "B c"), _one_of("")),
    '"char"': (_one_of("a", "b"), _one_of("")),
    "mood": (_one_of("sad", "ok"), _one_of("a, \"b\"")),
    "label": (_one_of("x", ""), _one_of("NULL")),
    "amount": (_one_of("1.5", "70"), _one_of("NaN")),
    "int[]": (_one_of("{}", "{1,NULL,3}"), _one_of("[0:1]={1,2}")),
    "text[]": (_one_of("{}", '{"a b",NULL,"NULL",""}'), _one_of('{"\\"","\\\\"}')),
    "inet": (_one_of("10.0.0.1", "::1"), _one_of("9.0.0.0/8")),
    "money": (_one_of("1.5", "-2"), _one_of("100000")),
    "bit(3)": (_one_of("101"), _one_of("000")),
    "int4range": (_one_of("[1,5)", "empty"), _one_of("(,)")),
    "point": (_one_of("(1,2)"), _one_of("(NaN,-0)")),
    "tsvector": (_one_of("'a' 'b':2"), _one_of("")),
}  # fmt: skip
BEFORE = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'a, \"b\"')",
    "CREATE DOMAIN label AS varchar(5)",
    "CREATE DOMAIN amount AS numeric(10,2) CHECK (VALUE > 0)",
)


@pytest.fixture(
    params=[
        "python",
        pytest.param("compiled", marks=pytest.mark.skipif(not COMPILED, reason="not compiled")),
    ]
)
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cells, "COMPILED", None if request.param == "python" else COMPILED)
    return str(request.param)


def test_compiled_module_is_built() -> None:
    if COMPILED is None:
        missing("the compiled columns were not built: make setup, with a C compiler")


def both(r: Rig, table: str, limit: int) -> Iterator[tuple[Chunk, Chunk]]:
    """Yield the chunks of a table, decoded value by value and packed."""
    packed = PostgresReads(r.pool, r.pool, r.shapes, r.log, r.columns, take=TextColumns)
    after = None
    while True:
        one, other = [each.chunk(table, after=after, span=None, limit=limit) for each in (r.reading, packed)]
        assert isinstance(other.rows, PackedRows) and not isinstance(one.rows, PackedRows)
        assert one.next_key == other.next_key and one.table == other.table
        yield one, other
        if one.next_key is None:
            return
        after = one.next_key


def check_same(one: Chunk, other: Chunk, columns: list[str] | None = None) -> None:
    """Check that two chunks are equal as values and as Arrow; NaN equals NaN, and -0.0 differs from 0.0."""
    assert repr(list(one.rows)) == repr(list(other.rows))
    assert len(one.rows) == len(other.rows)
    wanted = arrow.rows_batch(one.table, one.rows, columns)
    found = arrow.rows_batch(other.table, other.rows, columns)
    found.validate(full=True)
    assert found.schema.equals(wanted.schema, check_metadata=True)
    for name, one_column, other_column in zip(wanted.schema.names, wanted, found, strict=True):
        assert repr(one_column.to_pylist()) == repr(other_column.to_pylist()), name
    stream = arrow.ArrowStream(found.schema)  # and it can be sent
    body = stream.start() + stream.batch(found) + stream.end()
    assert repr(pa.ipc.open_stream(body).read_all().to_pylist()) == repr(wanted.to_pylist())


@pytest.mark.parametrize("number", range(TABLES))
def test_random_tables_read_as_text_columns_equal_those_read_as_rows(
    pg_rig: Attach, twin: str, number: int, monkeypatch: pytest.MonkeyPatch, fresh_seed: str
) -> None:
    generator = random.Random(fresh_seed)
    r = pg_rig(*BEFORE)
    monkeypatch.setattr(r.log, "barrier", lambda: 0)  # many reads, and nobody asks for their offsets
    # All types twice: once as they mostly are, once with what is rare. Else some of them.
    declared = list(TYPES) if number < 2 else generator.sample(list(TYPES), generator.randint(1, 8))
    rare = [0.0, 0.3, 0.02, 1.0][number % 4]
    names = [f'"c {place}"' for place in range(len(declared))]
    columns = ", ".join(f"{name} {each}" for name, each in zip(names, declared, strict=True))
    r.stream.run(f"CREATE TABLE t(id int PRIMARY KEY, {columns})")
    marks = ", ".join(f"%s::text::{each}" for each in declared)
    cells: list[Any] = []
    for _ in range(ROWS):
        cells += [
            None if generator.random() < 0.1 else TYPES[each][generator.random() < rare](generator) for each in declared
        ]
    lines = ", ".join(f"({row}, {marks})" for row in range(ROWS))
    r.stream.db.execute(f"INSERT INTO t VALUES {lines}", cells)
    for limit in (ROWS, 7):
        for one, other in both(r, "t", limit):
            check_same(one, other)
            check_same(one, other, ["c 0"])
            check_slices(one, other, generator)


def check_slices(one: Chunk, other: Chunk, generator: random.Random) -> None:
    low, high = sorted(generator.choices(range(len(one.rows) + 1), k=2))
    part, same = one.rows[low:high], other.rows[low:high]
    assert repr(list(same)) == repr(list(part)) and len(same) == len(part)
    found: list[Row] = [other.rows[place] for place in (0, -1)]
    assert repr(found) == repr([one.rows[0], one.rows[-1]])
    wanted = arrow.rows_batch(one.table, part)
    assert repr(arrow.rows_batch(other.table, same).to_pylist()) == repr(wanted.to_pylist())


def test_empty_table_is_packed_as_its_rows_are(pg_rig: Attach, twin: str) -> None:
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY, a text, b bytea, c timestamptz, d numeric, e boolean, f json)")
    ((one, other),) = both(r, "t", 10)
    check_same(one, other)
    r.run("INSERT INTO t(id) VALUES (1), (2)")
    ((one, other),) = both(r, "t", 10)
    check_same(one, other)


def test_chunks_of_several_fetches_have_every_row(pg_rig: Attach, twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_order_page, "FETCH", 50)
    monkeypatch.setattr(key_order_page, "MAX_BYTES", 20_000)
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY, a text)")
    r.run("INSERT INTO t SELECT n, repeat('x', n % 100) FROM generate_series(1, 900) n")
    chunks = list(both(r, "t", 400))
    for one, other in chunks:
        check_same(one, other)
    assert len(chunks) > 2 and sum(len(other.rows) for _, other in chunks) == 900


def test_rows_that_grow_without_warning_are_not_all_held_at_once(
    pg_rig: Attach, twin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    class Counted(TextColumns):
        def add(self, result: pq.abc.PGresult) -> None:
            super().add(result)
            held.append(self.weight)

    monkeypatch.setattr(key_order_page, "MAX_BYTES", 1_000_000)
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY, a text)", take=Counted)
    r.run(
        "INSERT INTO t SELECT n, repeat('x', CASE WHEN n <= 2000 THEN 10 ELSE 5000 END) FROM generate_series(1, 4000) n"
    )
    found: list[int] = []
    after: tuple[Any, ...] | None = None
    while after is not None or not found:
        chunk = r.reading.chunk("t", after=after, span=None, limit=65_536)
        found += [row[0] for row in chunk.rows]
        after = chunk.next_key
    assert found == list(range(1, 4001))
    assert max(held) < 1_000_000 + 5_100 * key_order_page.PART


@pytest.mark.parametrize("fits", [1, 3, 15])
def test_rows_too_large_for_one_arrow_batch_are_read_in_smaller_chunks(
    pg_rig: Attach, twin: str, monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    whole = cells.COMPILED or cells.in_python

    def overflows(result: pq.abc.PGresult) -> cells.Texts:
        if result.ntuples > fits:
            raise OverflowError
        return whole(result)

    monkeypatch.setattr("headwater.sources.postgres.read.text_columns.texts_of", overflows)
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 20)", take=TextColumns)
    found: list[int] = []
    after: tuple[Any, ...] | None = None
    while after is not None or not found:
        chunk = r.reading.chunk("t", after=after, span=None, limit=200)
        found += [row[0] for row in chunk.rows]
        after = chunk.next_key
    assert found == list(range(1, 21))


@pytest.mark.skipif(not COMPILED, reason="not compiled")
def test_columns_beyond_the_arrow_limit_are_refused(pg_rig: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwater.sources.postgres.read import text_cells_compiled

    def overflows(*args: int) -> None:
        raise OverflowError

    monkeypatch.setattr(cells, "COMPILED", COMPILED)
    monkeypatch.setattr(text_cells_compiled, "columns", overflows)
    r = pg_rig("CREATE TABLE t(id int PRIMARY KEY)", take=TextColumns)
    with pytest.raises(NotSupported, match="2 GiB"):
        r.reading.chunk("t", after=None, span=None, limit=5)
