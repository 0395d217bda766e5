"""The live log: staged changes are readable at once, without a gap to durable ones, during every flush."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.log.faults import FaultyVFS
from tests.log.memory_log import MemoryLog
from tests.log.samples import ORDERS, flat, ids, in_parts, transaction, transactions
from tests.suite.deadlines import PATIENCE
from tests.suite.examples import examples

from headwater.errors import InvalidRequest, OffsetExpired, StorageFull
from headwater.log.disk.disk_log import DiskLog
from headwater.log.live.live_log import LiveLog
from headwater.log.live.staged_tail import Tail, estimated_bytes
from headwater.log.log import Retention
from headwater.model.change import Change, Op, Transaction


class Clock:
    """A clock that stands still until the test sets `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class GatedLog(MemoryLog):
    """A log whose append reports that it runs and waits for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.gate = threading.Event(), threading.Event()

    def append(self, parts: Iterable[Transaction], *, notes: Mapping[str, str] | None = None) -> int:
        self.running.set()
        assert self.gate.wait(PATIENCE)
        return super().append(parts, notes=notes)


class UnreadLog(MemoryLog):
    """A log that counts its reads."""

    reads = 0

    def read(self, *, after: int, upto: int | None = None, limit: int | None = 512) -> list[Transaction]:
        self.reads += 1
        return super().read(after=after, upto=upto, limit=limit)


def stage(log: LiveLog, *sizes: int) -> None:
    log.stage(transactions(sizes, first=log.latest + 1))


def test_staged_transactions_are_readable_immediately_and_durable_after_flush() -> None:
    log = LiveLog(MemoryLog())
    stage(log, 2, 1)
    assert (log.latest, log.durable, log.staged_changes, log.position) == (3, 0, 3, "p3")
    assert ids(log.read(after=0)) == [1, 2, 3] and log.wrapped.read(after=0) == []
    assert log.flush(notes={"nonce": "1"}) == 3
    assert (log.latest, log.durable, log.staged_changes, log.note("nonce")) == (3, 3, 0, "1")
    assert flat(log.wrapped.read(after=0)) == flat(log.read(after=0))


def test_flush_of_many_transactions_syncs_once(tmp_path: Path) -> None:
    disk = FaultyVFS()
    log = LiveLog(DiskLog.open(tmp_path / "log.db", vfs=disk.name))
    stage(log, *[1] * 50)
    before = disk.syncs
    log.flush()
    assert disk.syncs == before + 1
    log.flush()
    assert disk.syncs == before + 1
    log.close()
    disk.unregister()


def test_read_across_disk_memory_and_staged_changes_has_no_gap(tmp_path: Path) -> None:
    log = LiveLog(DiskLog.open(tmp_path / "log.db"), keep_changes=8)
    stage(log, *[1] * 20, 5)
    log.flush()
    stage(log, 3, 1)
    assert ids(log.scan(after=0)) == ids(log.read(after=0)) == list(range(1, 30))
    assert ids(log.read(after=4, limit=20)) == list(range(5, 25))
    for after in range(30):
        assert ids(log.read(after=after, upto=27)) == list(range(after + 1, 28))
    log.close()


def test_reads_of_recent_changes_do_not_read_the_wrapped_log() -> None:
    wrapped = UnreadLog()
    log = LiveLog(wrapped, keep_changes=100)
    for _ in range(20):
        stage(log, 10)
        assert ids(log.read(after=log.latest - 10)) == list(range(log.latest - 9, log.latest + 1))
        log.flush()
    assert wrapped.reads == 0
    assert len(ids(log.read(after=log.latest - 90))) == 90 and wrapped.reads == 0
    assert ids(log.read(after=0, limit=3)) == [1, 2, 3] and wrapped.reads == 1


def test_reads_continue_while_a_flush_runs_in_another_thread() -> None:
    wrapped = GatedLog()
    log = LiveLog(wrapped, keep_changes=2)
    stage(log, 3, 3)
    flushing = threading.Thread(target=log.flush)
    flushing.start()
    assert wrapped.running.wait(PATIENCE)
    scan = log.scan(after=0)
    seen = [next(scan)]
    stage(log, 2)
    assert ids(log.read(after=0)) == list(range(1, 9)) and log.durable == 0
    wrapped.gate.set()
    flushing.join()
    assert (log.durable, log.latest, log.staged_changes) == (6, 8, 2)
    assert ids([*seen, *scan]) == [1, 2, 3, 4, 5, 6]
    assert ids(log.scan(after=0)) == list(range(1, 9))
    assert log.flush() == 8


def test_failed_flush_keeps_every_change_staged_and_readable(tmp_path: Path) -> None:
    disk = FaultyVFS()
    log = LiveLog(DiskLog.open(tmp_path / "log.db", vfs=disk.name))
    stage(log, 3)
    disk.full = True
    with pytest.raises(StorageFull):
        log.flush()
    assert (log.staged_changes, log.durable, ids(log.read(after=0))) == (3, 0, [1, 2, 3])
    stage(log, 1)
    disk.full = False
    assert log.flush() == 4
    assert ids(log.wrapped.read(after=0)) == [1, 2, 3, 4]
    log.close()
    disk.unregister()


def test_append_makes_staged_changes_durable_too() -> None:
    log = LiveLog(MemoryLog(), keep_changes=1000)
    stage(log, 2)
    assert log.append(in_parts(transaction(3, 10), 4)) == 12
    assert (log.durable, log.latest, log.position) == (12, 12, "p12")
    assert ids(log.scan(after=0)) == ids(log.wrapped.scan(after=0)) == list(range(1, 13))


def test_huge_append_is_evicted_from_memory(tmp_path: Path) -> None:
    log = LiveLog(DiskLog.open(tmp_path / "log.db"), keep_changes=1000)
    stage(log, 700)
    whole = transaction(701, 20_000)
    log.append(in_parts(whole, 500))
    assert log._tail.changes <= 1125
    assert ids(log.scan(after=0)) == list(range(1, 20_701))
    assert ids(log.read(after=19_000, limit=3)) == [19_001, 19_002, 19_003]
    assert log.append([transaction(20_701, 3000)]) == 23_700
    stage(log, 1)
    assert ids(log.read(after=20_699, limit=9999)) == list(range(20_700, 23_702))
    assert ids(log.read(after=100, limit=3)) == [101, 102, 103]
    log.close()


def test_failed_append_to_a_live_log_changes_nothing() -> None:
    log = LiveLog(MemoryLog())
    stage(log, 2)
    with pytest.raises(InvalidRequest):
        log.append([transaction(3), transaction(9)])
    assert (log.latest, log.durable, ids(log.read(after=0))) == (2, 0, [1, 2])
    assert log.append([transaction(3)]) == 3


def test_unstaged_changes_are_dropped_and_their_offsets_are_not_reused() -> None:
    log = LiveLog(MemoryLog())
    stage(log, 2)
    log.flush()
    stage(log, 5)
    assert log.unstage() == 5
    stage(log, 1)
    assert log.unstage() == 1
    assert (log.latest, log.durable, log.staged_since, log.position) == (2, 2, None, "p2")
    assert ids(log.read(after=0)) == [1, 2] and log.read(after=2) == []
    with pytest.raises(InvalidRequest, match="after 7"):
        log.restart(first=7, reason="restored")
    log.restart(first=9, reason="restored")
    assert (log.latest, log.horizon, log.read(after=8)) == (8, 9, [])
    stage(log, 1)
    assert ids(log.read(after=8)) == [9] and log.flush() == 9


def test_transaction_that_does_not_continue_the_log_is_not_staged() -> None:
    log = LiveLog(MemoryLog())
    log.append([transaction(1, ts=50)])
    for wrong in (transaction(3), transaction(2, ts=49), transaction(2, 4).cut(0, 3)):
        with pytest.raises(InvalidRequest):
            log.stage([wrong])
    reopened = LiveLog(log.wrapped)
    with pytest.raises(InvalidRequest, match="time"):
        reopened.stage([transaction(2, ts=49)])
    assert (log.latest, log.staged_changes) == (1, 0)


def test_staged_since_is_the_time_of_the_oldest_staged_transaction() -> None:
    clock = Clock()
    log = LiveLog(MemoryLog(), clock=clock)
    assert log.staged_since is None
    stage(log, 1)
    clock.now = 105
    stage(log, 1)
    assert log.staged_since == 100
    log.flush()
    assert log.staged_since is None


def test_retention_counts_staged_changes() -> None:
    log = LiveLog(MemoryLog())
    stage(log, 6, 6)
    log.retain(Retention(changes=5), now_ms=0)
    assert (log.horizon, log.durable) == (8, 12)
    with pytest.raises(OffsetExpired) as caught:
        log.read(after=3)
    assert (caught.value.horizon, caught.value.latest) == (8, 12)


def test_recent_returns_changes_in_memory_or_none_and_never_reads_the_wrapped_log() -> None:
    wrapped = UnreadLog()
    log = LiveLog(wrapped, keep_changes=8)
    assert log.recent(0, 100) == []
    stage(log, *[1] * 20)
    assert ids(log.recent(3, 7) or []) == [4, 5, 6, 7]
    log.flush()
    assert log.recent(3, 7) is None and log.recent(20, 25) == []
    assert ids(log.recent(12, 20) or []) == list(range(13, 21))
    assert wrapped.reads == 0


def test_recent_changes_below_the_horizon_are_not_returned() -> None:
    log = LiveLog(MemoryLog(), retention_changes=3)
    stage(log, *[1] * 9)
    assert log.recent(5, 9) is None and ids(log.recent(6, 9) or []) == [7, 8, 9]


def test_closed_time_is_recorded_with_the_last_staged_offset() -> None:
    log = LiveLog(MemoryLog())
    assert (log.closed, log.has_listeners) == ((0, 0), False)
    stage(log, 3)
    log.close_at(50)
    stage(log, 4)
    assert log.closed == (50, 3)
    log.unstage()
    log.restart(first=9, reason="restored")
    assert log.closed == (50, 8), "anew, and never lower"


def test_closed_time_of_a_reopened_log_is_its_clock_ceiling() -> None:
    wrapped = MemoryLog()
    log = LiveLog(wrapped)
    stage(log, 3)
    log.flush()
    log.raise_ceiling(99)
    assert LiveLog(wrapped).closed == (99, 3)


def waiting(log: LiveLog, offset: int) -> tuple[threading.Thread, list[bool]]:
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(log.wait_beyond(offset, 10)))
    thread.start()
    return thread, told


@pytest.mark.parametrize(
    ("act", "passed"),
    [
        (lambda log: stage(log, 2), True),
        (lambda log: log.append([transaction(1, 2)]), True),
        (lambda log: log.restart(first=5, reason="lost"), True),
        (lambda log: log.close(), False),
    ],
    ids=["stage", "append", "restart", "close"],
)
def test_waiting_reader_is_woken_by_stage_append_restart_and_close(
    act: Callable[[LiveLog], object], passed: bool
) -> None:
    log = LiveLog(MemoryLog())
    thread, told = waiting(log, 1)
    act(log)
    thread.join()
    assert told == [passed]


def test_wait_beyond_an_offset_ends_at_its_timeout() -> None:
    log = LiveLog(MemoryLog())
    assert not log.wait_beyond(0, timeout=0.001)
    stage(log, 1)
    assert log.wait_beyond(0, timeout=0) and not log.wait_beyond(1, timeout=0)


def test_listener_is_called_once_changes_are_readable_and_until_it_is_removed() -> None:
    log = LiveLog(MemoryLog())
    seen: list[int] = []

    def listen() -> None:
        seen.append(len(ids(log.read(after=0))))

    log.add_listener(listen)
    stage(log, 2)
    log.append([transaction(3)])
    log.flush()
    log.stage([])
    assert seen == [2, 3]
    log.remove_listener(listen)
    stage(log, 1)
    assert seen == [2, 3]


def test_listener_is_called_for_a_new_generation() -> None:
    log = LiveLog(MemoryLog())
    heard: list[int] = []
    log.add_listener(lambda: heard.append(log.latest))
    log.restart(first=9, reason="lost")
    assert heard == [8]


def test_tail_evicts_large_rows_sooner() -> None:
    tail = Tail()
    rows = [Change(Op.INSERT, ORDERS, None, (n, "x" * 1000)) for n in range(1, 11)]
    tail.extend(Transaction(f"t{n}", (row,), n) for n, row in enumerate(rows, 1))
    assert tail.weight == sum(estimated_bytes(Transaction("t", (row,), 1)) for row in rows) > 10_000
    tail.forget(upto=10, changes=100, weight=3500)
    assert (tail.first, tail.changes) == (8, 3) and tail.weight <= 3500
    tail.forget(upto=9, changes=0, weight=0)
    assert (tail.first, tail.changes) == (10, 1)


steps = st.lists(
    st.tuples(st.sampled_from(["stage", "flush", "append", "unstage", "merge"]), st.integers(1, 30)),
    max_size=25,
)


@examples(60)
@given(steps, st.integers(1, 40))
def test_live_log_after_random_steps_has_the_transactions_of_a_list(steps: list[tuple[str, int]], keep: int) -> None:
    log = LiveLog(MemoryLog(), keep_changes=keep)
    oracle: list[Transaction] = []
    for step, size in steps:
        new = transaction(log.latest + 1, size, ts=1)
        if step == "stage":
            log.stage(in_parts(new, 7))
            oracle.append(new)
        elif step == "append":
            log.append(in_parts(new, 7))
            oracle.append(new)
        elif step == "unstage":
            oracle = [part for part in oracle if part.upto <= log.durable]
            log.unstage()
        else:
            getattr(log, step)()
        assert flat(log.scan(after=0)) == flat(oracle)
        assert log.latest == sum(len(part.changes) for part in oracle)
        assert flat(log.read(after=size, limit=11)) == flat(oracle)[size : size + 11]
        assert log.first_whole(size) == next((part.first for part in oracle if part.first >= size), log.latest + 1)


def test_concurrent_followers_receive_every_change_once_during_flushes(tmp_path: Path) -> None:
    log = LiveLog(DiskLog.open(tmp_path / "log.db"), keep_changes=20)
    last = 3000
    followed: list[list[int]] = []

    def follow() -> None:
        seen: list[int] = []
        while len(seen) < last and log.wait_beyond(len(seen), 10):
            seen += ids(log.read(after=len(seen), limit=64))
        followed.append(seen)

    def flush() -> None:
        while log.durable < last and log.wait_beyond(log.durable, 10):
            log.flush()

    threads = [threading.Thread(target=run) for run in (follow, follow, flush)]
    for thread in threads:
        thread.start()
    for part in transactions([1, 2, 3, 4] * 300):
        log.stage([part])
        log.merge()
    for thread in threads:
        thread.join()
    assert followed == [list(range(1, last + 1))] * 2
    log.close()
