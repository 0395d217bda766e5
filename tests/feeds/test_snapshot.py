"""Snapshots: rows and later changes equal the table under concurrent writes, disconnects and restarts."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.capture.captured_database import Running, running
from tests.feeds.feed_database import (
    ITEMS,
    NAMES,
    WIDER,
    Fed,
    ReceivedFrame,
    Writer,
    frames_of,
    in_loop,
    insert,
    line,
    name,
    words,
)

from headwater.config import FeedsConfig
from headwater.database import Database
from headwater.errors import InvalidRequest
from headwater.feeds import snapshot as snapshot_module
from headwater.feeds.deliver import stream as stream_module
from headwater.feeds.deliver.stream import Stream
from headwater.feeds.deliver.stream_request import ReaderPosition, Transport
from headwater.feeds.feeds import Feeds
from headwater.feeds.groups.log_reader import View
from headwater.feeds.options import Options
from headwater.feeds.snapshot import Lease, Position, SnapshotPage, SnapshotReader, newer_than_snapshot
from headwater.feeds.subscription import SnapshotState
from headwater.feeds.subscriptions.registry import Registry
from headwater.feeds.subscriptions.subscribe_table import SubscribeTable
from headwater.log.log import Retention
from headwater.model.change import Change, Op, Transaction
from headwater.model.principal import Principal
from headwater.model.table import Column, Row, Table

pytestmark = pytest.mark.slow

LEASE = Lease("it", 1000.0, 1 << 40)
BIG = 1 << 40


class Seen(NamedTuple):
    """The arguments of an encoder call."""

    table: Table
    op: Op
    before: Row | None
    after: Row | None
    offset: int


class Remembering:
    """An encoder whose bytes have a chosen length and identify the encoded change."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []

    def _kept(self, seen: Seen) -> bytes:
        self._seen.append(seen)
        return b"%09d" % (len(self._seen) - 1)

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        before = None if op is Op.INSERT else change.before
        return self._kept(Seen(change.table, op, before, None if op is Op.DELETE else change.after, offset))

    def row(self, table: Table, row: Row, offset: int, read_ms: int) -> bytes:
        return self._kept(Seen(table, Op.INSERT, None, row, offset))

    def meant(self, data: bytes) -> Seen:
        return self._seen[int(data)]


class Client:
    """A client with its received rows and its position; with `strict` no row or change may arrive twice."""

    def __init__(self, database: Database, tables: tuple[str, ...], *, strict: bool = False, **options: Any) -> None:
        self.database, self.strict = database, strict
        self.encoder = Remembering()
        asked = Options(db="main", tables=tables, before=True, after=True, **options)
        self.view = View(asked, database.source, self.encoder)
        self.stored = SnapshotState(tables=tables)  # as the registry holds it
        self.held: dict[tuple[str, bytes], list[Row]] = {}
        self.place = ""
        self.restarts: list[str] = []
        self.done: SnapshotPage | None = None
        self.reader = self.connect()

    def connect(self) -> SnapshotReader:
        """Connect again at the cursor of the last received row."""

        def save(new: SnapshotState) -> None:
            self.stored = new

        self.reader = SnapshotReader(self.database, self.view, self.stored, LEASE, save=save, cursor=self.place)
        return self.reader

    def take(self, page: SnapshotPage, count: int | None = None) -> None:
        """Receive the first `count` rows of a page; the others are lost on the way."""
        if page.restarted:
            self.restarts.append(page.reason)
            self.held = {}
            self.place = page.began
        taken = page.rows if count is None else page.rows[:count]
        for cursor, data in taken:
            self.place = cursor
            self._put(self.encoder.meant(data), row=True)
        if len(taken) == len(page.rows):
            self.place = page.cursor
            self.done = page if page.done else None

    def follow(self, limit: int = 10) -> None:
        """Receive all changes up to the head, as a stream reads them."""
        assert self.done is not None
        log, at = self.database.log, self.done.offset
        newer, edge = newer_than_snapshot(self.stored, self.database.source), self.stored.highest
        while at < log.latest:
            page = self.view.page(log, after=at, limit=limit, most=BIG, newer=newer if at < edge else None)
            for delivery in page.deliveries:
                self._put(self.encoder.meant(delivery.data), row=False)
            at = page.upto
        self.done = self.done._replace(offset=at)

    def _put(self, seen: Seen, *, row: bool) -> None:
        if seen.op is Op.TRUNCATE:
            self.held = {key: rows for key, rows in self.held.items() if key[0] != seen.table.name}
        if seen.before is not None:
            rows = self.held.setdefault(self._key(seen.table, seen.before), [])
            if seen.before in rows:
                rows.remove(seen.before)
            else:
                assert not self.strict, f"{seen} changes what is not there"
                rows.clear()
        if seen.after is not None:
            rows = self.held.setdefault(self._key(seen.table, seen.after), [])
            if not self._may_repeat_key(seen):
                assert not (self.strict and rows), f"{seen} was received already"
                rows.clear()
            rows.append(seen.after)

    def _may_repeat_key(self, seen: Seen) -> bool:
        return seen.after is not None and None in seen.table.key_of(seen.after)

    def _key(self, table: Table, row: Row) -> tuple[str, bytes]:
        return table.name, self.database.source.order(table, table.key)(table.key_of(row))

    def rows(self) -> list[tuple[str, Row]]:
        return sorted(((table, row) for (table, _), rows in self.held.items() for row in rows), key=repr)

    def oracle(self) -> list[tuple[str, Row]]:
        """Return the rows that the client must have: the current tables."""
        source = self.database.source
        found = []
        for table in self.stored.tables:
            if table in source.describe():
                chunk = source.chunk(table, after=None, span=None, limit=10**6)
                found += [(table, row) for row in self.view.filter.rows(chunk.table, chunk.rows)]
        return sorted(found, key=repr)


def finish(client: Client, between: Callable[[], object] = lambda: None, limit: int = 5) -> None:
    """Receive all rows, then all changes."""
    for _ in range(10_000):
        if client.done is not None:
            break
        client.take(client.reader.page(limit, BIG))
        between()
    between()
    client.follow()
    assert client.rows() == client.oracle()


SOME: tuple[dict[str, Any], ...] = ({}, {"where": "size > 2"}, {"columns": ("size",)}, {"ops": ("insert", "update")})


# --- schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", range(10))
def test_rows_and_changes_equal_the_table_without_repeats(group: int) -> None:
    """Without a reconnect, every change fits the rows that the client holds at that moment."""
    for seed in range(group * 20, group * 20 + 20):
        chance = random.Random(seed)
        fed = Fed(keep_changes=16)
        writer = Writer(fed, seed, keys=chance.choice([6, 40]))
        writer.write(chance.randrange(40))
        given = chance.choice([{}, {"where": "size > 2"}])
        tables = ("items", "names") if not given or chance.random() < 0.5 else ("items",)
        client = Client(fed, tables, strict=True, **given)
        limits = [1, 2, 7, 100]
        while client.done is None:
            client.take(client.reader.page(chance.choice(limits), chance.choice([1, 50, BIG])))
            writer.write(chance.randrange(4), capture=chance.random() < 0.5)
        fed.capture()
        client.follow(chance.choice(limits))
        writer.write(3)
        client.follow(chance.choice(limits))
        assert client.rows() == client.oracle(), seed
        assert not client.restarts


@pytest.mark.parametrize("group", range(10))
def test_rows_and_changes_equal_the_table_after_reconnects_and_restarts(group: int) -> None:
    for seed in range(group * 25, group * 25 + 25):
        chance = random.Random(seed)
        fed = Fed(keep_changes=16)
        writer = Writer(fed, seed, keys=chance.choice([6, 40]))
        writer.write(chance.randrange(40))
        given = chance.choice([{}, {"where": "size > 2"}, {"where": "size = 5"}])
        client = Client(fed, ("items", "names"), **given)
        while client.done is None:
            page = client.reader.page(chance.choice([1, 2, 7, 100]), chance.choice([1, 50, BIG]))
            lost = chance.random() < 0.4
            client.take(page, chance.randrange(len(page.rows) + 1) if lost else None)
            writer.write(chance.randrange(4), capture=chance.random() < 0.5)
            if lost or chance.random() < 0.2:
                client.done = None if lost else client.done
                client.connect()
            match chance.randrange(60) if client.done is None else 60:
                case 0:
                    fed.log.release(LEASE.name)
                case 1:
                    fed.new_generation()
        assert client.done is not None
        fed.capture()
        client.follow(chance.choice([1, 7, 100]))
        assert client.rows() == client.oracle(), seed


def test_truncate_between_two_reads_restarts_the_snapshot() -> None:
    """Rows read before the truncate are deleted, rows read after it are not, and no change distinguishes them."""
    for pages in range(4):
        fed = Fed()
        fed.commit(*(insert(id) for id in range(0, 20, 2)))
        client = Client(fed, ("items", "names"))
        for _ in range(pages):
            client.take(client.reader.page(5, BIG))
        fed.source.commit(Change(Op.TRUNCATE, ITEMS), *(insert(id) for id in (3, 15, 17)))
        fed.source.commit(insert(19))
        finish(client, fed.capture)
        assert client.restarts == (["truncated"] if pages == 1 else []), pages


def test_old_cursor_repeats_rows_and_delivers_every_later_delete() -> None:
    fed = Fed()
    fed.commit(*(insert(id) for id in range(20)))
    client = Client(fed, ("items",))
    places = []
    for _ in range(4):
        client.take(client.reader.page(4, BIG))
        places.append(client.place)
    for place in reversed(places[:3]):
        fed.commit(*(Change(Op.DELETE, ITEMS, (id, 0, ""), None) for id in first_ids(fed, 2)))
        client.place = place
        client.connect()
        client.take(client.reader.page(3, BIG))
    finish(client)


def first_ids(fed: Fed, count: int) -> list[Any]:
    return [row[0] for row in fed.source.chunk("items", after=None, span=None, limit=count).rows]


# --- SQLite: keys with NULL, case-insensitive keys, tables without a key -----------------------------------------

SQLITE = {
    "integer": "CREATE TABLE t(k INTEGER PRIMARY KEY, v)",
    "without case": "CREATE TABLE t(k TEXT COLLATE NOCASE PRIMARY KEY, v) WITHOUT ROWID",
    "composite": "CREATE TABLE t(a TEXT, k, v, PRIMARY KEY (a, k)) WITHOUT ROWID",
    "nulls in the key": "CREATE TABLE t(a TEXT, k, v, PRIMARY KEY (a, k))",
    "no key": "CREATE TABLE t(k, v)",
}


def statements(chance: random.Random, kind: str) -> str:
    number = chance.randrange(9)
    key = f"'{chance.choice('aBcDeF')}'" if kind == "without case" else str(number)
    if kind in ("nulls in the key", "no key") and chance.random() < 0.4:
        key = "NULL"
    wide = kind in ("composite", "nulls in the key")
    first = chance.choice(["'x'", "'y'", *(["NULL"] if kind == "nulls in the key" else [])])
    row = f"({first}, {key}, {chance.randrange(5)})" if wide else f"({key}, {chance.randrange(5)})"
    where = f"k IS {key}" + (f" AND a IS {first}" if wide else "")
    return chance.choice(
        [
            f"INSERT OR REPLACE INTO t VALUES {row}",
            f"INSERT OR REPLACE INTO t VALUES {row}",
            f"UPDATE t SET v = {chance.randrange(5)} WHERE {where}",
            f"DELETE FROM t WHERE {where}",
        ]
    )


@pytest.mark.parametrize("kind", SQLITE)
def test_any_key_of_sqlite_is_read_without_gap_or_repeat(kind: str, tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run(SQLITE[kind])
        for seed in range(6):
            chance = random.Random(seed)

            def write_some(chance: random.Random = chance) -> None:
                for _ in range(chance.randrange(3)):
                    one.run(statements(chance, kind))
                one.caught_up()

            for _ in range(15):
                write_some()
            client = Client(Captured(one), ("t",), strict=True)
            finish(client, write_some, limit=chance.randint(1, 4))
            one.log.release(LEASE.name)


class Captured:
    """A captured SQLite file as feeds see it."""

    def __init__(self, one: Running) -> None:
        self.source, self.log, self.retention = one.source, one.log, Retention()
        self.catch_up = one.capture.catch_up


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_rows_with_a_shared_null_key_are_all_sent_after_a_disconnect_among_them(limit: int, tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run(SQLITE["nulls in the key"])
        one.run("INSERT INTO t VALUES (NULL, 1, 1), (NULL, 1, 2), (NULL, 1, 3), ('x', NULL, 4), ('x', NULL, 5)")
        one.caught_up()
        for cut in range(1, 5):
            client = Client(Captured(one), ("t",))
            got: set[Any] = set()
            left = cut
            while client.done is None:
                page = client.reader.page(limit, BIG)
                count = min(left, len(page.rows))
                got |= {client.encoder.meant(data).after[2] for _, data in page.rows[:count]}  # type: ignore[index]
                client.take(page, None if count == len(page.rows) else count)
                left -= count
                if left <= 0:
                    left = 10**6
                    client.done = None
                    client.connect()
            assert got == {1, 2, 3, 4, 5}, (cut, limit)
            one.log.release(LEASE.name)


# --- a snapshot that must restart --------------------------------------------------------------------------------


def begun(fed: Fed, rows: int = 20, **options: Any) -> Client:
    fed.commit(*(insert(id) for id in range(rows)), *(name(f"n{id}") for id in range(5)))
    client = Client(fed, ("items", "names"), **options)
    client.take(client.reader.page(4, BIG))
    return client


@pytest.mark.parametrize("reconnect", [False, True])
def test_lost_lease_restarts_the_snapshot_with_a_reason(reconnect: bool) -> None:
    fed = Fed()
    client = begun(fed)
    fed.log.release(LEASE.name)
    if reconnect:
        client.connect()
    page = client.reader.page(4, BIG)
    assert (page.restarted, page.reason) == (True, "snapshot_expired")
    assert [client.encoder.meant(data).after for _, data in page.rows] == [(id, 0, "") for id in range(4)]
    client.take(page)
    assert not client.reader.page(4, BIG).restarted, "the restart is reported once"
    assert fed.log.held(LEASE.name)


@pytest.mark.parametrize("reconnect", [False, True])
def test_new_generation_restarts_the_snapshot_with_a_reason(reconnect: bool) -> None:
    fed = Fed()
    client = begun(fed)
    fed.new_generation()
    fed.commit(insert(100))
    if reconnect:
        client.connect()
    client.take(client.reader.page(4, BIG))
    assert client.restarts == ["log_generation_changed"]
    finish(client)


KEYED = Table("items", (ITEMS.columns[0], Column("size", "i64"), Column("note", "str")), ("note", "id"), 2)


@pytest.mark.parametrize("reconnect", [False, True])
def test_changed_key_restarts_the_snapshot_with_a_reason(reconnect: bool) -> None:
    """Polls create a new reader for every page."""
    fed = Fed()
    client = begun(fed)
    fed.commit(*(Change(Op.DELETE, ITEMS, (id, 0, ""), None) for id in range(20)))
    fed.commit(Change(Op.SCHEMA_CHANGE, KEYED))
    fed.commit(*(Change(Op.INSERT, KEYED, None, (id, 0, f"note {id % 3}")) for id in range(20)))
    if reconnect:
        client.connect()
    client.take(client.reader.page(4, BIG))
    assert client.restarts == ["schema_changed"]
    finish(client)


@pytest.mark.parametrize("key", ["k INTEGER, v, PRIMARY KEY (v, k)", "k INTEGER, v TEXT PRIMARY KEY"])
def test_sqlite_table_recreated_with_another_key_restarts_the_snapshot(key: str, tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v TEXT)")
        one.run("INSERT INTO t VALUES (1, 'd'), (2, 'c'), (3, 'b'), (4, 'a')")
        one.caught_up()
        client = Client(Captured(one), ("t",))
        client.take(client.reader.page(2, BIG))
        one.run("DROP TABLE t")
        one.run(f"CREATE TABLE t({key}) WITHOUT ROWID")
        one.run("INSERT INTO t(k, v) VALUES (1, 'd'), (2, 'c'), (3, 'b'), (4, 'a')")
        one.caught_up()
        client.connect()
        client.take(client.reader.page(2, BIG))
        assert client.restarts == ["schema_changed"]
        finish(client)


def test_added_column_does_not_restart_the_snapshot() -> None:
    fed = Fed()
    client = begun(fed)
    fed.commit(Change(Op.SCHEMA_CHANGE, WIDER))
    while client.done is None:
        client.take(client.reader.page(4, BIG))
    assert not client.restarts


def test_snapshot_without_stored_state_restarts_with_the_reason_given_to_its_reader() -> None:
    """A stream without a subscription has no stored state, so a reconnect inside the snapshot restarts it."""
    fed = Fed()
    fed.commit(insert(1))
    view = View(Options(db="main", after=True), fed.source)
    state = SnapshotState(tables=("items",))
    reader = SnapshotReader(fed, view, state, LEASE, save=lambda new: None, reason="snapshot_expired")
    page = reader.page(10, BIG)
    assert (page.restarted, page.reason) == (True, "snapshot_expired")
    assert not reader.page(10, BIG).restarted


def test_cursor_of_an_earlier_snapshot_restarts_the_snapshot_with_a_reason() -> None:
    fed = Fed()
    client = begun(fed)
    old = client.place
    fed.log.release(LEASE.name)
    client.take(client.reader.page(4, BIG))
    client.take(client.reader.page(4, BIG))
    assert len(client.restarts) == 1
    client.place = old
    client.connect()
    client.take(client.reader.page(4, BIG))
    assert client.restarts == ["snapshot_expired", "snapshot_expired"]
    finish(client)


def test_table_dropped_during_the_snapshot_has_no_rows() -> None:
    fed = Fed()
    client = begun(fed)
    del fed.source._tables["items"]
    while client.done is None:
        client.take(client.reader.page(4, BIG))
    assert {seen for seen, _ in client.held} == {"items", "names"}
    assert sum(key == "names" for key, _ in client.held) == 5
    assert client.stored.done and [stretch.table for stretch in client.stored.chunks][-1] == "names"


# --- cursors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "x", "!!", "AAAA", "kwEA", "k" * 5000, "é", "kwECxAA", "s:kwEAwA"])
def test_malformed_cursor_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Position.parse(text)


@pytest.mark.parametrize("key", [None, (1,), ("a", None), (b"\0", 1.5), ("\udcff",)])
def test_cursor_survives_a_round_trip(key: Any) -> None:
    assert Position.parse(Position(3, 2, key).text()) == Position(3, 2, key)


@pytest.mark.parametrize(
    "ahead", [Position(1, 0, (15,)), Position(1, 1, None), Position(1, 1, ("n3",)), Position(1, 2, None)]
)
def test_cursor_that_was_never_sent_skips_no_row(ahead: Position) -> None:
    """Rows before that cursor were never read: they have no offset and must not be skipped."""
    fed = Fed()
    client = begun(fed)
    client.place = ahead.text()
    client.connect()
    finish(client)


@pytest.mark.parametrize("key", [(), (1, 2), ("x",), (b"",), (None,), (1.5,), ("\udcff",)])
def test_cursor_with_an_invalid_key_is_rejected_or_only_repeats_rows(key: Any, tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        one.run("INSERT INTO t VALUES (1, 1), (2, 2), (3, 3), (4, 4)")
        one.caught_up()
        client = Client(Captured(one), ("t",))
        client.take(client.reader.page(2, BIG))
        client.place = Position(1, 0, key).text()
        client.connect()
        try:
            page = client.reader.page(2, BIG)
        except InvalidRequest:
            return
        client.take(page)
        finish(client)


def test_complete_snapshot_can_be_read_again_from_any_cursor() -> None:
    fed = Fed()
    client = begun(fed)
    cursors = [client.place]
    while client.done is None:
        page = client.reader.page(4, BIG)
        cursors += [cursor for cursor, _ in page.rows]
        client.take(page)
    chunks = client.stored.chunks
    fed.commit(insert(50), Change(Op.DELETE, ITEMS, (10, 0, ""), None))
    for place in cursors:
        client.place, client.done = place, None
        client.connect()
        while client.done is None:
            client.take(client.reader.page(3, BIG))
        assert client.stored.chunks == chunks and not client.restarts
    client.follow()
    assert client.rows() == client.oracle()


# --- pages -------------------------------------------------------------------------------------------------------


def test_page_has_at_most_limit_rows() -> None:
    fed = Fed()
    client = begun(fed, rows=50)
    for limit in (1, 3, 10):
        assert len(client.reader.page(limit, BIG).rows) == limit


def test_repeated_page_uses_the_new_limit() -> None:
    fed = Fed()
    fed.commit(*(insert(id) for id in range(7)))
    client = Client(fed, ("items",))
    assert len(client.reader.page(2, BIG).rows) == 2
    fed.commit(insert(30), Change(Op.DELETE, ITEMS, (0, 0, ""), None))
    client.connect()  # no row of that page was acknowledged
    page = client.reader.page(200, BIG)
    assert len(page.rows) == 7 and page.done
    client.take(page)
    finish(client)


def test_pages_of_large_rows_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "FIRST_ROWS", 2)
    fed = Fed()
    fed.commit(*(insert(id) for id in range(50)))
    client = Client(fed, ("items",))
    assert [len(client.reader.page(1000, 45).rows) for _ in range(4)] == [2, 5, 5, 5]


def test_filter_that_passes_no_row_reaches_the_end() -> None:
    fed = Fed()
    fed.commit(*(insert(id) for id in range(1000)))
    client = Client(fed, ("items",), where="size = 9")
    page = client.reader.page(10, BIG)
    assert page.done and page.rows == [] and page.offset == 1000


def test_page_without_rows_returns_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "PAGE_SECONDS", 0.0)
    fed = Fed()
    fed.commit(*(insert(id) for id in range(20)))
    client = Client(fed, ("items",), where="size = 9")
    pages = [client.reader.page(4, BIG) for _ in range(3)]
    assert all(not page.done and not page.rows for page in pages)


def test_stretch_is_saved_and_leased_before_its_rows_are_sent() -> None:
    fed = Fed(retention=10)
    writer = Writer(fed, 1, keys=30)
    writer.write(30)
    client = Client(fed, ("items", "names"))
    offsets = []
    while client.done is None:
        page = client.reader.page(2, BIG)
        for _, data in page.rows:
            seen = client.encoder.meant(data)
            assert any(stretch.offset == seen.offset for stretch in client.stored.chunks)
            offsets.append(seen.offset)
        assert fed.log.horizon <= client.stored.lowest + 1
        client.take(page)
        writer.write(2)
    assert (min(offsets), max(offsets)) >= (client.stored.lowest, 0) and max(offsets) <= client.stored.highest
    client.follow()
    assert client.rows() == client.oracle() and not client.restarts


def test_adjacent_stretches_of_one_offset_are_merged() -> None:
    fed = Fed()
    fed.commit(*(insert(id) for id in range(100)), *(name(f"n{id:03d}") for id in range(100)))
    client = Client(fed, ("items", "names"))
    finish(client, limit=3)
    assert [(stretch.table, stretch.end, stretch.offset) for stretch in client.stored.chunks] == [
        ("items", b"", 200),
        ("names", b"", 200),
    ]


def test_case_insensitive_keys_are_one_key() -> None:
    fed = Fed()
    fed.commit(name("Ann"), name("bob"), name("Cid"))
    client = Client(fed, ("names",), strict=True)
    client.take(client.reader.page(1, BIG))
    fed.commit(Change(Op.UPDATE, NAMES, ("Ann", 0), ("aNN", 1)))
    client.take(client.reader.page(1, BIG))
    fed.commit(Change(Op.UPDATE, NAMES, ("bob", 0), ("BOB", 1)))
    finish(client, limit=1)


# --- more than one reader of one subscription ---------------------------------------------------------------------


class Databases:
    def __init__(self, fed: Fed) -> None:
        self._fed = fed

    def database(self, name: str) -> Fed:
        return self._fed

    def names(self) -> list[str]:
        return ["main"]


WHO = Principal("ann", "owner")


@asynccontextmanager
async def feeds_of(fed: Fed, folder: Path) -> AsyncIterator[tuple[Feeds, str]]:
    """Feeds with one subscription that starts with a snapshot of `items`."""
    registry = Registry.open(folder / "subscriptions.db")
    feeds = Feeds(Databases(fed), registry, FeedsConfig(), max_streams=100)
    try:
        yield feeds, feeds.subscriptions.subscribe(WHO, SubscribeTable(table="items", start="snapshot"))["sub_id"]
    finally:
        await feeds.close()
        registry.close()


async def rows_until(stream: Stream, word: str, most: int = 1000) -> list[ReceivedFrame]:
    found: list[ReceivedFrame] = []
    while word not in words(found) and len(found) < most:
        found += frames_of(await stream.next() or b"")
    return found


@pytest.fixture
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "PAGE", 4)


@pytest.mark.usefixtures("short_pages")
def test_stalled_connection_cannot_undo_the_progress_of_another(tmp_path: Path) -> None:
    """Rows that it read later and never delivered would count as received, and a delete in between would be lost."""

    async def work() -> None:
        fed = Fed()
        fed.commit(*(insert(id) for id in range(12)))
        async with feeds_of(fed, tmp_path) as (feeds, id):
            opening = Transport("sse", line)
            hanging = await feeds.open(WHO, id, opening, ReaderPosition())
            first = await rows_until(hanging, "", 4)
            second = await feeds.open(WHO, id, opening, ReaderPosition(last_id=first[-1].id))
            first += await rows_until(second, "", 4)
            fed.commit(Change(Op.DELETE, ITEMS, (5, 0, ""), None))
            await hanging.next()
            feeds.close_stream(hanging)
            feeds.close_stream(second)
            third = await feeds.open(WHO, id, opening, ReaderPosition(last_id=first[-1].id))
            found = first + await rows_until(third, "caught_up")
            feeds.close_stream(third)
            held: set[int] = set()
            for frame in found:
                if frame.word == "snapshot_restart":
                    held.clear()
                elif frame.word in ("insert", "delete"):
                    key = frame.json["pk"][0]["v"]
                    held.add(key) if frame.word == "insert" else held.discard(key)
            assert held == {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11}

    in_loop(work)


@pytest.mark.usefixtures("short_pages")
def test_acknowledged_cursor_is_kept_while_rows_continue(tmp_path: Path) -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(*(insert(id) for id in range(12)))
        async with feeds_of(fed, tmp_path) as (feeds, id):
            stream = await feeds.open(WHO, id, Transport("sse", line), ReaderPosition())
            first = await rows_until(stream, "", 4)
            feeds.subscriptions.ack(WHO, id, None, first[1].id[2:])
            await rows_until(stream, "", 4)
            feeds.close_stream(stream)
            again = await feeds.open(WHO, id, Transport("sse", line), ReaderPosition())
            found = await rows_until(again, "snapshot_end")
            feeds.close_stream(again)
            assert [frame.json["pk"][0]["v"] for frame in found[:-1]] == list(range(2, 12))

    in_loop(work)


@pytest.mark.usefixtures("short_pages")
def test_seek_is_not_undone_by_a_running_snapshot(tmp_path: Path) -> None:
    async def work() -> None:
        fed = Fed()
        fed.commit(*(insert(id) for id in range(12)))
        async with feeds_of(fed, tmp_path) as (feeds, id):
            stream = await feeds.open(WHO, id, Transport("sse", line), ReaderPosition())
            await rows_until(stream, "", 4)
            fed.commit(insert(50))
            feeds.subscriptions.seek(WHO, id, 13, None)
            while await stream.next() is not None and stream.cursor < 13:
                pass
            feeds.close_stream(stream)
            (found,) = feeds.subscriptions.list(WHO, "main")["subscriptions"]
            assert found["acked_offset"] == 13 and "snapshot" not in found

    in_loop(work)


def test_undelivered_snapshot_rows_read_at_a_newer_offset_raise_the_caught_up_offset() -> None:
    fed = Fed()
    fed.commit(*(insert(id) for id in range(4)))
    client = Client(fed, ("items",))
    assert client.reader.page(200, BIG).done  # the client received none of these rows
    before = client.stored.highest
    fed.commit(insert(30))
    client.connect()
    page = client.reader.page(200, BIG)
    assert len(page.rows) == 5 and client.stored.highest == fed.log.latest > before, (
        "the client has caught up only after this offset"
    )
    client.take(page)
    finish(client)
