"""The log file: other readers, damage, faults of the disk, huge transactions, merging and sudden death."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace
from tests.log.faults import FaultyVFS
from tests.log.samples import ITEMS, ORDERS, fill, flat, ids, mixed, transaction, transactions

from headwater.errors import InvalidRequest, LogDamaged, NotFound, OffsetExpired, StorageFull, Unavailable
from headwater.log.disk import block_reader, store
from headwater.log.disk.block_codec import MAX_RAW
from headwater.log.disk.disk_log import DiskLog
from headwater.log.log import Retention
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Table

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
def log(path: Path) -> Iterator[DiskLog]:
    made = DiskLog.open(path)
    yield made
    made.close()


def test_earlier_schema_version_is_read_from_the_log(log: DiskLog, path: Path) -> None:
    fill(log, [1])
    wider = replace(ORDERS, columns=(*ORDERS.columns, Column("more", "str")), version=ORDERS.version + 1)
    log.append([Transaction("t2", (Change(Op.SCHEMA_CHANGE, wider, ddl=""),), first=2, ts=2)])
    with contextlib.closing(DiskLog.open(path, read_only=True)) as other:
        for each in (log, other):
            assert each.shape(ORDERS.name, ORDERS.version) == ORDERS
            assert each.shape(ORDERS.name, wider.version) == wider
            assert each.shape(ORDERS.name, 99) is None and each.shape("none", 1) is None


def test_log_of_format_one_is_upgraded_and_bounds_tables_by_its_horizon(path: Path) -> None:
    with contextlib.closing(DiskLog.open(path)) as log:
        fill(log, [3, 600])
        log.retain(Retention(changes=100), now_ms=0)
    sql(path, "DROP TABLE evicted")
    sql(path, "PRAGMA user_version = 1")
    with contextlib.closing(DiskLog.open(path)) as log:
        assert (log.horizon, log.last_of("orders"), log.last_of("unknown")) == (504, 603, 503)


def test_last_change_of_a_table_is_known_after_its_block_is_deleted(log: DiskLog) -> None:
    fill(log, [3])
    for part in mixed(4, [["items"], ["orders"] * 600, ["orders"] * 600]):
        log.append([part])
    log.retain(Retention(changes=100), now_ms=0)
    assert log.horizon == 1105
    assert (log.last_of("orders"), log.last_of("items"), log.last_of("unknown")) == (1204, 4, 0)
    assert log.blocks()[0].first > 4, "the block was deleted"
    with contextlib.closing(DiskLog.open(log.path, read_only=True)) as other:
        assert other.last_of("items") == 4


def test_merge_of_unread_blocks_does_not_hide_the_last_change_of_a_table(log: DiskLog) -> None:
    for part in mixed(1, [["items"], ["orders"], ["orders"]]):
        log.append([part])
    assert log.last_of("items") == 1
    for part in mixed(4, [["items"], *[["orders"]] * 600]):
        log.append([part])
    while log.merge():
        pass
    assert (log.last_of("items"), log.last_of("orders")) == (4, 604)


def test_scan_of_one_table_leaves_the_blocks_of_others_compressed(log: DiskLog, monkeypatch: Any) -> None:
    for part in mixed(1, [["orders"] * 5000, ["items"], ["orders"] * 5000]):
        log.append([part])
    decoded: list[int] = []
    decode = block_reader.decode

    def counted(first: int, *rest: Any) -> Any:
        decoded.append(first)
        return decode(first, *rest)

    monkeypatch.setattr(block_reader, "decode", counted)
    found = [change for part in log.scan(after=0, table="items") for change in part.changes]
    assert [change.table.name for change in found].count("items") == 1
    assert len(decoded) == 1


@pytest.fixture
def disk() -> Iterator[FaultyVFS]:
    made = FaultyVFS()
    yield made
    made.unregister()


def sql(path: Path, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement on the log file, to read or to damage it.

    By APSW: two SQLite libraries in one process drop each other's file locks, and the -wal file with them.
    """
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def block_sizes(path: Path) -> list[int]:
    return [count for (count,) in sql(path, "SELECT count FROM block ORDER BY first")]


def in_child(script: str, path: Path) -> str:
    command = [sys.executable, "-c", script, path]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


# Opening


def test_created_flag_is_set_only_for_a_new_log(path: Path) -> None:
    log = DiskLog.open(path)
    assert log.created
    log.close()
    log = DiskLog.open(path)
    assert not log.created
    log.close()


def test_new_log_file_begins_at_the_floor(path: Path) -> None:
    log = DiskLog.open(path, floor=1001)
    assert (log.created, log.horizon, log.latest) == (True, 1001, 1000)
    fill(log, [2])
    log.close()
    log = DiskLog.open(path, floor=1)
    assert (log.created, log.latest, ids(log.read(after=1000))) == (False, 1002, [1001, 1002])
    log.close()


def test_log_file_is_in_wal_mode(log: DiskLog, path: Path) -> None:
    assert sql(path, "PRAGMA journal_mode") == [("wal",)]


def test_every_append_is_synced(path: Path, disk: FaultyVFS) -> None:
    log = DiskLog.open(path, vfs=disk.name)
    before = disk.syncs
    fill(log, [1, 1, 1])
    assert disk.syncs >= before + 3
    log.close()


def test_foreign_sqlite_file_is_refused_and_kept_unchanged(path: Path) -> None:
    sql(path, "CREATE TABLE users (id)")
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(LogDamaged, match="does not hold a Headwater log") as caught:
            DiskLog.open(path, read_only=read_only)
        assert str(path) in caught.value.message and "move this one aside" in caught.value.hint
    assert path.read_bytes() == before


def test_text_file_as_a_log_is_refused(path: Path) -> None:
    path.write_text("these are my notes, and no database at all\n" * 100)
    with pytest.raises(LogDamaged, match="log.db") as caught:
        DiskLog.open(path)
    assert "new generation" in caught.value.hint
    assert path.read_text().startswith("these are my notes")


def test_log_file_of_a_newer_format_is_refused(path: Path) -> None:
    DiskLog.open(path).close()
    sql(path, f"PRAGMA user_version = {len(store.FORMAT.migrations) + 1}")
    with pytest.raises(LogDamaged, match="format 3") as caught:
        DiskLog.open(path)
    assert "newer" in caught.value.hint


@pytest.mark.parametrize(
    "harm", ["DROP TABLE meta", "DROP TABLE block", "DELETE FROM meta", "UPDATE block SET ends = 0"]
)
def test_log_file_with_missing_pieces_is_refused(path: Path, harm: str) -> None:
    log = DiskLog.open(path)
    fill(log, [3])
    log.close()
    sql(path, harm)
    with pytest.raises(LogDamaged, match="log.db"):
        DiskLog.open(path)


def test_damaged_newest_block_is_refused_at_open_and_an_older_block_at_read(path: Path) -> None:
    log = DiskLog.open(path)
    fill(log, [3, 3])
    log.close()
    sql(path, "UPDATE block SET data = zeroblob(length(data)) WHERE first = 1")
    log = DiskLog.open(path)
    with pytest.raises(LogDamaged, match=r"log\.db.*offset 1 "):
        log.read(after=0)
    assert ids(log.read(after=3)) == [4, 5, 6]
    log.close()
    sql(path, "UPDATE block SET data = zeroblob(length(data)) WHERE first = 4")
    with pytest.raises(LogDamaged, match="checksum"):
        DiskLog.open(path)


def test_missing_block_raises_log_damaged(log: DiskLog, path: Path) -> None:
    fill(log, [3, 3, 3])
    sql(path, "DELETE FROM block WHERE first = 4")
    with pytest.raises(LogDamaged, match="offset 4 is missing"):
        list(log.scan(after=0))


def test_file_in_a_missing_folder_is_refused_with_the_folder_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="nowhere") as caught:
        DiskLog.open(tmp_path / "nowhere" / "log.db")
    assert "folder" in caught.value.hint


def test_closed_log_raises_unavailable(path: Path) -> None:
    log = DiskLog.open(path)
    fill(log, [1])
    log.close()
    log.close()
    for use in (lambda: log.read(after=0), lambda: log.append([transaction(2)]), lambda: log.note("a")):
        with pytest.raises(Unavailable):
            use()


# Schemas


def test_table_schema_is_stored_once_and_read_as_a_single_object(log: DiskLog, path: Path) -> None:
    fill(log, [600, 1, 1])
    tables = {id(change.table) for part in log.scan(after=0) for change in part.changes}
    assert len(tables) == 1
    assert sql(path, "SELECT name, version FROM schema") == [("orders", 1)]


def test_each_schema_version_of_a_table_is_read_back_unchanged(path: Path) -> None:
    wider = Table("orders", (*ORDERS.columns, Column("paid", "bool")), ("id",), version=2)
    log = DiskLog.open(path)
    changes = (Change(Op.INSERT, ORDERS, None, (1, "a")), Change(Op.INSERT, wider, None, (2, "b", True)))
    log.append([Transaction("t", changes, 1)])
    log.close()
    log = DiskLog.open(path)
    log.append([Transaction("u", (Change(Op.DELETE, wider, (2, "b", True)),), 3)])
    found = [change.table for part in log.scan(after=0) for change in part.changes]
    assert found == [ORDERS, wider, wider]
    log.close()


def test_append_after_a_rolled_back_append_stores_its_schema(log: DiskLog) -> None:
    with pytest.raises(InvalidRequest):
        log.append([transaction(1), transaction(5)])
    fill(log, [2])
    assert ids(log.read(after=0)) == [1, 2]


# Other readers


def test_read_only_log_follows_the_writer(log: DiskLog, path: Path) -> None:
    reader = DiskLog.open(path, read_only=True)
    assert (reader.latest, reader.read(after=0)) == (0, [])
    fill(log, [3, 600])
    log.set_notes(nonce="5")
    assert (reader.latest, reader.position, reader.note("nonce")) == (603, "p603", "5")
    assert flat(reader.scan(after=0)) == flat(log.scan(after=0))
    log.retain(Retention(changes=100), now_ms=0)
    assert reader.horizon == log.horizon == 504
    with pytest.raises(OffsetExpired):
        reader.read(after=0)
    log.restart(first=700, reason="lost")
    assert (reader.generation, reader.generation_reason, reader.latest) == (log.generation, "lost", 699)
    reader.close()


def test_read_only_log_refuses_every_write(log: DiskLog, path: Path) -> None:
    reader = DiskLog.open(path, read_only=True)
    for write in (
        lambda: reader.append([transaction(1)]),
        lambda: reader.set_notes(a="1"),
        lambda: reader.raise_ceiling(9),
        lambda: reader.retain(Retention(), now_ms=0),
        reader.merge,
    ):
        with pytest.raises(InvalidRequest, match="reading only"):
            write()
    reader.close()


def test_read_only_log_without_a_file_raises_not_found(path: Path) -> None:
    with pytest.raises(NotFound, match="log.db"):
        DiskLog.open(path, read_only=True)
    assert not path.exists()


READ_ALL = """
import sys
from headwater.log.disk.disk_log import DiskLog
log = DiskLog.open(sys.argv[1], read_only=True)
print(log.latest, sum(len(part.changes) for part in log.scan(after=0)))
log.close()
"""


def test_second_process_reads_the_log_of_an_open_writer(log: DiskLog, path: Path) -> None:
    fill(log, [5, 700])
    assert in_child(READ_ALL, path).split() == ["705", "705"]
    fill(log, [1])


def test_append_after_a_second_writer_is_refused(log: DiskLog, path: Path) -> None:
    fill(log, [1])
    other = DiskLog.open(path)
    fill(other, [2])
    with pytest.raises(Unavailable, match="another process writes"):
        log.append([transaction(2)])
    assert ids(other.read(after=0)) == [1, 2, 3]
    other.close()


def test_wal_checkpoint_of_another_connection_is_not_taken_for_a_second_writer(log: DiskLog, path: Path) -> None:
    fill(log, [1])
    sql(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    fill(log, [1])
    assert log.latest == 2


def test_write_from_inside_an_append_is_refused(log: DiskLog) -> None:
    def nested() -> Iterator[Transaction]:
        log.raise_ceiling(100)
        yield transaction(1)

    with pytest.raises(InvalidRequest, match="from inside"):
        log.append(nested())
    fill(log, [1])


# Faults of the disk


@pytest.mark.parametrize(("switch", "error"), [("full", StorageFull), ("fail_sync", Unavailable)])
def test_failed_append_leaves_no_changes_and_the_next_append_succeeds(
    path: Path, disk: FaultyVFS, switch: str, error: type[Exception]
) -> None:
    log = DiskLog.open(path, vfs=disk.name)
    fill(log, [3])
    setattr(disk, switch, True)
    for _ in range(3):
        with pytest.raises(error, match=f"the log {path.name}"):  # callers of a server need not know its folders
            log.append(transactions([5, 900], first=4), notes={"nonce": "x"})
        assert (log.latest, ids(log.scan(after=0)), log.note("nonce")) == (3, [1, 2, 3], "")
    for write in (
        lambda: log.set_notes(a="1"),
        lambda: log.raise_ceiling(10**6),
        lambda: log.retain(Retention(changes=1), now_ms=0),
        lambda: log.restart(first=9, reason="no"),
    ):
        with pytest.raises(error):
            write()
    assert (log.horizon, log.clock_ceiling, log.generation_reason) == (1, 1, "created")
    setattr(disk, switch, False)
    log.append(transactions([5, 900], first=4))
    assert ids(log.scan(after=0)) == list(range(1, 909))
    log.close()
    log = DiskLog.open(path)
    assert ids(log.scan(after=0)) == list(range(1, 909))
    log.close()


def test_full_disk_during_a_large_append_leaves_no_changes(path: Path, disk: FaultyVFS) -> None:
    def filling() -> Iterator[Transaction]:
        for part in transactions([400] * 50):
            disk.full = part.first > 8000
            yield part

    log = DiskLog.open(path, vfs=disk.name)
    with pytest.raises(StorageFull):
        log.append(filling())
    disk.full = False
    assert log.latest == 0
    fill(log, [2])
    assert ids(log.scan(after=0)) == [1, 2]
    log.close()


def test_failed_read_is_reported_and_the_next_read_succeeds(path: Path, disk: FaultyVFS) -> None:
    log = DiskLog.open(path, vfs=disk.name)
    fill(log, [500] * 10)
    log.close()
    log = DiskLog.open(path, vfs=disk.name)
    disk.fail_read = True
    with pytest.raises(Unavailable, match=f"the log {path.name}"):
        log.read(after=0)
    disk.fail_read = False
    assert ids(log.read(after=0)) == list(range(1, 513))
    log.close()


# Merging and retention


def test_single_row_commits_are_merged_into_full_blocks(log: DiskLog, path: Path) -> None:
    sent = fill(log, [1] * 1100)
    small = log.bytes
    gone = 0
    while step := log.merge():
        gone += step
    assert block_sizes(path) == [512, 512, *[1] * 76]
    assert gone == 1100 - 78 and log.bytes < small
    assert list(log.scan(after=0)) == sent
    assert log.merge() == 0


def test_merging_continues_at_its_last_position_after_reopening(path: Path) -> None:
    log = DiskLog.open(path)
    fill(log, [512, 3, 510, *[1] * 100])
    assert (log.merge(), log.merge()) == (2, 0)
    assert block_sizes(path)[:4] == [512, 3, 512, 1]
    fill(log, [1] * 500)
    log.close()
    log = DiskLog.open(path)
    while log.merge():
        pass
    assert block_sizes(path)[:4] == [512, 3, 512, 512]
    assert log.bytes == sum(len(block) for (block,) in apsw.Connection(str(path)).execute("SELECT data FROM block"))
    log.close()


def test_merged_blocks_join_the_parts_of_their_transaction(log: DiskLog, path: Path) -> None:
    huge, small = "x" * (MAX_RAW * 49 // 100), "x" * 100_000
    rows = [huge, huge, small, small, small, small, huge, huge]  # cut in halves until each half fits
    big = Transaction("big", tuple(Change(Op.INSERT, ORDERS, None, (n, v)) for n, v in enumerate(rows)), 1)
    log.append([big])
    assert block_sizes(path) == [2, 2, 2, 2]
    assert log.merge() == 1 and block_sizes(path) == [2, 4, 2]
    assert flat(log.scan(after=0)) == flat([big])
    assert [(part.first, part.start, part.last) for part in log.scan(after=0)] == [
        (1, 0, False), (3, 2, False), (7, 6, True),
    ]  # fmt: skip


def test_merging_stores_its_position(path: Path) -> None:
    log = DiskLog.open(path)
    fill(log, [1] * 513)
    assert log.merge() == 511
    log.close()
    assert sql(path, "SELECT value FROM meta WHERE name = 'merged'") == [(512,)]


def test_merging_skips_blocks_below_the_horizon(log: DiskLog, path: Path) -> None:
    fill(log, [1] * 900)
    log.retain(Retention(changes=100), now_ms=0)
    assert log.merge() == 0
    assert len(block_sizes(path)) == 900 - 256


def test_scan_during_merging_and_trimming_returns_every_change(log: DiskLog) -> None:
    fill(log, [1] * 1500)
    scan = log.scan(after=0)
    seen = [next(scan) for _ in range(5)]
    while log.merge():
        pass
    seen += [next(scan) for _ in range(700)]
    log.retain(Retention(changes=900), now_ms=0)
    seen += list(scan)
    assert ids(seen) == list(range(1, 1501))


@pytest.mark.parametrize("table", [None, "orders", "items"])
@pytest.mark.parametrize("kept", [10, 300])
def test_scan_overtaken_by_retention_raises_offset_expired(log: DiskLog, table: str | None, kept: int) -> None:
    tables = ["orders", "items"] if table is None else [table, "orders" if table == "items" else "items"]
    for part in mixed(1, [[tables[0]] * 100, [tables[1]] * 600, [tables[0]] * 600, [tables[1]] * 600]):
        log.append([part])
    scan = log.scan(after=0, table=table)
    next(scan)
    log.retain(Retention(changes=kept), now_ms=0)
    with pytest.raises(OffsetExpired):
        list(scan)


def test_last_change_is_found_after_a_merge_that_cuts_the_blocks_elsewhere(tmp_path: Path) -> None:
    def build(name: str, pad: int) -> DiskLog:
        """Return a log whose first two blocks fit together by their sizes; encoded as one they are larger."""
        orders = [Change(Op.INSERT, ORDERS, None, (n, "x" * (20_000 if n < 101 else 7_000))) for n in range(1, 401)]
        orders.append(Change(Op.INSERT, ORDERS, None, (401, "x" * pad)))
        orders[100] = Change(Op.INSERT, ITEMS, None, (101, 1, 1.0))
        large = Change(Op.INSERT, ORDERS, None, (402, "x" * 3_000_000))
        log = DiskLog.open(tmp_path / name)
        for first, changes in ((1, orders[:100]), (101, orders[100:]), (402, [large])):
            log.append([Transaction(f"t{first}", tuple(changes), first, first, 0, 0, True, f"p{first}")])
        return log

    with contextlib.closing(build("small.db", 1)) as small:
        pad = MAX_RAW - sum(block.raw for block in small.blocks()[:2]) - 13
    with contextlib.closing(build("log.db", pad)) as log:
        assert log.last_of("orders") == 402, "the headers are read"
        before = [block.first for block in log.blocks()]
        while log.merge():
            pass
        assert [block.first for block in log.blocks()] != before, "the blocks were cut elsewhere"
        assert log.last_of("items") == 101


def test_trimming_removes_at_most_256_blocks_per_step(log: DiskLog, path: Path) -> None:
    fill(log, [1] * 600)
    assert log.retain(Retention(changes=5), now_ms=0) == 256
    assert (log.horizon, len(block_sizes(path))) == (596, 344)
    assert [log.retain(Retention(changes=5), now_ms=0) for _ in range(3)] == [256, 83, 0]
    assert len(block_sizes(path)) == 5


def test_position_time_and_offsets_survive_retention_of_zero_changes(path: Path) -> None:
    log = DiskLog.open(path)
    fill(log, [3, 3])
    log.retain(Retention(changes=0), now_ms=0)
    log.close()
    log = DiskLog.open(path)
    assert (log.horizon, log.latest, log.position, log.clock_ceiling) == (7, 6, "p6", 4)
    log.close()


def test_clock_ceiling_survives_the_removal_of_an_old_generation(path: Path) -> None:
    log = DiskLog.open(path)
    log.append([transaction(1, ts=10**9)])
    log.restart(first=5, reason="lost")
    log.retain(Retention(), now_ms=0)
    log.close()
    assert block_sizes(path) == []
    log = DiskLog.open(path)
    assert (log.latest, log.clock_ceiling) == (4, 10**9)
    log.close()


def test_concurrent_readers_never_see_a_gap(log: DiskLog) -> None:
    stop = threading.Event()
    faults: list[object] = []

    def follow() -> None:
        after = 0
        try:
            while not (stop.is_set() and after == log.latest):
                page = log.read(after=after, limit=50)
                stop.wait(0 if page else 0.001)  # at the head: leave the writer some of the processor
                for part in page:
                    if part.first != after + 1 or ids([part]) != list(range(part.first, part.upto + 1)):
                        faults.append((after, part))
                    after = part.upto
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=follow) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        fill(log, [1, 2, 3, 40] * 10)
        log.merge()
        log.append([transaction(log.latest + 1, 700)])
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []


# Size and sudden death


ONE_MILLION = """
import resource, sys
from headwater.log.disk.disk_log import DiskLog
from headwater.model.change import Change, Op, Transaction
from tests.log.samples import ORDERS

def parts():
    for first in range(1, 1_000_001, 1000):
        changes = tuple(Change(Op.UPDATE, ORDERS, (i, "old"), (i, "new")) for i in range(first, first + 1000))
        yield Transaction("big", changes, first, 1, 1, first - 1, first == 999_001, "p")

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

log = DiskLog.open(sys.argv[1])
before = peak()
log.append(parts())
count = sum(len(part.changes) for part in log.scan(after=0))
whole = log.first_whole(2)
log.close()
print(count, whole, peak() - before)
"""


@pytest.mark.slow
def test_transaction_of_a_million_changes_is_stored_in_bounded_memory(path: Path) -> None:
    count, whole, kilobytes = map(int, in_child(ONE_MILLION, path).split())
    assert (count, whole) == (1_000_000, 1_000_001)
    assert kilobytes < 30_000


APPEND_FOREVER = """
import sys
from headwater.log.disk.disk_log import DiskLog
from tests.log.samples import transaction
log = DiskLog.open(sys.argv[1])
size = 0
while True:
    size = size % 40 + 1
    log.append([transaction(log.latest + 1, size * size)], notes={"latest": str(log.latest + size * size)})
    if size % 20 == 0:
        log.merge()
    print(log.latest, flush=True)
"""


@pytest.mark.slow
def test_appended_changes_survive_kill_9_and_no_partial_append_is_visible(path: Path) -> None:
    for kill_after in (7, 25, 60, 33):
        child = subprocess.Popen(
            [sys.executable, "-c", APPEND_FOREVER, path], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert child.stdout is not None
        told = 0
        for _ in range(kill_after):
            told = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        told = max([told, *map(int, child.stdout.read().split())])
        child.stdout.close()
        child.wait()
        log = DiskLog.open(path)
        found = list(log.scan(after=0))
        assert log.latest >= told
        assert ids(found) == list(range(1, log.latest + 1))
        assert found[-1].last and log.note("latest") == str(log.latest)
        log.close()
