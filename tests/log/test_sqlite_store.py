"""The store under every SQLite file of ours: numbered migrations, transactions, close."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from headwater.errors import InvalidRequest, LogDamaged, Unavailable
from headwater.log.sqlite_store import FileFormat, SqliteStore

ONE = "CREATE TABLE t (a INTEGER PRIMARY KEY)"
TWO = "ALTER TABLE t ADD COLUMN b"
THREE = "UPDATE t SET b = a * 10"


def format(*migrations: str, additions: str = "") -> FileFormat:
    return FileFormat("numbers", application_id=7, migrations=migrations, additions=additions)


def rows(store: SqliteStore) -> list[object]:
    with store.connection() as connection:
        return connection.execute("SELECT * FROM t").fetchall()


def test_file_of_an_older_format_is_upgraded_by_its_missing_migrations(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        path = tmp_path / f"{number}.db"
        store = SqliteStore(format(*(ONE, TWO, THREE)[:number]), path)
        with store.transaction() as connection:
            connection.execute("INSERT INTO t (a) VALUES (4)")
        store.close()
        store = SqliteStore(format(ONE, TWO, THREE), path)
        assert (store.created, rows(store)) == (False, [(4, 40 if number < 3 else None)])
        with store.connection() as connection:
            assert connection.pragma("user_version") == 3
        store.close()


def test_failed_migration_keeps_the_file_unchanged(tmp_path: Path) -> None:
    SqliteStore(format(ONE), tmp_path / "t.db").close()
    with pytest.raises(LogDamaged, match=r"the file of numbers \(t.db\)"):
        SqliteStore(format(ONE, TWO, "no SQL"), tmp_path / "t.db")
    store = SqliteStore(format(ONE), tmp_path / "t.db")
    with store.connection() as connection:
        assert len(connection.execute("PRAGMA table_info(t)").fetchall()) == 1
    store.close()


def test_newer_format_is_refused_and_additions_do_not_raise_the_format(tmp_path: Path) -> None:
    SqliteStore(format(ONE, additions="CREATE TABLE IF NOT EXISTS more (a)"), tmp_path / "t.db").close()
    SqliteStore(format(ONE), tmp_path / "t.db").close()
    SqliteStore(format(ONE, TWO), tmp_path / "t.db").close()
    with pytest.raises(LogDamaged, match="format 2; this Headwater reads up to 1"):
        SqliteStore(format(ONE), tmp_path / "t.db")


def test_only_a_new_file_is_filled(tmp_path: Path) -> None:
    for created in (True, False):
        store = SqliteStore(
            format(ONE), tmp_path / "t.db", fill=lambda new: void(new.execute("INSERT INTO t VALUES (1)"))
        )
        assert (store.created, rows(store)) == (created, [(1,)])
        store.close()


def void(_: object) -> None:
    return None


def test_transaction_that_raises_is_rolled_back_and_the_next_transaction_succeeds(tmp_path: Path) -> None:
    store = SqliteStore(format(ONE), tmp_path / "t.db")
    with pytest.raises(ZeroDivisionError), store.transaction() as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        raise ZeroDivisionError
    with pytest.raises(InvalidRequest, match="from inside"), store.transaction() as connection:
        connection.execute("INSERT INTO t VALUES (2)")
        with store.transaction():
            pass
    with store.transaction() as connection:
        connection.execute("INSERT INTO t VALUES (3)")
    assert rows(store) == [(3,)]
    store.close()


def test_closed_store_is_unavailable(tmp_path: Path) -> None:
    store = SqliteStore(format(ONE), tmp_path / "t.db")
    store.close()
    store.close()
    with pytest.raises(Unavailable, match=r"t\.db is closed"), store.transaction():
        pass
    apsw.Connection(str(tmp_path / "t.db")).close()
