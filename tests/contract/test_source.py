"""The contract of every source with capture and snapshots, checked on SQLite, PostgreSQL and the memory source."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sources.memory_source import MemorySource
from tests.sources.postgres.pg_source import PgRig, shared_server
from tests.sources.sqlite_source import MemoryNotes
from tests.suite.deadlines import PATIENCE

from headwater.errors import InvalidRequest, NotFound, NotSupported
from headwater.model.change import Change, Op, Transaction
from headwater.model.keys.key import Span, encode_key
from headwater.model.table import Column, Table
from headwater.sources.source import Source
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource

pytestmark = pytest.mark.slow

_numbers = itertools.count(1)
T = Table("t", (Column("k", "i64"), Column("v")), ("k",))
Row = tuple[int, Any]


class Driver:
    """A source with one table t(k, v), and a way to commit to it."""

    source: Source

    def commit(self, *changes: tuple[Row | None, Row | None]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.source.close()

    def proof(self, latest: int = 0, generation: str = "g") -> str:
        return self.source.prove(generation=generation, latest=latest, read=lambda after: iter(()))


class Memory(Driver):
    def __init__(self, folder: Path) -> None:
        self.source = MemorySource("main", T, part=1000)

    def commit(self, *changes: tuple[Row | None, Row | None]) -> None:
        ops = {(True, True): Op.UPDATE, (False, True): Op.INSERT, (True, False): Op.DELETE}
        made = [Change(ops[before is not None, after is not None], T, before, after) for before, after in changes]
        self.source.commit(*made)  # type: ignore[attr-defined]


class Sqlite(Driver):
    def __init__(self, folder: Path) -> None:
        self.source = SqliteSource("main", str(folder / "a.db"), notes=MemoryNotes(), config=SqliteConfig())
        assert self.proof() == ""
        self.source.write(lambda s: s.execute("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")).result(PATIENCE)

    def commit(self, *changes: tuple[Row | None, Row | None]) -> None:
        def work(session: Any) -> None:
            for before, after in changes:
                if before is None:
                    session.execute("INSERT INTO t VALUES (?, ?)", after)
                elif after is None:
                    session.execute("DELETE FROM t WHERE k = ?", before[:1])
                else:
                    session.execute("UPDATE t SET k = ?, v = ? WHERE k = ?", (*after, before[0]))

        self.source.write(work).result(PATIENCE)


class Postgres(Driver):
    def __init__(self, folder: Path) -> None:
        self._rig = PgRig(
            shared_server(), f"contract_{os.getpid()}_{next(_numbers)}", "CREATE TABLE t(k bigint PRIMARY KEY, v text)"
        )
        self._rig.run("ALTER TABLE t REPLICA IDENTITY FULL")
        self.source = self._rig.source

    def commit(self, *changes: tuple[Row | None, Row | None]) -> None:
        with self._rig.db.transaction():
            for before, after in changes:
                if before is None:
                    self._rig.db.execute("INSERT INTO t VALUES (%s, %s)", after)
                elif after is None:
                    self._rig.db.execute("DELETE FROM t WHERE k = %s", before[:1])
                else:
                    self._rig.db.execute("UPDATE t SET k = %s, v = %s WHERE k = %s", (*after, before[0]))
        self._rig.until(self.source.head)  # the stream has brought it

    def proof(self, latest: int = 0, generation: str = "g") -> str:
        reason = super().proof(latest, generation)
        if not reason:
            self._rig.until(self.source.head)  # the connection before this one has left
        return reason

    def close(self) -> None:
        self._rig.close()


@pytest.fixture(params=[Memory, Sqlite, Postgres])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    made: Driver = request.param(tmp_path)
    assert made.proof() == ""
    yield made
    made.close()


def after_attach(driver: Driver) -> int:
    """Return the offset at which a test begins: creating the table may have taken one."""
    return driver.source.head()


def flat(parts: list[Transaction]) -> list[tuple[Any, Any]]:
    return [(change.before, change.after) for part in parts for change in part.changes]


def test_committed_changes_are_followed_in_order_with_their_offsets(driver: Driver) -> None:
    start = after_attach(driver)
    driver.commit((None, (1, "a")), (None, (2, "b")))
    driver.commit(((1, "a"), (1, "A")), ((2, "b"), None))
    found = list(driver.source.follow(after=start))
    assert flat(found) == [(None, (1, "a")), (None, (2, "b")), ((1, "a"), (1, "A")), ((2, "b"), None)]
    assert [(part.first, part.upto, part.start, part.last) for part in found] == [
        (start + 1, start + 2, 0, True),
        (start + 3, start + 4, 0, True),
    ]
    assert driver.source.head() == start + 4
    assert all(part.ts == 0 and part.position for part in found)
    assert len({part.id for part in found}) == 2


def test_follow_starts_after_the_offset_and_ends_at_the_head(driver: Driver) -> None:
    start = after_attach(driver)
    driver.commit((None, (1, "a")))
    driver.commit((None, (2, "b")))
    assert flat(list(driver.source.follow(after=start + 1))) == [(None, (2, "b"))]
    assert list(driver.source.follow(after=start + 2)) == []
    follow = driver.source.follow(after=start)
    next(follow)
    driver.commit((None, (3, "c")))
    assert (None, (3, "c")) not in flat(list(follow))


def test_large_transaction_is_followed_in_parts(driver: Driver) -> None:
    start = after_attach(driver)
    driver.commit(*((None, (n, "x")) for n in range(10_000)))
    parts = list(driver.source.follow(after=start))
    assert len(parts) > 1 and len({part.id for part in parts}) == 1
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [part.start for part in parts] == [part.first - start - 1 for part in parts]
    assert parts[0].start == 0 and parts[-1].upto == start + 10_000


def test_acknowledged_changes_do_not_affect_later_offsets(driver: Driver) -> None:
    start = after_attach(driver)
    driver.commit((None, (1, "a")))
    list(driver.source.follow(after=start))
    driver.source.acknowledge(start + 1)
    driver.source.acknowledge(start)  # an older one means nothing
    driver.commit((None, (2, "b")))
    assert flat(list(driver.source.follow(after=start + 1))) == [(None, (2, "b"))]
    assert driver.source.head() == start + 2


def test_log_of_another_generation_or_offset_fails_the_proof(driver: Driver) -> None:
    start = after_attach(driver)
    assert driver.proof(latest=start) == ""
    assert driver.proof(latest=start, generation="other") != ""
    assert driver.proof(latest=start + 1) != ""


def test_restarted_source_numbers_from_the_given_offset(driver: Driver) -> None:
    driver.commit((None, (1, "a")))
    driver.source.restart(generation="next", first=1000)
    assert driver.source.head() == 999
    assert driver.proof(latest=999, generation="next") == ""
    driver.commit((None, (2, "b")))
    (part,) = driver.source.follow(after=999)
    assert (part.first, flat([part])) == (1000, [(None, (2, "b"))])


@pytest.mark.parametrize("end", ["wake", "commit"])
def test_wait_ends_on_a_wake_or_a_commit(driver: Driver, end: str) -> None:
    done = threading.Event()
    driver.source.wait(0)
    thread = threading.Thread(target=lambda: (driver.source.wait(30), done.set()))
    thread.start()
    actions: dict[str, Callable[[], None]] = {
        "wake": driver.source.wake,
        "commit": lambda: driver.commit((None, (9, 9))),
    }
    actions[end]()
    assert done.wait(PATIENCE)
    thread.join()


def test_chunks_cover_the_table_and_have_their_offset(driver: Driver) -> None:
    driver.commit(*((None, (n, f"v{n}")) for n in (5, 1, 3, -2, 4)))
    first = driver.source.chunk("t", after=None, span=None, limit=2)
    driver.commit((None, (6, "late")))
    second = driver.source.chunk("t", after=first.next_key, span=None, limit=9)
    assert [row[0] for row in first.rows + second.rows] == [-2, 1, 3, 4, 5, 6]
    assert (first.next_key, second.next_key) == ((1,), None)
    assert second.offset == first.offset + 1 == driver.source.head()
    inside = driver.source.chunk("t", after=(1,), span=Span.between(encode_key((0,)), encode_key((4,))), limit=9)
    assert [row[0] for row in inside.rows] == [3, 4]
    with pytest.raises(NotFound):
        driver.source.chunk("nothing", after=None, span=None, limit=1)


def test_get_returns_the_row_of_a_key_or_none(driver: Driver) -> None:
    driver.commit((None, (1, "a")))
    table, row, offset = driver.source.get("t", (1,))
    assert (table.name, row, offset) == ("t", (1, "a"), driver.source.head())
    assert driver.source.get("t", (2,))[1] is None
    with pytest.raises(NotFound):
        driver.source.get("nothing", (1,))


def test_describe_returns_the_tables_with_columns_and_key(driver: Driver) -> None:
    (table,) = driver.source.describe().values()
    assert (table.name, table.names, table.key) == ("t", ("k", "v"), ("k",))
    assert driver.source.status()["head"] == driver.source.head()


def test_condition_matches_the_rows_that_the_database_matches(driver: Driver) -> None:
    driver.commit((None, (1, "a")), (None, (2, None)), (None, (3, "b")))
    (table,) = driver.source.describe().values()
    rows = driver.source.chunk("t", after=None, span=None, limit=9).rows
    assert driver.source.condition(table, "v <> 'b'").holds(rows) == [True, False, False]
    assert driver.source.condition(table, "v LIKE '_' AND v > 'a' OR k + 1 = 2").holds(rows) == [True, False, True]
    with pytest.raises(InvalidRequest):
        driver.source.condition(table, "nothing = 1")
    with pytest.raises(NotSupported):
        driver.source.condition(table, "random() > k")


def test_condition_reports_the_values_that_a_column_must_have(driver: Driver) -> None:
    (table,) = driver.source.describe().values()
    pin = driver.source.condition(table, "k IN (1, 2) AND v LIKE 'x%'").pin
    place = driver.source.order(table, ["k"])
    assert pin is not None and (pin.column, pin.values) == ("k", {place((1,)), place((2,))})
    assert driver.source.condition(table, "k > 1").pin is None


def test_encoded_keys_sort_in_the_order_of_chunks(driver: Driver) -> None:
    numbers = [0, 1, -1, 7, 300, -300, 2**40, -(2**40), 2**63 - 1, -(2**63)]
    driver.commit(*((None, (n, None)) for n in numbers))
    chunk = driver.source.chunk("t", after=None, span=None, limit=99)
    place = driver.source.order(chunk.table, chunk.table.key)
    assert [row[0] for row in chunk.rows] == sorted(numbers, key=lambda n: place((n,)))
    assert place((5,)) == place((5.0,)) and Span.between(encode_key((0,)), encode_key((7,))).contains(place((7,)))
    with pytest.raises(InvalidRequest):
        driver.source.order(chunk.table, ["nothing"])


def test_stored_value_equals_the_value_read_back_after_an_insert(driver: Driver) -> None:
    driver.commit((None, (1, "a")))
    (table,) = driver.source.describe().values()
    _, row, _ = driver.source.get("t", (1,))
    assert driver.source.stored(table, ["k", "v"], (1, "a")) == row


def test_sample_estimates_rows_and_bytes_by_key_position(driver: Driver) -> None:
    assert (driver.source.sample("t", 9).rows, driver.source.sample("t", 9).points) == (0, ())
    driver.commit(*((None, (n, "x" * 100)) for n in range(2_000)))
    driver.commit((None, (2**62, "far")))
    sample = driver.source.sample("t", 400)
    place = driver.source.order(sample.table, sample.table.key)
    assert sample.rows == pytest.approx(2_001, rel=0.1) and sample.bytes == pytest.approx(220_000, rel=0.2)
    assert 300 <= len(sample.points) <= 500
    assert sum(point.rows for point in sample.points) == pytest.approx(sample.rows, abs=1)
    assert sum(point.bytes for point in sample.points) == pytest.approx(sample.bytes, abs=1)
    placed = [point.place for point in sample.points]
    assert placed == sorted(placed) and set(placed) <= {place((n,)) for n in (*range(2_000), 2**62)}
    below = sum(point.rows for point in sample.points if point.place < place((500,)))
    assert below == pytest.approx(500, rel=0.1)
    with pytest.raises(NotFound):
        driver.source.sample("nothing", 9)
