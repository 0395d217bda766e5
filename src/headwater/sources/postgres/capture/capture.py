"""Capture of a PostgreSQL database: the stream of a replication slot, and the proof that the log is its history."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from headwater.errors import HeadwaterError, SourceError, Unavailable
from headwater.model.change import Transaction
from headwater.model.table import Table
from headwater.sources.capture_stream import Capturable, LogNotes
from headwater.sources.postgres.capture.barriers import BarrierResult, Barriers, SideSession
from headwater.sources.postgres.capture.log_attachment import Attachment
from headwater.sources.postgres.capture.log_positions import Positions
from headwater.sources.postgres.capture.replication_buffer import ReplicationBuffer, TransactionEnd
from headwater.sources.postgres.capture.slot.slot import ServerIdentity
from headwater.sources.postgres.capture.slot_monitor import SlotMonitor
from headwater.sources.postgres.capture.stream.replication_stream import Stream
from headwater.sources.postgres.capture.visible_commits import VisibleCommits
from headwater.sources.postgres.connection import Connection, Server
from headwater.sources.postgres.schema.catalog import describe
from headwater.sources.postgres.schema.relations import split_name
from headwater.sources.postgres.schema.table_shapes import Shapes
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.doctor import Finding, whole_rows_remedy
from headwater.sources.postgres.setup.logins import Logins
from headwater.sources.postgres.snapshot_visibility import Visibility
from headwater.sources.read import SourceHead

DOWN_SECONDS = 1.0  # a longer outage of the connection is an error
CHECK_SECONDS = 5.0  # between two checks for changes that the stream does not carry: of the publication and of tables


class PostgresCapture(Capturable):
    """The capture of a database. Reads and writes share `snapshot_positions` and `_shapes`.

    It calls `reconnect` when the name leads to another server, `schema_changed` when the schema number changed.
    """

    def __init__(
        self,
        server: Server,
        logins: Logins,
        *,
        notes: LogNotes,
        config: PostgresConfig,
        folder: Path | None,
        reconnect: Callable[[], None],
        schema_changed: Callable[[], None],
    ) -> None:
        self.name, self._server, self._folder = server.name, server, folder
        self._reconnect, self._schema_changed = reconnect, schema_changed
        # Barrier marks must be on disk to be streamed, but need not wait for a standby: that commit is not visible yet.
        self._side = SideSession(server, synchronous_commit="local", statement_timeout="60000")
        self._attachment = Attachment(server, self._side, logins, notes=notes, config=config)
        self._barriers, self._visibility = Barriers(self._side, self._is_up), Visibility()
        self.snapshot_positions = Positions(self._barriers, self._visibility, self._notice)
        self._shapes = Shapes(self._known, self._version)
        self._arrived = threading.Event()
        self._visible_commits = VisibleCommits(server, self._visibility, self._arrived.set)
        self.beginning = self._given = 0  # the newest offset of an earlier stream: clients may have received it
        self._held: ReplicationBuffer | None = None
        self._stream: Stream | None = None
        self._monitor: SlotMonitor | None = None
        self._checked_at = 0.0
        self._schema = 0  # as last noticed
        self._checked_schema: int | None = None  # the newest one whose new tables are published

    def _is_up(self) -> bool:
        stream = self._stream
        if stream is None or stream.lost is not None:
            return False
        return stream.error is None or time.monotonic() - stream.error_since < DOWN_SECONDS

    def _known(self, table: str) -> Table | None:
        held = self._held
        return None if held is None else held.whole.shapes.tables.get(table)

    def _version(self, table: str) -> int:
        held = self._held
        return 0 if held is None else held.whole.shapes.versions.get(table, 0)

    # --- history -----------------------------------------------------------------------------------------------

    def prove(self, *, generation: str, latest: int, read: Callable[[int], Iterator[Transaction]]) -> str:
        """Return why the log is not this database's history; "" if it is, or is new: the stream then runs."""
        self._halt()
        self._attachment.check()
        found = self._attachment.resume(generation, latest, read)
        if isinstance(found, str):
            return found
        self.beginning = 0 if latest else found.offset
        self._run(found)
        return ""

    def restart(self, *, generation: str, first: int) -> int:
        """Begin a new generation with a new slot and start its stream; return its first offset."""
        self._halt()
        self._attachment.check()
        first = max(first, self._given + 2)
        self._run(self._attachment.renew(generation, first - 1))
        return first

    def reopen(self) -> None:
        self._halt()
        self._renew()

    def _renew(self) -> None:
        self._side.close()
        self._visible_commits.close()
        self._reconnect()

    def findings(self) -> list[Finding]:
        """Return the problems of the database, each with the SQL that fixes it."""
        return self._side.ask(self._attachment.findings)

    def remedy(self, table: str) -> str:
        """Return the SQL after which updates carry unchanged TOAST values."""
        parts = split_name(table)
        return "" if parts is None else self._side.ask(lambda connection: whole_rows_remedy(connection, *parts))

    def _run(self, point: TransactionEnd) -> None:
        attachment, held = self._attachment, ReplicationBuffer(point)
        attachment.mark(stopped=False)
        self._visibility.start(point.offset)
        stream = Stream(
            self._server,
            attachment.slot,
            attachment.publication,
            held,
            _StreamCallbacks(self),
            all_tables=attachment.is_of_all_tables,
            born_published=attachment.born_published,
            folder=self._folder,
        )
        self._held, self._stream = held, stream
        self._monitor = SlotMonitor(self.name, attachment.slot, attachment.find_slot)
        stream.start()
        self._monitor.start()

    def _halt(self) -> None:
        stream, self._stream = self._stream, None
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.stop()
        if stream is not None:
            stream.stop()
        if self._held is not None:
            self._given = max(self._given, self._held.latest)
            self._held = None

    # --- the stream --------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Table]:
        """Return the published tables as they are now."""
        self._running()
        publication = self._attachment.publication
        return self._side.ask(lambda connection: describe(connection, publication, self._known, self._version).tables)

    def head(self) -> int:
        """Return the offset of the newest change committed before this call; Unavailable if the stream is behind."""
        found = self._pass_barrier()
        if found.offset is None:
            raise Unavailable(f"the stream of {self.name!r} is behind", hint="Try again in a moment.")
        return found.offset

    def read_head(self) -> SourceHead:
        """Return the head and the schema number.

        It is not settled if the stream is behind, or if a new table may not be published yet.
        """
        held, _ = self._running()
        found = self._pass_barrier()
        if found.offset is None:
            return SourceHead(held.latest + 1, found.schema, settled=False)
        return SourceHead(found.offset, found.schema, settled=self._checked_schema == self._schema)

    def _pass_barrier(self) -> BarrierResult:
        self._running()
        found = self._barriers.set()
        self._notice(found)
        return found

    def _notice(self, found: BarrierResult) -> None:
        self._visibility.notice(found.snapshot)
        if found.schema != self._schema:
            self._schema_changed()
            held = self._held
            if held is not None:  # immediately: a change of an object that an analysed query uses must reach the log
                with suppress(HeadwaterError):
                    self._attachment.announce(held.whole.shapes)
            self._schema, self._checked_at = found.schema, 0.0

    def peek_head(self) -> SourceHead | None:
        """Return None: the head takes a round trip."""
        return None

    def follow(self, *, after: int) -> Iterator[Transaction]:
        """Return the visible transactions after `after` received so far; raise if the stream is lost or long down."""
        held, stream = self._running()
        if stream.lost is not None:
            raise stream.lost
        is_down = stream.error is not None and time.monotonic() - stream.error_since > DOWN_SECONDS
        seen = self._visible_commits.read(held)
        trouble = stream.error if is_down else seen.trouble
        if trouble is not None and held.durable >= min(seen.upto, held.latest):
            if self._visible_commits.gives_up():
                held.go_back()
                stream.wake()
            raise trouble
        parts = held.follow(after, seen.upto, seen.large)
        if held.wants_back:
            stream.wake()
        return parts

    def wait(self, timeout: float) -> None:
        if self._arrived.wait(timeout):
            self._arrived.clear()

    def wake(self) -> None:
        self._arrived.set()

    def acknowledge(self, upto: int) -> None:
        held, stream = self._running()
        point = held.acknowledge(upto)
        stream.confirm(point.position)
        due = self._attachment.is_due
        if due(point, idle=stream.idle, confirmed=stream.confirmed, is_asked=stream.is_asked):
            self._attachment.save(point, stream)
        if time.monotonic() - self._checked_at > CHECK_SECONDS:
            self._checked_at, schema = time.monotonic(), self._schema
            self._check_unstreamed(held, stream)
            self._checked_schema = schema  # even if the check failed: it is repeated

    def _check_unstreamed(self, held: ReplicationBuffer, stream: Stream) -> None:
        with suppress(HeadwaterError):
            reason = self._attachment.watch()
            if reason:
                stream.give_up(reason)
            schema = self._attachment.announce(held.whole.shapes)
            self._attachment.join()
            self._attachment.warn_of_refused_writes(schema)

    def release(self, reason: str) -> None:
        """Close the replication connection, so that PostgreSQL can shut down, and refuse writes from now on."""
        self.snapshot_positions.failure = reason
        self._halt()

    def _running(self) -> tuple[ReplicationBuffer, Stream]:
        held, stream = self._held, self._stream
        self.snapshot_positions.check()
        if held is None or stream is None:
            raise SourceError(f"capture of {self.name!r} does not run")
        return held, stream

    def status(self) -> dict[str, Any]:
        """Return numbers for the status page and metrics; `error` is the reason the stream has stopped."""
        held, stream = self._running()
        monitor, error = self._monitor, stream.lost or stream.error
        slot = None if monitor is None else monitor.check()
        return {
            "head": held.latest,
            "capture_rows": held.changes,
            "tables": sorted(self.describe()),
            "uncaptured": self._side.ask(self._attachment.uncaptured),
            "slot": self._attachment.slot,
            "slot_lag_bytes": None if slot is None else slot.lag_bytes,
            "slot_safe_bytes": None if slot is None else slot.safe_bytes,
            "slot_confirmed_seconds": None if slot is None else slot.confirmed_seconds,
            "wal_status": None if slot is None else slot.wal_status,
            "connections": stream.sessions,
            "error": None if error is None else f"{error.code}: {error.message}",
        }

    def close(self) -> None:
        """Save the stream's position, and close the connections."""
        held, stream = self._held, self._stream
        if held is not None and stream is not None:
            point = held.acknowledge(held.durable)
            with suppress(HeadwaterError):
                if not self._attachment.is_saved(point):
                    self._attachment.save(point, stream)
                self._attachment.mark(stopped=held.latest <= point.offset)
        self._halt()
        self._side.close()
        self._visible_commits.close()


class _StreamCallbacks:
    """The stream's callbacks into its capture. Fulfils `StreamOwner`; the thread of the stream calls it."""

    def __init__(self, capture: PostgresCapture) -> None:
        self._attachment, self._visibility = capture._attachment, capture._visibility
        self._positions, self._renew = capture.snapshot_positions, capture._renew
        self.passed, self.arrived = capture._barriers.passed, capture.wake

    def judge(self, identity: ServerIdentity, connection: Connection, point: TransactionEnd) -> str:
        return self._attachment.judge(identity, connection, point, self._renew)

    def logged(self, part: Transaction, upto: int) -> None:
        if part.last:
            self._visibility.log(int(part.id), upto)
        self._positions.came(part, upto)

    def rewound(self, point: TransactionEnd) -> None:
        self._visibility.cut(point.offset)
