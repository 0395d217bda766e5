"""Table versions: exact, or too high after changes were trimmed unread, and never decreasing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.capture.captured_database import running
from tests.log.memory_log import MemoryLog

from headwater.log.disk.disk_log import DiskLog
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Log, Retention
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Table
from headwater.queries.etag import table_versions
from headwater.queries.etag.table_versions import NOTE, TableVersions


def commit(log: Log, *names: str) -> Transaction:
    """A transaction that inserts one row into each of these tables."""
    first = log.latest + 1
    changes = tuple(Change(Op.INSERT, Table(name, (Column("id", "i64"),), ("id",)), None, (1,)) for name in names)
    return Transaction(f"t{first}", changes, first, ts=first)


def add(log: Log, *names: str) -> int:
    return log.append([commit(log, *names)])


def keep(log: Log, changes: int) -> None:
    log.retain(Retention(changes=changes), now_ms=0)
    assert log.latest - log.horizon + 1 == changes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.log.db"


@pytest.fixture
def log(path: Path) -> Iterator[LiveLog]:
    made = LiveLog(DiskLog.open(path))
    yield made
    made.close()


def test_version_of_a_table_is_the_offset_of_its_last_change(log: LiveLog) -> None:
    versions = TableVersions(log)
    assert versions.advance() == 0 and versions.at(["a"]) == {"a": 0}
    add(log, "a", "b", "a")
    log.stage([commit(log, "c")])
    assert versions.at(["a"]) == {"a": 0}, "nothing is looked at unasked"
    assert versions.advance() == 4
    assert versions.at(["a", "b", "c", "d"]) == {"a": 3, "b": 2, "c": 4, "d": 0}
    assert versions.advance() == 4 and versions.at([]) == {}


def test_table_version_at_an_offset_excludes_later_changes(log: LiveLog) -> None:
    versions = TableVersions(log)
    add(log, "a", "b")
    add(log, "a")
    versions.advance()
    assert versions.at(["a", "b", "c"], 2) == {"a": 2, "b": 2, "c": 0}
    assert versions.at(["a", "b"], 3) == {"a": 3, "b": 2}


def test_table_versions_reported_before_the_log_has_them_do_not_decrease_later(log: LiveLog) -> None:
    versions = TableVersions(log)
    add(log, "a", "b")
    versions.advance()
    assert versions.at(["a"], 4) == {"a": 4}
    add(log, "a", "b")
    add(log, "b")
    versions.advance()
    assert versions.at(["a", "b"]) == {"a": 4, "b": 5}, "a number that was told holds, though the change was at 3"


def test_table_versions_are_kept_after_the_changes_are_evicted(log: LiveLog) -> None:
    versions = TableVersions(log)
    add(log, "old")
    versions.advance()
    for _ in range(9):
        add(log, "new")
    versions.advance()
    keep(log, 2)
    assert versions.at(["old", "new", "none"]) == {"old": 1, "new": 10, "none": 0}
    assert versions.reached(["old", "new", "none"]) == {"old": 8, "new": 10, "none": 8, "*": 10}


def test_restart_continues_from_the_saved_versions(path: Path) -> None:
    log = LiveLog(DiskLog.open(path))
    versions = TableVersions(log)
    add(log, "old", "new")
    versions.advance()
    assert not versions.save(), "two changes are not worth a commit"
    assert versions.save(every=1) and not versions.save(every=1)
    for _ in range(4):
        add(log, "new")
    keep(log, 4)
    log.close()
    log = LiveLog(DiskLog.open(path))
    again = TableVersions(log)
    again.advance()
    assert again.at(["old", "new", "none"]) == {"old": 1, "new": 6, "none": 0}, "nothing was dropped unread"
    log.close()


def test_table_with_unread_trimmed_changes_is_reported_at_the_horizon(path: Path) -> None:
    log = LiveLog(DiskLog.open(path))
    versions = TableVersions(log)
    add(log, "old", "seen")
    versions.advance()
    versions.save(every=1)
    add(log, "unseen")
    add(log, "seen")
    add(log, "new")
    keep(log, 1)
    log.close()
    log = LiveLog(DiskLog.open(path))
    again = TableVersions(log)
    again.advance()
    assert again.at(["old", "seen", "unseen", "new"]) == {"old": 4, "seen": 4, "unseen": 4, "new": 5}
    log.close()


def test_unsaved_table_versions_are_computed_from_the_retained_log(log: LiveLog) -> None:
    add(log, "old")
    add(log, "a", "b")
    assert _fresh(log) == {"old": 1, "a": 2, "b": 3}
    keep(log, 1)
    assert _fresh(log) == {"old": 2, "a": 2, "b": 3}
    for note in (
        "{",
        "[]",
        '{"generation":1}',
        f'{{"generation":"{log.generation}","upto":99,"rest":0,"tables":{{}}}}',
    ):
        log.set_notes(**{NOTE: note})
        assert _fresh(log) == {"old": 2, "a": 2, "b": 3}, note


def _fresh(log: Log) -> dict[str, int]:
    versions = TableVersions(log)
    versions.advance()
    return versions.at(["old", "a", "b"])


def test_changes_evicted_before_they_were_read_raise_table_versions_to_the_horizon(log: LiveLog) -> None:
    versions = TableVersions(log)
    add(log, "a")
    versions.advance()
    for _ in range(5):
        add(log, "b")
    keep(log, 2)
    assert versions.advance() == 6
    assert versions.at(["a", "b"]) == {"a": 4, "b": 6}


def test_new_log_generation_resets_every_table_version_to_the_offset_before_its_first(log: LiveLog) -> None:
    versions = TableVersions(log)
    add(log, "a", "b")
    log.stage([commit(log, "c")])
    versions.advance()
    versions.save(every=1)
    log.unstage()
    log.restart(first=10, reason="the file was restored")
    assert versions.advance() == 9
    assert versions.at(["a", "b", "c", "d"]) == {"a": 9, "b": 9, "c": 9, "d": 9}
    add(log, "a")
    versions.advance()
    assert versions.at(["a", "b"]) == {"a": 10, "b": 9}
    assert _fresh(log) == {"old": 9, "a": 10, "b": 9}, "the note is of another generation"


def test_staged_changes_are_not_saved(path: Path) -> None:
    log = LiveLog(DiskLog.open(path))
    versions = TableVersions(log)
    add(log, "a")
    log.stage([commit(log, "b")])
    log.stage([commit(log, "c")])
    versions.advance()
    versions.save(every=1)
    log.wrapped.close()  # killed: what was staged is gone, and comes again, perhaps as something else
    log = LiveLog(DiskLog.open(path))
    assert log.latest == 1
    again = TableVersions(log)
    assert again.at(["a", "b", "none"]) == {"a": 1, "b": 1, "none": 0}
    add(log, "c")
    again.advance()
    assert again.at(["a", "b", "c"]) == {"a": 1, "b": 1, "c": 2}
    log.close()


def test_tables_beyond_the_limit_share_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_versions, "MAX_TABLES", 10)
    log = MemoryLog()
    versions = TableVersions(log)
    for number in range(100):
        add(log, f"t{number}")
        versions.advance()
    found = versions.at([f"t{number}" for number in range(100)])
    assert all(found[f"t{number}"] >= number + 1 for number in range(100)), "never too low"
    assert found["t99"] == 100 and found["t0"] < 100
    assert versions.save(every=1) and len(log.note(NOTE)) < 400


@pytest.mark.parametrize("seed", range(30))
def test_table_versions_never_decrease_and_are_exact_without_trimming(path: Path, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    names = ["a", "b", "c", "d"]
    log = LiveLog(DiskLog.open(path))
    versions, truth, told, exact = TableVersions(log), dict.fromkeys(names, 0), dict.fromkeys(names, 0), True
    for _ in range(60):
        step = rng.randrange(8)
        if step < 3:
            chosen = [rng.choice(names[: rng.randint(1, 4)]) for _ in range(rng.randint(1, 3))]
            truth |= {name: log.latest + place for place, name in enumerate(chosen, 1)}
            log.stage([commit(log, *chosen)])
        elif step == 3:
            versions.save(every=rng.choice([1, 5]))
        elif step == 4:
            exact = exact and rng.random() < 0.7 and versions.advance() == log.latest
            log.retain(Retention(changes=rng.randint(1, 20)), now_ms=0)
        elif step == 5:
            log.flush()
            log.close()
            log = LiveLog(DiskLog.open(path))
            versions, exact = TableVersions(log), False
        else:
            reached = versions.advance()
            found = versions.at(names)
            assert reached == log.latest
            assert all(truth[name] <= found[name] <= log.latest for name in names), (truth, found)
            assert all(told[name] <= versions.reached(names)[name] for name in names), (told, found)
            assert not exact or found == truth
            told = found
    log.close()


def test_changes_of_a_real_database_move_their_tables(tmp_path: Path) -> None:
    with running(tmp_path) as captured:
        made = captured.run("CREATE TABLE a (id INTEGER PRIMARY KEY, x)")
        captured.run("CREATE TABLE b (id INTEGER PRIMARY KEY, x)")
        one = captured.run("INSERT INTO a VALUES (1, 1), (2, 2)")
        two = captured.run("DELETE FROM a WHERE id = 1")
        altered = captured.run("ALTER TABLE b ADD COLUMN y")
        captured.caught_up()
        versions = TableVersions(captured.log)
        versions.advance()
        assert made < one < two < altered
        assert versions.at(["a", "b"]) == {"a": two, "b": altered}
        assert versions.save(every=1)
    with running(tmp_path) as captured:
        captured.caught_up()
        versions = TableVersions(captured.log)
        versions.advance()
        assert versions.at(["a", "b"]) == {"a": two, "b": altered}
