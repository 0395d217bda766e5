"""Changes of one kind are processed together, with the same result as one by one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.capture.captured_database import running
from tests.log.memory_log import MemoryLog
from tests.ranges.bulk_reads import place_of

from headwater.model.arrow import Images
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Table
from headwater.ranges.pull import table_changes
from headwater.ranges.pull.jobs import TABLE_DROPPED, Selection
from headwater.ranges.pull.table_changes import ChangeCollector, stop_of
from headwater.sources.sqlite.read.bulk_reader import SqliteReader

NOW = Table("t", (Column("k", "i64"), Column("v", "str")), ("k",), version=2)
THEN = Table("t", (Column("k", "i64"),), ("k",), version=1)
OTHER = Table("u", (Column("k", "i64"),), ("k",))


def _change(chooser: random.Random, op: Op, table: Table) -> Change:
    rows = [(chooser.randint(0, 99), *(["x"] if table is NOW else [])) for _ in range(2)]
    knows_before = op is not Op.INSERT and (op is Op.DELETE or chooser.random() > 0.02)
    return Change(op, table, rows[0] if knows_before else None, None if op is Op.DELETE else rows[1])


def _parts(chooser: random.Random) -> list[Transaction]:
    """Commits of one op on one shape, or with a few of others among them."""
    parts, first = [], 1
    for number in range(40):
        op, table = chooser.choice([Op.INSERT, Op.UPDATE, Op.DELETE]), chooser.choice([NOW, NOW, NOW, THEN, OTHER])
        changes = [_change(chooser, op, table) for _ in range(chooser.choice([1, 7, 8, 30]))]
        if chooser.random() < 0.3:
            odd = _change(chooser, chooser.choice([Op.INSERT, Op.UPDATE]), chooser.choice([NOW, THEN, OTHER]))
            changes[chooser.randrange(len(changes))] = odd
        parts.append(Transaction(f"t{number}", tuple(changes), first=first, ts=first, commit_ts_ms=first))
        first += len(changes)
    return parts


@pytest.mark.parametrize("seed", range(20))
def test_changes_processed_together_equal_those_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    log = MemoryLog()
    log.append(_parts(random.Random(seed)))
    with running(tmp_path) as one:
        place = place_of(one)
        reader = SqliteReader(place.source.address, inode=place.source.inode, generation=place.generation)
        try:
            found: list[Images] = []
            for many in (8, 10**9):
                monkeypatch.setattr(table_changes, "MANY", many)
                found += [images for images, _ in _gatherer(reader, log).batches(0, log.latest)]
        finally:
            reader.close()
    together, one_by_one = found
    assert together.rows == one_by_one.rows and len(together.rows) > 100
    assert together.about == one_by_one.about


def _gatherer(reader: SqliteReader, log: MemoryLog) -> ChangeCollector:
    return ChangeCollector(reader, log, NOW, Selection(), lambda: False)


@pytest.mark.parametrize(
    ("ddl", "is_end"),
    [
        ("DROP TABLE t", True),
        ("drop table if exists main . [T];", True),
        ("DROP TABLE `t` -- not published", True),
        ("ALTER TABLE t RENAME TO u", True),
        ("ALTER TABLE \"u\" RENAME TO /* now */ 't'", True),
        ("DROP TABLE t u", True),  # not a statement of SQLite
        ("DROP/**/TABLE t", True),
        ("DROP -- now\nTABLE/* u */t", True),
        ("ALTER/**/TABLE t RENAME/* */TO u", True),
        (" ;;/* */; DROP TABLE t", True),
        ("DROP TABLE \u00a0t", False),  # a name of SQLite, as it is
        ("WITH x AS (SELECT 1) UPDATE sqlite_schema SET name = 'u'", False),  # not clear
        ("ALTER TABLE t", False),
        (";DROP/**/TABLE u", False),
        ("ALTER TABLE u RENAME/* TO t */TO v", False),
        ("ALTER TABLE t ADD COLUMN v DEFAULT 'RENAME TO'", False),
        ("ALTER TABLE t DROP/**/v -- DROP TABLE t", False),
        ("DROP/**/VIEW t", False),
        ("DROP TABLE u", False),
        ('DROP TABLE IF EXISTS main."t""u" /* TABLE t */', False),
        ('ALTER TABLE u RENAME TO "t u"', False),
        ("ALTER TABLE /* t */ vault RENAME TO safe -- t", False),
        ('ALTER TABLE u RENAME COLUMN t TO "RENAME TO t"', False),
        ("CREATE TABLE t (k)", False),
        ("-- DROP TABLE t", False),
        (None, False),
    ],
)
def test_only_a_drop_or_rename_of_the_table_itself_ends_it(ddl: str | None, is_end: bool) -> None:
    assert stop_of(Change(Op.SCHEMA_CHANGE, THEN, ddl=ddl)) == (TABLE_DROPPED if is_end else "")


@pytest.mark.parametrize("name", ["shop.t", "a b", 'a"b', '"q"', "a--b", "a/*b", "a.b.c", "[x", "drop;", " ", "é.ü"])
@pytest.mark.parametrize("ddl", ["DROP TABLE {}", "DROP TABLE {} -- not published", "ALTER TABLE {} RENAME TO u"])
def test_unquoted_name_in_the_text_of_postgresql_ends_the_table(name: str, ddl: str) -> None:
    table = Table(name, THEN.columns, ("k",))
    assert stop_of(Change(Op.SCHEMA_CHANGE, table, ddl=ddl.format(name))) == TABLE_DROPPED


@pytest.mark.parametrize("name", ["shop.t", "a b", 'a"b', '"q"', "a--b", "a/*b", "a.b.c", "[x", "drop;", " ", "é.ü"])
@pytest.mark.parametrize("part", ['ADD COLUMN "a" int', 'DROP COLUMN "a"', 'ALTER COLUMN "a" TYPE int'])
def test_unquoted_name_in_an_altering_text_of_postgresql_does_not_end_the_table(name: str, part: str) -> None:
    table = Table(name, THEN.columns, ("k",))
    assert stop_of(Change(Op.SCHEMA_CHANGE, table, ddl=f"ALTER TABLE {name} {part}, {part}")) == ""


def test_ddl_text_of_many_comments_is_read_in_linear_time() -> None:
    comments = "/**/" * 10_000
    assert stop_of(Change(Op.SCHEMA_CHANGE, THEN, ddl=f"{comments} DROP {comments} TABLE t")) == TABLE_DROPPED
    assert stop_of(Change(Op.SCHEMA_CHANGE, THEN, ddl=f"{comments} DROP {comments} VIEW t")) == ""
