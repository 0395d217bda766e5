"""Connections that are closed while another thread still uses them."""

from __future__ import annotations

import threading

import apsw
import pytest

from headwater.sources.sqlite.database_file import close_when_idle

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
