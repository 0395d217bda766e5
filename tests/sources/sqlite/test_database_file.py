"""The file of a database: closing connections that another thread still uses, and errors after the file was moved."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import apsw
import pytest
from tests.sources.sqlite_source import Rig

from headwater.errors import HeadwaterError
from headwater.sources.sqlite.database_file import close_when_idle
from headwater.sources.sqlite.read.bulk_reader import SqliteReader

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def test_busy_connection_is_interrupted_and_closed() -> None:
    db, begun, failed = apsw.Connection(":memory:"), threading.Event(), []
    db.set_progress_handler(lambda: begun.set() or False, 1000)

    def work() -> None:
        try:
            db.execute(ENDLESS).fetchall()
        except apsw.Error as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    close_when_idle(db)
    thread.join()
    assert isinstance(failed[0], apsw.InterruptError)
    with pytest.raises(apsw.ConnectionClosedError):
        db.execute("SELECT 1")
    close_when_idle(db)


def test_errors_of_a_moved_file_name_the_file_without_its_folder(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    one = rig("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    folder = str(one.path.parent)
    reader = SqliteReader(str(one.path), inode=one.source.inode, generation="other")
    with pytest.raises(HeadwaterError, match="^app.db began a new history"):
        reader.head()
    reader.close()
    reader = SqliteReader(str(one.path), inode=one.source.inode, generation="g")
    os.rename(one.path, one.path.with_name("moved.db"))
    calls: list[Callable[[], object]] = [
        reader.head,
        one.source.begin,
        one.source.begin,
        lambda: one.source.write(lambda session: session.execute("INSERT INTO t VALUES (1)")).result(),
        lambda: list(one.source.follow(after=one.after)),
    ]
    for call in calls:
        with pytest.raises(HeadwaterError) as found:
            call()
        assert "app.db" in found.value.message
        assert folder not in f"{found.value.message} {found.value.hint}"
    assert str(one.path) in caplog.text
    reader.close()
