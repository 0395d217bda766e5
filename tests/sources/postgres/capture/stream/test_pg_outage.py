"""Servers that stop or do not answer: waiting callers get an error, and reconnects are paced."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.sources.postgres.pg_server import PATIENCE, Server
from tests.sources.postgres.pg_source import PgRig

from headwater.errors import HeadwaterError, SourceError
from headwater.sources.postgres.capture.stream.replication_stream import Stream, pace_for

TABLE = "CREATE TABLE t(k int PRIMARY KEY, v text)"
ROWS = 60_000  # far more than is held, and than fits between the server and us


def raised(work: Callable[[], Any]) -> list[HeadwaterError]:
    """Return the errors of `work`; fail if it does not end."""
    found: list[HeadwaterError] = []

    def run() -> None:
        try:
            work()
        except HeadwaterError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE / 2)
    assert not thread.is_alive(), "it waits for a server that is gone"
    return found


def test_reader_of_a_large_transaction_receives_an_error_when_the_server_crashes(
    pg: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.sources.postgres.capture.replication_buffer.MOST_CHANGES", 2_000)
    server = Server(pg.programs, logical_decoding_work_mem="512MB")  # so that it is sent when it is committed
    own = PgRig(server, "outage", TABLE)
    try:
        own.run(f"INSERT INTO t SELECT n, repeat('x', 500) FROM generate_series(1, {ROWS}) n")
        end = time.monotonic() + PATIENCE
        while not (part := next(parts := iter(own.source.follow(after=0)), None)):
            assert time.monotonic() < end
            own.source.wait(0.05)
        assert not part.last
        server.crash()
        (error,) = raised(lambda: list(parts))
        assert "inside a large transaction" in error.message
        while not (found := raised(lambda: list(own.source.follow(after=0)))):  # once it has been away for a while
            assert time.monotonic() < end
            own.source.wait(0.05)
        assert isinstance(found[0], SourceError)
        server.start()
        own.db.close()
        own.db = server.connect(own.name)
        while own.latest < ROWS:
            assert time.monotonic() < end
            with contextlib.suppress(SourceError):
                own.log += own.source.follow(after=own.latest)
            own.source.wait(0.05)
        assert own.fold() == own.rows()
    finally:
        own.close()
        server.stop()


class Waits(threading.Event):
    """An event that is set after `most` waits, which take no time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0)
        if len(self.seconds) == self.most:
            self.set()
        return self.is_set()


class Held:
    """A buffer from which changes may be requested again."""

    def __init__(self, wants_back: bool) -> None:
        self.wants_back = wants_back


class Quiet:
    """A stream owner that ignores every event."""

    def arrived(self) -> None:
        """See StreamOwner."""


class Failing(Stream):
    """A stream whose connections each break after a number of transactions, the last for good."""

    def __init__(self, *delivers: int, wants_back: bool) -> None:
        address = type("Address", (), {"name": "shop"})()
        super().__init__(address, "s", "p", Held(wants_back), Quiet(), all_tables=True)  # type: ignore[arg-type]
        self.delivers = list(delivers)
        self.waits = self.stopping = Waits(len(delivers))

    def _session(self) -> None:
        self.sessions += 1
        self.delivered += self.delivers.pop(0)
        raise SourceError("no space left for what is not committed yet")


@pytest.mark.parametrize("wants_back", [False, True])
def test_retry_delay_is_reset_only_after_a_connection_that_delivered_data(wants_back: bool) -> None:
    stream = Failing(0, 0, 0, 3, 0, 0, *[0] * 9, wants_back=wants_back)
    stream._run()
    first = [0.2, 0.4, 0.8, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    assert stream.waits.seconds == pytest.approx([*first, *[10.0] * 5])
    stream.wake_in.close()
    stream._wake_out.close()


@pytest.mark.parametrize(
    ("timeout", "interval", "silence"), [(60, 5, 120), (3, 1, 60), (0, 5, 60), (300, 5, 600), (3600, 5, 7200)]
)
def test_keepalive_interval_and_allowed_silence_follow_the_server_timeout(
    timeout: float, interval: float, silence: float
) -> None:
    found = pace_for(timeout)
    assert (found.interval, found.silence) == (interval, silence)
