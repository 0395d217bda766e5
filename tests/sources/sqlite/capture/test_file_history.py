"""Detection of another history: files restored in place or after a lost log, with the real capture and log."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sources.sqlite_writer_process import Foreign
from tests.suite.deadlines import PATIENCE

from headwater.capture.capture import Capture
from headwater.errors import SourceMismatch, Unavailable
from headwater.log.disk.disk_log import DiskLog
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Table
from headwater.sources.sqlite.capture.file_history import compare
from headwater.sources.sqlite.capture.image_chain import ImageChain
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource

T = "CREATE TABLE t(id INTEGER PRIMARY KEY, v)"
BACKUP = "other = sqlite3.connect({target!r}); {direction}; other.close()"
SEVERAL = range(12)


class Running:
    """A source, its log and its capture thread, as in a server."""

    def __init__(self, folder: Path, stop_when_lost: bool, **settings: Any) -> None:
        with contextlib.ExitStack() as undo:
            self.log = LiveLog(DiskLog.open(folder / "app.log.db"))
            undo.callback(self.log.close)
            config = SqliteConfig(**settings)
            self.source = SqliteSource("app", str(folder / "app.db"), notes=self.log, config=config)
            undo.callback(self.source.close)
            self.capture = Capture(
                self.source, self.log, retention=Retention(), flush_seconds=0.005, stop_when_lost=stop_when_lost
            )
            self.capture.start()
            undo.pop_all()

    def run(self, sql: str) -> int:
        """Write through the source; return the offset."""
        return self.source.write(lambda session: session.execute(sql)).result(PATIENCE).offset

    def caught_up(self) -> None:
        assert self.capture.catch_up(20), f"capture stands still: {self.capture.error}"

    def changes(self) -> list[Change]:
        self.caught_up()
        return [change for part in self.log.scan(after=self.log.horizon - 1) for change in part.changes]

    def close(self) -> None:
        self.source.finish_writes()
        self.capture.stop()
        self.source.close()
        self.log.close()


@contextlib.contextmanager
def running(folder: Path, *, stop_when_lost: bool = False, **settings: Any) -> Iterator[Running]:
    one = Running(folder, stop_when_lost, **settings)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def foreign(foreign_process: Foreign, tmp_path: Path) -> Iterator[Foreign]:
    foreign_process.open(tmp_path / "app.db")
    foreign_process.run("PRAGMA journal_mode = WAL")
    yield foreign_process
    foreign_process.close()


def backup(foreign: Foreign, target: Path) -> None:
    foreign.python(BACKUP.format(target=str(target), direction="con.backup(other)"))


def restore(foreign: Foreign, target: Path) -> None:
    """Restore a copy in place by SQLite's backup, while others have the file open."""
    foreign.python(BACKUP.format(target=str(target), direction="other.backup(con)"))


def wait_for(one: Running, holds: Callable[[], bool]) -> None:
    for _ in range(4000):
        if holds():
            return
        one.log.wait_beyond(one.log.latest, 0.005)
    raise AssertionError(f"capture: {one.capture.error}, {one.log.generation_reason}")


def check_goes_on(one: Running, foreign: Foreign, readable: int) -> None:
    """Check that the new generation begins above every offset ever readable, and follows both writers."""
    assert one.log.generation_first >= readable + 2
    foreign.run("INSERT INTO t VALUES (1000, 'foreign')")
    offset = one.run("INSERT INTO t VALUES (1001, 'ours')")
    assert offset > readable + 1
    assert [change.after for change in one.changes()][-2:] == [(1000, "foreign"), (1001, "ours")]


@pytest.mark.parametrize("more", [0, 3, 40])
@pytest.mark.parametrize("trimmed", [False, True])
def test_file_restored_under_a_running_server_begins_a_new_generation(
    tmp_path: Path, foreign: Foreign, trimmed: bool, more: int
) -> None:
    settings = {"trim_rows": 1, "trim_seconds": 0.001} if trimmed else {"trim_seconds": 3600.0}
    foreign.run(T)
    with running(tmp_path, **settings) as one:
        foreign.run("INSERT INTO t VALUES (0, 'kept')")
        one.caught_up()
        backup(foreign, tmp_path / "old.db")
        for n in SEVERAL:
            foreign.run("INSERT INTO t VALUES (?, 'lost')", n + 1)
        one.caught_up()
        readable, generation = one.log.latest, one.log.generation
        if trimmed:
            wait_for(one, lambda: one.source._trimmer.trimmed >= readable)
        restore(foreign, tmp_path / "old.db")
        for n in range(more):
            foreign.run("INSERT INTO t VALUES (?, 'other')", n + 100)
        wait_for(one, lambda: one.log.generation != generation)
        assert one.log.generation_reason
        check_goes_on(one, foreign, readable)


def test_restored_file_stops_capture_when_configured(tmp_path: Path, foreign: Foreign) -> None:
    foreign.run(T)
    with running(tmp_path, stop_when_lost=True, trim_seconds=3600.0) as one:
        foreign.run("INSERT INTO t VALUES (0, 'kept')")
        one.caught_up()
        backup(foreign, tmp_path / "old.db")
        foreign.run("INSERT INTO t VALUES (1, 'lost')")
        one.caught_up()
        generation = one.log.generation
        restore(foreign, tmp_path / "old.db")
        wait_for(one, lambda: (one.capture.error or "").startswith("source_mismatch"))
        assert one.log.generation == generation


def test_lost_log_with_later_foreign_writes_begins_a_new_generation(tmp_path: Path, foreign: Foreign) -> None:
    foreign.run(T)
    with running(tmp_path) as one:
        foreign.run("INSERT INTO t VALUES (1, 'a')")
        one.caught_up()
        readable = one.log.latest
    for path in tmp_path.glob("app.log.db*"):
        path.unlink()
    for n in SEVERAL:
        foreign.run("INSERT INTO t VALUES (?, 'unseen')", n + 10)
    with running(tmp_path) as one:
        assert one.log.generation_first >= readable + len(SEVERAL) + 2
        assert "log" in one.log.generation_reason
        assert one.changes() == []  # they are in no history: readers take a snapshot
        check_goes_on(one, foreign, readable + len(SEVERAL))


def test_file_copied_back_unchanged_keeps_its_history(tmp_path: Path, foreign: Foreign) -> None:
    foreign.run(T)
    with running(tmp_path) as one:
        foreign.run("INSERT INTO t VALUES (1, 'a')")
        one.caught_up()
        generation = one.log.generation
    foreign.close()
    shutil.copy(tmp_path / "app.db", tmp_path / "copy.db")
    (tmp_path / "app.db").unlink()
    shutil.copy(tmp_path / "copy.db", tmp_path / "app.db")
    foreign.open(tmp_path / "app.db")
    with running(tmp_path) as one:
        foreign.run("INSERT INTO t VALUES (2, 'b')")
        assert [change.after for change in one.changes()] == [(1, "a"), (2, "b")]
        assert one.log.generation == generation


def test_log_keeps_the_old_generation_while_the_source_restarts(
    tmp_path: Path, foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of the new generation would count as caught up, and would miss commits from before it begins."""
    foreign.run(T)
    with running(tmp_path) as one:
        old, begin = one.log.generation, one.source.restart
        seen: list[tuple[str, str]] = []

        def restart(*, generation: str, first: int) -> int:
            seen.append((generation, one.log.generation))
            return begin(generation=generation, first=first)

        monkeypatch.setattr(one.source, "restart", restart)
        lose(one, foreign, tmp_path)
        wait_for(one, lambda: one.log.generation != old)
        assert seen == [(one.log.generation, old)]


def test_new_generation_begins_after_the_offsets_read_during_the_restart(
    tmp_path: Path, foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign.run(T)
    with running(tmp_path) as one:
        old, begin = one.log.generation, one.source.restart
        read: list[int] = []

        def restart(*, generation: str, first: int) -> int:
            for n in SEVERAL:
                foreign.run("INSERT INTO t VALUES (?, 'late')", n + 500)
            read.append(one.source.head())
            return begin(generation=generation, first=first)

        monkeypatch.setattr(one.source, "restart", restart)
        lose(one, foreign, tmp_path, rows=1)
        wait_for(one, lambda: one.log.generation != old)
        assert read and one.log.generation_first > read[0] + 1, "whoever read up to there is told"


@pytest.mark.slow
def test_nothing_is_captured_until_the_log_can_begin_a_new_generation(
    tmp_path: Path, foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign.run(T)
    with running(tmp_path) as one:
        begin, tries = one.log.restart, []

        def restart(**told: Any) -> str:
            tries.append(one.log.latest)
            if len(tries) < 3:
                foreign.run(f"INSERT INTO t VALUES ({500 + len(tries)}, 'meanwhile')")
                raise Unavailable("no space left")
            return begin(**told)

        monkeypatch.setattr(one.log, "restart", restart)
        readable = lose(one, foreign, tmp_path)
        wait_for(one, lambda: len(tries) == 3 and one.capture.error is None)
        assert max(tries) <= readable
        check_goes_on(one, foreign, readable)


def lose(one: Running, foreign: Foreign, folder: Path, rows: int = len(SEVERAL)) -> int:
    """Restore a copy that lacks changes already read; return the last offset that was readable."""
    backup(foreign, folder / "old.db")
    for n in range(rows):
        foreign.run("INSERT INTO t VALUES (?, 'lost')", n + 1)
    one.caught_up()
    readable = one.log.latest
    restore(foreign, folder / "old.db")
    return readable


def test_generation_begun_only_in_the_file_is_replaced_at_the_start(tmp_path: Path, foreign: Foreign) -> None:
    foreign.run(T)
    with running(tmp_path) as one:
        foreign.run("INSERT INTO t VALUES (1, 'a')")
        one.caught_up()
        readable = one.log.latest
        one.capture.stop()
        one.capture._broken = "cut off here"  # nothing is taken in from here on
        one.source.restart(generation="half", first=readable + 30)
        foreign.run("INSERT INTO t VALUES (2, 'told to nobody')")
    with running(tmp_path) as one:
        assert one.log.generation != "half" and one.log.generation_first > readable + 31
        assert not one.changes(), "they are in the snapshot that everybody needs"
        check_goes_on(one, foreign, readable)


def test_generation_begun_only_in_the_log_is_replaced_at_the_start(tmp_path: Path, foreign: Foreign) -> None:
    foreign.run(T)
    with running(tmp_path) as one:
        foreign.run("INSERT INTO t VALUES (1, 'a')")
        one.caught_up()
        readable = one.log.latest
    log = DiskLog.open(tmp_path / "app.log.db")
    half = log.restart(first=readable + 2, reason="cut off here")
    log.close()
    with running(tmp_path) as one:
        assert one.log.generation != half
        check_goes_on(one, foreign, readable)


def test_start_with_a_lost_log_is_refused_with_a_reason_and_a_hint(tmp_path: Path, foreign: Foreign) -> None:
    foreign.run(T)
    with running(tmp_path) as one:
        one.run("INSERT INTO t VALUES (1, 'a')")
    for path in tmp_path.glob("app.log.db*"):
        path.unlink()
    with pytest.raises(SourceMismatch) as caught, running(tmp_path, stop_when_lost=True):
        raise AssertionError("it must not start")
    assert "log" in caught.value.message and "on_discontinuity" in caught.value.hint


# --- the comparison itself -------------------------------------------------------------------------------

TABLE = Table("t", (Column("k"), Column("v")), ("k",))


def insert(k: object, v: object) -> Change:
    return Change(Op.INSERT, TABLE, None, (k, v))  # type: ignore[arg-type]


def update(k: object, old: object, new: object) -> Change:
    return Change(Op.UPDATE, TABLE, (k, old), (k, new))  # type: ignore[arg-type]


def differs(file: list[Change], log: list[Change], upto: int = 1000) -> str:
    logged = Transaction("1", tuple(log), first=1)
    return compare(enumerate(file, 1), iter([logged]), upto)


def test_first_differing_change_of_two_histories_is_reported() -> None:
    changes = [insert(n, n) for n in range(500)]
    assert differs(changes, changes) == ""
    for place in (0, 1, 250, 499):
        for other in (insert(place, "x"), insert(place, float(place)), update(place, 0, place)):
            assert str(place + 1) in differs([*changes[:place], other, *changes[place + 1 :]], changes)
    assert differs([*changes, insert(7, "later")], changes) == ""
    assert differs([insert(0, "x"), *changes[1:]], changes, upto=0) == ""


def test_insert_in_the_file_matches_the_logged_update_of_its_row() -> None:
    assert differs([insert(1, "new")], [update(1, "old", "new")]) == ""
    assert differs([insert(1, "new")], [update(1, "old", "newer")]) != ""


def test_history_comparison_accepts_changes_that_capture_reordered() -> None:
    captured = [update(1, "b", "c"), update(1, "a", "b"), insert(2, 2)]
    ordered, lost = ImageChain().page(list(enumerate(captured, 1)))
    assert [change for _, change in ordered] == [update(1, "a", "b"), update(1, "b", "c"), insert(2, 2)] and not lost
    assert differs(captured, [change for _, change in ordered]) == ""


def test_changes_swapped_between_transactions_are_reported_as_different() -> None:
    first, second = [insert(1, "A"), insert(2, "B")], [insert(3, "C"), insert(4, "D")]
    logged = [Transaction("1", tuple(first), first=1), Transaction("3", tuple(second), first=3)]
    swapped = [first[0], second[0], first[1], second[1]]
    assert compare(enumerate([*first, *second], 1), iter(logged), 10) == ""
    assert "change 2" in compare(enumerate(swapped, 1), iter(logged), 10)


def test_logged_change_matches_only_a_single_change_of_the_file() -> None:
    twice = [insert(1, "A"), insert(1, "A"), insert(2, "B")]
    assert differs(twice, [insert(1, "A"), insert(2, "B"), insert(3, "C")]) != ""


def test_trimmed_file_matches_a_log_that_begins_earlier() -> None:
    logged = [Transaction("1", (update(1, "a", "b"), update(1, "b", "c")), first=1)]
    assert compare([(2, update(1, "a", "b"))], iter(logged), 10) == ""  # the file's change 1 is trimmed already


def test_restored_file_with_equal_changes_in_another_order_starts_a_new_generation(
    tmp_path: Path, foreign: Foreign
) -> None:
    # Given a file, and a copy of it from before three changes
    settings = {"trim_seconds": 3600.0}
    foreign.run(T)
    with running(tmp_path, **settings) as one:
        one.caught_up()
    foreign.close()
    shutil.copy(tmp_path / "app.db", tmp_path / "copy.db")
    with running(tmp_path, **settings) as one:
        for sql in ("INSERT INTO t VALUES (1, 'A')", "DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (2, 'B')"):
            one.run(sql)
        one.caught_up()
        generation = one.log.generation
    # When the copy comes back and others make changes of which each one stands in the log, elsewhere
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"app.db{suffix}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "copy.db", tmp_path / "app.db")
    foreign.open(tmp_path / "app.db")
    for sql in ("INSERT INTO t VALUES (1, 'A')", "DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (1, 'A')"):
        foreign.run(sql)
    # Then that is noticed
    with running(tmp_path, **settings) as one:
        assert one.log.generation != generation
