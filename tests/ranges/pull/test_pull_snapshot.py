"""A table read at one offset is the table as it was there, whatever is written while it is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.capture.captured_database import Running, running
from tests.guarantees.fold import RawRow, raw_row
from tests.suite.deadlines import PATIENCE

from headwater.errors import Conflict, InvalidRequest, NotFound, NotSupported, OffsetExpired
from headwater.log.log import Retention
from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Column, Table
from headwater.ranges.pull import snapshot
from headwater.ranges.pull.snapshot import read_as_of, shape_of
from headwater.ranges.pull.undo import Undo

BIG = 10**6
TABLES = {
    "integer": "CREATE TABLE t(k INTEGER PRIMARY KEY, v)",
    "text without case": "CREATE TABLE t(k TEXT COLLATE NOCASE PRIMARY KEY, v) WITHOUT ROWID",
    "composite": "CREATE TABLE t(a TEXT, k, v, PRIMARY KEY (a, k)) WITHOUT ROWID",
    "nulls in the key": "CREATE TABLE t(a TEXT, k, v, PRIMARY KEY (a, k))",
    "no key": "CREATE TABLE t(k, v)",
    "decimal": "CREATE TABLE t(k DECIMAL(10,2) PRIMARY KEY, v)",
    "decimal as text": "CREATE TABLE t(k DECIMAL_TEXT PRIMARY KEY, v)",
}


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as made:
        yield made


def contents(one: Running) -> tuple[list[RawRow], int]:
    """Return the rows of the table in key order as they are now, and their offset."""
    chunk = one.source.chunk("t", after=None, span=None, limit=BIG)
    return [raw_row(row) for row in chunk.rows], chunk.offset


def as_of(one: Running, offset: int, chunk_rows: int = 3, between: Callable[[], object] = lambda: None) -> list[RawRow]:
    found: list[RawRow] = []
    for table, rows in read_as_of(one.source, one.log, shape_of(one.source, "t"), offset, chunk_rows=chunk_rows):
        assert table.name == "t" and 0 < len(rows) <= chunk_rows
        found += map(raw_row, rows)
        assert len(found) <= 1000, "it reads what is written meanwhile, without end"
        between()
    return found


class Writes:
    """Random transactions on the few keys of `t`, so that the same rows are written again and again."""

    def __init__(self, one: Running, kind: str, seed: int) -> None:
        self.one, self.kind, self.random = one, kind, random.Random(seed)

    def key(self) -> str:
        number = self.random.randrange(7 if "a TEXT" in TABLES[self.kind] else 25)
        match self.kind:
            case "text without case":
                letter = chr(ord("a") + number)
                return f"'{letter.upper() if self.random.random() < 0.5 else letter}'"
            case "integer":
                return str(number - 5)
            case "decimal" | "decimal as text":
                return self.random.choice([f"{number}.5", f"'{number}.50'", str(number)])
            case _:
                choices = [str(number), f"{number}.25", f"'{number}'", f"x'{number:02d}'"]
                return self.random.choice(
                    [*choices, "NULL"] if "null" in self.kind or self.kind == "no key" else choices
                )

    def text(self) -> str:
        return self.random.choice(["'x'", "'y'", "'y '", *(["NULL"] if "null" in self.kind else [])])

    def where(self) -> str:
        both = f" AND a IS {self.text()}" if "a TEXT" in TABLES[self.kind] else ""
        return f"k IS {self.key()}{both}"

    def value(self) -> str:
        return self.random.choice(["1", "1.0", "'v'", "NULL", "x'00'", f"'{self.random.random()}'"])

    def row(self) -> str:
        first = f"{self.text()}, " if "a TEXT" in TABLES[self.kind] else ""
        return f"({first}{self.key()}, {self.value()})"

    def statement(self) -> str:
        match self.random.randrange(8):
            case 0 | 1 | 2:
                return f"INSERT OR {self.random.choice(['IGNORE', 'REPLACE'])} INTO t VALUES {self.row()}, {self.row()}"
            case 3 | 4:
                return f"UPDATE t SET v = {self.value()} WHERE {self.where()}"
            case 5:
                moved = f"k = {self.key()}" + (f", a = {self.text()}" if "a TEXT" in TABLES[self.kind] else "")
                return f"UPDATE OR {self.random.choice(['IGNORE', 'REPLACE'])} t SET {moved} WHERE {self.where()}"
            case 6:
                return f"DELETE FROM t WHERE {self.where()}"
            case _:
                return (
                    f"DELETE FROM t WHERE rowid % 7 = {self.random.randrange(7)}"
                    if self.kind
                    in (
                        "integer",
                        "no key",
                    )
                    else f"DELETE FROM t WHERE {self.where()}"
                )

    def some(self, most: int = 4) -> None:
        """Run one to `most` transactions of one to three statements."""
        for _ in range(self.random.randint(1, most)):
            statements = [self.statement() for _ in range(self.random.randint(1, 3))]
            self.one.source.write(lambda session, todo=statements: [session.execute(sql) for sql in todo]).result(
                PATIENCE
            )


@pytest.mark.parametrize("kind", TABLES)
def test_snapshot_read_with_writes_between_its_chunks_returns_the_rows_at_its_offset(one: Running, kind: str) -> None:
    one.run(TABLES[kind])
    for seed in range(12):
        one.run("DELETE FROM t")
        writes = Writes(one, kind, seed)
        writes.some(12)
        oracle, offset = contents(one)
        writes.some(1 + seed)
        chunk_rows = 1 + seed % 5
        found = as_of(one, offset, chunk_rows, writes.some)
        assert sorted(map(repr, found)) == sorted(map(repr, oracle)), f"seed {seed}"
        if kind != "nulls in the key":  # rows that share a key have no order among them
            assert found == oracle, f"seed {seed}"


def test_every_offset_of_a_history_can_be_read(one: Running) -> None:
    one.run(TABLES["integer"])
    writes, known = Writes(one, "integer", 7), {}
    for _ in range(30):
        rows, offset = contents(one)
        known[offset] = rows
        writes.some(1)
    assert {offset: as_of(one, offset, 4) for offset in known} == known


def test_rows_deleted_since_are_returned_in_bounded_pieces(one: Running) -> None:
    one.run(TABLES["integer"])
    one.run(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500) INSERT INTO t SELECT i, i FROM n"
    )
    oracle, offset = contents(one)
    one.run("DELETE FROM t")
    assert as_of(one, offset, 64) == oracle and len(oracle) == 500


def test_large_rows_come_fewer_at_a_time(one: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 1000)
    one.run(TABLES["integer"])
    one.run("INSERT INTO t VALUES (1, printf('%600s', '')), (2, printf('%600s', '')), (3, 'small')")
    _, offset = contents(one)
    one.run("UPDATE t SET v = 1")
    pieces = [len(rows) for _, rows in read_as_of(one.source, one.log, shape_of(one.source, "t"), offset)]
    assert pieces == [2, 1]


def test_snapshot_at_an_offset_where_the_table_was_empty_has_no_chunks(one: Running) -> None:
    one.run(TABLES["integer"])
    _, offset = contents(one)
    one.run("INSERT INTO t VALUES (1, 1)")
    assert as_of(one, offset) == []


def test_snapshot_at_the_head_is_readable_and_beyond_it_is_rejected(one: Running) -> None:
    one.run(TABLES["integer"])
    offset = one.run("INSERT INTO t VALUES (1, 'a')")
    assert len(as_of(one, offset)) == 1
    with pytest.raises(InvalidRequest, match="does not exist yet"):
        as_of(one, offset + 1)


def test_missing_or_uncaptured_table_is_rejected_immediately(tmp_path: Path) -> None:
    with running(tmp_path, tables=("t",)) as one:
        one.run(TABLES["integer"])
        one.run("CREATE TABLE other(k INTEGER PRIMARY KEY)")
        with pytest.raises(NotFound):
            read_as_of(one.source, one.log, shape_of(one.source, "never"), 1)
        with pytest.raises(NotSupported, match="not captured"):
            read_as_of(one.source, one.log, shape_of(one.source, "other"), 1)


def trimmed(one: Running) -> None:
    one.caught_up()
    one.log.retain(Retention(changes=1), now_ms=0)


def test_trimmed_offset_is_rejected_immediately(one: Running) -> None:
    one.run(TABLES["integer"])
    offset = one.run("INSERT INTO t VALUES (1, 'a')")
    one.run("INSERT INTO t VALUES (2, 'b'), (3, 'c')")
    trimmed(one)
    with pytest.raises(OffsetExpired):
        read_as_of(one.source, one.log, shape_of(one.source, "t"), offset)


def test_snapshot_read_survives_trimming_once_all_later_changes_were_read(one: Running) -> None:
    one.run(TABLES["integer"])
    one.run("INSERT INTO t VALUES (1, 1), (2, 2), (3, 3), (4, 4)")
    oracle, offset = contents(one)
    one.run("DELETE FROM t WHERE k = 4")
    chunks = read_as_of(one.source, one.log, shape_of(one.source, "t"), offset, chunk_rows=1)
    trimmed(one)
    assert [raw_row(row) for _, rows in chunks for row in rows] == oracle
    chunks = read_as_of(one.source, one.log, shape_of(one.source, "t"), one.source.head(), chunk_rows=1)
    next(chunks)
    one.run("UPDATE t SET v = 5")
    trimmed(one)
    with pytest.raises(OffsetExpired):
        list(chunks)


def test_snapshot_read_interrupted_by_a_new_generation_raises_offset_expired(one: Running) -> None:
    one.run(TABLES["integer"])
    one.run("INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)")
    chunks = read_as_of(one.source, one.log, shape_of(one.source, "t"), one.source.head(), chunk_rows=1)
    next(chunks)
    one.capture.stop()
    one.log.restart(first=one.log.highest + 2, reason="restored")
    with pytest.raises(OffsetExpired):
        list(chunks)


@pytest.mark.parametrize(
    "ddl",
    ["ALTER TABLE t ADD COLUMN w", "ALTER TABLE t RENAME COLUMN v TO w", "DROP TABLE t", "ALTER TABLE t RENAME TO u"],
)
def test_table_altered_since_the_offset_is_a_conflict(one: Running, ddl: str) -> None:
    one.run(TABLES["integer"])
    offset = one.run("INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)")
    chunks = read_as_of(one.source, one.log, shape_of(one.source, "t"), offset, chunk_rows=1)
    next(chunks)
    one.run(ddl)
    with pytest.raises((Conflict, NotFound)):
        list(chunks)
    with pytest.raises((Conflict, NotFound)):
        read_as_of(one.source, one.log, shape_of(one.source, "t"), offset)


def test_snapshot_read_continues_over_ddl_on_another_table(one: Running) -> None:
    one.run(TABLES["integer"])
    offset = one.run("INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)")
    assert len(as_of(one, offset, 1, lambda: one.run("CREATE TABLE IF NOT EXISTS u(a)"))) == 3


def test_closing_a_snapshot_read_half_way_allows_another_read_at_the_same_offset(one: Running) -> None:
    one.run(TABLES["integer"])
    offset = one.run("INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)")
    chunks = read_as_of(one.source, one.log, shape_of(one.source, "t"), offset, chunk_rows=1)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    read_as_of(one.source, one.log, shape_of(one.source, "t"), offset)


def test_incomplete_before_images_are_rejected() -> None:
    table = Table("t", (Column("k", "i64"), Column("v", "str")), ("k",))
    undo = Undo(table, lambda key: str(key[0]).encode())
    with pytest.raises(NotSupported, match="full before images"):
        undo.add_all([Change(Op.UPDATE, table, (1, UNAVAILABLE), (1, "new"))])
    undo.close()
