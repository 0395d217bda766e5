"""The link between a log and its slot: begun, proven at each start and each connection, recorded in a note.

**The one rule.** Before the server receives an LSN as confirmed, our log or the note holds that LSN. So a slot that
starts after both was re-created, or advanced by somebody else: changes are missing.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from headwater.model.change import Transaction
from headwater.sources.capture_stream import STOPPED, LogNotes
from headwater.sources.postgres.capture.barriers import SideSession
from headwater.sources.postgres.capture.replication_buffer import TransactionEnd
from headwater.sources.postgres.capture.slot import server_history
from headwater.sources.postgres.capture.slot.publication import (
    add_missing,
    find_publication,
    fit_publication,
    is_of_all_tables,
    publish_new,
    was_altered,
)
from headwater.sources.postgres.capture.slot.server_history import NOTE, History
from headwater.sources.postgres.capture.slot.slot import (
    ServerIdentity,
    Slot,
    create_slot,
    drop_slot,
    find_slot,
    identify,
    judge,
    shared,
    slot_name,
)
from headwater.sources.postgres.capture.stream.replication_stream import Stream
from headwater.sources.postgres.capture.unstreamed_changes import announce
from headwater.sources.postgres.connection import Connection, Server
from headwater.sources.postgres.protocol_session import Link
from headwater.sources.postgres.schema import definition_changes
from headwater.sources.postgres.schema.catalog import describe, schema_number
from headwater.sources.postgres.schema.shape_changes import Shapes
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.doctor import (
    Finding,
    all_tables,
    check,
    examine,
    examine_tables,
    warnings,
    why_uncaptured,
)
from headwater.sources.postgres.setup.logins import Logins

logger = logging.getLogger("headwater.postgres.fitness")

SAVE_CHANGES = 10_000  # acknowledged changes after which the note is updated
IDLE_BYTES = 16 << 20  # unneeded WAL above which it is confirmed to the server at once


class Attachment:
    """The slot, publication and note of a database. `side` runs every query except that for the server's identity."""

    def __init__(
        self, server: Server, side: SideSession, logins: Logins, *, notes: LogNotes, config: PostgresConfig
    ) -> None:
        self._server, self._side, self._notes, self._config = server, side, notes, config
        self._logins = logins
        self.slot = slot_name(config.slot, server.name)
        self.publication = slot_name(config.publication, server.name)
        self._lock = threading.Lock()  # guards _history, which the stream's reader thread changes too
        self._history: History | None = None
        self._told_at = 0.0
        self._warned: list[str] = []
        self._refusing: list[Finding] = []  # tables whose updates PostgreSQL refuses, as logged last
        self._examined: int | None = None  # the schema number at which they were searched
        self.is_of_all_tables = False  # the publication is FOR ALL TABLES; known once the log is begun or resumed
        self.born_published: set[int] = set()  # oids of tables published before their first row
        self._refused = ""  # why a table created since cannot be published
        self._announced: tuple[int, Shapes] | None = None  # schema number, and the shapes it was compared with
        self._meanings: definition_changes.Meanings | None = None  # the definitions already announced to readers

    def findings(self, connection: Connection) -> list[Finding]:
        """Return the problems of the database and the logins, each with the SQL that fixes it."""
        found = examine(
            connection, self._server, self.slot, self.publication, self._config.tables, self._config.publish_all
        )
        return found + self._logins.findings(connection)

    def uncaptured(self, connection: Connection) -> dict[str, str]:
        """Return the tables that are not published, each with the reason."""
        return {
            each.name: why_uncaptured(each, self._config.tables)
            for each in all_tables(connection, self.publication)
            if not each.is_published
        }

    def check(self) -> None:
        """Raise SourceUnfit if the database cannot be captured; log new warnings about harm to its other users."""
        found = self._side.ask(self.findings)
        check(found)
        self._refusing = [each for each in found if each.refuses_writes]
        told = warnings(found)
        if told != self._warned:
            self._warned = told
            for each in told:
                logger.warning("%s: %s", self._server.name, each)

    def warn_of_refused_writes(self, schema: int) -> None:
        """Log the tables whose updates PostgreSQL refuses since they lost their key, if the schema number changed."""
        if schema == self._examined:
            return
        config = self._config
        found = self._side.ask(
            lambda connection: examine_tables(
                connection, self._server, self.publication, config.tables, config.publish_all
            )
        )
        refusing = [each for each in found if each.refuses_writes]
        for each in warnings(each for each in refusing if each not in self._refusing):
            logger.warning("%s: %s", self._server.name, each)
        self._refusing, self._examined = refusing, schema

    def publish(self, link: Link) -> None:
        """Publish tables that a caller's statement created, in its transaction."""
        if not self.is_of_all_tables:
            self.born_published.update(publish_new(link, self.publication, self._config.tables))

    def find_slot(self) -> Slot | None:
        """Return the slot as it is now."""
        return self._side.ask(lambda connection: find_slot(connection, self.slot))

    # --- start and proof ---------------------------------------------------------------------------------------

    def begin(self, generation: str, offset: int | None = None) -> TransactionEnd:
        """Begin a log at the slot, which is created if missing: that waits for open transactions (see `create_slot`).

        Without an `offset`, offsets of a new slot start at 0. An existing slot may belong to a lost log: they start at
        its LSN, so that none is used twice, because no log has as many changes as the server's WAL has bytes.
        """

        def work(connection: Connection) -> History:
            self._ensure_publication(connection)
            slot, who = find_slot(connection, self.slot), self._identify()
            was_there = slot is not None
            if slot is not None and slot.confirmed > who.position:  # the slot would skip commits up to there
                drop_slot(connection, self.slot)
                slot = None
            position = create_slot(connection, self.slot) if slot is None else slot.confirmed
            found = describe(connection, self.publication)
            versions = {name: table.version for name, table in found.tables.items()}
            shapes = Shapes(found.tables, found.oids, versions, secret=secrets.token_hex(16))
            first = position if was_there else 0
            point = TransactionEnd(first if offset is None else offset, position, shapes)
            self._remember(definition_changes.read_meanings(connection))
            published = find_publication(connection, self.publication)
            return History(generation, who.system, who.timeline, connection.info.dbname, position, point, published)

        found = self._side.ask(work)
        self._notes.set_notes(**{server_history.FIRST: server_history.save_first(found.point.shapes)})
        self._keep(found)
        return self._known.point

    def renew(self, generation: str, offset: int) -> TransactionEnd:
        """Drop the slot and begin a log at a new slot: see `drop_slot` and `begin`."""
        self._side.ask(lambda connection: drop_slot(connection, self.slot))
        return self.begin(generation, offset)

    def resume(
        self, generation: str, latest: int, read: Callable[[int], Iterator[Transaction]]
    ) -> TransactionEnd | str:
        """Return the end of the log, or why the log is not this database's history. See Source.prove."""
        found = server_history.load(self._notes.note(NOTE))
        if found is None and not latest:
            return self.begin(generation)
        if found is None or found.generation != generation:
            return "the log was not made from this database"
        if found.point.offset > latest:
            return f"the log ends at offset {latest}, but it once reached offset {found.point.offset} of this database"
        self._meanings = definition_changes.load(self._notes.note(definition_changes.NOTE))
        owners = definition_changes.owners(self._meanings or {})
        point = server_history.brought_up(found.point, read(found.point.offset), owners)
        if point.offset != latest:
            return f"the log ends at offset {latest}, and its changes do not show which transaction ended there"
        if not point.shapes.secret:  # an old note has no secret; save it before the first announcement uses it
            shapes = msgspec.structs.replace(point.shapes, secret=secrets.token_hex(16))
            point = msgspec.structs.replace(point, shapes=shapes)
            self._keep(msgspec.structs.replace(found, point=point))
        self._history = msgspec.structs.replace(found, point=point)
        identity = self._identify()
        is_doubtful = identity.timeline != found.timeline and not self._notes.note(STOPPED)
        doubt = "a failover after an unclean stop of ours: reported commits may be lost" if is_doubtful else ""
        reason = self._side.ask(lambda connection: self.judge(identity, connection, point, doubt=doubt))
        if reason:
            return reason
        self._side.ask(self._fit_publication)
        return point

    def judge(
        self,
        identity: ServerIdentity,
        connection: Connection,
        point: TransactionEnd,
        moved: Callable[[], None] = lambda: None,
        *,
        doubt: str = "",
    ) -> str:
        """Return why the server does not continue at `point`; "" if it does. A failover that lost nothing is accepted:
        `moved` is called, because other sessions may still be connected to the old server."""
        slot = find_slot(connection, self.slot)
        with self._lock:
            known = self._known
            ours = known.known(point)
            reason = judge(ours, identity, slot, connection.info.dbname) or self._altered(connection) or doubt
            if reason:
                return reason
            is_other, confirmed = known.timeline != identity.timeline, shared(ours, identity)
            if is_other or confirmed != known.confirmed:  # at once: later positions are of this server
                self._keep(msgspec.structs.replace(known, timeline=identity.timeline, confirmed=confirmed))
        if is_other:
            moved()
        return ""

    def mark(self, *, stopped: bool) -> None:
        """Note for the next start whether the log holds everything reported to clients."""
        self._notes.set_notes(**{STOPPED: "yes" if stopped else ""})

    def watch(self) -> str:
        """Return why changes may be missing although the stream runs; "" if none are."""
        return self._side.ask(self._altered)

    def join(self) -> None:
        """Publish tables that were created since the start; log a warning once if one cannot be published."""
        if not self.is_of_all_tables:
            self._side.ask(self._join)

    def _join(self, connection: Connection) -> None:
        made, error = add_missing(connection, self.publication, self._config.tables)
        refused = "" if error is None else f"a new table is not published: {error.message}; {error.hint}"
        if refused and refused != self._refused:
            logger.warning("%s: %s", self._server.name, refused)
        self._refused = refused
        with self._lock:
            known = self._known
            if made and known.publication is not None:  # only these: alterations by others must still be detected
                members = {**known.publication.members, **made}
                joined = msgspec.structs.replace(known.publication, members=members)
                self._keep(msgspec.structs.replace(known, publication=joined))

    def announce(self, shapes: Shapes) -> int:
        """Announce unstreamed changes in the WAL, if the schema or `shapes` changed since the last announcement.

        Return the schema number.
        """

        def work(connection: Connection) -> int:
            number = schema_number(connection)
            # A stream that is behind may report a table only after the table is dropped.
            if self._announced is not None and number == self._announced[0] and shapes is self._announced[1]:
                return number
            is_told, means = announce(
                connection, self.publication, shapes, self._meanings, all_tables=self.is_of_all_tables
            )
            if means != self._meanings:  # a crash before this line repeats the announcement, which is harmless
                self._remember(means)
            if is_told:
                self._announced = number, shapes
            return number

        return self._side.ask(work)

    def _remember(self, means: definition_changes.Meanings) -> None:
        self._notes.set_notes(**{definition_changes.NOTE: definition_changes.save(means)})
        self._meanings = means

    def _altered(self, connection: Connection) -> str:
        known = self._known.publication
        if known is None or not was_altered(connection, known, find_publication(connection, self.publication)):
            return ""
        return f"the publication {self.publication} was dropped or altered: later commits may be missing"

    def _fit_publication(self, connection: Connection) -> None:
        self._ensure_publication(connection)
        published = find_publication(connection, self.publication)
        if published != self._known.publication:
            self._keep(msgspec.structs.replace(self._known, publication=published))

    def _ensure_publication(self, connection: Connection) -> None:
        config = self._config
        left = fit_publication(connection, self.publication, config.tables, publish_all=config.publish_all)
        if left:
            logger.warning("%s: other sessions lock %s: published once unlocked", self._server.name, ", ".join(left))
        self.is_of_all_tables = is_of_all_tables(connection, self.publication)

    def _identify(self) -> ServerIdentity:
        wire = self._server.replicate()
        try:
            return identify(wire)
        finally:
            wire.finish()

    # --- the note ----------------------------------------------------------------------------------------------

    def is_due(self, point: TransactionEnd, *, idle: int, confirmed: int, is_asked: bool) -> bool:
        """Return whether to `save`: the shapes changed, many changes were logged, or, though nothing was captured, it
        is time to confirm to the server that its WAL up to `idle` is not needed."""
        known = self._known
        if point.shapes is not known.point.shapes or point.offset - known.point.offset >= SAVE_CHANGES:
            return True
        unneeded = idle - confirmed
        if unneeded <= 0:
            return False
        waited = time.monotonic() - self._told_at
        return is_asked or unneeded > IDLE_BYTES or waited > self._config.heartbeat_seconds

    def save(self, point: TransactionEnd, stream: Stream) -> None:
        """Note that the log reached `point` and that the server may discard WAL up to `stream.idle`, then confirm it.
        Waits while a server is judged: the previous server's positions say nothing about the next."""
        with self._lock:
            known, idle = self._known, stream.idle
            stream.is_asked = False
            self._told_at = time.monotonic()
            self._keep(msgspec.structs.replace(known, point=point, confirmed=max(idle, known.confirmed)))
            stream.confirm(idle)

    def is_saved(self, point: TransactionEnd) -> bool:
        """Return whether the log end in the note is at or after `point`."""
        return self._history is not None and point.offset <= self._history.point.offset

    @property
    def _known(self) -> History:
        assert self._history is not None  # set by begin or resume
        return self._history

    def _keep(self, found: History) -> None:
        self._notes.set_notes(**{NOTE: server_history.save(found)})
        self._history = found
