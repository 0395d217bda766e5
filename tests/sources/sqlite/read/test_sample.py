"""Spans cut by a sample hold every key once, for every kind of key, and are even."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.sources.sqlite_source import MemoryNotes, Rig
from tests.suite.deadlines import PATIENCE

from headwater.errors import NotFound
from headwater.model.keys.key import Span
from headwater.ranges.ranges.split import sizes, split_into_spans
from headwater.sources.read import Sample
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource

pytestmark = pytest.mark.slow

TABLES = {
    "integer": "CREATE TABLE t(k INTEGER PRIMARY KEY, v)",
    "text": "CREATE TABLE t(k TEXT PRIMARY KEY, v)",
    "anything": "CREATE TABLE t(k PRIMARY KEY, v)",
    "without rowid": "CREATE TABLE t(k PRIMARY KEY, v) WITHOUT ROWID",
    "no case": "CREATE TABLE t(k TEXT COLLATE NOCASE PRIMARY KEY, v)",
    "no case without rowid": "CREATE TABLE t(k COLLATE NOCASE PRIMARY KEY, v) WITHOUT ROWID",
    "no trailing spaces": "CREATE TABLE t(k TEXT COLLATE RTRIM PRIMARY KEY, v)",
    "two columns": "CREATE TABLE t(k, a TEXT COLLATE NOCASE, v, PRIMARY KEY (a, k))",
    "three columns without rowid": "CREATE TABLE t(k, a TEXT, b BLOB, v, PRIMARY KEY (k, a, b)) WITHOUT ROWID",
    "no key": "CREATE TABLE t(k, v)",
    "blob": "CREATE TABLE t(k BLOB PRIMARY KEY, v)",
    "real": "CREATE TABLE t(k REAL PRIMARY KEY, v)",
    "decimal": "CREATE TABLE t(k DECIMAL(10,2) PRIMARY KEY, v)",
    "decimal as text": "CREATE TABLE t(k DECIMAL_TEXT PRIMARY KEY, v)",
    "uuid": "CREATE TABLE t(k UUID PRIMARY KEY, v)",
    "rowid by another name": 'CREATE TABLE t("rowid" TEXT PRIMARY KEY, k, v)',
    "every name of the rowid taken": 'CREATE TABLE t("rowid" INT, "oid" INT, "_rowid_" INT, k PRIMARY KEY, v)',
}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SqliteSource]:
    made = SqliteSource("main", str(tmp_path / "a.db"), notes=MemoryNotes(), config=SqliteConfig())
    assert made.prove(generation="g", latest=0, read=lambda after: iter(())) == ""
    yield made
    made.close()


def run(source: SqliteSource, *statements: str) -> None:
    for sql in statements:
        source.write(lambda session, sql=sql: session.execute(sql)).result(PATIENCE)


def some_value(random: Random) -> Any:
    return random.choice(
        [
            random.randrange(-50, 50),
            random.randrange(-(2**63), 2**63),
            random.uniform(-9, 9),
            random.choice(["", "a", "A", "b ", "B  ", "é", "z\0", "1.50", "-7", "3e2"]) * random.randrange(1, 3),
            "".join(random.choices("abcXYZ ", k=3)),
            random.randbytes(random.randrange(3)),
            f"{random.getrandbits(128):032x}",
            None,
        ]
    )


def fill(source: SqliteSource, rows: int, random: Random) -> None:
    (table,) = source.describe().values()
    names = [column.name for column in table.visible]
    marks = ", ".join("?" * len(names))

    def work(session: Any) -> None:
        for _ in range(rows):
            values = [some_value(random) for _ in names]
            if table.columns[table.key_places[0]].auto:
                values[table.key_places[0]] = random.randrange(-(2**40), 2**40)
            quoted = ", ".join(f'"{name}"' for name in names)
            session.execute(f"INSERT OR IGNORE INTO t({quoted}) VALUES ({marks})", values)

    source.write(work).result(PATIENCE)


def places(source: SqliteSource) -> list[bytes]:
    chunk = source.chunk("t", after=None, span=None, limit=100_000)
    place = source.order(chunk.table, chunk.table.key)
    return [place(chunk.table.key_of(row)) for row in chunk.rows]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("size", [24, 60, 1_000])
def test_spans_hold_every_key_once(source: SqliteSource, name: str, size: int) -> None:
    run(source, TABLES[name])
    fill(source, 250, Random(size))
    sample = source.sample("t", size)
    keys = places(source)
    assert [point.place for point in sample.points] == sorted(point.place for point in sample.points)
    assert {point.place for point in sample.points} <= set(keys)
    spans = split_into_spans(sample, max(sample.bytes // 7, 1))
    assert len(spans) > 2
    found = [sum(span.contains(key) for key in keys) for span in spans]
    assert sum(found) == len(keys) and min(found) > 0
    assert [sum(span.contains(key) for span in spans) for key in set(keys)] == [1] * len(set(keys))
    read = [len(source.chunk("t", after=None, span=span, limit=100_000).rows) for span in spans]
    assert read == found


@pytest.mark.parametrize("name", TABLES)
def test_table_smaller_than_the_sample_is_counted_exactly(source: SqliteSource, name: str) -> None:
    run(source, TABLES[name])
    assert source.sample("t", 10) == Sample(source.describe()["t"], 0, 0)
    fill(source, 60, Random(3))
    keys = places(source)
    sample = source.sample("t", 1_000)
    assert sample.rows == len(keys) and [point.place for point in sample.points] == sorted(keys)


NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {})"
LARGE = {
    "dense": ("CREATE TABLE t(k INTEGER PRIMARY KEY, v)", "SELECT i, 'x' FROM n"),
    "text": ("CREATE TABLE t(k TEXT PRIMARY KEY, v)", "SELECT hex(i * 2654435761 % 4294967296), i FROM n"),
    "far apart": ("CREATE TABLE t(k INTEGER PRIMARY KEY, v)", "SELECT i * 7046029, i FROM n"),
    "no key": ("CREATE TABLE t(k, v)", "SELECT i % 7, i FROM n"),
    "without rowid": ("CREATE TABLE t(k PRIMARY KEY, v) WITHOUT ROWID", "SELECT printf('%08d', i), i FROM n"),
    "two columns": ("CREATE TABLE t(k, v, PRIMARY KEY(v, k))", "SELECT i, i % 3 FROM n"),
}


@pytest.mark.parametrize("name", LARGE)
def test_spans_of_a_large_table_have_similar_row_counts(source: SqliteSource, name: str) -> None:
    create, rows = LARGE[name]
    run(source, create, f"{NUMBERS.format(30_000)} INSERT INTO t {rows}")
    sample = source.sample("t", 2_000)
    assert 0.85 < sample.rows / 30_000 < 1.15
    spans = split_into_spans(sample, sample.bytes // 6)
    keys = places(source)
    counts = [sum(span.contains(key) for key in keys) for span in spans]
    assert 6 <= len(spans) <= 7
    assert max(counts) < 1.4 * 30_000 / len(spans) and min(counts) > 0.6 * 30_000 / len(spans), counts
    measured = sizes(sample, spans)
    assert all(0.7 < size.rows / count < 1.4 for size, count in zip(measured, counts, strict=True))


def test_distant_single_row_does_not_distort_the_spans(source: SqliteSource) -> None:
    run(
        source,
        "CREATE TABLE t(k INTEGER PRIMARY KEY, v)",
        f"{NUMBERS.format(20_000)} INSERT INTO t SELECT i, 'x' FROM n",
        "INSERT INTO t VALUES (4611686018427387904, 'far')",
    )
    sample = source.sample("t", 1_000)
    keys = places(source)
    counts = [sum(span.contains(key) for key in keys) for span in split_into_spans(sample, sample.bytes // 4)]
    assert sample.rows == 20_001 and max(counts) < 1.1 * 20_001 / 4


def test_large_rows_are_cut_into_short_spans(source: SqliteSource) -> None:
    run(
        source,
        "CREATE TABLE t(k INTEGER PRIMARY KEY, v)",
        f"{NUMBERS.format(6_000)} INSERT INTO t SELECT i, zeroblob(CASE WHEN i <= 600 THEN 9000 ELSE 10 END) FROM n",
    )
    sample = source.sample("t", 1_000)
    assert 0.85 < sample.bytes / (600 * 9_000 + 5_400 * 20) < 1.15
    spans = split_into_spans(sample, sample.bytes // 8)
    place = source.order(sample.table, ("k",))
    assert sum(span.start <= place((600,)) for span in spans) >= len(spans) - 1


def test_text_that_is_not_utf8_is_sampled(source: SqliteSource) -> None:
    run(
        source,
        "CREATE TABLE t(k TEXT PRIMARY KEY, v)",
        f"{NUMBERS.format(300)} INSERT INTO t SELECT CAST(x'ff' || i AS TEXT), i FROM n",
    )
    sample, keys = source.sample("t", 20), places(source)
    assert sample.points and {point.place for point in sample.points} <= set(keys)


def test_sample_of_keys_with_an_application_collation_has_sizes_and_no_points(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.foreign.python("con.create_collation('own', lambda a, b: (a > b) - (a < b))")
    made.foreign.script(
        "CREATE TABLE t(k TEXT COLLATE own PRIMARY KEY, v)",
        f"{NUMBERS.format(300)} INSERT INTO t SELECT printf('%05d', i), zeroblob(87) FROM n",
    )
    for size in (50, 1_000):
        sample = made.source.sample("t", size)
        assert (sample.rows, sample.bytes, sample.points) == (300, 300 * 100, ())
        assert split_into_spans(sample, 10) == [Span.all()]


def test_sample_of_a_missing_table_is_refused(source: SqliteSource) -> None:
    with pytest.raises(NotFound):
        source.sample("nothing", 5)
