"""Rows and changes from the bulk worker: exact under concurrent writes, for any span, filter and table version."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.capture.captured_database import Running, foreign, running
from tests.ranges.bulk_reads import ABOUT, Rows, Side, bytes_of, folded, place_of, reading, rows_and_metadata, rows_in
from tests.ranges.pull.test_pull_snapshot import TABLES, Writes
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.errors import (
    Conflict,
    Forbidden,
    HeadwaterError,
    InvalidRequest,
    NotFound,
    NotSupported,
    OffsetExpired,
    Unavailable,
)
from headwater.log.log import Retention
from headwater.model.keys.key import Span
from headwater.model.table import Key, Row, Table
from headwater.model.work.fair_shares import FairPlaces
from headwater.ranges.pull import log_slices, snapshot, table_changes
from headwater.ranges.pull.arrow_pieces import snapshot_pieces
from headwater.ranges.pull.jobs import LogJob, Selection, SnapshotJob
from headwater.ranges.pull.log_slices import log_pieces
from headwater.ranges.pull.snapshot import read_as_of, shape_of
from headwater.ranges.pull.undo import LOG_DISAGREES
from headwater.ranges.worker.open_databases import Databases
from headwater.ranges.worker.worker import AT_ONCE, CALLER_SHARE
from headwater.sources.read import Chunk
from headwater.sources.sqlite.query.where import SqliteCondition
from headwater.sources.sqlite.read.bulk_reader import SqliteReader

pytestmark = pytest.mark.slow

KINDS = [kind for kind in TABLES if kind != "nulls in the key"]  # rows that share a key cannot be folded


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as made:
        yield made


@pytest.fixture
def side(one: Running, tmp_path: Path) -> Iterator[Side]:
    one.run(TABLES["integer"])
    with reading(one, tmp_path / "cache") as made:
        yield made


def write(side: Side, times: int) -> None:
    writes = Writes(side.one, "integer", 3)
    for _ in range(times):
        writes.some()


def spans(side: Side, chooser: random.Random) -> list[Span]:
    """Return spans that hold all keys once, cut at keys that are or were in the table."""
    shape = side.reader.describe()["t"]
    place = side.reader.order(shape, shape.key)
    chunk = side.reader.chunk("t", after=None, span=None, limit=1000)
    places = sorted({place(shape.key_of(row)) for row in chunk.rows})
    edges = [b"", *sorted(chooser.sample(places, min(3, len(places)))), None]
    return [Span(low, high) for low, high in zip(edges, edges[1:], strict=False)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_snapshots_of_all_spans_and_their_later_changes_fold_to_the_table(
    one: Running, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_slices, "SLICE", 16)
    monkeypatch.setattr(table_changes, "BATCH_BYTES", 100)
    monkeypatch.setattr(snapshot, "CHUNK_ROWS", 3)
    one.run(TABLES[kind])
    key = {"composite": ("a", "k"), "no key": ("_rowid",)}.get(kind, ("k",))
    with reading(one, tmp_path / "cache") as side:
        for seed in range(6):
            chooser, writes = random.Random(seed), Writes(one, kind, seed)
            writes.some(8)
            version = one.source.head()
            then = side.snapshot(version)
            cut = spans(side, chooser)
            writes.some(6)
            assert [row for span in cut for row in side.snapshot(version, span)] == then, f"seed {seed}"
            upto = side.durable()
            now = side.snapshot(upto)
            assert folded(then, side.changes(version, upto), *key) == sorted(now, key=repr), f"seed {seed}"
            for span in cut:
                here, there = side.snapshot(version, span), side.snapshot(upto, span)
                found = side.changes(version, upto, span=span)
                assert folded(here, found, *key) == sorted(there, key=repr), f"seed {seed} {span}"


@pytest.mark.slow
def test_chunks_of_a_span_are_exact_while_others_write_between_them(one: Running, tmp_path: Path) -> None:
    one.run(TABLES["integer"])
    with reading(one, tmp_path / "cache") as side:
        for seed in range(8):
            writes = Writes(one, "integer", seed)
            writes.some(10)
            then, offset = one.source.chunk("t", after=None, span=None, limit=1000).rows, one.source.head()
            for span in spans(side, random.Random(seed)):
                place = side.reader.order(one.source.describe()["t"], ("k",))
                expected = [row for row in then if span.contains(place(row[:1]))]
                found = []
                for _, rows in read_as_of(
                    side.reader, side.log, shape_of(side.reader, "t"), offset, span=span, chunk_rows=2
                ):
                    found += rows
                    writes.some(2)
                assert found == expected, f"seed {seed}"


@pytest.mark.slow
def test_every_stretch_of_the_log_is_the_same_from_the_cache_and_without(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_slices, "SLICE", 8)
    monkeypatch.setattr(table_changes, "BATCH_BYTES", 60)
    write(side, 20)
    upto = side.durable()
    whole = side.changes(0, upto, where="1")  # never kept: a filter might be any
    assert [row["_offset"] for row in whole] == sorted(row["_offset"] for row in whole) and len(whole) > 40
    chooser = random.Random(5)
    for _ in range(60):
        low = chooser.randint(0, upto)
        high = chooser.randint(low, upto)
        expected = [row for row in whole if low < row["_offset"] <= high]
        assert side.changes(low, high) == expected, (low, high)
        small = side.body(LogJob(side.place, "t", low, high, compression="lz4"))
        assert rows_in(small) == expected, (low, high)
        narrow = side.changes(low, high, columns=("k",))
        kept = ("k", "_misfit", *ABOUT)
        assert narrow == [{name: row[name] for name in kept} for row in expected], (low, high)
    assert side.cache.hits > side.cache.misses > 0


def test_lz4_log_pull_returns_the_same_rows_in_fewer_bytes(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_slices, "SLICE", 64)
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 300)"
    side.one.run(f"{numbers} INSERT INTO t(k, v) SELECT i, 'the same words again and again' FROM n")
    upto = side.durable()
    for after in (0, 1):  # of the second the first and the last slice are cut
        plain, small = (side.body(LogJob(side.place, "t", after, upto, compression=how)) for how in (None, "lz4"))
        assert rows_in(plain) == rows_in(small) and len(small) < 0.7 * len(plain)


def test_reader_resumes_from_the_position_in_any_batch(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_slices, "SLICE", 8)
    monkeypatch.setattr(snapshot, "CHUNK_ROWS", 2)
    write(side, 20)
    upto = side.durable()
    whole = side.changes(3, upto)
    job = LogJob(side.place, "t", 3, upto)
    batches = rows_and_metadata(side.body(job), b"upto")
    assert int(batches[-1][1]) == upto and len(batches) > 3
    seen = 0
    for count, reached in batches:
        seen += count
        assert side.changes(int(reached), upto) == whole[seen:]
    rows = side.snapshot(upto)
    piece = SnapshotJob(side.place, "t", upto)
    seen = 0
    for count, last in rows_and_metadata(
        bytes_of(snapshot_pieces(side.reader, side.log, piece, lambda: False)), b"last_key"
    ):
        seen += count
        rest = Span(bytes.fromhex(last.decode()) + b"\0")
        assert side.snapshot(upto, rest) == rows[seen:]
    assert seen == len(rows) > 2


def test_commit_version_is_the_last_offset_of_the_commit_in_every_slice(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_slices, "SLICE", 8)
    side.one.run("INSERT INTO t VALUES " + ", ".join(f"({number}, 1)" for number in range(30)))
    upto = side.durable()
    for after, end in ((0, upto), (5, 20), (9, 10)):
        found = side.changes(after, end)
        assert {row["_commit_version"] for row in found} == {upto}
        assert len(found) == end - max(after, 1)  # the first is the CREATE TABLE


def test_condition_and_span_of_a_log_pull_filter_each_image_by_itself(side: Side) -> None:
    side.one.run("INSERT INTO t VALUES (1, 5), (2, 50)")
    after = side.durable()
    side.one.run("UPDATE t SET v = 55 - v")
    side.one.run("UPDATE t SET k = k + 10")
    upto = side.durable()
    found = side.changes(after, upto, where="v > 10")
    assert [(row["_change_type"], row["k"], row["v"]) for row in found] == [
        ("update_postimage", 1, "50"),
        ("update_preimage", 2, "50"),
        ("update_preimage", 1, "50"),
        ("update_postimage", 11, "50"),
    ]
    place = side.reader.order(side.reader.describe()["t"], ("k",))
    found = side.changes(after, upto, span=Span(place((5,))))
    assert [(row["_change_type"], row["k"]) for row in found] == [("update_postimage", 11), ("update_postimage", 12)]
    assert [row["k"] for row in side.snapshot(upto, where="v > 10")] == [11]


@pytest.mark.parametrize("what", ["snapshot", "log"])
def test_pulled_columns_are_the_selected_ones_and_the_identity(side: Side, what: str) -> None:
    side.one.run("CREATE TABLE w(a, b TEXT, c INTEGER, d REAL)")
    side.one.run("INSERT INTO w VALUES (1, 'b', 'not a number', 2.5)")
    upto = side.durable()

    def ask(*columns: str) -> Rows:
        if what == "log":
            return side.changes(upto - 1, upto, table="w", columns=columns)
        return side.snapshot(upto, table="w", columns=columns)

    assert [*ask("d", "b")[0]][:4] == ["b", "d", "_rowid", "_misfit"], "in the order of the table"
    assert ask("b")[0]["_misfit"] is None and "not a number" in ask("c")[0]["_misfit"]
    assert ask("_rowid")[0]["_rowid"] == 1
    with pytest.raises(InvalidRequest, match="no column 'bb'") as caught:
        ask("bb")
    assert "'b'" in caught.value.hint
    with pytest.raises(InvalidRequest):
        ask("")


def test_pull_with_an_invalid_or_unsupported_where_condition_is_rejected(side: Side) -> None:
    upto = side.durable()
    for where in ("nowhere > 1", "random() > 1", "(SELECT 1)", ""):
        for ask in (side.snapshot, lambda offset, **pick: side.changes(0, offset, **pick)):
            with pytest.raises(InvalidRequest):  # NotSupported is one, too
                ask(upto, where=where)


# --- shapes ----------------------------------------------------------------------------------------------


def test_rows_of_other_table_versions_are_mapped_by_column_name(side: Side) -> None:
    side.one.run("CREATE TABLE w(id INTEGER PRIMARY KEY, a TEXT, b INTEGER)")
    after = side.one.source.head()
    side.one.run("INSERT INTO w VALUES (1, 'x', 10)")
    side.one.run("ALTER TABLE w ADD COLUMN c TEXT")
    side.one.run("ALTER TABLE w DROP COLUMN b")
    side.one.run("INSERT INTO w VALUES (2, 'y', 'z')")
    upto = side.durable()

    def values(shape: int | None) -> list[tuple[Any, ...]]:
        return [tuple(row.values())[: -len(ABOUT) - 1] for row in side.changes(after, upto, shape, table="w")]

    assert values(None) == values(3) == [(1, "x", None), (2, "y", "z")]
    assert values(1) == [(1, "x", 10), (2, "y", None)]
    assert values(2) == [(1, "x", 10, None), (2, "y", None, "z")]
    with pytest.raises(NotFound, match="version 4"):
        values(4)


def test_logged_value_of_another_kind_than_the_current_column_is_sent_as_misfit(side: Side) -> None:
    side.one.run("CREATE TABLE w(id INTEGER PRIMARY KEY, a TEXT)")
    side.one.run("INSERT INTO w VALUES (1, 'x')")
    after = side.one.source.head() - 1
    side.one.run("ALTER TABLE w DROP COLUMN a")
    side.one.run("ALTER TABLE w ADD COLUMN a INTEGER")
    (row,) = side.changes(after, side.durable(), table="w")
    assert (row["a"], row["_misfit"]) == (None, '{"a":{"t":"str","v":"x"}}')


@pytest.mark.parametrize(
    ("ddl", "reason"),
    [
        ("DROP TABLE w", "table_dropped"),
        ("/* a */ drop table w", "table_dropped"),
        ("ALTER TABLE w RENAME TO gone", "table_dropped"),
        ("ALTER TABLE w RENAME COLUMN id TO uid", "schema_changed"),
    ],
)
def test_reader_stops_where_rows_changed_without_row_changes(
    side: Side, ddl: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_slices, "SLICE", 4)
    side.one.run("CREATE TABLE w(id INTEGER PRIMARY KEY, a TEXT)")
    after = side.one.source.head()
    side.one.run("INSERT INTO w VALUES (1, 'x')")
    side.one.run(ddl)
    stop = side.one.source.head()
    if reason == "table_dropped":
        side.one.run("CREATE TABLE w(id INTEGER PRIMARY KEY, a TEXT)")
    for number in range(12):
        side.one.run(f"INSERT INTO w VALUES ({number + 10}, 'y')")
    upto = side.durable()
    for high in (stop, upto):
        with pytest.raises(OffsetExpired) as caught:
            side.changes(after, high, table="w")
        assert caught.value.extra["resnapshot_reason"] == reason
        assert caught.value.code == "resnapshot_required"
    assert len(side.changes(stop, upto, table="w")) == 12, "behind it everything is as it was"


def test_reader_continues_where_another_table_of_a_view_was_renamed(side: Side) -> None:
    side.one.run("CREATE TABLE w(id INTEGER PRIMARY KEY)")
    side.one.run("CREATE TABLE vault(id INTEGER PRIMARY KEY)")
    side.one.run("CREATE VIEW v AS SELECT w.id FROM w JOIN vault USING (id)")
    after = side.one.source.head()
    side.one.run("INSERT INTO w VALUES (1)")
    side.one.run("ALTER TABLE vault RENAME TO safe")  # SQLite rewrites the view: a schema change of `w`, too
    side.one.run("INSERT INTO w VALUES (2)")
    assert [row["id"] for row in side.changes(after, side.durable(), table="w")] == [1, 2]


def test_pull_across_a_table_rebuild_by_another_process_requires_a_resnapshot(side: Side, tmp_path: Path) -> None:
    after = side.durable()
    foreign(
        tmp_path / "app.db",
        "BEGIN IMMEDIATE",
        "INSERT INTO t VALUES (1, 1)",
        "CREATE TABLE tmp(k INTEGER PRIMARY KEY, v, more)",
        "INSERT INTO tmp SELECT k, v, 1 FROM t",
        "DROP TABLE t",
        "ALTER TABLE tmp RENAME TO t",
        "COMMIT",
    )
    with pytest.raises(OffsetExpired) as caught:
        side.changes(after, side.durable())
    assert caught.value.extra["resnapshot_reason"] == "schema_changed"
    with pytest.raises(Conflict) as conflict:
        side.snapshot(after)
    assert conflict.value.extra["resnapshot_reason"] == "schema_changed"


# --- what is not there -----------------------------------------------------------------------------------


def test_missing_tables_and_trimmed_or_future_offsets_are_rejected(side: Side) -> None:
    side.one.run("INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)")
    upto = side.durable()
    with pytest.raises(NotFound):
        side.changes(0, upto, table="nowhere")
    with pytest.raises(NotFound):
        side.snapshot(upto, table="nowhere")
    with pytest.raises(NotFound):
        side.tables(0, upto, "t", "nowhere")
    for ask in (side.changes, side.tables):
        with pytest.raises(InvalidRequest, match="not in the log yet"):
            ask(0, upto + 1)
    side.one.log.retain(Retention(changes=1), now_ms=0)
    for ask in (side.changes, side.tables):
        with pytest.raises(OffsetExpired) as caught:
            ask(0, upto)
        assert caught.value.extra["resnapshot_reason"] == "wal_horizon_exceeded"
    assert len(side.changes(upto - 1, upto)) == 1


def test_uncaptured_table_is_rejected(tmp_path: Path) -> None:
    with running(tmp_path, tables=("t",)) as one:
        one.run(TABLES["integer"])
        one.run("CREATE TABLE other(k INTEGER PRIMARY KEY)")
        with reading(one, tmp_path / "cache") as side:
            upto = side.durable()
            for ask in (lambda: side.snapshot(upto, table="other"), lambda: side.changes(0, upto, table="other")):
                with pytest.raises(NotSupported):
                    ask()


def test_slices_cached_before_retention_passed_them_serve_what_is_left(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_slices, "SLICE", 8)
    side.one.run("INSERT INTO t VALUES " + ", ".join(f"({number}, 1)" for number in range(30)))
    upto = side.durable()
    whole = side.changes(0, upto)
    side.one.log.retain(Retention(changes=18), now_ms=0)
    horizon = side.log.horizon
    for cached in (True, False):
        if not cached:
            for path in side.cache._folder.rglob("*.slice"):
                path.unlink()
        found = side.changes(horizon - 1, upto)
        assert found == [row for row in whole if row["_offset"] >= horizon] and len(found) == 18


def test_changes_of_several_tables_have_rows_as_json(side: Side) -> None:
    side.one.run("CREATE TABLE w(a, b BLOB)")
    after = side.one.source.head()
    side.one.run("INSERT INTO w VALUES (1.5, x'00')")
    side.one.run("INSERT INTO t VALUES (7, 'v')")
    side.one.run("UPDATE t SET v = NULL")
    side.one.run("DROP TABLE w")
    upto = side.durable()

    def images_of_changes(*names: str) -> list[tuple[Any, ...]]:
        return [
            tuple(row[name] for name in ("_table", "_change_type", "_key", "before", "after"))
            for row in side.tables(after, upto, *names)
        ]

    everything = images_of_changes()
    assert everything == [
        ("w", "insert", "[1]", None, '{"a":1.5,"b":"AA=="}'),
        ("t", "insert", "[7]", None, '{"k":7,"v":"v"}'),
        ("t", "update", "[7]", '{"k":7,"v":"v"}', '{"k":7,"v":null}'),
        ("w", "schema_change", None, None, '{"ddl":"DROP TABLE w","resnapshot":false,"version":1}'),
    ]
    assert images_of_changes("t") == everything[1:3]
    assert side.tables(upto, upto) == []


def test_changes_of_several_tables_come_in_bounded_batches(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.ranges.pull.arrow_pieces.TABLES_ROWS", 4)
    side.one.run("INSERT INTO t VALUES " + ", ".join(f"({number}, 1)" for number in range(10)))
    upto = side.durable()
    assert [row["_offset"] for row in side.tables(0, upto)] == list(range(1, upto + 1))


# --- the log against the source --------------------------------------------------------------------------


class Tampered:
    """A reader of a file in which rows were changed without capture."""

    def __init__(self, reader: SqliteReader, tamper: Callable[[list[Row]], list[Row]]) -> None:
        self._reader, self._tamper = reader, tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        found = self._reader.chunk(table, after=after, span=span, limit=limit)
        return msgspec.structs.replace(found, rows=tuple(self._tamper(list(found.rows))))


@pytest.mark.parametrize(
    ("tamper", "key"),
    [
        (lambda rows: [(2, "unseen") if row[0] == 2 else row for row in rows], "2"),
        (lambda rows: [row for row in rows if row[0] != 2], "2"),
        (lambda rows: sorted([*rows, (4, "back")], key=lambda row: row[0]), "4"),
        (lambda rows: [row for row in rows if row[0] != 5], "5"),
        (lambda rows: [(2, 1.0) if row[0] == 2 else row for row in rows], ""),  # the same number
        (lambda rows: [(1, "unseen") if row[0] == 1 else row for row in rows], ""),  # of which the log says nothing
    ],
)
def test_row_that_differs_from_the_log_is_a_conflict(
    side: Side, tamper: Callable[[list[Row]], list[Row]], key: str
) -> None:
    one = side.one
    one.run("INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, 'd')")
    version = side.durable()
    one.run("UPDATE t SET v = 0 WHERE k = 2")
    one.run("UPDATE t SET v = 1 WHERE k = 2")
    one.run("DELETE FROM t WHERE k = 4")
    one.run("INSERT INTO t VALUES (5, 'e')")
    side.durable()
    chunks = read_as_of(Tampered(side.reader, tamper), side.log, shape_of(side.reader, "t"), version)
    if not key:
        assert len([row for _, rows in chunks for row in rows]) == 4
        return
    with pytest.raises(Conflict, match=f"the row {key} of table 't'") as caught:
        list(chunks)
    assert caught.value.extra == {"resnapshot_reason": LOG_DISAGREES, "table": "t", "key": key}


def test_rows_changed_after_their_chunk_are_not_a_conflict(side: Side) -> None:
    side.one.run("INSERT INTO t VALUES (1, 0), (2, 0), (3, 0), (4, 0)")
    version = side.durable()
    found: list[Row] = []
    for _, rows in read_as_of(side.reader, side.log, shape_of(side.reader, "t"), version, chunk_rows=1):
        found += rows
        side.one.run("UPDATE t SET v = v + 1")
        side.one.run("DELETE FROM t WHERE k = 3")
        side.one.run("INSERT INTO t VALUES (3, 9)")
    assert found == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_snapshot_of_rows_that_share_a_null_key_misses_none(one: Running, tmp_path: Path) -> None:
    one.run(TABLES["nulls in the key"])
    one.run("INSERT INTO t VALUES (NULL, 1, 'a'), (NULL, 1, 'a'), (NULL, 1, 'b')")
    with reading(one, tmp_path / "cache") as side:
        version = side.durable()
        one.run("UPDATE t SET v = 'c' WHERE v = 'b'")
        side.durable()

        def read_all(reader: Any) -> list[Row]:
            return [row for _, rows in read_as_of(reader, side.log, shape_of(reader, "t"), version) for row in rows]

        assert sorted(row[2] for row in read_all(side.reader)) == ["a", "a", "b"]
        lost = Tampered(side.reader, lambda rows: [row for row in rows if row[2] != "c"])
        with pytest.raises(Conflict, match="None, 1"):
            read_all(lost)


# --- other files -----------------------------------------------------------------------------------------


def test_reader_with_another_inode_or_generation_refuses_to_read_the_file(one: Running, tmp_path: Path) -> None:
    one.run(TABLES["integer"])
    for inode, generation in ((one.source.inode + 1, one.log.generation), (one.source.inode, "another")):
        reader = SqliteReader(one.source.path, inode=inode, generation=generation)
        with pytest.raises((Unavailable, HeadwaterError)):
            reader.describe()
        reader.close()


def test_database_of_a_new_generation_is_opened_again_by_the_worker(one: Running, tmp_path: Path) -> None:
    one.run(TABLES["integer"])
    opened: list[SqliteReader] = []

    def open_reader(place: Any, log: object) -> SqliteReader:
        opened.append(SqliteReader(place.source.address, inode=place.source.inode, generation=place.generation))
        return opened[-1]

    databases = Databases(open_reader)
    place = place_of(one)
    with databases.use(place) as first, databases.use(place) as again:
        assert first is again and first.reader.describe()
    one.capture.stop()
    one.log.restart(first=one.log.highest + 2, reason="restored")
    with pytest.raises(OffsetExpired) as caught, databases.use(place):
        pass
    assert caught.value.extra["resnapshot_reason"] == "log_generation_changed"
    with databases.use(place_of(one)):
        pass
    assert len(opened) == 2
    databases.close()


def test_pull_whose_client_disconnected_stops_with_unavailable(side: Side) -> None:
    side.one.run("INSERT INTO t VALUES (1, 1)")
    upto = side.durable()
    with pytest.raises(Unavailable, match="left"):
        bytes_of(snapshot_pieces(side.reader, side.log, SnapshotJob(side.place, "t", 1), lambda: True))
    job = LogJob(side.place, "t", 0, upto, None, Selection(where="1"))
    with pytest.raises(Unavailable, match="left"):
        bytes_of(log_pieces(side.reader, side.log, side.cache, job, lambda: True))


def test_caller_with_slow_conditions_leaves_worker_slots_to_other_callers() -> None:
    places, order = FairPlaces(AT_ONCE, CALLER_SHARE), list[str]()
    attacker, victim = ("app", "key:attacker"), ("app", "key:victim")
    begun, finish = threading.Semaphore(0), threading.Event()

    def slow() -> None:
        with places.held(attacker):
            begun.release()
            assert finish.wait(PATIENCE)

    threads = [threading.Thread(target=slow) for _ in range(AT_ONCE * 2)]
    for thread in threads:
        thread.start()
    for _ in range(CALLER_SHARE):
        assert begun.acquire(timeout=PATIENCE)
    with places.held(victim):
        order.append("victim")
    assert not begun.acquire(blocking=False), "the attacker has more than its share"
    finish.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["victim"]


def test_job_that_checks_its_reader_lets_waiting_jobs_run_first() -> None:
    places, whose = FairPlaces(1, 1), ("app", "key:one")
    order: list[str] = []

    def second() -> None:
        with places.held(whose):
            order.append("second")

    with places.held(whose):
        thread = threading.Thread(target=second)
        thread.start()
        wait_until(lambda: places.has_waiting)
        places.yield_turn(whose)
        order.append("first again")
    thread.join(PATIENCE)
    assert order == ["second", "first again"]


@pytest.mark.parametrize("kind", ["snapshot", "log"])
def test_condition_checks_few_rows_between_two_checks_of_the_reader(
    side: Side, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_changes, "JUDGED", 10)
    side.one.run(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200) INSERT INTO t SELECT i, i FROM n"
    )
    upto, asked = side.durable(), list[str]()
    holds = SqliteCondition.holds

    def judge(self: SqliteCondition, rows: Any) -> list[bool]:
        asked.append(f"rows {len(rows)}")
        return holds(self, rows)

    def left() -> bool:
        asked.append("left")
        return False

    monkeypatch.setattr(SqliteCondition, "holds", judge)
    if kind == "snapshot":
        job = SnapshotJob(side.place, "t", upto, Selection(where="1"))
        bytes_of(snapshot_pieces(side.reader, side.log, job, left))
    else:
        changes = LogJob(side.place, "t", 0, upto, None, Selection(where="1"))
        bytes_of(log_pieces(side.reader, side.log, side.cache, changes, left))
    judged = [place for place, what in enumerate(asked) if what.startswith("rows")]
    assert len(judged) >= 20 and all(asked[place] == "rows 10" for place in judged[:-1])
    assert all("left" in asked[one:other] for one, other in itertools.pairwise(judged))


def test_condition_of_restricted_caller_calls_no_function_of_users(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.one.run("INSERT INTO t VALUES (1, 1)")
    upto, shape = side.durable(), side.reader.shape("t").version
    condition = SqliteReader.condition

    def calling(self: SqliteReader, table: Table, where: str) -> SqliteCondition:
        found = condition(self, table, where)
        found.calls = ("peek",)
        return found

    monkeypatch.setattr(SqliteReader, "condition", calling)
    assert side.snapshot(upto, where="1") and side.changes(0, upto, where="1")
    for is_dropped in (False, True):
        with pytest.raises(Forbidden, match="needs a credential for the whole database"):
            side.changes(0, upto, shape, where="1", is_restricted=True)
        assert side.changes(0, upto, shape, is_restricted=True)
        if not is_dropped:
            with pytest.raises(Forbidden, match="needs a credential for the whole database"):
                side.snapshot(upto, where="1", is_restricted=True)
            side.one.run("DROP TABLE t")


def test_conditions_of_two_jobs_share_no_engine(side: Side) -> None:
    table = side.reader.shape("t")
    one, other = (side.reader.condition(table, "abs(v) > 1") for _ in range(2))
    assert one._engine is not other._engine
