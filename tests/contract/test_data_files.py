"""The files of a data folder as of November 2026: SQL dumps in `data_files` that every later version must open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.log.samples import ids

from headwater.feeds.options import Options
from headwater.feeds.subscription import SnapshotState
from headwater.feeds.subscriptions.registry import Registry
from headwater.feeds.subscriptions.store import InstancePosition
from headwater.log.disk.disk_log import DiskLog
from headwater.model.keys.key import Span
from headwater.model.keys.range import Range
from headwater.model.principal import Principal
from headwater.queries.prepared import PreparedQueries, PreparedQuery, query_id
from headwater.ranges.ranges.store import Pull, RangeBasis, Store

DUMPS = Path(__file__).parent / "data_files"
OPEN: dict[str, Callable[[Path], Any]] = {
    "main.log.db": DiskLog.open,
    "queries.db": lambda path: PreparedQueries.open(path, most=10),
    "ranges.db": Store.open,
    "subscriptions.db": Registry.open,
}


def stored(folder: Path, name: str, *statements: str) -> Path:
    """Create the file of that name from its dump, and change it by `statements`."""
    connection = apsw.Connection(str(folder / name))
    connection.execute((DUMPS / f"{name}.sql").read_text())
    for statement in statements:
        connection.execute(statement)
    connection.close()
    return folder / name


def layout(path: Path) -> dict[str, Any]:
    """Return the header, and the columns and indexes of every table."""
    connection = apsw.Connection(str(path))
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    columns = {name: connection.execute(f"PRAGMA table_xinfo({name})").fetchall() for name in tables}
    indexes = {name: sorted(connection.execute(f"PRAGMA index_list({name})"), key=str) for name in tables}
    header = [connection.pragma(name) for name in ("application_id", "user_version", "journal_mode")]
    connection.close()
    return {"columns": columns, "indexes": indexes, "header": header}


def test_stored_log_is_read_and_continued(tmp_path: Path) -> None:
    log = DiskLog.open(stored(tmp_path, "main.log.db"))
    assert (log.created, log.generation, log.generation_reason) == (False, "6488389194dfce8d", "created")
    assert (log.horizon, log.latest, log.position, log.clock_ceiling, log.bytes) == (1, 3, "p3", 99, 72)
    assert (ids(log.scan(after=0)), log.note("nonce")) == ([1, 2, 3], "x")
    log.close()


def test_stored_prepared_queries_are_read(tmp_path: Path) -> None:
    queries = PreparedQueries.open(stored(tmp_path, "queries.db"), most=10)
    id = query_id("main", "SELECT 1")
    assert queries.get(id) == PreparedQuery(id, "main", "SELECT 1", name="one", role="viewer")
    queries.close()


def test_stored_ranges_and_leases_are_read(tmp_path: Path) -> None:
    store = Store.open(stored(tmp_path, "ranges.db"))
    assert store.cut("main", "t") == RangeBasis("g", 1, 100, 0)
    assert store.ranges("main", "t") == [Range(1, 1, Span(b"", b"m"), 5, 50), Range(2, 1, Span(b"m", None), 5, 50)]
    assert store.leases("main") == [Pull("main", "me", "t", 0, "g", 5, 2_000_000_000_000, "ann")]
    store.close()


def test_stored_subscriptions_are_read(tmp_path: Path) -> None:
    registry = Registry.open(stored(tmp_path, "subscriptions.db"))
    (one,) = registry.visible_to(Principal("ann", "editor"))
    assert (one.id, one.name, one.created_ms, one.acked, one.paused) == (f"sub_{0:016x}", "mine", 1234, 7, True)
    assert (one.options, one.snapshot) == (Options(db="main", tables=("t",)), SnapshotState(tables=("t",)))
    assert registry.position("main", "q1") == InstancePosition("q1", "main", "p", 3, 9)
    registry.close()


@pytest.mark.parametrize("name", OPEN)
def test_new_file_has_the_layout_of_the_stored_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "old").mkdir()
    old = stored(tmp_path / "old", name, "PRAGMA journal_mode = WAL")
    as_stored = layout(old)
    for path in (old, tmp_path / name):
        OPEN[name](path).close()
        assert layout(path) == as_stored


@pytest.mark.parametrize("name", OPEN)
def test_new_file_is_created_with_mode_600(tmp_path: Path, name: str) -> None:
    opened = OPEN[name](tmp_path / name)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    opened.close()


@pytest.mark.parametrize(
    ("name", "statements"),
    [
        ("main.log.db", ["DROP TABLE evicted", "PRAGMA user_version = 1"]),
        ("queries.db", ["ALTER TABLE prepared DROP COLUMN role", "PRAGMA user_version = 1"]),
        ("ranges.db", ["ALTER TABLE lease DROP COLUMN owner", "PRAGMA user_version = 1"]),
        ("subscriptions.db", ["DROP TABLE stand", "DROP INDEX subscription_owner"]),
    ],
)
def test_file_of_an_earlier_format_is_upgraded(tmp_path: Path, name: str, statements: list[str]) -> None:
    (tmp_path / "old").mkdir()
    old = stored(tmp_path / "old", name, *statements)
    OPEN[name](old).close()
    OPEN[name](tmp_path / name).close()
    assert layout(old) == layout(tmp_path / name)
